import pickle

import chex
import numpy as np
import pytest

from nsa_jax.data import DataError, windows
from nsa_jax.data.packing import best_fit, check_batch, pack_rows
from nsa_jax.data.synthetic import copy_rows, random_rows

EOS = 9


def slow_pack(rows, packing):
    """Token by token, from the definition: a document is what lies between two EOS."""
    out = {"inputs": [], "targets": [], "segment_start": [], "loss_mask": []}
    for row in rows:
        document, documents = 0, []
        for token in row:
            documents.append(document)
            if token == EOS:
                document += 1
        length = len(row) - 1
        out["inputs"].append([row[t] for t in range(length)])
        out["targets"].append([row[t + 1] for t in range(length)])
        out["segment_start"].append([documents.index(documents[t]) if packing else 0 for t in range(length)])
        out["loss_mask"].append([1.0 if documents[t] == documents[t + 1] else 0.0 for t in range(length)])
    kinds = {"inputs": np.int32, "targets": np.int32, "segment_start": np.int32, "loss_mask": np.float32}
    return {k: np.array(v, kinds[k]) for k, v in out.items()}


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("length", [2, 3, 17, 64])
@pytest.mark.parametrize("eos_share", [0.0, 0.1, 0.6, 1.0])
def test_pack_rows_follows_the_definition(packing, length, eos_share):
    rng = np.random.default_rng(length)
    rows = rng.integers(0, EOS, (5, length))
    rows[rng.random(rows.shape) < eos_share] = EOS
    chex.assert_trees_all_equal(pack_rows(rows, EOS, packing=packing), slow_pack(rows.tolist(), packing))


def test_packed_batches_pass_the_check():
    rows = np.random.default_rng(0).integers(0, EOS + 1, (4, 33))
    assert check_batch(pack_rows(rows, EOS))["inputs"].shape == (4, 32)


def test_unshifted_labels_are_refused_with_the_cause():
    batch = pack_rows(np.random.default_rng(0).integers(0, EOS, (2, 17)), EOS)
    batch["targets"] = batch["inputs"]
    with pytest.raises(DataError, match="not shifted.*copy its input.*shifted by one"):
        check_batch(batch)


def test_one_wrong_target_is_found():
    batch = pack_rows(np.arange(2 * 17).reshape(2, 17), EOS)
    batch["targets"] = batch["targets"].copy()
    batch["targets"][1, 4] += 1
    with pytest.raises(DataError, match="row 1, position 4"):
        check_batch(batch)


@pytest.mark.parametrize("bad", [-1, 6])
def test_impossible_segment_starts_are_found(bad):
    batch = pack_rows(np.arange(100, 117)[None], EOS)
    batch["segment_start"][0, 5] = bad
    with pytest.raises(DataError, match=f"row 0, position 5: segment_start {bad}"):
        check_batch(batch)


def test_random_rows_are_uniform_and_depend_on_their_number_alone():
    rows = np.arange(64)
    batch = check_batch(random_rows(rows, 256, 16, seed=3, split="train"))
    counts = np.bincount(batch["inputs"].reshape(-1), minlength=16)
    assert counts.shape == (16,)
    assert np.abs(counts / counts.sum() - 1 / 16).max() < 0.005
    chex.assert_trees_all_equal(
        random_rows(rows[40:42], 256, 16, seed=3, split="train"), {k: v[40:42] for k, v in batch.items()}
    )
    for other in (dict(seed=4, split="train"), dict(seed=3, split="validation")):
        same = (random_rows(rows, 256, 16, **other)["inputs"] == batch["inputs"]).mean()
        assert same < 0.08
    assert batch["loss_mask"].all() and not batch["segment_start"].any()


@pytest.mark.parametrize("seq_len", [2, 16, 17])
def test_copy_rows_score_exactly_the_second_copy(seq_len):
    batch = check_batch(copy_rows(np.arange(6), seq_len, 10, seed=0, split="train"))
    half = seq_len // 2
    for row in range(6):
        scored = np.flatnonzero(batch["loss_mask"][row])
        chex.assert_trees_all_equal(scored, np.arange(half, 2 * half))
        chex.assert_trees_all_equal(batch["targets"][row, scored], batch["inputs"][row, :half])
        assert batch["inputs"][row, half] == 9
        assert (batch["inputs"][row, :half] < 9).all()


class Numbered:
    """A split whose token at stream position p is p, but EOS (here -1) at the end of every document."""

    def __init__(self, lengths):
        self.offsets = np.concatenate([[0], np.cumsum(lengths)])
        self.tokens = np.arange(self.offsets[-1], dtype=np.int32)
        self.tokens[self.offsets[1:] - 1] = -1


def realistic_lengths(count, seed=0):
    """Of documents of the web: log-normal, half of them under 600 tokens, a mean of 1,000."""
    return np.random.default_rng(seed).lognormal(np.log(600), 1.0, count).astype(int) + 2


