r"""Times published NSA kernels beside this library's and dense cuDNN attention, in one process on one GPU.

    python benchmarks/peers.py --peer fla=CHECKOUT --peer xunhao=CHECKOUT --peer flash_nsa=CHECKOUT \
        --peer fsa=CHECKOUT --json benchmarks/results/peers_h100.json
    python benchmarks/peers.py --peer fla=CHECKOUT --lengths 2048,8192 --shape 32,8,128
    python benchmarks/peers.py --peer fla=CHECKOUT --shape 64,4,128:8192 --shape 32,8,128:8192 --shape 64,4,128:65536
    python benchmarks/peers.py --peer mine=CHECKOUT --adapter mine=adapter.py   # load(checkout, config) -> Peer

A CHECKOUT is a clone of the project, which the user makes; its commit goes into the result (--peer-commit names that of
a copy without git). peer_adapters.py says which function of which project is called. The published kernels need PyTorch
and Triton, in an environment of their own.

All but dense attention take query, one key and one value for all branches, and the gates' logits. They compute
compressed keys and values by the mean, the branches, and their gated sum; "fwd_bwd" also the gradients of these four
inputs. Beside a peer that leaves the window out, or has another geometry, stands a row of this library that computes
the same ("nsa_jax, as NAME").
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import json
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import nsa_jax  # noqa: E402
from benchmarks import peer_adapters  # noqa: E402
from benchmarks.peer_adapters import Peer  # noqa: E402
from benchmarks.timing import commit_of, environment, measure  # noqa: E402

OURS = "nsa_jax"
INPUTS = ("query", "key", "value", "gates")
CLEARLY_OFF = 0.05  # of the largest value: more than rounding, so another block was read


def attend_as(config: nsa_jax.NSAConfig, window: bool, implementation: str | None = None) -> Callable:
    """This library's function of query, key, value and the gates' logits, with or without the window branch."""

    def attend(query, key, value, logits):
        gates = jax.nn.sigmoid(logits)
        if window:
            return nsa_jax.nsa_self_attention(
                query, key, value, gates, config=config, implementation=implementation, nonnegative_gates=True
            )
        which = {"config": config, "implementation": implementation}
        key_cmp, value_cmp = (nsa_jax.mean_compress(x, config=config) for x in (key, value))
        compressed, lse = nsa_jax.compressed_attention(query, key_cmp, value_cmp, **which)
        lists = nsa_jax.select_blocks(query, key_cmp, lse, **which)
        selected = nsa_jax.selected_attention(
            query, key, value, lists, select_block=config.select_block, implementation=implementation
        )
        total = gates[..., 0, None] * compressed.astype(jnp.float32) + gates[..., 1, None] * selected
        return total.astype(query.dtype)

    return attend


def ours(config: nsa_jax.NSAConfig, window: bool) -> Peer:
    """This library as one of the peers."""
    notes = "" if window else "no window branch, as the peer; its ops one after the other, not the fused layer"
    return Peer(attend_as(config, window), config, window, notes, framework="jax")


def dense(config: nsa_jax.NSAConfig) -> Peer:
    """Dense causal attention, which has no gates."""
    on_gpu = jax.default_backend() == "gpu"
    attention = functools.partial(
        jax.nn.dot_product_attention, is_causal=True, implementation="cudnn" if on_gpu else "xla"
    )
    notes = "cuDNN" if on_gpu else "XLA"
    return Peer(lambda q, k, v, logits: attention(q, k, v), config, False, notes, framework="jax", agrees=False)


def make_inputs(shape: tuple[int, ...], length: int, seed: int) -> tuple[list[jax.Array], jax.Array]:
    """Query, key, value and the gates' logits in bfloat16, and a cotangent of the output; `shape` is B, N, K, H."""
    batch, heads, kv_heads, head = shape
    sizes = [(heads, head), (kv_heads, head), (kv_heads, head), (heads, 3), (heads, head)]
    keys = jax.random.split(jax.random.key(seed), len(sizes))
    made = [jax.random.normal(key, (batch, length, *size), jnp.bfloat16) for key, size in zip(keys, sizes, strict=True)]
    return made[:4], made[4]


