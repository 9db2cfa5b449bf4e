"""The run report in a real browser, from disk: drawn, usable, silent on the console and on the network.

One browser and one report of two runs for all tests: one run with 5,000 log lines and texts that try to escape, and one
without health, validation and samples that a guard stopped.
"""

import json
import math
import re
import shutil
import time

import pytest

from nsa_jax.report.__main__ import main

from .reported import AWKWARD, LAYERS, SAMPLE, SPIKE, write_full, write_stopped

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome on PATH")
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
LINES = (
    "chart-loss chart-lr chart-grad chart-param chart-update chart-speed chart-wait chart-share chart-memory".split()
)
MAPS = (
    "gate_share_compressed gate_share_selected gate_share_window gate_entropy gate_collapsed output_share_compressed "
    "output_share_selected output_share_window block_distance weights_norm gradients_norm updates_largest"
).split()


class Tab:
    """A page in the browser, with everything that it said and asked for."""

    def __init__(self, browser, url: str, width: int, scheme: str):
        phone = width < 600
        self.context = browser.new_context(
            viewport={"width": width, "height": 800},
            color_scheme=scheme,
            is_mobile=phone,
            has_touch=phone,
            offline=True,
        )
        self.page = self.context.new_page()
        self.said, self.asked = [], []
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(url)
        self.page.wait_for_selector("html[data-ready]", timeout=120_000)

    def __call__(self, script: str, *arguments):
        return self.page.evaluate(script, *arguments)

    def show(self, name: str) -> dict:
        """Scrolls to a chart, and waits until it is drawn; returns what it draws."""
        self(f"document.getElementById('{name}').scrollIntoView({{block: 'center'}})")
        self.until(f"document.getElementById('{name}').layout || document.getElementById('{name}').hidden")
        return self(
            """name => {
              const area = document.getElementById(name), box = area.getBoundingClientRect();
              const size = (e) => { const b = e.getBoundingClientRect(); return [b.width, b.height]; };
              return {
                hidden: area.hidden, width: box.width, height: box.height, label: area.getAttribute("aria-label"),
                traces: (area.data ?? []).map((t) => ({ type: t.type, name: t.name, x: t.x, y: t.y, z: t.z })),
                drawn: [...area.querySelectorAll(".scatterlayer .trace path, .heatmaplayer image")].map(size),
                paper: area.layout?.paper_bgcolor, range: area._fullLayout?.xaxis?.range,
              };
            }""",
            name,
        )

    def until(self, condition: str) -> None:
        """Waits for a condition; the page's own policy forbids the browser to poll one given as text."""
        end = time.monotonic() + 60
        while not self(f"Boolean({condition})"):
            assert time.monotonic() < end, f"{condition}: not in a minute"
            self.page.wait_for_timeout(20)

    def all_charts(self) -> None:
        for name in (*LINES, "chart-position", *(f"map-{name}" for name in MAPS), "chart-events"):
            self.show(name)

    def overflow(self) -> int:
        return self("document.documentElement.scrollWidth - document.documentElement.clientWidth")

    def close(self) -> None:
        self.context.close()


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=BROWSER, args=FLAGS)  # in a new profile directory
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    root = tmp_path_factory.mktemp("report")
    out = root / "report.html"
    assert main([str(write_full(root / AWKWARD)), str(write_stopped(root / "narrow")), "--out", str(out)]) == 0
    return out.as_uri()


@pytest.fixture(scope="module")
def desk(browser, url):
    """The page at 1440 px, light."""
    tab = Tab(browser, url, 1440, "light")
    yield tab
    tab.close()


