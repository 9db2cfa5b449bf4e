"""The notebooks: both files of each agree, and all run from top to bottom."""

import importlib.util
import sys
from pathlib import Path

import jax
import nbformat
import pytest

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
_SPEC = importlib.util.spec_from_file_location("notebooks_build", NOTEBOOKS / "build.py")
assert _SPEC is not None and _SPEC.loader is not None
build = importlib.util.module_from_spec(_SPEC)
sys.modules["notebooks_build"] = build
_SPEC.loader.exec_module(build)


@pytest.mark.parametrize("name", build.names())
def test_both_files_of_a_notebook_agree(name):
    kept = (NOTEBOOKS / f"{name}.ipynb").read_text()
    assert kept == build.convert(name), f"run: python notebooks/build.py sync {name}"
    cells = nbformat.reads(kept, as_version=4).cells
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells), "outputs are not kept"


def test_every_notebook_has_both_files():
    assert [path.stem for path in sorted(NOTEBOOKS.glob("*.ipynb"))] == build.names()
    assert [name[:2] for name in build.names()] == ["01", "02", "03", "04"]


@pytest.mark.notebook
@pytest.mark.slow
@pytest.mark.parametrize("name", build.names())
def test_a_notebook_runs_and_says_what_to_see_in_its_figures(name, monkeypatch, tmp_path):
    monkeypatch.delenv("XLA_FLAGS")  # the tests' eight virtual devices
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", jax.config.jax_compilation_cache_dir)
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    monkeypatch.setenv("NSA_JAX_NOTEBOOK_STEPS", "0.2")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    build.run(name)
    cells = nbformat.read(build.OUTPUT / f"{name}.ipynb", as_version=4).cells
    seen = 0
    for cell in cells:
        shown = [output.get("data", {}) for output in cell.get("outputs", [])]
        text = "\n".join(data.get("text/markdown", "") for data in shown)
        if any("image/png" in data or "text/html" in data for data in shown):
            assert "**See:**" in text, f"a figure without a word:\n{cell.source}"
            seen += 1
        assert "nan" not in text.split() and "{" not in text, text
    assert seen >= 4
