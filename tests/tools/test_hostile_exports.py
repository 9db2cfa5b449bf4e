"""Damaged and hostile exports: LoadError with what was wrong and where, whatever is in the files."""

from __future__ import annotations

import json
import os
import shutil
import stat
import struct
from pathlib import Path

import pytest
from flax import nnx

import nsa_jax
from nsa_jax import evaluate, export, generate, nn
from nsa_jax.data.tokenizers import BPE_EOS, HuggingFaceTokenizer, train_bpe
from nsa_jax.hub.convert import import_dense
from nsa_jax.hub.export_files import Arrays
from nsa_jax.loading import LoadError

from .checkpoints import describe, write
from .runs import small_config

LLAMA = Path(__file__).parent / "tiny_llama"


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """Directories "one file" and "shards" of the same model, and the model."""
    folder = tmp_path_factory.mktemp("exports")
    config = small_config()
    config.model.vocab_size = 280
    model = nn.Transformer(nn.ModelConfig.from_config(config, 280), rngs=nnx.Rngs(0))
    tokenizer = HuggingFaceTokenizer(train_bpe(["a text to train on " * 20], 270), eos=BPE_EOS)
    export.export(model, tokenizer, config, folder / "one file")
    export.export(model, tokenizer, config, folder / "shards", shard_bytes=9000)
    return folder


@pytest.fixture
def whole(exports, tmp_path):
    return Path(shutil.copytree(exports / "one file", tmp_path / "snapshots" / "export"))


@pytest.fixture
def sharded(exports, tmp_path):
    return Path(shutil.copytree(exports / "shards", tmp_path / "snapshots" / "export"))


def change(path: Path, **fields) -> None:
    """Sets fields of a JSON file, by names with dots."""
    value = json.loads(path.read_text())
    for name, new in fields.items():
        parent = value
        *parents, last = name.split(".")
        for key in parents:
            parent = parent[key]
        parent[last] = new
    path.write_text(json.dumps(value))


