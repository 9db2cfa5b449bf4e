# %% [markdown]
# # Long context
#
# Does the model find what lies far behind its window? Here a small model learns to look facts up several windows back;
# which branch does the work, where it fails, what the text model of notebook 02 gains from its context, and what a long
# context costs in memory when tokens are generated.

# %%
# %matplotlib inline
import re
import zlib

import numpy as np
from common import say, text_run, train_once
from flax import nnx
from IPython.display import display
from matplotlib import pyplot as plt

import nsa_jax
from configs import a100_prod, recall
from nsa_jax import inspect
from nsa_jax.data import Tokenizer
from nsa_jax.data.synthetic import num_facts, recall_rows
from nsa_jax.evaluate import Scorer, held_out_documents, position_bins, retrieval, score_documents
from nsa_jax.nn import ModelConfig, memory_report
from nsa_jax.ops import blocks

# %% [markdown]
# ## Associative recall
#
# A row states facts (key, value), goes on with noise and then asks for every fact. `configs/recall.py` does this over
# 128 tokens with a window of 8; here are 64 tokens and half the steps, for which a laptop needs less than a minute.


# %%
def recall_config():
    """configs/recall.py, shortened: rows of 64 tokens with 8 facts, 16 keys and 16 values."""
    c = recall.get_config()
    c.name = "recall_64"
    c.data.seq_len, c.data.synthetic_vocab = 64, 64
    c.train.steps, c.optim.warmup_steps = 175, 20
    c.train.eval_every, c.train.eval_batches = 0, 0
    c.train.save_every, c.train.keep_last = 25, 10
    c.guards.health = False
    return c


run = train_once("recall_64", recall_config)
model, _, config = nsa_jax.load(run)
geometry, T, vocab = model.config.nsa, config.data.seq_len, config.data.synthetic_vocab
facts, rows = num_facts(T), 64

batch = recall_rows(np.arange(rows), T, vocab, seed=config.seed, split="validation")
tokens, asked_at = batch["inputs"], np.flatnonzero(batch["loss_mask"][0])  # [rows, T], [facts]
answers, questions = batch["targets"][:, asked_at], tokens[:, asked_at]  # [rows, facts]
fact = np.argmax(tokens[:, None, : 2 * facts : 2] == questions[..., None], axis=-1)  # which fact each question is about
value_at = 2 * fact + 1  # position of the value in the row
distance = asked_at - value_at
say(
    f"{rows} held-out rows, {answers.size} questions. The answer lies {distance.min()} to {distance.max()} tokens "
    f"back, {distance.min() / geometry.window:.1f} to {distance.max() / geometry.window:.1f} windows; two layers of "
    f"window attention reach {2 * (geometry.window - 1)} tokens. Guessing is right in {4 / vocab:.1%}."
)

# %%
predict = nnx.jit(lambda model, tokens: model(tokens).argmax(-1))
saved = sorted(int(path.name) for path in (run / "checkpoints").iterdir() if path.name.isdigit())
right = {step: np.asarray(predict(nsa_jax.load(f"{run}@{step}")[0], tokens))[:, asked_at] == answers for step in saved}
by_fact = np.array([[correct[fact == f].mean() for f in range(facts)] for correct in right.values()])  # [steps, facts]
figure, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
image = axis.imshow(by_fact.T, cmap="cividis", vmin=0, vmax=1, aspect="auto")
axis.set_xticks(range(len(saved)), saved)
axis.set(xlabel="training step", ylabel="fact, by its place in the row", title="share of right answers")
figure.colorbar(image, ax=axis)
display(figure)
plt.close(figure)
mean = by_fact.mean(1)
learned = next((step for step, value in zip(saved, mean, strict=True) if value > 0.9), None)
say(
    f"**See:** recall appears within a few steps, for all places alike: {mean[0]:.0%} right at step {saved[0]}, "
    f"{mean[-1]:.1%} at step {saved[-1]}"
    + (f"; step {learned} is the first checkpoint above 90%." if learned else "; 90% is not reached.")
)

