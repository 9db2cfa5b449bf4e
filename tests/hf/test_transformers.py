"""What is computed here is what Hugging Face transformers computes, both ways, for every family of dense models.

`make test-hf` runs this in an environment of its own, with PyTorch and transformers. Models are tiny and random, with
weights so large that attention matters. Errors are shares of the largest logit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from flax import nnx
from safetensors.numpy import load_file, save_file

import nsa_jax
from nsa_jax import convert, export, nn
from nsa_jax.config import default_config
from nsa_jax.data.tokenizers import (
    BPE_EOS,
    ByteTokenizer,
    HuggingFaceTokenizer,
    SyntheticTokenizer,
    load_tokenizer,
    train_bpe,
)
from nsa_jax.generator import Generator
from nsa_jax.hub import families
from nsa_jax.hub.convert import import_dense
from nsa_jax.hub.native import export_native
from nsa_jax.sampling import Sampling
from tests.tools.test_first_words import sentencepiece

LENGTH, VOCAB = 512, 96
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 4}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3 | {"rope_theta": 500_000.0}}),
    "llama3, tied": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True, "head_dim": 16}),
    "llama, biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "llama, dynamic": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 256},
    ),
    "smollm2": ("Llama", {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}}),
    "mistral": ("Mistral", {"head_dim": 32, "sliding_window": None}),
    "mistral, window": ("Mistral", {"sliding_window": 64}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2.5, yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen2, yarn with a factor": ("Qwen2", {"rope_parameters": YARN | {"attention_factor": 1.2, "beta_fast": 16.0}}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3, yarn": ("Qwen3", {"head_dim": 32, "rope_parameters": YARN | {"rope_theta": 1e6}}),
    "qwen3, biased": ("Qwen3", {"head_dim": 32, "attention_bias": True}),
    "qwen2, window from layer 1": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen3, every other layer": (
        "Qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_hidden_layers": 4,
        },
    ),
}
SLIDING = {
    "mistral, window": ("window",),
    "qwen2, window from layer 1": ("dense", "window", "window"),
    "qwen3, every other layer": ("window", "dense"),
}
FULL = [name for name in MODELS if name not in SLIDING]


def make(name: str, seed: int = 0):
    """A random model of transformers."""
    family, changes = MODELS[name]
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": LENGTH,
        "rms_norm_eps": 1e-5,
        "bos_token_id": None,
        "eos_token_id": VOCAB - 1,
        "attn_implementation": "eager",
    }
    config = getattr(transformers, f"{family}Config")(**fields | json.loads(json.dumps(changes)))
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            if "norm" in label:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.5 if label.endswith("bias") else 1.5 * parameter.shape[-1] ** -0.5)
    return model


def theirs(model, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.as_tensor(tokens)).logits.float().numpy()


def ours(model: nn.Transformer, tokens: np.ndarray) -> np.ndarray:
    with jax.default_matmul_precision("highest"):
        return np.asarray(jax.jit(model)(jnp.asarray(tokens, jnp.int32)))


def draw(length: int = LENGTH, rows: int = 1) -> np.ndarray:
    return np.random.default_rng(5).integers(0, VOCAB - 1, (rows, length))


def error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(got - want).max() / np.abs(want).max())


def float32(config) -> None:
    config.model.compute_dtype = "float32"


@pytest.fixture
def saved(request, tmp_path):
    """A model of transformers and its folder."""
    model = make(request.param)
    model.save_pretrained(tmp_path / "in", max_shard_size="100KB")
    return model, tmp_path / "in"


@pytest.mark.parametrize("saved", FULL, indirect=True)
def test_imported_models_have_the_logits_of_transformers(saved, request):
    model, path = saved
    tokens = draw()
    want = theirs(model, tokens)
    other = tokens.copy()
    other[0, : LENGTH // 2] = other[0, : LENGTH // 2][::-1]
    assert error(theirs(model, other)[:, -1], want[:, -1]) > 1e-3, "attention matters"
    got = error(ours(import_dense(path, edit=float32)[0], tokens), want)
    print(f"{request.node.callspec.id}: {got:.1e}")
    assert got <= 2e-5


@pytest.mark.parametrize("saved", SLIDING, indirect=True)
def test_a_sliding_window_is_imported_as_window_attention(saved, request):
    model, path = saved
    tokens = draw()
    window, config = import_dense(path, attention="window", edit=float32)
    assert config.model.nsa.window == 64 and window.config.kinds == SLIDING[request.node.callspec.id]
    want = theirs(model, tokens)
    assert error(ours(window, tokens), want) <= 2e-5
    short = ours(import_dense(path, seq_len=64, edit=float32)[0], tokens[:, :64])
    assert error(short, want[:, :64]) <= 2e-5


@pytest.mark.parametrize("saved", ["mistral", "qwen2"], indirect=True)
def test_a_sliding_window_that_is_not_named_is_that_of_transformers(saved, monkeypatch):
    """The default of transformers is 4,096; here both sides read it as 64, so that rows are longer."""
    _, path = saved
    described = json.loads((path / "config.json").read_text())
    for name in ("sliding_window", "layer_types", "max_window_layers"):
        described.pop(name, None)
    if described["model_type"] == "qwen2":
        described |= {"use_sliding_window": True, "max_window_layers": 1}
    (path / "config.json").write_text(json.dumps(described))
    assert transformers.AutoConfig.from_pretrained(path).sliding_window == families._SLIDING_WINDOW
    there = transformers.AutoModelForCausalLM.from_pretrained(path, sliding_window=64, attn_implementation="eager")
    monkeypatch.setattr(families, "_SLIDING_WINDOW", 64)
    tokens = draw()
    here, config = import_dense(path, attention="window", edit=float32)
    assert config.model.nsa.window == 64 and error(ours(here, tokens), theirs(there, tokens)) <= 2e-5


def test_another_head_beside_tied_embeddings_is_that_of_transformers(tmp_path):
    make("llama3, tied").save_pretrained(tmp_path)
    arrays = load_file(tmp_path / "model.safetensors")
    arrays["lm_head.weight"] = np.flip(arrays["model.embed_tokens.weight"], 0).copy()
    save_file(arrays, tmp_path / "model.safetensors", metadata={"format": "pt"})
    there = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    here, config = import_dense(tmp_path, edit=float32)
    assert not config.model.tie_embeddings and there.config.tie_word_embeddings
    assert error(ours(here, draw()), theirs(there, draw())) <= 2e-5


@pytest.mark.parametrize("kind", ["dense", "nsa"])
def test_generation_in_transformers_ends_and_draws_as_that_of_the_checkpoint(tmp_path, kind):
    given = {"eos_token_id": [256, 65], "pad_token_id": 66, "do_sample": True, "temperature": 0.6, "top_p": 0.9}
    config = default_config()
    config.model.update({"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16})
    config.model.update({"attention": "dense", "compute_dtype": "float32", "init_std": 0.3})
    model = nn.Transformer(nn.ModelConfig.from_config(config, 257), rngs=nnx.Rngs(3))
    export_native(model, ByteTokenizer(), config, tmp_path / "in")
    (tmp_path / "in" / "generation_config.json").write_text(json.dumps(given))
    assert convert.main([str(tmp_path / "in"), str(tmp_path / "here"), f"--attention={kind}"]) == 0
    assert export.main([str(tmp_path / "here"), str(tmp_path / "out"), "--format=transformers"]) == 0
    load = transformers.GenerationConfig.from_pretrained
    assert load(tmp_path / "out").to_diff_dict() == load(tmp_path / "in").to_diff_dict()
    there = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert there.generation_config.eos_token_id == [256, 65] == there.config.eos_token_id


@pytest.mark.parametrize("saved", FULL, indirect=True)
def test_nsa_begins_as_the_model_of_transformers_on_short_rows(saved, request):
    """512 tokens are as many as the default window; the selected branch reads up to 1,024."""
    model, path = saved
    tokens = draw()
    want = theirs(model, tokens)
    exact, begun = (
        error(ours(import_dense(path, attention="nsa", edit=float32, **gate)[0], tokens), want)
        for gate in ({"gate": 0.0}, {})
    )
    print(f"{request.node.callspec.id}: gate 0 {exact:.1e}, default gate {begun:.1e}")
    assert exact <= 2e-5 and 1e-4 < begun <= 0.02


@pytest.mark.parametrize("saved", FULL, indirect=True)
def test_greedy_generation_is_that_of_transformers(saved, tmp_path):
    model, path = saved
    imported, config = import_dense(path, edit=float32)
    export.export(imported, SyntheticTokenizer(VOCAB, copy=False), config, tmp_path / "out")
    loaded, tokenizer, config = nsa_jax.load(tmp_path / "out")
    tokenizer.eos_id, model.generation_config.eos_token_id = -1, None  # neither stops before all tokens are there
    prompt = draw(40)
    with jax.default_matmul_precision("highest"):
        generator = Generator(loaded, tokenizer, context=config.data.seq_len)
        got = generator([prompt[0].tolist()], max_tokens=64, sampling=Sampling(temperature=0.0))[0].tokens
    given = {"input_ids": torch.as_tensor(prompt), "attention_mask": torch.ones(1, 40, dtype=torch.long)}
    want = model.generate(**given, max_new_tokens=64, do_sample=False, pad_token_id=0)[0, 40:].tolist()
    assert got == want and len(want) == 64


@pytest.mark.parametrize("saved", FULL, indirect=True)
def test_exported_folders_have_our_logits_in_transformers(saved, tmp_path, request):
    model, path = saved
    imported, config = import_dense(path, edit=float32)
    export_native(imported, SyntheticTokenizer(VOCAB, copy=False), config, tmp_path / "out", shard_bytes=100_000)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert back.dtype == torch.float32
    # A Mistral without a window is a Llama.
    assert type(back).__name__.removesuffix("ForCausalLM") == MODELS[request.node.callspec.id][0].replace(
        "Mistral", "Llama"
    )
    kept, given = back.state_dict(), model.state_dict()
    assert kept.keys() == given.keys() and all(torch.equal(kept[name], given[name]) for name in kept)
    tokens = draw()
    assert error(theirs(back, tokens), ours(imported, tokens)) <= 1e-4
    np.testing.assert_array_equal(theirs(back, tokens), theirs(model, tokens))


OPTIONS = {
    "Llama": {},
    "Mistral": {},
    "Qwen2": {"qkv_bias": True},
    "Qwen3": {"qk_norm": True, "tie_embeddings": False},
}


@pytest.mark.parametrize("family", OPTIONS)
def test_models_made_here_have_our_logits_in_transformers(family, tmp_path):
    """Biases and norms are not their initial zeros and ones, and the vocabulary is padded."""
    config = default_config()
    config.model.update({"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16})
    config.model.update({"attention": "dense", "compute_dtype": "float32", "init_std": 0.3, "vocab_size": 320})
    config.model.update(OPTIONS[family])
    if family == "Mistral":  # a Llama's width must be a multiple of its heads
        config.model.update({"dim": 30})
    model = nn.Transformer(nn.ModelConfig.from_config(config, 257), rngs=nnx.Rngs(3))
    graphdef, params = nnx.split(model)
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    leaves = [leaf + 0.2 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    model = nnx.merge(graphdef, jax.tree.unflatten(tree, leaves))
    export_native(model, ByteTokenizer(), config, tmp_path)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(back).__name__ == f"{family}ForCausalLM" and back.config.vocab_size == 320
    tokens = np.random.default_rng(2).integers(0, 257, (2, 200))
    assert error(theirs(back, tokens), ours(model, tokens)) <= 1e-4


@pytest.mark.parametrize(
    ("family", "pattern"),
    [("Mistral", ()), ("Qwen2", ()), ("Qwen3", ()), ("Qwen2", ("dense", "window")), ("Qwen3", ("window", "dense"))],
)
def test_window_models_made_here_are_sliding_windows_in_transformers(family, pattern, tmp_path):
    config = default_config()
    config.model.update(
        {"dim": 32, "num_layers": 2, "layer_pattern": pattern, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    )
    config.model.update({"attention": "window", "compute_dtype": "float32", "init_std": 0.3})
    config.model.update(OPTIONS.get(family, {}))
    config.model.nsa.window = 24
    model = nn.Transformer(nn.ModelConfig.from_config(config, VOCAB), rngs=nnx.Rngs(3))
    export_native(model, SyntheticTokenizer(VOCAB, copy=False), config, tmp_path)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert type(back).__name__ == f"{family}ForCausalLM"
    for length in (24, 25, 201):
        tokens = draw(length, rows=2)
        assert error(theirs(back, tokens), ours(model, tokens)) <= 2e-5
    prompt = torch.as_tensor(draw(40))
    given = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 40, "do_sample": False}
    back.generation_config.eos_token_id = None
    made = back.generate(prompt, **given, pad_token_id=0).numpy()
    assert made.shape == (1, 80)
    np.testing.assert_array_equal(made[0, 40:], ours(model, made)[0, 39:-1].argmax(-1), "the cache slides too")


def test_tokenizers_of_folders_are_read_by_transformers(tmp_path):
    config = default_config()
    config.model.update({"dim": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8})
    config.model.update({"attention": "dense", "compute_dtype": "float32"})
    model = nn.Transformer(nn.ModelConfig.from_config(config, 257), rngs=nnx.Rngs(3))
    export_native(model, ByteTokenizer(), config, tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "Native \u00e4\u00f6\u00fc  \U0001f600\n\tsparse"
    assert tokenizer.encode(text, add_special_tokens=False) == ByteTokenizer().encode(text).tolist()
    assert tokenizer.decode(tokenizer.encode(text)) == text and tokenizer.eos_token_id == 256
    assert tokenizer.pad_token_id == 256
    assert tokenizer(["a", "bcd"], padding=True)["attention_mask"] == [[1, 0, 0], [1, 1, 1]]
    assert transformers.GenerationConfig.from_pretrained(tmp_path).pad_token_id == 256


TEXTS = (
    "in 2048 tokens, 65536",
    "cafe\u0301 \ufb01",
    "don't we'LL go\n\n  x = 12345\n",
    " a\tb   c",
    "snake_case_name",
)


@pytest.mark.parametrize("changes", [{}, {"attention": "window"}, {"qkv_bias": True}, {"qk_norm": True}], ids=str)
@pytest.mark.parametrize("kind", ["byte", "bpe", "llama"])
def test_the_readme_of_a_folder_loads_a_tokenizer_of_the_same_ids(tmp_path, kind, changes):
    """AutoTokenizer splits texts for every Qwen2ForCausalLM as Qwen's tokenizer does; LlamaTokenizer has its way."""
    config = default_config()
    config.model.update({"dim": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8})
    config.model.update({"attention": "dense", "compute_dtype": "float32"} | changes)
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    tokenizer = ByteTokenizer() if kind == "byte" else HuggingFaceTokenizer(train_bpe([page], 500), eos=BPE_EOS)
    if kind == "llama":
        tokenizer = sentencepiece()
        tokenizer.settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False}
    model = nn.Transformer(nn.ModelConfig.from_config(config, tokenizer.vocab_size), rngs=nnx.Rngs(3))
    export_native(model, tokenizer, config, tmp_path)
    (line,) = [line for line in (tmp_path / "README.md").read_text().splitlines() if line.startswith("tokenizer = ")]
    read = getattr(transformers, line.split()[2].partition(".")[0]).from_pretrained(tmp_path)
    for text in TEXTS:
        assert read.encode(text) == tokenizer.encode(text).tolist()
        assert read.decode(read.encode(text)) == text


