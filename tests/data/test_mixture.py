"""Several sources: shares of tokens, resume with any number of processes, one order for one source, their mistakes."""

import hashlib
import json

import chex
import numpy as np
import pytest
from ml_collections import config_dict

from nsa_jax.command_line import override
from nsa_jax.config import default_config, validate
from nsa_jax.data import DataError, make_pipeline, tokenizers
from nsa_jax.data.mixture import MixedDocuments, Schedule
from nsa_jax.evaluate.scoring import held_out_documents
from nsa_jax.fields import source_configs
from nsa_jax.hub.saved_config import config_from_dict
from nsa_jax.train import env, metrics
from nsa_jax.train.preflight import data_check

WEIGHTS = {"web": 5.0, "code": 3.0, "books": 1.5}
LETTERS = {"web": "abc", "code": "defg", "books": "hijkl"}  # every source has letters of its own


@pytest.fixture
def mixed_config(tmp_path):
    """Three sources of unlike sizes and document lengths."""
    config, random = default_config(), np.random.default_rng(0)
    for i, (name, letters) in enumerate(LETTERS.items()):
        (tmp_path / name).mkdir()
        for number in range(40):
            text = "".join(random.choice(list(letters), random.integers(5, 300 * (i + 1))))
            (tmp_path / name / f"{number}.txt").write_text(text)
    config.data.source, config.data.text_separator = "text", ""
    config.data.sources = {
        name: {"files": (str(tmp_path / name / "*.txt"),), "weight": weight} for name, weight in WEIGHTS.items()
    }
    config.data.seq_len, config.data.val_fraction, config.data.prefetch = 48, 0.2, 2
    config.train.batch_size, config.train.eval_batches = 8, 2
    return config


def tokens_by_source(inputs):
    return np.array([np.isin(inputs, list(letters.encode())).sum() for letters in LETTERS.values()])


def take(iterator, count):
    found = [next(iterator) for _ in range(count)]
    iterator.close()
    return found


def test_realised_shares_of_tokens_are_the_weights_and_every_batch_is_mixed(mixed_config):
    pipeline = make_pipeline(mixed_config)
    batches = np.array([tokens_by_source(batch["inputs"]) for batch in take(pipeline.train(), 1000)])
    wanted = np.array(list(WEIGHTS.values())) / sum(WEIGHTS.values())
    realised = batches.sum(0) / batches.sum()
    assert np.abs(realised - wanted).max() < 0.005
    assert (np.abs(batches / (8 * 48) - wanted) < 2 / 8).all()
    epochs = pipeline.epochs(1000)
    for name, share in zip(WEIGHTS, wanted, strict=True):
        passes = 1000 * 8 * 48 * share / pipeline.parts[name].pipeline.stats["train"].tokens
        assert epochs[name] == pytest.approx(passes, rel=0.05)
    assert metrics.epochs_row(epochs).keys() == {f"data/epochs/{name}" for name in WEIGHTS}
    assert metrics.epochs_row({"": 2.5}) == {"data/epochs": 2.5}


def test_every_row_of_a_source_comes_once_and_in_order():
    schedule = Schedule.of({"a": 0.7, "b": 0.01, "c": 0.29})
    places = [schedule.place(row) for row in range(3000)]
    for source, count in enumerate(schedule.counts(3000)):
        assert [number for found, number in places if found == source] == list(range(count))
    assert sum(schedule.counts(10**15 + 1)) == 10**15 + 1


@pytest.mark.parametrize("large", [0, 7, 20])
def test_many_small_sources_are_in_every_batch_beside_a_large_one(large):
    """Wherever its name stands: what the shares of the small ones are rounded by does not gather in it."""
    weights = {str(i): 80.0 if i == large else 1.0 for i in range(21)}
    schedule = Schedule.of(weights)
    counts = np.diff([schedule.counts(64 * batch) for batch in range(101)], axis=0)
    assert (counts.sum(1) == 64).all()
    assert np.abs(counts[:, large] - 64 * 0.8).max() < 1
    assert np.abs(np.delete(counts, large, 1) - 0.64).max() < 2
    assert schedule.layout == ([] if large == 0 else ["largest first"])


def test_resume_is_bit_equal_also_with_another_number_of_processes(mixed_config):
    pipeline = make_pipeline(mixed_config)
    whole = take(pipeline.train(), 7)
    iterator = make_pipeline(mixed_config, process_index=1, process_count=2).train()
    take_two = [next(iterator) for _ in range(3)]
    chex.assert_trees_all_equal(take_two, [{k: v[4:] for k, v in batch.items()} for batch in whole[:3]])
    state = json.loads(json.dumps(iterator.get_state()))
    iterator.close()
    parts = []
    for index in range(4):
        restored = make_pipeline(mixed_config, process_index=index, process_count=4).train()
        restored.set_state(state)
        parts.append(take(restored, 4))
    for step in range(4):
        joined = {k: np.concatenate([part[step][k] for part in parts]) for k in whole[0]}
        chex.assert_trees_all_equal(joined, whole[3 + step])


