"""Whether training gives the same bits in every process, after a kill, and with any compilation cache.

    python benchmarks/reproducible.py --json out.json -- --config.data.source=text "--config.data.files=('text/*.txt',)"

trains `--config` (configs/a100_prod.py) four times with train.py and compares every logged number of the training steps
(loss, gradient norm, norms of parameters and updates):

  first, second   uninterrupted, each with an empty compilation cache of its own
  killed_warm     killed by SIGKILL at a random step and started again, with the cache that it has filled
  killed_cold     the same, started again with an empty cache

All run at the same time and share the GPUs of `--gpus`. What follows `--` is passed on to train.py.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

COMPARED = ("train/loss", "norm/grad", "norm/param", "norm/update")


def rows(workdir: pathlib.Path) -> dict[int, dict[str, float]]:
    """Training rows of metrics.jsonl by step."""
    path = workdir / "metrics.jsonl"
    found = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:  # the line that is being written
            continue
        if "train/loss" in row:
            found[row["step"]] = row
    return found


def command(options: argparse.Namespace, workdir: pathlib.Path, cache: pathlib.Path) -> list[str]:
    """What starts one run."""
    return [
        *(sys.executable, "train.py", f"--config={options.config}", f"--workdir={workdir}"),
        *(f"--config.compilation_cache_dir={cache}", f"--config.train.steps={options.steps}"),
        *(f"--config.train.save_every={options.save_every}", "--config.train.log_every=1"),
        *options.flags,
    ]


def start(options: argparse.Namespace, workdir: pathlib.Path, cache: pathlib.Path, gpu: str) -> subprocess.Popen:
    """Starts a run on one GPU; its output goes to WORKDIR.log."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu} if gpu else dict(os.environ)
    with open(f"{workdir}.log", "a") as log:
        return subprocess.Popen(command(options, workdir, cache), cwd=ROOT, env=environment, stdout=log, stderr=log)


def finish(process: subprocess.Popen, workdir: pathlib.Path) -> None:
    """Waits for a run that must succeed."""
    if process.wait():
        tail = pathlib.Path(f"{workdir}.log").read_text()[-3000:]
        print(f"{workdir.name} ended with status {process.returncode}:\n{tail}", file=sys.stderr)
        sys.exit(1)  # this thread; the missing result ends the benchmark


def uninterrupted(options, workdir, cache, gpu) -> dict[str, Any]:
    """One run from start to end."""
    finish(start(options, workdir, cache, gpu), workdir)
    return {"rows": rows(workdir)}


def killed(options, workdir, cache, gpu, kill_step: int, second_cache: pathlib.Path) -> dict[str, Any]:
    """One run that is killed when it has logged `kill_step`, and started again."""
    process = start(options, workdir, cache, gpu)
    while process.poll() is None and max(rows(workdir), default=0) < kill_step:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = rows(workdir)
    finish(start(options, workdir, second_cache, gpu), workdir)
    resumed_after = json.loads((workdir / "env.json").read_text())["start_step"]
    return {"rows": rows(workdir), "before_the_kill": before, "killed_at": max(before), "resumed_after": resumed_after}


def differing(a: dict[int, dict], b: dict[int, dict]) -> list[int]:
    """Steps of `b` whose compared metrics differ from those of `a` in any bit."""
    return [step for step, row in sorted(b.items()) if any(row[name] != a[step][name] for name in COMPARED)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="configs/a100_prod.py")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save_every", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of the steps at which runs are killed")
    parser.add_argument("--gpus", default="0", help="comma-separated; empty: whatever JAX finds")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--keep", type=pathlib.Path, help="a folder for the runs' metrics")
    parser.add_argument("--commit", help="of the code, where git does not tell")
    parser.add_argument("flags", nargs="*", help="for train.py, after --")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    kills = [draw.randrange(options.save_every + 1, options.steps) for _ in range(2)]
    gpus = options.gpus.split(",")
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)

        def cache(label: str) -> pathlib.Path:
            return folder / f"cache_{label}"

        warm, cold = folder / "killed_warm", folder / "killed_cold"
        work = {
            "first": lambda gpu: uninterrupted(options, folder / "first", cache("first"), gpu),
            "second": lambda gpu: uninterrupted(options, folder / "second", cache("second"), gpu),
            "killed_warm": lambda gpu: killed(options, warm, cache("warm"), gpu, kills[0], cache("warm")),
            "killed_cold": lambda gpu: killed(options, cold, cache("cold"), gpu, kills[1], cache("empty")),
        }

        def one(label: str, gpu: str) -> None:
            found[label] = work[label](gpu)

        threads = [
            threading.Thread(target=one, args=(label, gpus[index % len(gpus)])) for index, label in enumerate(work)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if options.keep:
            for label in work:
                if (folder / label / "metrics.jsonl").exists():
                    shutil.copy(folder / label / "metrics.jsonl", options.keep / f"{label}.jsonl")
        missing = sorted(set(work) - set(found))
        if missing:
            raise SystemExit(f"not finished: {', '.join(missing)}")
        env = json.loads((folder / "first" / "env.json").read_text())
    reference = found["first"]["rows"]
    report: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "device": env["devices"],
        "versions": env["versions"],
        "commit": options.commit or env["git"],
        "deterministic": env["deterministic"],
        "implementations": env["implementations"],
        "runs": {},
    }
    failed = False
    for label, run in found.items():
        compared = {part: differing(reference, run[part]) for part in ("rows", "before_the_kill") if part in run}
        failed |= any(compared.values()) or sorted(run["rows"]) != list(range(1, options.steps + 1))
        timed = [row["perf/step_seconds"] for row in run["rows"].values() if "perf/step_seconds" in row]
        report["runs"][label] = {
            "steps": len(run["rows"]),
            "steps_that_differ_from_first": compared,
            **{name: run[name] for name in ("killed_at", "resumed_after") if name in run},
            "median_step_seconds": statistics.median(timed),
            **{name: [row[name] for row in run["rows"].values()] for name in COMPARED},
        }
        print(label, {k: v for k, v in report["runs"][label].items() if k not in COMPARED})
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    print("DIFFERENT" if failed else "bit-equal")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
