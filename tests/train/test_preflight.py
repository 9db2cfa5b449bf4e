"""Preflight: faults in data, in the model code and in configs are named before a run starts."""

import dataclasses
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from nsa_jax import aot
from nsa_jax.command_line import load_config
from nsa_jax.config import ConfigError, NSAConfig, check, default_config, validate
from nsa_jax.data import DataError, make_pipeline
from nsa_jax.nn import dense
from nsa_jax.ops import blocks, nsa
from nsa_jax.ops.target import Target, compile_for
from nsa_jax.train import env, preflight
from nsa_jax.train.preflight import cost, data_check, hlo, memory, selftest
from nsa_jax.train.preflight.report import kernel_facts, program_facts
from nsa_jax.train.state import setup
from nsa_jax.train.watch import health

from .tiny import VOCAB, one_device, random_batch, tiny_config

ROOT = Path(__file__).parents[2]


def rules(problems, severity="error"):
    return {problem.rule for problem in problems if problem.severity == severity}


# Data.


def text_config(tmp_path, documents, **changes):
    path = tmp_path / "corpus.txt"
    path.write_text("\n%%\n".join(documents))
    config = tiny_config(data__source="text", data__files=(str(path),), data__text_separator="\n%%\n", **changes)
    config.data.val_fraction, config.data.cache_dir = 0.3, str(tmp_path / "cache")
    config.train.eval_batches, config.train.steps = 2, 2
    return config


def documents(count, seed=0):
    random = np.random.default_rng(seed)
    words = ["".join(chr(97 + c) for c in random.integers(0, 26, 5)) for _ in range(500)]
    return [" ".join(random.choice(words, 60)) for _ in range(count)]


def test_sound_text_has_no_finding(tmp_path):
    report = data_check.examine_local(text_config(tmp_path, documents(60)))
    assert report.problems == []
    assert 1.0 < report.bigram_entropy < report.unigram_entropy < np.log(257)
    facts = dict(report.facts)
    assert facts["documents in both splits"] == "0" and facts["validation windows seen in training"] == "0.00%"
    assert all(word.strip(".").isalpha() for word in facts["first text"].split("\\n")[0].split())


def test_a_corpus_full_of_duplicates_is_an_error(tmp_path):
    report = data_check.examine_local(text_config(tmp_path, documents(30) + documents(30)))
    assert rules(report.problems) >= {"R031"}
    assert "documents that repeat an earlier one" in str(report.problems)


def test_text_that_cannot_be_used_is_an_error(tmp_path):
    config = text_config(tmp_path, documents(60))
    config.data.val_fraction = 1e-9
    (problem,) = data_check.examine_local(config).problems
    assert (problem.rule, problem.severity) == ("R037", "error") and "no document is held out" in problem.message


def test_validation_on_training_data_is_an_error(tmp_path):
    config = text_config(tmp_path, documents(60))
    pipeline = make_pipeline(config)
    rows = pipeline._validation_rows
    pipeline._validation_rows = dataclasses.replace(rows, tokens=pipeline.corpus.train.tokens)
    found = data_check.examine(config, pipeline)
    assert rules(found.problems) == {"R030"} and "are training data" in str(found.problems[0])


def test_unshifted_labels_ids_out_of_range_and_empty_masks_are_errors():
    config = tiny_config()
    batch = random_batch(config)
    assert data_check.check_batches([batch], VOCAB) == []
    found = data_check.check_batches([{**batch, "targets": batch["inputs"]}], VOCAB)
    assert rules(found) == {"R033"} and "labels are not shifted" in str(found[0])
    found = data_check.check_batches([batch], VOCAB - 1)
    assert rules(found) == {"R033"} and "the vocabulary has 31" in str(found[0])
    found = data_check.check_batches([{**batch, "loss_mask": 0 * batch["loss_mask"]}], VOCAB)
    assert rules(found) == {"R033"} and "loss mask is 0" in str(found[0])


