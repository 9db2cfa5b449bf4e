"""The config of the runs in test_distributed.py, as train.py reads it."""

from tests.train.tiny import tiny_config


def get_config():
    """Byte-level text with everything on that several processes must do together; flags give the paths."""
    config = tiny_config(
        data__source="text", data__tokenizer="byte", data__val_fraction=0.2, train__steps=20, train__save_every=4,
        train__eval_every=4, train__eval_batches=2, train__sample_tokens=4, model__num_layers=1,
        model__implementation="xla", optim__schedule="constant", guards__health=True, guards__peer_seconds=10.0,
        guards__heartbeat_seconds=1.0, guards__max_gap=0.0, preflight__selftest=False, compilation_cache_dir="",
    )  # fmt: skip
    config.train.keep_last = 100
    config.lock()
    return config
