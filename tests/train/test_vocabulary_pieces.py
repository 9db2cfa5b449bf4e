"""Gradients of embedding and head that are made in pieces under fsdp are those of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nsa_jax.nn import ModelConfig, Transformer, layers, sharding
from nsa_jax.nn.layers import embed
from nsa_jax.train import loss as loss_lib
from nsa_jax.train.loss import weighted_loss
from nsa_jax.train.state import make_mesh

from .tiny import tiny_config

DIM, ROWS, LENGTH = 64, 8, 24
# A vocabulary of 104 is split into parts of 13, 26 or 52 tokens. One of 50 is whole, and fsdp splits the features.
CASES = [
    ("tied", 104, dict(fsdp=8), "kernel"),
    ("separate", 104, dict(fsdp=8), "plain"),
    ("tied", 104, dict(data=2, fsdp=2, tensor=2), "kernel"),
    ("separate", 104, dict(data=2, fsdp=2, context=2), "kernel"),
    ("tied", 50, dict(fsdp=4, context=2), "plain"),
    ("separate", 50, dict(fsdp=4, tensor=2), "kernel"),
]


def loss_and_gradients(vocab, tied):
    """Loss and gradients of embedding, head and hidden values, of a function that meets the table twice."""
    sizes = dict(
        dim=DIM, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, compute_dtype="float32", logit_soft_cap=3.0
    )
    model = Transformer(ModelConfig(vocab_size=vocab, tie_embeddings=tied, init_std=0.3, **sizes), rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model)
    draw = lambda seed: jax.random.randint(jax.random.key(seed), (ROWS, LENGTH), 0, vocab)  # noqa: E731
    # Few tokens are frequent, and the first and the last of the vocabulary are among inputs and targets.
    inputs, targets = draw(1).at[:, :9].set(vocab - 1).at[:, 9].set(0), draw(2).at[:, 0].set(vocab - 1).at[:, 1].set(0)
    hidden = jax.random.normal(jax.random.key(3), (ROWS, LENGTH, DIM))
    weight = jax.random.normal(jax.random.key(4), (ROWS, LENGTH))

    def loss(params, hidden):
        model = nnx.merge(graphdef, params)
        x = hidden + jnp.sin(embed(model.embedding[...], inputs, jnp.dtype("float32")))
        return weighted_loss(model, x, targets, weight, 0.1)[0]

    return jax.jit(jax.value_and_grad(loss, (0, 1)))(params, hidden)


@pytest.mark.parametrize(("heads", "vocab", "mesh", "lookup"), CASES)
def test_gradients_in_pieces_are_those_of_one_device(monkeypatch, heads, vocab, mesh, lookup):
    monkeypatch.setattr(sharding, "_REPLICATE_BELOW", 1)
    want, want_gradients = loss_and_gradients(vocab, heads == "tied")

    over, seen = sharding.Pieces.over, []
    monkeypatch.setattr(sharding.Pieces, "over", lambda self, *args: (seen.append(self.single), over(self, *args))[1])
    monkeypatch.setattr(sharding, "PIECE_BYTES", vocab * DIM * 4 // 3 + 1)  # that leave a rest
    monkeypatch.setattr(loss_lib, "_LOGIT_BYTES", LENGTH * vocab * 4 // 12)  # and tokens in chunks within a piece
    if lookup == "kernel":  # forced, and interpreted here
        monkeypatch.setattr(layers, "layer_kernels_serve", lambda width: width % 64 == 0)
    with jax.set_mesh(
        make_mesh(tiny_config(**{f"mesh__{axis}": size for axis, size in mesh.items()}), jax.devices()[:8])
    ):
        got, gradients = loss_and_gradients(vocab, heads == "tied")
    assert seen == [False, False]
    assert float(got) == pytest.approx(float(want), rel=1e-5)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(want_gradients), strict=True
    ):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b), jax.tree_util.keystr(path)
