"""Inspection of NSA: block lists, gates and attention of any model, as arrays and as figures.

    import nsa_jax
    from nsa_jax import inspect

    model, tokenizer, config = nsa_jax.load("runs/quickstart")
    text = "def add(a, b):\n    return a + b\n"
    tokens = tokenizer.encode(text)[None]
    found = inspect.capture(model, tokens)
    print(found.lists.shape, found.gates.mean((1, 2, 3)))  # [L, B, T, K, n]; mean gate of each layer and branch
    inspect.draw_lists(found).savefig("lists.png")
    inspect.explore(model, tokenizer, text).save("explore.html")  # a page to click tokens in; a notebook shows it

`capture` and `read_weights` take a whole `nsa_jax.nn.Transformer`. `capture_layer` takes one `NSAttention` of your own
model. `capture_arrays` and `read_weights_arrays` take the arguments of `nsa_jax.nsa_attention`. The functions of
`statistics` take plain arrays. Neither the model nor its code is changed: the forward pass is run layer by layer with
the ops that the model uses.
"""

from nsa_jax.extras import extra

with extra("train"):
    from nsa_jax.inspect.capture import (
        Capture,
        Reading,
        capture,
        capture_arrays,
        capture_layer,
        read_weights,
        read_weights_arrays,
        token_kinds,
        token_strings,
    )
    from nsa_jax.inspect.exploration import Exploration, explore
    from nsa_jax.inspect.far_questions import (
        FarTask,
        Verdict,
        far_task,
        judge_selection,
        score_far_task,
        show_far_question,
    )
    from nsa_jax.inspect.figures import (
        COLOURS,
        draw_gates,
        draw_gates_by_kind,
        draw_lists,
        draw_masks,
        draw_overlap,
        draw_reading,
        draw_statistics,
        reading_html,
    )
    from nsa_jax.inspect.probe import Probe, without_branch
    from nsa_jax.inspect.selection import (
        SUBSTITUTES,
        block_mass,
        dense_mass,
        held_mass,
        oracle_lists,
        random_mass,
        selection_quality,
        substituted_losses,
    )
    from nsa_jax.inspect.statistics import (
        attention_statistics,
        block_distances,
        block_kinds,
        block_weights,
        branch_probabilities,
        choosing_queries,
        chosen_by_score,
        layer_overlap,
        mean_by_kind,
        neighbour_overlap,
        spread_over_tokens,
    )
    from nsa_jax.nn.observe import BRANCHES, NSAArrays, run_attention, run_branches, walk_layers

__all__ = [
    "BRANCHES",
    "COLOURS",
    "Capture",
    "Exploration",
    "FarTask",
    "NSAArrays",
    "Probe",
    "Reading",
    "SUBSTITUTES",
    "Verdict",
    "attention_statistics",
    "block_distances",
    "block_kinds",
    "block_mass",
    "block_weights",
    "branch_probabilities",
    "capture",
    "capture_arrays",
    "capture_layer",
    "choosing_queries",
    "chosen_by_score",
    "dense_mass",
    "draw_gates",
    "draw_gates_by_kind",
    "draw_lists",
    "draw_masks",
    "draw_overlap",
    "draw_reading",
    "draw_statistics",
    "explore",
    "far_task",
    "held_mass",
    "judge_selection",
    "layer_overlap",
    "mean_by_kind",
    "neighbour_overlap",
    "oracle_lists",
    "random_mass",
    "read_weights",
    "read_weights_arrays",
    "reading_html",
    "run_attention",
    "run_branches",
    "score_far_task",
    "selection_quality",
    "show_far_question",
    "spread_over_tokens",
    "substituted_losses",
    "token_kinds",
    "token_strings",
    "walk_layers",
    "without_branch",
]
