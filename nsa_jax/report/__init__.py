"""Run reports: `python -m nsa_jax.report runs/quickstart` writes one HTML file about a run."""

from nsa_jax.report.page import build
from nsa_jax.report.reading import ReportError, read_run

__all__ = ["ReportError", "build", "read_run"]
