"""The training program: what train.py and `nsa-jax train` run. `python train.py --help` lists its flags."""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags
from ml_collections import ConfigDict

from nsa_jax.command_line import OVERRIDE, collect_overrides, forgive, load_config, override, workdir_problems
from nsa_jax.config import ConfigError, Problem, check, default_config
from nsa_jax.exit_status import (
    EXIT_AGAIN,
    EXIT_CONFIG,
    EXIT_FAULT,
    EXIT_GUARD,
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
)
from nsa_jax.fields import check_fields, nearest, walk
from nsa_jax.object_store import scheme_of
from nsa_jax.ops.gpus import GPUS
from nsa_jax.stacks import stacks_on_signal

_CONFIG = flags.DEFINE_string("config", None, "The run's config, a file in configs/.")
_OVERRIDES = flags.DEFINE_multi_string(OVERRIDE, [], "Any field of the config, such as --config.train.steps=100.")
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Where the run is written, a directory or s3://... or gs://...; default: runs/<config.name>."
)
_RESUME = flags.DEFINE_string(
    "resume", None, "Start from another run's checkpoint, DIR or DIR@STEP, or from an exported model."
)
_INIT = flags.DEFINE_string("init", None, "Start with the weights of an exported or converted model, at step 0.")
_STAGE = flags.DEFINE_bool(
    "stage", False, "Begin another stage of the run that --resume names: its weights and optimizer, this config's data."
)

_PREFLIGHT = flags.DEFINE_bool("preflight", False, "Examine the run instead of starting it; exits with 0 or 2.")
_TARGET = flags.DEFINE_enum(
    "target",
    None,
    list(GPUS),
    "Preflight: compile for this GPU, which need not be here; default: config.preflight.target.",
)
_DEVICES = flags.DEFINE_integer(
    "devices", None, "Preflight: number of those GPUs; default: config.preflight.devices.", lower_bound=1
)
_PROFILE = flags.DEFINE_string(
    "profile", None, "START:STOP writes a trace of steps START to STOP - 1 to WORKDIR/profile (xprof, Perfetto)."
)
_DISTRIBUTED = flags.DEFINE_bool(
    "distributed",
    None,
    "Several processes: true if there must be others, false if this one trains alone; default: if a cluster is found.",
)
_COORDINATOR = flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0, where nothing else names it.")
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "Processes of the run; with --coordinator.", lower_bound=1)
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "Index of this process; with --coordinator.", lower_bound=0)

_CLEAR = "\r\x1b[2K"  # the line that the cursor is on


def _answer(line: str) -> None:
    """Writes a line to stderr, from any thread; on a terminal in place of the status line."""
    os.write(2, f"{_CLEAR if sys.stderr.isatty() else ''}{line}\n".encode())


def end_at_once(number: int, _frame: object = None) -> None:
    """Answers Ctrl-C while there is nothing to save or to undo, such as while modules are imported."""
    if number == signal.SIGINT:
        _answer("interrupted before training began; nothing was changed. Start again with the same command")
        os._exit(EXIT_INTERRUPTED)


def preflight(config, workdir: str, target: str, devices: int) -> int:
    """Examines the run and prints the report; returns the exit status."""
    # A preflight downloads nothing.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # The compiler's warnings are about its own speed and its database of measurements; its errors are raised.
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    logging.getLogger("nsa_jax").setLevel(logging.WARNING)
    from rich.console import Console

    from nsa_jax.train import preflight as preflight_lib
    from nsa_jax.train import stopping
    from nsa_jax.train.mirror import local_directory
    from nsa_jax.train.terminal import Terminal

    directory = local_directory(workdir, check_fields(config, default_config())[0].train.local_dir)
    terminal = Terminal(sys.stderr)

    def doing(part: str) -> None:
        if terminal.live:
            terminal.doing(f"preflight: {part}")
        else:
            terminal.say(f"preflight: {part}")

    try:
        with stopping.listening(end_at_once):
            report = preflight_lib.examine(config, directory, target=target, devices=devices, doing=doing)
    finally:
        terminal.close()
    forgive(sys.stdout)
    preflight_lib.show(report, Console(width=None if sys.stdout.isatty() else 120))
    return report.exit_code


