"""The page: one HTML file with the data, the charting library and the scripts that draw."""

from __future__ import annotations

import base64
import functools
import gzip
import html
import importlib.metadata
import importlib.util
import os
import re
import time
import urllib.parse
from pathlib import Path
from typing import Any

from nsa_jax.offline_page import embed, fill_template
from nsa_jax.report.reading import COLUMNS, POINTS, ReportError, flatten

_HERE = Path(__file__).parent
_SCRIPTS = ("charts.js", "sections.js", "curves.js", "details.js", "page.js")
# The part of the environment that is compared. The rest follows from it or differs between any two runs.
_COMPARED = (
    "devices.",
    "versions.",
    "git.",
    "mesh.",
    "implementations.",
    "kernels.",
    "parameters.total",
    "data.tokenizer",
)


def labels(runs: list[dict[str, Any]]) -> list[str]:
    """A short name for each run: the end of its path, as long as needed to make the names unique."""
    parts = [Path(run["path"]).parts for run in runs]
    depth = 1
    while depth < max(map(len, parts)) and len({part[-depth:] for part in parts}) < len(runs):
        depth += 1
    return ["/".join(part[-depth:]).replace("//", "/") for part in parts]


def differences(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fields of config and environment that differ between runs: {"name", "values" (None: missing)}."""
    found = []
    tables = [run["config"] for run in runs]
    environments = [flatten(run["environment"]) for run in runs]
    for prefix, group in (("config.", tables), ("", environments)):
        names: dict[str, None] = {name: None for table in group for name in table}
        for name in names:
            if not prefix and not name.startswith(_COMPARED):
                continue
            values = [table.get(name) for table in group]
            if any(value != values[0] for value in values):
                found.append({"name": prefix + name, "values": values})
    return found


@functools.cache
def _plotly() -> tuple[str, str]:
    """The charting library, gzip in base64, and its version line."""
    spec = importlib.util.find_spec("plotly")
    places = (spec.submodule_search_locations if spec else None) or []
    for place in places:
        path = Path(place) / "package_data" / "plotly.min.js"
        if path.is_file():
            code = path.read_bytes()
            version = re.search(rb"plotly\.js v[\w.-]+", code[:400])
            name = version.group().decode() if version else "plotly.js"
            return base64.b64encode(gzip.compress(code, 9, mtime=0)).decode(), name
    raise ReportError('the charting library is missing: pip install "nsa_jax[report]"')


def _version() -> str:
    try:
        return importlib.metadata.version("nsa_jax")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return ""


def _exploration(workdir: Path, folder: Path | None) -> str | None:
    """The address of a run's exploration page from a folder; None if there is no page."""
    page = workdir / "explore.html"
    if folder is None or not page.is_file():
        return None
    return urllib.parse.quote(Path(os.path.relpath(page, folder.resolve())).as_posix())


def build(runs: list[dict[str, Any]], folder: Path | None = None) -> str:
    """The page of some runs.

    Args:
      runs: as `read_run` returns them; at least one.
      folder: in which the page will lie; it links to the runs' exploration pages from there. None links to none.

    Returns:
      HTML that requests nothing from the network; its Content-Security-Policy forbids it.

    Raises:
      ReportError: the charting library is not installed.
    """
    named = [
        {**run, "label": label, "explore": _exploration(Path(run["path"]), folder)}
        for run, label in zip(runs, labels(runs), strict=True)
    ]
    library, library_name = _plotly()
    data = {
        "generated": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "version": _version(),
        "library": library_name,
        "points": POINTS,
        "columns": COLUMNS,
        "runs": named,
        "differences": differences(named) if len(named) > 1 else [],
    }
    title = named[0]["label"] if len(named) == 1 else f"{len(named)} runs"
    parts = {
        "title": html.escape(f"{title}: run report"),
        "style": (_HERE / "style.css").read_text(encoding="utf-8"),
        "library_name": html.escape(library_name),
        "library": library,
        "data": embed(data),
        "script": "\n".join((_HERE / name).read_text(encoding="utf-8") for name in _SCRIPTS),
    }
    return fill_template((_HERE / "page.html").read_text(encoding="utf-8"), parts)
