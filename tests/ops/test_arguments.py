"""Caller mistakes name the argument, what it was and what it must be; what served an op can be asked for."""

from __future__ import annotations

import contextlib
import functools
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import nsa_jax
from nsa_jax import NSAConfig
from nsa_jax.ops import implementations
from nsa_jax.ops.target import Target, compile_for
from tests.ops.cases import SMALL, Case

CASE = Case("arguments", T=40, N=4, K=2, H=16, V=16, B=1)
ARRAYS = CASE.inputs()


def _nsa(**changes):
    return nsa_jax.nsa_attention(**{**ARRAYS, "config": SMALL, "implementation": "xla", **changes})


def _selected(**changes):
    arguments = dict(
        query=ARRAYS["query"], key=ARRAYS["key_slc"], value=ARRAYS["value_slc"],
        block_indices=jnp.zeros((1, 40, 2, 4), jnp.int32), select_block=16, implementation="xla",
    )  # fmt: skip
    return nsa_jax.selected_attention(**{**arguments, **changes})


def _window(**changes):
    arguments = dict(query=ARRAYS["query"], key=ARRAYS["key_win"], value=ARRAYS["value_win"], window=8)
    return nsa_jax.window_attention(**{**arguments, "implementation": "xla", **changes})


def _select(**changes):
    arguments = dict(query=ARRAYS["query"], key_cmp=ARRAYS["key_cmp"], lse=jnp.zeros((1, 40, 4)), config=SMALL)
    return nsa_jax.select_blocks(**{**arguments, "implementation": "xla", **changes})