@pytest.mark.parametrize("several", [False, True])
def test_chat_templates_survive_both_ways(tmp_path, several):
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    words = {"</s>": 0, "<unk>": 1, **{chr(32 + i): i for i in range(2, 90)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token="<unk>")
    fast.chat_template = {"default": template, "tool_use": template + "!"} if several else template
    make("qwen2").save_pretrained(tmp_path / "in")
    fast.save_pretrained(tmp_path / "in")
    assert convert.main([str(tmp_path / "in"), str(tmp_path / "here"), "--attention=dense"]) == 0
    assert export.main([str(tmp_path / "here"), str(tmp_path / "out"), "--format=transformers"]) == 0
    back = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    messages = [{"role": "user", "content": "HELLO"}]
    want = fast.apply_chat_template(messages, tokenize=False)
    assert back.apply_chat_template(messages, tokenize=False) == want == "<user>HELLO</s>"
    assert back.chat_template == fast.chat_template
    assert back.encode("HELLO") == fast.encode("HELLO")
    assert (back.eos_token, back.eos_token_id) == ("</s>", 0)


@pytest.mark.parametrize("settings", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
@pytest.mark.parametrize("template", ["<bos> $A", "$A <bos>", "<bos> <bos> $A", "$A"])
def test_texts_begin_as_in_transformers(tmp_path, template, settings):
    words = {"</s>": 0, "<bos>": 1, **{chr(95 + i): i for i in range(2, 20)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="</s>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    made.add_special_tokens(["</s>", "<bos>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(single=template, special_tokens=[("<bos>", 1)])
    made.save(str(tmp_path / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "bos_token": "<bos>", **settings}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(described))
    config = default_config()
    config.data.tokenizer, config.data.tokenizer_path = "hf", str(tmp_path / "tokenizer.json")
    ours = load_tokenizer(config)
    there = transformers.AutoTokenizer.from_pretrained(tmp_path).encode("abc")
    begun = [*ours.prefix_ids, *ours.encode("abc")]
    assert there[: len(begun)] == begun and set(there[len(begun) :]) <= {1}


def test_bfloat16_folders_keep_their_dtype(tmp_path):
    make("qwen3").to(torch.bfloat16).save_pretrained(tmp_path / "in")
    model, config = import_dense(tmp_path / "in")
    export_native(model, SyntheticTokenizer(VOCAB, copy=False), config, tmp_path / "out")
    load = transformers.AutoModelForCausalLM.from_pretrained
    given, back = (load(Path(tmp_path, name)) for name in ("in", "out"))
    assert back.dtype == torch.bfloat16
    kept = back.state_dict()
    assert all(torch.equal(kept[name], array) for name, array in given.state_dict().items())
