"""Trains variants of a model on the same batches and with as many parameters, and measures what each is good for.

    python benchmarks/quality.py --grid configs/quality/h200_8k.py --json quality.json --plots plots
    python benchmarks/quality.py --grid configs/quality/h200_8k.py --variants nsa,dense --gpus 2 --minutes 9.5
    python benchmarks/quality.py --grid configs/quality/cpu_smoke.py --files nsa_jax/data nsa_jax/ops
    python benchmarks/quality.py --merge quality.json --json benchmarks/results/quality_h200.json

A grid is a config with VARIANTS, fields that each changes, and MEASURES. Each variant has a folder in --folder and goes
through stages: train, position (loss by position), long (long tasks), context (losses with the context cut), selection
(lists against dense attention, for variants with NSA layers). What is finished is skipped; a run that was stopped
resumes from its checkpoint. With --minutes, runs are asked to save and stop in time, so that the same command may be
given again and again. Results are written whenever a variant is finished. With --parallel, speeds are of models that
share the GPU; with --gpus each has its own. Flags after -- are passed on to train.py. --merge trains nothing: it puts
the rows of another result into that of --json, and draws again.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

STAGES = ("train", "position", "long", "context", "selection")


@dataclasses.dataclass(frozen=True)
class Stage:
    """A program that makes one thing of a variant.

    Attributes:
      variant: its name.
      name: one of `STAGES`.
      command: arguments of Python.
      done: whether what it makes is there.
      log: where its output goes.
    """

    variant: str
    name: str
    command: tuple[str, ...]
    done: Callable[[], bool]
    log: pathlib.Path


def load_grid(path: str) -> Any:
    """The module of a grid.

    Raises:
      SystemExit: it lacks something.
    """
    spec = importlib.util.spec_from_file_location("quality_grid", path)
    if spec is None or spec.loader is None or not pathlib.Path(path).is_file():
        raise SystemExit(f"{path}: no Python file; see configs/quality")
    grid = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(grid)
    if missing := [name for name in ("get_config", "VARIANTS", "MEASURES") if not hasattr(grid, name)]:
        raise SystemExit(f"{path}: has no {', '.join(missing)}; see configs/quality/h200_8k.py")
    check_measures(path, grid)
    return grid


def check_measures(path: str, grid: Any) -> None:
    """Refuses before training what could not be measured after it."""
    from nsa_jax.data import long_tasks

    measures, length = grid.MEASURES, grid.get_config().data.seq_len
    if missing := [name for name in ("lengths", "samples", "max_tokens", "cuts") if name not in measures]:
        raise SystemExit(f"{path}: MEASURES has no {', '.join(missing)}; see configs/quality/h200_8k.py")
    if unknown := [name for name in measures.get("tasks", ()) if name not in long_tasks.TASKS]:
        raise SystemExit(f"{path}: MEASURES: no task {unknown[0]!r}; there are {', '.join(long_tasks.TASKS)}")
    if min(measures["cuts"], default=length) >= length:
        raise SystemExit(f"{path}: MEASURES: no cut is below the {length} tokens of a row")


def overrides(fields: dict[str, Any]) -> list[str]:
    """Fields and values as train.py's flags --config.FIELD=VALUE have them."""
    return [f"{field}={value if isinstance(value, str) else repr(value)}" for field, value in fields.items()]


def variant_config(grid: Any, name: str) -> tuple[Any, dict[str, Any]]:
    """The config of a variant, with as many parameters as the grid's own, and the fields that differ from it.

    Raises:
      SystemExit: no run could follow.
    """
    import jax

    from benchmarks.train import VOCAB, match_parameters
    from nsa_jax.command_line import override
    from nsa_jax.config import validate
    from nsa_jax.train.state import setup

    base, config = grid.get_config(), grid.get_config()
    problems = override(config, overrides(grid.VARIANTS[name])) or validate(config)
    if errors := [str(problem) for problem in problems if problem.severity == "error"]:
        raise SystemExit("\n  ".join([f"the variant {name!r} cannot run:", *errors]))
    devices = jax.devices()[:1]
    match_parameters(config, setup(base, VOCAB, devices).num_parameters(), devices)
    return config, {**grid.VARIANTS[name], "model.mlp_dim": config.model.mlp_dim}


def _finished(workdir: pathlib.Path) -> bool:
    try:
        return bool(json.loads((workdir / "summary.json").read_text())["finished"])
    except (OSError, ValueError, KeyError):
        return False