# %% [markdown]
# ### Which branch does it?
#
# Shutting one branch's gates in the trained model shows what depends on it.

# %%
accuracy = {"whole model": right[saved[-1]].mean()}
for index, branch in enumerate(inspect.BRANCHES):
    without = inspect.without_branch(model, index)
    accuracy[f"without {branch}"] = (np.asarray(predict(without, tokens))[:, asked_at] == answers).mean()
figure, axis = plt.subplots(figsize=(7, 2.2), layout="constrained")
axis.barh(list(accuracy), list(accuracy.values()), color=["#666666", *inspect.COLOURS.values()])
for y, value in enumerate(accuracy.values()):
    axis.text(value + 0.01, y, f"{value:.0%}", va="center")
axis.axvline(4 / vocab, color="black", linestyle=":")
axis.invert_yaxis()
axis.set(xlabel="share of right answers (dotted: guessing)", xlim=(0, 1.1))
display(figure)
plt.close(figure)
worst = min(accuracy, key=accuracy.get)
say(
    f"**See:** {worst} only {accuracy[worst]:.0%} stay right, without the selected branch's output "
    f"{accuracy['without selected']:.0%}. The learned compressor can hold a single fact in a block of "
    f"{geometry.compress_block} tokens, so that reading blocks is enough here; the paper's blocks have "
    f"{nsa_jax.NSAConfig().compress_block} tokens."
)

# %%
reading = inspect.read_weights(model, tokens, np.broadcast_to(asked_at, (rows, facts)))
weight = reading.branches()  # [L, B, P, N, S, 3]
pair = np.stack([value_at - 1, value_at])  # key and value
on_fact = sum(
    np.take_along_axis(weight, p[None, :, :, None, None, None], axis=4)[..., 0, :] for p in pair
)  # [L, B, P, N, 3]
share = on_fact.mean((1, 2)) / weight.sum(4).mean((1, 2))  # [L, N, 3]
even = np.mean(2 / (asked_at + 1))
figure, axes = plt.subplots(1, len(share), figsize=(9, 2.8), layout="constrained", sharey=True)
for layer, axis in enumerate(axes):
    for index, branch in enumerate(inspect.BRANCHES):
        at = np.arange(share.shape[1]) + (index - 1) * 0.27
        axis.bar(at, share[layer, :, index], 0.27, color=inspect.COLOURS[branch], label=branch)
    axis.axhline(even, color="black", linestyle=":")
    axis.set(title=f"layer {layer}", xlabel="query head", xticks=range(share.shape[1]))
axes[0].set_ylabel("share of the branch's weight\non the fact that is asked for")
axes[-1].legend(fontsize=8)
display(figure)
plt.close(figure)
where = np.unravel_index(share.argmax(), share.shape)
lists = inspect.capture(model, tokens).lists[:, np.arange(rows)[:, None], asked_at]  # [L, B, P, K, n]
hit = retrieval.picked(lists, value_at, geometry.select_block)
candidates = blocks.num_selection_blocks(T, geometry.select_block)
say(
    f"**See:** the dotted line is even attention ({even:.0%}). Layer {where[0]}, head {where[1]} finds the fact "
    f"best: {share[where]:.0%} of its {inspect.BRANCHES[where[2]]} branch's weight lies on the right key and value. "
    f"Some head's list holds the fact's block in {hit.any((0, 3)).mean():.0%} of the questions, a given head's in "
    f"{hit.mean():.0%} (at random about {geometry.num_selected / candidates:.0%})."
)

# %% [markdown]
# ## Needles
#
# One fact somewhere in noise, one question at the end: `nsa_jax.evaluate.retrieval.needle_row`, which `python -m
# nsa_jax.evaluate` runs on text. In training, facts stood at the beginning of 64 tokens, at even positions. What about
# other places, and other lengths?


# %%
class Symbols(Tokenizer):
    """Writes facts as the recall task does: a word is one of the keys, a number one of the values."""

    def encode(self, text):
        part, ids = vocab // 4, []
        for piece in re.findall(r"[a-z]+|\d+|\?", text):
            symbol = zlib.crc32(piece.encode()) % part
            ids.append(vocab - 1 if piece == "?" else symbol + part * piece.isdigit())
        return np.array(ids, np.int32)


