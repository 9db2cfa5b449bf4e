"""Runs of models with a `layer_pattern`: training, resume, health, the self-test and exports."""

import json

import jax
import numpy as np
import pytest
from flax import nnx

import nsa_jax
from nsa_jax.export import main as export_main
from nsa_jax.nn import dense
from nsa_jax.report.reading import health_maps
from nsa_jax.train.errors import TrainingError
from nsa_jax.train.preflight import selftest
from nsa_jax.train.state import partition_spec, setup
from nsa_jax.train.watch import health
from tests.train.tiny import VOCAB, losses, make_run, tiny_config

PATTERN = ("window", "nsa")
MIXED = {"model__layer_pattern": PATTERN, "model__num_layers": 4, "model__dropout": 0.1}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Workdirs of a run of 4 steps, and of one that was stopped after 2 and resumed."""
    root = tmp_path_factory.mktemp("runs")
    common = MIXED | {"guards__health": True, "train__save_every": 2, "train__steps": 4}
    make_run(root / "whole", **common, train__eval_batches=1).run()
    make_run(root / "resumed", resume=f"{root / 'whole'}@2", **common).run()
    return root


def test_a_resumed_run_continues_bit_exactly(runs):
    whole, resumed = losses(runs / "whole"), losses(runs / "resumed")
    assert sorted(resumed) == [3, 4] and all(resumed[step] == whole[step] for step in resumed)


def test_health_is_written_under_the_real_numbers_of_layers(runs):
    rows = [json.loads(line) for line in (runs / "whole" / "health.jsonl").read_text().splitlines()]
    for row in rows:
        for name in set(row) - {"step"}:
            assert [value is None for value in row[name]] == [True, False, True, False], name
    shown = health_maps(rows)["z"]["gate_entropy"]
    assert {value for layer in shown[::2] for value in layer} == {None} and all(v > 0 for v in shown[1] + shown[3])


def test_layers_and_held_out_queries_are_recorded(runs):
    def read(name):
        return [json.loads(line) for line in (runs / "whole" / f"{name}.jsonl").read_text().splitlines()]

    rows = {row["step"]: row for row in read("metrics") if "norm/grad" in row}
    layers = read("layers")
    assert [row["step"] for row in layers] == [1, 2, 3, 4]
    for row in layers:
        assert all(len(values) == 4 for name, values in row.items() if name != "step") and len(row) == 10
        # Embedding and head are part of the whole model's norm alone.
        assert 0 < np.linalg.norm(row["gradients_norm"]) < rows[row["step"]]["norm/grad"]
        assert 0 < np.linalg.norm(row["weights_norm"]) < rows[row["step"]]["norm/param"]
    first, last = read("validation")
    assert (first["step"], last["step"]) == (0, 4)
    loss = np.average([b["loss"] for b in last["position"]], weights=[b["tokens"] for b in last["position"]])
    (val,) = (row["val/loss"] for row in read("metrics") if row["step"] == 4 and "val/loss" in row)
    assert loss == pytest.approx(val, rel=1e-5) and last["position"][-1]["to"] == 48
    found = last["selection"]
    assert found["layers"] == [1, 3] and found["queries"] == first["selection"]["queries"]
    assert np.shape(found["lists"]) == (2, 4, 2, 4)
    for query, text, lists in zip(found["queries"], found["text"], np.moveaxis(found["lists"], 1, 0), strict=True):
        own = query // 8
        assert text and lists[lists < 6].max() == own and (lists == own).any(-1).all()  # never the future


def test_a_wrong_list_names_its_layer_in_the_model():
    config = tiny_config(**MIXED)
    figures = {"key_mismatches": np.array([0, 3]), "keys_counted": np.ones(2), "keys_predicted": np.ones(2)}
    with pytest.raises(TrainingError, match="in layer 3, 3 queries"):
        health.check(figures, 1, config, None, layers=(1, 3))


def test_an_export_loads_back_bit_equal(runs, tmp_path):
    assert export_main([str(runs / "whole"), str(tmp_path / "export")]) == 0
    (one, _, config), (other, _, other_config) = nsa_jax.load(runs / "whole"), nsa_jax.load(tmp_path / "export")
    assert config.model.layer_pattern == other_config.model.layer_pattern == PATTERN
    states = [nnx.to_pure_dict(nnx.state(model)) for model in (one, other)]
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), *states)
    assert sorted(states[0]["blocks"]) == ["layer_0", "layer_1"]


def test_the_selftest_looks_at_a_layer_of_each_kind(monkeypatch):
    tested = selftest.selftest(tiny_config(**MIXED))
    assert tested.problems == [] and dict(tested.facts)["model"].startswith("2 layers (window, nsa) of width 32")
    real = dense.window_attention
    monkeypatch.setattr(dense, "window_attention", lambda q, k, *a, **kw: real(q, k * 0, *a, **kw))
    found = {problem.rule: problem.message for problem in selftest.selftest(tiny_config(**MIXED)).problems}
    assert set(found) == {"R041", "R042"}
    assert "key of window attention:" in found["R042"] and "blocks/layer_0/attention/w_in[key]" in found["R041"]


def test_every_stack_is_split_by_the_table():
    made = setup(tiny_config(**MIXED, mesh__fsdp=2, mesh__tensor=2, train__batch_size=8), VOCAB, jax.devices()[:8])
    path = tuple(map(jax.tree_util.DictKey, ("params", "blocks", "layer_1", "attention", "w_out")))
    assert partition_spec(path, (2, 64, 256), made.mesh) == jax.P(None, "tensor", "fsdp")
