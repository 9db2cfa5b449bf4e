"""What a run with a far task among its sources tells at its end: who answers the task, and what one query read."""

from __future__ import annotations

from typing import Any

import jax

from nsa_jax.fields import source_configs
from nsa_jax.train.metrics import MetricsWriter
from nsa_jax.train.state import State

_TOKENS = 1 << 20  # of the rows that are asked; a sixteenth of it at once
PICTURE = "far_task.png"
_SHOWN = {
    "accuracy": "whole model",
    "without_selected": "selected branch off",
    "window_only": "window alone",
    "chance": "chance",
}


def measure(
    run: Any, state: State, validation: tuple[int, dict[str, float]] | None, writer: MetricsWriter
) -> dict[str, Any]:
    """The entry `far_task` of summary.json; {} if no source of the run is a task.

    It tells the terminal the figures and what one query read, and draws the latter into the workdir.

    Args:
      run: the `nsa_jax.train.loop.Run` that has ended.
      state: its last state.
      validation: step and metrics of its last validation, if there was one.
      writer: of the run.
    """
    if all(part.data.source != "task" for part in source_configs(run.config).values()):
        return {}
    from nsa_jax import inspect  # matplotlib, at the end of few runs alone

    if run.setup.mesh.size > 1:
        writer.say(f"the far task is measured on one device: python -m nsa_jax.evaluate {run.workdir} --tasks far")
        return {}
    task = inspect.far_task(run.config, run.pipeline.tokenizer)
    assert task is not None
    run.watchdog.beat(run.config.train.steps, "measuring the far task", finished=False)
    model = run.setup.model(state.get("ema", state["params"]))
    probe = inspect.Probe(model, run.pipeline.tokenizer.vocab_size)
    length = run.config.data.seq_len
    sizes = dict(rows=min(64, max(8, _TOKENS // length)), batch_size=min(16, max(1, _TOKENS // 16 // length)))
    try:
        found, verdict = inspect.score_far_task(probe, task, **sizes)
    except jax.errors.JaxRuntimeError as error:  # such as too little memory beside the state: the run itself is done
        first = str(error).partition("\n")[0]
        writer.say(f"the far task was not measured, try python -m nsa_jax.evaluate {run.workdir} --tasks far: {first}")
        return {}
    if not found:
        return {}
    for name, part in source_configs(run.config).items():
        bits = validation[1].get(f"val/bits_per_byte/{name}") if validation else None
        if bits is not None and part.data.source != "task":
            writer.say(f"{name}: {bits:.3f} bits per byte of held-out text")
    writer.say("far task: " + ", ".join(f"{name} {found[key]:.1%}" for key, name in _SHOWN.items() if key in found))
    if verdict is not None and (shown := inspect.show_far_question(probe, task)):
        text, figure = shown
        writer.say(f"{verdict}\n{text}\n  picture: {run.workdir / PICTURE}")
        figure.savefig(run.workdir / PICTURE)
    return {"far_task": found}
