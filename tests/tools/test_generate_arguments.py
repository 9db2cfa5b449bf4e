"""Arguments of the generator that cannot be meant are refused at once; a reader that has enough ends the program."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import nsa_jax
from nsa_jax import generate
from nsa_jax.data.tokenizers import ByteTokenizer, SyntheticTokenizer
from nsa_jax.generator import Generator
from nsa_jax.sampling import Sampling

from .runs import small_config, write_run


def test_one_stop_string_is_not_its_characters(generator):
    settings = dict(max_tokens=30, sampling=Sampling(seed=3))
    (plain,) = generator(["x"], **settings)
    stop = plain.text[5:8]
    for given in (stop, [stop], (stop,)):
        (stopped,) = generator(["x"], **settings, stop=given)
        assert stopped.finish == "stop" and stopped.text == plain.text[: plain.text.index(stop)]


@pytest.mark.parametrize("value", [2.5, 0, -1, True, "3", None])
@pytest.mark.parametrize("name", ["max_tokens", "num_samples"])
def test_counts_of_a_call_are_whole_numbers(generator, name, value):
    with pytest.raises(ValueError, match=f"{name}=.*: must be a whole number of at least 1"):
        generator(["x"], **{name: value})


@pytest.mark.parametrize("value", [4.5, 0, -3, True, "96"])
@pytest.mark.parametrize("name", ["context", "chunk", "tokens_per_dispatch"])
def test_sizes_of_a_generator_are_whole_numbers(model, name, value):
    with pytest.raises(ValueError, match=f"{name}=.*: must be a whole number of at least 1"):
        Generator(model, ByteTokenizer(), **{name: value})


@pytest.mark.parametrize("value", [{"temperature": 0.5}, {}, 0.8])
def test_sampling_is_a_record(generator, value):
    with pytest.raises(ValueError, match=r"sampling=.*: must be a Sampling, such as Sampling\(temperature=0.8\)"):
        generator(["x"], sampling=value)


@pytest.mark.parametrize("fields", [{"temperature": 1e39}, {"repetition_penalty": 1e39}, {"repetition_penalty": 1e-46}])
def test_settings_are_numbers_that_the_device_can_hold(fields):
    """As float32 these are infinity and 0, which made logits NaN."""
    with pytest.raises(ValueError, match="must be .* finite, as float32"):
        Sampling(**fields)


def test_a_tokenizer_with_ids_that_the_model_has_not_is_refused(model):
    with pytest.raises(ValueError, match="the tokenizer has 1,000 ids and the model 260: give the tokenizer"):
        Generator(model, SyntheticTokenizer(1000, copy=False))


def test_a_prompt_that_is_refused_is_not_printed(tmp_path, capsys):
    write_run(tmp_path, small_config())
    assert generate.main([str(tmp_path), "--prompt", "a text", "--context", "6"]) == 2
    shown = capsys.readouterr()
    assert not shown.out and shown.err.startswith("error: the prompt has 6 tokens and the context holds 6")


def test_rows_that_dynamic_scaling_would_turn_again_are_refused_with_a_context_that_works(tmp_path, capsys):
    config = small_config()
    config.model.rope_scaling.update({"kind": "dynamic", "factor": 2.0, "original_length": 40})
    write_run(tmp_path, config)
    assert generate.main([str(tmp_path), "--prompt", "ab"]) == 2
    fix = re.search(r"use a capacity of at most (\d+) .*: (--context)\)", capsys.readouterr().err)
    assert generate.main([str(tmp_path), "--prompt", "ab", fix[2], fix[1], "--max-tokens=40"]) == 0


def test_a_reader_that_has_enough_ends_it_quietly(tmp_path):
    write_run(tmp_path / "run", small_config())
    program = [sys.executable, "-m", "nsa_jax.generate", str(tmp_path / "run"), "--prompt=a", "--quiet"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(nsa_jax.__file__).parent.parent)}
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(program, stdout=writing, stderr=subprocess.PIPE, text=True, env=environment, timeout=300)
    os.close(writing)
    assert done.returncode == 0 and "pipe" not in done.stderr.lower() and "Traceback" not in done.stderr


_ENCODE = """
from nsa_jax.data.tokenizers import ByteTokenizer
from nsa_jax.generator import encode_prompt
found = [encode_prompt(ByteTokenizer(), text) for text in ("\\u00e9", "a\\udcff")]
print([(ids.tolist(), note) for ids, note in found])
"""


def test_a_prompt_is_utf_8_whatever_the_locale():
    """In a locale of another encoding such text was refused as no text, or lost its characters."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(nsa_jax.__file__).parent.parent)}
    environment |= {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}  # ASCII
    done = subprocess.run([sys.executable, "-c", _ENCODE], capture_output=True, text=True, env=environment, timeout=300)
    note = "the prompt is not UTF-8 (byte 0xff at offset 1): its bytes are used as they are"
    assert done.stdout.strip() == str([([0xC3, 0xA9], None), ([97, 255], note)]), done.stderr


def test_a_closed_standard_input_is_the_end_of_lines_and_no_prompt(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "run", small_config())
    monkeypatch.setattr(sys, "stdin", None)  # as after <&-
    assert generate.main([str(tmp_path / "run"), "--interactive"]) == 0
    assert generate.main([str(tmp_path / "run"), "--prompt-file=-"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "error: --prompt-file=-: the standard input is closed; pipe a text, or name a file\n"
