"""Preflight: faults in configs and what a compiled program takes are named before a run starts."""

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
from nsa_jax.config import ConfigError, check, default_config, validate
from nsa_jax.data import DataError
from nsa_jax.hub import remote_run
from nsa_jax.nn import dense
from nsa_jax.ops.target import Target, compile_for
from nsa_jax.train import env, preflight
from nsa_jax.train.preflight import cost, data_check, hlo, memory, selftest
from nsa_jax.train.preflight.report import kernel_facts, memory_facts, program_facts
from nsa_jax.train.state import setup

from .tiny import VOCAB, one_device, rules, tiny_config

ROOT = Path(__file__).parents[2]


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
    ("guards.heartbeat_seconds", 0.9, "R003"),
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
    config.data.files, config.data.tokenizer_path = ("/elsewhere/*.txt",), "/elsewhere/tokenizer.json"
    (problem,) = preflight.check_workdir(
        config, tmp_path
    )  # without a checkpoint nothing tells whether they are the same
    assert problem.severity == "error"
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    assert rules(preflight.check_workdir(config, tmp_path), "warning") == {"R023"}
    config.data.seq_len = 64
    (problem,) = preflight.check_workdir(config, tmp_path)
    assert problem.severity == "error" and "data.seq_len: 48 there, 64 now" in problem.message
    (tmp_path / "file").write_text("")
    assert rules(preflight.check_workdir(config, tmp_path / "file" / "run")) == {"R023"}


def test_a_store_may_lack_the_checkpoint_that_the_records_tell_of(tmp_path):
    """A machine that was lost while it uploaded its first checkpoint: another one begins again."""
    config = tiny_config(train__save_every=4)
    (tmp_path / "goodput.json").write_text(json.dumps({"starts": [{"first_step": 0, "step": 5, "checkpoint": 4}]}))
    assert preflight.check_workdir(config, tmp_path) == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 5, "train/loss": 1.0}\n')
    assert rules(preflight.check_workdir(config, tmp_path)) == {"R023"}
    (tmp_path / remote_run.ADDRESS).write_text("s3://bucket/run\n")
    assert preflight.check_workdir(config, tmp_path) == []


def test_other_batches_are_an_error_once_there_is_a_position_in_the_data(tmp_path):
    config = tiny_config()
    (tmp_path / "env.json").write_text(json.dumps({"config": json.loads(config.to_json())}))
    config.train.batch_size, config.train.grad_accum = 12, 3
    assert preflight.check_workdir(config, tmp_path) == []
    (tmp_path / "checkpoints" / "4").mkdir(parents=True)
    (problem,) = preflight.check_workdir(config, tmp_path)
    assert problem.severity == "error" and "another config: train.batch_size: 8 there, 12 now" in problem.message
    config.train.batch_ramp = ("2:8",)  # pieces of 4 rows
    (problem,) = preflight.check_workdir(config, tmp_path)
    assert "train.batch_ramp: [] there, ['2:8'] now; train.batch_size: 8 there, 12 now" in problem.message
    config.train.batch_size, config.train.grad_accum, config.train.batch_ramp = 16, 2, ("2:8",)  # of 8 rows, as before
    assert preflight.check_workdir(config, tmp_path) == []


def test_a_disk_too_small_for_the_checkpoints_is_an_error(tmp_path):
    config = tiny_config(train__save_every=5, train__steps=20)
    assert preflight.check_disk(config, tmp_path, 1000) == []
    (problem,) = preflight.check_disk(config, tmp_path / "new" / "run", 1 << 60)
    assert problem.rule == "R024" and "4 checkpoints" in problem.message  # there is no best one without validation
    config.train.eval_batches = 1
    (problem,) = preflight.check_disk(config, tmp_path, 1 << 60)
    assert "5 checkpoints" in problem.message
    # No more than are saved: 4 by their number, 4 at validations, the end; and the best, and one being written.
    config.train.keep_last, config.train.eval_every = 1_000_000, 5
    (problem,) = preflight.check_disk(config, tmp_path, 1 << 60)
    assert "11 checkpoints" in problem.message
    config.train.keep_last, config.train.eval_every = 3, 0
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
    config.train.keep_every = 250  # which are saved, too
    assert preflight.check_save_interval(config, dataclasses.replace(estimate, step_seconds=7.2)) == []
    (problem,) = preflight.check_save_interval(config, dataclasses.replace(estimate, step_seconds=21.6))
    assert "1.5 hours" in problem.message


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


