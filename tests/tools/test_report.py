"""The run report: what it reads from runs in every state, and that its page is safe, whole and written atomically."""

import io
import json
import math
import os
import re
import shlex
import subprocess
import sys
import urllib.parse

import jax.numpy as jnp
import numpy as np
import pytest

from nsa_jax import NSAConfig
from nsa_jax.config import default_config
from nsa_jax.nn import ModelConfig
from nsa_jax.offline_page import embed
from nsa_jax.report import ReportError, build, read_run
from nsa_jax.report.__main__ import main
from nsa_jax.report.page import _HERE, _SCRIPTS, differences, labels
from nsa_jax.report.reading import COLUMNS, POINTS, curves, health_maps, medians, outcome, thin
from nsa_jax.train import metrics
from nsa_jax.train.watch import health
from nsa_jax.train.watch.layers import layer_figures

from .reported import (
    AWKWARD,
    LAYERS,
    SAMPLE,
    SPIKE,
    health_row,
    layers_row,
    lines,
    train_row,
    write_full,
    write_stopped,
)


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    return write_full(tmp_path_factory.mktemp("runs") / AWKWARD)


@pytest.fixture
def stopped(tmp_path):
    return write_stopped(tmp_path / "narrow")


def test_a_long_curve_keeps_its_ends_and_every_spike():
    values = np.sin(np.arange(20_000) / 500)
    values[777], values[13_131], values[15_000] = 40.0, -30.0, math.nan
    kept = thin(np.arange(20_000), values)
    assert POINTS * 0.9 < len(kept) <= POINTS + 2
    assert {0, 777, 13_131, 19_999} <= set(kept.tolist()) and (np.diff(kept) > 0).all()


def test_what_is_not_finite_is_a_gap_and_an_event():
    rows = [train_row(step, math.nan if step in (3, 4) else 1.0) for step in range(1, 8)]
    found, events = curves(rows)
    assert found["train/loss"]["y"] == [1.0, 1.0, None, None, 1.0, 1.0, 1.0]
    assert "train/loss is not finite at 2 of 7 points, first at step 3" in [event["message"] for event in events]


def test_the_median_of_a_long_run_is_that_of_all_its_points():
    """Of a curve that was thinned the smallest and the largest of each piece are left: half of them are high."""
    speeds = {step: 60_000.0 if step % 5 in (1, 2, 3) else 100_000.0 for step in range(1, 15_001)}
    rows = [{"step": step, "perf/tokens_per_second": speed} for step, speed in speeds.items()]
    thinned = np.array(curves(rows)[0]["perf/tokens_per_second"]["y"])
    assert (thinned == 100_000).mean() > 0.49
    assert medians(rows) == {"perf/tokens_per_second": 60_000.0}


def test_steps_that_were_run_again_replace_the_earlier_ones():
    rows = [train_row(1, 3.0), train_row(2, 9.0), train_row(2, 2.5), {"step": 2, "val/loss": 2.6, "time": 1.0}]
    found, _ = curves(rows)
    assert found["train/loss"] == {"x": [1, 2], "y": [3.0, 2.5], "n": 2} and found["val/loss"]["y"] == [2.6]


def test_heat_maps_keep_the_worst_column_and_average_the_others():
    rows = [{"step": s, "gate_entropy": [1.0, 1.0], "block_overlap": [0.5, 0.5]} for s in range(1, 10 * COLUMNS + 1)]
    rows[1234] = {"step": 1235, "gate_entropy": [1.0, 0.2], "block_overlap": [0.5, 0.0]}
    rows[77] = {"step": 78, "gate_entropy": [math.nan, 1.0]}
    found = health_maps(rows)
    assert (found["layers"], found["n"], len(found["x"])) == (2, 10 * COLUMNS, COLUMNS)
    assert found["z"]["gate_entropy"][1][123] == 0.2 and set(found["z"]["gate_entropy"][0]) == {1.0}
    assert found["z"]["block_overlap"][1][123] == pytest.approx(0.45) and found["z"]["block_overlap"][0][7] == 0.5


