"""Problems of a config, and what every field must be: there, of its default's type, and a number where one is due."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Iterator
from typing import Any

from ml_collections import ConfigDict

# What an entry of config.data.sources may set, besides its weight; it takes the others from config.data.
SOURCE_FIELDS = (
    *("source", "files", "text_separator", "max_documents", "tree_characters"),
    *("tasks", "task_length", "task_answers_only", "task_answer_weight"),
    *("hf_path", "hf_name", "hf_data_files", "hf_split", "hf_text_field", "hf_tokens_field", "hf_streaming"),
    *("val_files", "hf_val_split"),
)
_SOURCE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # part of the names of metrics
_LARGEST_INT = 2**31 - 1  # steps and token ids are int32
_LARGEST_FLOAT = 3.4e38  # float32


@dataclasses.dataclass(frozen=True)
class Problem:
    """One finding about a config.

    Attributes:
      rule: stable id such as "R012"; `config.preflight.ignore` names it.
      severity: "error" (refuses to run), "warning", or "ignored" (an error that the config accepts).
      message: the field, its value and what is wrong.
      fix: what to change.
    """

    rule: str
    severity: str
    message: str
    fix: str

    def __str__(self) -> str:
        return f"{self.rule} {self.severity}: {self.message}. Fix: {self.fix}"


class Findings:
    """Collects problems while rules run."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def error(self, rule: str, message: str, fix: str) -> None:
        self.problems.append(Problem(rule, "error", message, fix))

    def warning(self, rule: str, message: str, fix: str) -> None:
        self.problems.append(Problem(rule, "warning", message, fix))


class ConfigError(ValueError):
    """Raised with every error that was found; `problems` holds them."""

    def __init__(self, problems: list[Problem]):
        self.problems = problems
        separator = " " if len(problems) == 1 else "\n  "
        super().__init__(separator.join(["the config cannot run:", *map(str, problems)]))


