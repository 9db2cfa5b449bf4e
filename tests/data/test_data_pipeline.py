import asyncio
import contextlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from pathlib import Path

import chex
import numpy as np
import pytest

from nsa_jax.config import default_config
from nsa_jax.data import DataError, make_pipeline
from nsa_jax.train.env import data_facts


def take(iterator, count):
    return [next(iterator) for _ in range(count)]


def synthetic_config(task="random"):
    config = default_config()
    config.data.source = "synthetic"
    config.data.synthetic = task
    config.data.synthetic_vocab = 32
    config.data.seq_len = 16
    config.train.batch_size = 8
    return config


@pytest.fixture(params=["text", "unpacked", "best_fit", "synthetic"])
def config(request):
    if request.param == "synthetic":
        return synthetic_config()
    text_config = request.getfixturevalue("text_config")
    text_config.data.packing = request.param != "unpacked"
    text_config.data.packing_method = "best_fit" if request.param == "best_fit" else "concatenate"
    return text_config


def test_batches_have_the_agreed_keys_shapes_and_types(config):
    batch = next(make_pipeline(config).train())
    shape = (config.train.batch_size, config.data.seq_len)
    for key, dtype in {
        "inputs": np.int32,
        "targets": np.int32,
        "segment_start": np.int32,
        "loss_mask": np.float32,
    }.items():
        chex.assert_shape(batch[key], shape)
        assert batch[key].dtype == dtype
    chex.assert_trees_all_equal(batch["targets"][:, :-1], batch["inputs"][:, 1:])
    assert len(batch) == 4


