"""What goes over the links in a step compiled for GPUs that are not here, beside what the layout needs.

Nothing else sees GPU code under a mesh: on a CPU other kernels, other layouts and no custom calls are compiled.
"""

import collections
import math
import re

import jax
import pytest

from nsa_jax import aot
from nsa_jax.config import default_config
from nsa_jax.nn.sharding import FSDP, PIECE_BYTES, TENSOR
from nsa_jax.train.preflight import hlo, memory
from nsa_jax.train.step import make_train_step
from tests.kernels.hollow import hollow_kernels

GPU = "a100-80gb"
# Of tokens and rows per device: with factors of their own, so that shapes tell whose tokens a result holds.
LENGTH, ROWS = 64 * 17, 5
BYTES = {"s32": 4, "f32": 4, "bf16": 2}


def small_config(**changes):
    """Two layers of the width that the GPU's kernels serve, in bfloat16, with weights much smaller than a batch."""
    c = default_config()
    c.model.dim, c.model.num_layers, c.model.mlp_dim = 128, 2, 256
    c.model.num_heads, c.model.num_kv_heads, c.model.head_dim = 6, 2, 64
    c.model.compute_dtype, c.model.remat, c.model.vocab_size = "bfloat16", "dots_saved", 512
    c.data.source, c.data.synthetic, c.data.synthetic_vocab, c.data.seq_len = "synthetic", "copy", 512, LENGTH
    for name, value in changes.items():
        part, field = name.split("__")
        c[part][field] = value
    shards = 8 // (c.mesh.tensor * c.mesh.context)
    c.train.batch_size = ROWS * shards * c.train.grad_accum
    return c


def large_vocabulary(tied):
    """One layer whose vocabulary holds nearly all parameters, as of a large model on 64 GPUs: one row on each."""
    c = small_config(model__num_layers=1, model__attention="dense", model__tie_embeddings=tied)
    c.model.dim, c.model.mlp_dim, c.model.vocab_size = 4096, 8192, 262_144
    c.model.num_heads, c.model.num_kv_heads = 32, 8
    c.data.seq_len, c.mesh.fsdp, c.train.batch_size = 64 * 51, 64, 64
    return c


def compiled(config, gpu=GPU, count=8):
    """The run's setup and its step compiled for so many GPUs."""
    try:
        made = memory.for_target(config, gpu, count, config.model.vocab_size)
    except aot.AheadOfTimeUnavailable as error:
        pytest.skip(str(error))
    step = make_train_step(made, memory._token_bytes(made))
    with hollow_kernels():
        return made, memory._compile(made, gpu, step, made.target(), made.abstract_batch())


def moved(text):
    """Bytes of results by kind of collective; what is exchanged between pairs of devices counts as one kind."""
    total = collections.Counter()
    for kind, times, results in hlo.instructions(text):
        kind = "exchange" if kind in ("all-to-all", "collective-permute") else kind
        total[kind] += times * sum(math.prod(shape) * BYTES[dtype] for dtype, shape in results)
    return total