def _at(workdir: pathlib.Path, stage: str) -> pathlib.Path:
    """The file that a stage writes last."""
    if stage == "selection":
        return workdir / "selection.json"
    return workdir / ("evaluation" if stage == "position" else f"evaluation_{stage}") / "evaluation.json"


def stages(options: argparse.Namespace, grid: Any, name: str) -> list[Stage]:
    """What is to be done for a variant, in order."""
    workdir, measures = options.folder / name, grid.MEASURES
    config, fields = variant_config(grid, name)
    flags = [f"--config.{override}" for override in overrides(fields)]
    if options.files:
        flags.append(f"--config.data.sources.text.files={tuple(options.files)!r}")
    made = [
        ("train", ["train.py", f"--config={options.grid}", f"--workdir={workdir}", *flags, *options.flags]),
    ]
    context, batch = config.data.seq_len, max(131_072 // config.data.seq_len, 1)
    common = [f"--context={context}", f"--max-tokens={measures['max_tokens']}", f"--batch-size={min(batch, 32)}"]

    def evaluate(task: str, *more: str) -> tuple[str, list[str]]:
        output = _at(workdir, task).parent
        return task, ["-m", "nsa_jax.evaluate", str(workdir), f"--tasks={task}", f"--output={output}", *common, *more]

    lengths, cuts = (",".join(map(str, measures[key])) for key in ("lengths", "cuts"))
    tasks = [f"--long-tasks={','.join(measures['tasks'])}"] if "tasks" in measures else []
    made += [
        evaluate("position", f"--stride={context}"),
        evaluate("long", f"--lengths={lengths}", f"--samples={measures['samples']}", *tasks),
        evaluate("context", f"--cuts={cuts}"),
    ]
    if "nsa" in (config.model.layer_pattern or (config.model.attention,)):
        dense = options.folder / "dense"
        of_dense = [f"--dense={dense}"] if "dense" in options.variants or _finished(dense) else []
        made.append(
            ("selection", ["benchmarks/selection.py", str(workdir), *of_dense, f"--json={_at(workdir, 'selection')}"])
        )

    check_finished(workdir, config, made[0][1])
    for kind, command in made[1:]:
        remove_outdated(workdir, kind, command)

    def stage(kind: str, command: list[str]) -> Stage:
        done = (lambda: _finished(workdir)) if kind == "train" else _at(workdir, kind).is_file
        return Stage(name, kind, tuple(command), done, workdir.parent / f"{name}.log")

    return [stage(*one) for one in made]


def check_finished(workdir: pathlib.Path, config: Any, command: Sequence[str]) -> None:
    """Refuses a finished run of another config: its results would be shown as those of this one.

    Args:
      workdir: of the run.
      config: of the variant.
      command: arguments of train.py, which override fields.

    Raises:
      SystemExit: the config is another.
    """
    from nsa_jax.command_line import OVERRIDE, collect_overrides, override
    from nsa_jax.train.preflight import check_workdir

    if not _finished(workdir):
        return
    flag = f"--{OVERRIDE}="
    override(config, [arg.removeprefix(flag) for arg in collect_overrides(command) if arg.startswith(flag)])
    problems = [problem.message for problem in check_workdir(config, workdir)]
    try:
        train = json.loads((workdir / "env.json").read_text())["config"]["train"]
    except (OSError, ValueError, KeyError):
        return
    for name in ("steps", "batch_size"):
        if train[name] != config.train[name]:
            problems.append(f"train.{name}: {train[name]} there, {config.train[name]} now")
    if problems:
        fix = "name another --folder, or delete the run's"
        raise SystemExit(f"{workdir} holds a finished run of another config: {'; '.join(problems)}. Fix: {fix}")


def remove_outdated(workdir: pathlib.Path, kind: str, command: Sequence[str]) -> None:
    """Removes what a stage measured in another way, and notes how it measures now."""
    output, note = _at(workdir, kind), workdir.parent / f"{workdir.name}.{kind}.json"
    told = [arg.replace(str(workdir.parent), "FOLDER") for arg in command]
    if output.is_file() and note.is_file() and json.loads(note.read_text()) != told:
        print(f"{workdir.name}: {kind} is measured again, as MEASURES or the variants have changed", flush=True)
        output.unlink()
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps(told) + "\n")


def ready(stage: Stage, todo: dict[str, list[Stage]]) -> bool:
    """Whether all that a stage reads is there: selection is compared with the dense variant, once that is trained."""
    trains = [one for one in todo.get("dense", []) if one.name == "train"]
    return stage.name != "selection" or not trains


