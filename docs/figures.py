"""Writes the measured figures of README.md and of pages in docs/ from benchmarks/results: python docs/figures.py

Rows of tables are found by their first cell, sentences by the comments around them. Three significant digits, all of
those before the point.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import quality_figures
from measured import RESULTS, ROOT, digits, results

PAGES = (
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("performance", "parallel", "quality", "extend")),
)

LENGTHS = (2048, 8192, 32768, 65536, 131072)
HEADLINE_LENGTHS = (2048, 4096, 8192, 65536)
SHAPE = (64, 4, 128, 128)  # N, K, H, V of the attention tables
OTHER_SHAPES = {
    "64 heads in 4 groups": SHAPE,
    "32 heads in 8 groups": (32, 8, 128, 128),
    "28 heads in 4 groups": (28, 4, 128, 128),
    "16 heads in 8 groups": (16, 8, 128, 128),
    "12 heads in 2 groups, head dim 64": (12, 2, 64, 64),
}
DENSE_DECODE = {"cuDNN": "dense_cudnn_us", "XLA": "dense_xla_us", "this library's split kernel": "dense_split_us"}
BRANCHES = {
    "compressed attention": ("compressed", ""),
    "block selection (scores and top-n)": ("select", ""),
    "selected attention, independent random lists": ("selected", "random"),
    "selected attention, lists shared by 64 neighbours": ("selected", "shared"),
    "window of 512": ("window", ""),
    "dense causal attention, cuDNN": ("dense", ""),
}

VERSIONS = {"commit": "commit", "JAX": "jax", "PyTorch": "torch", "Triton": "triton"}
_SHORT = {"select": "block selection", "window": "the window", "compressed": "compressed attention"}


def shape(row: dict) -> tuple[int, ...]:
    """N, K, H and V of a row."""
    return tuple(row[name] for name in "NKHV")


def usual_case(row: dict) -> bool:
    """Whether one row of one document was timed, with the kernels that the GPU gets."""
    return row["B"] == row["documents"] == 1 and row["kernels"] != "a100"


def with_kernels_of_a100() -> dict[tuple, float]:
    """Milliseconds of NSA at 32,768 tokens with an A100's kernels, by pass and shape."""
    rows = [row for row in results("attention_h200")["rows"] if row["kernels"] == "a100" and row["op"] == "nsa"]
    return {(row["pass"], *shape(row)): row["ms"] for row in rows if row["T"] == 32768 and row["lists"] == "selection"}


def attention_rows() -> dict[str, list[str]]:
    """Cells of the tables' rows by their first cell."""
    measured = [row for row in results("attention_h200")["rows"] if usual_case(row)]
    by_case = {(row["op"], row["pass"], row["T"], row["lists"], shape(row)): row for row in measured}

    def cell(op: str, kind: str, length: int, lists: str = "", of: tuple = SHAPE, field: str = "ms") -> float | None:
        return by_case.get((op, kind, length, "selection" if op == "nsa" else lists, of), {}).get(field)

    rows: dict[str, list[str]] = {}
    a100 = with_kernels_of_a100()
    for op, name in (("dense", "dense"), ("nsa", "NSA")):
        for kind, passes in (("fwd", "forward"), ("fwd_bwd", "forward + backward")):
            rows[f"{name} {passes}"] = [digits(cell(op, kind, length)) for length in LENGTHS]
        rows[f"{name}, GiB"] = [digits(cell(op, "fwd_bwd", length, field="temp_gib")) for length in LENGTHS]
    for name, (op, lists) in BRANCHES.items():
        rows[name] = [digits(cell(op, kind, 65536, lists)) for kind in ("fwd", "bwd")]
    for name, of in OTHER_SHAPES.items():
        pairs = [[cell(op, kind, 32768, of=of) for op in ("dense", "nsa")] for kind in ("fwd", "fwd_bwd")]
        rows[name] = [" / ".join(digits(ms) for ms in pair) for pair in pairs]
        rows[name] += [" / ".join(f"{dense / nsa:.1f}x" for dense, nsa in pairs if dense and nsa)]
        rows[name] += [" / ".join(digits(a100[kind, *of]) for kind in ("fwd", "fwd_bwd") if (kind, *of) in a100)]
    return rows


