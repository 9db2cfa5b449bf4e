"""Generation of text with the sparse cache: `Generator`, which `python -m nsa_jax.generate` runs."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nsa_jax.data import Tokenizer
from nsa_jax.data.tokenizers import ByteTokenizer
from nsa_jax.hub.generation import end_ids
from nsa_jax.nn import Transformer
from nsa_jax.nn.cache import Cache, memory_report
from nsa_jax.nn.decoder import Decoder
from nsa_jax.sampling import Sampling, sample


class PromptError(ValueError):
    """A prompt cannot be used; the message says why and what to do."""


@dataclasses.dataclass
class Completion:
    """What was generated for one row.

    Attributes:
      text: without the prompt; it ends before the stop string if one was generated.
      tokens: every generated token, including the end-of-document token and those of the stop string.
      finish: "stop" (a stop string), "end" (end of document), "length" (max_tokens) or "context" (the context is full).
      block_indices: the block lists that each token but the last read, those of the prompt first: int32
        [NSA layers, prompt + tokens - 1, K, n], padded with -1. None unless asked for.
    """

    text: str = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    finish: str = ""
    block_indices: np.ndarray | None = None


@dataclasses.dataclass
class Stats:
    """Counts and times of one call.

    Attributes:
      prompt_tokens: of all prompts, however many samples each has.
      new_tokens: of all rows.
      first_token_s: from the call to the first token, compilation of new shapes included.
      tokens_per_s: of all rows together, after the first dispatch, which compiles; 0 where that was the only one.
      cache: `memory_report` of the cache used.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    first_token_s: float = 0.0
    tokens_per_s: float = 0.0
    cache: dict[str, float] = dataclasses.field(default_factory=dict)


_BEFORE = 8  # tokens of a prompt after which its continuation is decoded


