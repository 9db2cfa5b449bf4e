"""What the directory of a finished checkpoint holds, and how it is read: by the trainer and by `nsa_jax.load`."""

from __future__ import annotations

import json
import logging
import math
import re
from pathlib import Path
from typing import Any

from orbax.checkpoint import v1 as ocp

from nsa_jax.hub import digests
from nsa_jax.hub.digests import Damage

logger = logging.getLogger("nsa_jax")

INFO = "info.json"
_ORBAX_METADATA = "_CHECKPOINT_METADATA"


def has_digests(directory: Path) -> bool:
    """Whether a step directory can be verified; those of earlier versions cannot."""
    return (directory / INFO).exists() or (directory / digests.SUMS).exists()


def _json_of(directory: Path, name: str) -> Any:
    try:
        return json.loads((directory / name).read_bytes())
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise Damage(f"{name}: is missing") from None
    except ValueError as error:
        raise Damage(f"{name}: is no JSON ({error})") from None


def read_info(directory: Path) -> dict[str, Any]:
    """What a finished step says about itself; reads small files only.

    Returns:
      "parameters", "tokenizer", "config" and "val_loss" (None if unknown).

    Raises:
      Damage: a file of the step is missing, or what says it differs from what was written.
    """
    if not has_digests(directory):
        return _read_info_without_digests(directory)
    sums = digests.read(directory)
    for path in sums:
        if not (directory / path).is_file():
            raise Damage(f"{path}: is missing")
    digests.check(directory, INFO, sums.get(INFO, "not listed"))
    return _json_of(directory, INFO)


def _read_info_without_digests(directory: Path) -> dict[str, Any]:
    """`read_info` of a step in the layout of versions that wrote no digests."""
    metadata = _json_of(directory, _ORBAX_METADATA)
    info = metadata.get("custom_metadata") if isinstance(metadata, dict) else None
    if not isinstance(info, dict) or not {"parameters", "tokenizer"} <= info.keys():
        raise Damage(f"{_ORBAX_METADATA}: does not say which parameters and tokenizer belong to the checkpoint")
    positions = sorted((directory / "data").glob("process_*.json"))
    if not positions:
        raise Damage("data/process_*.json: the position in the data is missing")
    _json_of(directory, f"data/{positions[0].name}")
    try:
        val_loss = _json_of(directory, "metrics/metrics")["val_loss"] if (directory / "metrics").exists() else None
    except (Damage, KeyError, TypeError) as error:
        logger.warning("%s: its validation loss is unknown (%s)", directory, error)
        val_loss = None
    return {**info, "val_loss": finite(val_loss)}


def finite(loss: Any) -> float | None:
    """The loss, or None if it is unknown or not finite."""
    return float(loss) if isinstance(loss, (int, float)) and math.isfinite(loss) else None


def find_steps(directory: Path) -> tuple[dict[int, float | None], dict[int, str]]:
    """The finished steps of a checkpoints directory, from their small files.

    Returns:
      Validation loss by step, ascending, and what is wrong by step for those that are seen to be damaged.
    """
    losses: dict[int, float | None] = {}
    damaged: dict[int, str] = {}
    paths = [path for path in directory.iterdir() if path.name.isdecimal()] if directory.is_dir() else []
    for path in sorted(paths, key=lambda path: int(path.name)):
        try:
            losses[int(path.name)] = read_info(path)["val_loss"]
        except Damage as error:
            damaged[int(path.name)] = str(error)
    return losses, damaged


def best_of(losses: dict[int, float | None]) -> int | None:
    """The step of the lowest validation loss, the first of equal ones; None if no loss is known."""
    known = [(loss, step) for step, loss in losses.items() if loss is not None]
    return min(known)[1] if known else None


def surplus(losses: dict[int, float | None], keep_last: int, keep_best: bool, keep_every: int) -> list[int]:
    """The steps to delete: all but the last `keep_last`, the best, and the multiples of `keep_every`.

    Args:
      losses: validation loss of each step there is.
      keep_last: how many of the last are kept.
      keep_best: whether the one of the lowest loss is kept.
      keep_every: 0: no multiples are kept.
    """
    steps = sorted(losses)
    keep = {*steps[-keep_last:], best_of(losses) if keep_best else None}
    return [step for step in steps if step not in keep and not (keep_every and step % keep_every == 0)]


def verify(directory: Path, index: int = 0, count: int = 1) -> None:
    """Compares a step with its digests; a step of a version without them is let pass with a warning.

    Args:
      directory: of the step.
      index: of the share that this process reads.
      count: of shares.

    Raises:
      Damage: what is missing or differs.
    """
    if has_digests(directory):
        digests.verify(directory, index, count)
    elif index == 0:
        logger.warning("checkpoint %s has no digests: an earlier version wrote it, damage may go unnoticed", directory)


# What Orbax and TensorStore say about files that are cut off, missing or changed. All else may be the machine's fault.
_DAMAGE_WORDS = re.compile(
    r"DATA_LOSS|OUT_OF_RANGE|NOT_FOUND|corrupt|zstd|crc|checksum|truncat|decod|pars(e|ing)|magic|unexpected end|JSON",
    re.IGNORECASE,
)


def names_damage(error: Exception) -> bool:
    """Whether an error tells of damaged files; asked only of steps without digests."""
    if isinstance(error, (FileNotFoundError, NotADirectoryError, UnicodeDecodeError, KeyError, TypeError)):
        return True
    return isinstance(error, ValueError) and bool(_DAMAGE_WORDS.search(str(error)))


def load_part(directory: Path, target: Any) -> Any:
    """Loads a part of a step's state; the rest is not read.

    Args:
      directory: of the step.
      target: abstract arrays with shardings, by their place in the state.
    """
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    with context:
        return ocp.load_checkpointables(directory, {"state": target})["state"]
