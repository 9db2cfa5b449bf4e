"""Tasks of EleutherAI's lm-evaluation-harness (`lm-eval`) on a model of nsa_jax; needs the `eval` extra.

Rules, which are those of the harness's own `hf` backend with `add_bos_token=False` and, for a tokenizer that has a
beginning-of-text token, `prefix_token_id` of the end-of-document token:

- Text is tokenized as in training: no beginning-of-text token is added.
- A continuation without a context, and the first token of a rolling log-likelihood, follow the end-of-document token.
- What does not fit --context loses tokens at its beginning. The prompt of a generation keeps room for all new tokens.
- A rolling log-likelihood counts every token once, in windows of --context tokens.
- A generation ends before the first stop string, at an end-of-document token, or after `max_gen_toks` tokens.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, handle_non_serializable, make_disjoint_window
from tqdm import tqdm

from nsa_jax.data import DataError, Tokenizer
from nsa_jax.evaluate.requests import DEFAULT_NEW_TOKENS, generation_settings, log_likelihoods
from nsa_jax.evaluate.scoring import Scorer
from nsa_jax.fields import nearest
from nsa_jax.generator import Generator
from nsa_jax.hub.generation import end_ids
from nsa_jax.nn import Transformer


class HarnessModel(TemplateLM):
    """A model as the harness asks for it.

    Args:
      model: the Transformer.
      tokenizer: its tokenizer.
      context: tokens of a row at most, new ones included.
      batch_size: requests at once; those of log-likelihoods are spread over the devices of this process.
      seed: of drawing, where a task draws.
    """

    def __init__(self, model: Transformer, tokenizer: Tokenizer, *, context: int, batch_size: int, seed: int = 0):
        super().__init__()
        self._model, self._text, self._seed = model, tokenizer, seed
        self.max_length, self.batch_size, self.max_gen_toks = context, batch_size, DEFAULT_NEW_TOKENS
        self._scorer: Scorer | None = None
        self._generator: Generator | None = None

    @property
    def eot_token_id(self) -> int:
        return int(self._text.eos_id)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
        """Token ids of a text, without special tokens whatever is asked for."""
        return self._text.encode(string).tolist()

    def _scored(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], quiet: bool) -> list[tuple[float, bool]]:
        if self._scorer is None:
            self._scorer = Scorer(self._model)
        with tqdm(total=len(pairs), desc="log-likelihoods", disable=quiet or None) as bar:
            return log_likelihoods(
                self._scorer, pairs, context=self.max_length, batch_size=self.batch_size, advance=bar.update
            )

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **kwargs) -> list[tuple[float, bool]]:
        pairs = [(context or [self.prefix_token_id], continuation) for _, context, continuation in requests]
        found = self._scored(pairs, disable_tqdm)
        for (texts, _, _), answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, answer)
        return found

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """Nats of every token of each text, the first after the end-of-document token."""
        pairs, owners = [], []
        for index, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1):
                pairs.append(make_disjoint_window(window))
                owners.append(index)
        totals = [0.0] * len(requests)
        for index, (nats, _) in zip(owners, self._scored(pairs, disable_tqdm), strict=True):
            totals[index] += nats
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _alone(self, tokens: Sequence[int], stop: Sequence[str]) -> str:
        """The text of new tokens, decoded without the prompt, as the harness does, up to the first stop string."""
        ends = end_ids(self._text)
        text = self._text.decode([token for token in tokens if token not in ends])
        return text[: min((at for s in stop if s and (at := text.find(s)) >= 0), default=len(text))]

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """Continuations, in batches of requests that ask for the same settings, the longest prompts first."""
        if self._generator is None:
            self._generator = Generator(self._model, self._text, context=self.max_length)
        prompts = [self._generator.prompt_ids(request.args[0]) for request in requests]
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True, default=str), []).append(index)
        found = [""] * len(requests)
        bar = tqdm(total=len(requests), desc="generations", disable=disable_tqdm or None)
        for group in groups.values():
            group.sort(key=lambda index: -len(prompts[index]))
            for at in range(0, len(group), self.batch_size):
                part = group[at : at + self.batch_size]
                stop, new_tokens, sampling = generation_settings(requests[part[0]].args[1], self._seed + at)
                if new_tokens >= self.max_length:
                    raise ValueError(
                        f"max_gen_toks={new_tokens:,} of a task leaves no room for a prompt in {self.max_length:,} "
                        "tokens: raise --context (beyond the training length, quality may suffer)"
                    )
                cut = [prompts[index][new_tokens - self.max_length :].tolist() for index in part]
                done = self._generator(cut, max_tokens=new_tokens, sampling=sampling, stop=stop)
                for index, completion in zip(part, done, strict=True):
                    found[index] = self._alone(completion.tokens, stop)
                    self.cache_hook.add_partial("generate_until", requests[index].args, found[index])
                bar.update(len(part))
        bar.close()
        return found


@contextlib.contextmanager
def _downloads(allowed: bool) -> Iterator[None]:
    """Within it, datasets and the Hugging Face hub use what is on this machine alone, unless downloads are allowed."""
    places = [(huggingface_hub.constants, "HF_HUB_OFFLINE"), (datasets.config, "HF_HUB_OFFLINE")]
    usual = [getattr(module, name) for module, name in places]
    for module, name in places if not allowed else []:
        setattr(module, name, True)
    try:
        yield
    finally:
        for (module, name), value in zip(places, usual, strict=True):
            setattr(module, name, value)


def _managers(names: Sequence[str], task_path: str | None) -> list[tuple[TaskManager, list[str]]]:
    """Which tasks are read from where; those of `task_path` go before the harness's own of the same name."""
    found, rest, known = [], list(names), []
    if task_path:
        if not Path(task_path).is_dir():
            raise DataError(f"--task-path={task_path}", "is no directory", "name a directory with yaml files of tasks")
        local = TaskManager(include_path=task_path, include_defaults=False)
        own = [name for name in names if name in local.task_index]
        rest = [name for name in names if name not in own]
        known += local.all_tasks
        found += [(local, own)] if own else []
    if rest:  # reading the thousands of tasks that come with the harness takes a while
        manager = TaskManager()
        known += manager.all_tasks
        for name in rest:
            if name not in manager.task_index:
                meant = nearest(name, known)
                what = f"the harness has no task of this name{f', but {meant}' if meant else ''}"
                raise DataError(f"--tasks lm_eval:{name}", what, "correct it, or give its directory with --task-path")
        found.append((manager, rest))
    return found


