"""The two examinations: of a config before it is started, and of a run before its first step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax
from jax.sharding import AbstractMesh, Mesh
from ml_collections import ConfigDict

from nsa_jax import aot
from nsa_jax import config as config_lib
from nsa_jax.config import ConfigError, Problem
from nsa_jax.data import Pipeline
from nsa_jax.fields import check_fields
from nsa_jax.ops.pallas import has_cudnn
from nsa_jax.ops.target import current_target
from nsa_jax.train.compile_ahead import THREADS, while_tracing
from nsa_jax.train.env import explain_step
from nsa_jax.train.preflight import cost as cost_lib
from nsa_jax.train.preflight import data_check
from nsa_jax.train.preflight import memory as memory_lib
from nsa_jax.train.preflight import selftest as selftest_lib
from nsa_jax.train.preflight.checks import (
    check_disk,
    check_float8,
    check_kernels,
    check_memory,
    check_save_interval,
    check_workdir,
    takes_cudnn,
)
from nsa_jax.train.preflight.data_check import NOT_CHECKED
from nsa_jax.train.preflight.report import Report, cost_facts, gib, kernel_facts, memory_facts, program_facts
from nsa_jax.train.program_store import ProgramStore
from nsa_jax.train.state import Setup
from nsa_jax.train.trackers import problems as tracker_problems

_SEARCH_UNTIL = 90.0  # seconds since the start, at which the search for the largest micro-batch should be over


def examine(
    config: ConfigDict,
    workdir: Path,
    *,
    target: str = "",
    devices: int = 0,
    doing: Callable[[str], None] = lambda part: None,
) -> Report:
    """Everything that can be known without training.

    Nothing is downloaded but a tokenizer of the hub, and nothing written but the cache of small text.

    Args:
      config: the training config; it need not be valid.
      workdir: of the run.
      target: a name in `aot.GPUS`; empty: `config.preflight.target`, and if that is empty too, this machine.
      devices: how many; 0: `config.preflight.devices`. Only read with a target.
      doing: told the name of each part as it begins.

    Returns:
      The report.
    """
    start = time.perf_counter()
    report = Report(problems=config_lib.validate(config))
    if check_fields(config, config_lib.default_config())[1]:
        return report
    report.problems += check_workdir(config, workdir) + tracker_problems(config.train.trackers)
    if _runnable(config):
        gpu, count = target or config.preflight.target, devices or config.preflight.devices
        _data_and_selftest(config, report, None, doing)
        assert report.data is not None
        vocab = report.data.vocab_size or memory_lib.vocabulary(config)
        before, report.facts = report.facts, {}
        began = time.perf_counter()
        _examine_program(config, workdir, gpu, count, vocab, start, report, doing)
        report.facts.update(before)
        report.seconds["program"] = time.perf_counter() - began
    report.settle(config)
    report.took = time.perf_counter() - start
    return report


@while_tracing()
def before_run(
    config: ConfigDict,
    workdir: Path,
    made: Setup,
    pipeline: Pipeline,
    doing: Callable[[str], None] = lambda part: None,
    store: ProgramStore | None = None,
    selftest: Future[selftest_lib.SelfTest] | None = None,
) -> Report:
    """What every run checks before its first step, on the devices it has.

    Args:
      config: validated.
      workdir: of the run.
      made: its setup.
      pipeline: its data.
      doing: told the name of each part as it begins.
      store: has compiled programs of earlier starts.
      selftest: what `begin_selftest` has returned, if the self-test has begun.

    Returns:
      The report, without errors.

    Raises:
      ConfigError: something is wrong; nothing has been trained.
    """
    began = time.perf_counter()
    report = Report(problems=check_workdir(config, workdir))
    _data_and_selftest(config, report, pipeline, doing, store, selftest)
    start = time.perf_counter()
    kind = made.mesh.devices.flat[0].device_kind
    report.cost = _cost(config, made, made.mesh.size, kind, report)
    report.problems += check_save_interval(config, report.cost)
    if jax.process_index() == 0:
        report.problems += check_disk(config, workdir, made.checkpoint_bytes())
    report.problems += check_kernels(config, made, "") + check_float8(config, made, "")
    report.seconds["program"] = time.perf_counter() - start
    report.problems += [problem for problem in config_lib.validate(config) if problem.severity == "error"]
    report.took = time.perf_counter() - began
    report.settle(config)
    if report.exit_code:
        raise ConfigError([problem for problem in report.problems if problem.severity == "error"])
    return report


def _runnable(config: ConfigDict) -> bool:
    """Whether a model and batches can be made of the config at all."""
    return not any(p.severity == "error" and p.rule in config_lib.FATAL for p in config_lib.validate(config))


def _selftest(config: ConfigDict, store: ProgramStore | None) -> selftest_lib.SelfTest:
    with jax.default_device(jax.local_devices()[0]):
        return selftest_lib.selftest(config, store)


def begin_selftest(config: ConfigDict, store: ProgramStore | None) -> Future[selftest_lib.SelfTest] | None:
    """Has a run's self-test made in a thread, for `before_run`; None if the run makes none. It needs no data."""
    if not config.preflight.selftest:
        return None
    thread = ThreadPoolExecutor(1, thread_name_prefix=THREADS)
    try:
        return thread.submit(_selftest, config, store)
    finally:
        thread.shutdown(wait=False)


