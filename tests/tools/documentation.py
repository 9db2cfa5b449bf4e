"""Checks the fenced blocks of a page: what may stand in the documentation, and how each kind is executed or checked."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import textwrap
import tomllib
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
import yaml

from .checkpoints import describe, write

ROOT = Path(__file__).parent.parent.parent


class DocsError(AssertionError):
    """A block is wrong, or of a kind that nobody checks."""


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block: where it is, the word behind the fence, and its text."""

    page: str
    line: int  # of its first line of text
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(text: str, page: str = "page.md") -> list[Block]:
    """All fenced blocks of a page.

    Raises:
      DocsError: a fence that is not closed, or an indented block, which would have no kind.
    """
    found, opened, lines = [], None, text.splitlines()
    for number, line in enumerate(lines, 1):
        fence = re.match(r"^( *)(```+|~~~+) *(\S*)", line)
        if opened is None and fence:
            opened = (number + 1, fence[2], fence[3])
        elif opened is not None and line.strip() == opened[1]:
            body = textwrap.dedent("\n".join(lines[opened[0] - 1 : number - 1]))
            found.append(Block(page, opened[0], opened[2], body))
            opened = None
        elif opened is None and line.startswith("    ") and not lines[number - 2].strip():
            raise DocsError(f"{page}:{number}: an indented block; use a fence with a kind")
    if opened is not None:
        raise DocsError(f"{page}:{opened[0]}: the block is not closed")
    return found


