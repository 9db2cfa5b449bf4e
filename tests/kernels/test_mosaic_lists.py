"""Values of the Hopper kernels that choose blocks and visit lists of them, as test_mosaic_interpreted.py."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nsa_jax.config import NSAConfig
from nsa_jax.ops import blocks, pallas, plan, reference, selected_tiles
from nsa_jax.ops import tiles as tuning
from nsa_jax.ops.kernels.selected import attention as selected
from nsa_jax.ops.kernels.selected import by_block_triton, sum_partials_sm90
from nsa_jax.ops.kernels.selected.grad_layout import make_layout
from nsa_jax.ops.target import current_target
from tests.kernels import mosaic_interpreter, test_ranged, test_select
from tests.kernels import test_mosaic_interpreted as interpreted
from tests.kernels import test_selected_backward as selected_cases

pytestmark = interpreted.pytestmark
called = interpreted.called

# The first two values: the most queries of a work item, so that blocks have several, and the kernel.
KEY_MAJOR_CASES = {
    "group_8": (24, "grad_scores_sm90", dict(length=37, num_keys=210, num_heads=8, v_dim=128, offset=150)),
    "group_16_packed": (
        24, "grad_scores_sm90",
        dict(length=33, num_keys=129, num_heads=32, num_kv=2, h_dim=128, packed=True, offset=90),
    ),
    "group_6": (150, "grad_partials_sm90", dict(length=280, num_keys=310, num_heads=6, slots=5, offset=30)),
    "group_6_packed": (
        40, "grad_partials_sm90",
        dict(batch=2, length=57, num_keys=129, num_heads=12, num_kv=2, packed=True, offset=70),
    ),
    # Two ranges of queries for each of two heads; most queries lie behind the last key, which does not end its block.
    "group_6_ranges": (
        25, "grad_partials_sm90",
        dict(length=90, num_keys=100, num_heads=12, num_kv=2, offset=70, queries_at_once=64),
    ),
    "group_1": (30, "grad_partials_sm90", dict(length=61, num_keys=129, num_heads=2, num_kv=2, offset=70)),
    # Two warpgroups with one tile of queries each; the second head dim is narrower.
    "group_4_wide_packed": (
        30, "grad_partials_sm90",
        dict(length=61, num_keys=129, num_heads=8, num_kv=2, h_dim=128, packed=True, offset=70),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KEY_MAJOR_CASES)
def test_selected_backward_by_key_blocks_matches_the_reference(name, monkeypatch):
    """The last tile of a work item is not full."""
    chunk, kernel, case = KEY_MAJOR_CASES[name]
    case = interpreted.SELECTED | case
    at_once = case.pop("queries_at_once", None)
    *inputs, block_indices, d_out, start = selected_cases._inputs(1, dtype=jnp.bfloat16, **case)
    keep_scores = kernel == "grad_scores_sm90"
    config = selected_tiles.SelectedBackwardConfig(64, chunk, 4, 2, keep_scores=keep_scores, tile=2, share=2)
    if at_once:
        config = dataclasses.replace(config, buffer_bytes=at_once * case["slots"] * 6 * 64 * 2)
    layout = make_layout(*inputs, case["slots"], 64, config)
    assert layout.steps == (4 if at_once else 1)
    # What fills up a tile leaves its score gradients or shares of dq in the row behind those of all list entries.
    unread_row = layout.pairs * layout.entries * (1 if keep_scores else layout.group)

    def differentiate(delta, lse):
        return selected_cases._backward(
            *inputs, block_indices, delta, lse, d_out,
            select_block=64, segment_start=start, query_offset=jnp.int32(case["offset"]), config=config,
        )  # fmt: skip

    with mosaic_interpreter.interpret(monkeypatch, unread_row=unread_row) as called:
        interpreted.check_forward_and_backward(
            None, differentiate, (*inputs, d_out), block_indices, start, case["offset"]
        )
    assert called == [kernel]


# The first values: the most list entries of a work item and tokens of a row, so that blocks have several items of
# several tiles each, and the tiles of queries on their way.
GATHER_CASES = {
    # The last queries lie behind the last key.
    "two_heads_offset": (8, 1000, 2, dict(length=90, num_keys=120, num_heads=12, num_kv=2, slots=2, offset=58)),
    "packed": (40, 50, 1, dict(batch=2, length=77, num_keys=161, num_heads=6, packed=True, slots=4, offset=84)),
    "group_4_wide_packed": (
        20, 40, 1, dict(length=61, num_keys=140, num_heads=8, num_kv=2, h_dim=128, v_dim=128, packed=True, offset=70),
    ),
    "group_1": (40, 1000, 2, dict(length=53, num_keys=129, num_heads=2, num_kv=2, slots=3, offset=70)),
    "group_2_wide_values": (40, 1000, 2, dict(length=53, num_keys=129, num_heads=2, v_dim=128, slots=3, offset=70)),
}  # fmt: skip


@pytest.mark.parametrize("name", GATHER_CASES)
def test_selected_attention_by_key_blocks_matches_the_reference(name, called, monkeypatch):
    """Rows of an item do not fill its last tile; queries see nothing, a part or all of a block."""
    chunk, row_tokens, ahead, shape = GATHER_CASES[name]
    case = interpreted.SELECTED | dict(dtype=jnp.bfloat16) | shape
    query, key, value, lists, d_out, start = selected_cases._inputs(3, **case)
    limits = selected_tiles.SelectedGatherConfig(chunk=chunk, row_tokens=row_tokens, warpgroups=2, ahead=ahead)
    monkeypatch.setattr(selected_tiles, "selected_gather_config", lambda *_: limits)
    made_for = plan.Shape.of(query, key, value)
    dims = made_for.group, made_for.head_dim, made_for.value_dim
    config = dataclasses.replace(
        selected_tiles.selected_config(*dims, 64, jnp.bfloat16, current_target()), tile=4, share=4
    )
    offset = case["offset"]
    want, want_lse, _ = selected_cases._reference(query, key, value, lists, d_out, start, 64, offset)
    sizes = dict(select_block=64, num_selected=lists.shape[-1], lists=config)
    made = plan.plan_selected_forward(made_for, current_target(), **sizes)
    attend = jax.jit(selected.selected_forward, static_argnums=(6, 7, 8))
    got, lse = attend(query, key, value, lists, start, jnp.int32(offset), 64, case["packed"], made)
    assert called == ["neighbours_sm90"] * (name not in ("group_1", "group_2_wide_values")) + interpreted.REST
    assert test_ranged.relative_error(got, want) <= 4e-3
    interpreted.check_unseen(got, lse, want_lse)


@pytest.mark.parametrize(("group", "v_dim", "tokens", "first"), [(7, 64, 9, 0), (3, 128, 7, 2), (1, 64, 5, 6)])
def test_sums_of_partials_equal_those_of_triton(group, v_dim, tokens, first, called):
    """Two rows of the lists of 13 tokens; unused places hold NaN, and the last rows of `count` have no tokens."""
    batch, length, num_kv, listed, at_once = 2, 13, 2, 11, 2
    rows = batch * num_kv * -(-length // tokens)
    rng = np.random.default_rng(0)
    count = rng.integers(0, listed + 1, (rows, tokens + 2))
    unused = np.arange(listed) >= count[first : first + at_once, :tokens, None]
    partial, partial_lse, out, lse = (
        rng.normal(size=shape).astype(np.float32)
        for shape in (
            (at_once, tokens, listed, group, v_dim), (at_once, tokens, listed, group),
            (batch, length, num_kv, group, v_dim), (batch, length, num_kv, group),
        )
    )  # fmt: skip
    partial[unused], partial_lse[unused] = np.nan, np.nan
    nothing = rng.random(lse.shape) < 0.3
    out[nothing], lse[nothing] = 0, -np.inf
    partial, out = jnp.asarray(partial, jnp.bfloat16), jnp.asarray(out, jnp.bfloat16)
    arrays = jnp.asarray([first]), jnp.asarray(count), tokens
    arrays += partial.reshape(at_once, -1, group, v_dim), jnp.asarray(partial_lse.reshape(at_once, -1, group)), out, lse
    want = by_block_triton._add_partials(*arrays, num_listed=listed)
    add = jax.jit(sum_partials_sm90.add_partials, static_argnums=2, static_argnames="num_listed")
    got = add(*arrays, num_listed=listed)
    assert called == ["sum_partials_sm90"] and not np.array_equal(got[1], lse)
    np.testing.assert_allclose(np.float32(got[0]), np.float32(want[0]), rtol=1e-2, atol=1e-6)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5, atol=1e-5)
    if group == 1:  # `jax.vmap`: each row of what is mapped is updated by itself
        mapped = jax.vmap(lambda out, lse: add(*arrays[:-2], out, lse, num_listed=listed))
        outs, lses = mapped(jnp.stack([out, 0 * out]), jnp.stack([lse, jnp.full_like(lse, -jnp.inf)]))
        np.testing.assert_array_equal(outs[0], got[0])
        np.testing.assert_array_equal(lses[0], got[1])
        alone = add(*arrays[:-2], 0 * out, jnp.full_like(lse, -jnp.inf), num_listed=listed)
        np.testing.assert_array_equal(outs[1], alone[0])
        np.testing.assert_array_equal(lses[1], alone[1])


# The first value: whether queries are divided over two buffers of scores.
SELECT_CASES = {
    # The document begins in the last quarter of a block: the first key of the next block lies before it.
    "group_8_documents": (False, dict(group=8, h_dim=64, length=150, offset=3100, documents=True, seed=18)),
    # Three warpgroups, of which the last has no part in the first tiles of queries.
    "group_6_many_blocks": (False, dict(group=6, h_dim=64, length=200, offset=1900, num_keys=3200)),
    "group_6_offset": (True, dict(group=6, num_kv=2, h_dim=128, length=77, offset=301, num_keys=500)),
    "group_1_paper_blocks": (False, dict(group=1, h_dim=192, length=70, offset=560, config=NSAConfig(num_selected=4))),
}  # fmt: skip


@pytest.mark.parametrize("name", SELECT_CASES)
def test_block_selection_equals_the_reference(name, called, monkeypatch):
    divided, case = SELECT_CASES[name]
    monkeypatch.setattr(tuning, "select_hopper_config", lambda *_: tuning.SelectHopperConfig(stages=4, query_tiles=2))
    if divided:
        choose = tuning.select_config
        monkeypatch.setattr(tuning, "select_config", lambda *a: dataclasses.replace(choose(*a), chunk_bytes=1))
    arrays, keywords = test_select.make_inputs(dtype=jnp.bfloat16, **case)
    got = jax.jit(lambda *a: pallas.select_blocks(*a, **keywords))(*arrays)
    want = reference.select_blocks(*arrays, **keywords)
    num_blocks = blocks.num_selection_blocks(keywords.pop("num_keys"), keywords["config"].select_block)
    scores = reference.importance(*arrays, num_blocks=num_blocks, **keywords)
    assert test_select.disagreements(scores, got, want) == 0
    assert called == ["scores_sm90"]
