"""The decode benchmark runs end to end and its bookkeeping is right; the figures themselves come from GPUs."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import decode


@pytest.mark.slow
def test_writes_rows_and_plot(tmp_path, monkeypatch):
    results, picture = tmp_path / "out.json", tmp_path / "out.png"
    monkeypatch.setattr(decode, "_MOST_ROTATED", 2)
    command = ["decode.py", "--batches", "1", "--contexts", "1024", "--shape", "4,2,16", "--dense", "xla"]
    monkeypatch.setattr(sys, "argv", [*command, "--json", str(results), "--plot", str(picture)])
    decode.main()
    (row,) = json.loads(results.read_text())["rows"]
    # 63 compressed blocks, 15 whole listed blocks and the current one, the window: everything up to the last token.
    assert row["keys_read"] == 63 + 1024 + 512
    assert row["speedup"] == round(row["dense_xla_us"] / row["nsa_us"], 2) > 0
    assert picture.stat().st_size > 10_000


def test_shares_take_the_faster_baseline():
    row = {"nsa_us": 10.0, "dense_cudnn_us": 90.0, "dense_xla_us": 80.0, "dense_split_us": 70.0}
    out = decode.shares(row, nsa_bytes=10**7, dense_bytes=14 * 10**7, peak=4e12, practical=2e12)
    assert out["speedup"] == 8.0 and out["speedup_over_split"] == 7.0
    assert out["nsa_tb_per_s"] == 1.0 and out["nsa_peak_share"] == 0.25 and out["nsa_copy_share"] == 0.5
    assert out["dense_tb_per_s"] == 2.0