def headline_rows() -> dict[str, list[str]]:
    """As `attention_rows`, of README.md's table: the newest kernels at the lengths that they were timed at."""
    rows = [row for row in results("attention_shapes_h200")["rows"] if usual_case(row) and shape(row) == SHAPE]
    of = {(row["op"], row["pass"], row["T"]): row["ms"] for row in rows if row["lists"] in ("", "selection")}
    dense, nsa = (
        [[of[op, kind, t] for kind in ("fwd", "fwd_bwd")] for t in HEADLINE_LENGTHS] for op in ("dense", "nsa")
    )
    faster = [[x / y for x, y in zip(*both, strict=True)] for both in zip(dense, nsa, strict=True)]
    return {
        "dense causal, cuDNN": [" / ".join(map(digits, pair)) for pair in dense],
        "NSA, this library": [" / ".join(map(digits, pair)) for pair in nsa],
        "speed-up": [" / ".join(f"{x:.1f}x" for x in pair) for pair in faster],
    }


def attention_origin() -> str:
    """Which figures of the attention tables are not of the same commit as the rest."""
    measured = results("attention_h200")
    usual, others = measured["environment"]["commit"], {}
    for row in measured["rows"]:
        commit = row.get("commit", usual)
        if commit == usual or shape(row) != SHAPE or not usual_case(row):
            continue
        if row["op"] in ("dense", "nsa"):
            others.setdefault((commit, row.get("note")), {})[f"at {row['T'] // 1024}k"] = None
        elif row["T"] == 65536:
            others.setdefault((commit, row.get("note")), {})[f"of {_SHORT.get(row['op'], row['op'])}"] = None
    said = [f"All figures are of commit {usual}" if not others else f"Figures are of commit {usual}"]
    for (commit, note), which in others.items():
        said.append(f"those {' and '.join(which)} of {commit}" + (f" ({note})" if note else ""))
    return ", ".join(said) + "."


def decoding_rows() -> dict[str, list[str]]:
    """As `attention_rows`, of one decode step: microseconds with 1 and with 16 rows."""
    steps = {(row["context"], row["B"]): row for row in results("decode_h200")["rows"]}

    def cells(show: Callable[[dict], str]) -> list[str]:
        contexts = sorted({context for context, _ in steps})
        return [" / ".join(show(steps[context, batch]) for batch in (1, 16)) for context in contexts]

    def dense(row: dict) -> float:
        return min(row[field] for field in DENSE_DECODE.values())

    rows = {
        "NSA decoding: 1 / 16 rows, µs": cells(lambda row: digits(row["nsa_us"])),
        "dense decoding, the fastest of three: 1 / 16 rows, µs": cells(lambda row: digits(dense(row))),
        "speed-up in decoding": cells(lambda row: f"{dense(row) / row['nsa_us']:.1f}x"),
    }
    for name, field in DENSE_DECODE.items():
        rows[f"dense decoding, {name}"] = cells(lambda row, field=field: digits(row[field]))
    return rows


def thousands(value: float) -> str:
    """Tokens per second."""
    return f"{round(value, -3):,.0f}"


