"""Long tasks: answers follow from the row's own statements, rows are seeded, and training can mix them with text."""

import pickle
import re

import numpy as np
import pytest

from nsa_jax.config import default_config, validate
from nsa_jax.data import DataError, load_tokenizer, make_pipeline
from nsa_jax.data.long_tasks import TASKS, TaskRows, parse_tasks
from nsa_jax.data.tokenizers import ByteTokenizer

BYTES = ByteTokenizer()
STATED = [name for name in TASKS if name != "keypad"]  # with statements in words


def solve(text: str, question: str) -> str:
    """The answer to a question by reading the row's text."""
    kind, _, key = question.strip(" =:\n").rpartition(" ")
    facts = re.findall(r"\n(\w+) = (\w+)(?=\n)", text)
    if kind == "count":
        return f" {text.count(f'{chr(10)}{key}!{chr(10)}')}"
    if kind == "copy":
        return " " + re.search(rf"\ncopy {key}: (\w+)\n", text)[1]
    if kind == "value":
        while key.isalpha():
            key = dict(facts)[key]
        return f" {key}"
    return "".join(f" {value}" for name, value in facts if name == key)


@pytest.mark.parametrize("name", STATED)
@pytest.mark.parametrize("distance", [None, 100])
def test_answers_follow_from_the_statements(name, distance):
    row = TASKS[name].row(np.random.default_rng(3), 2048, BYTES, distance=distance)
    assert row.tokens.shape == (2048,) and row.mask.sum() == sum(a.end - a.first for a in row.answers)
    text = BYTES.decode(row.tokens)
    statements_end = 0
    for i, answer in enumerate(row.answers):
        before = row.answers[i - 1].end if i else text.rindex("\n", 0, answer.first)
        right = text[answer.first : answer.end]
        assert right == solve(text[: row.answers[0].first], text[before : answer.first])
        assert 0 < answer.distance and 0 < answer.chance < 1
        if name != "count":
            assert text[answer.source :].startswith(" " + right.split()[0])
        statements_end = max(statements_end, answer.source + len(right.split()[0]) + 1)
    if distance is not None and name != "count":
        first_question = text.rindex("\n", 0, row.answers[0].first)
        if name == "needle":
            assert first_question - distance == statements_end + len("\n")
        # After the last value that is asked come at most the rest of its statement and of those behind it.
        assert distance < first_question - statements_end < distance + 250
        assert set(text[first_question - distance : first_question]) <= set("abcdefghijklmnopqrstuvwxyz .\n")


def test_tasks_are_text_in_any_vocabulary(documents):
    config = default_config()
    config.data.tokenizer, config.data.bpe_vocab_size = "bpe", 300
    bpe = load_tokenizer(config, iter(documents))
    for name in STATED:
        row = TASKS[name].row(np.random.default_rng(1), 2048, bpe)
        assert row.tokens.shape == (2048,)
        head = bpe.decode(row.tokens[: row.answers[0].first])
        question, right = head[head.rindex("\n") :], bpe.decode(row.tokens[row.answers[0].first : row.answers[0].end])
        assert right == solve(head, question)
        stated = bpe.decode(row.tokens[row.answers[0].source :][:40])
        assert name == "count" or stated.startswith(" " + right.split()[0])
    rows = TaskRows(bpe, {"copy": 1.0}, 1024, 0, "train")
    again = pickle.loads(pickle.dumps(rows))  # as workers get it
    np.testing.assert_array_equal(again(np.array([3]))["inputs"], rows(np.array([3]))["inputs"])


