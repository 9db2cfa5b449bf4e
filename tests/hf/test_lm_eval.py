"""lm-evaluation-harness on our models: by hand, against our own evaluation, and against the harness's `hf` backend.

The model is tiny and random, with rows of 96 tokens, so that requests are cut and rolling windows move on.
"""

from __future__ import annotations

import json
import math

import datasets
import huggingface_hub
import jax
import numpy as np
import pytest
from flax import nnx
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from nsa_jax import evaluate, nn
from nsa_jax.command_line import EXIT_USAGE
from nsa_jax.data.tokenizers import ByteTokenizer
from nsa_jax.evaluate import harness
from nsa_jax.evaluate.harness import HarnessModel, run_tasks
from nsa_jax.generator import Generator
from nsa_jax.hub.export import export
from nsa_jax.hub.native import export_native
from nsa_jax.sampling import Sampling
from tests.tools.runs import small_config
from tests.tools.test_first_words import sentencepiece

CONTEXT = 96
KINDS = {
    "choice": "output_type: multiple_choice\ndoc_to_choice: choices\ndoc_to_target: answer\nmetric_list:\n"
    "  - {metric: acc, aggregation: mean, higher_is_better: true}\n"
    "  - {metric: acc_norm, aggregation: mean, higher_is_better: true}\nfewshot_split: test\n",
    "text": "output_type: loglikelihood_rolling\ndoc_to_target: '{{question}}'\nmetric_list:\n"
    "  - {metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}\n",
    "open": "output_type: generate_until\ndoc_to_target: '{{choices[0]}}'\n"
    "generation_kwargs: {until: ['e'], max_gen_toks: 12, do_sample: false}\nmetric_list:\n"
    "  - {metric: exact_match, aggregation: mean, higher_is_better: true}\n",
}