def test_curves_of_both_runs_are_drawn_with_their_extremes(desk):
    loss = desk.show("chart-loss")
    # Of the long run a faint raw line, a smoothed one and validation; of the short one raw and smoothed.
    assert [len(t["x"]) for t in loss["traces"]] == [1500, 1500, 11, 3, 3]
    assert SPIKE[1] in loss["traces"][0]["y"] and SPIKE[0] in loss["traces"][0]["x"]
    assert loss["traces"][2]["y"][0] == pytest.approx(5.5) and loss["traces"][2]["y"][-1] == pytest.approx(1.6)
    assert len(loss["drawn"]) >= 5 and all(width > 1 or height > 1 for width, height in loss["drawn"])
    assert "validation loss" in loss["label"] and "1.6" in loss["label"]
    for name in LINES:
        chart = desk.show(name)
        assert not chart["hidden"] and chart["width"] > 200 and chart["height"] > 150 and chart["traces"], name
    assert desk.page.locator("#chart-update .scatterlayer .trace").count() == 4  # a value that is NaN ends no curve


def test_health_is_drawn_as_a_heat_map_of_every_figure(desk):
    for name in MAPS:
        chart = desk.show(f"map-{name}")
        assert chart["traces"][0]["type"] == "heatmap", name
        assert (len(chart["traces"][0]["z"]), len(chart["traces"][0]["z"][0])) == (LAYERS, 240), name
        assert chart["drawn"] and min(chart["drawn"][0]) > 40, name
    # What never changes is told once.
    still = " ".join(desk.page.locator(".still").all_inner_texts())
    assert all(text in still for text in ("beyond the forced ones): 0.4", "4.125", "116.5", "Gradients: zeros"))
    assert "Distance" not in still and desk.page.locator("#map-keys_counted, #map-updates_zeros").count() == 0
    # All shares have one scale; large and small values of layers are told apart by their logarithm.
    scales = {desk(f"document.getElementById('map-{name}').data[0].zmax") for name in MAPS if "_share_" in name}
    assert len(scales) == 1 and scales.pop() == pytest.approx(1 / 3 + 0.6)
    assert desk("document.getElementById('map-gradients_norm').data[0].z[1][0]") == pytest.approx(math.log10(5))
    assert "500 checks of 4 layers, every query read exactly" in desk.page.inner_text("#keys")
    position = desk.show("chart-position")["traces"]
    assert position[0]["y"][-1] == pytest.approx(2.0)  # of the evaluation; then of the last validation
    assert "evaluation, step 4,500" in position[0]["name"]  # the run went on to step 5,000
    assert len(position) == 2 and position[1]["y"] == [2.5] * 6 and "step 5,000" in position[1]["name"]
    assert desk.show("needles-needle")["traces"][0]["z"] == [[0, 0], [1, 1]]
    assert "exact answers, step 4,500" in desk.page.inner_text("#needles")


def test_goodput_is_a_table_of_seconds_and_shares(desk):
    rows = [row.split("\t") for row in desk.page.locator("#speed tbody tr").all_inner_texts()]
    assert rows[0] == ["all", "8 min 40 s (100.0 %)", "–"] and rows[1] == ["training", "6 min 40 s (76.9 %)", "–"]
    assert [row[0] for row in rows[2:]] == ["data", "startup", "validation", "saving", "other"]


def test_what_a_held_out_query_selects_is_drawn_over_training(desk):
    (drawn,) = desk.show("chart-selection")["traces"]
    assert drawn["y"] == [f"{step:,}" for step in range(0, 5001, 500)]
    assert drawn["z"][0] == [2, 3, *[0] * 12, 2, 2]  # layer 0: forced, chosen, not read
    desk.page.select_option("#selection-layer", "2")
    shown = desk.show("chart-selection")["traces"][0]["z"]
    assert [row.index(3) for row in shown] == list(range(3, 14))
    assert desk.page.inner_text("#selection .context").startswith(f"… {AWKWARD}")
    desk.page.select_option("#selection-query", "0")
    assert desk.show("chart-selection")["traces"][0]["z"][0] == [1, 1, 1]  # everything fits
    desk.page.select_option("#selection-query", "1")
    desk.page.select_option("#selection-layer", "0")


def test_the_buttons_of_a_chart_lie_above_its_data(desk):
    for name in ("chart-loss", "chart-grad", "map-gate_entropy"):
        desk.show(name)
        bar = desk(f"document.querySelector('#{name} .modebar').getBoundingClientRect().bottom")
        data = desk(f"document.querySelector('#{name} .nsewdrag').getBoundingClientRect().top")
        assert 0 < bar <= data, name


