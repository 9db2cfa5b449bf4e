"""The structure of nsa_jax that CONTRIBUTING.md describes: floors, no circles of imports, sizes, who reads the target.

Everything is read from the source with `ast`; nothing of the library is imported. Each rule has a set of what still
breaks it. The sets are compared for equality: a mended place must leave its set, and nothing new may enter.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# The floors, ground first, as in CONTRIBUTING.md. A module belongs to the longest name that it begins with, and imports
# from its own floor and from lower ones.
FLOORS = {
    "ground": "ops.target ops.gpus ops.blocks fields extras object_store offline_page",
    "tiles": "ops.tiles ops.selected_tiles ops.decode_tiles ops.choices",
    "machines": "ops.kernels.triton ops.kernels.mosaic ops.kernels.sm90 ops.kernels.sm90_gather ops.kernels.sm90_rows "
    "ops.kernels.sm90_columns ops.kernels.sm90_products ops.kernels.sm90_reduce ops.kernels.sm90_warp "
    "ops.kernels.sm90_mlir ops.kernels.sm80 ops.kernels.readers ops.kernels.softmax",
    "kernels": "ops.kernels",
    "plan": "ops.plan",
    "ops": "ops",
    "settings": "config rules bounds command_line devices aot sampling exit_status batch_ramp stacks",
    "model and data": "nn data",
    "inspection": "inspect",
    "hub": "hub loading",
    "training": "train",
    "programs": "generate generator evaluate convert export inspect.__main__ report trainer cli doctor",
}
APART = [("nsa_jax.nn", "nsa_jax.data")]  # on one floor, and neither imports the other

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 120
MAX_PART_LINES = 60  # of each part of a longer function

# What still breaks a rule.
KNOWN_CIRCLES: set[tuple[str, ...]] = set()
KNOWN_UPWARD_IMPORTS: set[str] = set()
KNOWN_LONG_FILES: set[str] = set()
KNOWN_LONG_FUNCTIONS: set[str] = set()
KNOWN_TARGET_READS: set[str] = set()


def compare(found: set, known: set) -> None:
    """Equality of what breaks a rule with the set of what is known to break it."""
    new, mended = found - known, known - found
    assert not new, "against the rules of CONTRIBUTING.md: " + "; ".join(sorted(map(str, new)))
    assert not mended, "mended, so remove it from its KNOWN set: " + "; ".join(sorted(map(str, mended)))


# Imports


def modules(root: Path) -> dict[str, Path]:
    """Every module below a package's folder by its dotted name; a package is named as its folder."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = [root.name, *path.relative_to(root).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(root: Path) -> dict[str, set[str]]:
    """The modules of a package that each of its modules imports.

    Imports at module level, inside functions and under TYPE_CHECKING count alike, and so does
    `importlib.import_module` of a literal name. Importing a submodule does not count as importing its package.
    """
    known = modules(root)

    def resolve(name: str) -> str | None:
        while name and name not in known:
            name = name.rpartition(".")[0]
        return name or None

    def named(module: str, path: Path) -> Iterator[str]:
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                base = ".".join([*above, *([node.module] if node.module else [])])
                yield from (f"{base}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                if (getattr(node.func, "attr", None) or getattr(node.func, "id", None)) == "import_module":
                    yield str(node.args[0].value)

    return {
        module: {found for name in named(module, path) if (found := resolve(name)) and found != module}
        for module, path in known.items()
    }


def circles(graph: dict[str, set[str]]) -> set[tuple[str, ...]]:
    """Groups of modules that all reach each other, sorted."""

    def reached(start: str) -> set[str]:
        seen, waiting = set(), [start]
        while waiting:
            for following in graph[waiting.pop()] - seen:
                seen.add(following)
                waiting.append(following)
        return seen

    reach = {module: reached(module) for module in graph}
    in_circles = [module for module in graph if module in reach[module]]
    return {
        tuple(sorted(other for other in in_circles if other in reach[module] and module in reach[other]))
        for module in in_circles
    }


def floor(module: str) -> int | None:
    """The number of a module's floor, the ground being 0; the package itself, which exports names, is the top."""
    if module == "nsa_jax":
        return len(FLOORS)
    found, longest = None, 0
    for number, names in enumerate(FLOORS.values()):
        for name in names.split():
            if f"{module}.".startswith(f"nsa_jax.{name}.") and len(name) > longest:
                found, longest = number, len(name)
    return found


def write_package(root: Path, files: dict[str, str]) -> Path:
    """A made-up package."""
    for name, text in {"__init__.py": "", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


GRAPH = imports(ROOT / "nsa_jax")


def test_no_circles_of_imports():
    compare(circles(GRAPH), KNOWN_CIRCLES)


@pytest.mark.parametrize(
    "back",
    [
        "import made.a",
        "from made import a",
        "from . import a",
        "from .a import name",
        "def late():\n    from made.a import name",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from made.a import name",
        "import importlib\nimportlib.import_module('made.a')",
    ],
)
def test_a_circle_is_found_however_it_is_written(tmp_path, back):
    files = {"a.py": "from made.b import name", "b.py": back, "c.py": "from made import a, b"}
    assert circles(imports(write_package(tmp_path / "made", files))) == {("made.a", "made.b")}


def test_a_package_without_circles_has_none(tmp_path):
    files = {"a.py": "from made.sub.b import name\nimport jax", "sub/__init__.py": "", "sub/b.py": "from .. import c"}
    graph = imports(write_package(tmp_path / "made", files | {"c.py": "import os"}))
    assert graph["made.a"] == {"made.sub.b"} and graph["made.sub.b"] == {"made.c"}
    assert circles(graph) == set()


def test_every_module_has_a_floor():
    assert not [module for module in GRAPH if floor(module) is None], "name it in FLOORS and in CONTRIBUTING.md"


def test_imports_go_down():
    upward = {
        f"{module} -> {other}"
        for module, others in GRAPH.items()
        for other in others
        if floor(other) is not None and floor(module) is not None and floor(other) > floor(module)
    }
    apart = {
        f"{module} -> {other}"
        for pair in APART
        for here, there in (pair, pair[::-1])
        for module, others in GRAPH.items()
        for other in others
        if f"{module}.".startswith(f"{here}.") and f"{other}.".startswith(f"{there}.")
    }
    compare(upward | apart, KNOWN_UPWARD_IMPORTS)


def test_contributing_names_the_same_floors():
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines()
        if line.startswith("| ") and line.count("|") == 4
    ]
    table = {row[0]: row[1].replace("`", "").replace(",", "") for row in rows if row[0] in FLOORS}
    assert table == FLOORS
    assert list(table) == list(FLOORS)[::-1], "the page shows the top floor first"


# Sizes


Function = ast.FunctionDef | ast.AsyncFunctionDef


def _length(function: Function) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def _nested(function: ast.AST) -> Iterator[Function]:
    """The functions that lie in a function, without those that lie in them."""
    for node in ast.iter_child_nodes(function):
        if isinstance(node, Function):
            yield node
        else:
            yield from _nested(node)


def long_parts(function: Function, depth: int = 0) -> Iterator[str]:
    """The parts of a function that are over MAX_PART_LINES long.

    The function and the functions directly in it, such as a Pallas kernel's body, are as long as what they hold: only
    their own lines count. A function that is nested deeper counts as a whole.
    """
    inner = list(_nested(function))
    if _length(function) - (depth < 2) * sum(map(_length, inner)) > MAX_PART_LINES:
        yield function.name
    for part in inner:
        yield from long_parts(part, depth + 1)


def outer_functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Functions and methods that do not lie in another function, with their names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield f"{prefix}{node.name}", node
        else:
            yield from outer_functions(node, f"{prefix}{node.name}." if isinstance(node, ast.ClassDef) else prefix)


def test_files_of_the_operator_can_be_read_in_a_sitting():
    lines = {path: path.read_text().count("\n") for path in (ROOT / "nsa_jax" / "ops").rglob("*.py")}
    long = {str(path.relative_to(ROOT)) for path, count in lines.items() if count > MAX_FILE_LINES}
    compare(long, KNOWN_LONG_FILES)


def test_long_functions_of_the_operator_are_cut_into_parts():
    long = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in (ROOT / "nsa_jax" / "ops").rglob("*.py")
        for name, function in outer_functions(ast.parse(path.read_text()))
        if _length(function) > MAX_FUNCTION_LINES and any(long_parts(function))
    }
    compare(long, KNOWN_LONG_FUNCTIONS)


