"""What the guards cost on this device, and whether preflight's memory figure is what the device really uses.

    python benchmarks/guards.py --config=configs/a100_prod.py --steps=60 --out=guards.json

trains on random tokens of the configured shape, once with all guards and once without, and prints one JSON object:
seconds per step of both, what the health figures and the batch check cost by themselves, the self-test's seconds, and
the fullest moment of device memory beside the plan of the compiler. `--batch_size` and `--grad_accum` shrink the step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.timing import environment  # noqa: E402
from nsa_jax.command_line import load_config  # noqa: E402
from nsa_jax.train.loop import Run  # noqa: E402
from nsa_jax.train.preflight import memory  # noqa: E402
from nsa_jax.train.preflight.selftest import selftest  # noqa: E402
from nsa_jax.train.watch.guards import Guards  # noqa: E402


def random_token_config(path: str, options: argparse.Namespace) -> Any:
    """The config of a file, on random tokens of its own vocabulary, without validation and checkpoints."""
    config = load_config(path)
    vocab = memory.vocabulary(config)
    config.data.source, config.data.synthetic, config.data.synthetic_vocab = "synthetic", "random", vocab
    config.train.steps, config.optim.warmup_steps = options.steps, 1
    config.train.eval_every = config.train.eval_batches = config.train.save_every = config.train.sample_tokens = 0
    config.train.batch_size = options.batch_size or config.train.batch_size
    config.train.grad_accum = options.grad_accum or config.train.grad_accum
    return config


def step_seconds(workdir: Path) -> list[float]:
    """Seconds per step of every full interval but the first."""
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [row["perf/step_seconds"] for row in rows if "perf/step_seconds" in row][1:]


def train(config: Any, guarded: bool) -> tuple[list[float], float]:
    """Trains; returns seconds per step of each interval and what one call of the health figures took."""
    config.guards.health = guarded
    config.guards.stall_seconds = 600.0 if guarded else 0.0
    with tempfile.TemporaryDirectory() as directory:
        run = Run(config, Path(directory))
        if not guarded:
            run.guards.on_batch = lambda step, batch: None  # type: ignore[method-assign]
        run.run()
        return step_seconds(Path(directory)), run.health.seconds if run.health else 0.0


def batch_check_seconds(config: Any) -> float:
    """What `Guards.on_batch` takes for one batch."""
    random = np.random.default_rng(0)
    shape = (config.train.batch_size, config.data.seq_len)
    batches = [{"inputs": random.integers(0, 30_000, shape, dtype=np.int32)} for _ in range(20)]
    guards, start = Guards(config), time.perf_counter()
    for step, batch in enumerate(batches):
        guards.on_batch(step, batch)
    return (time.perf_counter() - start) / len(batches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch_size", type=int, default=0)
    parser.add_argument("--grad_accum", type=int, default=0)
    parser.add_argument("--target", default="", help="also plan ahead of time for one of this GPU, such as h200")
    parser.add_argument("--plan_only", action="store_true", help="compile for this device, do not train")
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    jax.config.update("jax_compilation_cache_dir", tempfile.mkdtemp())
    config = random_token_config(options.config, options)
    tested = selftest(config)
    made = memory.for_target(config, "", 0, memory.vocabulary(config))
    planned = memory.compile_run(made, "")
    found: dict[str, Any] = {
        **environment(),
        "config": config.name,
        "batch": [config.train.batch_size, config.data.seq_len, config.train.grad_accum],
        "selftest_seconds": tested.seconds,
        "selftest_problems": [str(problem) for problem in tested.problems],
        "batch_check_seconds": batch_check_seconds(config),
        "planned_gib": planned.memory.total / 2**30,
        "compile_seconds": planned.seconds,
        "host_callbacks": len(planned.host),
    }
    if options.target:
        try:
            ahead = memory.for_target(config, options.target, 1, memory.vocabulary(config))
            planned_ahead = memory.compile_run(ahead, options.target).memory
            found["planned_ahead_of_time_gib"] = planned_ahead.total / 2**30
        except Exception as error:  # a report, not a gate
            found["planned_ahead_of_time_gib"] = f"{type(error).__name__}: {error}"[:300]
    if not options.plan_only:
        without, _ = train(config, guarded=False)
        stats = jax.local_devices()[0].memory_stats() or {}
        if "peak_bytes_in_use" in stats:
            found["peak_gib"] = stats["peak_bytes_in_use"] / 2**30
            found["peak_over_plan"] = stats["peak_bytes_in_use"] / planned.memory.total
        guarded, health = train(config, guarded=True)
        usual = statistics.median(without)
        found |= {
            "step_seconds_without_guards": usual,
            "step_seconds_with_guards": statistics.median(guarded),
            "intervals": [without, guarded],
            "health_seconds": health,
            "cost_by_parts": (health / config.train.log_every + found["batch_check_seconds"]) / usual,
            "cost_measured": statistics.median(guarded) / usual - 1,
        }
    text = json.dumps(found, indent=2)
    print(text)
    if options.out:
        Path(options.out).write_text(text + "\n")


if __name__ == "__main__":
    main()