def test_a_loader_that_repeats_rows_and_text_without_content_are_errors():
    batch = random_batch(tiny_config())
    assert rules(data_check.check_batches([batch, batch], VOCAB)) == {"R032"}
    same = np.full_like(batch["inputs"], 3)
    assert "R036" in rules(data_check.check_batches([{**batch, "inputs": same, "targets": same}], VOCAB))


def test_data_that_is_not_here_is_a_warning_and_nothing_is_downloaded(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.load_dataset", lambda *a, **k: pytest.fail("it was loaded"))
    config = tiny_config(data__source="hf", data__hf_path="some/dataset", data__tokenizer="bpe")
    config.data.cache_dir = str(tmp_path)
    report = data_check.examine_local(config)
    assert rules(report.problems, "warning") == {"R028"} and rules(report.problems) == set()
    assert [name for name, _ in report.facts] == ["not checked"]


# Causality.


def roll(op):
    """Every query gets what the next one should: it sees one token too many."""

    def leaky(*args, **kwargs):
        out = op(*args, **kwargs)
        return jax.tree.map(lambda a: jnp.roll(a, -1, axis=1), out)

    return leaky


def test_the_model_passes():
    tested = selftest.selftest(tiny_config())
    assert tested.problems == []
    assert dict(tested.facts)["documents apart"] == "passed"


@pytest.mark.parametrize("branch", ["compressed", "selected", "window"])
def test_a_leak_of_the_next_token_names_its_branch(branch, monkeypatch):
    op = f"{branch}_attention"
    monkeypatch.setattr(nsa, op, roll(getattr(nsa, op)))
    found = selftest.selftest(tiny_config()).problems
    assert "R040" in rules(found)
    assert f"the model sees the future, through the {branch} branch" in str(found[0])


def test_rounding_that_depends_on_the_lists_of_later_tokens_is_no_leak(monkeypatch):
    real = nsa.selected_attention

    def tiled(query, key, value, block_indices, **kwargs):
        """The last bits depend on what the next token lists, as in kernels that serve neighbours together."""
        out = real(query, key, value, block_indices, **kwargs)
        listed = (jnp.roll(block_indices, -1, axis=1) ** 2).sum((2, 3))
        return out * (1 + 1e-6 * listed[..., None, None])

    monkeypatch.setattr(nsa, "selected_attention", tiled)
    subject = selftest._Subject(*selftest.slice_config(tiny_config())[:2], True, 0)
    base, differs = subject.logits(), []
    for t in selftest._positions(subject.config, subject.length):
        changed = np.where(np.arange(subject.length) > t, subject.other, subject.tokens)
        where = selftest._first_difference(base[: t + 1], subject.logits(changed)[: t + 1])
        differs += [] if where is None else [where == t]
    assert differs and all(differs)
    assert selftest.selftest(tiny_config()).problems == []


def test_lists_that_depend_on_later_tokens_are_a_leak(monkeypatch):
    real = nsa.select_blocks
    monkeypatch.setattr(nsa, "select_blocks", lambda *a, **k: jnp.roll(real(*a, **k), -1, axis=1))
    assert rules(selftest.selftest(tiny_config()).problems) == {"R040"}


def test_the_selftest_runs_the_kernels_that_the_rows_of_the_run_are_served_by():
    config = load_config("configs/a100_prod.py")
    with compile_for(Target("gpu", (9, 0))):
        model, length, _ = selftest.slice_config(config)
        assert length == 1152 * 3 // 2 and selftest._kernels(model, length) == selftest._kernels(model, 2048)
        config.data.seq_len = 32_768
        model, length, _ = selftest.slice_config(config)
        assert length == 9216 * 3 // 2 and selftest._kernels(model, length) == selftest._kernels(model, 32_768)
        assert selftest._kernels(model, 1152) != selftest._kernels(model, 32_768)


@pytest.mark.gpu
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(("select_block", "num_selected"), [(64, 16), (32, 32)])
def test_gpu_kernels_of_long_rows_pass(select_block, num_selected, packing):
    config = load_config("configs/a100_prod.py")
    config.data.seq_len, config.data.packing = 32_768, packing
    config.model.nsa.select_block, config.model.nsa.num_selected = select_block, num_selected
    assert selftest.selftest(config).problems == []


def test_queries_of_the_second_document_choose_among_blocks():
    model, length, _ = selftest.slice_config(tiny_config())
    assert length - length // 3 > model.nsa.num_selected * model.nsa.select_block


def test_a_document_that_sees_its_neighbour_is_an_error(monkeypatch):
    real = nsa.window_attention
    monkeypatch.setattr(nsa, "window_attention", lambda *a, **k: real(*a, **{**k, "segment_start": None}))
    assert rules(selftest.selftest(tiny_config()).problems) == {"R044"}


@pytest.mark.parametrize(("op", "name"), [("selected_attention", "key_slc"), ("window_attention", "key_win")])
def test_keys_that_are_ignored_are_named(op, name, monkeypatch):
    real = getattr(nsa, op)
    monkeypatch.setattr(nsa, op, lambda query, key, *a, **k: real(query, key * 0, *a, **k))
    found = selftest.selftest(tiny_config()).problems
    assert rules(found) == {"R041", "R042"}
    assert all(name in str(problem) for problem in found)


def test_an_operation_that_is_not_deterministic_is_an_error(monkeypatch):
    noise = iter(range(1, 100))
    logits = selftest._Subject.logits
    monkeypatch.setattr(selftest._Subject, "logits", lambda *a, **k: logits(*a, **k) + np.float32(next(noise)))
    assert "R043" in rules(selftest.selftest(tiny_config()).problems)


# Configs, workdir, disk, cost.


def long_config():
    config = default_config()
    config.train.steps = 50_000
    return config


BAD = [
    ("model.compute_dtype", "float32", "R015"),
    ("model.dim", 128, "R016"),
    ("data.source", "synthetic", "R016"),
    ("model.param_dtype", "bfloat16", "R017"),
    ("preflight.target", "v100", "R001"),
    ("preflight.devices", 0, "R002"),
    ("preflight.utilisation", 0.0, "R003"),
    ("preflight.ignore", ("everything",), "R000"),
    ("guards.floor_ratio", 1.5, "R003"),
    ("guards.stall_seconds", -1.0, "R002"),
    ("guards.heartbeat_seconds", 0.0, "R003"),
    ("guards.max_gap", -0.5, "R002"),
]


@pytest.mark.parametrize(("field", "value", "rule"), BAD, ids=[f"{field}={value}" for field, value, _ in BAD])
def test_bad_values_of_long_runs_preflight_and_guards(field, value, rule):
    config = long_config()
    assert validate(config) == []
    *parents, name = field.split(".")
    target = config
    for part in parents:
        target = target[part]
    target[name] = value
    errors = [problem for problem in validate(config) if problem.severity == "error"]
    assert [problem.rule for problem in errors] == [rule] and errors[0].fix
    with pytest.raises(ConfigError, match=rule):
        check(config)


def test_an_error_is_accepted_by_its_id_alone():
    config = long_config()
    config.train.save_every, config.model.compute_dtype = 0, "float32"
    config.preflight.ignore = ("R013",)
    with pytest.raises(ConfigError) as caught:
        check(config)
    assert rules(caught.value.problems) == {"R015"}
    config.preflight.ignore = ("R013", "R015")
    assert rules(check(config), "ignored") == {"R013", "R015"}
    report = preflight.Report(problems=validate(config))
    report.settle(config)
    assert report.exit_code == 0 and len(report.record()["ignored"]) == 2


def test_a_workdir_of_another_run_or_without_permission_is_an_error(tmp_path):
    config = tiny_config()
    (tmp_path / "env.json").write_text(json.dumps({"config": json.loads(config.to_json())}))
    assert preflight.check_workdir(config, tmp_path) == []
    config.train.steps, config.guards.spike = 99, 2.0
    assert preflight.check_workdir(config, tmp_path) == []
    config.optim.learning_rate = 1e-4  # on purpose, after a divergence
    assert rules(preflight.check_workdir(config, tmp_path), "warning") == {"R023"}
    config.data.seq_len = 64
    (problem,) = preflight.check_workdir(config, tmp_path)
    assert problem.severity == "error" and "data.seq_len: 48 there, 64 now" in problem.message
    (tmp_path / "file").write_text("")
    assert rules(preflight.check_workdir(config, tmp_path / "file" / "run")) == {"R023"}


def test_a_disk_too_small_for_the_checkpoints_is_an_error(tmp_path):
    config = tiny_config(train__save_every=5)
    assert preflight.check_disk(config, tmp_path, 1000) == []
    (problem,) = preflight.check_disk(config, tmp_path / "new" / "run", 1 << 60)
    assert problem.rule == "R024" and "5 checkpoints" in problem.message
    config.train.steps, config.train.keep_every = 60, 10
    (problem,) = preflight.check_disk(config, tmp_path, 1 << 60)
    assert "11 checkpoints" in problem.message


def test_more_than_an_hour_between_checkpoints_is_an_error():
    config = tiny_config(train__save_every=1000, train__steps=5000)
    made = setup(config, VOCAB, one_device())
    estimate = cost.estimate(
        made.model_config, seq_len=48, batch_size=8, steps=5000, device_kind="NVIDIA A100", devices=1, utilisation=0.3
    )
    tokens_per_second = 0.3 * 312e12 / estimate.train_flops
    assert estimate.tokens_per_second == pytest.approx(tokens_per_second)
    assert estimate.hours == pytest.approx(5000 * 8 * 48 / tokens_per_second / 3600)
    assert preflight.check_save_interval(config, estimate) == []
    (problem,) = preflight.check_save_interval(config, dataclasses.replace(estimate, step_seconds=7.2))
    assert problem.rule == "R029" and "2.0 hours" in problem.message and "every 500 steps" in problem.fix


def test_head_dims_that_the_kernels_lack_are_found():
    config = tiny_config(model__head_dim=24, model__implementation="pallas")
    made = setup(config, VOCAB, one_device())
    assert rules(preflight.check_kernels(config, made, "h100")) == {"R018"}
    config.model.implementation = "auto"
    assert rules(preflight.check_kernels(config, made, "h100"), "warning") == {"R018"}
    config.model.head_dim = 16
    assert preflight.check_kernels(config, setup(config, VOCAB, one_device()), "h100") == []


@pytest.mark.parametrize(
    ("attention", "changes", "severity"),
    [
        ("window", {"model__implementation": "auto"}, "warning"),
        ("window", {"model__implementation": "pallas"}, "error"),
        ("window", {"model__implementation": "xla"}, None),
        ("dense", {}, "warning"),
        ("dense", {"data__packing": False, "train__deterministic": False}, None),  # cuDNN's
    ],
)
def test_window_and_dense_layers_without_kernels_are_found(attention, changes, severity):
    config = tiny_config(model__attention=attention, model__compute_dtype="bfloat16", model__head_dim=24, **changes)
    found = preflight.check_kernels(config, setup(config, VOCAB, one_device()), "h100")
    assert [(problem.rule, problem.severity) for problem in found] == ([("R018", severity)] if severity else [])


# Compiled programs.


def test_collectives_are_counted_through_loops():
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    sharding = NamedSharding(mesh, P("data"))

    def step(x, w):
        def body(carry, _):
            return carry + jnp.einsum("bd,bd->d", x, x * carry.sum()), None

        return jax.lax.scan(body, w, None, length=7)[0]

    compiled = (
        jax.jit(step, in_shardings=(sharding, None), out_shardings=None)
        .lower(jax.ShapeDtypeStruct((8, 128), jnp.float32), jax.ShapeDtypeStruct((128,), jnp.float32))
        .compile()
    )
    (found,) = hlo.collectives(compiled.as_text())
    assert (found.kind, found.dtype, found.count, found.bytes) == ("all-reduce", "f32", 7, 7 * 128 * 4)


def test_asynchronous_collectives_count_once():
    text = "\n".join(
        [
            "ENTRY %main (p: f32[8]) -> f32[8] {",
            "  %s = (f32[4,2]{1,0}, bf16[8,2]{1,0}) all-gather-start(%p), dimensions={0}",
            "  %d = bf16[8,2]{1,0} all-gather-done(%s)",
            "}",
        ]
    )
    assert hlo.collectives(text) == [hlo.Collective("all-gather", "bf16", 1, 32)]


@pytest.mark.parametrize(
    ("instruction", "want"),
    [
        ("(f32[4]{0}, bf16[8]{0}) all-reduce-start(%a, %b)", [("f32", 16), ("bf16", 16)]),
        ("((f32[4]{0}), f32[4]{0}) all-reduce-start(%a)", [("f32", 16)]),
        ("((f32[4]{0}, bf16[8]{0}), (f32[4]{0}, bf16[8]{0})) all-reduce-start(%a, %b)", [("f32", 16), ("bf16", 16)]),
        ("((f32[8]{0}, bf16[8]{0}), (f32[2]{0}, bf16[4]{0})) reduce-scatter-start(%a, %b)", [("f32", 8), ("bf16", 8)]),
        ("((f32[4]{0}), (f32[4]{0}), u32[], u32[]) collective-permute-start(%a)", [("f32", 16)]),
        ("(bf16[4]{0}, /*index=1*/bf16[32]{0}) all-gather(%a, %b)", [("bf16", 72)]),
        ("(bf16[4]{0}, f8e4m3fn[32]{0}, f8e5m2[8]{0}) all-gather(%a, %b, %c)",
         [("f8e4m3fn", 32), ("bf16", 8), ("f8e5m2", 8)]),
    ],
)  # fmt: skip
def test_combined_collectives_count_whole(instruction, want):
    """A start returns operands and results, and some kinds their own state. All-reduces differ by JAX version."""
    text = f"ENTRY %main (p: f32[8]) -> f32[8] {{\n  %s = {instruction}, dimensions={{0}}\n}}"
    assert [(found.dtype, found.count, found.bytes) for found in hlo.collectives(text)] == [(d, 1, b) for d, b in want]


@pytest.mark.slow
def test_examine_compiles_for_gpus_that_are_not_here(tmp_path):
    config = tiny_config(model__implementation="auto", model__compute_dtype="bfloat16", model__head_dim=16)
    config.model.num_layers, config.guards.health, config.train.sample_tokens = 1, True, 4
    try:
        aot.devices("a100-80gb", 2)
    except aot.AheadOfTimeUnavailable as error:
        pytest.skip(str(error))
    made = memory.for_target(config, "a100-80gb", 2, VOCAB)
    compiled = memory.compile_run(made, "a100-80gb")
    parameters = made.num_parameters() * 4
    assert compiled.memory.compiled and compiled.memory.fits and compiled.host == []
    assert compiled.nondeterministic == []
    assert compiled.memory.parameters == parameters
    assert compiled.memory.optimizer == pytest.approx(2 * parameters, abs=64)
    assert compiled.memory.activations > 0
    # Each keeps parameters, averages of the optimizer, and some of its own.
    assert compiled.others.keys() == {"evaluation", "health", "sampling"} == compiled.seconds.keys() - {"train step"}
    assert all(3 * parameters < size < 12 * parameters for size in compiled.others.values())
    kinds = {c.kind for c in compiled.collectives}
    assert kinds == {"all-reduce"} and sum(c.bytes for c in compiled.collectives) >= parameters // 2
    limit = compiled.memory.total
    for others, found in (({"health": limit}, set()), ({"health": limit + 1}, {"R025"})):
        report = preflight.Report(
            memory=dataclasses.replace(compiled.memory, limit=limit),
            compiled=dataclasses.replace(compiled, others=others),
        )
        assert rules(preflight.check_memory(report, "a100-80gb", 2)) == found


def test_the_kernels_of_a_device_are_named():
    config = tiny_config(model__implementation="auto", model__compute_dtype="bfloat16", model__head_dim=64)
    config.model.num_heads, config.model.num_kv_heads = 12, 2
    made = setup(config, VOCAB, one_device())
    explained = env.explain_step(made, aot.GPUS["h100"].target)
    assert (explained.shape.batch, explained.shape.num_queries) == (config.train.batch_size, config.data.seq_len)
    facts = dict(kernel_facts(explained))
    assert facts["range_attention.sm90_forward"] == "window forward; compressed forward"
    assert "(" not in facts["selection.top_n"]
    assert "compressed keys do not fill" in facts["selection.scores_triton"]
    assert env.kernels(made, aot.GPUS["h100"].target)["window, forward"] == "range_attention.sm90_forward"
    assert env.kernels(made, Target("cpu")) == {}


def test_the_estimate_without_compiling_counts_parameters_exactly():
    config = tiny_config()
    made = setup(config, VOCAB, one_device())
    found = memory.estimate(made, "h100")
    assert not found.compiled and found.parameters == made.num_parameters() * 4
    assert found.limit == int(0.75 * aot.GPUS["h100"].memory_bytes) and found.fits


def test_the_estimate_counts_the_logits_that_the_loss_keeps_at_once():
    config = tiny_config(data__seq_len=4096, train__batch_size=1, model__implementation="xla")
    small, large = (memory.estimate(setup(config, vocab, one_device()), "h100") for vocab in (VOCAB, 262_144))
    chunk = 512 * 2**20  # of the loss; the whole logits are 4 GiB
    # Compiled for the CPU, the loss and its gradients take 1,072 MiB besides their results.
    assert 2 * chunk <= large.temporaries - small.temporaries < 2.5 * chunk


def test_activations_with_the_shape_of_a_weight_are_counted():
    """A row of 8,192 tokens of nsa_1b: activations [1, T, D] beside weights [1, mlp_dim, D] of unrolled layers."""

    def kept(length):
        config = tiny_config(data__seq_len=length, train__batch_size=1, model__mlp_dim=56, model__implementation="xla")
        config.model.scan_layers = False
        made = setup(config, VOCAB, one_device())
        with jax.set_mesh(made.mesh):
            return memory.kept_activations(made)[0]

    assert kept(48) < kept(56) < kept(64)


def test_without_the_compiler_the_facts_are_those_of_the_target(tmp_path, monkeypatch, capsys):
    def unavailable(*_):
        raise aot.AheadOfTimeUnavailable("no compiler")

    monkeypatch.setattr(aot, "devices", unavailable)
    config = tiny_config(train__batch_size=32, train__grad_accum=2, model__implementation="auto")
    config.mesh.fsdp, config.preflight.selftest = 4, False
    told = []
    report = preflight.examine(config, tmp_path, target="a100-80gb", devices=8, doing=told.append)
    facts = dict(report.facts["run"])
    assert facts["mesh"] == "data 2, fsdp 4, context 1, tensor 1"
    assert facts["batch"] == "32 x 48 tokens, 2 rows of 48 tokens per device and micro-batch"
    whole = memory._fixed(setup(config, VOCAB, jax.devices()[:8]))
    assert (report.memory.parameters, report.memory.optimizer) == (whole["parameters"], whole["optimizer"])
    assert report.memory.parameters < 0.6 * setup(config, VOCAB, jax.devices()[:8]).num_parameters() * 4  # fsdp splits
    assert "not checked" in dict(report.facts["compiled program"]) and "not checked" in dict(report.facts["self-test"])
    assert told == ["data", "setting up the target"]
    preflight.show(report, Console(width=120))
    assert "not checked: compiled program, self-test" in " ".join(capsys.readouterr().out.split())


def dense_config(length=256):
    config = tiny_config(model__attention="dense", model__compute_dtype="bfloat16", data__seq_len=length)
    config.data.packing, config.train.deterministic, config.preflight.selftest = False, False, False
    return config


def test_the_estimate_counts_what_the_kernels_of_the_target_keep():
    """XLA's dense attention, which serves on the CPU, keeps the scores of every query and key."""
    short, long = (memory.without_compiler(dense_config(length), 2, VOCAB) for length in (256, 512))
    kept = [memory.estimate(made, "h100", mesh).activations for made, mesh in (short, long)]
    assert kept[1] == pytest.approx(2 * kept[0], rel=0.01)


def test_a_config_that_cannot_run_exits_with_2():
    done = subprocess.run(
        [sys.executable, "train.py", "--config=configs/toy.py", "--preflight", "--config.model.remat=all"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert "R001" in done.stdout and "must not start" in done.stdout


# Health.


@pytest.mark.parametrize("num_selected", [4, 20])
def test_keys_by_the_formula_are_those_that_lists_hold(num_selected):
    config = NSAConfig(8, 4, 8, num_selected, 1, 2, 12)
    random = np.random.default_rng(num_selected)
    t = np.tile(np.arange(80), (3, 1))
    start = np.array([np.zeros(80), np.where(t[0] >= 13, 13, 0), np.where(t[0] >= 40, 40, 0)], np.int32)
    scores = jnp.asarray(random.random((3, 80, 10), np.float32))
    lists = blocks.select_from_importance(scores, jnp.asarray(t), jnp.asarray(start), config)
    read = [
        [len({p for j in row for p in range(j * 8, j * 8 + 8) if s <= p <= q}) for row, q, s in zip(*rows, strict=True)]
        for rows in zip(np.asarray(lists), t, start, strict=True)
    ]
    np.testing.assert_array_equal(blocks.selected_key_count(t, start, config), read)
    np.testing.assert_array_equal(blocks.counted_keys(lists, jnp.asarray(t), jnp.asarray(start), 8), read)


def test_health_runs_the_same_forward_pass_as_the_model():
    config = tiny_config()
    made = setup(config, VOCAB, one_device())
    params, batch = made.init()["params"], random_batch(config)
    start = np.where(np.arange(48) >= 17, 17, 0).astype(np.int32)[None].repeat(8, 0)
    hidden, figures = health.forward_with_health(made.model(params), batch["inputs"], start)
    np.testing.assert_array_equal(hidden, made.model(params).hidden(batch["inputs"], start))
    assert set(figures["key_mismatches"].tolist()) == {0.0}
    shares = [figures[f"gate_share_{name}"] for name in health.BRANCHES]
    np.testing.assert_allclose(sum(shares), 1.0, rtol=1e-5)
    assert figures["gate_entropy"].shape == (2,) and 1.0 < figures["gate_entropy"].min() <= np.log(3) + 1e-6


def test_selection_figures_on_a_list_written_by_hand():
    config = NSAConfig(8, 4, 8, 4, 1, 2, 12)
    lists = np.full((1, 48, 1, 4), 6, np.int32)  # 6: padding
    for t in range(48):
        own = t // 8
        chosen = sorted({0, own, max(own - 1, 0)} | ({1} if own >= 3 else set()))
        lists[0, t, 0, : len(chosen)] = chosen
    found = health.selection_health(jnp.asarray(lists), jnp.zeros((1, 48), jnp.int32), config)
    counts = np.array([1, 2, 3, 4, 4, 4])
    assert float(found["blocks_distinct"]) == pytest.approx(counts.mean())
    assert float(found["blocks_beyond"]) == pytest.approx(3 / counts.sum())
    assert float(found["key_mismatches"]) == 0  # short lists of early queries hold all their candidates


def test_the_mean_distance_of_blocks_in_a_long_row_is_right():
    """Their sum is above 2^31 tokens."""
    config, length = NSAConfig(), 65_536
    own = np.arange(length) // config.select_block
    lists = own[:, None] * np.arange(16) // 16  # evenly spread over the past
    found = health.selection_health(jnp.asarray(lists[None, :, None]), jnp.zeros((1, length), jnp.int32), config)
    assert float(found["block_distance"]) == pytest.approx(64 * (own[:, None] - lists).mean(), rel=1e-5)


def test_dense_attention_is_planned_on_a_machine_without_cudnn(monkeypatch):
    """It ended in RuntimeError: cuDNN not found."""
    monkeypatch.setattr(dense, "has_cudnn", lambda: False)
    array = jax.ShapeDtypeStruct((1, 512, 4, 64), jnp.bfloat16)
    with compile_for(Target("gpu", (9, 0))):
        traced = jax.jit(lambda *x: dense.dense_attention(*x, deterministic=False)).trace(array, array, array)
    assert "cudnn" not in str(traced.jaxpr) and "pallas_call" in str(traced.jaxpr)


@pytest.mark.parametrize(
    ("asked", "found", "says"),
    [(True, [], "yes"), (False, [], "not promised"), (True, ["%x = f32[8] scatter(%a, %b, %c)"], "no: 1 operations")],
)
def test_preflight_says_whether_the_compiled_step_is_deterministic(asked, found, says):
    compiled = SimpleNamespace(seconds={}, collectives=[], host=[], nondeterministic=found)
    facts = dict(program_facts(tiny_config(train__deterministic=asked), compiled))
    assert facts["deterministic"].startswith(says)


def test_rows_of_parameters_are_no_activations():
    """Rows of unrolled layers are as large as activations here, and of the shape of one row of 64 tokens."""

    def kept(scan):
        config = tiny_config(model__dim=64, model__mlp_dim=2048, model__scan_layers=scan, model__remat="block")
        made = setup(config, VOCAB, one_device())
        with jax.set_mesh(made.mesh):
            return memory.kept_activations(made)[0]

    assert kept(False) == pytest.approx(kept(True), rel=0.1)


def test_data_are_looked_at_while_the_self_test_runs(monkeypatch, tmp_path):
    looking, testing = threading.Event(), threading.Event()

    def look(config):
        looking.set()
        assert testing.wait(60), "the self-test waits for the data"
        return data_check.DataReport(facts=[("documents", "3")])

    def test(config):
        testing.set()
        assert looking.wait(60), "the data wait for the self-test"
        return selftest.SelfTest([], [("took", "no time")], 0.0)

    monkeypatch.setattr(data_check, "examine_local", look)
    monkeypatch.setattr(selftest, "selftest", test)
    facts = preflight.examine(tiny_config(), tmp_path).facts
    assert (facts["data"], facts["self-test"]) == ([("documents", "3")], [("took", "no time")])


@pytest.mark.parametrize("also_the_selftest", [False, True])
def test_what_is_wrong_with_the_data_is_said_after_the_self_test(monkeypatch, tmp_path, also_the_selftest):
    failed = threading.Event()

    def look(config):
        try:
            raise DataError("trees", "no such file", "name another")
        finally:
            failed.set()

    def test(config):
        assert failed.wait(60)
        time.sleep(0.1)  # until the thread has passed the error on
        if also_the_selftest:
            raise RuntimeError("out of memory")
        return selftest.SelfTest([], [], 0.0)

    monkeypatch.setattr(data_check, "examine_local", look)
    monkeypatch.setattr(selftest, "selftest", test)
    with pytest.raises(DataError, match="no such file"):
        preflight.examine(tiny_config(), tmp_path)
