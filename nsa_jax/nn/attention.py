"""Attention modules: `NSAttention` and, with the same interface, `DenseAttention`."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from nsa_jax.nn.config import ModelConfig
from nsa_jax.nn.layers import RMSNorm, add_bias, init_bias, init_normal, make_compressor, product
from nsa_jax.nn.sharding import (
    TENSOR,
    HeadSplit,
    all_tokens,
    constrain_tensor,
    constrain_tokens,
    first_token,
    head_split,
    mirrored_first_token,
    on_shards,
    parameter_spec,
    swap_mirrored,
    tensor_size,
    token_spec,
    whole_weights,
    with_tokens_after,
    with_tokens_before,
)
from nsa_jax.ops import blocks, projected
from nsa_jax.ops.mean_key import mean_key_attention, mean_keys
from nsa_jax.ops.nsa import nsa_attention, window_attention
from nsa_jax.ops.target import current_target

# A matrix product whose width is no multiple of this misses the fast tensor-core kernels.
WIDTH_MULTIPLE = 64


def _cut(x: jax.Array, widths: Iterable[int]) -> list[jax.Array]:
    """Pieces of the given widths along the last axis; what is beyond them is dropped.

    `lax.split` is differentiated as one concatenation, slices as a sum of padded arrays, which took four times as long.
    """
    widths = list(widths)
    rest = x.shape[-1] - sum(widths)
    return list(jax.lax.split(x, [*widths, rest] if rest else widths, axis=-1))[: len(widths)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _cut_activations(x: jax.Array, widths: tuple[int, ...], total: int) -> list[jax.Array]:
    """As `_cut` of x [..., total]; each piece's gradient is computed by itself before they are put together.

    Left to the compiler, their concatenation is one kernel into which all that makes the pieces is drawn (sums of
    branches, RoPE backwards), with a choice among them for every element: 0.8 ms where the memory needs 0.3. Written
    into a padded first piece one after the other they took as long.
    """
    return _cut(x, widths)


def _cut_fwd(x, widths, total):
    return _cut(x, widths), None


def _cut_bwd(widths, total, _, gradients):
    pieces = lax.optimization_barrier(gradients)
    missing = total - sum(piece.shape[-1] for piece in pieces)
    whole = jnp.concatenate([*pieces, jnp.zeros((*pieces[0].shape[:-1], missing), pieces[0].dtype)], axis=-1)
    # Without this constraint XLA picks a feature-major layout for the weight gradient and copies the activation. The
    # constraint is a custom call that XLA does not partition: outside `on_shards` each device would gather the batch.
    row_major = Layout(tuple(range(whole.ndim)))
    tokens = token_spec(*whole.shape[:2])
    return (on_shards(lambda x: with_layout_constraint(x, row_major), (whole,), (tokens,), tokens),)


_cut_activations.defvjp(_cut_fwd, _cut_bwd)


def _padded_bias(bias: nnx.Param, dtype: jnp.dtype, width: int) -> jax.Array:
    return jnp.pad(bias[...].astype(dtype), (0, width - bias.shape[0]))


def fused_product(x: jax.Array, kernel: nnx.Param, bias: nnx.Param | None, config: ModelConfig) -> jax.Array:
    """x @ kernel + bias, with zeros behind it up to a multiple of `WIDTH_MULTIPLE`; the bias may be shorter.

    In float8, the columns of NSA's gates are a product of their own in the compute dtype.
    """
    weights = jnp.pad(kernel[...].astype(config.dtype), ((0, 0), (0, -kernel.shape[1] % WIDTH_MULTIPLE)))
    if config.matmul_dtype and config.attention == "nsa":
        *others, width = projection_widths(config, "nsa")
        gates = slice(sum(others), sum(others) + width)
        out = product(x, weights.at[:, gates].set(0), config)
        out = out.at[..., gates].set(x @ weights[:, gates])
    else:
        out = product(x, weights, config)
    return out if bias is None else out + _padded_bias(bias, config.dtype, out.shape[-1])


def _project(
    x: jax.Array,
    kernel: nnx.Param,
    bias: nnx.Param | None,
    config: ModelConfig,
    widths: tuple[int, ...],
) -> list[jax.Array]:
    """x @ kernel + bias in one product, cut along the last axis into pieces of the given widths.

    A bias that is shorter than the widths ends with one of the pieces.
    """
    dtype, num_kv_heads = config.dtype, config.num_kv_heads
    if tensor_size() > 1 and num_kv_heads % tensor_size() == 0:
        pieces = _project_by_group(x, kernel[...].astype(dtype), widths, num_kv_heads)
        if bias is None:
            return pieces
        biases = _cut(_padded_bias(bias, dtype, sum(widths)), widths)
        return [piece + part for piece, part in zip(pieces, biases, strict=True)]
    out = fused_product(x, kernel, bias, config)
    # Elsewhere it would gain nothing, and a custom gradient has no forward mode.
    return _cut_activations(out, widths, out.shape[-1]) if current_target().is_gpu else _cut(out, widths)


def _project_by_group(x: jax.Array, kernel: jax.Array, widths: tuple[int, ...], num_kv_heads: int) -> list[jax.Array]:
    """The same with the product split over the tensor axis.

    Columns are put in the order of the key/value heads, each with its query heads and gates, so that a device's share
    of them is whole heads. Every piece of the stored matrix is cut by itself: its columns are ordered by head already.
    """
    rows = kernel.shape[0]
    grouped = [piece.reshape(rows, num_kv_heads, -1) for piece in _cut(kernel, widths)]  # [D, K, width / K]
    shares = [piece.shape[-1] for piece in grouped]
    padding = -sum(shares) % (WIDTH_MULTIPLE // math.gcd(WIDTH_MULTIPLE, num_kv_heads // tensor_size()))
    fused = jnp.pad(jnp.concatenate(grouped, axis=-1), ((0, 0), (0, 0), (0, padding)))
    out = jnp.einsum("btd,dkf->btkf", x, constrain_tensor(fused, 1))
    pieces = _cut(constrain_tokens(out, TENSOR), shares)
    return [piece.reshape(*piece.shape[:2], -1) for piece in pieces]


def _heads(x: jax.Array, count: int) -> jax.Array:
    """[B, T, count * F] -> [B, T, count, F]."""
    return x.reshape(*x.shape[:2], count, -1)


def _positions(x: jax.Array, positions: jax.Array | None) -> jax.Array:
    return jnp.arange(x.shape[1], dtype=jnp.int32) if positions is None else positions


def _check_input(x: jax.Array, segment_start: jax.Array | None, config: ModelConfig) -> None:
    chex.assert_shape(x, (None, None, config.dim))
    chex.assert_type(x, config.dtype)
    if segment_start is not None:
        chex.assert_shape(segment_start, x.shape[:2])
        chex.assert_type(segment_start, int)


def projection_widths(config: ModelConfig, attention: str) -> tuple[int, ...]:
    """Columns of the matrices that a layer's `w_in` consists of: queries, keys and values by turns, and NSA's gates."""
    n, k, h, v = config.num_heads, config.num_kv_heads, config.head_dim, config.value_head_dim
    if attention != "nsa":
        return (n * h, k * h, k * v)
    branches = len(config.branches)
    return (n * h, *(k * h, k * v) * (1 if config.shared_kv else branches), branches * n)


class Projections(NamedTuple):
    """What NSAttention projects its input to. Keys of the selected and window branches are roped, key_raw is not.

    With `config.shared_kv` the three values are one array, as are key_slc and key_win; key_raw is the same unroped.
    With the selector "mean_key", key_raw is key_slc, and there is no value_raw.
    """

    query: jax.Array  # [B, T, N, H], roped
    key_raw: jax.Array  # [B, T, K, H], to be compressed
    value_raw: jax.Array | None  # [B, T, K, V], to be compressed
    key_slc: jax.Array  # [B, T, K, H], roped
    value_slc: jax.Array  # [B, T, K, V]
    key_win: jax.Array  # [B, T, K, H], roped
    value_win: jax.Array  # [B, T, K, V]
    gates: jax.Array  # [B, T, N, branches] float32


class NSAttention(nnx.Module):
    """Native Sparse Attention as a layer: projections, compressor, gates, the three branches, output projection.

    One matrix product gives the queries, the keys and values of the three branches, and the gates. Keys are compressed
    before RoPE and turned afterwards at their block's last position, so that phi sees the same numbers wherever a block
    lies. The compressed branch is queried by the same roped query as the others. With `config.shared_kv` all branches
    have the same keys and values: beside a dense layer's parameters there are only the compressors' and the gates'.

    With the selector "mean_key" (`nsa_jax.ops.mean_key`) there is no compressed branch: its keys and values, its gates
    and the compressors are absent, and 3 is 2 in the shapes below.

    Attributes:
      w_in: [D, N*H + 3*K*H + 3*K*V + 3*N], in the order of `Projections`; with `config.shared_kv`
        [D, N*H + K*H + K*V + 3*N]: query, key, value, gates.
      b_in: [N*H + 3*K*H + 3*K*V], the bias of queries, keys and values; None without `config.qkv_bias`. With
        `config.shared_kv` [N*H + K*H + K*V].
      q_norm, k_norm: RMSNorm of a head's queries, and of its keys in all three branches; None without `config.qk_norm`.
      gate_bias: [N, 3]; `config.gate_bias` at first. With 0 every gate starts near 0.5.
      compress_key, compress_value: phi of keys and of values; None with the selector "mean_key".
      w_out: [N*V, D].
      b_out: [D]; None without `config.out_bias`.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        n, h, v = config.num_heads, config.head_dim, config.value_head_dim
        self.config = config
        branches = len(config.branches)
        self.widths = projection_widths(config, "nsa")
        self.w_in = init_normal(rngs, (config.dim, sum(self.widths)), config.init_std, config)
        self.b_in = init_bias(sum(self.widths[:-1]), config) if config.qkv_bias else None
        self.q_norm = RMSNorm(config, h) if config.qk_norm else None
        self.k_norm = RMSNorm(config, h) if config.qk_norm else None
        self.gate_bias = nnx.Param(jnp.full((n, branches), config.gate_bias, jnp.dtype(config.param_dtype)))
        compresses = config.selector == "compressed"
        self.compress_key = make_compressor(config, h, rngs=rngs) if compresses else None
        self.compress_value = make_compressor(config, v, rngs=rngs) if compresses else None
        self.w_out = init_normal(rngs, (n * v, config.dim), config.residual_std, config)
        self.b_out = init_bias(config.dim, config) if config.out_bias else None

    def project(self, x: Float[Array, "B T D"], positions: jax.Array, length: int = 0) -> Projections:
        """Queries, keys, values and gates of the tokens x at row positions `positions` ([T] or [B, T]).

        `length` is that of the whole row, which RoPE's scaling of the kind "dynamic" depends on.
        """
        config = self.config
        pieces = _project(x, self.w_in, self.b_in, config, self.widths)
        query = _heads(pieces[0], config.num_heads)
        keys, values = ([_heads(x, config.num_kv_heads) for x in pieces[first:-1:2]] for first in (1, 2))
        if self.q_norm is not None and self.k_norm is not None:
            query, keys = self.q_norm(query), [self.k_norm(key) for key in keys]
        logits = _heads(pieces[-1].astype(jnp.float32), config.num_heads) + self.gate_bias[...].astype(jnp.float32)
        turn = functools.partial(config.rope, positions=positions, length=length)
        if config.shared_kv:
            key_slc = key_win = turn(keys[0])
            value_slc = value_win = values[0]
        else:
            key_slc, key_win = turn(keys[-2]), turn(keys[-1])
            value_slc, value_win = values[-2:]
        key_raw, value_raw = (key_slc, None) if config.selector == "mean_key" else (keys[0], values[0])
        gates = jax.nn.sigmoid(logits)
        return Projections(turn(query), key_raw, value_raw, key_slc, value_slc, key_win, value_win, gates)

    def compress(
        self,
        key_raw: Float[Array, "B S K H"],
        value_raw: Float[Array, "B S K V"] | None,
        first_position: int | jax.Array = 0,
        length: int = 0,
    ) -> tuple[Float[Array, "B C K H"], Float[Array, "B C K V"] | None]:
        """Compressed keys, roped at their block's last position, and compressed values.

        With the selector "mean_key", the mean keys and None.

        Args:
          key_raw: [B, S, K, H] keys, as in `Projections`, starting where a block starts.
          value_raw: [B, S, K, V], or None.
          first_position: row position of the first of them.
          length: tokens of the whole row; see `project`.
        """
        phi = (self.compress_key, self.compress_value)
        return _compress(phi, key_raw, value_raw, first_position, self.config, length)

    def output(self, attended: Float[Array, "B T N V"]) -> Float[Array, "B T D"]:
        """Joins the heads and projects back to the model width."""
        flat = attended.reshape(*attended.shape[:2], -1)
        return add_bias(product(flat, self.w_out[...].astype(self.config.dtype), self.config), self.b_out)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        segment_start: Int[Array, "B T"] | None = None,
        *,
        positions: jax.Array | None = None,
        block_indices: Int[Array, "B T K n"] | None = None,
        return_block_indices: bool = False,
    ):
        """Attention over the row.

        Args:
          x: [B, T, D] in the compute dtype.
          segment_start: int [B, T], first position of each token's document; None if rows hold one document.
          positions: integer [T] or [B, T] for RoPE; None means 0..T-1. Differences alone matter, except that
            compressed keys are turned by their index in the row: shift all positions by one constant only.
          block_indices: int32 [B, T, K, n], lists that the selected branch reads instead of selecting, such as those
            returned before; entries outside [0, J), such as -1, are padding. Kernels serve each branch by itself then.
          return_block_indices: also return the block lists of the selected branch, int32 [B, T, K, n].

        Returns:
          [B, T, D] in the compute dtype, or a pair with the block lists.
        """
        config = self.config
        _check_input(x, segment_start, config)
        positions = _positions(x, positions)
        nsa = config.nsa
        split = head_split(
            x.shape[0],
            x.shape[1],
            config.num_kv_heads,
            multiple=nsa.compress_stride,
            at_least=max(nsa.compress_block - nsa.compress_stride, 2),
        )
        if block_indices is not None:
            chex.assert_shape(block_indices, (*x.shape[:2], config.num_kv_heads, None))
            chex.assert_type(block_indices, jnp.int32)
        if split.context == 1 and block_indices is None and self._kernels_cut(x):
            attended, block_indices = self._attend_cut(x, segment_start, positions, split)
        elif split.context > 1:
            p = self.project(x, positions, x.shape[1])
            attended, block_indices = self._attend_split(p, positions[..., :1], segment_start, block_indices, split)
        else:
            p = self.project(x, positions, x.shape[1])
            key_cmp, value_cmp = self.compress(p.key_raw, p.value_raw, positions[..., :1], x.shape[1])
            arrays = (segment_start, block_indices, p.query, key_cmp, value_cmp, *p[3:])
            specs = (split.tokens, *(split.heads,) * (len(arrays) - 1))
            attended, block_indices = on_shards(self._attend, arrays, specs, (split.heads, split.heads))
        kernels = current_target().is_gpu if config.implementation is None else config.implementation == "pallas"
        # Kernels' branches are kept, and their sum is quickly made again, unless devices exchange parts of it.
        if split.context > 1 or not kernels:
            attended = checkpoint_name(attended, "attention_out")
        chex.assert_shape(attended, (*x.shape[:2], config.num_heads, config.value_head_dim))
        out = self.output(attended)
        return (out, block_indices) if return_block_indices else out

    def _attend(self, segment_start: jax.Array | None, block_indices: jax.Array | None, *arrays: Any, **offsets: Any):
        """Output and block lists for a device's share of `nsa_attention`'s arrays."""
        common: dict[str, Any] = dict(config=self.config.nsa, implementation=self.config.implementation, **offsets)
        common |= dict(segment_start=segment_start, block_indices=block_indices)
        if self.config.selector == "mean_key":
            query, key_mean, _, *others = arrays
            return mean_key_attention(query, key_mean, *others, **common)
        common |= dict(return_block_indices=True, nonnegative_gates=True)  # a sigmoid's
        return nsa_attention(*arrays, **common)

    def _kernels_cut(self, x: jax.Array) -> bool:
        """Whether kernels take the fused projection of whole rows as it is."""
        config = self.config
        # Norms of queries and keys lie between the cut and the turn, which these kernels do in one, for three branches.
        return (
            not config.qk_norm
            and not config.shared_kv
            and config.selector == "compressed"
            and tensor_size() == 1
            and projected.serves(
                (*x.shape[:2], config.num_heads, config.head_dim),
                config.num_kv_heads,
                config.value_head_dim,
                config.dtype,
                config=config.nsa,
                implementation=config.implementation,
            )
        )

    def _attend_cut(self, x: jax.Array, segment_start: jax.Array | None, positions: jax.Array, split: HeadSplit):
        """Projection and attention of whole rows; key/value heads are batch entries from the projection on."""
        config, kv_heads = self.config, self.config.num_kv_heads
        group = config.num_heads // kv_heads
        graphdef, phi, phi_specs = self._compressors()
        turns = config.rope_turns(positions, x.shape[1])
        cos, sin = turns if positions.ndim > 1 else (turn[None] for turn in turns)
        first_position = positions[..., :1]
        rows = split.rows if positions.ndim > 1 else P()
        fused = fused_product(x, self.w_in, self.b_in, config)
        arrays = (segment_start, first_position, cos, sin, phi, self.gate_bias[...], fused)
        specs = (split.tokens, rows, rows, rows, phi_specs, P(), split.tokens)

        def local(segment_start, first_position, cos, sin, phi, bias, fused):
            sizes = dict(num_heads=config.num_heads, head_dim=config.head_dim, value_dim=config.value_head_dim)
            pieces = projected.split_projection(fused, cos, sin, num_kv_heads=kv_heads, **sizes)
            if first_position.ndim > 1:
                first_position = jnp.repeat(first_position, kv_heads, axis=0)
            compressors = nnx.merge(graphdef, whole_weights(phi, phi_specs))
            raw = pieces.key_raw, pieces.value_raw
            key_cmp, value_cmp = _compress(compressors, *raw, first_position, config, x.shape[1])
            logits = _heads(pieces.logits.astype(jnp.float32), config.num_heads) + bias.astype(jnp.float32)
            gates = jax.nn.sigmoid(logits).reshape(*logits.shape[:2], kv_heads, group, 3).swapaxes(1, 2)
            others = (key_cmp, value_cmp, *pieces[3:7], gates.reshape(-1, *gates.shape[2:]))
            return projected.attend(
                pieces.queries,
                others,
                kv_heads=kv_heads,
                config=config.nsa,
                segment_start=segment_start,
                implementation=config.implementation,
                nonnegative_gates=True,  # sigmoid's
            )

        return on_shards(local, arrays, specs, (split.heads, split.heads))

    def _compressors(self) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
        """The pair of compressors, cast to the compute dtype in which they travel, and how their weights are stored."""
        graphdef, phi = nnx.split((self.compress_key, self.compress_value))
        phi = jax.tree.map(lambda x: x.astype(self.config.dtype), phi)
        return graphdef, phi, jax.tree.map(lambda x: parameter_spec(x.shape), phi)

    def _attend_split(
        self,
        p: Projections,
        first_position: jax.Array,
        segment_start: jax.Array | None,
        block_indices: jax.Array | None,
        split: HeadSplit,
    ):
        """Attention of rows whose tokens are split over the context axis.

        A device fetches
          compressed: the l - d tokens after its own, which its last blocks reach into, and then all compressed keys
            and values, T / d of them;
          selected: the layer's keys and values of all T tokens, since a query may choose any block. They are freed
            after the layer and fetched again by its backward pass (unless `remat` is "none"): T K (H + V) numbers;
          window: the w - 1 tokens before its own, or nothing more if it has the selected branch's keys and values.
        Late queries see more compressed blocks than early ones. So that no device waits for the last one, each attends
        with the first half of its own queries and the second half of those of its mirror image (the first device's is
        the last); queries, outputs, gates and window keys of one half travel for that.
        Gradients go the same ways back.
        """
        nsa, context = self.config.nsa, split.context
        graphdef, phi, phi_specs = self._compressors()
        arrays = (segment_start, block_indices, first_position, phi, *p)
        first_spec = split.rows if first_position.ndim > 1 else P()
        specs = (split.tokens, split.heads, first_spec, phi_specs, *(split.heads,) * len(p))

        def local(segment_start, block_indices, first_position, phi, *projected):
            p = Projections(*projected)
            start = first_token(p.query)
            key_raw, value_raw = (
                None if x is None else with_tokens_after(x, nsa.compress_block - nsa.compress_stride, context)
                for x in (p.key_raw, p.value_raw)
            )
            compressors = nnx.merge(graphdef, whole_weights(phi, phi_specs))
            length = p.query.shape[1] * context
            pair = _compress(compressors, key_raw, value_raw, first_position + start, self.config, length)
            # The last device's last blocks reach beyond the row.
            count = blocks.num_compressed(length, nsa)
            key_cmp, value_cmp = jax.tree.map(lambda x: all_tokens(x)[:, :count], pair)
            key_slc, value_slc = all_tokens(p.key_slc), all_tokens(p.value_slc)
            half = p.query.shape[1] // 2
            own, ends = [segment_start, block_indices, p.query, p.gates], [half] * 4
            before = 0
            if not self.config.shared_kv:
                (key_win, before), (value_win, _) = (
                    with_tokens_before(x, nsa.window - 1, context) for x in (p.key_win, p.value_win)
                )
                own, ends = [*own, key_win, value_win], [*ends, before + half, before + half]

            def attend(arrays, offset):
                segment_start, block_indices, query, gates, *window = arrays
                arrays = (query, key_cmp, value_cmp, key_slc, value_slc, *(window or (key_slc, value_slc)), gates)
                start = offset - before if window else None
                return self._attend(segment_start, block_indices, *arrays, query_offset=offset, window_start=start)

            early = [None if x is None else x[:, :end] for x, end in zip(own, ends, strict=True)]
            late = swap_mirrored([None if x is None else x[:, half:] for x in own], context)
            pair = attend(early, start), attend(late, mirrored_first_token(p.query, context) + half)
            return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), pair[0], swap_mirrored(pair[1], context))

        return on_shards(local, arrays, specs, (split.heads, split.heads))