class _Interrupts:
    """Ctrl-C until training begins: it is answered at once, and the main thread unwinds when it can.

    The loop answers later ones.
    """

    def __init__(self):
        self._count = 0

    def begin(self) -> None:
        """Installs the handler. `heard` must be listening already, because it gives the answer."""
        signal.signal(signal.SIGINT, self._unwind)

    def heard(self, number: int) -> None:
        """Called in another thread, also while the main thread compiles."""
        if number != signal.SIGINT:
            return
        self._count += 1
        if self._count > 1:
            os._exit(EXIT_INTERRUPTED)
        _answer("interrupted before training began: ending; once more ends at once")

    def _unwind(self, number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))
        raise KeyboardInterrupt


class _Log(logging.Handler):
    """Writes to what is sys.stderr at the time: a terminal's status line stays below."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


class _TerminalFormatter(logging.Formatter):
    """Messages as they are; what is more than information is called by its level."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if record.levelno <= logging.INFO else f"{record.levelname.lower()}: {text}"


def log_plainly() -> None:
    """Logs the library's messages and all warnings: a terminal gets the messages, a file date and level too."""
    handler = _Log()
    dated = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S")
    handler.setFormatter(_TerminalFormatter() if sys.stderr.isatty() else dated)
    logging.getLogger().handlers[:] = [handler]  # absl's, which puts file and line before each
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("nsa_jax").setLevel(logging.INFO)


