"""Memory of the host: the optimizer's averages lie there between steps, and runs are the same bit by bit."""

import chex
import jax
import pytest

from nsa_jax import aot
from nsa_jax.config import validate
from nsa_jax.train.preflight import memory
from nsa_jax.train.state import setup
from tests.kernels.hollow import hollow_kernels

from .test_resume import stop_before
from .tiny import VOCAB, losses, make_run, one_device, random_batch, steps, tiny_config

OFFLOAD = dict(train__offload_optimizer=True)


def kinds(state):
    """Where each array of a state lies, by its part: averages are the arrays of opt_state, counts its scalars."""
    found = {}
    for part, tree in state.items():
        for leaf in jax.tree.leaves(tree):
            name = part if part != "opt_state" else "averages" if leaf.ndim else "counts"
            found.setdefault(name, set()).add(leaf.sharding.memory_kind)
    return found


MESHES = {
    "one": dict(),
    "fsdp": dict(mesh__fsdp=4, model__implementation="xla"),
    "zero1": dict(mesh__data=4, mesh__shard_optimizer=True, model__implementation="xla"),
    "muon": dict(optim__name="muon", mesh__fsdp=4, model__implementation="xla"),
    "skipped": dict(guards__skip_steps=3, guards__skip_spikes=2, train__ema_decay=0.9),
}


@pytest.mark.parametrize("name", MESHES)
def test_averages_on_the_host_give_the_same_bits(name, monkeypatch):
    monkeypatch.setattr("nsa_jax.nn.sharding._REPLICATE_BELOW", 1)
    changes, devices = MESHES[name], jax.devices()[: 4 if "mesh" in "".join(MESHES[name]) else 1]
    batches = [random_batch(tiny_config(**changes), seed) for seed in range(3)]
    if name == "skipped":
        batches[1]["loss_mask"] = batches[1]["loss_mask"] * float("nan")
    want, plain = steps(tiny_config(**changes), batches, devices)
    got, state = steps(tiny_config(**OFFLOAD, **changes), batches, devices)
    chex.assert_trees_all_equal(got, want)
    chex.assert_trees_all_equal(jax.device_get(state), jax.device_get(plain))
    assert kinds(state).pop("averages") == {"pinned_host"}
    assert {kind for part, found in kinds(state).items() if part != "averages" for kind in found} == {"device"}
    assert {kind for found in kinds(plain).values() for kind in found} == {"device"}


