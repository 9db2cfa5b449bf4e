"""Every mesh trains the same model: losses of one device over twenty steps, on rows of several documents."""

import functools

import jax
import numpy as np
import pytest

from .tiny import random_batch, steps, tiny_config

# On 4 devices of the context axis a row's 48 tokens are cut at 12, 24 and 36: the first and the last cut go through a
# selection block of 8 tokens, every cut through a compressed block of 8 and a window of 12.
CHANGES = dict(train__batch_size=16, train__grad_accum=2, train__steps=20, model__implementation="xla")
MESHES = [
    dict(data=8),
    dict(fsdp=8),
    dict(data=2, fsdp=4),
    dict(data=4, fsdp=2),
    dict(data=4, tensor=2),
    dict(data=4, context=2),
    dict(data=2, context=4),
    dict(fsdp=2, tensor=2, context=2),
]


def name(mesh):
    return "-".join(f"{axis}{size}" for axis, size in mesh.items())


def packed_batch(config, seed):
    """Documents that begin inside blocks, windows and devices' shares; masked tokens, whole rows among them."""
    shape = (config.train.batch_size, config.data.seq_len)
    mask = np.ones(shape, np.float32)
    mask[::3, 5:29] = 0
    mask[3] = 0
    batch = random_batch(config, seed, mask)
    second = np.asarray([0, 7, 13, 35, 24] * shape[0])[: shape[0], None]
    batch["segment_start"] = np.where(np.arange(shape[1]) >= second, second, 0).astype(np.int32)
    return batch


@functools.cache
def twenty_steps(**mesh):
    config = tiny_config(**{f"mesh__{axis}": size for axis, size in mesh.items()}, **CHANGES)
    batches = [packed_batch(config, seed) for seed in range(20)]
    return steps(config, batches, jax.devices()[: int(np.prod(list(mesh.values())))])


@pytest.mark.parametrize("mesh", MESHES, ids=name)
def test_every_mesh_gives_the_losses_of_one_device(mesh, monkeypatch):
    monkeypatch.setattr("nsa_jax.train.state._REPLICATE_BELOW", 1)
    want, _ = twenty_steps(data=1)
    got, state = twenty_steps(**mesh)
    for step, (one, many) in enumerate(zip(want, got, strict=True)):
        assert abs(one["loss"] - many["loss"]) < 1e-5, step
        assert many["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
