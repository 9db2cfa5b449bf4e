"""Checkpoints of other programs: the import of dense models, as they are or as the start of an NSA model.

Arrays are read in parts, layer by layer, and written transposed and in the dtype of the parameters into the memory that
the model keeps: no second copy of the checkpoint is made.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from nsa_jax.hub.export_files import (
    ADAPTER,
    INDEX,
    MODEL_TYPE,
    NSA_TYPE,
    WHOLE,
    Arrays,
    LoadError,
    not_read_back,
    read_json,
)
from nsa_jax.hub.families import imported_config, layer_shapes, model_shapes, sliding_window, unsupported
from nsa_jax.hub.saved_config import abstract_model, checked_model_config
from nsa_jax.nn import ModelConfig, Transformer
from nsa_jax.nn.layers import make_compressor
from nsa_jax.nn.transformer import layer_stacks
from nsa_jax.rules import attention_kinds

__all__ = ["GATE", "import_dense", "imported_config"]

logger = logging.getLogger("nsa_jax")

# Where the compressed branch's gate begins. On rows that window and selection cover, the output of each attention
# layer differs from the dense one by this share at most; the sigmoid's slope, eps (1 - eps), is what opens the gate.
GATE = 0.005
_CLOSED = -30.0  # of a gate of 0: the sigmoid is 1e-13, which is nothing beside the others in float32
_ALIGNED = 64  # bytes; JAX uses memory that begins at a multiple of this as it is


def gate_bias(eps: float) -> list[float]:
    """Biases of the gates (compressed, selected, window) that begin at (eps, (1 - eps) / 2, (1 - eps) / 2)."""
    other = (1.0 - eps) / 2
    return [math.log(gate / (1.0 - gate)) if gate > 0 else _CLOSED for gate in (eps, other, other)]


def _refuse(found: list[str], directory: Path) -> None:
    if found:
        raise LoadError(f"{directory}: cannot import {', '.join(found)}; the dense model here has none")


def _check_window(described: dict[str, Any], config: ConfigDict, path: Path) -> None:
    """Refuses layers of a sliding window, unless those here attend likewise or rows are no longer than it.

    A window where the checkpoint has none is refused likewise, unless a layer_pattern asks for it.
    """
    window, theirs = sliding_window(described, path)
    ours, rows, here = attention_kinds(config.model), config.data.seq_len, config.model.nsa.window
    if window and "window" in ours and rows > min(window, here) and window != here:
        raise LoadError(
            f"{path}: config.model.nsa.window={here} would change what the checkpoint computes: its layers read "
            f"{window} tokens, and rows have {rows}. Fix: leave the field out, or ask for rows of at most "
            f"{min(window, here)} tokens (seq_len)"
        )
    if not window and ours == ("window",) and not config.model.layer_pattern and rows > here:
        raise LoadError(
            f"{path}: attention='window' would change what the checkpoint computes: its layers read whole rows, which "
            f"have {rows} tokens, and the window has {here}. Fix: ask for attention='dense' or 'nsa', or for rows of "
            f"at most {here} tokens (seq_len)"
        )
    # After lcm layers both patterns begin again.
    pairs = {(theirs[i % len(theirs)], ours[i % len(ours)]) for i in range(math.lcm(len(theirs), len(ours)))}
    wrong = [kind for was, kind in sorted(pairs) if was == "window" and kind != "window"]
    if not window or config.data.seq_len <= window or not wrong:
        return
    which = "all layers" if len(theirs) == 1 else "some of the layers"
    raise LoadError(
        f"{path}: cannot import sliding-window attention as {' and '.join(wrong)}: {which} read {window} tokens, and "
        f"rows have {config.data.seq_len}. Fix: ask for attention='window', which keeps each layer's kind, or for rows "
        f"of at most {window} tokens (seq_len)"
    )


def _check_arrays(arrays: Arrays, config: ModelConfig) -> None:
    """Raises LoadError unless the arrays are exactly those that the config asks for, from their headers alone."""
    expected = set()
    for name, shape in model_shapes(config, [layer_shapes(config)]):
        arrays.expect(name, shape)
        expected.add(name)
    unread = {name for name in arrays.files if name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq")}
    arrays.expect_no_others(expected | unread)


def _check_format(path: Path) -> None:
    """Raises LoadError if a checkpoint's weights are there in another format alone, or it holds an adapter."""
    names = {file.name for file in path.iterdir()} if path.is_dir() else set()
    if ADAPTER in names:
        raise LoadError(
            f"{path}: holds an adapter (LoRA) for another checkpoint. Fix: merge the two with peft, "
            "merge_and_unload(), and save the result in another directory with save_pretrained"
        )
    if names & {WHOLE, INDEX}:
        return
    if any(name.startswith("consolidated") for name in names):
        raise LoadError(
            f"{path}: its weights are in their maker's own format (consolidated.*). Fix: fetch the checkpoint in the "
            f"layout of transformers, whose files are {WHOLE} or {INDEX} and what it names"
        )
    if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
        raise LoadError(
            f"{path}: its weights are in PyTorch's format, which may run code when it is read. Fix: load it with "
            "transformers and save it with save_pretrained, which writes safetensors"
        )