def test_best_fit_places_every_token_of_an_epoch_once_and_keeps_documents_apart(monkeypatch):
    monkeypatch.setattr(windows, "_GROUP_TOKENS", 64)
    monkeypatch.setattr(windows, "_GROUP_ROWS", 8)
    monkeypatch.setattr(windows, "_POOL_GROUPS", 3)
    split = Numbered(np.random.default_rng(1).integers(2, 60, 200))
    rows = pickle.loads(pickle.dumps(windows.BestFitRows(split, 32, 5, -1, True)))
    offsets, count = split.offsets, rows.rows_per_epoch
    there = (offsets[-1] - 1) // 32
    assert rows.group_rows == there // (there // 8) and there - count < there // 8
    orders = []
    for epoch in range(2):
        batch = check_batch(rows(np.arange(epoch * count, (epoch + 1) * count)))
        orders.append(batch["inputs"])
        for inputs, targets, start, mask in zip(*batch.values(), strict=True):
            begins = start == np.arange(32)
            for t in range(32):
                if t and not begins[t]:  # the token before it in the row is the one before it in the document
                    assert inputs[t - 1] >= 0
                    assert inputs[t - 1] + 1 in offsets[1:] - 1 if inputs[t] < 0 else inputs[t - 1] == inputs[t] - 1
                if mask[t]:
                    assert targets[t] == split.tokens[inputs[t] + 1]
                else:
                    assert inputs[t] < 0 or begins[t + 1]
        seen = np.sort(batch["inputs"][batch["inputs"] >= 0])
        left_out = np.setdiff1d(np.arange(seen[0], seen[-1]), seen)
        assert (np.diff(seen) > 0).all() and np.isin(left_out, offsets[1:] - 1).all()
    assert not np.array_equal(*orders)


@pytest.mark.parametrize(("count", "lost"), [(33, 0), (63, 0), (64, 0), (95, 31), (200, 8)])
def test_only_the_last_tokens_of_concatenated_rows_are_in_no_epoch(count, lost):
    lengths = [5] * (count // 5 - 1)
    split = Numbered([*lengths, count - sum(lengths)])
    split.tokens = np.arange(count)

    def unseen(rows):
        batch = rows(np.arange(150 * rows.rows_per_epoch))
        return sorted(set(range(count)) - set(batch["inputs"].flat) - set(batch["targets"].flat))

    assert unseen(windows.ShuffledWindows(split.tokens, 32, 0, -1, True)) == list(range(count - lost, count))
    # The very last is an EOS, which is a target where its document ends a row.
    assert set(unseen(windows.BestFitRows(split, 32, 0, -1, True))) <= {count - 1}


@pytest.mark.parametrize("count", [700, 1013, 1023, 1537, 5000])
def test_best_fit_reads_a_corpus_of_few_groups_evenly(count):
    """A last group that is not full would be in no epoch, at one end of the corpus or the other."""
    split, seq_len = Numbered(np.full(count * 2, 1024)), 2048
    rows = windows.BestFitRows(split, seq_len, 0, -1, True)
    groups = rows.rows_per_epoch // rows.group_rows
    assert 512 <= rows.group_rows < 1024 and 0 <= (count - 1) - rows.rows_per_epoch < groups
    assert (rows.layout == "") == (rows.group_rows == 512)


def test_best_fit_cuts_few_documents_that_fit_and_pads_nothing():
    lengths, seq_len = realistic_lengths(20_000), 2048
    split = Numbered(lengths)
    rows = windows.BestFitRows(split, seq_len, 0, -1, True)
    count = rows.rows_per_epoch
    fits = lengths <= seq_len
    ends = split.offsets[1:]
    cut = {"concatenate": ((ends - 1) // seq_len > split.offsets[:-1] // seq_len)[fits].mean()}
    whole = np.zeros(len(lengths), bool)
    first, last = len(split.tokens), 0
    for group in range(count // rows.group_rows):
        for row in rows._place_group(0, group):
            assert sum(size for _, size in row) == seq_len  # no padding
            for start, size in row:
                document = np.searchsorted(split.offsets, start, "right") - 1
                whole[document] |= size == lengths[document]
                first, last = min(first, start), max(last, start + size)
    placed = fits & (split.offsets[:-1] >= first) & (ends <= last)  # the rest is left over in this epoch
    cut["best_fit"] = 1 - whole[placed].mean()
    assert cut["concatenate"] == pytest.approx(0.32, abs=0.02)
    assert cut["best_fit"] < 0.015


@pytest.mark.parametrize("lengths", [[8, 8], [1] * 16, [16], [3, 13], [9, 7], [5, 5, 6]])
def test_best_fit_fills_rows_exactly(lengths):
    rows = best_fit(np.array(lengths), 2, 8)
    assert [sum(size for *_, size in row) for row in rows] == [8, 8]
    covered = sorted((document, start + i) for row in rows for document, start, size in row for i in range(size))
    assert covered == [(document, i) for document, length in enumerate(lengths) for i in range(length)]
