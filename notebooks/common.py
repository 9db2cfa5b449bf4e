"""What the notebooks share: text with computed numbers, and small trained models."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import filelock
from IPython.display import Markdown, display
from ml_collections import ConfigDict

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "notebooks"
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # the package need not be installed, and configs/ is no package

# Before jax is imported: no talk about GPUs where there is none.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.CRITICAL)
logging.getLogger("absl").setLevel(logging.ERROR)


def say(text: str) -> None:
    """Shows Markdown: a sentence with numbers that were just computed."""
    display(Markdown(text))


def train_once(name: str, make_config: Callable[[], ConfigDict]) -> Path:
    """The workdir of a small run, trained at the first call and kept in build/notebooks/ for the next one.

    Other notebooks that ask for the same run at the same time wait for it. Of its steps, the share in the environment
    variable NSA_JAX_NOTEBOOK_STEPS is trained; tests, which look at no figure, need a few.
    """
    from nsa_jax.train.loop import Run

    config, share = make_config(), float(os.environ.get("NSA_JAX_NOTEBOOK_STEPS", 1.0))
    for field in ("steps", "save_every"):
        config.train[field] = max(int(share * config.train[field]), 1)
    # Another config is another run.
    workdir = BUILD / f"{name}-{hashlib.sha256(config.to_json_best_effort().encode()).hexdigest()[:8]}"
    BUILD.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f"{workdir}.lock"):
        if not (workdir / "summary.json").is_file():
            Run(config, workdir).run()
    return workdir


def text_config() -> ConfigDict:
    """The quickstart with 0.2M parameters: its rows and blocks, half of them the task keypad."""
    from configs import quickstart

    c = quickstart.get_config()
    c.name = "text"
    c.model.dim, c.model.head_dim, c.model.mlp_dim = 64, 16, 192
    c.data.max_documents, c.data.val_fraction = 400, 0.1
    c.train.steps, c.train.batch_size = 120, 16
    c.train.eval_every, c.train.eval_batches, c.train.sample_tokens = 0, 4, 0
    c.train.save_every, c.train.keep_last = 30, 10
    c.optim.learning_rate, c.optim.warmup_steps = 5e-3, 10
    c.guards.health = False
    return c


def text_run() -> Path:
    """A run on text and a task: runs/quickstart if it is there, else a smaller model, trained in under a minute."""
    quickstart = ROOT / "runs" / "quickstart"
    if (quickstart / "summary.json").is_file():
        return quickstart
    return train_once("text", text_config)
