"""Caches that are kept in an object store, against a local S3 server: made on one machine and read on another."""

import errno

import numpy as np
import pytest

from nsa_jax.data import DataError, cache, cache_store, make_pipeline
from nsa_jax.data.sources import TextSource
from nsa_jax.object_store import Folder, StoreError
from nsa_jax.train.preflight.data_check import examine_local
from tests.s3 import bucket, s3, s3fs  # noqa: F401


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Packages try again twice instead of for many seconds."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 2)
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def config(text_config, bucket):  # noqa: F811
    text_config.data.cache_dir = f"s3://{bucket}/caches"
    text_config.data.tokenizer = "bpe"
    text_config.data.bpe_vocab_size = 300
    return text_config


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Moves to the machine of a name, whose disk is empty at first."""
    return lambda name: monkeypatch.setenv("NSA_JAX_CACHE", str(tmp_path / name))


@pytest.fixture
def reads(monkeypatch):
    """Of the text: once to train the tokenizer, once to tokenise."""
    found = []
    documents = TextSource.documents
    monkeypatch.setattr(TextSource, "documents", lambda self: (found.append(1), documents(self))[1])
    return found


def kept(s3, bucket):  # noqa: F811
    """Names below caches/, the hashes left out."""
    found = [name.split("/")[1:] for name in s3.names(bucket)]
    return {"/".join(["bpe" if first.startswith("bpe-") else "corpus", *rest]) for first, *rest in found}


def tokens(pipeline):
    return np.array(pipeline.corpus.train.tokens.array)


def test_another_machine_fetches_tokenizer_and_tokens_instead_of_making_them(config, machine, reads, s3, bucket):  # noqa: F811
    machine("first")
    made = make_pipeline(config)
    names = kept(s3, bucket)
    assert {"bpe/tokenizer_config.json", "bpe/tokenizer.json", "corpus/meta.json", "corpus/statistics.json"} < names
    assert {"corpus/train.tokens", "corpus/train.tokens.crc32", "corpus/validation.hashes"} < names
    assert len(reads) == 2
    machine("second")
    found = make_pipeline(config)
    assert len(reads) == 2 and found.fingerprint == made.fingerprint
    assert np.array_equal(tokens(found), tokens(made)) and len(tokens(found)) > 1000
    assert str(found.corpus.directory).startswith(str(cache.cache_root())) and found.corpus != made.corpus
    for name in ("statistics.json", "tokenizer/tokenizer.json"):
        assert (found.corpus.directory / name).read_bytes() == (made.corpus.directory / name).read_bytes()


def test_half_an_upload_is_never_used_and_is_completed(config, machine, reads, monkeypatch, s3, bucket, caplog):  # noqa: F811
    upload, order = Folder.upload, []

    def lost(self, local, path):
        order.append(path)
        if path.startswith("validation"):
            raise StoreError(f"{self}: the object store does not answer", "check the network")
        upload(self, local, path)

    monkeypatch.setattr(Folder, "upload", lost)
    machine("first")
    made = make_pipeline(config)
    assert "does not answer" in caplog.text and f"The cache is in {made.corpus.directory} alone" in caplog.text
    assert {"corpus/meta.json"}.isdisjoint(kept(s3, bucket)) and "corpus/train.tokens" in kept(s3, bucket)
    assert order.index("tokenizer.json") < order.index("tokenizer_config.json")
    monkeypatch.setattr(Folder, "upload", upload)
    caplog.clear()
    machine("second")  # gets the tokenizer alone
    assert np.array_equal(tokens(make_pipeline(config)), tokens(made)) and len(reads) == 3
    assert "corpus/meta.json" in kept(s3, bucket) and "damaged" not in caplog.text
    s3.delete(bucket, next(name for name in s3.names(bucket) if name.endswith("meta.json")))
    machine("first")  # which has a whole one
    make_pipeline(config)
    assert "corpus/meta.json" in kept(s3, bucket) and len(reads) == 3


def test_denied_writes_are_a_warning_and_the_next_start_uploads(config, machine, reads, s3, bucket, caplog):  # noqa: F811
    machine("first")
    with s3.denying(bucket):
        made = make_pipeline(config)
        assert "access is denied" in caplog.text and "The cache is in" in caplog.text and "tries again" in caplog.text
        assert not kept(s3, bucket)
    assert np.array_equal(tokens(make_pipeline(config)), tokens(made)) and len(reads) == 2
    assert {"corpus/meta.json", "bpe/tokenizer_config.json"} < kept(s3, bucket)


def test_a_store_that_cannot_be_read_is_named_before_anything_is_tokenised(config, machine, reads, s3, bucket, caplog):  # noqa: F811
    machine("first")
    config.data.cache_dir = f"s3://{bucket}-not/caches"
    with pytest.raises(DataError, match=r"config.data.cache_dir=s3://.*-not.*Fix: create the bucket.*local directory"):
        make_pipeline(config)
    assert not reads
    config.data.cache_dir = f"s3://{bucket}/caches"
    made = make_pipeline(config)
    s3.stop()
    try:  # what is on this machine serves
        assert np.array_equal(tokens(make_pipeline(config)), tokens(made)) and len(reads) == 2
        assert "does not answer" in caplog.text
        machine("second")
        with pytest.raises(DataError, match=r"config.data.cache_dir=.*does not answer.*check the network"):
            make_pipeline(config)
    finally:
        s3.start()


def test_a_damaged_cache_is_made_again_and_replaced(config, machine, reads, s3, bucket, caplog):  # noqa: F811
    machine("first")
    made = make_pipeline(config)
    name = next(name for name in s3.names(bucket) if name.endswith("train.tokens"))
    whole = s3.get(bucket, name)
    s3.put(bucket, name, whole[:100] + b"\xff" + whole[101:])
    machine("second")
    assert np.array_equal(tokens(make_pipeline(config)), tokens(made)) and len(reads) == 3
    assert "is damaged: it is made again" in caplog.text
    assert s3.get(bucket, name) == whole and "corpus/meta.json" in kept(s3, bucket)
    assert not [path for path in cache.cache_root().iterdir() if path.name.endswith(".fetched")]


def test_a_full_disk_is_not_taken_for_a_store_that_fails(config, machine, monkeypatch):
    machine("first")
    make_pipeline(config)
    machine("second")

    async def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(s3fs.S3FileSystem, "_get_file", full)
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(DataError, match=f"cache directory {cache.cache_root()}: no space left"):
        make_pipeline(config)
    assert not list(cache.cache_root().glob("*.fetched"))


def test_objects_outside_of_the_cache_are_not_written(config, machine, s3, bucket, tmp_path):  # noqa: F811
    machine("first")
    directory = make_pipeline(config).corpus.directory
    s3.put(bucket, f"caches/{directory.name}/../../outside", b"x")
    machine("second")
    make_pipeline(config)
    assert not list(tmp_path.rglob("outside"))


def test_preflight_and_token_files_leave_the_store_alone(config, machine, monkeypatch, tmp_path, s3, bucket):  # noqa: F811
    machine("first")
    monkeypatch.setattr(cache_store, "Folder", None)
    monkeypatch.setattr("nsa_jax.train.preflight.data_check._is_small_and_local", lambda config: False)
    (problem,) = examine_local(config).problems
    assert problem.rule == "R028" and "source text: its tokens are not in the cache yet" in problem.message
    row = np.arange(100, dtype=np.uint16)
    row[-1] = 256  # EOS
    np.tile(row, 50).tofile(tmp_path / "a.bin")
    config.data.update(source="tokens", files=(str(tmp_path / "a.bin"),), tokenizer="byte")
    assert make_pipeline(config).corpus.train.stats.documents > 20


def test_the_local_copies_are_in_the_default_directory(machine, tmp_path):
    machine("first")
    assert cache.cache_root("s3://bucket/caches") == cache.cache_root("gs://bucket") == tmp_path / "first"
    assert cache.cache_root(str(tmp_path / "own")) == tmp_path / "own"
    assert cache.store_address("gs://bucket/caches") == "gs://bucket/caches" and not cache.store_address("/caches")
