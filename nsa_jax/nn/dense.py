"""`DenseAttention`: full causal attention, or a sliding window, with the interface of `NSAttention`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from nsa_jax.nn.config import ModelConfig
from nsa_jax.nn.layers import RMSNorm, add_bias, init_bias, init_normal, product
from nsa_jax.nn.projection import check_input, project, projection_widths, row_positions, split_heads
from nsa_jax.nn.sharding import all_tokens, first_token, head_split, on_shards, with_tokens_before
from nsa_jax.ops import checks
from nsa_jax.ops.nsa import window_attention
from nsa_jax.ops.pallas import has_cudnn
from nsa_jax.ops.target import current_target


def cudnn_serves(dtype, head_dim: int, value_dim: int, *, packed: bool, deterministic: bool) -> bool:
    """Whether `dense_attention` takes cuDNN's kernels on a GPU."""
    served = dtype == jnp.bfloat16 and head_dim == value_dim and head_dim % 8 == 0 and head_dim <= 128
    return served and not packed and not deterministic


def dense_attention(query, key, value, *, segment_start=None, deterministic=False):
    """Causal softmax attention over the whole document: time quadratic in T.

    On a GPU, cuDNN serves bfloat16 rows of one document, and the window kernels, with a window as long as the row, all
    others (cuDNN takes no document boundaries here): memory is linear in T. Elsewhere XLA with a mask: quadratic.
    Compiled ahead of time on a machine without cuDNN, the window kernels take its place.
    cuDNN's backward pass adds the query's gradient with atomics, in an order that differs from run to run.

    Args:
      query: [B, T, N, H].
      key: [B, T, K, H].
      value: [B, T, K, V].
      segment_start: int [B, T] or None. A token whose document begins after it sees nothing; its output is 0.
      deterministic: the window kernels serve in cuDNN's place.

    Returns:
      [B, T, N, V] in query's dtype.
    """
    length, head_dim, value_dim = query.shape[1], query.shape[-1], value.shape[-1]
    target, asked = current_target(), {"packed": segment_start is not None, "deterministic": deterministic}
    if target.is_gpu and cudnn_serves(query.dtype, head_dim, value_dim, **asked):
        if not target.ahead_of_time or has_cudnn():
            return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")
    if target.is_gpu:
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
    if segment_start is not None:  # XLA gives a token that sees nothing the mean of all values
        out = jnp.where((segment_start <= jnp.arange(length))[..., None, None], out, 0)
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
        query, key, value = project(x, self.w_in, self.b_in, config, self.widths)
        query, key = split_heads(query, config.num_heads), split_heads(key, config.num_kv_heads)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        turn = functools.partial(config.rope, positions=positions, length=length)
        return turn(query), turn(key), split_heads(value, config.num_kv_heads)

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
        check_input(x, segment_start, self.config)
        arrays = (segment_start, *self.project(x, row_positions(x, positions), x.shape[1]))
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
            zero = jnp.zeros(query.shape[:2], jnp.int32)
            segment_start = zero if segment_start is None else checks.clip_segments(segment_start)
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
