"""How much of the held-out text is trained on, estimated from samples of a stream too long to search."""

import numpy as np
import pytest

from nsa_jax.train.preflight import data_check

LENGTH = 16


@pytest.fixture
def text():
    return np.random.default_rng(0).integers(0, 256, 200_000)


def counts(stream, held_out, count):
    return data_check.shared_windows(data_check._stretches(stream, count, LENGTH), held_out.reshape(8, -1), LENGTH)


def test_every_occurrence_is_counted(text):
    held_out = text[:4096]
    stream = np.concatenate([text[4096:50_000], held_out, text[50_000:], held_out])
    assert set(counts(stream, held_out, len(stream))) == {2}
    assert set(counts(text[4096:], held_out, len(stream))) == {0}


def test_windows_over_the_seams_of_stretches_are_found(text, monkeypatch):
    monkeypatch.setattr(data_check, "_STRETCH", 1000)
    assert set(counts(text, text[500:2548], len(text))) == {1}


def test_a_leak_is_seen_in_a_sample(text, monkeypatch):
    """Half of what is held out is trained on once; a tenth of the stream tells so."""
    monkeypatch.setattr(data_check, "_STRETCH", 500)
    held_out, rest = text[:40_000], text[40_000:]
    stream = np.concatenate([rest[:80_000], held_out[:20_000], rest[80_000:]])
    times = counts(stream, held_out, len(stream) // 10)
    assert data_check._estimated_share(times, 0.1) == pytest.approx(0.5, abs=0.15)


def test_boilerplate_is_not_scaled_up(text, monkeypatch):
    """A licence before every document is in every sample: what is found of the windows is all there is to find."""
    monkeypatch.setattr(data_check, "_STRETCH", 2000)
    licence = np.random.default_rng(1).integers(0, 256, 300)
    stream = np.concatenate([np.concatenate([licence, part]) for part in text[40_000:].reshape(-1, 400)])
    held_out = np.concatenate([np.concatenate([licence, part]) for part in text[:8_000].reshape(8, -1)])
    times = counts(stream, held_out, len(stream) // 10)
    in_all = (counts(stream, held_out, len(stream)) > 0).mean()
    assert in_all > 0.03
    assert data_check._estimated_share(times, 0.1) == pytest.approx(in_all, abs=0.01)
