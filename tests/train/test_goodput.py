"""Goodput: seconds by cause add up to the wall time, over one start and over all starts of a run."""

import json
import time
from concurrent.futures import Future

import jax
import numpy as np
import pytest

from nsa_jax.train import batches, goodput, loop, timing
from nsa_jax.train.callbacks import Callback
from nsa_jax.train.goodput import Goodput
from nsa_jax.train.loop import Run
from tests.train.tiny import make_run, one_device, rows, tiny_config

PARTS = ("training", "data", "startup", "validation", "saving", "other")


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves: clock.now."""

    class Clock:
        now = 1000.0

    monkeypatch.setattr(goodput.time, "perf_counter", lambda: Clock.now)
    return Clock


def spend(clock, made, cause, seconds):
    with made.spent_on(cause):
        clock.now += seconds


def one_start(clock, workdir, first, last):
    """A start of 100 s: 30 startup, 5 and 5 validation, 44 training, 6 data, 3 and 1 saving, 6 other."""
    made = Goodput(workdir, clock.now)
    clock.now += 20
    made.resume(first)
    spend(clock, made, "validation", 5)
    clock.now += 10
    made.first_lap(clock.now)
    clock.now += 30  # a lap of 25 s, read 5 s after its end
    half = made.lap((first + last) // 2, 25, 6, clock.now - 5)
    clock.now += 20
    row = made.lap(last, 25, 0, clock.now)
    spend(clock, made, "validation", 5)
    spend(clock, made, "saving", 3)
    clock.now += 6
    spend(clock, made, "saving", 1)
    made.close()
    return made, half, row


def test_causes_add_up_to_the_wall_time(clock, tmp_path):
    made, half, row = one_start(clock, tmp_path, 0, 10)
    for found, expected in ((half, [19, 6, 30, 5, 0, 0]), (row, [44, 6, 30, 5, 0, 0])):
        np.testing.assert_allclose([found[f"time/{part}_seconds"] for part in PARTS], expected, atol=1e-9)
        np.testing.assert_allclose(found["time/wall_seconds"], sum(expected))
        np.testing.assert_allclose(found["perf/goodput"], expected[0] / sum(expected))
    start = made.summary()["start"]
    np.testing.assert_allclose([start[f"{part}_seconds"] for part in PARTS], [44, 6, 30, 10, 4, 6], atol=1e-9)
    assert start["wall_seconds"] == 100 and start["goodput"] == pytest.approx(0.44)


def test_steps_that_are_trained_again_count_once_over_all_starts(clock, tmp_path):
    """Starts of 100 s from steps 0, 5 and 0 of 10: half of the first one's training is lost, and then all."""
    one_start(clock, tmp_path, 0, 10)
    clock.now += 1e6  # between two starts the run costs nothing
    second, _, row = one_start(clock, tmp_path, 5, 10)
    run = second.summary()["run"]
    assert (run["starts"], run["wall_seconds"]) == (2, 200)
    assert run["goodput"] == pytest.approx((22 + 44) / 200) and run["repeated_seconds"] == pytest.approx(22)
    assert row["perf/goodput"] == pytest.approx(44 / 85) and row["perf/goodput_run"] == pytest.approx((22 + 44) / 185)
    run = one_start(clock, tmp_path, 0, 10)[0].summary()["run"]
    assert run["goodput"] == pytest.approx(44 / 300) and run["repeated_seconds"] == pytest.approx(88)
    written = json.loads((tmp_path / "goodput.json").read_text())
    assert written["run"] == run and [start["step"] for start in written["starts"]] == [0, 5, 10]
    parts = [f"{part}_seconds" for part in (*PARTS, "repeated")]
    for record in (run, *written["starts"]):
        assert sum(record[part] for part in parts) == pytest.approx(record["wall_seconds"])


@pytest.mark.parametrize("text", ["", "[]", '{"starts": [{"first_step": 0, "step": 2}]}', '{"starts": [3]}'])
def test_a_damaged_record_costs_only_what_it_held(text, clock, tmp_path, caplog):
    (tmp_path / "goodput.json").write_text(text)
    made = Goodput(tmp_path, clock.now)
    made.resume(1)
    clock.now += 2
    assert made.summary()["run"]["wall_seconds"] == 2 and "goodput is that of this start" in caplog.text
    assert made.summary()["run"]["startup_seconds"] == 2  # nothing was trained yet


