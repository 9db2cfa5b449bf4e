"""Reports of runs whose records hold anything: made of what can be read, with a note of what cannot."""

import json
import math
import os

import numpy as np
import pytest

from nsa_jax.report import build, read_run
from nsa_jax.report.__main__ import main

from .reported import environment, health_row, layers_row, lines, train_row, validation_row

VALUES = [
    *(None, True, -1, 0, 10**30, -(10**400), 2**63, 1e308, math.nan, math.inf, -math.inf, "", "x", "inf", "\ud800\x00"),
    *([], {}, [None], [[1]], {"a": None}, [math.nan] * 3, [1] * 5000, {"step": math.inf}, {"": {"": math.inf}}),
]
FILES = ["env.json", "summary.json", "stopped.json", "evaluation/evaluation.json"]
TABLES = "metrics.jsonl health.jsonl layers.jsonl validation.jsonl alarms.jsonl samples.jsonl heartbeat_0.jsonl".split()


@pytest.fixture
def run(tmp_path):
    """A small finished run with one of everything."""
    path = tmp_path / "run"
    (path / "evaluation").mkdir(parents=True)
    (path / "checkpoints" / "20").mkdir(parents=True)
    lines(path / "metrics.jsonl", [train_row(step, 2.0 / step) for step in (10, 20, 30)])
    lines(path / "health.jsonl", [health_row(step) for step in (10, 20, 30)])
    lines(path / "layers.jsonl", [layers_row(step) for step in (10, 20, 30)])
    lines(path / "validation.jsonl", [validation_row(step, 3) for step in (10, 20)])
    lines(path / "alarms.jsonl", [{"step": 20, "alarm": "spike", "message": "high", "time": 1e9}])
    lines(path / "samples.jsonl", [{"step": 20, "name": "sample", "text": "a text", "time": 1e9}])
    lines(path / "heartbeat_0.jsonl", [{"event": "stopped", "time": 1e9, "doing": "training"}])
    best = {"step": 20, "val/loss": 1.5}
    (path / "summary.json").write_text(json.dumps({"step": 30, "finished": True, "best_checkpoint": best}))
    (path / "env.json").write_text(json.dumps(environment("run", data__seq_len=256)))
    stop = {"guard": "spike", "step": 10, "time": 1.0, "message": "high", "last_checkpoint": 5}
    (path / "stopped.json").write_text(json.dumps(stop))
    cell, point = {"length": 64, "depth": 0.5, "exact_match": 1.0}, {"from": 0, "to": 1, "loss": 2.0, "tokens": 9}
    tasks = {"needle": {"cells": [cell]}, "position": {"bins": [point]}, "perplexity": {"loss": 2.0}}
    (path / "evaluation" / "evaluation.json").write_text(json.dumps({"context": 64, "tasks": tasks}))
    return path


def page(path):
    """The run, after its page was made; the data of the page is JSON in the strict sense."""
    found = read_run(path, now=2e9)
    assert "<!doctype html>" in build([found, {**found, "path": "/other"}])
    json.dumps(found, allow_nan=False)
    return found


def test_the_run_of_these_tests_has_nothing_to_note(run):
    found = page(run)
    assert found["notes"] == [] and found["outcome"]["state"] == "finished" and found["best"]["step"] == 20
    assert found["evaluation"]["needles"] and found["samples"] and found["tokens_per_step"]
    assert found["layers"] and found["validation"]["positions"] and found["validation"]["selection"]


def test_shares_of_right_answers_are_those_of_the_summary(run):
    assert page(run)["far_task"] is None
    summary = json.loads((run / "summary.json").read_text())
    shares = {"accuracy": 0.97, "window_only": 0.1, "chance": 0.2}
    (run / "summary.json").write_text(json.dumps({**summary, "far_task": {**shares, "questions": 9, "window": 16}}))
    assert page(run)["far_task"] == shares


