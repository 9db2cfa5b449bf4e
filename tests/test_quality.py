"""The runner of variants: what is left is done in order, in parallel and in time, and variants are fairly compared."""

import argparse
import json
import os
import re
import subprocess
import sys
import time

import pytest

from benchmarks import quality
from nsa_jax.config import validate
from nsa_jax.nn import ModelConfig
from nsa_jax.train.state import setup

GRIDS = sorted((quality.ROOT / "configs" / "quality").glob("*.py"))


@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)
def test_variants_are_valid_and_have_equally_many_parameters(path):
    import jax

    grid = quality.load_grid(str(path))
    for heading in ("What:", "Data:", "Takes:", "Reaches:", f"--grid configs/quality/{path.name}"):
        assert heading in grid.__doc__
    base = grid.get_config()
    assert validate(base) == [] and base.name == path.stem and base.is_locked
    # The largest difference: an MLP is made wider by 64 features, of which the tiny model has few.
    step = 3 * base.model.dim * base.model.num_layers * 32
    total = setup(base, 257, jax.devices()[:1]).num_parameters()
    names = (
        list(grid.VARIANTS)
        if base.model.dim < 100
        else [n for n in ("dense", "window_dense", "n32") if n in grid.VARIANTS]
    )
    for name in names:
        config, fields = quality.variant_config(grid, name)
        assert [p for p in validate(config) if p.severity == "error"] == [] and set(grid.VARIANTS[name]) < set(fields)
        made = setup(config, 257, jax.devices()[:1])
        assert abs(made.num_parameters() - total) <= step
    for name, changes in grid.VARIANTS.items():
        config = grid.get_config()
        for field, value in changes.items():
            config[field.rpartition(".")[0]][field.rpartition(".")[2]] = value
        assert validate(config) == [], name
        ModelConfig.from_config(config, 257)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model.nsa.windw": 16}, "config.model.nsa.windw"),
        ({"nsa.window": 8}, "config.nsa.window"),
        ({"model.nsa.window": "wide"}, "config.model.nsa.window"),
        ({"model.attention": "windw"}, "'windw'"),
    ],
)
def test_a_variant_that_cannot_run_is_named(fields, says):
    grid = quality.load_grid(str(GRIDS[0]))
    grid.VARIANTS = {"bad": fields}
    with pytest.raises(SystemExit, match="'bad' cannot run") as error:
        quality.variant_config(grid, "bad")
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"tasks": ("needl",)}, "no task 'needl'"), ({"cuts": (256,)}, "no cut is below the 256"), (None, "no lengths")],
)
def test_what_cannot_be_measured_is_refused_before_training(tmp_path, changes, says):
    path = tmp_path / "grid.py"
    measures = {} if changes is None else quality.load_grid(str(GRIDS[0])).MEASURES | changes
    path.write_text(f"{GRIDS[0].read_text()}\nMEASURES = {measures!r}\n")
    with pytest.raises(SystemExit, match=says):
        quality.load_grid(str(path))


def stage(tmp_path, variant, name, program="", seconds=0.0, done=True):
    """A program that notes when it began and writes its file after some seconds."""
    file = tmp_path / f"{variant}.{name}"
    writes = f"open({str(file)!r}, 'w').close()" if done else ""
    code = f"import os, time\n{program}\ntime.sleep({seconds}); {writes}"
    return quality.Stage(variant, name, ("-S", "-c", code), file.is_file, tmp_path / f"{variant}.log")


def run(todo, tmp_path, **changes):
    started, finished = [], []
    running = {"now": 0, "most": 0}

    def launch(one):
        started.append((one.variant, one.name))
        processes.append(subprocess.Popen([sys.executable, *one.command]))
        running["most"] = max(running["most"], sum(p.poll() is None for p in processes))
        return processes[-1]

    processes = []
    settings = dict(parallel=1, deadline=time.monotonic() + 60, reserve=0.0, on_finished=finished.append, poll=0.01)
    failed = quality.schedule(todo, launch, **{**settings, **changes})
    assert all(p.poll() is not None for p in processes)
    return started, finished, failed, running["most"]


def test_stages_run_in_order_and_finished_ones_are_skipped(tmp_path):
    (tmp_path / "a.train").touch()
    todo = {v: [stage(tmp_path, v, "train"), stage(tmp_path, v, "long")] for v in "ab"}
    started, finished, failed, most = run(todo, tmp_path)
    assert started == [("a", "long"), ("b", "train"), ("b", "long")] and finished == [["a"], ["b"]]
    assert failed == {} and most == 1 and todo == {"a": [], "b": []}


