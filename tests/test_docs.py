"""Every code block, link and name of README.md, CONTRIBUTING.md and docs/ is true.

Python blocks run, in one namespace per page. Of shell blocks, `nsa_jax` tools run on a tiny model, `train.py` lines
have their flags parsed and their config validated, other scripts have their arguments parsed, `make` targets exist.
Trees of files must list files. A block or command of another kind is an error: nothing is skipped.
"""

from __future__ import annotations

import ast
import functools
import importlib
import json
import re
import types
from pathlib import Path

import jax
import pytest
from tools.documentation import ROOT, DocsError, World, blocks, check, prose, write_corpus
from tools.reported import environment, lines, train_row
from tools.runs import small_config, write_run

from nsa_jax.config import default_config

DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS, *sorted((ROOT / "launch").glob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory):
    """Writes a tiny model's workdir when first called."""

    @functools.cache
    def write() -> Path:
        directory = tmp_path_factory.mktemp("tiny")
        write_corpus(directory / "corpus")
        config = small_config()
        config.data.source, config.data.files = "text", (str(directory / "corpus" / "*.txt"),)
        config.data.cache_dir, config.data.val_fraction = str(directory / "cache"), 0.5
        write_run(directory / "run", config)
        lines(directory / "run" / "metrics.jsonl", [train_row(step, 3.0 - step / 10) for step in (1, 2)])
        (directory / "run" / "env.json").write_text(json.dumps(environment("quickstart")))
        return directory / "run"

    return write


@pytest.fixture
def world(tmp_path, monkeypatch, tiny_run):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NSA_JAX_CACHE", str(tmp_path / "cache"))
    usual = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)  # everything here is compiled to run once
    yield World(tmp_path, tiny_run)
    jax.config.update("jax_disable_most_optimizations", usual)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_block_is_true(page, world):
    check(blocks(page.read_text(), str(page.relative_to(ROOT))), world)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```python\nassert 1 == 2, 'untrue'\n```", "untrue"),
        ("```toml\na = 1\n```", "kind 'toml'"),
        ("```bash\nrm -r runs\n```", "what rm does"),
        ("```bash\nmake everything\n```", "make everything"),
        ("```bash\npython train.py --config=configs/toy.py --config.train.step=1\n```", "train.step"),
        ("```bash\npython train.py --config=configs/toy.py --config.model.num_kv_heads=3\n```", "R004"),
        ("```bash\npython train.py --config=configs/none.py\n```", "none.py"),
        ("```bash\npython -m nsa_jax.generate runs/quickstart --promt x\n```", "status 2"),
        ("```bash\npython -m nsa_jax.trian\n```", "nsa_jax.trian"),
        ("```bash\npython benchmarks/attention.py --sizes 5\n```", "--sizes"),
        ("```bash\npython tools/none.py\n```", "tools/none.py"),
        ("```bash\npip install -c constraints.txt -e '.[tpu]'\n```", "tpu"),
        ("```bash\nmake test && JAX_PLATFORMS=cpu nonsense\n```", "nonsense"),
        ("```text\nnsa_jax/\n  none.py   what is not there\n```", "none.py"),
        ("```\nsome output\n```", "only trees"),
        ("```python\n", "not closed"),
        ("Words.\n\n    indented\n", "indented"),
    ],
)
def test_the_check_notices(text, message, world, capfd):
    with pytest.raises((AssertionError, DocsError), match=re.escape(message)):
        check(blocks(text), world)


# Links and names


def anchors(page: Path) -> set[str]:
    """What GitHub lets links of a page point to."""
    headings = re.findall(r"^#+ +(.*)$", prose(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text())):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


def _exists(dotted: str) -> bool:
    """Whether a dotted name can be imported."""
    names = dotted.split(".")
    for cut in range(len(names), 0, -1):
        try:
            found = importlib.import_module(".".join(names[:cut]))
        except ModuleNotFoundError:
            continue
        for name in names[cut:]:
            if not hasattr(found, name):
                return False
            found = getattr(found, name)
        return True
    return False


_FLAGS_OF_OTHERS = ("dependency",)  # of sbatch
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)  # what has a docstring


