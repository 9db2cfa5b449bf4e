"""Long-context tasks as text: needles, chains of variables, recall at a distance, copying, counting and a keypad.

A row is filler with statements in it and, at its end, questions with their answers. All of it is text in the vocabulary
of the run's tokenizer, so rows can be mixed with rows of text. The tasks follow RULER (arXiv 2404.06654), section 3.
Keys have five letters, which no word of the filler has, so a statement is never made by chance.

    row = TASKS["variables2"].row(np.random.default_rng(0), 4096, tokenizer)
    row.tokens[row.mask]  # the answers' tokens
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from nsa_jax.data.errors import DataError
from nsa_jax.data.packing import Batch, pack_rows
from nsa_jax.data.synthetic import row_generator
from nsa_jax.data.tokenizers import Tokenizer

NEEDLE = ("\n{key} = {value}\n", "\n{key} =", " {value}")  # fact, question, answer
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_LEXICON = 512
_MOST = 9  # the task count: the highest number
_KEYPAD_LEAST = 64  # tokens of its shortest row


@dataclasses.dataclass(frozen=True)
class Question:
    """What is asked at the end of a row.

    Attributes:
      text: before the answer.
      answer: the text that is right.
      statement: index of the statement that holds the answer's beginning, or the key's last mention in counting.
      chance: probability of being right for who chooses among the row's candidates without reading the question.
    """

    text: str
    answer: str
    statement: int
    chance: float


@dataclasses.dataclass(frozen=True)
class Answer:
    """Where an answer lies in a row.

    Attributes:
      first: position of its first token.
      end: position after its last token.
      source: position of the token that its first token repeats; in counting, that of the last mention.
      chance: see `Question`.
    """

    first: int
    end: int
    source: int
    chance: float

    @property
    def distance(self) -> int:
        """Tokens from the source to the answer."""
        return self.first - self.source


@dataclasses.dataclass(frozen=True)
class Row:
    """Tokens of one document, int32 [length], without the end-of-document token, and its answers in order."""

    tokens: np.ndarray
    answers: tuple[Answer, ...]

    @property
    def asked_first(self) -> list[bool]:
        """For each answer, whether a statement is its source. False: the same question was answered before."""
        return [answer.source < self.answers[0].first for answer in self.answers]

    @property
    def mask(self) -> np.ndarray:
        """True where a token belongs to an answer: bool [length]."""
        found = np.zeros(len(self.tokens), bool)
        for answer in self.answers:
            found[answer.first : answer.end] = True
        return found


def random_words(rng: np.random.Generator, count: int, length: int = 5) -> list[str]:
    """Distinct words of random letters."""
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(_LETTERS[i] for i in rng.integers(0, 26, length))] = None
    return list(found)


def _values(rng: np.random.Generator, count: int) -> list[str]:
    """Distinct numbers of five digits."""
    return [str(10_000 + int(i)) for i in rng.choice(90_000, count, replace=False)]


@functools.lru_cache(maxsize=4)
def _lexicon(tokenizer: Tokenizer) -> list[np.ndarray]:
    """Tokens of the filler's words; every eighth ends a sentence."""
    return [np.asarray(tokenizer.encode_within(word), np.int32) for word in _lexicon_words()]


def _lexicon_words() -> list[str]:
    rng = np.random.default_rng(0)
    lengths = rng.choice([2, 3, 4, 6, 7, 8], _LEXICON)
    return [random_words(rng, 1, int(length))[0] + (".\n" if i % 8 == 0 else " ") for i, length in enumerate(lengths)]


def rows_kind(tokenizer: Tokenizer) -> str:
    """Names how rows are made of text: those of "tasks-1" began each statement as the tokenizer begins a text."""
    pieces = [*_lexicon_words(), *(part.format(key="abcde", value="12345") for part in NEEDLE)]
    same = all(np.array_equal(tokenizer.encode(piece), tokenizer.encode_within(piece)) for piece in pieces)
    return "tasks-1" if same else "tasks-2"


