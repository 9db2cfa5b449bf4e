"""Loading a run and generating from it."""

from __future__ import annotations

import dataclasses
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import nsa_jax
from nsa_jax import generate, nn
from nsa_jax.command_line import EXIT_USAGE
from nsa_jax.data.tokenizers import ByteTokenizer
from nsa_jax.generator import Generator, PromptError, _TextStream
from nsa_jax.loading import LoadError
from nsa_jax.ops.rope import RopeScaling
from nsa_jax.sampling import Sampling, filtered_logits

from .runs import small_config, write_run


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    config = small_config()
    path = tmp_path_factory.mktemp("runs") / "small"
    return path, write_run(path, config), config


def test_load_reads_the_newest_a_numbered_and_the_best_step(workdir):
    path, params, config = workdir
    for name, factor in ((str(path), 1.5), (f"{path}@1", 1.0), (f"{path}@2", 1.5), (f"{path}@best", 1.0)):
        model, tokenizer, loaded = nsa_jax.load(name)
        assert tokenizer.fingerprint == ByteTokenizer.fingerprint and loaded == config
        got = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        jax.tree.map(lambda a, b, f=factor: np.testing.assert_array_equal(a, b * f), got, params)


def test_load_says_what_is_missing(workdir, tmp_path):
    for name, words in (
        (f"{workdir[0]}@7", r"no such step; it has \[1, 2\]"),
        (str(tmp_path / "nowhere"), "is no directory"),
        (str(tmp_path), "neither checkpoints/ nor config.json"),
    ):
        with pytest.raises(LoadError, match=words):
            nsa_jax.load(name)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(LoadError, match="import it first"):
        nsa_jax.load(tmp_path)


def test_greedy_is_the_argmax_of_the_full_forward(model, generator):
    """Two prompts of different lengths in one batch, each continued as the forward pass says."""
    prompts = ["def f(x):\n    return", "im"]
    completions = generator(prompts, max_tokens=40, sampling=Sampling(temperature=0))
    forward = jax.jit(model)
    for prompt, completion in zip(prompts, completions, strict=True):
        row = np.zeros((1, 96), np.int32)
        ids = [*prompt.encode()]
        for token in completion.tokens:
            row[0, : len(ids)] = ids
            assert token == int(np.argmax(np.asarray(forward(row))[0, len(ids) - 1, :257]))
            ids.append(token)
        assert completion.finish in ("length", "end") and len(completion.tokens) <= 40


def test_samples_depend_on_seed_and_row_alone(generator):
    def texts(seed, num_samples):
        out = generator(["a"], max_tokens=20, sampling=Sampling(seed=seed), num_samples=num_samples)
        return [c.tokens for c in out]

    two = texts(1, 2)
    assert two == texts(1, 2)
    assert two[0] == texts(1, 1)[0]
    assert two[0] != two[1]
    assert two != texts(2, 2)


def test_logits_that_are_nan_are_no_text(model):
    broken = nnx.clone(model)
    broken.norm.scale[...] = broken.norm.scale[...] * jnp.nan
    for temperature in (0.0, 1.0):
        with pytest.raises(FloatingPointError, match="logits of row 0 are NaN: check its weights"):
            Generator(broken, ByteTokenizer())(["a"], sampling=Sampling(temperature=temperature))


def test_tokens_per_dispatch_changes_no_token(model, generator):
    """Rows end at a stop string, at max_tokens, and where the context is full; the lists read are the same too."""
    prompts = ["x", "y" * 91, "def "]
    settings = dict(max_tokens=21, sampling=Sampling(seed=3), return_block_indices=True)
    stop = [generator(["x"], **settings)[0].text[4:8]]
    want = generator(prompts, stop=stop, **settings)
    assert [c.finish for c in want] == ["stop", "context", "length"] and len(want[2].tokens) == 21
    for count in (1, 3):
        other = Generator(model, ByteTokenizer(), context=96, chunk=32, tokens_per_dispatch=count)
        for a, b in zip(other(prompts, stop=stop, **settings), want, strict=True):
            assert (a.tokens, a.text, a.finish) == (b.tokens, b.text, b.finish)
            np.testing.assert_array_equal(a.block_indices, b.block_indices)
    with pytest.raises(ValueError, match="tokens_per_dispatch=0: must be a whole number of at least 1"):
        Generator(model, ByteTokenizer(), tokens_per_dispatch=0)


