"""Every mesh trains the same model: losses of one device over twenty steps, on rows of several documents."""

import functools
import re

import jax
import numpy as np
import pytest

from nsa_jax.config import ConfigError, default_config, validate
from nsa_jax.train.preflight import hlo
from nsa_jax.train.state import make_mesh, mesh_problems, partition_spec, setup
from nsa_jax.train.step import make_train_step

from .tiny import VOCAB, random_batch, steps, tiny_config

# On 4 devices of the context axis a row's 48 tokens are cut at 12, 24 and 36: the first and the last cut go through a
# selection block of 8 tokens, every cut through a compressed block of 8 and a window of 12.
CHANGES = dict(train__batch_size=16, train__grad_accum=2, train__steps=20, model__implementation="xla")
MESHES = [
    dict(data=4, fsdp=2),  # data alone, fsdp alone and 2 x 4: test_step.py
    dict(data=4, tensor=2),
    dict(data=2, context=4),
    dict(fsdp=2, tensor=2, context=2),
    dict(data=8, shard_optimizer=True),
]


def name(mesh):
    return "-".join(f"{axis}{size}" for axis, size in mesh.items())


def packed_batch(config, seed):
    """Documents that begin inside blocks, windows and devices' shares; masked tokens, whole rows among them."""
    shape = (config.train.batch_size, config.data.seq_len)
    mask = np.ones(shape, np.float32)
    mask[::3, 5:29] = 0
    mask[3] = 0
    batch = random_batch(config, seed, mask)
    second = np.asarray([0, 7, 13, 35, 24] * shape[0])[: shape[0], None]
    batch["segment_start"] = np.where(np.arange(shape[1]) >= second, second, 0).astype(np.int32)
    return batch


@functools.cache
def twenty_steps(**mesh):
    config = tiny_config(**{f"mesh__{axis}": size for axis, size in mesh.items()}, **CHANGES)
    batches = [packed_batch(config, seed) for seed in range(20)]
    return steps(config, batches, jax.devices()[: int(np.prod(list(mesh.values())))])


