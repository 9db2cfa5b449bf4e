"""The attention layer's fused projection, cut into what the branches read, and its gradient: one kernel each way.

Hopper's kernels want the heads of most groups beside each other, with key/value heads as batch entries. Left to the
compiler, rotating and rearranging the query ran at 40 % of the memory's bandwidth, every key and value had a kernel of
its own, and the gradient was written twice more on its way into one array. Here each direction reads and writes every
number once. Groups of 1, 2 and 4 heads, which could stay as they are, pass through here for that.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl

from nsa_jax.ops.kernels.triton import first_derivative, pieces, triton_call

# The forward kernel's name, by which remat policies know it: cheap enough to run again.
NAME = "nsa_split_projection"
# The name under which they can keep what it writes.
_PIECES = "nsa_projection"

# Numbers of one load: with 128 threads, 16 bytes of bfloat16 each.
_TILE = 1024
_WARPS = 4
# Loads on their way at a time. Stores end a batch of them: the compiler cannot know that they are to other arrays.
_LOADS = 8


class Pieces(NamedTuple):
    """A projection by key/value head: these are batch entries, with their query heads beside each other.

    The query comes several times, once for each backward pass of the branches: the gradients that come back are added
    in float32 where they are rotated. So do keys and values that the branches share.
    """

    queries: tuple[jax.Array, ...]  # one array [B * K, T, G, H], roped
    key_raw: jax.Array  # [B * K, T, 1, H]
    value_raw: jax.Array  # [B * K, T, 1, V]
    key_slc: jax.Array  # [B * K, T, 1, H], roped
    value_slc: jax.Array  # [B * K, T, 1, V]
    key_win: jax.Array  # [B * K, T, 1, H], roped
    value_win: jax.Array  # [B * K, T, 1, V]
    logits: jax.Array  # [B, T, 3 * N], of the gates


class _Head(NamedTuple):
    """Where one head lies: columns of the projection, and arrays by key/value head, its entry and columns there."""

    column: int
    entry: int
    offset: int
    width: int
    plain: tuple[int, ...]  # arrays that hold it as it is: 0 is the query, then as in `Pieces`
    turned: tuple[int, ...]  # and those that hold it roped


# Arrays that the keys and values of a projection become, by column: (as they are, roped).
_OWN = (((1,), ()), ((2,), ()), ((), (3,)), ((4,), ()), ((), (5,)), ((6,), ()))
_SHARED = (((1,), (3, 5)), ((2, 4, 6), ()))


@dataclasses.dataclass(frozen=True)
class _Layout:
    """The columns of a projection [B, T, width]; see `split_projection`."""

    num_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    width: int
    shared_kv: bool
    joint_window: bool

    @property
    def queries(self) -> int:
        """How many times `Pieces` holds the query."""
        return 2 if self.joint_window else 3

    @property
    def group(self) -> int:
        return self.num_heads // self.kv_heads

    @property
    def keys_values(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        return _SHARED if self.shared_kv else _OWN

    @property
    def graded(self) -> tuple[int, ...]:
        """The arrays but the query whose gradients are read; those of the others are 0."""
        return tuple(range(1, len(self.widths) - (2 if self.joint_window else 0)))

    @property
    def logits(self) -> int:
        """Where the gates' logits begin."""
        pairs = len(self.keys_values) // 2
        return self.num_heads * self.head_dim + pairs * self.kv_heads * (self.head_dim + self.value_dim)

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns of the arrays by key/value head."""
        return (self.group * self.head_dim, *(self.head_dim, self.value_dim) * 3)

    @property
    def written(self) -> tuple[int, ...]:
        """The arrays that are written; each of the others is one of them, see `same`."""
        return tuple(sorted(set(self.same)))

    @property
    def same(self) -> tuple[int, ...]:
        """For every array the first that holds the same."""
        found = list(range(len(self.widths)))
        for arrays in (arrays for both in self.keys_values for arrays in both):
            for array in arrays:
                found[array] = arrays[0]
        return tuple(found)

    def heads(self) -> list[_Head]:
        """All heads in the order of their columns, but the gates."""
        dim, group = self.head_dim, self.group
        found = [_Head(n * dim, n // group, n % group * dim, dim, (), (0,)) for n in range(self.num_heads)]
        column = self.num_heads * dim
        for plain, turned in self.keys_values:
            width = self.widths[(plain or turned)[0]]
            for entry in range(self.kv_heads):
                found.append(_Head(column, entry, 0, width, plain, turned))
                column += width
        return found


def _where(rows: int, length: int, batched_turns: bool):
    """The program's tokens, as rows of the projection, of the turns, and of an array by key/value head.

    Past the row's end they repeat the last token. The last is a function of (key/value heads, one of them).
    """
    batch = pl.program_id(1)
    token = jnp.minimum(pl.program_id(0) * rows + lax.broadcasted_iota(jnp.int32, (rows,), 0), length - 1)
    row = batch * length + token
    return row, row if batched_turns else token, lambda kv_heads, entry: (batch * kv_heads + entry) * length + token


def _load_turns(cos_ref, sin_ref, row) -> list:
    """[(cosines, sines)] of the columns that `pieces` of half a head names."""
    return [tuple(ref[row, pl.ds(*piece)] for ref in (cos_ref, sin_ref)) for piece in pieces(cos_ref.shape[1])]


def _head_pieces(head: _Head) -> list[tuple[int, int]]:
    """(offset, size) within a head; where it is turned, pairs of them: of the first half and of the second."""
    if not head.turned:
        return pieces(head.width)
    half = head.width // 2
    return [(start + at, size) for at, size in pieces(half) for start in (0, half)]


def _batches(heads: Iterable[_Head], loads: Callable[[_Head], int]) -> list[list[_Head]]:
    """Neighbouring heads, so many that they are loaded by `_LOADS` loads."""
    out: list[list[_Head]] = []
    free = 0
    for head in heads:
        if loads(head) > free or not out:
            out.append([])
            free = _LOADS
        out[-1].append(head)
        free -= loads(head)
    return out


def _turn(values: list, turns: list, sign: int) -> list:
    """Halves of a head in float32, turned by their positions; backwards if the sign is negative."""
    out = []
    for first, second, (cos, sin) in zip(values[::2], values[1::2], turns, strict=True):
        sin = sign * sin
        out += [first * cos - second * sin, second * cos + first * sin]
    return out


def _split_kernel(projected_ref, cos_ref, sin_ref, *out_refs, rows: int, length: int, layout: _Layout):
    """projected_ref [B * T, width], turns [(B *) T, H / 2]; out: the written arrays [B * K * T, columns]."""
    row, turn_row, row_of = _where(rows, length, cos_ref.shape[0] > length)
    turns = _load_turns(cos_ref, sin_ref, turn_row)
    out_of = dict(zip(layout.written, out_refs, strict=True))
    for heads in _batches(layout.heads(), lambda head: len(_head_pieces(head))):
        loaded = [
            [projected_ref[row, pl.ds(head.column + at, size)] for at, size in _head_pieces(head)] for head in heads
        ]
        for head, values in zip(heads, loaded, strict=True):
            stored = [(array, values) for array in head.plain[:1]]
            if head.turned:
                stored.append((head.turned[0], _turn([x.astype(jnp.float32) for x in values], turns, 1)))
            out_row = row_of(layout.kv_heads, head.entry)
            for array, values in stored:
                for (at, size), value in zip(_head_pieces(head), values, strict=True):
                    out_of[array][out_row, pl.ds(head.offset + at, size)] = value.astype(out_of[array].dtype)


def _join_kernel(cos_ref, sin_ref, *refs, rows: int, length: int, layout: _Layout):
    """Turns, the gradients of the query, those of the other arrays by key/value head, and of the logits with the
    padding behind them [B * T, columns]; out: the projection's gradient [B * T, width]."""
    *grad_refs, tail_ref, out_ref = refs
    queries, others = grad_refs[: layout.queries], dict(zip(layout.graded, grad_refs[layout.queries :], strict=True))
    row, turn_row, row_of = _where(rows, length, cos_ref.shape[0] > length)
    turns = _load_turns(cos_ref, sin_ref, turn_row)

    def sources(arrays: tuple[int, ...]) -> list:
        found = (queries if array == 0 else [others[array]] for array in arrays if array == 0 or array in others)
        return [ref for refs in found for ref in refs]

    def load(head: _Head, arrays: tuple[int, ...]) -> list[list]:
        grad_row = row_of(layout.kv_heads, head.entry)
        columns = [pl.ds(head.offset + at, size) for at, size in _head_pieces(head)]
        return [[ref[grad_row, column] for ref in sources(arrays)] for column in columns]

    def total(values: list[list]) -> list:
        """Sums in float32; a single gradient as it is."""
        return [x[0] if len(x) == 1 else sum(part.astype(jnp.float32) for part in x) for x in values]

    for heads in _batches(
        layout.heads(), lambda head: len(sources(head.plain + head.turned)) * len(_head_pieces(head))
    ):
        loaded = [(load(head, head.plain), load(head, head.turned)) for head in heads]
        for head, (plain, turned) in zip(heads, loaded, strict=True):
            sums = total(plain) if head.plain else []
            if head.turned:
                back = _turn([x.astype(jnp.float32) for x in total(turned)], turns, -1)
                sums = [x.astype(jnp.float32) + y for x, y in zip(sums, back, strict=True)] if sums else back
            for (at, size), value in zip(_head_pieces(head), sums, strict=True):
                out_ref[row, pl.ds(head.column + at, size)] = value.astype(out_ref.dtype)
    for at, size in pieces(tail_ref.shape[1]):
        out_ref[row, pl.ds(layout.logits + at, size)] = tail_ref[row, pl.ds(at, size)]