def training_rows() -> dict[str, list[str]]:
    """As `attention_rows`, of whole training steps; of cases that were timed twice, the newest."""
    measured = results("train_speed_h200")["rows"]

    def found(attention: str, length: int, remat: str, layers: str = "scanned", **which) -> dict:
        case = dict(attention=attention, length=length, tokens=131072, remat=remat, layers=layers)
        case |= dict(devices=1, layout="data") | which
        return [row for row in measured if case.items() <= row.items() and "error" not in row][-1]

    cases = [[found(kind, length, "dots_saved", "unrolled") for length in LENGTHS[:4]] for kind in ("nsa", "dense")]
    speeds = [[row["tokens_per_second"] for row in rows] for rows in cases]
    sizes = [[f"{row['parameters'] / 1e6:.0f}M" for row in rows] for rows in cases]
    unrolled = [found("nsa", 2048, policy, "unrolled") for policy in ("none", "dots_saved")]
    remat = [*unrolled, *(found("nsa", 2048, policy) for policy in ("attention_saved", "block"))]
    eight = [found("nsa", 2048, "dots_saved", "unrolled", devices=8, layout=layout) for layout in ("data", "fsdp")]
    context = results("context_h200")
    split = [row for row in (*context["same"], *context["long"]) if row["attention"] == "nsa"]
    vocabulary = results("vocabulary_h100")["rows"]
    billion = results("train_1b_h200")["rows"]
    two = results("train_1b_two_h200")["rows"]
    shared = {
        (row["remat"], row["tokens"], row["length"], row["attention"]): row  # the newest of each
        for row in results("train_1b_shared_h200")["rows"]
    }

    def of_shared(remat: str, tokens: int, lengths: tuple[int, ...]) -> list[str]:
        pairs = [[shared[remat, tokens, length, kind] for kind in ("nsa", "dense")] for length in lengths]
        speeds = [[row["tokens_per_second"] for row in pair] for pair in pairs]
        return [f"{nsa:,} / {dense:,}, {nsa / dense:.2f}x" for nsa, dense in speeds]

    cells = lambda show: [" / ".join(show(row) for row in billion[i : i + 2]) for i in (0, 2)]  # noqa: E731
    mebibytes = lambda part, kind: [f"{row[part][kind] / 2**20:,.0f}" for row in vocabulary]  # noqa: E731
    percent = lambda share: f"{share:.1%}".replace("%", " %")  # noqa: E731
    return {
        "model with NSA, tokens/s": [thousands(speed) for speed in speeds[0]],
        "model with dense attention, tokens/s": [thousands(speed) for speed in speeds[1]],
        "NSA over dense": [f"{nsa / dense:.2f}x" for nsa, dense in zip(*speeds, strict=True)],
        "parameters, NSA / dense": [" / ".join(pair) for pair in zip(*sizes, strict=True)],
        "speed, tokens/s": [thousands(row["tokens_per_second"]) for row in remat],
        "memory, GiB": [digits(row["planned_gib"]) for row in remat],
        "compiling, s": [f"{row['compile_seconds']:.0f}" for row in remat],
        "eight GPUs, tokens/s": [thousands(row["tokens_per_second"]) for row in eight],
        "share of eight times one GPU": [percent(row["scaling"]) for row in eight],
        "row split over GPUs, tokens/s": [thousands(row["tokens_per_second"]) for row in split],
        "1.1B, NSA / dense, tokens/s": cells(lambda row: f"{row['tokens_per_second']:,}"),
        "1.1B, NSA / dense, MFU": cells(lambda row: percent(row["mfu"])),
        "1.1B, NSA / dense, planned GiB": cells(lambda row: digits(row["planned_gib"])),
        "`attention_saved`, 65,536 tokens in a step": of_shared("attention_saved", 65536, (8192, 32768)),
        "`dots_saved`, 32,768 tokens in a step": of_shared("dots_saved", 32768, (8192, 32768)),
        "`dots_saved`, 65,536 tokens in a step": [*of_shared("dots_saved", 65536, (8192,)), ""],
        "one and two GPUs, tokens/s": [f"{row['tokens_per_second']:,}" for row in two],
        "share of twice one GPU": [percent(row["scaling"]) if "scaling" in row else "" for row in two],
        "one and two GPUs, planned GiB": [digits(row["planned_gib"]) for row in two],
        "gathered in a step, MiB": mebibytes("bytes", "all-gather"),
        "gathered, needed by embedding and head, MiB": mebibytes("needed", "all-gather"),
        "reduced and scattered in a step, MiB": mebibytes("bytes", "reduce-scatter"),
        "reduced and scattered, needed by embedding and head, MiB": mebibytes("needed", "reduce-scatter"),
        "temporaries, GiB": [digits(row["temporaries"] / 2**30) for row in vocabulary],
        "row split over GPUs, peak GiB": [digits(row["peak_gib_so_far"]) for row in split],
    }


