"""Tokenises a source in shards: by all cores of a host, by all hosts that share a directory, and over restarts.

A shard is a run of consecutive documents of up to about `_SHARD_BYTES` bytes. Only the source decides where it begins
and ends, so the tokens do not depend on how many processes made them. A shard is one file, whose name holds its number
and a checksum of its text, and which appears when it is complete. The process that makes a shard holds a lock on its
byte of the file `claims`; the system releases the lock when the process dies. Every host reads the whole source, and
tokenises the shards that neither exist nor are claimed.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import itertools
import os
import pickle
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import rich.console
import rich.progress

from nsa_jax.data import tokenize_worker
from nsa_jax.data.documents import Source
from nsa_jax.data.encoding import Encoded, encode, to_bytes
from nsa_jax.data.errors import DataError
from nsa_jax.data.tokenizers import Tokenizer

_SHARD_BYTES = 4 << 20  # of text: some seconds of one core, which is what a kill loses
_LAST_SHARDS = 64  # a shard is at most this part of the text that is left: all cores shall finish at the same time
WORKER_ENVIRONMENT = {
    # One process per core leaves nothing for the threads of the tokenizers library.
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    # By default, glibc gives the memory of each batch back to the system, which then clears it for the next one.
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
}
_POLL_SECONDS = 0.5
_LINE_SECONDS = 30.0  # between lines of progress where there is no terminal


def available_cores() -> int:
    """CPU cores that this process may use: its affinity, and the quota of its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # no control groups, or no quota ("max")
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(round(int(quota) / int(period)), 1))
    return cores


