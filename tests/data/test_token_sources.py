import pickle
import shutil
import struct

import chex
import numpy as np
import pytest

from nsa_jax import object_store
from nsa_jax.config import ConfigError, check, default_config
from nsa_jax.data import DataError, make_pipeline, shards, token_sources

EOS = 256


@pytest.fixture
def tokens(documents):
    """The documents as the byte tokenizer's ids."""
    return [np.frombuffer(text.encode(), np.uint8).astype(np.int64) for text in documents]


def stream(documents, first=False):
    return np.concatenate([part for d in documents for part in (([EOS], d) if first else (d, [EOS]))])


def write_megatron(path, documents, *, eod=True, dtype="uint16", pieces=1):
    """Each document in `pieces` sequences."""
    sequences, firsts = [], [0]
    for document in documents:
        sequences += np.array_split(np.append(document, EOS) if eod else document, pieces)
        firsts.append(len(sequences))
    lengths = np.array([len(s) for s in sequences], "<i4")
    data = np.concatenate(sequences).astype(dtype)
    data.tofile(path.with_suffix(".bin"))
    code = {"uint16": 8, "int32": 4}[dtype]
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(firsts))
    positions = (np.cumsum(lengths, dtype="<i8") - lengths) * data.itemsize
    path.with_suffix(".idx").write_bytes(
        head + lengths.tobytes() + positions.astype("<i8").tobytes() + np.array(firsts, "<i8").tobytes()
    )


def write_llm_c(path, data, count=None):
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(data) if count is None else count
    path.write_bytes(header.tobytes() + data.astype("<u2").tobytes())


def write(kind, directory, tokens, write_rows):
    """Writes the documents, and returns the fields of config.data that name them."""
    directory.mkdir(exist_ok=True)
    bins = {"source": "tokens", "files": (str(directory / "*.bin"),)}
    if kind == "nanogpt":
        stream(tokens).astype(np.uint16).tofile(directory / "train.bin")
    elif kind == "llm.c":  # documents begin with EOS, and files are cut anywhere
        data = stream(tokens, first=True)
        write_llm_c(directory / "0.bin", data[:7001])
        write_llm_c(directory / "1.bin", data[7001:])
    elif kind == "megatron":
        write_megatron(directory / "a", tokens[:100], pieces=3)
        write_megatron(directory / "b", tokens[100:], dtype="int32")
    elif kind == "megatron without EOS":
        write_megatron(directory / "a", tokens, eod=False)
    elif kind == "disk":
        import datasets

        made = datasets.Dataset.from_dict({"ids": [t.tolist() for t in tokens]})
        made.save_to_disk(str(directory / "saved"), num_shards=3)
        return {"source": "hf", "hf_path": str(directory / "saved"), "hf_tokens_field": "ids"}
    else:
        rows = write_rows(directory, kind, [t.tolist() for t in tokens], field="ids")
        return {"source": "hf", "hf_path": kind, "hf_data_files": (rows,), "hf_tokens_field": "ids"}
    return bins


def make_config(fields, val_fraction=0.2):
    config = default_config()
    config.allow_dense_regime = True
    config.data.update(fields)
    config.data.seq_len, config.data.val_fraction = 48, val_fraction
    config.train.batch_size, config.train.eval_batches = 8, 4
    return config


KINDS = ["nanogpt", "llm.c", "megatron", "megatron without EOS", "parquet", "json", "disk"]


@pytest.mark.parametrize("kind", KINDS)
def test_documents_are_split_and_read_where_they_are(kind, tokens, tmp_path, hf_home, write_rows):
    config = make_config(write(kind, tmp_path / "in", tokens, write_rows))
    check(config)
    corpus = make_pipeline(config).corpus
    assert not list(corpus.directory.glob("*.tokens")) and corpus.validation.stats.documents > 30
    sides = {tuple(t): [] for t in tokens}
    for split in (corpus.train, corpus.validation):
        found = [split.document(i) for i in range(split.stats.documents)]
        for ids in found:
            sides[tuple(ids)].append(split.name)
        assert [tuple(ids) for ids in found] == [tuple(t) for t in tokens if split.name in sides[tuple(t)]]
        whole = stream(found)
        assert split.stats.tokens == len(whole) == split.stats.bytes + len(found)
        view = pickle.loads(pickle.dumps(split.tokens))
        chex.assert_trees_all_equal(view.array, whole.astype(np.int32))
        rng = np.random.default_rng(0)
        for low, high in np.sort(rng.integers(0, len(whole) + 1, (50, 2))):
            chex.assert_trees_all_equal(view[low:high], whole[low:high].astype(np.int32))
    assert all(len(names) == 1 for names in sides.values())


