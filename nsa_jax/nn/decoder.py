"""`Decoder`: a Transformer made ready to generate, with prefill in chunks and one compiled step per token."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nsa_jax.nn import few_rows
from nsa_jax.nn.cache import Cache, capacity_bucket, init_cache, prefill_attention, step_attention
from nsa_jax.nn.layers import RMSNorm, lookup, soft_cap
from nsa_jax.nn.projection import WIDTH_MULTIPLE
from nsa_jax.nn.transformer import Block, Transformer, layer_stacks
from nsa_jax.ops import checks
from nsa_jax.ops.target import current_target, has_explicit_axes

# Parameters that are used in float32; all others are used in the compute dtype.
_WIDE = ("scale", "gate_bias")


class Decoder:
    """Runs a Transformer token by token.

    The stacked layers are cut apart and cast to the compute dtype once: a step then reads each weight in place.
    Functions are compiled for a batch size and a cache capacity, not for lengths.

    Attributes:
      config: the model's.
      params: arrays to pass to the methods' functional counterparts; a plain pytree.
    """

    def __init__(self, model: Transformer, *, chunk: int = 2048):
        """Prepares a model.

        Args:
          model: its parameters are read, not kept.
          chunk: tokens of a prompt that are processed at once; bounds the memory of prefill.
        """
        self.config = config = model.config
        block = config.nsa.select_block
        self.chunk = max(checks.positive("chunk", chunk) // block, 1) * block
        self._graphdefs, stacks = zip(*map(nnx.split, layer_stacks(model.blocks, config)), strict=True)
        self._norm, norm = nnx.split(model.norm)
        self._layer_trees = [jax.tree.structure(stacked) for stacked in stacks]
        self._norm_tree = jax.tree.structure(norm)

        def ready(path, leaf):
            names = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
            if any(name in _WIDE for name in names):
                return leaf
            leaf = leaf.astype(config.dtype)
            # The layer pads its projection to a width that suits the matrix product: once, here, instead of each step.
            padding = -leaf.shape[-1] % WIDTH_MULTIPLE if "attention" in names and "w_in" in names else 0
            return jnp.pad(leaf, ((0, 0), (0, padding))) if padding else leaf

        def layer(index):
            row, position = divmod(index, len(stacks))
            cut = jax.tree_util.tree_map_with_path(lambda path, leaf: ready(path, leaf[row]), stacks[position])
            return tuple(jax.tree.leaves(cut))

        # Tuples of arrays: every step looks through them, which took 0.34 ms for 12 layers as Flax's states and takes
        # 0.02 so, and a step of a small model takes the GPU half a millisecond.
        self.params: dict[str, Any] = {
            "embedding": model.embedding[...].astype(config.dtype),
            "layers": tuple(layer(index) for index in range(config.num_layers)),
            "norm": tuple(jax.tree.leaves(norm)),
        }
        if not config.tie_embeddings:
            self.params["head"] = model.head[...].astype(config.dtype)
        self._prefill_chunk: Any = jax.jit(self.prefill_chunk, donate_argnums=1)
        self._step: Any = jax.jit(self.step, donate_argnums=1)
        self._pick = jax.jit(self._last_logits)

    def _blocks(self, params):
        for index, leaves in enumerate(params["layers"]):
            position = index % len(self._graphdefs)
            tree = jax.tree.unflatten(self._layer_trees[position], leaves)
            block: Block = nnx.merge(self._graphdefs[position], tree)
            yield block

    def _last_norm(self, params) -> RMSNorm:
        norm: RMSNorm = nnx.merge(self._norm, jax.tree.unflatten(self._norm_tree, params["norm"]))
        return norm

    def logits(self, params, hidden: jax.Array) -> jax.Array:
        """float32 logits [..., vocab] of hidden activations [..., D]."""
        weight, equation = (
            (params["head"], "...d,dv->...v") if "head" in params else (params["embedding"], "...d,vd->...v")
        )
        logits = jnp.einsum(equation, hidden, weight, preferred_element_type=jnp.float32)
        return soft_cap(logits, self.config.logit_soft_cap)

    def prefill_chunk(self, params, cache: Cache, tokens, offset, lengths, segment_start=None):
        """One chunk of every row's prompt; see `prefill`.

        Args:
          params: `self.params`.
          cache: holds the tokens before the chunk.
          tokens: int32 [B, T], T a multiple of `select_block`.
          offset: int32 scalar, position of the first of them, a multiple of `select_block`.
          lengths: int32 [B], length of each row's whole prompt.
          segment_start: int32 [B, T] or None.

        Returns:
          Hidden activations [B, T, D] (normed, as the head reads them) and the cache.
        """
        segment_start = checks.clip_segments(segment_start)
        ends = jnp.minimum(lengths, offset + tokens.shape[1])
        x = params["embedding"][tokens]
        layers = []
        for block, layer in zip(self._blocks(params), cache.layers, strict=True):

            def attend(normed, attention=block.attention, layer=layer):
                attended, layer = prefill_attention(attention, normed, layer, offset, segment_start, ends)
                return attention.output(attended), layer

            x, layer = block.forward(x, attend)
            layers.append(layer)
        start = cache.segment_start
        if segment_start is not None:
            last = jnp.clip(lengths - 1 - offset, 0, tokens.shape[1] - 1)[:, None]
            here = (lengths > offset) & (lengths <= offset + tokens.shape[1])
            start = jnp.where(here, jnp.take_along_axis(segment_start, last, axis=1)[:, 0], start)
        return self._last_norm(params)(x), dataclasses.replace(
            cache, layers=tuple(layers), lengths=ends, segment_start=start
        )

    def step(self, params, cache: Cache, tokens, segment_start=None):
        """One more token in every row.

        Args:
          params: `self.params`.
          cache: the tokens so far. A row that is full stays as it is: its token is lost and its logits mean nothing,
            which lets a batch go on after some of its rows have ended.
          tokens: int32 [B], the tokens at positions `cache.lengths`. An id that the model does not have,
            such as -1, has an embedding of zeros, as in the model.
          segment_start: int32 [B] if a token begins another document; None keeps each row's document.

        Returns:
          float32 logits [B, vocab] of the tokens that follow, and the cache.
        """
        start = cache.segment_start
        if segment_start is not None:
            start = jnp.where(cache.lengths < cache.capacity, checks.clip_segments(segment_start), start)
        x, batch = lookup(params["embedding"], tokens, self.config.dtype), len(tokens)
        blocks = list(self._blocks(params))
        by_kernels = all(few_rows.serves(block, batch) for block in blocks)
        if batch == 1 and (by_kernels or current_target().is_gpu):
            # A single row goes through several times: it fills a tile of the kernels for few rows, and XLA computes
            # norms and products of two rows in fewer kernels than those of one.
            x = jax.lax.optimization_barrier(jnp.broadcast_to(x, (few_rows.COPIES if by_kernels else 2, x.shape[1])))
        layers, stream, x = [], few_rows.Stream(x), x[:, None]
        for block, layer in zip(blocks, cache.layers, strict=True):

            def attend(h, attention=block.attention, layer=layer):
                return step_attention(attention, h, layer, cache.lengths, start, cache.capacity)

            def attend_normed(normed, attention=block.attention, attend=attend):
                attended, layer = attend(normed[:batch])
                return attention.output(attended), layer

            if by_kernels:
                stream, layer = few_rows.forward(block, stream, batch, attend)
            else:
                x, layer = block.forward(x, attend_normed)
            layers.append(layer)
        norm = self._last_norm(params)
        hidden = stream.normed(norm)[1] if by_kernels else norm(x)[:, 0]
        logits = self.logits(params, hidden[:batch])
        lengths = jnp.minimum(cache.lengths + 1, cache.capacity)
        return logits, dataclasses.replace(cache, layers=tuple(layers), lengths=lengths, segment_start=start)

    def steps(self, params, cache: Cache, tokens, draw: Callable, held: Any, count: int):
        """`count` steps in a loop on the device, so that a dispatch from Python brings more than one token.

        The number of rounds is fixed: a loop that ends early would wait for the host in every round.

        Args:
          params: `self.params`.
          cache: the tokens so far. Rows that are full stay as they are; see `step`.
          tokens: int32 [B], the tokens at positions `cache.lengths`.
          draw: (index of the step, float32 logits [B, vocab], held) -> (int32 [B], held), the choice of the next token.
          held: what `draw` hands from step to step; a pytree of arrays.
          count: number of steps, at least 1; static.

        Returns:
          The cache, the drawn tokens int32 [count, B], and `held`.
        """

        def one(carry, index):
            cache, tokens, held = carry
            logits, cache = self.step(params, cache, tokens)
            tokens, held = draw(index, logits, held)
            return (cache, tokens, held), tokens

        indices = jnp.arange(count, dtype=jnp.int32)
        (cache, _, held), drawn = jax.lax.scan(one, (cache, tokens, held), indices)
        return cache, drawn, held

    def _last_logits(self, params, hidden, offset, lengths, logits):
        index = lengths - 1 - offset
        last = jnp.take_along_axis(hidden, jnp.clip(index, 0, hidden.shape[1] - 1)[:, None, None], axis=1)[:, 0]
        here = (index >= 0) & (index < hidden.shape[1])
        return jnp.where(here[:, None], self.logits(params, last), logits)

    def init_cache(self, batch: int, tokens: int, *, record_block_indices: bool = False) -> Cache:
        """An empty cache for rows of up to this many tokens, rounded up to a capacity bucket.

        With `record_block_indices`, what follows keeps the block lists of every token; see `Cache.block_indices`.

        Raises:
          ValueError: the mesh in context has explicit axes.
        """
        if has_explicit_axes():
            fix = "make it with axis_types=(AxisType.Auto,) * number of axes"
            raise ValueError(f"the mesh in context has explicit axes, over which the decoder cannot split rows: {fix}")
        capacity = capacity_bucket(tokens, self.config)
        return _compiled_init(self.config, batch, capacity, record_block_indices)

    def prefill(self, cache: Cache, tokens, lengths=None, segment_start=None, on_chunk=None):
        """Fills an empty cache with prompts, chunk by chunk.

        Args:
          cache: from `init_cache`; it is consumed.
          tokens: int [B, T], prompts padded on the right.
          lengths: int [B], tokens of each prompt, at least 1; None means T for all.
          segment_start: int [B, T] or None.
          on_chunk: called with (offset, hidden activations [B, chunk, D]) of every chunk.

        Returns:
          float32 logits [B, vocab] of the token that follows each prompt, and the cache.

        Raises:
          ValueError: an argument has the wrong shape or dtype, a prompt is empty or longer than the cache, a token is
            none of the model's, or the cache holds tokens already.
        """
        sizes = {"B": cache.lengths.shape[0]}
        try:
            tokens = np.asarray(tokens)
        except ValueError:  # NumPy's message does not name the argument
            raise ValueError("tokens has rows of different lengths: pad them on the right, and give lengths") from None
        checks.integers("tokens", tokens, "BT", sizes, "the cache")
        batch, length = tokens.shape
        lengths = np.full((batch,), length, np.int32) if lengths is None else np.asarray(lengths)
        checks.integers("lengths", lengths, "B", sizes, "the cache")
        if segment_start is not None:
            segment_start = np.asarray(segment_start)
            checks.segments(segment_start, sizes, "tokens")
            segment_start = np.asarray(checks.clip_segments(segment_start))
        if length < 1 or lengths.min() < 1 or lengths.max() > length:
            raise ValueError(f"lengths={lengths.tolist()}: every prompt must have 1 to {length} tokens")
        if length > cache.capacity:
            raise ValueError(f"tokens has length {length}: the cache holds {cache.capacity} tokens")
        given, last = np.arange(length) < lengths[:, None], self.config.vocab_size - 1
        least, most = tokens[given].min(), tokens[given].max()
        if least < 0 or most > last:
            raise ValueError(f"tokens has ids {least} to {most}: must be 0 to {last}")
        if np.asarray(cache.lengths).any():
            raise ValueError("cache holds tokens already: prefill fills an empty one; give a new one from init_cache")
        lengths, tokens = lengths.astype(np.int32), np.where(given, tokens, 0)
        logits = jnp.zeros((batch, self.config.vocab_size), jnp.float32)
        ends = jnp.asarray(lengths)
        offset, chunk = 0, min(self.chunk, chunk_bucket(length, self.config.nsa.select_block))
        while offset < length:
            size = min(chunk, cache.capacity - offset)
            piece = np.zeros((batch, size), np.int32)
            given = tokens[:, offset : offset + size]
            piece[:, : given.shape[1]] = given
            start = None
            if segment_start is not None:
                start = np.zeros((batch, size), np.int32)
                start[:, : given.shape[1]] = segment_start[:, offset : offset + size]
            at = jnp.int32(offset)
            hidden, cache = self._prefill_chunk(self.params, cache, jnp.asarray(piece), at, ends, start)
            logits = self._pick(self.params, hidden, at, ends, logits)
            if on_chunk is not None:
                on_chunk(offset, hidden)
            offset += size
        return logits, cache

    def decode(self, cache: Cache, tokens, segment_start=None):
        """`step`, compiled; the cache is consumed.

        Raises:
          ValueError: `tokens` or `segment_start` are not integers [B].
        """
        tokens, sizes = jnp.asarray(tokens), {"B": cache.lengths.shape[0]}
        checks.integers("tokens", tokens, "B", sizes, "the cache")
        if segment_start is not None:
            segment_start = segment_start if isinstance(segment_start, jax.Array) else np.asarray(segment_start)
            checks.integers("segment_start", segment_start, "B", sizes, "the cache")
            segment_start = checks.clip_segments(segment_start)
        return self._step(self.params, cache, tokens.astype(jnp.int32), segment_start)

    def compilations(self) -> dict[str, int]:
        """How many programs have been compiled for prefill chunks and for decode steps."""
        return {"prefill": self._prefill_chunk._cache_size(), "step": self._step._cache_size()}


def chunk_bucket(length: int, select_block: int) -> int:
    """The chunk length for a short prompt: a power-of-two number of selection blocks."""
    count = -(-length // select_block)
    return select_block << max(count - 1, 0).bit_length()


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _compiled_init(config, batch: int, capacity: int, record_block_indices: bool) -> Cache:
    return init_cache(config, batch, capacity, record_block_indices=record_block_indices)
