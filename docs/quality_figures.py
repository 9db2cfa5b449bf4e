"""Rows of tables about what models learned: losses, tasks, selection, extensions.

Functions return the cells of rows by their first cell.
"""

from __future__ import annotations

from measured import results

VARIANTS = {
    "dense": "dense",
    "window": "window of 512",
    "nsa": "NSA",
    "window_nsa": "window and NSA by turns",
    "shared_mean": "shared NSA",
}


def nats(value: float | None) -> str:
    """A loss or a difference of losses, or a share: three decimals, and no zero below zero."""
    return "" if value is None else f"{round(value, 3) + 0.0:.3f}"


def quality_rows() -> dict[str, list[str]]:
    """Models trained at 32,768 tokens: losses by tokens seen and by position, and recall."""
    rows = {row["variant"]: row for row in results("quality_h200")["rows"] if row["length"] == 32768}
    runs = {name: rows[variant] for variant, name in VARIANTS.items()}
    for variant in ("nsa", "shared_mean"):
        runs[f"{VARIANTS[variant]}, earlier run"] = rows[variant] | rows[variant]["earlier_run"]
    found = {}
    for name, row in runs.items():
        curve = {point["step"]: point for point in row["validation"]}
        speed = f"{row['tokens_per_second'] / row['device']['count']:,.0f}"
        for field, title, end in (
            ("bits_per_byte", "bits per byte", speed),
            ("task_nats", "nats per token of tasks", ""),
        ):
            losses = [curve[step][field] if step in curve else None for step in range(190, 1901, 190)]
            found[f"{name}, {title}"] = [*map(nats, losses), end]
    by_position = {
        variant: [part["nats"] for part in row["by_position"] if part["from"] >= 128] for variant, row in rows.items()
    }
    for variant, name in VARIANTS.items():
        found[f"held-out text, {name}"] = [nats(loss) for loss in by_position[variant]]
    for one, others in (("nsa", ("dense", "window")), ("shared_mean", ("dense", "window", "nsa"))):
        for other in others:
            pairs = zip(by_position[one], by_position[other], strict=True)
            found[f"{VARIANTS[one]} minus {VARIANTS[other]}"] = [nats(first - second) for first, second in pairs]
    for variant, name in VARIANTS.items():
        parts = [part for part in rows[variant]["long"]["distances"] if part["task"] == "recall"]
        shares = []
        for first, end in ((32, 512), (512, 4096), (4096, 8192), (8192, 16_384), (16_384, 32_768)):
            asked = [part for part in parts if first <= part["from"] < end]
            right = sum(part["exact_match"] * part["questions"] for part in asked)
            shares.append(right / sum(part["questions"] for part in asked))
        found[f"recall, {name}"] = [f"{share:.0%}".replace("%", " %") for share in shares]
    return found | context_rows(rows) | selection_rows(rows)


def percent(first: float, second: float) -> str:
    """Two shares."""
    return f"{100 * first:.0f} / {100 * second:.0f} %"


def quality_8k_rows() -> dict[str, list[str]]:
    """Dense attention and shared NSA at 8,192 tokens; tasks in percent, dense first."""
    rows = {row["variant"]: row for row in results("quality_h200")["rows"] if row["length"] == 8192}
    dense, shared = rows["dense"], rows["shared_mean"]
    found = {}
    for name, row in (("dense", dense), ("shared NSA", shared)):
        curve = {point["step"]: point for point in row["validation"]}
        points = [curve[step] for step in range(381, 3811, 381)]
        speed = f"{row['tokens_per_second']:,.0f}"
        found[f"8k, {name}, bits per byte"] = [*(nats(point["bits_per_byte"]) for point in points), speed]
        found[f"8k, {name}, nats per token of tasks"] = [*(nats(point["task_nats"]) for point in points), ""]
    losses = [[part["nats"] for part in row["by_position"] if part["from"] >= 64] for row in (dense, shared)]
    found["8k, held-out text, dense"], found["8k, held-out text, shared NSA"] = ([*map(nats, x)] for x in losses)
    found["8k, shared NSA minus dense"] = [nats(b - a) for a, b in zip(*losses, strict=True)]
    for cut in (512, 2048):
        for name, row in (("dense", dense), ("shared NSA", shared)):
            parts = [part for part in row["context"]["bins"] if part["from"] >= 64]
            found[f"8k, beyond {cut:,}, {name}"] = [nats(part[f"beyond_{cut}"]) for part in parts]
    for task in ("needle", "multikey", "recall", "copy", "keypad", "variables1", "variables2", "variables4"):
        parts = [[part for part in row["long"]["cells"] if part["task"] == task] for row in (dense, shared)]
        found[f"8k, {task}"] = [percent(a["exact_match"], b["exact_match"]) for a, b in zip(*parts, strict=True)]
        if task in ("needle", "recall"):
            shares = [percent(part["selection_mean"], part["selection_chance"]) for part in parts[1]]
            found[f"8k, {task}, in shared NSA's lists / in random lists"] = shares
    layers = shared["selection"]["own"]
    for field, title in (("listed", "lists"), ("random", "random lists"), ("oracle", "the best lists")):
        found[f"8k, held by {title}, shared NSA"] = [nats(row[field]) for row in layers]
    parts = [part for part in shared["selection"]["substitutes"] if part["from"] >= 512]
    for field, title in (("none", "its own lists"), ("oracle", "the best lists"), ("all", "all blocks")):
        found[f"8k, shared NSA with {title}"] = [nats(part[field]) for part in parts]
    return found


