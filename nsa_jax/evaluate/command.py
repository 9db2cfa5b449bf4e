r"""Evaluates a trained model: perplexity, use of the context, retrieval.

    python -m nsa_jax.evaluate runs/quickstart
    python -m nsa_jax.evaluate runs/quickstart --files notes.txt --stride 64 --tasks perplexity
    python -m nsa_jax.evaluate runs/quickstart --tasks needle,needle-multi --lengths 4096,16384 --samples 16
    python -m nsa_jax.evaluate runs/recall --tasks recall
    python -m nsa_jax.evaluate runs/quickstart --tasks long,context --lengths 2048,8192 --cuts 512,2048
    python -m nsa_jax.evaluate runs/llama-nsa --tasks lm_eval:arc_easy,hellaswag --limit 200 --allow-download

Tasks (default: those that fit the run's data):
  validation    the run's own validation: the rows, masks and counts of training, so the same loss and bits per byte.
  perplexity    nats per token, perplexity and bits per byte over held-out documents (or --files), in windows of
                --context tokens that advance by --stride: a smaller stride gives tokens more context and costs more.
                Training validates on packed rows, where tokens have less context: compare with validation for that.
  position      loss by position in the context, with a plot: does the long context help?
  needle        a fact at every depth of contexts of several lengths: is it found, and was its block selected?
  needle-multi  the same among several facts.
  recall        the associative recall task of configs/recall.py.
  far           the tasks on which the run trained, where their answers lie far back: by the whole model, without the
                selected branch, and by the window alone; how often block lists hold the answer, beside chance.
  long          needles, chains of variables, recall at distances, copying and counting at several lengths: the tasks of
                config.data.tasks, on rows that training has not seen. --long-tasks names some of them.
  context       how much of the loss at each position depends on tokens that lie further than --cuts away: whole windows
                of --context tokens against the same tokens with the context cut.
  lm_eval:NAME  tasks of EleutherAI's lm-evaluation-harness, from --task-path or its own; needs pip install
                "nsa_jax[eval]". Names after it that are none of the tasks above are tasks of the harness too.

Results go to a table, OUTPUT/evaluation.json and pictures in OUTPUT, by default PATH/evaluation.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict
from rich.console import Console
from rich.table import Table

from nsa_jax import inspect
from nsa_jax.command_line import number, run_program, silence
from nsa_jax.data import DataError, long_tasks
from nsa_jax.data.sources import has_held_out
from nsa_jax.data.synthetic import num_facts
from nsa_jax.data.tokenizers import SyntheticTokenizer
from nsa_jax.evaluate import long_context, retrieval
from nsa_jax.evaluate.scoring import (
    HeldOut,
    Scorer,
    fingerprint,
    held_out_documents,
    plot_positions,
    position_bins,
    score_documents,
)
from nsa_jax.evaluate.validation import repeat_validation
from nsa_jax.extras import extra
from nsa_jax.fields import source_configs
from nsa_jax.hub.load import load_recorded, local_directory
from nsa_jax.hub.output import check_writable
from nsa_jax.nn import function_differences
from nsa_jax.rules import GENERATED
from nsa_jax.train.env import plain_config, write_json

TASKS = ("validation", "perplexity", "position", "needle", "needle-multi", "recall", "far", "long", "context")
_SAME_LOSS = 1e-3  # relative; kernels and precision of another machine may differ by less
_TEXT_TASKS = ("needle", "needle-multi", "long")  # which ask questions in words
HARNESS = "lm_eval:"  # before names of tasks of the lm-evaluation-harness


class _Console(Console):
    """Goes on in silence when who reads the tables, such as head, has enough of them: results are in files too."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        silence(sys.stdout)


def _reads_context(task: str) -> bool:
    """Whether rows of a task are `--context` tokens long; those of others have the run's length, or `--lengths`."""
    return task in ("perplexity", "position", "context") or task.startswith(HARNESS)