def _has_own_head(arrays: Arrays, config: ModelConfig) -> bool:
    """Whether a checkpoint that calls its embeddings tied holds another head, which transformers then keeps."""
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if head not in arrays.shapes or embedding not in arrays.shapes:
        return False
    arrays.expect(head, (config.vocab_size, config.dim))
    if arrays.shapes[head] != arrays.shapes[embedding]:
        return True
    pairs = zip(arrays.parts(head), arrays.parts(embedding), strict=True)
    return any(ours.tobytes() != theirs.tobytes() for (_, ours), (_, theirs) in pairs)


def _stored_dtype(arrays: Arrays) -> str:
    """The dtype of parameters that holds every number of a checkpoint."""
    return "bfloat16" if {kind for _, kind in arrays.shapes.values()} == {"bfloat16"} else "float32"


def _empty(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
    """Memory for a parameter, which JAX on a CPU takes over without a copy."""
    size = math.prod(leaf.shape) * leaf.dtype.itemsize
    raw = np.empty(size + _ALIGNED, np.uint8)
    begin = -raw.ctypes.data % _ALIGNED
    return raw[begin : begin + size].view(leaf.dtype).reshape(leaf.shape)


class _Reader:
    """Copies arrays of a checkpoint into memory of another dtype.

    Attributes:
      not_finite: names of arrays that hold NaN or infinity in that dtype.
    """

    def __init__(self, arrays: Arrays):
        self._arrays = arrays
        self.not_finite: set[str] = set()

    def _parts(self, name: str, dtype: np.dtype) -> Iterator[tuple[slice, np.ndarray]]:
        for rows, stored in self._arrays.parts(name):
            part = stored.astype(dtype, copy=False)
            if not np.isfinite(part).all():
                self.not_finite.add(name)
            yield rows, part

    def copy(self, name: str, target: np.ndarray) -> None:
        """Fills `target`, which has the array's shape."""
        for rows, part in self._parts(name, target.dtype):
            target[rows] = part

    def transpose(self, name: str, target: np.ndarray) -> None:
        """Fills `target` [in, out] from a matrix [out, in]."""
        for rows, part in self._parts(name, target.dtype):
            target[:, rows] = part.T


def _widths(config: ModelConfig) -> tuple[int, int, int]:
    """Columns of queries, keys and values."""
    key, value = config.num_kv_heads * config.head_dim, config.num_kv_heads * config.value_head_dim
    return config.num_heads * config.head_dim, key, value


def _fill_attention(read: _Reader, prefix: str, target: dict[str, Any], config: ModelConfig, gate: float) -> None:
    """Fills one layer's attention; every branch of NSA gets the dense keys and values, or all of them together."""
    query, key, value = _widths(config)
    pair, branches = key + value, len(config.branches) if config.attention == "nsa" and not config.shared_kv else 1

    def fill(copy: Callable[[str, np.ndarray], None], kind: str, into: np.ndarray) -> None:  # into [..., columns]
        for letter, first, width in (("q", 0, query), ("k", query, key), ("v", query + key, value)):
            copy(f"{prefix}{letter}_proj.{kind}", into[..., first : first + width])
        for branch in range(1, branches):
            first = query + branch * pair
            into[..., first : first + pair] = into[..., query : query + pair]

    fill(read.transpose, "weight", target["w_in"])
    target["w_in"][:, query + branches * pair :] = 0  # gates depend on their biases alone
    read.transpose(f"{prefix}o_proj.weight", target["w_out"])
    if config.qkv_bias:
        fill(read.copy, "bias", target["b_in"])
    if config.out_bias:
        read.copy(f"{prefix}o_proj.bias", target["b_out"])
    if config.qk_norm:
        for name in ("q_norm", "k_norm"):
            read.copy(f"{prefix}{name}.weight", target[name]["scale"])
    if config.attention == "nsa":
        compresses = config.selector == "compressed"
        target["gate_bias"][...] = gate_bias(gate) if compresses else gate_bias(0.0)[1:]


def _fill_compressors(target: dict[str, Any], config: ModelConfig, rngs: nnx.Rngs) -> None:
    """Fills one layer's compressors: what a new model begins with, but the mean of the block exactly."""
    sizes = {"compress_key": config.head_dim, "compress_value": config.value_head_dim}
    for name, features in sizes.items():
        if name in target:  # the mean has no parameters
            fresh = nnx.to_pure_dict(nnx.state(make_compressor(config, features, rngs=rngs), nnx.Param))
            for part, array in fresh.items():
                target[name][part][...] = 0 if part == "w_2" else np.asarray(array)


def _fill_layer(read: _Reader, index: int, target: dict[str, Any], config: ModelConfig, gate: float) -> None:
    prefix, m = f"model.layers.{index}.", config.mlp_dim
    _fill_attention(read, f"{prefix}self_attn.", target["attention"], config, gate)
    mlp = target["mlp"]
    for name, columns in (("gate", slice(0, m)), ("up", slice(m, 2 * m))):
        read.transpose(f"{prefix}mlp.{name}_proj.weight", mlp["w_in"][:, columns])
        if config.mlp_bias:
            read.copy(f"{prefix}mlp.{name}_proj.bias", mlp["b_in"][columns])
    read.transpose(f"{prefix}mlp.down_proj.weight", mlp["w_out"])
    if config.mlp_bias:
        read.copy(f"{prefix}mlp.down_proj.bias", mlp["b_out"])
    read.copy(f"{prefix}input_layernorm.weight", target["norm_attention"]["scale"])
    read.copy(f"{prefix}post_attention_layernorm.weight", target["norm_mlp"]["scale"])


def _read_params(arrays: Arrays, config: ModelConfig, abstract: dict[str, Any], seed: int, gate: float) -> Any:
    """The parameters in host memory, in the tree of `abstract`."""
    params = jax.tree.map(_empty, abstract)
    read, rngs = _Reader(arrays), nnx.Rngs(seed)
    read.copy("model.embed_tokens.weight", params["embedding"])
    stacks = layer_stacks(params["blocks"], config)
    for index in range(config.num_layers):
        row, position = divmod(index, len(stacks))
        layer = jax.tree.map(lambda leaf, i=row: leaf[i], stacks[position])
        of_layer = config.of_layer(index)
        _fill_layer(read, index, layer, of_layer, gate)
        if of_layer.attention == "nsa":
            _fill_compressors(layer["attention"], of_layer, rngs)
    read.copy("model.norm.weight", params["norm"]["scale"])
    if not config.tie_embeddings:
        read.transpose("lm_head.weight", params["head"])
    if read.not_finite:
        names = sorted(read.not_finite)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        logger.warning(
            "%s%s: NaN or infinity as %s; copy the checkpoint again, or try --dtype=float32",
            ", ".join(names[:3]), more, config.param_dtype,
        )  # fmt: skip
    return params


def check_import(
    directory: str | os.PathLike,
    *,
    attention: str = "dense",
    layer_pattern: Sequence[str] = (),
    shared_kv: bool = False,
    dtype: str | None = None,
    seq_len: int | None = None,
    edit: Callable[[ConfigDict], None] | None = None,
) -> tuple[Arrays, ConfigDict, ModelConfig]:
    """Refuses what `import_dense`, which has the same arguments, cannot import; no array is read.

    Returns:
      The checkpoint's arrays, the training config and the model's.
    """
    kinds = tuple(layer_pattern) or (attention,)
    if shared_kv and "nsa" not in kinds:
        names = ", ".join(dict.fromkeys(kinds))
        raise ValueError(f"shared_kv=True: must be False for layers of the kinds {names}, which have one branch")
    path = Path(directory)
    _check_format(path)
    described = read_json(path, "config.json")
    if described.get("model_type") == MODEL_TYPE:
        raise LoadError(
            f"{path}: is a model of nsa_jax already, which load, generate, evaluate and --resume take as it is. To "
            "begin with other attention, convert the checkpoint that it came from"
        )
    if described.get("model_type") == NSA_TYPE:
        raise not_read_back(path)
    _refuse(unsupported(described, path), path)
    config = imported_config(described, attention, path, layer_pattern)
    config.model.nsa.shared_kv = shared_kv
    if seq_len is not None:
        config.data.seq_len = seq_len
    arrays = Arrays(path)  # their headers
    config.model.param_dtype = dtype or _stored_dtype(arrays)
    if edit is not None:
        edit(config)
    _check_window(described, config, path)
    model_config = checked_model_config(config, config.model.vocab_size, arrays, path)
    _check_arrays(arrays, model_config)
    return arrays, config, model_config


def import_dense(
    directory: str | os.PathLike,
    *,
    attention: str = "dense",
    layer_pattern: Sequence[str] = (),
    shared_kv: bool = False,
    gate: float = GATE,
    dtype: str | None = None,
    seq_len: int | None = None,
    edit: Callable[[ConfigDict], None] | None = None,
) -> tuple[Transformer, ConfigDict]:
    """Reads a dense checkpoint of a family that `nsa_jax.hub.families` knows.

    With attention="nsa" every branch has the dense keys and values, and compression is the mean. On rows of at most
    min(w, n l') tokens the window and the selected branch are dense attention each, so that with gate=0 the model is
    the dense one. With shared_kv that is so too, and the checkpoint's keys and values are there once. With the selector
    "mean_key" (`edit`) there is no compressed branch, and the other gates begin at 1/2 whatever `gate` is.

    Args:
      directory: config.json and safetensors.
      attention: "dense" for the same function, "nsa" for a model to continue training, "window" for a checkpoint whose
        layers attend to a sliding window, all of them or some.
      layer_pattern: kinds of attention over which the layers repeat, instead of `attention`, such as ("nsa", "dense").
      shared_kv: the branches of NSA share their keys and values, see `ModelConfig`.
      gate: eps in [0, 1): gates begin at (eps, (1 - eps) / 2, (1 - eps) / 2) for the compressed, the selected and the
        window branch. With 0 the compressed branch hardly learns, since the sigmoid's slope is eps (1 - eps).
      dtype: of the parameters, "float32" or "bfloat16"; None means bfloat16 if all arrays of the checkpoint are, and
        float32 otherwise.
      seq_len: tokens of rows, `config.data.seq_len`; None means the checkpoint's max_position_embeddings.
      edit: changes the config before the model is made, for example its NSA geometry or compute dtype.

    Returns:
      The model and a training config for it.

    Raises:
      LoadError: the checkpoint has parts that this model has not, or lacks some. It is raised before an array is read.
      ValueError: `gate` is out of range, or `shared_kv` is asked of another attention.
    """
    if not 0.0 <= gate < 1.0:
        raise ValueError(f"gate={gate}: must be in [0, 1)")
    kinds: dict[str, Any] = {"attention": attention, "layer_pattern": layer_pattern, "shared_kv": shared_kv}
    arrays, config, model_config = check_import(directory, **kinds, dtype=dtype, seq_len=seq_len, edit=edit)
    path = Path(directory)
    if model_config.tie_embeddings and _has_own_head(arrays, model_config):
        logger.warning("%s: its lm_head.weight is not its embedding, so that they are not tied here", path)
        config.model.tie_embeddings = False
        model_config = checked_model_config(config, config.model.vocab_size, arrays, path)
    graphdef, abstract = abstract_model(model_config)
    params = _read_params(arrays, model_config, abstract, config.seed, gate)
    leaves, tree = jax.tree.flatten(params)
    del params
    for index, leaf in enumerate(leaves):  # one after another: on a GPU the host's memory is freed as it goes
        leaves[index] = jax.device_put(leaf)
    return nnx.merge(graphdef, jax.tree.unflatten(tree, leaves)), config
