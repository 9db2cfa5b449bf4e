r"""What a step with a large vocabulary gathers, reduces and holds on each of many GPUs that need not be here.

    JAX_PLATFORMS=cpu python benchmarks/vocabulary.py --json benchmarks/results/vocabulary_h100.json

compiles the training step of one layer of dense attention under mesh.fsdp, one row per device, with tied embeddings and
with a head of its own. The gradients of embedding and head are made in pieces (`nsa_jax.nn.sharding.PIECE_BYTES`), and
in one piece for comparison. Bytes are those that the compiled program states: results of collectives on one device, and
temporaries at the fullest moment. `needed` is what embedding and head alone need.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import Any
from unittest import mock

import numpy as np
from ml_collections import ConfigDict

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks.timing import environment  # noqa: E402
from nsa_jax.config import default_config  # noqa: E402
from nsa_jax.nn import sharding  # noqa: E402
from nsa_jax.train.preflight import hlo, memory  # noqa: E402
from nsa_jax.train.step import make_train_step  # noqa: E402


def config_of(args: argparse.Namespace, tied: bool) -> ConfigDict:
    """One layer, one row per device."""
    c = default_config()
    c.model.dim, c.model.mlp_dim, c.model.num_layers = args.dim, 2 * args.dim, 1
    c.model.num_heads, c.model.num_kv_heads, c.model.head_dim = args.dim // 128, args.dim // 512, 64
    c.model.attention, c.model.compute_dtype, c.model.remat = "dense", "bfloat16", "dots_saved"
    c.model.vocab_size, c.model.tie_embeddings = args.vocab, tied
    c.data.source, c.data.synthetic, c.data.synthetic_vocab, c.data.seq_len = "synthetic", "copy", 512, args.length
    c.mesh.fsdp, c.train.batch_size = args.devices, args.devices
    return c


def row(args: argparse.Namespace, tied: bool, pieces: bool) -> dict[str, Any]:
    """Figures of one compiled step."""
    config = config_of(args, tied)
    made = memory.for_target(config, args.target, args.devices, args.vocab)
    step = make_train_step(made, np.ones(args.vocab, np.int32))
    with mock.patch.object(sharding, "PIECE_BYTES", sharding.PIECE_BYTES if pieces else 2**62):
        program = memory._compile(made, args.target, step, made.target(), made.abstract_batch())
    moved = {"all-gather": 0, "reduce-scatter": 0, "all-reduce": 0}
    for collective in hlo.collectives(program.as_text()):
        moved[collective.kind] = moved.get(collective.kind, 0) + collective.bytes
    matrix = args.vocab * args.dim
    needed = {
        "all-gather": matrix * 2 * (1 if tied else 2),
        "reduce-scatter": matrix * 4 // args.devices * (1 if tied and not pieces else 2),
    }
    temporaries = program.memory_analysis().temp_size_in_bytes
    return {"tied": tied, "pieces": pieces, "bytes": moved, "needed": needed, "temporaries": temporaries}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="h100", help="a GPU that nsa_jax.aot knows")
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=262_144)
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a row")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    rows = []
    for tied in (True, False):
        for pieces in (False, True):
            rows.append(row(args, tied, pieces))
            print(rows[-1], flush=True)
    case = {name: getattr(args, name) for name in ("target", "devices", "vocab", "dim", "length")}
    if args.json:
        result = {"environment": environment(), "case": case, "rows": rows}
        pathlib.Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
