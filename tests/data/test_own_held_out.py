"""Held-out documents of the user's own: files and splits beside those that are trained on."""

import itertools

import numpy as np
import pytest

from nsa_jax.config import ConfigError, check, default_config, validate
from nsa_jax.data import DataError, make_pipeline
from nsa_jax.data.cache import content_hash
from nsa_jax.data.statistics import corpus_report
from nsa_jax.evaluate import held_out_documents
from nsa_jax.train.preflight.data_check import check_splits, examine

EOS = 256


def write_bin(path, texts):
    ids = [np.append(np.frombuffer(text.encode(), np.uint8), EOS) for text in texts]
    np.concatenate(ids).astype(np.uint16).tofile(path)


@pytest.fixture(params=["text", "tokens", "hf column", "hf json"])
def config(request, tmp_path, documents, write_rows, hf_home):
    """250 documents to train on and 50 that are held out."""
    train, held_out = documents[:250], documents[250:]
    c = default_config()
    c.allow_dense_regime = True
    c.data.seq_len, c.train.batch_size, c.train.eval_batches, c.data.prefetch = 48, 8, 1000, 2
    if request.param == "text":
        for name, texts in (("train", train), ("val", held_out)):
            (tmp_path / f"{name}.txt").write_text("<|>".join(texts), encoding="utf-8")
        c.data.update(source="text", text_separator="<|>")
        c.data.files, c.data.val_files = (str(tmp_path / "train.txt"),), (str(tmp_path / "val.txt"),)
    elif request.param == "tokens":
        write_bin(tmp_path / "train.bin", train)
        write_bin(tmp_path / "val.bin", held_out)
        c.data.source = "tokens"
        c.data.files, c.data.val_files = (str(tmp_path / "train.bin"),), (str(tmp_path / "val.bin"),)
    elif request.param == "hf column":
        import datasets

        splits = {"train": train, "validation": held_out}
        rows = {name: {"ids": [list(t.encode()) for t in texts]} for name, texts in splits.items()}
        made = datasets.DatasetDict({name: datasets.Dataset.from_dict(ids) for name, ids in rows.items()})
        made.save_to_disk(str(tmp_path / "saved"))
        c.data.update(source="hf", hf_path=str(tmp_path / "saved"), hf_tokens_field="ids", hf_val_split="validation")
    else:
        rows = write_rows(tmp_path / "json", "json", documents)
        c.data.update(source="hf", hf_path="json", hf_data_files=(rows,))
        c.data.update(hf_split="train[:250]", hf_val_split="train[250:]")
    return c


def texts_of(split):
    return [bytes(split.document(i).astype(np.uint8)).decode() for i in range(split.stats.documents)]


def test_all_other_documents_are_trained_on_and_these_are_held_out(config, documents):
    pipeline = make_pipeline(config)
    assert texts_of(pipeline.corpus.train) == [text for text in documents[:250]]
    assert texts_of(pipeline.corpus.validation) == [text for text in documents[250:]]
    assert pipeline.stats["train"].documents == 250 and pipeline.stats["validation"].documents == 50
    held_out = np.concatenate([b["inputs"][b["loss_mask"].any(1)].ravel() for b in pipeline.validation()])
    stream = np.concatenate([np.append(np.frombuffer(t.encode(), np.uint8), EOS) for t in documents[250:]])
    np.testing.assert_array_equal(held_out[: len(stream) - 48], stream[: len(stream) - 48])
    assert corpus_report(pipeline.corpus).overlap_documents == 0
    scored = held_out_documents(config, (), pipeline.tokenizer, 10**6).documents
    assert len(scored) == 50
    again = make_pipeline(config, cached_only=True)  # both are in the cache now
    assert again.fingerprint == pipeline.fingerprint
    config.data.val_files, config.data.hf_val_split = (), ""
    assert make_pipeline(config).fingerprint != pipeline.fingerprint


def test_nothing_is_built_where_the_cache_alone_may_be_read(config):
    with pytest.raises(DataError, match="not in the cache yet"):
        make_pipeline(config, cached_only=True)


@pytest.fixture
def files(text_config, tmp_path):
    held_out = tmp_path / "held_out.txt"
    held_out.write_text("what nobody else wrote " * 20)
    text_config.data.val_files = (str(held_out),)
    return text_config, held_out


def test_a_file_is_either_trained_on_or_held_out(files, tmp_path):
    config, held_out = files
    config.data.files = (*config.data.files, str(tmp_path / "*.txt"))
    config.data.cache_dir = str(tmp_path / "cache")
    with pytest.raises(DataError, match=r"config.data.val_files entry '.*held_out.txt'.*also trained on"):
        make_pipeline(config)
    config.data.val_files = (str(tmp_path / "nowhere.txt"),)
    with pytest.raises(DataError, match=r"config.data.val_files entry '.*nowhere.txt'.*matches no file"):
        make_pipeline(config)
    assert not list((tmp_path / "cache").rglob("meta.json"))  # told before anything was tokenised


def test_held_out_files_without_text_are_told_from_those_that_are_trained_on(files):
    config, held_out = files
    held_out.write_text("\n")
    with pytest.raises(DataError, match="held-out documents: source text: the corpus is empty"):
        make_pipeline(config)


