"""Speed is measured right: from when the device finished the steps, whenever the host comes to read their metrics."""

import threading

import jax
import numpy as np
import pytest

from nsa_jax.train import timing


class _Machine:
    """A clock and a device that the test moves."""

    def __init__(self):
        self.now = 100.0
        self._over: dict[int, threading.Event] = {}

    def perf_counter(self):
        return self.now

    def block_until_ready(self, values):
        assert self._over[values["loss"]].wait(timeout=30)

    def interval(self, first_step):
        interval = timing.Interval(first_step)
        self._over[first_step] = threading.Event()
        interval.add({"loss": first_step})
        return interval

    def finish(self, interval, at):
        """The device has computed the interval at time `at`."""
        self.now = at
        self._over[interval.first_step].set()
        assert interval.end() == at


@pytest.fixture
def machine(monkeypatch):
    fake = _Machine()
    monkeypatch.setattr(timing.time, "perf_counter", fake.perf_counter)
    monkeypatch.setattr(jax, "block_until_ready", fake.block_until_ready)
    monkeypatch.setattr(jax, "device_get", lambda values: values)
    return fake


def test_intervals_that_are_read_late_keep_their_own_time(machine):
    """The host reads the first interval when the second is over too: neither takes the other's time."""
    clock = timing.Clock()
    first, second = machine.interval(1), machine.interval(11)
    machine.finish(first, at=110.0)
    machine.finish(second, at=140.0)
    machine.now = 200.0  # the host was busy with something else
    np.testing.assert_allclose([clock.lap(first)[1], clock.lap(second)[1]], [10.0, 30.0])


def test_reading_slowly_is_nobodys_time(machine, monkeypatch):
    """Fetching metrics takes the host a while: the steps meanwhile on the device are not faster or slower for it."""
    clock = timing.Clock()
    first, second = machine.interval(1), machine.interval(11)
    machine.finish(first, at=110.0)

    def fetch(values):
        machine.now += 5.0
        return values

    monkeypatch.setattr(jax, "device_get", fetch)
    seconds = [clock.lap(first)[1]]
    assert machine.now == 115.0
    machine.finish(second, at=120.0)
    np.testing.assert_allclose([*seconds, clock.lap(second)[1]], [10.0, 10.0])


def test_validation_is_not_counted(machine):
    clock = timing.Clock()
    machine.finish(machine.interval(1), at=110.0)
    machine.now = 150.0
    clock.restart()
    second = machine.interval(11)
    machine.finish(second, at=152.0)
    np.testing.assert_allclose(clock.lap(second)[1], 2.0)
