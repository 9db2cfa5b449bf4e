"""Dense checkpoints of every family become models here; NSA begins as the dense model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nsa_jax
from nsa_jax import convert, evaluate, export, generate
from nsa_jax.data.tokenizers import HuggingFaceTokenizer, load_tokenizer
from nsa_jax.hub.convert import GATE, gate_bias, import_dense
from nsa_jax.hub.export_files import Arrays, LoadError

from .checkpoints import (
    FAMILIES,
    LLAMA3,
    UNSCALED,
    VOCAB,
    YARN,
    describe,
    float32,
    letters,
    logits,
    run,
    tokens,
    write,
)  # fmt: skip

# Import


@pytest.mark.parametrize("family", UNSCALED)
def test_an_imported_model_computes_its_familys_formulas(tmp_path, family):
    described = describe(family)
    arrays = write(tmp_path, described, files=1 + len(family) % 3)
    model, config = import_dense(tmp_path, edit=float32)
    assert config.model.param_dtype == "float32" and config.data.seq_len == 128
    row = tokens(48)
    want = logits(described, arrays, row)
    np.testing.assert_allclose(run(model, row), want, atol=2e-5 * np.abs(want).max())


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("llama3", {}, {"kind": "llama3", "factor": 8.0, "original_length": 64, "high_freq_factor": 4.0}),
        ("llama3, tied", {}, {"kind": "llama3", "factor": 8.0, "original_length": 64, "low_freq_factor": 1.0}),
        ("qwen2.5, yarn", {}, {"kind": "yarn", "factor": 4.0, "original_length": 32, "attention_factor": 0.0}),
        (
            "qwen2",
            {"rope_scaling": YARN | {"attention_factor": 1.5, "beta_fast": 16, "beta_slow": None}},
            {"attention_factor": 1.5, "beta_fast": 16.0, "beta_slow": 1.0},
        ),
        (
            "qwen2",
            {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 32}},
            {"factor": 4.0, "original_length": 32},
        ),
        ("llama2", {"rope_scaling": {"type": "linear", "factor": 2}}, {"kind": "linear", "factor": 2.0}),
        (
            "llama2",
            {"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 7}},
            {"kind": "dynamic", "factor": 2.0, "original_length": 128},  # transformers reads the longest row here
        ),
        ("mistral", {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}, {"attention_factor": 1.0}),
        ("llama2", {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, {"kind": "none"}),
    ],
)
def test_scaling_of_rope_is_read_in_every_spelling(tmp_path, family, changes, expected):
    write(tmp_path, describe(family, **changes))
    config = import_dense(tmp_path)[1].model
    got = config.rope_scaling.to_dict()
    assert {name: got[name] for name in expected} == expected
    want = {"llama3": 500_000.0, "llama3, tied": 500_000.0, "mistral": 1_000_000.0}.get(family, 10_000.0)
    assert config.rope_theta == (5.0 if "rope_parameters" in changes else want)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama2", {"model_type": "gemma3"}, "a model of type 'gemma3' .known types are llama, mistral, qwen2, qwen3"),
        ("llama2", {"model_type": None}, "a model of type None"),
        ("llama2", {"hidden_act": "gelu"}, "the activation 'gelu'"),
        ("llama2", {"quantization_config": {"quant_method": "gptq"}}, "quantized weights"),
        ("llama2", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "RoPE scaling of type 'longrope'"),
        ("llama2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ("qwen2", {"is_causal": False}, "attention to later tokens, is_causal False"),
        ("qwen3", {"rope_scaling": YARN | {"truncate": False}}, "YaRN whose range is not rounded"),
        ("qwen3", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differs between layers"),
        (
            "llama2",
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "low_freq_factor=None: must be a positive",
        ),
        ("llama2", {"rope_scaling": {"rope_type": "linear"}}, "factor=None: must be a positive number"),
        ("llama2", {"rope_scaling": LLAMA3 | {"factor": 0.5}}, "factor=0.5: "),
        ("llama2", {"attention_bias": "yes"}, "attention_bias='yes': must be true or false"),
        ("llama2", {"attention_bias": True}, "no array 'model.layers.0.self_attn.q_proj.bias'"),
        ("llama2", {"model_type": "qwen3", "head_dim": 8}, "no array 'model.layers.0.self_attn.q_norm.weight'"),
        ("llama2", {"tie_word_embeddings": True, "num_hidden_layers": 1}, "9 arrays have no place"),
    ],
)
def test_what_is_missing_here_is_named_before_an_array_is_read(tmp_path, monkeypatch, family, changes, words):
    described = describe(family)
    write(tmp_path, described)
    described = {name: value for name, value in (described | changes).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(described))
    monkeypatch.setattr(Arrays, "__getitem__", lambda *_: pytest.fail("an array was read"))
    monkeypatch.setattr(Arrays, "parts", lambda *_: pytest.fail("an array was read"))
    with pytest.raises(LoadError, match=words):
        import_dense(tmp_path)


def test_weights_in_pytorchs_format_are_refused(tmp_path):
    write(tmp_path, describe("llama2"))
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(LoadError, match="weights are in PyTorch's format.* save_pretrained"):
        import_dense(tmp_path)


SLIDING = [
    ("mistral", {"sliding_window": 16}, ()),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}, ()),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, ("dense", "window")),
    (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        ("window", "dense"),
    ),
]


@pytest.mark.parametrize(("family", "changes", "pattern"), SLIDING)
def test_layers_of_a_sliding_window_need_window_attention_or_short_rows(tmp_path, family, changes, pattern):
    write(tmp_path, describe(family, **changes))
    for kinds in ({"attention": "dense"}, {"attention": "nsa"}, {"layer_pattern": ["nsa", "dense"]}):
        with pytest.raises(LoadError, match="sliding-window attention.* read 16 tokens, and rows have 128") as caught:
            import_dense(tmp_path, **kinds)
        assert "attention='window'" in str(caught.value)
    model, config = import_dense(tmp_path, edit=float32, seq_len=16)
    row = tokens(40)
    window, config = import_dense(tmp_path, attention="window", edit=float32)
    assert config.model.nsa.window == 16 and config.model.layer_pattern == pattern
    assert window.config.kinds == (pattern or ("window",))
    got, want = run(window, row), run(model, row)
    np.testing.assert_allclose(got[:16], want[:16], atol=1e-5 * np.abs(want).max())
    assert np.abs(got[16:] - want[16:]).max() > 0.01 * np.abs(want).max()


def test_layer_types_that_do_not_fit_are_refused(tmp_path):
    for types in (["sliding_attention"], ["sliding_attention", "chunked_attention"]):
        changes = {"use_sliding_window": True, "sliding_window": 16, "layer_types": types}
        write(tmp_path, describe("qwen3", **changes))
        with pytest.raises(LoadError, match="layer_types=.*must be 2 times one of full_attention, sliding_attention"):
            import_dense(tmp_path, attention="window")


def test_a_pattern_of_nsa_and_dense_layers_begins_as_the_dense_model(tmp_path):
    """On rows within the window, where each layer's NSA is its dense attention."""
    write(tmp_path, describe("qwen3"))
    dense, _ = import_dense(tmp_path, edit=float32)
    mixed, config = import_dense(tmp_path, layer_pattern=("nsa", "dense"), gate=0.0, edit=float32)
    assert mixed.config.kinds == config.model.layer_pattern == ("nsa", "dense")
    want = run(dense, tokens(40))
    np.testing.assert_allclose(run(mixed, tokens(40)), want, atol=2e-5 * np.abs(want).max())
    last = mixed.blocks.layer_1.attention.w_in[...]
    np.testing.assert_array_equal(last, dense.blocks.attention.w_in[...][1:])
    with pytest.raises(LoadError, match="layer_pattern=.*3 kinds cannot be repeated over num_layers=2"):
        import_dense(tmp_path, layer_pattern=("nsa", "dense", "dense"))