def _compress(phi: tuple, key_raw, value_raw, first_position, config: ModelConfig, length: int):
    """See `NSAttention.compress`; phi is its pair of compressors."""
    if config.selector == "mean_key":
        return mean_keys(key_raw, config=config.nsa), None
    key, value = phi[0](key_raw), phi[1](value_raw)
    index = jnp.arange(key.shape[1], dtype=jnp.int32)
    last = first_position + blocks.compressed_last_position(index, config.nsa)
    return config.rope(key, last, length), value


def dense_attention(query, key, value, *, segment_start=None, deterministic=False):
    """Causal softmax attention over the whole document: time quadratic in T.

    On a GPU, cuDNN serves bfloat16 rows of one document, and the window kernels, with a window as long as the row, all
    others (cuDNN takes no document boundaries here): memory is linear in T. Elsewhere XLA with a mask: quadratic.
    cuDNN's backward pass adds the query's gradient with atomics, in an order that differs from run to run.

    Args:
      query: [B, T, N, H].
      key: [B, T, K, H].
      value: [B, T, K, V].
      segment_start: int [B, T] or None.
      deterministic: the window kernels serve in cuDNN's place.

    Returns:
      [B, T, N, V] in query's dtype.
    """
    length, head_dim, value_dim = query.shape[1], query.shape[-1], value.shape[-1]
    unpacked = segment_start is None and query.dtype == jnp.bfloat16 and head_dim == value_dim
    if current_target().is_gpu and unpacked and not deterministic and head_dim % 8 == 0 and head_dim <= 128:
        return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")
    if current_target().is_gpu:
        return window_attention(query, key, value, window=length, segment_start=segment_start)
    # jax.nn wants H = V: zeros at the end of keys change no score, and at the end of values are cut off again.
    wide = max(head_dim, value_dim)
    query, key, value = (jnp.pad(a, [(0, 0)] * 3 + [(0, wide - a.shape[-1])]) for a in (query, key, value))
    mask = None
    if segment_start is not None:
        mask = (jnp.arange(length) >= segment_start[..., None])[:, None]  # [B, 1, T, S]
    out = jax.nn.dot_product_attention(
        query, key, value, mask=mask, is_causal=True, scale=head_dim**-0.5, implementation="xla"
    )
    return out[..., :value_dim]