def _jax_passes(attend: Callable) -> tuple[Callable, Callable]:
    def both(cotangent, *inputs):
        out, pullback = jax.vjp(attend, *inputs)
        return out, pullback(cotangent)

    return jax.jit(attend), jax.jit(both)


def _torch_passes(torch: Any, attend: Callable) -> tuple[Callable, Callable]:
    def forward(*inputs):
        with torch.no_grad():
            return attend(*inputs)

    def both(cotangent, *inputs):
        out = attend(*inputs)
        return out, torch.autograd.grad(out, inputs, cotangent)

    return forward, both


class Run:
    """A peer's two passes with inputs in its framework's arrays."""

    def __init__(self, peer: Peer, inputs: list[jax.Array], cotangent: jax.Array):
        if peer.framework == "jax":
            self.forward, self.both = _jax_passes(peer.attend)
            self.wait: Callable = jax.block_until_ready
            self.inputs, self.cotangent = list(inputs), cotangent
        else:
            torch = peer_adapters.import_torch()
            self.forward, self.both = _torch_passes(torch, peer.attend)
            self.wait = lambda _: torch.cuda.synchronize() if torch.cuda.is_available() else None
            jax.block_until_ready((inputs, cotangent))
            *copies, self.cotangent = (torch.from_dlpack(x).clone() for x in (*inputs, cotangent))
            self.inputs = [x.requires_grad_() for x in copies]

    def times(self, which: str, repeats: int, min_sample_s: float) -> float:
        """Median milliseconds of a pass."""
        function, arguments = (
            (self.forward, self.inputs) if which == "fwd" else (self.both, [self.cotangent, *self.inputs])
        )
        return measure(function, [tuple(arguments)], repeats=repeats, min_sample_s=min_sample_s, wait=self.wait)

    def output(self) -> np.ndarray:
        """The output in float32."""
        return _numpy(self.forward(*self.inputs))

    def output_and_gradients(self) -> list[np.ndarray]:
        """The output and the four gradients in float32."""
        out, gradients = self.both(self.cotangent, *self.inputs)
        return [_numpy(x) for x in (out, *gradients)]


def _numpy(array: Any) -> np.ndarray:
    return np.asarray(array if isinstance(array, jax.Array) else array.detach().float().cpu().numpy(), np.float32)


def _difference(array: np.ndarray, reference: np.ndarray) -> float:
    """Largest difference as a share of the largest reference value."""
    if not np.isfinite(array).all():
        raise FloatingPointError("the result has values that are not finite")
    return float(np.abs(array - reference).max() / np.abs(reference).max())


def check(peer: Peer, shape: tuple[int, ...], seed: int) -> dict[str, Any]:
    """How far a peer is from the float32 reference on small inputs.

    At n*l' tokens every query reads all its blocks, so what differs is rounding. At twice as many tokens the selection
    matters: "tokens_off" is the share of tokens whose output is clearly another one, as scores that nearly tie give.
    """
    if not peer.agrees:
        return {"not_compared": "it computes another function"}
    config = peer.config
    reference = attend_as(config, peer.window, "reference")

    def runs(length: int) -> tuple[Run, Run]:
        inputs, cotangent = make_inputs(shape, length, seed)
        exact = dataclasses.replace(peer, attend=reference, framework="jax")
        wide = [x.astype(jnp.float32) for x in (*inputs, cotangent)]
        return Run(peer, inputs, cotangent), Run(exact, wide[:-1], wide[-1])

    tokens = config.num_selected * config.select_block
    results = (run.output_and_gradients() for run in runs(tokens))
    differences = [_difference(*pair) for pair in zip(*results, strict=True)]
    found: dict[str, Any] = {"tokens": tokens, "output": differences[0]}
    found["gradients"] = dict(zip(INPUTS, differences[1:], strict=True))
    if peer.same_selection:
        out, exact = (run.output() for run in runs(2 * tokens))
        off = np.abs(out - exact).max(axis=(2, 3)) > CLEARLY_OFF * np.abs(exact).max()
        found["tokens_off"] = float(off.mean())
    else:
        found["tokens_off"] = "not compared: it selects other blocks"
    return found