@pytest.mark.parametrize("mesh", MESHES, ids=name)
def test_every_mesh_gives_the_losses_of_one_device(mesh, monkeypatch):
    monkeypatch.setattr("nsa_jax.nn.sharding._REPLICATE_BELOW", 1)
    want, _ = twenty_steps(data=1)
    got, state = twenty_steps(**mesh)
    for step, (one, many) in enumerate(zip(want, got, strict=True)):
        assert abs(one["loss"] - many["loss"]) < 1e-5, step
        assert many["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)


def test_the_state_is_split_by_the_table_and_over_fsdp(monkeypatch):
    monkeypatch.setattr("nsa_jax.nn.sharding._REPLICATE_BELOW", 1)
    _, state = twenty_steps(fsdp=2, tensor=2, context=2)
    matrices = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
    split = [
        leaf for path, leaf in matrices.items() if "embedding" in path or "attention']['w_" in path or "'mlp'" in path
    ]
    assert len(split) == 3 * 5  # parameters and both moments of embedding, attention's and the MLP's matrices
    for leaf in split:
        assert leaf.addressable_shards[0].data.size == leaf.size // 4
    whole = [leaf for path, leaf in matrices.items() if "compress_" in path and "'w_1'" in path]
    assert len(whole) == 3 * 2
    for leaf in whole:
        assert leaf.addressable_shards[0].data.size == leaf.size // 2  # by fsdp alone: every head needs the compressor


def test_the_averages_of_the_optimizer_are_split_over_data_as_well(monkeypatch):
    monkeypatch.setattr("nsa_jax.nn.sharding._REPLICATE_BELOW", 1)
    _, state = twenty_steps(data=8, shard_optimizer=True)
    for leaf in jax.tree.leaves(state["params"]):
        assert leaf.addressable_shards[0].data.shape == leaf.shape
    moments = [leaf for leaf in jax.tree.leaves(state["opt_state"]) if any(size % 8 == 0 for size in leaf.shape[1:])]
    assert sum(leaf.size for leaf in moments) > 0.9 * sum(leaf.size for leaf in jax.tree.leaves(state["opt_state"]))
    for leaf in moments:
        assert leaf.addressable_shards[0].data.size == leaf.size // 8
    (problem,) = mesh_problems(tiny_config(mesh__fsdp=2, mesh__shard_optimizer=True, train__batch_size=16), 8)
    assert problem.rule == "R020" and "leave it False" in problem.fix


def test_partition_specs_by_name():
    mesh = make_mesh(tiny_config(mesh__fsdp=2, mesh__tensor=2), jax.devices()[:8])
    spec = lambda shape, *names: partition_spec(tuple(map(jax.tree_util.DictKey, names)), shape, mesh)  # noqa: E731
    assert spec((1000, 64), "params", "embedding") == jax.P(("tensor", "fsdp"))
    assert spec((64, 1000), "params", "head") == jax.P(None, ("tensor", "fsdp"))
    assert spec((3, 64, 256), "params", "blocks", "attention", "w_out") == jax.P(None, "tensor", "fsdp")
    assert spec((3, 64, 99), "opt_state", "mu", "blocks", "mlp", "w_in") == jax.P(None, ("tensor", "fsdp"))
    assert spec((3, 64, 256), "params", "blocks", "attention", "compress_key", "w_in") == jax.P(None, None, "fsdp")
    assert spec((3, 8), "params", "blocks", "norm", "scale") == jax.P()


def compiled(**changes):
    config = tiny_config(train__batch_size=4, model__num_layers=1, model__implementation="xla", **changes)
    made = setup(config, config.model.vocab_size or VOCAB, jax.devices()[:4])
    step = make_train_step(made, np.ones(made.model_config.vocab_size, np.int32))
    with jax.set_mesh(made.mesh):
        return step.lower(made.target(), random_batch(config)).compile().as_text()


def test_logits_and_tokens_stay_split_in_the_compiled_step(monkeypatch):
    monkeypatch.setattr("nsa_jax.train.loss._LOGIT_BYTES", 4 * 48 * 1152 * 4 // 8)  # the loss in chunks
    text = compiled(mesh__tensor=2, mesh__context=2, model__vocab_size=1152, train__grad_accum=1)
    # Neither the table nor a token's logits are ever whole. (The bytes of each token, f32[1152], are.)
    assert re.search(r"f32\[[\d,]+,576\]", text)
    assert not re.search(r"f32\[[\d,]+,1152\]|f32\[1152,", text)
    # Nothing as wide as the model or the MLP's two halves has a whole row of tokens.
    assert re.search(r"f32\[4,24,32\]", text)
    assert not re.search(r"f32\[4,48,(32|96)\]", text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(mesh__tensor=4), "does not divide num_kv_heads=2"),
        (dict(mesh__tensor=2, model__mlp_dim=51), "does not divide mlp_dim=51"),
        (dict(mesh__tensor=2, model__vocab_size=257), "does not divide vocab_size=257"),
        (dict(mesh__context=8), "cannot be split over 8 devices in multiples of 4 tokens"),
        (dict(mesh__context=5), "cannot be split over 5 devices"),
        (dict(mesh__context=0), "too small"),
    ],
)
def test_axes_that_do_not_fit_the_model_are_refused(changes, message):
    found = [problem for problem in validate(tiny_config(**changes)) if problem.severity == "error"]
    assert any(message in problem.message for problem in found)


def test_shares_of_a_row_that_are_shorter_than_a_block_reaches_are_refused_with_a_length_that_serves():
    config = default_config()
    config.mesh.context, config.model.nsa.compress_block = 64, 64  # 32 tokens each; a block reaches over 48 more
    (problem,) = validate(config)
    assert problem.rule == "R020" and "multiple of 1024, at least 3072" in problem.fix
    config.data.seq_len = 3072
    assert validate(config) == []


def test_axes_that_do_not_fit_devices_batch_or_vocabulary_are_refused():
    assert "data * fsdp * tensor * context" in mesh_problems(tiny_config(mesh__tensor=3), 8)[0].message
    assert mesh_problems(tiny_config(mesh__tensor=2, mesh__context=2, train__batch_size=2), 8) == []
    problem = mesh_problems(tiny_config(mesh__context=2, train__batch_size=6), 8)[0]
    assert "6 rows cannot be split over 4 devices" in problem.message
    with pytest.raises(ConfigError, match="vocabulary of 257 cannot be split over 2 devices.*vocab_size=384"):
        setup(tiny_config(mesh__tensor=2), 257, jax.devices()[:8])


def test_gradients_are_summed_over_devices_once_per_step():
    changes = dict(train__grad_accum=2, train__batch_size=8, model__num_layers=2, model__implementation="xla")
    made = setup(tiny_config(**changes), VOCAB, jax.devices()[:4])
    step = make_train_step(made, np.ones(VOCAB, np.int32))
    with jax.set_mesh(made.mesh):
        text = step.lower(made.target(), random_batch(made.config)).compile().as_text()
    found = hlo.collectives(text)
    assert {collective.kind for collective in found} == {"all-reduce"}
    assert sum(collective.bytes for collective in found) == pytest.approx(4 * made.num_parameters(), abs=64)
