import errno
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import chex
import numpy as np
import pytest

from nsa_jax.data import DataError, cache, encoding, make_pipeline, shards
from nsa_jax.data import corpus as corpus_files
from nsa_jax.data.sources import TextSource
from nsa_jax.data.token_file import ChunkWriter, TokenFile
from nsa_jax.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer, train_bpe


class ListSource:
    name = "list"

    def __init__(self, documents):
        self._documents = documents
        self.reads = 0

    def fingerprint(self):
        return str(hash(tuple(self._documents)))

    def documents(self):
        self.reads += 1
        yield from self._documents

    def size_bytes(self):
        return None


def load(source, root, *, val_fraction=0.2, tokenizer=None):
    return cache.load_corpus(source, tokenizer or ByteTokenizer(), val_fraction=val_fraction, root=Path(root))


@pytest.mark.parametrize("batch_bytes", [50, 1 << 22])
def test_corpus_holds_every_document_on_its_side(documents, tmp_path, monkeypatch, batch_bytes):
    monkeypatch.setattr(encoding, "_BATCH_BYTES", batch_bytes)
    tokenizer = ByteTokenizer()
    corpus = load(ListSource(documents), tmp_path, tokenizer=tokenizer)
    sides = {"train": [], "validation": []}
    for text in documents:
        side = cache.is_validation(cache.content_hash(text.encode()), 0.2)
        sides["validation" if side else "train"].append(text)
    for split in (corpus.train, corpus.validation):
        expected = sides[split.name]
        assert [tokenizer.decode(split.document(i)) for i in range(split.stats.documents)] == expected
        assert split.stats.bytes == sum(len(t.encode()) for t in expected)
        assert split.stats.tokens == split.stats.bytes + len(expected) == len(split.tokens.array)
        assert split.offsets[-1] == split.stats.tokens and len(split.hashes) == len(expected)
        chex.assert_trees_all_equal(np.flatnonzero(split.tokens.array == 256), split.offsets[1:] - 1)
    assert 30 < len(sides["validation"]) < 90  # 60 expected


def test_subword_corpus_decodes_to_its_documents(documents, tmp_path):
    tokenizer = HuggingFaceTokenizer(train_bpe(documents, 300))
    corpus = load(ListSource(documents), tmp_path, tokenizer=tokenizer, val_fraction=0.0)
    assert corpus.validation.stats.documents == 0
    for i in (0, 150, 299):
        assert tokenizer.decode(corpus.train.document(i)) == documents[i]


def test_duplicates_never_fall_on_both_sides(documents, tmp_path):
    copies = [text for text in documents for _ in range(3)]
    copies += ["  \n" + text + "\n\n" for text in documents]  # white space around a document does not make it new
    copies = [copies[i] for i in np.random.default_rng(0).permutation(len(copies))]
    tokenizer = ByteTokenizer()
    corpus = load(ListSource(copies), tmp_path)
    sides = [
        [tokenizer.decode(split.document(i)).strip() for i in range(split.stats.documents)]
        for split in (corpus.train, corpus.validation)
    ]
    assert len(sides[0]) + len(sides[1]) == 4 * len(documents)
    assert sides[1] and not set(sides[0]) & set(sides[1])
    assert len(np.unique(corpus.train.hashes)) == len(sides[0]) / 4


def test_split_does_not_depend_on_order_or_other_documents(documents, tmp_path):
    whole = load(ListSource(documents), tmp_path)
    part = load(ListSource(documents[::-2]), tmp_path)
    assert set(part.validation.hashes.tolist()) <= set(whole.validation.hashes.tolist())
    assert set(part.train.hashes.tolist()) <= set(whole.train.hashes.tolist())


def test_second_use_reads_no_document(documents, tmp_path):
    source = ListSource(documents)
    first, second = load(source, tmp_path), load(source, tmp_path)
    assert source.reads == 1 and first.directory == second.directory
    other = load(source, tmp_path, val_fraction=0.3)
    assert source.reads == 2 and other.directory != first.directory
    assert load(ListSource(documents[1:]), tmp_path).directory != first.directory


