"""NSA models exported for transformers compute there what they compute here: logits, generation, padded batches.

Models are tiny and random, with weights so large that attention matters. Errors are absolute, of logits whose largest
is printed beside them.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from nsa_jax import nn
from nsa_jax.config import default_config
from nsa_jax.data.tokenizers import ByteTokenizer, SyntheticTokenizer
from nsa_jax.generator import Generator
from nsa_jax.hub.native import export_native
from nsa_jax.nn.transformer import layer_stacks
from nsa_jax.sampling import Sampling

VOCAB = 96
# Of the geometry below: shorter than a compressed block, past the window, past the selected reach and odd, and long.
LENGTHS = (1, 7, 30, 77, 200)
GEOMETRY = {"compress_block": 8, "compress_stride": 4, "select_block": 16, "num_selected": 4, "window": 24}
YARN = {"kind": "yarn", "factor": 4.0, "original_length": 64}
LLAMA3 = {"kind": "llama3", "factor": 8.0, "original_length": 64}

# Changes to config.model.
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mean": {"compressor": "mean", "num_kv_heads": 1, "tie_embeddings": False},
    "every head its own": {"num_kv_heads": 4, "nsa": {"compress_stride": 8, "num_initial": 2, "num_local": 1}},
    "norms, biases, yarn": {
        **{name: True for name in ("qk_norm", "qkv_bias", "out_bias", "mlp_bias")},
        "rope_scaling": YARN,
        "tie_embeddings": False,
    },
    "shared keys and values": {
        **{name: True for name in ("qk_norm", "qkv_bias")},
        "value_head_dim": 8,
        "nsa": {"shared_kv": True},
    },
    "mean keys": {"qk_norm": True, "nsa": {"selector": "mean_key", "num_initial": 1, "num_local": 1}},
    "mean keys, shared": {"num_kv_heads": 1, "nsa": {"selector": "mean_key", "shared_kv": True}},
    "norms alone, mean": {"qk_norm": True, "compressor": "mean"},
    "wide values, capped": {"value_head_dim": 24, "logit_soft_cap": 5.0, "qkv_bias": True},
    "narrow values, partial rope": {
        "value_head_dim": 8,
        "rotary_dim": 8,
        "rope_scaling": YARN | {"attention_factor": 1.3},
    },
    "llama3, large blocks": {
        "rope_scaling": LLAMA3,
        "rope_theta": 5e5,
        "nsa": {"compress_block": 16, "compress_stride": 4, "select_block": 32, "num_selected": 3, "window": 9},
    },
    "linear": {"rope_scaling": {"kind": "linear", "factor": 3.0}, "nsa": {"compress_stride": 2, "select_block": 8}},
    "dynamic": {"rope_scaling": {"kind": "dynamic", "factor": 2.0, "original_length": 160}},
    "window, NSA and dense layers": {
        "layer_pattern": ("window", "nsa", "dense"),
        "num_layers": 3,
        "value_head_dim": 24,
        "qk_norm": True,
        "qkv_bias": True,
    },
}


def make(name: str) -> tuple[nn.Transformer, Any]:
    """A random model and its training config."""
    changes = copy.deepcopy(MODELS[name])
    config = default_config()
    config.model.update({"dim": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "mlp_dim": 64})
    config.model.update({"attention": "nsa", "compute_dtype": "float32", "implementation": "reference"})
    config.model.nsa.update(GEOMETRY | changes.pop("nsa", {}))
    config.model.rope_scaling.update(changes.pop("rope_scaling", {}))
    config.model.update(changes)
    config.data.seq_len = 256
    model = nn.Transformer(nn.ModelConfig.from_config(config, VOCAB), rngs=nnx.Rngs(3))
    graphdef, params = nnx.split(model)
    random = np.random.default_rng(sorted(MODELS).index(name))

    def draw(path, leaf):
        label, shape = str(path), leaf.shape
        if "norm" in label:
            return jnp.asarray(random.uniform(0.5, 1.5, shape), leaf.dtype)
        inputs = np.prod(shape[1:-1]) if "blocks" in label and "w_" in label else 0
        std = 1.5 * inputs**-0.5 if inputs else 0.5
        return jnp.asarray(std * random.normal(size=shape), leaf.dtype)

    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(draw, params)), config


@pytest.fixture(scope="module", params=MODELS)
def models(request, tmp_path_factory):
    """A model, its folder, and what transformers makes of it."""
    model, config = make(request.param)
    path = tmp_path_factory.mktemp("exported") / "out"
    export_native(model, SyntheticTokenizer(VOCAB, copy=False), config, path, shard_bytes=100_000)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
    loaded.generation_config.eos_token_id = None  # does not stop before all tokens are there
    return request.param, model, config, path, loaded.eval()


def draw(length: int, rows: int = 1, seed: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB - 1, (rows, length))


def ours(model: nn.Transformer, tokens: np.ndarray) -> np.ndarray:
    with jax.default_matmul_precision("highest"):
        return np.asarray(jax.jit(model)(jnp.asarray(tokens, jnp.int32)))


@torch.no_grad()
def theirs(model, tokens: np.ndarray, **arguments) -> np.ndarray:
    return model(torch.as_tensor(tokens), **arguments).logits.numpy()


def padded(prompts: list[np.ndarray]) -> dict[str, torch.Tensor]:
    """Prompts as one batch with padding on the left, which holds tokens like any other."""
    longest = max(map(len, prompts))
    tokens = torch.full((len(prompts), longest), 7)
    mask = torch.zeros((len(prompts), longest), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) :], mask[row, longest - len(prompt) :] = torch.as_tensor(prompt), 1
    return {"input_ids": tokens, "attention_mask": mask}


PROMPTS = [draw(length, seed=length)[0] for length in (3, 41, 90)]


def test_logits_are_ours(models):
    name, model, _, _, loaded = models
    assert type(loaded).__name__ == "NSAForCausalLM" and loaded.dtype == torch.float32
    errors = {}
    for length in LENGTHS:
        tokens = draw(length, rows=2)
        want = ours(model, tokens)
        errors[length] = float(np.abs(theirs(loaded, tokens) - want).max())
    print(f"{name}: " + ", ".join(f"T={t} {error:.1e}" for t, error in errors.items()), f"of {np.abs(want).max():.1f}")
    other = tokens.copy()
    other[:, :100] = other[:, 99::-1]
    assert np.abs(ours(model, other)[:, -1] - want[:, -1]).max() > 1e-2, "attention matters"
    assert max(errors.values()) <= 1e-4


def test_tensors_keep_their_bits(models, tmp_path):
    name, model, _, _, loaded = models
    got = {name: array.numpy() for name, array in loaded.state_dict().items()}
    params = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    stacks, modules = (layer_stacks(blocks, model.config) for blocks in (params["blocks"], model.blocks))
    for index in range(model.config.num_layers):
        row, position = divmod(index, len(stacks))
        attention, widths = stacks[position]["attention"], modules[position].attention.widths
        order = ("q", "k", "v")
        if model.config.of_layer(index).attention == "nsa":
            branches = ("",) if model.config.shared_kv else ("_cmp", "_slc", "_win")[-len(model.config.branches) :]
            order = ("q", *(f"{part}{branch}" for branch in branches for part in "kv"), "gate")
        at = f"model.layers.{index}.self_attn."
        fused = np.concatenate([got.pop(f"{at}{part}_proj.weight") for part in order]).T
        np.testing.assert_array_equal(fused, attention["w_in"][row])
        assert fused.shape[1] == sum(widths)
        if "b_in" in attention:
            biased = [part for part in order if part != "gate"]
            fused = np.concatenate([got.pop(f"{at}{part}_proj.bias") for part in biased])
            np.testing.assert_array_equal(fused, attention["b_in"][row])
    total = sum(leaf.size for leaf in jax.tree.leaves(params))
    tied = model.config.tie_embeddings
    assert sum(p.numel() for p in loaded.parameters()) == total, "a shared matrix counts once"
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    loaded.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True).state_dict()
    assert all(torch.equal(again[name], array) for name, array in loaded.state_dict().items())
    tokens = draw(77)
    np.testing.assert_array_equal(
        theirs(transformers.AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True), tokens),
        theirs(loaded, tokens),
    )


def test_greedy_generation_is_ours_alone_and_in_a_padded_batch(models):
    name, model, _, _, loaded = models
    arguments = {"max_new_tokens": 64, "do_sample": False, "pad_token_id": 0}
    if name == "dynamic":  # the generator's capacity would be beyond the original length
        made = loaded.generate(**padded(PROMPTS[2:]), **arguments).numpy()
        np.testing.assert_array_equal(made[0, 90:], ours(model, made[:, :-1])[0, 89:].argmax(-1))
        return
    tokenizer = SyntheticTokenizer(VOCAB, copy=False)
    tokenizer.eos_id = -1
    with jax.default_matmul_precision("highest"):
        generator = Generator(model, tokenizer, context=160)
        results = generator([p.tolist() for p in PROMPTS], max_tokens=64, sampling=Sampling(temperature=0.0))
    want = [result.tokens for result in results]
    for prompt, tokens in zip(PROMPTS, want, strict=True):
        given = padded([prompt])
        assert loaded.generate(**given, **arguments)[0, len(prompt) :].tolist() == tokens and len(tokens) == 64
    assert loaded.generate(**padded(PROMPTS), **arguments)[:, 90:].tolist() == want


def test_padded_rows_give_what_they_give_alone(models):
    _, model, _, _, loaded = models
    given = padded(PROMPTS)
    with torch.no_grad():
        got = loaded(**given).logits.numpy()
    for row, prompt in enumerate(PROMPTS):
        np.testing.assert_allclose(got[row, -len(prompt) :], ours(model, prompt[None])[0], rtol=0, atol=1e-4)
    assert np.isfinite(got).all()


def test_the_cache_gives_what_the_whole_row_gives(models):
    _, model, _, _, loaded = models
    tokens = draw(150, rows=2)
    want, got, cache = ours(model, tokens), [], None
    with torch.no_grad():
        for first, end in ((0, 5), (5, 6), (6, 90), (90, 91), (91, 92), (92, 150)):
            out = loaded(torch.as_tensor(tokens[:, first:end]), past_key_values=cache, use_cache=True)
            got.append(out.logits.numpy())
            cache = out.past_key_values
    assert cache.get_seq_length() == 150
    # Before the row is as long as RoPE of the kind "dynamic" leaves as it is, all pieces have the same frequencies.
    np.testing.assert_allclose(np.concatenate(got, axis=1), want, rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    model, config = make("plain")
    path = tmp_path_factory.mktemp("plain") / "out"
    export_native(model, SyntheticTokenizer(VOCAB, copy=False), config, path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True).eval()
    loaded.generation_config.eos_token_id = None
    return model, path, loaded


@pytest.mark.parametrize(
    "arguments", [{"do_sample": True}, {"do_sample": True, "num_return_sequences": 2}, {"num_beams": 3}]
)
def test_sampling_and_beams_are_the_same_with_and_without_a_cache(plain, arguments):
    got = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        given = padded(PROMPTS)
        out = plain[2].generate(**given, max_new_tokens=20, pad_token_id=0, use_cache=use_cache, **arguments)
        got.append(out[:, 90:].tolist())
    assert got[0] == got[1]


def test_queries_served_in_pieces_give_the_same(plain, monkeypatch):
    model, _, loaded = plain
    tokens = draw(200, rows=2)
    monkeypatch.setattr(sys.modules[type(loaded.model.layers[0].self_attn).__module__], "_LARGEST_ARRAY", 40_000)
    np.testing.assert_allclose(theirs(loaded, tokens), ours(model, tokens), rtol=0, atol=1e-4)


def test_every_parameter_gets_a_gradient_and_the_loss_is_the_mean_of_shifted_labels(plain):
    _, path, loaded = plain
    loaded = copy.deepcopy(loaded).train()
    tokens = torch.as_tensor(draw(100, rows=2))
    out = loaded(tokens, labels=tokens)
    want = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(out.loss, want)
    assert out.past_key_values is None
    out.loss.backward()
    for name, parameter in loaded.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), name


def test_new_models_can_be_made_of_the_config(plain):
    config = transformers.AutoConfig.from_pretrained(plain[1], trust_remote_code=True)
    made = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    weight = made.model.layers[0].self_attn.q_proj.weight
    assert abs(float(weight.detach().std()) - config.initializer_range) < 0.1 * config.initializer_range
    assert not made.model.layers[0].self_attn.gate_bias.any()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"attention_mask": torch.tensor([[1, 1, 0, 1]])}, "padding on the left"),
        ({"attention_mask": torch.ones(1, 3)}, "has the shape"),
        ({"attention_mask": torch.tensor([[1, 1, 2, 2]])}, "rows of several documents are not served"),
        ({"past_key_values": transformers.DynamicCache()}, "must be the NSACache"),
        ({"output_attentions": True}, "output_attentions"),
        ({"position_ids": torch.tensor([[0, 1, 0, 1]])}, "position_ids: must be 0, 1, 2"),
        ({"input_ids": torch.ones((1, 0), dtype=torch.long)}, r"input_ids has the shape \(1, 0\): give at least one"),
        ({"input_ids": None, "inputs_embeds": torch.ones((1, 0, 48))}, r"inputs_embeds has the shape \(1, 0\)"),
    ],
)
def test_what_cannot_be_served_is_refused(plain, arguments, words):
    with pytest.raises(ValueError, match=words):
        plain[2](**{"input_ids": torch.ones((1, 4), dtype=torch.long)} | arguments)


def test_what_generation_cannot_give_is_refused(plain):
    given = padded(PROMPTS[:1]) | {"max_new_tokens": 2, "pad_token_id": 0}
    with pytest.raises(ValueError, match="output_attentions: sparse attention has no dense matrices"):
        plain[2].generate(**given, output_attentions=True, return_dict_in_generate=True)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("beams", [1, 3])
def test_generation_from_embeddings_is_that_from_tokens(plain, masked, beams):
    loaded = plain[2]
    given = padded(PROMPTS[1:] if masked else PROMPTS[1:2])
    settings = {"max_new_tokens": 50, "do_sample": False, "pad_token_id": 0, "num_beams": beams}
    want = loaded.generate(**given, **settings)
    tokens = given.pop("input_ids")
    if not masked:
        given = {}
    embeds = loaded.get_input_embeddings()(tokens)
    assert torch.equal(loaded.generate(**given, inputs_embeds=embeds, **settings), want[:, tokens.shape[1] :])
    assert torch.equal(loaded.generate(tokens, **given, inputs_embeds=embeds, **settings), want)


def test_arguments_that_change_nothing_are_taken(plain):
    """Token types of tokenizers, and position ids as they are anyway, of padded and of cached rows, too."""
    loaded, given = plain[2], padded(PROMPTS)
    with torch.no_grad():
        want = loaded(**given).logits
        types = torch.zeros_like(given["input_ids"])
        from_first_token = (given["attention_mask"].cumsum(-1) - 1).clamp_min(0)
        for positions in (torch.arange(90)[None], from_first_token):
            got = loaded(**given, token_type_ids=types, position_ids=positions)
            assert torch.equal(got.logits, want)
        row = {"input_ids": given["input_ids"][2:]}
        cache = loaded(row["input_ids"][:, :50], use_cache=True).past_key_values
        rest = loaded(row["input_ids"][:, 50:], past_key_values=cache, position_ids=torch.arange(50, 90)[None])
        np.testing.assert_allclose(rest.logits, want[2:, 50:], rtol=0, atol=1e-4)


def test_results_have_the_form_that_the_arguments_or_the_config_ask_for(plain):
    loaded, tokens = copy.deepcopy(plain[2]), torch.as_tensor(draw(20))
    for model in (loaded, loaded.model):
        named = model(tokens)
        assert named.hidden_states is None
        assert isinstance(model(tokens, return_dict=False), tuple)
        assert torch.equal(model(tokens, return_dict=False)[0], named[0])
    loaded.config.output_hidden_states = True
    assert len(loaded(tokens).hidden_states) == 3 == len(loaded.model(tokens).hidden_states)
    assert loaded(tokens, output_hidden_states=False).hidden_states is None
    loaded.config.return_dict = False
    assert isinstance(loaded(tokens), tuple) and isinstance(loaded.model(tokens), tuple)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_no_gradient(plain, reentrant):
    loaded, tokens = copy.deepcopy(plain[2]).train(), torch.as_tensor(draw(60, rows=2))
    loaded(tokens, labels=tokens).loss.backward()
    want = {name: parameter.grad.clone() for name, parameter in loaded.named_parameters()}
    loaded.zero_grad()
    loaded.gradient_checkpointing_enable({"use_reentrant": reentrant})
    loaded(tokens, labels=tokens).loss.backward()
    for name, parameter in loaded.named_parameters():
        torch.testing.assert_close(parameter.grad, want[name], msg=name)
    with pytest.raises(ValueError, match="gradient checkpointing goes without a cache"):
        loaded(tokens, use_cache=True)


def test_dynamic_rope_refuses_cached_rows_that_it_would_turn_again(tmp_path):
    model, config = make("dynamic")
    export_native(model, SyntheticTokenizer(VOCAB, copy=False), config, tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    loaded.generation_config.eos_token_id = None
    arguments = padded([draw(150)[0]]) | {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    with pytest.raises(ValueError, match="at most 160 tokens"):
        loaded.generate(**arguments)
    assert loaded.generate(**arguments, use_cache=False).shape[1] == 170


_ALONE = """
import sys
for name in ("nsa_jax", "jax", "flax"):
    sys.modules[name] = None
import numpy as np, torch, transformers
path, tokens, out = sys.argv[1:]
config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=True)
model = transformers.AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=True)
assert config.model_type == "nsa" and type(model.config) is type(config)
tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, "left"
batch = tokenizer(["one", "two and more"], padding=True, return_tensors="pt")
text = tokenizer.batch_decode(model.generate(**batch, max_new_tokens=4), skip_special_tokens=True)
assert text[0].startswith("one") and text[1].startswith("two and more")
with torch.no_grad():
    np.save(out, model(torch.as_tensor(np.load(tokens))).logits.numpy())
"""


def test_folders_need_nothing_of_this_library(tmp_path):
    model, config = make("plain")
    config.model.vocab_size = 260
    model = nn.Transformer(nn.ModelConfig.from_config(config, 257), rngs=nnx.Rngs(3))
    export_native(model, ByteTokenizer(), config, tmp_path / "out")
    np.save(tmp_path / "tokens.npy", draw(90))
    arguments = [tmp_path / name for name in ("out", "tokens.npy", "logits.npy")]
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [sys.executable, "-c", _ALONE, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(np.load(tmp_path / "logits.npy"), ours(model, draw(90)), rtol=0, atol=1e-4)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["auto_map"]["AutoConfig"]
