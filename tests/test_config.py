"""Validation: every rule fires with its fix, several at once; the configs that are shipped are clean."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from nsa_jax.config import ConfigError, NSAConfig, check, default_config, nsa_config, validate
from nsa_jax.nn import ModelConfig

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs").glob("[a-z]*.py"))


def load(path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_defaults_are_valid():
    assert validate(default_config()) == []
    assert nsa_config(default_config()) == NSAConfig()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_are_valid_and_are_experiment_records(path, monkeypatch):
    module = load(path, monkeypatch)
    config = module.get_config()
    assert validate(config) == []
    assert config.name == path.stem and config.is_locked
    ModelConfig.from_config(config, 257)
    for heading in ("What:", "Data:", "Takes:", "Reaches:", f"Command: python train.py --config=configs/{path.name}"):
        assert heading in module.__doc__


def test_toy_and_production_configs_are_what_they_are_called(monkeypatch):
    found = {path.stem: load(path, monkeypatch).get_config() for path in CONFIGS}
    toy, prod, long = found["toy"], found["a100_prod"], found["h200_long"]
    assert (toy.model.dim, toy.model.num_heads, toy.model.num_kv_heads, toy.data.seq_len) == (128, 8, 2, 128)
    assert nsa_config(toy) == NSAConfig(16, 8, 32, 8, 1, 2, 64)
    assert (prod.model.dim, prod.model.num_layers, prod.model.num_heads, prod.model.num_kv_heads) == (768, 12, 12, 2)
    assert (prod.model.head_dim, prod.data.seq_len, prod.model.compute_dtype) == (64, 2048, "bfloat16")
    assert nsa_config(prod) == NSAConfig() and nsa_config(long) == NSAConfig()
    assert (prod.train.steps, prod.train.save_every, prod.optim.clip) == (50_000, 1_000, 1.0)
    assert (prod.data.hf_path, prod.optim.schedule) == ("HuggingFaceFW/fineweb-edu", "cosine")
    assert prod.data.tokenizer in ("bpe", "hf") and prod.model.remat != "none" and prod.optim.warmup_steps > 0
    assert long.data.seq_len == 65_536
    same = ("dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mlp_dim")
    assert [long.model[name] for name in same] == [prod.model[name] for name in same]
    quick = found["quickstart"]
    assert quick.data.seq_len >= 32 * quick.model.nsa.select_block and quick.model.nsa.num_selected <= 8
    # The windows of all layers together do not reach from a question to its answer, T / 4 tokens away.
    assert quick.model.num_layers * (quick.model.nsa.window - 1) < quick.data.seq_len // 4 and quick.train.save_every


BAD = [
    ("model.attention", "sparse", "R001"),
    ("model.compressor", "max", "R001"),
    ("model.implementation", "cuda", "R001"),
    ("model.compute_dtype", "float16", "R001"),
    ("model.remat", "all", "R001"),
    ("data.source", "web", "R001"),
    ("data.tokenizer", "word", "R001"),
    ("optim.schedule", "step", "R001"),
    ("train.steps", 0, "R002"),
    ("train.batch_size", 0, "R002"),
    ("train.log_every", 0, "R002"),
    ("train.xla_options", ("latency_hiding",), "R059"),
    ("train.save_every", -1, "R002"),
    ("model.num_kv_heads", 0, "R002"),
    ("mesh.fsdp", 0, "R002"),
    ("mesh.data", 0, "R002"),
    ("model.dropout", 1.0, "R003"),
    ("data.val_fraction", -0.1, "R003"),
    ("optim.learning_rate", 0.0, "R003"),
    ("optim.learning_rate", float("nan"), "R003"),
    ("optim.b2", 1.0, "R003"),
    ("optim.clip", float("inf"), "R003"),
    ("guards.min_gate_entropy", float("nan"), "R003"),
    ("guards.min_gate_entropy", -1.0, "R002"),
    ("guards.max_gate_share", 1.5, "R003"),
    ("guards.max_collapsed", -0.1, "R003"),
    ("guards.early_stop_delta", -0.1, "R002"),
    ("guards.stall_seconds", 1e30, "R002"),
    ("model.dim", 2**30, "R002"),
    ("data.num_workers", 5000, "R002"),
    ("data.synthetic_vocab", 0, "R002"),
    ("train.batch_size", 2**21, "R010"),
    ("name", "", "R001"),
    ("data.cache_dir", "http://host/cache", "R001"),
    ("train.local_dir", "s3://bucket/run", "R001"),
    ("guards.upload_seconds", -1.0, "R002"),
    ("compilation_cache_dir", "a\0b", "R001"),
    ("model.num_kv_heads", 5, "R004"),
    ("model.head_dim", 63, "R004"),
    ("model.nsa.compress_stride", 7, "R005"),
    ("model.nsa.num_selected", 2, "R005"),
    ("data.seq_len", 1024, "R006"),
    ("data.source", "text", "R007"),
    ("data.source", "hf", "R007"),
    ("data.packing_method", "greedy", "R001"),
    ("data.tokenizer", "hf", "R007"),
    ("model.vocab_size", 256, "R008"),
    ("data.val_fraction", 0.0, "R009"),
    ("train.grad_accum", 3, "R010"),
    ("mesh.data", 3, "R010"),
    ("optim.warmup_steps", 1000, "R011"),
]


@pytest.mark.parametrize(("field", "value", "rule"), BAD, ids=[f"{field}={value}" for field, value, _ in BAD])
def test_bad_values_are_found_with_field_and_fix(field, value, rule):
    config = default_config()
    target = config
    *parents, name = field.split(".")
    for part in parents:
        target = target[part]
    target[name] = value
    problems = validate(config)
    assert [problem.rule for problem in problems] == [rule]
    assert problems[0].severity == "error" and problems[0].fix
    assert name in problems[0].message and (str(value) in problems[0].message or repr(value) in problems[0].message)
    with pytest.raises(ConfigError, match=rule):
        check(config)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [("save_every", 0, "R013"), ("save_every", 4000, "R013"), ("eval_every", 0, "R014")],
)
def test_long_runs_need_checkpoints_and_validation(field, value, rule):
    config = default_config()
    config.train.steps = 5_000
    assert validate(config) == []
    config.train[field] = value
    assert [problem.rule for problem in validate(config)] == [rule]
    config.train.steps = 4_999
    assert rule not in [p.rule for p in validate(config) if field != "save_every" or value == 0]


def test_dense_regime_can_be_allowed_and_short_rows_warn():
    config = default_config()
    config.data.seq_len = 1024
    config.allow_dense_regime = True
    assert validate(config) == []
    config.allow_dense_regime = False
    config.model.nsa.num_selected = 8
    (warning,) = check(config)
    assert (warning.rule, warning.severity) == ("R006", "warning")
    config.model.attention = "dense"
    assert validate(config) == []


@pytest.mark.parametrize("address", ["s3://bucket/caches", "gs://bucket"])
def test_token_caches_may_be_kept_in_an_object_store(address):
    config = default_config()
    config.data.cache_dir = address
    assert validate(config) == []


def test_unknown_fields_are_refused():
    with pytest.raises(AttributeError):
        default_config().train.stepz = 5


def train_py(*arguments):
    command = [sys.executable, "train.py", "--config=configs/quickstart.py", *arguments]
    # A platform that does not exist: touching any device would fail with another error.
    env = {"JAX_PLATFORMS": "nowhere", "PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("override", ["--config.train.stepz=5", "--config.train.steps=many", "--workdri=x"])
def test_train_exits_with_2_on_flags_that_do_not_exist_or_have_another_type(override):
    done = train_py(override)
    assert done.returncode == 2
    assert override.split("=")[0].split(".")[-1].lstrip("-") in done.stderr and "Traceback" not in done.stderr


def test_train_exits_with_2_and_every_problem_before_touching_a_device():
    done = train_py("--config.model.num_kv_heads=5", "--config.train.grad_accum=5", "--config.optim.warmup_steps=9999")
    assert done.returncode == 2
    for expected in ("R004", "num_kv_heads=5", "R010", "grad_accum=5", "R011", "warmup_steps=9999", "Fix:"):
        assert expected in done.stderr
    assert "Traceback" not in done.stderr
