"""Tokenizers that put a space before a text, and decoders that take one away, as those of Llama 2 and Mistral 7B do."""

import json
import string
import types

import numpy as np
import pytest
import tokenizers

import nsa_jax
from nsa_jax import convert, evaluate
from nsa_jax.data import DataError, load_tokenizer, make_pipeline
from nsa_jax.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer
from nsa_jax.evaluate import retrieval
from nsa_jax.generator import _BEFORE, _TextStream
from nsa_jax.inspect.capture import token_strings

from .checkpoints import describe, letters, write

TEXT = "the model reads\nthe = 12345"


def sentencepiece() -> HuggingFaceTokenizer:
    words = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *string.ascii_lowercase, *string.digits]
    words += ["=", ".", "th", "the", "▁the"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    model = tokenizers.models.BPE({word: i for i, word in enumerate(words)}, merges, byte_fallback=True)
    made = tokenizers.Tokenizer(model)
    normalizers, decoders = tokenizers.normalizers, tokenizers.decoders
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return HuggingFaceTokenizer(made.to_str())


def test_pieces_of_a_text_are_encoded_and_decoded_as_within_it():
    tokenizer = sentencepiece()
    whole = tokenizer.encode(TEXT)
    pieces = [tokenizer.encode("the model"), *map(tokenizer.encode_within, (" reads", "\nthe =", " 12345"))]
    np.testing.assert_array_equal(np.concatenate(pieces), whole)
    assert tokenizer.decode(tokenizer.encode(" 12345")) == " 12345" and len(tokenizer.encode(" 12345")) == 7
    assert "".join(token_strings(tokenizer, whole)) == f" {TEXT}"
    assert token_strings(tokenizer, [tokenizer.eos_id]) == [""]
    byte = ByteTokenizer()
    assert byte.encode_within(TEXT).tolist() == byte.encode(TEXT).tolist()
    assert byte.decode_each(byte.encode(TEXT)) == list(TEXT)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), sentencepiece()], ids=["byte", "sentencepiece"])
def test_a_model_that_copies_finds_every_needle(tokenizer):
    def copied(row, query):
        """The token after the last earlier place that agrees longest with what ends at the query."""
        lengths = [next((n for n in range(at + 1) if row[at - n] != row[query - n]), at + 1) for at in range(query)]
        return row[int(np.argmax(np.array(lengths) + np.arange(query) / query)) + 1]

    def probe(tokens, queries):
        return np.array([[copied(row, q) for q in qs] for row, qs in zip(tokens, queries, strict=True)]), None

    probe.config = types.SimpleNamespace(nsa=nsa_jax.NSAConfig())
    haystack = tokenizer.encode("grass is green and sky is blue. " * 20)
    cells = retrieval.needle_grid(probe, tokenizer, haystack, lengths=[150], depths=[0.0, 0.5, 1.0], samples=4)
    assert [cell["exact_match"] for cell in cells] == [1.0, 1.0, 1.0]


def test_a_continuation_keeps_its_first_space():
    tokenizer = sentencepiece()
    new = tokenizer.encode_within(" model reads")
    for prompt in ("the", "日本", "日本\n", "日本\n\n"):
        stream = _TextStream(tokenizer, (), lambda text: None, tokenizer.encode(prompt)[-_BEFORE:].tolist())
        for token in new:
            stream.add(int(token))
        stream.finish()
        assert stream.text == " model reads"
    prompt = "é".encode()[:1]  # cut within a character, whose rest comes: the text has all that decodes
    stream = _TextStream(ByteTokenizer(), (), lambda text: None, list(prompt))
    stream.add("é".encode()[1])
    stream.finish()
    assert stream.text == "\ufffd"


def checkpoint(path, settings=None, **described):
    """A Llama with the tokenizer above."""
    tokenizer = sentencepiece()
    write(path, describe("llama2", vocab_size=tokenizer.vocab_size, **described))
    tokenizer.save(path)
    (path / "tokenizer_config.json").write_text(json.dumps(settings or {}))
    return path


def test_the_end_of_a_document_is_the_checkpoints_own(tmp_path):
    for name, special, described, expected in (
        ("map", {"eos_token": {"content": "<0x04>"}, "pad_token": "<unk>"}, {}, "<0x04>"),
        ("ids", {}, {"eos_token_id": [7, 1]}, "<0x05>"),
        ("strange", {"eos_token": "<nowhere>"}, {"eos_token_id": 7}, "<0x05>"),
        ("usual", {}, {}, "</s>"),
    ):
        source = checkpoint(tmp_path / name, {"eos_token": None}, **described)
        (source / "special_tokens_map.json").write_text(json.dumps(special))
        assert convert.main([str(source), str(tmp_path / f"{name}_out"), "--attention=dense"]) == 0
        tokenizer = nsa_jax.load(tmp_path / f"{name}_out")[1]
        assert tokenizer.eos_token == expected and tokenizer.settings.get("pad_token") == special.get("pad_token")


def test_a_model_that_was_moved_is_evaluated_with_its_own_tokenizer(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NSA_JAX_CACHE", str(tmp_path / "cache"))
    checkpoint(tmp_path / "in")
    assert convert.main([str(tmp_path / "in"), str(tmp_path / "out"), "--attention=dense"]) == 0
    (tmp_path / "out").rename(tmp_path / "moved")
    (tmp_path / "out").mkdir()
    letters(tmp_path / "out")  # another tokenizer where its own was
    _, tokenizer, config = nsa_jax.load(tmp_path / "moved")
    assert load_tokenizer(config).fingerprint == tokenizer.fingerprint
    text = tmp_path / "text.txt"
    text.write_text("the grass is green. " * 500)
    config.data.update({"source": "text", "files": (str(text),), "seq_len": 32})
    assert make_pipeline(config).tokenizer.fingerprint == tokenizer.fingerprint
    config.data.tokenizer_path = str(tmp_path / "out" / "tokenizer.json")
    with pytest.raises(DataError, match="its tokenizer now is .*, the model's is"):
        evaluate.held_out_documents(config, (), tokenizer, 1000)
    (tmp_path / "out" / "tokenizer.json").unlink()
    assert evaluate.main([str(tmp_path / "moved"), "--tasks=perplexity", f"--files={text}", "--batch-size=1"]) == 0
    assert "bits per byte" in capsys.readouterr().out
