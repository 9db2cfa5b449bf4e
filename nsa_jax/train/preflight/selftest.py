"""The causality self-test: proof, on the model code that is about to be trained, that it does not see the future.

It takes a slice of the configured model (one layer of the real width for each kind of attention, a small vocabulary),
compiles it with the configured implementation and precision at a length beyond two windows that the same kernels serve
as the rows of the run, and checks:

  R040  changing the tokens after t changes no block list up to t, and with the same lists no bit of the logits up to t;
  R041  every parameter receives a finite gradient that is not zero, every part of a fused projection by itself;
  R042  the output depends on the keys of every branch;
  R043  the same input gives the same bits twice;
  R044  with packing, a document does not see the one before it.

Lists are compared apart because kernels serve the blocks that several neighbouring tokens list together. Which blocks
these are depends on the lists of all tokens of a tile, the later ones included, and with it the order of additions.

It runs at the start of every training run and refuses to train on failure.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from nsa_jax.config import Problem
from nsa_jax.nn import ModelConfig, Transformer
from nsa_jax.nn.transformer import layer_stacks
from nsa_jax.ops.choices import Shape
from nsa_jax.ops.explain import Explanation, explanation_of
from nsa_jax.ops.target import current_target
from nsa_jax.train.compile_ahead import CompileAhead
from nsa_jax.train.compiler import compiler_options
from nsa_jax.train.loss import weighted_loss
from nsa_jax.train.program_store import Program, ProgramStore

_VOCAB = 256
_SHORT = {"compressed": "cmp", "selected": "slc", "window": "win"}
_FIX = "do not train: the loss of such a model means nothing. Run the operator tests (pytest tests/ops tests/nn)"


@dataclasses.dataclass
class SelfTest:
    """Outcome of the self-test.

    Attributes:
      problems: empty if all is well.
      facts: (name, value) lines for the reader.
      seconds: that it took.
    """

    problems: list[Problem]
    facts: list[tuple[str, str]]
    seconds: float


def slice_config(config: ConfigDict) -> tuple[ModelConfig, int, str]:
    """The model to test, the length to test it at, and a note if it is not what the config asks for."""
    whole = ModelConfig.from_config(config, _VOCAB)
    implementation, note = whole.implementation, ""
    if implementation == "pallas" and not current_target().is_gpu:
        implementation, note = None, " (the kernels are tested on the GPU)"
    # At a trained model's scale, so that a small leak is not rounded away.
    model = dataclasses.replace(
        whole,
        vocab_size=_VOCAB,
        num_layers=len(set(whole.kinds)),
        layer_pattern=tuple(dict.fromkeys(whole.kinds)),
        init_std=whole.dim**-0.5,
        implementation=implementation,
        **({} if current_target().is_gpu else _on_cpu(whole)),
        dropout=0.0,
    )
    nsa = model.nsa
    reach = max(2 * nsa.window, nsa.num_selected * nsa.select_block, 2 * nsa.compress_block)
    whole_row = max(config.data.seq_len, 2)
    length = min(reach + 2 * nsa.select_block, whole_row)
    if "nsa" in model.kinds and current_target().is_gpu:
        served = _kernels(model, whole_row)
        while length < whole_row and _kernels(model, length) != served:
            length = min(2 * length, whole_row)
    if config.data.packing:  # the second document, two thirds of the row, is to have queries that choose blocks
        length += length // 2
    return model, length, note


def _on_cpu(model: ModelConfig) -> dict[str, Any]:
    """What is changed on CPUs: the dtype, since XLA lacks some bfloat16 products there, and the width of large MLPs."""
    return {"compute_dtype": "float32", "mlp_dim": min(model.mlp_dim, model.dim)}


def _explained(model: ModelConfig, length: int) -> Explanation:
    """What serves each stage and pass of NSA in rows of a length."""
    heads, dims = (model.num_heads, model.num_kv_heads), (model.head_dim, model.value_head_dim)
    shape = Shape(1, length, length, *heads, *dims, model.compute_dtype)
    target, shared_kv = current_target(), model.shared_kv
    return explanation_of(shape, model.nsa, target, packed=False, shared_kv=shared_kv, selector=model.selector)


def _kernels(model: ModelConfig, length: int) -> list[str]:
    """The kernel of each stage and pass of NSA in rows of a length."""
    return [row.choice.kernel for row in _explained(model, length).rows]


def _shares_blocks(model: ModelConfig, length: int) -> bool:
    """Whether kernels serve blocks that neighbours share, so that logits change by rounding where lists do not."""
    if "nsa" not in model.kinds or not current_target().is_gpu:
        return False
    return any(row.direction == "forward, shared blocks" for row in _explained(model, length).rows)


def _positions(model: ModelConfig, length: int) -> list[int]:
    """The t after which tokens are changed: around the edges of blocks and windows, and where blocks are chosen."""
    nsa = model.nsa
    edges = (nsa.compress_block - 1, nsa.window - 1, nsa.window, 2 * nsa.window)
    wanted = (*edges, length // 2, 7 * length // 8, length - 2)
    return sorted({t for t in wanted if 0 <= t < length - 1})


def _forward(graphdef: nnx.GraphDef, packed: bool, jit: Callable):
    """Jitted (params, tokens, segment_start, block lists or None) -> logits [T, vocab]."""

    @jit
    def forward(params, tokens, segment_start, lists):
        return nnx.merge(graphdef, params)(tokens, segment_start if packed else None, block_indices=lists)[0]

    return forward


def _lists(graphdef: nnx.GraphDef, packed: bool, jit: Callable):
    """Jitted (params, tokens, segment_start) -> block lists int32 [NSA layers, 1, T, K, n]."""

    @jit
    def lists(params, tokens, segment_start):
        model = nnx.merge(graphdef, params)
        return model.hidden(tokens, segment_start if packed else None, return_block_indices=True)[1]

    return lists


def _gradient(graphdef: nnx.GraphDef, packed: bool, jit: Callable):
    """Jitted (params, tokens, segment_start) -> gradients like params, float32, and logits [T, vocab]."""

    @jit
    def gradient(params, tokens, segment_start):
        def loss(params):
            model = nnx.merge(graphdef, params)
            hidden = model.hidden(tokens, segment_start if packed else None)
            weights = jnp.full(tokens.shape, 1 / tokens.size, jnp.float32)
            return weighted_loss(model, hidden, jnp.roll(tokens, -1, axis=1), weights)[0], model.logits(hidden)[0]

        gradients, logits = jax.grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda g: g.astype(jnp.float32), gradients), logits

    return gradient


class _Subject:
    """The model under test: parameters, one row of tokens, and how to change parts of them.

    Its programs take the compiler options of the evaluation: XLA measures nothing for them.
    """

    def __init__(
        self,
        model: ModelConfig,
        length: int,
        packed: bool,
        seed: int,
        options: dict[str, Any] | None = None,
        store: ProgramStore | None = None,
    ):
        self.config, self.length, self.packed = model, length, packed

        def init():
            return nnx.to_pure_dict(nnx.state(Transformer(model, rngs=nnx.Rngs(params=seed)), nnx.Param))

        self.graphdef = nnx.graphdef(nnx.eval_shape(lambda: Transformer(model, rngs=nnx.Rngs(0))))
        self._init = Program(jax.jit(init))
        random = np.random.default_rng(seed)
        self.tokens = random.integers(0, model.vocab_size, (1, length), dtype=np.int32)
        self.other = (self.tokens + random.integers(1, model.vocab_size, self.tokens.shape)) % model.vocab_size
        self.start = length // 3 if packed else 0  # of the second document
        positions = np.arange(length)
        self.segments = np.where(positions >= self.start, self.start, 0).astype(np.int32)[None]
        jit = functools.partial(jax.jit, compiler_options=options)
        forward, lists, gradient = (make(self.graphdef, packed, jit) for make in (_forward, _lists, _gradient))
        self._run, self._run_with_lists = Program(forward), Program(forward)
        self._select, self._gradient = Program(lists), Program(gradient)
        # GPUs run a step in less time than another program needs to be traced and compiled, CPUs do not.
        self._logits_apart = not current_target().is_gpu
        row = (jax.eval_shape(init), self.tokens, self.segments)
        programs: dict[str, tuple[Any, tuple]] = {"gradient": (self._gradient, row)}
        if self._logits_apart:
            programs["logits"] = self._run, (*row, None)
        if _shares_blocks(model, length):
            shape = (len(model.layers_of("nsa")), 1, length, model.num_kv_heads, model.nsa.num_selected)
            programs["lists"] = (self._select, row)
            programs["logits with lists"] = (self._run_with_lists, (*row, jax.ShapeDtypeStruct(shape, jnp.int32)))
        device: Any = jax.config
        context = functools.partial(jax.default_device, device.jax_default_device)
        initial = CompileAhead({"parameters of the self-test": (self._init, ())}, context, store)
        self._compiling = CompileAhead(programs, context, store)
        initial.wait("parameters of the self-test")
        self.params = self._init()

    def logits(self, tokens: np.ndarray | None = None, params: Any = None, lists: Any = None) -> np.ndarray:
        """float32 [T, vocab]; with block lists those are read."""
        program = ("logits" if self._logits_apart else "gradient") if lists is None else "logits with lists"
        self._compiling.wait(program)
        tokens = self.tokens if tokens is None else tokens.astype(np.int32)
        row = (self.params if params is None else params, tokens, self.segments)
        if program == "gradient":
            return np.asarray(self._gradient(*row)[1])
        return np.asarray((self._run if lists is None else self._run_with_lists)(*row, lists))

    def lists(self, tokens: np.ndarray, params: Any = None) -> np.ndarray:
        """The block lists of the layer with NSA: int32 [NSA layers, 1, T, K, n]."""
        self._compiling.wait("lists")
        params = self.params if params is None else params
        return np.asarray(self._select(params, tokens.astype(np.int32), self.segments))

    def gradients(self) -> Any:
        self._compiling.wait("gradient")
        return jax.device_get(self._gradient(self.params, self.tokens, self.segments)[0])

    def with_attention(self, kind: str, name: str, change) -> Any:
        """Parameters with one of the arrays of a kind of attention changed."""
        params = jax.tree.map(lambda leaf: leaf, self.params)
        attention = layer_stacks(params["blocks"], self.config)[self.config.kinds.index(kind)]["attention"]
        attention[name] = change(attention[name])
        return params

    def pieces(self, kind: str) -> dict[str, slice]:
        """Columns of the fused projection of a kind of attention by what they project to."""
        model = nnx.merge(self.graphdef, self.params)
        widths = layer_stacks(model.blocks, self.config)[self.config.kinds.index(kind)].attention.widths
        apart = kind == "nsa" and not self.config.shared_kv
        branches = [f"_{_SHORT[name]}" for name in self.config.branches] if apart else [""]
        names = ["query", *(f"{part}{branch}" for branch in branches for part in ("key", "value"))]
        names += ["gates"] if kind == "nsa" else []
        ends = np.cumsum(widths)
        return {name: slice(end - width, end) for name, end, width in zip(names, ends, widths, strict=True)}


def _first_difference(a: np.ndarray, b: np.ndarray) -> int | None:
    """The first position at which two arrays [T, ...] are not the same bits."""
    differs = (a.view(np.uint32) != b.view(np.uint32)).any(-1)
    return int(np.argmax(differs)) if differs.any() else None


def _first_change(
    subject: _Subject, base: np.ndarray, changed: np.ndarray, span: slice, params: Any = None
) -> int | None:
    """The first position of a span at which other tokens elsewhere change lists, or logits with the same lists."""
    where = _first_difference(base[span], subject.logits(changed, params)[span])
    if where is None or "nsa" not in subject.config.kinds:
        return where
    lists = subject.lists(subject.tokens, params)
    differ = (lists != subject.lists(changed, params))[:, 0, span].any((0, 2, 3))
    if differ.any():
        return int(np.argmax(differ))
    again = (subject.logits(tokens, params, lists)[span] for tokens in (subject.tokens, changed))
    return _first_difference(*again)


def _leak(subject: _Subject, base: np.ndarray, t: int, params: Any = None) -> int | None:
    """The first position up to t whose logits change with the tokens after t."""
    changed = subject.tokens.copy()
    changed[:, t + 1 :] = subject.other[:, t + 1 :]
    return _first_change(subject, base, changed, slice(0, t + 1), params)


def _leaking_branches(subject: _Subject, t: int) -> str:
    """Which branch of NSA leaks, found by closing the gates of the others."""
    if "nsa" not in subject.config.kinds:
        return ""
    found = []
    for index, name in enumerate(subject.config.branches):
        closed = np.full((len(subject.config.branches),), -1e4, np.float32)
        closed[index] = 0.0
        params = subject.with_attention("nsa", "gate_bias", lambda bias, closed=closed: bias + closed)
        if _leak(subject, subject.logits(params=params), t, params) is not None:
            found.append(name)
    return f", through the {' and '.join(found)} branch" if found else ", outside the branches of NSA"


def _check_causality(subject: _Subject, base: np.ndarray) -> list[Problem]:
    for t in _positions(subject.config, subject.length):
        where = _leak(subject, base, t)
        if where is not None:
            message = f"the logits at position {where} change when tokens after {t} do: the model sees the future"
            return [Problem("R040", "error", message + _leaking_branches(subject, t), _FIX)]
    if subject.start:
        changed = subject.tokens.copy()
        changed[:, : subject.start] = subject.other[:, : subject.start]
        where = _first_change(subject, base, changed, slice(subject.start, None))
        if where is not None:
            message = f"the logits at position {subject.start + where} change with the document before theirs"
            return [Problem("R044", "error", message, _FIX)]
    return []


def _negated(weight: jax.Array, columns: slice) -> np.ndarray:
    changed = np.array(weight)  # on the host, where nothing is compiled for it
    changed[..., columns] *= -1
    return changed


def _check_keys(subject: _Subject, base: np.ndarray) -> list[Problem]:
    ignored = []
    kinds = subject.config.kinds
    for kind in kinds:
        for name, columns in subject.pieces(kind).items():
            if not name.startswith("key"):
                continue
            params = subject.with_attention(kind, "w_in", functools.partial(_negated, columns=columns))
            if _first_difference(base, subject.logits(params=params)) is None:
                ignored.append(name if len(kinds) == 1 else f"{name} of {kind} attention")
    if not ignored:
        return []
    message = f"the output does not depend on {', '.join(ignored)}: attention ignores its keys"
    return [Problem("R042", "error", message, _FIX)]


def _check_gradients(subject: _Subject) -> tuple[list[Problem], int]:
    """R041, and how many arrays or parts of arrays were looked at."""
    dead, broken, count = [], [], 0
    kinds = subject.config.kinds
    for path, gradient in jax.tree_util.tree_leaves_with_path(subject.gradients()):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        parts = {name: gradient}
        if name.endswith("attention/w_in"):  # "blocks/layer_0/attention/w_in" with a pattern
            kind = kinds[int(name.split("/")[1].removeprefix("layer_")) if len(kinds) > 1 else 0]
            parts = {f"{name}[{piece}]": gradient[..., columns] for piece, columns in subject.pieces(kind).items()}
        for part, values in parts.items():
            layers = values if name.startswith("blocks") else values[None]
            for layer, value in enumerate(layers):
                count += 1
                label = f"{part} of layer {layer}" if name.startswith("blocks") else part
                if not np.isfinite(value).all():
                    broken.append(label)
                elif not value.any():
                    dead.append(label)
    problems = []
    if broken:
        problems.append(Problem("R041", "error", f"gradients that are not finite: {', '.join(broken[:6])}", _FIX))
    if dead:
        message = f"parameters without gradient: {', '.join(dead[:6])}"
        problems.append(Problem("R041", "error", message, _FIX))
    return problems, count


def selftest(config: ConfigDict, store: ProgramStore | None = None) -> SelfTest:
    """Runs the self-test on this machine's first device; takes seconds.

    Args:
      config: the training config.
      store: has compiled programs of earlier starts.
    """
    start = time.perf_counter()
    model, length, note = slice_config(config)
    (device,) = jnp.zeros(()).devices()
    store = None if store is None else dataclasses.replace(store, devices=(device,))
    subject = _Subject(model, length, bool(config.data.packing), 0, compiler_options(config, device), store)
    base = subject.logits()
    problems: list[Problem] = []
    again = _first_difference(base, subject.logits())
    if not np.isfinite(base).all():
        problems.append(Problem("R041", "error", "logits of the untrained model are not finite", _FIX))
    elif again is not None:
        message = f"the same input gave other logits the second time, from position {again}"
        problems.append(Problem("R043", "error", message, "find the operation that is not deterministic"))
    else:
        problems += _check_causality(subject, base)
        problems += _check_keys(subject, base)
    found, count = _check_gradients(subject)
    problems += found
    seconds = time.perf_counter() - start
    served = model.implementation or "best for this device"
    checks = len(_positions(model, length))
    facts = [
        ("model", f"{_layers(model)} of width {model.dim}, {length} tokens, {model.compute_dtype}"),
        ("implementation", served + note),
        ("future tokens", f"changed after {checks} positions: {_verdict(problems, 'R040')}"),
        ("gradients", f"{count} arrays and parts: {_verdict(problems, 'R041')}"),
        ("keys matter", _verdict(problems, "R042")),
        ("took", f"{seconds:.1f} s"),
    ]  # fmt: skip
    if subject.packed:
        facts.insert(2, ("documents apart", _verdict(problems, "R044")))
    return SelfTest(problems, facts, seconds)


def _layers(model: ModelConfig) -> str:
    return "1 layer" if model.num_layers == 1 else f"{model.num_layers} layers ({', '.join(model.kinds)})"


def _verdict(problems: list[Problem], rule: str) -> str:
    return "FAILED" if any(problem.rule == rule for problem in problems) else "passed"
