import asyncio
import json

import chex
import numpy as np
import pytest

from nsa_jax.config import default_config
from nsa_jax.data import DataError, cache, make_pipeline


@pytest.fixture(params=["parquet", "json"])
def stream_config(request, tmp_path, hf_home, documents, write_rows):
    config = default_config()
    config.data.source = "hf"
    config.data.hf_path = request.param
    config.data.hf_data_files = (write_rows(tmp_path / "rows", request.param, documents),)
    config.data.hf_streaming = True
    config.data.seq_len = 48
    config.data.val_fraction = 0.2
    config.data.prefetch = 3
    config.train.batch_size = 8
    config.train.eval_batches = 4
    return config


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_stream_whose_columns_are_known_by_its_rows_alone_begins_with_the_first(stream_config, tmp_path, lanes):
    rows = [f"row {i} of a csv file" for i in range(100)]
    (tmp_path / "rows.csv").write_text("\n".join(["text", *rows]))
    stream_config.data.update(hf_path="csv", hf_data_files=(str(tmp_path / "rows.csv"),), stream_lanes=lanes)
    stream_config.data.val_fraction = 0.0
    for lane in range(lanes):
        mine = [row.encode() for row in rows[lane::lanes]]
        found = lane_text(make_pipeline(stream_config), lane, lanes, 12)
        assert len(found) > len(mine) and found[: 2 * len(mine)] == (2 * mine)[: len(found)]


def held_out(text, val_fraction=0.2):
    return cache.is_validation(cache.content_hash(text.encode()), val_fraction)


def take(iterator, count):
    return [next(iterator) for _ in range(count)]


def tokens_of(batches):
    """The token stream that consecutive batches were cut from."""
    inputs = np.concatenate([b["inputs"].reshape(-1) for b in batches])
    return np.append(inputs, batches[-1]["targets"][-1, -1])


def test_stream_is_the_training_documents_in_order_epoch_after_epoch(stream_config, documents):
    expected = np.array([i for t in documents if not held_out(t) for i in (*t.encode(), 256)], np.int32)
    count = 2 * len(expected) // (8 * 48) + 3
    with_epochs = np.tile(expected, 4)
    stream = tokens_of(take(make_pipeline(stream_config).train(), count))
    assert len(stream) > 2 * len(expected)
    chex.assert_trees_all_equal(stream, with_epochs[: len(stream)])


@pytest.mark.parametrize("consumed", [0, 1, 13, 95, 110, 187])
def test_set_state_continues_bit_for_bit(stream_config, consumed):
    """An epoch is about 93 batches, so that positions in the second and third are tried as well."""
    iterator = make_pipeline(stream_config).train()
    take(iterator, consumed)
    state = json.loads(json.dumps(iterator.get_state()))
    assert len(json.dumps(state)) < 2000
    expected = take(iterator, 12)
    fresh = make_pipeline(stream_config).train()
    take(fresh, 2)
    fresh.set_state(state)
    assert fresh.get_state() == state
    chex.assert_trees_all_equal(take(fresh, 5), expected[:5])
    again = make_pipeline(stream_config).train()
    again.set_state(json.loads(json.dumps(fresh.get_state())))  # a state taken after a restart
    chex.assert_trees_all_equal(take(again, 7), expected[5:])


def test_state_just_after_a_restart_is_the_state_restored(stream_config):
    """`datasets` reports the old position until a row is read; saving at once must not go back to the start."""
    iterator = make_pipeline(stream_config).train()
    take(iterator, 20)
    for _ in range(3):
        restored = make_pipeline(stream_config).train()
        restored.set_state(iterator.get_state())
        chex.assert_trees_all_equal(next(restored), next(iterator))
        iterator = restored


def test_processes_share_the_stream(stream_config):
    whole = take(make_pipeline(stream_config).train(), 3)
    for count in (2, 4):
        parts = [
            take(make_pipeline(stream_config, process_index=i, process_count=count).train(), 3) for i in range(count)
        ]
        for step in range(3):
            joined = {k: np.concatenate([part[step][k] for part in parts]) for k in whole[step]}
            chex.assert_trees_all_equal(joined, whole[step])


