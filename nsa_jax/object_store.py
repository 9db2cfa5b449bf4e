"""Objects of s3:// and gs:// addresses, through fsspec. Whatever goes wrong there is raised as one `StoreError`."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import re
import uuid
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

from nsa_jax.extras import MissingExtra, extra

SCHEMES = ("s3://", "gs://")

_READ_BYTES = 8 << 20  # of one request, when an object is read as a stream

_REFUSED = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "DefaultCredentialsError",
    "RefreshError",
    "TokenRetrievalError",
}
_CREDENTIALS = {
    "s3://": "aws sts get-caller-identity shows those in use, and AWS_ENDPOINT_URL names a store that is not Amazon's",
    "gs://": "gcloud auth application-default login, or GOOGLE_APPLICATION_CREDENTIALS",
}


class StoreError(OSError):
    """An object store refuses, does not answer or lacks what was asked for; the message says what to do.

    Attributes:
      what: address and reason.
      fix: what to do.
      denied: whether the store refuses; trying again is of no use then.
    """

    def __init__(self, what: str, fix: str, *, denied: bool = False):
        super().__init__(f"{what}. Fix: {fix}")
        self.what, self.fix, self.denied = what, fix, denied


def normal(address: str) -> str:
    """An address as fsspec takes it: both slashes after the scheme, which `Path` makes one, and none at the end."""
    return re.sub(r"^(\w+):/+", r"\1://", address).rstrip("/")


def scheme_of(address: str) -> str:
    """The one of `SCHEMES` that an address begins with; empty for a path and for other schemes."""
    return next((scheme for scheme in SCHEMES if normal(address).startswith(scheme)), "")


def filesystem(address: str) -> Any:
    """The fsspec file system of an address. Listings are never cached: other machines write there too.

    Raises:
      StoreError: the package that reads this scheme is not installed.
    """
    try:
        with extra("remote"):
            import fsspec

            importlib.import_module({"s3://": "s3fs", "gs://": "gcsfs"}[scheme_of(address)])
    except MissingExtra as error:
        raise StoreError(f"{address}: {error}", "install it, or use a local file", denied=True) from error
    return fsspec.filesystem(scheme_of(address).removesuffix("://"), use_listings_cache=False)


@contextlib.contextmanager
def accessing(address: str) -> Iterator[None]:
    """Turns errors of an object store into `StoreError`.

    Raises:
      FileNotFoundError: as it is: whether something must exist is for the caller to know.
      OSError: as it is, if the local disk is full.
    """
    try:
        yield
    except (FileNotFoundError, FileExistsError, StoreError):
        raise
    except Exception as error:  # botocore, aiohttp, google.auth and gcsfs have families of their own
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):  # of this machine's disk
            raise
        raise explain(address, error) from error


def explain(address: str, error: Exception) -> StoreError:
    """The `StoreError` for an error of fsspec."""
    if isinstance(error, StoreError):
        return error
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    names = {cls.__name__ for cls in type(error).__mro__}
    if isinstance(error, PermissionError) or names & _REFUSED or getattr(error, "code", None) in (401, 403):
        fix = "use credentials that may list, read, write and delete there: " + _CREDENTIALS.get(scheme_of(address), "")
        return StoreError(f"{address}: access is denied ({reason})", fix, denied=True)
    if isinstance(error, FileNotFoundError):
        return StoreError(f"{address}: {reason}", "create the bucket, or correct the address", denied=True)
    fix = "check the network and the endpoint, and start again"
    return StoreError(f"{address}: the object store does not answer ({reason})", fix)


class Object(NamedTuple):
    """One object: its address, its size in bytes, and what changes whenever its content does."""

    address: str
    size: int
    version: str


def matching(pattern: str) -> list[Object]:
    """The objects that an address names; it may hold globs (`*`, `**`). Sorted; empty if there are none.

    Raises:
      StoreError: the store refuses or does not answer.
    """
    files = filesystem(pattern)
    with accessing(pattern):
        found = files.glob(normal(pattern), detail=True)
    return [
        Object(
            scheme_of(pattern) + name,
            int(entry["size"]),
            str(entry.get("ETag") or entry.get("etag") or entry.get("generation") or entry.get("mtime")),
        )
        for name, entry in sorted(found.items())
        if entry["type"] == "file"
    ]


def open_object(address: str) -> BinaryIO:
    """An object, for reading from its beginning to its end."""
    with accessing(address):
        return filesystem(address).open(normal(address), "rb", block_size=_READ_BYTES)


class Folder:
    """The objects below an address; paths are relative to it.

    Args:
      address: s3://BUCKET/PATH or gs://BUCKET/PATH.

    Every method raises `StoreError`, and FileNotFoundError for an object that is not there.
    """

    def __init__(self, address: str):
        self.address = normal(address)
        self._fs = filesystem(address)

    def __str__(self) -> str:
        return self.address

    def _at(self, path: str) -> str:
        return f"{self.address}/{path}"

    def sizes(self, below: str = "") -> dict[str, int]:
        """Size in bytes of every object whose path begins with `below`, by its path; empty if there are none."""
        base = self.address.partition("://")[2] + "/"
        with accessing(self.address):
            try:
                found = self._fs.find(self._at(below).rstrip("/"), detail=True)
            except FileNotFoundError as error:  # an empty prefix is no error, but a bucket that is not there is
                raise explain(self.address, error) from error
        return {
            name.removeprefix(base): int(entry["size"])
            for name, entry in found.items()
            if name.startswith(base + below) and not name.endswith("/")  # a console makes folders such objects
        }

    def read(self, path: str) -> bytes:
        with accessing(self._at(path)):
            return self._fs.cat_file(self._at(path))

    def write(self, path: str, content: bytes, *, only_new: bool = False) -> None:
        """Writes an object at once.

        Raises:
          FileExistsError: it exists, and `only_new` is set; the store itself decides, so one of several writers wins.
        """
        with accessing(self._at(path)):
            try:
                self._fs.pipe_file(self._at(path), content, mode="create" if only_new else "overwrite")
            except FileNotFoundError as error:
                raise explain(self.address, error) from error

    def upload(self, local: str, path: str) -> None:
        """Writes an object from a local file; a reader sees all of it or nothing."""
        with accessing(self._at(path)):
            try:
                self._fs.put_file(local, self._at(path))
            except FileNotFoundError as error:
                if not os.path.exists(local):
                    raise
                raise explain(self.address, error) from error

    def download(self, path: str, local: str) -> None:
        with accessing(self._at(path)):
            self._fs.get_file(self._at(path), local)

    def delete(self, path: str) -> None:
        """Deletes an object; one that is not there is no error."""
        with accessing(self._at(path)), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._at(path))

    def check_writable(self) -> None:
        """Writes and deletes a small object.

        Raises:
          StoreError: that is not possible.
        """
        path = f".probe-{uuid.uuid4().hex}"  # several processes check at once
        self.write(path, b"")
        self.delete(path)
