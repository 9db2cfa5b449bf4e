"""Which kernel serves which problem: the table, and what holds for every plan. No GPU is needed."""

import dataclasses
import functools
import importlib.util
import itertools

import jax
import jax.numpy as jnp
import pytest

import nsa_jax
from nsa_jax.ops import blocks, pallas, plan
from nsa_jax.ops.choices import Choice, Shape
from nsa_jax.ops.explain import explanation_of, plan_rows
from nsa_jax.ops.mean_key import mean_key_attention
from nsa_jax.ops.target import Target, compile_for

PAPER = nsa_jax.NSAConfig()
A100, H100 = Target("gpu", (8, 0), ahead_of_time=True), Target("gpu", (9, 0), ahead_of_time=True)

# B, T, N, K, H, V, dtype
SHAPES = {
    "paper": (1, 65536, 64, 4, 128, 128, "bfloat16"),
    "groups_of_4": (1, 32768, 32, 8, 128, 128, "bfloat16"),
    "groups_of_7": (1, 8192, 28, 4, 128, 128, "bfloat16"),
    "small": (4, 65536, 12, 2, 64, 64, "bfloat16"),
    "small_one_row": (1, 32768, 12, 2, 64, 64, "bfloat16"),
    "short_rows": (64, 2048, 12, 2, 64, 64, "bfloat16"),
    "wide": (1, 8192, 16, 1, 192, 128, "bfloat16"),
    "float32": (2, 4096, 8, 2, 64, 128, "float32"),
    "narrow": (2, 4096, 8, 2, 32, 32, "bfloat16"),
}
TRITON_RANGE = "range_attention.triton_forward" + " range_attention.triton_backward" * 2
SM90_RANGE = "range_attention.sm90_forward range_attention.sm90_grad_query range_attention.sm90_grad_key_value"
# Of each shape: heads moved to the batch, range attention, scores, shared blocks, the rest, backward by block, dq.
A100_TABLE = {
    "paper": (False, TRITON_RANGE, "neighbours_triton", "by_token_triton", "grad_by_block_triton", "grad_query"),
    "groups_of_4": (False, TRITON_RANGE, "neighbours_triton", "by_block_triton", "grad_by_block_triton",
                    "grad_reduce_triton"),
    "groups_of_7": (False, TRITON_RANGE, "neighbours_triton", "by_block_triton", "grad_by_block_triton",
                    "grad_reduce_triton"),
    "small": (False, TRITON_RANGE, "neighbours_triton", "by_block_triton", "grad_by_block_triton",
              "grad_reduce_triton"),
    "small_one_row": (False, TRITON_RANGE, "neighbours_triton", "by_block_triton", "grad_by_block_triton",
                      "grad_reduce_triton"),
    "short_rows": (False, TRITON_RANGE, "neighbours_triton", "by_block_triton", "grad_by_block_triton",
                   "grad_reduce_triton"),
    "wide": (False, TRITON_RANGE, "neighbours_triton", "by_token_triton", "grad_by_block_triton", "grad_query"),
    "float32": (False, TRITON_RANGE, None, "by_token_triton", "grad_by_block_triton", "grad_query"),
    "narrow": (False, TRITON_RANGE, "neighbours_triton", "by_block_triton", "grad_by_block_triton",
               "grad_reduce_triton"),
}  # fmt: skip
H100_TABLE = A100_TABLE | {
    "paper": (False, SM90_RANGE, "by_token_sm90", "by_token_sm90", "grad_scores_sm90", "grad_query"),
    "groups_of_4": (False, SM90_RANGE, "sm90_forward", "by_block_sm90", "grad_partials_sm90",
                    "grad_reduce_triton"),
    "groups_of_7": (True, SM90_RANGE, "neighbours_sm90", "by_block_sm90", "grad_partials_sm90", "grad_reduce_triton"),
    "small": (False, SM90_RANGE, "neighbours_sm90", "by_block_sm90", "grad_partials_sm90", "grad_reduce_triton"),
    "small_one_row": (False, SM90_RANGE, "neighbours_sm90", "by_block_sm90", "grad_partials_sm90",
        "grad_reduce_triton"),
    "short_rows": (False, SM90_RANGE, None, "whole_row_sm90", "whole_row_sm90", "whole_row_sm90"),
    "wide": (False, SM90_RANGE, "neighbours_triton", "by_token_triton", "grad_by_block_triton", "grad_query"),
}  # fmt: skip
SCORES_SM90 = {"paper", "groups_of_4", "groups_of_7", "small", "small_one_row", "wide"}


