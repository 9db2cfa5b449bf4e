"""Dense and window models become folders that transformers loads without code of this library, and come back."""

from __future__ import annotations

import json
import os
import stat

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx
from safetensors import safe_open

import nsa_jax
from nsa_jax import convert, export, nn
from nsa_jax.data.tokenizers import BPE_EOS, ByteTokenizer, HuggingFaceTokenizer, SyntheticTokenizer, train_bpe
from nsa_jax.hub import native
from nsa_jax.hub.convert import import_dense
from nsa_jax.hub.export_files import LoadError
from nsa_jax.hub.native import export_native

from .checkpoints import FAMILIES, VOCAB, describe, float32, run, stored, tokens, write
from .runs import small_config, write_run
from .test_export import same_parameters


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_folder_holds_the_bits_of_the_checkpoint(tmp_path, family, dtype):
    described = describe(family)
    arrays = write(tmp_path / "in", described, dtype=dtype, files=2)
    model, config = import_dense(tmp_path / "in")
    export_native(model, SyntheticTokenizer(VOCAB, copy=False), config, tmp_path / "out", shard_bytes=10_000)
    got = stored(tmp_path / "out")
    assert got.keys() == arrays.keys()
    for name, array in arrays.items():
        assert got[name].dtype == array.dtype
        np.testing.assert_array_equal(got[name].view(np.uint8), array.view(np.uint8), err_msg=name)
    again, config_again = import_dense(tmp_path / "out")
    same_parameters(model, again)
    assert config_again == config
    for path in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(path, framework="np") as file:
            assert file.metadata()["format"] == "pt"


@pytest.mark.parametrize(
    ("family", "kind", "architecture"),
    [
        ("llama3", "llama", "LlamaForCausalLM"),
        ("llama, biased", "llama", "LlamaForCausalLM"),
        ("mistral", "llama", "LlamaForCausalLM"),
        ("qwen2", "qwen2", "Qwen2ForCausalLM"),
        ("qwen3, biased", "qwen3", "Qwen3ForCausalLM"),
    ],
)
def test_a_folder_names_the_class_that_computes_the_model(tmp_path, family, kind, architecture):
    write(tmp_path / "in", describe(family))
    model, config = import_dense(tmp_path / "in")
    export_native(model, SyntheticTokenizer(VOCAB, copy=False), config, tmp_path / "out")
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (described["model_type"], described["architectures"]) == (kind, [architecture])


@pytest.fixture(scope="module")
def dense_run(tmp_path_factory):
    """A workdir of a byte-level dense model with a padded vocabulary, and what its trainer summarised."""
    path, config = tmp_path_factory.mktemp("runs") / "dense", small_config()
    config.model.attention, config.name = "dense", "dense"
    write_run(path, config)
    validation = {"step": 2, "val/loss": 3.0, "val/bits_per_byte": 4.25}
    (path / "summary.json").write_text(json.dumps({"validation": validation}))
    return path


def test_a_run_becomes_a_folder_with_its_metrics(dense_run, tmp_path, capsys):
    out = tmp_path / "out"
    assert export.main([str(dense_run), str(out), "--format=transformers"]) == 0
    described = json.loads((out / "config.json").read_text())
    model, tokenizer, _ = nsa_jax.load(dense_run)
    assert described["vocab_size"] == 260 == stored(out)["model.embed_tokens.weight"].shape[0]
    assert described["eos_token_id"] == tokenizer.eos_id == 256
    card = (out / "README.md").read_text()
    for row in ("| training steps | 2 |", "| val/loss | 3.0000 |", "| val/bits_per_byte | 4.2500 |"):
        assert row in card
    mask = os.umask(0)
    os.umask(mask)
    assert {stat.S_IMODE(path.stat().st_mode) for path in out.iterdir()} == {0o666 & ~mask}
    assert export.main([f"{dense_run}@best", str(out), "--format=transformers"]) == 0
    card = (out / "README.md").read_text()
    assert "| val/loss | 2.0000 |" in card and "bits_per_byte" not in card

    assert convert.main([str(out), str(tmp_path / "back"), "--attention=dense"]) == 0
    back, letters_of, _ = nsa_jax.load(tmp_path / "back")
    same_parameters(nsa_jax.load(f"{dense_run}@best")[0], back)
    text = "Bytes: \u00e4\u00f6 \U0001f600\t\n\x00"
    np.testing.assert_array_equal(letters_of.encode(text), ByteTokenizer().encode(text))
    assert letters_of.decode(letters_of.encode(text)) == text and letters_of.eos_id == 256