@pytest.mark.parametrize("changes", [{"sliding_window": 128}, {"sliding_window": None}])
def test_a_window_as_long_as_all_rows_is_none(tmp_path, changes):
    write(tmp_path, describe("mistral", **changes))
    assert import_dense(tmp_path)[1].model.attention == "dense"


@pytest.mark.parametrize(
    ("stored_as", "asked", "expected"),
    [
        (np.float32, None, "float32"),
        (np.float16, None, "float32"),
        (jnp.bfloat16, None, "bfloat16"),
        (jnp.bfloat16, "float32", "float32"),
        (np.float32, "bfloat16", "bfloat16"),
    ],
)
def test_parameters_have_the_dtype_that_was_asked_for_or_the_checkpoints(tmp_path, stored_as, asked, expected):
    arrays = write(tmp_path, describe("qwen2"), dtype=stored_as)
    model, config = import_dense(tmp_path, dtype=asked)
    assert config.model.param_dtype == expected
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(model)} == {expected}
    want = arrays["model.embed_tokens.weight"].astype(getattr(jnp, expected))
    np.testing.assert_array_equal(np.asarray(model.embedding[...]), want)
    want = arrays["model.layers.1.self_attn.q_proj.weight"].astype(getattr(jnp, expected))
    np.testing.assert_array_equal(np.asarray(model.blocks.attention.w_in[...])[1, :, :32], want.T)


