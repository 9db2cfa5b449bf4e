"""Matplotlib figures and highlighted text of what `nsa_jax.inspect` captures.

Every function returns a `matplotlib.figure.Figure` without pyplot, so there is no global state and nothing to close.
The colours are distinguishable with every type of colour vision (Okabe and Ito's palette, cividis).
"""

from __future__ import annotations

import functools
import html
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from nsa_jax.config import NSAConfig
from nsa_jax.inspect.capture import Capture, Reading
from nsa_jax.inspect.statistics import choosing_queries, chosen_by_score, layer_overlap, neighbour_overlap
from nsa_jax.nn.observe import BRANCHES
from nsa_jax.ops import blocks

COLOURS = {"compressed": "#0072B2", "selected": "#D55E00", "window": "#009E73"}
_MAP = "cividis"
_LIST_STATES = {"not readable": "#FFFFFF", "not listed": "#D9D9D9", "always listed": "#56B4E9", "by score": "#D55E00"}


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained", dpi=100)


def _masks(config: NSAConfig, segment_start: np.ndarray, lists: np.ndarray | None) -> dict[str, np.ndarray]:
    """Which of the T keys (or C blocks) each of T queries may read: bool [T, C or T] for each branch."""
    length = len(segment_start)
    t, start = np.arange(length)[:, None], segment_start[:, None]
    low, high = blocks.compressed_range(t, start, config)
    index, token = np.arange(blocks.num_compressed(length, config)), np.arange(length)
    usable = (token >= start) & (token <= t)
    masks = {"compressed": (index >= low) & (index < high)}
    if lists is not None:
        listed = blocks.listed_blocks(lists, blocks.num_selection_blocks(length, config.select_block))
        masks["selected"] = np.repeat(listed, config.select_block, axis=-1)[:, :length] & usable
    masks["window"] = usable & (token > t - config.window)
    return masks


