"""What train.py is told: every mistake in flags, config file and workdir is one line that says where it is."""

import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from ml_collections import ConfigDict, FrozenConfigDict, config_dict

from nsa_jax.command_line import OVERRIDE, collect_overrides, load_config, override, run_program, workdir_problems
from nsa_jax.config import ConfigError, check, default_config, validate
from nsa_jax.fields import nearest, walk

ROOT = Path(__file__).parent.parent


def overridden(*arguments):
    """The config after these flags, and the messages about the wrong ones."""
    config = default_config()
    collected = collect_overrides(["train.py", *arguments])[1:]
    prefix = f"--{OVERRIDE}="
    assert all(argument.startswith(prefix) for argument in collected)
    return config, [str(p) for p in override(config, [argument.removeprefix(prefix) for argument in collected])]


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        (["--config.train.steps=5"], "train.steps", 5),
        (["--config.train.steps", "5"], "train.steps", 5),
        (["-config.train.steps=5"], "train.steps", 5),
        (["--config.mesh.data=-1"], "mesh.data", -1),
        (["--config.mesh.data", "-1"], "mesh.data", -1),
        (["--config.train.steps=5", "--config.train.steps=6"], "train.steps", 6),
        (["--config.optim.learning_rate=1"], "optim.learning_rate", 1.0),
        (["--config.optim.learning_rate=1e-4"], "optim.learning_rate", 1e-4),
        (["--config.data.packing=False"], "data.packing", False),
        (["--noconfig.data.packing"], "data.packing", False),
        (["--config.guards.stall_exit"], "guards.stall_exit", True),
        (["--config.name=a=b"], "name", "a=b"),
        (["--config.train.sample_prompt=two\nlines"], "train.sample_prompt", "two\nlines"),
        (["--config.train.sample_prompt=5"], "train.sample_prompt", "5"),
        (["--config.data.files=('a*.txt', \"b\")"], "data.files", ("a*.txt", "b")),
        (["--config.data.files=['a']"], "data.files", ("a",)),
        (["--config.data.files=corpus/*.txt"], "data.files", ("corpus/*.txt",)),
        (["--config.data.files=a", "--config.data.files=b"], "data.files", ("a", "b")),
        (["--config.data.files=a", "--config.data.files=('b', 'c')"], "data.files", ("b", "c")),
        (["--config.data.files=['a']", "--config.data.files=b"], "data.files", ("a", "b")),
        (["--config.data.files="], "data.files", ()),
        (["--config.preflight.ignore=R013"], "preflight.ignore", ("R013",)),
        (["--config.model.nsa.window=32"], "model.nsa.window", 32),
    ],
)
def test_overrides_are_values_of_the_field_s_type(arguments, field, value):
    config, problems = overridden(*arguments)
    assert problems == []
    found = dict(walk(config))[field]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("--config.trian.steps=3", "config.trian.steps: no such field. Fix: did you mean config.train.steps?"),
        ("--config.steps=3", "did you mean config.train.steps?"),
        ("--config.model.window=3", "did you mean config.model.nsa.window?"),
        ("--config.model.num_head=3", "did you mean config.model.num_heads?"),
        ("--config.zzzzzz=3", "config.zzzzzz: no such field. Fix: docs/config.md lists all fields"),
        ("--config.train=3", "config.train: a section, not a field. Fix: set its fields: config.train.batch_ramp"),
        ("--config.data.sources.web=3", "a section, not a field. Fix: set its fields: config.data.sources.web.weight"),
        ("--config.data.sources=3", "a section, not a field. Fix: set its fields: config.data.sources.NAME.weight"),
        ("--config.train.steps", "--config.train.steps: no value. Fix: write --config.train.steps=VALUE"),
        ("--config.train.steps=ten", "config.train.steps='ten': must be a whole number"),
        ("--config.train.steps=2.5", "config.train.steps='2.5': must be a whole number"),
        ("--config.train.steps=99999999999", "R003 error: config.train.steps=99999999999: out of range"),
        ("--config.guards.min_gate_entropy=nan", "R003 error: config.guards.min_gate_entropy=nan: out of range"),
        ("--config.optim.clip=inf", "config.optim.clip=inf: out of range. Fix: use a finite number"),
        ("--config.data.packing=maybe", "config.data.packing='maybe': must be True or False"),
        ("--config.data.files=(1, 2)", "config.data.files=(1, 2): must be a tuple of text"),
        ("--config.data.files=('a", "must be a tuple of text"),
        ("--config.name=\udcff", r"config.name='\udcff': must be text"),
    ],
)
def test_wrong_overrides_are_named_with_what_to_write(argument, expected):
    config, (problem,) = overridden(argument)
    if "must be a tuple" not in expected or "(1, 2)" in expected:
        assert expected in problem
        assert config == default_config()


