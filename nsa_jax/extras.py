"""The extras of pyproject.toml: the operator needs few packages, and the other parts say which extra brings theirs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from importlib import metadata


class MissingExtra(ImportError):
    """A part of the library needs a package that is not installed; the message says how to install it."""


@contextlib.contextmanager
def extra(name: str) -> Iterator[None]:
    """Around imports of a part of the library: a package that is missing there belongs to this extra.

    Raises:
      MissingExtra: naming the package and the extra.
    """
    try:
        yield
    except (ModuleNotFoundError, MissingExtra) as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "nsa_jax"):
            raise
        message = f'the package {package} is not installed: pip install "nsa_jax[{name}]"'
        raise MissingExtra(message, name=error.name) from error


@contextlib.contextmanager
def hidden(package: str) -> Iterator[None]:
    """Around imports of another package that imports `package` where it is installed, but does not need it.

    A package that has been imported already is not hidden.
    """
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]


def installed_version() -> str:
    """The version of the installed package; of one that is run from its sources, "0+source"."""
    try:
        return metadata.version("nsa_jax")
    except metadata.PackageNotFoundError:
        return "0+source"
