"""Finished caches in an object store, where config.data.cache_dir is s3://BUCKET/PATH or gs://BUCKET/PATH.

Caches are made and read in a local directory, because their files are locked and read in place. ADDRESS/NAME/ holds the
files of the local directory NAME. The file that completes such a directory is uploaded last and deleted first; without
it, the others do not count. Hosts that share no file system, and later runs, download what one host has made.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

import filelock

from nsa_jax.data.errors import DataError
from nsa_jax.object_store import Folder, StoreError

_THREADS = 4  # files at a time

logger = logging.getLogger(__name__)


def fetch(address: str, directory: Path, last: str, load: Callable[[Path], object | None]) -> bool:
    """Downloads a directory, which appears under its name when it is complete.

    Args:
      address: of the object store; empty: nothing is done.
      directory: local, in the folder of all caches; nothing is done if it exists.
      last: the file that is uploaded last.
      load: reads a directory; None or DataError if it is damaged. A damaged one is left to be made and uploaded again.

    Returns:
      Whether the directory exists now.

    Raises:
      DataError: the store refuses or does not answer.
    """
    if not address:
        return directory.exists()
    directory.parent.mkdir(parents=True, exist_ok=True)
    unfinished = directory.with_name(f"{directory.name}.fetched")
    with filelock.FileLock(f"{directory}.lock"):
        if directory.exists():
            return True
        try:
            store = Folder(f"{address}/{directory.name}")
            sizes = {path: size for path, size in store.sizes().items() if ".." not in PurePosixPath(path).parts}
            if last not in sizes:
                return False
            logger.info("fetching %s: %s bytes", store, f"{sum(sizes.values()):,}")
            shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
            for path in sizes:
                (unfinished / path).parent.mkdir(parents=True, exist_ok=True)
            _each(lambda path: store.download(path, str(unfinished / path)), sizes)
            if _is_whole(unfinished, load):
                os.rename(unfinished, directory)
                return True
            logger.warning("%s is damaged: it is made again", store)
            _discard(store, last)
        except FileNotFoundError:  # another host is uploading it anew
            return False
        except StoreError as error:
            fix = f"{error.fix}; or set it to a local directory"
            raise DataError(f"config.data.cache_dir={error.what}", "nothing can be fetched", fix) from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return False


def keep(address: str, directory: Path, last: str) -> None:
    """Uploads a finished directory unless the store holds it. A store that fails is a warning: the local one serves.

    Args:
      address: of the object store; empty: nothing is done.
      directory: local.
      last: the file to upload last.
    """
    if not address:
        return
    try:
        store = Folder(f"{address}/{directory.name}")
        try:
            store.read(last)
            return
        except FileNotFoundError:
            pass
        logger.info("uploading %s to %s", directory, store)
        paths = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
        _each(lambda path: store.upload(str(directory / path), path), sorted(paths - {last}))
        store.upload(str(directory / last), last)
    except StoreError as error:
        logger.warning("%s. The cache is in %s alone; the next start tries again to upload it", error, directory)


def _is_whole(directory: Path, load: Callable[[Path], object | None]) -> bool:
    try:
        return load(directory) is not None
    except DataError:
        return False


def _discard(store: Folder, last: str) -> None:
    try:
        store.delete(last)
    except StoreError as error:
        logger.warning("%s", error)


def _each(work: Callable[[str], object], paths: Iterable[str]) -> None:
    """Calls `work` with every path, a few at a time; raises what the first failure raised."""
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(work, paths))