def _commands_that_do_not_exist(text: str) -> list[str]:
    """Targets, scripts, modules and flags of this repository that the text between backticks names in vain."""
    phony = re.search(r"^\.PHONY:(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets = phony[1].split() if phony else []
    scripts = [ROOT / "train.py", *ROOT.glob("nsa_jax/**/*.py"), *ROOT.glob("benchmarks/*.py")]
    source, wrong = "".join(path.read_text() for path in scripts), []
    for span in re.findall(r"`([^`\n]+)`", text):
        if found := re.match(r"make ([\w-]+)", span):
            wrong += [span] * (found[1] not in targets)
        if found := re.match(r"python -m (nsa_jax[\w.]*)", span):
            wrong += [span] * (not _exists(found[1]))
        if found := re.match(r"python ([\w/.]+\.py)", span):
            wrong += [span] * (not (ROOT / found[1]).is_file())
        if span.startswith(("--", "python")):
            for flag in re.findall(r"(?<!\S)--([a-z][\w-]*)", span):
                names = (f"--{flag}", flag, flag.removeprefix("no"))
                known = flag in ("config", *_FLAGS_OF_OTHERS) or any(f'"{name}"' in source for name in names)
                wrong += [span] * (not known)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_names_in_the_text_exist(page):
    """Fields of the config, names of the package, rules, commands and flags, as the text mentions them."""
    text, schema, unknown = prose(page.read_text()), default_config(), []
    for dotted in re.findall(r"(?<![\w./])config\.(?!md|py|json)((?:[a-z_0-9]+\.)*[a-z_0-9]+)", text):
        field = schema
        for name in dotted.split("."):
            if not hasattr(field, name):
                unknown.append(f"config.{dotted}")
                break
            field = getattr(field, name)
    for dotted in set(re.findall(r"`(nsa_jax(?:\.\w+)+)", text)):
        if not _exists(dotted):
            unknown.append(dotted)
    source = "".join(path.read_text() for path in (ROOT / "nsa_jax").rglob("*.py"))
    unknown += [rule for rule in set(re.findall(r"\bR\d{3}\b", text)) if f'"{rule}"' not in source]
    unknown += _commands_that_do_not_exist(text)
    assert not unknown


def test_fields_that_docstrings_name_exist():
    schema, unknown = default_config(), []
    sections = "|".join(name for name, value in schema.items() if hasattr(value, "items"))
    for path in (ROOT / "nsa_jax").rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        told = [ast.get_docstring(node) or "" for node in nodes if isinstance(node, _DOCUMENTED)]
        for section, field in re.findall(rf"\bconfig\.({sections})\.(\w+)", "\n".join(told)):
            unknown += [f"{path.name}: config.{section}.{field}"] * (not hasattr(schema[section], field))
    assert not unknown


# The site


def test_every_page_is_in_the_navigation_once():
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1].split("\n\n")[0]
    listed = re.findall(r"^ +- [^:]+: (\S+\.md)$", navigation, re.MULTILINE)
    pages = sorted(str(page.relative_to(ROOT / "docs")) for page in DOCS)
    assert sorted(listed) == pages
    contents = (ROOT / "docs" / "README.md").read_text()
    assert [page for page in pages if page != "README.md" and f"]({page})" not in contents] == []


def test_links_of_the_site_that_leave_the_documentation():
    text = (
        "![a](../../benchmarks/results/decode_h200.png) [b](../../configs/toy.py#x) [c](../faq.md)\n"
        "```\n[d](../../a)\n```\n"
    )
    kept, images = script("site_links").rewrite(text, "tutorials/page.md", "https://host/repository")
    assert images == {"benchmarks/results/decode_h200.png"}
    assert kept == (
        "![a](../repository/benchmarks/results/decode_h200.png) "
        "[b](https://host/repository/blob/main/configs/toy.py#x) [c](../faq.md)\n```\n[d](../../a)\n```\n"
    )
    assert " b [c](../faq.md)" in script("site_links").rewrite(text, "tutorials/page.md", "")[0]


# Generated pages and measured figures


@pytest.mark.parametrize(
    "span",
    ["make tets", "python -m nsa_jax.genrate runs/a", "python trian.py", "--preflght", "python train.py --devces=8"],
)
def test_commands_in_the_text_that_do_not_exist_are_noticed(span):
    assert _commands_that_do_not_exist(f"Run `{span}` or `make test` or `--nodistributed`.") == [span]


