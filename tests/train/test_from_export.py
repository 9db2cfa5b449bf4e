"""Training starts from the weights of an exported model."""

import jax
import numpy as np
import pytest
from flax import nnx

from nsa_jax import nn
from nsa_jax.config import ConfigError
from nsa_jax.data import load_tokenizer
from nsa_jax.export import export
from nsa_jax.hub.export_files import LoadError
from nsa_jax.train import CheckpointError, prepared

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


def test_a_step_of_an_export_is_refused(tmp_path):
    exported(tmp_path / "export")
    with pytest.raises(ConfigError, match="R022.*export@5: an exported model has no steps. Fix: leave out @5"):
        make_run(tmp_path / "run", f"{tmp_path / 'export'}@5", train__steps=1)


def test_an_export_of_another_shape_is_refused(tmp_path):
    exported(tmp_path / "export", model__dim=16)
    with pytest.raises(CheckpointError, match="does not fit the exported model"):
        make_run(tmp_path / "run", str(tmp_path / "export"), train__steps=1).run()


def test_a_model_of_another_library_is_named_before_data_are_read(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.setattr(prepared, "make_pipeline", None)
    with pytest.raises(LoadError, match="type 'llama'; import it first: python -m nsa_jax.convert"):
        make_run(tmp_path / "run", str(tmp_path), train__steps=1)


def test_an_export_that_would_be_another_function_is_refused_field_by_field(tmp_path):
    exported(tmp_path / "export")
    changes = {"model__rope_theta": 500.0, "model__norm_eps": 1e-3, "model__nsa__window": 16, "model__dropout": 0.1}
    with pytest.raises(CheckpointError) as caught:
        make_run(tmp_path / "run", str(tmp_path / "export"), train__steps=1, **changes).run()
    text = str(caught.value)
    for field, saved, wanted in (("rope_theta", 10000.0, 500.0), ("norm_eps", 1e-6, 1e-3), ("nsa.window", 12, 16)):
        assert f"config.model.{field}: {saved!r} where it was saved, {wanted!r} here" in text
    assert text.count("R054") == 2 * 3 and "dropout" not in text and "Fix: set" in text


def test_another_function_can_be_asked_for(tmp_path):
    exported(tmp_path / "export")
    run = make_run(
        tmp_path / "run", str(tmp_path / "export"), train__steps=1, model__rope_theta=500.0, preflight__ignore=("R054",)
    )
    run.run()
    assert len(losses(tmp_path / "run")) == 1


def test_a_checkpoint_of_another_function_is_refused(tmp_path):
    make_run(tmp_path / "run", train__steps=1, train__save_every=1).run()
    for workdir, resume in (("run", None), ("other", str(tmp_path / "run"))):
        with pytest.raises(CheckpointError, match=r"model.rope_theta: 10000.0 where it was saved, 500.0 here"):
            make_run(tmp_path / workdir, resume, train__steps=2, train__save_every=1, model__rope_theta=500.0).run()


@pytest.mark.parametrize(
    ("attention", "changes", "fields"),
    [
        ("nsa", {"compressor": "mean"}, ["compressor"]),
        ("nsa", {"attention": "window"}, ["attention", "nsa.window"]),
        ("nsa", {"num_heads": 2, "head_dim": 16}, ["num_heads", "head_dim"]),
        ("dense", {"compressor": "mean", "nsa": {"window": 3}}, []),
        ("window", {"nsa": {"window": 3, "num_selected": 9}}, ["nsa.window"]),
        ("nsa", {"remat": "full", "scan_layers": False, "implementation": "xla", "compute_dtype": "bfloat16"}, []),
        ("nsa", {"init_std": 1.0, "dropout": 0.5, "rope_theta": 10_000}, []),
        ("nsa", {"rotary_dim": tiny_config().model.head_dim}, []),  # all, as 0 says
        ("nsa", {"rotary_dim": 4}, ["rotary_dim"]),
        ("dense", {"rope_scaling": {"factor": 2.0, "original_length": 64}}, []),  # of kind none
        ("dense", {"rope_scaling": {"kind": "linear", "factor": 2.0, "beta_fast": 8.0}}, ["rope_scaling.kind"]),
    ],
)
def test_only_fields_that_change_the_function_are_compared(attention, changes, fields):
    wanted = tiny_config(model__attention=attention).model.to_dict()
    saved = {**wanted, **changes, "nsa": {**wanted["nsa"], **changes.get("nsa", {})}}
    if changes.get("attention") == "window":
        saved["nsa"]["window"] = 3
    problems = nn.function_differences(saved, wanted)
    assert [problem.message.split(":")[0] for problem in problems] == [f"config.model.{name}" for name in fields]
    assert all(problem.rule == "R054" for problem in problems)


def test_fields_that_an_old_checkpoint_lacks_have_their_default():
    wanted = tiny_config().model.to_dict()
    saved = {name: value for name, value in wanted.items() if name not in ("rope_theta", "tie_embeddings")}
    assert nn.function_differences(saved, wanted) == []
    assert [p.rule for p in nn.function_differences(saved, {**wanted, "rope_theta": 7.0})] == ["R054"]
