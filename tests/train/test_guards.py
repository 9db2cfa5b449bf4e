"""Guards decide on numbers alone: what raises an alarm, what stops, what must not."""

import json
import os
import zlib

import numpy as np
import pytest

from nsa_jax.train.errors import TrainingError
from nsa_jax.train.watch import memory_use
from nsa_jax.train.watch.guards import Guards, check_implementations

from .tiny import tiny_config

GIB = 2**30


@pytest.fixture
def guards(tmp_path):
    return Guards(tiny_config(train__steps=10_000), tmp_path, bigram_entropy=3.0, say=lambda line: None)


def feed(guards, losses, first_step=1):
    guards.on_steps(first_step, [{"loss": float(x), "grad_norm": 1.0, "learning_rate": 1e-3} for x in losses])


def report(guards, step, *, speed=1000.0, seconds=1.0, waits=(0.01,), idle=None, programs=1, memory=None):
    idle = sum(waits) if idle is None else idle
    figures = dict(tokens_per_second=speed, seconds=seconds, waits=list(waits), idle=idle)
    return guards.on_report(step, **figures, programs=programs, memory=memory or {})


def falling(count, low=2.0, high=6.0, noise=0.1):
    random = np.random.default_rng(0)
    return low + (high - low) * np.exp(-np.arange(count) / (count / 5)) + noise * random.normal(size=count)


