"""NSA models exported for transformers: files, names, shapes and bits. tests/hf computes with them."""

from __future__ import annotations

import ast
import json
import sys
import tomllib
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from nsa_jax import export, nn
from nsa_jax.data.tokenizers import ByteTokenizer
from nsa_jax.hub import native_nsa
from nsa_jax.hub.export_files import Arrays
from nsa_jax.hub.native import export_native, native_config

from .runs import small_config, write_run

SOURCES = Path(native_nsa.__file__).parent / "transformers_nsa"
ORDER = ("q", "k_cmp", "v_cmp", "k_slc", "v_slc", "k_win", "v_win", "gate")
OPTIONS = {
    "plain": {},
    "all": {
        **{name: True for name in ("qk_norm", "qkv_bias", "out_bias", "mlp_bias")},
        "value_head_dim": 12,
        "tie_embeddings": False,
        "num_layers": 2,
    },
    "shared": {"nsa": {"shared_kv": True}, "qkv_bias": True},
    "mean keys": {"nsa": {"selector": "mean_key"}, "qkv_bias": True},
    "mean, bfloat16": {"compressor": "mean", "param_dtype": "bfloat16"},
}


def stored(path: Path) -> dict[str, np.ndarray]:
    arrays = Arrays(path)
    return {name: np.asarray(arrays[name]) for name in arrays.files}


@pytest.mark.parametrize("options", OPTIONS)
def test_a_folder_holds_every_parameter_with_its_bits(tmp_path, options):
    config = small_config()
    config.model.update(OPTIONS[options])
    learned = config.model.compressor == "mlp" and config.model.nsa.selector == "compressed"
    order = ORDER if config.model.nsa.selector == "compressed" else ORDER[:1] + ORDER[3:]
    order = ("q", "k", "v", "gate") if config.model.nsa.shared_kv else order
    model = nn.Transformer(nn.ModelConfig.from_config(config, 257), rngs=nnx.Rngs(3))
    graphdef, params = nnx.split(model)
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jax.numpy.asarray(random.normal(size=leaf.shape), leaf.dtype), params)
    export_native(nnx.merge(graphdef, params), ByteTokenizer(), config, tmp_path, shard_bytes=5_000)
    got, want = stored(tmp_path), jax.tree.map(np.asarray, nnx.to_pure_dict(params))

    def same(names: list[str], array: np.ndarray) -> None:
        """The arrays in the folder, one below the other, are the array with its inputs first."""
        found = np.concatenate([got.pop(name) for name in names])
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array.T, err_msg=names[0])

    same(["model.embed_tokens.weight"], want["embedding"].T)
    same(["model.norm.weight"], want["norm"]["scale"])
    if not config.model.tie_embeddings:
        same(["lm_head.weight"], want["head"])
    for index in range(config.model.num_layers):
        block = jax.tree.map(lambda leaf, index=index: leaf[index], want["blocks"])
        layer = f"model.layers.{index}."
        same([f"{layer}input_layernorm.weight"], block["norm_attention"]["scale"])
        same([f"{layer}post_attention_layernorm.weight"], block["norm_mlp"]["scale"])
        attention, at = block["attention"], f"{layer}self_attn."
        same([f"{at}{name}_proj.weight" for name in order], attention["w_in"])
        same([f"{at}o_proj.weight"], attention["w_out"])
        same([f"{at}gate_bias"], attention["gate_bias"].T)
        same([f"{layer}mlp.{name}_proj.weight" for name in ("gate", "up")], block["mlp"]["w_in"])
        same([f"{layer}mlp.down_proj.weight"], block["mlp"]["w_out"])
        if config.model.qkv_bias:
            same([f"{at}{name}_proj.bias" for name in order[:-1]], attention["b_in"])
        if options == "all":
            same([f"{at}o_proj.bias"], attention["b_out"])
            same([f"{layer}mlp.{name}_proj.bias" for name in ("gate", "up")], block["mlp"]["b_in"])
            same([f"{layer}mlp.down_proj.bias"], block["mlp"]["b_out"])
            same([f"{at}q_norm.weight"], attention["q_norm"]["scale"])
            same([f"{at}k_norm.weight"], attention["k_norm"]["scale"])
        for kind in ("key", "value") if learned else ():
            phi, here = attention[f"compress_{kind}"], f"{at}compress_{kind}."
            same([f"{here}position"], phi["position"].T)
            same([f"{here}in_proj.weight"], phi["w_1"].reshape(-1, phi["w_1"].shape[-1]))
            same([f"{here}in_proj.bias"], phi["b_1"])
            same([f"{here}out_proj.weight"], phi["w_2"])
    assert not got, "nothing else is there"


def test_a_run_becomes_a_folder_with_its_code(tmp_path, capsys):
    config = small_config()
    config.model.rope_scaling.update({"kind": "yarn", "factor": 4.0, "original_length": 64})
    write_run(tmp_path / "run", config)
    out = tmp_path / "out"
    assert export.main([str(tmp_path / "run"), str(out), "--format=transformers"]) == 0
    files = {path.name for path in out.iterdir()}
    assert files == {
        *("README.md", "config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "configuration_nsa.py", "attention_nsa.py", "modeling_nsa.py"),
    }
    for name in native_nsa.SOURCES:
        assert (out / name).read_bytes() == (SOURCES / name).read_bytes()
    described = json.loads((out / "config.json").read_text())
    assert described["model_type"] == "nsa" and described["architectures"] == ["NSAForCausalLM"]
    assert described["auto_map"]["AutoModelForCausalLM"] == "modeling_nsa.NSAForCausalLM"
    assert (described["vocab_size"], described["eos_token_id"], described["window"]) == (260, 256, 12)
    assert described["rope_options"]["kind"] == "yarn" and described["rope_options"]["theta"] == 10_000.0
    card = (out / "README.md").read_text()
    assert card.count("trust_remote_code=True") == 2  # of the model and of the tokenizer, which asks without it
    assert "Native Sparse Attention" in card and "dense attention" not in card

    config.model.attention = "dense"
    model = nn.Transformer(nn.ModelConfig.from_config(config, 257), rngs=nnx.Rngs(3))
    export_native(model, ByteTokenizer(), config, out)
    assert not [path.name for path in out.glob("*.py")], "code is not left beside a model that does not need it"


def test_config_json_has_every_field_that_the_class_takes(tmp_path):
    tree = ast.parse((SOURCES / "configuration_nsa.py").read_text())
    (init,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    fields = {argument.arg for argument in init.args.args} - {"self"}
    (rope,) = (ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign))
    described = native_config(nn.ModelConfig.from_config(small_config(), 257), 96)
    assert fields == described.keys() - {"architectures", "model_type", "auto_map", "torch_dtype"}
    assert rope.keys() == described["rope_options"].keys()


def test_the_code_imports_nothing_but_pytorch_and_transformers():
    own = {f".{Path(name).stem}" for name in native_nsa.SOURCES}
    for name in native_nsa.SOURCES:
        tree = ast.parse((SOURCES / name).read_text())
        found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        found |= {f"{'.' * node.level}{node.module}" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        roots = {module.partition(".")[0] for module in found - own}
        assert roots - set(sys.stdlib_module_names) <= {"torch", "transformers"}, name


def test_the_code_is_part_of_the_wheel():
    settings = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert "transformers_nsa/*.py" in settings["tool"]["setuptools"]["package-data"]["nsa_jax.hub"]
    assert {path.name for path in SOURCES.glob("*.py")} == set(native_nsa.SOURCES)