def triton_rows() -> dict[str, list[str]]:
    """As `attention_rows`, of Pallas's Triton and what replaces it: milliseconds."""
    rows: dict[str, list[str]] = {}
    of = {
        (row["kernels"], row["op"], row["pass"], row["T"], row["H"]): row["ms"]
        for row in results("mma_sync_h100")["rows"]
    }
    kinds = ("compressed", "fwd", "forward"), ("compressed", "bwd", "backward"), ("window", "bwd", "backward")
    for op, kind, name in kinds:
        for length, dim, where in ((8192, 128, "8,192"), (32_768, 128, "32,768"), (8192, 64, "4 x 8,192, head dim 64")):
            triton, mosaic = (of[kernels, op, kind, length, dim] for kernels in ("a100_triton", "a100"))
            rows[f"{op}, {name}, {where}"] = [digits(triton), digits(mosaic), f"{triton / mosaic:.2f}x"]
    plain = results("plain_triton_h200")["summary"]
    return rows | {
        "Pallas's Triton": [digits(row["pallas_ms"]) for row in plain],
        "the `triton` package": [digits(row["plain_ms"]) for row in plain],
        "this library's kernels for Hopper": [digits(row["hopper_ms"]) for row in plain],
    }


def whole_operator_rows(name: str, device: str = "") -> dict[str, list[str]]:
    """As `attention_rows`, of a result with dense attention, NSA and, if they were timed, an A100's kernels."""
    found: dict[tuple, dict[tuple, float]] = {}
    for row in results(name)["rows"]:
        case = row["B"], row["T"], row["documents"], row["lists"] == "alike", *shape(row)
        found.setdefault(case, {})[row["op"], row["kernels"], row["pass"]] = row["ms"]
    rows = {}
    for (batch, length, documents, alike, heads, kv_heads, dim, _), ms in found.items():
        name = f"{device}{batch} x {length:,}, {heads} / {kv_heads} heads of {dim}"
        name += ", 16 documents" * (documents > 1) + ", 64 neighbours alike" * alike
        timed = {
            which: [ms.get((*which, kind)) for kind in ("fwd", "fwd_bwd")]
            for which in (("dense", ""), ("nsa", "hopper"), ("nsa", "a100"))
        }
        dense, nsa, a100 = timed.values()
        faster = [f"{x / y:.2f}x" for x, y in zip(dense, nsa, strict=True) if x and y]
        rows[name] = [" / ".join(digits(x) for x in both if x) for both in (dense, nsa)]
        rows[name] += [" / ".join(faster), " / ".join(digits(x) for x in a100 if x)]
    return rows


def few_blocks_rows() -> dict[str, list[str]]:
    """As `attention_rows`, of a decode step of a whole model before and after few blocks had kernels of their own."""
    measured = results("generate_few_h200")["rows"]
    before = measured[0]["commit"]
    found = {}
    for title, attention, context, earlier in (
        ("a step at 2k, NSA with four kernels of attention", "nsa", 2048, True),
        ("a step at 2k, NSA after that", "nsa", 2048, False),
        ("a step at 2k, dense attention", "dense", 2048, True),
        ("a step at 4k, NSA after that", "nsa", 4096, False),
    ):
        rows = [row for row in measured if (row["attention"], row["context"]) == (attention, context)]
        found[title] = [f"{row['ms_per_step']:.3f}" for row in rows if (row["commit"] == before) == earlier]
    return found


def collective_rows() -> dict[str, list[str]]:
    """As `attention_rows`, of steps compiled for eight GPUs: what collectives result in and memory, on one device."""
    rows = [row for row in results("collectives_h200")["rows"] if row["devices"] == 8]
    found: dict[str, list[str]] = {}
    for name in ("a100_prod", "nsa_1b"):
        of = {row["layout"]: row for row in rows if row["config"] == name}
        layouts = [of[name] for name in ("data", "fsdp", "tensor=2", "context=2", "context=4", "context=8")]
        sent = [sum(part["bytes"] for part in row["collectives"]) / 2**30 for row in layouts]
        found[f"`{name}`, results of collectives, GiB"] = [digits(size) for size in sent]
        found[f"`{name}`, planned memory, GiB"] = [digits(row["planned_gib"]) for row in layouts]
    return found