MISTAKES = {
    "rank": (_nsa, dict(query=ARRAYS["query"][0]), r"query has shape \(40, 4, 16\).*4 dimensions"),
    "batch": (_nsa, dict(key_slc=jnp.zeros((2, 40, 2, 16))), r"key_slc has shape \(2,.*must be 1 to match query"),
    "head_dim": (_nsa, dict(key_win=jnp.zeros((1, 40, 2, 8))), r"key_win has shape.*\(H\) must be 16"),
    "heads": (_window, dict(key=jnp.zeros((1, 40, 3, 16)), value=jnp.zeros((1, 40, 3, 16))), r"key has 3.*divide.*4"),
    "key_length": (_nsa, dict(key_slc=jnp.zeros((1, 39, 2, 16))), r"value_slc has shape \(1, 40.*must be 39"),
    "no_offset": (_window, dict(query=ARRAYS["query"][:, :8]), r"key has length 40: must be 8.*no query_offset"),
    "compressed_length": (_nsa, dict(key_cmp=jnp.zeros((1, 5, 2, 16)), value_cmp=jnp.zeros((1, 5, 2, 16))),
                          r"key_cmp has length 5: must be 9"),
    "uncompressed": (_nsa, dict(key_cmp=jnp.zeros((1, 40, 2, 16)), value_cmp=jnp.zeros((1, 40, 2, 16))),
                     r"key_cmp has length 40: must be 9.*nsa_jax.mean_compress\(key, config=config\)"),
    "compressed_heads": (_nsa, dict(key_cmp=jnp.zeros((1, 9, 1, 16)), value_cmp=jnp.zeros((1, 9, 1, 16))),
                         r"key_cmp and value_cmp have shapes.*K=2"),
    "value_dtype": (_nsa, dict(value_win=jnp.zeros((1, 40, 2, 16), jnp.bfloat16)), r"value_win has dtype bfloat16"),
    "query_dtype": (_nsa, dict(query=jnp.zeros((1, 40, 4, 16), jnp.float16)), r"query has dtype float16.*float32 or"),
    "gates": (_nsa, dict(gates=jnp.zeros((1, 40, 4, 2))), r"gates has shape \(1, 40, 4, 2\): must be \(1, 40, 4, 3\)"),
    "config": (_nsa, dict(config={"window": 8}), r"config=\{'window': 8\}: must be an nsa_jax.NSAConfig"),
    "segment_shape": (_nsa, dict(segment_start=jnp.zeros((1, 39), jnp.int32)), r"segment_start has shape.*must be 40"),
    "segment_dtype": (_nsa, dict(segment_start=jnp.zeros((1, 40))), r"segment_start has dtype float32.*integer"),
    "implementation": (_nsa, dict(implementation="cuda"), r"implementation='cuda': must be None or one of"),
    "offset_negative": (_window, dict(query_offset=-1), r"query_offset=-1: must be >= 0"),
    "offset_too_large": (_window, dict(query_offset=1),
                         r"key has length 40: must be at least 41 to reach the last query, 39 after query_offset=1"),
    "window": (_window, dict(window=0), r"window=0: must be a positive int"),
    "select_block": (_selected, dict(select_block=0), r"select_block=0: must be a positive int"),
    "nsa_index_shape": (_nsa, dict(block_indices=jnp.zeros((1, 40, 4), jnp.int32)), r"block_indices has shape.*4 dim"),
    "index_dtype": (_selected, dict(block_indices=jnp.zeros((1, 40, 2, 4))), r"block_indices has dtype float32.*int32"),
    "index_shape": (_selected, dict(block_indices=jnp.zeros((1, 40, 4, 4), jnp.int32)), r"block_indices.*must be 2"),
    "lse_dtype": (_select, dict(lse=jnp.zeros((1, 40, 4), jnp.bfloat16)), r"lse has dtype bfloat16: must be float32"),
    "num_keys_missing": (_select, dict(query_offset=0), r"num_keys=None: must be the number of keys"),
    "gates_missing": (_nsa, dict(gates=None), r"gates=None: must be an array \[B, T, N, 3\]"),
    "offset_numpy": (_window, dict(query_offset=np.int64(-1)), r"query_offset=-1: must be >= 0"),
    "offset_numpy_too_large": (_window, dict(query_offset=np.int64(1)), r"key has length 40: must be at least 41"),
    "offset_array": (_window, dict(query_offset=jnp.int32(1)), r"must be at least 41 .* after query_offset=1"),
    "offset_float": (_nsa, dict(query_offset=1.0), r"query_offset=1.0: must be an int or an integer scalar, not float"),
    "offset_bool": (_nsa, dict(query_offset=True), r"query_offset=True: must be an int or an integer scalar, not bool"),
    "offset_per_row": (_select, dict(query_offset=jnp.zeros(1, jnp.int32), num_keys=40), r"of shape \(1,\)"),
    "window_start": (_nsa, dict(query_offset=0, window_start="0"), r"window_start='0': must be an int or an integer"),
    "window_start_late": (_nsa, dict(query_offset=0, window_start=1), r"window_start=1: must be at most 0"),
    "query_list": (_nsa, dict(query=[0.0] * 500), r"query=\[0.0, [0., ]{,80}: must be an array"),
    "gates_list": (_nsa, dict(gates=[0.5] * 500), r"gates=\[0.5, [0.5, ]{,80}: must be an array"),
    "window_bool": (_window, dict(window=True), r"window=True: must be a positive int below 2\*\*31"),
    "window_large": (_window, dict(window=2**31), r"window=2147483648: must be a positive int below 2\*\*31"),
    "select_block_bool": (_selected, dict(select_block=True), r"select_block=True: must be a positive int"),
    "no_index": (_selected, dict(block_indices=jnp.zeros((1, 40, 2, 0), jnp.int32)),
                 r"block_indices has shape \(1, 40, 2, 0\): every size must be >= 1"),
    "num_keys_float": (_select, dict(num_keys=40.0), r"num_keys=40.0: must be a positive int"),
    "num_keys_small": (_select, dict(num_keys=39), r"num_keys=39: must be at least 40"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_explained(name):
    function, changes, message = MISTAKES[name]
    with pytest.raises(ValueError, match=message):
        function(**changes)


@pytest.mark.parametrize(
    "field,value,message",
    [
        ("window", 0, "window=0: must be a positive int"),
        ("compress_block", 24, "compress_block=24: must be a multiple of compress_stride=16"),
        ("select_block", 40, "select_block=40: must be a multiple of compress_stride=16"),
        ("compress_block", 128, "compress_block=128: must be at most select_block=64"),
        ("num_selected", 2, "num_selected=2: must be at least num_initial"),
        ("num_local", True, "num_local=True: must be a positive int"),
    ],
)
def test_impossible_geometry_is_explained(field, value, message):
    with pytest.raises(ValueError, match=message):
        NSAConfig(**{field: value})


def test_a_traced_offset_is_checked_as_far_as_it_is_known():
    keys = dict(key=ARRAYS["key_win"][:, :39], value=ARRAYS["value_win"][:, :39])
    with pytest.raises(ValueError, match="key has length 39: must be at least 40 to reach the last query"):
        jax.eval_shape(lambda offset: _window(**keys, query_offset=offset), jnp.int32(0))
    with pytest.raises(ValueError, match=r"query_offset=.*: must be an int or an integer scalar, not float32"):
        jax.eval_shape(lambda offset: _window(query_offset=offset), jnp.float32(0))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32])
