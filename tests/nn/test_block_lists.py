"""Block lists in and out of models: handed back they change nothing, and training replays what a sampler read."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nsa_jax.data.tokenizers import ByteTokenizer
from nsa_jax.generator import Generator
from nsa_jax.nn import NSAttention
from nsa_jax.sampling import Sampling
from tests.nn.test_cache import SMALL, documents, make_model, random_tokens
from tests.nn.test_parallel import mesh_of

pytestmark = pytest.mark.usefixtures("quick_compilation")

LENGTH = 88


def loss_and_lists(model, tokens, start, block_indices=None):
    """(loss, lists) and gradients."""
    graphdef, params = nnx.split(model)

    @jax.jit
    def run(params, block_indices):
        def loss(params):
            given = dict(block_indices=block_indices, return_block_indices=True)
            logits, lists = nnx.merge(graphdef, params)(tokens, start, **given)
            return jax.nn.log_softmax(logits)[..., 5].mean(), lists

        return jax.value_and_grad(loss, has_aux=True)(params)

    return run(params, block_indices)


@pytest.mark.parametrize(
    "changes",
    [
        dict(remat="full", num_layers=4),
        dict(selector="mean_key", scan_layers=False),
        dict(layer_pattern=("nsa", "dense", "nsa"), num_layers=6, remat="block"),
    ],
    ids=str,
)
def test_own_lists_handed_back_change_neither_loss_nor_gradients(changes):
    model, tokens = make_model(**changes), random_tokens(2, LENGTH)
    start = jnp.asarray(np.stack([documents(LENGTH), np.zeros(LENGTH, np.int32)]))
    (loss, lists), grads = loss_and_lists(model, tokens, start)
    blocks = -(-LENGTH // SMALL.select_block)
    assert lists.shape == (len(model.config.layers_of("nsa")), 2, LENGTH, 2, 4) and lists.dtype == jnp.int32
    assert all((a != b).any() for a, b in zip(lists, lists[1:], strict=False))
    assert (np.asarray(lists).max(), int((lists[:, 1, -1] < blocks).sum(-1).min())) == (blocks, 4)
    padded = jnp.where(lists < blocks, lists, -1)[..., ::-1]  # order and the number that pads mean nothing
    (again, returned), others = loss_and_lists(model, tokens, start, padded)
    np.testing.assert_array_equal(returned, lists)
    np.testing.assert_allclose(again, loss, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(others), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6 * np.abs(b).max())
    # Other lists are another function: nothing is selected in their place.
    (changed, returned), _ = loss_and_lists(model, tokens, start, jnp.full_like(lists[..., :1], 0))
    assert abs(changed - loss) > 1e-6 and returned.shape[-1] == 1 and not np.asarray(returned).any()


def test_lists_on_shares_of_tokens_and_heads():
    """With given lists, and those that are returned, a mesh changes nothing."""
    model = make_model(num_layers=1, implementation="xla", num_heads=4)
    tokens = random_tokens(2, 64)
    (_, own), _ = loss_and_lists(model, tokens, None)
    shifted = jnp.where(own < 4, (own + 1) % 4, -1)
    want = loss_and_lists(model, tokens, None, shifted)
    with jax.set_mesh(mesh_of(context=4, tensor=2)):
        got = loss_and_lists(model, tokens, None, shifted)
        (_, lists), _ = loss_and_lists(model, tokens, None)
    np.testing.assert_array_equal(lists, own)
    np.testing.assert_array_equal(got[0][1], want[0][1])
    for a, b in zip(jax.tree.leaves((got[0][0], got[1])), jax.tree.leaves((want[0][0], want[1])), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max())


def test_what_a_sampler_read_is_replayed_by_training():
    """Ragged prompts and rows that end early: blocks and log-probabilities of the sampled tokens are the same."""
    model = make_model(vocab_size=257)
    generator = Generator(model, ByteTokenizer(), context=80, chunk=32)
    prompts = [random_tokens(1, 70)[0], random_tokens(1, 37, seed=2)[0], random_tokens(1, 3, seed=3)[0]]
    found = generator(prompts, max_tokens=20, sampling=Sampling(temperature=1.0), return_block_indices=True)
    assert [len(c.tokens) for c in found[:2]] == [10, 20]
    for prompt, completion in zip(prompts, found, strict=True):
        row = np.concatenate([prompt, completion.tokens]).astype(np.int32)
        recorded = completion.block_indices
        assert recorded.shape == (2, len(row) - 1, 2, 4) and recorded.dtype == np.int32 and recorded.min() == -1
        given = np.pad(recorded, ((0, 0), (0, 99 - len(row)), (0, 0), (0, 0)), constant_values=-1)
        tokens = np.pad(row[:-1], (0, 99 - len(row)))
        (_, lists), _ = loss_and_lists(model, tokens[None], None, given[:, None])
        read = np.asarray(lists)[:, 0, : len(row) - 1]
        np.testing.assert_array_equal(np.sort(np.where(read < -(-98 // 16), read, -1)), np.sort(recorded))
        (_, chosen), _ = loss_and_lists(model, tokens[None], None)
        np.testing.assert_array_equal(read, np.asarray(chosen)[:, 0, : len(row) - 1])
    logits, _ = generator.decoder.prefill(generator.decoder.init_cache(1, 80), row[None, :-1])
    given = jnp.asarray(recorded[:, None])
    replayed = jax.jit(lambda given: model(jnp.asarray(row[None, :-1]), block_indices=given))(given)
    np.testing.assert_allclose(replayed[0, -1], logits[0], atol=1e-5)
    assert generator(prompts[2:], max_tokens=1)[0].block_indices is None


def test_models_without_lists_say_so():
    dense = make_model(attention="dense", num_layers=1)
    with pytest.raises(ValueError, match="attention='dense': must be 'nsa' to have block lists"):
        dense(random_tokens(1, 16), return_block_indices=True)
    with pytest.raises(ValueError, match="record_block_indices=True: must be False for attention='dense'"):
        bytes_model = make_model(attention="dense", num_layers=1, vocab_size=257)
        Generator(bytes_model, ByteTokenizer())([[1]], return_block_indices=True)
    model = make_model(num_layers=1)
    with pytest.raises(ValueError, match=r"block_indices has shape .*: dimension 3 \(K\) must be 2"):
        model(random_tokens(1, 16), block_indices=jnp.zeros((1, 1, 16, 3, 4), jnp.int32))
    with pytest.raises(ValueError, match="block_indices has dtype float32: must be an integer"):
        layer = NSAttention(model.config, rngs=nnx.Rngs(0))
        layer(jnp.zeros((1, 16, 16)), block_indices=jnp.zeros((1, 16, 2, 4), jnp.float32))
