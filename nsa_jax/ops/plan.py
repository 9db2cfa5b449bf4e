"""Every choice of kernel and of its tiles, as a pure function from a problem to a plan.

`plan_nsa` plans the whole operator, the other `plan_` functions one stage each. Kernels take their part of a plan and
never ask what device they are traced for; forward and backward cannot disagree, because both are in one plan. The rules
by which tile sizes follow from shapes are in `tiles`. `explain` shows a plan as a table.

A kernel's name is its module in `nsa_jax.ops.kernels`.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from nsa_jax.ops import blocks, decode_tiles, selected_tiles, tiles
from nsa_jax.ops.blocks import NSAConfig
from nsa_jax.ops.choices import (
    Choice,
    NSAPlan,
    RangePlan,
    SelectedBackwardPlan,
    SelectedForwardPlan,
    SelectedPlan,
    SelectionPlan,
    Shape,
)
from nsa_jax.ops.target import Target
from nsa_jax.ops.tiles import DIRECT_GROUPS, ROWS

HEAD_DIMS = (16, 32, 64, 128, 192)
SM80_HEAD_DIMS = (64, 128)
SM90_HEAD_DIMS = (64, 128, 192)
MAX_GROUP = 64
MAX_SELECTION_BLOCKS = 32_768  # top-n keeps a row of scores in registers


def unsupported(op: str, shape: Shape, target: Target, *, select_block: int | None = None) -> str | None:
    """Why the GPU kernels cannot serve an op, or None if they can.

    Args:
      op: the public op's name.
      shape: its sizes.
      target: the device.
      select_block: l', where the op ranks selection blocks of `shape.num_keys` keys.
    """
    if target.is_gpu and (target.compute_capability or (0, 0)) < (8, 0):
        return f"compute capability {target.compute_capability}: the kernels need 8.0 (A100) or later"
    for name, dim in (("query", shape.head_dim), ("value", shape.value_dim)):
        if dim not in HEAD_DIMS:
            return f"{name} has head dim {dim}: the kernels support {HEAD_DIMS}"
    if shape.group > MAX_GROUP:
        return f"{shape.group} query heads per key/value head: the kernels support at most {MAX_GROUP}"
    if op == "select_blocks" and select_block is not None:
        count = blocks.num_selection_blocks(shape.num_keys, select_block)
        if count > MAX_SELECTION_BLOCKS:
            return f"{count} selection blocks: the kernels support at most {MAX_SELECTION_BLOCKS}"
    rows = shape.batch * max(shape.num_queries * shape.num_heads, shape.num_keys * shape.kv_heads)
    if rows >= 2**31:
        return f"{rows} rows of queries or keys (B*T*N or B*S*K): the kernels index them with 32 bits"
    return None


def sm90_obstacle(shape: Shape, target: Target, span: int | None = None) -> str | None:
    """Why Hopper's kernels of range attention do not serve, or None if they do; `span` as in `plan_range`.

    TMA fetches some groups of heads as they lie, see `tiles.lies_as_read`. Others need rearranged copies, unless all
    heads are one group, and short ranges do not repay a copy.
    """
    if not target.is_hopper:
        return "the GPU has no wgmma and TMA (sm90)"
    if not shape.is_bfloat16:
        return f"sm90 kernels take bfloat16, not {shape.dtype}"
    if shape.head_dim not in SM90_HEAD_DIMS or shape.value_dim not in SM90_HEAD_DIMS:
        return f"sm90 kernels take head dims {SM90_HEAD_DIMS}, not {shape.head_dim} and {shape.value_dim}"
    # A grid's slow axis has 2^16 - 1 programs, of up to 8 tiles of at least 128 rows, or of at least 128 keys.
    if max(-(-shape.num_queries * shape.group // 1024), -(-shape.num_keys // 128)) >= 2**16:
        return "the grids of the sm90 kernels have no room for so many rows"
    if span is None or span > 1024 or shape.kv_heads == 1 or shape.lies_as_read:
        return None
    return f"groups of {shape.group} heads need rearranged copies, which ranges of {span} keys do not repay"


def sm80_obstacle(shape: Shape, target: Target) -> str | None:
    """Why range attention's sm80 kernels do not serve, or None if they do.

    Never ahead of time: JAX takes a GPU that is not here for a Hopper GPU, and Mosaic GPU compiles all of a process's
    kernels for the first GPU that it met. Other GPUs with mma.sync have shared memory for one program at a time.
    """
    if not target.is_gpu or target.compute_capability != (8, 0):
        return "the sm80 kernels are for compute capability 8.0 (A100)"
    if jax.__version_info__ < (0, 11):
        return f"JAX {jax.__version__} has no mma.sync in Mosaic GPU, 0.11 and later have"
    if target.ahead_of_time:
        return "the sm80 kernels are not compiled for a GPU that is not here"
    if not shape.is_bfloat16:
        return f"the sm80 kernels take bfloat16, not {shape.dtype}"
    if shape.head_dim != shape.value_dim or shape.head_dim not in SM80_HEAD_DIMS:
        return f"the sm80 kernels take equal head dims {SM80_HEAD_DIMS}, not {shape.head_dim} and {shape.value_dim}"
    # Pieces of 16 bytes of queries and words of two key gradients have 32-bit indices; a grid has so many tiles.
    indices = max(shape.num_queries * shape.num_heads * 16, shape.num_keys * shape.kv_heads * 64) * shape.batch
    key_blocks = -(-shape.num_keys // ROWS)
    query_tiles = -(-shape.num_queries * shape.group // tiles.ranged_sm80_forward_config().rows)
    if indices >= 2**32 or max(key_blocks, query_tiles) >= 2**16:
        return "the sm80 kernels do not index so many rows"
    return None


def moves_heads_to_batch(shape: Shape, target: Target) -> bool:
    """Whether the whole operator makes key/value heads batch entries, so that all branches share the copies."""
    return sm90_obstacle(shape, target) is None and not shape.lies_as_read


def cuts_projection(shape: Shape, target: Target) -> bool:
    """Whether kernels cut a layer's fused projection by key/value head, see `layer.projection`.

    They rotate query and keys and add up their gradients on the way, and key/value heads become batch entries for free.
    Small groups, whose heads no kernel wants rearranged, gain from the former.
    """
    return sm90_obstacle(shape, target) is None and (shape.group < 8 or shape.group not in DIRECT_GROUPS)


def plan_range(shape: Shape, target: Target, *, span: int | None = None, cudnn: bool = False) -> RangePlan:
    """Plans attention in which every query sees one contiguous range of keys.

    Args:
      shape: sizes.
      target: the device.
      span: the most keys that a query sees, where that is known.
      cudnn: the ranges are a causal window in whole rows of one document, and cuDNN is there.
    """
    dims = shape.head_dim, shape.value_dim, span, shape.num_keys
    obstacle = sm90_obstacle(shape, target, span)
    if obstacle is None:
        reason = "sm90, bfloat16, head dims of 64 to 192"
        return RangePlan(
            *(
                Choice(f"range_attention.{kernel}", rule(*dims), reason, f"range_attention.{otherwise}")
                for kernel, rule, otherwise in (
                    ("sm90_forward", tiles.ranged_hopper_config, "triton_forward"),
                    ("sm90_grad_query", tiles.ranged_hopper_dq_config, "triton_backward"),
                    ("sm90_grad_key_value", tiles.ranged_hopper_dkv_config, "triton_backward"),
                )
            )
        )
    sm80 = sm80_obstacle(shape, target)
    if sm80 is None:
        chosen = _sm80_range()
    else:
        chosen = _triton_range(shape, target, span, f"{obstacle}; {sm80}")
    if cudnn and cudnn_serves_window(shape, target):
        reason = f"a window of whole rows, bfloat16, H = V <= 128; {obstacle}"
        forward = Choice("range_attention.window_cudnn", None, reason, chosen.forward.kernel)
        return dataclasses.replace(chosen, forward=forward)
    return chosen


def _sm80_range() -> RangePlan:
    reason = "sm80, bfloat16, H = V of 64 or 128, JAX 0.11 or later"
    return RangePlan(
        *(
            Choice(f"range_attention.sm80_{kernel}", record, reason, f"range_attention.{otherwise}")
            for kernel, record, otherwise in (
                ("forward", tiles.ranged_sm80_forward_config(), "triton_forward"),
                ("grad_query", tiles.ranged_sm80_dq_config(), "triton_backward"),
                ("grad_key_value", tiles.ranged_sm80_dkv_config(), "triton_backward"),
            )
        )
    )


def _triton_range(shape: Shape, target: Target, span: int | None, reason: str) -> RangePlan:
    dims = shape.head_dim, shape.value_dim, shape.dtype, target
    return RangePlan(
        Choice("range_attention.triton_forward", tiles.ranged_forward_config(*dims), reason),
        Choice("range_attention.triton_backward", tiles.ranged_dq_config(*dims, span), reason),
        Choice("range_attention.triton_backward", tiles.ranged_dkv_config(*dims, span), reason),
    )


def cudnn_serves_window(shape: Shape, target: Target) -> bool:
    """Whether cuDNN's forward serves a window in whole rows of one document.

    Never ahead of time: compiling for a GPU that is not here has no cuDNN to ask for its plan.
    """
    return (
        target.is_gpu
        and not target.ahead_of_time
        and shape.is_bfloat16
        and shape.head_dim == shape.value_dim <= 128
        and shape.num_queries == shape.num_keys > 1
    )


def plan_selection(shape: Shape, config: NSAConfig, target: Target) -> SelectionPlan:
    """Plans the scores and the top n; `shape.num_keys` is C, the number of compressed keys."""
    members = 1 << (config.select_block // config.compress_stride - 1).bit_length()  # of a block, to a power of two
    obstacle = _sm90_scores_obstacle(shape, members, target)
    hopper = shape.num_keys > 0 and obstacle is None
    record = tiles.select_config(shape.num_queries, members, shape.dtype, target, hopper)
    if hopper:
        reason = "sm90, bfloat16, enough compressed keys for its warpgroups"
        scores = Choice("selection.scores_sm90", record, reason, "selection.scores_triton")
    else:
        scores = Choice("selection.scores_triton", record, obstacle or "")
    top_n = Choice("selection.top_n", None, "bisection on the scores' bits; widths follow the number of blocks")
    return SelectionPlan(scores if shape.num_keys else None, top_n, record)


def _sm90_scores_obstacle(shape: Shape, members: int, target: Target) -> str | None:
    if not target.is_hopper:
        return "the GPU has no wgmma and TMA (sm90)"
    if not shape.is_bfloat16:
        return f"the sm90 kernel takes bfloat16, not {shape.dtype}"
    if tiles.SCORE_KEYS // members < 8:
        return f"selection blocks of {members} compressed blocks are more than its tiles can fold"
    if shape.head_dim in (128, 192):
        return None
    if shape.head_dim != 64:
        return f"the sm90 kernel takes head dims {SM90_HEAD_DIMS}, not {shape.head_dim}"
    if shape.num_keys <= 3 * tiles.SCORE_KEYS:
        return f"{shape.num_keys} compressed keys do not fill three warpgroups of {tiles.SCORE_KEYS}"
    return None


def reads_whole_rows(shape: Shape, target: Target, select_block: int, num_selected: int) -> bool:
    """Whether lists hold so many of all blocks that causal attention under a mask of blocks is faster."""
    num_blocks = blocks.num_selection_blocks(shape.num_keys, select_block)
    return (
        select_block == ROWS
        and num_blocks <= min(selected_tiles.MASKED_BLOCKS_PER_SLOT * num_selected, selected_tiles.MOST_MASKED_BLOCKS)
        and shape.num_queries > 1
        and sm90_obstacle(shape, target) is None
    )


def joins_window(shape: Shape, target: Target, config: NSAConfig) -> bool:
    """Whether the window is a part of the selected branch's kernels, where they share keys and values."""
    narrow = max(shape.head_dim, shape.value_dim) <= 128  # heads of 192 leave no shared memory
    return narrow and reads_whole_rows(shape, target, config.select_block, config.num_selected)