def walk(config: ConfigDict, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every field, such as "model.dim", with its value."""
    for name, value in config.items():
        if isinstance(value, ConfigDict):
            yield from walk(value, f"{path}{name}.")
        else:
            yield path + name, value


def is_source_name(name: Any) -> bool:
    """Whether one of `config.data.sources` can be called so."""
    return isinstance(name, str) and _SOURCE_NAME.fullmatch(name) is not None


def default_of(name: str, defaults: dict[str, Any]) -> Any:
    """The default of a field such as "model.dim" or "data.sources.web.weight"; None if there is no such field."""
    source, _, field = name.removeprefix("data.sources.").partition(".")
    if name.startswith("data.sources.") and is_source_name(source):
        return _source_defaults(defaults).get(field)
    return defaults.get(name)


def _source_defaults(defaults: dict[str, Any]) -> dict[str, Any]:
    return {"weight": 1.0, **{field: defaults[f"data.{field}"] for field in SOURCE_FIELDS}}


def source_configs(config: ConfigDict) -> dict[str, ConfigDict]:
    """The config of each of `config.data.sources` as if it were the only one, in the order of their names.

    Without such sources: the config itself, under an empty name.
    """
    if not config.data.sources:
        return {"": config}
    found = {}
    for name in sorted(config.data.sources):
        found[name] = alone = config.copy_and_resolve_references()
        with alone.unlocked(), alone.ignore_type():
            fields = alone.data.sources[name]
            alone.data.sources = ConfigDict()
            alone.data.update({field: fields[field] for field in SOURCE_FIELDS if field in fields})
    return found


def nearest(name: str, names: Iterable[str]) -> str:
    """The one of `names` that a name which does not exist most likely means; empty if none is near."""
    known, last = list(names), name.rpartition(".")[2]
    # A field that is named without its section, or in the wrong one.
    same = [other for other in known if other.rpartition(".")[2] == last]
    found = difflib.get_close_matches(name, same, 1, 0.0) or difflib.get_close_matches(name, known, 1, 0.6)
    return found[0] if found else ""


def no_such_field(name: str, known: Iterable[str]) -> Problem:
    """The error about a field, such as "trian.steps", that is none of those known."""
    meant = nearest(name, known)
    fix = f"did you mean config.{meant}? " if meant else ""
    return Problem("R056", "error", f"config.{name}: no such field", f"{fix}docs/config.md lists all fields")


def expected(value: Any, default: Any) -> str:
    """What a field with this default must be, if `value` is not that; otherwise empty."""
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "True or False"
    if isinstance(default, int):
        right = isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _LARGEST_INT
        return "" if right else f"a whole number up to {_LARGEST_INT:,}"
    if isinstance(default, float):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return "" if number and abs(value) <= _LARGEST_FLOAT else "a finite number"  # nan is not <= anything
    if isinstance(default, str):
        return "" if _is_text(value) else "text"
    right = isinstance(value, tuple) and all(map(_is_text, value))
    return "" if right else 'a tuple of text, such as ("a.txt", "b.txt")'


def _is_text(value: Any) -> bool:
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:  # half a surrogate pair, or bytes of the command line that are no UTF-8
        return False


def remote(path: str) -> str:
    """The scheme of an address such as gs://bucket/run, also after `Path` has removed a slash; empty for a path."""
    match = re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", path)
    return f"{match[0]}/" if match else ""


def shown(value: Any) -> str:
    """A value in a message: its repr, not longer than a line."""
    try:
        text = ascii(value)
    except Exception:  # whatever a class of the user's raises; Python itself refuses integers of thousands of digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 80 else f"{text[:77]}..."


def wrong_value(name: str, value: Any, must_be: str, default: Any) -> Problem:
    """The error about a value that `expected` refuses: a number that is none, or something else altogether."""
    if type(default) in (int, float) and type(value) in (int, type(default)):
        return Problem("R003", "error", f"config.{name}={shown(value)}: out of range", f"use {must_be}")
    message = f"config.{name}={shown(value)}: must be {must_be}"
    return Problem("R057", "error", message, f"use one, such as the default, {default!r}")


def _value(config: ConfigDict, name: str) -> Any:
    """A field's value, or what is raised where a placeholder was not filled or a reference cannot be computed."""
    try:
        return config[name]
    except Exception as error:
        return error


def check_fields(config: ConfigDict, schema: ConfigDict) -> tuple[ConfigDict, list[Problem], set[str]]:
    """Compares the fields of a config, whoever made it, with those of the schema.

    Args:
      config: to be checked; it is not changed.
      schema: every field with its default; it becomes the copy that is returned.

    Returns:
      A copy of the config in which whatever is missing or of another type has its default, the problems, and the names
      of those fields (without section).
    """
    problems, replaced = [], set()
    defaults = dict(walk(schema))

    def check_sources(sources: ConfigDict) -> ConfigDict:
        clean = ConfigDict()
        for name in sources:
            path, fields = f"data.sources.{name}", _value(sources, name)
            if not is_source_name(name) or not isinstance(fields, ConfigDict):
                message = f"config.{path}={shown(fields)}: must be a name of letters, digits, _ and - with fields"
                fix = 'write such as {"web": {"source": "text", "files": ("web/*.txt",), "weight": 0.7}}'
                problems.append(Problem("R057", "error", message, fix))
                continue
            clean[name] = ConfigDict()
            for field in fields:
                value, default = _value(fields, field), default_of(f"{path}.{field}", defaults)
                if default is None:
                    message = f"config.{path}.{field}: no field of a source"
                    fix = f"use {', '.join(_source_defaults(defaults))}; all others are the same for all sources"
                    problems.append(Problem("R056", "error", message, fix))
                elif must_be := expected(value, default):
                    problems.append(wrong_value(f"{path}.{field}", value, must_be, default))
                else:
                    clean[name][field] = value
        return clean

    def check(config: ConfigDict, clean: ConfigDict, path: str) -> None:
        for name in sorted(map(str, set(config.keys()) - set(clean.keys()))):
            problems.append(no_such_field(f"{path}{name}", defaults))
        for name, default in list(clean.items()):
            fields = set(default) if isinstance(default, ConfigDict) else {name}
            if name not in config:
                message = f"config.{path}{name}: missing"
                problems.append(Problem("R056", "error", message, "begin with nsa_jax.config.default_config()"))
                replaced.update(fields)
                continue
            value = _value(config, name)
            if isinstance(value, ConfigDict) and path + name == "data.sources":
                clean[name] = check_sources(value)
            elif isinstance(value, ConfigDict) and isinstance(default, ConfigDict):
                check(value, default, f"{path}{name}.")
            elif isinstance(default, ConfigDict):
                message = f"config.{path}{name}={shown(value)}: is a section, not a value"
                problems.append(Problem("R057", "error", message, "set the section's fields one by one"))
                replaced.update(fields)
            elif must_be := expected(value, default):
                problems.append(wrong_value(path + name, value, must_be, default))
                replaced.update(fields)
            else:
                clean[name] = value

    check(config, schema, "")
    return schema, problems, replaced