def prose(text: str) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^ *(```+|~~~+).*?^ *\1 *$", "", text, flags=re.MULTILINE | re.DOTALL)


# Shell


def commands(block: Block) -> list[list[str]]:
    """The words of each command of a shell block, comments and assignments before the command left out."""
    found = []
    for line in block.text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, "&&"]:
            if word in ("&&", ";", "||", "|"):
                if words:
                    found.append(words)
                words = []
            elif words or not re.match(r"^[A-Z_]+=", word):
                words.append(word)
    return found


def write_corpus(directory: Path) -> None:
    """A few small documents, in which no row of tokens comes twice."""
    directory.mkdir()
    for index in range(6):
        lines = [f"Document {index}, line {line}. The key of box {index} is blue.\n" for line in range(200)]
        (directory / f"{index}.txt").write_text("".join(lines))


class World:
    """A directory that looks like a checkout after `make quickstart`, with a tiny model in runs/quickstart."""

    def __init__(self, directory: Path, tiny_run: Callable[[], Path]):
        self.directory, self._tiny_run = directory, tiny_run
        for path in ROOT.iterdir():
            if not path.name.startswith(".") and path.name != "runs":
                (directory / path.name).symlink_to(path)
        write_corpus(directory / "corpus")
        (directory / "notes.txt").write_text("Some notes on native sparse attention.\n" * 20)
        llama = directory / "TinyLlama-1.1B"
        layers = 8  # as many as pages divide into kinds
        write(llama, describe("llama3", num_key_value_heads=2, num_hidden_layers=layers, max_position_embeddings=64))
        words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0, "notes": 1}, unk_token="notes"))
        words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        words.save(str(llama / "tokenizer.json"))
        self.train_lines: list[list[str]] = []

    def run(self, name: str) -> Path:
        """The workdir of a tiny model."""
        path = self.directory / "runs" / name
        if not path.exists():
            shutil.copytree(self._tiny_run(), path)
        return path

    # What each program's arguments are checked with.

    def python(self, words: list[str]) -> None:
        if words[:1] == ["-m"]:
            return self.module(words[1], words[2:])
        if words[0] == "train.py":
            self.train_lines.append(words)
            return None
        if not (self.directory / words[0]).is_file():
            raise DocsError(f"there is no {words[0]}")
        if words[0].startswith("docs/") and len(words) == 1:
            return None  # tests of their own
        if words[0].startswith("benchmarks/"):
            return parse_only(self.directory / words[0], words[1:])
        raise DocsError(f"nobody checks what {words[0]} does")

    def module(self, name: str, words: list[str]) -> None:
        if name == "pip":
            return self.pip(words)
        if name == "venv" and len(words) == 1:
            return None
        if name not in _TOOLS:
            raise DocsError(f"nobody checks what python -m {name} does")
        for word in words:
            if word.startswith("runs/"):
                self.run(word.removeprefix("runs/").partition("@")[0])
        tool = importlib.import_module(name)
        if not hasattr(tool, "main"):  # a package
            tool = importlib.import_module(f"{name}.__main__")
        try:
            status = tool.main([*words, *_TOOLS[name]])
        except SystemExit as exit:
            status = exit.code
        if status:
            raise DocsError(f"python -m {name} ended with status {status}")
        return None

    def pip(self, words: list[str]) -> None:
        if words[:1] != ["install"]:
            raise DocsError(f"nobody checks pip {words[:1]}")
        words = [word for word in words[1:] if word not in ("-e", "-c", "--quiet")]
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        for word in words:
            name = re.fullmatch(r"(\.|nsa_jax)(?:\[([\w,]+)\])?", word)
            if name is None and not (self.directory / word).is_file():
                raise DocsError(f"pip install {word}: neither this package nor a file")
            unknown = set((name[2] or "").split(",") if name else []) - {"", *project["optional-dependencies"]}
            if unknown:
                raise DocsError(f"pip install {word}: no such extras: {sorted(unknown)}")

    def uv(self, words: list[str]) -> None:
        if words[:1] == ["pip"]:
            self.pip(words[1:])
        elif words[:1] != ["venv"]:
            raise DocsError(f"nobody checks uv {words[:1]}")

    def make(self, words: list[str]) -> None:
        phony = re.search(r"^\.PHONY:(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
        targets = [word for word in words if "=" not in word]
        for target in targets:
            if phony is None or target not in phony[1].split():
                raise DocsError(f"make {target}: no such target")
        done = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, timeout=240)
        if done.returncode:
            raise DocsError(f"make {' '.join(words)}: {done.stderr}")

    def touch(self, words: list[str]) -> None:
        if words != ["runs/NAME/HALT"]:
            raise DocsError(f"touch {words}: only the HALT file is known")

    def check_command(self, words: list[str]) -> None:
        """Checks one command of a shell block."""
        program = "python" if re.search(r"(^|/)python3?(\.\d+)?$", words[0]) else re.sub(r"^.*/", "", words[0])
        check: Callable[[list[str]], None] | None = {
            "python": self.python,
            "pip": self.pip,
            "uv": self.uv,
            "make": self.make,
            "touch": self.touch,
        }.get(program)
        if check is None:
            raise DocsError(f"nobody checks what {program} does")
        check(words[1:])

    def check_train_lines(self) -> None:
        """Parses the flags of all train.py lines met so far and validates their configs."""
        lines, self.train_lines = self.train_lines, []
        if not lines:
            return
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _CHECK_TRAIN, json.dumps(lines)],
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        if done.returncode:
            raise DocsError(done.stdout + done.stderr)


# Tools that run, and what keeps them short.
_TOOLS = {
    "nsa_jax.generate": ["--max-tokens=3"],
    "nsa_jax.evaluate": ["--max-tokens=200", "--samples=1", "--batch-size=2", "--num-keys=2"],
    "nsa_jax.convert": [],
    "nsa_jax.export": [],
    "nsa_jax.inspect": ["--tokens=64"],
    "nsa_jax.report": [],
}

# Each line in a process of its own, since flags are global; forked, since importing JAX takes seconds.
_CHECK_TRAIN = """
import json, os, sys
from nsa_jax import trainer as train
from nsa_jax import config
failed = 0
for line in json.loads(sys.argv[1]):
    child = os.fork()
    if child == 0:
        try:
            rest = train.parse_flags(line)
            if len(rest) > 1:
                raise ValueError(f"unexpected arguments {rest[1:]}")
            config.check(*train.read_config())
        except BaseException as error:
            print(" ".join(line), error, flush=True)
            os._exit(1)
        os._exit(0)
    failed += os.waitpid(child, 0)[1] != 0
sys.exit(failed)
"""


class _Parsed(Exception):
    """The arguments are fine."""


def parse_only(script: Path, words: list[str]) -> None:
    """Runs a script until its arguments have been parsed."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser, *args, **kwargs):
        parse(parser, *args, **kwargs)
        raise _Parsed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
        patch.setattr(sys, "argv", [str(script), *words])
        patch.syspath_prepend(str(script.parent))
        try:
            runpy.run_path(str(script), run_name="__main__")
        except _Parsed:
            return
        except SystemExit as error:
            raise DocsError(f"{script.name} does not take {words}") from error
    raise DocsError(f"{script.name} parses no arguments")


# Blocks


def check_tree(block: Block) -> None:
    """A tree of files: two blanks of indentation per level, entries followed by a description."""
    path: list[str] = []
    for line in block.text.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        first, *rest = re.split(r"; +", line.strip())
        for piece in [first, *(piece for piece in rest if re.match(r"[\w.-]+\.\w+  ", piece))]:
            entry = piece.split()[0]
            if not re.fullmatch(r"[\w.-]+(/|\.\w+)", entry):
                raise DocsError(f"{block}: {entry!r} is neither a file nor a directory: only trees may be of kind text")
            where = ROOT.joinpath(*path[:depth], entry)
            if not where.exists():
                raise DocsError(f"{block}: there is no {where.relative_to(ROOT)}")
            if entry.endswith("/"):
                path = [*path[:depth], entry]


def run_python(block: Block, namespace: dict) -> None:
    """Executes a block; a traceback shows the page's own lines. What needs transformers runs where it is installed."""
    code = compile("\n" * (block.line - 1) + block.text, str(ROOT / block.page), "exec")
    if block.text.startswith("# Needs transformers") and importlib.util.find_spec("transformers") is None:
        return  # tests/hf/test_tutorial.py runs the page
    exec(code, namespace)


def check(found: list[Block], world: World) -> None:
    """Checks the blocks of one page."""
    module = types.ModuleType("documentation_page")
    sys.modules[module.__name__] = module  # dataclasses look their module up
    for block in found:
        try:
            if block.kind == "python":
                run_python(block, module.__dict__)
            elif block.kind == "bash":
                for words in commands(block):
                    world.check_command(words)
            elif block.kind == "yaml":
                yaml.safe_load(block.text)
            elif block.kind in ("text", ""):
                check_tree(block)
            else:
                raise DocsError(f"a block of kind {block.kind!r}, which nobody checks")
        except DocsError as error:
            raise DocsError(f"{block}: {error}") from error
    world.check_train_lines()
