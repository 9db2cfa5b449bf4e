"""Text files in an object store, read from a local server."""

import gzip

import pytest
import zstandard

from nsa_jax.data import DataError
from nsa_jax.data.sources import TextSource
from tests.s3 import bucket, s3  # noqa: F401

TEXTS = ["first\n", "second " * 5000, "third ünïcode"]


@pytest.fixture
def corpus(s3, bucket):  # noqa: F811
    s3.put(bucket, "a/1.txt", TEXTS[0].encode())
    s3.put(bucket, "a/2.txt.gz", gzip.compress(TEXTS[1].encode()))
    s3.put(bucket, "a/b/3.txt.zst", zstandard.compress(TEXTS[2].encode()))
    s3.put(bucket, "other/4.md", b"no text")
    return f"s3://{bucket}"


def test_plain_and_compressed_objects_are_read_in_order(s3, corpus, tmp_path):  # noqa: F811
    (tmp_path / "local.txt").write_text("local")
    source = TextSource((f"{corpus}/a/**", tmp_path / "local.txt", f"{corpus}/a/1.txt"))
    assert list(source.documents()) == [*TEXTS, "local"]
    assert source.files[:3] == [f"{corpus}/a/{name}" for name in ("1.txt", "2.txt.gz", "b/3.txt.zst")]
    assert TextSource(f"{corpus}/other/*.md").size_bytes() == 7


def test_the_fingerprint_changes_with_an_object(s3, bucket, corpus):  # noqa: F811
    before = TextSource(f"{corpus}/a/1.txt").fingerprint()
    assert TextSource(f"{corpus}/a/1.txt").fingerprint() == before
    s3.put(bucket, "a/1.txt", b"FIRST\n")  # as long as before
    assert TextSource(f"{corpus}/a/1.txt").fingerprint() != before


def test_mistakes_and_denials_are_named(s3, bucket, corpus):  # noqa: F811
    with pytest.raises(DataError, match=r"'s3://.*/none/\*'.*matches no object"):
        TextSource(f"{corpus}/none/*")
    with pytest.raises(DataError, match=r"no-such-bucket-here/\*.txt': matches no object. Fix: correct the address"):
        TextSource("s3://no-such-bucket-here/*.txt")
    source = TextSource(f"{corpus}/a/*")
    with s3.denying(bucket, "s3:GetObject"):
        with pytest.raises(DataError, match=r"a/1.txt: access is denied .*use credentials that may list, read"):
            list(source.documents())
    s3.put(bucket, "a/2.txt.gz", gzip.compress(b"x" * 10000)[:-12])
    with pytest.raises(DataError, match="a/2.txt.gz: cannot be read .*replace the file or leave it out"):
        list(TextSource(f"{corpus}/a/*.gz").documents())