@pytest.mark.parametrize("length", [64, 65, 256, 1000])
def test_a_keypad_row_states_each_letter_once_before_it_asks(length):
    row = TASKS["keypad"].row(np.random.default_rng(length), length, BYTES)
    text, asked = BYTES.decode(row.tokens), max(length // 8, 10)
    head, tail = text[: length - 2 * asked], text[length - 2 * asked :]
    letters = [c for c in head if c.isalpha()]
    assert len(letters) == 10 and not re.search(r"\d", head) and len(row.tokens) == length
    stands_for = {str("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwx".index(c) // 5): c for c in letters}
    assert set(tail[::2]) == set(stands_for) == set("0123456789")
    assert all(stands_for[digit] == letter for digit, letter in zip(tail[::2], tail[1::2], strict=True))
    assert row.mask.tolist() == [False] * (length - 2 * asked) + [False, True] * asked
    first = [a for a in row.answers if a.source < len(head)]
    assert len(first) == 10 and min(a.distance for a in first) > length // 4
    for answer in row.answers:  # nowhere between the two does the letter stand
        assert text[answer.source] == text[answer.first] and answer.chance == 0.2
        assert text[answer.first] not in text[answer.source + 1 : answer.first]


def test_a_keypad_needs_a_token_for_each_character():
    class Halves(ByteTokenizer):
        def encode(self, text):
            return super().encode(text) // 2

    class Words(ByteTokenizer):  # no token stands for a space, as in WordPiece vocabularies
        def encode(self, text):
            return super().encode(text.strip())

    for tokenizer in (Halves(), Words()):
        with pytest.raises(DataError, match="keypad.*needs a token of its own"):
            TASKS["keypad"].row(np.random.default_rng(0), 256, tokenizer)
        with pytest.raises(DataError, match="keypad.*needs a token of its own"):  # before the first row
            TaskRows(tokenizer, {"keypad": 1.0}, 256, 0, "train")
    with pytest.raises(ValueError, match="length=63"):
        TASKS["keypad"].row(np.random.default_rng(0), 63, BYTES)


def test_hops_and_values_are_as_many_as_the_name_says():
    for hops in (1, 2, 3, 4):
        row = TASKS[f"variables{hops}"].row(np.random.default_rng(0), 2048, BYTES)
        text = BYTES.decode(row.tokens)
        key, followed = re.search(r"value (\w+) =", text)[1], -1
        facts = dict(re.findall(r"\n(\w+) = (\w+)(?=\n)", text))
        while key.isalpha():
            key, followed = facts[key], followed + 1
        assert followed == hops and row.answers[0].chance == 1 / 4
    values = TASKS["multivalue"].row(np.random.default_rng(0), 2048, BYTES).answers
    assert len(values) == 2 and values[0].end - values[0].first == 4 * 6
    assert values[0].chance == pytest.approx(1 / (8 * 7 * 6 * 5))


def test_recall_covers_distances_evenly_on_a_logarithmic_scale():
    rng = np.random.default_rng(0)
    distances = [TASKS["recall"].row(rng, 8192, BYTES).answers[0].distance for _ in range(60)]
    assert 10 < sum(d < 600 for d in distances) < 50 and max(distances) > 4000


def test_a_row_that_is_too_short_says_what_it_needs():
    with pytest.raises(ValueError, match=r"length=100: a row of the task multikey needs \d+ tokens"):
        TASKS["multikey"].row(np.random.default_rng(0), 100, BYTES)
    with pytest.raises(ValueError, match="and 500 of distance"):
        TASKS["needle"].row(np.random.default_rng(0), 200, BYTES, distance=500)


def test_rows_of_several_documents_count_answers_alone_and_depend_on_seed_and_number():
    rows = TaskRows(BYTES, parse_tasks(("needle", "copy:3")), 2048, seed=1, split="train", least=512)
    batch = rows(np.array([5, 6]))
    np.testing.assert_array_equal(rows(np.array([6]))["inputs"], batch["inputs"][1:])
    held_out = TaskRows(BYTES, {"needle": 1.0}, 2048, seed=1, split="validation")(np.array([5]))
    assert (held_out["inputs"] != batch["inputs"][:1]).mean() > 0.5
    assert len(np.unique(batch["segment_start"])) > 2
    for targets, mask, inputs in zip(batch["targets"], batch["loss_mask"], batch["inputs"], strict=True):
        counted = BYTES.decode(targets[mask > 0])
        assert re.fullmatch(r"( \d{5}| [a-z]{32})+", counted)
        assert (inputs[mask > 0] != 256).all()
    everything = TaskRows(BYTES, {"needle": 1.0}, 512, 1, "train", answers_only=False)(np.array([0]))
    assert everything["loss_mask"].sum() == 512
    heavy = TaskRows(BYTES, {"needle": 1.0}, 512, 1, "train", answers_only=False, answer_weight=16.0)(np.array([0]))
    assert heavy["loss_mask"].sum() == 512 + 15 * 6 and heavy["loss_mask"].dtype == np.float32
    weighted = TaskRows(BYTES, {"needle": 1.0, "copy": 3.0}, 1024, 1, "train")(np.arange(200))
    copies = sum("copy" in BYTES.decode(row) for row in weighted["inputs"])
    assert 120 < copies < 180


def task_config(**fields):
    config = default_config()
    config.data.source, config.data.seq_len, config.data.prefetch = "task", 512, 2
    config.data.tasks, config.allow_dense_regime = ("needle",), True
    config.data.update(fields)
    config.train.batch_size, config.train.eval_batches = 4, 1
    return config


def test_tasks_are_mixed_with_text_in_their_share(tmp_path):
    (tmp_path / "a.txt").write_text("# " * 4000)
    config = task_config(
        source="text", files=(str(tmp_path / "a.txt"),), val_fraction=0.0, cache_dir=str(tmp_path / "c")
    )
    config.data.sources = {"text": {"weight": 3.0}, "tasks": {"source": "task", "weight": 1.0}}
    config.train.eval_batches, config.train.eval_every = 0, 0
    assert validate(config) == []
    iterator = make_pipeline(config).train()
    batches = [next(iterator) for _ in range(3)]
    state = iterator.get_state()
    iterator.close()
    for batch in batches:
        assert [("=" in BYTES.decode(row)) for row in batch["inputs"]].count(True) == 1
    config.data.sources.tasks.tasks = ("copy",)
    with pytest.raises(DataError, match="belongs to other data"):
        make_pipeline(config).train().set_state(state)


def test_mistakes_are_named():
    assert validate(task_config()) == []
    pipeline = make_pipeline(task_config())
    (held_out,) = make_pipeline(task_config(task_answer_weight=4.0)).validation()
    (same,) = pipeline.validation()
    np.testing.assert_array_equal(held_out["loss_mask"], same["loss_mask"])
    for fields, message in (
        ({"tasks": ("needles",)}, "config.data.tasks: 'needles': no such task"),
        ({"tasks": ("copy:-1",)}, "'copy:-1'"),
        (
            {"tasks": ("variables4",), "seq_len": 256},
            "config.data.seq_len=256: a document of the task variables4 needs",
        ),
        ({"task_answer_weight": -1.0}, "config.data.task_answer_weight=-1.0: not positive"),
        ({"task_length": 600}, "config.data.task_length=600: longer than a row"),
        (
            {"task_length": 64, "tasks": ("keypad",)},
            "a document of the task keypad needs 64 tokens and its end",
        ),
    ):
        with pytest.raises(DataError, match=re.escape(message)):
            make_pipeline(task_config(**fields))
    (problem,) = validate(task_config(tokenizer="bpe"))
    assert "no text to train it on" in problem.message


@pytest.mark.parametrize("name", ["multikey", "recall", "copy"])
def test_chance_is_that_of_choosing_among_what_the_row_states(name):
    row = TASKS[name].row(np.random.default_rng(0), 2048, BYTES)
    text = BYTES.decode(row.tokens)
    answers = {text[answer.first : answer.end] for answer in row.answers}  # every statement is asked for once
    assert all(text[: row.answers[0].first].count(answer) == 1 for answer in answers)
    assert {answer.chance for answer in row.answers} == {1 / len(answers)}


def test_a_task_that_is_named_twice_is_refused():
    with pytest.raises(DataError, match="needle is named twice"):
        parse_tasks(("needle", "copy:2", "needle:0.25"))