@pytest.fixture(scope="module")
def model():
    return nn.Transformer(nn.ModelConfig.from_config(small_config(), 257), rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def adapter(model):
    return HarnessModel(model, ByteTokenizer(), context=CONTEXT, batch_size=8)


def test_new_text_is_decoded_without_the_prompt_as_the_harness_does(model):
    tokenizer = sentencepiece()
    adapter = HarnessModel(model, tokenizer, context=CONTEXT, batch_size=8)
    tokens = [*tokenizer.encode_within(" the model reads the end").tolist(), tokenizer.eos_id]
    assert adapter._alone(tokens, ["reads", "", "nowhere"]) == "the model "
    assert adapter._alone(tokens, []) == "the model reads the end"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A directory with tasks of three kinds on the same questions, some of them longer than a row."""
    path = tmp_path_factory.mktemp("tasks")
    rng = np.random.default_rng(0)

    def text(length):
        return "".join(rng.choice(list("abcdef ."), length)).strip() + "x"

    questions = [
        {"question": text(n), "choices": [" " + text(k) for k in rng.integers(1, 12, 3)], "answer": int(n % 3)}
        for n in (5, 60, 230, 97, 30, 150)
    ]
    (path / "questions.json").write_text("".join(json.dumps(row) + "\n" for row in questions))
    for name, rest in KINDS.items():
        head = f"task: tiny_{name}\ndataset_path: json\ntest_split: test\ndoc_to_text: '{{{{question}}}}'\n"
        data = f"dataset_kwargs: {{data_files: {{test: {path}/questions.json}}}}\n"
        (path / f"{name}.yaml").write_text(head + data + rest)
    return path


def ask(adapter, kind, *arguments):
    return getattr(adapter, kind)([Instance(kind, {}, given, i) for i, given in enumerate(arguments)], True)


def test_log_likelihoods_are_those_of_the_full_logits(model, adapter):
    """After a context, after one that ends in spaces, and after none, which stands for the end of a document."""
    pairs = [("one two", " three"), ("one  ", "two"), ("", "word")]
    want = [(b"one two", b" three"), (b"one", b"  two"), (None, b"word")]
    found = ask(adapter, "loglikelihood", *pairs)
    for (before, after), (nats, greedy) in zip(want, found, strict=True):
        ids = [*(before if before is not None else [256]), *after]
        log_probs = np.asarray(jax.nn.log_softmax(model(np.asarray([ids[:-1]]))))[0, -len(after) :]
        assert nats == pytest.approx(log_probs[np.arange(len(after)), list(after)].sum(), rel=1e-5)
        assert greedy == (log_probs.argmax(-1) == list(after)).all()


@pytest.mark.parametrize("length", [40, 2 * CONTEXT])
def test_rolling_log_likelihoods_agree_with_bits_per_byte(model, adapter, length):
    text = "".join(np.random.default_rng(1).choice(list("abc "), length))
    (nats,) = ask(adapter, "loglikelihood_rolling", (text,))
    document = np.append([256], ByteTokenizer().encode(text)).astype(np.int32)
    token_bytes = np.append(np.ones(256, np.int32), [0] * 4)
    found = evaluate.score_documents(
        evaluate.Scorer(model), [document], token_bytes, 256, context=CONTEXT, stride=CONTEXT, batch_size=8, cut=[0]
    )
    assert found["tokens"] == found["bytes"] == length
    assert -nats / math.log(2) / length == pytest.approx(found["bits_per_byte"], rel=1e-6)


def test_generations_are_those_of_the_generator(model, adapter):
    """In other batches, with stop strings, and with a prompt that leaves no room."""
    prompts, long = ["abc", "d", "ab ab ab"], "".join(np.random.default_rng(2).choice(list("abc "), 300))
    settings = {"until": ["a"], "max_gen_toks": 10}
    requests = [(prompt, settings) for prompt in (*prompts, long)]
    found = ask(adapter, "generate_until", *requests, (prompts[0], {"max_gen_toks": 4}))
    generator = Generator(model, ByteTokenizer(), context=CONTEXT)
    want = generator([*prompts, long[-CONTEXT + 10 :]], max_tokens=10, sampling=Sampling(temperature=0), stop=["a"])
    assert found[:4] == [completion.text for completion in want]
    (short,) = generator([prompts[0]], max_tokens=4, sampling=Sampling(temperature=0))
    assert found[4] == short.text
    with pytest.raises(ValueError, match="max_gen_toks=256.*raise --context"):
        ask(adapter, "generate_until", ("a", {}))


def test_tasks_give_what_the_hf_backend_gives(model, tasks, tmp_path):
    config = small_config()
    export(model, ByteTokenizer(), config, tmp_path / "ours")
    export_native(model, ByteTokenizer(), config, tmp_path / "theirs")
    names = [f"tiny_{kind}" for kind in KINDS]
    command = [str(tmp_path / "ours"), "--tasks", "lm_eval:" + ",".join(names), "--task-path", str(tasks)]
    assert evaluate.main([*command, "--log-samples", "--output", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out" / "evaluation.json").read_text())["tasks"]

    there = tmp_path / "there"
    there.mkdir()
    options = {"trust_remote_code": True, "dtype": "float32", "add_bos_token": False}
    backend = HFLM(str(tmp_path / "theirs"), device="cpu", batch_size=2, **options)
    want = run_tasks(backend, names, task_path=str(tasks), samples=there)
    assert set(want) == set(names) and set(found) == {f"lm_eval:{name}" for name in names}
    for name in names:
        ours, theirs = found[f"lm_eval:{name}"], want[name]
        assert (ours["samples"], ours["num_fewshot"]) == (theirs["samples"], theirs["num_fewshot"]) == (6, 0)
        assert ours["metrics"] == pytest.approx(theirs["metrics"], rel=1e-5) and ours["metrics"]
        logs = [(place / f"samples_{name}.jsonl").read_text().splitlines() for place in (tmp_path / "out", there)]
        for left, right in zip(*(map(json.loads, log) for log in logs), strict=True):
            answers = [np.ravel(log["resps"]).tolist() for log in (left, right)]
            if name == "tiny_open":
                assert answers[0] == answers[1]
            else:
                np.testing.assert_allclose(*(np.asarray(a, object).astype(float) for a in answers), atol=1e-4)
    assert 0 < found["lm_eval:tiny_choice"]["metrics"]["acc"] < 1


def test_limit_and_few_shots_reach_the_harness(adapter, tasks):
    found = run_tasks(adapter, ["tiny_choice"], task_path=str(tasks), num_fewshot=1, limit=2)["tiny_choice"]
    assert (found["samples"], found["num_fewshot"]) == (2, 1)


def test_mistakes_are_named(model, tasks, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(harness, "TaskManager", lambda **options: _manager(tasks))  # reading all tasks takes long
    export(model, ByteTokenizer(), small_config(), tmp_path / "ours")
    hub = (tasks / "choice.yaml").read_text().replace("tiny_choice", "hub")
    (tasks / "hub.yaml").write_text(hub.replace("path: json", "path: nobody/nothing"))
    for arguments, words in (
        (["lm_eval:tiny_chioce"], "no task of this name, but tiny_choice"),
        (["lm_eval:tiny_choice", "--task-path", str(tmp_path / "none")], "is no directory"),
        (["lm_eval:hub", "--task-path", str(tasks)], "--allow-download"),
    ):
        assert evaluate.main([str(tmp_path / "ours"), "--tasks", *arguments]) == EXIT_USAGE
        assert words in capsys.readouterr().err


def test_nothing_is_downloaded_unless_asked_for():
    for allowed in (False, True):
        with harness._downloads(allowed):
            assert huggingface_hub.is_offline_mode() == datasets.config.HF_HUB_OFFLINE == (not allowed)
    assert huggingface_hub.is_offline_mode() == datasets.config.HF_HUB_OFFLINE == False  # noqa: E712


def _manager(path, manager=harness.TaskManager):
    return manager(include_path=str(path), include_defaults=False)