def test_commands_are_copied_and_the_exploration_is_linked(desk):
    commands = desk.page.locator("#commands code").all_inner_texts()
    assert commands[0].startswith("python train.py ") and "-m nsa_jax.inspect" in commands[1]
    desk("navigator.clipboard.writeText = (text) => { window.copied = text; return Promise.resolve(); }")
    desk.page.locator("#commands .copy").nth(1).click()
    desk.until("window.copied")
    assert desk("window.copied") == commands[1]
    assert desk.page.get_attribute("#commands a", "href").endswith("explore.html")


def test_hovering_tells_the_values(desk):
    desk.show("chart-loss")
    box = desk.page.locator("#chart-loss .nsewdrag").bounding_box()
    desk.page.mouse.move(box["x"] + box["width"] * 0.55, box["y"] + box["height"] / 2)
    desk.page.wait_for_selector("#chart-loss .hoverlayer text")
    said = desk("document.querySelector('#chart-loss .hoverlayer').textContent")
    assert AWKWARD[:20] in said  # as it was written, not as HTML
    step = int(re.search(r"step ([\d,]+)", said).group(1).replace(",", ""))
    at = json.loads(desk("JSON.stringify(DATA.runs[0].series['train/loss'])"))
    assert f"training : {at['y'][at['x'].index(step)]:.4g}" in said and 2000 < step < 3000  # not the smoothed value
    desk.page.mouse.move(5, 5)


def test_alarms_stand_on_the_time_line_and_in_the_table(desk):
    events = desk.show("chart-events")
    assert [t["y"] for t in events["traces"]] == [["spike", "gate_entropy", "not_finite"], ["checkpoint"]]
    assert events["traces"][0]["x"] == [2345, 3000, 4000]
    marks = desk(
        "document.getElementById('chart-loss').layout.shapes.filter((s) => s.yref === 'paper').map((s) => s.x0)"
    )
    assert marks == [2345, 3000, 4000]
    rows = desk.page.locator("#events tbody tr").all_inner_texts()
    assert len(rows) == 3 and AWKWARD in rows[1]


def test_samples_are_browsed_by_step_and_stay_text(desk):
    expected = SAMPLE
    for hidden in "\x00\x1b\ud800\u202e":
        expected = expected.replace(hidden, hidden.encode("unicode_escape", "surrogatepass").decode())
    shown = "document.getElementById('sample-text').textContent"
    assert desk(shown) == expected  # the last one first
    desk.page.select_option("#sample-step", "1")
    assert desk(shown) == "sample 1"
    desk.page.click("#samples button[aria-label='later sample']")
    assert desk(shown) == "sample 2" and desk("document.getElementById('sample-slider').value") == "2"
    desk.page.focus("#sample-slider")
    desk.page.keyboard.press("Home")
    assert desk(shown) == "sample 0" and desk.page.is_disabled("#samples button[aria-label='earlier sample']")
    assert desk("[window.hacked, document.querySelectorAll('main b, main img, main i').length]") == [None, 0]


def test_units_axis_smoothing_and_runs_are_chosen(desk):
    before = desk.show("chart-loss")["traces"]
    desk.page.click("[data-value=perplexity]")
    shown = desk.show("chart-loss")["traces"]
    assert shown[2]["y"][-1] == pytest.approx(math.exp(1.6), rel=1e-5)
    assert desk.page.get_attribute("[data-value=perplexity]", "aria-pressed") == "true"
    desk.page.click("[data-value=loss]")
    desk.page.click("[data-value=tokens]")
    shown = desk.show("chart-loss")["traces"]
    assert shown[0]["x"][-1] == 5000 * 4 * 256 and shown[3]["x"] == [5120, 25_600, 46_080]
    assert desk("tokensAt(DATA.runs[1], 15)") == 15_360 and desk("tokensAt(DATA.runs[1], 99)") == 46_080
    desk.page.click("[data-value=time]")
    assert desk.show("chart-grad")["traces"][0]["x"][-1] == pytest.approx(500 / 60, rel=1e-3)  # minutes
    desk.page.click("[data-value=step]")
    desk.page.select_option("#smooth", "none")
    assert [len(t["x"]) for t in desk.show("chart-loss")["traces"]] == [1500, 11, 3]
    desk.page.select_option("#smooth", "some")
    desk.page.locator("#runs input[type=checkbox]").first.uncheck()
    assert [len(t["x"]) for t in desk.show("chart-loss")["traces"]] == [3, 3]
    desk.page.locator("#runs input[type=checkbox]").first.check()
    assert desk.show("chart-loss")["traces"] == before