def draw_masks(
    config: NSAConfig, length: int, lists: np.ndarray | None = None, segment_start: np.ndarray | None = None
) -> Figure:
    """Which keys every query reads, with one panel per branch.

    Args:
      config: the operator's.
      length: T.
      lists: int32 [T, n] of one row and head group; None leaves the selected branch out.
      segment_start: int [T] or None.
    """
    start = np.zeros(length, np.int32) if segment_start is None else np.asarray(segment_start)
    masks = _masks(config, start, None if lists is None else np.asarray(lists))
    figure = _figure(4 * len(masks), 4.2)
    for axis, (branch, mask) in zip(np.ravel(figure.subplots(1, len(masks))), masks.items(), strict=True):
        colours = ListedColormap(["#EEEEEE", COLOURS[branch]])
        axis.imshow(mask, cmap=colours, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        keys = "compressed block" if branch == "compressed" else "key token"
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set(xlabel=keys, ylabel="query token", title=f"{branch}: {mask.sum(1).max()} keys at most")
    return figure


def _list_states(lists: np.ndarray, config: NSAConfig, segment_start: np.ndarray) -> np.ndarray:
    """Index into `_LIST_STATES` of every block for every query: lists [T, K, n] -> int [K, T, J]."""
    length = len(lists)
    num_blocks = blocks.num_selection_blocks(length, config.select_block)
    first, last = blocks.candidate_range(np.arange(length)[:, None], segment_start[:, None], config.select_block)
    j = np.arange(num_blocks)
    readable = ((j >= first) & (j <= last))[:, None]
    listed = blocks.listed_blocks(lists, num_blocks)
    chosen = chosen_by_score(lists[None], config, segment_start[None])[0]
    scored = blocks.listed_blocks(np.where(chosen, lists, num_blocks), num_blocks)
    states = readable + listed.astype(int) + scored
    return np.moveaxis(states, 1, 0)


def draw_lists(capture: Capture, row: int = 0, layers: Sequence[int] | None = None) -> Figure:
    """Which selection blocks each query lists, as a map of queries and blocks per layer and head group.

    Args:
      capture: of a model.
      row: of the batch.
      layers: to draw, by their indices in the model; None means all NSA layers.
    """
    layers = capture.layers if layers is None else layers
    num_kv = capture.lists.shape[3]
    figure = _figure(3.1 * num_kv + 0.6, 2.5 * len(layers) + 0.6)
    axes = figure.subplots(len(layers), num_kv, squeeze=False, sharex=True, sharey=True)
    colours = ListedColormap(list(_LIST_STATES.values()))
    norm = BoundaryNorm(np.arange(len(_LIST_STATES) + 1) - 0.5, len(_LIST_STATES))
    for line, layer in zip(axes, layers, strict=True):
        states = _list_states(
            capture.lists[capture.layers.index(layer), row], capture.config, capture.segment_start[row]
        )
        for group, axis in enumerate(line):
            axis.imshow(states[group], cmap=colours, norm=norm, aspect="auto", interpolation="nearest")
            axis.set_title(f"layer {layer}, head group {group}", fontsize=9)
    for axis in axes[-1]:
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_xlabel(f"block of {capture.config.select_block} tokens")
    for axis in axes[:, 0]:
        axis.set_ylabel("query token")
    patches = [Patch(facecolor=colour, edgecolor="#888888", label=name) for name, colour in _LIST_STATES.items()]
    figure.legend(handles=patches, loc="outside upper center", ncols=4, fontsize=8, frameon=False)
    return figure


def draw_overlap(capture: Capture, max_lag: int | None = None) -> Figure:
    """Overlap of lists: with those of earlier queries, by distance, and between layers and head groups.

    Only queries that have a choice count. The other queries list everything, so their overlap says nothing.

    Args:
      capture: of a model.
      max_lag: largest distance between queries, tokens; None means two blocks.

    Raises:
      ValueError: no query has more candidate blocks than it lists.
    """
    config = capture.config
    max_lag = min(max_lag or 2 * config.select_block, capture.lists.shape[2] - 1)
    choosing = choosing_queries(config, capture.segment_start)
    if not choosing[:, max_lag:].any():
        raise ValueError(f"rows of {capture.lists.shape[2]} tokens: every query lists all its blocks; use longer rows")
    figure = _figure(10, 4.2)
    left, right = figure.subplots(1, 2)
    lags = np.unique(np.linspace(1, max_lag, 24).astype(int))
    colours = colormaps[_MAP](np.linspace(0, 0.9, capture.num_layers))
    for layer, lists, colour in zip(capture.layers, capture.lists, colours, strict=True):
        share = [
            neighbour_overlap(lists, capture.num_blocks, int(lag))[:, max_lag - lag :][choosing[:, max_lag:]].mean()
            for lag in lags
        ]
        left.plot(lags, share, color=colour, label=f"layer {layer}")
    left.set(xlabel="tokens between the two queries", ylabel="share of the list in common", ylim=(0, 1.02))
    left.grid(alpha=0.3)
    left.legend(fontsize=8)
    shared, chance = layer_overlap(capture.lists, config, capture.segment_start)
    names = [f"{layer}.{group}" for layer in capture.layers for group in range(capture.lists.shape[3])]
    image = _matrix(right, shared, names)
    figure.colorbar(image, ax=right, label=f"share in common, of blocks chosen by score\n(at random: {chance:.2f})")
    right.set(xlabel="layer.group that also chose them", ylabel="layer.group")
    return figure


def _matrix(axis: Any, values: np.ndarray, names: Sequence[str], columns: Sequence[str] | None = None) -> Any:
    """Draws a heat map of shares with its numbers and returns the image."""
    columns = names if columns is None else columns
    image = axis.imshow(values, cmap=_MAP, vmin=0, vmax=1, aspect="auto")
    for (y, x), value in np.ndenumerate(values):
        if np.isfinite(value) and values.size <= 256:
            axis.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=7, color=_ink(image, value))
    axis.set_xticks(range(len(columns)), columns, fontsize=8)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    return image


def _ink(image: Any, value: float) -> str:
    """Black or white, whichever is readable on the map's colour for a value."""
    red, green, blue, _ = image.cmap(image.norm(value))
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def draw_gates(capture: Capture) -> Figure:
    """Mean gate of every layer and head, with one panel per branch."""
    means = capture.gates.mean((1, 2))  # [L, N, 3]
    figure = _figure(4 * len(BRANCHES), 0.45 * capture.num_layers + 1.7)
    layers = [f"layer {layer}" for layer in capture.layers]
    for index, (axis, branch) in enumerate(zip(figure.subplots(1, 3), BRANCHES, strict=True)):
        names = layers if index == 0 else [""] * len(layers)
        image = _matrix(axis, means[..., index], names, [str(head) for head in range(means.shape[1])])
        axis.set(xlabel="query head", title=branch)
    figure.colorbar(image, ax=figure.axes, label="mean gate")
    return figure


def draw_gates_by_kind(means: Mapping[str, np.ndarray], layers: Sequence[int] | None = None) -> Figure:
    """Mean gates by kind of token.

    Args:
      means: {kind: float [L, N, 3]}, as `mean_by_kind` returns for a capture's gates.
      layers: indices of the L layers in the model, `capture.layers`; None means 0 to L - 1.
    """
    kinds = list(means)
    num_layers = len(next(iter(means.values())))
    figure = _figure(3.4 * num_layers, 3.2)
    numbers = range(num_layers) if layers is None else layers
    for layer, axis in enumerate(np.ravel(figure.subplots(1, num_layers, sharey=True))):
        for index, branch in enumerate(BRANCHES):
            height = [means[kind][layer, :, index].mean() for kind in kinds]
            at = np.arange(len(kinds)) + (index - 1) * 0.27
            axis.bar(at, height, 0.27, color=COLOURS[branch], label=branch)
        axis.set_xticks(range(len(kinds)), kinds, rotation=35, fontsize=8)
        axis.set(title=f"layer {numbers[layer]}", ylim=(0, 1))
        axis.grid(axis="y", alpha=0.3)
    axes = figure.axes
    axes[0].set_ylabel("mean gate")
    axes[-1].legend(fontsize=8)
    return figure


