"""Which kernel serves each stage and pass of a problem, and why: a plan as a table."""

from __future__ import annotations

import dataclasses

from nsa_jax.ops import blocks, checks, pallas, plan
from nsa_jax.ops.blocks import NSAConfig
from nsa_jax.ops.choices import Choice, NSAPlan, Shape
from nsa_jax.ops.gpus import GPUS
from nsa_jax.ops.target import Target, current_target

_TARGETS = {"a100": GPUS["a100-80gb"].target} | {name: gpu.target for name, gpu in GPUS.items()}


@dataclasses.dataclass(frozen=True)
class Row:
    """One stage and pass.

    Attributes:
      stage: part of the operator, such as "selected".
      direction: "forward" or "backward", with what it computes where a pass has several kernels.
      choice: the kernel, its tiles and the reason.
    """

    stage: str
    direction: str
    choice: Choice


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The kernels of a problem; `print` shows them as a table.

    Attributes:
      target: the device they are for.
      shape: sizes of the selected branch.
      packed: rows hold several documents.
      unsupported: why no kernels serve and XLA does, or None.
      rows: one for each stage and pass; empty if no kernels serve.
    """

    target: Target
    shape: Shape
    packed: bool
    unsupported: str | None
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        s = self.shape
        capability = self.target.compute_capability
        device = f"sm{capability[0]}{capability[1]}" if capability else self.target.platform
        lines = [
            f"NSA on {device}: B={s.batch} T={s.num_queries} N={s.num_heads} K={s.kv_heads} G={s.group} H={s.head_dim} "
            f"V={s.value_dim} {s.dtype}{' packed' if self.packed else ''}"
        ]
        if self.unsupported is not None:
            return f"{lines[0]}\nserved by implementation='xla', since the kernels do not: {self.unsupported}"
        cells = [(r.stage, r.direction, r.choice.kernel) for r in self.rows]
        widths = [max(len(row[i]) for row in cells) for i in range(3)]
        indent = " " * (sum(widths) + 6)
        for row, cell in zip(self.rows, cells, strict=True):
            lines.append("  ".join(text.ljust(width) for text, width in zip(cell, widths, strict=True)).rstrip())
            lines[-1] += f"  {row.choice.reason}"
            if row.choice.otherwise:
                lines.append(f"{indent}otherwise {row.choice.otherwise}")
            if row.choice.tiles is not None:
                record = dataclasses.asdict(row.choice.tiles)
                lines.append(indent + ", ".join(f"{name}={value}" for name, value in record.items()))
        return "\n".join(lines)


def explain(
    *,
    length: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int | None = None,
    batch: int = 1,
    dtype: str = "bfloat16",
    packed: bool = False,
    shared_kv: bool = False,
    config: NSAConfig | None = None,
    target: Target | str | None = None,
) -> Explanation:
    """Prints and returns which kernel serves each stage and pass of `nsa_attention`, with which tiles and why.

    Args:
      length: T, tokens of a row.
      num_heads: N.
      num_kv_heads: K.
      head_dim: H.
      value_dim: V; None means H.
      batch: B.
      dtype: of queries, keys and values, "float32" or "bfloat16".
      packed: rows hold several documents (`segment_start` is given).
      shared_kv: the branches have the same keys and values, and no gate is negative.
      config: block geometry; None means the paper's.
      target: a name such as "a100", "h100", "b200" or "l40s" (`nsa_jax.ops.gpus.GPUS`), or a `Target`; None means the
        current device.

    Raises:
      ValueError: an argument has the wrong value, the sizes contradict each other, or the target is unknown.
    """
    if isinstance(target, str):
        if target not in _TARGETS:
            raise ValueError(f"target={target!r}: must be one of {sorted(_TARGETS)}, a Target or None")
        target = _TARGETS[target]
    checks.require(
        target is None or isinstance(target, Target),
        f"target={target!r}: must be one of {sorted(_TARGETS)}, a Target or None",
    )
    sizes = dict(batch=batch, length=length, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    sizes["value_dim"] = head_dim if value_dim is None else value_dim
    sizes = {name: checks.positive(name, size) for name, size in sizes.items()}
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads={num_heads}: must be a multiple of num_kv_heads={num_kv_heads}")
    batch, length, num_heads, num_kv_heads, head_dim, value_dim = sizes.values()
    shape = Shape(batch, length, length, num_heads, num_kv_heads, head_dim, value_dim, dtype)
    checks.require(dtype in ("float32", "bfloat16"), f"dtype={dtype!r}: must be 'float32' or 'bfloat16'")
    config = NSAConfig() if config is None else config
    checks.nsa_config(config)
    explanation = explanation_of(shape, config, target or current_target(), packed=packed, shared_kv=shared_kv)
    print(explanation)
    return explanation


def explanation_of(
    shape: Shape,
    config: NSAConfig,
    target: Target,
    *,
    packed: bool,
    shared_kv: bool = False,
    selector: str = "compressed",
) -> Explanation:
    """What `explain` prints, for the sizes of the selected branch; with more keys than queries, of the last queries.

    With the selector "mean_key", of `mean_key.mean_key_attention`.
    """
    reason = plan.unsupported("select_blocks", shape, target, select_block=config.select_block)
    if reason is None and not target.is_gpu:
        reason = f"no GPU (platform {target.platform})"
    rows: tuple[Row, ...] = ()
    if reason is None:
        count = blocks.num_compressed(shape.num_keys, config)
        cudnn = not packed and not target.ahead_of_time and pallas.has_cudnn()
        if selector == "mean_key":
            rows = _mean_key_rows(shape, config, target, count, cudnn)
        else:
            made = plan.plan_nsa(shape, config, target, num_compressed=count, cudnn=cudnn, shared_window=shared_kv)
            rows = plan_rows(made)
    return Explanation(target, shape, packed, reason, rows)


def plan_rows(made: NSAPlan) -> tuple[Row, ...]:
    """The plan's choices, in the order in which they run."""
    choices: list[tuple[str, str, Choice | None]] = [("all branches", "rearrange", made.heads_to_batch)]
    branches = [("window", made.window), ("compressed", made.compressed)]
    choices += [(name, "forward", branch.forward) for name, branch in branches if branch is not None]
    forward, backward = made.selected.forward, made.selected.backward
    choices += [
        ("selection", "scores", made.selection.scores),
        ("selection", "top n", made.selection.top_n),
        ("selected", "forward, shared blocks", forward.neighbours),
        ("selected", "forward", forward.rest),
        ("selected", "backward, dk and dv", backward.by_block),
        ("selected", "backward, dq", backward.grad_query),
    ]
    for name, branch in reversed(branches):
        if branch is not None:
            choices.append((name, "backward, dq", branch.grad_query))
            choices.append((name, "backward, dk and dv", branch.grad_key_value))
    return tuple(Row(stage, direction, choice) for stage, direction, choice in choices if choice is not None)


def _mean_key_rows(shape: Shape, config: NSAConfig, target: Target, count: int, cudnn: bool) -> tuple[Row, ...]:
    """The stages of `mean_key.mean_key_attention`, ops of their own. One query per group chooses among `count` keys."""
    choosing = dataclasses.replace(shape, num_heads=shape.kv_heads, num_keys=count, value_dim=shape.head_dim)
    made = NSAPlan(
        shape=shape,
        heads_to_batch=None,
        compressed=None,
        selection=plan.plan_selection(choosing, config, target),
        selected=plan.plan_selected(shape, target, select_block=config.select_block, num_selected=config.num_selected),
        window=plan.plan_range(shape, target, span=config.window, cudnn=cudnn),
    )
    window, *others = plan_rows(made)
    sums = [Row("selection", "log-sum-exp", plan.plan_range(choosing, target).forward)] if count else []
    return window, *sums, *others