def needed(made):
    """The same, as the layout needs it."""
    config, m = made.config, made.model_config
    data, fsdp, context, tensor = (config.mesh[axis] for axis in ("data", "fsdp", "context", "tensor"))
    data = made.mesh.size // (fsdp * context * tensor) if data < 0 else data
    micro, layers, item = config.train.grad_accum, m.num_layers, m.dtype.itemsize
    row_length = config.data.seq_len
    rows, length = config.train.batch_size // micro // (data * fsdp), row_length // context
    need = collections.Counter()

    # Parameters. Those of layers travel in the compute dtype, and so do their gradients; those of embedding and head
    # are fetched in it once, and have float32 gradients. A table that is both has one gradient, but two where they are
    # too large to be held until they are added.
    leaves = jax.tree_util.tree_leaves_with_path(made.abstract_state["params"])
    shardings = jax.tree.leaves(made.sharding["params"])
    for (path, leaf), sharding in zip(leaves, shardings, strict=True):
        axes = [axis for dim in sharding.spec if dim for axis in (dim if isinstance(dim, tuple) else (dim,))]
        in_layer = "blocks" in jax.tree_util.keystr(path)
        if config.optim.name == "muon" and in_layer and path[-1].key in ("w_in", "w_out"):
            # Layers are shared by all devices: sums of gradients go to their owners, updates come back.
            padded = -(-layers // made.mesh.size) * made.mesh.size * leaf.size // layers * item
            need["exchange"] += 2 * padded // made.mesh.size
            need["all-gather"] += padded // fsdp if data > 1 else 0
        own = leaf.size // (tensor if TENSOR in axes else 1)  # without fsdp
        wide = 4 if path[-1].key in ("embedding", "head", "scale", "gate_bias") else item
        if FSDP in axes:
            need["all-gather"] += micro * own * item * (2 if in_layer else 1)  # for each pass
            uses = 2 if path[-1].key == "embedding" and m.tie_embeddings and own * wide > PIECE_BYTES else 1
            need["reduce-scatter"] += micro * uses * own * wide / fsdp
            own //= fsdp
        if config.mesh.shard_optimizer and own >= 4096:  # sums of gradients, and new parameters
            need["reduce-scatter"] += own * 4 / data
            need["all-gather"] += own * 4
        elif data == made.mesh.size and m.dropout == 0:
            need["all-reduce"] += own * 4  # once per step, whatever the number of micro-batches
        elif data * context > 1 or (TENSOR not in axes and tensor > 1):
            need["all-reduce"] += micro * own * wide
        if in_layer and path[-1].key == "w_in" and tensor > 1:
            need["exchange"] += micro * 3 * leaf.size // tensor * item  # from rows to heads in two passes, and back

    # Activations.
    stream = rows * length * m.dim * item
    if tensor > 1:  # sums after attention and MLP, of gradients before them, of the lookup and of the head's gradient
        need["all-reduce"] += micro * (4 * layers + 2) * stream
    if context > 1:
        keys_values = rows * m.num_kv_heads // tensor * (m.head_dim + m.value_head_dim) * item  # of one token
        query, out = (rows * m.num_heads // tensor * dim * item for dim in (m.head_dim, m.value_head_dim))
        gates = rows * m.num_heads // tensor * 3 * 4
        before = m.nsa.window - 1
        if m.attention == "nsa":
            gathered = row_length * keys_values * (1 + 1 / m.nsa.compress_stride)
            half = length // 2
            halos = (m.nsa.compress_block - m.nsa.compress_stride + before) * keys_values
            mirrored = half * (query + gates) + (half + before) * keys_values
            # Forward, its recomputation, backward. The output is kept.
            need["exchange"] += micro * layers * (3 * (halos + mirrored) + 2 * half * out)
        elif m.attention == "dense":
            gathered = row_length * keys_values
        else:
            gathered = 0
            need["exchange"] += micro * layers * 3 * before * keys_values
        need["all-gather"] += micro * layers * 2 * gathered
        need["reduce-scatter"] += micro * layers * gathered / context
    return need


# Every axis, with and without each kind of attention, scan, dropout, accumulation and a head of its own.
CASES = {
    "fsdp": dict(mesh__fsdp=8),
    "fsdp-unscanned": dict(
        mesh__fsdp=8, model__attention="dense", model__scan_layers=False, model__tie_embeddings=False,
        model__dropout=0.1, train__grad_accum=2,
    ),
    "data": dict(mesh__data=8, model__attention="window", train__grad_accum=2),
    "data-sharded": dict(
        mesh__data=8, mesh__shard_optimizer=True, model__attention="window", train__grad_accum=2, train__ema_decay=0.99
    ),
    "muon": dict(mesh__data=2, mesh__fsdp=4, optim__name="muon"),
    "data-dropout": dict(mesh__data=8, model__attention="dense", model__scan_layers=False, model__dropout=0.1),
    "context": dict(mesh__context=2, mesh__fsdp=4),
    "context-dense": dict(mesh__context=2, mesh__fsdp=4, model__attention="dense"),
    "context-window": dict(mesh__context=4, mesh__data=2, model__attention="window", model__scan_layers=False),
    "tensor": dict(mesh__tensor=2, mesh__fsdp=4),
    "nsa-unscanned": dict(mesh__fsdp=8, model__scan_layers=False, model__dropout=0.1, train__grad_accum=2),
}  # fmt: skip
# About half a minute each; these run on the older of CI's two JAX versions.
SLOW = ("context", "muon", "tensor", "nsa-unscanned")


def spans(shape, tokens):
    """Whether a result has a number or a vector for each of this many tokens: neighbouring dimensions multiply to it.

    All dimensions of an array with features may do so by chance.
    """
    runs = [shape[i:j] for i in range(len(shape)) for j in range(i + 1, len(shape) + 1)]
    return any(math.prod(run) == tokens for run in runs if run != shape or len(shape) <= 2)


def check_traffic(made, text):
    config = made.config
    tokens = config.train.batch_size // config.train.grad_accum * config.data.seq_len
    for kind, _, results in hlo.instructions(text):
        for dtype, shape in results:
            assert not spans(shape, tokens), f"{kind} {dtype}{shape} spans the tokens of all devices"
    got, need = moved(text), needed(made)
    slack = 64 * 1024  # sums of losses, norms and the like
    for kind in {*got, *need}:
        told = f"{kind}: {got[kind]:,} bytes where the layout needs {need[kind]:,.0f}"
        assert got[kind] <= 1.2 * need[kind] + slack, told
        # A formula that asks for too much would hold nothing. XLA may gather fused matrices instead of exchanging them.
        assert kind == "exchange" or got[kind] >= 0.7 * need[kind] - slack, told


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] if c in SLOW else []) for c in CASES])
def test_a_step_moves_what_its_layout_needs(case):
    made, program = compiled(small_config(**CASES[case]))
    check_traffic(made, program.as_text())


