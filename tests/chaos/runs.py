"""Real runs of train.py for the attacks, started in a fraction of a second.

A process imports everything once and never touches a device; each run is a fork of it that runs train.py as `python
train.py` would.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFIG = "tests/chaos/run_config.py"


class Runs:
    """Starts runs; a context manager that ends what is left of them.

    Args:
      folder: where what they print is kept.
    """

    def __init__(self, folder: Path):
        self._folder = folder

    def __enter__(self) -> Runs:
        env = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": re.sub(r"(device_count=)\d+", r"\g<1>1", os.environ.get("XLA_FLAGS", "")),
            "PYTHONPATH": str(ROOT),
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "JAX_COMPILATION_CACHE_DIR": str(Path(tempfile.gettempdir()) / f"nsa_jax_chaos_cache_{os.getuid()}"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        command = [sys.executable, "-m", "tests.chaos.runs"]
        self._server = subprocess.Popen(
            command, cwd=ROOT, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._started: list[Run] = []
        return self

    def __exit__(self, *_: object) -> None:
        for run in self._started:
            run.kill()
        self._server.stdin.close()
        self._server.wait()

    def ask(self, question: dict) -> dict:
        self._server.stdin.write(json.dumps(question) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def start(self, workdir: Path, *flags: str) -> Run:
        """A run of `CONFIG`."""
        log = self._folder / f"{workdir.name}_{len(self._started)}.log"
        argv = ["train.py", f"--config={CONFIG}", f"--workdir={workdir}", *flags]
        run = Run(self, self.ask({"argv": argv, "log": str(log)})["pid"], log)
        self._started.append(run)
        return run

    def finish(self, workdir: Path, *flags: str, seconds: float = 300.0) -> Run:
        """A run that has ended by itself."""
        return self.wait(self.start(workdir, *flags), seconds)

    def until_rows(self, run: Run, workdir: Path, count: int) -> None:
        """Returns when so many rows have been logged, or the run has ended."""
        wait_until(lambda: len(rows(workdir)) >= count or run.status() is not None, 120)

    def wait(self, run: Run, seconds: float = 300.0) -> Run:
        """The run when it has ended by itself, or was killed because it hangs."""
        if not wait_until(lambda: run.status() is not None, seconds):
            run.kill()
            run.hung = True
        return run


@dataclasses.dataclass
class Run:
    """One process that runs train.py."""

    runs: Runs
    pid: int
    log: Path
    ended: int | None = None
    hung: bool = False

    def status(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        if self.ended is None:
            self.ended = self.runs.ask({"poll": self.pid})["status"]
        return self.ended

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal; after SIGKILL the process is gone."""
        if self.status() is None:
            os.kill(self.pid, number)
            if number == signal.SIGKILL:
                wait_until(lambda: self.status() is not None, 60)

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def complaint(self, status: int = 0) -> str:
        """What is wrong if the run did not end as it should; empty otherwise."""
        if self.hung:
            return f"the run hangs: {self.text()[-300:]}"
        return "" if self.status() == status else f"status {self.status()}: {self.text()[-500:]}"


def wait_until(condition: Callable[[], bool], seconds: float, tick: float = 0.005) -> bool:
    """Whether the condition came true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(tick)
    return True


def rows(workdir: Path) -> list[dict]:
    """Complete rows of metrics.jsonl."""
    path = workdir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _serve() -> None:
    """Answers questions on stdin: {"argv", "log"} starts a run, {"poll": pid} tells its exit status."""
    import runpy

    import nsa_jax.export  # noqa: F401
    import nsa_jax.train  # noqa: F401

    for line in sys.stdin:
        question = json.loads(line)
        if "poll" in question:
            pid, status = os.waitpid(question["poll"], os.WNOHANG)
            answer = {"status": os.waitstatus_to_exitcode(status) if pid else None}
        else:
            answer = {"pid": os.fork()}
            if not answer["pid"]:
                log = os.open(question["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                null = os.open(os.devnull, os.O_RDONLY)
                for source, target in ((null, 0), (log, 1), (log, 2)):
                    os.dup2(source, target)
                sys.argv = question["argv"]
                runpy.run_path("train.py", run_name="__main__")
                return
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve()