def planned(name: str, target: Target) -> plan.NSAPlan:
    batch, length, num_heads, kv_heads, *rest = SHAPES[name]
    shape = Shape(batch, length, length, num_heads, kv_heads, *rest)
    return plan.plan_nsa(shape, PAPER, target, num_compressed=blocks.num_compressed(length, PAPER))


@pytest.mark.parametrize(("target", "name"), [*itertools.product(["a100", "h100"], SHAPES)])
def test_the_table_of_kernels(target, name):
    made = planned(name, {"a100": A100, "h100": H100}[target])
    moved, ranges, shared, rest, by_block, grad_query = (A100_TABLE if target == "a100" else H100_TABLE)[name]
    assert (made.heads_to_batch is not None) == moved
    for branch in (made.compressed, made.window):
        assert [x.kernel for x in (branch.forward, branch.grad_query, branch.grad_key_value)] == ranges.split()
    scores = "sm90" if target == "h100" and name in SCORES_SM90 else "triton"
    assert made.selection.scores.kernel == f"selection.scores_{scores}"
    selected = made.selected
    got = None if selected.forward.neighbours is None else selected.forward.neighbours.kernel.rpartition(".")[2]
    assert got == shared
    chosen = (selected.forward.rest, selected.backward.by_block, selected.backward.grad_query)
    assert [choice.kernel for choice in chosen] == [f"selected.{x}" for x in (rest, by_block, grad_query)]


def test_rows_of_many_blocks_are_not_read_whole():
    """However long the lists: the bits of more blocks do not fit beside the tiles, and compiling them failed."""
    for length, whole in ((640 * 64, True), (641 * 64, False)):
        shape = Shape(1, length, length, 16, 1, 128, 128, "bfloat16")
        assert plan.reads_whole_rows(shape, H100, 64, 464) == whole


def test_rows_that_the_kernels_cannot_index_are_not_theirs():
    """A grid has 2^16 - 1 programs along its slow axis; entries of lists are counted with 32 bits."""
    for length, served in ((2**19, True), (2**20, False)):
        shape = Shape(1, length, length, 64, 1, 128, 128, "bfloat16")
        assert (plan.sm90_obstacle(shape, H100) is None) == served
    for num_selected, served in ((16, True), (80, False)):
        made = plan.plan_selected(
            Shape(1, 2**20, 2**20, 32, 32, 64, 64, "bfloat16"), H100, select_block=64, num_selected=num_selected
        )
        kernels = {made.forward.rest.kernel, made.backward.by_block.kernel}
        assert (kernels == {"selected.by_block_sm90", "selected.grad_partials_sm90"}) == served, kernels


@pytest.mark.parametrize(
    ("target", "heads", "dim", "block", "kernel", "tile", "share"),
    [
        # The kernel for whole lists reads the others once for the tile as well: more than half must share.
        (H100, 16, 128, 64, "selected.by_token_sm90", 8, 5),
        (H100, 64, 64, 64, "selected.by_token_sm90", 2, 2),
        (H100, 16, 128, 128, "selected.by_token_triton", 8, 4),
        (H100, 20, 128, 64, "selected.by_token_triton", 6, 3),
        (A100, 16, 128, 64, "selected.by_token_triton", 8, 4),
        (H100, 8, 128, 64, "selected.by_block_sm90", 16, 8),
        (H100, 8, 64, 64, "selected.by_block_sm90", 8, 4),
    ],
)
def test_so_many_tokens_of_a_tile_must_list_a_shared_block(target, heads, dim, block, kernel, tile, share):
    shape = plan.Shape(1, 65_536, 65_536, heads, 1, dim, dim, "bfloat16")
    made = plan.plan_selected_forward(shape, target, select_block=block, num_selected=16)
    assert (made.rest.kernel, made.lists.tile, made.lists.share) == (kernel, tile, share)


