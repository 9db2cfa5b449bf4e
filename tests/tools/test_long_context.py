"""Long tasks are scored by their answers, and losses with a cut context are those of shorter texts."""

import json

import numpy as np
import pytest
from flax import nnx

from nsa_jax import evaluate, nn
from nsa_jax.data.long_tasks import TASKS
from nsa_jax.data.tokenizers import ByteTokenizer
from nsa_jax.evaluate import long_context
from nsa_jax.inspect.probe import score_rows

from .runs import small_config, write_run

CONFIG = nn.ModelConfig.from_config(small_config(), 257)


class Knows:
    """A probe that knows every answer but those of a length, and lists the blocks of all answers' sources in one head.

    It is told the rows, as a model is not.
    """

    def __init__(self, wrong_length=0):
        self.config, self.wrong_length = CONFIG, wrong_length

    def __call__(self, tokens, positions):
        answers = np.take_along_axis(tokens, positions + 1, axis=1)
        answers[:, -1] += tokens.shape[1] == self.wrong_length  # the last token of the last answer
        lists = np.full((1, *positions.shape, 2, self.config.nsa.num_selected), 999, np.int32)
        lists[0, :, :, 1, :1] = 3
        return answers, lists


def test_exact_match_by_length_and_distance():
    sizes = dict(names=("needle", "multikey", "recall"), lengths=(1024, 2048), samples=4, batch_size=3)
    found = long_context.task_grid(Knows(wrong_length=1024), ByteTokenizer(), **sizes)
    cells = {(cell["task"], cell["length"]): cell for cell in found["cells"]}
    assert list(cells) == [(task, length) for length in (1024, 2048) for task in sizes["names"]]
    for (task, length), cell in cells.items():
        keys = 1 if task == "needle" else 8
        assert cell["questions"] == 4 * keys
        # A needle has fewer tokens than the other rows: what is wrong there lies beyond its answer.
        assert cell["exact_match"] == (7 / 8 if keys == 8 and length == 1024 else 1.0)
        assert cell["chance"] == pytest.approx(1 / 8 if keys == 8 else 1 / 90_000)
        assert cell["selection_chance"] == 4 / (length // 16)
    for task in sizes["names"]:
        part = [row for row in found["distances"] if row["task"] == task]
        assert sum(row["questions"] for row in part) == 2 * 4 * (1 if task == "needle" else 8)
        assert all(row["to"] == 2 * row["from"] for row in part)
    recall = [row["from"] for row in found["distances"] if row["task"] == "recall"]
    assert min(recall) >= 64 and max(recall) >= 512  # 8 to 64 windows of 12 tokens


class KnowsWhatStandsClose(Knows):
    """A probe that knows those letters of the keypad that stand among the last tokens before the question."""

    def __call__(self, tokens, positions):
        answers, lists = super().__call__(tokens, positions)
        for row, places, answered in zip(tokens, positions, answers, strict=True):
            for i, at in enumerate(places):
                if answered[i] not in row[max(at - 200, 0) : at + 1]:
                    answered[i] = ord("?")
        return answers, lists


def test_questions_that_the_row_has_answered_say_nothing_about_its_length():
    sizes = dict(names=("keypad",), lengths=(2048,), samples=3, batch_size=2)
    found = long_context.task_grid(KnowsWhatStandsClose(), ByteTokenizer(), **sizes)
    (cell,) = found["cells"]
    assert (cell["questions"], cell["exact_match"]) == (3 * 10, 0.0)  # ten digits, all stated far before
    assert sum(row["questions"] for row in found["distances"]) == 3 * 256
    near = [row["exact_match"] for row in found["distances"] if row["to"] <= 128]
    assert near and min(near) == 1.0


def test_selection_is_counted_at_the_blocks_of_the_sources():
    rows = [("needle", TASKS["needle"].row(np.random.default_rng(i), 256, ByteTokenizer())) for i in range(12)]
    scored = score_rows(Knows(), rows, 5)
    sources = np.array([s.answer.source // 16 for s in scored])
    np.testing.assert_array_equal([s.listed.tolist() for s in scored], [[[False, b == 3]] for b in sources])
    assert all(s.right for s in scored)


def test_losses_with_a_cut_context_are_those_of_shorter_texts():
    model = nn.Transformer(CONFIG, rngs=nnx.Rngs(0))
    scorer = evaluate.Scorer(model)
    rows = np.random.default_rng(0).integers(0, 256, (2, 65)).astype(np.int32)
    whole = long_context.context_losses(scorer, rows, 64, 64, batch_size=2)
    np.testing.assert_allclose(whole, scorer(rows[:, :-1], rows[:, 1:]), rtol=1e-5)
    cut = long_context.context_losses(scorer, rows, 16, 1, batch_size=8)
    for position in (0, 15, 16, 40, 63):  # each by itself: the text begins 16 tokens before the target
        first = max(position - 15, 0)
        piece = np.pad(rows[:, first : position + 2], ((0, 0), (0, 15 - (position - first))))
        alone = scorer(piece[:, :-1], piece[:, 1:])[:, position - first]
        np.testing.assert_allclose(cut[:, position], alone, rtol=2e-4)
    assert np.abs(cut[:, 16:] - whole[:, 16:]).max() > 1e-2
    table = long_context.context_table(whole, {16: cut})
    assert [(row["from"], row["to"]) for row in table][-2:] == [(16, 32), (32, 64)]
    assert table[-3]["beyond_16"] is None
    assert table[-1]["beyond_16"] == pytest.approx((cut - whole)[:, 32:].mean(), abs=1e-6)


def test_the_command_line_runs_them_and_says_what_does_not_fit(tmp_path, capsys):
    config = small_config()
    config.data.source, config.data.tasks = "task", ("needle",)
    write_run(tmp_path / "run", config)
    (tmp_path / "a.txt").write_text("value = 1\n" * 60)
    command = [str(tmp_path / "run"), "--files", str(tmp_path / "a.txt"), "--samples", "2", "--batch-size", "4"]
    more = ["--tasks", "long,context", "--long-tasks", "needle,copy", "--lengths", "512", "--cuts", "12,48"]
    assert evaluate.main([*command, *more]) == 0
    found = json.loads((tmp_path / "run" / "evaluation" / "evaluation.json").read_text())["tasks"]
    assert [cell["task"] for cell in found["long"]["cells"]] == ["needle", "copy"]
    assert found["context"]["rows"] == 6 and found["context"]["bins"][-1].keys() >= {"loss", "beyond_12", "beyond_48"}
    for name in ("long.png", "context.png"):
        assert (tmp_path / "run" / "evaluation" / name).stat().st_size > 5_000
    assert evaluate.main([*command, "--tasks", "long", "--long-tasks", "multikey", "--context", "96"]) != 0
    assert "too short: these tasks need" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        evaluate.main([*command, "--long-tasks", "needles"])
    assert "unknown ['needles']: choose from needle" in capsys.readouterr().err
