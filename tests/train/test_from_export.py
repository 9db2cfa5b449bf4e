"""Training starts from the weights of an exported model."""

import jax
import numpy as np
import pytest
from flax import nnx

from nsa_jax import nn
from nsa_jax.data import load_tokenizer
from nsa_jax.export import export
from nsa_jax.train import CheckpointError

from .tiny import losses, make_run, tiny_config


def exported(directory, **changes):
    config = tiny_config(**changes)
    tokenizer = load_tokenizer(config)
    model = nn.Transformer(nn.ModelConfig.from_config(config, tokenizer.vocab_size), rngs=nnx.Rngs(params=11))
    export(model, tokenizer, config, directory)
    return model


def test_the_first_loss_is_that_of_the_exported_weights(tmp_path):
    model = exported(tmp_path / "export")
    run = make_run(tmp_path / "run", str(tmp_path / "export"), train__steps=1)
    batch = next(run.pipeline.train())
    log_probs = jax.nn.log_softmax(jax.jit(model)(batch["inputs"], batch["segment_start"]))
    chosen = np.take_along_axis(np.asarray(log_probs), batch["targets"][..., None], -1)[..., 0]
    want = -(chosen * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
    run.run()
    assert list(losses(tmp_path / "run").values())[0] == pytest.approx(want, rel=1e-5)


def test_an_export_of_another_shape_is_refused(tmp_path):
    exported(tmp_path / "export", model__dim=16)
    with pytest.raises(CheckpointError, match="does not fit the exported model"):
        make_run(tmp_path / "run", str(tmp_path / "export"), train__steps=1).run()