def test_a_weight_that_overflowed_is_seen_and_a_missing_figure_is_none():
    rows = [
        {"step": s, "weights_largest": [2.0, None if s == 9 else 2.0], "gate_entropy": [None, 1.0]}
        for s in range(1, 2 * COLUMNS + 1)
    ]
    found = health_maps(rows)["z"]
    assert found["weights_largest"][1][:6] == [2.0, 2.0, 2.0, 2.0, None, 2.0] and set(found["weights_largest"][0]) == {
        2.0
    }
    assert set(found["gate_entropy"][0]) == {None} and set(found["gate_entropy"][1]) == {1.0}


def test_a_killed_run_is_read_up_to_its_last_whole_line(full):
    run = read_run(full)
    assert run["outcome"]["state"] == "interrupted" and run["outcome"]["step"] == 5000
    assert run["notes"] == ["metrics.jsonl: 1 line cut off or not a JSON object with a step, left out"]
    loss = run["series"]["train/loss"]
    assert loss["n"] == 5000 and len(loss["x"]) <= POINTS + 2 and SPIKE[1] == loss["y"][loss["x"].index(SPIKE[0])]
    assert run["health"]["layers"] == LAYERS and len(run["health"]["x"]) == COLUMNS
    assert run["tokens_per_step"] == 1024
    kinds = [(event["step"], event["kind"], event["name"]) for event in run["events"]]
    assert kinds == [(2345, "alarm", "spike"), (3000, "alarm", "gate_entropy"), (4000, "alarm", "not_finite"),
                     (4500, "note", "checkpoint")]  # fmt: skip
    assert [sample["step"] for sample in run["samples"]] == [0, 500, 1000, 1500, 2000]
    assert [cell["exact_match"] for cell in run["evaluation"]["needles"]["needle"]] == [0, 1, 0, 1]
    assert run["evaluation"]["position"][-1]["to"] == 256 and run["evaluation"]["step"] == 4500
    assert {name: run["changed"][name] for name in ("model.nsa.window", "train.batch_size")} == {
        "model.nsa.window": default_config().model.nsa.window,
        "train.batch_size": default_config().train.batch_size,
    }
    assert len(run["changed"]) == 8 and run["config"]["model.nsa.window"] == 64
    started = shlex.join(["python", "train.py", f"--config.name={AWKWARD}"])
    assert run["commands"][0] == {"what": "train", "command": started}
    assert f"python -m nsa_jax.report {shlex.quote(str(full))}" in [row["command"] for row in run["commands"]]


def test_block_lists_over_training_keep_what_was_chosen(full):
    found = read_run(full)["validation"]
    assert [row["step"] for row in found["positions"]][::7] == [0, 5000] and len(found["positions"]) == 8
    assert found["positions"][-1]["bins"][-1] == {"from": 128, "to": 256, "loss": 2.5, "tokens": 100}
    selection = found["selection"]
    assert selection["steps"] == list(range(0, 5001, 500)) and selection["groups"] == 1
    assert selection["kinds"] == [[3, 3, 3] + [0] * 13, [2] + [1] * 13 + [2, 2]]  # everything fits; forced at the ends
    for index, step in enumerate(selection["chosen"]):
        assert step == [[[[]], [[3 + index if layer == 2 else 1]]] for layer in range(LAYERS)]


def test_the_page_links_to_the_exploration_of_a_run(full, tmp_path):
    run = read_run(full)

    def links(folder):
        data = re.search(r'id="data">(.*?)</script>', build([run], folder), re.S).group(1)
        return json.loads(data)["runs"][0]["explore"]

    name = urllib.parse.quote(full.name)
    assert links(full) == "explore.html" and links(full.parent) == f"{name}/explore.html" and links(None) is None
    assert links(tmp_path / "none") == f"{os.path.relpath(full.parent, tmp_path / 'none')}/{name}/explore.html"


def test_curves_that_are_smoothed_have_the_means_of_stretches():
    """The page smooths them: smallest and largest values of skewed losses lie around another middle."""
    values = 2.5 + 0.05 * np.random.default_rng(0).gamma(2.0, 1.0, 30_000)
    rows = [{"step": step, "train/loss": float(value)} for step, value in enumerate(values, 1)]
    rows[-1]["train/loss"] = None
    found = curves(rows)[0]["train/loss"]
    assert len(found["mean"]) == len(found["x"]) < 1600
    assert found["mean"][-1] is None is found["y"][-1]
    assert np.mean(found["mean"][:-1]) == pytest.approx(values.mean(), abs=1e-3)
    assert "mean" not in curves(rows[:1000])[0]["train/loss"]


