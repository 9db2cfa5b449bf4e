# %% [markdown]
# # Kernels and scaling
#
# Time and memory of NSA and of dense attention over the sequence length T: from the measurements that the repository
# keeps in `benchmarks/results/`, and live on this machine. Where do the two cross, what bounds each kernel, what is
# left to gain?

# %%
# %matplotlib inline
import json
import os
import shutil
import subprocess
import sys
import time

import numpy as np
from common import BUILD, ROOT, say
from IPython.display import display
from matplotlib import pyplot as plt

import nsa_jax
from nsa_jax import inspect
from nsa_jax.ops import blocks
from nsa_jax.train.flops import peak_flops

files = sorted((ROOT / "benchmarks" / "results").glob("attention_*.json"))
results = {path.stem: json.loads(path.read_text()) for path in files}
chosen = "attention_h200"
environment, rows = results[chosen]["environment"], results[chosen]["rows"]
paper = nsa_jax.NSAConfig()
N, K, H, V = (rows[0][name] for name in "NKHV")
say(
    f"{', '.join(results)}: this notebook reads `{chosen}` ({environment['device']}, bf16, jax "
    f"{environment['jax']}, {environment['date']}, commit {environment['commit']}). One attention layer, one row, N "
    f"= {N} query heads in K = {K} groups, head dim {H}; the paper's geometry."
)


def curve(op, which, field="ms"):
    """(T, value) of an op and pass, by T."""
    points = {r["T"]: r[field] for r in rows if r["op"] == op and r["pass"] == which and r.get(field) is not None}
    return np.array(sorted(points)), np.array([points[T] for T in sorted(points)])


# %% [markdown]
# ## Time, and where the two cross
#
# The whole of NSA is timed: block selection, gates and the building of lists for the kernels included, on random
# inputs, where neighbours choose unlike blocks. That is the slowest case.

# %%
passes = {"fwd": ("forward", "--"), "fwd_bwd": ("forward + backward", "-")}
colour = {"dense": "#666666", "nsa": inspect.COLOURS["selected"]}
figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.4), layout="constrained")
crossings, slopes = {}, {}
for which, (label, style) in passes.items():
    for op in ("dense", "nsa"):
        T, ms = curve(op, which)
        left.loglog(T, ms, style, marker="o", color=colour[op], label=f"{op}, {label}")
        slopes[op, which] = np.log2(ms[-1] / ms[-2]) / np.log2(T[-1] / T[-2])
    T, dense = curve("dense", which)
    assert (T == curve("nsa", which)[0]).all()
    ratio = dense / curve("nsa", which)[1]
    right.semilogx(T, ratio, style, marker="o", color=colour["nsa"], label=label)
    # The ratio grows with T: interpolate its logarithm to 0.
    crossings[which] = float(np.exp(np.interp(0, np.log(ratio), np.log(T))))
for axis in (left, right):
    axis.set_xticks(T, [f"{x // 1024}k" for x in T])
    axis.minorticks_off()
    axis.set_xlabel("sequence length T")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
left.set(ylabel="milliseconds", title="time of a layer's attention")
right.set(ylabel="dense time / NSA time", title="speed-up")
right.axhline(1, color="black", linewidth=0.8)
display(figure)
plt.close(figure)
say(
    f"**See:** the lines cross near T = {crossings['fwd']:,.0f} (forward) and {crossings['fwd_bwd']:,.0f} (forward "
    f"+ backward); below, dense is the better choice. At {T[-1] // 1024}k NSA is {ratio[-1]:.1f} times as fast in "
    f"training. Over the last doubling dense grows like T^{slopes['dense', 'fwd_bwd']:.2f}, NSA like "
    f"T^{slopes['nsa', 'fwd_bwd']:.2f}: between 1 and 2, since the compressed branch and the scores still see T / "
    f"{paper.compress_stride} keys."
)

# %% [markdown]
# ## Memory
#
# Temporary memory of forward and backward, as the compiler plans it: besides inputs, outputs and gradients. Neither
# kind stores anything of size T².

