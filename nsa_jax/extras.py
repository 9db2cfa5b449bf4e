"""The extras of pyproject.toml: the operator needs few packages, and the other parts say which extra brings theirs."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from importlib import metadata
from typing import Any


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


class _Missing:
    """A finder of modules by which one package cannot be found in the thread that made it."""

    def __init__(self, package: str):
        self._package, self._thread = package, threading.get_ident()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == self._package and threading.get_ident() == self._thread:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@contextlib.contextmanager
def hidden(package: str) -> Iterator[None]:
    """Around imports of another package that imports `package` where it is installed, but does not need it.

    A package that has been imported already is not hidden, nor are imports in other threads.
    """
    finder: Any = _Missing(package)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def installed_version() -> str:
    """The version of the installed package; of one that is run from its sources, "0+source"."""
    try:
        return metadata.version("nsa_jax")
    except metadata.PackageNotFoundError:
        return "0+source"