@pytest.mark.parametrize(
    ("lines", "long"),
    [
        ({"f": 61}, ["f"]),
        ({"f": 60, "kernel": 60, "step": 60, "multiply": 5}, ["step"]),  # with multiply it has 65
        ({"f": 60, "kernel": 60, "step": 55, "multiply": 5}, []),
        ({"f": 5, "kernel": 61, "step": 5}, ["kernel"]),
    ],
)
def test_long_parts_are_found(lines, long):
    """Functions in each other with so many lines of their own."""
    text = "".join(
        f"{'    ' * depth}def {name}():\n" + f"{'    ' * (depth + 1)}x = 1\n" * (count - 1)
        for depth, (name, count) in enumerate(lines.items())
    )
    ((_, function),) = outer_functions(ast.parse(text))
    assert list(long_parts(function)) == long


# The target


def target_reads(path: Path) -> set[str]:
    """The outer functions of a file that read the target, and "module level" for what lies in none."""
    tree = ast.parse(path.read_text())

    def reads(node: ast.AST) -> int:
        return sum(
            isinstance(inner, ast.Name | ast.Attribute)
            and (getattr(inner, "id", None) or getattr(inner, "attr", None)) == "current_target"
            for inner in ast.walk(node)
        )

    found = {name for name, function in outer_functions(tree) if reads(function)}
    if reads(tree) > sum(reads(function) for _, function in outer_functions(tree)):
        found.add("module level")
    return found