def test_zooming_one_chart_zooms_the_others(desk):
    desk.show("chart-loss")
    desk.show("map-gate_entropy")
    desk.show("chart-grad")
    box = desk.page.locator("#chart-grad .nsewdrag").bounding_box()
    y = box["y"] + box["height"] / 2
    desk.page.mouse.move(box["x"] + box["width"] * 0.25, y)
    desk.page.mouse.down()
    desk.page.mouse.move(box["x"] + box["width"] * 0.5, y, steps=4)
    desk.page.mouse.up()
    desk.page.wait_for_selector("html[data-zoomed]")
    desk.until("document.getElementById('chart-loss')._fullLayout.xaxis.range[0] > 800")
    ranges = [
        desk.show(name)["range"]
        for name in ("chart-grad", "chart-loss", "map-gate_entropy", "chart-events", "chart-speed")
    ]
    assert ranges[0][0] == pytest.approx(1250, abs=150) and ranges[0][1] == pytest.approx(2500, abs=150)
    assert all(shown == pytest.approx(ranges[0]) for shown in ranges)
    desk.page.click("[aria-label='zoom out']")
    wide = desk.show("chart-loss")["range"]
    assert wide[1] - wide[0] == pytest.approx(2 * (ranges[0][1] - ranges[0][0]), rel=0.01)
    desk.page.click("[aria-label='reset zoom']")
    desk.until("document.getElementById('chart-loss')._fullLayout.xaxis.range[1] >= 5000")
    assert desk("document.documentElement.hasAttribute('data-zoomed')") is False


def test_another_run_is_chosen(desk):
    assert "Interrupted" in desk.page.inner_text("#outcome") and AWKWARD in desk.page.inner_text("#outcome")
    assert desk.page.locator("#runs tbody").first.locator("tr").count() == 2
    names = [row.split()[0] for row in desk.page.locator("#runs table[aria-label^=Fields] tbody tr").all_inner_texts()]
    assert names == ["config.name", "config.train.batch_size", "config.guards.health"]
    desk.page.select_option("#run", "1")
    outcome = desk.page.inner_text("#outcome")
    assert "Stopped by the guard loss_floor" in outcome and "<i>too</i> good" in outcome
    assert desk.show("map-gate_entropy")["hidden"] and "logged no health" in desk.page.inner_text("#keys")
    assert "wrote no samples" in desk.page.inner_text("#samples")
    assert desk.show("chart-events")["traces"][0]["y"] == ["stopped"]
    assert len(desk.show("chart-loss")["traces"]) == 5  # the curves stay those of all runs
    desk.page.click("[data-choose='0']")
    assert "Interrupted" in desk.page.inner_text("#outcome") and not desk.show("map-gate_entropy")["hidden"]
    assert desk("document.getElementById('run').value") == "0"


def test_the_configuration_shows_what_was_changed_and_all_of_it(desk):
    rows = desk.page.locator("#config tbody tr")
    assert rows.count() == 8 and "8 of " in desk.page.inner_text("#config")
    desk.page.check("#config input[type=checkbox]")
    assert rows.count() > 80
    desk.page.fill("#config input[type=search]", "NSA.window")
    assert rows.all_inner_texts() == ["model.nsa.window\t64\t512"]
    assert AWKWARD in desk.page.inner_text("#environment ul") and "937,568" in desk.page.inner_text("#environment")


