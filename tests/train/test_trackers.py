"""Experiment trackers: complete rows in order, one id over all starts, and no harm from one that fails.

The tests of the real libraries write offline runs and read them back. They need the extras:
pip install "nsa_jax[wandb,mlflow]", then pytest tests/train/test_trackers.py.
"""

import json
import logging
import struct
import threading
import time

import pytest

from nsa_jax.config import ConfigError, validate
from nsa_jax.train import run, trackers
from nsa_jax.train.preflight.run import examine
from nsa_jax.train.trackers import Trackers
from tests.train.tiny import make_run, one_device, tiny_config

ROWS = [(step, {"train/loss": 3.0 / step, "norm/grad": 0.5}) for step in range(1, 51)]


class Fake:
    """A tracker that keeps the calls it gets."""

    package = "json"
    calls: list[tuple] = []

    def start(self, config, workdir, env):
        kept = trackers.kept_id(workdir, "wandb")
        trackers.keep_id(workdir, "wandb", kept or "first")
        self.calls.append(("start", kept, config, env))

    def log(self, step, row):
        self.calls.append(("log", step, row))

    def text(self, step, name, text):
        self.calls.append(("text", step, name, text))

    def finish(self, summary):
        self.calls.append(("finish", summary))


class Failing:
    """A tracker whose every method raises."""

    package = "json"
    attempts: list[str] = []

    def __getattr__(self, method):
        def fail(*args):
            self.attempts.append(method)
            raise SystemExit(f"no {method} today")

        return fail


@pytest.fixture
def fakes(monkeypatch):
    monkeypatch.setattr(trackers, "TRACKERS", {"wandb": Fake, "mlflow": Failing})
    Fake.calls, Failing.attempts = [], []


def send(workdir, *names, summary=None):
    """Fifty rows and a text through trackers; the first row comes before they start."""
    made = Trackers(names)
    made.log(*ROWS[0])
    made.start({"name": "tiny", "train": {"steps": 50}}, workdir, {"cpu_count": 2})
    for step, row in ROWS[1:]:
        made.log(step, row)
    made.text(50, "sample", "<b>once upon")
    made.finish(summary or {"finished": True, "step": 50})


def test_a_run_goes_on_without_a_tracker_that_fails(tmp_path, fakes, caplog):
    """Real runs: the other tracker gets every row, the config and the summary, and a resumed run keeps its id."""
    names = ("wandb", "mlflow")
    with caplog.at_level(logging.WARNING, "nsa_jax"):
        summary = make_run(tmp_path, train__steps=3, train__save_every=3, train__trackers=names).run()
    assert summary["finished"] and Failing.attempts == ["start"]
    (warning,) = [record.getMessage() for record in caplog.records if "tracker" in record.getMessage()]
    assert warning == "tracker mlflow is dropped, training goes on: SystemExit: no start today"
    (_, kept, config, env), *logged, end = Fake.calls
    assert kept is None and config["train"]["steps"] == 3 and env["parameters"]["total"] > 0 and "config" not in env
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [{"step": step, **row} for _, step, row in logged] == [
        {k: row[k] for k in row if k != "time"} for row in rows
    ]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert end == ("finish", summary)
    make_run(tmp_path, train__steps=4, train__trackers=names).run()
    assert [call[1] for call in Fake.calls if call[0] == "start"] == [None, "first"]
    assert json.loads((tmp_path / "trackers.json").read_text()) == {"wandb": "first"}


def test_an_error_ends_the_tracked_run_without_a_summary(tmp_path, fakes, monkeypatch):
    tiny = make_run(tmp_path, train__steps=3, train__trackers=("wandb",))

    def fail(*_):
        raise KeyError("lost")

    monkeypatch.setattr(tiny, "_summarise", fail)
    with pytest.raises(KeyError):
        tiny.run()
    assert [call[0] for call in Fake.calls] == ["start", "log", "log", "log", "finish"]
    assert Fake.calls[-1] == ("finish", None)


def test_rows_of_before_the_start_come_first_and_all_in_order(tmp_path, fakes):
    send(tmp_path, "wandb")
    assert [call[0] for call in Fake.calls] == ["start", *["log"] * 50, "text", "finish"]
    assert [call[1:] for call in Fake.calls[1:51]] == ROWS


def test_a_tracker_that_hangs_holds_up_neither_the_loop_nor_the_end(tmp_path, fakes, monkeypatch, caplog):
    monkeypatch.setattr(trackers, "FINISH_SECONDS", 0.05)
    monkeypatch.setattr(trackers, "QUEUE_CALLS", 60)
    go_on = threading.Event()
    monkeypatch.setattr(Fake, "start", lambda *_: go_on.wait(60))
    send(tmp_path, "wandb")
    assert "has not finished in time" in caplog.text and not Fake.calls
    monkeypatch.setattr(trackers, "QUEUE_CALLS", 20)
    send(tmp_path, "wandb")
    assert "it is 20 calls behind" in caplog.text and caplog.text.count("is dropped") == 2
    go_on.set()