def test_documents_in_both_are_counted_and_told(files, documents):
    config, held_out = files
    before = make_pipeline(config).fingerprint
    held_out.write_text(documents[7])
    pipeline = make_pipeline(config)
    assert pipeline.fingerprint != before
    assert int(pipeline.corpus.validation.hashes[0]) == content_hash(documents[7].encode())
    assert corpus_report(pipeline.corpus).overlap_documents == 1
    rows = np.concatenate([batch["inputs"] for batch in itertools.islice(pipeline.train(), 4)])
    problems, _ = check_splits(pipeline, rows, 48)
    (told,) = [p for p in problems if "also held out" in p.message]
    assert told.rule == "R030" and told.severity == "warning" and told.message.startswith("1 training document")


def test_a_saved_data_set_of_one_split_has_no_other(config, tmp_path):
    import datasets

    if config.data.source != "hf" or not config.data.hf_tokens_field:
        pytest.skip("of token columns")
    rows = {"ids": [list(f"document {i}".encode()) for i in range(100)]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "one"))
    config.data.hf_path = str(tmp_path / "one")
    with pytest.raises(DataError, match="holds one split .*, not 'validation'.*DatasetDict"):
        make_pipeline(config)
    config.data.hf_val_split, config.train.eval_batches = "", 0
    assert make_pipeline(config).corpus.train.stats.documents > 90


def test_held_out_files_are_those_of_each_source(files, tmp_path):
    config, held_out = files
    other = tmp_path / "other.txt"
    other.write_text("\n".join(f"line {i} of the other source" for i in range(900)))
    config.data.val_files = ()
    config.data.text_separator = "\n"
    config.data.sources = {"a": {"val_files": (str(held_out),)}, "b": {"files": (str(other),)}}
    parts = make_pipeline(config).parts
    assert texts_of(parts["a"].pipeline.corpus.validation) == [("what nobody else wrote " * 20)]
    held_out_of_b = texts_of(parts["b"].pipeline.corpus.validation)
    assert 100 < len(held_out_of_b) < 260 and all(text.endswith("other source") for text in held_out_of_b)


def test_a_source_does_not_train_on_what_another_one_holds_out(files, tmp_path):
    config, held_out = files
    config.data.val_files = ()
    config.data.sources = {"a": {"val_files": (str(held_out),)}, "b": {"files": (str(tmp_path / "held*.txt"),)}}
    with pytest.raises(DataError, match=r"sources.a: .*val_files entry '.*held_out.txt'.*trained on by the source b"):
        make_pipeline(config)
    config.data.sources = {"a": {"val_files": ("nowhere.txt",)}, "b": {"files": (str(tmp_path / "held*.txt"),)}}
    with pytest.raises(DataError, match=r"sources.a: .*val_files entry 'nowhere.txt': matches no file"):
        make_pipeline(config)
    copy = tmp_path / "copy.txt"
    copy.write_text(held_out.read_text() + "<|>" + "and more " * 400)
    config.data.text_separator = "<|>"
    config.data.sources = {"a": {"val_files": (str(held_out),)}, "b": {"files": (str(copy),)}}
    config.data.val_fraction = 1e-9
    config.train.eval_batches = 0
    problems = [p for p in examine(config, make_pipeline(config)).problems if "by the source" in p.message]
    assert [(p.rule, p.severity) for p in problems] == [("R030", "warning")]
    assert problems[0].message.startswith("config.data.sources.b: 1 training documents are held out by the source a")


def test_a_tokenizer_is_trained_on_all_that_is_not_held_out(files):
    config, _ = files
    config.data.tokenizer, config.data.bpe_vocab_size = "bpe", 400
    tokenizer = make_pipeline(config).tokenizer
    assert len(tokenizer.encode("nobody")) > 2  # a word of the held-out text alone
    assert len(tokenizer.encode(" the")) <= 2 or tokenizer.vocab_size == 400


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            dict(source="stdlib", val_files=("a.txt",)),
            r"config.data.val_files=\('a.txt',\): source stdlib does not read",
        ),
        (dict(source="hf", hf_path="x", val_files=("a.txt",)), "(?s)source hf does not read files.*hf_val_split"),
        (dict(source="stdlib", hf_val_split="test"), "config.data.hf_val_split='test': source stdlib has no splits"),
        (dict(source="hf", hf_path="x", hf_streaming=True, hf_val_split="test"), "streams hold documents out by"),
    ],
)
def test_rules_refuse_what_a_source_does_not_have(fields, message):
    config = default_config()
    config.data.update(fields)
    with pytest.raises(ConfigError, match=message):
        check(config)


def test_no_share_is_needed_beside_them():
    config = default_config()
    config.data.update(source="text", files=("a.txt",), val_fraction=0.0)
    assert any(p.rule == "R009" for p in validate(config))
    config.data.val_files = ("b.txt",)
    assert not any(p.rule == "R009" for p in validate(config))
    config.data.val_files = ()
    config.data.sources = {"a": {"val_files": ("b.txt",)}, "t": {"source": "task", "weight": 0.5}}
    assert not any(p.rule == "R009" for p in validate(config))
    config.data.sources.b = {"files": ("c.txt",)}
    assert any(p.rule == "R009" for p in validate(config))
