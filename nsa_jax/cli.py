"""The command `nsa-jax`: every program of the package by its name.

    nsa-jax train quickstart --config.train.steps=100
    nsa-jax preflight configs/a100_prod.py --target=h100 --devices=8
    nsa-jax generate runs/quickstart --prompt "def "
    nsa-jax evaluate runs/quickstart
    nsa-jax convert Qwen/Qwen3-0.6B converted/qwen
    nsa-jax export runs/quickstart exported/quickstart
    nsa-jax inspect runs/quickstart --text notes.txt
    nsa-jax report runs/quickstart
    nsa-jax doctor

`train` and `preflight` take a config first: a file, or the name of one that comes with the package. `nsa-jax COMMAND
--help` lists the options. `doctor` shows on one screen what the machine has. The same programs are train.py
(with --preflight) and python -m nsa_jax.COMMAND.
"""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Sequence

from nsa_jax.extras import MissingExtra, extra, installed_version

EXIT_USAGE = 2
TRAINING = ("train", "preflight")
TOOLS = ("generate", "evaluate", "convert", "export", "inspect", "report", "doctor")
_MODULES = {name: f"nsa_jax.{name}.__main__" for name in ("inspect", "report")}


def _train(command: str, arguments: Sequence[str]) -> None:
    with extra("train"):
        from nsa_jax import trainer

    signal.signal(signal.SIGINT, trainer.end_at_once)
    found = list(arguments)
    if found and not found[0].startswith("-"):
        found[0] = f"--config={found[0]}"
    trainer.start([f"nsa-jax {command}", *found, *(["--preflight"] if command == "preflight" else [])])


def _tool(command: str, arguments: Sequence[str]) -> int:
    with extra("report" if command == "report" else "train"):
        module = importlib.import_module(_MODULES.get(command, f"nsa_jax.{command}"))
    return module.main(arguments)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program that the first argument names; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if arguments else EXIT_USAGE
    command, *rest = arguments
    if command == "--version":
        print(installed_version())
        return 0
    try:
        if command in TRAINING:
            _train(command, rest)  # exits
        if command in TOOLS:
            return _tool(command, rest)
        problem = f"{command!r} is no command: choose from {', '.join(TRAINING + TOOLS)}"
    except MissingExtra as error:
        problem = str(error)
    print(f"error: {problem}", file=sys.stderr)
    return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
