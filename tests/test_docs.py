"""Every code block, link and name of README.md and docs/*.md is true.

Python blocks run, in one namespace per page. Of shell blocks, `nsa_jax` tools run on a tiny model, `train.py` lines
have their flags parsed and their config validated, other scripts have their arguments parsed, `make` targets exist.
Trees of files must list files. A block or command of another kind is an error: nothing is skipped.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
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

import jax
import pytest
import tokenizers
from tools.reported import environment, lines, train_row
from tools.runs import small_config, write_run

from nsa_jax.config import default_config

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "launch").glob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


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
    """A few small documents."""
    directory.mkdir()
    for index in range(6):
        (directory / f"{index}.txt").write_text(f"Document {index}. The key of box {index} is blue.\n" * 40)


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
        shutil.copytree(ROOT / "tests" / "tools" / "tiny_llama", llama)
        words = tokenizers.models.WordLevel({"</s>": 0, "notes": 1}, unk_token="</s>")
        (llama / "tokenizer.json").write_text(tokenizers.Tokenizer(words).to_str())
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
        done = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, timeout=60)
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
    "nsa_jax.export": [],
    "nsa_jax.report": [],
}

# Each line in a process of its own, since flags are global; forked, since importing JAX takes seconds.
_CHECK_TRAIN = """
import json, os, sys
import train
from nsa_jax import config
failed = 0
for line in json.loads(sys.argv[1]):
    child = os.fork()
    if child == 0:
        try:
            sys.argv = line  # where ml_collections looks for overrides
            rest = train.parse_flags(line)
            if len(rest) > 1:
                raise ValueError(f"unexpected arguments {rest[1:]}")
            config.check(train._CONFIG.value)
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
    """Executes a block; a traceback shows the page's own lines."""
    code = compile("\n" * (block.line - 1) + block.text, str(ROOT / block.page), "exec")
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
            elif block.kind in ("text", ""):
                check_tree(block)
            else:
                raise DocsError(f"a block of kind {block.kind!r}, which nobody checks")
        except DocsError as error:
            raise DocsError(f"{block}: {error}") from error
    world.check_train_lines()


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory):
    """Writes a tiny model's workdir when first called."""

    @functools.cache
    def write() -> Path:
        directory = tmp_path_factory.mktemp("tiny")
        write_corpus(directory / "corpus")
        config = small_config()
        config.data.source, config.data.files = "text", (str(directory / "corpus" / "*.txt"),)
        config.data.cache_dir, config.data.val_fraction = str(directory / "cache"), 0.5
        write_run(directory / "run", config)
        lines(directory / "run" / "metrics.jsonl", [train_row(step, 3.0 - step / 10) for step in (1, 2)])
        (directory / "run" / "env.json").write_text(json.dumps(environment("quickstart")))
        return directory / "run"

    return write


@pytest.fixture
def world(tmp_path, monkeypatch, tiny_run):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NSA_JAX_CACHE", str(tmp_path / "cache"))
    usual = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)  # everything here is compiled to run once
    yield World(tmp_path, tiny_run)
    jax.config.update("jax_disable_most_optimizations", usual)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_block_is_true(page, world):
    check(blocks(page.read_text(), str(page.relative_to(ROOT))), world)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```python\nassert 1 == 2, 'untrue'\n```", "untrue"),
        ("```yaml\na: 1\n```", "kind 'yaml'"),
        ("```bash\nrm -r runs\n```", "what rm does"),
        ("```bash\nmake everything\n```", "make everything"),
        ("```bash\npython train.py --config=configs/toy.py --config.train.step=1\n```", "train.step"),
        ("```bash\npython train.py --config=configs/toy.py --config.model.num_kv_heads=3\n```", "R004"),
        ("```bash\npython train.py --config=configs/none.py\n```", "none.py"),
        ("```bash\npython -m nsa_jax.generate runs/quickstart --promt x\n```", "status 2"),
        ("```bash\npython -m nsa_jax.trian\n```", "nsa_jax.trian"),
        ("```bash\npython benchmarks/attention.py --sizes 5\n```", "--sizes"),
        ("```bash\npython tools/none.py\n```", "tools/none.py"),
        ("```bash\npip install -c constraints.txt -e '.[tpu]'\n```", "tpu"),
        ("```bash\nmake test && JAX_PLATFORMS=cpu nonsense\n```", "nonsense"),
        ("```text\nnsa_jax/\n  none.py   what is not there\n```", "none.py"),
        ("```\nsome output\n```", "only trees"),
        ("```python\n", "not closed"),
        ("Words.\n\n    indented\n", "indented"),
    ],
)
def test_the_check_notices(text, message, world, capfd):
    with pytest.raises((AssertionError, DocsError), match=re.escape(message)):
        check(blocks(text), world)


