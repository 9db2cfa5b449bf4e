"""Whether selection learns: what health figures say of lists, and the alarm for lists no better than random ones."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nsa_jax import inspect
from nsa_jax.ops import block_mass, blocks
from nsa_jax.ops.blocks import NSAConfig
from nsa_jax.train.state import batch_sharding, setup
from nsa_jax.train.watch import health
from nsa_jax.train.watch.guards import SELECTION_REPORTS, Guards

from .test_mesh import packed_batch
from .tiny import VOCAB, make_run, one_device, tiny_config

NSA = NSAConfig(compress_block=8, compress_stride=4, select_block=8, num_selected=3, num_local=1, window=10)


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
def test_figures_are_those_of_inspect(packed):
    """Held, random and best, at the queries that are looked at, are what `inspect.selection_quality` measures."""
    config = tiny_config(data__packing=packed, model__nsa__num_selected=3, model__nsa__num_local=1, model__init_std=0.5)
    made = setup(config, VOCAB, one_device())
    model = made.model(made.init()["params"])
    batch = packed_batch(config, 0)
    tokens, start = batch["inputs"][:1], batch["segment_start"][:1] if packed else None
    figures = health.forward_with_health(model, tokens, start)[1]
    starts = jnp.zeros(tokens.shape[1], jnp.int32) if start is None else start[0]
    positions, any_choice = health.choosing_queries(starts, model.config.nsa)
    assert bool(any_choice)
    wanted = inspect.selection_quality(model, tokens, np.asarray(positions), start)
    for name, other in (("held", "listed"), ("random", "random"), ("best", "oracle")):
        np.testing.assert_allclose(figures[f"selection_{name}"], wanted[other].mean((1, 2, 3)), rtol=1e-5)
    spread = np.asarray(figures["selection_best"] - figures["selection_random"])
    assert (spread > 0).all()


@pytest.mark.parametrize("mesh", [{"data": 4, "tensor": 2}, {"context": 4, "fsdp": 2}], ids=str)
def test_devices_agree(mesh):
    """The program of a run finds the same on eight devices as on one."""
    changes = dict(data__packing=True, model__nsa__num_selected=3, model__nsa__num_local=1, model__init_std=0.2)
    found = []
    for axes, devices in (({}, one_device()), (mesh, jax.devices())):
        config = tiny_config(**changes, **{f"mesh__{axis}": size for axis, size in axes.items()})
        made = setup(config, VOCAB, devices)
        with jax.set_mesh(made.mesh):
            batch = jax.device_put(packed_batch(config, 0), batch_sharding(made.mesh))
            found.append(jax.device_get(health.make_health(made)(made.init()["params"], batch)[0]))
    assert (found[0]["selection_best"] > found[0]["selection_random"]).all()
    for name, value in found[0].items():
        np.testing.assert_allclose(found[1][name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def test_queries_are_spread_over_those_with_a_choice():
    """Sixteen positions, each with more blocks than a list holds; in a row of short documents there are none."""
    start = jnp.where(jnp.arange(400) < 150, 0, 150)
    positions, any_choice = health.choosing_queries(start, NSA)
    assert bool(any_choice) and positions.shape == (16,)
    t = np.asarray(positions)
    assert bool(blocks.has_choice(positions, start[positions], NSA).all())
    choosing = np.flatnonzero(np.asarray(blocks.has_choice(jnp.arange(400), start, NSA)))
    places = np.searchsorted(choosing, t)
    assert np.abs(np.diff(places) - len(choosing) / 16).max() <= 1 and (t < 150).any() and (t >= 150).any()
    short = jnp.arange(400) // 20 * 20
    assert not bool(health.choosing_queries(short, NSA)[1])


def test_mass_in_chunks_is_the_mass():
    """Queries in memory four at a time, of a number that four does not divide, give what all at once give."""
    keys = jax.random.split(jax.random.key(0), 2)
    query, key = (jax.random.normal(k, (2, n, h, 16)) for k, n, h in zip(keys, (7, 60), (4, 2), strict=True))
    positions = jnp.tile(jnp.arange(20, 55, 5), (2, 1))
    start = jnp.where(positions > 30, 24, 0)
    whole = block_mass.block_mass(query, key, NSA, start, positions)
    np.testing.assert_allclose(
        block_mass.block_mass(query, key, NSA, start, positions, at_once=4), whole, rtol=1e-6, atol=1e-7
    )


def figures(held, random=0.2, best=0.6, layers=2):
    """Of healthy gates."""
    gates = {"gate_entropy": 1.0, "gate_share_max": 0.4, "gate_collapsed": 0.0}
    zeros = dict.fromkeys(("key_mismatches", "keys_counted", "keys_predicted"), 0.0)
    values = gates | zeros | {"selection_held": held, "selection_random": random, "selection_best": best}
    return {name: np.full(layers, value, np.float32) for name, value in values.items()}


@pytest.mark.parametrize(
    ("held", "step", "changes", "told"),
    [
        (0.21, 6, {}, 1),
        (0.21, 3, {}, 0),
        (0.3, 6, {}, 0),
        (0.15, 6, {"guards__min_selection_gain": 0.0}, 0),
        (0.21, 6, {"model__nsa__shared_kv": True}, 1),
    ],
    ids=["random lists", "too early", "lists that choose", "off", "shared keys"],
)
def test_alarm_for_lists_no_better_than_random(tmp_path, held, step, changes, told):
    """From half of the eight steps on, five reports of lists that make 2.5 % of the way raise an alarm with a fix."""
    config = tiny_config(**{"guards__min_selection_gain": 0.1} | changes)
    guards = Guards(config, workdir=tmp_path)
    for reports in range(1, SELECTION_REPORTS + 1):
        assert not guards.alarms
        health.check(figures(held), step, config, guards)
        health.check(figures(0.0, 0.0, 0.0), step, config, guards)  # rows without a choice say nothing
        assert len(guards.selection) == reports
    assert [alarm.name for alarm in guards.alarms] == ["selection"] * told
    shared = bool(changes.get("model__nsa__shared_kv"))
    assert all("2%" in alarm.message and ("shared_kv=True" in alarm.message) != shared for alarm in guards.alarms)


@pytest.mark.parametrize(("selector", "most"), [("compressed", "1.10"), ("mean_key", "0.69")])
def test_alarms_speak_of_the_branches_that_there_are(tmp_path, selector, most):
    """With mean keys there are two branches, and blocks are ranked by the keys that are read."""
    config = tiny_config(guards__min_selection_gain=0.1, model__nsa__selector=selector)
    guards = Guards(config, workdir=tmp_path)
    for _ in range(SELECTION_REPORTS):
        health.check(figures(0.21) | {"gate_entropy": np.array([0.6, 0.1])}, 6, config, guards)
    told = {alarm.name: alarm.message for alarm in guards.alarms}
    assert told.keys() == {"gate_entropy", "selection"}
    assert f"gate entropy 0.10 nats (limit 0.5, most {most})" in told["gate_entropy"]
    assert ("shared_kv=True" in told["selection"]) == (selector == "compressed")


def test_a_resumed_run_remembers_the_reports(tmp_path):
    """Reports before an interruption count as those after it; one good report among five keeps the alarm away."""
    config = tiny_config(guards__min_selection_gain=0.1)
    before, after = Guards(config, workdir=tmp_path), Guards(config, workdir=tmp_path)
    for _ in range(SELECTION_REPORTS - 1):
        health.check(figures(0.21), 6, config, before)
    after.restore(json.loads(json.dumps(before.state())))
    before_good = Guards(config, workdir=tmp_path)
    before_good.restore(before.state())
    health.check(figures(0.21), 6, config, after)
    health.check(figures(0.5), 6, config, before_good)
    assert len(after.alarms) == 1 and not before_good.alarms


def test_nothing_is_judged_without_a_difference():
    """Where the best lists hold no more than random ones, or no query has a choice, there is no gain to report."""
    assert health.selection_gain(0.2, 0.2, 0.21) is None
    assert health.selection_gain(0.0, 0.0, 0.0) is None
    assert health.selection_gain(0.4, 0.2, 0.6) == pytest.approx(0.5)


def test_a_run_tells(tmp_path):
    """A run whose lists miss the limit logs the figures from its start, and raises the alarm in its second half."""
    fields = dict(guards__health=True, guards__min_selection_gain=1.0, train__steps=8, model__nsa__num_selected=3)
    fields["model__nsa__num_local"] = 1
    run = make_run(tmp_path, model__init_std=0.5, **fields)
    run.run()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    gains = [row["health/selection_gain"] for row in rows if "health/selection_gain" in row]
    assert len(gains) == 8 and all(-1 < gain < 1 for gain in gains)
    alarms = [json.loads(line) for line in (tmp_path / "alarms.jsonl").read_text().splitlines()]
    assert [a["step"] for a in alarms if a["alarm"] == "selection"] == [5]
    layers = [json.loads(line) for line in (tmp_path / "health.jsonl").read_text().splitlines()]
    assert len(layers[0]["selection_held"]) == 2