def test_every_format_gives_the_same_batches(tokens, tmp_path, hf_home, write_rows):
    batches = []
    for kind in KINDS:
        pipeline = make_pipeline(make_config(write(kind, tmp_path / kind, tokens, write_rows)))
        batches.append([next(pipeline.train(step)) for step in (0, 90)] + [next(iter(pipeline.validation()))])
        chex.assert_trees_all_equal(batches[-1], batches[0])


def test_without_held_out_documents_the_batches_are_those_of_the_text(tokens, text_config, tmp_path, write_rows):
    text_config.data.val_fraction = 0.0
    fields = write("nanogpt", tmp_path / "in", tokens, write_rows)
    text, ours = (make_pipeline(c).train(3) for c in (text_config, make_config(fields, 0.0)))
    text_rows, our_rows = next(text), next(ours)
    assert text_rows["inputs"].shape == our_rows["inputs"].shape
    paths = sorted((tmp_path / "corpus").rglob("*.txt"))
    in_order = [np.frombuffer(path.read_bytes(), np.uint8) for path in paths]
    stream(in_order).astype(np.uint16).tofile(tmp_path / "in" / "train.bin")
    chex.assert_trees_all_equal(next(make_pipeline(make_config(fields, 0.0)).train(3)), text_rows)


def test_a_document_of_one_token_that_is_held_out_is_not_read_with_those_beside_it(tmp_path):
    """Without an end-of-document token it takes as much room in the file as the end that is put in its place."""
    documents = [np.random.default_rng(i).integers(0, 256, 1 + i % 2) for i in range(300)]
    write_megatron(tmp_path / "a", documents, eod=False)
    fields = {"source": "tokens", "files": (str(tmp_path / "a.bin"),)}
    split = make_pipeline(make_config(fields, 0.3)).corpus.train
    assert 100 < split.stats.documents < 290
    ends = split.offsets[1:] - 1
    assert (split.tokens[:][ends] == EOS).all()
    assert np.count_nonzero(split.tokens[:] == EOS) == split.stats.documents
    assert all(split.tokens[end : end + 1][0] == EOS for end in ends)


def test_an_index_is_used_again_until_a_file_changes(tokens, tmp_path, monkeypatch, write_rows):
    config = make_config(write("nanogpt", tmp_path / "in", tokens, write_rows))
    first = make_pipeline(config).corpus
    with monkeypatch.context() as patch:
        patch.delattr(token_sources, "_index")
        assert make_pipeline(config).corpus.directory == first.directory
        assert make_pipeline(config, cached_only=True).corpus.directory == first.directory
    first.train.tokens[:10]
    path = tmp_path / "in" / "train.bin"
    data = np.fromfile(path, np.uint16)
    data[:] = 300
    with open(path, "r+b") as file:  # the same file, as a run that reads it sees it
        file.write(data.tobytes())
    with pytest.raises(DataError, match=r"now holds ids outside \[0, 257\).*start again"):
        first.train.tokens[:50]
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(DataError, match="train.bin.*has become shorter"):
        first.train.tokens[5000:5010]
    stream(tokens[:100]).astype(np.uint16).tofile(path)
    assert make_pipeline(config).corpus.directory != first.directory


def test_max_documents_limits_the_index(tokens, tmp_path, monkeypatch, write_rows, capsys):
    monkeypatch.setattr(token_sources, "_CHUNK", 1000)
    monkeypatch.setattr(shards, "_LINE_SECONDS", 0.0)
    config = make_config(write("llm.c", tmp_path / "in", tokens, write_rows))
    config.data.max_documents = 123
    corpus = make_pipeline(config).corpus
    assert corpus.train.stats.documents + corpus.validation.stats.documents == 123
    config.data.max_documents = 0
    corpus = make_pipeline(config).corpus
    assert corpus.train.stats.documents + corpus.validation.stats.documents == 300
    assert "looking up documents of tokens on " in (line := capsys.readouterr().err.splitlines()[-1])
    assert "300 documents, " in line and "0.0 min remaining" in line