class DenseAttention(nnx.Module):
    """Full causal attention with the interface of `NSAttention`: the baseline.

    With `config.attention == "window"`, attention over the sliding window alone.

    Attributes:
      w_in: [D, N*H + K*H + K*V]: query, key, value.
      b_in: [N*H + K*H + K*V]; None without `config.qkv_bias`.
      q_norm, k_norm: RMSNorm of a head's queries and keys; None without `config.qk_norm`.
      w_out: [N*V, D].
      b_out: [D]; None without `config.out_bias`.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        n, h, v = config.num_heads, config.head_dim, config.value_head_dim
        self.config = config
        self.widths = projection_widths(config, "dense")
        self.w_in = init_normal(rngs, (config.dim, sum(self.widths)), config.init_std, config)
        self.b_in = init_bias(sum(self.widths), config) if config.qkv_bias else None
        self.q_norm = RMSNorm(config, h) if config.qk_norm else None
        self.k_norm = RMSNorm(config, h) if config.qk_norm else None
        self.w_out = init_normal(rngs, (n * v, config.dim), config.residual_std, config)
        self.b_out = init_bias(config.dim, config) if config.out_bias else None

    def project(
        self, x: Float[Array, "B T D"], positions: jax.Array, length: int = 0
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Roped query [B, T, N, H], roped key [B, T, K, H] and value [B, T, K, V]; see `NSAttention.project`."""
        config = self.config
        query, key, value = _project(x, self.w_in, self.b_in, config, self.widths)
        query, key = _heads(query, config.num_heads), _heads(key, config.num_kv_heads)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        turn = functools.partial(config.rope, positions=positions, length=length)
        return turn(query), turn(key), _heads(value, config.num_kv_heads)

    def output(self, attended: Float[Array, "B T N V"]) -> Float[Array, "B T D"]:
        """Joins the heads and projects back to the model width."""
        flat = attended.reshape(*attended.shape[:2], -1)
        return add_bias(product(flat, self.w_out[...].astype(self.config.dtype), self.config), self.b_out)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        segment_start: Int[Array, "B T"] | None = None,
        *,
        positions: jax.Array | None = None,
    ) -> Float[Array, "B T D"]:
        """Attention over the row; the arguments are `NSAttention`'s."""
        _check_input(x, segment_start, self.config)
        arrays = (segment_start, *self.project(x, _positions(x, positions), x.shape[1]))
        split = head_split(x.shape[0], x.shape[1], self.config.num_kv_heads)
        attend = self._attend_split if split.context > 1 else self._attend
        specs = (split.tokens, *(split.heads,) * 3)
        attended = on_shards(functools.partial(attend, split.context), arrays, specs, split.heads)
        return self.output(checkpoint_name(attended, "attention_out"))

    def _attend(self, context: int, segment_start: jax.Array | None, query, key, value):
        """Attention of whole rows."""
        del context
        if self.config.attention != "window":
            deterministic = self.config.deterministic
            return dense_attention(query, key, value, segment_start=segment_start, deterministic=deterministic)
        return window_attention(
            query,
            key,
            value,
            window=self.config.nsa.window,
            segment_start=segment_start,
            implementation=self.config.implementation,
        )

    def _attend_split(self, context: int, segment_start: jax.Array | None, query, key, value):
        """Attention of one device's queries, where the tokens of rows are split over the context axis.

        Dense attention fetches the keys and values of the whole row, and is served as a window as long as the row:
        cuDNN's causal mask has no offset.
        """
        window, start = self.config.nsa.window, first_token(query)
        before: int | jax.Array = start
        if self.config.attention != "window":
            window = query.shape[1] * context
            key, value = all_tokens(key), all_tokens(value)
        else:
            (key, fetched), (value, _) = (with_tokens_before(x, window - 1, context) for x in (key, value))
            before = fetched
            # Positions are counted from the first key; what lies before the row is nobody's document.
            segment_start = jnp.zeros(query.shape[:2], jnp.int32) if segment_start is None else segment_start
            segment_start = segment_start - start + before
        return window_attention(
            query,
            key,
            value,
            window=window,
            segment_start=segment_start,
            query_offset=before,
            implementation=self.config.implementation,
        )