def test_a_healthy_loss_and_speed_raise_nothing(guards):
    random = np.random.default_rng(1)
    for start in range(1, 3000, 20):
        feed(guards, falling(3000)[start - 1 : start + 19], start)
        memory = {"host": (int(2 * GIB + random.integers(0, GIB // 8)), 64 * GIB)}
        report(guards, start + 19, speed=1000 * random.uniform(0.7, 1.3), waits=[0.05], memory=memory)
    assert guards.alarms == []


@pytest.mark.parametrize(("loss", "norm"), [(float("nan"), 1.0), (float("inf"), 1.0), (3.0, float("nan"))])
def test_values_that_are_not_finite_stop(guards, loss, norm):
    with pytest.raises(TrainingError, match=r"step 12: .*not finite\. Lower config\.optim\.learning_rate") as caught:
        guards.on_steps(11, [{"loss": 3.0, "grad_norm": 1.0, "learning_rate": 1e-3},
                             {"loss": loss, "grad_norm": norm, "learning_rate": 1e-3}])  # fmt: skip
    assert (caught.value.guard, caught.value.step, caught.value.save) == ("non_finite", 12, False)


def test_values_that_are_not_finite_may_be_left_out_so_many_times_in_a_row(tmp_path):
    config = tiny_config(guards__skip_steps=2)
    guards = Guards(config, tmp_path)
    bad, good = ({"loss": loss, "grad_norm": 1.0, "learning_rate": 1e-3} for loss in (float("nan"), 3.0))
    guards.on_steps(1, [good, bad, bad, good, bad])
    restarted = Guards(config, tmp_path)
    restarted.restore(guards.state())
    assert [(alarm.name, alarm.step) for alarm in guards.alarms] == [("skipped", 2)]  # told once for a while
    restarted.on_steps(6, [bad])
    with pytest.raises(TrainingError, match=r"not finite 3 times in a row \(config\.guards\.skip_steps=2\)"):
        restarted.on_steps(7, [bad])


def test_loss_floor_early_and_late(guards):
    feed(guards, [0.46])  # 0.15 x 3.0 = 0.45
    with pytest.raises(TrainingError, match="guard loss_floor.*labels are not shifted"):
        feed(guards, [0.44], 2)
    feed(guards, [0.4], 2000)  # a large model after thousands of steps
    with pytest.raises(TrainingError, match="guard loss_floor"):
        feed(guards, [0.1], 2001)


def test_a_trained_model_may_be_good_at_its_first_steps(tmp_path):
    """Another stage of a run counts its steps from 0; that its loss is low then is no sign of a leak. 0.1 would be."""
    guards = Guards(tiny_config(train__steps=500), tmp_path, bigram_entropy=3.0)
    guards.begin_trained()
    feed(guards, [0.44])
    resumed = Guards(tiny_config(train__steps=500), tmp_path, bigram_entropy=3.0)
    resumed.restore(guards.state())
    feed(resumed, [0.44], 2)
    with pytest.raises(TrainingError, match="guard loss_floor"):
        feed(resumed, [0.1], 3)


def test_a_good_model_of_bytes_is_not_taken_for_a_leak(tmp_path):
    """Losses of an honest run: 85M parameters, source code by bytes, one H200; bigrams have 2.641 nats."""
    guards = Guards(tiny_config(train__steps=500), tmp_path, bigram_entropy=2.641)
    for step, loss in ((10, 3.3), (100, 1.75), (200, 1.33), (300, 1.19), (350, 1.05), (500, 0.8)):
        feed(guards, [loss], step)


def test_no_floor_without_an_entropy(tmp_path):
    feed(Guards(tiny_config(), tmp_path), [0.001, 0.002])


def test_a_spike_raises_one_alarm(guards):
    feed(guards, falling(200))
    feed(guards, [5.5, 5.6], 201)
    assert guards.summary() == {"spike": 1}
    assert "loss 5.500" in guards.alarms[0].message and guards.alarms[0].step == 201


def test_a_plateau_raises_an_alarm(tmp_path):
    config = tiny_config(train__steps=10_000, guards__plateau_steps=300)
    guards = Guards(config, tmp_path, say=lambda line: None)
    for start in range(0, 1000, 20):
        feed(guards, np.concatenate([falling(400), np.full(600, 2.1)])[start : start + 20], start + 1)
        report(guards, start + 20)
    assert set(guards.summary()) == {"plateau"}
    assert 600 <= guards.alarms[0].step <= 900 and "has not fallen since step" in guards.alarms[0].message


def test_throughput_collapse_is_noticed_in_three_intervals(guards):
    for step in range(10, 110, 10):
        report(guards, step, speed=1000 + step)
    assert report(guards, 110, speed=400)["alarm/total"] == 0
    report(guards, 120, speed=400)
    row = report(guards, 130, speed=400)
    assert guards.summary() == {"throughput": 1} and row["alarm/throughput"] == 1.0
    assert "3 intervals in a row under half the usual" in guards.alarms[0].message


def test_one_slow_interval_is_no_collapse(guards):
    for step in range(10, 400, 10):
        report(guards, step, speed=100 if step % 50 == 0 else 1000)
    assert guards.alarms == []


def test_a_hiccup_of_the_machine_is_no_collapse(guards):
    for step in range(10, 400, 10):
        slow = 200 <= step < 250
        report(guards, step, speed=100 if slow else 1000, seconds=0.5 if slow else 0.05, waits=[0.004] * 10)
    assert guards.alarms == []


def test_a_toys_waits_of_less_than_a_second_are_not_slow_data(guards):
    for step in range(10, 60, 10):
        report(guards, step, seconds=0.2, waits=[0.006] * 10)
    assert guards.alarms == []


def test_waiting_for_data_is_noticed(guards):
    rows = [report(guards, step, waits=[0.1, 0.15]) for step in (10, 20, 30)]
    assert rows[0]["perf/data_wait_share"] == pytest.approx(0.25)
    assert guards.summary() == {"data_wait": 1} and "25% of the time" in guards.alarms[0].message


def test_waits_that_overlap_with_work_of_the_device_are_not_slow_data(guards):
    rows = [report(guards, step, waits=[0.4, 0.4], idle=0.1) for step in (10, 20, 30)]
    assert rows[0]["perf/data_wait_share"] == pytest.approx(0.8) and guards.alarms == []


def test_memory_that_will_run_out_is_noticed_long_before(guards):
    for step in range(20, 2000, 20):
        report(guards, step, memory={"host": (2 * GIB + step * 8 * 2**20, 64 * GIB)})  # 80 GiB by the end
        if guards.alarms:
            break
    assert guards.summary() == {"memory_slope": 1} and guards.alarms[0].step < 500
    assert "host memory grows by 8,000 MiB per 1,000 steps" in guards.alarms[0].message


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/\n", {"memory.max": "3000000\n"}, 3_000_000),  # a container
        ("0::/slurm/job_7/step_0\n", {"slurm/job_7/memory.max": "4000000\n", "slurm/job_7/step_0/memory.max": "max\n"},
         4_000_000),
        ("5:cpu:/\n4:memory:/docker/ab\n", {"memory/memory.limit_in_bytes": "5000000\n"}, 5_000_000),
        ("0::/\n", {"memory.max": "max\n"}, None),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, None),
        (None, {}, None),
    ],
    ids=["container", "job", "version 1", "no limit", "no limit, version 1", "no groups"],
)  # fmt: skip
def test_the_hosts_memory_is_what_the_process_may_use(groups, files, limit, tmp_path, monkeypatch):
    """In a container or a job that is less than the machine has, and a leak ends the run there."""
    if groups is not None:
        (tmp_path / "own").write_text(groups)
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text)
    monkeypatch.setattr(memory_use, "_GROUPS_OF_PROCESS", tmp_path / "own", raising=False)
    monkeypatch.setattr(memory_use, "_GROUPS", tmp_path / "groups", raising=False)
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert memory_use.host_memory()[1] == (limit or machine)