def draw_statistics(capture: Capture) -> Figure:
    """Distance and entropy of each branch's attention, and its share of the output, per layer."""
    # In float64: NumPy adds along the first axes one by one, and sums of float32 go wrong beyond a few million values.
    mean = functools.partial(np.mean, axis=(1, 2, 3), dtype=np.float64)
    size = mean(capture.sizes)
    panels = {
        "share of what is added up": size / size.sum(-1, keepdims=True),
        "entropy, nats": mean(capture.entropy),
        "mean distance, tokens": mean(capture.distance),
        "read from beyond the window": mean(capture.beyond_window),
    }
    figure = _figure(12, 3)
    layers = np.arange(capture.num_layers)
    for axis, (title, values) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for index, branch in enumerate(BRANCHES):
            axis.bar(layers + (index - 1) * 0.27, values[:, index], 0.27, color=COLOURS[branch], label=branch)
        axis.set_title(title, fontsize=10)
        axis.set_xticks(layers, capture.layers)
        axis.set_xlabel("layer")
        axis.grid(axis="y", alpha=0.3)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    return figure


def draw_reading(reading: Reading, row: int = 0, query: int = 0) -> Figure:
    """What one query reads: its weight on every source token, stacked by branch, with one panel per layer.

    Args:
      reading: as `read_weights` returns it.
      row: of the batch.
      query: which of the row's P positions.
    """
    weights = reading.branches()[:, row, query].mean(1)  # [L, S, 3], mean over heads
    position = int(reading.positions[row, query])
    edges = np.arange(position + 2) - 0.5  # of tokens
    figure = _figure(9, 1.5 * len(weights) + 0.8)
    for layer, axis in enumerate(np.ravel(figure.subplots(len(weights), 1, sharex=True))):
        below = np.zeros(position + 1)
        for index, branch in enumerate(BRANCHES):
            above = below + weights[layer, : position + 1, index]
            # One outline for all tokens: a bar for each would take minutes in long rows.
            steps = (np.append(edge, edge[-1]) for edge in (below, above))
            axis.fill_between(edges, *steps, step="post", linewidth=0, color=COLOURS[branch], label=branch)
            below = above
        axis.set_ylabel(f"layer {reading.layers[layer]}")
        axis.set_xlim(-0.5, position + 0.5)
        axis.set_ylim(0.0, 1.05 * max(float(below.max()), 1e-12))
        borders = edges[: -1 : reading.config.select_block]
        axis.vlines(borders, 0, 1, transform=axis.get_xaxis_transform(), color="#BBBBBB", linewidth=0.5, zorder=0)
    figure.axes[-1].set_xlabel(f"source token (the query is token {position}; lines are borders of selection blocks)")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    return figure


def reading_html(strings: Sequence[str], weights: np.ndarray, position: int, next_token: str = "") -> str:
    """Source text as HTML, in which each token's colour shows how much is read from it.

    Args:
      strings: the row's tokens as text (`token_strings`), at least `position + 1`.
      weights: float [S], such as `reading.tokens()[layer, row, query].mean(0)`.
      position: of the query. Its token is framed, and later tokens are left out.
      next_token: the predicted token, shown at the end.

    Returns:
      One `<pre>`. The largest weight has the full colour, and each token shows its weight as a tooltip.
    """
    weights = np.asarray(weights, np.float64)[: position + 1]
    peak = max(float(weights.max()), 1e-12)
    pieces = []
    for index, weight in enumerate(weights):
        text = strings[index].replace("\n", "⏎\n") or "∎"
        frame = "outline:2px solid #0072B2;" if index == position else ""
        # The square root keeps small weights visible.
        alpha = (weight / peak) ** 0.5
        pieces.append(
            f'<span title="{index}: {weight:.4f}" style="background:rgba(213,94,0,{alpha:.2f});{frame}">'
            f"{html.escape(text)}</span>"
        )
    if next_token:
        pieces.append(f'<b style="color:#0072B2"> → {html.escape(repr(next_token))}</b>')
    style = "white-space:pre-wrap;line-height:1.45;background:#FFFFFF;color:#000000;padding:8px"
    return f'<pre style="{style}">{"".join(pieces)}</pre>'
