"""Evaluation from the command line: where results go, whose they are, and what is refused before it is computed."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from nsa_jax import convert, evaluate, export
from nsa_jax.config import default_config
from nsa_jax.data import long_tasks
from nsa_jax.data.tokenizers import ByteTokenizer
from nsa_jax.evaluate import command
from nsa_jax.inspect.__main__ import main as inspect_main

from .checkpoints import describe, write
from .runs import small_config, write_run


@pytest.fixture
def text(tmp_path) -> list[str]:
    (tmp_path / "text.txt").write_text("value = 1\n" * 40)
    return ["--files", str(tmp_path / "text.txt"), "--tasks=perplexity"]


def results(directory: Path) -> dict:
    return json.loads((directory / "evaluation" / "evaluation.json").read_text())


@pytest.mark.parametrize("step", ["", "@1"])
def test_results_go_into_a_directory_with_an_at_in_its_path(tmp_path, text, step):
    path = tmp_path / "user@host" / "run@home"
    write_run(path, small_config())
    assert evaluate.main([f"{path}{step}", *text]) == 0
    assert results(path)["tasks"]["perplexity"]["tokens"] == 400
    assert [child.name for child in path.parent.iterdir()] == ["run@home"]
    assert sorted(child.name for child in tmp_path.iterdir()) == ["text.txt", "user@host"]


OF_DOCUMENTS = ["perplexity", "position", "needle", "needle-multi"]


@pytest.mark.parametrize(
    ("fields", "tasks"),
    [
        ({}, ["validation", *OF_DOCUMENTS]),
        ({"source": "hf", "hf_path": "x", "hf_streaming": True}, ["validation"]),
        ({"val_fraction": 0.0}, ["validation"]),
        ({"val_fraction": 0.0, "source": "text", "val_files": ("a",)}, ["validation", *OF_DOCUMENTS]),
    ],
    ids=["text", "stream", "nothing_held_out", "own_files"],
)
def test_default_tasks_are_those_that_the_data_can_serve(fields, tasks):
    made = object.__new__(command.Evaluation)
    made.args = SimpleNamespace(files=[], lengths=None, num_keys=4, long_tasks=list(long_tasks.TASKS))
    made.config, made.tokenizer, made.context, made._said = default_config(), ByteTokenizer(), 4096, []
    made.config.data.update(fields)
    assert made.default_tasks() == tasks


def test_results_of_another_model_at_the_same_place_are_dropped(tmp_path, text):
    run, out = tmp_path / "run", tmp_path / "out"
    write_run(run, small_config())
    files = text[:2]
    assert export.main([f"{run}@1", str(out)]) == 0
    assert evaluate.main([str(out), *files, "--tasks=position"]) == evaluate.main([str(out), *text]) == 0
    first = results(out)
    assert first["tasks"].keys() == {"position", "perplexity"}  # of the same model
    assert export.main([f"{run}@2", str(out)]) == 0
    assert evaluate.main([str(out), *text]) == 0
    assert results(out)["tasks"].keys() == {"perplexity"} and results(out)["fingerprint"] != first["fingerprint"]


def test_results_of_the_same_weights_in_another_function_are_dropped(tmp_path, text):
    """Conversions with other blocks have the same arrays, and other losses."""
    write(tmp_path / "in", describe("llama2", vocab_size=300))
    out, ways = tmp_path / "out", ("--config.model.nsa.window=32", "--config.model.nsa.window=64")
    for way, task in zip(ways, ("perplexity", "position"), strict=True):
        assert convert.main([str(tmp_path / "in"), str(out), "--tokenizer=byte", way]) == 0
        assert evaluate.main([str(out), *text[:2], f"--tasks={task}", f"--output={tmp_path / 'evaluation'}"]) == 0
        assert results(tmp_path)["tasks"].keys() == {task}


def test_results_stay_where_a_model_is_named_in_another_way(tmp_path, text, monkeypatch):
    write_run(tmp_path / "run", small_config())
    files = text[:2]
    assert evaluate.main([str(tmp_path / "run"), *files, "--tasks=position"]) == 0
    monkeypatch.chdir(tmp_path)
    assert evaluate.main(["run/", *text]) == 0
    assert results(tmp_path / "run")["tasks"].keys() == {"position", "perplexity"}


def test_the_validation_of_a_model_without_a_run_is_not_called_that_of_training(tmp_path, monkeypatch, capsys):
    write(tmp_path / "in", describe("llama2", vocab_size=300))
    write_run(tmp_path / "run", small_config())
    assert convert.main([str(tmp_path / "in"), str(tmp_path / "out"), "--tokenizer=byte"]) == 0
    monkeypatch.setattr(command, "repeat_validation", lambda *_: {"loss": 2.0})
    for name, said in (("out", False), ("run", True)):
        capsys.readouterr()
        assert evaluate.main([str(tmp_path / name), "--tasks=validation"]) == 0
        shown = " ".join(capsys.readouterr().out.split())  # a title may have two lines
        assert "validation" in shown and ("as in training" in shown) == said


def damage_weights(workdir: Path, step: int) -> None:
    state = workdir / "checkpoints" / str(step) / "state"
    weights = max((path for path in state.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    weights.write_bytes(bytes(weights.stat().st_size))


@pytest.mark.parametrize(("asked", "damaged", "read", "loss"), [("", 2, 1, 2.0), ("@best", 1, 2, 3.0)])
def test_results_are_those_of_the_step_that_was_read(asked, damaged, read, loss, tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "run", small_config())
    damage_weights(tmp_path / "run", damaged)
    monkeypatch.setattr(command, "repeat_validation", lambda *_: {"loss": loss})
    assert evaluate.main([f"{tmp_path / 'run'}{asked}", "--tasks=validation"]) == 0
    found = results(tmp_path / "run")
    assert (found["step"], found["tasks"]["validation"]["recorded_loss"]) == (read, loss)
    assert "are not those of training" not in capsys.readouterr().out
    assert export.main([f"{tmp_path / 'run'}{asked}", str(tmp_path / "out"), "--format=transformers"]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"| training steps | {read} |" in card and f"| val/loss | {loss:.4f} |" in card


def closed_pipe():
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "w")


def full_disk():
    return open("/dev/full", "w")


@pytest.mark.parametrize(
    ("output", "status", "done"),
    [(closed_pipe, 0, {"perplexity", "position"}), (full_disk, 2, {"perplexity"})],
)
def test_results_are_written_before_they_are_shown(output, status, done, tmp_path, text, monkeypatch, capfd):
    write_run(tmp_path / "run", small_config())
    with contextlib.suppress(OSError), output() as stdout:  # closing /dev/full fails too
        monkeypatch.setattr(sys, "stdout", stdout)
        assert evaluate.main([str(tmp_path / "run"), *text[:2], "--tasks=perplexity,position"]) == status
    assert results(tmp_path / "run")["tasks"].keys() == done
    assert "pipe" not in capfd.readouterr().err


def test_a_tokenizer_with_ids_that_the_model_has_not_is_refused(tmp_path, text, capsys):
    config = small_config()
    config.data.source, config.data.synthetic, config.data.synthetic_vocab = "synthetic", "copy", 32
    config.model.vocab_size = 32
    write_run(tmp_path / "run", config)
    ByteTokenizer().save(tmp_path / "run" / "tokenizer")
    assert evaluate.main([str(tmp_path / "run"), *text]) == 2
    assert "error: the tokenizer has 257 ids and the model 32: give the tokenizer" in capsys.readouterr().err


def test_rows_that_are_too_short_are_refused_or_left_out_before_anything_is_computed(tmp_path, monkeypatch, capsys):
    config = small_config()
    config.data.seq_len, config.data.synthetic_vocab = 48, 16
    write_run(tmp_path / "run", config)
    (tmp_path / "text.txt").write_text("value = 1\n" * 40)
    base = [str(tmp_path / "run"), "--files", str(tmp_path / "text.txt")]
    assert evaluate.main(base) == 0
    shown = capsys.readouterr().out
    assert "needle-multi is left out: context=48: too short: 4 facts need" in shown and "perplexity" in shown
    assert results(tmp_path / "run")["tasks"].keys() == {"perplexity", "position"}
    monkeypatch.setattr(command, "score_documents", lambda *_, **__: pytest.fail("losses were computed"))
    for tasks, words in (
        (["--tasks=perplexity,needle-multi"], "context=48: too short: 4 facts need"),
        (["--tasks=perplexity,long"], "context=48: too short: these tasks need"),
        (["--tasks=perplexity,needle", "--lengths=512,20"], "--lengths 20: too short: 1 facts need"),
        (["--tasks=perplexity,long", "--lengths=16,20"], "--lengths 20: too short: these tasks need"),
        (["--tasks=perplexity,context", "--context=500"], "--tasks context: no document has 501 tokens"),
        (["--tasks=perplexity,far"], "--tasks far: the run has no source of tasks"),
        (["--tasks=perplexity,recall"], "config.data.synthetic_vocab=16: too few ids for the 6 facts of a row"),
    ):
        assert evaluate.main([*base, *tasks]) == 2
        captured = capsys.readouterr()
        assert words in captured.err and "nats" not in captured.out


def test_questions_in_words_are_not_asked_of_synthetic_tokens(tmp_path, text, monkeypatch, capsys):
    """Their words became token ids by their lengths, and answers of as many letters counted as right."""
    config = small_config()
    config.data.source, config.data.synthetic, config.data.synthetic_vocab = "synthetic", "copy", 32
    config.model.vocab_size = 32
    write_run(tmp_path / "run", config)
    monkeypatch.setattr(command, "score_documents", lambda *_, **__: pytest.fail("losses were computed"))
    for task in ("needle", "needle-multi", "long", "lm_eval:arc_easy"):
        assert evaluate.main([str(tmp_path / "run"), *text, f"--tasks=perplexity,{task}"]) == 2
        assert f"--tasks {task}: its questions are text, and the run's tokens are synth" in capsys.readouterr().err


def test_far_questions_that_a_run_cannot_ask_are_left_out(tmp_path, capsys):
    """A run whose windows reach over the whole row ended its evaluation there, and the long tasks were not run."""
    config = small_config()
    config.data.source, config.data.tasks, config.data.seq_len = "task", ("keypad",), 64
    config.model.nsa.window, config.train.eval_batches = 96, 0
    write_run(tmp_path / "run", config)
    assert evaluate.main([str(tmp_path / "run"), "--long-tasks=keypad", "--samples=1", "--batch-size=2"]) == 0
    assert "far is left out: config.data.seq_len=64: no answer lies more than 95 tokens" in capsys.readouterr().out
    assert results(tmp_path / "run")["tasks"].keys() == {"long"}


def test_bits_per_byte_of_no_bytes_are_unknown():
    def scorer(inputs, targets):
        return np.ones(inputs.shape, np.float32)

    sizes = dict(context=8, stride=8, batch_size=1)
    found = evaluate.score_documents(scorer, [np.arange(5)], np.zeros(9, np.int32), 8, **sizes)
    assert found["bits_per_byte"] is None and (found["tokens"], found["bytes"], found["loss"]) == (5, 0, 1.0)


def test_inspect_says_that_its_text_is_a_file(tmp_path, capsys):
    for given in ("hello world", "x" * 300, str(tmp_path)):
        assert inspect_main([str(tmp_path / "run"), "--text", given]) == 2
        error = capsys.readouterr().err
        assert f"--text={given}: cannot be read" in error and "names a FILE, and - is the standard input" in error


def test_inspect_without_a_standard_input_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)  # as after <&-
    assert inspect_main([str(tmp_path / "run"), "--text=-"]) == 2
    assert capsys.readouterr().err == "error: --text=-: the standard input is closed; pipe a text, or name a FILE\n"


def test_inspect_writes_into_a_directory_with_an_at_in_its_path(tmp_path, text):
    path = tmp_path / "user@host" / "run"
    write_run(path, small_config())
    assert inspect_main([f"{path}@1", "--text", text[1], "--tokens=64"]) == 0
    assert [child.name for child in tmp_path.iterdir() if child.is_dir()] == ["user@host"]
    assert (path / "explore.html").exists()