@pytest.mark.parametrize(
    ("name", "fields", "note"),
    [
        ("env.json", {"config": {"train": {"steps": math.inf, "batch_size": math.inf}}}, None),
        ("env.json", {"start_step": math.inf, "resumed_from": "runs/a"}, None),
        ("env.json", {"config": [1]}, "config of env.json is no object and is left out"),
        ("env.json", {"preflight": 3}, "preflight of env.json is no object and is left out"),
        ("env.json", {"preflight": {"warnings": 3, "ignored": {"a": 1}, "bigram_entropy": math.inf}}, None),
        ("env.json", {"devices": "cpu"}, "devices of env.json is no object and is left out"),
        ("env.json", {"parameters": {"total": math.inf}}, "parameters.total of env.json is no number and is left out"),
        ("summary.json", {"step": math.inf}, "summary.json has no step and is left out"),
        ("summary.json", {"best_checkpoint": "20"}, "best_checkpoint of summary.json is no object and is left out"),
        ("summary.json", {"best_checkpoint": {"step": 20, "val/loss": math.nan}}, None),
        ("summary.json", {"far_task": 3}, "far_task of summary.json is no object and is left out"),
        ("summary.json", {"far_task": {"accuracy": "x", "chance": math.nan}}, None),
        ("stopped.json", {"step": math.inf, "time": math.inf, "last_checkpoint": math.inf}, None),
    ],
)
def test_numbers_that_are_none_and_other_types_cost_no_report(run, name, fields, note):
    value = json.loads((run / name).read_text())
    (run / name).write_text(json.dumps({**value, **fields}))
    assert page(run)["notes"] == ([note] if note else [])


def test_a_run_that_was_stopped_at_no_step_is_shown_at_its_last(run):
    (run / "summary.json").unlink()
    (run / "stopped.json").write_text('{"guard": "spike", "step": Infinity, "time": NaN, "last_checkpoint": 1e999}')
    result = page(run)["outcome"]
    assert (result["state"], result["step"]) == ("stopped", 30) and "no checkpoint was kept" in result["message"]


@pytest.mark.parametrize("name", FILES + TABLES)
@pytest.mark.parametrize(
    "content",
    [b"", b"\x00\xff" * 50, b"[" * 100_000, b'{"a":' * 300 + b"1" + b"}" * 300, b"NaN", b'{"step": 1' + b"0" * 5000],
    ids=["empty", "bytes", "brackets", "nested", "nan", "digits"],
)
def test_files_that_hold_something_else_are_left_out(run, name, content):
    (run / name).write_bytes(content)
    notes = page(run)["notes"]
    quiet = name.startswith("heartbeat") or (name in TABLES and not content)
    assert (notes == []) if quiet else (len(notes) == 1 and name.rpartition("/")[2] in notes[0])


@pytest.mark.parametrize("name", FILES + TABLES)
@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, None], ids=["folder", "pipe", "unreadable"])
def test_files_that_cannot_be_read_are_noted(run, name, make, monkeypatch):
    if make is None:
        read = type(run).read_text

        def refuse(self, *args, **kwargs):
            if self == run / name:
                raise PermissionError(13, "Permission denied")
            return read(self, *args, **kwargs)

        monkeypatch.setattr(type(run), "read_text", refuse)
    else:
        (run / name).unlink()
        make(run / name)
    assert [name.rpartition("/")[2] in note and "could not be read" in note for note in page(run)["notes"]] == [True]


@pytest.mark.parametrize("seed", range(8))
def test_any_value_anywhere_leaves_a_report(run, seed):
    rng = np.random.default_rng(seed)

    def pick(items):
        return items[int(rng.integers(len(items)))]

    def spoil(value):
        """One node of a JSON value replaced."""
        if isinstance(value, (dict, list)) and value and rng.random() < 0.8:
            key = pick(list(value) if isinstance(value, dict) else range(len(value)))
            value[key] = spoil(value[key])
            return value
        return pick(VALUES)

    whole = {name: (run / name).read_text() for name in FILES + TABLES}
    for _ in range(25):
        for name, text in whole.items():
            rows = [json.loads(line) for line in text.splitlines()]
            (run / name).write_text("".join(json.dumps(spoil(row)) + "\n" for row in rows))
        found = read_run(run, now=2e9)
        json.dumps(found, allow_nan=False)
    page(run)


def test_the_command_makes_the_report_of_a_hostile_run(run, capsys):
    for name in FILES:
        (run / name).write_text('{"step": Infinity, "config": {"train": {"steps": Infinity}}, "start_step": -Infinity}')
    with (run / "health.jsonl").open("a") as file:
        file.write(json.dumps({"step": 40, "gate_entropy": [1.0] * 10**6}) + "\n")
    assert main([str(run)]) == 0
    assert "report.html" in capsys.readouterr().out and (run / "report.html").stat().st_size > 10**5
