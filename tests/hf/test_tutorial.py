"""The tutorial that ends in transformers, with its last block, which the other tests only compile."""

from tools.documentation import ROOT, World, blocks, check


def test_a_llama_becomes_an_nsa_model_in_transformers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NSA_JAX_CACHE", str(tmp_path / "cache"))
    page = ROOT / "docs" / "tutorials" / "from_llama.md"
    found = blocks(page.read_text(), str(page.relative_to(ROOT)))
    assert sum(block.text.startswith("# Needs transformers") for block in found) == 1

    def no_other_run():
        raise AssertionError("the page makes the runs that it uses")

    check(found, World(tmp_path, no_other_run))
