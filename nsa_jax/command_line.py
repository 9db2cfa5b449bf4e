"""What the programs are told: the config's file, the flags that override its fields, the workdir, numbers.

Every mistake in them becomes a `Problem` that says where it is. Overrides are taken out of the arguments before absl
sees them, so that all that are wrong can be reported at once.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import logging
import os
import re
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from ml_collections import ConfigDict

from nsa_jax.config import default_config
from nsa_jax.devices import choose_platform
from nsa_jax.extras import MissingExtra
from nsa_jax.fields import (
    ConfigError,
    Problem,
    default_of,
    expected,
    is_source_name,
    no_such_field,
    remote,
    walk,
    wrong_value,
)
from nsa_jax.object_store import SCHEMES, Folder, StoreError, scheme_of

EXIT_USAGE = 2
LARGEST = 2**31 - 1
OVERRIDE = "config.FIELD"  # the flag that overrides are turned into
_TRUE, _FALSE = ("true", "t", "1"), ("false", "f", "0")
_NO_VALUE = "\0"  # no argument of a process can hold it


def collect_overrides(argv: Sequence[str]) -> list[str]:
    """Turns every --config.train.steps=5 into --config.FIELD=train.steps=5.

    Args:
      argv: arguments, the program first.

    Returns:
      The same arguments with "--config.X V" and "--noconfig.X" written like that too.
    """
    defaults = dict(walk(default_config()))
    out, rest = [argv[0]], list(argv[1:])
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            return [*out, argument, *rest]
        match = re.fullmatch(r"--?(no)?config\.([^=]*)(?:=(.*))?", argument, re.DOTALL)
        if match is None or argument.startswith(f"--{OVERRIDE}="):  # the latter: the flag itself
            out.append(argument)
            continue
        negated, name, value = match.groups()
        if value is None and isinstance(defaults.get(name), bool):
            value = "false" if negated else "true"
        elif value is None:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else _NO_VALUE
        out.append(f"--{OVERRIDE}={name}={value}")
    return out


def _parse(text: str, default: Any) -> Any:
    """The value that a text means for a field with this default; the text itself if it means none."""
    try:
        if isinstance(default, bool):
            return text.lower() in _TRUE if text.lower() in (*_TRUE, *_FALSE) else text
        if isinstance(default, tuple):
            # One text without quotes is a tuple of it: --config.data.files=corpus/*.txt.
            value = ast.literal_eval(text) if text.startswith(("(", "[", "'", '"')) else (text,) if text else ()
            return tuple(value) if isinstance(value, (tuple, list)) else (value,)
        return type(default)(text)
    except Exception:  # literal_eval raises what the parser does, MemoryError and RecursionError too
        return text


def override(config: ConfigDict, overrides: Sequence[str]) -> list[Problem]:
    """Sets fields of a config.

    Args:
      config: changed where an override is right.
      overrides: such as "train.steps=5". A field of several texts that is named several times gets all of them; a whole
        tuple, "data.files=('a', 'b')", replaces what came before.

    Returns:
      What is wrong with the others.
    """
    defaults, problems, seen = dict(walk(default_config())), [], set()
    for text in overrides:
        name, _, value_text = text.partition("=")
        default = default_of(name, defaults)
        if default is None:
            problems.append(_not_a_field(name, defaults))
            continue
        if value_text == _NO_VALUE:
            problems.append(Problem("R057", "error", f"--config.{name}: no value", f"write --config.{name}=VALUE"))
            continue
        value = _parse(value_text, default)
        if must_be := expected(value, default):
            problems.append(wrong_value(name, value, must_be, default))
            continue
        *sections, last = name.split(".")
        target = config
        try:
            with contextlib.ExitStack() as stack:
                if name not in defaults:  # of a source, which the config's file need not name
                    stack.enter_context(config.unlocked())
                    stack.enter_context(config.ignore_type())
                    if sections[-1] not in config.data.sources:
                        config.data.sources[sections[-1]] = ConfigDict()
                for section in sections:
                    target = target[section]
                if isinstance(value, tuple) and name in seen and not value_text.startswith(("(", "[")):
                    value = target[last] + value
                target[last] = value
        except Exception:  # the file's get_config() made another structure, which is reported as such
            continue
        seen.add(name)
    return problems


def _not_a_field(name: str, known: dict[str, Any]) -> Problem:
    source = name.removeprefix("data.sources.")
    a_source = f"data.sources.{source if source != name and is_source_name(source) else 'NAME'}.weight"
    inside = [other for other in [*known, a_source] if other.startswith(f"{name}.")]
    if inside:
        return Problem("R056", "error", f"config.{name}: a section, not a field", f"set its fields: config.{inside[0]}")
    return no_such_field(name, known)


def load_config(path: str) -> ConfigDict:
    """The config that a file's get_config() returns.

    Args:
      path: of the file, or the name of a config that comes with the package, such as quickstart; what follows a colon
        is get_config's argument.

    Raises:
      ConfigError: naming the file and, if its code is at fault, the line.
    """
    name, colon, argument = path.partition(":")
    if re.fullmatch(r"\w{1,64}", name) and not os.path.lexists(name):
        name = _shipped(name)
    try:
        source = Path(name).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise _file_error(f"{name or repr(name)}: {reason}", "name a file such as configs/quickstart.py") from error
    module = types.ModuleType("config_of_the_run")
    module.__file__ = name
    sys.modules[module.__name__] = module  # where dataclasses look for the names of their annotations
    try:
        exec(compile(source, name, "exec"), module.__dict__)
        get_config = getattr(module, "get_config", None)
        if not callable(get_config):
            raise _file_error(f"{name}: no function get_config", "define get_config() that returns the config")
        config = get_config(*([argument] if colon else []))
    except ConfigError as error:
        if len(error.problems) == 1 and error.problems[0].rule == "R055":
            raise
        raise _file_error(*_what_happened(name, error)) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit() too: whatever ends the file's code is its mistake
        raise _file_error(*_what_happened(name, error)) from error
    if not isinstance(config, ConfigDict):
        kind = type(config).__name__
        raise _file_error(f"{name}: get_config() returned {kind}", "return what default_config() returned, edited")
    return ConfigDict(config)  # one that can be changed, whatever kind it was


def _shipped(name: str) -> str:
    """The file of a config that comes with the package: inside of it if installed, else beside it."""
    package = Path(__file__).parent
    folder = next((path for path in (package / "configs", package.parent / "configs") if path.is_dir()), package)
    path = folder / f"{name}.py"
    if not path.is_file():
        names = ", ".join(sorted(found.stem for found in folder.glob("*.py")))
        raise _file_error(f"{name}: no such file", f"name a file, or one of {names}")
    return str(path)


def _file_error(where: str, fix: str) -> ConfigError:
    return ConfigError([Problem("R055", "error", f"config file {where}", fix)])


def _what_happened(name: str, error: BaseException) -> tuple[str, str]:
    """Message and fix for an exception of the config's code: the last of the file's lines that took part."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == name]
    line, text = (frames[-1].lineno, frames[-1].line) if frames else (None, "")
    if isinstance(error, SyntaxError) and error.filename == name:
        line, text = error.lineno, error.text
    try:
        what = f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"
    except Exception:  # an exception of the file's own that cannot be shown
        what = type(error).__name__
    where = f"{name}, line {line}" if line else name
    code = f"`{' '.join(text.split())[:100]}`: " if text else ""
    return f"{where}: {code}{' '.join(what.split())[:300]}", "correct the file"