def test_several_variants_run_at_once_and_selection_waits_for_the_dense_model(tmp_path):
    begun, nsa, dense = (str(tmp_path / name) for name in ("begun", "nsa.train", "dense.train"))
    until = "while not os.path.exists({!r}): time.sleep(0.01)".format
    todo = {  # NSA trains until dense has begun, dense until NSA could begin with the selection
        "nsa": [
            stage(tmp_path, "nsa", "train", program=until(begun)),
            stage(tmp_path, "nsa", "selection", program=f"assert os.path.exists({dense!r})"),
        ],
        "dense": [
            stage(tmp_path, "dense", "train", program=f"open({begun!r}, 'w').close()\n{until(nsa)}", seconds=0.5)
        ],
    }
    started, _, failed, most = run(todo, tmp_path, parallel=2)
    assert started == [("nsa", "train"), ("dense", "train"), ("nsa", "selection")] and most == 2 and not failed


def test_a_variant_that_fails_does_not_stop_the_others(tmp_path):
    todo = {
        "dense": [stage(tmp_path, "dense", "train", program="raise SystemExit(3)"), stage(tmp_path, "dense", "long")],
        "nsa": [stage(tmp_path, "nsa", "train"), stage(tmp_path, "nsa", "selection")],
        "quiet": [stage(tmp_path, "quiet", "train", done=False)],
    }
    started, finished, failed, _ = run(todo, tmp_path)
    assert ("dense", "long") not in started and finished == [["nsa"]]
    assert failed["dense"].startswith("train ended with status 3; see") and "status 0" in failed["quiet"]


def test_processes_are_stopped_in_time_and_what_is_left_is_kept(tmp_path):
    saves = f"import signal, sys; signal.signal(15, lambda *_: (open({str(tmp_path / 'saved')!r}, 'w'), sys.exit(75)))"
    deaf = "import signal; signal.signal(15, signal.SIG_IGN)"
    todo = {
        "a": [stage(tmp_path, "a", "train", program=saves, seconds=60)],
        "b": [stage(tmp_path, "b", "train", program=deaf, seconds=60)],
        "c": [stage(tmp_path, "c", "train")],
    }
    begin = time.monotonic()
    started, finished, failed, _ = run(todo, tmp_path, parallel=2, deadline=begin + 4, reserve=2)
    assert 2 < time.monotonic() - begin < 20 and (tmp_path / "saved").exists()
    assert started == [("a", "train"), ("b", "train")] and not finished and failed == {}
    assert [len(left) for left in todo.values()] == [1, 1, 1]


def test_an_interruption_waits_until_processes_have_saved(tmp_path):
    begun, saved = tmp_path / "begun", tmp_path / "saved"
    saves = "\n".join((
        f"saved = lambda *_: (time.sleep(0.5), open({str(saved)!r}, 'w'), sys.exit(75))",
        f"import signal, sys; signal.signal(15, saved); open({str(begun)!r}, 'w').close()",
    ))  # fmt: skip
    wait = f"while not os.path.exists({str(begun)!r}): time.sleep(0.01)"
    todo = {"a": [stage(tmp_path, "a", "train", wait)], "b": [stage(tmp_path, "b", "train", saves, seconds=60)]}

    def interrupt(names):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(todo, tmp_path, parallel=2, reserve=20.0, on_finished=interrupt)
    assert saved.exists() and len(todo["b"]) == 1


def test_an_interrupted_call_says_what_is_left(tmp_path, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # which main sets
    monkeypatch.setattr(quality, "schedule", interrupted)
    monkeypatch.setattr(quality, "variant_config", lambda grid, name: (grid.get_config(), {}))
    monkeypatch.setattr(quality.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["quality.py", f"--grid={GRIDS[0]}", f"--folder={tmp_path}", "--variants=nsa"])
    assert quality.main() == 75
    assert "left for the next call: nsa: train" in capsys.readouterr().out


def options_of(folder, **changes):
    settings = dict(folder=folder, variants=["nsa"], files=["text"], flags=[], grid=str(GRIDS[0]))
    return argparse.Namespace(**settings | changes)


def finished_run(folder, grid):
    """A finished run of the grid's own config."""
    (folder / "nsa").mkdir()
    config = grid.get_config()
    config.data.sources.text.files = ("text",)
    config.model.mlp_dim = 128
    (folder / "nsa" / "env.json").write_text(json.dumps({"config": json.loads(config.to_json())}))
    (folder / "nsa" / "summary.json").write_text(json.dumps({"finished": True}))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"flags": ["--config.train.steps=5"]}, "train.steps: 4 there, 5 now"),
        ({"flags": ["--config.model.nsa.window=8"]}, "model.nsa.window: 16 there, 8 now"),
        ({"files": ["other"]}, "data.sources.text.files"),
    ],
)
def test_results_of_another_config_are_not_taken_for_those_of_this_one(tmp_path, changes, says):
    grid = quality.load_grid(str(GRIDS[0]))
    finished_run(tmp_path, grid)
    assert quality.stages(options_of(tmp_path), grid, "nsa")[0].done()
    with pytest.raises(SystemExit, match=f"finished run of another config.*{says}"):
        quality.stages(options_of(tmp_path, **changes), grid, "nsa")


