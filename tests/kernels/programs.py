"""The GPU programs that the ops trace to, as text: what a change that only moves code must leave alone.

    python -m tests.kernels.programs OUT        one file per case
    diff -r BEFORE AFTER

Kernels are part of the text with all that they are compiled with; names of functions and files are not. The cases cross
every kernel of the operator, forward and backward, for an A100 and an H100, of which neither need be here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import Literal

import nsa_jax
from nsa_jax.nn import ModelConfig, Transformer
from nsa_jax.ops.target import Target, compile_for

TARGETS = {"a100": Target("gpu", (8, 0)), "h100": Target("gpu", (9, 0))}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Arguments of the operator: B rows of T tokens, N query heads and K key/value heads of H and V columns."""

    batch: int
    length: int
    num_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str = "bfloat16"
    packed: bool = False
    config: nsa_jax.NSAConfig = nsa_jax.NSAConfig()


SHAPES = {
    "paper": Shape(1, 65536, 64, 4, 128, 128),
    "packed": Shape(1, 32768, 64, 4, 128, 128, packed=True),
    "groups_of_4": Shape(1, 32768, 32, 8, 128, 128),
    "groups_of_7": Shape(1, 8192, 28, 4, 128, 128, packed=True),
    "small": Shape(4, 65536, 12, 2, 64, 64),
    "small_one_row": Shape(1, 32768, 12, 2, 64, 64, packed=True),
    "short_rows": Shape(64, 2048, 12, 2, 64, 64),
    "wide": Shape(1, 8192, 16, 1, 192, 128),
    "float32": Shape(2, 4096, 8, 2, 64, 128, dtype="float32"),
    "odd": Shape(2, 1000, 6, 2, 32, 16, config=nsa_jax.NSAConfig(16, 8, 32, 5, 1, 1, 100)),
}


def operator(shape: Shape) -> tuple[Callable, list[jax.ShapeDtypeStruct]]:
    """The operator and all of its gradients, and the arguments to trace them with."""
    c = shape.config
    num_cmp = max(0, (shape.length - c.compress_block) // c.compress_stride + 1)
    lengths = (num_cmp, num_cmp, *[shape.length] * 4)
    arrays = [(shape.length, shape.num_heads, shape.head_dim)]
    for i, length in enumerate(lengths):
        arrays.append((length, shape.kv_heads, shape.value_dim if i % 2 else shape.head_dim))
    arrays.append((shape.length, shape.num_heads, 3))
    args = [jax.ShapeDtypeStruct((shape.batch, *array), shape.dtype) for array in arrays]
    starts = [jax.ShapeDtypeStruct((shape.batch, shape.length), jnp.int32)] if shape.packed else []

    def gradients(*args):
        start = args[8] if starts else None

        def total(*tensors):
            out = nsa_jax.nsa_attention(
                *tensors, config=c, segment_start=start, implementation="pallas", nonnegative_gates=not starts
            )
            return out.astype(jnp.float32).sum()

        return jax.value_and_grad(total, argnums=tuple(range(8)))(*args[:8])

    return gradients, args + starts


def branches(shape: Shape) -> tuple[Callable, list[jax.ShapeDtypeStruct]]:
    """The four ops called one by one, and the gradients of those that have them."""
    _, args = operator(shape)
    c = shape.config

    def gradients(*args):
        start = args[8] if shape.packed else None

        def total(query, key_cmp, value_cmp, key_slc, value_slc, key_win, value_win):
            common = dict(segment_start=start, implementation="pallas")
            out, lse = nsa_jax.compressed_attention(query, key_cmp, value_cmp, config=c, **common)
            lists = nsa_jax.select_blocks(query, key_cmp, lse, config=c, **common)
            outs = [
                out,
                nsa_jax.selected_attention(query, key_slc, value_slc, lists, select_block=c.select_block, **common),
                nsa_jax.window_attention(query, key_win, value_win, window=c.window, **common),
            ]
            return sum(x.astype(jnp.float32).sum() for x in outs)

        return jax.value_and_grad(total, argnums=tuple(range(7)))(*args[:7])

    return gradients, args


def decoding(shape: Shape) -> tuple[Callable, list[jax.ShapeDtypeStruct]]:
    """One step of decoding over a cache of the shape's length."""
    _, args = operator(dataclasses.replace(shape, packed=False))
    query, gates = args[0], args[7]
    one = [jax.ShapeDtypeStruct((x.shape[0], 1, *x.shape[2:]), x.dtype) for x in (query, gates)]
    window = [jax.ShapeDtypeStruct((x.shape[0], shape.config.window, *x.shape[2:]), x.dtype) for x in args[5:7]]
    lengths = jax.ShapeDtypeStruct((shape.batch,), jnp.int32)

    def step(query, gates, lengths, *cache):
        return nsa_jax.decode_attention(
            query, *cache, gates, config=shape.config, lengths=lengths, implementation="pallas"
        )

    return step, [*one, lengths, *args[1:5], *window]


def model(shape: Shape) -> tuple[Callable, list[jax.ShapeDtypeStruct]]:
    """A transformer of one layer and its gradients."""
    config = ModelConfig(
        dim=shape.num_heads * shape.head_dim, num_heads=shape.num_heads, num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim, vocab_size=1024, num_layers=1, mlp_dim=512, nsa=shape.config, remat="dots_saved",
        compute_dtype=shape.dtype,
    )  # fmt: skip
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))
    leaves, tree = jax.tree.flatten(params)
    tokens = jax.ShapeDtypeStruct((shape.batch, shape.length), jnp.int32)

    def gradients(tokens, *leaves):
        def total(leaves):
            model = nnx.merge(graphdef, jax.tree.unflatten(tree, leaves))
            return model(tokens, tokens if shape.packed else None).astype(jnp.float32).sum()

        return jax.value_and_grad(total)(leaves)

    return gradients, [tokens, *leaves]