probe, rng = inspect.Probe(model), np.random.default_rng(0)
noise = rng.integers(vocab // 2, vocab - 1, 4096).astype(np.int32)
template, lengths, samples = ("{key} {value}", "? {key}", " {value}"), (32, 64, 128), 32
places = np.round(np.linspace(0, 1, 13), 3)  # of the room before the question
exact, listed = np.zeros((2, 2, len(places), len(lengths)))  # at even and odd positions
for column, length in enumerate(lengths):
    room = length - 5  # noise; fact, question and answer have 5 tokens
    for line, place in enumerate(places):
        for parity in range(2):
            at = min(int(place * room) // 2 * 2 + parity, room)
            made = [
                retrieval.needle_row(Symbols(), noise, length, at / room, rng=rng, template=template)
                for _ in range(samples)
            ]
            row, query, target = (np.stack(x) for x in zip(*made, strict=True))
            likely, lists = probe(row, query)
            exact[parity, line, column] = (likely == row[:, -1:]).mean()
            listed[parity, line, column] = retrieval.picked(lists, target, geometry.select_block).mean()

figure, axes = plt.subplots(1, 4, figsize=(13, 4.2), layout="constrained", sharey=True)
panels = [exact[0], exact[1], listed[0], listed[1]]
titles = [
    f"{what},\nfact at {side} positions"
    for what in ("right answers", "heads that list its block")
    for side in ("even", "odd")
]
for axis, panel, title in zip(axes, panels, titles, strict=True):
    image = axis.imshow(panel, cmap="cividis", vmin=0, vmax=1, aspect="auto")
    axis.set_xticks(range(len(lengths)), lengths)
    axis.set(title=title, xlabel="tokens in the context")
axes[0].set_yticks(range(len(places)), [f"{place:.0%}" for place in places])
axes[0].set_ylabel("depth of the fact (100%: right before the question)")
figure.colorbar(image, ax=axes)
display(figure)
plt.close(figure)
inner = slice(0, -1)
say(
    f"**See:** at even positions {exact[0, inner].mean():.0%} of the facts are found (depth 100% aside), at odd "
    f"ones {exact[1, inner].mean():.0%}. Compressed blocks begin at multiples of d = {geometry.compress_stride}, "
    "and in training every fact began where a block does: one that is cut elsewhere is new to the compressor. A "
    f"context of {lengths[-1]} tokens, twice that of training, gives {exact[0, inner, -1].mean():.0%} at even "
    "positions. Such gaps show in a heat map and in no average: build training data whose facts stand anywhere."
)

# %% [markdown]
# ## Loss by position
#
# On text the question is how much later positions gain from what stands before the window. The text model of notebook
# 02, whole and with one branch's gates shut.

# %%
text, tokenizer, text_config = nsa_jax.load(text_run())
context, window = text_config.data.seq_len, text_config.model.nsa.window
documents = [d for d in held_out_documents(text_config, (), tokenizer, 60_000).documents if len(d) >= context]
token_bytes = np.zeros(text.config.vocab_size, np.int32)
token_bytes[: tokenizer.vocab_size] = tokenizer.token_bytes
variants = {
    "whole model": (text, "#666666"),
    "without selected": (inspect.without_branch(text, 1), inspect.COLOURS["selected"]),
    "without compressed": (inspect.without_branch(text, 0), inspect.COLOURS["compressed"]),
}
figure, axis = plt.subplots(figsize=(7, 3.8), layout="constrained")
inside, beyond = {}, {}
for name, (variant, colour) in variants.items():
    scores = score_documents(
        Scorer(variant), documents, token_bytes, tokenizer.eos_id, context=context, stride=context, batch_size=16
    )["by_position"]
    bins = [b for b in position_bins(scores["nats"], scores["counts"]) if b["from"] >= 4]
    axis.plot(
        [(b["from"] + b["to"]) / 2 for b in bins], [b["loss"] for b in bins], marker="o", color=colour, label=name
    )
    inside[name], beyond[name] = (
        scores["nats"][part].sum() / scores["counts"][part].sum() for part in (slice(4, window), slice(window, None))
    )
    if name == "whole model":
        first, last, seen = bins[0], bins[-1], int(scores["counts"].sum())
axis.axvline(window, color="black", linestyle=":", label=f"window of {window}")
axis.set_xscale("log")
axis.set_xticks([4, 16, 64, 256], ["4", "16", "64", "256"])
axis.minorticks_off()
axis.set(xlabel="position in the context", ylabel="loss, nats per byte")
axis.grid(alpha=0.3)
axis.legend()
display(figure)
plt.close(figure)
gained = inside["whole model"] - beyond["whole model"]
cost = {
    name: (inside[name] - inside["whole model"], beyond[name] - beyond["whole model"]) for name in list(variants)[1:]
}
say(
    f"**See:** over {seen:,} held-out bytes the loss goes from {first['loss']:.2f} at positions "
    f"{first['from']}–{first['to'] - 1} to {last['loss']:.2f} at {last['from']}–{last['to'] - 1}: "
    + f"beyond the window its mean is {abs(gained):.3f} {'lower' if gained > 0 else 'higher'} than within. "
    "With one branch shut: "
    + "; ".join(
        f"{name} the loss rises by {a:.3f} within the window and by {b:.3f} beyond" for name, (a, b) in cost.items()
    )
    + ". Only the second minus the first is what the branch brings from afar; a branch that the rest was trained with "
    "is missed in any case."
)

# %% [markdown]
# ## What a long context costs in generation
#
# NSA's cache keeps every token's key and value for the selected branch, one compressed pair every d tokens and, unless
# the branches share keys and values as here, a window: its size is dense's and a little more. What shrinks is what a
# step must read, and reading is what decoding waits for.

# %%
prod = ModelConfig.from_config(a100_prod.get_config(), vocab_size=32_000)
lengths = 2 ** np.arange(11, 18)
reports = [memory_report(prod, 1, int(length)) for length in lengths]
per_key = prod.num_layers * prod.num_kv_heads * (prod.head_dim + prod.value_head_dim) * prod.dtype.itemsize
low, high = blocks.compressed_range(lengths - 1, 0, prod.nsa)
keys_read = (high - low) + blocks.selected_key_count(lengths - 1, 0, prod.nsa) + np.minimum(lengths, prod.nsa.window)
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
left.loglog(lengths, [r["dense_total_mib"] for r in reports], color="#666666", marker="o", label="dense")
left.loglog(lengths, [r["total_mib"] for r in reports], color="#D55E00", marker="o", label="NSA")
right.loglog(lengths, lengths * per_key / 2**20, color="#666666", marker="o", label="dense")
right.loglog(lengths, keys_read * per_key / 2**20, color="#D55E00", marker="o", label="NSA")
for axis, title in ((left, "cache of one row"), (right, "read for one more token, all layers")):
    axis.set_xticks(lengths, [f"{x // 1024}k" for x in lengths])
    axis.minorticks_off()
    axis.set(xlabel="tokens of context", ylabel="MiB", title=title)
    axis.grid(alpha=0.3)
    axis.legend()
display(figure)
plt.close(figure)
last = reports[-1]
say(
    f"**See:** for `a100_prod` ({prod.num_layers} layers, {prod.num_kv_heads} key/value heads) at "
    f"{lengths[-1] // 1024}k tokens the cache takes {last['total_mib']:,.0f} MiB, "
    f"{last['total_mib'] / last['dense_total_mib']:.3f} times dense's. A decode step reads {keys_read[-1]:,} of "
    f"{lengths[-1]:,} key positions, {lengths[-1] / keys_read[-1]:.1f} times fewer; at {lengths[0] // 1024}k it "
    f"reads {keys_read[0]:,}, and saves "
    f"{'nothing' if keys_read[0] >= lengths[0] else f'{lengths[0] / keys_read[0]:.1f}x'}."
)
