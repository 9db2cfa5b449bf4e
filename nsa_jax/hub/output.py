"""Directories for results. An export's: what it may replace, and how it replaces an earlier export as a whole."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from nsa_jax.fields import remote
from nsa_jax.hub.export_files import CHECKSUMS, INDEX, MODEL_TYPE, WHOLE, LoadError, read_json
from nsa_jax.hub.native_nsa import SOURCES

logger = logging.getLogger("nsa_jax")

# With which the README.md of an export for transformers begins.
CARD = "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- nsa_jax\n---\n\n"
_UNFINISHED = ".unfinished-export"  # files are written here first
_RUN = ("checkpoints", "env.json")  # what tells a run's workdir
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
# What is read of a tokenizer. Exports write the first two; transformers, which may save over one, writes others too.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
# Files of an export that a reader would take for part of the next one.
_STALE = ("generation_config.json", *TOKENIZER_FILES, *SOURCES)


def _is_card(path: Path) -> bool:
    """Whether a file is the README.md that an earlier export wrote."""
    with contextlib.suppress(OSError):
        return path.name == "README.md" and path.read_text(errors="replace").startswith(CARD)
    return False


def _is_export(path: Path) -> bool:
    """Whether a directory holds what an export wrote: its config.json says so, or its weights have checksums."""
    with contextlib.suppress(LoadError):
        if read_json(path, "config.json").get("model_type") == MODEL_TYPE:
            return True
    weights = sorted(name for name in os.listdir(path) if name == WHOLE or _SHARD.fullmatch(name))
    with contextlib.suppress(SafetensorError, OSError):
        for name in weights[:1]:
            with safe_open(path / name, framework="np") as file:
                return CHECKSUMS in (file.metadata() or {})
    return False


def check_writable(directory: str | os.PathLike, fix: str) -> Path:
    """Refuses a directory that cannot be written, before anything is computed for it.

    Args:
      directory: that will be written, and created if needed.
      fix: what to do instead, the end of the message.

    Returns:
      The directory, or the first above it that exists: a temporary file was written there.

    Raises:
      OSError: naming the directory.
    """
    path = Path(directory).absolute()
    existing = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    if not existing.is_dir():
        raise OSError(f"{directory}: {existing} is no directory; {fix}")
    try:
        with tempfile.TemporaryFile(dir=existing):
            return existing
    except OSError as error:
        raise OSError(f"{directory}: {existing} cannot be written ({error.strerror}); {fix}") from error


def check_output(directory: str | os.PathLike, overwrite: bool = False) -> None:
    """Checks that an export may be written into a directory, before a model is read for it.

    It may be new, empty, or hold an earlier export, which is replaced, but for a README.md that no export wrote.

    Args:
      directory: to be written.
      overwrite: it may hold anything but a run; files of an export's names are replaced there, and others stay.

    Raises:
      LoadError: it cannot be written, or holds something else.
    """
    path = Path(directory).absolute()
    if remote(os.fspath(directory)):
        raise LoadError(f"{directory}: exports are written to directories alone; name one, and copy it from there")
    try:
        existing = check_writable(directory, "name a directory to write, or correct its permissions")
    except OSError as error:
        raise LoadError(str(error)) from error
    if existing != path:
        return
    if run := [name for name in _RUN if os.path.lexists(path / name)]:
        raise LoadError(f"{directory}: holds a run ({', '.join(run)}); name another directory to write")
    held = sorted(set(os.listdir(path)) - {_UNFINISHED})
    if held and not overwrite and not _is_export(path):
        shown = ", ".join(held[:3]) + (f" and {len(held) - 3} more" if len(held) > 3 else "")
        raise LoadError(
            f"{directory}: holds {shown}, and no earlier export. Fix: name another directory to write, or replace the "
            "model that is there with --overwrite"
        )


@contextlib.contextmanager
def whole_export(directory: str | os.PathLike, overwrite: bool = False) -> Iterator[Path]:
    """A folder for the files of an export, which move to their places when all are written.

    Until then an earlier export stays as it is, also where the program is killed.

    Args:
      directory: of the export, see `check_output`; created if needed.
      overwrite: see `check_output`.

    Yields:
      The folder, empty.

    Raises:
      LoadError: as `check_output`.
    """
    check_output(directory, overwrite)
    path, new = Path(directory), not os.path.lexists(directory)
    unfinished = path / _UNFINISHED
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        # config.json is removed first and comes last: an export that is cut short here is not taken for a whole one.
        (path / "config.json").unlink(missing_ok=True)
        for name in os.listdir(path):
            if name in (WHOLE, INDEX, *_STALE) or _SHARD.fullmatch(name) or _is_card(path / name):
                (path / name).unlink()
        # Weights go first: by their checksums what is there is known as an export if this is cut short.
        names = sorted(os.listdir(unfinished))
        if "README.md" in names and os.path.lexists(path / "README.md") and not overwrite:  # the cards are gone by now
            logger.warning("%s: is no export's and stays as it is; --overwrite replaces it", path / "README.md")
            names.remove("README.md")
        for name in sorted(names, key=lambda name: (name == "config.json", "safetensors" not in name)):
            os.replace(unfinished / name, path / name)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        if new:
            with contextlib.suppress(OSError):  # it is empty where the export failed
                path.rmdir()