# Links and names


def anchors(page: Path) -> set[str]:
    """What GitHub lets links of a page point to."""
    headings = re.findall(r"^#+ +(.*)$", prose(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text())):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


def _exists(dotted: str) -> bool:
    """Whether a dotted name can be imported."""
    names = dotted.split(".")
    for cut in range(len(names), 0, -1):
        try:
            found = importlib.import_module(".".join(names[:cut]))
        except ModuleNotFoundError:
            continue
        for name in names[cut:]:
            if not hasattr(found, name):
                return False
            found = getattr(found, name)
        return True
    return False


_FLAGS_OF_OTHERS = ("dependency",)  # of sbatch


def _commands_that_do_not_exist(text: str) -> list[str]:
    """Targets, scripts, modules and flags of this repository that the text between backticks names in vain."""
    phony = re.search(r"^\.PHONY:(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets = phony[1].split() if phony else []
    scripts = [ROOT / "train.py", *ROOT.glob("nsa_jax/**/*.py"), *ROOT.glob("benchmarks/*.py")]
    source, wrong = "".join(path.read_text() for path in scripts), []
    for span in re.findall(r"`([^`\n]+)`", text):
        if found := re.match(r"make ([\w-]+)", span):
            wrong += [span] * (found[1] not in targets)
        if found := re.match(r"python -m (nsa_jax[\w.]*)", span):
            wrong += [span] * (not _exists(found[1]))
        if found := re.match(r"python ([\w/.]+\.py)", span):
            wrong += [span] * (not (ROOT / found[1]).is_file())
        if span.startswith(("--", "python")):
            for flag in re.findall(r"(?<!\S)--([a-z][\w-]*)", span):
                names = (f"--{flag}", flag, flag.removeprefix("no"))
                known = flag in ("config", *_FLAGS_OF_OTHERS) or any(f'"{name}"' in source for name in names)
                wrong += [span] * (not known)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_names_in_the_text_exist(page):
    """Fields of the config, names of the package, rules, commands and flags, as the text mentions them."""
    text, schema, unknown = prose(page.read_text()), default_config(), []
    for dotted in re.findall(r"(?<![\w./])config\.(?!md|py|json)((?:[a-z_0-9]+\.)*[a-z_0-9]+)", text):
        field = schema
        for name in dotted.split("."):
            if not hasattr(field, name):
                unknown.append(f"config.{dotted}")
                break
            field = getattr(field, name)
    for dotted in set(re.findall(r"`(nsa_jax(?:\.\w+)+)", text)):
        if not _exists(dotted):
            unknown.append(dotted)
    source = "".join(path.read_text() for path in (ROOT / "nsa_jax").rglob("*.py"))
    unknown += [rule for rule in set(re.findall(r"\bR\d{3}\b", text)) if f'"{rule}"' not in source]
    unknown += _commands_that_do_not_exist(text)
    assert not unknown


# Generated pages and measured figures


@pytest.mark.parametrize(
    "span",
    ["make tets", "python -m nsa_jax.genrate runs/a", "python trian.py", "--preflght", "python train.py --devces=8"],
)
def test_commands_in_the_text_that_do_not_exist_are_noticed(span):
    assert _commands_that_do_not_exist(f"Run `{span}` or `make test` or `--nodistributed`.") == [span]


def script(name: str) -> types.ModuleType:
    """A script of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_config_reference_is_up_to_date():
    reference = script("config_reference")
    assert all(reference.fields().values()), "every field of the config has a comment"
    assert (ROOT / "docs" / "config.md").read_text() == reference.page(), "run make docs"


def test_figures_of_attention_are_those_of_the_results():
    figures, rows = script("figures"), set()
    for path in figures.PAGES:
        text = path.read_text()
        assert text == figures.page(text), "run make docs"
        rows |= {row for row in figures.attention_rows() if f"\n| {row} |" in text}
    assert rows == set(figures.attention_rows())


def test_figures_of_training_are_those_of_the_results():
    rows = json.loads((ROOT / "benchmarks" / "results" / "train_h200.json").read_text())["rows"]
    measured = set()
    for row in rows:
        for memory in ("device_peak_gib", "planned_gib"):
            if row.get("mfu") and row.get(memory):
                measured.add(
                    (f"{round(row['tokens_per_second'], -3):,}", f"{100 * row['mfu']:.0f}", f"{row[memory]:.1f}")
                )
    found = set()
    for page in PAGES:
        text = " ".join(page.read_text().split())
        found.update(re.findall(r"([\d,]+) tokens(?: per second|/s), (\d+) % MFU, ([\d.]+) GiB", text))
    assert found and found <= measured