def _message(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:500]}"


def _free() -> None:
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


class Table:
    """Measures peers at one shape, and hands each row to `add`."""

    def __init__(self, args: argparse.Namespace, shape: tuple[int, ...], add: Callable[[dict], None]):
        self.args, self.shape, self.add = args, shape, add
        self.checks: dict[tuple, dict] = {}

    def checked(self, name: str, peer: Peer, length: int) -> dict[str, Any]:
        """The comparison with the reference, made once for a shape, at the first length."""
        key = (name, peer.config, peer.window)
        if key not in self.checks:
            if peer.framework == "torch":  # kernels that tune themselves in their first call do so at a timed length
                with contextlib.suppress(Exception):
                    self.run(peer, length).output_and_gradients()
            try:
                self.checks[key] = check(peer, self.shape, self.args.seed)
            except Exception as error:
                self.checks[key] = {"error": _message(error)}
            finally:
                _free()
        return self.checks[key]

    def run(self, peer: Peer, length: int) -> Run:
        """The peer with inputs of this many tokens."""
        return Run(peer, *make_inputs(self.shape, length, self.args.seed))

    def measure(self, name: str, peer: Peer, length: int, beside: dict[str, dict], **fields: Any) -> dict[str, float]:
        """Milliseconds by pass; `beside` has those of other rows, which the new ones state beside their own."""
        case = {"peer": name, "T": length, **dict(zip("BNKH", self.shape, strict=True)), **fields}
        if name != "dense":
            case |= {"geometry": dataclasses.asdict(peer.config), "window_branch": peer.window}
        case["notes"] = peer.notes
        times: dict[str, float] = {}
        try:
            if name != "dense":
                case["check"] = self.checked(name, peer, length)
            run = self.run(peer, length)
            for which in self.args.passes:
                times[which] = run.times(which, self.args.repeats, self.args.min_sample_s)
                others = {f"{other}_ms": round(ms[which], 4) for other, ms in beside.items() if which in ms}
                self.add(case | {"pass": which, "ms": round(times[which], 4)} | others)
        except Exception as error:  # one that fails must not lose the others
            self.add(case | {"error": _message(error)})
        finally:
            run = None  # frees its arrays
            _free()
        return times


def load_peers(args: argparse.Namespace, add: Callable[[dict], None]) -> dict[str, tuple[Peer, str | None]]:
    """Peers and their commits by name; one that cannot be imported leaves a row with the error."""
    adapters = dict(peer_adapters.ADAPTERS)
    found = {}
    for name, checkout in args.peers.items():
        commit = args.peer_commits.get(name) or commit_of(checkout)
        try:
            if name in args.adapters:
                adapters[name] = peer_adapters.adapter_of(args.adapters[name])
            found[name] = adapters[name](checkout, args.config), commit
        except Exception as error:
            add({"peer": name, "commit": commit, "error": _message(error)})
    return found


def run(args: argparse.Namespace, add: Callable[[dict], None]) -> None:
    """Measures all rows."""
    peers = load_peers(args, add)
    as_we: dict[tuple[nsa_jax.NSAConfig, bool], list[str]] = {(args.config, True): []}
    for name, (peer, _) in peers.items():
        as_we.setdefault((peer.config, peer.window), []).append(name)
    tables: dict[tuple[int, ...], Table] = {}
    for shape, lengths in args.cases:
        table = tables.setdefault(shape, Table(args, (args.batch, *shape), add))
        for length in lengths:
            beside: dict[str, dict] = {}
            if args.dense:
                beside["dense"] = table.measure("dense", dense(args.config), length, {})
            for (config, window), names in as_we.items():
                default = (config, window) == (args.config, True)
                mine = table.measure(OURS, ours(config, window), length, beside, like=names, default=default)
                for name in names:
                    peer, commit = peers[name]
                    table.measure(name, peer, length, beside | {"ours": mine}, commit=commit)