class _TextStream:
    """Turns the tokens of one row into text as they arrive.

    Text is passed on when no later token can change it. It is held back while a character's bytes are incomplete, and
    while it could be the beginning of a stop string.

    Args:
      tokenizer: of the model.
      stop: strings before which the text ends.
      emit: called with text as it becomes final.
      before: the last tokens of what the text continues: some decoders leave out a space at the beginning of a text.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str], emit: Callable[[str], None], before: Sequence[int] = ()
    ):
        self._tokenizer, self._stop, self._emit = tokenizer, [s for s in stop if s], emit
        tails = [[int(i) for i in before[at:]] for at in range(len(before))]
        # Neither begins nor ends within a character; if the whole ends so, the rest of it is part of the text.
        self._ids: list[int] = next((tail for tail in tails if not tokenizer.decode(tail).endswith("\ufffd")), [])
        # Decoding restarts at `_prefix`. The text up to `_read` has already been passed on.
        self._prefix, self._read = 0, len(self._ids)
        self._held = ""
        self.text = ""
        self.stopped = False

    def _give(self, text: str) -> None:
        self.text += text
        if text:
            self._emit(text)

    def _take(self, final: bool) -> str:
        before = self._tokenizer.decode(self._ids[self._prefix : self._read])
        now = self._tokenizer.decode(self._ids[self._prefix :])
        if now.endswith("\ufffd") and not final:
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return now[len(before) :]

    def add(self, token: int) -> None:
        """Takes the next token; sets `stopped` when a stop string is complete."""
        self._ids.append(token)
        self._push(self._take(final=False))

    def _push(self, new: str) -> None:
        self._held += new
        found = [at for at in (self._held.find(s) for s in self._stop) if at >= 0]
        if found:
            self.stopped = True
            self._give(self._held[: min(found)])
            self._held = ""
            return
        keep = max(
            (n for s in self._stop for n in range(1, len(s)) if self._held.endswith(s[:n])),
            default=0,
        )
        cut = len(self._held) - keep
        self._give(self._held[:cut])
        self._held = self._held[cut:]

    def finish(self) -> None:
        """Passes on the text that was held back."""
        if not self.stopped:
            self._push(self._take(final=True))
            if not self.stopped:
                self._give(self._held)
        self._held = ""


def encode_prompt(tokenizer: Tokenizer, prompt: str | bytes) -> tuple[np.ndarray, str | None]:
    """Token ids of a prompt.

    The byte tokenizer keeps bytes that are not UTF-8. For other tokenizers they become U+FFFD.

    Returns:
      int32 ids, and a note if the prompt was not taken literally.
    """
    # Odd bytes of a program's arguments are surrogates here. Text is UTF-8 whatever the locale, unlike os.fsencode's.
    raw = prompt.encode("utf-8", "surrogateescape") if isinstance(prompt, str) else prompt
    try:
        return tokenizer.encode(raw.decode("utf-8")), None
    except UnicodeDecodeError as error:
        where = f"the prompt is not UTF-8 (byte 0x{raw[error.start]:02x} at offset {error.start})"
    if isinstance(tokenizer, ByteTokenizer):
        return np.frombuffer(raw, np.uint8).astype(np.int32), f"{where}: its bytes are used as they are"
    return tokenizer.encode(raw.decode("utf-8", "replace")), f"{where}: such bytes became U+FFFD"


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{name}={value!r:.80}: must be a whole number of at least 1")


class Generator:
    """Generates with one model; programs are compiled once per batch size and capacity bucket.

    A prompt is one document: an end-of-document token in it, such as that between the turns of a chat, hides nothing.

    Args:
      model: the Transformer.
      tokenizer: its tokenizer. Text ends at its end-of-document token, and at those that an imported checkpoint names.
      context: the largest number of tokens of a row, including the prompt; None: no limit. Quality is not guaranteed
        beyond the training length (config.data.seq_len).
      chunk: tokens of a prompt processed at once.
      tokens_per_dispatch: tokens of a row that the device draws in a loop between two looks at them. Text arrives in
        pieces of so many tokens, and after the end of all rows up to twice as many are computed in vain.
      bos: a prompt of text follows the tokens that the tokenizer puts before a text in transformers. Training here puts
        none there.

    Raises:
      ValueError: a number is not a whole one in its range, or the tokenizer has ids that the model has not.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        *,
        context: int | None = None,
        chunk: int = 2048,
        tokens_per_dispatch: int = 8,
        bos: bool = False,
    ):
        for name, value in (("context", context), ("chunk", chunk), ("tokens_per_dispatch", tokens_per_dispatch)):
            if value is not None or name != "context":
                _check_count(name, value)
        tokenizer.check_fits(model.config.vocab_size)
        self._prefix = tokenizer.prefix_ids if bos else ()
        self._ends = frozenset(end_ids(tokenizer))
        self.tokenizer, self.context, self.tokens_per_dispatch = tokenizer, context, tokens_per_dispatch
        self.decoder = Decoder(model, chunk=chunk)
        self.stats = Stats()
        self._advance = jax.jit(self._advance_steps, donate_argnums=1)
        self._first = jax.jit(self._draw)

    def _draw(self, logits, seen, key, rows, position, settings):
        keys = jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(key, row), position))(rows)
        token = sample(logits, seen, keys, settings, self.tokenizer.vocab_size)
        return token, seen.at[jnp.arange(token.shape[0]), token].set(True)

    def _advance_steps(self, params, state, key, rows, position, settings):
        """The state after the next tokens, the first of them at `position` behind the prompts, and these tokens."""

        def draw(index, logits, seen):
            return self._draw(logits, seen, key, rows, position + index, settings)

        cache, token, seen = state
        cache, drawn, seen = self.decoder.steps(params, cache, token, draw, seen, self.tokens_per_dispatch)
        return (cache, drawn[-1], seen), drawn

    def prompt_ids(self, prompt: str | bytes | Sequence[int]) -> np.ndarray:
        """Token ids of a prompt, as at the beginning of a document in training.

        Training never predicts a document's first token, so an empty prompt becomes a line break, unless `bos` puts
        tokens there. A sequence of ids is used as it is.
        """
        if isinstance(prompt, (str, bytes)):
            try:
                ids, note = encode_prompt(self.tokenizer, prompt)
            except UnicodeEncodeError as error:
                raise PromptError(f"the prompt {prompt!r:.80} is no text: {error.reason}") from error
            if note:
                logging.getLogger("nsa_jax").warning("%s", note)
            if self._prefix:
                return np.asarray([*self._prefix, *ids], np.int32)
            if not len(ids):
                ids = self.tokenizer.encode("\n")
            return np.asarray(ids if len(ids) else [self.tokenizer.eos_id], np.int32)
        wrong = f"a prompt of token ids must be a list of whole numbers, not {prompt!r:.80}"
        vocab = self.decoder.config.vocab_size
        try:
            ids = np.asarray(prompt)
        except ValueError as error:  # lists of different lengths
            raise PromptError(wrong) from error
        if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
            raise PromptError(wrong)
        if ids.size and not (0 <= ids.min() and ids.max() < vocab):
            outside = ids[(ids < 0) | (ids >= vocab)][0]
            raise PromptError(f"token id {outside} of a prompt: must be in [0, {vocab})")
        return ids.astype(np.int32)

    def check(self, prompts: Sequence[Sequence[int] | np.ndarray]) -> None:
        """Raises PromptError if the ids of a prompt are none, or do not fit the context."""
        for index, prompt in enumerate(prompts):
            if not len(prompt):
                raise PromptError(f"prompt {index} has no tokens; give text, or at least one id")
            if self.context is not None and len(prompt) >= self.context:
                raise PromptError(
                    f"the prompt has {len(prompt):,} tokens and the context holds {self.context:,}, what follows "
                    "included: shorten the prompt, or raise --context (beyond the training length, quality may suffer)"
                )

    def __call__(
        self,
        prompts: Sequence[str | bytes | Sequence[int]],
        *,
        max_tokens: int = 128,
        sampling: Sampling | None = None,
        stop: str | Sequence[str] = (),
        num_samples: int = 1,
        on_text: Callable[[int, str], None] | None = None,
        return_block_indices: bool = False,
    ) -> list[Completion]:
        """Continues every prompt `num_samples` times, all in one batch.

        Args:
          prompts: texts, bytes, or token ids; their lengths may differ.
          max_tokens: new tokens per row at most.
          sampling: how tokens are drawn; default `Sampling()`.
          stop: a row ends before the first of these strings (or this one) that it produces.
          num_samples: rows per prompt.
          on_text: called with (row, text) as text becomes final.
          return_block_indices: also record which blocks were read, so that training can read the same ones
            (`block_indices` of `nsa_jax.nn.Transformer`).

        Returns:
          Completions, with all samples of the first prompt first. `stats` holds counts and times.

        Raises:
          PromptError: a prompt is empty, no prompt or does not fit the context.
          FloatingPointError: a row's logits are NaN, so that no token is the most likely one.
          ValueError: `max_tokens` or `num_samples` is no whole number of at least 1, `sampling` or `stop` is something
            else, or the model has no block lists to return.
        """
        begin = time.perf_counter()
        settings = Sampling() if sampling is None else sampling
        if not isinstance(settings, Sampling):
            raise ValueError(f"sampling={sampling!r:.80}: must be a Sampling, such as Sampling(temperature=0.8)")
        stops = [stop] if isinstance(stop, str) else list(stop) if isinstance(stop, Iterable) else [stop]
        if not all(isinstance(text, str) for text in stops):
            raise ValueError(f"stop={stop!r:.80}: must be strings")
        _check_count("max_tokens", max_tokens)
        _check_count("num_samples", num_samples)
        if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Iterable):
            raise PromptError(f"prompts={prompts!r:.80}: must be a list of prompts; for one, put it into a list")
        prompts = list(prompts)
        if not prompts:
            self.stats = Stats()
            return []
        ids = [self.prompt_ids(prompt) for prompt in prompts]
        self.check(ids)
        prompt_tokens = sum(map(len, ids))
        ids = [row for row in ids for _ in range(num_samples)]
        lengths = np.asarray([len(row) for row in ids], np.int32)
        batch, longest = len(ids), int(np.max(lengths))
        vocab = self.decoder.config.vocab_size
        tokens, seen = np.zeros((batch, longest), np.int32), np.zeros((batch, vocab), bool)
        for row, given in enumerate(ids):
            tokens[row, : len(given)] = given
            seen[row, given] = True
        room = max_tokens if self.context is None else min(max_tokens, self.context - int(np.min(lengths)))
        most = longest + room if self.context is None else min(longest + room, self.context)
        cache = self.decoder.init_cache(batch, most, record_block_indices=return_block_indices)
        sizes = self.decoder.config, batch, cache.capacity
        report = memory_report(*sizes, record_block_indices=return_block_indices)

        completions = [Completion() for _ in ids]

        def emitter(row):
            return (lambda text: on_text(row, text)) if on_text else (lambda text: None)

        streams = [
            _TextStream(self.tokenizer, stops, emitter(row), given[-_BEFORE:].tolist()) for row, given in enumerate(ids)
        ]
        key, rows, scalars = settings.key(), jnp.arange(batch, dtype=jnp.uint32), settings.arrays()
        logits, cache = self.decoder.prefill(cache, tokens, lengths)
        token, seen = self._first(logits, jnp.asarray(seen), key, rows, jnp.int32(0), scalars)
        state, arriving, drawn, arrivals = (cache, token, seen), jnp.copy(token)[None], 1, []
        while not all(completion.finish for completion in completions):
            shown = arriving
            if drawn < room:  # the device computes the next tokens while these are decoded
                state, arriving = self._advance(self.decoder.params, state, key, rows, jnp.int32(drawn), scalars)
                drawn += self.tokens_per_dispatch
            fetched = np.asarray(shown)
            arrivals.append(time.perf_counter())
            for by_row in fetched:
                for row, completion in enumerate(completions):
                    if not completion.finish:
                        if by_row[row] < 0:
                            raise FloatingPointError(f"the model's logits of row {row} are NaN: check its weights")
                        self._take(completion, streams[row], int(by_row[row]), int(lengths[row]), max_tokens)
        if return_block_indices:
            self._add_lists(completions, state[0], lengths)
        total = sum(len(c.tokens) for c in completions)
        rest = sum(max(len(c.tokens) - 1 - self.tokens_per_dispatch, 0) for c in completions)
        rate = rest / (arrivals[-1] - arrivals[1]) if rest else 0.0
        self.stats = Stats(prompt_tokens, total, arrivals[0] - begin, rate, report)
        return completions

    def _add_lists(self, completions: list[Completion], cache: Cache, prompts: np.ndarray) -> None:
        """Gives every completion its part of the lists in the cache."""
        lists = np.asarray(cache.block_indices())  # [NSA layers, B, S, K, n]
        lists = np.where(lists < cache.capacity // self.decoder.config.nsa.select_block, lists, -1)
        for row, completion in enumerate(completions):
            completion.block_indices = lists[:, row, : int(prompts[row]) + len(completion.tokens) - 1]

    def _take(self, completion: Completion, stream: _TextStream, token: int, prompt: int, max_tokens: int) -> None:
        completion.tokens.append(token)
        if token in self._ends:
            completion.finish = "end"
        else:
            stream.add(token)
            if stream.stopped:
                completion.finish = "stop"
            elif len(completion.tokens) >= max_tokens:
                completion.finish = "length"
            elif self.context is not None and prompt + len(completion.tokens) >= self.context:
                completion.finish = "context"
        if completion.finish:
            stream.finish()
            if stream.stopped:
                completion.finish = "stop"
        completion.text = stream.text
