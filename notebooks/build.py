"""Keeps the notebooks' two files in step, and executes them.

    python notebooks/build.py sync           # NAME.py -> NAME.ipynb without outputs, after an edit of NAME.py
    python notebooks/build.py run [NAME …]   # executes; the notebooks with their outputs go to build/notebooks/

NAME.py is the source: cells in percent format, good to edit, review and diff. NAME.ipynb is the same for those who
open notebooks in a browser. An edit made in Jupyter goes back with `jupytext --to py:percent notebooks/NAME.ipynb`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
OUTPUT = HERE.parent / "build" / "notebooks"
CELL_SECONDS = 600


def names() -> list[str]:
    """All notebooks, in order."""
    return sorted(path.stem for path in HERE.glob("[0-9]*.py"))


def convert(name: str) -> str:
    """NAME.ipynb as it must be: made from NAME.py, without outputs, the same at every call."""
    notebook = jupytext.read(HERE / f"{name}.py", fmt="py:percent")
    for index, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{index}"
        cell["metadata"] = {}
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    nbformat.validate(notebook)
    return nbformat.writes(notebook) + "\n"


def run(name: str) -> float:
    """Executes a notebook from top to bottom in a process of its own; returns the seconds that it took.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell raised; the message has the cell and the traceback.
    """
    notebook = nbformat.reads(convert(name), as_version=4)
    OUTPUT.mkdir(parents=True, exist_ok=True)
    # The package need not be installed, and `configs` never is.
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    client = NotebookClient(notebook, timeout=CELL_SECONDS, resources={"metadata": {"path": str(HERE)}})
    begin = time.perf_counter()
    try:
        client.execute(env={**os.environ, "PYTHONPATH": path})
    finally:
        nbformat.write(notebook, OUTPUT / f"{name}.ipynb")
    return time.perf_counter() - begin


def main(argv: Sequence[str] | None = None) -> int:
    """The command line tool; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("sync", "run"))
    parser.add_argument("names", nargs="*", help="default: all")
    args = parser.parse_args(argv)
    for name in args.names or names():
        if args.command == "sync":
            (HERE / f"{name}.ipynb").write_text(convert(name))
        else:
            print(f"{name}: {run(name):.1f} s, {(OUTPUT / name).relative_to(HERE.parent)}.ipynb", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
