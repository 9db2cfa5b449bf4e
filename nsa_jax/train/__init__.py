"""Training: state and sharding, the compiled step, the loop, checkpoints, metrics."""

from nsa_jax.extras import extra

with extra("train"):
    from nsa_jax.train.callbacks import Callback
    from nsa_jax.train.checkpoint import CheckpointError, Checkpoints
    from nsa_jax.train.errors import TrainingError
    from nsa_jax.train.lock import WorkdirInUse
    from nsa_jax.train.state import Setup, make_mesh, setup
    from nsa_jax.train.step import make_eval_step, make_train_step
    from nsa_jax.train.workdir import run

__all__ = [
    "Callback",
    "CheckpointError",
    "Checkpoints",
    "Setup",
    "TrainingError",
    "WorkdirInUse",
    "make_eval_step",
    "make_mesh",
    "make_train_step",
    "run",
    "setup",
]