def test_a_traced_offset_is_an_integer_of_any_type(dtype):
    """The last offset that 300 keys allow is above what int8 and uint8 can hold."""
    query = ARRAYS["query"][:, :10]
    key, value = (jnp.tile(ARRAYS[name], (1, 8, 1, 1))[:, :300] for name in ("key_win", "value_win"))
    late = jax.jit(lambda offset: _window(query=query, key=key, value=value, query_offset=offset))
    chex.assert_trees_all_close(
        late(dtype(100)), _window(query=query, key=key, value=value, query_offset=100), atol=1e-6
    )


@pytest.mark.parametrize("implementation", ["reference", "xla", "pallas"])
@pytest.mark.filterwarnings("ignore:.*interpret mode")
def test_integers_of_numpy_and_the_largest_window(implementation):
    want = _window(window=40, implementation=implementation)
    for changes in (dict(window=np.int64(40), query_offset=np.int32(0)), dict(window=2**31 - 1)):
        chex.assert_trees_all_close(_window(**changes, implementation=implementation), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "implementation"),
    [(np.int8, "pallas"), *((x, "reference") for x in (np.int8, np.uint8, np.int16, np.uint16, np.uint32))],
)
@pytest.mark.filterwarnings("ignore:.*interpret mode")
def test_documents_begin_where_integers_of_any_type_say(dtype, implementation):
    start = np.repeat([0, 25], [25, 15])[None]
    want = _nsa(segment_start=jnp.asarray(start, jnp.int32), implementation=implementation)
    got = _nsa(segment_start=jnp.asarray(start, dtype), implementation=implementation)
    chex.assert_trees_all_equal(got, want)
    assert np.abs(want - _nsa(implementation=implementation)).max() > 0.1


@pytest.mark.parametrize("begin", [2**33 + 5, np.iinfo(np.int64).max])
def test_documents_that_begin_beyond_32_bits_are_not_read_from_their_lower_ones(begin):
    """NumPy's integers have 64. A token that should see nothing saw the whole row."""
    want, got = (
        _nsa(segment_start=np.where(np.arange(40) < 30, 0, start)[None], implementation="xla") for start in (100, begin)
    )
    chex.assert_trees_all_equal(got, want)
    assert not want[:, 30:].any() and want[:, :30].any()