def _label(row: dict) -> str:
    same = row["peer"] != OURS or row["default"]
    name = row["peer"] if same else f"{OURS}, as {', '.join(row['like'])}"
    return name if row.get("window_branch", True) else f"{name}, no window"


def _cell(row: dict) -> str:
    if "error" in row:
        return "error"
    over = row.get("ours_ms")
    return f"{row['ms']:.3g}" + (f" ({row['ms'] / over:.2f}x)" if over else "")


def summary(rows: list[dict]) -> str:
    """A short table of milliseconds, with the times of a peer over this library's beside it, and then the errors."""
    lines: list[str] = []
    timed = [row for row in rows if "T" in row]
    width = max((len(_label(row)) for row in timed), default=0)
    for shape in dict.fromkeys(tuple(row[x] for x in "BNKH") for row in timed):
        mine = [row for row in timed if tuple(row[x] for x in "BNKH") == shape]
        lengths = list(dict.fromkeys(row["T"] for row in mine))
        of = ", ".join(f"{name}={size}" for name, size in zip("BNKH", shape, strict=True))
        for which, title in (("fwd", "forward"), ("fwd_bwd", "forward + backward")):
            if not any(row.get("pass") == which for row in mine):
                continue
            lines += ["", f"{title}, ms (times {OURS} that computes the same); {of}"]
            lines.append(f"{'tokens':<{width}}" + "".join(f"{length:>18}" for length in lengths))
            for label in dict.fromkeys(map(_label, mine)):
                cells = []
                for length in lengths:
                    here = [row for row in mine if _label(row) == label and row["T"] == length]
                    cells.append(_cell(next((row for row in here if row.get("pass", which) == which), {"error": ""})))
                lines.append(f"{label:<{width}}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join([*lines, "", *dict.fromkeys(_errors(rows))]).strip("\n")


def _errors(rows: list[dict]) -> list[str]:
    said = []
    for row in rows:
        where = f" at N={row['N']}, K={row['K']}" if "T" in row else ""
        if "error" in row.get("check", {}):
            said.append(f"{_label(row)}{where}, compared with the reference: {row['check']['error']}")
        if "error" in row:
            said.append(f"{_label(row)}{where}{', T=' + str(row['T']) if where else ''}: {row['error']}")
    return said


def print_row(row: dict) -> None:
    text = row.get("error") or f"{row['pass']:>7} {row['ms']:10.3f} ms"
    if "ours_ms" in row:
        text += f"  {row['ms'] / row['ours_ms']:.2f}x {OURS}'s"
    if "output" in row.get("check", {}):
        text += f"  differs from the reference by {row['check']['output']:.2g} of its largest value"
    where = f"T={row['T']:<6} N={row['N']:<3} K={row['K']:<2}" if "T" in row else ""
    print(f"{_label(row):>18} {where} {text}", flush=True)


def _named(parser: argparse.ArgumentParser, flag: str, pairs: list[str], what: str = "PATH") -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals and value):
            parser.error(f"{flag} {pair}: must be NAME={what}")
        if name in found or name in (OURS, "dense"):
            parser.error(f"{flag} {pair}: the name {name} is taken")
        found[name] = value
    return found


