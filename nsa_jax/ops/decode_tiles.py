"""How a step of decoding is divided among programs: for attention, and for products with a layer's weights."""

from __future__ import annotations

import dataclasses

from nsa_jax.ops.blocks import NSAConfig
from nsa_jax.ops.target import Target


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Tiles and splits of decoding.

    Attributes:
      keys: keys per step of the loops over compressed and listed blocks (dense decoding: over all keys).
      compressed_parts: programs that share the compressed blocks of one (token, key/value head).
      selected_parts: programs that share its listed blocks.
      num_warps: warps of these kernels, and of the one that serves a pair.
      num_stages: software pipeline depth of their loops.
      window_parts: programs that share its window.
      window_keys: keys per step of their loop.
      columns: compressed blocks whose scores are read at a time.
      rank_warps: warps of the kernel that makes the list and reads its blocks, and of the one that only reads scores.
      chunks: scores of more chunks than these are read by a kernel of their own.
      pair_parts: programs that share the listed blocks of one (token, key/value head), where one kernel serves pairs.
      pair_window_parts: programs that share its window, where pair_parts are several.
      pair_keys: keys per step of its loops.
      pair_tiles: tiles of compressed blocks whose probabilities it makes at a time, for long rows; 0: the scores of
        all of them stay in registers.
      pair_stages: software pipeline depth of its loops.
    """

    keys: int
    compressed_parts: int
    selected_parts: int
    num_warps: int
    num_stages: int
    window_parts: int
    window_keys: int
    columns: int
    rank_warps: int
    chunks: int = 1
    pair_parts: int = 1
    pair_window_parts: int = 1
    pair_keys: int = 64
    pair_tiles: int = 0
    pair_stages: int = 3


# Programs of the attention kernels: as many as an H200 holds at once, two per multiprocessor, so that none waits for
# a second round.
_DECODE_PROGRAMS = 256

# Two kernels read all selection blocks before the lists are known if keys, values and partial results of all rows and
# key/value heads have at most so many bytes.
DECODE_READ_BYTES = 20 * 2**20

# If the batch has at most so many bytes, rows of twice as many blocks are read whole, too. If it has more, half of
# DECODE_PAIRS are enough for the kernel of pairs (`few_rows` in decode_many_rows.json).
DECODE_READ_FREELY = 6 * 2**20

# From so many (query token, key/value head) pairs on, one kernel serves pairs with few blocks. With few pairs it is
# slower than two (decode_many_rows.json).
DECODE_PAIRS = 16


# Where a row can have at most this many compressed blocks, their scores stay in the registers of one or two kernels.
DECODE_FEW_COMPRESSED = 256

# From so many pairs on, one kernel serves long rows too: a program for each pair is enough to read at full speed.
DECODE_LONG_PAIRS = 96


def decode_config(pairs: int, num_cmp: int, config: NSAConfig, row_bytes: int) -> DecodeConfig:
    """Picks how a decode step is split.

    Programs are as many as an H200 holds at once. The compressed blocks are cut into at most half as many parts as
    there are tiles, but up to 32, because summing many parts costs more than it saves. The window has at most
    half as many programs as an H200 holds.

    From 128 pairs on, the window's keys are read in larger steps. Where one kernel serves a pair, two to eight programs
    share the listed blocks of up to 127 pairs of short rows, and a tile of keys and values has 32 KiB: 128 keys at head
    dim 64. In long rows, where four tiles are on their way, each pair has one program. What was measured is in
    decode_many_rows.json and decode_long_rows.json.

    Args:
      pairs: (query token, key/value head) pairs in the batch.
      num_cmp: compressed blocks that the cache can hold.
      config: block geometry.
      row_bytes: bytes of one key and one value.
    """
    keys = 64 if row_bytes <= 512 else 32
    wanted = max(1, -(-_DECODE_PROGRAMS // pairs))
    tiles, long = -(-num_cmp // keys), num_cmp > DECODE_FEW_COMPRESSED
    most = 4 if pairs >= DECODE_PAIRS else 8
    pair_parts = 1 if long or pairs >= 128 else min(most, max(2, _DECODE_PROGRAMS // 2 // pairs))
    return DecodeConfig(
        keys=keys,
        compressed_parts=min(wanted, tiles, max(32, -(-tiles // 2))),
        selected_parts=min(wanted, config.num_selected),
        num_warps=4,
        num_stages=3,
        window_parts=min(max(1, wanted // 2), -(-config.window // keys)),
        window_keys=64 if pairs >= 128 and row_bytes <= 512 else 32,
        columns=2048,
        rank_warps=8,
        pair_parts=pair_parts,
        pair_window_parts=1,
        pair_keys=max(32, min(128, 1 << (32_768 // row_bytes).bit_length() - 1)),
        pair_tiles=16 if long else 0,
        pair_stages=4 if long else 3,
    )


def decode_kernel(
    pairs: int, num_blocks: int, num_cmp: int, read: int, config: NSAConfig, pair_fits: bool, long_pair_fits: bool
) -> tuple[str, str]:
    """The kernel of a decode step, "pair", "short" or "step" (files of ops/kernels/decode), and why it is that one.

    Args:
      pairs, num_cmp, config: those of `decode_config`.
      num_blocks: selection blocks that a row can have.
      read: bytes of all blocks of the batch, with what is stored of each.
      pair_fits, long_pair_fits: whether the GPU has room for a program that serves a pair with few blocks, or with
        any number of them.
    """
    freely = read <= min(DECODE_READ_FREELY, DECODE_READ_BYTES)
    few = num_blocks <= 4 * config.num_selected and num_cmp <= DECODE_FEW_COMPRESSED
    twice_as_many = num_blocks <= 8 * config.num_selected and num_cmp <= 2 * DECODE_FEW_COMPRESSED
    enough = DECODE_PAIRS // (1 if freely else 2) if few else DECODE_LONG_PAIRS
    if pairs >= enough and (pair_fits if few else long_pair_fits):
        return "pair", "many rows: one program makes the list and reads its blocks"
    if (twice_as_many and freely) or (few and read <= DECODE_READ_BYTES):
        return "short", "few blocks: reading all takes less time than waiting for the list"
    return "step", "any GPU from sm80 on"


@dataclasses.dataclass(frozen=True)
class ProductConfig:
    """Tiles of the product of few rows with weights.

    Attributes:
      columns: columns of the product that one program computes; with SwiGLU, of each half.
      inner: numbers of the inner dimension in a step of its loop.
      parts: programs that share the inner dimension of a tile of columns.
      num_warps, num_stages: of the program, and the software pipeline depth of its loop.
    """

    columns: int
    inner: int
    parts: int = 1
    num_warps: int = 4
    num_stages: int = 6


# Products of up to so many rows have kernels of their own; with more, multiplying takes longer than reading weights.
PRODUCT_ROWS = 64


def product_config(rows: int, inner: int, width: int, *, gated: bool, in_parts: bool, target: Target) -> ProductConfig:
    """Picks how the product of few rows with weights is divided (decode_products.json).

    Programs have the widest tiles of columns of which there are still 64. Where the product may be in parts, 24 tiles
    are enough, and up to four programs share each, 128 altogether.

    Args:
      rows, inner, width: sizes of the product; the width is that of one half with SwiGLU.
      gated: SwiGLU.
      in_parts: whether what follows adds up parts of the inner dimension.
      target: the device.
    """
    least = 24 if in_parts else 64
    columns = next((c for c in (64, 32) if width // c >= least), 16)
    held = max(16, 1 << (rows - 1).bit_length()) + columns * (1 + gated)  # rows and columns of a stage
    room = (target.shared_memory - 8192) // (2 * held)
    step = 128 if inner % 128 == 0 and room >= 3 * 128 else 64
    parts, steps = 1, inner // step
    if in_parts:
        parts = min(4, max(1, 128 // -(-width // columns)), steps)
        parts = -(-steps // -(-steps // parts))  # none without a step
    return ProductConfig(columns, step, parts, num_stages=min(6, room // step, 512 // (columns * (1 + gated))))