def test_a_window_that_begins_where_it_is_first_read():
    """With windows of 8 tokens, queries from position 30 on read tokens from 23 on."""
    whole = {name: x for name, x in ARRAYS.items() if name not in ("query", "gates")}
    late = dict(whole, query=ARRAYS["query"][:, 30:], gates=ARRAYS["gates"][:, 30:], query_offset=30)
    late["config"] = config = NSAConfig(8, 4, 8, 4, window=8)
    want = _nsa(**late)
    cut = {name: ARRAYS[name][:, 23:] for name in ("key_win", "value_win")}
    chex.assert_trees_all_close(_nsa(**{**late, **cut}, window_start=23), want, atol=1e-6)
    with pytest.raises(ValueError, match="window_start=24: must be at most 23"):
        _nsa(**{**late, **cut}, window_start=24)
    with pytest.raises(ValueError, match="window_start=24: must be at most 23"):
        _nsa(**{**late, "query_offset": jnp.int32(30)}, window_start=jnp.int32(24))
    # Windows end where their documents begin, as far as that is known.
    cut = {name: ARRAYS[name][:, 28:] for name in cut}
    for begin, good in ((28, True), (27, False)):
        start = np.full((1, 10), begin)
        call = functools.partial(_nsa, **{**late, **cut}, window_start=28)
        if good:
            want = _nsa(**late, segment_start=start)
            chex.assert_trees_all_close(call(segment_start=start), want, atol=1e-6)
            chex.assert_trees_all_close(jax.jit(lambda s, call=call: call(segment_start=s))(start), want, atol=1e-6)
        else:
            with pytest.raises(ValueError, match="window_start=28: must be at most 27.*within documents"):
                call(segment_start=start)
    # Queries that see nothing are counted too.
    cut = {name: jnp.concatenate([ARRAYS[name][:, 35:], jnp.ones_like(ARRAYS[name][:, :5])], 1) for name in cut}
    blind = dict(late, **cut, window_start=35, segment_start=np.full((1, 10), 35))
    with pytest.raises(ValueError, match="window_start=35: must be at most 30"):
        jax.jit(lambda query: _nsa(**{**blind, "query": query}))(late["query"])
    cut = {name: ARRAYS[name][:, 23:] for name in cut}
    short = {name: x[:, :16] for name, x in cut.items()}
    for implementation in ("xla", "pallas"):
        call = {**late, **short, "window_start": 23, "implementation": implementation}
        with pytest.raises(ValueError, match="key_win has length 16: must be at least 17 to reach the last query"):
            jax.jit(lambda query, call=call: _nsa(**{**call, "query": query}))(late["query"])
    assert config.window == 8


@pytest.mark.parametrize("wanted", ["nsa", "window"])
def test_gradients_on_a_mesh_with_explicit_axes(wanted):
    """Such a mesh is what jax.make_mesh gives unless it is asked for another."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    function = {"nsa": _nsa, "window": _window}[wanted]
    names = [name for name in ARRAYS if wanted == "nsa" or name in ("query", "key_win", "value_win")]
    arrays = {name: jnp.concatenate([ARRAYS[name]] * 4) for name in names}
    if wanted == "window":
        arrays = {"query": arrays["query"], "key": arrays["key_win"], "value": arrays["value_win"]}
    loss = jax.jit(jax.grad(lambda arrays: (function(**arrays, implementation="xla") ** 2).sum()))
    want = loss(arrays)
    with jax.set_mesh(mesh):
        split = jax.device_put(arrays, NamedSharding(mesh, P("data")))
        got = loss(split)
    chex.assert_trees_all_close(jax.device_get(got), jax.device_get(want), atol=1e-5)


@pytest.mark.parametrize("select_block", [2, 8], ids=["gathered", "masked"])
@pytest.mark.parametrize("split", ["query", "key", "query, key, lists"])
def test_some_arrays_may_be_split_on_a_mesh_with_explicit_axes(split, select_block):
    """Gradients have the layout of what they belong to."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    arrays = {"query": ARRAYS["query"], "key": ARRAYS["key_slc"], "lists": jnp.zeros((1, 40, 2, 2), jnp.int32)}
    arrays = {name: jnp.concatenate([x] * 2) for name, x in arrays.items()}

    def loss(query, key, lists):
        common = dict(implementation="xla")
        listed = nsa_jax.selected_attention(query, key, key, lists, select_block=select_block, **common)
        keys = nsa_jax.mean_compress(key, config=SMALL)
        _, lse = nsa_jax.compressed_attention(query, keys, keys, config=SMALL, **common)
        chosen = nsa_jax.select_blocks(query, keys, lse, config=SMALL, **common)
        near = nsa_jax.window_attention(query, key, key, window=4, **common)
        return (listed**2).sum() + (near**3).sum() + chosen.sum()

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))
    want = gradients(*arrays.values())
    with jax.set_mesh(mesh):
        given = [jax.device_put(x, NamedSharding(mesh, P("data") if n in split else P())) for n, x in arrays.items()]
        got = gradients(*given)
    assert [x.sharding.spec[0] for x in got] == ["data" if name in split else None for name in ("query", "key")]
    chex.assert_trees_all_close(jax.device_get(got), jax.device_get(want), atol=1e-5)


