"""Writes docs/config.md from the code: python docs/config_reference.py

Fields, defaults and comments are those of nsa_jax/config.py; rules are found where the code reports them.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import re
import textwrap
import tokenize
from collections.abc import Iterator
from pathlib import Path

from ml_collections import ConfigDict

from nsa_jax import bounds as bounds_lib
from nsa_jax import config as config_lib
from nsa_jax.ops.rope import RopeScaling

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "config.md"

_TITLES = {
    "": "The run",
    "model": "Model",
    "model.nsa": "Sparse attention",
    "model.rope_scaling": "RoPE for longer rows",
    "data": "Data",
    "train": "Training",
    "optim": "Optimizer",
    "optim.learning_rate_factor": "Learning rates of groups of parameters",
    "optim.weight_decay_factor": "Weight decay of groups of parameters",
    "mesh": "Devices",
    "preflight": "Preflight",
    "guards": "Guards",
}

# Whose fields are those of a dataclass.
_DATACLASSES: dict[str, type] = {
    "model.nsa": config_lib.NSAConfig,
    "model.rope_scaling": RopeScaling,
    "optim.learning_rate_factor": config_lib.GroupFactors,
    "optim.weight_decay_factor": config_lib.GroupFactors,
}

_GEOMETRY = {f"model.nsa.{field.name}" for field in dataclasses.fields(config_lib.NSAConfig)}

_HEAD = """\
# Configuration reference

Generated from [nsa_jax/config.py](../nsa_jax/config.py) by `make docs`; a test fails when it is stale.

A config is a Python file like those in [configs](../configs):

```python
from nsa_jax.config import check, default_config


def get_config():
    c = default_config()  # locked: a field that does not exist raises
    c.name = "mine"
    c.model.num_layers = 24
    c.data.source, c.data.files = "text", ("corpus/*.txt",)
    c.data.seq_len = 8192
    return c


check(get_config())  # raises with all problems at once; train.py does this
```

A field has the type of its default; numbers are finite, and whole ones at most 2,147,483,647. On the command line any
field can be set:

```bash
python train.py --config=configs/quickstart.py --config.train.steps=1000 --config.model.nsa.window=32
python train.py --config=configs/a100_prod.py --config.data.source=text --config.data.files="('corpus/*.txt',)"
```

The last value counts. A field of several texts gets one more each time it is given one, such as
`--config.data.files=a.txt --config.data.files=b.txt`; a whole tuple replaces what came before.
"""

_RULES = """
## Rules

What is checked before a run, and where. An error refuses to start with status 2;
`config.preflight.ignore = ("R013",)` accepts the errors of a rule, and env.json records it. No run could follow these,
which cannot be ignored: FATAL.
A message shows the value where this table shows `…`.

| rule | severity | what it says |
|---|---|---|
"""


def _comments(source: str) -> dict[int, str]:
    """Comment of each line."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}


def fields() -> dict[str, str]:
    """Every field of the schema, such as "model.dim", with its comment ("" if it has none), in source order."""
    source = textwrap.dedent(inspect.getsource(config_lib.default_config))
    comments, found, alias = _comments(source), {}, {"c": ""}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Assign):
            continue
        target = node.targets[0]
        if not (isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name)):
            continue
        name = f"{alias[target.value.id]}{target.attr}"
        if len(node.targets) == 2 and isinstance(node.targets[1], ast.Name):
            alias[node.targets[1].id] = f"{name}."
        if name in _DATACLASSES:
            found.update({f"{name}.{field}": text for field, text in _attributes(_DATACLASSES[name]).items()})
        elif len(node.targets) == 1:
            found[name] = comments.get(node.end_lineno or 0) or comments.get(node.value.end_lineno or 0, "")
    return found


def _attributes(cls: type) -> dict[str, str]:
    """The Attributes section of a dataclass's docstring."""
    section = (inspect.getdoc(cls) or "").split("Attributes:\n")[1].split("\n\n")[0]
    pairs = re.findall(r"^  (\w+): (.*(?:\n    .*)*)", section, re.MULTILINE)
    texts = {name: " ".join(text.split()) for name, text in pairs}
    return {field.name: texts.get(field.name, "") for field in dataclasses.fields(cls)}


