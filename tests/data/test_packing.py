import chex
import numpy as np
import pytest

from nsa_jax.data import DataError
from nsa_jax.data.packing import check_batch, pack_rows
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