def filler(rng: np.random.Generator, length: int, tokenizer: Tokenizer) -> np.ndarray:
    """Sentences of a fixed lexicon of made-up words in random order: int32 [length]."""
    words = _lexicon(tokenizer)
    mean = sum(map(len, words)) / len(words)
    parts: list[np.ndarray] = []
    missing = length
    while missing > 0:
        chosen = [words[i] for i in rng.integers(0, len(words), int(missing / mean) + 8)]
        parts += chosen
        missing -= sum(map(len, chosen))
    return np.concatenate(parts)[:length] if parts else np.zeros(0, np.int32)


def assemble(
    haystack: np.ndarray, statements: Sequence[np.ndarray], places: Sequence[int]
) -> tuple[np.ndarray, list[int]]:
    """Puts statements into a haystack.

    Args:
      haystack: int [room].
      statements: tokens of each.
      places: before which position of the haystack each comes; those at one place keep their order.

    Returns:
      int32 [room + tokens of the statements], and the position of each statement's first token.
    """
    pieces: list[np.ndarray] = []
    starts, done, size = [0] * len(statements), 0, 0
    for index in sorted(range(len(statements)), key=lambda i: places[i]):
        pieces += [haystack[done : places[index]], statements[index]]
        size += places[index] - done
        done, starts[index] = places[index], size
        size += len(statements[index])
    return np.concatenate([*pieces, haystack[done:]]).astype(np.int32), starts


def _source(tokenizer: Tokenizer, statement: str, answer: str, num_tokens: int) -> int:
    """The place in a statement of the token with which the answer begins; the last if the statement lacks it."""
    at = statement.find(" " + answer.split()[0])
    # A tokenizer may cut statement and answer differently.
    return min(len(tokenizer.encode_within(statement[:at])) if at >= 0 else num_tokens, num_tokens - 1)


@dataclasses.dataclass(frozen=True)
class Task:
    """A kind of rows.

    Attributes:
      name: as `config.data.tasks` and `evaluate` call it.
      make: draws statements in groups, whose order is kept, and questions about them.
      together: statements stand side by side at one distance from the questions, instead of spread over the row.
    """

    name: str
    make: Callable[[np.random.Generator], tuple[list[list[str]], list[Question]]]
    together: bool = False

    def least(self, tokenizer: Tokenizer) -> int:
        """Tokens that hold the statements and questions of any draw: twice what those of one draw take."""
        groups, questions = self.make(np.random.default_rng(0))
        texts = [*(text for group in groups for text in group), *(q.text + q.answer for q in questions)]
        return 2 * sum(len(tokenizer.encode_within(text)) + 2 for text in texts)

    def row(self, rng: np.random.Generator, length: int, tokenizer: Tokenizer, *, distance: int | None = None) -> Row:
        """One row.

        Args:
          rng: draws keys, values, filler and places.
          length: tokens.
          tokenizer: of the model.
          distance: tokens of filler between the last statement and the questions; the statements stand side by side
            then. None: drawn log-uniformly where the task has them side by side, else they are spread over the row.

        Raises:
          ValueError: statements, questions and distance do not fit into `length`.
        """
        groups, questions = self.make(rng)
        texts = [text for group in groups for text in group]
        statements = [np.asarray(tokenizer.encode_within(text), np.int32) for text in texts]
        asked = [[np.asarray(tokenizer.encode_within(t), np.int32) for t in (q.text, q.answer)] for q in questions]
        needed = sum(map(len, statements)) + sum(len(part) for pair in asked for part in pair)
        room = length - needed
        if room < (distance or 0):
            more = f" and {distance} of distance" if distance else ""
            raise ValueError(f"length={length}: a row of the task {self.name} needs {needed} tokens{more}")
        if distance is None and self.together:
            distance = int(math.exp(rng.uniform(0, math.log(room + 1)))) if room else 0
        if distance is None:
            places: list[int] = []
            for group in groups:
                places += sorted(rng.integers(0, room + 1, len(group)).tolist())
        else:
            places = [room - distance] * len(texts)
        head, starts = assemble(filler(rng, room, tokenizer), statements, places)
        pieces, answers, at = [head], [], len(head)
        for question, (text, answer) in zip(questions, asked, strict=True):
            first, told = at + len(text), question.statement
            within = _source(tokenizer, texts[told], question.answer, len(statements[told]))
            answers.append(Answer(first, first + len(answer), starts[told] + within, question.chance))
            pieces += [text, answer]
            at = first + len(answer)
        return Row(np.concatenate(pieces).astype(np.int32), tuple(answers))