def test_texts_lose_what_cannot_be_shown_and_nothing_else(full):
    text = read_run(full)["samples"][-1]["text"]
    expected = SAMPLE
    for hidden in "\x00\x1b\ud800\u202e":
        expected = expected.replace(hidden, hidden.encode("unicode_escape", "surrogatepass").decode())
    assert text == expected and r"\x00" in text and "文" in text


@pytest.mark.parametrize(
    ("summary", "stop", "beat", "state", "title"),
    [
        ({"step": 30, "finished": True}, {}, {}, "finished", "Finished"),
        ({"step": 30, "stopped_by": "SIGTERM"}, {}, {}, "requested", "Stopped by SIGTERM"),
        ({"step": 30, "stopped_by": "early stopping: 3"}, {}, {}, "requested", "Stopped early"),
        ({"step": 20, "finished": True}, {}, {}, "interrupted", "Interrupted"),  # was continued after it had ended
        ({}, {"guard": "spike", "step": 30, "time": 104.0}, {}, "stopped", "Stopped by the guard spike"),
        ({}, {"guard": "spike", "step": 10, "time": 50.0}, {}, "interrupted", "Interrupted"),  # and resumed since
        ({"step": 30, "finished": True}, {"guard": "spike", "time": 50.0}, {}, "finished", "Finished"),
        ({}, {}, {"event": "alive", "time": 990.0}, "running", "Still running"),
        ({}, {}, {"event": "alive", "time": 300.0}, "interrupted", "Interrupted"),
        ({"step": 20, "finished": True}, {}, {"event": "alive", "time": 990.0}, "running", "Still running"),
    ],
)  # fmt: skip
def test_the_outcome_is_that_of_the_youngest_evidence(summary, stop, beat, state, title):
    rows = [{"step": step, "time": 100.0 + step / 10} for step in (10, 20, 30)]
    found = outcome(40, rows, summary, stop, beat, now=1000.0)
    assert (found["state"], found["title"]) == (state, title)


@pytest.mark.parametrize(
    ("step", "source", "said"),
    [
        (0, "/runs/a/checkpoints@1000", "began with the weights of /runs/a/checkpoints@1000"),  # --stage
        (0, "/exported/short", "began with the weights of /exported/short"),
        (0, None, "resumed after step 0 of {}"),  # its own checkpoint, of a request before the first step
        (400, None, "resumed after step 400 of {}"),
        (400, "/runs/a/checkpoints", "resumed after step 400 of /runs/a/checkpoints"),
    ],
)
def test_a_stage_and_the_weights_of_a_model_are_not_resumed_after_step_0(step, source, said, tmp_path):
    env = {"config": {}, "start_step": step, "resumed_from": source or str(tmp_path)}
    (tmp_path / "env.json").write_text(json.dumps(env))
    assert [event["message"] for event in read_run(tmp_path)["events"]] == [said.format(tmp_path)]


def test_a_guard_stopped_a_run_whose_clock_was_set_back():
    rows = [{"step": 10, "time": 9000.0}, {"step": 20, "time": 100.0}]
    assert outcome(40, rows, {}, {"guard": "spike", "time": 104.0}, {}, now=1000.0)["state"] == "stopped"


def test_a_run_whose_config_asks_for_few_heartbeats_is_running_between_them(stopped):
    env = json.loads((stopped / "env.json").read_text())
    env["config"]["guards"]["heartbeat_seconds"] = 600.0
    (stopped / "env.json").write_text(json.dumps(env))
    lines(stopped / "heartbeat_0.jsonl", [{"event": "alive", "time": 1e9}])
    (stopped / "stopped.json").unlink()
    assert read_run(stopped, now=1e9 + 599)["outcome"]["state"] == "running"
    assert read_run(stopped, now=1e9 + 3601)["outcome"]["state"] == "interrupted"


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (True, "the state was saved; the same command resumes"),
        (False, "nothing was saved: config.train.save_every is 0"),
    ],
)
def test_a_run_that_was_stopped_tells_whether_it_was_saved(saved, message):
    summary = {"step": 30, "stopped_by": "HALT", "saved": saved}
    assert outcome(40, [{"step": 30}], summary, {}, {}, now=1000.0)["message"] == message