def test_other_processes_than_the_first_track_nothing(tmp_path, fakes):
    made = Trackers(("wandb",), active=False)
    made.start({}, tmp_path, {})
    made.finish()
    assert not Fake.calls


def test_a_tracker_that_is_unknown_or_not_installed_is_refused_at_the_start(tmp_path, monkeypatch):
    (problem,) = validate(tiny_config(train__trackers=("wandb", "tensorbord")))
    assert problem.rule == "R001" and "'tensorbord' is no tracker" in problem.message
    monkeypatch.setattr(trackers.WandbTracker, "package", "wandb_that_is_not_here.sdk")
    with pytest.raises(ConfigError, match=r"R058 error: .*'wandb'.*pip install \"nsa_jax\[wandb\]\"") as caught:
        run(tiny_config(train__trackers=("wandb",)), tmp_path / "run", devices=one_device())
    assert len(caught.value.problems) == 1 and not (tmp_path / "run").exists()
    wrong = tiny_config(train__trackers=("wandb",), model__remat="no")  # R001 leaves the compilation out
    assert {"R001", "R058"} <= {problem.rule for problem in examine(wrong, tmp_path / "run").problems}
    with pytest.raises(ConfigError) as caught:
        run(wrong, tmp_path / "run", devices=one_device())
    assert {"R001", "R058"} <= {problem.rule for problem in caught.value.problems}
    with pytest.raises(ConfigError, match="R057 error: config.train.trackers=None"):
        run(tiny_config(train__trackers=None), tmp_path / "run", devices=one_device())


def wandb_records(path):
    """The protocol buffers of a .wandb file: records in pieces over blocks of 32 KiB, as in LevelDB's log."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, pieces = path.read_bytes(), 7, b""
    while at < len(data):
        if 32768 - at % 32768 < 7:  # too little for a header
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        pieces += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield Record.FromString(pieces)
            pieces = b""


def test_wandb_offline_runs_hold_every_row_under_one_id(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    send(tmp_path, "wandb")
    time.sleep(1.1)  # folders of starts are named by the second
    send(tmp_path, "wandb")
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    run_id = json.loads((tmp_path / "trackers.json").read_text())["wandb"]
    assert [path.name for path in files] == [f"run-{run_id}.wandb"] * 2
    for path in files:
        records = list(wandb_records(path))
        items = [
            {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for record in records
            if record.HasField("history")
        ]
        rows = [(row["step"], {k: row[k] for k in ("train/loss", "norm/grad")}) for row in items if "train/loss" in row]
        assert rows == ROWS
        assert items[-1]["step"] == 50 and items[-1]["sample/_type"] == "html-file"
        (sample,) = path.parent.rglob("sample*.html")
        assert sample.read_text() == "<pre>&lt;b&gt;once upon</pre>"
        configs = [update.key for record in records for update in record.config.update]
        assert {"name", "train", "env"} <= set(configs)


@pytest.mark.parametrize(
    ("summary", "status"),
    [
        (None, "FAILED"),
        ({"finished": True, "stopped_by": None}, "FINISHED"),
        ({"finished": False, "stopped_by": "SIGTERM"}, "KILLED"),
        ({"finished": False, "stopped_by": "early stopping: 3 validations without improvement on 2.0"}, "FINISHED"),
    ],
)
def test_mlflow_calls_only_runs_killed_that_a_request_stopped(summary, status):
    class Client:
        def log_dict(self, *_):
            pass

        def set_terminated(self, _, status):
            self.status = status

    tracker = trackers.MLflowTracker()
    tracker._client, tracker._id = Client(), "id"
    tracker.finish(summary)
    assert tracker._client.status == status


def test_mlflow_offline_runs_hold_every_row_under_one_id(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    send(tmp_path, "mlflow", summary={"finished": False, "step": 50})
    client, run_id = MlflowClient(), json.loads((tmp_path / "trackers.json").read_text())["mlflow"]
    assert client.get_run(run_id).info.status == "KILLED"
    send(tmp_path, "mlflow")
    found = client.get_run(run_id)
    assert found.info.status == "FINISHED" and found.data.params == {"name": "tiny", "train.steps": "50"}
    history = sorted((metric.step, metric.value) for metric in client.get_metric_history(run_id, "train/loss"))
    assert history == sorted((step, row["train/loss"]) for step, row in ROWS for _ in range(2))
    assert {path.path for path in client.list_artifacts(run_id)} == {"env.json", "summary.json", "texts"}