def test_large_arrays_are_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("nsa_jax.hub.export_files._BLOCK_BYTES", 300)  # two rows
    arrays = write(tmp_path, describe("llama2"))
    read = [rows for rows, _ in Arrays(tmp_path).parts("model.layers.0.mlp.down_proj.weight")]
    assert len(read) == 32
    model, _ = import_dense(tmp_path)
    want = arrays["model.layers.0.mlp.down_proj.weight"].T
    np.testing.assert_array_equal(np.asarray(model.blocks.mlp.w_out[...])[0], want)


# NSA


def geometry(config, window: int = 32, num_selected: int = 2) -> None:
    float32(config)
    n = config.model.nsa
    n.compress_block, n.compress_stride, n.select_block, n.num_initial, n.num_local = 8, 4, 16, 1, 1
    n.window, n.num_selected = window, num_selected


def error(got: np.ndarray, want: np.ndarray) -> float:
    """The largest difference as a share of the largest logit."""
    return float(np.abs(got - want).max() / np.abs(want).max())


@pytest.mark.parametrize("family", FAMILIES)
def test_nsa_without_gate_is_the_dense_model_on_short_rows(tmp_path, family):
    write(tmp_path, describe(family))
    dense, _ = import_dense(tmp_path, edit=geometry)
    nsa, _ = import_dense(tmp_path, attention="nsa", gate=0.0, edit=geometry)
    row = tokens(64)
    got, want = run(nsa, row), run(dense, row)
    assert error(got[:32], want[:32]) <= 2e-5  # min(w, n l') = 32
    assert error(got[32:], want[32:]) > 1e-3
    begun, _ = import_dense(tmp_path, attention="nsa", edit=geometry)
    assert 1e-4 < error(run(begun, row)[:32], want[:32]) <= 0.02


@pytest.mark.parametrize(("window", "num_selected", "short"), [(24, 4, 24), (48, 2, 32)])
def test_rows_are_short_up_to_the_window_and_to_what_is_selected(tmp_path, window, num_selected, short):
    write(tmp_path, describe("qwen3"))

    def edit(config):
        geometry(config, window, num_selected)

    nsa, dense = (import_dense(tmp_path, attention=name, gate=0.0, edit=edit)[0] for name in ("nsa", "dense"))
    row = tokens(64)
    differs = np.abs(run(nsa, row) - run(dense, row)).max(-1) > 1e-4
    assert not differs[:short].any() and differs[short : short + 8].any()


def test_shared_keys_and_values_are_the_checkpoints_once(tmp_path):
    write(tmp_path, describe("qwen2"))
    dense, _ = import_dense(tmp_path, edit=geometry)
    shared, config = import_dense(tmp_path, attention="nsa", shared_kv=True, gate=0.0, edit=geometry)
    assert config.model.nsa.shared_kv
    row = tokens(64)
    got, want = run(shared, row), run(dense, row)
    assert error(got[:32], want[:32]) <= 2e-5 and error(got[32:], want[32:]) > 1e-3
    columns = dense.blocks.attention.w_in.shape[-1]
    np.testing.assert_array_equal(shared.blocks.attention.w_in[..., :columns], dense.blocks.attention.w_in[...])
    np.testing.assert_array_equal(shared.blocks.attention.b_in[...], dense.blocks.attention.b_in[...])
    assert not np.asarray(shared.blocks.attention.w_in[..., columns:]).any()  # gates

    def by_mean_keys(config):
        geometry(config)
        config.model.nsa.selector = "mean_key"

    moba, _ = import_dense(tmp_path, attention="nsa", shared_kv=True, edit=by_mean_keys)
    got = run(moba, row)
    assert error(got[:32], want[:32]) <= 2e-5 and error(got[32:], want[32:]) > 1e-3
    with pytest.raises(ValueError, match="must be False for layers of the kinds dense"):
        import_dense(tmp_path, shared_kv=True)


