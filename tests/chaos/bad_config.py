"""Bad configs and flags: each must be refused before training with status 2 and few lines, and never a traceback.

A server process imports train.py once and forks for every attempt, which then runs `main` as a shell's command would.
Training, and what a preflight compiles, is replaced: status 42 says that the config was accepted. Every twentieth
attempt is a real process. Values that may be legal (a field is set to anything at all) count as held if they are
accepted, unless setting the run up on small data then fails with a traceback.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from nsa_jax.config import CHOICES, default_config
from nsa_jax.fields import walk

from .harness import Outcome

QUICK = 60
_ROOT = Path(__file__).parent.parent.parent
_ACCEPTED = 42
_MOST_LINES = 40
_LIMIT = 30  # seconds of an attempt
_NOISE = ("cudart_stub", "InitializeLog")  # what importing JAX may print

# Reads {"argv", "set_up"} a line, answers {"status", "output"}. Forked before JAX has made a backend.
_SERVER = """
import json, os, signal, sys, tempfile
sys.path.insert(0, os.getcwd())
from nsa_jax import trainer as train
import nsa_jax.train as trainer
import nsa_jax.train.loop, nsa_jax.train.preflight.run, nsa_jax.export
from absl import app, flags

def accept(*_, **__):
    raise SystemExit(42)

can_run = nsa_jax.train.preflight.run._runnable
nsa_jax.train.preflight.run._runnable = lambda config: can_run(config) and accept()
nsa_jax.train.loop.Run._train = accept  # data, model, state and --resume come before

for line in sys.stdin:
    job = json.loads(line)
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            signal.alarm(LIMIT)  # nothing that is refused takes long
            status = 99
            try:
                sys.argv = ["train.py", *job["argv"]]
                if not job["set_up"]:
                    trainer.run = accept
                flags.mark_flag_as_required("config")
                app.run(train.main, flags_parser=train.parse_flags)
            except SystemExit as error:
                status = error.code if isinstance(error.code, int) else int(error.code is not None)
            except BaseException:
                import traceback
                traceback.print_exc()
                status = 1
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        print(json.dumps({"status": status, "output": output.read()}), flush=True)
"""


class _Server:
    """Runs train.py's main in forks of one process."""

    def __init__(self, environment: dict[str, str]):
        command = [sys.executable, "-c", _SERVER.replace("LIMIT", str(_LIMIT))]
        self._process = subprocess.Popen(
            command, cwd=_ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __call__(self, argv: list[str], *, set_up: bool) -> tuple[int, str]:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps({"argv": argv, "set_up": set_up}), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline())
        return answer["status"], answer["output"]

    def close(self) -> None:
        self._process.communicate()


def _environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "HOME", "VIRTUAL_ENV")}
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "JAX_PLATFORMS": "cpu"}
    return {**kept, **offline, "PYTHONPATH": str(_ROOT), "NSA_JAX_CACHE": str(folder / "cache")}


_SMALL = """
from ml_collections import ConfigDict, FrozenConfigDict, config_dict

from nsa_jax.config import default_config


def get_config():
    c = default_config()
    c.name = "small"
    c.compilation_cache_dir = "off"
    c.model.dim, c.model.num_layers, c.model.num_heads, c.model.num_kv_heads, c.model.head_dim = 16, 1, 2, 1, 8
    c.model.compute_dtype = "float32"
    n = c.model.nsa
    n.compress_block, n.compress_stride, n.select_block, n.num_selected, n.window = 8, 4, 8, 4, 12
    c.data.source, c.data.files, c.data.seq_len, c.data.val_fraction = "text", (TEXT,), 64, 0.3
    c.train.steps, c.train.batch_size, c.train.eval_batches, c.optim.warmup_steps = 4, 2, 1, 1
    c.preflight.selftest = False
    EDIT
    return c
"""


def _small(folder: Path, edit: str = "pass", name: str = "small.py") -> str:
    path = folder / name
    path.write_text(_SMALL.replace("TEXT", repr(str(folder / "text" / "*.txt"))).replace("EDIT", edit))
    return str(path)


def _misspell(rng: np.random.Generator, name: str) -> str:
    """The name with two letters exchanged, or one left out or doubled; never a field's."""
    known = dict(walk(default_config()))
    while True:
        at = int(rng.integers(1, len(name)))
        found = str(
            rng.choice([name[: at - 1] + name[at] + name[at - 1] + name[at + 1 :], name[:at] + name[at + 1 :],
                        name[:at] + name[at - 1] + name[at:]])
        )  # fmt: skip
        if found not in known and not any(other.startswith(f"{found}.") for other in known):
            return found