def test_the_order_in_which_sources_are_written_does_not_matter_but_weights_do(mixed_config):
    iterator = make_pipeline(mixed_config).train()
    first, state = next(iterator), iterator.get_state()
    iterator.close()
    mixed_config.data.sources = dict(reversed(list(mixed_config.data.sources.items())))
    again = make_pipeline(mixed_config).train()
    again.set_state(state)
    chex.assert_trees_all_equal(take(make_pipeline(mixed_config).train(), 1)[0], first)
    mixed_config.data.sources.web.weight = 4.0
    with pytest.raises(DataError, match="belongs to other data"):
        make_pipeline(mixed_config).train().set_state(state)


def test_one_source_has_the_order_that_it_always_had(text_config):
    digest = hashlib.blake2b(digest_size=8)
    for batch in take(make_pipeline(text_config).train(), 60):
        for name in sorted(batch):
            digest.update(batch[name].tobytes())
    assert digest.hexdigest() == "a508910132e7a2ee"


def test_each_source_has_validation_of_its_own(mixed_config):
    pipeline = make_pipeline(mixed_config)
    for i, (name, part) in enumerate((name, pipeline.parts[name]) for name in WEIGHTS):
        (first, *_) = part.pipeline.validation()
        counts = tokens_by_source(first["inputs"])
        assert counts[i] == counts.sum() > 0 and part.share == pytest.approx(WEIGHTS[name] / 9.5)
    with pytest.raises(DataError, match="one for each source"):
        pipeline.validation()


def test_held_out_documents_to_score_are_of_all_sources_by_turns(mixed_config):
    tokenizer = make_pipeline(mixed_config).tokenizer
    found = held_out_documents(mixed_config, (), tokenizer, 10**6).documents
    counts = np.array([tokens_by_source(document) for document in found])
    assert ((counts > 0).sum(1) == 1).all() and [int(c.argmax()) for c in counts[:6]] == [2, 1, 0, 2, 1, 0]
    parts = make_pipeline(mixed_config).parts.values()
    assert len(found) == sum(part.pipeline.stats["validation"].documents for part in parts)


def test_the_total_validation_loss_weighs_sources_as_training_does():
    sums = {"web": (200.0, 100.0, 400.0), "code": (30.0, 10.0, 20.0)}
    row = metrics.mixed_validation_row(sums, {"web": 0.25, "code": 0.75})
    assert row["val/loss"] == pytest.approx(0.25 * 2 + 0.75 * 3) and row["val/perplexity"] == np.exp(row["val/loss"])
    assert row["val/bits_per_byte"] == pytest.approx(2.75 / np.log(2) / (0.25 * 4 + 0.75 * 2))
    assert (row["val/loss/web"], row["val/loss/code"]) == (2.0, 3.0)
    assert row["val/bits_per_byte/code"] == pytest.approx(30 / np.log(2) / 20)


def test_a_tokenizer_is_trained_on_documents_of_all_sources(mixed_config):
    class Source:
        def __init__(self, text, count):
            self.name, self.text, self.count = text, text, count

        def documents(self):
            return iter([self.text] * self.count)

    mixed = MixedDocuments({"a": Source("aaa", 100), "b": Source("bbbbbbb", 20)}, {"a": 3.0, "b": 1.0})
    documents = list(mixed.documents())
    assert documents.count("aaa") == 100 and documents.count("bbbbbbb") == 20
    characters = {text: documents[:40].count(text) * (len(text) + 1) for text in ("aaa", "bbbbbbb")}
    assert characters["aaa"] == pytest.approx(3 * characters["bbbbbbb"], abs=24)
    mixed_config.data.tokenizer, mixed_config.data.bpe_vocab_size = "bpe", 280
    tokenizer = make_pipeline(mixed_config).tokenizer
    merged = [tokenizer.decode([i]) for i in range(257, 280)]
    for letters in LETTERS.values():
        assert any(set(piece) <= set(letters) for piece in merged if piece)


def test_fields_of_sources_are_set_on_the_command_line_and_take_the_others_from_the_config():
    config = default_config()
    config.data.source, config.data.hf_split = "hf", "all"
    config.data.sources = {"web": {"hf_path": "x", "weight": 1}}
    flags = ("web.weight=0.5", "code.source=text", "code.files=a.txt", "code.files=b.txt")
    assert override(config, [f"data.sources.{flag}" for flag in flags]) == []
    alone = source_configs(config)
    assert list(alone) == ["code", "web"] and config.data.sources.web.weight == 0.5
    assert (alone["code"].data.source, alone["code"].data.files) == ("text", ("a.txt", "b.txt"))
    assert (alone["web"].data.source, alone["web"].data.hf_path, alone["web"].data.hf_split) == ("hf", "x", "all")
    assert validate(config) == []
    restored = config_from_dict(env.plain_config(config))
    assert restored.data.sources == config.data.sources and restored.is_locked
    (problem,) = override(config, ["data.sources.web.wieght=3"])
    assert problem.rule == "R056" and "config.data.sources.web.wieght" in problem.message
    (problem,) = override(config, ["data.sources=3"])
    assert "config.data.sources.NAME.weight" in problem.fix


