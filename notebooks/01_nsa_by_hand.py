# %% [markdown]
# # NSA by hand
#
# Native Sparse Attention ([arXiv 2502.11089](https://arxiv.org/abs/2502.11089)) replaces one softmax over all keys by
# three over few: **compressed** keys (blocks of tokens pooled into one), a few **selected** blocks at full resolution,
# and a sliding **window**. Learned gates add the three up. Here each step is written out with NumPy for 64 tokens and
# compared with the library.
#
# | symbol | meaning | here | paper |
# |---|---|---|---|
# | l | tokens in a compressed block | 8 | 32 |
# | d | tokens between the starts of compressed blocks | 4 | 16 |
# | l' | tokens in a selection block | 8 | 64 |
# | n | selection blocks that a query reads | 4 | 16 |
# | w | tokens in the window | 12 | 512 |

# %%
# %matplotlib inline
import numpy as np
from common import say
from IPython.display import display
from matplotlib import pyplot as plt

import nsa_jax
from nsa_jax import inspect
from nsa_jax.ops import blocks

config = nsa_jax.NSAConfig(
    compress_block=8, compress_stride=4, select_block=8, num_selected=4, num_initial=1, num_local=1, window=12
)
ell, d, l2, n, w = 8, 4, 8, 4, 12
T, N, K, H = 64, 2, 1, 16  # tokens, query heads, key/value heads, head dim
G = N // K  # query heads that share keys, values and the block list
rng = np.random.default_rng(0)

# %% [markdown]
# ## Inputs with something to find
#
# Random queries, keys and values; every branch has its own keys and values. Token 52 asks for what token 19 offers: its
# query points along that token's keys. A window of 12 cannot reach 33 tokens back.

# %%
query = rng.normal(size=(T, N, H)).astype(np.float32)
key_raw, key_slc, key_win = (rng.normal(size=(T, K, H)).astype(np.float32) for _ in range(3))
value_raw, value_slc, value_win = (rng.normal(size=(T, K, H)).astype(np.float32) for _ in range(3))
gates = 1 / (1 + np.exp(-rng.normal(size=(T, N, 3)).astype(np.float32)))

asks, offers = 52, 19
wanted = rng.normal(size=H).astype(np.float32)
wanted *= 4 / np.linalg.norm(wanted)
query[asks] = 2 * wanted
key_raw[offers], key_slc[offers] = 2 * wanted, wanted

# %% [markdown]
# ## 1. Compression
#
# Block i pools the tokens [i d, i d + l): C = (T - l) / d + 1 blocks, neighbours overlap by l - d (paper eq. 7). Models
# learn the pooling φ; the mean is the simplest one.

# %%
C = (T - ell) // d + 1
key_cmp = np.stack([key_raw[i * d : i * d + ell].mean(0) for i in range(C)])  # [C, K, H]
value_cmp = np.stack([value_raw[i * d : i * d + ell].mean(0) for i in range(C)])


def compare(name, ours, theirs, tolerance=1e-5):
    """Raises unless the two agree; says by how much they differ."""
    difference = np.abs(np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)).max()
    assert difference <= tolerance, (name, difference)
    say(f"{name}: largest difference to the library {difference:.1e}")


compare("compressed keys", key_cmp, nsa_jax.mean_compress(key_raw[None], config=config)[0])
say(f"{T} tokens became C = {C} blocks.")

# %% [markdown]
# ## 2. The compressed branch
#
# An ordinary softmax over blocks. Query t may read a block only when all of its tokens are known: i d + l - 1 ≤ t. The
# first l - 1 queries see nothing, and the branch gives exactly 0 there.


# %%
def attend(query, key, value, mask):
    """Softmax attention of one row under mask [T, S]: output [T, N, V], probabilities [T, N, S], log-sum-exp [T, N]."""
    key, value = key.repeat(G, axis=1), value.repeat(G, axis=1)  # head h reads key/value head h // G
    scores = np.einsum("tnh,snh->tns", query, key) / np.sqrt(H)
    exponentials = np.where(mask[:, None], np.exp(scores), 0)
    total = exponentials.sum(-1, keepdims=True)
    probs = np.divide(exponentials, total, where=total > 0, out=np.zeros_like(scores))
    with np.errstate(divide="ignore"):
        return np.einsum("tns,snv->tnv", probs, value), probs, np.log(total[..., 0])


t, i, s = np.arange(T)[:, None], np.arange(C), np.arange(T)
mask_cmp = i * d + ell - 1 <= t
out_cmp, p_cmp, lse = attend(query, key_cmp, value_cmp, mask_cmp)