def test_what_was_measured_otherwise_is_measured_again(tmp_path):
    grid = quality.load_grid(str(GRIDS[0]))
    finished_run(tmp_path, grid)
    for kind in quality.STAGES[1:]:
        quality._at(tmp_path / "nsa", kind).parent.mkdir(exist_ok=True)
        quality._at(tmp_path / "nsa", kind).touch()
    for _ in range(2):  # the first time nothing is known of how they were measured
        assert all(stage.done() for stage in quality.stages(options_of(tmp_path), grid, "nsa"))
    grid.MEASURES = grid.MEASURES | {"samples": 3}
    made = quality.stages(options_of(tmp_path), grid, "nsa")
    assert [stage.name for stage in made if not stage.done()] == ["long"]


def test_variants_at_once_have_a_gpu_each(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    with pytest.raises(SystemExit, match="--gpus 4: CUDA_VISIBLE_DEVICES names 3"):
        quality.Launcher(4, 4)
    launcher = quality.Launcher(2, 2)
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in launcher.environment  # none shares its GPU

    def stage(name, program):
        return quality.Stage(name, "train", ("-c", program), lambda: True, tmp_path / f"{name}.log")

    tell = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True)"
    wait = f"{tell}; import time; time.sleep(60)"
    first, second = launcher(stage("first", wait)), launcher(stage("second", tell))
    try:
        assert second.wait(60) == 0
        assert launcher(stage("third", tell)).wait(60) == 0  # the second's GPU is free again
        assert [(tmp_path / f"{name}.log").read_text() for name in ("second", "third")] == ["6\n", "6\n"]
        while not (said := (tmp_path / "first.log").read_text()):
            time.sleep(0.05)
        assert said == "4\n"
    finally:
        first.kill()
        first.wait()


def write_variant(folder, name, bits):
    """What a finished variant leaves behind."""
    folder = folder / name
    config = {"train": {"batch_size": 2}, "data": {"seq_len": 256}}
    env = {"config": config, "parameters": {"total": 1000}, "devices": {}, "versions": {}, "git": {}}
    rows = [{"step": s, "val/loss": b, "val/bits_per_byte": 9.0, "val/bits_per_byte/text": b} for s, b in bits.items()]
    rows += [{"step": s, "perf/step_seconds": 0.5} for s in range(1, 6)]
    (folder / "evaluation").mkdir(parents=True)
    (folder / "env.json").write_text(json.dumps(env))
    (folder / "summary.json").write_text(json.dumps({"finished": True}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    position = [{"from": 0, "to": 128, "loss": 2.5, "tokens": 64}]
    (folder / "validation.jsonl").write_text(json.dumps({"step": 10, "position": position}) + "\n")
    bins = [{"from": 0, "to": 128, "loss": 2.0}, {"from": 128, "to": 256, "loss": 1.5}]
    cell = {"task": "needle", "length": 256, "exact_match": 0.5, "chance": 1e-5}
    for stage_name, result in (("position", {"bins": bins}), ("long", {"cells": [cell]}), ("context", {"bins": []})):
        path = quality._at(folder, stage_name)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"tasks": {stage_name: result}}))