def _tell_others_apart(process: int, count: int) -> None:
    """Log lines name their process; all but the first keep to warnings."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(logging.Formatter(f"[{process}/{count}] %(asctime)s %(levelname)s %(name)s: %(message)s"))
    if process:
        logging.getLogger("nsa_jax").setLevel(logging.WARNING)


def beginning(resume: str | None, init: str | None, workdir: str) -> str | None:
    """What a run without checkpoints of its own begins with, from the values of --resume and --init.

    If the workdir has a checkpoint, the model that --init names is not needed, and may be gone; what an object store
    has is looked at later.

    Raises:
      ConfigError: both are given, one is empty, or `init` is no exported model.
    """
    for flag, value in (("--resume", resume), ("--init", init)):
        if value is not None and not value.strip():
            fix = "name what to begin with, or leave it out"
            raise ConfigError([Problem("R022", "error", f"{flag} is empty", fix)])
    from nsa_jax.hub.load import split_step
    from nsa_jax.train.errors import newest_checkpoint

    if init is None:
        return resume
    if resume is not None:
        fix = "leave out one of them"
        raise ConfigError([Problem("R022", "error", f"--init={init} --resume={resume}: a run has one beginning", fix)])
    if scheme_of(workdir):  # the model may be gone if the store has a checkpoint; a run is no model in any case
        needed = bool(scheme_of(init)) or Path(split_step(init)[0]).expanduser().exists()
    else:
        needed = newest_checkpoint(Path(workdir)) is None
    if needed and not (Path(init).expanduser() / "config.json").is_file():
        fix = "name a directory that convert or export wrote; --resume=RUN goes on from a run"
        raise ConfigError([Problem("R022", "error", f"--init={init}: no exported model there", fix)])
    return init


def train(config, workdir: str) -> tuple[int, str]:
    """Trains; returns the exit status and, if something went wrong, what."""
    from nsa_jax.data import DataError
    from nsa_jax.hub.export_files import LoadError
    from nsa_jax.train import CheckpointError, TrainingError, WorkdirInUse, processes, run
    from nsa_jax.train.errors import find_cause
    from nsa_jax.train.profiling import parse_window
    from nsa_jax.train.timing import process_start

    try:
        window = parse_window(_PROFILE.value) if _PROFILE.value else None
        cluster = processes.from_flags(_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value, _DISTRIBUTED.value)
        if cluster is not None:
            processes.join(cluster, config.guards.peer_seconds)
            _tell_others_apart(cluster.process_id, cluster.num_processes)
            processes.check_same_run(config, workdir)
        resume = beginning(_RESUME.value, _INIT.value, workdir)
        summary = run(
            config, workdir, resume, profile=window, stage=_STAGE.value, began=process_start(), store_programs=True
        )
    except (ConfigError, CheckpointError, DataError, LoadError, WorkdirInUse, processes.DistributedError) as error:
        print(error, file=sys.stderr)
        return EXIT_CONFIG, str(error)
    except TrainingError as error:
        print(f"stopped: {error}", file=sys.stderr)
        find_cause(error)
        return (EXIT_AGAIN if error.guard == "upload" else EXIT_GUARD), str(error)
    if summary.get("terminated"):
        return (EXIT_AGAIN if summary["saved"] else EXIT_TERMINATED), ""
    return 0, ""


def read_config() -> tuple[ConfigDict, list[Problem]]:
    """The config that the flags ask for, and what is wrong with the overrides.

    Raises:
      ConfigError: its file is at fault.
    """
    config = load_config(_CONFIG.value or "")
    return config, override(config, _OVERRIDES.value)


def main(argv: list[str]) -> int:
    """Validates the config and trains; returns the exit status."""
    with stacks_on_signal(sys.stderr):
        return _main(argv)


def _main(argv: list[str]) -> int:
    if len(argv) > 1:
        print(f"unexpected arguments: {' '.join(argv[1:])}; flags start with --", file=sys.stderr)
        return EXIT_CONFIG
    if (_TARGET.value or _DEVICES.value) and not _PREFLIGHT.value:
        print(
            "--target and --devices say what --preflight compiles for: add --preflight, or leave them out",
            file=sys.stderr,
        )
        return EXIT_CONFIG
    log_plainly()
    logging.getLogger("absl").setLevel(logging.ERROR)
    # Each of Orbax's threads logs, with all its frames, the error that the trainer is given and explains.
    logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)

    try:
        config, problems = read_config()
        workdir = os.path.expanduser(
            f"runs/{check_fields(config, default_config())[0].name}" if _WORKDIR.value is None else _WORKDIR.value
        )
        problems += workdir_problems(workdir)
        if problems or not _PREFLIGHT.value:  # otherwise the preflight's report shows what there is
            for problem in check(config, problems):
                print(problem, file=sys.stderr)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_CONFIG
    target = (_TARGET.value or config.preflight.target) if _PREFLIGHT.value else ""
    if _DEVICES.value and not target:
        message = f"--devices={_DEVICES.value} counts the GPUs of --target: add --target, or leave it out"
        print(f"{message} to look at this machine", file=sys.stderr)
        return EXIT_CONFIG

    from nsa_jax.devices import choose_platform

    choose_platform(cpu=bool(target))
    if _PREFLIGHT.value:
        return preflight(config, workdir, target, _DEVICES.value or config.preflight.devices)

    # Imported after the check: from here on devices are used.
    from nsa_jax.train import processes, stopping
    from nsa_jax.train.compile_ahead import compiling
    from nsa_jax.train.errors import find_cause

    interrupts = _Interrupts()
    try:
        with stopping.listening(interrupts.heard):
            interrupts.begin()
            status, why = train(config, workdir if scheme_of(workdir) else str(Path(workdir).absolute()))
    except KeyboardInterrupt:
        processes.leave(EXIT_INTERRUPTED, "interrupted")
        logging.shutdown()
        os._exit(EXIT_INTERRUPTED)  # a normal exit crashes where a compilation was interrupted
    except BaseException as error:
        if processes.peers() is not None:
            traceback.print_exc()
            find_cause(error)
            processes.leave(EXIT_FAULT, f"{type(error).__name__}: {error}")
        raise
    processes.leave(status if why else 0, why)  # whoever was asked to stop leaves in good order
    if status and compiling():
        logging.shutdown()
        sys.stdout.flush()
        os._exit(status)  # a normal exit would wait for the compiler, for up to a minute
    return status


def parse_flags(argv: list[str]) -> list[str]:
    """Parses flags; one that does not exist, or a value of another type, is one line and status 2."""
    if {"-h", "--help"} & set(argv[1:]):  # absl's lists the flags of the main module alone, and ends with 1
        print(sys.modules["__main__"].__doc__ or __doc__, flags.FLAGS.module_help(__name__), sep="\n")
        sys.exit(0)
    try:
        return flags.FLAGS(collect_overrides(flags.FLAGS.read_flags_from_files(argv, force_gnu=False)))
    except (flags.Error, AttributeError, TypeError, ValueError) as error:
        meant = nearest(getattr(error, "flagname", ""), dict(walk(default_config())))
        hint = f" Or --config.{meant}?" if isinstance(error, flags.UnrecognizedFlagError) and meant else ""
        print(f"the flags cannot be used: {' '.join(str(error).split())}{hint}", file=sys.stderr)
        sys.exit(EXIT_CONFIG)


def start(argv: Sequence[str] | None = None) -> None:
    """Runs the program with its arguments, the program's name first (None: those of the process), and exits."""
    flags.mark_flag_as_required("config")
    app.run(main, argv=None if argv is None else list(argv), flags_parser=parse_flags)