theirs, their_lse = nsa_jax.compressed_attention(
    query[None], key_cmp[None], value_cmp[None], config=config, implementation="reference"
)
compare("output of the compressed branch", out_cmp, theirs[0])
compare("log-sum-exp", lse[ell - 1 :], their_lse[0, ell - 1 :])

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
left.imshow(mask_cmp, cmap="Greys", aspect="auto", interpolation="nearest", vmax=1.6)
left.set(title="mask", xlabel="compressed block i", ylabel="query t")
image = right.imshow(p_cmp[:, 0], cmap="cividis", aspect="auto", interpolation="nearest", vmax=0.6)
right.set(title="probabilities p_cmp, head 0", xlabel="compressed block i", ylabel="query t")
right.annotate(f"query {asks}", (C - 0.5, asks), (C + 0.2, asks), fontsize=8, va="center", annotation_clip=False)
figure.colorbar(image, ax=right, extend="max", pad=0.1)
display(figure)
plt.close(figure)
best = np.flatnonzero(p_cmp[asks, 0] > 0.2)
say(
    f"**See:** the staircase has steps of d = {d} queries, one new block each. Row {asks} is nearly dark but for "
    f"blocks {', '.join(map(str, best))}, which hold {p_cmp[asks, 0, best].sum():.0%} of its attention: they are "
    f"those that contain token {offers} (tokens {', '.join(f'{b * d}–{b * d + ell - 1}' for b in best)})."
)

# %% [markdown]
# ## 3. Importance of selection blocks
#
# The same probabilities decide which tokens are worth reading in full; no second scoring network, no extra gradient. A
# selection block's importance is the attention that compressed blocks inside and across it received (paper eq. 9):
#
# p_slc[j] = Σ over m in [0, l'/d), r in [0, l/d) of p_cmp[(l'/d) j + m - r]
#
# summed over the G heads of a group (eq. 10): all heads of a group read the same blocks, so that a kernel loads them
# once.

