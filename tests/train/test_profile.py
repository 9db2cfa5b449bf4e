"""--profile=START:STOP: a trace of these steps, and clear refusals."""

import gzip
import json
import re

import pytest

from nsa_jax.config import ConfigError
from nsa_jax.train.loop import Run
from nsa_jax.train.profiling import Window, parse_window

from .tiny import losses, make_run, one_device, tiny_config

SMALL = dict(model__attention="dense", model__num_layers=1, train__steps=6)


def profiled(workdir, window, **changes):
    return Run(tiny_config(**{**SMALL, **changes}), workdir, None, one_device(), parse_window(window))


def traced_steps(workdir):
    """Steps in the trace for Perfetto."""
    (path,) = (workdir / "profile").rglob("perfetto_trace.json.gz")
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    found = [event.get("args", {}).get("step_num") for event in events if event.get("name") == "train"]
    return sorted(int(step) for step in found if step is not None)


def test_the_trace_holds_these_steps_and_changes_no_loss(tmp_path, capsys):
    make_run(tmp_path / "plain", **SMALL).run()
    run = profiled(tmp_path / "traced", "3:5")
    assert run.run()["finished"]
    assert traced_steps(tmp_path / "traced") == [3, 4]
    assert len(list((tmp_path / "traced" / "profile").rglob("*.xplane.pb"))) == 1  # for xprof
    assert f"profile of steps 3 to 4 in {tmp_path / 'traced' / 'profile'}" in capsys.readouterr().out
    assert losses(tmp_path / "traced") == losses(tmp_path / "plain")
    assert run.train_step._cache_size() == 1


def test_a_run_that_stops_within_the_window_still_writes_the_trace(tmp_path, capsys):
    run = profiled(tmp_path, "3:6")
    step = run.train_step

    def halting(state, batch):
        if int(state["step"]) == 3:
            (tmp_path / "HALT").touch()
        return step(state, batch)

    run.train_step = halting
    assert run.run()["step"] == 4
    assert traced_steps(tmp_path) == [3, 4]
    assert "profile of steps 3 to 4 in " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("20", "is not START:STOP"), ("a:b", "is not START:STOP"), ("5:", "is not START:STOP"),
        ("-3:4", "is not START:STOP"), ("1:4", "while it compiles"), ("9:9", "holds no step"), ("9:4", "holds no step"),
        ("10:500", "490 steps are too many"),
    ],
)  # fmt: skip
def test_windows_that_mean_nothing(text, message):
    with pytest.raises(ConfigError, match=f"--profile={re.escape(text)}: .*{message}"):
        parse_window(text)


def test_windows_that_this_start_does_not_train(tmp_path):
    assert parse_window(" 20:25 ") == Window(20, 25)
    with pytest.raises(ConfigError, match="the run ends with step 6"):
        profiled(tmp_path, "5:8").run()
    make_run(tmp_path, **{**SMALL, "train__steps": 3, "train__save_every": 3}).run()
    with pytest.raises(ConfigError, match="begins with step 4, which compiles.*use 5 or later"):
        run = Run(tiny_config(**SMALL), tmp_path / "new", f"{tmp_path}@3", one_device(), parse_window("4:6"))
        run.run()
    assert profiled(tmp_path, "5:7", train__save_every=3).run()["start_step"] == 3
    assert traced_steps(tmp_path) == [5, 6]


def test_a_run_that_goes_on_behind_the_window_traces_nothing(tmp_path, caplog):
    """The same command starts it again, after a preemption or a rollback."""
    assert profiled(tmp_path, "2:4", train__save_every=2).run()["finished"]
    summary = profiled(tmp_path, "2:4", train__save_every=2, train__steps=8).run()
    assert (summary["start_step"], summary["step"]) == (6, 8)
    assert (
        "--profile=2:4: the run goes on with step 7, which compiles: nothing is traced; use 8 or later" in caplog.text
    )