# What is not of a field's type, as Python that a config may hold.
_OTHERS = {
    bool: ["None", "1", "0.0", '"yes"', "()", "{}", "object()"],
    int: [
        "None",
        "2.0",
        '"ten"',
        "()",
        "[3]",
        "True",
        "{}",
        "float('nan')",
        "10**400",
        "10**5000",
        "-(10**30)",
        "2**31",
    ],
    float: ["None", '"0.1"', "()", "True", "float('nan')", "float('inf')", "-float('inf')", "10**400", "1e300", "{}"],
    str: ["None", "3", "0.5", "b'byte'", "()", "{}", '"\\ud800"', "object"],
    tuple: ["None", "3", '"a.txt"', "(1, 2)", "[None]", "{}", '("\\udcff",)'],
}
# Text on the command line that means none of a field's values.
_BAD_TEXT = {
    bool: ["yes", "maybe", "2", "None", " ", "()"],
    int: [
        "ten",
        "1e3",
        "2.0",
        "nan",
        "inf",
        "None",
        "",
        "()",
        "0x",
        "9" * 5000,
        "99999999999999999999",
        "1 000",
        "\udcff",
    ],
    float: ["a", "nan", "inf", "-inf", "1e999", "None", "", "()", "1,5", "0.1.2", "\udcff"],
    str: ["\udcff\udcfe"],
    tuple: ["(1, 2)", "(", "('a'", "[[]]", "({}, 1)", "(" * 3000, "\udcff"],
}
_EXTREME = {
    bool: ["True", "False"],
    int: ["-1", "0", "1", "2", "3", "7", "255", "2**20", "2**24", "2**31 - 1", "-(2**31)"],
    float: ["-1.0", "0.0", "-0.0", "1e-300", "1e-9", "0.5", "1.0", "1.5", "1e9", "3e38", "-3e38"],
    str: ['""', '"x"', '"x" * 5000', '"a\\0b"', '"/"', '".."', '"\\u2028"', '"gs://b/x"', '"/proc/none"', '"x.json"'],
    tuple: ["()", '("",)', '("nothing.txt",)', '("/proc/self/mem",)', '("a\\0",)', '("R999",)', '("R001",)', '("/",)'],
}  # fmt: skip


def _fields(rng: np.random.Generator, count: int) -> list[tuple[str, Any]]:
    known = list(walk(default_config()))
    return [known[i] for i in rng.choice(len(known), count, replace=False)]