def _table(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """For each task and group: its metrics with their standard errors, shots, samples and version."""
    rows = {}
    for name, values in found["results"].items():
        metrics = {
            key.removesuffix(",none"): value
            for key, value in values.items()
            if isinstance(value, (int, float)) and "," in key
        }
        rows[name] = {
            "metrics": metrics,
            "num_fewshot": found["n-shot"].get(name),
            "samples": found["n-samples"].get(name, {}).get("effective"),
            "version": found["versions"].get(name),
        }
    return rows


def run_tasks(
    model: TemplateLM,
    names: Sequence[str],
    *,
    task_path: str | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    allow_download: bool = False,
    samples: Path | None = None,
) -> dict[str, dict[str, Any]]:
    """Runs tasks of the harness, with the harness's own seeds.

    Args:
      model: a `HarnessModel`, or another backend of the harness.
      names: of tasks, groups or tags.
      task_path: directory whose yaml files are tasks too.
      num_fewshot: examples before each question; None: as each task says.
      limit: questions of each task at most.
      allow_download: fetch data that is not on this machine.
      samples: directory for one samples_TASK.jsonl per task, with each question and what the model answered.

    Returns:
      For each task and group: metrics (standard errors end in _stderr), num_fewshot, samples, version.

    Raises:
      DataError: a task does not exist, or its data is not on this machine.
    """
    # The harness forks processes for standard errors by bootstrap, which may hang beside the threads of JAX.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    rows: dict[str, dict[str, Any]] = {}
    for manager, own in _managers(names, task_path):
        try:
            with _downloads(allow_download):
                found = simple_evaluate(
                    model=model,
                    tasks=own,
                    num_fewshot=num_fewshot,
                    limit=limit,
                    task_manager=manager,
                    log_samples=samples is not None,
                )
        except (ConnectionError, FileNotFoundError) as error:
            fix = "check the network" if allow_download else "fetch it with --allow-download, or use local files"
            raise DataError(f"--tasks lm_eval:{','.join(own)}", f"its data is not to be had ({error})", fix) from error
        rows |= _table(found)
        if samples is not None:
            for name, answers in found["samples"].items():
                text = "".join(json.dumps(answer, default=handle_non_serializable) + "\n" for answer in answers)
                (samples / f"samples_{name}.jsonl").write_text(text, encoding="utf-8")
    return rows