def _shard_bytes(total: int | None, done: int) -> int:
    """Bytes of text of the next shard, after `done` of about `total`; a source that fills no more than one is one."""
    if total is None or total <= _SHARD_BYTES or total <= done:
        return _SHARD_BYTES
    return max(min((total - done) // _LAST_SHARDS, _SHARD_BYTES), _SHARD_BYTES // 32)


def _groups(source: Source, tell: Callable[[int], None] = lambda empty: None) -> Iterator[list[bytes]]:
    """The documents of each shard; documents without text are left out, and at the end their number is told."""
    group: list[bytes] = []
    total, done, size, empty = source.size_bytes(), 0, 0, 0
    limit = _shard_bytes(total, done)
    for text in source.documents():
        if not text or text.isspace():
            empty += 1
            continue
        group.append(to_bytes(text))
        size += len(group[-1])
        if size >= limit:
            yield group
            done += size
            group, size, limit = [], 0, _shard_bytes(total, done)
    if group:
        yield group
    tell(empty)


class _Claims:
    """Which shards this process makes: locks of single bytes of a file, which other hosts see."""

    def __init__(self, directory: Path):
        self._file = open(directory / "claims", "ab")  # noqa: SIM115

    def take(self, index: int) -> bool:
        """Whether this process now holds the shard; False if another one does."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, index)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def close(self) -> None:
        self._file.close()


class _Worker:
    """A tokenising process."""

    def __init__(self, tokenizer_directory: str):
        # -P: the folder of the program holds modules named like packages that it imports.
        command = [sys.executable, "-P", tokenize_worker.__file__, tokenizer_directory, str(os.getpid())]
        environment = {**os.environ, **WORKER_ENVIRONMENT}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )

    def __call__(self, path: Path, documents: list[bytes]) -> tuple[int, int]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            pickle.dump((path, documents), self._process.stdin)
            self._process.stdin.flush()
            answer = pickle.load(self._process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:
            self._process.kill()
            raise DataError(
                "tokenising process",
                f"ended with status {self._process.wait()} while it made {path.name}",
                "read its messages above; if it was killed for memory, lower config.data.tokenizer_workers",
            ) from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # what was not read yet cannot be written out any more
                pipe.close()


class _Pool:
    """Up to `count` tokenising processes.

    They take some tenths of a second to start and few shards would leave most of them idle, so each of the first
    shards doubles their number.
    """

    def __init__(self, count: int, tokenizer_directory: str, done: Callable[[int, int, int], None]):
        self._count = count
        self._directory = tokenizer_directory
        self._done = done
        self._workers: list[_Worker] = []
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._threads = concurrent.futures.ThreadPoolExecutor(count)
        self._futures: list[concurrent.futures.Future] = []

    def submit(self, path: Path, documents: list[bytes]) -> None:
        """Has a shard made; waits until a process is free. Raises what an earlier shard raised."""
        for _ in range(min(max(len(self._workers), 1), self._count - len(self._workers))):
            self._workers.append(_Worker(self._directory))
            self._idle.put(self._workers[-1])
        worker = self._idle.get()
        self._check(wait=False)
        self._futures.append(self._threads.submit(self._make, worker, path, documents))

    def _make(self, worker: _Worker, path: Path, documents: list[bytes]) -> None:
        try:
            made = worker(path, documents)
            self._done(sum(map(len, documents)), *made)
        finally:
            self._idle.put(worker)

    def _check(self, *, wait: bool) -> None:
        running = []
        for future in self._futures:
            if wait or future.done():
                future.result()
            else:
                running.append(future)
        self._futures = running

    def join(self) -> None:
        """Waits until all shards are made."""
        self._check(wait=True)

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._threads.shutdown()
        for worker in self._workers:
            worker.close()


class Progress:
    """Bytes, documents and tokens done: a bar in terminals, else a line now and then, from every host.

    Args:
      task: what is done, such as "tokenising text".
      total: bytes to expect; None if unknown.
    """

    def __init__(self, task: str, total: int | None):
        self._lock = threading.Lock()
        self._name, self._total = task, total
        self._known = self._bytes = self._documents = self._tokens = 0
        self._began = self._told = time.monotonic()
        console = rich.console.Console(stderr=True)
        self._bar: rich.progress.Progress | None = None
        if console.is_terminal:
            self._bar = rich.progress.Progress(
                rich.progress.TextColumn("{task.description}"),
                rich.progress.BarColumn(),
                rich.progress.DownloadColumn(),
                rich.progress.TextColumn("{task.fields[rate]}"),
                rich.progress.TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task(self._name, total=self._total, rate="")
            self._bar.start()

    def known(self, num_bytes: int) -> None:
        """Counts what was there, or is done by other hosts."""
        with self._lock:
            self._known += num_bytes
            self._show()

    def made(self, num_bytes: int, documents: int, tokens: int) -> None:
        """Counts what this host has done."""
        with self._lock:
            self._bytes += num_bytes
            self._documents += documents
            self._tokens += tokens
            self._show()

    def _rate(self) -> str:
        rate = self._tokens / max(time.monotonic() - self._began, 1e-9)
        return f"{self._documents:,} documents, {self._tokens:,} tokens, {rate:,.0f} tokens/s"

    def _show(self) -> None:
        done = self._known + self._bytes
        if self._bar is not None:
            self._bar.update(self._task, completed=done, rate=self._rate())
            return
        now = time.monotonic()
        if now - self._told < _LINE_SECONDS:
            return
        self._told = now
        left = ""
        if self._total and self._bytes:
            seconds = max(self._total - done, 0) / self._bytes * (now - self._began)
            left = (
                f", {min(done / self._total, 1):.1%} of {self._total / 1e9:,.2f} GB, {seconds / 60:,.1f} min remaining"
            )
        print(f"{self._name} on {socket.gethostname()}: {self._rate()}{left}", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def encoded_shards(
    source: Source,
    tokenizer: Tokenizer,
    directory: Path,
    *,
    workers: int,
    finished: Callable[[], bool],
    tell: Callable[[int], None] = lambda empty: None,
) -> Iterator[Encoded] | None:
    """Tokenises what is not tokenised yet, together with other processes that do the same.

    Args:
      source: where documents come from.
      tokenizer: one that `Tokenizer.load` reads back.
      directory: where shards are kept; it is not created if the documents fill no more than one shard.
      workers: tokenising processes; 0: one for each core that this process may use.
      finished: whether another process has completed the corpus, after which the shards are deleted.
      tell: told the number of documents without text after each pass over the source.

    Returns:
      The tokens of each shard in order, none if there is no document; None if another process completed the corpus.

    Raises:
      DataError: of the source, or of a tokenising process that died.
      OSError: of a shard that cannot be written.
    """
    groups: Iterator[list[bytes]] = _groups(source, tell)
    begin = list(itertools.islice(groups, 2))
    if len(begin) < 2 and not directory.exists():
        return iter([encode(group, tokenizer) for group in begin])
    directory.mkdir(exist_ok=True)
    groups = itertools.chain(begin, groups)
    with contextlib.ExitStack() as stack:
        saved = stack.enter_context(tempfile.TemporaryDirectory())
        tokenizer.save(saved)
        claims, progress = _Claims(directory), Progress(f"tokenising {source.name}", source.size_bytes())
        pool = _Pool(workers or available_cores(), saved, progress.made)
        for part in (claims, progress, pool):
            stack.callback(part.close)
        while True:
            paths = _one_pass(groups, directory, claims, pool, progress, finished)
            if paths is None:
                return None
            pool.join()
            if _wait(paths, claims, finished):
                return None if finished() else map(_load, paths)
            groups = _groups(source, tell)


def _one_pass(
    groups: Iterator[list[bytes]],
    directory: Path,
    claims: _Claims,
    pool: _Pool,
    progress: Progress,
    finished: Callable[[], bool],
) -> list[Path] | None:
    """Has every shard made that nobody else makes. Returns the files of all; None if the corpus is complete."""
    paths = []
    for index, group in enumerate(groups):
        checksum = 0
        for raw in group:
            checksum = zlib.crc32(raw, checksum)
        path = directory / f"{index:06}-{checksum:08x}.npz"
        paths.append(path)
        # The order matters: who completes the corpus deletes the shards afterwards, and they are no longer needed.
        if path.exists() or not claims.take(index) or path.exists():
            progress.known(sum(map(len, group)))
        elif finished():
            return None
        else:
            pool.submit(path, group)
    return paths


def _wait(paths: list[Path], claims: _Claims, finished: Callable[[], bool]) -> bool:
    """Waits for other processes. Returns whether all is there; False if one of them died and left a shard to make."""
    missing = list(enumerate(paths))
    while missing := [(index, path) for index, path in missing if not path.exists()]:
        if finished():
            return True
        if any(claims.take(index) for index, _ in missing):
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _load(path: Path) -> Encoded:
    try:
        return Encoded.load(path)
    except ValueError as error:
        path.unlink(missing_ok=True)
        raise DataError(str(path), str(error), "start again: it was removed, and is made anew") from error