# %%
J = -(-T // l2)
p_slc = np.zeros((T, N, J), np.float32)
for j in range(J):
    for m in range(l2 // d):
        for r in range(ell // d):
            index = l2 // d * j + m - r
            if 0 <= index < C:
                p_slc[:, :, j] += p_cmp[:, :, index]
importance = p_slc.reshape(T, K, G, J).sum(2)

compare("importance", importance, blocks.fold_importance(np.float32(p_cmp.reshape(T, K, G, C).sum(2)), J, config))
weights = ", ".join(map(str, blocks.fold_weights(config)))
say(f"Equal to a weighted sum with the weights ({weights}) over neighbouring compressed blocks.")

# %% [markdown]
# ## 4. Selection
#
# Candidates are the blocks up to the query's own. The first block and the query's own block are always taken (here one
# of each; the paper takes the last two) and count towards n; the rest are the highest scores, ties to the lower index.

# %%
lists = np.full((T, K, n), J)  # padded with J
for query_index in range(T):
    candidates = range(query_index // l2 + 1)
    for group in range(K):
        forced = {0, query_index // l2}
        rest = sorted(set(candidates) - forced, key=lambda j: (-importance[query_index, group, j], j))
        chosen = sorted([*forced, *rest[: n - len(forced)]])
        lists[query_index, group, : len(chosen)] = chosen

theirs = nsa_jax.select_blocks(query[None], key_cmp[None], their_lse, config=config, implementation="reference")
assert (lists == np.asarray(theirs[0])).all()
say(f"All {T} block lists equal the library's.")

arrays = (query, key_cmp, value_cmp, key_slc, value_slc, key_win, value_win, gates)
found = inspect.capture_arrays(*(x[None] for x in arrays), config=config, implementation="reference")
figure, axis = plt.subplots(figsize=(5.4, 3.8), layout="constrained")
image = axis.imshow(np.where(importance[:, 0] > 0, importance[:, 0], np.nan), cmap="cividis", aspect="auto")
axis.annotate(f"query {asks}", (J - 0.5, asks), (J - 0.3, asks), fontsize=8, va="center", annotation_clip=False)
axis.set(title="importance p_slc of the group", xlabel="selection block j", ylabel="query t")
figure.colorbar(image, ax=axis, pad=0.12)
display(figure, inspect.draw_lists(found))
plt.close(figure)
say(
    f"**See:** below, blue blocks are always listed; orange ones won by score. Row {asks} lists blocks "
    f"{', '.join(map(str, lists[asks, 0]))}: block {offers // l2} holds token {offers} and has importance "
    f"{importance[asks, 0, offers // l2]:.2f} of {importance[asks, 0].sum():.2f}. Up to query {n * l2 - 1} a list "
    "has room for every block, so that nothing is left out."
)

# %% [markdown]
# ## 5. The selected branch
#
# A softmax over the tokens of the listed blocks, up to t, with keys and values of its own.

# %%
listed = (lists[:, 0, :, None] == np.arange(J)).any(1)  # [T, J]
mask_slc = listed[:, s // l2] & (s <= t)
out_slc, p_selected, _ = attend(query, key_slc, value_slc, mask_slc)
theirs = nsa_jax.selected_attention(
    query[None], key_slc[None], value_slc[None], theirs, select_block=l2, implementation="reference"
)
compare("output of the selected branch", out_slc, theirs[0])
say(
    f"Query {asks} gives {p_selected[asks, 0, offers]:.0%} of its selected attention to token {offers} alone, "
    f"{asks - offers} tokens back."
)

# %% [markdown]
# ## 6. The window
#
# The last w tokens, the query's own included. With a branch for what is near, the other two need not learn it.

# %%
mask_win = (s <= t) & (s > t - w)
out_win, p_window, _ = attend(query, key_win, value_win, mask_win)
theirs = nsa_jax.window_attention(query[None], key_win[None], value_win[None], window=w, implementation="reference")
compare("output of the window branch", out_win, theirs[0])

display(inspect.draw_masks(config, T, lists[:, 0]))
read = [mask.sum(1)[-1] for mask in (mask_cmp, mask_slc, mask_win)]
say(
    f"**See:** three sparse shapes of one causal triangle: stairs, blocks, a band. The last query reads {read[0]} "
    f"pooled keys, {read[1]} selected tokens and {read[2]} window tokens. Row {asks} of the middle panel reaches "
    f"token {offers}."
)

# %% [markdown]
# ## 7. Gates
#
# The layer computes three gates per token and head, sigmoid(linear(x)), and adds the branches up. They need not sum to
# one.

# %%
out = gates[..., :1] * out_cmp + gates[..., 1:2] * out_slc + gates[..., 2:] * out_win
for implementation in ("reference", "xla"):
    theirs = nsa_jax.nsa_attention(*(x[None] for x in arrays), config=config, implementation=implementation)
    compare(f"the whole operator, {implementation}", out, theirs[0])

reading = inspect.read_weights_arrays(*(x[None] for x in arrays), positions=asks, config=config)
display(inspect.draw_reading(reading))
weight = reading.branches()[0, 0, 0].mean(0)  # [T, 3], mean over heads
say(
    f"**See:** gate × probability of query {asks} on each token. Token {offers} gets {weight[offers].sum():.2f} "
    f"({weight[offers, 0]:.2f} of it through compressed blocks, shared out evenly among their tokens), the most of "
    f"all; green bars end after {w} tokens. The bars add up to {weight.sum():.2f}, the mean sum of the gates."
)
assert weight.sum(-1).argmax() == offers

# %% [markdown]
# ## 8. Packed rows
#
# Rows of training data hold several documents. A query carries `segment_start`, the position where its document begins,
# and reads nothing before it: blocks must begin at or after it, and the document's own first block is the one always
# taken.

# %%
segment_start = np.where(np.arange(T) < 27, 0, 27).astype(np.int32)
packed = inspect.capture_arrays(*(x[None] for x in arrays), config=config, segment_start=segment_start[None])
display(inspect.draw_masks(config, T, packed.lists[0, 0, :, 0], segment_start))
masks = inspect.draw_masks(config, T, packed.lists[0, 0, :, 0], segment_start)
leaks = [int(np.asarray(axis.images[0].get_array())[27:, :27].sum()) for axis in masks.axes[1:]]
say(
    f"**See:** a second triangle begins at token 27, in the middle of a block. Its queries read {sum(leaks)} tokens "
    "of the first document. Compressed blocks that straddle the border are seen by nobody behind it: block 6 "
    f"(tokens 24–31) is readable to {int((np.asarray(masks.axes[0].images[0].get_array())[27:, 6]).sum())} queries "
    "of the second document."
)

# %% [markdown]
# ## 9. What it saves
#
# Keys per query at the paper's geometry, counted by the library's own block arithmetic.

# %%
paper = nsa_jax.NSAConfig()
lines = ["| context | compressed | selected | window | NSA | dense | dense / NSA |", "|---|---|---|---|---|---|---|"]
for length in (1024, 4096, 16384, 65536, 262144):
    low, high = blocks.compressed_range(length - 1, 0, paper)
    counts = [high - low, blocks.selected_key_count(length - 1, 0, paper), min(length, paper.window)]
    cells = " | ".join(f"{int(count):,}" for count in counts)
    lines.append(f"| {length:,} | {cells} | {sum(counts):,} | {length:,} | {length / sum(counts):.1f}x |")
say("\n".join(lines))
say(
    "**See:** selected and window are bounded; only the compressed branch still grows, with T / d, so that the "
    f"saving tends to d = {paper.compress_stride}. Below a few thousand tokens there is nothing to save."
)