def _holds_out(source: ConfigDict) -> bool:
    """Whether a source, as a config of its own, keeps documents that are held out."""
    data = source.data
    if data.source in GENERATED or (data.source == "hf" and data.hf_streaming):
        return False
    return data.val_fraction > 0 or has_held_out(source)


class Evaluation:
    """The tasks of one call, sharing the model, its data and where results go."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        directory = local_directory(args.path)
        if directory is None and not args.output:
            raise ValueError(f"{args.path}: name a directory for the results with --output")
        self.model, self.tokenizer, self.config, self.recorded = load_recorded(args.path)
        self.tokenizer.check_fits(self.model.config.vocab_size)
        self.context = args.context or self.config.data.seq_len
        self.output = Path(args.output or Path(directory or "") / "evaluation")
        check_writable(self.output, "name another place with --output")
        self.output.mkdir(parents=True, exist_ok=True)
        self.console = _Console() if sys.stdout.isatty() else _Console(width=120)
        self._said: list[Table | str] = []
        self._held_out: HeldOut | None = None
        self._scores: dict[str, Any] | None = None
        self._probe: inspect.Probe | None = None

    def default_tasks(self) -> list[str]:
        """Tasks that fit the run's data."""
        if self.config.data.source == "synthetic" and not self.args.files:
            return ["recall"] if self.config.data.synthetic == "recall" else []
        validated = ["validation"] if self.config.train.eval_batches and not self.args.files else []
        alone = source_configs(self.config).values()
        kinds = {part.data.source for part in alone}
        text = (
            ["perplexity", "position", "needle", "needle-multi"]
            if self.args.files or any(map(_holds_out, alone))
            else []
        )
        found = []
        for task in [*validated, *text, *(["far", "long"] if "task" in kinds else [])]:
            try:
                self._check(task)
            except DataError as error:
                self._say(f"{task} is left out: {error}")
            else:
                found.append(task)
        return found

    def _check(self, task: str) -> None:
        """Raises DataError if the rows of a task cannot be made, before anything is computed."""
        data = self.config.data
        if isinstance(self.tokenizer, SyntheticTokenizer) and (task in _TEXT_TASKS or task.startswith(HARNESS)):
            fix = "use --tasks validation, or recall for runs of configs/recall.py"
            raise DataError(f"--tasks {task}", "its questions are text, and the run's tokens are synthetic", fix)
        if task == "far":
            _ = self.far_task
        elif task == "context":
            self._context_rows()
        elif task == "recall" and 4 * num_facts(data.seq_len) > data.synthetic_vocab:
            what = f"too few ids for the {num_facts(data.seq_len)} facts of a row of {data.seq_len} tokens"
            fix = "this task is for runs of configs/recall.py: use --tasks long for others"
            raise DataError(f"config.data.synthetic_vocab={data.synthetic_vocab}", what, fix)
        else:
            self._lengths(task)

    @functools.cached_property
    def far_task(self) -> inspect.FarTask:
        """The tasks of the run's own data, which have far questions."""
        task = inspect.far_task(self.config, self.tokenizer)
        if task is None:
            what, fix = "the run has no source of tasks", "use --tasks long, which brings its own rows"
            raise DataError("--tasks far", what, fix)
        if not any(task.is_far(answer) for _, row in task.rows(8 * self.args.samples) for answer in row.answers):
            what = f"no answer lies more than {task.reach} tokens back, which all windows together reach"
            raise DataError(f"config.data.seq_len={task.seq_len}", what, "use --tasks long with longer --lengths")
        return task

    def _lengths(self, task: str) -> list[int]:
        """Lengths of a task's rows: those asked for, or the parts of the context that are long enough.

        Raises:
          DataError: the task's rows do not fit into any of them.
        """
        if task == "long":
            needed = [long_tasks.TASKS[name].least(self.tokenizer) for name in self.args.long_tasks]
            least, room = min(needed), max(needed)
            what, fix = "these tasks need", "name others with --long-tasks, or raise --context"
        elif task in ("needle", "needle-multi"):
            count = self.args.num_keys if task == "needle-multi" else 1
            least = retrieval.needle_tokens(self.tokenizer, count)
            room = 2 * least
            what, fix = f"{count} facts need", "use fewer with --num-keys, or raise --context"
        else:
            return []
        if self.args.lengths:
            tried = (max if task == "long" else min)(self.args.lengths)  # of the long tasks, some may fit
            if tried < least:
                raise DataError(f"--lengths {tried}", f"too short: {what} {least} tokens", "raise it")
            return list(self.args.lengths)
        lengths = [length for length in (self.context >> shift for shift in (3, 2, 1, 0)) if length >= room]
        if not lengths:
            raise DataError(f"context={self.context}", f"too short: {what} {room} tokens", fix)
        return lengths

    @property
    def held_out(self) -> HeldOut:
        if self._held_out is None:
            args = self.args
            self._held_out = held_out_documents(
                self.config, args.files, self.tokenizer, args.max_tokens, self.context, args.text_separator
            )
        return self._held_out

    @property
    def documents(self) -> list[np.ndarray]:
        return self.held_out.documents

    @property
    def probe(self) -> inspect.Probe:
        if self._probe is None:
            self._probe = inspect.Probe(self.model, self.tokenizer.vocab_size, jax.local_devices())
        return self._probe

    @property
    def token_bytes(self) -> np.ndarray:
        """Bytes of text of each token id: int32 [vocab]."""
        found = np.zeros(self.model.config.vocab_size, np.int32)
        found[: self.tokenizer.vocab_size] = self.tokenizer.token_bytes
        return found

    @property
    def scores(self) -> dict[str, Any]:
        if self._scores is None:
            self._scores = score_documents(
                Scorer(self.model),
                self.documents,
                self.token_bytes,
                self.tokenizer.eos_id,
                context=self.context,
                stride=min(self.args.stride or self.context // 2, self.context),
                batch_size=self.args.batch_size,
                cut=self.held_out.cut,
            )
        return self._scores

    def validation(self) -> dict[str, Any]:
        """The run's validation, beside what the run recorded of it at this step."""
        result = repeat_validation(self.model, self.tokenizer, self.config, self.token_bytes, self.args.batch_size)
        recorded = self.recorded.get("val/loss")
        if recorded is not None:
            result["recorded_loss"] = recorded
        self._table("validation" + ("" if recorded is None else ", as in training"), [result])
        if recorded is not None and abs(result["loss"] - recorded) > _SAME_LOSS * abs(recorded):
            self._say(
                f"The run recorded a loss of {recorded:.6g} here: the data or the precision are not those of training."
            )
        return result

    def perplexity(self) -> dict[str, Any]:
        """Losses over whole documents."""
        result = {name: value for name, value in self.scores.items() if name != "by_position"}
        self._table("perplexity", [result])
        if not self.args.files:
            self._say(
                f"Whole documents in windows of {result['context']:,} tokens that advance by {result['stride']:,}: not "
                "comparable with val/bits_per_byte of training (packed rows); --tasks validation is."
            )
        return result

    def position(self) -> dict[str, Any]:
        """The task of that name."""
        found = self.scores["by_position"]
        rows = position_bins(found["nats"], found["counts"])
        window = self.config.model.nsa.window
        plot_positions(found["nats"], found["counts"], window, self.config.name, self.output / "loss_by_position.png")
        self._table("loss by position", rows)
        return {"bins": rows}

    def needle(self, num_keys: int = 1, name: str = "needle") -> dict[str, Any]:
        """The tasks needle and needle-multi."""
        lengths = self._lengths(name)
        haystack = np.concatenate(self.documents)
        haystack = np.tile(haystack, -(-max(lengths) // len(haystack)))
        cells = retrieval.needle_grid(
            self.probe,
            self.tokenizer,
            haystack,
            lengths=lengths,
            depths=self.args.depths,
            samples=self.args.samples,
            num_keys=num_keys,
            seed=self.args.seed,
            batch_size=min(self.args.batch_size, self.args.samples),
        )
        retrieval.plot_needles(cells, f"{self.config.name}: {num_keys} fact(s)", self.output / f"{name}.png")
        self._table(f"{name} ({num_keys} facts per context)", cells)
        return {"cells": cells, "exact_match": float(np.mean([cell["exact_match"] for cell in cells]))}

    def recall(self) -> dict[str, Any]:
        """The task of that name."""
        data = self.config.data
        measure = functools.partial(
            retrieval.recall_accuracy,
            seq_len=data.seq_len,
            vocab_size=data.synthetic_vocab,
            rows=32 * self.args.samples,
            seed=self.config.seed,
        )
        result = measure(self.probe)
        if "nsa" in self.model.config.kinds:  # what each branch contributes to this model
            for index, branch in enumerate(self.model.config.branches):
                result[f"accuracy_without_{branch}"] = measure(self.probe.without(index))["accuracy"]
        self._table(f"associative recall ({', '.join(self.model.config.kinds)})", [result])
        return result

    def far(self) -> dict[str, Any]:
        """The tasks of the run's own data; without selection, no verdict and no picture."""
        task = self.far_task
        rows = dict(rows=8 * self.args.samples, batch_size=self.args.batch_size)
        result, verdict = inspect.score_far_task(self.probe, task, **rows)
        self._table("questions about far tokens", [result])
        if verdict is not None and (shown := inspect.show_far_question(self.probe, task)):
            self._say(f"{verdict}\n{shown[0]}")
            shown[1].savefig(self.output / "far_task.png")
        return result

    def long(self) -> dict[str, Any]:
        """The tasks of `data.long_tasks`."""
        lengths = self._lengths("long")
        result = long_context.task_grid(
            self.probe,
            self.tokenizer,
            names=self.args.long_tasks,
            lengths=lengths,
            samples=self.args.samples,
            seed=self.args.seed,
            batch_size=self.args.batch_size,
        )
        long_context.plot_tasks({self.config.name: result["cells"]}, self.output / "long.png")
        self._table("long tasks by length", result["cells"])
        self._table("long tasks by distance", result["distances"])
        return result

    def _context_rows(self) -> tuple[list[np.ndarray], list[int]]:
        """Rows and cuts of the task context."""
        window = self.config.model.nsa.window
        cuts = [cut for cut in self.args.cuts or [window << shift for shift in (0, 2, 4, 6)] if cut < self.context]
        rows = [
            document[first : first + self.context + 1]
            for document in self.documents
            for first in range(0, len(document) - self.context, self.context)
        ]
        if not rows or not cuts:
            what = (
                f"no cut is below the context {self.context}" if rows else f"no document has {self.context + 1} tokens"
            )
            fix = "lower --context or --cuts, raise --max-tokens, or name longer --files"
            raise DataError("--tasks context", what, fix)
        return rows, cuts

    def cut_context(self) -> dict[str, Any]:
        """The task context."""
        rows, cuts = self._context_rows()
        if left_out := sorted(set(self.args.cuts or ()) - set(cuts)):
            self._say(f"--cuts {', '.join(map(str, left_out))}: left out, not below the context {self.context}.")
            self._show()
        scorer, tokens = Scorer(self.model), np.stack(rows)
        sizes = {"batch_size": self.args.batch_size}
        whole = long_context.context_losses(scorer, tokens, self.context, self.context, **sizes)
        cut = {}
        for size in cuts:
            more = max(self.args.batch_size * self.context // size, 1)  # as many tokens at once
            cut[size] = long_context.context_losses(scorer, tokens, size, max(size // 4, 1), batch_size=more)
        table = long_context.context_table(whole, cut)
        long_context.plot_context(table, self.config.name, self.output / "context.png")
        self._table(f"nats per token that depend on tokens further away ({len(rows)} rows)", table)
        return {"rows": len(rows), "bins": table}

    def harness(self, names: list[str]) -> dict[str, dict[str, Any]]:
        """Tasks of the lm-evaluation-harness, each under its name with the prefix."""
        with extra("eval"):
            from nsa_jax.evaluate.harness import HarnessModel, run_tasks

        args = self.args
        model = HarnessModel(
            self.model, self.tokenizer, context=self.context, batch_size=args.batch_size, seed=args.seed
        )
        found = run_tasks(
            model,
            names,
            task_path=args.task_path,
            num_fewshot=args.num_fewshot,
            limit=args.limit,
            allow_download=args.allow_download,
            samples=self.output if args.log_samples else None,
        )
        rows = [
            {"task": name, "shots": row["num_fewshot"], "samples": row["samples"], "metric": metric, "value": value}
            for name, row in found.items()
            for metric, value in row["metrics"].items()
        ]
        self._table("lm-evaluation-harness", rows)
        return {f"{HARNESS}{name}": row for name, row in found.items()}

    def _say(self, line: str) -> None:
        self._said.append(line)

    def _show(self) -> None:
        """Prints what the tasks said, once their results are written."""
        for said in self._said:
            self.console.print(said, markup=False, highlight=False, soft_wrap=isinstance(said, str))
        self._said.clear()

    def _table(self, title: str, rows: list[dict[str, Any]]) -> None:
        def shown(value):
            if value is None or isinstance(value, str):
                return value
            if isinstance(value, bool):
                return "yes" if value else "no"
            return f"{value:.4g}" if isinstance(value, float) else f"{value:,}"

        table = Table(title=title, show_header=len(rows) > 1)
        if len(rows) == 1:
            for name, value in rows[0].items():
                table.add_row(name.replace("_", " "), shown(value))
        else:
            for name in rows[0]:
                table.add_column(name.replace("_", " "), justify="right")
            for row in rows:
                table.add_row(*map(shown, row.values()))
        self._said.append(table)

    def run(self) -> dict[str, Any]:
        """Runs the tasks, and writes evaluation.json after each; returns what this call found."""
        tasks = self.args.tasks or self.default_tasks()
        self._show()
        if not tasks:
            raise DataError("--tasks", "none fits the run's data", "name tasks, with --files for text")
        for task in tasks:
            self._check(task)
        harness = [task for task in tasks if task not in TASKS]
        model = {"path": str(self.args.path), "step": self.recorded.get("step")}
        model |= {"fingerprint": fingerprint(self.model), "tokenizer": self.tokenizer.fingerprint}
        model["model"] = plain_config(self.config)["model"]
        result: dict[str, Any] = {**model, "context": self.context, "tasks": {}}
        kept = self._results_of(model)
        for task in tasks:
            begin = time.perf_counter()
            if task == "needle-multi":
                found = {task: self.needle(self.args.num_keys, "needle-multi")}
            elif task == "context":
                found = {task: self.cut_context()}
            elif task in TASKS:
                found = {task: getattr(self, task)()}
            elif task == harness[0]:
                found = self.harness([name.removeprefix(HARNESS) for name in harness])
            else:  # it ran with the first
                continue
            seconds = round(time.perf_counter() - begin, 2)
            read = {"context": self.context} if _reads_context(task) else {}
            result["tasks"] |= {name: {**read, **values, "seconds": seconds} for name, values in found.items()}
            write_json(self.output / "evaluation.json", {**result, "tasks": kept | result["tasks"]})
            self._show()
        self.console.print(f"written to {self.output}")
        return result

    def _results_of(self, model: dict[str, Any]) -> dict[str, Any]:
        """What earlier calls found of this model, by task."""
        try:
            found = json.loads((self.output / "evaluation.json").read_text())
            # A model may be named in several ways; files of earlier versions have its name alone, or no tokenizer.
            same = ("step", "fingerprint") if "fingerprint" in found else ("path", "step")
            other = any(found[name] != model[name] for name in same)
            other |= found.get("tokenizer", model["tokenizer"]) != model["tokenizer"]
            # With other blocks, for example, the same parameters are another function.
            other |= bool(function_differences(found.get("model", model["model"]), model["model"]))
            return {} if other else dict(found["tasks"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}


def _parser() -> argparse.ArgumentParser:
    def numbers(kind):
        return lambda text: [kind(x) for x in text.split(",")]

    def tasks(text):
        names, harness, unknown = [], False, []
        for name in text.split(","):
            harness = harness or name.startswith(HARNESS)
            if name in TASKS or (name.startswith(HARNESS) and name != HARNESS):
                names.append(name)
            elif harness and name and name != HARNESS:
                names.append(HARNESS + name)
            else:
                unknown.append(name)
        if unknown:
            known = f"{', '.join(TASKS)}, {HARNESS}NAME"
            raise argparse.ArgumentTypeError(f"unknown {sorted(unknown)}: choose from {known}")
        return names

    def some_long_tasks(text):
        names = text.split(",")
        if unknown := sorted(set(names) - set(long_tasks.TASKS)):
            raise argparse.ArgumentTypeError(f"unknown {unknown}: choose from {', '.join(long_tasks.TASKS)}")
        return names

    parser = argparse.ArgumentParser(
        prog="python -m nsa_jax.evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", help="a run's workdir (WORKDIR@STEP, WORKDIR@best) or an exported model")
    parser.add_argument("--tasks", type=tasks, help="comma separated; default: those that fit the run's data")
    parser.add_argument("--files", nargs="+", default=[], help="text files or globs instead of held-out documents")
    parser.add_argument(
        "--text-separator", help="what is between the documents of --files; '': nothing; default: as in the run's data"
    )
    parser.add_argument("--context", type=number(int, 2), help="tokens of a window; default: the training length")
    parser.add_argument("--stride", type=number(int, 1), help="how far windows advance; default: half the context")
    parser.add_argument(
        "--max-tokens", type=number(int, 2), default=200_000, help="tokens of text to score (default %(default)s)"
    )
    parser.add_argument("--batch-size", type=number(int, 1), default=8)
    parser.add_argument(
        "--lengths", type=numbers(number(int, 2)), help="needle: context lengths; default: up to the context"
    )
    parser.add_argument(
        "--depths", type=numbers(number(float, 0, 1)), default=[0.0, 0.25, 0.5, 0.75, 1.0], help="needle: 0 to 1"
    )
    parser.add_argument(
        "--samples", type=number(int, 1), default=8, help="needle: samples per cell; recall: 32 rows each"
    )
    parser.add_argument(
        "--num-keys", type=number(int, 1), default=4, help="needle-multi: facts per context (default %(default)s)"
    )
    parser.add_argument(
        "--long-tasks",
        type=some_long_tasks,
        default=list(long_tasks.TASKS),
        help="long: comma separated; default: all",
    )
    parser.add_argument(
        "--cuts", type=numbers(number(int, 1)), help="context: tokens that are left; default: 1, 4, 16 and 64 windows"
    )
    parser.add_argument("--seed", type=number(int, 0), default=0)
    group = parser.add_argument_group("lm_eval")
    group.add_argument("--task-path", metavar="DIR", help="its yaml files are tasks too, and go before others")
    group.add_argument("--num-fewshot", type=number(int, 0), help="examples per question; default: as the task says")
    group.add_argument("--limit", type=number(int, 1), help="questions per task; default: all")
    group.add_argument("--allow-download", action="store_true", help="fetch data of tasks that is not on this machine")
    group.add_argument("--log-samples", action="store_true", help="write each question and answer to OUTPUT")
    parser.add_argument("--output", help="directory for results; default: PATH/evaluation")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command line tool; returns the exit status."""
    args = _parser().parse_args(argv)
    return run_program(lambda: Evaluation(args).run())
