"""Documents in packed rows: operations per token, and how many queries have blocks to choose from."""

import numpy as np
import pytest

from nsa_jax.config import NSAConfig, default_config
from nsa_jax.data import make_pipeline
from nsa_jax.nn import ModelConfig
from nsa_jax.train import flops
from nsa_jax.train.preflight import cost, data_check

from .tiny import make_run, tiny_config

NSA = NSAConfig(compress_block=8, compress_stride=4, select_block=8, num_selected=4, window=12)


def starts(*lengths):
    """segment_start of one row that holds documents of these lengths."""
    begins = np.cumsum([0, *lengths[:-1]])
    return np.repeat(begins, lengths)[None].astype(np.int32)


def model(attention="nsa"):
    return ModelConfig(dim=32, num_heads=2, num_kv_heads=1, head_dim=8, nsa=NSA, attention=attention)


@pytest.mark.parametrize("attention", ["nsa", "dense", "window"])
def test_a_packed_row_costs_what_its_documents_cost(attention):
    config, lengths = (
        model(attention),
        (40, 8, 80, 64),
    )  # multiples of a block, so that blocks are those of the document
    packed = flops.keys_per_query(config, 192, starts(*lengths))
    alone = [flops.keys_per_query(config, length) for length in lengths]
    for branch, keys in packed.items():
        assert keys == pytest.approx(np.average([each[branch] for each in alone], weights=lengths))
    assert packed != flops.keys_per_query(config, 192)
    assert flops.keys_per_query(config, 192, starts(192)) == flops.keys_per_query(config, 192)
    parts = [flops.forward_flops_per_token(config, 192, s) for s in (None, starts(*lengths))]
    for name in parts[0]:
        depends = name.startswith(("attention", "selection"))
        assert parts[1][name] < parts[0][name] if depends else parts[1][name] == parts[0][name]


def test_documents_that_begin_within_a_block_are_counted_by_the_keys_that_exist():
    keys = flops.keys_per_query(model(), 23, starts(13, 10))
    assert keys["selected"] == pytest.approx(np.mean([*range(1, 14), *range(1, 11)]))  # fewer than 4 blocks: all
    assert keys["window"] == pytest.approx(np.mean([*range(1, 13), 12, *range(1, 11)]))


def test_cost_and_mfu_count_documents(tmp_path):
    segment_start = starts(*[48] * 4)
    settings = {"seq_len": 192, "batch_size": 4, "steps": 10, "device_kind": "NVIDIA H200", "devices": 1}
    whole = cost.estimate(model(), utilisation=0.5, **settings)
    packed = cost.estimate(model(), utilisation=0.5, segment_start=segment_start, **settings)
    assert packed.packed and not whole.packed and packed.hours < whole.hours
    assert packed.train_flops == flops.train_flops_per_token(model(), 192, segment_start)
    assert packed.dense_flops == flops.train_flops_per_token(model("dense"), 192, segment_start)
    letters = np.random.default_rng(0).integers(97, 123, (200, 40), np.uint8)
    (tmp_path / "corpus.txt").write_text(
        "|".join(row[: 10 + i % 30].tobytes().decode() for i, row in enumerate(letters))
    )
    run = make_run(
        tmp_path / "run",
        **{"data__source": "text", "data__files": (str(tmp_path / "corpus.txt"),), "data__text_separator": "|"},
        **{"data__cache_dir": str(tmp_path / "cache"), "preflight__selftest": False},
    )
    by_rows = flops.train_flops_per_token(run.setup.model_config, 48)
    run.examine()
    sampled = run.pipeline.sampled_segment_starts()
    assert sampled.shape == (1024, 48) and sampled.any()
    assert run._flops_per_token == flops.train_flops_per_token(run.setup.model_config, 48, sampled) < by_rows
    assert run.preflight.cost.train_flops == run._flops_per_token


def documents_report(seq_len, *lengths, **changes):
    config = default_config()
    config.data.seq_len = seq_len
    config.update_from_flattened_dict(changes)
    report = data_check.DataReport()
    data_check._examine_documents(config, starts(*lengths), report)
    return report


def test_rows_of_short_documents_are_told_to_be_dense_attention():
    report = documents_report(65_536, *[1024] * 64)
    (problem,) = report.problems
    assert (problem.rule, problem.severity, report.choice_share) == ("R038", "warning", 0.0)
    assert "only 0.0% of the queries" in problem.message and "1,024 tokens on average" in problem.message
    assert dict(report.facts) == {
        "tokens of a document in a row": "1,024 on average",
        "queries with more blocks than they select": "0.0%",
    }
    assert documents_report(65_536, *[1024] * 64, allow_dense_regime=True).problems == []


def test_long_documents_leave_a_choice():
    report = documents_report(65_536, 65_536)
    assert report.choice_share == pytest.approx(1 - 1024 / 65_536) and report.problems == []
    report = documents_report(4096, 1500, 2596)  # blocks 0 to 23, then 23 (from its middle) to 63
    assert report.choice_share == pytest.approx((1500 - 1024 + 4096 - 39 * 64) / 4096) and report.problems == []
    assert documents_report(4096, 4096, **{"model.attention": "dense"}).choice_share is None


def test_preflight_samples_the_documents_of_the_real_source(tmp_path):
    (tmp_path / "short.txt").write_text("|".join(f"{n:010}" * 2 for n in range(400)))
    config = tiny_config(data__source="text", data__text_separator="|", data__files=(str(tmp_path / "short.txt"),))
    config.data.cache_dir, config.data.seq_len = str(tmp_path / "cache"), 96
    report = data_check.examine(config, make_pipeline(config))
    assert "R038" in {problem.rule for problem in report.problems} and report.choice_share == 0
    config.data.packing = False
    report = data_check.examine(config, make_pipeline(config))
    assert report.segment_start is None and report.choice_share == pytest.approx(1 - 32 / 96)
