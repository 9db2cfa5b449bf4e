"""A conversion computes what the checkpoint computes, or says why not, with something to do about it."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import nsa_jax
from nsa_jax import convert, export, generate
from nsa_jax.data.tokenizers import load_tokenizer
from nsa_jax.hub.convert import import_dense
from nsa_jax.hub.export import exported_config
from nsa_jax.hub.export_files import LoadError

from .checkpoints import VOCAB, describe, float32, letters, run, tokens, write
from .test_convert import SLIDING

SLIDING_MISTRAL = {"sliding_window": 16}


def weights(directory: Path, **changes: np.ndarray) -> None:
    """Changes arrays of a checkpoint."""
    path = directory / "model.safetensors"
    save_file(load_file(path) | changes, path, metadata={"format": "pt"})


# Windows


@pytest.mark.parametrize("window", [8, 64])
@pytest.mark.parametrize(("family", "changes", "pattern"), SLIDING)
def test_a_window_of_another_width_is_refused_where_rows_are_longer(tmp_path, family, changes, pattern, window):
    write(tmp_path, describe(family, **changes))

    def edit(config):
        float32(config)
        config.model.nsa.window = window

    least = min(window, 16)
    with pytest.raises(LoadError, match=f"window={window} would change.* read 16 tokens.* rows have 128") as caught:
        import_dense(tmp_path, attention="window", edit=edit)
    assert f"rows of at most {least} tokens" in str(caught.value)
    row = tokens(least)
    same = run(import_dense(tmp_path, attention="window", edit=edit, seq_len=least)[0], row)
    np.testing.assert_array_equal(same, run(import_dense(tmp_path, attention="window", edit=float32)[0], row))


def test_a_window_where_the_checkpoint_has_none_is_refused_where_rows_are_longer(tmp_path, capsys):
    write(tmp_path / "in", describe("llama2", max_position_embeddings=600))
    letters(tmp_path / "in")
    arguments = [str(tmp_path / "in"), str(tmp_path / "out"), "--attention=window"]
    assert convert.main(arguments) == 2
    error = capsys.readouterr().err
    assert "its layers read whole rows, which have 600 tokens, and the window has 512" in error
    assert "attention='dense'" in error and not (tmp_path / "out").exists()
    assert convert.main([*arguments, "--seq-len=512"]) == 0
    config = import_dense(tmp_path / "in", layer_pattern=("window", "nsa"))[1]  # which was asked for by name
    assert config.model.layer_pattern == ("window", "nsa")


@pytest.mark.parametrize(
    ("family", "changes", "window"),
    [
        ("mistral", {}, 4096),
        ("qwen2", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, 4096),
        ("qwen2", {"use_sliding_window": False, "sliding_window": None}, 0),
    ],
)
def test_a_sliding_window_that_is_not_named_is_transformers_default(tmp_path, family, changes, window):
    described = describe(family, max_position_embeddings=8192, **changes)
    assert "sliding_window" not in described
    write(tmp_path, described)
    if window:
        with pytest.raises(LoadError, match="read 4096 tokens, and rows have 8192"):
            import_dense(tmp_path)
        assert import_dense(tmp_path, attention="window")[1].model.nsa.window == window
    (tmp_path / "config.json").write_text(json.dumps(described | {"sliding_window": None}))
    assert import_dense(tmp_path)[1].model.attention == "dense"  # null: none


@pytest.mark.parametrize(
    ("options", "named"), [(["--attention=window"], ["window"]), (["--seq-len=16"], ["dense", "nsa"])]
)
def test_losses_are_reported_for_checkpoints_with_a_sliding_window(tmp_path, capsys, options, named):
    write(tmp_path / "in", describe("mistral", **SLIDING_MISTRAL))
    letters(tmp_path / "in")
    (tmp_path / "text.txt").write_text("Hello there " * 20)
    text = ["--text", str(tmp_path / "text.txt")]
    assert convert.main([str(tmp_path / "in"), str(tmp_path / "out"), *options, *text]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "loss at step 0" in line]
    assert [line.split(":")[0].removeprefix("loss at step 0, ") for line in lines] == named


def test_text_that_is_not_there_is_named_before_a_model_is_written(tmp_path, capsys):
    write(tmp_path / "in", describe("llama2"))
    letters(tmp_path / "in")
    assert convert.main([str(tmp_path / "in"), str(tmp_path / "out"), "--text", str(tmp_path / "none.txt")]) == 2
    assert "none.txt" in capsys.readouterr().err and not (tmp_path / "out").exists()


# Arrays


def test_another_head_beside_tied_embeddings_is_kept_as_transformers_keeps_it(tmp_path, caplog):
    described = describe("smollm2")
    arrays = write(tmp_path, described)
    weights(tmp_path, **{"lm_head.weight": arrays["model.embed_tokens.weight"]})
    tied, config = import_dense(tmp_path, edit=float32)
    assert config.model.tie_embeddings and not caplog.text
    weights(tmp_path, **{"lm_head.weight": arrays["model.embed_tokens.weight"][::-1].copy()})
    model, config = import_dense(tmp_path, edit=float32)
    assert not config.model.tie_embeddings and "its lm_head.weight is not its embedding" in caplog.text
    np.testing.assert_allclose(run(model, tokens(20)), run(tied, tokens(20))[:, ::-1], rtol=1e-5, atol=1e-4)
    weights(tmp_path, **{"lm_head.weight": np.ones((VOCAB + 1, 32), np.float32)})
    with pytest.raises(LoadError, match="lm_head.weight is .65, 32."):
        import_dense(tmp_path)


def test_numbers_that_are_not_finite_are_named(tmp_path, caplog):
    arrays = write(tmp_path, describe("llama2"))
    import_dense(tmp_path, dtype="bfloat16")
    assert not caplog.text
    norm, embedding = arrays["model.norm.weight"], arrays["model.embed_tokens.weight"]
    norm[3], embedding[1, 1] = np.nan, 3.4e38  # the latter is infinite in bfloat16
    weights(tmp_path, **{"model.norm.weight": norm, "model.embed_tokens.weight": embedding})
    import_dense(tmp_path)
    assert "model.norm.weight: NaN or infinity as float32" in caplog.text
    import_dense(tmp_path, dtype="bfloat16")
    assert "model.embed_tokens.weight, model.norm.weight: NaN or infinity as bfloat16" in caplog.text


def test_swish_is_silu(tmp_path):
    write(tmp_path, describe("llama2"))
    want = run(import_dense(tmp_path, edit=float32)[0], tokens(20))
    write(tmp_path, describe("llama2", hidden_act="swish"))
    np.testing.assert_array_equal(run(import_dense(tmp_path, edit=float32)[0], tokens(20)), want)


# What to do


def test_an_adapter_is_refused_with_the_way_to_a_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8}))
    (tmp_path / "adapter_model.safetensors").touch()
    (tmp_path / "training_args.bin").touch()
    with pytest.raises(LoadError, match="holds an adapter.*merge_and_unload"):
        import_dense(tmp_path)
    write(tmp_path, describe("llama2"))  # its base model lies there, too: the adapter would be left out without a word
    with pytest.raises(LoadError, match="holds an adapter"):
        import_dense(tmp_path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("consolidated.safetensors", "maker's own format.*layout of transformers"),
        ("consolidated.00.pth", "maker's own format"),
        ("model.pt", "PyTorch's format.* save_pretrained"),
    ],
)
def test_weights_of_another_format_are_refused_with_the_way_to_others(tmp_path, name, words):
    write(tmp_path, describe("llama2"))
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    with pytest.raises(LoadError, match=words):
        import_dense(tmp_path)


def test_what_was_written_here_is_not_sent_in_circles(tmp_path, capsys):
    write(tmp_path / "in", describe("llama2"))
    letters(tmp_path / "in")
    here, there = str(tmp_path / "here"), str(tmp_path / "there")
    assert convert.main([str(tmp_path / "in"), here]) == 0
    assert export.main([here, there, "--format=transformers"]) == 0
    capsys.readouterr()
    assert convert.main([here, str(tmp_path / "again")]) == 2
    assert "is a model of nsa_jax already, which load, generate, evaluate" in capsys.readouterr().err
    for main, arguments in (
        (convert.main, [there, str(tmp_path / "again")]),
        (generate.main, [there]),
        (export.main, [there, str(tmp_path / "again")]),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert "exported for transformers, which is not read back" in error and "import it first" not in error
    with pytest.raises(LoadError, match="exported for transformers, which is not read back"):  # configs/extend.py
        exported_config(there)


def test_a_tokenizers_end_can_be_named(tmp_path, capsys):
    write(tmp_path / "in", describe("llama2"))
    letters(tmp_path / "in")
    made = (tmp_path / "in" / "tokenizer.json").read_text().replace("</s>", "<fin>")
    (tmp_path / "in" / "tokenizer.json").write_text(made)
    (tmp_path / "in" / "tokenizer_config.json").unlink()
    arguments = [str(tmp_path / "in"), str(tmp_path / "out")]
    assert convert.main(arguments) == 2
    assert "set config.data.tokenizer_eos" in capsys.readouterr().err
    assert convert.main([*arguments, "--config.data.tokenizer_eos=<fin>"]) == 0
    assert nsa_jax.load(tmp_path / "out")[1].eos_token == "<fin>"


def test_too_many_ids_of_the_checkpoints_own_tokenizer_need_rows(tmp_path, capsys):
    write(tmp_path / "in", describe("llama2"))
    letters(tmp_path / "in", size=VOCAB + 5)
    own = str(tmp_path / "in" / "tokenizer.json")
    for given, words in (([], "resize_token_embeddings(69)"), ([f"--tokenizer={own}"], "give the tokenizer.json of")):
        assert convert.main([str(tmp_path / "in"), str(tmp_path / "out"), *given]) == 2
        assert words in capsys.readouterr().err


# Generation


IDS = {"bos_token_id": 3, "eos_token_id": [0, 5], "pad_token_id": 7}


def published(directory: Path, generation: dict | None, **settings) -> None:
    """A checkpoint with what its maker says about generation, and a tokenizer that begins texts with "3"."""
    write(directory, describe("qwen3", bos_token_id=3, eos_token_id=5, pad_token_id=-1), dtype=jnp.bfloat16)
    letters(directory)
    path = directory / "tokenizer.json"
    prefix = {"SpecialToken": {"id": "3", "type_id": 0}}
    text = [{"Sequence": {"id": "A", "type_id": 0}}]
    special = {"3": {"id": "3", "ids": [3], "tokens": ["3"]}}
    template = {
        "type": "TemplateProcessing",
        "single": [prefix, *text],
        "pair": [prefix, *text],
        "special_tokens": special,
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | {"post_processor": template}))
    if settings:
        path = directory / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))


def exported(tmp_path: Path, kind: str) -> dict[str, dict]:
    """The JSON files of a folder for transformers, made by way of an export and of another export of that."""
    assert convert.main([str(tmp_path / "in"), str(tmp_path / "here"), f"--attention={kind}"]) == 0
    assert export.main([str(tmp_path / "here"), str(tmp_path / "again")]) == 0
    assert export.main([str(tmp_path / "again"), str(tmp_path / "out"), "--format=transformers"]) == 0
    return {path.name: json.loads(path.read_text()) for path in (tmp_path / "out").glob("*config.json")}


@pytest.mark.parametrize("kind", ["dense", "nsa"])
def test_what_a_checkpoint_says_about_generation_is_written_back(tmp_path, kind):
    given = IDS | {"do_sample": True, "temperature": 0.6, "top_p": 0.9}
    published(tmp_path / "in", given | {"transformers_version": "4.40.0"}, pad_token="7", bos_token="3")
    found = exported(tmp_path, kind)
    assert found["generation_config.json"] == given
    # A run's tokenizer is made of the config, and has the settings too.
    _, tokenizer, config = nsa_jax.load(tmp_path / "here")
    assert load_tokenizer(config).settings == tokenizer.settings
    assert {name: found["config.json"][name] for name in IDS} == IDS
    assert found["tokenizer_config.json"]["pad_token"] == "7"
    assert "generation_config" not in found["tokenizer_config.json"]


def test_ids_of_config_json_count_where_there_is_no_generation_config(tmp_path):
    published(tmp_path / "in", None)
    found = exported(tmp_path, "dense")
    # The tokenizer's own end is one, too; a pad of -1 stands for none, and then the end pads.
    assert found["generation_config.json"] == {"bos_token_id": 3, "eos_token_id": [0, 5], "pad_token_id": 0}
    assert found["tokenizer_config.json"]["pad_token"] == "</s>"


def test_damaged_generation_settings_are_named(tmp_path, capsys):
    published(tmp_path / "in", {})
    (tmp_path / "in" / "generation_config.json").write_text("[")
    assert convert.main([str(tmp_path / "in"), str(tmp_path / "out")]) == 2
    assert "generation_config.json: is not JSON" in capsys.readouterr().err


def test_text_ends_at_every_end_of_an_imported_model(tmp_path):
    published(tmp_path / "in", IDS)
    assert convert.main([str(tmp_path / "in"), str(tmp_path / "out"), "--attention=dense"]) == 0
    model, tokenizer, _ = nsa_jax.load(tmp_path / "out")
    sampling = nsa_jax.sampling.Sampling(seed=1, temperature=3.0)
    prompts = [[index] for index in range(8, 40)]
    found = generate.Generator(model, tokenizer)(prompts, max_tokens=60, sampling=sampling)
    assert {row.tokens[-1] for row in found if row.finish == "end"} == {0, 5}
    assert not any({0, 5} & set(row.tokens[:-1]) for row in found)


@pytest.mark.parametrize("prefix", [(3,), ()])
def test_prompts_of_imported_models_begin_as_in_transformers(tmp_path, monkeypatch, prefix):
    published(tmp_path / "in", IDS)
    if not prefix:
        letters(tmp_path / "in")  # puts nothing before a text
    out = str(tmp_path / "out")
    (tmp_path / "text.txt").write_text("4567" * 9)
    scored = []
    monkeypatch.setattr(
        convert, "score_documents", lambda _, documents, *__, **___: scored.append(documents[0][:2]) or {"loss": 0.0}
    )
    assert convert.main([str(tmp_path / "in"), out, "--attention=dense", "--text", str(tmp_path / "text.txt")]) == 0
    assert scored[0].tolist() == [*prefix, 4, 5][:2]
    seen = []
    original = generate.Generator.prompt_ids
    monkeypatch.setattr(
        generate.Generator, "prompt_ids", lambda self, prompt: seen.append(original(self, prompt)) or seen[-1]
    )
    for options, want in (([], prefix), (["--bos"], prefix), (["--no-bos"], ())):
        assert generate.main([out, "--prompt=45", "--max-tokens=1", "--quiet", *options]) == 0
        assert seen[-1].tolist() == [*want, 4, 5]
    assert generate.Generator(*nsa_jax.load(out)[:2]).prompt_ids("45").tolist()[-2:] == [4, 5]
    assert len(seen[-1]) == 2  # from Python, only where it is asked for
