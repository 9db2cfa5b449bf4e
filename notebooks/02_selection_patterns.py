# %% [markdown]
# # What a trained model selects
#
# Which blocks do queries pick, do neighbours and layers agree, what is read when a given token is predicted, and when
# does the model learn all this? Everything below works on a model of your own: `nsa_jax.load("runs/NAME")` and
# `nsa_jax.inspect`.
#
# `runs/quickstart` is used if it is there (`make quickstart`); otherwise a smaller model is trained first, in under a
# minute.

# %%
# %matplotlib inline
import numpy as np
from common import say, text_run
from flax import nnx
from IPython.display import HTML, display
from matplotlib import pyplot as plt

import nsa_jax
from nsa_jax import inspect
from nsa_jax.evaluate import held_out_documents
from nsa_jax.nn import ModelConfig, Transformer

run = text_run()
model, tokenizer, config = nsa_jax.load(run)
untrained = Transformer(ModelConfig.from_config(config, tokenizer.vocab_size), rngs=nnx.Rngs(config.seed))

# %%
geometry, T = model.config.nsa, config.data.seq_len
documents = held_out_documents(config, (), tokenizer, 40_000).documents
rows = [d[first : first + T] for d in documents for first in range(0, len(d) - T, T)]
tokens = np.stack(rows[:8])  # [B, T], text that was held out from training
found = inspect.capture(model, tokens)
say(
    f"`{run.name}`: {model.config.num_layers} layers, {model.config.num_heads} heads in {model.config.num_kv_heads} "
    f"groups; {T} tokens are {found.num_blocks} blocks of l' = {geometry.select_block}, of which a query lists n = "
    f"{geometry.num_selected}: the first, the last {geometry.num_local}, and "
    f"{geometry.num_selected - geometry.num_local - 1} by score. The window has {geometry.window} tokens. The text "
    f"is {len(tokens)} rows of held-out Python source."
)
print(tokenizer.decode(tokens[0])[:300])

# %% [markdown]
# ## Which blocks each query picks
#
# One map per layer and head group; all heads of a group read the same blocks. Down is time, across is the past.

# %%
display(inspect.draw_lists(found))
scored = inspect.chosen_by_score(found.lists, geometry)
distance = np.where(scored, inspect.block_distances(found.lists, geometry), np.nan)
choosing = inspect.choosing_queries(geometry, found.segment_start)
per_layer = np.nanmean(distance[:, choosing], axis=(1, 2, 3))
# Among candidates that no rule forces: the mean distance of all of them.
own = np.arange(T) // geometry.select_block
free = [np.arange(geometry.num_local, block) for block in own[choosing[0]]]
expected = geometry.select_block * np.mean([np.mean(blocks_back) for blocks_back in free])
say(
    "**See:** blue blocks are rules, orange ones choices. Runs of orange are stretches of text that keep their "
    "interest in a block; stripes are tokens that look elsewhere. Chosen blocks begin "
    f"{', '.join(f'{x:.0f}' for x in per_layer)} tokens back on average (layer 0 to {found.num_layers - 1}); "
    f"picking at random would give {expected:.0f}."
)

# %% [markdown]
# ## Does selection find what is needed?
#
# On text nobody knows which block a query ought to read. In the task of the run it is known: one early token states the
# answer. The verdict compares how often lists hold its block with how often lists drawn at random would.

# %%
task = inspect.far_task(config, tokenizer)
if task is None:
    say("This run has no source of tasks (`configs/quickstart.py` has one), so there is nothing to judge.")
else:
    probe = inspect.Probe(model)
    scores, verdict = inspect.score_far_task(probe, task, rows=32)
    _, before = inspect.score_far_task(probe.of(untrained), task, rows=32)
    text, figure = inspect.show_far_question(probe, task)
    print(text)
    display(figure)
    say(
        f"**See:** the dotted line is the token that states the answer. Of {scores['questions']} questions the model "
        f"answers {scores['accuracy']:.0%}, without its selected branch {scores['without_selected']:.0%}; "
        f"{scores['chance']:.0%} is chance. **For this model {verdict}.** Before its first step of training, {before}."
    )

# %% [markdown]
# ## Do neighbours and layers agree?
#
# Neighbouring queries that share blocks let a kernel load each block once for all of them. Layers that agree would make
# one selection enough for several.

# %%
display(inspect.draw_overlap(found))
lag_1 = inspect.neighbour_overlap(found.lists, found.num_blocks)[:, :, geometry.num_selected * geometry.select_block :]
shared, chance = inspect.layer_overlap(found.lists, geometry)
K = model.config.num_kv_heads
layer_of = np.arange(len(shared)) // K
same_layer = (layer_of[:, None] == layer_of) & ~np.eye(len(shared), dtype=bool)
other_layer = layer_of[:, None] != layer_of
say(
    f"**See:** a query shares {lag_1.mean():.0%} of its list with the query before it, which falls with distance. "
    f"Groups of one layer choose the same blocks in {shared[same_layer].mean():.0%} of the cases, groups of "
    f"different layers in {shared[other_layer].mean():.0%}; lists drawn at random would agree in {chance:.0%}."
)