def two_gpu_rows() -> dict[str, list[str]]:
    """As `attention_rows`, of steps of a100_prod on one and on two GPUs."""
    rows = results("train_a100_two_h100")["rows"]
    short, long = [row for row in rows if row["length"] == 2048], [row for row in rows if row["length"] != 2048]
    one = short[0]["tokens_per_second"]
    shares = [f"{row['tokens_per_second_per_device'] / one:.1%}".replace("%", " %") for row in short[1:]]
    return {
        "`a100_prod`, tokens/s": [f"{row['tokens_per_second']:,}" for row in short + long],
        "`a100_prod`, share of twice one GPU": ["", *shares, *("" for _ in long)],
        "`a100_prod`, planned GiB": [digits(row["planned_gib"]) for row in short + long],
    }


def generation_rows() -> dict[str, list[str]]:
    """As `attention_rows`, of a whole model's decode step: milliseconds with 1 to 64 rows, – where not measured."""
    rows = [row for row in results("generate_h200")["rows"] if row["tokens_per_dispatch"] == 8]
    steps = {(row["attention"], row["context"], row["B"]): row for row in rows}
    contexts = sorted({context for _, context, _ in steps})

    def cells(value: Callable[[int, int], float], form: str, batches: tuple[int, ...]) -> list[str]:
        def cell(context: int, batch: int) -> str:
            try:
                return format(value(context, batch), form)
            except KeyError:
                return "–"

        return [" / ".join(cell(context, batch) for batch in batches) for context in contexts]

    def nsa(context: int, batch: int) -> float:
        return steps["nsa", context, batch]["ms_per_step"]

    def dense(context: int, batch: int) -> float:
        return steps["dense", context, batch]["ms_per_step"]

    out = {}
    for batches in ((1, 2, 4, 8), (16, 64)):
        rows_of = " / ".join(map(str, batches)) + " rows"
        out[f"a step of the model with NSA: {rows_of}, ms"] = cells(nsa, ".3f", batches)
        out[f"a step of the model with dense attention: {rows_of}, ms"] = cells(dense, ".3f", batches)
        out[f"NSA's time over dense attention's: {rows_of}"] = cells(lambda *at: nsa(*at) / dense(*at), ".2f", batches)
    rate = cells(lambda context, batch: steps["nsa", context, batch]["tokens_per_s"], ",.0f", (64,))
    return out | {"tokens/s with 64 rows, NSA": rate}


def all_rows() -> dict[str, list[str]]:
    """Cells of all rows with figures."""
    of_models = generation_rows() | training_rows() | collective_rows() | two_gpu_rows()
    return (
        attention_rows()
        | headline_rows()
        | whole_operator_rows("attention_h100")
        | whole_operator_rows("attention_shapes_h200", "H200, ")
        | few_blocks_rows()
        | triton_rows()
        | decoding_rows()
        | of_models
        | quality_figures.all_rows()
    )


def quickstart_reaches() -> str:
    """What the quickstart reaches over its seeds."""
    rows = results("quickstart_cpu")["rows"]

    def span(field: str, scale: float = 100, unit: str = " %", places: int = 0) -> str:
        low, high = (f"{scale * pick(row[field] for row in rows):.{places}f}" for pick in (min, max))
        return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"

    return (
        f"over {len(rows)} seeds {span('bits_per_byte', 1, '', 2)} bits per byte and {span('accuracy')} right answers, "
        f"{span('without_selected')} without the selected branch, {span('window_only')} by windows alone "
        f"(chance: {span('chance')})"
    )