# %%
figure, axis = plt.subplots(figsize=(6, 3.8), layout="constrained")
memory = {}
for op in ("dense", "nsa"):
    T, memory[op] = curve(op, "fwd_bwd", "temp_gib")
    axis.loglog(T, memory[op], marker="o", color=colour[op], label=op)
scores = N * T.astype(float) ** 2 * 2 / 2**30
axis.loglog(T, scores, ":", color="black", label="scores of all pairs, if they were stored (bf16)")
axis.set_xticks(T, [f"{x // 1024}k" for x in T])
axis.minorticks_off()
axis.set(xlabel="sequence length T", ylabel="GiB", title="temporary memory, forward + backward")
axis.grid(alpha=0.3)
axis.legend(fontsize=8)
display(figure)
plt.close(figure)
say(
    f"**See:** both grow linearly. NSA takes {memory['nsa'][-1] / memory['dense'][-1]:.2f} times dense's memory at "
    f"{T[-1] // 1024}k ({memory['nsa'][-1]:.1f} and {memory['dense'][-1]:.1f} GiB), since it keeps three branches "
    f"and their lists. Storing all scores would take {scores[-1]:,.0f} GiB."
)

# %% [markdown]
# ## Where the time goes

# %%
at = 65536
names = {"compressed": "compressed", "select": "selection", "selected": "selected", "window": "window"}
forward, backward = {}, {}
for r in rows:
    if r["T"] == at and r["op"] in names and r["lists"] in ("", "random"):
        {"fwd": forward, "bwd": backward}.get(r["pass"], {})[names[r["op"]]] = r["ms"]
bars = {
    f"NSA forward: {sum(forward.values()):.0f} ms": forward,
    f"NSA backward: {sum(backward.values()):.0f} ms": backward,
}
dense_times = {which: dict(zip(*curve("dense", which), strict=True))[at] for which in ("fwd", "bwd")}
palette = {**inspect.COLOURS, "selection": "#CC79A7"}
figure, axis = plt.subplots(figsize=(9, 2.4), layout="constrained")
for y, parts in enumerate(bars.values()):
    start = 0
    for name, ms in parts.items():
        axis.barh(y, ms, left=start, color=palette[name], label=name if y == 0 else None)
        axis.text(start + ms / 2, y, f"{ms:.1f}", ha="center", va="center", color="white", fontsize=8)
        start += ms
