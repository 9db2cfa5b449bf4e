"""Conversions choose the layers that stay dense, and read no more of the texts than they need."""

from __future__ import annotations

import argparse

import numpy as np
import pytest

import nsa_jax
from nsa_jax import convert
from nsa_jax.config import default_config
from nsa_jax.data.tokenizers import ByteTokenizer
from nsa_jax.evaluate.far_layers import FarLayers

from .checkpoints import describe, letters, write


def test_layers_that_read_far_stay_dense(tmp_path, capsys, caplog):
    write(tmp_path / "in", describe("qwen3"))
    letters(tmp_path / "in")
    (tmp_path / "text.txt").write_text("".join(chr(48 + i * i % 61) for i in range(1000)))
    arguments = [str(tmp_path / "in"), str(tmp_path / "out"), "--text", str(tmp_path / "text.txt"), "--shared-kv"]
    assert convert.main([*arguments, "--dense-layers=1"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("looking for the layers that read far: about ")
    assert lines[0].startswith("loss in rows of 128 tokens: ") and "the first 16 and the last 32" in lines[0]
    full, near = (float(lines[0].split()[place].strip(";")) for place in (6, -1))
    told = lines[1].endswith("of the way")
    assert ("reading further gains the model" in caplog.text) == (not told) and not (told and near <= full)
    layer = int(lines[1].split()[1])
    pattern = nsa_jax.load(tmp_path / "out")[0].config.layer_pattern
    assert lines[1].startswith(f"layer {layer} (the first is 0) sees all: ")
    assert f"to nsa, in layers {layer} dense attention" in lines[2]
    assert [kind == "dense" for kind in pattern] == [i == layer for i in range(len(pattern))]
    assert convert.main([*arguments, f"--dense-layers={len(pattern)}"]) == 2
    assert f"must be less than the model's {len(pattern)} layers" in capsys.readouterr().err


def test_layers_after_those_that_read_far_are_windows(tmp_path, capsys):
    described = describe("qwen3")
    described["num_hidden_layers"] = 4
    write(tmp_path / "in", described)
    letters(tmp_path / "in")
    (tmp_path / "text.txt").write_text("".join(chr(48 + i * i % 61) for i in range(1000)))
    arguments = [str(tmp_path / "in"), str(tmp_path / "out"), "--text", str(tmp_path / "text.txt"), "--dense-layers=1"]
    for count in (2, 0):
        assert convert.main([*arguments, f"--nsa-layers={count}"]) == 0
        first, *lines = capsys.readouterr().out.splitlines()
        assert f"about {4 * (1 + count)} times " in first
        order = [int(line.split("layer ")[1].split()[0]) for line in lines[1 : 2 + count]]
        pattern = nsa_jax.load(tmp_path / "out")[0].config.layer_pattern
        want = dict.fromkeys(range(4), "window") | dict.fromkeys(order, "nsa") | {order[0]: "dense"}
        assert len(set(order)) == 1 + count and pattern == tuple(want.values())
        nsa = ", ".join(str(layer) for layer in sorted(order[1:]))
        also = f", in layers {nsa} nsa" if count else ""
        assert f"to window, in layers {order[0]} dense{also} attention" in lines[2 + count]
    assert convert.main([*arguments, "--nsa-layers=3"]) == 0  # which leaves no layer for a window
    assert f"to nsa, in layers {order[0]} dense attention" in capsys.readouterr().out
    assert convert.main([*arguments, "--nsa-layers=4"]) == 2
    assert "the model has 4 layers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nsa-layers=0", "--shared-kv"], "must be False for layers of the kinds dense, window"),
        ([f"--config.model.nsa.{name}=8192" for name in ("compress_block", "select_block")], "compress_block=8192: "),
    ],
)
def test_models_that_cannot_be_are_refused_before_layers_are_looked_for(tmp_path, capsys, monkeypatch, options, words):
    monkeypatch.setattr(convert, "far_layers", lambda *_, **__: pytest.fail("layers were looked for"))
    write(tmp_path / "in", describe("qwen3"))
    letters(tmp_path / "in")
    (tmp_path / "text.txt").write_text("Hello there " * 20)
    arguments = [str(tmp_path / "in"), str(tmp_path / "out"), "--text", str(tmp_path / "text.txt"), "--dense-layers=1"]
    assert convert.main([*arguments, *options]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("full", "told"), [(3.96, True), (3.99, False), (4.01, False)])