def test_every_epoch_shows_every_window_once_in_another_order(text_config):
    pipeline = make_pipeline(text_config)
    stream = np.array(pipeline.corpus.train.tokens.array)
    windows = pipeline._train_rows
    count = windows.rows_per_epoch
    starts = windows.starts(np.arange(3 * count)).reshape(3, count)
    for epoch in starts:
        assert np.array_equal(np.diff(np.sort(epoch)), np.full(count - 1, 48))
        assert epoch.min() >= 0 and epoch.max() + 49 <= len(stream)
        assert not np.array_equal(epoch, np.sort(epoch))
    assert len({int(epoch.min()) for epoch in starts}) > 1  # cut at another offset
    assert not np.array_equal(np.argsort(starts[0]), np.argsort(starts[1]))
    tokens = np.concatenate([b["inputs"] for b in take(pipeline.train(), count // 8 + 1)])[:count]
    for row, start in zip(tokens, starts[0], strict=True):
        assert np.array_equal(row, stream[start : start + 48])


def test_rows_know_their_documents(text_config):
    """Document structure from the offsets of the cache, which the pipeline does not use, token by token."""
    pipeline = make_pipeline(text_config)
    offsets = pipeline.corpus.train.offsets
    batches = take(pipeline.train(), 5)
    starts = pipeline._train_rows.starts(np.arange(40))
    boundaries = 0
    for row, start in enumerate(starts):
        batch = {k: v[row % 8] for k, v in batches[row // 8].items()}
        document = np.searchsorted(offsets, np.arange(start, start + 49), side="right") - 1
        boundaries += int((np.diff(document) > 0).sum())
        for t in range(48):
            assert batch["segment_start"][t] == max(offsets[document[t]] - start, 0)
            assert batch["loss_mask"][t] == (document[t] == document[t + 1])
    assert boundaries > 5


def test_unpacked_rows_differ_in_segment_start_only(text_config):
    packed = next(make_pipeline(text_config).train())
    text_config.data.packing = False
    unpacked = next(make_pipeline(text_config).train())
    assert packed["segment_start"].any() and not unpacked["segment_start"].any()
    for key in ("inputs", "targets", "loss_mask"):
        chex.assert_trees_all_equal(packed[key], unpacked[key])
    assert (unpacked["loss_mask"] == 0).any()


@pytest.mark.parametrize("process_count", [2, 4])
def test_processes_share_the_batches_of_one(config, process_count):
    whole = take(make_pipeline(config).train(), 4)
    pipelines = [make_pipeline(config, process_index=i, process_count=process_count) for i in range(process_count)]
    parts = [take(p.train(), 4) for p in pipelines]
    for step, batch in enumerate(whole):
        joined = {k: np.concatenate([part[step][k] for part in parts]) for k in batch}
        chex.assert_trees_all_equal(joined, batch)
    whole_validation = list(make_pipeline(config).validation())
    parts = [list(p.validation()) for p in pipelines]
    for step, batch in enumerate(whole_validation):
        chex.assert_trees_all_equal({k: np.concatenate([part[step][k] for part in parts]) for k in batch}, batch)


@pytest.mark.parametrize("consumed", [0, 1, 7])
def test_set_state_continues_bit_for_bit(config, consumed):
    iterator = make_pipeline(config).train()
    take(iterator, consumed)
    state = json.loads(json.dumps(iterator.get_state()))
    expected = take(iterator, 6)
    fresh = make_pipeline(config).train()
    take(fresh, 3)  # whatever it has prefetched must not come through
    fresh.set_state(state)
    chex.assert_trees_all_equal(take(fresh, 6), expected)
    assert fresh.get_state() == iterator.get_state()
    iterator.set_state(state)  # backwards, on the same iterator
    chex.assert_trees_all_equal(take(iterator, 6), expected)


def test_start_step_is_immediate_and_equal(config):
    pipeline = make_pipeline(config)
    chex.assert_trees_all_equal(next(pipeline.train(37)), take(pipeline.train(), 38)[37])
    late = pipeline.train(10**9)
    assert next(late)["inputs"].shape[0] == 8 and late.get_state()["step"] == 10**9 + 1


def test_state_is_that_of_any_process_and_worker_count(text_config):
    one = make_pipeline(text_config).train()
    take(one, 5)
    two = make_pipeline(text_config, process_index=1, process_count=2).train()
    two.set_state(one.get_state())
    chex.assert_trees_all_equal(next(two), {k: v[4:] for k, v in next(one).items()})
    text_config.data.prefetch = 0
    chex.assert_trees_all_equal(take(make_pipeline(text_config).train(6), 1), take(one, 1))


def test_worker_processes_give_the_same_batches(text_config):
    expected = take(make_pipeline(text_config).train(), 9)
    text_config.data.num_workers = 2
    iterator = make_pipeline(text_config).train()
    try:
        chex.assert_trees_all_equal(take(iterator, 4), expected[:4])
        state = iterator.get_state()
        assert state["step"] == 4
        iterator.set_state({**state, "step": 6})
        chex.assert_trees_all_equal(take(iterator, 3), expected[6:])
    finally:
        iterator.close()


KILLED = """
import sys, time
from nsa_jax.config import default_config
from nsa_jax.data import make_pipeline

if __name__ == "__main__":
    config = default_config()
    config.data.source, config.data.synthetic_vocab, config.data.seq_len = "synthetic", 32, 16
    config.data.num_workers = 1
    iterator = make_pipeline(config).train()
    next(iterator)
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked up in /proc")
def test_worker_processes_end_with_a_parent_that_was_killed(tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    mark = f"NSA_JAX_TEST_MARK={tmp_path}"

    def alive():
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                state = (path / "stat").read_text().rpartition(")")[2].split()[0]
                if mark in (path / "environ").read_text(errors="replace").split("\0") and state != "Z":
                    found.append(path.name)
        return found

    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "NSA_JAX_TEST_MARK": str(tmp_path)}
    with subprocess.Popen([sys.executable, script], env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        assert len(alive()) >= 2
        process.kill()
    deadline = time.monotonic() + 20
    while alive() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not alive()


def test_orbax_protocol_saves_and_loads_the_position_for_another_process_count(text_config, tmp_path):
    class Directory:
        async def await_creation(self):
            return tmp_path

    async def save(iterator):
        await (await iterator.save(Directory()))

    async def load(iterator):
        await (await iterator.load(tmp_path))

    iterator = make_pipeline(text_config).train()
    take(iterator, 3)
    asyncio.run(save(iterator))
    restored = make_pipeline(text_config, process_index=1, process_count=4).train()
    asyncio.run(load(restored))
    chex.assert_trees_all_equal(next(restored), {k: v[2:4] for k, v in next(iterator).items()})


CHANGES = ["seed", "seq_len", "batch_size", "packing", "packing_method", "corpus", "val_fraction"]


@pytest.mark.parametrize("mixed", [False, True])
def test_a_position_belongs_to_documents_wherever_their_files_lie(text_config, tmp_path, mixed):
    def pipeline(where):
        files = (str(where / "**" / "*.txt"),)
        text_config.data.files = files
        one = (str(where / "part1" / "*.txt"),)
        text_config.data.sources = {"a": {"files": files}, "b": {"files": one}} if mixed else {}
        return make_pipeline(text_config)

    before = pipeline(tmp_path / "corpus")
    iterator = before.train()
    take(iterator, 3)
    state, expected = iterator.get_state(), take(iterator, 2)
    iterator.close()
    shutil.copytree(tmp_path / "corpus", tmp_path / "moved", copy_function=shutil.copyfile)  # without their times
    moved = pipeline(tmp_path / "moved")
    assert moved.fingerprint == before.fingerprint != before.earlier_fingerprint != moved.earlier_fingerprint
    again = moved.train()
    again.set_state(state)
    chex.assert_trees_all_equal(take(again, 2), expected)
    again.set_state({**state, "data": moved.earlier_fingerprint})  # saved by an earlier version
    with pytest.raises(DataError, match="belongs to other data"):
        again.set_state({**state, "data": before.earlier_fingerprint})
    again.close()
    changed = next((tmp_path / "moved").rglob("*.txt"))
    text = changed.read_text()
    changed.write_text(text.replace("e", "i"))  # as many documents, of as many bytes
    assert changed.read_text() != text and pipeline(tmp_path / "moved").fingerprint != before.fingerprint


@pytest.mark.parametrize("change", CHANGES)
def test_position_of_other_data_is_refused(text_config, tmp_path, change):
    state = make_pipeline(text_config).train().get_state()
    if change == "seed":
        text_config.seed = 1
    elif change == "batch_size":
        text_config.train.batch_size = 4
    elif change == "corpus":
        (tmp_path / "corpus" / "more.txt").write_text("one more document")
    else:
        other = {"seq_len": 32, "packing": False, "packing_method": "best_fit", "val_fraction": 0.3}
        text_config.data[change] = other[change]
    with pytest.raises(DataError, match="belongs to other data.*could not continue exactly"):
        make_pipeline(text_config).train().set_state(state)


def test_seed_decides_the_order(text_config):
    first = next(make_pipeline(text_config).train())["inputs"]
    text_config.seed = 1
    assert not np.array_equal(next(make_pipeline(text_config).train())["inputs"], first)


def test_validation_is_fixed_and_covers_the_held_out_stream_once(text_config):
    text_config.train.eval_batches = 1000
    pipeline = make_pipeline(text_config)
    batches = list(pipeline.validation())
    chex.assert_trees_all_equal(list(pipeline.validation()), batches)
    stream = np.array(pipeline.corpus.validation.tokens.array).astype(np.int32)
    rows = np.concatenate([b["inputs"] for b in batches]).reshape(-1)[: len(stream)]
    chex.assert_trees_all_equal(rows, stream)
    scored = sum(b["loss_mask"].sum() for b in batches)
    documents = pipeline.stats["validation"].documents
    assert scored == len(stream) - 1 - (documents - 1)  # every token but the first, and no first token of a document
    assert len(pipeline.validation()) == -(-(len(stream) - 1) // (8 * 48))


def test_validation_stops_at_eval_batches(text_config):
    assert len(list(make_pipeline(text_config).validation())) == 4


def test_validation_shorter_than_a_row_is_filled_up_without_targets(text_config):
    text_config.data.seq_len = 4096
    text_config.train.batch_size = 4
    pipeline = make_pipeline(text_config)
    tokens = pipeline.stats["validation"].tokens
    (*whole, last) = pipeline.validation()
    chex.assert_shape(last["inputs"], (4, 4096))
    assert len(whole) * 4 * 4096 + last["loss_mask"].astype(bool).any(1).sum() * 4096 > tokens - 1
    assert (last["loss_mask"] == 0).all(1).any() and last["loss_mask"].any()


def test_validation_text_is_never_trained_on(text_config):
    text_config.train.eval_batches = 1000
    pipeline = make_pipeline(text_config)
    held_out = {tuple(pipeline.corpus.validation.document(i)) for i in range(pipeline.stats["validation"].documents)}
    trained = {tuple(pipeline.corpus.train.document(i)) for i in range(pipeline.stats["train"].documents)}
    assert held_out and trained and not held_out & trained


def test_no_held_out_document_is_an_error_only_where_it_matters(text_config):
    text_config.data.val_fraction = 0.0
    pipeline = make_pipeline(text_config)
    next(pipeline.train())
    with pytest.raises(DataError, match="no document is held out.*val_fraction.*text_separator"):
        pipeline.validation()


def test_corpus_shorter_than_one_row_is_refused(text_config):
    text_config.data.seq_len = 1_000_000
    with pytest.raises(DataError, match=r"training split of text: .* fewer than one row.*1,000,001.*lower.*seq_len"):
        make_pipeline(text_config)


def test_corpus_of_exactly_one_row_gives_that_row(tmp_path):
    (tmp_path / "a.txt").write_text("abcdefghij")
    config = default_config()
    config.data.source, config.data.files = "text", (str(tmp_path / "a.txt"),)
    config.data.seq_len, config.data.val_fraction, config.train.batch_size = 10, 0.0, 2
    batch = next(make_pipeline(config).train())
    assert batch["inputs"].tolist() == [list(b"abcdefghij")] * 2
    assert batch["targets"][0, -1] == 256
    config.data.seq_len = 11
    with pytest.raises(DataError, match="fewer than one row"):
        make_pipeline(config)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("data.seq_len", 0, "config.data.seq_len=0"),
        ("data.val_fraction", 1.0, "config.data.val_fraction=1.0"),
        ("data.val_fraction", -0.1, "config.data.val_fraction=-0.1"),
        ("train.batch_size", 0, "config.train.batch_size=0"),
        ("train.batch_size", 7, "config.train.batch_size=7.*2 processes"),
        ("seed", -1, "config.seed=-1"),
    ],
)
def test_bad_fields_are_named(text_config, field, value, message):
    text_config.update_from_flattened_dict({field: value})
    with pytest.raises(DataError, match=message):
        make_pipeline(text_config, process_count=2)


def test_process_index_outside_the_run_is_refused(text_config):
    with pytest.raises(DataError, match="process_index=2"):
        make_pipeline(text_config, process_index=2, process_count=2)


@pytest.mark.parametrize(
    ("task", "vocab", "length", "message"),
    [("sort", 8, 16, "synthetic='sort'"), ("copy", 2, 16, "synthetic_vocab=2"), ("copy", 8, 1, "seq_len=1")],
)
def test_bad_synthetic_tasks_are_named(task, vocab, length, message):
    config = synthetic_config(task)
    config.data.synthetic_vocab, config.data.seq_len = vocab, length
    with pytest.raises(DataError, match=message):
        make_pipeline(config)


def test_synthetic_vocabulary_is_exactly_the_one_asked_for():
    for task in ("random", "copy"):
        pipeline = make_pipeline(synthetic_config(task))
        assert pipeline.tokenizer.vocab_size == 32
        assert len(pipeline.validation()) == 16
        batch = next(pipeline.train())
        assert batch["inputs"].max() == 31
        assert not np.array_equal(batch["inputs"], next(iter(pipeline.validation()))["inputs"])


def test_errors_survive_pickling():
    error = pickle.loads(pickle.dumps(DataError("here", "is wrong", "do this")))
    assert str(error) == "here: is wrong. Fix: do this" and error.fix == "do this"


def test_a_wrong_batch_does_not_leave_the_pipeline(text_config, monkeypatch):
    from nsa_jax.data import windows as module

    def unshifted(rows, eos_id, *, packing=True):
        batch = pack(rows, eos_id, packing=packing)
        return {**batch, "targets": batch["inputs"]}

    pack = module.pack_rows
    monkeypatch.setattr(module, "pack_rows", unshifted)
    with pytest.raises(DataError, match="not shifted"):
        next(make_pipeline(text_config).train())
    with pytest.raises(DataError, match="not shifted"):
        next(iter(make_pipeline(text_config).validation()))


def test_a_vocabulary_that_the_corpus_cannot_fill_is_told(text_config, caplog):
    text_config.data.tokenizer, text_config.data.bpe_vocab_size = "bpe", 300
    assert make_pipeline(text_config).tokenizer.vocab_size == 300 and "the corpus gave" not in caplog.text
    text_config.data.bpe_vocab_size = 9000
    for _ in range(2):  # trained, and loaded
        caplog.clear()
        pipeline = make_pipeline(text_config)
        size = pipeline.tokenizer.vocab_size
        assert size < 9000 and data_facts(pipeline)["vocab_size"] == size
        assert f"config.data.bpe_vocab_size=9000: the corpus gave {size:,} of 9,000 tokens" in caplog.text