def _facts(rng: np.random.Generator, keys: int) -> tuple[list[list[str]], list[Question]]:
    """Keys with a value each; every key is asked, in another order."""
    names, values = random_words(rng, keys), _values(rng, keys)
    fact, question, answer = NEEDLE
    groups = [[fact.format(key=k, value=v)] for k, v in zip(names, values, strict=True)]
    chance = 1 / keys if keys > 1 else 1 / 90_000
    asked = [
        Question(question.format(key=names[i]), answer.format(value=values[i]), int(i), chance)
        for i in rng.permutation(keys)
    ]
    return groups, asked


def _multivalue(rng: np.random.Generator, keys: int, each: int) -> tuple[list[list[str]], list[Question]]:
    """Keys with several values each, which are asked in the order in which they were stated."""
    names, values = random_words(rng, keys), _values(rng, keys * each)
    fact, question, _ = NEEDLE
    of_key = [values[i * each : (i + 1) * each] for i in range(keys)]
    groups = [[fact.format(key=k, value=v) for v in vs] for k, vs in zip(names, of_key, strict=True)]
    chance = 1 / math.perm(keys * each, each)
    asked = [
        Question(question.format(key=names[i]), "".join(f" {v}" for v in of_key[i]), int(i) * each, chance)
        for i in rng.permutation(keys)
    ]
    return groups, asked


def _variables(rng: np.random.Generator, chains: int, hops: int) -> tuple[list[list[str]], list[Question]]:
    """Chains of variables: the first has a value, each later one that of the one before; the last is asked for its."""
    names, values = random_words(rng, chains * (hops + 1)), _values(rng, chains)
    groups, asked = [], []
    for i in range(chains):
        chain = names[i * (hops + 1) : (i + 1) * (hops + 1)]
        stated = [values[i], *chain]
        groups.append([f"\n{new} = {old}\n" for new, old in zip(chain, stated, strict=False)])
        asked.append(Question(f"\nvalue {chain[-1]} =", f" {values[i]}", i * (hops + 1), 1 / chains))
    return groups, [asked[i] for i in rng.permutation(chains)]


def _copy(rng: np.random.Generator, strings: int, letters: int) -> tuple[list[list[str]], list[Question]]:
    """Strings of random letters, each to be repeated."""
    names, texts = random_words(rng, strings), random_words(rng, strings, letters)
    groups = [[f"\ncopy {k}: {text}\n"] for k, text in zip(names, texts, strict=True)]
    asked = [Question(f"\ncopy {names[i]}:", f" {texts[i]}", int(i), 1 / strings) for i in rng.permutation(strings)]
    return groups, asked


def _count(rng: np.random.Generator, keys: int) -> tuple[list[list[str]], list[Question]]:
    """Keys that are mentioned one to nine times each; it is asked how often."""
    names, counts = random_words(rng, keys), rng.integers(1, _MOST + 1, keys)
    groups = [[f"\n{name}!\n"] * int(count) for name, count in zip(names, counts, strict=True)]
    last = np.cumsum(counts) - 1
    asked = [Question(f"\ncount {names[i]} =", f" {counts[i]}", int(last[i]), 1 / _MOST) for i in rng.permutation(keys)]
    return groups, asked