def peers_name(row: dict) -> str:
    """What a row of a comparison with published kernels is called."""
    name = row["peer"] if row.get("default", True) else f"{row['peer']}, as {', '.join(row['like'])}"
    return name if row.get("window_branch", True) else f"{name}, no window"


def peers_tables(name: str) -> str:
    """Tables of one result of benchmarks/peers.py, one for each shape, and what a reader must know of each peer."""
    measured = results(name)
    made = measured["environment"]
    cells: dict[tuple, dict[str, dict[int, list[str]]]] = {}
    for row in measured["rows"]:
        if "T" in row:
            times = cells.setdefault(tuple(row[symbol] for symbol in "BNKH"), {}).setdefault(peers_name(row), {})
            times.setdefault(row["T"], []).append(digits(row["ms"]) if "ms" in row else "error")
    tables = []
    for sizes, names in cells.items():
        lengths = sorted({length for times in names.values() for length in times})
        of = ", ".join(f"{symbol}={size}" for symbol, size in zip("BNKH", sizes, strict=True))
        lines = [f"| {of} | {' | '.join(f'{length:,}' for length in lengths)} |", "|---" * (len(lengths) + 1) + "|"]
        for label, times in names.items():
            lines.append(f"| {label} | {' | '.join(' / '.join(times.get(length, [])) for length in lengths)} |")
        tables.append("\n".join(lines))
    versions = ", ".join(f"{what} {made[key]}" for what, key in VERSIONS.items() if made.get(key))
    head = f"{made['device']}, forward / forward + backward, in milliseconds over the tokens"
    head += f" ([{name}.json](../benchmarks/results/{name}.json); {versions}):"
    return "\n\n".join([head, *tables, *(["\n".join(said)] if (said := peers_said(measured["rows"])) else [])])


def peers_said(rows: list[dict]) -> list[str]:
    """A list of each peer's commit, notes, greatest difference from the reference, and errors."""
    said = []
    for peer in dict.fromkeys(row["peer"] for row in rows if row["peer"] not in ("nsa_jax", "dense")):
        mine = [row for row in rows if row["peer"] == peer]
        commit = next((row["commit"] for row in mine if row.get("commit")), None)
        parts = [note for note in dict.fromkeys(row.get("notes", "") for row in mine) if note]
        checks = [row["check"] for row in mine if "output" in row.get("check", {})]
        if checks:
            worst = [max(check["output"] for check in checks)]
            worst += [max(value for check in checks for value in check["gradients"].values())]
            parts.append("from the reference: output {:.1%}, gradients {:.1%}".format(*worst).replace("%", " %"))
        for row in mine:
            if "error" in row:
                where = f"N={row['N']}, K={row['K']}, {row['T']:,} tokens: " if "T" in row else ""
                parts.append(where + " ".join(row["error"].split())[:160].replace("|", "/"))
        said.append(f"- `{peer}`" + (f" {commit}" if commit else "") + f": {'; '.join(dict.fromkeys(parts))}.")
    return said


def peers() -> str:
    """Published kernels beside this library's, from every result of that program; a sentence where there is none."""
    found = sorted(path.stem for path in RESULTS.glob("peers_*.json"))
    if not found:
        return "No result is in benchmarks/results yet, so this page states no times of other projects."
    return "\n\n".join(peers_tables(name) for name in found) + "\n"


SENTENCES = {"attention-origin": attention_origin, "quickstart-reaches": quickstart_reaches, "peers": peers}


def page(text: str) -> str:
    """A page's text with the figures of the results."""
    rows = all_rows()

    def fill(match: re.Match[str]) -> str:
        name = match[1].strip()
        if name not in rows:
            return match[0]
        return re.sub(r"\|  (?=\|)", "| ", f"| {' | '.join([name, *rows[name]])} |")

    for name, sentence in SENTENCES.items():
        text = re.sub(rf"(<!-- {name} -->).*?(<!-- end -->)", rf"\g<1>{sentence()}\2", text, flags=re.DOTALL)
    return re.sub(r"^\| ([^|\n]+) \|.*\|$", fill, text, flags=re.MULTILINE)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(page(path.read_text()))
