"""The exploration page: its arrays are what the model reads, the command makes it, and a browser shows it."""

import base64
import gzip
import io
import json
import re
import shutil

import numpy as np
import pytest

import nsa_jax
from nsa_jax import inspect
from nsa_jax.data.tokenizers import ByteTokenizer
from nsa_jax.inspect.__main__ import main
from nsa_jax.inspect.exploration import observe
from nsa_jax.inspect.statistics import CANDIDATE, FORCED, FREE, UNREADABLE

from .runs import small_config, write_run
from .test_report_in_browser import BROWSER, Tab
from .test_report_in_browser import browser as browser

TEXT = "".join(f"box {i}: <b>é</b>\n\t" for i in range(10))  # 160 bytes and more: 11 blocks of 16


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs with two checkpoints each, and a text file."""
    root = tmp_path_factory.mktemp("explored")
    for name, seed in (("one", 0), ("two", 1)):
        config = small_config()
        config.seed = seed
        write_run(root / name, config)
    (root / "text.txt").write_text(TEXT)
    return root


@pytest.fixture(scope="module")
def page(runs):
    out = runs / "both.html"
    assert main([str(runs / "one"), str(runs / "two"), "--text", str(runs / "text.txt"), "--html", str(out)]) == 0
    return out


def test_a_view_holds_what_the_model_reads_and_why(runs):
    model, tokenizer, config = nsa_jax.load(runs / "one")
    tokens = np.asarray(tokenizer.encode(TEXT), np.int32)[:152]
    view, found = observe(model, tokens), inspect.capture(model, tokens[None])
    reading = inspect.read_weights(model, tokens[None], [10, 100, 151])
    geometry = model.config.nsa
    block = np.arange(len(tokens)) // geometry.select_block
    for p, t in enumerate((10, 100, 151)):
        own = t // geometry.select_block
        assert (view.kinds[t, own + 1 :] == UNREADABLE).all()
        if own < geometry.num_selected:
            assert (view.kinds[t, : own + 1] == FREE).all() and not view.chosen[:, :, t].any()
        else:
            assert view.kinds[t, : own + 1].tolist() == [FORCED, *[CANDIDATE] * (own - 2), FORCED, FORCED]
        for group in range(2):
            listed = view.chosen[0, group, t] | np.isin(view.kinds[t], (FORCED, FREE))
            lists = found.lists[0, 0, t, group]
            assert np.flatnonzero(listed).tolist() == lists[lists < 10].tolist()
            heads = slice(2 * group, 2 * group + 2)
            parts = reading.branches()[0, 0, p, heads].mean(0)  # [S, 3]
            share = np.stack([parts[block == j].sum(0) for j in range(10)]).T  # [3, J]
            total = share.sum(-1, keepdims=True)
            share = np.where(total > 0, share / np.where(total > 0, total, 1), 0)
            np.testing.assert_allclose((view.weights[0, group, :, t] / 255.0) ** 2, share, atol=4e-3)
            gates = found.gates[0, 0, t, heads].mean(0)
            np.testing.assert_allclose(view.gates[0, group, t] / 255.0, gates, atol=2.1e-3)


def test_the_page_holds_every_checkpoint_of_both_runs(page):
    text = page.read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', text).group(1))
    assert [(view["run"], view["step"]) for view in data["views"]] == [("one", 1), ("one", 2), ("two", 1), ("two", 2)]
    assert "".join(data["strings"]).replace("‥", "") == TEXT  # a character of two bytes is shown once
    blobs = re.findall(r'id="view-\d">(.*?)</script>', text)
    sizes = {len(gzip.decompress(base64.b64decode(blob))) for blob in blobs}
    tokens, blocks = len(TEXT.encode()), data["views"][0]["blocks"]
    assert sizes == {tokens * blocks + 2 * tokens * (2 + 3 * blocks + 3)} and len(set(blobs)) == 4
    assert not re.search(r"https?://", text.split('id="data"')[0])


def test_a_run_that_is_the_current_directory_has_its_name(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(runs / "one")
    assert main([".", "--text", "../text.txt", "--html", str(tmp_path / "page.html")]) == 0
    assert "<title>one: what is read</title>" in (tmp_path / "page.html").read_text()


def test_what_cannot_be_explored_is_refused_with_what_to_do(runs, tmp_path, capsys):
    def refused(*arguments):
        assert main([*arguments, "--html", str(tmp_path / "out.html")]) == 2
        assert not (tmp_path / "out.html").exists()
        return capsys.readouterr().err

    config = small_config()
    config.data.source, config.data.synthetic, config.data.synthetic_vocab = "synthetic", "copy", 32
    config.model.vocab_size = 32
    write_run(tmp_path / "other", config)
    text = str(runs / "text.txt")
    assert "compare runs of the same tokenizer" in refused(str(runs / "one"), str(tmp_path / "other"), "--text", text)
    ByteTokenizer().save(tmp_path / "other" / "tokenizer")
    assert "the tokenizer has 257 ids and the model 32" in refused(str(tmp_path / "other"), "--text", text)
    (tmp_path / "empty.txt").write_text("")
    assert "has no tokens" in refused(str(runs / "one"), "--text", str(tmp_path / "empty.txt"))
    (tmp_path / "bytes.txt").write_bytes(b"caf\xe9 au lait")
    assert "bytes.txt: not UTF-8 (invalid" in refused(str(runs / "one"), "--text", str(tmp_path / "bytes.txt"))
    assert main([str(runs / "one"), "--text", text, "--html", str(tmp_path / "none" / "page.html")]) == 2
    assert "there is no directory" in capsys.readouterr().err
    assert "No such file" in refused(str(runs / "one"), "--text", str(tmp_path / "none.txt"))
    assert "no such step" in refused(f"{runs / 'one'}@7", "--text", text)
    with pytest.raises(ValueError, match="8,192; give less text"):
        inspect.Exploration(ByteTokenizer(), "a" * 9000)


def test_standard_input_is_utf8_whatever_the_locale(runs, tmp_path, monkeypatch, capsys):
    out = tmp_path / "page.html"
    for encoding, errors in (("latin-1", "strict"), ("utf-8", "surrogateescape")):  # the second is of the C locale
        for raw, status in (("é\r\nb".encode(), 0), (b"caf\xe9 au lait", 2)):
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(raw), encoding, errors))
            assert main([str(runs / "one"), "--text=-", "--html", str(out)]) == status
        assert "(0.0 MB, 4 tokens" in (said := capsys.readouterr()).out
        assert "--text=-: not UTF-8 (invalid continuation byte at byte 3)" in said.err


def test_a_damaged_checkpoint_is_left_out_unless_it_is_all(runs, tmp_path, capsys, caplog):
    shutil.copytree(runs / "one", tmp_path / "run")
    steps = sorted((tmp_path / "run" / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))
    arguments = ["--text", str(runs / "text.txt"), "--html", str(tmp_path / "out.html")]
    for step, status in zip(steps[::-1], (0, 2), strict=True):
        largest = max((path for path in step.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
        largest.write_bytes(largest.read_bytes()[:-7] + b"damaged")
        assert main([str(tmp_path / "run"), *arguments]) == status
        assert f"skipping checkpoint {step.name}" in caplog.text
    assert "damaged" in capsys.readouterr().err


def test_a_notebook_gets_the_page_in_a_frame_and_names_are_told_apart(runs):
    model, tokenizer, _ = nsa_jax.load(runs / "one")
    found = inspect.explore(model, tokenizer, TEXT)
    frame = found._repr_html_()
    assert frame.startswith('<iframe srcdoc="&lt;!doctype html&gt;') and frame.count("<") == 2
    with pytest.raises(ValueError, match="was added before"):
        found.add(model)


@pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome on PATH")
@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (390, "dark")])
def test_tokens_are_clicked_and_keys_move(browser, page, runs, width, scheme):
    tab = Tab(browser, page.as_uri(), width, scheme)
    model, tokenizer, _ = nsa_jax.load(runs / "two")
    view = observe(model, np.asarray(tokenizer.encode(TEXT), np.int32))
    read = tab("arrays(3).then((view) => query(view, 0, 1, 140, 'window').map((one) => [one.listed, one.share]))")
    names = np.array(["future", "unread", "forced", "free"])[view.kinds[140]]
    assert [name for name, _ in read] == np.where(view.chosen[0, 1, 140], "chosen", names).tolist()
    np.testing.assert_allclose([share for _, share in read], (view.weights[0, 1, 2, 140] / 255.0) ** 2)
    shown = "document.getElementById('where').textContent"
    assert tab.page.title() == "one and two: what is read" and "step 2" in tab.page.inner_text("#step")
    assert tab("document.querySelectorAll('#text b').length > 0 && !document.querySelector('#text script, #text b b')")
    # The first screen shows the text and the map.
    for name in ("text", "map"):
        box = tab(f"(({{top, bottom}}) => [top, bottom])(document.getElementById('{name}').getBoundingClientRect())")
        assert 0 <= box[0] and box[1] <= 844, name
    (tab.page.tap if width < 600 else tab.page.click)('[data-token="100"]')
    tab.until(f"{shown}.startsWith('Token 100 ')")
    assert "4 of 7 blocks: 3 forced, 1 chosen" in tab(shown)
    coloured = "[...document.querySelectorAll('#text span')].filter((s) => s.style.background !== '').length"
    assert 50 <= tab(coloured) <= 64 and tab("document.querySelectorAll('#text .future').length") > 50
    tab.page.keyboard.press("ArrowLeft")
    tab.until(f"{shown}.startsWith('Token 99 ')")
    tab.page.keyboard.press("Shift+ArrowLeft")
    tab.page.keyboard.press("g")
    tab.until(f"{shown}.startsWith('Token 83 ') && {shown}.includes('group 1')")
    tab.page.keyboard.press("Shift+ArrowLeft")
    tab.page.keyboard.press("Shift+ArrowLeft")
    tab.until(f"{shown}.includes('All 4 blocks fit in the list of 4')")
    tab.page.keyboard.press("r")
    tab.page.keyboard.press(",")
    tab.until("document.getElementById('step').textContent === 'step 1' && state.view === 2")
    tab.page.click("#map", position={"x": 200, "y": 5})
    tab.until("state.token < 10")
    assert tab.overflow() == 0 and not tab.said and tab.asked == [page.as_uri()]
    tab.close()