def workdir_problems(workdir: str | Path) -> list[Problem]:
    """R023: a workdir is a directory or an address of an object store, and can be written.

    Nothing is left behind: a temporary file is written into the directory, or into the first above it that exists, and
    into its checkpoints; an object below the address is written and deleted.
    """
    text = str(workdir)
    if not text.strip():
        return [Problem("R023", "error", "--workdir is empty", "name a directory, or leave it out for runs/NAME")]
    if scheme_of(text):
        try:
            Folder(text).check_writable()
        except StoreError as error:
            return [Problem("R023", "error", f"--workdir={error.what}", error.fix)]
        return []
    if (scheme := remote(text)) in SCHEMES:
        return [Problem("R023", "error", f"--workdir={text}: no bucket is named", f"write {scheme}BUCKET/PATH")]
    if scheme:
        message = f"--workdir={text}: {scheme} is not supported"
        return [Problem("R023", "error", message, f"use a directory, or an address of {' or '.join(SCHEMES)}")]
    try:
        directory = Path(workdir).absolute()
        for inside in (directory, directory / "checkpoints"):
            if _exists(inside) and not inside.is_dir():
                return [Problem("R023", "error", f"--workdir={text}: {inside} is a file", "name a directory")]
        for link in (directory / "checkpoints", directory, *directory.parents):
            if link.is_symlink() and not link.exists():
                message = f"--workdir={text}: {link} is a link to {os.readlink(link)}, which does not exist"
                return [Problem("R023", "error", message, "mount or create that, or name another directory")]
        existing = next(parent for parent in (directory, *directory.parents) if _exists(parent))
        for place in filter(_exists, (existing, directory / "checkpoints")):
            with tempfile.TemporaryFile(dir=place):
                pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        message = f"--workdir={text}: cannot be written ({reason})"
        return [Problem("R023", "error", message, "choose another --workdir, or correct its permissions")]
    return []


def _exists(path: Path) -> bool:
    """As Path.exists, but a path that cannot be (too long, with a null character) is an error in every Python."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def silence(stream: TextIO) -> None:
    """Lets what is still written to a stream go nowhere, with what Python flushes at the end."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def forgive(stream: TextIO) -> None:
    """Lets a stream write ? for characters that its encoding does not have: they must not end a program."""
    reconfigure: Any = getattr(stream, "reconfigure", None)
    if reconfigure and stream.errors in ("strict", "surrogateescape"):
        reconfigure(errors="replace")


def run_program(work: Callable[[], object]) -> int:
    """Runs a command line tool with its logging and platform set; a mistake of the user ends in one line.

    Args:
      work: what the tool does. The errors that name the user's mistakes (LoadError, DataError, ConfigError,
        CheckpointError, PromptError) are ValueErrors; these, OSErrors, NaN logits and missing packages are reported.

    Returns:
      The exit status: 0, or EXIT_USAGE if an error was reported on standard error.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as by >&-
            setattr(sys, name, open(os.devnull, "w"))
    forgive(sys.stdout)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("absl").setLevel(logging.ERROR)
    choose_platform()
    try:
        work()
    except (ValueError, OSError, FloatingPointError, MissingExtra) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    return 0


def number(kind: type, lowest: float, highest: float = LARGEST) -> Callable[[str], Any]:
    """For argparse: reads an int or float within bounds, so that a wrong one is refused before a model is loaded."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not lowest <= value <= highest:  # nan neither
            what = "whole number" if kind is int else "number"
            raise argparse.ArgumentTypeError(f"{text!r}: must be a {what} from {lowest:,} to {highest:,}")
        return value

    return read
