"""Speed is measured right whether the host runs ahead of the device or is held back by it."""

import numpy as np
import pytest

from nsa_jax.train import loop


class _Time:
    """A clock that the test moves."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def time(monkeypatch):
    fake = _Time()
    monkeypatch.setattr(loop.time, "perf_counter", fake.perf_counter)
    return fake


def _interval(time, dispatched, finished, monkeypatch):
    interval = loop._Interval(1)
    time.now = dispatched
    interval.close([])

    def read():
        time.now = max(time.now, finished)
        return [{}]

    monkeypatch.setattr(interval, "read", read)
    return interval


def test_host_far_ahead_of_the_device(time, monkeypatch):
    clock = loop._Clock()
    first = _interval(time, 100.1, 110.0, monkeypatch)
    second = _interval(time, 100.2, 120.0, monkeypatch)
    np.testing.assert_allclose([clock.lap(first)[1], clock.lap(second)[1]], [10.0, 10.0])


def test_host_held_back_by_the_device(time, monkeypatch):
    """Both intervals are over when the first is reported: neither takes the other's time."""
    clock = loop._Clock()
    first = _interval(time, 110.0, 110.0, monkeypatch)
    second = _interval(time, 120.0, 120.0, monkeypatch)
    np.testing.assert_allclose([clock.lap(first)[1], clock.lap(second)[1]], [10.0, 10.0])
