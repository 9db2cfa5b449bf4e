"""What a run writes, and the figures that are not part of the compiled step."""

import fnmatch
import io
import json
import math
import re
import struct
import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx
from tensorboardX.proto.event_pb2 import Event, SessionLog

from nsa_jax import NSAConfig, evaluate
from nsa_jax.data import DataError, pipeline
from nsa_jax.nn import ModelConfig, Transformer, count_parameters
from nsa_jax.nn.transformer import layer_stacks
from nsa_jax.ops import reference
from nsa_jax.train import flops, metrics, prepared
from nsa_jax.train.loop import Run
from nsa_jax.train.preflight import selftest
from nsa_jax.train.state import setup
from nsa_jax.train.terminal import data_line
from nsa_jax.train.watch import health

from .tiny import VOCAB, make_run, one_device, random_batch, rows, tiny_config


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run on text with everything switched on, and its summary."""
    root = tmp_path_factory.mktemp("text")
    words = ["alpha", "beta", "gamma", "delta", "epsilon"]
    rng = np.random.default_rng(0)
    for index in range(60):
        (root / f"{index}.txt").write_text(" ".join(rng.choice(words, 60)))
    config = tiny_config(
        data__source="text", data__files=(f"{root}/*.txt",), data__cache_dir=str(root / "cache"),
        data__val_fraction=0.2, train__steps=30, train__log_every=10, train__eval_every=15, train__eval_batches=2,
        train__save_every=30,
        train__sample_tokens=12, train__sample_prompt="alpha", optim__learning_rate=1e-2,
    )  # fmt: skip
    config.data.tokenizer = "byte"
    run = Run(config, root / "run", None, one_device())
    return root / "run", run, run.run()


def all_rows(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def test_the_start_names_the_data(finished):
    run = finished[1]
    documents = run.pipeline.corpus.train.stats.documents
    tokens = run.pipeline.corpus.train.stats.tokens / 1000
    assert data_line(run.config, run.pipeline) == f"data: text, {documents} documents, {tokens:.1f}k tokens, byte"
    assert data_line(tiny_config(), make_run(finished[0].parent / "other").pipeline) == "data: synthetic copy"


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_the_peak_of_host_memory_is_in_bytes(platform, unit, monkeypatch):
    """Linux counts it in KiB, macOS in bytes."""
    monkeypatch.setattr(metrics.sys, "platform", platform)
    monkeypatch.setattr(metrics.resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=3 * 2**30 // unit))
    row = metrics.memory_row()
    assert (row["memory/host_peak_rss_mib"], row["memory/host_peak_rss_gib"]) == (3072, 3)


def test_every_logged_name_is_listed(finished):
    """docs/tracking.md sends readers to the head of metrics.py for the names."""
    listed = []
    for name in re.findall(r"[a-z]+/(?:\w|\*|/|\{.*?\})+", metrics.__doc__):
        before, _, rest = name.partition("{")
        choices, _, after = rest.partition("}")
        listed += [re.sub("[A-Z]+", "*", before + choice + after) for choice in choices.split(",")]
    values = dict.fromkeys((*metrics.TRAIN_NAMES, "z_loss", "selection_loss"), 1.0)
    config = tiny_config()
    made = setup(config, VOCAB, one_device())
    figures = jax.device_get(health.make_health(made)(made.init()["params"], random_batch(config))[0])
    spread = {"selection_random": np.zeros(2), "selection_best": np.ones(2)}
    names = {*metrics.train_row(values), *health.summarise(figures | spread), "perf/health_seconds", "perf/mfu"}
    names |= {name for row in all_rows(finished[0]) for name in row} | {
        "alarm/spike",
        "val/loss/web",
        "data/epochs/web",
    }
    missing = {name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in listed)}
    assert missing == {"step", "time", "learning_rate"}  # which are words of their own


def _text(tmp_path, **changes):
    (tmp_path / "one.txt").write_text(" ".join(map(str, range(4000))))  # a single document
    config = tiny_config(data__source="text", data__files=(str(tmp_path / "one.txt"),), **changes)
    config.data.cache_dir = str(tmp_path / "cache")
    return config


class _Waiting:
    """A function whose lowering says that it has begun and waits."""

    def __init__(self):
        self.begun, self.go_on, self.compiled = threading.Event(), threading.Event(), False

    def lower(self):
        self.begun.set()
        assert self.go_on.wait(60)
        return self

    def compile(self):
        self.compiled = True


def test_a_corpus_that_holds_nothing_out_is_refused_and_nothing_more_is_compiled(tmp_path, monkeypatch):
    step = _Waiting()
    monkeypatch.setattr(prepared, "first_programs", lambda *_: {"train step": (step, ())})
    config = _text(tmp_path, train__eval_batches=1, preflight__selftest=False)
    with pytest.raises(DataError, match="nothing to validate on"):
        Run(config, tmp_path / "run", compile_early=True)
    assert step.begun.wait(60)
    step.go_on.set()
    for thread in threading.enumerate():
        if thread.name.startswith("compile"):
            thread.join(60)
    assert not step.compiled


def test_programs_are_compiled_and_tested_while_the_data_are_tokenised(tmp_path, monkeypatch):
    step, load, tested = _Waiting(), pipeline.cache.load_corpus, threading.Event()
    monkeypatch.setattr(prepared, "first_programs", lambda *_: {"train step": (step, ())})

    def tokenise(*arguments, **options):
        assert step.begun.wait(60) and tested.wait(60)
        return load(*arguments, **options)

    def test(*_):
        tested.set()
        return selftest.SelfTest([], [("took", "no time")], 0.0)

    monkeypatch.setattr(pipeline.cache, "load_corpus", tokenise)
    monkeypatch.setattr(selftest, "selftest", test)
    run = Run(_text(tmp_path, data__val_fraction=0.0), tmp_path / "run", compile_early=True)
    step.go_on.set()
    run._compiling.wait("train step")
    assert step.compiled
    tested.clear()
    run.examine()
    assert run.preflight.facts["self-test"] == [("took", "no time")] and not tested.is_set()  # not made again
    # Without `compile_early` both begin in `examine`.
    monkeypatch.setattr(pipeline.cache, "load_corpus", load)
    run = Run(_text(tmp_path, data__val_fraction=0.0), tmp_path / "run")
    assert not run._compiling._programs and run._selftest is None


def test_the_mean_of_bits_per_byte_is_over_the_steps_since_the_last_row(tmp_path):
    make_run(tmp_path / "each", train__steps=4, train__log_every=1).run()
    make_run(tmp_path / "two", train__steps=4, train__log_every=2).run()
    each = [row["train/bits_per_byte"] for row in rows(tmp_path / "each").values()]
    found = [row["train/bits_per_byte_mean"] for row in rows(tmp_path / "two").values()]
    assert found == pytest.approx([(each[0] + each[1]) / 2, (each[2] + each[3]) / 2], rel=1e-12)


def test_every_row_has_a_step_and_finite_numbers(finished):
    found = all_rows(finished[0])
    assert [row["step"] for row in found] == [0, 10, 15, 15, 20, 30, 30]
    for row in found:
        assert all(math.isfinite(value) for value in row.values())
        for name in row:
            if name.endswith("_mib"):
                assert row[name] == pytest.approx(1024 * row[name.replace("_mib", "_gib")])
    needed = (
        "train/loss train/perplexity train/bits_per_byte norm/grad norm/param norm/update learning_rate "
        "perf/tokens_per_second perf/step_seconds perf/data_wait_p50_seconds perf/data_wait_p95_seconds "
        "memory/host_peak_rss_mib memory/host_peak_rss_gib"
    ).split()
    for row in rows(finished[0]).values():
        assert set(needed) <= set(row)
        assert row["norm/grad"] > 0 and row["norm/update"] > 0 and row["perf/tokens_per_second"] > 0
        assert row["train/perplexity"] == pytest.approx(math.exp(row["train/loss"]))


def test_validation_falls_from_eight_bits_per_byte(finished):
    values = [row["val/bits_per_byte"] for row in all_rows(finished[0]) if "val/loss" in row]
    assert 7.5 < values[0] < 9 and values[-1] < 6 and len(values) == 3


def test_evaluation_repeats_the_last_validation(finished, tmp_path, capsys):
    """In smaller batches, on several devices instead of one; the other task scores documents with more context."""
    workdir, run, summary = finished
    tasks = ["--tasks", "validation,perplexity", "--output", str(tmp_path), "--batch-size", "5"]
    assert evaluate.main([str(workdir), *tasks]) == 0
    found = json.loads((tmp_path / "evaluation.json").read_text())["tasks"]
    last, again = summary["validation"], found["validation"]
    assert last["step"] == 30
    for name in ("loss", "perplexity", "bits_per_byte"):
        assert again[name] == pytest.approx(last[f"val/{name}"], rel=1e-6)
    assert again["recorded_loss"] == last["val/loss"]
    masks = [batch["loss_mask"] for batch in run.pipeline.validation()]
    assert (again["tokens"], again["rows"]) == (sum(mask.sum() for mask in masks), sum(len(mask) for mask in masks))
    assert again["bytes"] == pytest.approx(again["loss"] * again["tokens"] / math.log(2) / again["bits_per_byte"])
    assert abs(found["perplexity"]["bits_per_byte"] / last["val/bits_per_byte"] - 1) > 1e-4
    assert "not comparable with val/bits_per_byte" in capsys.readouterr().out


def test_validation_is_the_loss_over_held_out_tokens(finished):
    _, run, summary = finished
    batches = list(run.pipeline.validation())
    nats = tokens = 0.0
    found = run._last_validation[1]
    state = run.setup.target()  # shapes only: the numbers come from the checkpoint
    from nsa_jax.train.checkpoint import Checkpoints

    checkpoints = Checkpoints(finished[0] / "checkpoints", {}, read_only=True)
    checkpoints._check_fits = lambda *_: None
    _, state = checkpoints.restore(state, run.pipeline.train())
    checkpoints.close()
    model = run.setup.model(state["params"])
    apply = jax.jit(lambda tokens, start: model(tokens, start))
    for batch in batches:
        logp = np.asarray(jax.nn.log_softmax(apply(batch["inputs"], batch["segment_start"])))
        picked = np.take_along_axis(logp, batch["targets"][..., None], -1)[..., 0]
        nats -= (picked * batch["loss_mask"]).sum()
        tokens += batch["loss_mask"].sum()
    assert found["val/loss"] == pytest.approx(nats / tokens, rel=1e-5)
    assert summary["validation"]["val/loss"] == found["val/loss"]
    text_bytes = sum((run.pipeline.tokenizer.token_bytes[b["targets"]] * b["loss_mask"]).sum() for b in batches)
    assert found["val/bits_per_byte"] == pytest.approx(nats / math.log(2) / text_bytes, rel=1e-5)


def test_env_and_summary_say_what_was_run(finished):
    workdir, run, summary = finished
    env = json.loads((workdir / "env.json").read_text())
    from flax import nnx

    assert env["parameters"]["total"] == count_parameters(Transformer(run.setup.model_config, rngs=nnx.Rngs(0)))
    assert env["config"]["model"]["nsa"]["window"] == 12 and env["config"]["train"]["steps"] == 30
    assert (
        env["implementations"]["selected_attention"] == "reference"
        and env["deterministic"] is True
        and env["kernels"] == {}
    )
    assert env["versions"]["jax"] == jax.__version__ and env["devices"]["count"] == 1
    assert set(env["git"]) == {"commit", "changed"}
    assert env["data"]["splits"]["train"]["tokens"] > 10_000
    assert json.loads((workdir / "summary.json").read_text()) == summary
    assert summary["finished"] and summary["step"] == 30 and summary["stopped_by"] is None
    assert summary["best_checkpoint"]["step"] == 30
    assert list((workdir / "tensorboard").iterdir()) and (workdir / "checkpoints" / "30").is_dir()


def test_one_compilation_over_the_whole_run(finished):
    assert finished[1].train_step._cache_size() == 1
    assert finished[1].eval_step._cache_size() == 1


def test_samples_are_written_at_each_validation(tmp_path, capsys):
    changes = dict(
        train__steps=2, train__eval_every=1, train__eval_batches=1, train__sample_tokens=4, model__attention="dense"
    )
    make_run(tmp_path, **changes).run()
    lines = capsys.readouterr().out
    assert lines.count(": sample") == 3
    assert f"the run is in {tmp_path}" in lines.splitlines()[-1]


def test_metrics_of_the_last_interval_are_fetched_late(tmp_path, monkeypatch):
    run = make_run(tmp_path, train__steps=8, train__log_every=2, model__attention="dense")
    dispatched, seen = [0], []
    train_step, report = run.train_step, run._report

    def counting(state, batch):
        dispatched[0] += 1
        return train_step(state, batch)

    def reporting(interval, writer, clock):
        seen.append((interval.first_step + len(interval.values) - 1, dispatched[0]))
        return report(interval, writer, clock)

    run.train_step, run._report = counting, reporting
    run.run()
    assert seen == [(2, 4), (4, 6), (6, 8), (8, 8)]


def test_a_step_that_was_over_before_the_clock_ran_has_no_speed(tmp_path):
    make_run(tmp_path, train__steps=3, model__attention="dense").run()
    names = ("perf/tokens_per_second", "perf/step_seconds")
    assert [[name in row for name in names] for row in rows(tmp_path).values()] == [[False] * 2, [True] * 2, [True] * 2]


@pytest.mark.parametrize(("start_step", "purged"), [(0, 0), (7, 8)])
def test_tensorboard_forgets_the_steps_that_are_run_again(tmp_path, start_step, purged):
    for _ in range(2):  # the first was killed before it saved, or after step 7
        writer = metrics.MetricsWriter(tmp_path, start_step=start_step, total_steps=9, stream=io.StringIO())
        writer.write(8, {"train/loss": 1.0})
        writer.close()
    newest = max((tmp_path / "tensorboard").iterdir(), key=lambda path: path.stat().st_mtime)
    raw, events = newest.read_bytes(), []
    while raw:  # records: length, checksum, event, checksum
        (size,) = struct.unpack("<Q", raw[:8])
        events.append(Event.FromString(raw[12 : 12 + size]))
        raw = raw[16 + size :]
    (start,) = (event for event in events if event.HasField("session_log"))
    assert start.session_log.status == SessionLog.START and start.step == purged


def test_samples_cannot_garble_a_terminal():
    assert metrics.printable("a\x1b[2J\x00\n\tb\u00e9") == "a\\x1b[2J\\x00\n\tb\u00e9"
    assert metrics.printable("a\u202eb\u2028\ufeff") == "a\\u202eb\\u2028\\ufeff"
    for text in ("\u3000\u6771\u4eac", "10\u00a0%", "\u0645\u06cc\u200c\u062e"):  # spaces and a joiner of languages
        assert metrics.printable(text) == text


@pytest.mark.parametrize("seq_len", [5, 40, 100])
def test_keys_per_query_are_those_that_the_operator_reads(seq_len):
    nsa = NSAConfig(compress_block=8, compress_stride=4, select_block=8, num_selected=4, window=12)
    config = ModelConfig(dim=32, num_heads=2, num_kv_heads=1, head_dim=8, nsa=nsa)
    q, k = jax.random.normal(jax.random.key(0), (2, 1, seq_len, 2, 8))
    count = 0 if seq_len < 8 else (seq_len - 8) // 4 + 1
    key_cmp = k[:, :count, :1]
    _, lse = reference.compressed_attention(q, key_cmp, key_cmp, config=nsa)
    lists = np.asarray(reference.select_blocks(q, key_cmp, lse, config=nsa, num_keys=seq_len))[0, :, 0]
    t = np.arange(seq_len)
    selected = [sum(1 for j in lists[i] for p in range(8 * j, 8 * j + 8) if p <= i) for i in t]
    compressed = [sum(1 for c in range(count) if 4 * c + 7 <= i) for i in t]
    want = {"compressed": compressed, "selected": selected, "window": [min(i + 1, 12) for i in t]}
    got = flops.keys_per_query(config, seq_len)
    for branch, keys in want.items():
        assert got[branch] == pytest.approx(np.mean(keys))


def test_flops_of_the_matrices_are_two_per_parameter():
    config = ModelConfig(
        dim=64, num_heads=4, num_kv_heads=2, head_dim=16, num_layers=3, vocab_size=100, attention="dense",
        tie_embeddings=False,
    )  # fmt: skip
    parts = flops.forward_flops_per_token(config, 128)
    params = nnx.state(Transformer(config, rngs=nnx.Rngs(0)))
    matrices = sum(x.size for x in jax.tree.leaves(params) if x.ndim > 1 and x.shape != (3, 64)) - 100 * 64
    assert parts["projections"] + parts["mlp"] + parts["head"] == 2 * matrices
    assert parts["attention_dense"] == 3 * 2 * 4 * 32 * 64.5
    assert flops.train_flops_per_token(config, 128) == pytest.approx(3 * sum(parts.values()))
    # 6 operations per parameter and token is the usual estimate for a short row.
    assert flops.train_flops_per_token(config, 1) == pytest.approx(6 * matrices, rel=0.02)


def test_flops_of_nsa_are_those_of_its_arrays_and_keys():
    nsa = NSAConfig(compress_block=8, compress_stride=4, select_block=8, num_selected=4, window=12)
    config = ModelConfig(
        dim=32, num_heads=6, num_kv_heads=2, head_dim=8, value_head_dim=4, num_layers=3, vocab_size=10, nsa=nsa
    )
    layer = layer_stacks(Transformer(config, rngs=nnx.Rngs(0)).blocks, config)[0].attention  # three layers, stacked
    parts, keys = flops.forward_flops_per_token(config, 96), flops.keys_per_query(config, 96)
    assert parts["projections"] == 2 * (layer.w_in.size + layer.w_out.size)  # gates are columns of w_in
    phi = [x.size for phi in (layer.compress_key, layer.compress_value) for x in (phi.w_1, phi.w_2)]
    assert parts["compressor"] == 2 * sum(phi) * 2 / 4  # of both key/value heads, once for every fourth token
    for branch in ("compressed", "selected", "window"):
        assert parts[f"attention_{branch}"] == pytest.approx(3 * 6 * 2 * (8 + 4) * keys[branch])
    assert parts["selection"] == pytest.approx(3 * 6 * 2 * 8 * keys["compressed"])
    assert parts["head"] == 2 * 32 * 10
    # The lists have no gradient.
    assert flops.train_flops_per_token(config, 96) == pytest.approx(3 * sum(parts.values()) - 2 * parts["selection"])


def test_mfu_peaks_are_known_for_the_gpus_in_the_table_only():
    assert flops.peak_flops("NVIDIA H200") == 989e12
    assert flops.peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert flops.peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert flops.peak_flops("NVIDIA H100 PCIe") == 756e12
    # Slower or faster relatives, whose names hold that of another one.
    assert flops.peak_flops("NVIDIA H200 NVL") == 835e12
    assert flops.peak_flops("NVIDIA GH200 480GB") == 989e12
    assert flops.peak_flops("NVIDIA B200") == 2250e12
    assert flops.peak_flops("NVIDIA GB200") == 2500e12
    assert flops.peak_flops("NVIDIA RTX PRO 6000 Blackwell Workstation Edition") == 503e12
    assert flops.peak_flops("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition") == 438e12
    assert flops.peak_flops("cpu") is None


def test_rows_of_steps_that_are_run_again_are_dropped_everywhere(tmp_path):
    """A crash after step 15, resumed from step 10."""
    files = [tmp_path / f"{name}.jsonl" for name in ("metrics", "samples", "health", "layers", "validation")]
    for file in files:
        file.write_text("".join(json.dumps({"step": step}) + "\n" for step in (5, 10, 15)))
    metrics.MetricsWriter(tmp_path, start_step=10, total_steps=20, stream=io.StringIO()).close()
    for file in files:
        assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [5, 10], file.name