@pytest.mark.parametrize("in_context", [True, False])
def test_heads_may_be_split_on_a_mesh_with_explicit_axes(in_context):
    """Rows too long for masks: blocks are gathered, and their gradients added up chunk by chunk."""
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(AxisType.Explicit,))
    config = NSAConfig(4, 4, 4, 3, window=4)
    keys = jax.random.split(jax.random.key(0), 4)
    query, key, value = (jax.random.normal(k, (1, 1280, 2, 8)) for k in keys[:3])
    arrays = query, key, value, jax.nn.sigmoid(jax.random.normal(keys[3], (1, 1280, 2, 3)))

    def loss(*arrays):
        return (nsa_jax.nsa_self_attention(*arrays, config=config, implementation="xla") ** 2).sum()

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))
    want = gradients(*arrays)
    with jax.set_mesh(mesh) if in_context else contextlib.nullcontext():
        got = gradients(*(jax.device_put(x, NamedSharding(mesh, P(None, None, "heads"))) for x in arrays))
    assert all(x.sharding.spec[2] == "heads" for x in got)
    chex.assert_trees_all_close(jax.device_get(got), jax.device_get(want), atol=1e-4, rtol=1e-4)


def test_named_implementation_that_cannot_serve_says_why():
    with pytest.raises(NotImplementedError, match="pallas.*head dim 24"):
        nsa_jax.window_attention(
            jnp.zeros((1, 4, 2, 24)),
            jnp.zeros((1, 4, 1, 24)),
            jnp.zeros((1, 4, 1, 24)),
            window=2,
            implementation="pallas",
        )


def test_a_gpu_without_kernels_for_the_inputs_is_warned_of_once():
    shape = jax.ShapeDtypeStruct((1, 4, 1, 24), jnp.float32)
    attend = lambda *qkv: nsa_jax.window_attention(*qkv, window=2)  # noqa: E731
    implementations._WARNED.clear()
    with compile_for(Target("gpu", (8, 0))):
        with pytest.warns(UserWarning, match="window_attention runs as 'xla'.*query has head dim 24.*Fix: ") as caught:
            jax.eval_shape(attend, shape, shape, shape)
        assert caught[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            jax.eval_shape(lambda *qkv: attend(*qkv), shape, shape, shape)
    assert nsa_jax.implementations_served()["window_attention"] == "xla"


def test_what_served_each_op_can_be_asked_for():
    jax.eval_shape(lambda: _nsa(implementation="reference"))
    assert nsa_jax.implementations_served()["selected_attention"] == "reference"
    out = jax.eval_shape(lambda: _nsa(implementation="xla"))
    served = nsa_jax.implementations_served()
    for op in ("compressed_attention", "select_blocks", "selected_attention", "window_attention"):
        assert served[op] == "xla", op
    assert out.shape == (1, 40, 4, 16)