def test_all_wrong_overrides_are_reported_with_all_other_problems():
    flags = ("--config.trian.steps=3", "--config.train.steps=ten", "--config.optim.eps=nan", "--config.mesh.fsdp=0")
    collected = [argument.partition("=")[2] for argument in collect_overrides(["train.py", *flags])[1:]]
    config = default_config()
    problems = override(config, collected)
    with pytest.raises(ConfigError) as caught:
        check(config, problems)
    assert [problem.rule for problem in caught.value.problems] == ["R056", "R057", "R003", "R002"]


def test_other_flags_are_left_alone():
    argv = ["train.py", "--config=a.py", "--workdir", "x", "--", "--config.train.steps=5"]
    assert collect_overrides(argv) == argv


def test_nearest_of_nothing():
    assert nearest("qqqqqqqq", ["model.dim"]) == "" and nearest("", ["model.dim"]) == ""


def config_file(tmp_path, body):
    path = tmp_path / "mine.py"
    path.write_text(f"from nsa_jax.config import default_config\n\n\ndef get_config(*arguments):\n{body}")
    return str(path)


def test_a_file_s_config_can_be_changed_and_takes_an_argument(tmp_path):
    path = config_file(tmp_path, "    c = default_config()\n    c.name = arguments[0]\n    return c\n")
    config = load_config(f"{path}:mine")
    assert config.name == "mine" and override(config, ["train.steps=7"]) == [] and config.train.steps == 7


def test_a_frozen_config_can_be_overridden(tmp_path):
    path = config_file(
        tmp_path,
        "    from ml_collections import FrozenConfigDict\n    return FrozenConfigDict(default_config())\n",
    )
    config = load_config(path)
    assert not isinstance(config, FrozenConfigDict)
    assert override(config, ["model.nsa.window=7"]) == [] and config.model.nsa.window == 7 and validate(config) == []


@pytest.mark.parametrize(
    ("body", "line", "expected"),
    [
        ("    c = default_config()\n    c.train.steps = 'ten'\n    return c\n", 6, "c.train.steps = 'ten'"),
        ("    c = default_config()\n    c.trian.steps = 10\n    return c\n", 6, 'Did you mean "train"'),
        ("    import nothing_like_this\n", 5, "ModuleNotFoundError"),
        ("    return 1 / 0\n", 5, "ZeroDivisionError: division by zero"),
        ("    return (\n", 5, "SyntaxError"),
        ("    raise SystemExit('no')\n", 5, "SystemExit: no"),
        ("    return default_config().train.nothing\n", 5, "nothing"),
    ],
)
def test_a_mistake_in_the_file_is_one_line_with_its_number(tmp_path, body, line, expected):
    path = config_file(tmp_path, body)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    (text,) = str(caught.value).splitlines()
    assert f"{path}, line {line}: " in text and expected in text and "Fix: " in text


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("    return {'train': {'steps': 3}}\n", "get_config() returned dict"),
        ("    pass\n", "get_config() returned NoneType"),
        ("get_config = 3\n", "no function get_config"),
    ],
)
def test_what_get_config_must_return(tmp_path, body, expected):
    path = config_file(tmp_path, "    pass\n" + body if body.startswith("get") else body)
    with pytest.raises(ConfigError, match="mine.py: ") as caught:
        load_config(path)
    assert expected in str(caught.value)