def test_damaged_corpus_is_built_again(documents, tmp_path):
    source = ListSource(documents)
    tokens = np.array(load(source, tmp_path).train.tokens.array)
    path = load(source, tmp_path).directory / "train.tokens"
    path.write_bytes(path.read_bytes()[:-10])
    chex.assert_trees_all_equal(np.array(load(source, tmp_path).train.tokens.array), tokens)
    assert source.reads == 2


def test_documents_without_text_are_left_out_and_a_corpus_of_them_is_refused(tmp_path):
    assert load(ListSource(["", " \n", "text"]), tmp_path, val_fraction=0.0).train.stats.documents == 1
    with pytest.raises(DataError, match="corpus is empty"):
        load(ListSource(["", "\t\n"]), tmp_path / "empty")
    assert not [p for p in (tmp_path / "empty").iterdir() if p.is_dir()]


def test_failing_source_leaves_nothing_behind(documents, tmp_path):
    class Failing(ListSource):
        def documents(self):
            yield from self._documents
            raise DataError("file.txt", "not UTF-8", "convert it")

    with pytest.raises(DataError, match="file.txt"):
        load(Failing(documents), tmp_path)
    assert not [p for p in tmp_path.iterdir() if p.is_dir()]


def test_files_that_grow_while_they_are_read_are_no_corpus(text_config, documents, tmp_path):
    path = tmp_path / "growing.txt"
    path.write_text("".join(documents[:100]))

    class Growing(TextSource):
        def documents(self):
            yield from super().documents()
            path.write_text("".join(documents))

    with pytest.raises(DataError, match="source text: its files changed while they were read.*when they are complete"):
        load(Growing((str(path),)), tmp_path / "root", val_fraction=0.0)
    assert not [p for p in (tmp_path / "root").iterdir() if p.is_dir()]
    corpus = load(TextSource((str(path),)), tmp_path / "root", val_fraction=0.0)
    assert corpus.train.stats.bytes == sum(len(text.encode()) for text in documents)


def test_a_file_that_vanishes_before_it_is_read_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    source = TextSource((str(tmp_path / "*.txt"),))
    (tmp_path / "a.txt").unlink()
    with pytest.raises(DataError, match=r"a.txt: cannot be read \(.*No such file.*restore it"):
        load(source, tmp_path / "root")


def test_full_disk_names_the_cache_directory(documents, tmp_path, monkeypatch):
    def full(self, *_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache._SplitWriter, "append", full)
    with pytest.raises(DataError, match=f"cache directory {tmp_path}: no space left.*config.data.cache_dir"):
        load(ListSource(documents), tmp_path)
    assert not [p for p in tmp_path.iterdir() if p.is_dir()]


def test_unusable_cache_directory_is_named(documents, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cache directory .*file.*cannot be written"):
        load(ListSource(documents), tmp_path / "file" / "cache")


def test_the_cache_is_not_blamed_for_a_file_of_the_source(documents, tmp_path, monkeypatch):
    def gone(self, *_):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "gone.bin")

    monkeypatch.setattr(cache._SplitWriter, "append", gone)
    with pytest.raises(DataError, match=r"^gone.bin: cannot be read \(No such file"):
        load(ListSource(documents), tmp_path)


def test_root_comes_from_config_then_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("NSA_JAX_CACHE", str(tmp_path / "env"))
    assert cache.cache_root("") == tmp_path / "env"
    assert cache.cache_root("/else") == Path("/else")
    monkeypatch.delenv("NSA_JAX_CACHE")
    assert cache.cache_root("") == Path.home() / ".cache" / "nsa_jax"


BUILDER = """
import sys, time
from pathlib import Path
from nsa_jax.data import cache, shards
from nsa_jax.data.tokenizers import ByteTokenizer

root, log, pause_at, host = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
shards._SHARD_BYTES = 2000
cache._cores_name = lambda: host
submit = shards._Pool.submit

def note(*words):
    with log.open("a") as f: print(host, *words, file=f)

def noted(pool, path, documents):
    note("makes", path.name)
    if host == "stuck": time.sleep(300)
    submit(pool, path, documents)

class Slow:
    name = "slow"
    def fingerprint(self): return "slow"
    def size_bytes(self): return None
    def documents(self):
        note("reading")
        for i in range(200):
            if i == pause_at:
                note("paused")
                while not (root / "go.lock").exists(): time.sleep(0.05)
            yield f"document {i} " * 20

shards._Pool.submit = noted
cache.logger.warning = lambda *words: note("waits")
corpus = cache.load_corpus(Slow(), ByteTokenizer(), val_fraction=0.1, root=root, workers=2)
print(corpus.directory, corpus.train.stats, int(corpus.train.tokens.array.astype("int64").sum()))
"""