def test_the_theme_is_switched_and_kept(desk):
    desk.show("chart-loss")
    assert desk.show("chart-loss")["paper"] == "#ffffff"
    desk.page.click("#theme")
    assert desk("document.documentElement.dataset.theme") == "dark" and desk.page.inner_text("#theme") == "Light theme"
    assert desk.show("chart-loss")["paper"] == desk.show("map-gate_entropy")["paper"] == "#181e25"
    for _ in range(5):  # the browser takes a moment to hand what is stored to the page's next process
        desk.page.wait_for_timeout(200)
        desk.page.reload()
        desk.page.wait_for_selector("html[data-ready]")
        if desk("document.documentElement.dataset.theme") == "dark":
            break
    assert desk("document.documentElement.dataset.theme") == "dark"
    desk.page.click("#theme")
    assert desk("document.documentElement.dataset.theme") == "light"


CONTRAST = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = (c) => { const [r, g, b] = c.map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = (e) => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
    if (c.length === 3 || c[3] === 1) return c; } return [255, 255, 255]; };
  const found = [];
  const walker = document.createTreeWalker(document.getElementById("app"), NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const e = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || e.closest("svg, option, button:disabled") || !e.offsetParent) continue;
    const [a, b] = [light(parse(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) found.push(walker.currentNode.data);
  }
  return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_it_fits_and_is_silent_on_phone_and_desk_in_both_themes(browser, url, width, scheme):
    tab = Tab(browser, url, width, scheme)
    assert tab("document.documentElement.dataset.theme") == scheme
    tab.all_charts()
    assert tab.overflow() <= 0
    boxes = "[...document.querySelectorAll('svg.main-svg, .panel')].map((e) => e.getBoundingClientRect().right)"
    assert tab(f"Math.max(...{boxes})") <= width
    assert tab(CONTRAST) == []
    assert tab("[...document.querySelectorAll('main h2')].length") == 13
    if width == 390:
        # The first screen shows the outcome and the loss.
        tab("scrollTo(0, 0)")
        assert "Interrupted" in tab.page.inner_text("#outcome")
        bottom = "document.getElementById('chart-loss').getBoundingClientRect().bottom"
        assert tab("document.getElementById('outcome').getBoundingClientRect().top") > 0 and tab(bottom) <= 844
        tab.page.tap("[aria-label='zoom in']")
        for name in ("chart-loss", "map-gate_entropy"):  # a finger scrolls the page, and tells values by tapping
            tab.show(name)
            assert tab(f"document.getElementById('{name}').layout.dragmode") is False
            box = tab.page.locator(f"#{name} .nsewdrag").bounding_box()
            tab.page.touchscreen.tap(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
            tab.page.wait_for_selector(f"#{name} .hoverlayer text")
            assert tab.show(name)["range"] == [1250, 3750]  # which a tap does not reset
    assert tab.said == [] and tab.asked == [url]
    tab.close()


def test_a_run_of_one_line_has_a_page_without_errors(browser, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "val/loss": 5.5}\n{"st')
    shares = {"accuracy": 0.9961, "window_only": 0.108, "chance": 0.2}
    (tmp_path / "summary.json").write_text(json.dumps({"step": 0, "finished": True, "far_task": shares}))
    assert main([str(tmp_path)]) == 0
    tab = Tab(browser, (tmp_path / "report.html").as_uri(), 390, "dark")
    told = "Questions about far tokens: 99.6 % right, 10.8 % by windows alone, chance is 20.0 %."
    assert told in tab.page.inner_text("#outcome")
    loss = tab.show("chart-loss")
    assert [t["y"] for t in loss["traces"]] == [[5.5]] and tab.show("chart-lr")["hidden"]
    assert "not logged by this run" in tab.page.inner_text("#optimisation")
    assert tab.page.locator("#run").count() == 0 and tab.overflow() <= 0 and tab.said == []
    times = tab("[0.4, 59.6, 119.7, 3599.8, 7322].map(duration)")
    assert times == ["0 s", "1 min 0 s", "2 min 0 s", "1 h 0 min", "2 h 2 min"]
    tab.close()


def test_the_long_session_was_silent_as_well(desk):
    assert desk.said == [] and set(desk.asked) == {desk.page.url}