def test_a_run_that_a_guard_stopped_tells_which_and_why(stopped):
    run = read_run(stopped)
    assert run["outcome"]["title"] == "Stopped by the guard loss_floor" and run["outcome"]["step"] == 30
    assert run["outcome"]["message"].endswith("too</i> good (no checkpoint was kept)")
    assert run["health"] is None and run["samples"] == [] and run["evaluation"] == {} and run["goodput"] is None


def test_damaged_files_cost_what_they_held_and_no_more(stopped):
    (stopped / "env.json").write_text('{"config": ')
    (stopped / "stopped.json").write_text("[1]")
    (stopped / "goodput.json").write_text('{"run": {"wall_seconds": "x", "training_seconds": 1e999}}')
    (stopped / "evaluation").mkdir()
    (stopped / "evaluation" / "evaluation.json").write_text('{"tasks": {"position": {"bins": [{"from": 0}, 3]}}}')
    rows = [
        '{"step": 1e999}',
        '{"step": 1' + "0" * 400 + "}",
        '"x"',
        "[]",
        "{}",
        '{"step": 7, "train/loss": "NaN", "a": true}',
    ]
    with (stopped / "metrics.jsonl").open("ab") as file:
        file.write("\n".join(rows).encode() + b'\n\xff\xfe{"step"\n')
    run = read_run(stopped)
    assert run["notes"][0] == "metrics.jsonl: 6 lines cut off or not a JSON object with a step, left out"
    assert (
        run["notes"][1:]
        == [f"{name}.json could not be read and is left out" for name in ("stopped", "env", "evaluation")][:2]
    )
    assert run["config"] == {} and run["outcome"]["steps"] is None and run["evaluation"]["position"] == []
    assert run["goodput"] is None
    assert "<!doctype html>" in build([run])


def test_runs_are_told_apart_by_as_much_of_the_path_as_needed():
    assert labels([{"path": "/r/a"}]) == ["a"] and labels([{"path": "/r/a"}, {"path": "/r/b"}]) == ["a", "b"]
    assert labels([{"path": "/x/seed0/run"}, {"path": "/x/seed1/run"}]) == ["seed0/run", "seed1/run"]


def test_the_difference_of_runs_names_config_and_environment(full, stopped):
    first, second = read_run(full), read_run(stopped)
    second["environment"]["devices"]["kind"] = "H200"
    found = {row["name"]: row["values"] for row in differences([first, second])}
    assert found == {
        "config.name": [AWKWARD, "narrow"],
        "config.train.batch_size": [4, 8],
        "config.guards.health": [True, False],
        "devices.kind": ["cpu", "H200"],
    }


def test_nothing_a_user_wrote_can_leave_the_data_element(full, stopped):
    hostile = embed({"a": "</script><!--<script>&amp;\u2028"})
    assert json.loads(hostile) == {"a": "</script><!--<script>&amp;\u2028"} and hostile.isascii()
    assert not set("<>&") & set(hostile)
    page = build([read_run(full), read_run(stopped)])
    assert page.count("</script") == 4 and page.count("<script") == 4 and "<img" not in page and "<b>wide" not in page
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S).group(1))
    assert [run["label"] for run in data["runs"]] == [AWKWARD, "narrow"]
    assert page.encode("utf-8") and len(page) < 3e6
    assert "connect-src" not in page and "default-src 'none'" in page


