"""What configs/quickstart.py reaches over several seeds, and the time that it takes on this machine's CPU.

    python benchmarks/quickstart.py --seeds=0,1,2,3,4 --out=quickstart_cpu.json

trains with train.py, one seed after the other, and reads each run's summary.json. A run that is finished in `--workdir`
is not trained again. Other flags are passed on to train.py: --config.model.nsa.shared_kv=False, for example.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.timing import environment  # noqa: E402


def train(seed: int, workdir: pathlib.Path, overrides: list[str]) -> None:
    """One run; its wall and CPU seconds, compilation and preflight included, go to WORKDIR/seconds.json."""
    command = [sys.executable, "train.py", "--config=configs/quickstart.py", f"--workdir={workdir}"]
    begin, before = time.perf_counter(), os.times()
    subprocess.run([*command, f"--config.seed={seed}", *overrides], cwd=ROOT, check=True)
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    seconds = {"wall_seconds": time.perf_counter() - begin, "cpu_seconds": cpu}
    (workdir / "seconds.json").write_text(json.dumps(seconds) + "\n")


def row(seed: int, workdir: pathlib.Path) -> dict[str, Any]:
    """The figures of one seed."""
    summary = json.loads((workdir / "summary.json").read_text())
    bits = summary["validation"]["val/bits_per_byte/text"]
    seconds = json.loads((workdir / "seconds.json").read_text())
    steps = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    gain = [step["health/selection_gain"] for step in steps if "health/selection_gain" in step][-1]
    return {"seed": seed, "bits_per_byte": bits, "selection_gain": gain, **summary["far_task"], **seconds}


def main() -> None:
    """The command line tool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--workdir", type=pathlib.Path, default=ROOT / "runs" / "quickstart_seeds")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("quickstart_cpu.json"))
    args, overrides = parser.parse_known_args()
    rows = []
    for seed in map(int, args.seeds.split(",")):
        workdir = args.workdir.absolute() / str(seed)
        if not (workdir / "seconds.json").is_file():
            train(seed, workdir, overrides)
        rows.append(row(seed, workdir))
        found = {**environment(), "cores": os.cpu_count(), "overrides": overrides, "rows": rows}
        args.out.write_text(json.dumps(found, indent=1) + "\n")
        print(json.dumps(rows[-1]), flush=True)


if __name__ == "__main__":
    main()
