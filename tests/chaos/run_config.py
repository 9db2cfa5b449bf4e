"""The config of the attacked runs, as train.py reads it."""

from tests.train.tiny import tiny_config


def get_config():
    """48 steps with validation, saving and the alarm of a plateau, which a resumed run must raise at the same step."""
    config = tiny_config(
        train__steps=48, train__save_every=6, train__eval_every=12, train__eval_batches=1, model__num_layers=1,
        preflight__selftest=False, compilation_cache_dir="", guards__plateau_steps=5, data__synthetic="random",
        guards__max_gap=0.0,
    )  # fmt: skip
    config.lock()
    return config
