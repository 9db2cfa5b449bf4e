import json
import resource

import chex
import numpy as np
import pytest
import tokenizers as hf_tokenizers

from nsa_jax.config import default_config
from nsa_jax.data import DataError, Tokenizer, load_tokenizer, make_pipeline
from nsa_jax.data.encoding import encode
from nsa_jax.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer, SyntheticTokenizer, train_bpe

TEXT = "Attention, naïvely: softmax(QKᵀ)V costs O(T²) — 注意力.\n\tdef f(x): return x  # 🙂"


@pytest.fixture
def bpe(documents):
    return HuggingFaceTokenizer(train_bpe([*documents, TEXT], 400))


def word_level(eos="</s>", **extra):
    vocabulary = {"[UNK]": 0, "the": 1, "▁loss": 2, "##ing": 3, "<0x0A>": 4, eos: 9, **extra}
    tokenizer = hf_tokenizers.Tokenizer(hf_tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = hf_tokenizers.pre_tokenizers.Whitespace()
    return tokenizer.to_str()


def test_byte_ids_are_the_bytes():
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode("aé")
    assert ids.dtype == np.int32 and ids.tolist() == [97, 195, 169]
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (257, 256)
    assert tokenizer.decode([97, 256, 98]) == "ab"
    assert tokenizer.token_bytes[256] == 0 and tokenizer.token_bytes[:256].sum() == 256


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_round_trip_and_bytes_per_token(kind, bpe):
    tokenizer = ByteTokenizer() if kind == "byte" else bpe
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.token_bytes[ids].sum() == len(TEXT.encode())
    assert ids.max() < tokenizer.vocab_size and tokenizer.eos_id not in ids
    for one, many in zip([TEXT, "x"], tokenizer.encode_batch([TEXT, "x"]), strict=True):
        chex.assert_trees_all_equal(tokenizer.encode(one), many.astype(np.int32))


@pytest.mark.parametrize("kind", ["byte", "bpe", "random", "copy"])
def test_save_and_load_give_the_same_tokenizer(kind, bpe, tmp_path):
    make = {
        "byte": ByteTokenizer,
        "bpe": lambda: bpe,
        "random": lambda: SyntheticTokenizer(12, copy=False),
        "copy": lambda: SyntheticTokenizer(12, copy=True),
    }
    tokenizer = make[kind]()
    tokenizer.save(tmp_path / "saved")
    loaded = Tokenizer.load(tmp_path / "saved")
    assert type(loaded) is type(tokenizer)
    assert (loaded.fingerprint, loaded.vocab_size, loaded.eos_id) == (
        tokenizer.fingerprint,
        tokenizer.vocab_size,
        tokenizer.eos_id,
    )
    chex.assert_trees_all_equal(loaded.token_bytes, tokenizer.token_bytes)
    chex.assert_trees_all_equal(loaded.encode("7 11 3"), tokenizer.encode("7 11 3"))


def test_a_save_that_fails_leaves_what_was_saved(bpe, tmp_path):
    bpe.save(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, limits[1]))  # files cannot grow beyond, as on a full disk
    try:
        with pytest.raises(OSError):
            bpe.save(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert Tokenizer.load(tmp_path).fingerprint == bpe.fingerprint
    bpe.save(tmp_path)
    assert not list(tmp_path.glob("*.tmp"))


def test_load_from_an_empty_directory_is_refused(tmp_path):
    with pytest.raises(DataError, match="holds no saved tokenizer"):
        Tokenizer.load(tmp_path)


def test_bpe_compresses_is_reproducible_and_has_the_size_asked_for(documents, bpe):
    assert bpe.vocab_size == 400
    text = "".join(documents)
    assert len(bpe.encode(text)) < 0.5 * len(text.encode())
    again = HuggingFaceTokenizer(train_bpe([*documents, TEXT], 400))
    assert again.fingerprint == bpe.fingerprint
    assert HuggingFaceTokenizer(train_bpe(documents, 300)).fingerprint != bpe.fingerprint


def test_the_end_of_document_token_is_ordinary_text_inside_a_document(bpe, tmp_path):
    bpe.save(tmp_path)
    text = f"a{bpe.eos_token}b"
    for tokenizer in (bpe, Tokenizer.load(tmp_path)):
        ids = tokenizer.encode(text)
        assert tokenizer.eos_id not in ids and tokenizer.decode(ids) == text
        assert tokenizer.token_bytes[ids].sum() == len(text) and tokenizer.token_bytes[tokenizer.eos_id] == 0


def test_special_tokens_of_others_end_no_document_that_mentions_them(documents):
    """The library finds them in any text; but that of its end, the other ones stay what they are."""
    serialized = json.loads(train_bpe(documents, 400))
    names, first = ("<|endoftext|>", "<|user|>"), 400
    serialized["added_tokens"] = [
        dict(id=first + i, content=name, special=True, single_word=False, lstrip=False, rstrip=False, normalized=False)
        for i, name in enumerate(names)
    ]
    tokenizer = HuggingFaceTokenizer(json.dumps(serialized), eos=names[0])
    user, eos = tokenizer.encode(names[1])[0], tokenizer.eos_id
    texts = ["<|endoftext|>", "a<|endoftext|><|user|>b\0<|endoftext|>", "<|user|>c"]
    assert all(eos in tokenizer.encode(text) for text in texts[:2])
    plain, mixed, other = tokenizer.encode_documents(texts)
    assert eos not in plain and eos not in mixed and user in mixed
    assert [tokenizer.decode(ids) for ids in (plain, mixed)] == texts[:2]
    chex.assert_trees_all_equal(other, tokenizer.encode_batch(texts)[2])
    ends = encode([text.encode() for text in texts], tokenizer).tokens == eos
    assert np.count_nonzero(ends) == 3


def test_bpe_reads_no_more_text_than_allowed():
    read = []

    def documents():
        for i in range(1000):
            read.append(i)
            yield "some words of text " * 10

    train_bpe(documents(), 260, max_bytes=2000)
    assert len(read) < 15


def test_bpe_is_trained_once_on_training_documents_and_kept(text_config, monkeypatch):
    import nsa_jax.data.tokenizers as module

    text_config.data.tokenizer = "bpe"
    text_config.data.bpe_vocab_size = 300
    seen = []
    train = module.train_bpe

    def spy(documents, vocab_size):
        kept = list(documents)
        seen.append(kept)
        return train(kept, vocab_size)

    monkeypatch.setattr(module, "train_bpe", spy)
    first = make_pipeline(text_config)
    second = make_pipeline(text_config)
    assert len(seen) == 1 and len(seen[0]) == first.stats["train"].documents
    assert first.tokenizer.fingerprint == second.tokenizer.fingerprint
    assert first.tokenizer.vocab_size == 300
    held_out = first.tokenizer.decode(first.corpus.validation.document(0))
    assert held_out not in seen[0]


def test_hf_tokenizer_file_with_gaps_and_byte_counts(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(word_level())
    config = default_config()
    config.data.tokenizer = "hf"
    for name in (path, tmp_path):
        config.data.tokenizer_path = str(name)
        tokenizer = load_tokenizer(config)
        assert (tokenizer.vocab_size, tokenizer.eos_id) == (10, 9)
        assert tokenizer.encode("the the").tolist() == [1, 1]
        # the: 3 bytes; ▁loss stands for a space and 4 letters; ##ing for 3; a byte fallback for 1; EOS for none
        assert tokenizer.token_bytes[[1, 2, 3, 4, 9]].tolist() == [3, 5, 3, 1, 0]


def test_bytes_of_pieces_that_only_look_like_marks():
    """A heading of Markdown counted as no bytes: "##" before a piece goes on within a word in WordPiece alone."""
    vocabulary = {piece: i for i, piece in enumerate(("</s>", "#", "##", "###", "\u2581", "a"))}
    pieces = hf_tokenizers.Tokenizer(hf_tokenizers.models.BPE(vocabulary, [("#", "#"), ("##", "#")]))
    pieces.normalizer = hf_tokenizers.normalizers.Replace(" ", "\u2581")
    tokenizer = HuggingFaceTokenizer(pieces.to_str(), eos="</s>")
    for text in ("## a", "### a", "#"):
        assert tokenizer.token_bytes[tokenizer.encode(text)].sum() == len(text)

    vocabulary = {piece: i for i, piece in enumerate(("</s>", "h", "i", "i</w>", "hi</w>"))}
    ends = hf_tokenizers.models.BPE(vocabulary, [("h", "i</w>")], end_of_word_suffix="</w>")
    tokenizer = HuggingFaceTokenizer(hf_tokenizers.Tokenizer(ends).to_str(), eos="</s>")
    assert tokenizer.encode("hi").tolist() == [4] and tokenizer.token_bytes.tolist() == [0, 1, 1, 1, 2]


@pytest.mark.parametrize(("eos", "text"), [("\n", "a\nb"), ("</s>", "a\uff1c/s\uff1eb")])
def test_a_token_that_text_makes_again_is_no_end_of_documents(eos, text):
    """Documents were cut there: at every line, or where NFKC makes the token of other characters."""
    vocabulary = {piece: i for i, piece in enumerate(("a", "b", eos, *sorted(set("</s>") - {eos})))}
    made = hf_tokenizers.Tokenizer(hf_tokenizers.models.BPE(vocabulary, []))
    made.normalizer = hf_tokenizers.normalizers.NFKC()
    made.add_special_tokens([hf_tokenizers.AddedToken(eos, normalized=True)])
    tokenizer = HuggingFaceTokenizer(made.to_str(), eos=eos)
    assert tokenizer.encode_documents(["ab"])[0].tolist() == [0, 1]
    with pytest.raises(DataError, match="finds its end-of-document token .* Fix: set config.data.tokenizer_eos"):
        tokenizer.encode_documents([text])


def test_hf_tokenizer_eos_comes_from_config_then_settings_then_usual_names(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(word_level(stop=5, end=6))
    config = default_config()
    config.data.tokenizer = "hf"
    config.data.tokenizer_path = str(path)
    assert load_tokenizer(config).eos_id == 9
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "stop"}}')
    assert load_tokenizer(config).eos_id == 5
    config.data.tokenizer_eos = "end"
    assert load_tokenizer(config).eos_id == 6
    config.data.tokenizer_eos = "absent"
    with pytest.raises(DataError, match="absent is in its vocabulary|none of absent.*tokenizer_eos"):
        load_tokenizer(config)


def test_hf_tokenizer_problems_are_explained(tmp_path, monkeypatch):
    config = default_config()
    config.data.tokenizer = "hf"
    with pytest.raises(DataError, match="tokenizer_path=''"):
        load_tokenizer(config)
    config.data.tokenizer_path = str(tmp_path / "absent.json")
    with pytest.raises(DataError, match="absent.json.*cannot be read"):
        load_tokenizer(config)
    (tmp_path / "bad.json").write_text("{}")
    config.data.tokenizer_path = str(tmp_path / "bad.json")
    with pytest.raises(DataError, match="bad.json.*not a tokenizer.json"):
        load_tokenizer(config)
    (tmp_path / "noeos.json").write_text(word_level(eos="other"))
    config.data.tokenizer_path = str(tmp_path / "noeos.json")
    with pytest.raises(DataError, match="noeos.json.*config.data.tokenizer_eos"):
        load_tokenizer(config)

    import huggingface_hub

    def unreachable(*_):
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    config.data.tokenizer_path = "gpt2"
    with pytest.raises(DataError, match="tokenizer_path='gpt2'.*hub.*ConnectionError.*local tokenizer.json"):
        load_tokenizer(config)


def test_unknown_tokenizer_and_too_small_bpe_are_refused(documents):
    config = default_config()
    config.data.tokenizer = "words"
    with pytest.raises(DataError, match="tokenizer='words'.*byte, bpe or hf"):
        load_tokenizer(config)
    with pytest.raises(DataError, match="bpe_vocab_size=100.*at least 257"):
        train_bpe(documents, 100)
    with pytest.raises(DataError, match="no text to train a tokenizer"):
        train_bpe([], 300)
    config.data.tokenizer = "bpe"
    with pytest.raises(DataError, match="no text to train on"):
        load_tokenizer(config)


def test_model_vocabulary_smaller_than_the_tokenizer_is_refused(text_config):
    text_config.model.vocab_size = 256
    with pytest.raises(DataError, match="model.vocab_size=256.*257 ids of the byte tokenizer.*at least 257"):
        make_pipeline(text_config)
    text_config.model.vocab_size = 320
    assert make_pipeline(text_config).tokenizer.vocab_size == 257
