"""Exports load back bit-equal; imports of dense checkpoints compute what Hugging Face transformers computes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nsa_jax
from nsa_jax import export, nn
from nsa_jax.command_line import EXIT_USAGE
from nsa_jax.data.tokenizers import ByteTokenizer
from nsa_jax.hub.load import checkpoints_of
from nsa_jax.loading import LoadError

from .checkpoints import describe, write
from .make_tiny_llama import make
from .runs import small_config, write_run

LLAMA = Path(__file__).parent / "tiny_llama"


def same_parameters(first: nn.Transformer, second: nn.Transformer) -> None:
    trees = [nnx.to_pure_dict(nnx.state(model, nnx.Param)) for model in (first, second)]
    assert jax.tree.structure(trees[0]) == jax.tree.structure(trees[1])
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), *trees)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: a.dtype == b.dtype, *trees)))


def small_nsa(config) -> None:
    """Geometry in which rows of 24 tokens are longer than the window and have several blocks."""
    config.model.compute_dtype = "float32"
    n = config.model.nsa
    n.compress_block, n.compress_stride, n.select_block, n.num_selected, n.window = 4, 2, 4, 4, 8


@pytest.mark.parametrize(("dtype", "shard_bytes"), [("float32", 3000), ("bfloat16", 10**9)])
def test_an_export_loads_back_bit_equal(tmp_path, dtype, shard_bytes):
    config = small_config()
    config.model.param_dtype, config.data.files = dtype, ("a", "b")
    model = nn.Transformer(nn.ModelConfig.from_config(config, 257), rngs=nnx.Rngs(3))
    export.export(model, ByteTokenizer(), config, tmp_path, shard_bytes=shard_bytes)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert {"config.json", "tokenizer_config.json"} < set(files)
    assert ("model.safetensors" in files) == (shard_bytes == 10**9)
    loaded, tokenizer, loaded_config = nsa_jax.load(tmp_path)
    same_parameters(model, loaded)
    assert tokenizer.fingerprint == ByteTokenizer.fingerprint and loaded_config == config
    tokens = np.arange(40)[None]
    np.testing.assert_array_equal(jax.jit(model)(tokens), jax.jit(loaded)(tokens))


def test_exporting_again_leaves_no_stale_shards(tmp_path):
    config = small_config()
    model = nn.Transformer(nn.ModelConfig.from_config(config, 257), rngs=nnx.Rngs(3))
    export.export(model, ByteTokenizer(), config, tmp_path, shard_bytes=3000)
    export.export(model, ByteTokenizer(), config, tmp_path)
    assert [path.name for path in tmp_path.glob("model*")] == ["model.safetensors"]


def test_command_line_exports_a_run(tmp_path, capsys):
    write_run(tmp_path / "run", small_config())
    assert export.main([f"{tmp_path / 'run'}@1", str(tmp_path / "out")]) == 0
    same_parameters(nsa_jax.load(f"{tmp_path / 'run'}@1")[0], nsa_jax.load(tmp_path / "out")[0])
    assert export.main([str(tmp_path / "run")]) == EXIT_USAGE
    assert "name the directory to write" in capsys.readouterr().err


@pytest.mark.parametrize("step", ["1", "best"])
def test_an_export_has_no_steps(tmp_path, step):
    """The step that was asked for was passed over."""
    config = small_config()
    model = nn.Transformer(nn.ModelConfig.from_config(config, 257), rngs=nnx.Rngs(3))
    export.export(model, ByteTokenizer(), config, tmp_path)
    for read in (nsa_jax.load, checkpoints_of):
        with pytest.raises(LoadError, match=f"@{step}: an exported model has no steps. Fix: leave out @{step}"):
            read(f"{tmp_path}@{step}")


def test_damaged_exports_are_refused(tmp_path):
    config = small_config()
    model = nn.Transformer(nn.ModelConfig.from_config(config, 257), rngs=nnx.Rngs(3))
    export.export(model, ByteTokenizer(), config, tmp_path, shard_bytes=3000)
    described = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(described | {"vocab_size": 300}).replace('"vocab_size": 260', '"vocab_size": 300')
    )
    with pytest.raises(LoadError, match="must be"):
        nsa_jax.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(described))
    (tmp_path / "model-00002-of-00002.safetensors").unlink(missing_ok=True)
    sorted(tmp_path.glob("model-*.safetensors"))[0].unlink()
    with pytest.raises(LoadError, match="is missing"):
        nsa_jax.load(tmp_path)


@pytest.mark.parametrize(("field", "was", "now"), [("tie_embeddings", False, True), ("qk_norm", True, False)])
def test_arrays_that_the_config_does_not_ask_for_are_refused(tmp_path, field, was, now):
    """They were passed over, and the others computed another function than the model that was exported."""
    config = small_config()
    config.model[field] = was
    model = nn.Transformer(nn.ModelConfig.from_config(config, 257), rngs=nnx.Rngs(3))
    export.export(model, ByteTokenizer(), config, tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    described["config"]["model"][field] = now
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(LoadError, match="arrays have no place in this model: .*; config.json does not fit the arrays"):
        nsa_jax.load(tmp_path)


def check_logits(directory: Path, tokens, logits) -> None:
    def edit(config):
        config.model.compute_dtype = "float32"

    model, config = export.import_dense(directory, edit=edit)
    assert config.model.attention == "dense"
    with jax.default_matmul_precision("highest"):
        got = np.asarray(jax.jit(model)(jnp.asarray(tokens)))
    np.testing.assert_allclose(got, logits, atol=2e-5 * np.abs(logits).max())


def test_an_imported_llama_has_the_logits_of_transformers():
    """A sharded checkpoint with grouped queries; logits computed by transformers (see make_tiny_llama.py)."""
    expected = np.load(LLAMA / "expected.npz")
    check_logits(LLAMA, expected["tokens"], expected["logits"])


@pytest.mark.parametrize("tied", [False, True])
def test_an_imported_llama_has_the_logits_of_transformers_installed_here(tmp_path, tied):
    pytest.importorskip("transformers")
    pytest.importorskip("torch")
    check_logits(tmp_path, *make(tmp_path, seed=7, tied=tied, shard="1GB"))


def test_an_imported_nsa_model_begins_with_the_dense_branches():
    """On rows within window and selection, two of three branches are the dense attention; all have gradients."""
    model, config = export.import_dense(LLAMA, attention="nsa", edit=small_nsa)
    attention = model.blocks.attention
    gates = np.broadcast_to([0.005, 0.4975, 0.4975], (2, 4, 3))
    np.testing.assert_allclose(jax.nn.sigmoid(attention.gate_bias[...]), gates, rtol=1e-5)
    _, *pieces = np.split(np.asarray(attention.w_in[...]), np.cumsum([32, 16, 16, 16, 16, 16, 16]), axis=-1)
    for branch in (0, 2, 4):
        np.testing.assert_array_equal(pieces[branch], pieces[0])
        np.testing.assert_array_equal(pieces[branch + 1], pieces[1])
    assert not pieces[-1].any() and not attention.compress_key.w_2[...].any()

    dense, _ = export.import_dense(LLAMA, edit=small_nsa)
    tokens = np.load(LLAMA / "expected.npz")["tokens"][:1, :3]  # no block of 4 is complete: compression reads nothing
    bias = np.zeros((2, 4, 3), np.float32)
    bias[..., 0], bias[..., 2] = 0.0, -100.0
    bias[..., 1] = 100.0  # the selected branch alone
    attention.gate_bias[...] = jnp.asarray(bias)
    np.testing.assert_allclose(jax.jit(model)(tokens), jax.jit(dense)(tokens), atol=1e-4)


class Letters(ByteTokenizer):
    """Bytes folded into 32 ids."""

    eos_id = 0
    vocab_size = 32
    token_bytes = np.ones(32, np.int32)

    def __init__(self):
        pass

    def encode_batch(self, texts):
        return [ids % 31 + 1 for ids in super().encode_batch(texts)]


def test_step_zero_losses_are_those_of_the_models(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("hello world " * 3)
    models = {name: export.import_dense(LLAMA, attention=name, edit=small_nsa)[0] for name in ("dense", "nsa")}
    losses = export.step_zero_losses(models, Letters(), [str(text)], context=36)
    ids = np.append(Letters().encode("hello world " * 3), 0)
    for name, model in models.items():
        log_probs = np.asarray(jax.nn.log_softmax(jax.jit(model)(ids[None, :-1]))[0])
        assert losses[name] == pytest.approx(-log_probs[np.arange(36), ids[1:]].mean(), rel=1e-5)
    assert losses["dense"] != losses["nsa"]
    # In windows of one token a document of 96 is cut after 64 and goes on: 63 targets, none of them the end.
    text.write_text("hello world " * 8)
    cut = export.step_zero_losses({"dense": models["dense"]}, Letters(), [str(text)], context=1)["dense"]
    ids = Letters().encode("hello world " * 8)
    log_probs = np.asarray(jax.nn.log_softmax(models["dense"](ids[:63, None])))[:, 0]
    assert cut == pytest.approx(-log_probs[np.arange(63), ids[1:64]].mean(), rel=1e-5)
    # Of all files no more than the limit is read: the rest of a document that it cuts and the next ones stay out.
    (tmp_path / "u.txt").write_text("world")
    files = [str(text), str(tmp_path / "u.txt")]
    few = export.step_zero_losses({"dense": models["dense"]}, Letters(), files, context=1, limit=40)["dense"]
    assert few == pytest.approx(-log_probs[np.arange(39), ids[1:40]].mean(), rel=1e-5)


def test_a_config_that_does_not_fit_the_model_is_not_written(tmp_path):
    write(tmp_path / "in", describe("llama2", vocab_size=300))
    assert export.main(["--import-from", str(tmp_path / "in"), str(tmp_path / "out"), "--tokenizer=byte"]) == 0
    model, tokenizer, config = nsa_jax.load(tmp_path / "out")
    other = config.copy_and_resolve_references()
    other.model.rope_theta, other.model.remat, other.data.seq_len = 999.0, "none", 64
    with pytest.raises(LoadError, match="the model's own config differ in rope_theta: give the config that"):
        export.export(model, tokenizer, other, tmp_path / "out")
    nnx.update(model, jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(model)))
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    for write_export in (export.export, export.export_native):
        with pytest.raises(LoadError, match="parameters are bfloat16, and its config has param_dtype='float32'"):
            write_export(model, tokenizer, config, tmp_path / "out")
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_an_import_without_tokenizer_asks_for_one(tmp_path, capsys):
    assert export.main(["--import-from", str(LLAMA), str(tmp_path / "out")]) == EXIT_USAGE
    assert "name a tokenizer.json" in capsys.readouterr().err


def test_an_import_writes_one_directory(tmp_path, capsys):
    assert export.main(["--import-from", str(LLAMA), str(tmp_path / "out"), str(tmp_path / "other")]) == EXIT_USAGE
    assert "name one directory, the one to write" in capsys.readouterr().err and not any(tmp_path.iterdir())


def test_an_import_takes_the_arguments_of_a_conversion(tmp_path, capsys):
    write(tmp_path / "in", describe("llama2", vocab_size=300))
    arguments = ["--import-from", str(tmp_path / "in"), str(tmp_path / "out"), "--tokenizer", "byte"]
    assert export.main([*arguments, "--config.model.nsa.num_selected=7"]) == 0
    config = nsa_jax.load(tmp_path / "out")[2].model
    assert config.attention == "nsa" and config.nsa.num_selected == 7
    assert export.main([*arguments, "--config.model.rope_theta=3"]) == EXIT_USAGE
    assert "the checkpoint and the other options decide it" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        export.main([*arguments, "--selected=3"])
    assert "unrecognized arguments: --selected=3" in capsys.readouterr().err


def test_options_of_an_import_are_refused_without_one(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(export, "load_recorded", lambda *_: pytest.fail("weights were read"))
    arguments = [str(tmp_path / "run"), str(tmp_path / "out"), "--format=transformers"]
    for options, names in (
        (["--dtype=bfloat16", "--seq-len", "64", "--shared-kv"], "--dtype, --seq-len, --shared-kv"),
        (["--attention=nsa"], "--attention"),  # what it is by default
        (["--config.model.nsa.window=64"], "--config.model.nsa.window"),
    ):
        assert export.main([*arguments, *options]) == EXIT_USAGE
        error = capsys.readouterr().err
        assert f"error: {names}: only with --import-from=CHECKPOINT" in error


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 500.0}}, "RoPE scaling of type 'longrope'"),
        ({"hidden_act": "gelu"}, "the activation 'gelu'"),
        ({"num_hidden_layers": 1}, "have no place in this model"),
        ({"intermediate_size": 25}, "config.json does not fit"),
    ],
)
def test_checkpoints_with_other_parts_are_refused(tmp_path, change, words):
    source = tmp_path / "llama"
    shutil.copytree(LLAMA, source)
    described = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(described | change))
    with pytest.raises(LoadError, match=words):
        export.import_dense(source)
