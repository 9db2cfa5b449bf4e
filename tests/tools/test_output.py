"""What an export may be written over, and that it replaces an earlier one as a whole or not at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

import nsa_jax
from nsa_jax import convert, evaluate, export, nn
from nsa_jax.data.tokenizers import ByteTokenizer, load_tokenizer
from nsa_jax.hub import load, native, output
from nsa_jax.hub.export_files import LoadError
from nsa_jax.inspect import __main__ as inspect_command

from .checkpoints import describe, letters, write
from .runs import small_config, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    config = small_config()
    config.model.attention = "dense"
    path = tmp_path_factory.mktemp("runs") / "small"
    write_run(path, config)
    return path


def content(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def foreign(directory: Path) -> Path:
    """A folder with weights of a user's own."""
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "llama"}')
    save_file({"a": np.ones(3, np.float32)}, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model_final.safetensors").write_bytes(b"mine")
    (directory / "notes.txt").write_text("mine")
    return directory


@pytest.mark.parametrize("options", [[], ["--format=transformers"]])
def test_a_directory_that_holds_something_else_is_left_alone(run, tmp_path, monkeypatch, capsys, options):
    place = foreign(tmp_path / "place")
    before = content(place)
    with monkeypatch.context() as patched:
        patched.setattr(export, "load_recorded", lambda *_: pytest.fail("weights were read"))
        assert export.main([str(run), str(place), *options]) == 2
    error = capsys.readouterr().err
    assert "holds config.json, model.safetensors, model_final.safetensors and 1 more" in error
    assert "--overwrite" in error and content(place) == before
    assert export.main([str(run), str(place), *options, "--overwrite"]) == 0
    after = content(place)
    assert after["notes.txt"] == after["model_final.safetensors"] == b"mine"  # other names stay
    assert after["model.safetensors"] != before["model.safetensors"]
    assert export.main([str(run), str(place), *options]) == 0  # an earlier export is replaced


def test_a_conversion_leaves_something_else_alone(tmp_path, capsys):
    write(tmp_path / "in", describe("llama2", vocab_size=300))
    place = foreign(tmp_path / "place")
    before = content(place)
    arguments = [str(tmp_path / "in"), str(place), "--tokenizer=byte"]
    assert convert.main(arguments) == 2
    assert "no earlier export" in capsys.readouterr().err and content(place) == before
    assert export.main(["--import-from", str(tmp_path / "in"), str(place), "--tokenizer=byte"]) == 2
    assert convert.main([*arguments, "--overwrite"]) == 0 == convert.main(arguments)


@pytest.mark.parametrize("held", ["checkpoints", "env.json"])
def test_a_run_is_never_written_over(run, tmp_path, capsys, held):
    place = tmp_path / "other"
    place.mkdir()
    (place / held).mkdir() if held == "checkpoints" else (place / held).write_text("{}")
    for overwrite in ([], ["--overwrite"]):
        assert export.main([str(run), str(place), *overwrite]) == 2
        assert f"holds a run ({held})" in capsys.readouterr().err
    assert os.listdir(place) == [held]


@pytest.mark.parametrize("step", ["", "@1", "@best"])
def test_a_run_is_not_exported_onto_itself(run, capsys, step):
    before = content(run)
    assert export.main([f"{run}{step}", str(run), "--overwrite"]) == 2
    assert "is what is to be exported" in capsys.readouterr().err and content(run) == before


def test_outputs_that_cannot_be_written_are_named_before_weights_are_read(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(export, "load_recorded", lambda *_: pytest.fail("weights were read"))
    monkeypatch.setattr(convert, "import_dense", lambda *_, **__: pytest.fail("weights were read"))
    (tmp_path / "file").write_text("a file")
    for place, words in (
        (tmp_path / "file", "is no directory; name a directory to write"),
        (tmp_path / "file" / "below", f"{tmp_path / 'file'} is no directory"),
        ("/proc/none", "/proc cannot be written"),
        ("s3://bucket/model", "written to directories alone"),
    ):
        for arguments in ([str(run), str(place)], ["--import-from", str(tmp_path), str(place)]):
            assert export.main(arguments) == 2
            error = capsys.readouterr().err
            assert words in error and error.count("\n") == 1


def test_results_that_cannot_be_written_are_refused_before_anything_is_computed(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(inspect_command, "explore_runs", lambda *_: pytest.fail("the text was read by a model"))
    (tmp_path / "a.txt").write_text("some text")
    explore = [str(run), "--text", str(tmp_path / "a.txt"), "--html"]
    for main, arguments, words in (
        (evaluate.main, [str(run), "--output", "/proc/none"], "/proc/none: /proc cannot be written"),
        (inspect_command.main, [*explore, "/proc/a.html"], "/proc cannot be written"),
        (inspect_command.main, [*explore, str(tmp_path)], "a directory; name a file"),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert words in error and arguments[-2] in error and error.count("\n") == 1


def test_only_files_of_an_exports_names_are_removed(run, tmp_path):
    model, tokenizer, config = nsa_jax.load(run)
    export.export(model, tokenizer, config, tmp_path, shard_bytes=3000)
    kept = ("model_best.safetensors", "model.safetensors.bak", "model-1.safetensors", "evaluation.json")
    for name in kept:
        (tmp_path / name).write_text("mine")
    export.export(model, tokenizer, config, tmp_path)
    assert sorted(path.name for path in tmp_path.glob("model*")) == sorted([*kept[:3], "model.safetensors"])
    native.export_native(model, tokenizer, config, tmp_path)
    assert all((tmp_path / name).read_text() == "mine" for name in kept)


def test_the_card_of_another_export_does_not_stay(run, tmp_path):
    model, tokenizer, config = nsa_jax.load(run)
    native.export_native(model, tokenizer, config, tmp_path)
    assert (tmp_path / "README.md").exists()
    export.export(model, tokenizer, config, tmp_path)
    assert not (tmp_path / "README.md").exists()
    mine = "---\nlicense: mit\ntags:\n- nsa_jax\n---\nmine"
    (tmp_path / "README.md").write_text(mine)
    export.export(model, tokenizer, config, tmp_path)
    assert (tmp_path / "README.md").read_text() == mine
    native.export_native(model, tokenizer, config, tmp_path)
    assert (tmp_path / "README.md").read_text() == mine and (tmp_path / "config.json").exists()
    native.export_native(model, tokenizer, config, tmp_path, overwrite=True)
    assert (tmp_path / "README.md").read_text().startswith(output.CARD)


def test_the_chat_template_of_another_model_does_not_stay(tmp_path):
    """transformers writes it to a file of its own when it saves a tokenizer, and reads that before the settings."""
    for name in ("first", "second"):
        write(tmp_path / name, describe("llama2"))
        letters(tmp_path / name, name)
        assert convert.main([str(tmp_path / name), str(tmp_path / "out"), "--attention=dense"]) == 0
        template = load_tokenizer(nsa_jax.load(tmp_path / "out")[2]).settings["chat_template"]
        assert template == name
        (tmp_path / "out" / "chat_template.jinja").write_text(template)


_KILLED = """
import os, sys
import nsa_jax
from nsa_jax import export
from nsa_jax.hub import load
model, tokenizer, config = nsa_jax.load(sys.argv[1])
type(tokenizer).save = lambda *_: os._exit(9)  # after the weights
export.export(model, tokenizer, config, sys.argv[2])
"""


def test_a_killed_export_leaves_the_earlier_one(run, tmp_path):
    out = tmp_path / "out"
    assert export.main([f"{run}@1", str(out)]) == 0
    before = content(out)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(nsa_jax.__file__).parent.parent)}
    killed = subprocess.run([sys.executable, "-c", _KILLED, str(run), str(out)], env=environment, timeout=300)
    assert killed.returncode == 9
    after = content(out)
    assert {name: after[name] for name in before} == before and load.load(out)
    assert export.main([str(run), str(out)]) == 0
    assert content(out).keys() == before.keys() and content(out) != before  # nothing of the killed one is left


def test_a_model_that_transformers_saved_over_an_export_is_not_an_export(tmp_path):
    config = small_config()
    model = nn.Transformer(nn.ModelConfig.from_config(config, 257), rngs=nnx.Rngs(3))
    native.export_native(model, ByteTokenizer(), config, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "nsa"
    native.export_native(model, ByteTokenizer(), config, tmp_path)
    save_file({"a": np.ones(3, np.float32)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LoadError, match="no earlier export"):
        native.export_native(model, ByteTokenizer(), config, tmp_path)