def test_kernels_do_not_ask_for_the_target():
    """A kernel takes its part of the plan; only Triton's calls ask whether they are to be interpreted."""
    folder = ROOT / "nsa_jax" / "ops" / "kernels"
    found = {f"{path.relative_to(folder)}: {name}" for path in folder.rglob("*.py") for name in target_reads(path)}
    assert "triton.py: interpreted" in found, "the finder sees the read that is allowed"
    compare(found - {"triton.py: interpreted"}, KNOWN_TARGET_READS)


def test_reads_of_the_target_are_found(tmp_path):
    path = tmp_path / "kernel.py"
    path.write_text(
        "from nsa_jax.ops import target\nfrom nsa_jax.ops.target import current_target\n"
        "HOPPER = current_target().is_hopper\n"
        "def one():\n    return target.current_target()\n"
        "class Two:\n    def method(self):\n        return lambda: current_target()\n"
        "def three(target):\n    return target.is_gpu\n"
    )
    assert target_reads(path) == {"module level", "one", "Two.method"}


# What imports bring with them


def test_importing_the_library_imports_no_trainer():
    """The operator alone needs JAX: `import nsa_jax` must not pay for modules, optimizers, checkpoints and data."""
    program = "import json, sys, nsa_jax; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    imported = set(json.loads(done.stdout))
    assert "jax" in imported
    assert not imported & {"flax", "optax", "orbax", "grain", "ml_collections", "datasets"}


def test_the_trainer_starts_without_pytorch_where_it_is_installed(tmp_path):
    """tensorboardX imports it where it can: three seconds of every start."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('PyTorch was imported')")
    program = "import sys, nsa_jax.train.loop; print('torch' in sys.modules)"
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr
