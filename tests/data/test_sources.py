import gzip
import json
import os
import pickle
import sys

import pytest
import zstandard

from nsa_jax.config import default_config
from nsa_jax.data import DataError, cache, documents, sources, streaming
from nsa_jax.data.encoding import content_hash, document_hash, to_bytes
from nsa_jax.data.sources import HuggingFaceSource, LimitedSource, StdlibSource, TextSource, TreeSource
from nsa_jax.data.tokenizers import ByteTokenizer


def test_stdlib_is_large_real_text_without_packages():
    source = StdlibSource()
    names = [name for name, _ in source.files()]
    assert "dataclasses.py" in names and "json/decoder.py" in names
    assert not [n for n in names if "site-packages" in n or "__pycache__" in n]
    assert 5e6 < source.size_bytes() < 1e8
    assert source.fingerprint() == StdlibSource().fingerprint()


def test_stdlib_skips_files_that_are_not_utf8(tmp_path):
    (tmp_path / "good.py").write_text("x = 'é'\n", encoding="utf-8")
    (tmp_path / "latin.py").write_bytes("# coding: latin-1\nx = 'é'\n".encode("latin-1"))
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "installed.py").write_text("y = 1\n")
    assert list(StdlibSource(tmp_path).documents()) == ["x = 'é'\n"]


def test_the_mark_of_utf8_files_is_no_text(tmp_path):
    """Editors of Windows begin files with it."""
    text = "\ufeffcafé\n"
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text.encode()))
    write_tree(tmp_path, "tree", {"a.py": text})
    assert list(TextSource((f"{tmp_path}/a.txt", f"{tmp_path}/a.txt.gz")).documents()) == ["café\n"] * 2
    assert list(TreeSource(f"{tmp_path}/tree").documents()) == ["# tree/a.py\ncafé\n\n"]
    assert list(StdlibSource(tmp_path / "tree").documents()) == ["café\n"]


def write_tree(root, name, files):
    for path, text in files.items():
        (root / name / path).parent.mkdir(parents=True, exist_ok=True)
        (root / name / path).write_bytes(text if isinstance(text, bytes) else text.encode())


def test_trees_join_their_files_in_order(tmp_path):
    write_tree(
        tmp_path, "b", {"z.py": "z = 1\n", "a/x.md": "é\n\n", "a/no.bin": "0", "a/latin.py": "é".encode("latin-1")}
    )
    write_tree(tmp_path, "a", {"__init__.py": "", "y.py": "y"})
    source = TreeSource(f"{tmp_path}/*")
    assert list(source.documents()) == ["# a/y.py\ny\n\n", "# b/a/x.md\né\n\n# b/z.py\nz = 1\n\n"]
    before = source.fingerprint()
    assert [str(text)[:7] for text in TreeSource(f"{tmp_path}/*", least=15).documents()] == ["# b/a/x"]
    write_tree(tmp_path, "a", {"y.py": "longer"})
    assert TreeSource(f"{tmp_path}/*").fingerprint() != before != TreeSource(f"{tmp_path}/*", least=15).fingerprint()
    with pytest.raises(DataError, match="matches no folder"):
        TreeSource(f"{tmp_path}/c*")


def test_whole_trees_are_held_out(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "MAX_DOCUMENT_CHARS", 1000)
    for tree in range(40):
        write_tree(
            tmp_path / "trees", f"p{tree}", {f"{i}.py": f"tree {tree} file {i} = {'x' * 300}\n" for i in range(9)}
        )
    source = TreeSource(f"{tmp_path}/trees/*")
    pieces = list(source.documents())
    assert len(pieces) == 40 * 3 and all(600 < len(piece) < 1400 for piece in pieces)
    assert pickle.loads(pickle.dumps(to_bytes(pieces[0]))).group == "p0"
    corpus = cache.load_corpus(source, ByteTokenizer(), val_fraction=0.3, root=tmp_path / "cache")
    assert corpus.validation.stats.documents % 3 == 0 and 3 <= corpus.validation.stats.documents <= 100
    assert len(set(corpus.train.hashes.tolist())) == corpus.train.stats.documents, "they are no duplicates"
    assert document_hash(b"text") == content_hash(b"text")
    of_tree = {str(piece): piece.group for piece in pieces}
    groups = [
        {of_tree[bytes(split.document(i).astype("uint8")).decode()] for i in range(split.stats.documents)}
        for split in (corpus.train, corpus.validation)
    ]
    assert not groups[0] & groups[1] and len(groups[0] | groups[1]) == 40


def test_text_reads_plain_gz_and_zst_alike(tmp_path):
    text = "A line with ünïcode €.\nAnother.\r\n" * 50
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(text.encode()))
    # Two frames, as `cat x.zst y.zst` or a parallel compressor leaves them.
    half = len(text.encode()) // 2
    frames = [zstandard.compress(part) for part in (text.encode()[:half], text.encode()[half:])]
    (tmp_path / "c.txt.zst").write_bytes(b"".join(frames))
    assert list(TextSource((str(tmp_path / "*"),)).documents()) == [text] * 3


def test_zst_of_the_largest_window_is_read(tmp_path):
    text = "a line of a dump\n" * 500
    settings = zstandard.ZstdCompressionParameters.from_level(3, window_log=31, enable_ldm=True)  # zstd --long=31
    frame = zstandard.ZstdCompressor(compression_params=settings).compressobj()  # which does not know the text's size
    (tmp_path / "a.txt.zst").write_bytes(frame.compress(text.encode()) + frame.flush())
    assert list(TextSource((str(tmp_path / "a.txt.zst"),)).documents()) == [text]


def test_text_lists_each_file_once_and_takes_a_comma_separated_string(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    source = TextSource(f"{tmp_path}/b.txt,{tmp_path}/*.txt")
    assert list(source.documents()) == ["b.txt", "a.txt"]


def test_text_separator_makes_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_READ_BYTES", 7)  # separators fall across reads
    documents = ["first", "", "second one", "third\nwith lines"]
    (tmp_path / "a.txt").write_text("<|sep|>".join(documents))
    assert list(TextSource(tmp_path / "a.txt", separator="<|sep|>").documents()) == documents


@pytest.mark.parametrize("separator", ["", "\n\n"])
def test_text_cuts_long_documents_at_line_ends(tmp_path, monkeypatch, separator):
    monkeypatch.setattr(documents, "MAX_DOCUMENT_CHARS", 100)
    monkeypatch.setattr(sources, "_READ_BYTES", 33)
    text = "".join(f"line number {i} of the file\n" for i in range(60)) + "x" * 450
    (tmp_path / "a.txt").write_text(text)
    pieces = list(TextSource(tmp_path / "a.txt", separator=separator).documents())
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 100 and len(pieces) > 15
    assert all(p.endswith("\n") for p in pieces[:10])


def test_a_separator_that_is_in_no_file_is_told(tmp_path, caplog):
    (tmp_path / "a.txt").write_text("one\r\n\r\ntwo", newline="")
    assert len(list(TextSource(tmp_path / "a.txt", separator="\r\n\r\n").documents())) == 2 and not caplog.text
    assert len(list(TextSource(tmp_path / "a.txt", separator="\n\n").documents())) == 1
    assert r"text_separator='\n\n' is in none of the 1 files" in caplog.text and r"have '\r\n'" in caplog.text


def test_text_fingerprint_follows_the_files(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    before = TextSource(path).fingerprint()
    assert TextSource(path).fingerprint() == before
    assert TextSource(path, separator="\n").fingerprint() != before
    path.write_text("two")
    os.utime(path, ns=(1, 1))
    assert TextSource(path).fingerprint() != before


def test_text_without_files_or_matches_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"config.data.files=\(\).*no files.*Fix: list files"):
        TextSource(())
    with pytest.raises(DataError, match=r"nothing\*\.txt.*matches no file"):
        TextSource((f"{tmp_path}/nothing*.txt",))
    with pytest.raises(DataError, match=r"is a directory.*\*\*/\*\.txt"):
        TextSource((str(tmp_path),))


def test_a_link_whose_file_is_gone_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").symlink_to(tmp_path / "unmounted" / "b.txt")
    with pytest.raises(DataError, match=r"b\.txt: is a link to .*unmounted/b.txt, which does not exist.*Fix:"):
        TextSource((f"{tmp_path}/*.txt",))


def _zst_cut_short():
    return zstandard.compress(b"some text that compresses " * 4000 + b"".join(b"%d " % i for i in range(9999)))[:-40]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("latin.txt", lambda: "caf\xe9 noir".encode("latin-1"), "not UTF-8 text"),
        ("cut.txt", lambda: "caf\xe9".encode()[:-1], "not UTF-8 text"),
        ("broken.gz", lambda: b"not gzip at all", "cannot be read"),
        ("cut.txt.zst", _zst_cut_short, "cannot be read .*ended before"),
        ("broken.zst", lambda: b"not zstd at all", "cannot be read"),
    ],
)
def test_unreadable_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content())
    with pytest.raises(DataError, match=f"{name}: {message}.*Fix:"):
        list(TextSource(tmp_path / name).documents())


def test_truncated_gzip_is_named(tmp_path):
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"plain text, " * 5000)[:-12])
    with pytest.raises(DataError, match="cut.gz: cannot be read"):
        list(TextSource(tmp_path / "cut.gz").documents())


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="permissions do not bind this user")
def test_unreadable_permissions_are_named(tmp_path):
    (tmp_path / "secret.txt").write_text("x")
    (tmp_path / "secret.txt").chmod(0)
    with pytest.raises(DataError, match="secret.txt: cannot be read .*Permission"):
        list(TextSource(tmp_path / "secret.txt").documents())


def test_max_documents_limits_any_source(text_config, documents):
    text_config.data.max_documents = 7
    source = sources.make_source(text_config)
    assert isinstance(source, LimitedSource)
    assert len(list(source.documents())) == 7
    text_config.data.max_documents = 0
    assert source.fingerprint() != sources.make_source(text_config).fingerprint()


@pytest.mark.parametrize(
    ("names", "kind"),
    [(["a.jsonl", "b.json"], "json"), (["a.jsonl.zst"], "json"), (["a.json.gz"], "json"), (["a.parquet"], "parquet")],
)
def test_files_of_records_are_not_read_as_text(tmp_path, names, kind):
    for name in names:
        (tmp_path / name).write_text("{}")
    config = default_config()
    config.data.source, config.data.files = "text", (str(tmp_path / "*"),)
    message = (
        f"files entry '{tmp_path}/\\*': names {kind} files.* Fix: set source='hf', hf_path='{kind}', hf_data_files="
    )
    with pytest.raises(DataError, match=message):
        sources.make_source(config)
    config.data.files, config.data.val_files = (str(tmp_path),), config.data.files
    with pytest.raises(DataError, match="config.data.val_files entry"):
        sources.make_held_out_source(config)
    config.data.files = config.data.val_files
    (tmp_path / "more.txt").write_text("text")  # such as a folder of source code
    assert len(sources.make_source(config).files) == len(names) + 1


def test_unknown_source_is_refused():
    config = default_config()
    config.data.source = "books"
    message = "config.data.source='books'.*stdlib, text, trees, tokens, hf, task or synthetic"
    with pytest.raises(DataError, match=message):
        sources.make_source(config)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["parquet", "json"])
def test_hf_reads_local_files_through_load_dataset(tmp_path, write_rows, hf_home, documents, kind, streaming):
    pattern = write_rows(tmp_path / "rows", kind, [*documents[:40], None])
    source = HuggingFaceSource(path=kind, data_files=(pattern,), streaming=streaming)
    assert list(source.documents()) == [*documents[:40], ""]


@pytest.mark.parametrize("streamed", [False, True])
def test_long_documents_of_datasets_are_cut_at_line_ends(tmp_path, hf_home, monkeypatch, streamed):
    monkeypatch.setattr(documents, "MAX_DOCUMENT_CHARS", 20)
    lines = [f"line {i} of it\n" for i in range(6)]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "".join(lines)}) + "\n")
    source = sources.HuggingFaceSource(path="json", data_files=(str(tmp_path / "rows.jsonl"),), streaming=streamed)
    assert list(source.documents()) == lines
    if streamed:
        shape = dict(seq_len=8, packing=True, batch_size=1, first_row=0, num_rows=1)
        batches = streaming.StreamBatches(source, ByteTokenizer(), val_fraction=0.0, **shape)
        assert streaming._DocumentStream(batches, 0).next_group() == lines


@pytest.mark.parametrize("streamed", [False, True])
def test_a_broken_line_of_jsonl_is_the_reason_that_is_given(tmp_path, hf_home, streamed):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"text": broken}\n')
    source = sources.HuggingFaceSource(path="json", data_files=(str(tmp_path / "rows.jsonl"),), streaming=streamed)
    with pytest.raises(DataError, match="JSON parse error: Invalid value. in row 1"):
        list(source.documents())


def test_hf_fingerprint_follows_local_files(tmp_path, write_rows, documents):
    pattern = write_rows(tmp_path / "rows", "json", documents[:10])
    before = HuggingFaceSource(path="json", data_files=pattern).fingerprint()
    assert HuggingFaceSource(path="json", data_files=pattern).fingerprint() == before
    write_rows(tmp_path / "rows", "json", documents[:11])
    assert HuggingFaceSource(path="json", data_files=pattern).fingerprint() != before


@pytest.mark.parametrize("streaming", [False, True])
def test_hf_unknown_column_lists_the_columns(tmp_path, write_rows, hf_home, documents, streaming):
    pattern = write_rows(tmp_path / "rows", "parquet", documents[:10], field="content")
    source = HuggingFaceSource(path="parquet", data_files=pattern, streaming=streaming)
    with pytest.raises(DataError, match="hf_text_field='text'.*columns are content, id"):
        next(source.documents())


def test_hf_column_that_is_not_text_is_refused(tmp_path, write_rows, hf_home, documents):
    pattern = write_rows(tmp_path / "rows", "parquet", documents[:10])
    with pytest.raises(DataError, match="hf_text_field='id'.*holds int, not text"):
        next(HuggingFaceSource(path="parquet", data_files=pattern, text_field="id").documents())


def test_hf_reads_files_and_folders_of_the_home_directory(tmp_path, write_rows, hf_home, documents, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_rows(tmp_path / "rows", "json", documents)
    for fields in ({"path": "json", "data_files": ("~/rows/*.jsonl",)}, {"path": "~/rows"}):
        source = HuggingFaceSource(**fields)
        assert list(source.documents()) == documents
        before = source.fingerprint()
        os.utime(tmp_path / "rows" / "0.jsonl", (1, 1))
        assert source.fingerprint() != before
        os.utime(tmp_path / "rows" / "0.jsonl")


def test_hf_unknown_split_and_missing_files_are_explained(tmp_path, write_rows, hf_home, documents):
    pattern = write_rows(tmp_path / "rows", "json", documents[:10])
    with pytest.raises(DataError, match="split='test'.*correct hf_path"):
        next(HuggingFaceSource(path="json", data_files=pattern, split="test").documents())
    with pytest.raises(DataError, match="absent.*correct hf_path"):
        next(HuggingFaceSource(path="json", data_files=f"{tmp_path}/absent/*.json").documents())
    with pytest.raises(DataError, match="hf_path=''.*FineWeb|hf_path=''.*fineweb"):
        HuggingFaceSource(path="")


@pytest.mark.parametrize("splits", [False, True])
def test_text_that_was_saved_to_disk_is_read_as_the_message_says(tmp_path, hf_home, documents, splits):
    import datasets

    saved, path = datasets.Dataset.from_dict({"text": documents[:10]}), str(tmp_path / "saved")
    (datasets.DatasetDict({"train": saved, "test": saved.select([0])}) if splits else saved).save_to_disk(path)
    with pytest.raises(DataError, match="save_to_disk") as found:
        next(HuggingFaceSource(path=path).documents())
    _, kind, _, files, _ = found.value.fix.split("'")
    assert list(HuggingFaceSource(path=kind, data_files=(files,)).documents()) == documents[:10]


def test_a_kind_of_files_alone_reads_no_working_directory(tmp_path, write_rows, hf_home, documents, monkeypatch):
    write_rows(tmp_path / "train", "json", documents[:10])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="hf_path='json'.*hf_data_files names none.*make hf_path the directory"):
        HuggingFaceSource(path="json", streaming=True)
    assert len(list(HuggingFaceSource(path="train").documents())) == 10


@pytest.mark.parametrize("kind", [ConnectionError, "wrapped"])
def test_unreachable_hub_points_to_local_files(monkeypatch, kind):
    import datasets

    def load_dataset(path, **arguments):
        assert path == "HuggingFaceFW/fineweb-edu" and arguments["name"] == "sample-10BT"
        assert arguments["streaming"] is True and arguments["split"] == "train"
        if kind == "wrapped":
            try:
                raise ConnectionError("Name or service not known")
            except ConnectionError as error:
                raise FileNotFoundError("no such dataset") from error
        raise kind("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    config = default_config()
    config.data.update(sources.fineweb_edu())
    with pytest.raises(DataError, match="hub cannot be reached.*local files.*hf_path='parquet'"):
        next(sources.make_source(config).documents())