def test_unusable_files_are_named(tokens, tmp_path, write_rows):
    directory = tmp_path / "in"
    config = make_config(write("nanogpt", directory, tokens, write_rows))
    path = directory / "train.bin"
    good = path.read_bytes()

    def refused(match):
        with pytest.raises(DataError, match=match):
            make_pipeline(config)

    data = np.frombuffer(good, np.uint16).copy()
    data[5000] = 257
    path.write_bytes(data.tobytes())
    refused(r"train.bin, token 5,000: the id is 257, and the byte tokenizer has 257 ids")
    path.write_bytes(good + b"x")
    refused("train.bin: .* bytes are not uint16")
    data[data >= EOS] = 7
    path.write_bytes(data.tobytes())
    refused("train.bin: holds no end-of-document token .id 256.*tokenizer_eos")
    for wider in (np.uint32, np.int64):
        path.write_bytes(np.frombuffer(good, np.uint16).astype(wider).tobytes())
        refused("train.bin: every second uint16 is 0, as in a file of uint32 or int64.*write the tokens as uint16")
    np.save(tmp_path / "array.npy", data)
    shutil.copy(tmp_path / "array.npy", path)
    refused(r"train.bin: is a .npy file.*Fix: write the numbers alone: array.astype\(np.uint16\).tofile")
    write_llm_c(path, data, count=5)
    refused("bytes are not a header and 5 tokens")
    write_megatron(path, tokens)
    index = path.with_suffix(".idx").read_bytes()
    path.with_suffix(".idx").write_bytes(b"x" + index[1:])
    refused("train.idx: is no index of Megatron")
    path.with_suffix(".idx").write_bytes(index[:-9])
    refused("train.idx: is no index of Megatron")
    path.with_suffix(".idx").write_bytes(index)
    path.write_bytes(path.read_bytes()[:1000])
    refused("train.idx: names tokens that the .bin file does not hold")
    config.data.tokenizer = "bpe"
    refused("holds tokens, and a tokenizer cannot be trained on them")


def test_unusable_columns_are_named(tokens, documents, tmp_path, hf_home, write_rows):
    import datasets

    rows = write_rows(tmp_path / "in", "parquet", documents)
    fields = {"source": "hf", "hf_path": "parquet", "hf_data_files": (rows,), "hf_tokens_field": "text"}
    with pytest.raises(DataError, match="column 'text' cannot be read as lists of token ids"):
        make_pipeline(make_config(fields))
    made = datasets.Dataset.from_dict({"ids": [[1, 2, -3]] * 9})
    made.save_to_disk(str(tmp_path / "saved"))
    config = make_config({"source": "hf", "hf_path": str(tmp_path / "saved"), "hf_tokens_field": "ids"})
    with pytest.raises(DataError, match="token 2: the id is -3"):
        make_pipeline(config)
    config = make_config(write("parquet", tmp_path / "ids", tokens, write_rows))
    config.data.hf_split = "train[:50%]"
    with pytest.raises(DataError, match="150 rows in an order of its own, its files have 300.*save_to_disk"):
        make_pipeline(config)


def test_rules_refuse_what_needs_text():
    config = make_config({"source": "hf", "hf_path": "x", "hf_tokens_field": "ids", "hf_streaming": True})
    config.data.tokenizer = "bpe"
    with pytest.raises(ConfigError, match="(?s)no text to train it on.*streams hold text"):
        check(config)


@pytest.mark.parametrize("field", ["files", "val_files"])
def test_token_files_in_an_object_store_are_refused(field, tokens, tmp_path, write_rows, monkeypatch):
    monkeypatch.setattr(object_store, "matching", lambda pattern: [object_store.Object(pattern, 1000, "1")])
    config = default_config()
    config.data.update(write("nanogpt", tmp_path, tokens, write_rows))
    config.data[field] = ("s3://bucket/a.bin",)
    with pytest.raises(DataError, match=rf"config.data.{field}: s3://bucket/a.bin: lies in an object store.*copy it"):
        make_pipeline(config)