def _call(kernel, name: str, out_shape, batch: int, length: int, layout: _Layout, *arrays):
    widest = max(size for dim in (layout.head_dim // 2, layout.value_dim) for _, size in pieces(dim))
    rows = 1 << (max(16, min(64, 2 * _TILE // widest)).bit_length() - 1)
    return triton_call(
        functools.partial(kernel, rows=rows, length=length, layout=layout),
        num_warps=_WARPS,
        num_stages=1,
        grid=(pl.cdiv(length, rows), batch),
        out_shape=out_shape,
        name=name,
    )(*arrays)


def _flat(x: jax.Array, columns: int) -> jax.Array:
    return x.reshape(-1, columns)


def _forward(projected: jax.Array, cos: jax.Array, sin: jax.Array, layout: _Layout) -> Pieces:
    batch, length, width = projected.shape
    entries = batch * layout.kv_heads
    shapes = [jax.ShapeDtypeStruct((entries * length, layout.widths[i]), projected.dtype) for i in layout.written]
    arrays = (_flat(projected, width), *(_flat(x, layout.head_dim // 2) for x in (cos, sin)))
    query, *others = _call(_split_kernel, NAME, shapes, batch, length, layout, *arrays)
    query = query.reshape(entries, length, layout.group, layout.head_dim)
    others = [x.reshape(entries, length, 1, x.shape[-1]) for x in others]
    logits = lax.slice_in_dim(projected, layout.logits, layout.logits + 3 * layout.num_heads, axis=2)
    # The barrier hides the kernel from XLA's dynamic-slice fusion, see `layer.nsa`: a scan may keep these arrays.
    query, others, logits = checkpoint_name(lax.optimization_barrier((query, others, logits)), _PIECES)
    array = dict(zip(layout.written[1:], others, strict=True))
    return Pieces._make([(query,) * layout.queries, *(array[i] for i in layout.same[1:]), logits])


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _split(projected: jax.Array, cos: jax.Array, sin: jax.Array, layout: _Layout) -> Pieces:
    return _forward(projected, cos, sin, layout)


def _split_fwd(projected, cos, sin, layout: _Layout):
    (projected,) = first_derivative(projected)
    return _forward(projected, cos, sin, layout), (cos, sin)


def _split_bwd(layout: _Layout, residuals, gradients: Pieces):
    queries, *others, logits = jax.tree.map(lambda x: first_derivative(x)[0], gradients)
    (batch, length), dtype = logits.shape[:2], logits.dtype
    columns = layout.width - layout.logits
    # Padded here, so that the kernel copies whole widths.
    tail = jnp.pad(_flat(logits, logits.shape[-1]), ((0, 0), (0, columns - logits.shape[-1])))
    arrays = (
        *(_flat(x, layout.head_dim // 2) for x in residuals),
        *(_flat(x, layout.widths[0]) for x in queries),
        *(_flat(others[i - 1], layout.widths[i]) for i in layout.graded),
        tail,
    )
    out_shape = jax.ShapeDtypeStruct((batch * length, layout.width), dtype)
    out = _call(_join_kernel, NAME + "_gradient", out_shape, batch, length, layout, *arrays)
    return out.reshape(batch, length, layout.width), None, None  # the turns are of integer positions


_split.defvjp(_split_fwd, _split_bwd)


def split_projection(
    projected: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int,
    shared_kv: bool = False,
    joint_window: bool = False,
) -> Pieces:
    """Cuts a fused projection into its parts, rotates query and keys (RoPE), and puts key/value heads into the batch.

    Args:
      projected: [B, T, W], whose columns are the query (N*H), raw key (K*H) and value (K*V), the selected branch's key
        and value, the window's key and value, the gates' logits (3*N), then padding, whose gradient is 0. H must be a
        multiple of 16.
      cos, sin: float32 [1 or B, T, H / 2], see `nsa_jax.ops.rope.rope_turns`. They get no gradient.
      num_heads: N.
      num_kv_heads: K.
      head_dim: H.
      value_dim: V.
      shared_kv: the projection has one key and one value (K*H and K*V columns) for all branches; `Pieces` holds the
        roped key and the value as often as branches read them, and their gradients are added in float32.
      joint_window: one backward pass serves the selected branch and the window, which share keys and values: `Pieces`
        holds the query twice, not three times, and gradients of the window's key and value are not read.
    """
    assert shared_kv or not joint_window
    layout = _Layout(num_heads, num_kv_heads, head_dim, value_dim, projected.shape[-1], shared_kv, joint_window)
    return _split(projected, cos, sin, layout)