def test_files_that_are_none(tmp_path):
    (tmp_path / "binary.py").write_bytes(b"\0\1\2")
    for path in (tmp_path / "missing.py", tmp_path, tmp_path / "binary.py", "x" * 5000):
        with pytest.raises(ConfigError) as caught:
            load_config(str(path))
        assert len(str(caught.value).splitlines()) == 1 and str(path) in str(caught.value)


def test_fields_of_any_other_structure_are_problems_and_hide_no_others():
    config = default_config()
    with config.ignore_type(), config.unlocked():
        config.train.steps = "ten"
        config.model.num_heads = None  # rules about heads would compare with the default, and are left out
        config.optim.eps = float("nan")
        config.data.files = ("a", 1)
        config.seed = 10**5000
        config.mesh = 5
        config.nothing = 1
        config.model.windw = 3
        config.preflight.ignore = None
        config.train.grad_accum = 3
        del config.guards
    config.name = config_dict.placeholder(str, required=True)
    found = {(problem.rule, problem.message.split(":")[0].split("=")[0]) for problem in validate(config)}
    assert found == {
        ("R003", "config.optim.eps"),
        ("R003", "config.seed"),
        ("R010", "config.train.batch_size"),
        ("R056", "config.guards"),
        ("R056", "config.model.windw"),
        ("R056", "config.nothing"),
        ("R057", "config.data.files"),
        ("R057", "config.mesh"),
        ("R057", "config.model.num_heads"),
        ("R057", "config.name"),
        ("R057", "config.preflight.ignore"),
        ("R057", "config.train.steps"),
    }
    with pytest.raises(ConfigError):
        check(config)
    assert {problem.rule for problem in validate(ConfigDict())} == {"R056"}


WRONG = {
    bool: [None, 1, "x"],
    int: [None, True, 2.0, "x", float("nan"), 2**31, 10**5000],
    float: [None, "x", float("nan"), float("inf"), -float("inf"), 1e300],
    str: [None, 3, b"x", "\ud800"],
    tuple: [None, "x", (1,)],
}


@pytest.mark.parametrize("number", range(max(map(len, WRONG.values()))))
def test_every_field_refuses_values_of_another_type_and_numbers_that_are_none(number):
    config = default_config()
    for name, default in walk(default_config()):
        *sections, last = name.split(".")
        target = config
        for section in sections:
            target = target[section]
        values = WRONG[type(default)]
        with target.ignore_type():
            target[last] = values[number % len(values)]
    problems = [problem for problem in validate(config) if problem.rule in ("R003", "R057")]
    named = {problem.message.split("=")[0] for problem in problems}
    assert named == {f"config.{name}" for name, _ in walk(default_config())} and len(problems) == len(named)


@pytest.mark.parametrize("address", ["az://bucket/run", "file:///tmp/run", "hdfs:/host/run"])
def test_workdirs_of_other_schemes_are_refused(address):
    (problem,) = workdir_problems(address)
    assert "is not supported" in problem.message and "s3:// or gs://" in problem.fix


@pytest.mark.parametrize("address", ["s3://", "gs:/"])
def test_addresses_without_a_bucket_are_refused_as_that(address):
    config = default_config()
    config.data.cache_dir = address
    for problem in (*workdir_problems(address), *validate(config)):
        assert problem.message.endswith("no bucket is named"), problem