@pytest.mark.parametrize(
    ("fields", "rule", "message"),
    [
        ({"weight": 0.0}, "R003", "config.data.sources.web.weight=0.0"),
        ({"weight": "much"}, "R057", "config.data.sources.web.weight='much'"),
        ({"tokenizer": "byte"}, "R056", "config.data.sources.web.tokenizer: no field of a source"),
        ({"source": "synthetic"}, "R001", "config.data.sources.web.source='synthetic': cannot be mixed"),
        ({"source": "text"}, "R007", "config.data.sources.web.files=(): source text has nothing to read"),
        ({"max_documents": -1}, "R002", "config.data.sources.web.max_documents=-1"),
        ({"weight": config_dict.placeholder(float, required=True)}, "R057", "config.data.sources.web.weight="),
    ],
)
def test_mistakes_in_a_source_name_it(fields, rule, message):
    config = default_config()
    config.data.sources = {"web": fields}
    (problem,) = validate(config)
    assert problem.rule == rule and message in problem.message and problem.severity == "error"


def test_names_that_cannot_be_part_of_a_metric_and_streams_are_refused():
    config = default_config()
    config.data.sources = {"a/b": {"weight": 1.0}}
    (problem,) = validate(config)
    assert "a/b" in problem.message and problem.rule == "R057"
    config.data.sources = {"web": {"source": "hf", "hf_path": "x"}}
    config.data.hf_streaming = True
    (problem,) = validate(config)
    assert "a stream cannot be mixed" in problem.message
    config.data.source, config.data.hf_streaming = "synthetic", False
    (problem,) = validate(config)
    assert problem.message.startswith("config.data.source='synthetic' with config.data.sources")
    with pytest.raises(DataError, match="config.data.source='synthetic': with config.data.sources"):
        make_pipeline(config)
    config.data.sources, config.data.hf_streaming = {}, True
    config.data.source, config.data.hf_path, config.data.packing_method = "hf", "x", "best_fit"
    (problem,) = validate(config)
    assert "packing_method='best_fit': streams" in problem.message


def test_sources_are_mixed_in_their_shares_with_best_fit_too(mixed_config):
    mixed_config.data.packing_method = "best_fit"
    pipeline = make_pipeline(mixed_config)
    counts = sum(tokens_by_source(batch["inputs"]) for batch in take(pipeline.train(), 200))
    assert np.abs(counts / counts.sum() - np.array([5, 3, 1.5]) / 9.5).max() < 0.01
    assert pipeline.epochs(200)["web"] > 5


def test_a_source_that_cannot_be_used_is_named(mixed_config, tmp_path):
    mixed_config.data.sources.code.files = (str(tmp_path / "nothing*"),)
    with pytest.raises(DataError, match=r"config.data.sources.code: .*matches no file"):
        make_pipeline(mixed_config)
    mixed_config.data.sources.code.files = (str(tmp_path / "one.txt"),)
    (tmp_path / "one.txt").write_text("one document " * 1000)
    part = make_pipeline(mixed_config).parts["code"]
    with pytest.raises(DataError, match="^config.data.sources.code: validation split: no document is held out"):
        part.pipeline.validation()
    mixed_config.data.sources.code.weight = -1.0
    with pytest.raises(DataError, match=r"config.data.sources.code.weight=-1.0.*positive"):
        make_pipeline(mixed_config)


def test_preflight_tells_how_often_a_small_source_is_repeated(mixed_config):
    mixed_config.train.steps = 2000
    report = data_check.examine_local(mixed_config)
    repeated = [p.message for p in report.problems if p.rule == "R034"]
    assert len(repeated) == 3 and repeated[0].startswith("config.data.sources.books: 121,263 tokens of training are")
    facts = dict(report.facts)
    assert "52.63% of all" in facts["web: passes over them"]
    assert facts["code: documents in both splits"] == "0"


def test_a_tokenizer_is_not_trained_on_what_one_source_holds_out_by_hash(mixed_config, tmp_path, monkeypatch):
    """The others hold out files of their own, which config.data names."""
    data, seen = mixed_config.data, []
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "0.txt").write_text("xyz" * 100)
    data.files, data.val_files = data.sources["code"].files, (str(tmp_path / "held" / "*.txt"),)
    with data.sources.unlocked():
        data.sources["web"].val_files = ()
    data.tokenizer, data.bpe_vocab_size = "bpe", 260
    load = tokenizers.load_tokenizer

    def spy(config, documents, **kwargs):
        seen.extend(documents)
        return load(config, iter(seen), **kwargs)

    monkeypatch.setattr(tokenizers, "load_tokenizer", spy)
    pipeline = make_pipeline(mixed_config)
    stats = pipeline.parts["web"].pipeline.stats
    assert stats["validation"].documents > 0
    assert sum(text[0] in LETTERS["web"] for text in seen) == stats["train"].documents
    assert sum(text[0] in LETTERS["code"] for text in seen) == 40