def _named_paths(parser: argparse.ArgumentParser, flag: str, pairs: list[str]) -> dict[str, pathlib.Path]:
    return {name: pathlib.Path(path).expanduser() for name, path in _named(parser, flag, pairs).items()}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line, with `peers` and `adapters` as paths by name, `config` as an NSAConfig and `cases` as shapes
    with their lengths."""

    def integers(text: str) -> list[int]:
        return [int(x) for x in text.split(",")]

    def case(text: str) -> tuple[tuple[int, ...], list[int] | None]:
        shape, own, lengths = text.partition(":")
        return tuple(integers(shape)), integers(lengths) if own else None

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shipped = ", ".join(peer_adapters.ADAPTERS)
    parser.add_argument("--peer", action="append", default=[], help=f"NAME=CHECKOUT; repeatable; shipped: {shipped}")
    parser.add_argument("--peer-commit", action="append", default=[], help="NAME=COMMIT of a checkout without git")
    parser.add_argument("--adapter", action="append", default=[], help="NAME=FILE.py: an adapter of your own")
    parser.add_argument("--lengths", default=[2048, 8192, 32768, 65536], type=integers)
    parser.add_argument("--shape", action="append", type=case, help="N,K,H or N,K,H:LENGTHS; repeatable, in this order")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--passes", default="fwd,fwd_bwd", type=lambda text: text.split(","))
    parser.add_argument("--geometry", default="", help="fields of NSAConfig: num_selected=16,window=512")
    parser.add_argument("--no-dense", dest="dense", action="store_false", help="leave the dense baseline out")
    parser.add_argument("--repeats", type=int, default=11, help="samples that a median is taken over")
    parser.add_argument("--min-sample-s", type=float, default=0.1, help="calls are queued until a sample lasts so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write the rows and the environment here")
    parser.add_argument("--commit", help="commit to record where git is not available")
    args = parser.parse_args(arguments)
    shapes = args.shape or [((64, 4, 128), None), ((32, 8, 128), None)]
    args.cases = [(shape, lengths or args.lengths) for shape, lengths in shapes]
    for shape, _ in args.cases:
        if len(shape) != 3 or shape[0] % shape[1]:
            parser.error(f"--shape {','.join(map(str, shape))}: must be N,K,H, and K must divide N")
    if unknown := set(args.passes) - {"fwd", "fwd_bwd"}:
        parser.error(f"--passes: unknown {sorted(unknown)}: choose from fwd, fwd_bwd")
    try:
        fields = dict(pair.split("=") for pair in args.geometry.split(",") if pair)
        args.config = nsa_jax.NSAConfig(**{name: int(value) for name, value in fields.items()})
    except (TypeError, ValueError) as error:
        parser.error(f"--geometry {args.geometry}: {error}")
    args.peers = _named_paths(parser, "--peer", args.peer)
    args.adapters = _named_paths(parser, "--adapter", args.adapter)
    args.peer_commits = _named(parser, "--peer-commit", args.peer_commit, "COMMIT")
    if unknown := set(args.peer_commits) - set(args.peers):
        parser.error(f"--peer-commit: no --peer is named {sorted(unknown)}")
    for name, checkout in args.peers.items():
        if not checkout.is_dir():
            parser.error(f"--peer {name}={checkout}: there is no such folder; clone the project and give its path")
        if name not in peer_adapters.ADAPTERS and name not in args.adapters:
            parser.error(
                f"--peer {name}: no adapter of this name; shipped are {shipped}; --adapter {name}=FILE adds one"
            )
    for name, file in args.adapters.items():
        if not file.is_file() or name not in args.peers:
            parser.error(f"--adapter {name}={file}: needs a file, and --peer {name}=CHECKOUT")
    return args


def main(arguments: list[str] | None = None) -> dict:
    args = parse(arguments)
    # PyTorch shares the GPU: JAX may not take three quarters of its memory at start. Read when JAX finds the device.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    result: dict[str, Any] = {"environment": environment(args.commit), "rows": []}
    if set(args.peers) - set(args.adapters):
        torch = peer_adapters.import_torch()
        result["environment"] |= {"torch": torch.__version__, "triton": sys.modules["triton"].__version__}

    def add(row: dict) -> None:
        result["rows"].append(row)
        print_row(row)
        if args.json:
            pathlib.Path(args.json).write_text(json.dumps(result, indent=1) + "\n")

    run(args, add)
    print("\n" + summary(result["rows"]))
    return result


if __name__ == "__main__":
    main()