def quality_mixed_rows() -> dict[str, list[str]]:
    """Variants at 8,192 tokens that were stopped early, beside the others after as many."""
    rows = {row["variant"]: row for row in results("quality_h200")["rows"] if row["length"] == 8192}
    names = {
        "dense": "dense",
        "shared_mean": "shared NSA",
        "shared_mean_fine": "shared NSA, blocks of 8",
        "shared_mean_dense": "shared NSA and dense",
        "window3_dense": "window and dense",
    }
    found, steps = {}, range(381, 1906, 381)
    for variant, name in names.items():
        curve = {point["step"]: point for point in rows[variant]["validation"]}
        for field, title in (("bits_per_byte", "bits per byte"), ("task_nats", "nats per token of tasks")):
            points = [curve[step][field] if step in curve else None for step in steps]
            found[f"8k to 250M, {name}, {title}"] = [nats(point) for point in points]
    halfway = {
        variant: row["halfway"]["validation_by_position"] if "halfway" in row else row["validation_by_position"]
        for variant, row in rows.items()
        if variant != "window3_dense"
    }
    losses = {variant: [part["nats"] for part in parts if part["from"] >= 64] for variant, parts in halfway.items()}
    for variant, values in losses.items():
        others = [b - a for a, b in zip(losses["dense"], values, strict=True)]
        title = "8k at 250M, dense" if variant == "dense" else f"8k at 250M, {names[variant]} minus dense"
        found[title] = [nats(value) for value in (values if variant == "dense" else others)]
    cells = {
        variant: {(part["task"], part["length"]): part for part in rows[variant]["long"]["cells"]}
        for variant in ("shared_mean_dense", "shared_mean_fine")
    }
    lengths = (1024, 2048, 4096, 8192)
    for task in ("needle", "multikey", "recall", "copy", "keypad", "variables1", "variables2", "variables4"):
        pairs = [[cells[variant][task, length]["exact_match"] for variant in cells] for length in lengths]
        found[f"8k at 250M, {task}"] = [percent(*pair) for pair in pairs]
    return found


def readme_quality_rows() -> dict[str, list[str]]:
    """The README: dense attention, NSA as the configs have it, and every fourth layer dense."""
    rows = {(row["variant"], row["length"]): row for row in results("quality_h200")["rows"]}
    variants = ("dense", "shared_mean", "shared_mean_dense")

    def bits(name: str, length: int, step: int) -> str:
        curve = {point["step"]: point for point in rows.get((name, length), {}).get("validation", ())}
        return nats(curve[step]["bits_per_byte"]) if step in curve else ""

    def needles(name: str) -> str:
        cells = {part["length"]: part for part in rows[name, 8192]["long"]["cells"] if part["task"] == "needle"}
        return percent(cells[4096]["exact_match"], cells[8192]["exact_match"])

    return {
        "rows of 32,768 tokens, 250M tokens, bits per byte": [bits(name, 32768, 1908) for name in variants],
        "rows of 32,768 tokens, 224M tokens, bits per byte": [bits(name, 32768, 1710) for name in variants],
        "rows of 8,192 tokens, 250M tokens, bits per byte": [bits(name, 8192, 1905) for name in variants],
        "rows of 8,192 tokens, 500M tokens, bits per byte": [bits(name, 8192, 3810) for name in variants],
        "needles found in rows of 4,096 / 8,192 tokens": [needles(name) for name in variants],
    }


def context_rows(rows: dict[str, dict]) -> dict[str, list[str]]:
    """What text further away than a cut is worth to each variant, by position."""
    found = {}
    for cut in (512, 2048, 8192):
        for variant, name in VARIANTS.items():
            parts = [part for part in rows[variant]["context"]["bins"] if part["from"] >= 2048]
            found[f"beyond {cut:,}, {name}"] = [nats(part[f"beyond_{cut}"]) for part in parts]
    return found


