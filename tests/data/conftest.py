import json
import random

import pytest

from nsa_jax.config import default_config

WORDS = "the loss of a model that sees one token is an entropy and not a guess so measure it".split()


@pytest.fixture(autouse=True)
def cache_root(tmp_path, monkeypatch):
    """Every test has its own empty cache."""
    root = tmp_path / "cache"
    monkeypatch.setenv("NSA_JAX_CACHE", str(root))
    return root


@pytest.fixture
def hf_home(tmp_path, monkeypatch):
    """Keeps `datasets` out of the user's cache, and off the network."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    return tmp_path / "hf"


def make_documents(count, seed=0):
    generator = random.Random(seed)
    return [
        f"document {i}: " + " ".join(generator.choices(WORDS, k=generator.randint(1, 60))) + " €\n"
        for i in range(count)
    ]


@pytest.fixture
def documents():
    return make_documents(300)


@pytest.fixture
def text_config(tmp_path, documents):
    """A config over 300 small documents in files, some in subdirectories."""
    for i, text in enumerate(documents):
        path = tmp_path / "corpus" / f"part{i % 3}" / f"{i:04d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    config = default_config()
    config.data.source = "text"
    config.data.files = (str(tmp_path / "corpus" / "**" / "*.txt"),)
    config.data.seq_len = 48
    config.data.val_fraction = 0.2
    config.data.prefetch = 2
    config.train.batch_size = 8
    config.train.eval_batches = 4
    return config


@pytest.fixture
def write_rows():
    """Writes documents as the rows of two files, and returns the glob that matches them."""
    import pyarrow
    import pyarrow.parquet

    def write(directory, kind, documents, field="text"):
        directory.mkdir(exist_ok=True)
        half = len(documents) // 2
        for i, part in enumerate((documents[:half], documents[half:])):
            if kind == "parquet":
                table = pyarrow.table({field: part, "id": list(range(len(part)))})
                pyarrow.parquet.write_table(table, directory / f"{i}.parquet", row_group_size=16)
            else:
                lines = [json.dumps({field: text, "id": j}) + "\n" for j, text in enumerate(part)]
                (directory / f"{i}.jsonl").write_text("".join(lines))
        return str(directory / ("*.parquet" if kind == "parquet" else "*.jsonl"))

    return write