class _Attempts:
    """One attempt of each kind: what is run, and whether it may be accepted."""

    def __init__(self, rng: np.random.Generator, folder: Path):
        self.rng, self.folder, self.edit = rng, folder, ""
        (folder / "text").mkdir(exist_ok=True)
        for i in range(12):
            (folder / "text" / f"{i}.txt").write_text(f"Document {i} counts to {i}. " * 60)
        self.plain = f"--config={_small(folder)}"
        (folder / "file").write_text("a file")
        (folder / "binary.json").write_bytes(rng.bytes(999))
        (folder / "list.json").write_text("[1, 2]")
        (folder / "export").mkdir(exist_ok=True)
        (folder / "export" / "config.json").write_text('{"model_type": "nsa_jax", "config": {"model": 3}}')

    def one(self, options: list) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def misspelt_override(self) -> list[str]:
        ((name, value),) = _fields(self.rng, 1)
        return [self.plain, f"--config.{_misspell(self.rng, name)}={value}"]

    def misspelt_flag(self) -> list[str]:
        name = self.one(["workdir", "resume", "preflight", "target", "devices", "profile", "coordinator"])
        misspelt = f"--{_misspell(self.rng, name)}=x"
        return [
            self.plain,
            self.one([misspelt, misspelt, "--steps=5", "--seed=1", "--dim=3", "-x", "--=", "---"]),
        ]

    def text_of_another_type(self) -> list[str]:
        fields = _fields(self.rng, int(self.rng.integers(1, 4)))
        chosen = [(name, self.one(_BAD_TEXT[type(value)])) for name, value in fields]
        return [self.plain, *(f"--config.{name}={text}" for name, text in chosen)]

    def override_without_sense(self) -> list[str]:
        options = (
            "--config.train=5", "--config.model.nsa=x", "--config.=3", "--config..train=1", "--config.train.steps",
            "--noconfig.train.steps", "--config.train.steps=", "--config.train.steps[0]=3",
            "--config.model.nsa.window.x=1",
            "--config.items=3", "--config.__class__=3", "--config.model.lock=1", "--config.train.steps =3",
            "--config.FIELD=3", "--config.FIELD", "--config.data.files[0]=a", "--config.data.files=('a', 3)",
        )  # fmt: skip
        return [self.plain, self.one(list(options))]

    def bad_flag(self) -> list[str]:
        options = (
            ["--workdir=az://bucket/run"], ["--workdir=ftp://host/run"], ["--workdir=file:///tmp/x"],
            ["--workdir=hdfs://host:9000/x"], [f"--workdir={self.folder / 'file'}"], ["--workdir=/proc/none"],
            [f"--workdir={self.folder / 'file' / 'below'}"], ["--workdir=/sys/kernel/run"], ["--workdir=" + "x" * 300],
            ["--workdir=/dev/null"], ["--workdir"], ["--preflight=perhaps"], ["--devices=0"], ["--devices=many"],
            ["--target=b200"], ["--num_processes=0"], ["--process_id=-1"], ["more", "words"],
            ["--flagfile=nothing.txt"],
            [f"--flagfile={self.folder / 'binary.json'}"], ["--flagfile=/"], ["--", "x"], ["--noconfig"], ["--config"],
            ["--config="],
        )  # fmt: skip
        return [self.plain, *self.one(list(options))]

    def flag_for_the_start(self) -> list[str]:
        options = (
            "--profile=x", "--profile=5", "--profile=5:2", "--profile=1:3", "--profile=2:900", "--profile=-1:3",
            f"--resume={self.folder / 'export'}", "--resume=nothing", "--resume=az://bucket/run",
            f"--resume={self.folder / 'file'}", "--resume=@",
            "--resume=@3",
            f"--resume={self.folder}@99999999999999999999", "--coordinator=here", "--num_processes=2", "--process_id=0",
            "--nodistributed --coordinator=a:1 --num_processes=2 --process_id=0", "--distributed",
            "--coordinator=a --num_processes=2 --process_id=0", "--coordinator=a:1 --num_processes=2 --process_id=2",
        )  # fmt: skip
        return [self.plain, f"--workdir={self.folder / 'new'}", *self.one(list(options)).split()]

    def bad_file(self) -> list[str]:
        sources = (
            b"", b"x = 1\n", b"def get_config(:\n", b"\0\1", self.rng.bytes(300), b"import nothing_here\n", b"1 / 0\n",
            b"get_config = 3\n", b"def get_config(a, b):\n    pass\n", b"def get_config():\n    pass\n",
            b"def get_config():\n    return {'train': {'steps': 3}}\n", b"def get_config():\n    return 5\n",
            b"def get_config():\n    return get_config()\n", b"import sys\nsys.exit(3)\n",
            b"import sys\nsys.exit('no')\n",
            b"raise BaseException('x')\n", b"def get_config():\n    raise KeyError('train')\n", b"\xff\xfe\x00",
            b"from nsa_jax.config import nothing\n", b"if True:\nx = 1\n", b"x = '\n", b"  x = 1\n", b"(" * 500,
            b"from ml_collections import ConfigDict\ndef get_config():\n    return ConfigDict({'a': 1})\n",
            b"from ml_collections import ConfigDict\ndef get_config():\n    return ConfigDict()\n",
            b"from nsa_jax.config import *\ndef get_config():\n    raise ConfigError([])\n",
            b"class E(Exception):\n    def __str__(self):\n        1 / 0\nraise E\n",
            b"raise Exception('a\\nb\\n' * 99)\n",
            b"class C:\n    def get_config(self): 1\nget_config = C()\n", b"# coding: nonsense\n",
        )  # fmt: skip
        path = self.folder / "bad.py"
        source = self.one(list(sources))
        self.edit = str(source)
        path.write_bytes(source)
        missing = ["nothing.py", str(self.folder), "/dev/null", "", ":", "nothing:x", f"{path}:argument", "x" * 5000]
        return [f"--config={self.one([str(path)] * 12 + missing)}"]

    def bad_edit(self) -> list[str]:
        name, default = _fields(self.rng, 1)[0]
        section = name.rpartition(".")[0]
        edits = (
            f"c.{name} = {self.one(_OTHERS[type(default)])}", f"c.{_misspell(self.rng, name)} = 1", f"del c.{name}",
            f"c.{_misspell(self.rng, name)}", f"c.{section + '.' if section else ''}update(dict(a=1))",
            f"c.unlock(); c.{section + '.' if section else ''}nothing = 3", "return FrozenConfigDict(a=1)",
            "return c.to_json()", "return c.train", "return [c]", "c.model = 5", "c.model.nsa = None", "del c.model",
            f"c.unlock(); del c.{section or 'guards'}", "return c.to_dict()", "return get_config",
            "raise ValueError(c)",
            f"c.ignore_type().__enter__(); c.{section or 'train'} = 3", "c.train.steps = c.get_ref('train')",
        )  # fmt: skip
        self.edit = self.one(list(edits))
        return [f"--config={_small(self.folder, self.edit, 'edited.py')}"]

    def _edited(self, values: dict[type, list[str]], count: int) -> list[str]:
        lines = [f"c.{name} = {self.one(values[type(default)])}" for name, default in _fields(self.rng, count)]
        self.edit = "\n        ".join(["with c.ignore_type():", *lines])
        return [f"--config={_small(self.folder, self.edit, 'edited.py')}"]

    def values_of_another_type(self) -> list[str]:
        return self._edited(_OTHERS, int(self.rng.integers(1, 6)))

    def extreme_value(self) -> list[str]:
        return [*self._edited(_EXTREME, 1), f"--workdir={self.folder / 'new'}"]

    def no_such_choice(self) -> list[str]:
        return [self.plain, f"--config.{self.one(sorted(CHOICES))}=nothing"]

    def bad_tokenizer(self) -> list[str]:
        path = self.one(["binary.json", "list.json", "file", "nothing.json", "", "text", "small.py"])
        fields = {"tokenizer": "hf", "tokenizer_path": str(self.folder / path)}
        return [self.plain, f"--workdir={self.folder / 'new'}", *(f"--config.data.{k}={v}" for k, v in fields.items())]

    def bad_data(self) -> list[str]:
        options = (
            "files=nothing.txt", f"files={self.folder}", "source=hf", "source=hf --config.data.hf_path=no/such",
            f"cache_dir={self.folder / 'file'}", "cache_dir=/proc/none", "val_fraction=0.999", "seq_len=100000",
            "files=('','')", f"files={self.folder / 'binary.json'}", "source=synthetic --config.data.synthetic_vocab=2",
            "source=synthetic --config.data.synthetic=recall --config.data.synthetic_vocab=20", "val_fraction=1e-9",
            "source=hf --config.data.hf_path=json --config.data.hf_data_files=nothing.json", "max_documents=1",
        )  # fmt: skip
        return [self.plain, f"--workdir={self.folder / 'new'}", *f"--config.data.{self.one(list(options))}".split()]


