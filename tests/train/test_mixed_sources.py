"""A run over two sources: what it logs of each, and that it resumes bit for bit."""

import json

import numpy as np
import pytest

from nsa_jax.config import check
from nsa_jax.train.env import changed_fields

from .tiny import losses, make_run

SHARES = {"one": 0.25, "two": 0.75}


def sources(tmp_path):
    random = np.random.default_rng(0)
    for name, letters in {"one": "ab", "two": "cdefghij"}.items():
        documents = ["".join(random.choice(list(letters), 80)) for _ in range(60)]
        (tmp_path / f"{name}.txt").write_text("|".join(documents))
    found = {name: {"files": (str(tmp_path / f"{name}.txt"),), "weight": w} for name, w in (("one", 1.0), ("two", 3.0))}
    return {
        **{"data__source": "text", "data__text_separator": "|", "data__sources": found, "data__val_fraction": 0.3},
        **{"data__cache_dir": str(tmp_path / "cache"), "train__eval_batches": 1, "train__save_every": 3},
        **{"model__attention": "dense", "model__num_layers": 1},  # which any model can tell
    }


def test_validation_weighs_tasks_by_the_targets_that_count_in_training(tmp_path):
    """Of a row of text every target counts, of a row of a task its answers alone."""
    changes = sources(tmp_path)
    changes["data__sources"]["one"] = {"source": "task", "tasks": ("needle",), "weight": 1.0}
    run = make_run(tmp_path / "run", train__steps=2, data__seq_len=256, **changes)
    batches = [next(iterator) for iterator in [run.pipeline.train()] for _ in range(40)]
    counted = np.concatenate([batch["loss_mask"].sum(1) for batch in batches])
    share = counted[counted < 128].sum() / counted.sum()
    assert run.pipeline.loss_shares == {"one": pytest.approx(share, rel=0.1), "two": pytest.approx(1 - share, rel=0.01)}
    assert share < 0.1
    last = run.run()["validation"]
    mean = sum(run.pipeline.loss_shares[name] * last[f"val/loss/{name}"] for name in ("one", "two"))
    assert last["val/loss"] == pytest.approx(mean, rel=1e-6)


def test_what_changed_names_sources_that_come_or_go_and_weights_that_are_now_written_out():
    """A start with another mixture was not seen, or refused with a list of all that might have changed."""
    old = {"data": {"sources": {"a": {"files": ["x"]}, "b": {"files": ["y"], "weight": 2.0}}}}
    new = {"data": {"sources": {"a": {"files": ["x"], "weight": 3.0}, "c": {"files": ["y"]}}}}
    found = changed_fields(old, new)
    assert found == [
        "data.sources.a.weight: 1.0 there, 3.0 now",
        "data.sources.b: only there",
        "data.sources.c: only now",
    ]
    new = {"data": {"sources": {"a": {"files": ["x"], "weight": 1.0}, "b": old["data"]["sources"]["b"]}}}
    assert changed_fields(old, new, "config.") == []


def test_a_run_over_two_sources_tells_the_loss_of_each_and_resumes(tmp_path, capsys):
    changes = sources(tmp_path)
    run = make_run(tmp_path / "run", train__steps=6, **changes)
    check(run.config)
    summary = run.run()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    last = summary["validation"]
    assert last["val/loss"] == pytest.approx(0.25 * last["val/loss/one"] + 0.75 * last["val/loss/two"], rel=1e-6)
    assert last["val/loss/one"] < last["val/loss/two"]
    (trained,) = [row for row in rows if row["step"] == 6 and "train/loss" in row]
    tokens = {name: part.pipeline.stats["train"].tokens for name, part in run.pipeline.parts.items()}
    assert trained["data/epochs/one"] == pytest.approx(6 * 2 * 48 / tokens["one"], rel=0.05)
    assert trained["data/epochs/two"] == pytest.approx(6 * 6 * 48 / tokens["two"], rel=0.05)
    said = capsys.readouterr().out
    documents = {name: part.pipeline.stats["train"].documents for name, part in run.pipeline.parts.items()}
    told = [
        f"{n} {share} (text, {documents[n]} documents, {tokens[n] / 1000:.3g}k tokens)" for n, share in SHARES.items()
    ]
    assert f"\ndata: {told[0]}, {told[1]}, byte\n" in said
    assert f"validation loss {last['val/loss']:.4f} (one {last['val/loss/one']:.4f}, two " in said
    assert set(json.loads((tmp_path / "run" / "env.json").read_text())["data"]["splits"]) == {"one", "two"}

    make_run(tmp_path / "again", train__steps=3, optim__schedule="constant", **changes).run()
    make_run(tmp_path / "again", train__steps=6, optim__schedule="constant", **changes).run()
    make_run(tmp_path / "whole", train__steps=6, optim__schedule="constant", **changes).run()
    assert losses(tmp_path / "again") == losses(tmp_path / "whole")