LAYERS = {
    "one": dict(),
    "data": dict(mesh__data=4),
    "fsdp-unscanned": dict(mesh__fsdp=4, model__scan_layers=False),
    "tensor-dropout": dict(mesh__tensor=2, model__dropout=0.2),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_whose_input_lies_on_the_host_train_with_the_same_bits(name):
    changes = dict(model__implementation="xla", train__grad_accum=2, **LAYERS[name])
    devices = jax.devices()[: 1 if name == "one" else 2 if "tensor" in name else 4]
    batches = [random_batch(tiny_config(), seed) for seed in range(2)]
    want, plain = steps(tiny_config(model__remat="block", **changes), batches, devices)
    got, state = steps(tiny_config(model__remat="offload", **changes), batches, devices)
    chex.assert_trees_all_equal(got, want)
    chex.assert_trees_all_equal(jax.device_get(state), jax.device_get(plain))


SHORT = dict(
    model__attention="dense", model__implementation="xla", model__num_layers=1, train__steps=4, train__save_every=2
)


@pytest.mark.parametrize(("before", "after"), [(True, True), (True, False), (False, True)])
def test_runs_are_resumed_with_and_without_it_bit_exactly(before, after, tmp_path, monkeypatch):
    make_run(tmp_path / "whole", **SHORT).run()
    stopped = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        stop_before(patch, 3, (stopped.mkdir() or stopped / "HALT").touch)
        assert make_run(stopped, train__offload_optimizer=before, **SHORT).run()["step"] == 3
    again = make_run(stopped, train__offload_optimizer=after, **SHORT)
    assert again.run()["start_step"] == 3 and losses(stopped) == losses(tmp_path / "whole")
    assert kinds(again._live[1])["averages"] == {"pinned_host" if after else "device"}


def test_states_that_are_made_anew_lie_where_the_config_says():
    made = setup(tiny_config(**OFFLOAD, **SHORT), VOCAB, one_device())
    state = made.init()
    assert kinds(state)["averages"] == {"pinned_host"}
    fresh = made.fresh_optimizer(state["params"], 7)
    assert kinds({"opt_state": fresh}) == {"averages": {"pinned_host"}, "counts": {"device"}}
    stage = made.another_stage(state)
    assert kinds(stage)["averages"] == {"pinned_host"}


def planned(gpu="h100", devices=4, **changes):
    """What preflight says of a dense model that is large enough for its state to matter."""
    small = dict(model__dim=256, model__head_dim=64, model__compute_dtype="bfloat16", model__implementation="auto")
    config = tiny_config(**small, **{**dict(model__attention="dense", data__seq_len=512), **changes})
    try:
        made = memory.for_target(config, gpu, devices, VOCAB)
    except aot.AheadOfTimeUnavailable as error:
        pytest.skip(str(error))
    with hollow_kernels():
        program = memory._lower_train_step(made, gpu).compile()
    return made, memory._train_memory(made, gpu, program), program


@pytest.mark.parametrize("mesh", [dict(mesh__fsdp=4), dict(mesh__shard_optimizer=True)], ids=["fsdp", "zero1"])
def test_a_gpu_has_the_memory_of_the_averages_for_other_things(mesh, usual_compilation, monkeypatch):
    monkeypatch.setattr("nsa_jax.nn.sharding._REPLICATE_BELOW", 1)
    made, without, _ = planned(**mesh)
    _, memory_with, program = planned(**mesh, **OFFLOAD)
    averages = 2 * 4 * made.num_parameters() / 4  # on each of 4 devices
    assert without.host == 0 and without.optimizer == pytest.approx(averages, rel=1e-2)
    assert memory_with.host == without.optimizer - memory_with.optimizer == pytest.approx(averages, rel=1e-2)
    assert memory_with.optimizer < 100  # counts of steps
    assert without.total - memory_with.total == pytest.approx(averages, rel=0.05)
    assert program.memory_analysis().host_alias_size_in_bytes == memory_with.host, "averages are copied on the host"


def test_a_gpu_has_the_memory_of_the_inputs_of_layers_for_other_things(usual_compilation):
    def found(remat):
        changes = dict(model__num_layers=12, model__remat=remat, data__seq_len=1024, train__batch_size=16)
        return planned(devices=1, **changes)[1]

    block, offload = found("block"), found("offload")
    layer = 16 * 1024 * 256 * 2  # rows, tokens, width, bytes
    assert (block.host, offload.host) == (0, 12 * layer)
    assert block.activations - offload.activations == 12 * layer
    # Some layers' inputs are on their way. Temporaries lie otherwise, which is worth less than one layer's.
    assert (12 - 4) * layer < block.total - offload.total < (12 + 1) * layer


def test_layers_that_are_not_scanned_are_refused():
    """XLA copies their inputs to the host when they are to come back, and keeps them on the device until then."""
    assert not validate(tiny_config(model__remat="offload"))
    (problem,) = validate(tiny_config(model__remat="offload", model__scan_layers=False))
    assert (problem.rule, problem.severity) == ("R060", "error") and "scan_layers=True" in problem.fix


def test_an_estimate_counts_what_lies_on_the_host_apart():
    made = {
        kind: setup(tiny_config(model__remat=kind, **OFFLOAD), VOCAB, one_device()) for kind in ("block", "offload")
    }
    block, offload = (memory.estimate(made[kind], "h100") for kind in ("block", "offload"))
    inputs = 2 * 8 * 48 * 32 * 4  # layers, rows, tokens, width, bytes
    assert block.host == 2 * 4 * made["block"].num_parameters()
    assert offload.host == block.host + inputs and offload.activations == block.activations - inputs