class Launcher:
    """Starts stages as processes, and asks them to stop.

    Args:
      parallel: how many run at once.
      gpus: of this machine, of which each has one; 0: all run on all devices.
    """

    def __init__(self, parallel: int, gpus: int = 0):
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        self.visible = named.split(",") if named else [str(gpu) for gpu in range(gpus)]
        if gpus > len(self.visible):
            raise SystemExit(f"--gpus {gpus}: CUDA_VISIBLE_DEVICES names {len(self.visible)}")
        self.running: dict[int, subprocess.Popen | None] = dict.fromkeys(range(gpus))
        self.environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        # JAX refuses the two names of this variable together.
        if parallel > 1 and not gpus and "XLA_CLIENT_MEM_FRACTION" not in self.environment:
            self.environment.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{0.9 / parallel:.3f}")

    def __call__(self, stage: Stage) -> subprocess.Popen:
        stage.log.parent.mkdir(parents=True, exist_ok=True)
        print(f"+ {stage.variant}: python {' '.join(stage.command)}", flush=True)
        environment, gpu = self.environment, None
        if self.running:
            gpu = next(gpu for gpu, process in self.running.items() if process is None or process.poll() is not None)
            environment = environment | {"CUDA_VISIBLE_DEVICES": self.visible[gpu]}
        with open(stage.log, "ab") as log:
            process = subprocess.Popen(
                [sys.executable, *stage.command], cwd=ROOT, env=environment, stdout=log, stderr=log
            )
        if gpu is not None:
            self.running[gpu] = process
        return process


def schedule(
    todo: dict[str, list[Stage]],
    launch: Callable[[Stage], subprocess.Popen],
    *,
    parallel: int,
    deadline: float,
    reserve: float,
    on_finished: Callable[[list[str]], None],
    poll: float = 0.5,
) -> dict[str, str]:
    """Runs the stages of all variants, those of one variant in order.

    Args:
      todo: by variant; what is done is taken out, so that unfinished work remains.
      launch: starts a stage.
      parallel: processes at once.
      deadline: of `time.monotonic`; `reserve` seconds before it, processes get SIGTERM, and at it SIGKILL.
      reserve: seconds; an interruption gives processes as many.
      on_finished: called with the variants whose last stage is done.
      poll: seconds between looks at the processes.

    Returns:
      For each variant that failed, the stage and its status.
    """
    running: dict[str, tuple[Stage, subprocess.Popen]] = {}
    failed: dict[str, str] = {}
    stopping = False
    try:
        while True:
            for name, (stage, process) in list(running.items()):
                if process.poll() is None:
                    continue
                del running[name]
                if stage.done():
                    continue
                if not stopping:
                    failed[name] = f"{stage.name} ended with status {process.returncode}; see {stage.log}"
                    print(f"{name}: {failed[name]}", flush=True)
            unfinished = [name for name, left in todo.items() if left]
            for left in todo.values():
                while left and left[0].done():
                    left.pop(0)
            if finished := [name for name in unfinished if not todo[name]]:
                on_finished(finished)
            now = time.monotonic()
            if now >= deadline - reserve and not stopping:
                stopping = True
                for _, process in running.values():
                    process.terminate()
            if stopping and now >= deadline:
                for _, process in running.values():
                    process.kill()
            waiting = [
                left[0]
                for name, left in todo.items()
                if left and name not in running and name not in failed and ready(left[0], without(todo, failed))
            ]
            if not stopping:
                for stage in waiting[: parallel - len(running)]:
                    running[stage.variant] = stage, launch(stage)
            if not running and (stopping or not waiting):
                return failed
            time.sleep(poll)
    finally:
        end([process for _, process in running.values()], reserve)