def selection_rows(rows: dict[str, dict]) -> dict[str, list[str]]:
    """What lists hold of dense attention by layer, and losses with other lists by position."""
    found = {}
    for variant in ("nsa", "window_nsa", "shared_mean"):
        measured, name = rows[variant]["selection"], VARIANTS[variant]
        layers = {row["layer"]: row for row in measured["own"]}
        for field, title in (
            ("listed", "held by lists"),
            ("random", "held by random lists"),
            ("oracle", "held by the best lists"),
            ("overlap", "in common with the best lists"),
        ):
            found[f"{title}, {name}"] = [nats(layers.get(layer, {}).get(field)) for layer in range(12)]
        parts = [part for part in measured["substitutes"] if part["from"] >= 512]
        for field, title in (("none", "its own lists"), ("oracle", "the best lists"), ("all", "all blocks")):
            found[f"{name} with {title}"] = [nats(part[field]) for part in parts]
    return found


def sharing_rows() -> dict[str, list[str]]:
    """Quickstarts with keys of each branch's own or shared, and with either compressor."""
    found: dict[str, list[str]] = {}
    for shared, compressor in ((False, "mlp"), (False, "mean"), (True, "mlp"), (True, "mean")):
        rows = [
            row
            for row in results("sharing_cpu")["rows"]
            if (row["shared_kv"], row["compressor"]) == (shared, compressor)
        ]
        cells = {
            "quickstart, share of the way after 20 steps": [f"{row['selection_gain'][0]['gain']:.2f}" for row in rows],
            "quickstart, share of the way at the end": [f"{row['selection_gain'][-1]['gain']:.2f}" for row in rows],
            "quickstart, right answers about far tokens": [f"{row['accuracy'] * 100:.1f} %" for row in rows],
            "quickstart, bits per byte": [f"{row['bits_per_byte']:.2f}" for row in rows],
        }
        for name, values in cells.items():
            found.setdefault(name, []).append(", ".join(values))
    return found


def extend_rows() -> dict[str, list[str]]:
    """A dense model that was extended in several ways: losses over training and by position."""
    runs = results("extend_far_h100")["runs"]
    names = ("dense", "shared_mean", "far3_nsa2", "far2_nsa3", "far2_nsa1")
    losses = {name: {point["step"]: f"{point['loss']:.4f}" for point in runs[name]["validation"]} for name in names}
    speed = {name: runs[name]["tokens_per_second"] for name in names}
    found = {
        f"extended, {when}": [losses[name].get(step, "") for name in names]
        for when, step in (
            ("before", 0),
            ("after 12.5 million tokens", 95),
            ("after 25 million tokens", 190),
            ("after 37.5 million tokens", 285),
            ("after 50 million tokens", 380),
        )
    }
    found["extended, tokens/s"] = [f"{round(speed[name], -2):,.0f}" for name in names]
    found["extended, speed over dense"] = ["", *(f"{speed[name] / speed['dense']:.2f}x" for name in names[1:])]
    for parts in zip(*(runs[name]["by_position"] for name in names), strict=True):
        dense, *others = (part["loss"] for part in parts)
        span = f"extended, {parts[0]['from']:,} to {parts[0]['to']:,}"
        found[span] = [f"{dense:.4f}", *(f"{round(loss - dense, 3) + 0.0:+.3f}" for loss in others)]
    return found


def extend_short_rows() -> dict[str, list[str]]:
    """Extensions with short documents among the long ones: two base models, each with dense attention and with NSA."""
    runs = results("extend_short_h100")["runs"]
    pairs = [[runs[f"{name}_short{seed}"] for name in ("dense", "far2_nsa3")] for seed in ("", "_seed1")]
    both = [run for pair in pairs for run in pair]
    speeds = [run["tokens_per_second"] for run in both]
    ratios = (f"{nsa['tokens_per_second'] / dense['tokens_per_second']:.2f}x" for dense, nsa in pairs)
    found = {
        "with short documents, before": [f"{run['validation'][0]['loss']:.4f}" for run in both],
        "with short documents, after 50 million tokens": [f"{run['validation'][-1]['loss']:.4f}" for run in both],
        "with short documents, seconds of training": [f"{380 * run['step_seconds']:.0f}" for run in both],
        "with short documents, tokens/s": [f"{round(value, -2):,.0f}" for value in speeds],
        "with short documents, speed over dense": [cell for ratio in ratios for cell in ("", ratio)],
    }
    for parts in zip(*(run["by_position"] for run in both), strict=True):
        span = f"with short documents, {parts[0]['from']:,} to {parts[0]['to']:,}"
        found[span] = []
        for dense, nsa in (parts[:2], parts[2:]):
            behind = round(nsa["loss"] - dense["loss"], 3) + 0.0
            found[span] += [f"{dense['loss']:.4f}", f"{behind:+.3f}"]
    return found


def all_rows() -> dict[str, list[str]]:
    """All of them."""
    return (
        quality_rows()
        | quality_8k_rows()
        | quality_mixed_rows()
        | readme_quality_rows()
        | sharing_rows()
        | extend_rows()
        | extend_short_rows()
    )
