"""Which implementation serves an op: the reference, plain XLA or the GPU kernels."""

from __future__ import annotations

import importlib
import logging
import threading
import types
import warnings
from typing import Any

from nsa_jax.ops import checks, plan
from nsa_jax.ops.target import current_target

logger = logging.getLogger("nsa_jax")

IMPLEMENTATIONS = ("reference", "xla", "pallas")  # modules of nsa_jax.ops

_SERVED: dict[str, str] = {}
_SERVING = threading.Lock()  # programs are traced by several threads
_WARNED: set[str] = set()


def implementations_served() -> dict[str, str]:
    """Which implementation served each op most recently, by op name: {"selected_attention": "pallas", ...}."""
    return dict(_SERVED)


def forget_implementations_served() -> None:
    """Empties what `implementations_served` returns: a run that starts is not to be told what another one used."""
    _SERVED.clear()


def remembered() -> dict[str, Any]:
    """What tracing has left here, as JSON values: what served each op, and the warnings that were given."""
    with _SERVING:
        return {"served": dict(_SERVED), "warned": sorted(_WARNED)}


def recall(record: dict[str, Any]) -> None:
    """Records, and warns of, what `remembered` returned when a program that has just been loaded was compiled."""
    for op, chosen in record["served"].items():
        _record(op, chosen, "when the program was compiled")
    for message in record["warned"]:
        _warn_once(message)


def module(implementation: str) -> types.ModuleType:
    """An implementation's module, imported when first used: the kernels' dependencies load only where they run."""
    return importlib.import_module(f"nsa_jax.ops.{implementation}")


def kernels_wanted(implementation: str | None) -> bool:
    """Whether `implementation` means the kernels on the current device, if they support the inputs."""
    return implementation == "pallas" or (implementation is None and current_target().is_gpu)


def choose(
    op: str, implementation: str | None, shape: plan.Shape, *, select_block: int | None = None
) -> types.ModuleType:
    """Picks the module that serves `op`, records it, and logs it for the first op and for each that differs.

    Args:
      op: the public op's name.
      implementation: one of `IMPLEMENTATIONS`, or None for the best that supports the inputs on this device.
      shape: the op's sizes.
      select_block: l', where the op ranks selection blocks of `shape.num_keys` keys.
    """
    checks.require(
        implementation is None or implementation in IMPLEMENTATIONS,
        f"implementation={implementation!r}: must be None or one of {sorted(IMPLEMENTATIONS)}",
    )
    target = current_target()
    why = "asked for"
    if kernels_wanted(implementation):
        reason = plan.unsupported(op, shape, target, select_block=select_block)
        if implementation == "pallas":
            if reason is not None:
                raise NotImplementedError(f"{op}(implementation='pallas'): {reason}")
            if not target.is_gpu:
                _warn_once(
                    f"{op}(implementation='pallas') runs in interpret mode on {target.platform}: correct and very slow"
                )
        elif reason is None:
            implementation, why = "pallas", "the GPU kernels"
        else:
            implementation, why = "xla", f"not pallas: {reason}"
            _warn_once(
                f"{op} runs as 'xla' on this GPU, slower than the kernels: {reason}. Fix: change what it names, or "
                "accept it with implementation='xla'"
            )
    elif implementation is None:
        implementation, why = "xla", f"no GPU (platform {target.platform})"
    chosen = implementation or "xla"
    _record(op, chosen, why)
    return module(chosen)


def _record(op: str, chosen: str, why: str) -> None:
    with _SERVING:
        usual = next(iter(_SERVED.values()), None)
        if usual is None:
            logger.info("the ops are served by %r (%s)", chosen, why)
        elif _SERVED.get(op, usual) != chosen:
            logger.info("%s is served by %r (%s)", op, chosen, why)
        _SERVED[op] = chosen


def _warn_once(message: str) -> None:
    if message not in _WARNED:
        _WARNED.add(message)
        warnings.warn(message, stacklevel=4)