def test_a_shared_window_is_served_with_the_selected_branch():
    """Where rows are read whole and the keys are the same; nowhere else."""
    for name, (batch, length, num_heads, kv_heads, *rest) in SHAPES.items():
        shape = Shape(batch, length, length, num_heads, kv_heads, *rest)
        sizes = dict(num_compressed=blocks.num_compressed(length, PAPER), shared_window=True)
        for target in (A100, H100):
            made = plan.plan_nsa(shape, PAPER, target, **sizes)
            assert made.joint_window == (name == "short_rows" and target is H100)
            assert not plan.plan_nsa(shape, PAPER, target, **sizes | dict(shared_window=False)).joint_window
            assert made.joint_window == plan.joins_window(shape, target, PAPER)


@pytest.mark.parametrize("shared", [False, True])
def test_tiles_overlap_with_and_without_the_window(shared):
    shape = Shape(1, 2048, 2048, 64, 4, 128, 128, "bfloat16")
    made = plan.plan_nsa(shape, PAPER, H100, num_compressed=blocks.num_compressed(2048, PAPER), shared_window=shared)
    passes = made.selected.backward.by_block, made.selected.backward.grad_query
    assert [choice.tiles.overlap for choice in passes] == [True] * 2


@pytest.mark.parametrize("length", [2048, 16_384])
def test_the_kernels_of_selection_by_mean_keys_are_those_that_are_called(length, monkeypatch):
    """Its stages are ops of their own: nothing is moved for all, no window is joined, and nothing is compressed."""
    config = nsa_jax.NSAConfig(compress_block=64, compress_stride=64, select_block=64)
    batch, num_heads, kv_heads, dim = 1, 28, 4, 128
    shape = Shape(batch, length, length, num_heads, kv_heads, dim, dim, "bfloat16")
    planned = []
    for name in ("plan_range", "plan_selection", "plan_selected"):
        make = getattr(plan, name)
        monkeypatch.setattr(plan, name, lambda *a, make=make, **kw: planned.append(make(*a, **kw)) or planned[-1])
    array = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)  # noqa: E731
    keys = [array(batch, length, kv_heads, dim)] * 4
    arrays = array(batch, length, num_heads, dim), array(batch, length // 64, kv_heads, dim), *keys
    attend = functools.partial(mean_key_attention, config=config, implementation="pallas")
    with compile_for(H100):
        jax.eval_shape(lambda *x: attend(*x), *arrays, array(batch, length, num_heads, 2))
    called = {(type(x), x) for x in planned}
    planned.clear()
    found = explanation_of(shape, config, H100, packed=False, shared_kv=True, selector="mean_key")
    assert called == {(type(x), x) for x in planned}
    stages = [(row.stage, row.direction) for row in found.rows]
    assert ("selection", "log-sum-exp") in stages
    assert not any(stage in ("compressed", "all branches") for stage, _ in stages)


@pytest.mark.parametrize(("target", "name"), [*itertools.product([A100, H100], SHAPES)])
def test_every_choice_names_a_module_and_a_reason(target, name):
    for row in plan_rows(planned(name, target)):
        choice = row.choice
        assert choice.reason and choice.kernel != choice.otherwise
        for kernel in filter(None, (choice.kernel, choice.otherwise)):
            assert importlib.util.find_spec(f"nsa_jax.ops.kernels.{kernel}"), kernel
        if target is H100 and "triton" in choice.kernel and "by_token" not in choice.kernel:
            words = ("sm90", "warpgroups", "adds a query's partial sums")
            assert any(word in choice.reason for word in words), f"{choice.kernel}: {choice.reason}"


def test_plans_are_keys_of_traces():
    """Equal problems have equal plans, or jitted functions would be traced again and again."""
    assert planned("small", H100) == planned("small", H100)
    assert hash(planned("paper", H100)) == hash(planned("paper", H100))
    assert planned("small", H100) != planned("small", A100)


@pytest.mark.parametrize("target", [A100, H100])
@pytest.mark.parametrize("name", SHAPES)
def test_the_batch_size_decides_no_kernel(name, target):
    """A user who changes the batch size meets the same kernels; tiles and work items may differ."""

    def kernels(batch):
        _, length, num_heads, kv_heads, *rest = SHAPES[name]
        made = plan.plan_nsa(
            Shape(batch, length, length, num_heads, kv_heads, *rest), PAPER, target, num_compressed=length // 16 - 1
        )
        return [row.choice.kernel for row in plan_rows(made)]

    assert kernels(1) == kernels(2) == kernels(7)
    assert len(kernels(1)) >= 8


def test_a_window_alone_is_not_rearranged_for_hopper():
    shape = Shape(1, 8192, 8192, 14, 2, 64, 64, "bfloat16")
    alone, inside = plan.plan_range(shape, H100, span=512), planned("groups_of_7", H100).window
    assert alone.forward.kernel == "range_attention.triton_forward"
    assert "7 heads need rearranged copies" in alone.forward.reason
    assert inside.forward.kernel == "range_attention.sm90_forward"


@pytest.mark.parametrize(
    ("group", "dim", "direct"),
    [*((group, 128, True) for group in (1, 2, 4, 8)), (6, 128, False), (6, 64, True), (3, 64, True), (7, 64, False)],
)
def test_groups_that_tma_copies_as_they_lie_are_not_rearranged(group, dim, direct):
    """A window alone gets Hopper's kernels then. A layer's projection is cut by key/value head as before."""
    shape = Shape(1, 8192, 8192, 2 * group, 2, dim, dim, "bfloat16")
    assert plan.moves_heads_to_batch(shape, H100) != direct
    assert (plan.plan_range(shape, H100, span=512).forward.kernel == "range_attention.sm90_forward") == direct
    assert plan.cuts_projection(shape, H100) == (group != 8)
    assert not plan.cuts_projection(shape, A100) and not plan.moves_heads_to_batch(shape, A100)


def test_cudnn_serves_windows_of_whole_rows_where_it_is():
    shape = Shape(1, 8192, 8192, 12, 2, 64, 64, "bfloat16")
    here = dataclasses.replace(A100, ahead_of_time=False)
    assert plan.plan_range(shape, here, span=512, cudnn=True).forward.kernel == "range_attention.window_cudnn"
    for changed in (dataclasses.replace(shape, dtype="float32"), dataclasses.replace(shape, value_dim=128)):
        chosen = plan.plan_range(changed, here, span=512, cudnn=True).forward
        assert chosen.kernel == "range_attention.triton_forward"
    chosen = plan.plan_range(shape.with_keys(9000), here, span=512, cudnn=True).forward
    assert chosen.kernel != "range_attention.window_cudnn"
    assert plan.plan_range(shape, A100, span=512, cudnn=True).forward.kernel == "range_attention.triton_forward"


def test_an_a100_that_is_here_gets_mosaic_gpu(monkeypatch):
    monkeypatch.setattr(plan.jax, "__version_info__", (0, 11, 0))
    shape, here = Shape(1, 8192, 511, 12, 2, 64, 64, "bfloat16"), Target("gpu", (8, 0))
    made = plan.plan_range(shape, here)
    chosen = made.forward, made.grad_query, made.grad_key_value
    names = ["sm80_forward", "sm80_grad_query", "sm80_grad_key_value"]
    assert [choice.kernel for choice in chosen] == [f"range_attention.{name}" for name in names]
    assert [choice.otherwise for choice in chosen] == TRITON_RANGE.split()

    for other, target, why in (
        (dataclasses.replace(shape, dtype="float32"), here, "float32"),
        (dataclasses.replace(shape, value_dim=128), here, "64 and 128"),
        (dataclasses.replace(shape, head_dim=32, value_dim=32), here, "32 and 32"),
        (dataclasses.replace(shape, num_queries=2**17, num_heads=64, kv_heads=1), here, "so many rows"),  # 65,536 tiles
        (dataclasses.replace(shape, num_keys=2**22), here, "so many rows"),
        (dataclasses.replace(shape, batch=2**12, num_queries=1, num_keys=2**13), here, "so many rows"),
        (shape, dataclasses.replace(here, ahead_of_time=True), "not here"),
        *((shape, Target("gpu", capability), "8.0") for capability in ((8, 6), (8, 9), (10, 0), (12, 0))),
        (shape, Target("cpu", (8, 0)), "8.0"),
    ):
        forward = plan.plan_range(other, target).forward
        assert forward.kernel == "range_attention.triton_forward"
        assert why in forward.reason
    monkeypatch.setattr(plan.jax, "__version_info__", (0, 10, 2))
    assert "0.11 and later" in plan.plan_range(shape, here).forward.reason


def test_the_operator_takes_its_plan(monkeypatch):
    """What `nsa_attention` is traced with is what `plan_nsa` says, and nothing else is asked."""
    asked = []
    original = plan.plan_nsa
    monkeypatch.setattr(plan, "plan_nsa", lambda *args, **kw: asked.append(original(*args, **kw)) or asked[-1])
    with compile_for(A100):
        query = jnp.zeros((1, 64, 2, 16), jnp.bfloat16)
        key = jnp.zeros((1, 64, 1, 16), jnp.bfloat16)
        config = nsa_jax.NSAConfig(16, 8, 16, 3, 1, 1, 32)
        compressed = jnp.zeros((1, 7, 1, 16), jnp.bfloat16)
        gates = jnp.zeros((1, 64, 2, 3), jnp.bfloat16)
        import jax

        jax.make_jaxpr(
            lambda q: pallas.nsa_attention(q, compressed, compressed, key, key, key, key, gates, config=config)
        )(query)
    assert [type(x) for x in asked] == [plan.NSAPlan] and isinstance(asked[0].selected.forward.rest, Choice)


def test_explain_prints_a_row_for_each_stage_and_pass(capsys):
    told = nsa_jax.explain(
        length=32768, num_heads=12, num_kv_heads=2, head_dim=64, packed=True, target="h100", config=PAPER
    )
    text = capsys.readouterr().out
    assert text.startswith("NSA on sm90: B=1 T=32768 N=12 K=2 G=6 H=64 V=64 bfloat16 packed\n")
    assert {(row.stage, row.direction) for row in told.rows} >= {
        ("compressed", "forward"), ("window", "forward"), ("selection", "scores"), ("selection", "top n"),
        ("selected", "forward"), ("selected", "backward, dq"), ("compressed", "backward, dk and dv"),
    }  # fmt: skip
    for row in told.rows:
        assert f"{row.choice.kernel}  {row.choice.reason}" in text
    assert "otherwise selected.by_block_triton" in text and "warpgroups=4" in text


def test_explain_refuses_what_the_operator_refuses():
    sizes = dict(length=512, num_heads=2, num_kv_heads=1, head_dim=64, target="h100")
    for changes, words in (
        (dict(dtype="float16"), "dtype='float16': must be 'float32' or 'bfloat16'"),
        (dict(value_dim=0), "value_dim=0: must be a positive int"),
        (dict(config=64), "config=64: must be an nsa_jax.NSAConfig"),
    ):
        with pytest.raises(ValueError, match=words):
            nsa_jax.explain(**sizes | changes)


def test_explain_says_why_no_kernel_serves(capsys):
    told = nsa_jax.explain(length=512, num_heads=2, num_kv_heads=1, head_dim=48, target="a100")
    assert told.unsupported.startswith("query has head dim 48") and not told.rows
    assert "implementation='xla'" in capsys.readouterr().out
    assert "no GPU" in nsa_jax.explain(length=512, num_heads=2, num_kv_heads=1, head_dim=64).unsupported
    with pytest.raises(ValueError, match="target='v100'"):
        nsa_jax.explain(length=512, num_heads=2, num_kv_heads=1, head_dim=64, target="v100")
    with pytest.raises(ValueError, match="target=90: must be one of .*a100"):
        nsa_jax.explain(length=512, num_heads=2, num_kv_heads=1, head_dim=64, target=90)
    with pytest.raises(ValueError, match="num_heads=3"):
        nsa_jax.explain(length=512, num_heads=3, num_kv_heads=2, head_dim=64, target="a100")
