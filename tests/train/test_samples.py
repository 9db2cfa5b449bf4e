"""The text sample that training writes: it begins as a document does in training."""

import jax
import numpy as np
import pytest

from nsa_jax.train.loop import Run

from .tiny import one_device, tiny_config


@pytest.mark.parametrize(("prompt", "tokens"), [("", [ord("\n")]), ("ab", [ord("a"), ord("b")])])
def test_a_sample_continues_its_prompt_and_ends_with_its_document(tmp_path, prompt, tokens):
    (tmp_path / "a.txt").write_text("some text " * 300)
    config = tiny_config(
        data__source="text", data__files=(str(tmp_path / "a.txt"),), data__cache_dir=str(tmp_path / "cache"),
        data__tokenizer="byte", data__val_fraction=0.0, train__sample_tokens=6, train__sample_prompt=prompt,
    )  # fmt: skip
    run = Run(config, tmp_path / "run", None, one_device())
    sampler, given = run.sampler, []

    def sample(params, row, length, key):
        given.append((np.asarray(row), length))
        out = np.array(row)
        out[0, length:] = [ord("x"), ord("y"), run.pipeline.tokenizer.eos_id, ord("z"), ord("z"), ord("z")]
        return jax.numpy.asarray(out)

    sampler._sample = sample
    text = sampler({}, 3)
    ((row, length),) = given
    # No end of a document before it: in training no token sees the one of the document before.
    assert row.shape == (1, len(tokens) + 6) and row[0, :length].tolist() == tokens
    assert text == bytes(tokens).decode() + "xy"