def test_memory_that_levels_off_or_will_suffice_is_fine(guards):
    for step in range(20, 4000, 20):
        levels = 2 * GIB + min(step, 60) * 4 * 2**20
        report(guards, step, memory={"host": (levels, 8 * GIB), "device": (GIB + step * 1000, 80 * GIB)})
    assert guards.alarms == []


def test_compiling_again_stops_and_compiling_before_step_two_does_not(guards):
    report(guards, 1, programs=1)
    report(guards, 2, programs=2)
    report(guards, 3, programs=2)
    with pytest.raises(TrainingError, match="guard recompilation: the train step was compiled again"):
        report(guards, 4, programs=3)


def test_validation_gap_stops(guards):
    feed(guards, [2.0] * 100)
    assert guards.on_validation(100, 3.4, None) is None
    with pytest.raises(TrainingError, match="guard generalisation_gap.*memorises") as caught:
        guards.on_validation(200, 3.6, None)
    assert caught.value.save


def test_early_stopping_counts_validations_without_improvement(tmp_path):
    guards = Guards(tiny_config(guards__early_stop=2, guards__early_stop_delta=0.01), tmp_path)
    losses = (3.0, 2.5, 2.495, 2.51)
    reasons = [guards.on_validation(step, loss, 2.4) for step, loss in enumerate(losses, 1)]
    assert reasons[:3] == [None] * 3 and "2 validations without improvement on 2.5000" in reasons[3]


def test_a_batch_may_not_come_twice_but_the_next_epoch_may(guards):
    random = np.random.default_rng(0)
    batches = [{"inputs": random.integers(0, 9, (4, 64))} for _ in range(300)]
    for step, batch in enumerate(batches, 1):
        guards.on_batch(step, batch)
    guards.on_batch(301, batches[0])  # long ago
    with pytest.raises(TrainingError, match="step 302, guard frozen_loader: the batch equals that of step 300"):
        guards.on_batch(302, batches[299])