def end(processes: Sequence[subprocess.Popen], seconds: float) -> None:
    """Asks processes to save and stop, and waits until they have, at most so many seconds."""
    for process in processes:
        process.terminate()
    until = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(max(until - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def without(todo: dict[str, list[Stage]], failed: dict[str, str]) -> dict[str, list[Stage]]:
    """What may still be done."""
    return {name: left for name, left in todo.items() if name not in failed}


def _nats(bins: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Losses by position as a result has them."""
    return [{"from": row["from"], "to": row["to"], "nats": row["loss"]} for row in bins]


def read(workdir: pathlib.Path, fields: dict[str, Any]) -> dict[str, Any]:
    """The results of a finished variant."""
    from benchmarks import extend

    run = extend.read(workdir)
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    curve = [
        {"step": row["step"], "tokens": row["step"] * run["tokens_per_step"], "bits_per_byte": bits}
        | ({"task_nats": row["val/loss/tasks"]} if "val/loss/tasks" in row else {})
        for row in rows
        if (bits := row.get("val/bits_per_byte/text", row.get("val/bits_per_byte"))) is not None
    ]
    validated = json.loads((workdir / "validation.jsonl").read_text().splitlines()[-1])["position"]
    env = json.loads((workdir / "env.json").read_text())
    config = env["config"]
    found = {
        "variant": workdir.name,
        "length": config["data"]["seq_len"],
        "tokens": curve[-1]["tokens"],
        "parameters": run["parameters"]["total"],
        "bits_per_byte": curve[-1]["bits_per_byte"],
        "tokens_per_second": round(run["tokens_per_second"]),
        "by_position": _nats(run["by_position"]),
        "validation_by_position": _nats(validated),
        "fields": fields,
        "data": env.get("data", {}).get("splits"),
        "validation": curve,
        "device": run["device"],
        "versions": run["versions"],
        "git": run["git"],
    }
    for stage in ("long", "context"):
        found[stage] = json.loads(_at(workdir, stage).read_text())["tasks"][stage]
    if _at(workdir, "selection").is_file():
        found["selection"] = json.loads(_at(workdir, "selection").read_text())
    return found


def draw(rows: Sequence[dict[str, Any]], folder: pathlib.Path, prefix: str = "") -> None:
    """Bits per byte over tokens, loss by position and long tasks by length: one picture each, of what was measured."""
    from matplotlib.figure import Figure

    from benchmarks import curves
    from nsa_jax.evaluate.long_context import plot_tasks

    folder.mkdir(parents=True, exist_ok=True)
    seen = {row["variant"]: row["validation"][-1]["tokens"] for row in rows}
    whole = {variant: tokens >= 0.9 * max(seen.values()) for variant, tokens in seen.items()}

    def label(row: dict[str, Any]) -> str:
        less = "" if whole[row["variant"]] else f", {seen[row['variant']] / 1e6:.0f} million tokens"
        return f"{row['variant']}{less}"

    runs = [{"name": row["variant"], "validation": row["validation"]} for row in rows]
    curves.draw(runs).savefig(folder / f"{prefix}tokens.png", dpi=130)
    # Losses by position compare after equally many tokens alone.
    measured = [row for row in rows if row.get("by_position") and whole[row["variant"]]]
    if measured:
        figure = Figure(figsize=(7, 4.2), layout="constrained")
        axes = figure.add_subplot()
        base = next((row for row in measured if row["variant"] == "dense"), measured[0])
        for row in measured:
            pairs = list(zip(row["by_position"], base["by_position"], strict=False))
            axes.plot(
                [r["to"] for r, _ in pairs], [r["nats"] - b["nats"] for r, b in pairs], "o-", label=row["variant"]
            )
        axes.set_xscale("log", base=2)
        axes.set(xlabel="position in the row, up to", ylabel=f"nats per byte more than {base['variant']}")
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(folder / f"{prefix}position.png", dpi=130)
    if cells := {label(row): row["long"]["cells"] for row in rows if "long" in row}:
        plot_tasks(cells, folder / f"{prefix}long.png")


def merge(path: pathlib.Path, other: pathlib.Path, folder: pathlib.Path) -> None:
    """Puts the rows of another result into that of `path`, in place of those of the same variant and length.

    Raises:
      SystemExit: one of the results is not there.
    """
    if missing := [file for file in (path, other) if not file.is_file()]:
        raise SystemExit(f"--merge: {missing[0]}: no such file; a result is what --json wrote")
    result, more = (json.loads(file.read_text()) for file in (path, other))
    rows = {(row["variant"], row["length"]): row for row in (*result["rows"], *more["rows"])}
    path.write_text(json.dumps(result | {"rows": list(rows.values())}, indent=1) + "\n")
    for length in sorted({row["length"] for row in result["rows"] + more["rows"]}):
        draw([row for row in rows.values() if row["length"] == length], folder, f"{path.stem}_{length}_")


def report(options: argparse.Namespace, grid: Any, fields: dict[str, dict[str, Any]]) -> None:
    """Writes the results of all variants that are finished, and prints a table."""
    rows = []
    for name in options.variants:
        if _finished(options.folder / name) and all(_at(options.folder / name, s).is_file() for s in STAGES[1:4]):
            rows.append(read(options.folder / name, fields[name]))
    if not rows:
        return
    result = {
        "command": ["python", *sys.argv],
        "grid": grid.get_config().name,
        "parallel": 1 if options.gpus else options.parallel,
        "measures": grid.MEASURES,
        "rows": rows,
    }
    path = options.json or options.folder / "results.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(f"{path.name}.tmp").write_text(json.dumps(result, indent=1) + "\n")
    path.with_name(f"{path.name}.tmp").replace(path)
    draw(rows, options.plots or options.folder)
    print(
        "\n| variant | parameters | tokens | bits per byte | last positions | long tasks | tokens/s |\n"
        + "|---" * 7
        + "|"
    )
    for row in rows:
        exact = [cell["exact_match"] for cell in row["long"]["cells"]]
        print(
            f"| {row['variant']} | {row['parameters']:,} | {row['tokens']:,} | {row['bits_per_byte']:.4f} | "
            f"{row['by_position'][-1]['nats']:.4f} | {sum(exact) / len(exact):.1%} | {row['tokens_per_second']:,} |"
        )
    if other := [row["variant"] for row in rows if row["data"] != rows[0]["data"]]:
        print(f"\nnot comparable: {', '.join(other)} read other text than {rows[0]['variant']}; the files have changed")
    print(flush=True)


def main() -> int:
    """Reads flags and runs what is left; the status is 0 if all is done, 1 if something failed, 75 if stopped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", help="a file such as configs/quality/h200_8k.py")
    parser.add_argument("--merge", type=pathlib.Path, help="train nothing: put the rows of this result into --json")
    parser.add_argument("--variants", help="comma separated; default: all of the grid")
    parser.add_argument("--folder", type=pathlib.Path, help="of all runs; default: runs/quality/GRID")
    parser.add_argument("--files", nargs="*", default=[], help="folders of the source text instead of all packages")
    parser.add_argument("--parallel", type=int, default=1, help="variants at once, each with its share of the memory")
    parser.add_argument("--gpus", type=int, default=0, help="variants at once, each on a GPU of its own")
    parser.add_argument("--minutes", type=float, default=0.0, help="stop in time, with everything saved; 0: no limit")
    parser.add_argument("--reserve", type=float, default=60.0, help="seconds of --minutes that saving may take")
    parser.add_argument("--json", type=pathlib.Path, help="default: results.json in the folder")
    parser.add_argument("--plots", type=pathlib.Path, help="folder of the pictures; default: that of the runs")
    own, flags = sys.argv[1:], []
    if "--" in own:
        own, flags = own[: own.index("--")], own[own.index("--") + 1 :]
    options = parser.parse_args(own)
    options.flags = flags
    if options.merge:
        if not options.json:
            parser.error("--merge needs --json: the result that the rows are put into")
        merge(options.json, options.merge, options.plots or options.json.parent)
        return 0
    if not options.grid:
        parser.error("--grid is missing: a file such as configs/quality/h200_8k.py")
    begin = time.monotonic()
    options.parallel = options.gpus or options.parallel
    launcher = Launcher(options.parallel, options.gpus)
    os.environ["JAX_PLATFORMS"] = "cpu"  # this process counts parameters, and leaves the device to the others
    grid = load_grid(options.grid)
    options.variants = options.variants.split(",") if options.variants else list(grid.VARIANTS)
    if unknown := [name for name in options.variants if name not in grid.VARIANTS]:
        raise SystemExit(f"--variants: {options.grid} has no {unknown[0]!r}; it has {', '.join(grid.VARIANTS)}")
    options.folder = (options.folder or ROOT / "runs" / "quality" / pathlib.Path(options.grid).stem).absolute()
    options.files = [str(pathlib.Path(file).absolute()) for file in options.files]
    options.grid = str(pathlib.Path(options.grid).absolute())
    fields = {name: variant_config(grid, name)[1] for name in options.variants}
    todo = {name: stages(options, grid, name) for name in options.variants}
    deadline = begin + options.minutes * 60 if options.minutes else float("inf")

    def interrupted(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupted)
    try:
        failed = schedule(
            todo,
            launcher,
            parallel=options.parallel,
            deadline=deadline,
            reserve=options.reserve,
            on_finished=lambda _: report(options, grid, fields),
        )
    except KeyboardInterrupt:
        print("interrupted: the runs were stopped, and the same command resumes them")
        failed = {}
    left = [f"{name}: {stage.name}" for name, part in todo.items() for stage in part[:1] if name not in failed]
    for name, why in failed.items():
        print(f"failed: {name}: {why}")
    if left:
        print(f"left for the next call: {', '.join(left)}")
    return 1 if failed else 75 if left else 0


if __name__ == "__main__":
    sys.exit(main())