# %% [markdown]
# ## What the model reads when it predicts a token
#
# `read_weights` gives, for a query, gate × probability of every source token, summed over the three branches. Its sum
# is the sum of the gates; times the values it is the layer's output. The query shown is the one, among correct and
# confident predictions, that reads the most from beyond its window.

# %%
logits = np.asarray(nnx.jit(lambda model, tokens: model(tokens))(model, tokens))
probability = np.exp(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))
best, target = probability.argmax(-1), np.roll(tokens, -1, axis=1)
far = (
    (found.gates * found.beyond_window)[..., :2].sum(-1).mean(-1)
)  # [L, B, T]: weight beyond the window, mean over heads
allowed = (best == target) & (probability.max(-1) > 0.5) & choosing
allowed[:, -1] = False
row, at = np.unravel_index(np.where(allowed, far.max(0), -1).argmax(), allowed.shape)
layer = int(far[:, row, at].argmax())

reading = inspect.read_weights(model, tokens[row : row + 1], at)
weights = reading.tokens()[:, 0, 0].mean(1)  # [L, S], mean over heads
strings = inspect.token_strings(tokenizer, tokens[row])
for index in range(found.num_layers):
    display(HTML(f"<b>layer {index}</b>" + inspect.reading_html(strings, weights[index], at, strings[at + 1])))
near = weights[layer, : at - geometry.window + 1]
top = np.argsort(-near)[:5]
words = ", ".join(f"`{strings[i]!r}` {at - i} back" for i in top)
say(
    f"**See:** the framed token predicts {strings[at + 1]!r} with {probability[row, at].max():.0%}. Layer {layer} "
    f"reads {near.sum() / weights[layer].sum():.0%} of its weight from beyond the window of {geometry.window}; the "
    f"strongest there are {words}. (Compressed blocks colour all their tokens evenly.)"
)

# %%
display(inspect.draw_reading(reading))
branches = reading.branches()[:, 0, 0].mean(1).sum(1)  # [L, 3]
shares = branches / branches.sum(-1, keepdims=True)
say(
    "**See:** the same weights as bars. Green ends at the window's edge; behind it, orange stands in the listed "
    f"blocks only, and blue lies flat over all that is known. The selected branch has {shares[layer, 1]:.0%} of "
    f"layer {layer}'s weight, the window {shares[layer, 2]:.0%}, the compressed branch {shares[layer, 0]:.0%}."
)

# %% [markdown]
# ## Gates
#
# A gate near 0 switches a branch off for a token and head.

# %%
display(inspect.draw_gates(found))
means = found.gates.mean((1, 2))  # [L, N, 3]
lowest, highest = (np.unravel_index(f(means), means.shape) for f in (np.argmin, np.argmax))
say(
    f"**See:** heads differ. The most open gate is that of the {inspect.BRANCHES[highest[2]]} branch in layer "
    f"{highest[0]}, head {highest[1]} ({means[highest]:.2f}), the most closed that of the "
    f"{inspect.BRANCHES[lowest[2]]} branch in layer {lowest[0]}, head {lowest[1]} ({means[lowest]:.2f}). All began "
    "at 0.5."
)

# %%
kinds = np.stack([inspect.token_kinds(inspect.token_strings(tokenizer, r)) for r in tokens])
common = [kind for kind in ("letter", "digit", "punctuation", "space", "newline") if (kinds == kind).sum() >= 16]
by_kind = {kind: value for kind, value in inspect.mean_by_kind(found.gates, kinds).items() if kind in common}
display(inspect.draw_gates_by_kind(by_kind))
table = np.stack([by_kind[kind].mean(1) for kind in by_kind])  # [kinds, L, 3]
spread = table.max(0) - table.min(0)
where = np.unravel_index(spread.argmax(), spread.shape)
names = list(by_kind)
say(
    f"**See:** gates depend on the token. The largest difference is in layer {where[0]}, "
    f"{inspect.BRANCHES[where[1]]} branch: {names[table[:, where[0], where[1]].argmax()]} "
    f"{table[:, where[0], where[1]].max():.2f}, {names[table[:, where[0], where[1]].argmin()]} "
    f"{table[:, where[0], where[1]].min():.2f}. Counted over "
    f"{', '.join(f'{(kinds == kind).sum():,} × {kind}' for kind in names)}."
)