def lane_text(pipeline, lane, lanes, steps):
    batches = take(pipeline.train(), steps)
    size = 8 // lanes
    own = slice(lane * size, (lane + 1) * size)
    parts = [{"inputs": b["inputs"][own], "targets": b["targets"][own]} for b in batches]
    return bytes(np.minimum(tokens_of(parts), 255).astype(np.uint8)).split(b"\xff")[:-1]


@pytest.mark.parametrize("lanes", [2, 4])  # two files: one for each lane, or every fourth document
@pytest.mark.parametrize("shuffle", [0, 50])
def test_lanes_hold_every_document_once_per_epoch(stream_config, documents, lanes, shuffle):
    stream_config.data.stream_lanes, stream_config.data.shuffle_buffer = lanes, shuffle
    kept = [t.encode() for t in documents if not held_out(t)]
    seen = []
    for lane in range(lanes):
        mine = documents[lane * 150 : (lane + 1) * 150] if lanes == 2 else documents[lane::4]
        mine = [t.encode() for t in mine if not held_out(t)]
        found = lane_text(make_pipeline(stream_config), lane, lanes, 110)
        first, second = found[: len(mine)], found[len(mine) : 2 * len(mine)]
        assert sorted(first) == sorted(mine)
        seen += first
        if not shuffle:
            assert found[: 2 * len(mine)] == (2 * mine)[: len(found)]
        else:
            assert first != mine and set(first[:50]) == set(mine[:50])
            assert second[:20] != first[:20]
    assert sorted(seen) == sorted(kept)


def test_the_shuffle_is_of_the_seed(stream_config):
    stream_config.data.shuffle_buffer = 100
    first, again = (next(make_pipeline(stream_config).train()) for _ in range(2))
    chex.assert_trees_all_equal(first, again)
    stream_config.seed = 1
    assert (next(make_pipeline(stream_config).train())["inputs"] != first["inputs"]).any()


def processes(config, count):
    return [make_pipeline(config, process_index=i, process_count=count).train() for i in range(count)]


def joined(parts):
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


@pytest.mark.parametrize("lanes", [2, 8])
def test_a_run_continues_bit_for_bit_with_another_number_of_processes(stream_config, tmp_path, lanes):
    stream_config.data.stream_lanes, stream_config.data.shuffle_buffer = lanes, 40
    whole = take(make_pipeline(stream_config).train(), 200)
    iterators = processes(stream_config, 2)
    for step in range(190):
        chex.assert_trees_all_equal(joined([next(iterator) for iterator in iterators]), whole[step])
        if step % 19 and not 90 < step < 96:  # the first epoch ends here
            continue
        directory = tmp_path / str(step)
        directory.mkdir()
        for i, iterator in enumerate(iterators):
            text = json.dumps(iterator.get_state())
            assert len(text) < 1500 * lanes
            (directory / f"process_{i}-of-2.json").write_text(text)
        for count in (1, 4) if step % 38 == 0 else (2,):
            others = processes(stream_config, count)
            for other in others:
                asyncio.run(load(other, directory))
            for ahead in range(1, 5):
                chex.assert_trees_all_equal(joined([next(other) for other in others]), whole[step + ahead])


async def load(iterator, directory):
    await (await iterator.load(directory))


def test_a_process_tokenises_its_own_lanes_only(stream_config, monkeypatch):
    stream_config.data.stream_lanes = 4
    counts = {}
    for index, count in ((0, 1), (1, 2), (3, 4)):
        pipeline = make_pipeline(stream_config, process_index=index, process_count=count)
        encode, texts = pipeline.tokenizer.encode_batch, []
        monkeypatch.setattr(
            pipeline.tokenizer, "encode_batch", lambda batch, e=encode, t=texts: t.extend(batch) or e(batch)
        )
        iterator = pipeline.train()
        take(iterator, 40)
        iterator.close()
        counts[count] = len(texts)
    assert counts[2] < 0.65 * counts[1] and counts[4] < 0.65 * counts[2]