def test_the_page_asks_for_names_that_the_trainer_writes():
    scripts = "".join((_HERE / name).read_text() for name in _SCRIPTS)
    written = {
        *metrics.TRAIN_NAMES.values(),
        "train/perplexity",
        "train/tokens",
        *metrics.validation_row(1.0, 1.0, 1.0),
        *metrics.wait_row([]),
    }
    written |= set(metrics.memory_row()) | {"memory/device_peak_gib", "memory/device_in_use_gib"}
    written |= {"perf/tokens_per_second", "perf/mfu", "perf/data_wait_share", "perf/goodput", "perf/goodput_run"}
    asked = set(re.findall(r'"((?:train|val|norm|perf|memory)/\w+)"', scripts)) | {"learning_rate"}
    assert len(asked) >= 15 and asked <= written
    gates, config = (
        jnp.full((1, 64, 2, 3), 0.5),
        NSAConfig(select_block=32, compress_block=16, compress_stride=8, num_selected=4),
    )
    lists = jnp.zeros((1, 64, 1, 4), jnp.int32)
    figures = {**health._gate_health(gates, [jnp.ones((1, 64, 2, 4))] * 3)}
    figures |= health.selection_health(lists, jnp.zeros((1, 64), jnp.int32), config)
    assert set(health_row(1)) - {"step"} <= set(figures)
    model = ModelConfig(dim=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, vocab_size=8)
    layers = layer_figures(model, weights={"blocks": {"w": jnp.ones((1, 2))}})
    assert set(layers_row(1)) >= set(layers) and all(f"_{name.split('_')[1]}`" in scripts for name in layers)
    maps = set(re.findall(r'\[\s*"((?:gate|block|blocks|keys)_\w+)"', scripts))
    assert len(maps) == 7 and maps <= set(figures)


def test_the_trainer_keeps_samples_and_forgets_those_that_are_made_again(tmp_path):
    for start, step in ((0, 5), (5, 10), (5, 10)):
        writer = metrics.MetricsWriter(tmp_path, start_step=start, total_steps=20, stream=io.StringIO())
        writer.text(step, "sample", f"\x00 from {start}")
        writer.close()
    assert [(s["step"], s["text"]) for s in read_run_samples(tmp_path)] == [(5, r"\x00 from 0"), (10, r"\x00 from 5")]
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 2


def read_run_samples(path):
    return read_run(path)["samples"]


def test_the_command_says_where_in_any_encoding(tmp_path, monkeypatch):
    run = write_stopped(tmp_path / "caf\u00e9 \u6771")
    for errors in ("strict", "surrogateescape"):
        said = io.BytesIO()
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(said, "ascii", errors, write_through=True))
        assert main([str(run)]) == 0 and b"caf? ?/report.html (" in said.getvalue()


def test_the_command_writes_one_file_and_says_where(stopped, tmp_path, capsys):
    assert main([str(stopped), str(stopped) + "/."]) == 0  # the same run, named twice
    assert str(stopped / "report.html") in capsys.readouterr().out
    assert sorted(p.name for p in stopped.iterdir()) == ["env.json", "metrics.jsonl", "report.html", "stopped.json"]
    assert "<title>narrow: run report</title>" in (stopped / "report.html").read_text()


@pytest.mark.parametrize("wrong", ["nothing", "empty", "file"])
def test_a_directory_that_is_no_run_is_refused_and_the_output_stays(stopped, tmp_path, wrong):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    out = tmp_path / "report.html"
    out.write_text("old")
    command = [sys.executable, "-m", "nsa_jax.report"] if wrong == "nothing" else None
    arguments = [str(stopped), str(tmp_path / wrong), "--out", str(out)]
    if command:
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120)
        status, said = done.returncode, done.stderr
        assert f"error: {tmp_path / wrong}: no such directory" in said and "Traceback" not in said
    else:
        status = main(arguments)
    assert status == 2 and out.read_text() == "old"


def test_a_file_that_cannot_be_written_leaves_the_old_one_and_no_litter(stopped, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "report.html").write_text("old")

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full_disk)
    assert main([str(stopped), "--out", str(out / "report.html")]) == 2
    assert "No space left" in capsys.readouterr().err
    assert [p.read_text() for p in out.iterdir()] == ["old"]
    assert main([str(stopped), "--out", str(out)]) == 2 and "a directory; name a file" in capsys.readouterr().err
    assert main([str(stopped), "--out", str(out / "none" / "a.html")]) == 2
    assert f"there is no directory {out / 'none'}" in capsys.readouterr().err
    assert main([str(stopped), "--out", "/proc/a.html"]) == 2
    assert "/proc cannot be written" in (said := capsys.readouterr().err) and "--out" in said


def test_reading_nothing_is_an_error_that_says_so(tmp_path):
    with pytest.raises(ReportError, match="neither metrics.jsonl nor env.json"):
        read_run(tmp_path)
    lines(tmp_path / "metrics.jsonl", [])
    assert read_run(tmp_path)["outcome"]["state"] == "empty"