def change_header(path: Path, edit) -> None:
    """Changes the header of a safetensors file and nothing else."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"config": 3}, "config=3: must be an object"),
        ({"config.model": [1]}, r"config.model=\[1\]: must be an object"),
        ({"config.model.dim": "16"}, "config.model.dim='16': must be a whole number"),
        ({"config.model.dim": True}, "config.model.dim=True: must be a whole number"),
        ({"config.model.rope_theta": "1"}, "config.model.rope_theta='1': must be a number"),
        ({"config.model.rope_theta": float("nan")}, "config.model.rope_theta=nan: out of range"),
        ({"config.model.rope_theta": float("inf")}, "config.model.rope_theta=inf: out of range"),
        ({"config.model.scan_layers": 1}, "config.model.scan_layers=1: must be true or false"),
        ({"config.model.attention": "linear"}, "config.model.attention='linear': no such choice"),
        ({"config.data.files": [1]}, r"config.data.files=\[1\]: must be texts"),
        ({"config.model.num_layers": -1}, "config.model.num_layers=-1: too small"),
        ({"config.model.num_layers": 10**6}, "config.model.num_layers=1000000: must be in"),
        ({"config.model.num_layers": 10**9}, "config.model.num_layers=1000000000: too large"),
        ({"config.model.mlp_dim": 10**30}, "config.model.mlp_dim=10+: out of range"),
        ({"config.model.nsa.window": 10**12}, "config.model.nsa.window=10+: out of range"),
        ({"config.model.nsa.compress_block": 0}, "NSAConfig.compress_block=0: must be a positive int"),
        ({"config.model.num_kv_heads": 3}, "num_kv_heads=3: does not divide"),
        ({"config.model.fields": 3}, "config.model.fields: this version of nsa_jax has no such field"),
        ({"vocab_size": None}, "vocab_size=None: must be a whole number"),
        ({"model_type": ["nsa_jax"]}, "import it first"),
    ],
)
def test_configs_that_describe_no_model_are_refused(whole, fields, words):
    change(whole / "config.json", **fields)
    with pytest.raises(LoadError, match=words):
        nsa_jax.load(whole)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", b"", "config.json: is not JSON"),
        ("config.json", b"\xff\xfe{", "config.json: is not JSON"),
        ("config.json", b"[" * 100_000, "config.json: is not JSON"),
        ("config.json", b"[1]", r"config.json=\[1\]: must be a JSON object"),
        ("config.json", b'{"a": 1' + b"0" * 5000 + b"}", "config.json: is not JSON"),
        ("model.safetensors", b"", "model.safetensors: is no whole safetensors file"),
        ("model.safetensors", b"\xff" * 100, "model.safetensors: is no whole safetensors file"),
        ("model.safetensors.index.json", b"{}", "weight_map=None: must be an object"),
        ("tokenizer_config.json", b"{", "tokenizer_config.json: is not JSON"),
        ("tokenizer_config.json", b"3", "tokenizer_config.json: is no JSON object"),
        ("tokenizer_config.json", b"{}", "tokenizer_config.json: kind=None"),
        ("tokenizer_config.json", b'{"kind": "hf", "eos_token": [1]}', "kind='hf', or its eos_token"),
        ("tokenizer_config.json", b'{"kind": "hf", "eos_token": "\\ud800"}', "is not a tokenizer.json"),
        ("tokenizer_config.json", b'{"kind": "synthetic", "vocab_size": 1000000000000, "copy": true}', "vocab_size=10"),
        ("tokenizer.json", b"{}", "is not a tokenizer.json"),
        ("tokenizer.json", b"\xff", "holds no saved tokenizer"),
    ],
)
def test_files_that_hold_something_else_are_named(whole, name, content, words):
    if name == "model.safetensors.index.json":  # not read beside a whole file
        (whole / "model.safetensors").unlink()
    (whole / name).write_bytes(content)
    with pytest.raises(LoadError, match=words):
        nsa_jax.load(whole)


def test_a_changed_tokenizer_is_noticed(whole):
    change(whole / "tokenizer.json", **{"decoder": None})
    with pytest.raises(LoadError, match="the tokenizer is not the one that was saved.*delete fingerprint"):
        nsa_jax.load(whole)
    change(whole / "tokenizer_config.json", fingerprint=HuggingFaceTokenizer(
        (whole / "tokenizer.json").read_text(), eos=BPE_EOS).fingerprint)  # fmt: skip
    nsa_jax.load(whole)


def test_token_ids_without_bound_are_refused(whole):
    tokenizer = json.loads((whole / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["unused"] = 4_000_000_000
    (whole / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(LoadError, match="has the token id 4000000000"):
        nsa_jax.load(whole)


@pytest.mark.parametrize(
    "name",
    ["../outside.safetensors", "/etc/passwd", "folder/x.safetensors", "..", "", "config.json", 3, None, ["x"], "\x00"],
)
def test_weight_maps_name_files_of_the_export_alone(sharded, name):
    shard = next(iter(sharded.glob("model-*.safetensors")))
    shutil.copy(shard, sharded.parent / "outside.safetensors")
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    files = {array: name if file == shard.name else file for array, file in index["weight_map"].items()}
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    with pytest.raises(LoadError, match="must be the name of a safetensors file in the same directory"):
        nsa_jax.load(sharded)


def test_weight_maps_that_name_what_is_not_there_are_refused(sharded):
    index = sharded / "model.safetensors.index.json"
    names = sorted(json.loads(index.read_text())["weight_map"].items())
    other = next(file for _, file in names if file != names[0][1])
    index.write_text(json.dumps({"weight_map": {**dict(names), names[0][0]: other}}))
    with pytest.raises(LoadError, match="holds no array .* though model.safetensors.index.json says so"):
        nsa_jax.load(sharded)
    index.write_text(json.dumps({"weight_map": {**dict(names), names[0][0]: "x" * 5000 + ".safetensors"}}))
    with pytest.raises(LoadError, match="cannot be loaded: .*File name too long"):
        nsa_jax.load(sharded)


def test_arrays_of_a_shard_count_that_no_index_names(tmp_path):
    described = describe("llama2")
    write(tmp_path, described | {"attention_bias": True}, files=2)
    index = tmp_path / "model.safetensors.index.json"
    named = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {name: named[name] for name in named if "bias" not in name}}))
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(LoadError, match="8 arrays have no place in this model: .*k_proj.bias"):
        import_dense(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors"])
def test_links_lead_to_the_export_or_to_the_blobs_of_its_hugging_face_cache(whole, name):
    outside = whole.parents[1] / "elsewhere"
    outside.mkdir()
    (whole / name).rename(outside / name)
    (whole / name).symlink_to(f"../../elsewhere/{name}")
    with pytest.raises(LoadError, match=f"{name}: a link to .*elsewhere.*, outside of the model's directory"):
        nsa_jax.load(whole)
    outside.rename(whole.parents[1] / "blobs")  # the layout of the hub: snapshots/REVISION/FILE -> ../../blobs/HASH
    (whole / name).unlink()
    (whole / name).symlink_to(f"../../blobs/{name}")
    nsa_jax.load(whole)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_folders_and_pipes_are_not_opened(whole, name, make):
    (whole / name).unlink()
    make(whole / name)
    with pytest.raises(LoadError, match=f"{name} is no regular file"):
        nsa_jax.load(whole)


def test_an_overwritten_weight_is_noticed(whole):
    path = whole / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes(raw)
    with pytest.raises(LoadError, match="model.safetensors: .* has not the checksum that was written with it"):
        nsa_jax.load(whole)
    change_header(path, lambda header: header["__metadata__"].pop("crc32"))  # as older versions wrote them
    nsa_jax.load(whole)
    change_header(path, lambda header: header["__metadata__"].update(crc32="["))
    with pytest.raises(LoadError, match="its checksums are damaged"):
        nsa_jax.load(whole)


def test_nothing_is_read_before_all_headers_have_been_compared(whole, monkeypatch):
    change_header(whole / "model.safetensors", lambda header: header.update(other=header.pop("norm.scale")))
    monkeypatch.setattr(Arrays, "__getitem__", lambda *_: pytest.fail("an array was read"))
    with pytest.raises(LoadError, match="no array 'norm.scale', which config.json asks for"):
        nsa_jax.load(whole)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_size": None}, "hidden_size=None: must be a whole number"),
        ({"hidden_size": 16.0}, "hidden_size=16.0: must be a whole number"),
        ({"num_hidden_layers": 10**6}, "num_layers=1000000: must be in"),
        ({"num_hidden_layers": 10**9}, "num_layers=1000000000: too large"),
        ({"num_hidden_layers": 3}, "no array 'model.layers.2"),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0: must be a whole number"),
        ({"head_dim": 10**12}, "head_dim=10+: must be a whole number"),
        ({"rope_theta": "x"}, "rope_theta='x': must be a positive number"),
        ({"rope_parameters": [1]}, "must be an object or null"),
        ({"rope_scaling": {"rope_type": "x" * 10**6}}, "RoPE scaling of type 'xx"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan: must be a positive number"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no': must be true or false"),
        ({"max_position_embeddings": "many"}, "max_position_embeddings='many'"),
    ],
)
def test_foreign_configs_are_checked_field_by_field(tmp_path, fields, words):
    shutil.copytree(LLAMA, tmp_path / "llama")
    change(tmp_path / "llama" / "config.json", **fields)
    with pytest.raises(LoadError, match=words) as caught:
        export.import_dense(tmp_path / "llama")
    assert len(str(caught.value)) < 1000


def test_foreign_arrays_of_whole_numbers_are_refused(tmp_path):
    shutil.copytree(LLAMA, tmp_path / "llama")
    for path in (tmp_path / "llama").glob("*.safetensors"):
        change_header(path, lambda header: [h.update(dtype="I32") for h in header.values() if "dtype" in h])
    with pytest.raises(LoadError, match="I32, must be .* of floating-point numbers"):
        export.import_dense(tmp_path / "llama")


def test_command_lines_say_it_in_one_line(whole, tmp_path, capsys):
    (whole / "model.safetensors").write_bytes(b"\x00" * 100)
    source = Path(shutil.copytree(LLAMA, tmp_path / "llama"))
    (source / "config.json").write_text("[")
    commands = [
        (generate.main, [str(whole), "--prompt", "a"]),
        (evaluate.main, [str(whole)]),
        (export.main, [str(whole), str(tmp_path / "out")]),
        (export.main, ["--import-from", str(source), str(tmp_path / "out"), "--tokenizer", "byte"]),
    ]
    for main, arguments in commands:
        assert main(arguments) == 2
        lines = capsys.readouterr().err.strip().split("\n")
        assert len(lines) == 1 and lines[0].startswith("error: ") and "Fix: " in lines[0], lines


@pytest.mark.parametrize("mask", [0o022, 0o027])
def test_files_of_an_export_have_the_modes_that_the_umask_gives(exports, tmp_path, mask):
    model, tokenizer, config = nsa_jax.load(exports / "shards")
    before = os.umask(mask)
    try:
        export.export(model, tokenizer, config, tmp_path / "out", shard_bytes=9000)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()}
    assert set(modes.values()) == {0o666 & ~mask}, modes


def test_an_export_that_is_cut_short_leaves_the_earlier_one_or_nothing(exports, tmp_path, monkeypatch):
    model, tokenizer, config = nsa_jax.load(exports / "shards")
    export.export(model, tokenizer, config, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(type(tokenizer), "save", full)
    for name in ("out", "new"):
        with pytest.raises(OSError, match="No space"):
            export.export(nsa_jax.load(exports / "one file")[0], tokenizer, config, tmp_path / name)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert not (tmp_path / "new").exists()