def test_every_parameter_of_a_converted_model_can_learn(tmp_path):
    """The mean's share of phi begins with a zero matrix, whose own gradient opens it; gates open by their slope."""
    write(tmp_path, describe("qwen3"))
    model, _ = import_dense(tmp_path, attention="nsa", edit=geometry)
    assert not np.asarray(model.blocks.attention.compress_key.w_2[...]).any()
    row = jnp.asarray(tokens(64)[None], jnp.int32)

    @jax.jit
    def gradients(bias):
        graphdef, params = nnx.split(model)
        params = nnx.to_pure_dict(params)
        params["blocks"]["attention"]["gate_bias"] = jnp.broadcast_to(bias, (2, 4, 3))
        loss = jax.grad(lambda p: jax.nn.log_softmax(nnx.merge(graphdef, p)(row))[0, :, 5].mean())
        return loss(params)["blocks"]["attention"]

    def opening(attention):  # of the compressed branch, as a share of the others'
        gate = np.abs(np.asarray(attention["gate_bias"]))  # [layers, N, 3]
        return gate[..., 0].mean() / gate[..., 1:].mean()

    begun, closed = (gradients(jnp.asarray(gate_bias(eps), jnp.float32)) for eps in (GATE, 0.0))
    assert opening(begun) > 2e-3 and opening(closed) < 1e-9
    for phi in ("compress_key", "compress_value"):
        assert np.abs(np.asarray(begun[phi]["w_2"])).max() > 1e-9


def test_gates_begin_as_asked():
    for eps in (0.0, 1e-6, GATE, 0.5, 0.99):
        gates = np.asarray(jax.nn.sigmoid(jnp.asarray(gate_bias(eps), jnp.float32)))
        np.testing.assert_allclose(gates, [eps, (1 - eps) / 2, (1 - eps) / 2], rtol=2e-5, atol=1e-12)
    assert (np.asarray(jax.nn.sigmoid(jnp.asarray(gate_bias(0.0), jnp.bfloat16))) < 1e-12)[0]


@pytest.mark.parametrize("gate", [-0.1, 1.0, float("nan")])
def test_gates_out_of_range_are_refused(tmp_path, gate):
    with pytest.raises(ValueError, match="gate=.*must be in"):
        import_dense(tmp_path, attention="nsa", gate=gate)


# Memory


