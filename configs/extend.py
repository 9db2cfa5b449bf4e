"""Longer rows for a model that was trained on short ones: NSA or dense, converted or trained here.

What:    the argument is an exported model and the new row length, 32,768 if left out. The model is the export's; the
         base of RoPE grows by ratio ** (H / (H - 2)) for rows longer by this ratio, so that the slowest pair of
         features turns no further over the new row than it did over the old one (NTK-aware scaling, arXiv 2309.00071).
         A model with scaled RoPE keeps it. New gates and compressors learn three times as fast as the weights that were
         trained before. The learning rate starts at half of that of a model of this size and falls to zero, since 50
         million tokens are few. Without an argument the model is that of a100_prod at 32,768 tokens.
Data:    text files, one document each: use documents as long as the rows. A corpus of short ones teaches nothing about
         the longer row, but the first tokens of a row need some: let a fifth of the tokens be in short ones, of
         128 bytes, say, by config.data.sources (docs/extend.md). 380 steps of 4 x 32,768 tokens are 50 million tokens.
Takes:   112 s on an H200 for a model of 73M parameters with NSA, 292 s with dense attention; on an H100 123 and 310 s,
         and 124 s with two of its twelve layers dense, three of NSA and seven of windows.
Reaches: 0.487 nats per byte of source text with NSA in every layer, 0.445 with those two layers dense that read far and
         the next three NSA (python -m nsa_jax.convert --dense-layers=2 --nsa-layers=3), 0.445 with dense attention
         (docs/extend.md).
Command: python train.py --config=configs/extend.py:converted/nsa,32768 --resume=converted/nsa --stage
Other:   64k in a second stage: --config=configs/extend.py:converted/nsa,65536 --resume=runs/extend --stage
         --workdir=runs/extend_64k. The optimizer's averages are kept then.
"""

from pathlib import Path

from ml_collections import ConfigDict

from nsa_jax.command_line import load_config
from nsa_jax.config import default_config
from nsa_jax.hub.export import exported_config
from nsa_jax.rules import attention_kinds

TOKENS_PER_STEP = 131_072


def get_config(argument: str = "") -> ConfigDict:
    """The extension of a model.

    Args:
      argument: "EXPORT" or "EXPORT,LENGTH": a directory that convert or export wrote, and the tokens of the new rows.
    """
    directory, _, length = argument.partition(",")
    saved = exported_config(directory) if directory else load_config(str(Path(__file__).with_name("a100_prod.py")))
    c = default_config()
    c.name = "extend"

    c.model.update(saved.model)
    c.data.seq_len = int(length or 32_768)
    ratio = max(c.data.seq_len / saved.data.seq_len, 1.0)
    if c.model.rope_scaling.kind == "none":
        turned = max(c.model.rotary_dim or c.model.head_dim, 4)  # a single pair of features turns at any base alike
        c.model.rope_theta = c.model.rope_theta * ratio ** (turned / (turned - 2))

    c.data.source = "text"
    c.data.files = ("corpus/*.txt",)
    c.data.tokenizer = "byte"
    if directory and (Path(directory) / "tokenizer.json").is_file():
        c.data.tokenizer = "hf"
        c.data.tokenizer_path = str(Path(directory) / "tokenizer.json")

    c.train.steps = 380
    c.train.batch_size = max(TOKENS_PER_STEP // c.data.seq_len, 1)
    c.train.eval_every = 95
    c.train.eval_batches = 8
    c.train.save_every = 95

    c.optim.learning_rate = 3e-4
    c.optim.schedule = "linear"
    c.optim.final_fraction = 0.0
    c.optim.warmup_steps = 20
    if "nsa" in attention_kinds(c.model):
        c.optim.learning_rate_factor.gates = 3.0
        if c.model.nsa.selector == "compressed" and c.model.compressor == "mlp":
            c.optim.learning_rate_factor.compressor = 3.0

    c.preflight.target = "h200"
    return c