def test_models_without_a_counterpart_are_refused_and_nothing_is_written(tmp_path, capsys):
    config = small_config()
    config.model.attention, config.model.qkv_bias, config.model.out_bias = "window", True, True
    write_run(tmp_path / "run", config)
    out = tmp_path / "out"
    assert export.main([str(tmp_path / "run"), str(out), "--format=transformers"]) == 2
    error = capsys.readouterr().err
    assert "window attention beside out_bias" in error and "leave out --format=transformers" in error
    assert not out.exists()


def test_a_tokenizer_that_qwen2_would_read_as_its_own_is_told(tmp_path, caplog):
    """transformers takes normalizer and words for this class from its own code, and got other ids without a word."""
    config = small_config()
    config.model.attention, config.model.qkv_bias = "dense", True
    model = nn.Transformer(nn.ModelConfig.from_config(config, 257), rngs=nnx.Rngs(0))
    export_native(model, ByteTokenizer(), config, tmp_path / "byte")
    assert "load it with PreTrainedTokenizerFast" in caplog.text
    assert (
        'tokenizer = PreTrainedTokenizerFast.from_pretrained("DIRECTORY")' in (tmp_path / "byte/README.md").read_text()
    )

    caplog.clear()
    made = tokenizers.Tokenizer.from_str(train_bpe(["some text"], 257))
    splits = tokenizers.pre_tokenizers.Split(tokenizers.Regex(native._QWEN2_WORDS), "isolated")
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([splits, level])
    made.normalizer = tokenizers.normalizers.NFC()
    export_native(model, HuggingFaceTokenizer(made.to_str(), eos=BPE_EOS), config, tmp_path / "qwen")
    assert not caplog.records


MIXED = {"layer_pattern": ("window", "dense"), "num_layers": 4}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("mistral", {}),
        ("qwen2", {"qkv_bias": True}),
        ("qwen3", {"qk_norm": True}),
        ("qwen2", {"qkv_bias": True, **MIXED}),
        ("qwen3", {"qk_norm": True, **MIXED}),
    ],
)
def test_window_attention_becomes_the_sliding_window_of_a_family(tmp_path, kind, changes):
    config = small_config()
    config.model.attention = "window"
    config.model.update(changes)
    model = nn.Transformer(nn.ModelConfig.from_config(config, 257), rngs=nnx.Rngs(0))
    export_native(model, ByteTokenizer(), config, tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    assert (described["model_type"], described["sliding_window"]) == (kind, 12)
    types = ["sliding_attention", "full_attention"] * 2 if "layer_pattern" in changes else None
    assert described.get("layer_types") == types
    back, back_config = import_dense(tmp_path, attention="window", edit=float32)
    same_parameters(model, back)
    assert back_config.model.nsa.window == 12
    np.testing.assert_array_equal(run(model, tokens(40)), run(back, tokens(40)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"value_head_dim": 16}, "value_head_dim=16"),
        ({"rotary_dim": 4}, "rotary_dim=4"),
        ({"logit_soft_cap": 30.0}, "logit_soft_cap=30.0"),
        ({"out_bias": True}, "out_bias without qkv_bias"),
        ({"qk_norm": True, "qkv_bias": True}, "qk_norm with qkv_bias alone"),
        ({"mlp_bias": True, "qkv_bias": True}, "mlp_bias beside"),
        ({"layer_pattern": ("window", "dense"), "num_layers": 2}, "window attention in some layers, but neither"),
    ],
)
def test_options_without_a_counterpart_are_named(tmp_path, changes, words):
    config = small_config()
    config.model.attention = "dense"
    for name, value in changes.items():
        config.model[name] = value
    model = nn.Transformer(nn.ModelConfig.from_config(config, 257), rngs=nnx.Rngs(0))
    with pytest.raises(LoadError, match=words):
        export_native(model, ByteTokenizer(), config, tmp_path / "out")
    assert not (tmp_path / "out").exists()
