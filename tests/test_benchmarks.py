"""The benchmarks run end to end and their bookkeeping is right; the figures themselves come from GPUs."""

import json
import subprocess
import sys
import types

import jax
import numpy as np
import pytest

import nsa_jax
from benchmarks import attention, curves, timing, train

# What is timed here is interpreted: it is compiled for much longer than it runs.
pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.slow
def test_attention_benchmark_writes_rows_and_plot(tmp_path):
    results, picture = tmp_path / "out.json", tmp_path / "out.png"
    command = [sys.executable, "benchmarks/attention.py", "--lengths", "128", "--shape", "4,2,16,16", "--no-dense"]
    command += ["--ops", "nsa,selected", "--passes", "fwd,fwd_bwd", "--lists", "shared"]
    command += ["--json", str(results), "--plot", str(picture)]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    data = json.loads(results.read_text())
    assert [(row["op"], row["pass"]) for row in data["rows"]] == [
        ("nsa", "fwd"),
        ("nsa", "fwd_bwd"),
        ("selected", "fwd"),
        ("selected", "fwd_bwd"),
    ]
    assert all(row["ms"] > 0 and row["tflops"] > 0 for row in data["rows"])
    assert all((row["B"], row["documents"], row["kernels"]) == (1, 1, "") for row in data["rows"])
    assert {"device", "jax", "commit", "command", "date"} <= data["environment"].keys()
    assert picture.stat().st_size > 10_000