def _whole_row_reason(num_selected: int) -> str:
    blocks_per_slot = selected_tiles.MASKED_BLOCKS_PER_SLOT
    return f"at most {blocks_per_slot} blocks in a row for each of {num_selected} list entries; sm90"


def plan_selected(shape: Shape, target: Target, *, select_block: int, num_selected: int) -> SelectedPlan:
    """Plans the selected branch.

    Args:
      shape: sizes.
      target: the device.
      select_block: l'.
      num_selected: n, entries of a list.
    """
    return SelectedPlan(
        plan_selected_forward(shape, target, select_block=select_block, num_selected=num_selected),
        plan_selected_backward(shape, target, select_block=select_block, num_selected=num_selected),
    )


def plan_selected_forward(
    shape: Shape,
    target: Target,
    *,
    select_block: int,
    num_selected: int,
    lists: selected_tiles.SelectedConfig | None = None,
) -> SelectedForwardPlan:
    """Plans the forward pass; given `lists`, these tiles are used and the rows are not read whole."""
    dims, triton, by_token = (shape.head_dim, shape.value_dim), "selected.neighbours_triton", "selected.by_token_triton"
    if lists is None and reads_whole_rows(shape, target, select_block, num_selected):
        record, reason = selected_tiles.selected_masked_config(*dims), _whole_row_reason(num_selected)
        return SelectedForwardPlan(None, Choice("selected.whole_row_sm90", record, reason, triton), None)
    if lists is None:
        lists = selected_tiles.selected_config(shape.group, *dims, select_block, shape.dtype, target)
        tile = min(2 * ROWS // shape.group, 32)
        fits = max(dims) <= 128 and _range_kernel_fits(shape, target, select_block, tile)
        if fits and not lists.key_major:  # its kernel reads the other blocks once for the tile as well
            lists = dataclasses.replace(lists, share=tile // 2 + 1)
        elif fits and dims == (128, 128):  # faster than Triton serves its own tiles of 64 rows
            lists = dataclasses.replace(lists, tile=tile, share=tile // 2)
    if lists.tile == 1 or shape.num_queries == 1:
        reason = f"{shape.dtype}: tiles of neighbours do not fit" if lists.tile == 1 else "one query"
        return SelectedForwardPlan(None, Choice(by_token, lists, reason), lists)
    fits = _range_kernel_fits(shape, target, select_block, lists.tile)
    if fits and not lists.key_major and max(dims) <= 128:
        reason = f"what {lists.share} of {lists.tile} neighbours list and then the rest; sm90, {shape.group} heads"
        both = Choice("selected.by_token_sm90", selected_tiles.selected_token_config(*dims), reason, by_token)
        return SelectedForwardPlan(both, both, lists)
    shared = f"blocks that {lists.share} of {lists.tile} neighbouring tokens list"
    if fits:
        record = selected_tiles.selected_hopper_config(*dims)
        neighbours = Choice("range_attention.sm90_forward", record, f"{shared}; sm90", triton)
    elif lists.key_major and _sm90_tiles_fit(shape, target, select_block, lists.tile):
        count = shape.batch * shape.kv_heads * -(-shape.num_queries // lists.tile)
        tile_record = selected_tiles.selected_hopper_tiles_config(count, shape.head_dim)
        reason = f"{shared}; sm90, small groups of heads of 64 or 128"
        neighbours = Choice("selected.neighbours_sm90", tile_record, reason, triton)
    else:
        neighbours = Choice(triton, lists, f"{shared}; {_no_sm90_lists(shape, target, select_block)}")
    if not lists.key_major:
        rest = Choice(by_token, lists, f"what is left of the lists; groups of {shape.group} heads")
    elif (obstacle := _gather_obstacle(shape, target, select_block, num_selected)) is None:
        reason = f"small groups are served by key block; sm90, groups of {shape.group} heads of {shape.head_dim}"
        gather = selected_tiles.selected_gather_config(shape.group, *dims)
        rest = Choice("selected.by_block_sm90", gather, reason, "selected.by_block_triton")
    else:
        rest = Choice("selected.by_block_triton", lists, f"small groups are served by key block; {obstacle}")
    return SelectedForwardPlan(neighbours, rest, lists)


def _range_kernel_fits(shape: Shape, target: Target, select_block: int, tile: int) -> bool:
    """Whether Hopper's kernel of range attention serves what tiles of `tile` tokens share."""
    fits = shape.group in DIRECT_GROUPS and select_block == ROWS and tile * shape.group == 2 * ROWS
    return fits and sm90_obstacle(shape, target) is None


def _sm90_tiles_fit(shape: Shape, target: Target, select_block: int, tile: int) -> bool:
    narrow = shape.head_dim == shape.value_dim and shape.head_dim in (64, 128) and select_block == ROWS
    grouped = (2 if shape.head_dim == 128 else 4) <= shape.group <= 7 and tile * shape.group <= ROWS
    return target.is_hopper and shape.is_bfloat16 and narrow and grouped and shape.num_queries >= tile


def _gather_obstacle(shape: Shape, target: Target, select_block: int, num_selected: int) -> str | None:
    """Why the sm90 kernels that gather rows themselves do not serve."""
    dims = shape.head_dim, shape.value_dim
    entries = shape.num_queries * shape.kv_heads * num_selected
    rows = max(shape.num_queries * shape.num_heads, shape.num_keys * shape.kv_heads, entries) * shape.batch
    fits = all(dim in (64, 128) for dim in dims) and select_block == ROWS and rows < 2**31
    return None if target.is_hopper and shape.is_bfloat16 and fits else _no_sm90_lists(shape, target, select_block)


def _no_sm90_lists(shape: Shape, target: Target, select_block: int) -> str:
    """Why no sm90 kernel serves lists of blocks."""
    if obstacle := sm90_obstacle(shape, target):
        return obstacle
    dims = f"head dims {shape.head_dim} and {shape.value_dim}"
    return f"no sm90 kernel for {shape.group} heads per group, {dims}, blocks of {select_block}"


def plan_selected_backward(
    shape: Shape,
    target: Target,
    *,
    select_block: int,
    num_selected: int,
    lists: selected_tiles.SelectedBackwardConfig | None = None,
) -> SelectedBackwardPlan:
    """Plans the backward pass; given `lists`, these tiles are used and the rows are not read whole."""
    dims = shape.head_dim, shape.value_dim
    if lists is None and reads_whole_rows(shape, target, select_block, num_selected):
        reason = _whole_row_reason(num_selected)
        by_block_tiles = tiles.ranged_hopper_dkv_config(*dims, None, shape.num_keys)
        query_tiles = tiles.ranged_hopper_dq_config(*dims, ROWS, shape.num_keys)
        kernel = "selected.whole_row_sm90"
        return SelectedBackwardPlan(Choice(kernel, by_block_tiles, reason), Choice(kernel, query_tiles, reason), None)
    if lists is None:
        count = shape.batch * shape.kv_heads * blocks.num_selection_blocks(shape.num_keys, select_block)
        lists = selected_tiles.selected_backward_config(shape.group, *dims, shape.dtype, select_block, count, target)
    triton = "selected.grad_by_block_triton"
    if lists.keep_scores:
        narrow = all(dim in (64, 128) for dim in dims)
        serves = target.is_hopper and shape.is_bfloat16 and narrow and select_block == ROWS
        if serves and shape.group >= 8 and shape.group in DIRECT_GROUPS:
            by_block = Choice("selected.grad_scores_sm90", lists, "keeps score gradients (G >= 8); sm90", triton)
        else:
            why = _no_sm90_lists(shape, target, select_block)
            by_block = Choice(triton, lists, f"keeps score gradients (G >= 8, or blocks are divided); {why}")
        grad_query = Choice("selected.grad_query", lists, "score gradients times the listed keys")
    else:
        obstacle = _gather_obstacle(shape, target, select_block, num_selected)
        if obstacle is None:
            reason = f"keeps partial sums of dq; sm90, groups of {shape.group} heads of {shape.head_dim}"
            by_block = Choice("selected.grad_partials_sm90", lists, reason, triton)
        else:
            by_block = Choice(triton, lists, f"keeps partial sums of dq; {obstacle}")
        grad_query = Choice("selected.grad_reduce_triton", lists, "adds a query's partial sums in its list's order")
    return SelectedBackwardPlan(by_block, grad_query, lists)


def plan_nsa(
    shape: Shape,
    config: NSAConfig,
    target: Target,
    *,
    num_compressed: int,
    window_keys: int | None = None,
    cudnn: bool = False,
    by_kv_head: bool = False,
    shared_window: bool = False,
) -> NSAPlan:
    """Plans the whole operator.

    Args:
      shape: sizes of the query and of the selected branch's keys and values.
      config: block geometry.
      target: the device.
      num_compressed: C.
      window_keys: keys of the window branch; None means as many as the selected branch has.
      cudnn: rows are whole and hold one document each, and cuDNN is there.
      by_kv_head: the arrays' key/value heads are batch entries already.
      shared_window: the window's keys and values are those of the selected branch, and no gate is negative.
    """
    moved = None
    if not by_kv_head and shape.kv_heads > 1 and moves_heads_to_batch(shape, target):
        reason = f"sm90 kernels want the {shape.group} heads of a group in a row; all branches share the copies"
        moved = Choice("layer.nsa", None, reason)
        shape = shape.heads_to_batch()
    window = shape.with_keys(shape.num_keys if window_keys is None else window_keys)
    compressed = shape.with_keys(num_compressed)
    selected = plan_selected(shape, target, select_block=config.select_block, num_selected=config.num_selected)
    window_plan = plan_range(window, target, span=config.window, cudnn=cudnn)
    if shared_window and joins_window(shape, target, config):
        reason = "with the selected branch, whose keys and values are the same: the products are shared"
        passes = window_plan.forward, window_plan.grad_query, window_plan.grad_key_value
        window_plan = RangePlan(*(Choice(selected.forward.rest.kernel, None, reason, x.kernel) for x in passes))
        selected = selected.with_window(shape)
    return NSAPlan(
        shape=shape,
        heads_to_batch=moved,
        compressed=plan_range(compressed, target) if num_compressed else None,
        selection=plan_selection(compressed, config, target),
        selected=selected,
        window=window_plan,
    )


def plan_decode(shape: Shape, num_split: int, config: NSAConfig, target: Target) -> Choice:
    """Plans one step of decoding: how the keys of a row are divided among programs.

    Args:
      shape: sizes of the new queries and of the cache.
      num_split: compressed blocks that the cache can hold; for dense attention, its tokens.
      config, target: block geometry and device.
    """
    row_bytes = (shape.head_dim + shape.value_dim) * jnp.dtype(shape.dtype).itemsize
    pairs = shape.batch * shape.num_queries * shape.kv_heads
    split = decode_tiles.decode_config(pairs, num_split, config, row_bytes)
    num_blocks = shape.num_keys // config.select_block
    read = num_blocks * pairs * (config.select_block * row_bytes + 4 * shape.group * shape.value_dim)
    fits = row_bytes <= 1024 and shape.group <= 16  # registers
    fits_long = fits and not target.is_small  # shared memory
    kernel, reason = decode_tiles.decode_kernel(pairs, num_blocks, num_split, read, config, fits, fits_long)
    return Choice(f"decode.{kernel}", split, reason)