def _character_tokens(tokenizer: Tokenizer, characters: str) -> np.ndarray:
    """A token for each character: int32 [len(characters)]. What a tokenizer puts before a word is left out."""
    found = [int(i) for character in characters for i in tokenizer.encode_within(character)[-1:]]
    if len(set(found)) < len(characters):
        what = "the task keypad needs a token of its own for each letter, digit and mark"
        raise DataError(f"tokenizer {tokenizer.name}", what, "use the tokenizer 'byte', or leave the task out")
    return np.array(found, np.int32)


@dataclasses.dataclass(frozen=True)
class Keypad:
    """Rows in which each digit stands for one of its five letters, as stated once, far before the questions.

    The keypad is the same in all rows: 0 has the letters ABCDE, 1 has FGHIJ, and so on. Somewhere in its first half a
    row states one letter of each digit, all ten in any order, such as `B.u-K P,q-d,X m.G`. The last quarter asks: a
    digit, and after it its letter is to be predicted, as in `7m2K7m0B`. All else is blanks and punctuation. One
    attention over far tokens finds the answer, so that a small model learns the task in minutes.

    It has the interface of `Task`. The source of an answer is where its letter stands last: a statement, or the answer
    to the same question shortly before.
    """

    name: str = "keypad"
    together: bool = False
    digits: str = "0123456789"
    letters: str = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwx"
    blanks: str = " .,-"

    def least(self, tokenizer: Tokenizer) -> int:
        """Tokens of the shortest row.

        Raises:
          DataError: the tokenizer does not have a token for each character.
        """
        self._ids(tokenizer)
        return _KEYPAD_LEAST

    def _ids(self, tokenizer: Tokenizer) -> np.ndarray:
        return _character_tokens(tokenizer, self.digits + self.letters + self.blanks)

    def row(self, rng: np.random.Generator, length: int, tokenizer: Tokenizer, *, distance: int | None = None) -> Row:
        """One row; see `Task.row`.

        Raises:
          ValueError: `length` is less than `least`, or `distance` is given.
          DataError: the tokenizer does not have a token for each character.
        """
        if length < _KEYPAD_LEAST or distance is not None:
            raise ValueError(f"length={length}, distance={distance}: keypad needs 64 tokens and takes no distance")
        ids = self._ids(tokenizer)
        count, each = len(self.digits), len(self.letters) // len(self.digits)
        digits, letters, blanks = np.split(ids, [count, count * (each + 1)])
        asked = max(length // 8, count)
        first = length - 2 * asked  # of the questions, which the row ends with
        tokens = rng.choice(blanks, length)
        stated = letters.reshape(count, each)[np.arange(count), rng.integers(0, each, count)]
        last = rng.integers(0, first - length // 4 - 2 * count + 1) + 2 * rng.permutation(count)  # mention of each
        tokens[last] = stated
        questions = rng.integers(0, count, asked)
        questions[rng.permutation(asked)[:count]] = np.arange(count)  # each digit at least once
        tokens[first::2], tokens[first + 1 :: 2] = digits[questions], stated[questions]
        answers = []
        for at, digit in zip(range(first + 1, length, 2), questions, strict=True):
            answers.append(Answer(at, at + 1, int(last[digit]), 1 / each))
            last[digit] = at
        return Row(tokens.astype(np.int32), tuple(answers))


_TASKS: tuple[Task | Keypad, ...] = (
    Task("needle", functools.partial(_facts, keys=1)),
    Task("multikey", functools.partial(_facts, keys=8)),
    Task("multivalue", functools.partial(_multivalue, keys=2, each=4)),
    *(Task(f"variables{hops}", functools.partial(_variables, chains=4, hops=hops)) for hops in (1, 2, 3, 4)),
    Task("recall", functools.partial(_facts, keys=8), together=True),
    Task("copy", functools.partial(_copy, strings=2, letters=32)),
    Task("count", functools.partial(_count, keys=4)),
    Keypad(),
)
TASKS = {task.name: task for task in _TASKS}


def parse_tasks(entries: Sequence[str]) -> dict[str, float]:
    """Weights by name of entries such as "needle" or "variables2:0.5"; of all tasks equally if there are none.

    Raises:
      DataError: an entry names no task, or one that another entry names, or has no positive weight.
    """
    found = {}
    for entry in entries or TASKS:
        name, _, weight = entry.partition(":")
        if name in found:
            raise DataError(f"config.data.tasks: {entry!r}", f"{name} is named twice", "name it once, with one weight")
        try:
            found[name] = float(weight or 1)
        except ValueError:
            found[name] = math.nan
        if name not in TASKS or not 0 < found[name] < math.inf:
            raise DataError(
                f"config.data.tasks: {entry!r}",
                "no such task or weight",
                f"use NAME or NAME:WEIGHT of {', '.join(TASKS)}",
            )
    return found


@dataclasses.dataclass(frozen=True)
class TaskRows:
    """Rows of tasks for training, a function of (seed, split, row number).

    A row is one document of `seq_len` + 1 tokens, or several of at least `least` tokens whose lengths are drawn
    log-uniformly, each with its end-of-document token.

    Attributes:
      tokenizer: of the run.
      weights: of the tasks; a document's task is drawn by them.
      seq_len: T.
      seed: of the run.
      split: train or validation.
      least: tokens of the shortest document; 0 means that a document fills the row.
      answers_only: the loss counts the tokens of answers alone, instead of all.
      answer_weight: with which training counts them.
      packing: attention does not cross documents.

    Raises:
      DataError: a task does not fit into a document, or the weight is not positive.
    """

    tokenizer: Tokenizer
    weights: dict[str, float]
    seq_len: int
    seed: int
    split: str
    least: int = 0
    answers_only: bool = True
    answer_weight: float = 1.0
    packing: bool = True

    def __post_init__(self):
        shortest = self.least - 1 if self.least else self.seq_len  # its end is one of a document's tokens
        for name in self.weights:
            if (needed := TASKS[name].least(self.tokenizer)) > shortest:
                field = f"config.data.task_length={self.least}" if self.least else f"config.data.seq_len={self.seq_len}"
                end = " and its end" if self.least else ""
                raise DataError(
                    field, f"a document of the task {name} needs {needed} tokens{end}", "raise it or leave it out"
                )
        if not 0 < self.answer_weight < math.inf:
            raise DataError(f"config.data.task_answer_weight={self.answer_weight}", "not positive", "use 1.0 or more")
        if self.least > self.seq_len:
            raise DataError(f"config.data.task_length={self.least}", "longer than a row", f"use {self.seq_len} or less")

    def __call__(self, rows: np.ndarray) -> Batch:
        tokens = np.empty((len(rows), self.seq_len + 1), np.int32)
        answers = np.zeros((len(rows), self.seq_len + 1), bool)
        for i, row in enumerate(rows):
            self._fill(int(row), tokens[i], answers[i])
        batch = pack_rows(tokens, self.tokenizer.eos_id, packing=self.packing)
        others = 0.0 if self.answers_only else 1.0
        batch["loss_mask"] *= np.where(answers[:, 1:], np.float32(self.answer_weight), np.float32(others))
        return batch

    def _fill(self, row: int, tokens: np.ndarray, answers: np.ndarray) -> None:
        rng = row_generator(self.seed, self.split, row)
        names, shares = list(self.weights), np.array(list(self.weights.values()))
        at = 0
        while (left := len(tokens) - at) > 0:
            length = left
            if self.least and left > 2 * self.least:
                length = int(math.exp(rng.uniform(math.log(self.least), math.log(left - self.least)))) + 1
            made = TASKS[names[rng.choice(len(names), p=shares / shares.sum())]].row(rng, length - 1, self.tokenizer)
            tokens[at : at + length - 1], tokens[at + length - 1] = made.tokens, self.tokenizer.eos_id
            answers[at : at + length - 1] = made.mask
            at += length
