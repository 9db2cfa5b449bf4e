"""Batches that grow: rows of each step, order of the data, numbers of a step, validation, resuming."""

import json

import jax
import numpy as np
import pytest

from nsa_jax.batch_ramp import BatchRamp
from nsa_jax.config import validate
from nsa_jax.train import flops
from nsa_jax.train.loop import Run
from nsa_jax.train.state import batch_sharding, setup, to_device
from nsa_jax.train.step import make_train_step

from .test_resume import stop_before
from .tiny import VOCAB, losses, make_run, one_device, rows, tiny_config

# 2 rows in steps 1 and 2, 6 in step 3, then 8; micro-batches of 2.
RAMP = dict(
    model__attention="dense", model__num_layers=1, train__steps=6, train__save_every=100, train__batch_size=8,
    train__grad_accum=4, train__batch_ramp=("2:2", "3:6"), train__log_every=10,
)  # fmt: skip


def test_rows_of_steps():
    ramp = BatchRamp.of({"batch_size": 8, "grad_accum": 4, "batch_ramp": ("2:2", "3:6")})
    assert [ramp.rows(step) for step in range(1, 7)] == [2, 2, 6, 8, 8, 8] and ramp.unit == 2
    assert [ramp.rows_before(steps) for steps in range(7)] == [0, 2, 4, 10, 18, 26, 34]
    plain = BatchRamp.of({"batch_size": 8, "grad_accum": 4})  # a config of before
    assert (plain.unit, plain.rows(1), plain.rows_before(5)) == (8, 8, 40)


@pytest.mark.parametrize(
    ("ramp", "said"),
    [
        (("2=2",), "'2=2' is not LAST_STEP:ROWS"),
        (("2:3",), "'2:3': rows must be a multiple of the micro-batch"),
        (("4:2", "4:4"), "last steps must be positive and ascend"),
    ],
)
def test_a_wrong_ramp_is_refused(ramp, said):
    (problem,) = validate(tiny_config(**{**RAMP, "train__batch_ramp": ramp}))
    assert problem.rule == "R010" and said in problem.message


def test_lanes_of_a_stream_must_share_the_pieces_of_a_ramp():
    stream = dict(data__source="hf", data__hf_path="text", data__hf_streaming=True, data__val_fraction=0.5)
    changes = {**RAMP, **stream, "model__vocab_size": 0, "data__synthetic": "random"}
    assert not validate(tiny_config(**changes, data__stream_lanes=2))
    (problem,) = validate(tiny_config(**changes, data__stream_lanes=4))
    assert problem.rule == "R007" and "stream_lanes=4: cannot share batch_ramp's pieces of 2 rows" in problem.message
    assert not validate(tiny_config(**{**changes, "train__batch_ramp": ()}, data__stream_lanes=4))


def test_a_ramp_trains_on_the_same_rows_in_order_and_is_resumed_bit_by_bit(tmp_path, monkeypatch):
    made = make_run(tmp_path / "whole", **RAMP)
    monkeypatch.setattr(made.pipeline, "epochs", lambda batches: {"": float(batches)})
    made.run()
    found = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    # A line's steps have batches of one size.
    assert [(row["step"], row["train/tokens"]) for row in found] == [(2, 4 * 48), (3, 10 * 48), (6, 34 * 48)]
    assert [row["data/epochs"] for row in found] == [2, 5, 17]  # pieces of 2 rows
    got = losses(tmp_path / "whole")

    small = {**RAMP, "train__batch_size": 2, "train__grad_accum": 1, "train__batch_ramp": ()}
    pieces = make_run(tmp_path / "pieces", **small).pipeline.train()
    state, seen = None, []
    for step, size in enumerate([2, 2, 6, 8, 8, 8], 1):
        if step in (1, 3, 4):
            fixed = {**RAMP, "train__batch_size": size, "train__grad_accum": size // 2, "train__batch_ramp": ()}
            same_size = setup(tiny_config(**fixed), VOCAB, one_device())
            train_step = make_train_step(same_size, np.ones(VOCAB, np.int32))
        with jax.set_mesh(same_size.mesh):
            state = same_size.init() if state is None else state
            taken = [next(pieces) for _ in range(size // 2)]
            batch = {name: np.concatenate([piece[name] for piece in taken]) for name in taken[0]}
            state, values = train_step(state, to_device(batch, batch_sharding(same_size.mesh)))
        seen.append(float(values["loss"]))
        assert seen[-1] == got.get(step, seen[-1])
    means = [np.mean(seen[:2]), seen[2], np.mean(seen[3:])]
    np.testing.assert_allclose([row["train/loss_mean"] for row in found], means, rtol=1e-12)

    workdir = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        stop_before(patch, 3, (workdir.mkdir() or workdir / "HALT").touch)
        assert make_run(workdir, **RAMP).run()["step"] == 3
    assert make_run(workdir, **RAMP).run()["start_step"] == 3
    assert losses(workdir) == got and rows(workdir)[6]["train/tokens"] == 34 * 48


def test_validation_is_on_the_same_rows(tmp_path):
    settings = dict(RAMP, train__steps=1, train__eval_batches=2, optim__warmup_steps=0)
    for name, ramp in (("ramp", RAMP["train__batch_ramp"]), ("plain", ())):
        make_run(tmp_path / name, **{**settings, "train__batch_ramp": ramp}).run()
    first = [json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[0]) for name in ("ramp", "plain")]
    assert first[0]["step"] == 0 and first[0]["val/loss"] == pytest.approx(first[1]["val/loss"], rel=1e-6)


def test_tokens_are_counted_as_they_were_trained_on_when_the_ramp_has_changed(tmp_path):
    saving = {**RAMP, "train__save_every": 1, "train__log_every": 1}
    make_run(tmp_path, **{**saving, "train__steps": 4}).run()
    make_run(tmp_path, **{**saving, "train__batch_ramp": ("2:2",)}).run()  # step 3 had 6 rows
    assert [row["train/tokens"] / 48 for row in rows(tmp_path).values()] == [2, 4, 10, 18, 26, 34]


def test_speed_and_mfu_are_of_the_steps_own_rows_on_all_devices(tmp_path, monkeypatch):
    """Each row's tokens per second and utilisation, of two devices, against the seconds of a step."""
    monkeypatch.setattr(flops, "peak_flops", lambda kind: 1e9)
    config = tiny_config(**RAMP | {"train__log_every": 1})
    run = Run(config, tmp_path, None, jax.devices()[:2])
    run.run()
    per_token = flops.train_flops_per_token(run.setup.model_config, 48)
    found = rows(tmp_path)
    timed = {step: row for step, row in found.items() if "perf/step_seconds" in row}
    assert found.keys() - timed.keys() == {1, 3, 4}  # each compiles for its rows
    for step, row in timed.items():
        tokens = {2: 2, 5: 8, 6: 8}[step] * 48
        assert row["perf/tokens_per_second"] == pytest.approx(tokens / row["perf/step_seconds"])
        assert row["perf/mfu"] == pytest.approx(per_token * tokens / row["perf/step_seconds"] / (2 * 1e9))
