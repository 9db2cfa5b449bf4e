"""One offline page to explore by hand what a model reads: `explore`.

For every token of a text, layer and head group, the page holds which selection blocks are read, why, and how much
attention each branch gives to each block. Symbols: T tokens in J selection blocks, L NSA layers, K head groups.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import gzip
import html
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nsa_jax.config import NSAConfig
from nsa_jax.data import Tokenizer
from nsa_jax.inspect.capture import token_strings
from nsa_jax.inspect.statistics import CANDIDATE, block_kinds, block_weights
from nsa_jax.nn import Transformer
from nsa_jax.nn.observe import BRANCHES, NSAArrays, walk_layers
from nsa_jax.offline_page import embed, fill_template
from nsa_jax.ops import blocks

MAX_TOKENS = 8192  # of a page: beyond, browsers take long to open it
_HERE = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class View:
    """What one model reads in the text: a checkpoint of a run. Arrays are of the text's T tokens and J blocks.

    Attributes:
      run: its name; views of one run are checkpoints of it.
      step: of the checkpoint; None if it is not known.
      config: the operator's.
      layers: indices of the L NSA layers in the model.
      kinds: uint8 [T, J], `block_kinds`.
      chosen: bool [L, K, T, J], candidates that were listed by their score.
      weights: uint8 [L, K, 3, T, J], which share of each branch's attention, times its gate and averaged over the
        group's heads, lies in each block, as 255 * sqrt(share); branches in the order compressed, selected, window.
      gates: uint8 [L, K, T, 3], mean over the group's heads, as 255 * gate.
    """

    run: str
    step: int | None
    config: NSAConfig
    layers: tuple[int, ...]
    kinds: np.ndarray
    chosen: np.ndarray
    weights: np.ndarray
    gates: np.ndarray

    def header(self) -> dict[str, Any]:
        """What the page must know to read `blob`."""
        _, groups, tokens, num_blocks = self.chosen.shape
        geometry = dataclasses.asdict(self.config)
        return {
            "run": self.run,
            "step": self.step,
            "layers": self.layers,
            "groups": groups,
            "tokens": tokens,
            "blocks": num_blocks,
            **{name: geometry[name] for name in ("select_block", "num_selected", "window")},
        }

    def blob(self) -> str:
        """The arrays behind each other, as gzip in base64; `chosen` as bits, the first block lowest."""
        arrays = (self.kinds, np.packbits(self.chosen, axis=-1, bitorder="little"), self.weights, self.gates)
        raw = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
        return base64.b64encode(gzip.compress(raw, 9, mtime=0)).decode()


@functools.partial(jax.jit, static_argnums=0)
def _observe(graphdef, params, tokens):
    model: Transformer = nnx.merge(graphdef, params)
    config, groups = model.config.nsa, model.config.num_kv_heads

    def look(arrays: NSAArrays):
        keys = (arrays.key_cmp, arrays.key_slc, arrays.key_win)
        gates = arrays.gates.astype(jnp.float32)
        weights = gates[..., None] * block_weights(arrays.query, *keys, arrays.lists, config=config)[0]
        weights = weights.reshape(*weights.shape[:2], groups, -1, *weights.shape[3:]).mean(3)[0]  # [T, K, 3, J]
        total = weights.sum(-1, keepdims=True)
        share = jnp.where(total > 0, weights / jnp.where(total > 0, total, 1.0), 0.0)
        mean_gates = gates[0].reshape(gates.shape[1], groups, -1, len(BRANCHES)).mean(2)
        return {
            "lists": arrays.lists[0],
            "weights": jnp.moveaxis(jnp.round(255 * jnp.sqrt(share)).astype(jnp.uint8), 0, 2),  # [K, 3, T, J]
            "gates": jnp.moveaxis(jnp.round(255 * mean_gates).astype(jnp.uint8), 0, 1),  # [K, T, 3]
        }

    return walk_layers(model, tokens, None, look)[1]


def observe(model: Transformer, tokens: np.ndarray, run: str = "model", step: int | None = None) -> View:
    """Runs a model over a row of tokens that is one document.

    Args:
      model: a Transformer with NSA layers.
      tokens: int [T].
      run: its name.
      step: of its checkpoint.

    Raises:
      ValueError: the model has no NSA layers.
    """
    config = model.config.nsa
    found = {
        name: np.asarray(value)
        for name, value in _observe(*nnx.split(model), jnp.asarray(tokens, jnp.int32)[None]).items()
    }
    num_blocks = blocks.num_selection_blocks(len(tokens), config.select_block)
    kinds = block_kinds(config, num_blocks, np.arange(len(tokens)))
    listed = blocks.listed_blocks(found["lists"], num_blocks)  # [L, T, K, J]
    return View(
        run=run,
        step=step,
        config=config,
        layers=tuple(model.config.layers_of("nsa")),
        kinds=kinds,
        chosen=np.moveaxis(listed & (kinds == CANDIDATE)[:, None], 1, 2),
        weights=found["weights"],
        gates=found["gates"],
    )


def _readable_strings(tokenizer: Tokenizer, tokens: np.ndarray) -> list[str]:
    """`token_strings`, where tokens that only together make a character show it at the last of them, after dots."""
    strings = token_strings(tokenizer, tokens)
    first = None
    for index, text in enumerate([*strings, ""]):
        if "\ufffd" in text:
            first = index if first is None else first
        elif first is not None:
            joined = tokenizer.decode(tokens[first:index])
            if "\ufffd" not in joined:
                strings[first:index] = ["‥"] * (index - first - 1) + [joined]
            first = None
    return strings


class Exploration:
    """A text and what models read in it, as one page; shown by a notebook as it is.

    Args:
      tokenizer: of the models.
      text: what they read.
      max_tokens: keep so many tokens of the text; None keeps all.

    Raises:
      ValueError: the text has no tokens, or more than `MAX_TOKENS` are to be kept.
    """

    def __init__(self, tokenizer: Tokenizer, text: str, max_tokens: int | None = None):
        tokens = np.asarray(tokenizer.encode(text), np.int32)
        self.left_out = max(len(tokens) - (max_tokens or len(tokens)), 0)
        self.tokens = tokens[:max_tokens]
        if not len(self.tokens):
            raise ValueError("text: has no tokens; give some text")
        if len(self.tokens) > MAX_TOKENS:
            message = (
                f"text: {len(self.tokens):,} tokens, and a page holds {MAX_TOKENS:,}; give less text or max_tokens"
            )
            raise ValueError(message)
        self.strings = _readable_strings(tokenizer, self.tokens)
        self.views: list[View] = []

    def add(self, model: Transformer, run: str = "model", step: int | None = None) -> Exploration:
        """Adds what a model reads; models of one `run` are told apart by `step`. Returns the exploration.

        Raises:
          ValueError: the model has no NSA layers, or run and step were added before.
        """
        if any((view.run, view.step) == (run, step) for view in self.views):
            raise ValueError(f"run={run!r}, step={step}: was added before; give another name or step")
        self.views.append(observe(model, self.tokens, run, step))
        return self

    def html(self) -> str:
        """The page: it requests nothing from the network, and its Content-Security-Policy forbids it."""
        data = {
            "strings": self.strings,
            "ids": self.tokens.tolist(),
            "left_out": self.left_out,
            "views": [view.header() for view in self.views],
        }
        blobs = "\n".join(
            f'<script type="text/plain" id="view-{index}">{view.blob()}</script>'
            for index, view in enumerate(self.views)
        )
        runs = list(dict.fromkeys(view.run for view in self.views))
        parts = {
            "title": html.escape(f"{' and '.join(runs)}: what is read"),
            "style": (_HERE / "explore.css").read_text(encoding="utf-8"),
            "data": embed(data),
            "blobs": blobs,
            "script": (_HERE / "explore.js").read_text(encoding="utf-8"),
        }
        return fill_template((_HERE / "explore.html").read_text(encoding="utf-8"), parts)

    def save(self, path: str | Path) -> Path:
        """Writes the page to a file; returns its path."""
        path = Path(path)
        path.write_text(self.html(), encoding="utf-8")
        return path

    def _repr_html_(self) -> str:
        """A frame with the page, for notebooks: the page's styles and scripts stay within it."""
        page = html.escape(self.html(), quote=True)
        return f'<iframe srcdoc="{page}" style="width:100%;height:820px;border:0" title="what a model reads"></iframe>'


def explore(model: Transformer, tokenizer: Tokenizer, text: str, *, run: str = "model", step: int | None = None):
    """A page on which a reader clicks tokens of a text and sees what each head group of the model reads.

    Args:
      model: a Transformer with NSA layers, such as `nsa_jax.load` returns.
      tokenizer: the model's.
      text: one document.
      run: the model's name on the page.
      step: of the checkpoint.

    Returns:
      An `Exploration`: a notebook shows it; `save` writes it, and `add` adds other checkpoints and runs.

    Raises:
      ValueError: the text is empty or too long, or the model has no NSA layers.
    """
    return Exploration(tokenizer, text).add(model, run, step)