def script(name: str) -> types.ModuleType:
    """A script of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs"))  # scripts find their neighbours there
        spec.loader.exec_module(module)
    return module


def test_config_reference_is_up_to_date():
    reference = script("config_reference")
    assert all(reference.fields().values()), "every field of the config has a comment"
    assert (ROOT / "docs" / "config.md").read_text() == reference.page(), "run make docs"


def test_figures_of_tables_are_those_of_the_results():
    figures, rows, sentences = script("figures"), set(), set()
    for path in figures.PAGES:
        text = path.read_text()
        assert text == figures.page(text), "run make docs"
        rows |= {row for row in figures.all_rows() if f"\n| {row} |" in text}
        sentences |= {name for name in figures.SENTENCES if f"<!-- {name} -->" in text}
    assert rows == set(figures.all_rows())
    assert sentences == set(figures.SENTENCES)


def test_times_of_other_projects_are_stated_only_where_they_were_measured(tmp_path, monkeypatch):
    figures = script("figures")
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    monkeypatch.setattr(figures, "results", lambda name: json.loads((tmp_path / f"{name}.json").read_text()))
    assert figures.peers().startswith("No result")
    sizes = {"B": 1, "N": 64, "K": 4, "H": 128, "T": 8192, "window_branch": False}
    ours = {"peer": "nsa_jax", "default": False, "like": ["fla"], **sizes}
    fla = {"peer": "fla", "commit": "abc", "notes": "one block size", **sizes}
    check = {"output": 0.002, "gradients": {"query": 0.004, "key": 0.003}}
    rows = [ours | {"pass": "fwd", "ms": 1.234}, ours | {"pass": "fwd_bwd", "ms": 5}]
    rows += [fla | {"pass": "fwd", "ms": 2.5, "check": check}, fla | {"error": "oom", "T": 65536}]
    rows += [{"peer": "fsa", "error": "no package"}]
    made = {"device": "H200", "commit": "d00", "jax": "0.11.2", "torch": "2.11"}
    for name in ("peers_h100", "peers_h200"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"environment": made, "rows": rows}))
    text = figures.peers()
    assert text.count("| nsa_jax, as fla, no window | 1.23 / 5.00 |  |") == 2
    first, second = text.split("\n\nH200, forward / forward + backward, in milliseconds over the tokens ")
    assert second.splitlines() == [
        "([peers_h200.json](../benchmarks/results/peers_h200.json); commit d00, JAX 0.11.2, PyTorch 2.11):",
        "",
        "| B=1, N=64, K=4, H=128 | 8,192 | 65,536 |",
        "|---|---|---|",
        "| nsa_jax, as fla, no window | 1.23 / 5.00 |  |",
        "| fla, no window | 2.50 | error |",
        "",
        "- `fla` abc: one block size; from the reference: output 0.2 %, gradients 0.4 %; "
        "N=64, K=4, 65,536 tokens: oom.",
        "- `fsa`: no package.",
    ]


def test_rows_of_another_commit_are_named(monkeypatch):
    figures = script("figures")
    case = dict(zip("NKHV", figures.SHAPE, strict=True)) | {"B": 1, "documents": 1, "kernels": "hopper"}
    rows = [case | {"op": op, "T": T} for op in ("dense", "nsa") for T in (2048, 131072)]
    monkeypatch.setattr(figures, "results", lambda name: {"environment": {"commit": "aaa"}, "rows": rows})
    assert figures.attention_origin() == "All figures are of commit aaa."
    for row in rows[1::2]:
        row |= {"commit": "bbb", "note": "older kernels"}
    assert figures.attention_origin() == "Figures are of commit aaa, those at 128k of bbb (older kernels)."


def test_figures_of_the_recall_task_are_those_of_its_config():
    page = (ROOT / "docs" / "evidence.md").read_text()
    quoted = re.findall(r"1 to \d minutes|[\d.]+ %", page[page.index("The first line takes") :].split("\n\n")[0])
    recorded = (ROOT / "configs" / "recall.py").read_text()
    assert len(quoted) == 4 and all(figure in recorded for figure in quoted)


def test_figures_of_the_training_run_are_those_of_its_result():
    runs = json.loads((ROOT / "benchmarks" / "results" / "nsa_dense_h200.json").read_text())["runs"]
    measured = {
        (
            f"{round(run['speed']['tokens_per_second'], -3):,}",
            f"{100 * run['speed']['mfu']:.0f}",
            f"{run['speed']['device_peak_gib']:.1f}",
        )
        for run in runs
    }
    found = set()
    for page in PAGES:
        text = " ".join(page.read_text().split())
        found.update(re.findall(r"([\d,]+) tokens(?: per second|/s), (\d+) % MFU, ([\d.]+) GiB", text))
    assert found and found <= measured
