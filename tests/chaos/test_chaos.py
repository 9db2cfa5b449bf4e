"""A short form of every attack; `make chaos` makes the long one."""

import importlib

import pytest

from .harness import ATTACKS, Outcome, Tally, failures, run_attack, table


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_promises_hold(name, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "True")
    quick = importlib.import_module(f"{__package__}.{name}").QUICK
    tallies = run_attack(name, seed=0, folder=tmp_path, count=quick)
    assert sum(tally.attempts for tally in tallies.values()) == quick
    assert not failures(tallies), table(tallies)


def test_broken_promises_and_broken_attacks_are_counted(tmp_path, monkeypatch):
    class Module:
        @staticmethod
        def attack(rng, folder):
            yield Outcome("held")
            yield Outcome("broken", "the step was accepted")
            raise ValueError("a bug")

    monkeypatch.setattr(importlib, "import_module", lambda name: Module)
    tallies = run_attack("any", seed=0, folder=tmp_path, count=10)
    assert tallies["any", "held"] == Tally(1, [], tallies["any", "held"].seconds)
    assert failures(tallies) == [
        "any / broken: the step was accepted",
        "any / error in the attack: ValueError: a bug",
    ]
    assert "all" in table(tallies) and "the step was accepted" in table(tallies)