# %%
display(inspect.draw_statistics(found))
size = found.sizes.mean((1, 2, 3))
size = size / size.sum(-1, keepdims=True)
say(
    "**See:** what a gate says and what a branch adds are two things: over all layers the window makes "
    f"{size[:, 2].mean():.0%} of what is added up, the selected branch {size[:, 1].mean():.0%}, the compressed "
    f"branch {size[:, 0].mean():.0%}. The selected branch reads {found.beyond_window[..., 1].mean():.0%} of its "
    "attention from beyond the window: the rest is what the window sees too."
)

# %% [markdown]
# ## How the patterns form
#
# The same text at every checkpoint of the run, and before the first step.

# %%
saved = sorted(int(path.name) for path in (run / "checkpoints").iterdir() if path.name.isdigit())
captures = {0: inspect.capture(untrained, tokens)}
captures |= {step: inspect.capture(nsa_jax.load(f"{run}@{step}")[0], tokens) for step in saved}
steps, last = list(captures), captures[saved[-1]]


def agreement(capture):
    """Share of the last checkpoint's choices that a checkpoint's lists have already."""
    chosen = inspect.chosen_by_score(last.lists, geometry) & choosing[None, :, :, None, None]
    same = (last.lists[..., None] == capture.lists[..., None, :]).any(-1)
    return (same & chosen).sum() / chosen.sum()


figure, axes = plt.subplots(1, 4, figsize=(13, 3.2), layout="constrained")
for index, branch in enumerate(inspect.BRANCHES):
    style = dict(color=inspect.COLOURS[branch], marker="o", label=branch)
    axes[0].plot(steps, [c.gates[..., index].mean() for c in captures.values()], **style)
    axes[1].plot(steps, [c.entropy[..., index].mean() for c in captures.values()], **style)
    axes[2].plot(steps, [c.beyond_window[..., index].mean() for c in captures.values()], **style)
agreements = [agreement(capture) for capture in captures.values()]
axes[3].plot(steps, agreements, color="black", marker="o", label="measured")
axes[3].axhline(chance, color="grey", linestyle=":", label="at random")
titles = ("mean gate", "entropy, nats", "read from beyond the window", "choices that the last step shares")
for axis, title in zip(axes, titles, strict=True):
    axis.set(title=title, xlabel="training step", ylim=(0, None))
    axis.grid(alpha=0.3)
axes[0].legend(fontsize=8)
axes[3].legend(fontsize=8)
display(figure)
plt.close(figure)
first_entropy, last_entropy = captures[0].entropy.mean((0, 1, 2, 3)), last.entropy.mean((0, 1, 2, 3))
say(
    "**See:** the lower the entropy, the sharper the attention; the selected branch's goes from "
    f"{first_entropy[1]:.2f} to {last_entropy[1]:.2f} nats. Before training, lists share {agreements[0]:.0%} of the "
    f"final choices, {chance:.0%} being chance; at step {steps[1]} {agreements[1]:.0%}."
)

# %%
shown = steps if len(steps) <= 5 else [steps[i] for i in np.linspace(0, len(steps) - 1, 5).astype(int)]
figure, axes = plt.subplots(1, len(shown), figsize=(2.6 * len(shown), 3.2), layout="constrained", sharey=True)
importance = {}
for axis, step in zip(axes, shown, strict=True):
    lists = captures[step].lists[layer, :, :, 0]  # [B, T, n]
    importance[step] = (lists[..., None] == np.arange(found.num_blocks)).any(2).mean(0)  # [T, J]
    image = axis.imshow(importance[step], cmap="cividis", aspect="auto", vmin=0, vmax=1, interpolation="nearest")
    axis.set(title=f"step {step}", xlabel=f"block of {geometry.select_block} tokens")
axes[0].set_ylabel("query token")
figure.colorbar(image, ax=axes, label="share of texts")
display(figure)
plt.close(figure)
own = np.arange(T) // geometry.select_block


def by_distance(step):
    """Share of the queries that list the block k behind their own, for every k beyond the forced ones."""
    far = range(geometry.num_local, own[-1])
    queries = {k: np.flatnonzero((own > k) & choosing[0]) for k in far}
    return {k: importance[step][t, own[t] - k].mean() for k, t in queries.items() if t.size}


before, after = by_distance(shown[0]), by_distance(shown[-1])
peak = max(after, key=after.get)
low = min(after, key=after.get)
say(
    f"**See:** how often a query lists each block, over {len(tokens)} texts (layer {layer}, group 0). Stripes along "
    "the diagonal are a habit of distance, whatever the text says, which RoPE makes easy to learn; columns would "
    f"be a habit of position, an even field a choice by content. At the end {after[peak]:.0%} of the queries list "
    f"the block {peak} behind their own and {after[low]:.0%} the one {low} behind; before training "
    f"{before[peak]:.0%} and {before[low]:.0%}."
)