def cases() -> Iterator[tuple[str, Target, Callable, list[jax.ShapeDtypeStruct]]]:
    """(name, target, function, arguments) of every program."""
    for target_name, target in TARGETS.items():
        for name, shape in SHAPES.items():
            for make in (operator, branches):
                yield f"{name}.{make.__name__}.{target_name}", target, *make(shape)
        for name in ("paper", "small", "short_rows"):
            yield f"{name}.decoding.{target_name}", target, *decoding(SHAPES[name])
        for name in ("packed", "small", "short_rows"):
            yield f"{name}.model.{target_name}", target, *model(SHAPES[name])


_NAMES = re.compile(r"0x[0-9a-f]+|/\S+?\.py:\d+|name=\S+|for kernel function '?\S+'?( at \S+)?")


def _lines(jaxpr: Any, indent: int = 0) -> Iterator[str]:
    """A jaxpr with those that its equations hold; variables are numbered by first use."""
    numbers: dict[Any, int] = {}

    def variable(x) -> str:
        if isinstance(x, Literal):
            return f"{x.val}:{x.aval.str_short()}"
        return f"v{numbers.setdefault(x, len(numbers))}:{x.aval}"

    pad = " " * indent
    yield pad + "in " + " ".join(variable(x) for x in jaxpr.invars)
    for equation in jaxpr.eqns:
        inputs, outputs = [[variable(x) for x in xs] for xs in (equation.invars, equation.outvars)]
        yield f"{pad}{' '.join(outputs)} = {equation.primitive.name} {' '.join(inputs)}"
        for key in sorted(equation.params):
            yield from _parameter(key, equation.params[key], indent + 4)
    yield pad + "out " + " ".join(variable(x) for x in jaxpr.outvars)


# Parameters that name things, or hold what other parameters say already.
_LEFT_OUT = ("bwd", "ctx_mesh", "debug", "debug_info", "fwd_jaxpr_thunk", "index_map_src_info", "jvp_jaxpr_fun", "name")
_LEFT_OUT += ("name_and_src_info", "origin", "resolve_mesh_axis_names")


def _parameter(key: str, value: Any, indent: int) -> Iterator[str]:
    pad = " " * indent
    if key in _LEFT_OUT:
        return
    inner = getattr(value, "jaxpr", value)
    if hasattr(inner, "eqns"):
        yield pad + key
        yield from _lines(inner, indent + 4)
    elif isinstance(value, (tuple, list)) and not all(isinstance(x, (int, float, str)) for x in value):
        for i, x in enumerate(value):
            yield from _parameter(f"{key}[{i}]", x, indent)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield f"{pad}{key}: {type(value).__name__}"
        for field in dataclasses.fields(value):
            yield from _parameter(field.name, getattr(value, field.name), indent + 4)
    elif callable(value) and not isinstance(value, type):
        yield f"{pad}{key}: a function"
    else:
        yield f"{pad}{key}: {_NAMES.sub('', repr(value))}"


def text(function: Callable, args, target: Target) -> str:
    """The program that `function` of `args` traces to on `target`."""
    with compile_for(target):
        traced = jax.make_jaxpr(lambda *args: function(*args))(*args)
    return "\n".join(_lines(traced.jaxpr)) + "\n"


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, target, function, args in cases():
        program = text(function, args, target)
        (folder / f"{name}.txt").write_text(program)
        print(f"{hashlib.sha256(program.encode()).hexdigest()[:16]}  {name}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