def test_several_rows_of_several_documents_are_timed_as_such():
    config = nsa_jax.NSAConfig(4, 2, 4, 2, 1, 1, 3)
    one, many = (attention.Bench(64, 4, 2, 16, 16, config, "float32", 0, *more) for more in ((), (3, 4)))
    function, inputs, _ = many.inputs("nsa", None)
    np.testing.assert_array_equal(inputs[8], np.arange(64) // 16 * 16 * np.ones((3, 1)))
    assert function(*inputs).shape == (3, 64, 4, 16)
    assert many.pairs("dense") == 4 * 16 * 17 / 2 and one.pairs("dense") == 64 * 65 / 2
    assert many.lists(1).shape == (3, 64, 2, 2)


def test_alike_neighbours_have_the_same_query():
    config = nsa_jax.NSAConfig(4, 2, 4, 2, 1, 1, 3)
    bench = attention.Bench(62, 4, 2, 16, 16, config, "float32", 0, alike=4)
    function, inputs, _ = bench.inputs("nsa", None)
    query = np.asarray(inputs[0])
    assert query.shape == (1, 62, 4, 16) and function(*inputs).shape == query.shape
    same = (query[:, 1:] == query[:, :-1]).all((0, 2, 3))
    np.testing.assert_array_equal(same, np.arange(1, 62) % 4 != 0)
    abstract = attention.AbstractBench(62, 4, 2, 16, 16, config, "float32", 0, alike=4)
    assert abstract.inputs("nsa", None)[1][0].shape == query.shape


def test_the_whole_operator_is_timed_with_shared_keys_and_values():
    """As the reference with the window's those of the selected branch; packed rows too."""
    config = nsa_jax.NSAConfig(4, 2, 4, 2, 1, 1, 3)
    for documents in (1, 4):
        bench = attention.Bench(64, 4, 2, 16, 16, config, "float32", 0, documents=documents)
        function, inputs, differentiable = bench.inputs("nsa_shared", None)
        assert differentiable == 6 and len(inputs) == 6 + (documents > 1)
        query, key_cmp, value_cmp, key, value, gates, *segments = inputs
        packed = dict(segment_start=segments[0]) if segments else {}
        arrays = query, key_cmp, value_cmp, key, value, key, value, gates
        want = nsa_jax.nsa_attention(*arrays, config=config, implementation="reference", **packed)
        np.testing.assert_allclose(function(*inputs), want, atol=1e-5)


def _result(commit, device="NVIDIA H200", **ms):
    """A result with a row of NSA per length, given as T2048=ms."""
    case = {"op": "nsa", "pass": "fwd", "B": 1, "N": 64, "K": 4, "H": 128, "V": 128, "lists": "selection"}
    case |= {"kernels": "hopper", "documents": 1}
    environment = {"device": device, "jax": "0.11.2", "commit": commit}
    return {"environment": environment, "rows": [case | {"T": int(T[1:]), "ms": value} for T, value in ms.items()]}


def test_merged_rows_replace_those_of_the_same_case_and_say_their_commit():
    kept = attention.merge(_result("aaa", T2048=1.0, T131072=9.0), _result("bbb", T131072=8.0, T8192=2.0))
    assert [(row["T"], row["ms"], row.get("commit")) for row in kept["rows"]] == [
        (2048, 1.0, None),
        (131072, 8.0, "bbb"),
        (8192, 2.0, "bbb"),
    ]
    assert not any("jax" in row for row in kept["rows"])
    again = attention.merge(kept, _result("aaa", T131072=7.0))["rows"][1]
    assert again["ms"] == 7.0 and "commit" not in again
    with pytest.raises(ValueError, match="A100"):
        attention.merge(kept, _result("bbb", device="NVIDIA A100", T2048=1.0))


@pytest.mark.parametrize("shared_by", [1, 64])
def test_made_up_lists_are_valid(shared_by):
    config = nsa_jax.NSAConfig()
    lists = np.asarray(attention.make_lists(jax.random.key(0), 2048, 2, config, shared_by))
    assert lists.shape == (1, 2048, 2, 16)
    own = np.arange(2048)[None, :, None] // config.select_block
    real = lists < 32
    assert np.all(real.sum(-1) == np.minimum(own + 1, 16))
    assert np.all(np.where(real, lists, 0) <= own[..., None])
    assert np.all(np.diff(np.where(real, lists, 32 + np.arange(16)), axis=-1) > 0)
    same = np.all(lists[:, 1:] == lists[:, :-1], axis=(2, 3))[0]
    assert same[1984:].all() == (shared_by == 64)


def test_useful_work_of_one_small_case():
    config = nsa_jax.NSAConfig(4, 2, 4, 2, 1, 1, 3)
    # Five tokens: pairs of the dense mask 15, of the window 1+2+3+3+3, of compressed blocks (ends 3, 5, ..) 0+0+0+1+1.
    assert attention.visible_pairs("dense", 5, config) == 15
    assert attention.visible_pairs("window", 5, config) == 12
    assert attention.visible_pairs("compressed", 5, config) == 2
    lists = np.array([[[[0, 2]], [[0, 2]], [[0, 2]], [[0, 2]], [[0, 1]]]])
    assert attention.visible_pairs("selected", 5, config, lists) == 1 + 2 + 3 + 4 + 5


@pytest.mark.parametrize("attention", ["dense", "window"])
def test_models_that_are_compared_have_equally_many_parameters(attention):
    options = train.argparse.Namespace(config="configs/a100_prod.py", tiny=False)
    case = dict(remat="block", length=2048, tokens=4096, devices=1, layout="data", layers="scanned")
    case |= dict(matmul="compute", averages="device", deterministic=True)
    sizes = []
    for kind in ("nsa", attention):
        config = train.make_config(options, case | {"attention": kind})
        train.widen_mlp(config, jax.devices()[:1])
        sizes.append(train.setup(config, train.VOCAB, jax.devices()[:1]).num_parameters())
    assert sizes[0] > 80e6
    np.testing.assert_allclose(sizes[1], sizes[0], rtol=0.01)


def test_curves_count_tokens_and_start_after_the_untrained_model(tmp_path):
    config = {"train": {"batch_size": 4}, "data": {"seq_len": 100}}
    (tmp_path / "env.json").write_text(json.dumps({"config": config}))
    rows = [
        {"step": 0, "val/bits_per_byte": 8.0},
        {"step": 1, "train/loss": 5.0},  # no step was timed
        *({"step": step, "perf/tokens_per_second": speed} for step, speed in ((2, 7.0), (5, 99.0), (7, 8.0))),
        {"step": 10, "val/bits_per_byte": 2.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = curves.read(tmp_path)
    assert [point["tokens"] for point in run["validation"]] == [0, 4000]
    assert run["tokens_per_second"] == 8
    (line,) = curves.draw([run]).axes[0].lines
    np.testing.assert_allclose(line.get_xydata(), [[0.004, 2.5]])


def test_curves_name_the_last_point_that_every_run_has():
    def run(name, *points):
        validation = [{"step": step, "tokens": step * 10, "bits_per_byte": value} for step, value in points]
        return {"name": name, "validation": validation}

    runs = [run("a", (0, 8.0), (5, 2.0), (10, 1.5)), run("b", (0, 8.0), (5, 2.25))]
    assert curves.last_common(runs) == 50
    labels = [line.get_label() for line in curves.draw(runs).axes[0].lines]
    assert [label.split(":")[1].split()[0] for label in labels] == ["2.0000", "2.2500"]
    with pytest.raises(SystemExit, match="same batches"):
        curves.last_common([runs[0], run("c", (0, 8.0), (7, 2.0))])


@pytest.mark.slow
def test_tokenisation_benchmark_compares_numbers_of_processes(tmp_path):
    results = tmp_path / "out.json"
    command = [sys.executable, "benchmarks/tokenisation.py", "--workers", "1", "2", "--repeats", "1", "--control"]
    subprocess.run([*command, "--megabytes", "9", "--json", str(results)], check=True, timeout=300, capture_output=True)
    data = json.loads(results.read_text())
    assert [row["workers"] for row in data["rows"]] == [1, 2]
    assert len({(row["digest"], row["tokens"]) for row in data["rows"]}) == 1
    assert all(rate > 10_000 for rate in data["tokens_per_second"].values())
    assert [row["control"] for row in data["controls"]] == [1, 2]
    assert all(row["tokens_per_second"] > 10_000 for row in data["controls"])


def test_kernels_are_listed_by_launch():
    """Three calls, each of which launches one kernel twice and another once, on two streams; nothing without a GPU."""
    event = lambda name, start, us: types.SimpleNamespace(name=name, start_ns=start, duration_ns=us * 1e3)  # noqa: E731
    line = lambda name, *events: types.SimpleNamespace(name=name, events=events)  # noqa: E731
    streams = [
        line("Stream #1", *(event("twice", call * 10 + 5, 20 + call) for call in (2, 0, 1))),
        line(
            "Stream #2", *(x for call in range(3) for x in (event("once", call * 10, 4), event("twice", call * 10, 1)))
        ),
        line("XLA Ops", event("twice", 0, 1000)),
    ]
    assert timing._by_launch(types.SimpleNamespace(lines=streams), 3) == {"twice": [1.0, 21.0], "once": [4.0]}
    assert timing.kernel_times(lambda: jax.numpy.zeros(4) + 1) == {}


@pytest.mark.parametrize("script", ["generate", "train"])
def test_a_config_that_is_not_there_is_named(script):
    command = [sys.executable, f"benchmarks/{script}.py", "--config", "nowhere.py"]
    done = subprocess.run(command, timeout=120, capture_output=True, text=True)
    assert done.returncode == 1 and "config file nowhere.py: No such file" in done.stderr


def test_a_training_benchmark_that_times_nothing_fails(tmp_path):
    """The rows say why, and are kept."""
    results = tmp_path / "rows.json"
    command = [sys.executable, "benchmarks/train.py", "--tiny", "--attention", "nsa", "--lengths", "256"]
    command += ["--tokens", "256", "--remat", "nothing", "--json", str(results)]
    done = subprocess.run(command, timeout=120, capture_output=True, text=True)
    assert done.returncode == 1 and "no case was timed" in done.stderr
    (row,) = json.loads(results.read_text())["rows"]
    assert row["remat"] == "nothing" and "remat" in row["error"]