@pytest.mark.parametrize("address", ["gs://bucket/run", "s3:/bucket/run"])
def test_workdirs_in_buckets_need_the_extra(address, monkeypatch):
    for package in ("s3fs", "gcsfs"):
        monkeypatch.setitem(sys.modules, package, None)
    (problem,) = workdir_problems(address)
    assert problem.rule == "R023" and 'pip install "nsa_jax[remote]"' in problem.message


def test_workdirs_must_be_directories_that_can_be_written(tmp_path, monkeypatch):
    assert workdir_problems(tmp_path) == [] and workdir_problems(tmp_path / "new" / "run") == []
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("")
    for bad in (tmp_path / "file", tmp_path / "file" / "run", tmp_path / "run", "/proc/run", "x" * 300, "a\0b"):
        (problem,) = workdir_problems(bad)
        assert problem.rule == "R023" and str(bad) in problem.message
    (problem,) = workdir_problems("")
    assert problem.rule == "R023" and problem.message == "--workdir is empty"

    (tmp_path / "saved" / "checkpoints").mkdir(parents=True)
    write = tempfile.TemporaryFile

    def not_in_checkpoints(dir):
        if dir.name == "checkpoints":
            raise OSError(13, "Permission denied")
        return write(dir=dir)

    monkeypatch.setattr("tempfile.TemporaryFile", not_in_checkpoints)
    (problem,) = workdir_problems(tmp_path / "saved")
    assert problem.rule == "R023" and "cannot be written (Permission denied)" in problem.message

    def read_only(dir):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", read_only)
    (problem,) = workdir_problems(tmp_path / "new")
    assert "cannot be written (Read-only file system)" in problem.message


def test_rules_without_which_no_run_could_follow_cannot_be_ignored():
    config = default_config()
    config.model.attention, config.preflight.ignore = "sparse", ("R001", "R006")
    with pytest.raises(ConfigError) as caught:
        check(config)
    assert {(p.rule, p.severity) for p in caught.value.problems} == {("R000", "error"), ("R001", "error")}


def test_a_link_to_a_disk_that_is_not_there_is_named(tmp_path):
    (tmp_path / "link").symlink_to("/nowhere/scratch")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to("/nowhere/scratch")
    for workdir in (tmp_path / "link", tmp_path / "link" / "run", tmp_path / "run"):
        (problem,) = workdir_problems(workdir)
        assert problem.rule == "R023" and "is a link to /nowhere/scratch, which does not exist" in problem.message


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--config.trian.steps=3"], "did you mean config.train.steps?"),
        (["--steps=3"], "--config.train.steps?"),
        (["--config=missing.py"], "missing.py: No such file or directory"),
        (["--config.guards.min_gate_entropy=nan"], "config.guards.min_gate_entropy=nan: out of range"),
        (["--workdir=az://bucket/run"], "az:// is not supported"),
        (["--workdir=train.py"], "train.py is a file"),
        (["--workdir=~/run"], "/proc/run: cannot be written"),
        (["--target=h100"], "add --preflight"),
        (["--preflight", "--devices=8"], "add --target"),
        (["--workdir=/proc/run", "--config.train.stepz=1"], "/proc/run"),
    ],
)
def test_train_says_it_in_one_line_and_status_2_before_touching_a_device(arguments, expected):
    env = {"JAX_PLATFORMS": "nowhere", "PATH": os.environ["PATH"], "HOME": "/proc", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "train.py", "--config=configs/quickstart.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and expected in done.stderr and "Traceback" not in done.stderr


def test_a_program_whose_output_lacks_a_character_ends_well(monkeypatch):
    said = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(said, "latin-1", write_through=True))
    assert run_program(lambda: print("caf\u00e9 \u6771")) == 0 and said.getvalue() == b"caf\xe9 ?\n"


@pytest.mark.parametrize("program", [["train.py"], ["-m", "nsa_jax.cli", "train"]])
def test_help_lists_the_flags(program):
    command = [sys.executable, *program, "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    for flag in ("config", "workdir", "resume", "target", "profile"):
        assert f"  --{flag}: " in done.stdout