_MEASURED = """
import resource, sys
from nsa_jax import convert
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
small, large, output, attention = sys.argv[1:]
options = [f"--attention={attention}", "--tokenizer=byte"]
assert convert.main([small, output, *options]) == 0
before = peak()
assert convert.main([large, output, *options]) == 0
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_a_conversion_needs_little_more_memory_than_the_checkpoint_is_large(tmp_path, attention):
    # With heads as large as those below, so that what XLA needs to compile is not taken for a copy of weights.
    write(tmp_path / "small", describe("llama3", vocab_size=512, head_dim=64), dtype=jnp.bfloat16)
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "vocab_size": 16_000}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4}
    write(tmp_path / "large", describe("llama3", **sizes, **heads), dtype=jnp.bfloat16, files=3)
    size = sum(path.stat().st_size for path in (tmp_path / "large").glob("*.safetensors"))
    assert size > 400e6
    arguments = [str(tmp_path / name) for name in ("small", "large", "output")]
    done = subprocess.run(
        # A shell between: what starts as this process has its peak already.
        ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", _MEASURED, *arguments, attention],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(nsa_jax.__file__).parent.parent)},
    )
    assert done.returncode == 0, done.stderr
    ratio = int(done.stdout.split()[-1]) / size
    print(f"{attention}: {ratio:.3f} of {size / 1e6:.0f} MB")
    assert 0.9 < ratio < 1.3


# Tokenizers


def test_the_tokenizer_and_its_chat_template_are_kept(tmp_path):
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    write(tmp_path / "in", describe("qwen3"))
    letters(tmp_path / "in", template)
    assert convert.main([str(tmp_path / "in"), str(tmp_path / "nsa")]) == 0
    _, tokenizer, config = nsa_jax.load(tmp_path / "nsa")
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    kept = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, "generation_config": {}}
    assert tokenizer.settings == kept
    assert config.model.attention == "nsa" and tokenizer.eos_token == "</s>"
    assert load_tokenizer(config).fingerprint == tokenizer.fingerprint
    assert config.data.tokenizer_path == str(tmp_path / "nsa" / "tokenizer.json")

    (tmp_path / "in" / "chat_template.jinja").write_text("{{ newer }}")  # where transformers 5 puts it
    assert convert.main([str(tmp_path / "in"), str(tmp_path / "dense"), "--attention=dense"]) == 0
    assert export.main([str(tmp_path / "dense"), str(tmp_path / "out"), "--format=transformers"]) == 0
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == "{{ newer }}" and settings["eos_token"] == "</s>"
    assert not settings.keys() & {"kind", "fingerprint", "auto_map", "generation_config"}


def test_a_pad_token_that_is_null_is_none(tmp_path):
    write(tmp_path / "in", describe("llama2"))
    letters(tmp_path / "in")
    settings = json.loads((tmp_path / "in" / "tokenizer_config.json").read_text())
    (tmp_path / "in" / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": None}))
    assert convert.main([str(tmp_path / "in"), str(tmp_path / "dense"), "--attention=dense"]) == 0
    assert export.main([str(tmp_path / "dense"), str(tmp_path / "out"), "--format=transformers"]) == 0
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["pad_token"] == "</s>"
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["pad_token_id"] == 0


def test_a_whole_file_counts_beside_an_index_as_in_transformers(tmp_path, caplog):
    """save_pretrained leaves the other kind of an earlier save where it is."""
    c = describe("llama2")
    arrays = write(tmp_path, c)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": "gone.safetensors"}}')
    model, _ = import_dense(tmp_path, edit=float32)
    np.testing.assert_allclose(run(model, tokens(20)), logits(c, arrays, tokens(20)), atol=1e-4)
    assert "holds model.safetensors and model.safetensors.index.json: the first is read" in caplog.text


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"])
def test_links_out_of_a_checkpoint_are_not_followed(tmp_path, capsys, name):
    write(tmp_path / "in", describe("llama2"))
    letters(tmp_path / "in")
    (tmp_path / "secret").write_text("a secret")
    (tmp_path / "in" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "in" / name).symlink_to(tmp_path / "secret")
    assert convert.main([str(tmp_path / "in"), str(tmp_path / "out")]) == 2
    assert "outside of the model's directory" in capsys.readouterr().err


def test_a_tokenizer_with_more_ids_than_the_embedding_has_rows_is_refused(tmp_path, capsys):
    write(tmp_path / "in", describe("llama2"))
    letters(tmp_path / "in", size=VOCAB + 5)
    assert convert.main([str(tmp_path / "in"), str(tmp_path / "out")]) == 2
    assert "its ids go up to 68, but the embedding has 64 rows" in capsys.readouterr().err
    assert convert.main([str(tmp_path / "in"), str(tmp_path / "out"), "--tokenizer=byte"]) == 2
    error = capsys.readouterr().err
    assert "--tokenizer=byte: its ids go up to 256, but the embedding has 64 rows" in error
    assert not (tmp_path / "out").exists()


# The command line


def test_a_converted_model_is_generated_from_and_evaluated(tmp_path, capsys):
    write(tmp_path / "in", describe("qwen3"))
    letters(tmp_path / "in")
    out, text = str(tmp_path / "out"), tmp_path / "text.txt"
    text.write_text("Hello there " * 20)
    options = ["--gate=0", "--shared-kv", "--dtype=float32", "--text", str(text), "--config.model.nsa.num_selected=7"]
    assert convert.main([str(tmp_path / "in"), out, *options]) == 0
    assert nsa_jax.load(out)[2].model.nsa.num_selected == 7
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "loss at step 0" in line]
    dense, nsa = (float(words[5]) for words in lines)
    assert dense == pytest.approx(nsa, abs=5e-3)  # in bfloat16; the text is shorter than the window
    assert generate.main([out, "--prompt", "Hello", "--max-tokens=3", "--quiet"]) == 0
    assert evaluate.main([out, "--tasks=perplexity", f"--files={text}", "--batch-size=1"]) == 0
    assert evaluate.main([out, "--tasks=validation"]) == 2 and "has no validation" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["NONE", "OUT"], "is no directory; give a checkpoint's directory, or a hub id"),
        (["IN", "IN"], "is the checkpoint itself"),
        (["IN", "OUT"], "name a tokenizer.json with --tokenizer"),
        (["IN", "FILE", "--tokenizer=byte"], "FILE"),
        (["EMPTY", "OUT"], "config.json is missing"),
        (["IN", "OUT", "--gate=1"], "argument --gate"),
        (["IN", "OUT", "--gate=-0.1"], "argument --gate"),
        (["IN", "OUT", "--gate=nan"], "argument --gate"),
        (["IN", "OUT", "--dtype=int8"], "argument --dtype"),
        (["IN", "OUT", "--seq-len=0"], "argument --seq-len"),
        (["IN", "OUT", "--attention=sparse"], "argument --attention"),
        (["IN", "OUT", "--tokenizer=byte", "--dense-layers=1"], "--dense-layers: name files with --text"),
        (["IN", "OUT", "--tokenizer=byte", "--dense-layers=1", "--text", "FILE"], "no document has 129 tokens"),
        (["IN", "OUT", "--dense-layers=1", "--layer-pattern=nsa,dense"], "not allowed with argument"),
        (["IN", "OUT", "--tokenizer=byte", "--nsa-layers=1"], "--nsa-layers: goes with --dense-layers"),
        (["IN", "OUT", "--nsa-layers=-1"], "argument --nsa-layers"),
        (["IN", "OUT", "--gate=0.1", "--attention=dense"], "no layer has NSA, whose gate it is; leave it out"),
        (["IN", "OUT", "--shared-kv", "--layer-pattern=window,dense"], "False for layers of the kinds window, dense"),
        (["IN", "OUT", "--selected=3"], "unrecognized arguments: --selected=3"),
        (["IN", "OUT", "--config.model.nsa.num_selectd=3"], "did you mean config.model.nsa.num_selected"),
        (["IN", "OUT", "--config.model.rope_theta=3"], "--config.model.rope_theta: the checkpoint"),
        (["IN", "OUT", "--config.model.nsa.gate_bias=2"], "nsa.gate_bias: gates begin where --gate says"),
        (["IN", "OUT", "--tokenizer=byte", "--config.model.nsa.select_block=40"], "must be a multiple of"),
        (["IN"], "OUTPUT"),
    ],
)
def test_bad_arguments_are_one_line(tmp_path, capsys, arguments, words):
    write(tmp_path / "in", describe("llama2", vocab_size=300))
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("a file")
    places = {"IN": "in", "OUT": "out", "FILE": "file", "EMPTY": "empty", "NONE": "none"}
    given = [str(tmp_path / places[word]) if word in places else word for word in arguments]
    try:
        status = convert.main(given)
    except SystemExit as exit:  # of argparse
        status = exit.code
    error = capsys.readouterr().err
    assert status == 2 and "Traceback" not in error
    assert words.replace("FILE", str(tmp_path / "file")) in error.strip().splitlines()[-1]
    assert (tmp_path / "in" / "model.safetensors").exists()


def test_hub_ids_are_fetched(tmp_path, monkeypatch, capsys):
    import huggingface_hub

    write(tmp_path / "in", describe("llama2", vocab_size=300))
    asked = []

    def fetch(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(tmp_path / "in")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert convert.main(["owner/model", "out", "--tokenizer=byte"]) == 0
    assert asked[0][0] == "owner/model" and "model*.safetensors" in asked[0][1]

    (tmp_path / "in" / "model.safetensors").unlink()  # weights in PyTorch's format alone, which are not fetched
    assert convert.main(["owner/model", "out", "--tokenizer=byte"]) == 2
    assert "owner/model: holds no model.safetensors and no" in (line := capsys.readouterr().err)
    assert "Fix: load it with transformers, save it with save_pretrained" in line
    (tmp_path / "in" / "adapter_config.json").touch()
    assert convert.main(["owner/model", "out", "--tokenizer=byte"]) == 2
    assert "holds an adapter (LoRA)" in capsys.readouterr().err

    def offline(name, allow_patterns):
        raise OSError("cannot find\nthe files")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    assert convert.main(["owner/model", "out", "--tokenizer=byte"]) == 2
    line = capsys.readouterr().err.strip().splitlines()
    assert len(line) == 1 and "not to be had from the Hugging Face hub (OSError: cannot find the files)" in line[0]

    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert convert.main(["owner/model", "out", "--tokenizer=byte"]) == 2
    assert "without huggingface_hub no hub id" in capsys.readouterr().err
