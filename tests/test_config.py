"""Validation: every rule fires with its fix, several at once; the configs that are shipped are clean."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from nsa_jax.command_line import load_config, override
from nsa_jax.config import ConfigError, NSAConfig, check, default_config, nsa_config, validate
from nsa_jax.nn import ModelConfig
from nsa_jax.rules import RULES

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
    ("optim.b1", 0.99999999, "R003"),
    ("optim.clip", float("inf"), "R003"),
    ("guards.min_gate_entropy", float("nan"), "R003"),
    ("guards.min_gate_entropy", -1.0, "R002"),
    ("guards.max_gate_share", 1.5, "R003"),
    ("guards.max_collapsed", -0.1, "R003"),
    ("guards.early_stop_delta", -0.1, "R002"),
    ("guards.stall_seconds", 1e30, "R002"),
    ("guards.stall_seconds", 0.001, "R002"),
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


def test_no_lane_of_a_stream_is_too_few():
    config = default_config()
    config.data.stream_lanes = 0
    assert "R002" in [problem.rule for problem in validate(config) if problem.severity == "error"]


QUICKSTART = {"text": {"source": "stdlib"}, "keypad": {"source": "task"}}
WITHOUT_EFFECT = [
    (["data.files=a.txt"], "error", "data.files=('a.txt',)", "data.source='stdlib'", "data.source='text'"),
    (["data.hf_path=json"], "warning", "data.hf_path='json'", "data.source='stdlib'", "data.source='hf'"),
    (["data.hf_streaming=True"], "warning", "data.hf_streaming=True", "data.source='stdlib'", "data.source='hf'"),
    (["data.text_separator=%"], "warning", "data.text_separator='%'", "data.source='stdlib'", "data.source='text'"),
    (["data.tokenizer_path=x"], "warning", "data.tokenizer_path='x'", "data.tokenizer='byte'", "data.tokenizer='hf'"),
    (["data.bpe_vocab_size=300"], "warning", "data.bpe_vocab_size=300", "data.tokenizer='byte'", "tokenizer='bpe'"),
    (["data.shuffle_buffer=9"], "warning", "data.shuffle_buffer=9", "data.hf_streaming=False", "hf_streaming=True"),
    (["data.stream_lanes=2"], "warning", "data.stream_lanes=2", "data.hf_streaming=False", "hf_streaming=True"),
    (
        ["data.num_workers=2", "data.source=hf", "data.hf_path=x", "data.hf_streaming=True"],
        *("warning", "data.num_workers=2", "data.hf_streaming=True", "data.hf_streaming=False"),
    ),
    (["data.tree_characters=9"], "warning", "data.tree_characters=9", "data.source='stdlib'", "data.source='trees'"),
    (["data.hf_name=x"], "warning", "data.hf_name='x'", "data.source='stdlib'", "data.source='hf'"),
    (["data.synthetic=copy"], "warning", "data.synthetic='copy'", "data.source='stdlib'", "data.source='synthetic'"),
    (["data.tokenizer_eos=x"], "warning", "data.tokenizer_eos='x'", "data.tokenizer='byte'", "data.tokenizer='hf'"),
    (["data.tasks=needle"], "warning", "data.tasks=('needle',)", "data.source='stdlib'", "data.source='task'"),
    (["data.task_length=9"], "warning", "data.task_length=9", "data.source='stdlib'", "data.source='task'"),
    (["optim.decay_fraction=0.5"], "warning", "decay_fraction=0.5", "optim.schedule='cosine'", "schedule='wsd'"),
    (["optim.momentum=0.5"], "warning", "optim.momentum=0.5", "optim.name='adamw'", "optim.name='muon'"),
    (
        ["model.compressor=mean", "model.nsa.selector=mean_key"],
        *("warning", "model.compressor='mean'", "model.nsa.selector='mean_key'", "model.nsa.selector='compressed'"),
    ),
    (
        ["model.nsa.compress_block=64", "model.nsa.selector=mean_key"],
        *("warning", "nsa.compress_block=64", "model.nsa.selector='mean_key'", "model.nsa.selector='compressed'"),
    ),
    (
        ["optim.final_fraction=0.5", "optim.schedule=constant"],
        *("warning", "optim.final_fraction=0.5", "optim.schedule='constant'", "optim.schedule='cosine'"),
    ),
    (
        ["optim.learning_rate_factor.head=0.5"],
        *("warning", "learning_rate_factor.head=0.5", "model.tie_embeddings=True", "model.tie_embeddings=False"),
    ),
    (
        ["train.selection_queries=8"],
        "warning",
        "selection_queries=8",
        "train.selection_loss=0.0",
        "train.selection_loss",
    ),
    (["guards.spike_norm=9"], "warning", "guards.spike_norm=9.0", "guards.skip_spikes=0", "guards.skip_spikes"),
    (["guards.early_stop_delta=1"], "warning", "early_stop_delta=1.0", "guards.early_stop=0", "guards.early_stop"),
    (
        ["guards.stall_exit=True", "guards.stall_seconds=0"],
        *("warning", "guards.stall_exit=True", "guards.stall_seconds=0.0", "guards.stall_seconds"),
    ),
    (
        ["guards.max_collapsed=0.5", "guards.health=False"],
        *("warning", "guards.max_collapsed=0.5", "guards.health=False", "guards.health=True"),
    ),
    (
        ["model.rope_scaling.factor=2"],
        "warning",
        "model.rope_scaling.factor=2.0",
        "model.rope_scaling.kind='none'",
        "model.rope_scaling.kind='linear'",
    ),
]
READ = [
    ["data.source=text", "data.files=a.txt", "data.num_workers=2"],
    ["data.source=text", "data.files=a.txt", "data.text_separator=%"],
    ["data.sources.a.source=text", "data.sources.b.source=stdlib", "data.files=a.txt"],
    ["data.source=text", "data.files=a.txt", "data.sources.a.weight=1", "data.sources.b.source=stdlib"],
    ["data.source=trees", "data.sources.a.source=trees", "data.sources.b.source=task"],
    ["data.task_length=9", "data.tree_characters=9", "data.sources.a.source=trees", "data.sources.b.source=task"],
    # A config for a data set, and other data or another tokenizer by flags.
    ["data.source=text", "data.files=a.txt", "data.hf_path=x", "data.hf_name=y", "data.hf_text_field=z"],
    ["data.sources.a.source=hf", "data.sources.a.hf_path=x", "data.hf_text_field=z", "data.sources.a.hf_name=y"],
    ["data.source=text", "data.sources.a.files=a.txt", "data.sources.b.source=text", "data.sources.b.files=b.txt"],
    ["data.source=hf", "data.hf_path=x", "data.bpe_vocab_size=300"],
    ["data.source=hf", "data.hf_path=x", "data.hf_streaming=True", "data.shuffle_buffer=9", "data.stream_lanes=2"],
    ["optim.schedule=wsd", "optim.decay_fraction=0.5"],
    ["train.selection_loss=0.1", "train.selection_queries=8", "guards.skip_spikes=3", "guards.spike_norm=9"],
    ["guards.stall_exit=True", "guards.min_selection_gain=0.1", "guards.selection_from=0.2", "train.keep_every=9"],
]


@pytest.mark.parametrize(("steps", "reported"), [(401, False), (400, True), (100, True)])
def test_an_early_stop_that_comes_after_the_end_is_reported(steps, reported):
    config = default_config()
    config.guards.early_stop, config.train.eval_every, config.train.steps = 2, 200, steps
    found = [problem for problem in validate(config) if "early_stop" in problem.message]
    assert [(problem.rule, problem.severity) for problem in found] == [("R010", "warning")] * reported


@pytest.mark.parametrize(("steps", "fix"), [(9, "set warmup_steps=0"), (10, "1 to 10 % of the steps")])
def test_the_warm_up_that_is_advised_fits_the_steps(steps, fix):
    config = default_config()
    config.train.steps = config.optim.warmup_steps = steps
    (problem,) = [problem for problem in validate(config) if problem.rule == "R011"]
    assert fix in problem.fix


def overridden(*overrides, **sources):
    config = default_config()
    with config.unlocked():
        config.data.sources = sources
    assert override(config, overrides) == []
    return config


@pytest.mark.parametrize(
    ("overrides", "severity", "what", "because", "fix"), WITHOUT_EFFECT, ids=lambda value: value[0]
)
def test_a_field_that_nothing_reads_is_reported(overrides, severity, what, because, fix):
    (problem,) = validate(overridden(*overrides))
    assert (problem.rule, problem.severity) == ("R063", severity)
    assert what in problem.message and f"has no effect, because config.{because}" in problem.message
    assert problem.fix.startswith("set config.") and fix in problem.fix


def test_a_field_that_several_sources_override_is_reported():
    alone = validate(overridden("data.files=a.txt", **QUICKSTART))
    message = (
        "has no effect, because config.data.sources.keypad.source='task', config.data.sources.text.source='stdlib'"
    )
    assert [p.message for p in alone] == [f"config.data.files=('a.txt',) {message}"]
    assert "set config.data.sources.text.source='text' and config.data.sources.text.files" in alone[0].fix
    both = validate(overridden("data.source=hf", "data.hf_path=json", **QUICKSTART))
    assert [p.message for p in both] == [f"config.data.hf_path='json' {message}", f"config.data.source='hf' {message}"]
    own = validate(overridden("data.source=text", "data.files=a.txt", a={"files": ("b.txt",)}))
    assert [p.message for p in own] == [
        "config.data.files=('a.txt',) has no effect, because config.data.sources.a.files=('b.txt',)"
    ]
    (tasks,) = validate(
        overridden("data.tasks=copy", far={"source": "task", "tasks": ("keypad",)}, text={"weight": 2.0})
    )
    assert "because config.data.sources.far.tasks=('keypad',), config.data.source='stdlib'" in tasks.message
    assert tasks.fix.startswith("set config.data.sources.far.tasks, or leave config.data.tasks at its default, ()")


def test_a_source_s_own_field_that_it_does_not_read_is_reported():
    """Files of a source that is none of text would leave the run with other data than those that were meant."""
    (files,) = validate(overridden(a={"files": ("a.txt",), "weight": 0.7}, b={"source": "task", "task_length": 9}))
    assert str(files) == (
        "R063 error: config.data.sources.a.files=('a.txt',) has no effect, because config.data.source='stdlib'. "
        "Fix: set config.data.sources.a.source='text', or leave config.data.sources.a.files out"
    )
    assert validate(overridden("data.sources.a.source=text", a={"files": ("a.txt",)})) == []
    (files,) = validate(overridden(a={"source": "hf", "hf_path": "x", "files": ("a.txt",)}))
    assert files.severity == "warning" and "because config.data.sources.a.source='hf'" in files.message
    (kind,) = validate(overridden("data.synthetic=copy", **QUICKSTART))
    assert kind.fix.startswith("set config.data.source='synthetic' and no config.data.sources, or leave")


def test_a_source_is_written_as_the_error_says():
    config = default_config()
    with config.unlocked(), config.ignore_type():
        config.data.sources = {"web": ("web/*.txt",)}
    (problem,) = validate(config)
    entry = ast.literal_eval(problem.fix.removeprefix("write such as "))
    assert validate(overridden(**entry)) == []


def test_the_fix_for_a_synthetic_source_beside_others_leaves_nothing_to_say():
    (problem,) = [p for p in validate(overridden("data.source=synthetic", **QUICKSTART)) if p.severity == "error"]
    assert problem.rule == "R007" and "leave it at its default, 'stdlib'" in problem.fix
    assert validate(overridden("data.source=stdlib", **QUICKSTART)) == []


@pytest.mark.parametrize(("source", "holds_out"), [("stdlib", True), ("synthetic", False), ("task", False)])
def test_held_out_files_of_a_source_without_files_are_refused_with_what_holds_out_instead(source, holds_out):
    config = default_config()
    config.data.source, config.data.val_files = source, ("held_out.txt",)
    (problem,) = (problem for problem in validate(config) if "val_files" in problem.message)
    assert problem.rule == "R007" and ("val_fraction" in problem.fix) is holds_out


def test_files_beside_other_data_that_were_asked_for_are_no_error():
    """configs/extend.py has files; a flag may take a data set instead of them."""
    (problem,) = validate(overridden("data.files=a.txt", "data.source=hf", "data.hf_path=json"))
    assert (problem.rule, problem.severity) == ("R063", "warning")


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("task_answer_weight", -1.0, "R003 error: config.data.sources.far.task_answer_weight=-1.0: out of range"),
        ("task_length", -5, "R002 error: config.data.sources.far.task_length=-5: too small. Fix: use at least 0"),
        ("max_documents", -1, "R002 error: config.data.sources.far.max_documents=-1: too small. Fix: use at least 0"),
    ],
)
def test_the_bounds_of_a_field_hold_for_a_source_too(field, value, said):
    (problem,) = validate(overridden(far={"source": "task", field: value}))
    assert said in str(problem)
    (problem,) = validate(overridden(f"data.{field}={value}", "data.source=task", a={}, b={}))
    assert f"config.data.{field}={value}" in str(problem)


@pytest.mark.parametrize("overrides", READ, ids=lambda value: value[0])
def test_a_field_that_a_source_reads_is_not_reported(overrides):
    assert [problem for problem in validate(overridden(*overrides)) if problem.rule == "R063"] == []


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "quality").glob("*.py")), ids=lambda path: path.stem)
def test_configs_of_the_comparison_are_valid(path):
    assert validate(load_config(str(path))) == []


DOUBTFUL = [
    (
        ["optim.schedule=wsd", "optim.decay_fraction=0.95"],
        "R011 error: config.optim.warmup_steps=100, decay_fraction=0.95: warm-up and decay need 1,050 of 1,000 steps, "
        "so the learning rate never reaches its peak",
    ),
    (
        ["preflight.ignore=R0013"],
        "R000 error: config.preflight.ignore: 'R0013' is no rule's id. Fix: did you mean 'R013'? name the rules",
    ),
    (
        ["preflight.ignore=r029"],
        "R000 error: config.preflight.ignore: 'r029' is no rule's id. Fix: did you mean 'R029'?",
    ),
    (["preflight.target=H100"], "config.preflight.target='H100': no such choice. Fix: use one of \"\", a100"),
    (
        ["train.batch_ramp=('100:4', '1000:6')"],
        "R010 warning: config.train.batch_ramp=('100:4', '1000:6'): never reaches batch_size=8 in 1,000 steps",
    ),
    (
        ["train.batch_ramp=('10:6', '20:4')"],
        "R010 warning: config.train.batch_ramp=('10:6', '20:4'): batches shrink (6 to 4",
    ),
    (["train.batch_ramp=('10:16',)"], "batches shrink (16 to 8 rows)"),
    (
        ["train.batch_ramp=('10:64000000',)"],
        "R010 error: config.train.batch_ramp=('10:64000000',): 131,072,000,000 tokens in a step. Fix: use fewer than",
    ),
    (
        ["data.sources.a.weight=1e6", "data.sources.b.weight=1"],
        "R007 warning: config.data.sources.b.weight=1.0: 0.008 rows are expected in the whole run. Fix: raise it, or",
    ),
]


@pytest.mark.parametrize(("overrides", "said"), DOUBTFUL, ids=lambda value: value[0] if isinstance(value, list) else "")
def test_settings_that_miss_their_purpose_are_reported(overrides, said):
    batches = ["train.grad_accum=4"] if "batch_ramp" in overrides[0] else []
    (problem,) = validate(overridden(*batches, *overrides))
    assert said in str(problem)


def test_wsd_that_reaches_its_peak_for_one_step_is_valid():
    assert validate(overridden("optim.schedule=wsd", "optim.decay_fraction=0.9", "optim.warmup_steps=100")) == []
    assert validate(overridden("optim.schedule=wsd", "optim.decay_fraction=1.0", "optim.warmup_steps=0")) == []


def test_every_rule_that_the_code_reports_can_be_named(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import config_reference

    assert {rule for rule, _, _ in config_reference.rules()} == RULES


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [("save_every", 0, "R013"), ("save_every", 4000, "R013"), ("eval_every", 0, "R014"), ("eval_every", 5000, "R014")],
)
def test_long_runs_need_checkpoints_and_validation(field, value, rule):
    config = default_config()
    config.train.steps = 5_000
    assert validate(config) == []
    config.train[field] = value
    assert [problem.rule for problem in validate(config)] == [rule]
    if value == 4000:
        config.train.keep_every = 1000  # which are saved, too
        assert validate(config) == []
    config.train.steps = 4_999
    assert rule not in [p.rule for p in validate(config) if field != "save_every" or value == 0]


def test_long_runs_of_generated_rows_alone_are_refused():
    long = ("train.steps=5000", "data.sources.a.source=task", "data.sources.b.source=task")
    (problem,) = validate(overridden(*long))
    assert problem.rule == "R016" and "config.data.sources.a.source='task', config.data.sources.b" in problem.message
    assert validate(overridden(*long, "data.sources.b.source=stdlib")) == []


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


@pytest.mark.parametrize(
    ("group", "model", "because"),
    [
        ("gates", "model.attention=dense", "config.model.attention='dense'"),
        ("gates", "model.layer_pattern=('dense', 'window')", "config.model.layer_pattern=('dense', 'window')"),
        ("compressor", "model.attention=window", "config.model.attention='window'"),
        ("compressor", "model.compressor=mean", "config.model.compressor='mean'"),
        ("compressor", "model.nsa.selector=mean_key", "config.model.nsa.selector='mean_key'"),
    ],
)
@pytest.mark.parametrize("kind", ["learning_rate", "weight_decay"])
def test_a_factor_of_parameters_that_the_model_does_not_have_is_reported(kind, group, model, because):
    factor = f"optim.{kind}_factor.{group}"
    (problem,) = [p for p in validate(overridden(f"{factor}=3.0", model)) if p.rule == "R063"]
    assert problem.severity == "warning"
    assert problem.message == f"config.{factor}=3.0 has no effect, because {because}"
    has = "model.layer_pattern=('dense', 'nsa')" if group == "gates" else "model.compressor=mlp"
    assert [p for p in validate(overridden(f"{factor}=3.0", has)) if p.rule == "R063"] == []