def test_lanes_that_cannot_share_a_batch_are_refused(stream_config):
    stream_config.data.stream_lanes = 3
    with pytest.raises(DataError, match="stream_lanes=3: cannot share a batch of 8 rows evenly"):
        make_pipeline(stream_config)


def test_a_position_of_a_version_without_lanes_is_read(stream_config):
    iterator = make_pipeline(stream_config).train()
    take(iterator, 20)
    state = json.loads(json.dumps(iterator.get_state()))
    (state["stream"],) = state["stream"]["lanes"].values()
    del state["stream"]["position"]["taken"]
    fresh = make_pipeline(stream_config).train()
    fresh.set_state(state)
    chex.assert_trees_all_equal(take(fresh, 3), take(iterator, 3))


def test_start_step_reads_up_to_there(stream_config):
    expected = take(make_pipeline(stream_config).train(), 5)[4]
    chex.assert_trees_all_equal(next(make_pipeline(stream_config).train(4)), expected)


def test_validation_comes_from_held_out_documents_only(stream_config, documents):
    pipeline = make_pipeline(stream_config)
    batches = list(pipeline.validation())
    chex.assert_trees_all_equal(list(pipeline.validation()), batches)
    kept = [t for t in documents if held_out(t)]
    text = pipeline.tokenizer.decode(tokens_of(batches))
    assert text.startswith(kept[0] + kept[1]) and "".join(kept).startswith(text)
    assert pipeline.stats["validation"].documents <= len(kept) and pipeline.stats["train"] is None


def test_validation_reads_no_more_of_the_stream_than_it_needs(stream_config, documents):
    stream_config.train.eval_batches = 1
    stats = make_pipeline(stream_config).stats["validation"]
    assert 8 * 48 < stats.tokens < 8 * 48 + 600


def test_max_documents_limits_each_epoch(stream_config, documents):
    stream_config.data.max_documents = 40
    kept = [t for t in documents[:40] if not held_out(t)]
    epoch = sum(len(t.encode()) + 1 for t in kept)
    stream = tokens_of(take(make_pipeline(stream_config).train(), 2 * epoch // (8 * 48) + 1))
    chex.assert_trees_all_equal(stream[epoch : 2 * epoch], stream[:epoch])


def test_bpe_and_unpacked_rows_work_on_streams(stream_config):
    stream_config.data.tokenizer = "bpe"
    stream_config.data.bpe_vocab_size = 300
    stream_config.data.packing = False
    pipeline = make_pipeline(stream_config)
    batch = next(pipeline.train())
    assert not batch["segment_start"].any() and (batch["loss_mask"] == 0).any()
    assert pipeline.tokenizer.decode(batch["inputs"][0]).startswith("document ")


def test_non_streaming_dataset_is_cached_like_any_corpus(stream_config, documents):
    stream_config.data.hf_streaming = False
    pipeline = make_pipeline(stream_config)
    assert pipeline.stats["train"].documents == sum(not held_out(t) for t in documents)
    assert pipeline.stats["validation"].documents == sum(held_out(t) for t in documents)


def test_stream_without_held_out_documents_is_an_error(stream_config):
    stream_config.data.val_fraction = 1e-9
    with pytest.raises(DataError, match="none of the first 300 documents.*val_fraction"):
        make_pipeline(stream_config)


def test_stream_without_training_documents_is_an_error(stream_config):
    stream_config.data.val_fraction = 1 - 1e-12
    with pytest.raises(DataError, match="holds no training document.*300 documents read"):
        next(make_pipeline(stream_config).train())


def test_position_of_another_stream_is_refused(stream_config, tmp_path, documents, write_rows):
    state = make_pipeline(stream_config).train().get_state()
    write_rows(tmp_path / "rows", stream_config.data.hf_path, documents[:-1])
    with pytest.raises(DataError, match="belongs to other data"):
        make_pipeline(stream_config).train().set_state(state)