def test_the_largest_micro_batch_is_told_with_its_batch(monkeypatch):
    """Memory of 1,000 bytes, 100 for each row, and of the batch 16 for each of 50 tokens in 4 micro-batches."""
    config = tiny_config(data__seq_len=50, train__batch_size=16, train__grad_accum=4)

    def planned(rows, accumulate):
        parts = dict(parameters=1000, optimizer=0, gradients=0, activations=100 * rows, temporaries=0, host=0)
        return memory.Memory(
            **parts, batch=16 * 50 * rows * accumulate, limit=1000 + 10 * (100 + 16 * 50 * 4), compiled=True
        )

    def for_target(changed, *_):
        return changed.train.batch_size // changed.train.grad_accum, changed.train.grad_accum

    monkeypatch.setattr(memory, "for_target", for_target)
    monkeypatch.setattr(memory, "_lower_train_step", lambda made, gpu: SimpleNamespace(compile=lambda: None))
    monkeypatch.setattr(memory, "_train_memory", lambda made, gpu, program: planned(*made))
    known = planned(4, 4)
    found = memory.largest_micro_batch(config, "h100", 1, known, VOCAB, 60.0)
    assert found == memory.MicroBatch(10, known.limit, True)


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


@pytest.mark.parametrize(
    ("variable", "value", "share", "shown"),
    [
        ("XLA_CLIENT_MEM_FRACTION", "0.9", 0.9, "what JAX takes by XLA_CLIENT_MEM_FRACTION"),
        ("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5", 0.5, "what JAX takes by XLA_PYTHON_CLIENT_MEM_FRACTION"),
        ("XLA_PYTHON_CLIENT_MEM_FRACTION", "", 0.75, "what JAX takes by default"),
    ],
)
def test_the_limit_is_the_pool_that_jax_takes(variable, value, share, shown, monkeypatch):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    found = memory.estimate(setup(tiny_config(), VOCAB, one_device()), "h100")
    assert found.limit == int(share * aot.GPUS["h100"].memory_bytes)
    assert shown in dict(memory_facts(preflight.Report(memory=found), "h100"))["can be used per device"]


@pytest.mark.parametrize("value", ["90%", "nan"])
def test_a_pool_that_is_no_number_is_reported_before_compiling(value, tmp_path, monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", value)
    report = preflight.examine(tiny_config(preflight__selftest=False), tmp_path, target="h100")
    assert report.compiled is None and report.exit_code == 2
    errors = [problem for problem in report.problems if problem.severity == "error"]
    assert [problem.rule for problem in errors] == ["R025"]
    assert f"XLA_CLIENT_MEM_FRACTION={value}" in errors[0].message and "unset" in errors[0].fix


def test_the_estimate_counts_the_logits_that_the_loss_keeps_at_once():
    config = tiny_config(data__seq_len=4096, train__batch_size=1, model__implementation="xla")
    small, large = (memory.estimate(setup(config, vocab, one_device()), "h100") for vocab in (VOCAB, 262_144))
    chunk = 512 * 2**20  # of the loss; the whole logits are 4 GiB
    # Compiled for the CPU, the loss and its gradients take 1,072 MiB besides their results.
    assert 2 * chunk <= large.temporaries - small.temporaries < 2.5 * chunk


def test_the_estimate_divides_what_tensor_splits():
    """Almost all activations of a wide MLP are its own."""

    def estimate(tensor):
        config = tiny_config(model__mlp_dim=4096, model__vocab_size=64, model__remat="none", mesh__tensor=tensor)
        made, mesh = memory.without_compiler(config, tensor, VOCAB)
        return memory.estimate(made, "h100", mesh)

    whole, half = estimate(1), estimate(2)
    assert half.activations == pytest.approx(whole.activations / 2, rel=0.1)
    assert half.temporaries == pytest.approx(whole.temporaries / 2, rel=0.1)


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


def test_dense_attention_is_planned_on_a_machine_without_cudnn(monkeypatch):
    """It ended in RuntimeError: cuDNN not found."""
    monkeypatch.setattr(dense, "has_cudnn", lambda: False)
    array = jax.ShapeDtypeStruct((1, 512, 4, 64), jnp.bfloat16)
    with compile_for(Target("gpu", (9, 0))):
        traced = jax.jit(lambda *x: dense.dense_attention(*x, deterministic=False)).trace(array, array, array)
    assert "cudnn" not in str(traced.jaxpr) and "nsa_ranged_forward" in str(traced.jaxpr)


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

    def test(config, store):
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

    def test(config, store):
        assert failed.wait(60)
        time.sleep(0.1)  # until the thread has passed the error on
        if also_the_selftest:
            raise RuntimeError("out of memory")
        return selftest.SelfTest([], [], 0.0)

    monkeypatch.setattr(data_check, "examine_local", look)
    monkeypatch.setattr(selftest, "selftest", test)
    with pytest.raises(DataError, match="no such file"):
        preflight.examine(tiny_config(), tmp_path)