def start_builder(*arguments):
    command = [sys.executable, "-c", BUILDER, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ})


def wait_for(log, word, process, timeout=300):
    deadline = time.monotonic() + timeout
    while not (log.exists() and word in log.read_text()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def built(root):
    """Contents of the one corpus below a root, where nothing but locks is left."""
    (directory,) = (path for path in root.iterdir() if path.suffix != ".lock")
    files = {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}
    assert set(files) >= {"train.tokens", "validation.hashes", "meta.json"}
    return files


def made_by(log, host):
    return [line.split()[2] for line in log.read_text().splitlines() if line.startswith(f"{host} makes")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The files of BUILDER's corpus when one process makes all of it at once, without shards."""

    class Whole:
        name = "slow"

        def fingerprint(self):
            return "slow"

        def size_bytes(self):
            return None

        def documents(self):
            return (f"document {i} " * 20 for i in range(200))

    root = tmp_path_factory.mktemp("whole")
    load(Whole(), root, val_fraction=0.1)
    return built(root)


def test_killed_half_way_is_continued_without_a_shard_lost_or_doubled(tmp_path, undisturbed):
    root, log = tmp_path / "root", tmp_path / "log"
    killed = start_builder(root, log, 150, "one")
    wait_for(log, "paused", killed)
    (directory,) = root.glob("*.shards")
    while len(done := sorted(p.name for p in directory.glob("*.npz"))) < 10:
        assert killed.poll() is None
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert not [p for p in root.iterdir() if (p / "meta.json").exists()]
    output, errors = start_builder(root, log, -1, "two").communicate(timeout=300)
    assert "documents=" in output, errors
    again = made_by(log, "two")
    assert len(again) == len(set(again)) and not set(done) & set(again)
    assert built(root) == undisturbed


def test_shards_that_a_killed_process_left_beside_a_finished_corpus_are_removed(documents, tmp_path):
    directory = load(ListSource(documents), tmp_path).directory
    assert (directory / "statistics.json").exists()
    left = directory.with_name(f"{directory.name}.shards")
    left.mkdir()
    (left / "000000-00000000.npz").touch()
    assert load(ListSource(documents), tmp_path).directory == directory and not left.exists()


def test_two_processes_of_a_host_build_one_cache_once(tmp_path, undisturbed):
    root, log = tmp_path / "root", tmp_path / "log"
    first = start_builder(root, log, 100, "one")
    wait_for(log, "paused", first)
    second = start_builder(root, log, 100, "one")
    wait_for(log, "waits", second)
    (root / "go.lock").touch()
    outputs = [process.communicate(timeout=300) for process in (first, second)]
    assert outputs[0][0] == outputs[1][0] and "documents=" in outputs[0][0], outputs
    assert log.read_text().count("reading") == 1
    assert built(root) == undisturbed


def test_hosts_share_the_shards_and_make_those_of_one_that_was_killed(tmp_path, undisturbed):
    root, log = tmp_path / "root", tmp_path / "log"
    stuck = start_builder(root, log, -1, "stuck")
    wait_for(log, "stuck makes", stuck)
    first = start_builder(root, log, 100, "one")
    wait_for(log, "one paused", first)
    second = start_builder(root, log, 190, "two")
    wait_for(log, "two paused", second)
    (root / "go.lock").touch()
    assert made_by(log, "stuck")[0] not in made_by(log, "one") + made_by(log, "two")
    stuck.kill()
    stuck.communicate()
    outputs = [process.communicate(timeout=300) for process in (first, second)]
    assert outputs[0][0] == outputs[1][0] and "documents=" in outputs[0][0], outputs
    one, two = made_by(log, "one"), made_by(log, "two")
    assert one and two and not set(one) & set(two)
    assert made_by(log, "stuck")[0] in one + two and sorted(one + two)[-1].startswith("000023")
    assert built(root) == undisturbed


def test_tokenising_processes_load_neither_jax_nor_grain_and_end_with_their_parent(documents, tmp_path, monkeypatch):
    for name in ("jax", "grain", "datasets"):
        (tmp_path / "path" / name).mkdir(parents=True)
        (tmp_path / "path" / name / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    monkeypatch.setattr(shards, "_SHARD_BYTES", 10_000)
    corpus = load(ListSource(documents), tmp_path / "cache", tokenizer=HuggingFaceTokenizer(train_bpe(documents, 300)))
    assert corpus.train.stats.documents + corpus.validation.stats.documents == len(documents)
    ByteTokenizer().save(tmp_path)
    # Its parent is said to be another process, as if it had been adopted.
    command = [sys.executable, "-P", shards.tokenize_worker.__file__, str(tmp_path), "1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as orphan:
        assert orphan.wait(timeout=60) == 1


def test_shards_become_smaller_towards_the_end_so_that_all_cores_finish_together(tmp_path):
    source = ListSource(["x" * 1000] * 20_000)  # 20 MB
    for size, shards_of in [(None, [4_195_000] * 4 + [3_220_000]), (4 << 20, [4_195_000] * 4 + [3_220_000])]:
        source.size_bytes = lambda size=size: size
        assert [sum(map(len, group)) for group in shards._groups(source)] == shards_of
    source.size_bytes = lambda: 20_000_000
    found = [sum(map(len, group)) for group in shards._groups(source)]
    assert sum(found) == 20_000_000 and found == sorted(found, reverse=True)
    assert found[:2] == [313_000, 308_000] and set(found[-60:-1]) == {132_000}
    for size, done, limit in [
        (130_000_000, 0, 2_031_250),
        (1 << 40, 0, 4 << 20),
        (1 << 40, (1 << 40) - (1 << 27), 2 << 20),
        (1 << 40, 1 << 40, 4 << 20),  # more text than was expected
    ]:
        assert shards._shard_bytes(size, done) == limit


def test_each_of_the_first_shards_doubles_the_tokenising_processes(monkeypatch, tmp_path):
    started, done = [], []

    class Worker:
        def __init__(self, directory):
            started.append(directory)

        def __call__(self, path, group):
            return len(group), 3

        kill = close = lambda self: None

    monkeypatch.setattr(shards, "_Worker", Worker)
    pool, counts = shards._Pool(5, "tokenizer", lambda *made: done.append(made)), []
    for _ in range(5):
        pool.submit(tmp_path, [b"ab", b"c"])
        counts.append(len(started))
    pool.join()
    pool.close()
    assert counts == [1, 2, 4, 5, 5] and done == [(3, 2, 3)] * 5


def test_a_tokenising_process_that_dies_is_named_and_its_shard_is_made_again(documents, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "_SHARD_BYTES", 10_000)
    call, calls = shards._Worker.__call__, []

    def dies(worker, path, group):
        calls.append(path.name)
        if len(calls) == 3:
            worker._process.kill()
        return call(worker, path, group)

    monkeypatch.setattr(shards._Worker, "__call__", dies)
    source = ListSource(documents)
    with pytest.raises(DataError, match=r"ended with status -9 while it made 0000\d\d-.*data.tokenizer_workers"):
        load(source, tmp_path)
    lost = calls[2]
    calls[:] = [None] * 3
    corpus = load(source, tmp_path)
    assert lost in calls and len(calls) - 3 < len(documents) * 190 / 10_000
    assert corpus.train.stats.documents + corpus.validation.stats.documents == len(documents)


def test_a_damaged_shard_is_named_and_made_again(documents, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "_SHARD_BYTES", 10_000)
    source, load_shard = ListSource(documents), encoding.Encoded.load

    def damaged(path):
        if path.name.startswith("000001"):
            overwrite(path, path.stat().st_size // 2, b"damage")
        return load_shard(path)

    with monkeypatch.context() as patch:
        patch.setattr(encoding.Encoded, "load", damaged)
        with pytest.raises(DataError, match="000001-.*is damaged.*start again"):
            load(source, tmp_path)
    corpus = load(source, tmp_path)
    assert corpus.train.stats.documents + corpus.validation.stats.documents == len(documents)


def test_progress_is_told_in_plain_lines(documents, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shards, "_SHARD_BYTES", 10_000)
    monkeypatch.setattr(shards, "_LINE_SECONDS", 0.0)
    source = ListSource(documents)
    source.size_bytes = lambda: sum(len(text.encode()) for text in documents)
    load(source, tmp_path)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("tokenising list on ")
    tokens = source.size_bytes() + 300
    assert f"300 documents, {tokens:,} tokens, " in last and "tokens/s, 100.0% of 0.00 GB, 0.0 min remaining" in last


def overwrite(path, start, data):
    raw = bytearray(path.read_bytes())
    raw[start : start + len(data)] = data
    path.write_bytes(raw)


@pytest.fixture
def large(tmp_path, monkeypatch):
    """A corpus of many chunks, of which nearly nothing is compared when it is opened."""
    monkeypatch.setattr(corpus_files, "_VERIFIED_CHUNKS", 0)
    monkeypatch.setattr(corpus_files, "_SAMPLED_CHUNKS", 2)
    rng = np.random.default_rng(0)
    texts = [bytes(rng.integers(97, 123, 5000, np.uint8)).decode() for _ in range(40)]
    return load(ListSource(texts), tmp_path, val_fraction=0.0), ListSource(texts)


@pytest.mark.parametrize("name", ["train.tokens", "train.offsets", "train.hashes", "train.tokens.crc32", "meta.json"])
def test_a_cache_that_was_overwritten_is_built_again(documents, tmp_path, name):
    source = ListSource(documents)
    corpus = load(source, tmp_path)
    tokens = np.array(corpus.train.tokens.array)
    size = (corpus.directory / name).stat().st_size
    overwrite(corpus.directory / name, size // 2, b"7")
    assert (corpus.directory / name).stat().st_size == size
    chex.assert_trees_all_equal(np.array(load(source, tmp_path).train.tokens.array), tokens)
    assert source.reads == 2


def test_what_is_overwritten_after_the_cache_was_opened_is_never_returned(large):
    corpus, _ = large
    tokens, path = corpus.train.tokens, corpus.directory / "train.tokens"
    truth = tokens[:].copy()
    overwrite(path, 3 * 16384 + 100, bytes(8))
    start = 3 * 16384 // 2
    chex.assert_trees_all_equal(tokens[:start], truth[:start])
    chex.assert_trees_all_equal(tokens[start + 8192 :], truth[start + 8192 :])
    with pytest.raises(
        DataError, match=r"train.tokens: bytes 49,152 to 65,536 are not what was written.*delete .* it is"
    ):
        tokens[start + 8191 : start + 8192]
    with pytest.raises(DataError, match="bytes 49,152 to 65,536"):
        tokens.array  # noqa: B018
    overwrite(path, 3 * 16384 + 100, truth.tobytes()[3 * 16384 + 100 :][:8])
    chex.assert_trees_all_equal(tokens.array, truth)


def test_damage_that_the_sample_misses_is_noticed_when_it_is_read(large, tmp_path):
    corpus, source = large
    truth = np.array(corpus.train.tokens[:])
    overwrite(corpus.directory / "train.tokens", 10 * 16384, b"damage")
    again = load(source, tmp_path, val_fraction=0.0)
    assert source.reads == 0
    with pytest.raises(DataError, match="bytes 163,840 to 180,224"):
        again.train.tokens[:]
    overwrite(corpus.directory / "train.tokens", 0, b"damage")  # the first and last chunks are always compared
    chex.assert_trees_all_equal(load(source, tmp_path, val_fraction=0.0).train.tokens[:], truth)
    assert source.reads == 1


def test_a_cache_that_becomes_shorter_while_it_is_read_ends_no_process(large):
    tokens, path = large[0].train.tokens, large[0].directory / "train.tokens"
    tokens[:10]
    os.truncate(path, 20_000)
    with pytest.raises(DataError, match="train.tokens has become shorter than 114,688 bytes"):
        tokens[50_000:50_010]


def test_a_cache_of_another_corpus_is_built_again(documents, tmp_path):
    one, other = ListSource(documents), ListSource(documents[::-1])
    first, second = load(one, tmp_path).directory, load(other, tmp_path).directory
    truth = (first / "train.tokens").read_bytes()
    shutil.rmtree(first)
    shutil.copytree(second, first)
    assert load(one, tmp_path).directory == first and (first / "train.tokens").read_bytes() == truth


def test_a_cache_of_a_version_without_checksums_is_used_with_a_warning(documents, tmp_path, caplog):
    source = ListSource(documents)
    whole = load(source, tmp_path)
    directory, truth = whole.directory, np.array(whole.train.tokens.array)
    assert whole.content != whole.fingerprint
    meta = json.loads((directory / "meta.json").read_text())
    del meta["checksums"], meta["checksum"], meta["empty_documents"]
    for path in directory.glob("*.crc32"):
        del meta["files"][path.name]
        path.unlink()
    (directory / "meta.json").write_text(json.dumps(meta))
    corpus = load(source, tmp_path)
    tokens = corpus.train.tokens
    chex.assert_trees_all_equal(tokens[5:50], truth[5:50])
    chex.assert_trees_all_equal(tokens.array, truth)
    # What is saved with it is accepted as a position of before, when the corpus has been built again.
    assert corpus.content == corpus.fingerprint == whole.fingerprint
    assert source.reads == 1 and "kept no checksums" in caplog.text and "Delete it" in caplog.text


@pytest.mark.parametrize("size", [0, 1, 16383, 16384, 16385, 5 * 16384 + 7])
@pytest.mark.parametrize("piece", [1, 5000, 16384, 100_000])
def test_chunks_do_not_depend_on_how_a_file_was_written(tmp_path, size, piece):
    data = np.random.default_rng(size).bytes(size)
    writer = ChunkWriter(tmp_path / "file")
    for start in range(0, size, piece if size < 20_000 or piece > 1 else 999):
        writer.write(data[start : start + (piece if size < 20_000 or piece > 1 else 999)])
    writer.finish()
    writer.close()
    file = pickle.loads(pickle.dumps(TokenFile(tmp_path / "file", np.uint8, checked=True)))
    assert file[:].tobytes() == file.array.tobytes() == data and len(file) == size
    assert file[size // 3 : size // 2].tobytes() == data[size // 3 : size // 2]
    assert (tmp_path / "file.crc32").stat().st_size == 4 * -(-size // 16384)


def test_a_trained_tokenizer_names_a_cache_directory_that_cannot_hold_it(text_config, tmp_path):
    text_config.data.tokenizer, text_config.data.bpe_vocab_size = "bpe", 300
    text_config.data.cache_dir = str(tmp_path / "file")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cache directory .*file: cannot be written .*config.data.cache_dir"):
        make_pipeline(text_config)


def test_what_is_left_of_a_trained_tokenizer_is_replaced(text_config, tmp_path):
    text_config.data.tokenizer, text_config.data.bpe_vocab_size = "bpe", 300
    text_config.data.cache_dir = str(tmp_path / "cache")
    fingerprint = make_pipeline(text_config).tokenizer.fingerprint
    (path,) = (tmp_path / "cache").glob("bpe-*/tokenizer_config.json")
    path.unlink()
    assert make_pipeline(text_config).tokenizer.fingerprint == fingerprint and path.exists()


def test_a_damaged_trained_tokenizer_is_named(text_config, tmp_path):
    text_config.data.tokenizer, text_config.data.bpe_vocab_size = "bpe", 300
    text_config.data.cache_dir = str(tmp_path / "cache")
    make_pipeline(text_config)
    (path,) = (tmp_path / "cache").glob("bpe-*/tokenizer.json")
    path.write_text(path.read_text().replace('"ByteLevel"', '"ByteLevel" ', 1))
    with pytest.raises(DataError, match="bpe-.*its fingerprint differs.*delete .*bpe-.*: the tokenizer is trained"):
        make_pipeline(text_config)