def test_merged_rows_replace_those_of_the_same_variant_and_length(tmp_path):
    def result(name, **rows):
        made = [
            {"variant": variant, "length": 256, "bits_per_byte": bits,
             "validation": [{"step": 5, "tokens": 1280, "bits_per_byte": bits}]}
            for variant, bits in rows.items()
        ]  # fmt: skip
        (tmp_path / name).write_text(json.dumps({"grid": "cpu_smoke", "rows": made}))
        return tmp_path / name

    kept, other = result("kept.json", dense=1.0, nsa=2.0), result("other.json", nsa=0.9, window=1.5)
    quality.merge(kept, other, tmp_path)
    found = json.loads(kept.read_text())
    assert found["grid"] == "cpu_smoke"
    expected = [("dense", 1.0), ("nsa", 0.9), ("window", 1.5)]
    assert [(row["variant"], row["bits_per_byte"]) for row in found["rows"]] == expected
    with pytest.raises(SystemExit, match="none.json: no such file"):
        quality.merge(tmp_path / "none.json", other, tmp_path)
    # No row has losses by position or long tasks, so there is one picture.
    assert [path.name for path in tmp_path.glob("*.png")] == ["kept_256_tokens.png"]


@pytest.mark.parametrize(
    ("arguments", "says"), [(["--merge", "nowhere.json"], "--merge needs --json"), ([], "--grid is missing")]
)
def test_flags_that_are_missing_are_named(arguments, says, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["quality.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        quality.main()
    assert stopped.value.code == 2 and says in capsys.readouterr().err


def test_results_are_those_of_the_finished_variants(tmp_path, capsys):
    write_variant(tmp_path, "nsa", {0: 8.0, 10: 1.25})
    write_variant(tmp_path, "window", {0: 8.0, 10: 1.5})
    (tmp_path / "window" / "evaluation_context" / "evaluation.json").unlink()
    grid = quality.load_grid(str(quality.ROOT / "configs" / "quality" / "cpu_smoke.py"))
    options = argparse.Namespace(folder=tmp_path, variants=["nsa", "window"], json=None, plots=None, gpus=0, parallel=2)
    quality.report(options, grid, {"nsa": {"model.mlp_dim": 128}, "window": {}})
    found = json.loads((tmp_path / "results.json").read_text())
    (row,) = found["rows"]
    expected = {"variant": "nsa", "length": 256, "tokens": 5120, "parameters": 1000, "bits_per_byte": 1.25}
    expected |= {"tokens_per_second": 1024, "by_position": [
        {"from": 0, "to": 128, "nats": 2.0}, {"from": 128, "to": 256, "nats": 1.5}
    ]}  # fmt: skip
    expected["validation_by_position"] = [{"from": 0, "to": 128, "nats": 2.5}]
    assert {name: row[name] for name in expected} == expected and found["parallel"] == 2
    assert row["fields"] == {"model.mlp_dim": 128} and len(row["validation"]) == 2
    assert "| nsa | 1,000 | 5,120 | 1.2500 | 1.5000 | 50.0% | 1,024 |" in capsys.readouterr().out
    for name in ("tokens.png", "position.png", "long.png"):
        assert (tmp_path / name).stat().st_size > 5_000


def test_variants_that_read_other_text_are_named(tmp_path, capsys):
    for name, tokens in (("nsa", 100), ("window", 101)):
        write_variant(tmp_path, name, {0: 8.0, 10: 1.25})
        env = json.loads((tmp_path / name / "env.json").read_text())
        env["data"] = {"splits": {"text": {"train": {"tokens": tokens}}}}
        (tmp_path / name / "env.json").write_text(json.dumps(env))
    grid = quality.load_grid(str(GRIDS[0]))
    options = argparse.Namespace(folder=tmp_path, variants=["nsa", "window"], json=None, plots=None, gpus=0, parallel=1)
    quality.report(options, grid, {"nsa": {}, "window": {}})
    assert "not comparable: window read other text than nsa" in capsys.readouterr().out


@pytest.mark.slow
def test_two_tiny_variants_from_end_to_end(tmp_path):
    command = [sys.executable, "benchmarks/quality.py", "--grid", "configs/quality/cpu_smoke.py"]
    command += ["--folder", str(tmp_path / "runs"), "--json", str(tmp_path / "out.json")]
    command += ["--files", *(f"nsa_jax/{name}" for name in ("data", "ops", "nn", "train"))]
    flags = re.sub(r"(device_count=)\d+", r"\g<1>1", os.environ["XLA_FLAGS"])
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    for _ in range(2):  # the second time there is nothing to do
        done = subprocess.run(command, cwd=quality.ROOT, env=environment, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "+ nsa" not in done.stdout
    rows = {row["variant"]: row for row in json.loads((tmp_path / "out.json").read_text())["rows"]}
    assert set(rows) == {"nsa", "window"} and "selection" in rows["nsa"] and "selection" not in rows["window"]
    assert abs(rows["nsa"]["parameters"] - rows["window"]["parameters"]) <= 3 * 32 * 2 * 32