def test_another_pass_may_bring_a_batch_again_but_no_loader_stands_still(guards):
    """A healthy run of long rows was stopped in its second pass, and again after every restart."""
    batches = [{"inputs": np.full((1, 8), i)} for i in range(5)]
    for step in range(1, 16):
        guards.on_batch(step, batches[(step * 2) % 5], {"a": (step - 1) // 5, "b": 0})
    restored = Guards(tiny_config(), say=lambda line: None)
    restored.restore(json.loads(json.dumps(guards.state())))
    with pytest.raises(TrainingError, match="step 16, guard frozen_loader: the batch equals that of step 12"):
        restored.on_batch(16, batches[24 % 5], {"a": 2, "b": 0})
    guards.on_batch(16, batches[24 % 5], {"a": 3, "b": 0})
    guards.on_batch(17, batches[24 % 5], {"a": 4, "b": 0})  # the last row of a pass, and the first of the next
    with pytest.raises(TrainingError, match="step 18, guard frozen_loader: the batch equals that of step 17"):
        guards.on_batch(18, batches[24 % 5], {"a": 5, "b": 0})


def test_batches_of_one_crc32_are_not_taken_for_equal(guards):
    batches = [np.array([row], np.int32) for row in ((3, 1), (5, 627793885))]
    assert zlib.crc32(batches[0].tobytes()) == zlib.crc32(batches[1].tobytes())
    for step, batch in enumerate(batches, 1):
        guards.on_batch(step, {"inputs": batch})


def test_a_loss_that_rises_for_long_is_divergence(guards):
    feed(guards, falling(400))
    with pytest.raises(TrainingError, match=r"guard divergence: .*learning_rate=0.003\).* Lower config") as caught:
        feed(guards, np.linspace(2.0, 6.0, 200), 401)
    assert caught.value.guard == "divergence" and not caught.value.save


def test_a_spike_that_passes_is_no_divergence(guards):
    feed(guards, falling(400))
    feed(guards, [6.0] * 20 + [2.0] * 100, 401)
    assert set(guards.summary()) == {"spike"}


def test_a_gap_in_a_spike_or_after_a_rise_is_not_memorisation(guards):
    feed(guards, falling(400))
    feed(guards, [5.0], 401)
    assert guards.on_validation(401, 5.2, None) is None  # validation is no worse than training at this moment
    feed(guards, [3.6] * 60, 402)
    with pytest.raises(TrainingError, match="guard divergence"):
        guards.on_validation(461, 9.0, None)


@pytest.mark.parametrize("interruption", [1, 40, 230, 310, 420])
def test_interrupted_guards_raise_the_same_alarms(tmp_path, interruption):
    losses = np.concatenate([falling(200), [6.0], np.full(600, 2.1)])

    def told(interruptions):
        """(step, alarm) of a run, with the step at which early stopping came, interrupted after some steps."""
        config = tiny_config(train__steps=10_000, guards__plateau_steps=100, guards__early_stop=3)
        found = []

        def start(state=None):
            made = Guards(config, say=lambda line: found.append(line))
            if state is not None:
                made.restore(json.loads(json.dumps(state)))
            return made

        guards = start()
        for step in range(1, len(losses) + 1):
            batch = np.arange(8) + (step if step < 450 else 449 - 60 * (step == 500))
            if step < 450 or step == 500:
                try:
                    guards.on_batch(step, {"inputs": batch})
                except TrainingError as error:
                    found.append(str(error))
            feed(guards, [losses[step - 1]], step)
            if step % 10 == 0:
                report(guards, step)
            if step % 50 == 0 and (reason := guards.on_validation(step, 2.5 + (step > 200), None)):
                found.append(f"step {step}: {reason}")
            if step in interruptions:
                guards = start(guards.state())
        return found, guards.summary()

    uninterrupted = told(())
    assert any("spike" in line for line in uninterrupted[0]) and uninterrupted[1]["plateau"] >= 2
    assert any("early stopping" in line for line in uninterrupted[0])
    assert any("frozen_loader" in line for line in uninterrupted[0])
    assert told((interruption,)) == uninterrupted


def test_alarms_are_not_repeated_at_every_report(guards):
    for step in range(10, 500, 10):
        report(guards, step, waits=[0.5])
    assert guards.summary()["data_wait"] == 3  # of 47 reports


def test_further_processes_tell_only_what_concerns_them_alone(tmp_path):
    told = []
    guards = Guards(tiny_config(), tmp_path, say=told.append, active=False)
    guards.alarm("spike", 7, "the loss is the same on all processes")
    guards.alarm("data_wait", 8, "this process waits")
    assert told == ["ALARM data_wait at step 8: this process waits"]
    assert guards.summary() == {"spike": 1, "data_wait": 1} and not list(tmp_path.iterdir())


def test_another_implementation_than_asked_for_is_an_error():
    check_implementations("auto", {"select_blocks": "xla"})
    check_implementations("pallas", {"select_blocks": "pallas"})
    with pytest.raises(TrainingError, match="implementation='pallas', but select_blocks by 'xla'"):
        check_implementations("pallas", {"select_blocks": "xla", "window_attention": "pallas"})