def _data_and_selftest(
    config: ConfigDict,
    report: Report,
    pipeline: Pipeline | None,
    doing: Callable[[str], None],
    store: ProgramStore | None = None,
    selftest: Future[selftest_lib.SelfTest] | None = None,
) -> None:
    """Looks at the data while the self-test, which mostly waits for the compiler, runs."""
    looked: Future[tuple[data_check.DataReport, float]] = Future()

    def look() -> None:
        start = time.perf_counter()
        try:
            found = data_check.examine(config, pipeline) if pipeline else data_check.examine_local(config)
            looked.set_result((found, time.perf_counter() - start))
        except BaseException as error:
            looked.set_exception(error)

    threading.Thread(target=look, name="data check", daemon=True).start()
    tested = None
    if config.preflight.selftest:
        doing("data and self-test")
        try:
            tested = selftest.result() if selftest is not None else _selftest(config, store)
        except Exception as error:
            if looked.done() and (of_data := looked.exception()):
                raise of_data from error
            raise
    if not looked.done():
        doing("data")
    report.data, report.seconds["data"] = looked.result()
    report.problems += report.data.problems
    report.facts["data"] = report.data.facts
    if tested is not None:
        report.problems += tested.problems
        report.facts["self-test"] = tested.facts
        report.seconds["self-test"] = tested.seconds
    else:
        report.facts["self-test"] = [(NOT_CHECKED, "config.preflight.selftest is False: causality is taken on trust")]


def _cost(config: ConfigDict, made: Setup, devices: int, kind: str, report: Report) -> cost_lib.Cost:
    return cost_lib.estimate(
        made.model_config,
        seq_len=config.data.seq_len,
        batch_size=config.train.batch_size,
        steps=config.train.steps,
        device_kind=kind,
        devices=devices,
        utilisation=config.preflight.utilisation,
        segment_start=report.data.segment_start if report.data else None,
    )


def _examine_program(
    config: ConfigDict,
    workdir: Path,
    gpu: str,
    count: int,
    vocab: int,
    start: float,
    report: Report,
    doing: Callable[[str], None],
) -> None:
    """Sets the run up for its target and looks at cost, disk and the compiled program."""
    doing("setting up the target")
    estimated = None
    try:
        if gpu:
            memory_lib.device_bytes(gpu)  # a limit that cannot be read is reported before anything is compiled
        try:
            made = memory_lib.for_target(config, gpu, count, vocab)
            mesh: Mesh | AbstractMesh = made.mesh
        except aot.AheadOfTimeUnavailable as error:
            report.problems.append(Problem("R027", "warning", str(error), "install it for exact figures"))
            made, mesh = memory_lib.without_compiler(config, count, vocab)
            estimated = memory_lib.estimate(made, gpu, mesh)
    except ConfigError as error:
        report.problems += error.problems
        return
    size = mesh.size
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    kind = cost_lib.device_kind(gpu) if gpu else made.mesh.devices.flat[0].device_kind
    report.cost = _cost(config, made, size, kind, report)
    checkpoint = made.checkpoint_bytes()
    report.facts["run"] = [
        ("target", f"{size} x {kind}"),
        ("mesh", ", ".join(f"{axis} {n}" for axis, n in mesh.shape.items())),
        ("parameters", f"{made.num_parameters():,} (vocabulary {made.model_config.vocab_size:,})"),
        (
            "batch",
            f"{config.train.batch_size} x {config.data.seq_len:,} tokens, "
            f"{config.train.batch_size // config.train.grad_accum // shards} rows of "
            f"{config.data.seq_len // mesh.shape['context']:,} tokens per device and micro-batch",
        ),
        ("one checkpoint", gib(checkpoint)),
    ]
    report.facts["cost"] = cost_facts(report.cost, size, kind)
    target = aot.GPUS[gpu].target if gpu else current_target()
    explained = explain_step(made, target)
    if explained is not None:
        report.facts["kernels"] = kernel_facts(explained)
    report.problems += check_save_interval(config, report.cost)
    report.problems += check_disk(config, workdir, checkpoint)
    report.problems += check_kernels(config, made, gpu) + check_float8(config, made, gpu)
    if estimated is not None:
        report.memory = estimated
        report.problems += check_memory(report, gpu, size)
        report.facts["memory per device"] = memory_facts(report, gpu)
        missing = "collectives, host callbacks and determinism need the compiler, pip install 'nsa_jax[aot]'"
        report.facts["compiled program"] = [(NOT_CHECKED, missing)]
    else:
        _compile_part(config, made, gpu, vocab, start, report, doing)


def _compile_part(
    config: ConfigDict,
    made: Setup,
    gpu: str,
    vocab: int,
    start: float,
    report: Report,
    doing: Callable[[str], None],
) -> None:
    devices = made.mesh.size
    report.compiled = memory_lib.compile_run(made, gpu, doing)
    report.memory = report.compiled.memory
    if gpu:
        doing("searching the largest micro-batch")
        left, one = _SEARCH_UNTIL - (time.perf_counter() - start), report.compiled.seconds["train step"]
        known = report.compiled.memory
        report.micro_batch = memory_lib.largest_micro_batch(config, gpu, devices, known, vocab, left, one)
    if report.compiled.host:
        message = f"the compiled step talks to the host: {report.compiled.host[0][:160]}"
        report.problems.append(Problem("R026", "error", message, "remove callbacks and prints from the model"))
    report.problems += check_memory(report, gpu, devices)
    report.facts["memory per device"] = memory_facts(report, gpu)
    report.facts["compiled program"] = program_facts(config, report.compiled)
    if gpu and takes_cudnn(config, made) and not has_cudnn():
        standing_in = "compiled with this library's kernels, which stand in for cuDNN's: cuDNN is not on this machine"
        report.facts["compiled program"].append(("dense attention", standing_in))