# Kind: share of attempts, whether the run is set up, whether it may be accepted.
_KINDS: dict[str, tuple[int, bool, bool]] = {
    "misspelt_override": (3, False, False),
    "misspelt_flag": (2, False, False),
    "text_of_another_type": (4, False, False),
    "override_without_sense": (3, False, False),
    "bad_flag": (4, False, False),
    "flag_for_the_start": (1, True, False),
    "bad_file": (4, False, False),
    "bad_edit": (4, False, False),
    "values_of_another_type": (4, False, False),
    "no_such_choice": (1, False, False),
    "bad_tokenizer": (1, True, False),
    "bad_data": (1, True, False),
    "extreme_value": (2, True, True),
}


def _judge(status: int, output: str, may_be_accepted: bool) -> str:
    """How the promise was broken; empty if it held."""
    lines = [line for line in output.splitlines() if not any(noise in line for noise in _NOISE)]
    if "Traceback" in output or "Fatal Python" in output:
        return f"a traceback: {lines[-1] if lines else ''}"
    if status == _ACCEPTED and not may_be_accepted:
        return "accepted"
    if may_be_accepted and status == -signal.SIGALRM:
        return ""  # a value that is much work, such as a million rows in a batch
    if status not in (2, _ACCEPTED):
        return f"status {status}: {' '.join(lines)[-300:]}"
    if status == 2 and not lines:
        return "refused without a word"
    if len(lines) > _MOST_LINES:
        return f"{len(lines)} lines of output"
    return ""


def _real(argv: list[str], folder: Path) -> tuple[int, str]:
    """The attempt as a process of its own."""
    command = [sys.executable, "train.py", *argv]
    environment = _environment(folder)
    done = subprocess.run(
        command, cwd=_ROOT, env=environment, capture_output=True, text=True, errors="replace", timeout=300
    )
    return done.returncode, done.stdout + done.stderr


def attack(rng: np.random.Generator, folder: Path) -> Iterator[Outcome]:
    """Attempts of all kinds, in random order."""
    attempts = _Attempts(rng, folder)
    shares = np.array([share for share, _, _ in _KINDS.values()], float)
    server = _Server(_environment(folder))
    try:
        number = 0
        while True:
            kind = str(rng.choice(list(_KINDS), p=shares / shares.sum()))
            _, set_up, may_be_accepted = _KINDS[kind]
            attempts.edit = ""
            argv = getattr(attempts, kind)()
            real = number % 20 == 19 and not may_be_accepted
            if rng.random() < 0.15 and not set_up:
                argv.insert(0, "--preflight")
            status, output = _real(argv, folder) if real else server(argv, set_up=set_up)
            failure = _judge(status, output, may_be_accepted)
            label = kind.replace("_", " ") + (", a real process" if real else "")
            yield Outcome(label, failure and f"{' '.join(argv)[-300:]} {attempts.edit} -> {failure}")
            number += 1
    finally:
        server.close()
