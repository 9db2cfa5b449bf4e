"""The validation of training, repeated: the same rows, masks and counts."""

from __future__ import annotations

import copy
import math
from typing import Any

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from nsa_jax.data import DataError, Tokenizer
from nsa_jax.evaluate.scoring import data_of_the_run
from nsa_jax.nn import Transformer
from nsa_jax.train import setup
from nsa_jax.train.state import batch_sharding
from nsa_jax.train.step import make_eval_step
from nsa_jax.train.validation import evaluate


def repeat_validation(
    model: Transformer, tokenizer: Tokenizer, config: ConfigDict, token_bytes: np.ndarray, batch_size: int
) -> dict[str, Any]:
    """The metrics that training logs as val/loss, val/perplexity and val/bits_per_byte, and those of each source.

    Rows are spread over devices of this process; each holds the whole model.

    Args:
      model: the Transformer.
      tokenizer: the model's.
      config: the training config, whose data must be on this machine.
      token_bytes: int [vocab], bytes of text of each token id.
      batch_size: rows at once at most; training's own batch may have been that of many devices.

    Returns:
      loss, perplexity, bits_per_byte (of several sources also loss/NAME and bits_per_byte/NAME), tokens, bytes, rows
      (of seq_len tokens, padding included), seq_len.

    Raises:
      DataError: the run holds nothing out, or its data now has another tokenizer.
    """
    train = config.train
    if not train.eval_batches:
        raise DataError("config.train.eval_batches=0", "the run has no validation", "use --tasks perplexity")
    pipeline = data_of_the_run(config, tokenizer)
    here = copy.deepcopy(config)
    here.mesh.update({"data": -1, "fsdp": 1, "tensor": 1, "context": 1})
    rows = max(n for n in range(1, train.batch_size + 1) if train.batch_size % n == 0 and n <= batch_size)
    here.train.grad_accum = train.batch_size // rows
    devices = jax.local_devices()
    made = setup(here, tokenizer.vocab_size, devices[: math.gcd(rows, len(devices))])
    with jax.set_mesh(made.mesh):
        params = jax.device_put(nnx.to_pure_dict(nnx.state(model, nnx.Param)), made.sharding["params"])
        row, sums = evaluate(make_eval_step(made, token_bytes), params, pipeline, batch_sharding(made.mesh))
    return {
        **{name.removeprefix("val/"): value for name, value in row.items()},
        "tokens": int(sums["tokens"]),
        "bytes": int(sums["bytes"]),
        "rows": sum(len(part.pipeline.validation()) for part in pipeline.parts.values()) * train.batch_size,
        "seq_len": config.data.seq_len,
    }