def test_filters_keep_what_they_promise():
    probs = np.asarray([[0.5, 0.2, 0.15, 0.1, 0.05]])
    logits = jnp.asarray(np.log(probs), jnp.float32)
    none = jnp.zeros((1, 5), bool)

    def kept(vocab=5, **fields):
        out = filtered_logits(logits, none, Sampling(**fields).arrays(), vocab)
        return np.flatnonzero(np.isfinite(np.asarray(out)[0])).tolist()

    assert kept() == [0, 1, 2, 3, 4]
    assert kept(vocab=3) == [0, 1, 2]
    assert kept(top_k=2) == [0, 1]
    assert kept(top_k=99) == [0, 1, 2, 3, 4]
    assert kept(top_p=0.5) == [0] and kept(top_p=0.51) == [0, 1] and kept(top_p=0.86) == [0, 1, 2, 3]
    assert kept(min_p=0.25) == [0, 1, 2]
    rare = filtered_logits(jnp.asarray([[0.0, -20.0, -30.0]]), none[:, :3], Sampling(top_p=1.0).arrays(), 3)
    assert np.isfinite(rare).all()  # the first two probabilities add up to 1 in float32
    assert kept(top_k=3, top_p=0.7) == [0, 1]  # of the three, 0.59 + 0.24 reaches 0.7
    assert kept(top_p=0.6, temperature=0.5) == [0]  # 0.77 after sharpening
    seen = none.at[0, 0].set(True)
    out = filtered_logits(logits, seen, Sampling(repetition_penalty=4.0).arrays(), 5)
    np.testing.assert_allclose(np.asarray(out)[0, 0] - np.asarray(out)[0, 1], 4 * np.log(0.5) - np.log(0.2), rtol=1e-6)
    assert kept(top_p=1e-50) == kept(temperature=1e-38) == [0]  # 0 and infinite in float32
    infinite = filtered_logits(jnp.asarray([[jnp.inf, 1.0, 2.0]]), none[:, :3], Sampling(top_k=1).arrays(), 3)
    assert np.flatnonzero(np.isfinite(np.asarray(infinite)[0])).tolist() == [0]
    for penalty in (3e38, 2e-38):  # products of 3 and these are infinite, or nearly 0
        extreme = Sampling(repetition_penalty=penalty).arrays()
        for values in ([-3.0, -2.0, -5.0], [3.0, 2.0, 5.0]):
            out = filtered_logits(jnp.asarray([values]), ~none[:, :3], extreme, 2)
            assert np.asarray(out).max() == 0 and np.isneginf(out[0, 2])
    assert kept(vocab=9) == [0, 1, 2, 3, 4]  # a tokenizer's, larger than the model's


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(temperature=-1), "temperature"),
        (dict(top_p=0), "top_p"),
        (dict(min_p=1), "min_p"),
        (dict(top_k=-1), "top_k"),
        (dict(repetition_penalty=0), "repetition_penalty"),
        (dict(seed=-1), "seed"),
        (dict(seed=1.5), "seed"),
    ],
)
def test_impossible_settings_are_named(fields, words):
    with pytest.raises(ValueError, match=f"{words}="):
        Sampling(**fields)


def test_every_bit_of_a_seed_counts():
    keys = [jax.random.key_data(Sampling(seed=seed).key()) for seed in (5, 2**32 + 5, 2**64 + 5, 2**32)]
    np.testing.assert_array_equal(keys[0], jax.random.key_data(jax.random.key(5)))
    assert len({tuple(np.asarray(key).tolist()) for key in keys}) == 4


def stream(text, stop=()):
    """Pieces given out for each byte of text, the pieces of `finish`, and the stream."""
    pieces = []
    out = _TextStream(ByteTokenizer(), stop, pieces.append)
    per_token = []
    for byte in text if isinstance(text, bytes) else text.encode():
        pieces.clear()
        out.add(byte)
        per_token.append("".join(pieces))
        if out.stopped:
            break
    pieces.clear()
    out.finish()
    return per_token, "".join(pieces), out


def test_streaming_gives_whole_characters_and_loses_none():
    text = "añ→😀z\n" * 3
    pieces, rest, out = stream(text)
    assert "".join(pieces) + rest == out.text == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces[:4] == ["a", "", "ñ", ""]
    assert stream(b"ab\xf0\x9f")[2].text == "ab\ufffd"  # cut inside a character


def test_stop_strings_end_the_text_and_are_never_shown():
    pieces, rest, out = stream("one\n\ntwo", ["\n\n", "zzz"])
    assert out.stopped and out.text == "one" and rest == "" and pieces == ["o", "n", "e", "", ""]
    _, rest, out = stream("one\n", ["\n\n"])
    assert not out.stopped and rest == "\n" and out.text == "one\n"
    assert stream("aab", ["ab"])[2].text == "a"


def test_a_stop_string_ends_its_row_only(generator):
    plain = generator(["x"], max_tokens=30, sampling=Sampling(seed=3), num_samples=2)
    pairs = [plain[0].text[at : at + 2] for at in range(5, 20)]
    letters = next(pair for pair in pairs if pair not in plain[1].text)
    stopped = generator(["x"], max_tokens=30, sampling=Sampling(seed=3), num_samples=2, stop=[letters])
    assert stopped[0].finish == "stop" and stopped[0].text == plain[0].text[: plain[0].text.index(letters)]
    assert stopped[1].tokens == plain[1].tokens


def test_a_prompt_of_several_samples_is_counted_once(generator):
    completions = generator(["abc", "x"], max_tokens=2, num_samples=3)
    assert generator.stats.prompt_tokens == 4
    assert generator.stats.new_tokens == sum(len(completion.tokens) for completion in completions)


def test_a_long_and_a_short_prompt_share_a_cache_of_the_context(model):
    """The long one has room for a few tokens, the short one for all; dynamic scaling refuses a longer cache."""
    config = dataclasses.replace(model.config, rope_scaling=RopeScaling("dynamic", 2.0, 256))
    generator = Generator(nn.Transformer(config, rngs=nnx.Rngs(0)), ByteTokenizer(), context=256, chunk=32)
    prompts = ["y" * 250, "x"]
    greedy = dict(max_tokens=60, sampling=Sampling(temperature=0.0))
    together = generator(prompts, **greedy)
    alone = [generator([prompt], **greedy)[0] for prompt in prompts]
    assert [c.tokens for c in together] == [c.tokens for c in alone]
    assert together[0].finish == "context" and len(together[1].tokens) > 6


def test_one_compiled_step_for_all_lengths_of_a_bucket(model):
    generator = Generator(model, ByteTokenizer(), context=250, chunk=32)
    for prompt in ("a", "b" * 70, "c" * 200):
        completion = generator([prompt], max_tokens=12, sampling=Sampling(temperature=0.5, top_k=7, seed=len(prompt)))[
            0
        ]
        assert len(completion.tokens) == 12 or completion.finish == "end"
    assert generator._advance._cache_size() == 1
    stats = generator.stats
    assert stats.prompt_tokens == 200 and stats.first_token_s > 0 and stats.tokens_per_s > 0


def test_prompts_that_do_not_fit_or_are_not_text(generator, caplog):
    with pytest.raises(PromptError, match="96 tokens and the context holds 96"):
        generator(["x" * 96])
    with pytest.raises(PromptError, match="no tokens"):
        generator([[]])
    for bad, words in (
        ([-1], "token id -1"),
        ([3, 10**6], "token id 1000000"),
        ([1.7], "whole numbers"),
        ([[1]], "list"),
        ([[]], "list"),
        ([[1], [2, 3]], "list"),
    ):
        with pytest.raises(PromptError, match=words):
            generator([bad])
    with pytest.raises(PromptError, match="must be a list of prompts"):
        generator("text")
    for bad in (None, 5):
        with pytest.raises(PromptError, match=f"prompts={bad}: must be a list of prompts"):
            generator(bad)
    with pytest.raises(PromptError, match=r"the prompt 'a\\ud800' is no text: surrogates not allowed"):
        generator(["a\ud800"])
    for bad in ([b"x"], [None], None, 3):
        with pytest.raises(ValueError, match="stop=.*: must be strings"):
            generator(["x"], stop=bad)
    assert len(generator((text for text in "xy"), max_tokens=1)) == 2
    for field in (dict(top_p="0.9"), dict(temperature=None), dict(top_p=np.asarray([0.5, 0.9]))):
        with pytest.raises(ValueError, match=f"{next(iter(field))}=.*: must be a number"):
            Sampling(**field)
    assert Sampling(temperature=np.float32(0.5), top_p=jnp.asarray(0.5)).arrays().temperature == 0.5
    assert generator([]) == []
    for wrong in (dict(max_tokens=0), dict(num_samples=0)):
        with pytest.raises(ValueError, match="=0: must be a whole number of at least 1"):
            generator(["x"], **wrong)
    assert generator(["x" * 95], max_tokens=10)[0].finish in ("context", "end")
    assert len(generator([""], max_tokens=3, sampling=Sampling(temperature=0))[0].tokens) <= 3
    np.testing.assert_array_equal(generator.prompt_ids(b"a\xffb"), [97, 255, 98])
    np.testing.assert_array_equal(generator.prompt_ids(""), [10])
    assert "not UTF-8 (byte 0xff at offset 1)" in caplog.text


def test_command_line(workdir, capsys, tmp_path):
    path = str(workdir[0])
    assert generate.main([path, "--prompt", "def ", "--max-tokens", "12", "--seed", "5"]) == 0
    first = capsys.readouterr()
    assert first.out.startswith("def ") and "tokens/s" in first.err and "first token after" in first.err
    assert generate.main([path, "--prompt", "def ", "--max-tokens", "12", "--seed", "5", "--quiet"]) == 0
    assert "def " + capsys.readouterr().out == first.out
    assert generate.main([path, "--prompt", "def ", "--max-tokens", "9", "--seed", "5"]) == 0
    assert "tokens/s" not in capsys.readouterr().err  # one dispatch, which compiled
    assert generate.main([path, "--prompt", "def ", "--max-tokens", "9", "--seed", "5", "--tokens-per-dispatch=2"]) == 0
    assert "tokens/s" in capsys.readouterr().err
    file = tmp_path / "prompt"
    file.write_bytes(b"def ")
    assert generate.main([path, "--prompt-file", str(file), "--max-tokens", "8", "--num-samples", "2"]) == 0
    assert "--- sample 2 ---" in capsys.readouterr().out
    assert generate.main([path, "--max-tokens", "2"]) == 0
    assert "empty prompt" in capsys.readouterr().err
    for wrong, words in (
        ([path, "--prompt-file", str(tmp_path / "none")], "No such file"),
        ([str(tmp_path)], "neither checkpoints"),
        ([path, "--top-p", "2"], "top_p=2.0"),
        ([path, "--prompt", "x" * 100], "context holds 96"),
    ):
        assert generate.main(wrong) == EXIT_USAGE
        assert words in capsys.readouterr().err


def test_interactive_continues_until_reset(workdir, capsys, monkeypatch):
    lines = iter(["ab", "cd", "/reset", "/help", "/what", "ab", "/quit"])
    seen = []
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    original = Generator.prompt_ids
    monkeypatch.setattr(Generator, "prompt_ids", lambda self, p: seen.append(p) or original(self, p))
    assert generate.main([str(workdir[0]), "--interactive", "--max-tokens", "4", "--greedy"]) == 0
    said = capsys.readouterr().err
    assert "/reset forgets the text so far" in said and "/what is no command; /help lists them" in said
    assert len(seen) == 3  # neither /help nor /what reached the model
    assert seen[0] == seen[2] == "ab" and seen[1].startswith("ab") and seen[1].endswith("cd") and len(seen[1]) > 4


def test_a_text_that_was_stopped_is_continued(workdir, capsys, monkeypatch):
    """Ctrl-C left it on the screen, and the model went on from before it."""
    lines, seen, write = iter(["ab", "cd", "/quit"]), [], generate._write

    def write_and_stop(text):
        write(text)
        if len(seen) == 1 and text != "\n":
            raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    monkeypatch.setattr(generate, "_write", write_and_stop)
    original = Generator.prompt_ids
    monkeypatch.setattr(Generator, "prompt_ids", lambda self, p: seen.append(p) or original(self, p))
    assert generate.main([str(workdir[0]), "--interactive", "--max-tokens=4", "--greedy", "--quiet"]) == 0
    first = capsys.readouterr().out.split("\n")[0]
    assert first and seen[1] == f"ab{first}cd"


def test_lines_that_are_not_utf_8_are_prompts_too(workdir, monkeypatch, capsys):
    """Most locales have Python refuse such a line, which ended the program."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xffb\nc\n"), encoding="utf-8"))
    seen, original = [], Generator.prompt_ids
    monkeypatch.setattr(Generator, "prompt_ids", lambda self, p: seen.append(original(self, p)) or seen[-1])
    assert generate.main([str(workdir[0]), "--interactive", "--max-tokens=2", "--greedy", "--quiet"]) == 0
    assert seen[0].tolist() == [97, 255, 98] and len(seen) == 2 and seen[1].tolist()[:3] == [97, 255, 98]


def test_a_path_is_a_prompt_and_no_command():
    assert [generate._is_command(line) for line in ("/help", "/usr/bin", "/", " /help", "a/b")] == [True] + [False] * 4
