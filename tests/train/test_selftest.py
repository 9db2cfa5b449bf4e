"""The causality self-test names leaks, ignored keys and other faults in the model code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nsa_jax.command_line import load_config
from nsa_jax.ops import nsa
from nsa_jax.ops.target import Target, compile_for
from nsa_jax.train.preflight import selftest

from .tiny import rules, tiny_config


def roll(op):
    """Every query gets what the next one should: it sees one token too many."""

    def leaky(*args, **kwargs):
        out = op(*args, **kwargs)
        return jax.tree.map(lambda a: jnp.roll(a, -1, axis=1), out)

    return leaky


def test_the_model_passes(usual_compilation):
    """In programs that are compiled as those of a run; faults are found in any."""
    tested = selftest.selftest(tiny_config())
    assert tested.problems == []
    assert dict(tested.facts)["documents apart"] == "passed"


@pytest.fixture
def one_program(monkeypatch):
    """As on a GPU, where the logits come from the program of the gradient; returns the subjects that were made."""
    subjects, make = [], selftest._Subject.__init__

    def init(subject, *arguments):
        make(subject, *arguments)
        subject._logits_apart = False
        subjects.append(subject)

    monkeypatch.setattr(selftest._Subject, "__init__", init)
    return subjects


def test_logits_from_the_gradients_program_are_those_of_the_model(one_program, monkeypatch):
    assert selftest.selftest(tiny_config()).problems == []
    (subject,) = one_program
    logits = subject.logits()
    subject._logits_apart = True
    np.testing.assert_allclose(logits, subject.logits(), rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(nsa, "window_attention", roll(nsa.window_attention))
    assert "R040" in rules(selftest.selftest(tiny_config()).problems)


@pytest.mark.parametrize("branch", ["compressed", "selected", "window"])
def test_a_leak_of_the_next_token_names_its_branch(branch, monkeypatch):
    op = f"{branch}_attention"
    monkeypatch.setattr(nsa, op, roll(getattr(nsa, op)))
    found = selftest.selftest(tiny_config()).problems
    assert "R040" in rules(found)
    assert f"the model sees the future, through the {branch} branch" in str(found[0])


def test_rounding_that_depends_on_the_lists_of_later_tokens_is_no_leak(monkeypatch):
    real = nsa.selected_attention

    def tiled(query, key, value, block_indices, **kwargs):
        """The last bits depend on what the next token lists, as in kernels that serve neighbours together."""
        out = real(query, key, value, block_indices, **kwargs)
        listed = (jnp.roll(block_indices, -1, axis=1) ** 2).sum((2, 3))
        return out * (1 + 1e-6 * listed[..., None, None])

    monkeypatch.setattr(nsa, "selected_attention", tiled)
    subject = selftest._Subject(*selftest.slice_config(tiny_config())[:2], True, 0)
    base, differs = subject.logits(), []
    for t in selftest._positions(subject.config, subject.length):
        changed = np.where(np.arange(subject.length) > t, subject.other, subject.tokens)
        where = selftest._first_difference(base[: t + 1], subject.logits(changed)[: t + 1])
        differs += [] if where is None else [where == t]
    assert differs and all(differs)
    assert selftest.selftest(tiny_config()).problems == []


def test_lists_that_depend_on_later_tokens_are_a_leak(monkeypatch):
    real = nsa.select_blocks
    monkeypatch.setattr(nsa, "select_blocks", lambda *a, **k: jnp.roll(real(*a, **k), -1, axis=1))
    assert rules(selftest.selftest(tiny_config()).problems) == {"R040"}


def test_the_selftest_runs_the_kernels_that_the_rows_of_the_run_are_served_by(capsys):
    config = load_config("configs/a100_prod.py")
    with compile_for(Target("gpu", (9, 0))):
        model, length, _ = selftest.slice_config(config)
        assert length == 1152 * 3 // 2 and selftest._kernels(model, length) == selftest._kernels(model, 2048)
        config.data.seq_len = 32_768
        model, length, _ = selftest.slice_config(config)
        assert length == 9216 * 3 // 2 and selftest._kernels(model, length) == selftest._kernels(model, 32_768)
        assert selftest._kernels(model, 1152) != selftest._kernels(model, 32_768)
        assert selftest._shares_blocks(model, 32_768) and not selftest._shares_blocks(model, 1152)
    assert capsys.readouterr().out == ""  # tables of kernels do not fill the log of a run


@pytest.mark.gpu
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(("select_block", "num_selected"), [(64, 16), (32, 32)])
def test_gpu_kernels_of_long_rows_pass(select_block, num_selected, packing):
    config = load_config("configs/a100_prod.py")
    config.data.seq_len, config.data.packing = 32_768, packing
    config.model.nsa.select_block, config.model.nsa.num_selected = select_block, num_selected
    assert selftest.selftest(config).problems == []


def test_queries_of_the_second_document_choose_among_blocks():
    model, length, _ = selftest.slice_config(tiny_config())
    assert length - length // 3 > model.nsa.num_selected * model.nsa.select_block


def test_a_document_that_sees_its_neighbour_is_an_error(monkeypatch):
    real = nsa.window_attention
    monkeypatch.setattr(nsa, "window_attention", lambda *a, **k: real(*a, **{**k, "segment_start": None}))
    assert rules(selftest.selftest(tiny_config()).problems) == {"R044"}


@pytest.mark.parametrize(("op", "name"), [("selected_attention", "key_slc"), ("window_attention", "key_win")])
def test_keys_that_are_ignored_are_named(op, name, monkeypatch):
    real = getattr(nsa, op)
    monkeypatch.setattr(nsa, op, lambda query, key, *a, **k: real(query, key * 0, *a, **k))
    found = selftest.selftest(tiny_config()).problems
    assert rules(found) == {"R041", "R042"}
    assert all(name in str(problem) for problem in found)


def test_an_operation_that_is_not_deterministic_is_an_error(monkeypatch):
    noise = iter(range(1, 100))
    logits = selftest._Subject.logits
    monkeypatch.setattr(selftest._Subject, "logits", lambda *a, **k: logits(*a, **k) + np.float32(next(noise)))
    assert "R043" in rules(selftest.selftest(tiny_config()).problems)