axis.set_yticks(range(len(bars)), list(bars))
axis.set(xlabel=f"milliseconds at T = {at // 1024}k, branches measured one by one", ylim=(1.6, -0.6))
axis.legend(ncols=4, fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
display(figure)
plt.close(figure)
whole = dict(zip(*curve("nsa", "fwd"), strict=True))[at]
slowest = max(backward, key=backward.get)
say(
    f"**See:** dense takes {dense_times['fwd']:.0f} ms forward and {dense_times['bwd']:.0f} ms backward here. In "
    f"NSA's forward pass the selected branch has {forward['selected'] / sum(forward.values()):.0%}, in the backward "
    f"pass the {slowest} branch the most ({backward[slowest] / sum(backward.values()):.0%}). Measured together, the "
    f"forward pass takes {whole:.1f} ms."
)

# %% [markdown]
# ## What could be gained at most
#
# Query-key pairs that must be touched, counted by the library's block arithmetic. Their ratio is the speed-up of
# kernels that are as efficient as the dense one.

# %%
T, dense = curve("dense", "fwd")
pairs_dense, pairs_nsa = [], []
for length in T:
    t = np.arange(length)
    low, high = blocks.compressed_range(t, 0, paper)
    compressed = np.maximum(high - low, 0).sum()
    selected, window = blocks.selected_key_count(t, 0, paper).sum(), np.minimum(t + 1, paper.window).sum()
    pairs_dense.append((t + 1).sum())
    # Selection scores the compressed keys once more, without values: half a pair.
    pairs_nsa.append(1.5 * compressed + selected + window)
possible = np.array(pairs_dense) / np.array(pairs_nsa)
measured = dense / curve("nsa", "fwd")[1]
figure, axis = plt.subplots(figsize=(6, 3.8), layout="constrained")
axis.loglog(T, possible, marker="s", color="#0072B2", label="pairs of dense / pairs of NSA")
axis.loglog(T, measured, marker="o", color=colour["nsa"], label="measured speed-up, forward")
axis.axhline(1, color="black", linewidth=0.8)
axis.set_xticks(T, [f"{x // 1024}k" for x in T])
axis.minorticks_off()
axis.set_yticks([0.3, 1, 3, 10], ["0.3", "1", "3", "10"])
axis.set(xlabel="sequence length T", ylabel="times", title="forward")
axis.grid(alpha=0.3)
axis.legend(fontsize=8)
display(figure)
plt.close(figure)
say(
    f"**See:** counted in pairs, NSA would cross at a shorter T and gain {possible[-1]:.1f}x at {T[-1] // 1024}k; "
    f"measured are {measured[-1]:.1f}x, {measured[-1] / possible[-1]:.0%} of it ({measured[0] / possible[0]:.0%} at "
    f"{T[0] // 1024}k). The rest is the lower efficiency of sparse kernels; the roofline says why."
)

# %% [markdown]
# ## Roofline
#
# A kernel is bound by the tensor cores or by memory, depending on how many operations it does per byte. The selected
# branch is the interesting one: every query of a group reads n blocks of its own. If nothing were reused between
# queries, each key loaded would serve only the G = N / K heads of one token.

# %%
bandwidth = {"H200": 4.8e12, "H100": 3.35e12, "A100": 2.04e12}  # bytes per second, data sheets (A100: 80 GB)
gpu = next(name for name in bandwidth if name in environment["device"])
peak, speed = peak_flops(environment["device"]) / 1e12, bandwidth[gpu] / 1e12  # TFLOP/s, TB/s
G, size = N // K, 2  # bytes of a bf16
once = size * (N * (H + V) + K * (H + V))  # bytes per token if q, k, v are read and the output written once
own = size * K * (H + V) * paper.num_selected * paper.select_block  # bytes per token if each loads its blocks itself
operations = {r["op"]: r["tflops"] * r["ms"] * 1e9 / at for r in rows if r["T"] == at and r["pass"] == "fwd"}
points = {}
for r in rows:
    if r["T"] == at and r["pass"] == "fwd" and r["op"] in ("dense", "compressed", "window", "selected"):
        loads = once + (own / (64 if r["lists"] == "shared" else 1) if r["op"] == "selected" else 0)
        kind = {"random": "selected, lists of their own", "shared": "selected, 64 neighbours share"}
        points[kind.get(r["lists"], r["op"])] = (operations[r["op"]] / loads, r["tflops"])

figure, axis = plt.subplots(figsize=(8, 4.6), layout="constrained")
intensity = np.logspace(0.5, 5, 50)
axis.loglog(
    intensity, np.minimum(peak, intensity * speed), color="black", label=f"{gpu}: {peak:.0f} TFLOP/s, {speed} TB/s"
)
axis.axvline(G, color="grey", linestyle=":", label=f"G = {G}: no reuse between queries")
marks = {"dense": ("#666666", "D"), "compressed": ("#0072B2", "o"), "window": ("#009E73", "^")}
for name, (x, y) in points.items():
    face, mark = marks.get(name, ("#D55E00", "s" if "own" in name else "P"))
    axis.loglog(x, y, mark, color=face, markersize=9, label=f"{name}: {y:.0f} TFLOP/s")
axis.set(xlabel="operations per byte of device memory", ylabel="TFLOP/s", title=f"forward at T = {at // 1024}k")
axis.grid(alpha=0.3, which="both")
axis.legend(fontsize=8, loc="lower right")
display(figure)
plt.close(figure)
x, y = points["selected, lists of their own"]
shared = points["selected, 64 neighbours share"][1]
say(
    f"**See:** with lists of its own, each query does {x:.0f} operations per byte: device memory alone would allow "
    f"{x * speed:.0f} TFLOP/s. The kernel reaches {y:.0f}, {y / (x * speed):.1f} times that, because the L2 cache "
    f"holds what other queries loaded. When neighbours share lists it reaches {shared:.0f}. So overlap between "
    "neighbours (notebook 02 measures it) is speed, and so is a large G: with G = 4 the memory bound would be "
    f"{x * speed * 4 / G:.0f} TFLOP/s. The other kernels do at least "
    f"{min(point[0] for name, point in points.items() if 'own' not in name):.0f} operations per byte, right of the "
    f"ridge at {peak / speed:.0f}."
)

# %% [markdown]
# ## Live, on this machine
#
# With a GPU, `benchmarks/attention.py` runs at three lengths. Without one, a small shape shows the same law with the
# `xla` implementation, which serves any device with memory linear in T.

# %%
if shutil.which("nvidia-smi"):
    # In a process of its own, so that two do not share the GPU's memory.
    output = BUILD / "attention_live.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "attention.py"), "--ops", "nsa", "--passes", "fwd,fwd_bwd"]
    command += ["--lengths", "2048,8192,32768", "--json", str(output)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path})
    live = json.loads(output.read_text())
    here = live["environment"]["device"]
    times = {
        op: {r["T"]: r["ms"] for r in live["rows"] if r["op"] == op and r["pass"] == "fwd"} for op in ("dense", "nsa")
    }