def defaults() -> dict[str, object]:
    """Every field of the schema with its default."""

    def walk(config: ConfigDict, path: str) -> Iterator[tuple[str, object]]:
        for name, value in config.items():
            if isinstance(value, ConfigDict) and value:
                yield from walk(value, f"{path}{name}.")
            else:
                yield path + name, value

    return dict(walk(config_lib.default_config(), ""))


def _allowed(name: str, comment: str) -> str:
    if name in config_lib.CHOICES:
        if all(choice in comment for choice in config_lib.CHOICES[name]):
            return ""  # the comment says what each is
        return ", ".join(f"`{choice!r}`" for choice in config_lib.CHOICES[name])
    bounds = [f"≥ {lowest}" for lowest, names in bounds_lib.AT_LEAST.items() if name in names.split()]
    if name in bounds_lib.RANGES:
        low, low_included, high, high_included = bounds_lib.RANGES[name]
        if high != float("inf"):
            return f"{'[' if low_included else '('}{low:g}, {high:g}{']' if high_included else ')'}"
        bounds.append(f"{'≥' if low_included else '>'} {low:g}")
    if name in _GEOMETRY:
        bounds.append("> 0")
    bounds += [f"≤ {highest:_}" for highest, names in bounds_lib.AT_MOST.items() if name in names.split()]
    return ", ".join(bounds)


def _default(value: object) -> str:
    if isinstance(value, ConfigDict):
        return "`{}`"
    return f"`{value:_}`" if isinstance(value, int) and not isinstance(value, bool) else f"`{value!r}`"


class _Rules(ast.NodeVisitor):
    """Finds `found.error("R001", message, fix)`, `Problem("R001", "error", message, fix)` and their warnings."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, str]] = []
        self._messages: dict[str, ast.expr] = {}  # what names were last assigned

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        if isinstance(node.targets[0], ast.Name):
            self._messages[node.targets[0].id] = node.value

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if function not in ("error", "warning", "Problem") or not node.args:
            return
        rule = node.args[0]
        if not (isinstance(rule, ast.Constant) and re.fullmatch(r"R\d{3}", str(rule.value))):
            return
        severities, message = [function], node.args[1]
        if function == "Problem":
            severities, message = self._severities(node.args[1]), node.args[2]
        self.rows.append((rule.value, " or ".join(severities), self._text(message)))

    def _severities(self, node: ast.expr) -> list[str]:
        if isinstance(node, ast.Name):
            node = self._messages[node.id]
        names = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
        return sorted(names & {"error", "warning"})

    def _text(self, node: ast.expr) -> str:
        if isinstance(node, ast.Name) and node.id in self._messages:
            return self._text(self._messages[node.id])
        if isinstance(node, ast.Constant):
            return str(node.value)
        if isinstance(node, ast.JoinedStr):
            return "".join(self._text(part) for part in node.values)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self._text(node.left) + self._text(node.right)
        return "…"


def rules() -> list[tuple[str, str, str]]:
    """(id, severity, message with … for values) of everything that the code can report."""
    rows = set()
    for path in sorted((ROOT / "nsa_jax").rglob("*.py")):
        visitor = _Rules()
        visitor.visit(ast.parse(path.read_text()))
        rows |= set(visitor.rows)
    return sorted(rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def page() -> str:
    """What docs/config.md must hold."""
    lines = [_HEAD]
    comments, values = fields(), defaults()
    if set(comments) != set(values):
        raise ValueError(f"config.py: fields without an assignment of their own: {set(comments) ^ set(values)}")
    for section in dict.fromkeys(name.rpartition(".")[0] for name in comments):
        title = _TITLES.get(section, section.capitalize())
        lines.append(f"## {title}\n\n| field | default | allowed | meaning |\n|---|---|---|---|")
        for name, comment in comments.items():
            if name.rpartition(".")[0] == section:
                cells = f"`config.{name}`", _default(values[name]), _allowed(name, comment), _cell(comment.rstrip("."))
                lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    head = _RULES.replace("FATAL", ", ".join(sorted(config_lib.FATAL)))
    rows = [f"| {rule} | {severity} | {_cell(text)} |" for rule, severity, text in rules()]
    return "\n".join(lines).rstrip() + "\n" + head + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