@pytest.mark.parametrize(
    "mesh", [dict(fsdp=8), pytest.param(dict(tensor=2, fsdp=4), marks=pytest.mark.slow)], ids=["fsdp", "tensor"]
)
def test_the_selection_loss_moves_weights_alone(mesh):
    def config(weight):
        c = small_config(train__selection_loss=weight, train__selection_queries=8, model__num_layers=1)
        c.data.packing = False
        c.mesh.update(mesh)
        c.train.batch_size = ROWS * 8 // mesh.get("tensor", 1)
        return c

    made, with_loss = compiled(config(1.0))
    _, without = compiled(config(0.0))
    more = moved(with_loss.as_text()).total() - moved(without.as_text()).total()
    batch = made.config.train.batch_size * LENGTH * made.model_config.dim * made.model_config.dtype.itemsize
    assert 0 < more < batch // 2  # half a batch of tokens for one layer


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "separate"])
def test_no_device_holds_a_float32_head_or_its_gradient(tied):
    made, program = compiled(large_vocabulary(tied), "h100", 64)
    text, m = program.as_text(), made.model_config
    check_traffic(made, text)
    largest = max(
        (math.prod(map(int, dims.split(","))), f"f32[{dims}]") for dims in re.findall(r"f32\[([\d,]+)\]", text)
    )
    assert largest[0] * 4 <= PIECE_BYTES, largest[1]
    # The head in bfloat16, and beside it a piece of it, its gradient, its logits and their gradient, and the layer.
    limit = m.vocab_size * m.dim * 2 + 6 * PIECE_BYTES
    assert program.memory_analysis().temp_size_in_bytes <= limit