def test_the_share_of_the_way_is_told_where_reading_far_gains(tmp_path, capsys, caplog, monkeypatch, full, told):
    found = FarLayers(layers=(1,), losses=(3.98,), near=4.0, full=full, alone=(4.001, 3.98))

    def far_layers(*_, on_found, **__):
        on_found(found)
        return found

    monkeypatch.setattr(convert, "far_layers", far_layers)
    rows, model = np.zeros((2, 129), np.int32), argparse.Namespace(config=argparse.Namespace(num_layers=2))
    assert convert._far_layers(model, default_config(), rows, 1) == found
    assert ("layer 1 (the first is 0) sees all: 3.9800, 50% of the way\n" in capsys.readouterr().out) == told
    assert ("reading further gains the model" in caplog.text) == (not told)


def test_rows_to_look_for_far_layers_in_are_spread_over_documents(tmp_path):
    """Each of two files has more rows than are looked at; a document begins with the tokenizer's prefix."""
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name * 20_000)
    args = argparse.Namespace(dense_layers=1, nsa_layers=None, text=[str(tmp_path / "*.txt")])
    config = default_config()
    config.data.seq_len, config.model.num_layers = 64, 2
    tokenizer = ByteTokenizer()
    tokenizer.prefix_ids = (256,)
    rows = convert._far_rows(args, config, tokenizer)
    assert rows.shape == (30, 65)  # 15 of each: no document is read beyond 16 characters per token of a row
    assert rows[0, 0] == 256 and (rows[:15, 1:] == ord("a")).all() and (rows[15:, 1:] == ord("b")).all()


def test_the_pattern_of_the_command_line_is_that_of_the_model(tmp_path, capsys):
    write(tmp_path / "in", describe("qwen3"))
    letters(tmp_path / "in")
    paths = [str(tmp_path / "in"), str(tmp_path / "out")]
    assert convert.main([*paths, "--layer-pattern=dense, nsa"]) == 0
    assert "to dense, nsa attention" in capsys.readouterr().out
    assert nsa_jax.load(tmp_path / "out")[0].config.layer_pattern == ("dense", "nsa")
    assert convert.main([*paths, "--layer-pattern=dense,sparse"]) == 2
    assert "'sparse' is no kind of attention" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        convert.main([*paths, "--layer-pattern=dense,nsa", "--attention=dense"])
    assert "not allowed with argument" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "words"), [(b"Hello \xff", "not UTF-8 text"), (b"", "--text: these files hold no text")]
)
def test_texts_that_cannot_be_scored_are_refused_before_anything_is_written(tmp_path, capsys, content, words):
    write(tmp_path / "in", describe("qwen3"))
    letters(tmp_path / "in")
    (tmp_path / "text").write_bytes(content)
    assert convert.main([str(tmp_path / "in"), str(tmp_path / "out"), "--text", str(tmp_path / "text")]) == 2
    shown = capsys.readouterr()
    assert words in shown.err and not shown.out and not (tmp_path / "out").exists()


def test_of_texts_no_more_is_read_than_is_scored(tmp_path):
    for name, content in (("a", b"Hello there"), ("b", b"\xff")):
        (tmp_path / name).write_bytes(content)
    files = [str(tmp_path / name) for name in "ab"]
    documents, cut = convert._first_tokens(ByteTokenizer(), files, context=128, limit=5)
    assert [bytes(document.tolist()) for document in documents] == [b"Hello"] and cut == [0]