@pytest.mark.parametrize(("finished", "idle"), [(None, 0.0), ("later", 0.0), (8.0, 4.0), (11.0, 3.0), (13.5, 0.5)])
def test_only_waits_without_work_on_the_device_are_lost(finished, idle):
    """The loop waits from 10 to 14; the device finishes what it has before, meanwhile, or later."""
    last = None if finished is None else Future()
    if isinstance(finished, float):
        last.set_result(finished)
    assert batches.idle_seconds(10.0, 14.0, last) == idle


def test_what_callbacks_take_is_no_training(tmp_path):
    class Slow(Callback):
        def on_step(self, step, metrics):
            time.sleep(0.3)

    made = Run(tiny_config(model__attention="dense", train__steps=10), tmp_path, None, one_device(), callbacks=[Slow()])
    start = made.run()["goodput"]["start"]
    assert start["other_seconds"] > 2.0 > start["training_seconds"]
    for row in rows(tmp_path).values():
        parts = [row[f"time/{part}_seconds"] for part in PARTS]
        assert min(parts) >= 0.0 and sum(parts) == pytest.approx(row["time/wall_seconds"])


def test_the_first_step_is_no_part_of_the_second_ones_time(tmp_path):
    """The device needs two seconds for it; it has been dispatched, and its program compiled, before that."""
    config = tiny_config(model__attention="dense", train__steps=3, train__log_every=2, train__eval_batches=0)
    made = Run(config, tmp_path, None, one_device())
    made.examine()
    train_step, slow = made.train_step, [2.0]

    def wait(value):
        time.sleep(slow.pop() if slow else 0.0)
        return value

    def step(state, batch):
        state, values = train_step(state, batch)
        return state, {**values, "loss": jax.jit(lambda x: jax.pure_callback(wait, x, x))(values["loss"])}

    made.train_step = step
    goodput = made.run()["goodput"]["start"]
    assert not slow and goodput["startup_seconds"] > 2.0
    assert rows(tmp_path)[2]["perf/step_seconds"] < 1.0


def test_the_process_began_before_now_and_not_long_ago():
    assert 0.0 <= time.perf_counter() - timing.process_start() < 3600.0


def test_a_run_says_where_its_time_went(tmp_path, monkeypatch):
    """A real run whose batches after the first come 0.2 s late, and its second start."""

    late = []  # seconds; the machine may pause, too

    class Slow(loop.Batches):
        def __init__(self, iterator, *args):
            super().__init__(self._late(iterator), *args)

        def _late(self, iterator):
            for batch in iterator:
                began = time.perf_counter()
                time.sleep(0.2 if self.last_step else 0.0)
                late.append(time.perf_counter() - began)
                yield batch

    monkeypatch.setattr(loop, "Batches", Slow)
    changes = {"train__save_every": 2, "train__eval_every": 2, "train__eval_batches": 1}
    first = make_run(tmp_path, train__steps=4, **changes).run()["goodput"]
    second = make_run(tmp_path, train__steps=6, **changes).run()["goodput"]
    for row in rows(tmp_path).values():
        spent = [row[f"time/{part}_seconds"] for part in PARTS]
        assert min(spent) >= -1e-6
        np.testing.assert_allclose(sum(spent), row["time/wall_seconds"], rtol=0.01)
        np.testing.assert_allclose(row["perf/goodput"], spent[0] / sum(spent), rtol=0.01)
    assert first["run"] == {"starts": 1, **first["start"]} and second["run"]["starts"] == 2
    assert all(first["start"][f"{part}_seconds"] > 0 for part in PARTS)
    assert 0.1 < first["start"]["data_seconds"] < sum(late[:4]) + 1.0
    assert second["run"]["wall_seconds"] == pytest.approx(
        first["start"]["wall_seconds"] + second["start"]["wall_seconds"], abs=0.5
    )
