"""`NSAttention`: Native Sparse Attention as a layer."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from nsa_jax.nn.config import ModelConfig
from nsa_jax.nn.layers import RMSNorm, add_bias, init_bias, init_normal, make_compressor, product
from nsa_jax.nn.projection import check_input, fused_product, project, projection_widths, row_positions, split_heads
from nsa_jax.nn.sharding import (
    HeadSplit,
    all_tokens,
    first_token,
    head_split,
    mirrored_first_token,
    on_shards,
    parameter_spec,
    swap_mirrored,
    tensor_size,
    whole_weights,
    with_tokens_after,
    with_tokens_before,
)
from nsa_jax.ops import blocks, checks, projected
from nsa_jax.ops.mean_key import mean_key_attention, mean_keys
from nsa_jax.ops.nsa import nsa_attention
from nsa_jax.ops.target import current_target


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
        pieces = project(x, self.w_in, self.b_in, config, self.widths)
        query = split_heads(pieces[0], config.num_heads)
        keys, values = ([split_heads(x, config.num_kv_heads) for x in pieces[first:-1:2]] for first in (1, 2))
        if self.q_norm is not None and self.k_norm is not None:
            query, keys = self.q_norm(query), [self.k_norm(key) for key in keys]
        logits = split_heads(pieces[-1].astype(jnp.float32), config.num_heads) + self.gate_bias[...].astype(jnp.float32)
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
        check_input(x, segment_start, config)
        positions = row_positions(x, positions)
        nsa = config.nsa
        split = head_split(
            x.shape[0],
            x.shape[1],
            config.num_kv_heads,
            multiple=nsa.compress_stride,
            at_least=max(nsa.compress_block - nsa.compress_stride, 2),
        )
        if block_indices is not None:
            sizes = dict(zip("BTK", (*x.shape[:2], config.num_kv_heads), strict=True))
            checks.integers("block_indices", block_indices, "BTKn", sizes, "x and config.num_kv_heads")
            block_indices = block_indices.astype(jnp.int32)
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
        if self.config.shared_kv:  # the same arrays, which sharding may have told apart
            query, key_cmp, value_cmp, key, value, _, _, gates = arrays
            arrays = (query, key_cmp, value_cmp, key, value, key, value, gates)
        return nsa_attention(*arrays, **common)

    def _kernels_cut(self, x: jax.Array) -> bool:
        """Whether kernels take the fused projection of whole rows as it is."""
        config = self.config
        # Norms of queries and keys lie between the cut and the turn, which these kernels do in one.
        return (
            not config.qk_norm
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
            sizes |= dict(num_kv_heads=kv_heads)
            pieces = projected.split_projection(fused, cos, sin, config=config.nsa, shared_kv=config.shared_kv, **sizes)
            if first_position.ndim > 1:
                first_position = jnp.repeat(first_position, kv_heads, axis=0)
            compressors = nnx.merge(graphdef, whole_weights(phi, phi_specs))
            raw = pieces.key_raw, pieces.value_raw
            key_cmp, value_cmp = _compress(compressors, *raw, first_position, config, x.shape[1])
            logits = split_heads(pieces.logits.astype(jnp.float32), config.num_heads) + bias.astype(jnp.float32)
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
                shared_kv=config.shared_kv,
                keeps_sum=config.keeps_products,
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
            begins, before, late_before = [half] * 4, 0, 0
            if not self.config.shared_kv:
                (key_win, before), (value_win, _) = (
                    with_tokens_before(x, nsa.window - 1, context) for x in (p.key_win, p.value_win)
                )
                # Where a window is longer than the tokens before a device's own, its late queries read them all.
                late_before = min(nsa.window - 1, before + half)
                begin = before + half - late_before
                own, ends = [*own, key_win, value_win], [*ends, before + half, before + half]
                begins = [*begins, begin, begin]

            def attend(arrays, offset, before):
                segment_start, block_indices, query, gates, *window = arrays
                arrays = (query, key_cmp, value_cmp, key_slc, value_slc, *(window or (key_slc, value_slc)), gates)
                start = offset - before if window else None
                return self._attend(segment_start, block_indices, *arrays, query_offset=offset, window_start=start)

            early = [None if x is None else x[:, :end] for x, end in zip(own, ends, strict=True)]
            late = [None if x is None else x[:, begin:] for x, begin in zip(own, begins, strict=True)]
            late_offset = mirrored_first_token(p.query, context) + half
            pair = attend(early, start, before), attend(swap_mirrored(late, context), late_offset, late_before)
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