else:
    import jax

    here, small = "this CPU", nsa_jax.NSAConfig(16, 8, 32, 4, 1, 2, 64)
    times = {"dense": {}, "nsa": {}}
    for length in (512, 1024, 2048, 4096):
        keys = iter(jax.random.split(jax.random.key(0), 8))
        query = jax.random.normal(next(keys), (1, length, 4, 32))
        kv = [jax.random.normal(next(keys), (1, length, 1, 32)) for _ in range(4)]
        cmp = [nsa_jax.mean_compress(x, config=small) for x in kv[:2]]
        gates = jax.nn.sigmoid(jax.random.normal(next(keys), (1, length, 4, 3)))
        dense_op = jax.jit(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True))
        nsa_op = jax.jit(lambda *a: nsa_jax.nsa_attention(*a, config=small, implementation="xla"))
        inputs = {"dense": (query, *kv[:2]), "nsa": (query, *cmp, *kv, gates)}
        for op, function in (("dense", dense_op), ("nsa", nsa_op)):
            jax.block_until_ready(function(*inputs[op]))
            samples = []
            for _ in range(3):
                begin = time.perf_counter()
                jax.block_until_ready(function(*inputs[op]))
                samples.append(time.perf_counter() - begin)
            times[op][length] = 1e3 * min(samples)

figure, axis = plt.subplots(figsize=(6, 3.8), layout="constrained")
for op, points_live in times.items():
    axis.loglog(list(points_live), list(points_live.values()), marker="o", color=colour[op], label=op)
axis.set_xticks(list(times["nsa"]), [f"{x:,}" for x in times["nsa"]])
axis.minorticks_off()
axis.set(xlabel="sequence length T", ylabel="milliseconds", title=f"forward, live on {here}")
axis.grid(alpha=0.3)
axis.legend()
display(figure)
plt.close(figure)
growth = {op: (v := list(p.values()))[-1] / v[-2] for op, p in times.items()}
step = list(times["nsa"])[-1] / list(times["nsa"])[-2]
say(
    f"**See:** from {list(times['nsa'])[-2]:,} to {list(times['nsa'])[-1]:,} tokens ({step:.0f}x) dense takes "
    f"{growth['dense']:.1f} times as long, NSA {growth['nsa']:.1f} times. At the longest, dense takes "
    f"{list(times['dense'].values())[-1]:.1f} ms and NSA {list(times['nsa'].values())[-1]:.1f} ms on {here}."
)
