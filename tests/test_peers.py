"""The comparison with published kernels runs end to end with stand-ins; the figures themselves come from GPUs."""

import json
import subprocess

import jax.numpy as jnp
import numpy as np
import pytest

import nsa_jax
from benchmarks import peer_adapters, peers, timing

pytestmark = pytest.mark.usefixtures("quick_compilation")

GEOMETRY = "compress_block=4,compress_stride=2,select_block=8,num_selected=4,window=12"
TINY = ["--lengths", "40", "--shape", "4,2,16", "--geometry", GEOMETRY, "--repeats", "1", "--min-sample-s", "0"]

STAND_IN = """
import dataclasses
from benchmarks.peer_adapters import Peer
from benchmarks.peers import attend_as
import stand_in_project

def load(checkout, config):
    config = dataclasses.replace(config, compress_block=8, compress_stride=8)
    right = attend_as(config, window=False)
    attend = lambda query, *rest: right(query, *rest) * stand_in_project.SCALE
    return Peer(attend, config, window=False, notes="a stand-in", framework="jax")
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Arguments that add a peer of JAX, and the file that says what it multiplies its output by."""
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    (checkout / "stand_in_project.py").write_text("SCALE = 1.0\n")
    monkeypatch.syspath_prepend(str(checkout))
    monkeypatch.delitem(peers.sys.modules, "stand_in_project", raising=False)
    (tmp_path / "adapter.py").write_text(STAND_IN)
    flags = ["--peer", f"mine={checkout}", "--adapter", f"mine={tmp_path / 'adapter.py'}"]
    return flags, checkout / "stand_in_project.py"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the program and gives what it wrote."""

    def go(*arguments):
        monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")  # put back afterwards
        peers.main([*arguments, "--json", str(tmp_path / "out.json")])
        assert peers.os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
        return json.loads((tmp_path / "out.json").read_text())

    return go


def test_a_peer_is_timed_and_compared_beside_ours_with_its_own_geometry(run, stand_in, capsys):
    data = run(*TINY, *stand_in[0])
    names = [(row["peer"], row.get("default"), row["pass"]) for row in data["rows"]]
    both = ("fwd", "fwd_bwd")
    expected = (("dense", None), ("nsa_jax", True), ("nsa_jax", False), ("mine", None))
    assert names == [(name, default, which) for name, default in expected for which in both]
    by_name = {row["peer"]: row for row in data["rows"] if row["pass"] == "fwd_bwd" and not row.get("default")}
    mine, like_it, dense = by_name["mine"], by_name["nsa_jax"], by_name["dense"]
    assert mine["geometry"] == like_it["geometry"] and mine["geometry"]["compress_block"] == 8
    assert like_it["like"] == ["mine"] and not mine["window_branch"] and not like_it["window_branch"]
    assert (mine["ours_ms"], mine["dense_ms"]) == (like_it["ms"], dense["ms"])
    assert {"B": 1, "N": 4, "K": 2, "H": 16, "T": 40, "notes": "a stand-in"}.items() <= mine.items()
    assert mine["check"]["tokens"] == 32
    assert 0 < mine["check"]["output"] < 0.02 and mine["check"]["tokens_off"] < 0.1
    assert all(0 < mine["check"]["gradients"][name] < 0.04 for name in peers.INPUTS)
    assert "check" not in dense
    table = capsys.readouterr().out.rpartition("\n\n")[2]
    assert table.startswith("forward + backward, ms") and "B=1, N=4, K=2, H=16" in table
    assert [line.split("  ")[0] for line in table.splitlines()[2:]] == [
        "dense",
        "nsa_jax",
        "nsa_jax, as mine, no window",
        "mine, no window",
    ]
    assert f"{mine['ms']:.3g} ({mine['ms'] / mine['ours_ms']:.2f}x)" in table


def test_a_wrong_peer_shows_in_its_difference(run, stand_in):
    flags, project = stand_in
    project.write_text("SCALE = 1.25\n")
    rows = run(*TINY, *flags, "--passes", "fwd", "--no-dense")["rows"]
    found = {row["peer"]: row["check"] for row in rows}
    np.testing.assert_allclose(found["mine"]["output"], 0.25, atol=0.02)
    assert found["nsa_jax"]["output"] < 0.02


def test_a_failing_peer_leaves_its_error_and_the_others(run, stand_in, tmp_path, capsys):
    flags, _ = stand_in
    (tmp_path / "late.py").write_text(
        STAND_IN.replace("right(query, *rest) * stand_in_project.SCALE", "1 / 0").replace("8, compress_stride=8", "8")
    )
    (tmp_path / "early.py").write_text("import a_package_that_is_not_there\n")
    for name in ("late", "early"):
        flags = [*flags, "--peer", f"{name}={tmp_path}", "--adapter", f"{name}={tmp_path / name}.py"]
    rows = run(*TINY, *flags, "--passes", "fwd", "--no-dense")["rows"]
    errors = {row["peer"]: row for row in rows if "error" in row}
    assert set(errors) == {"late", "early"}
    assert "a_package_that_is_not_there" in errors["early"]["error"] and "T" not in errors["early"]
    assert "ZeroDivisionError" in errors["late"]["error"] and errors["late"]["T"] == 40
    assert "ZeroDivisionError" in errors["late"]["check"]["error"]
    assert [row["peer"] for row in rows if "ms" in row] == ["nsa_jax", "nsa_jax", "mine", "nsa_jax"]
    assert "late, no window at N=4, K=2, T=40: ZeroDivisionError" in capsys.readouterr().out


def test_rows_are_written_as_they_come(tmp_path, stand_in, monkeypatch):
    out = tmp_path / "out.json"

    def stop(row):
        if row["peer"] == "mine":
            raise KeyboardInterrupt

    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    monkeypatch.setattr(peers, "print_row", stop)
    with pytest.raises(KeyboardInterrupt):
        peers.main([*TINY, *stand_in[0], "--passes", "fwd", "--json", str(out)])
    assert [row["peer"] for row in json.loads(out.read_text())["rows"]] == ["dense", "nsa_jax", "nsa_jax"]


def test_peers_that_compute_something_else_are_not_compared():
    config = nsa_jax.NSAConfig(4, 2, 8, 4, 1, 2, 12)
    ours = peers.ours(config, window=True)
    assert "not_compared" in peers.check(peers.dense(config), (1, 2, 1, 16), 0)
    other = peers.dataclasses.replace(ours, same_selection=False)
    found = peers.check(other, (1, 2, 1, 16), 0)
    assert found["output"] < 0.02 and "not compared" in found["tokens_off"]
    nan = peers.dataclasses.replace(ours, attend=lambda query, *rest: query * jnp.nan)
    with pytest.raises(FloatingPointError):
        peers.check(nan, (1, 2, 1, 16), 0)


def test_another_selection_shows_in_the_share_of_tokens():
    config = nsa_jax.NSAConfig(4, 2, 8, 4, 1, 2, 12)
    more = peers.dataclasses.replace(config, num_local=3)
    found = peers.check(
        peers.dataclasses.replace(peers.ours(config, True), attend=peers.attend_as(more, True)), (1, 2, 1, 16), 0
    )
    assert found["output"] < 0.02 < 0.1 < found["tokens_off"] < 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--peer", "fla=/no/such/folder"], "there is no such folder; clone the project"),
        (["--peer", "fla"], "must be NAME=PATH"),
        (["--peer", "nsa_jax=."], "the name nsa_jax is taken"),
        (["--peer", "fla=.", "--peer", "fla=."], "the name fla is taken"),
        (["--peer", "unknown=."], "no adapter of this name; shipped are fla, xunhao"),
        (["--peer", "mine=.", "--adapter", "mine=missing.py"], "needs a file"),
        (["--shape", "6,4,128"], "K must divide N"),
        (["--shape", "4,2,16:"], "invalid case value"),
        (["--peer-commit", "fla=abc"], "no --peer is named ['fla']"),
        (["--peer", "fla=.", "--peer-commit", "fla"], "must be NAME=COMMIT"),
        (["--passes", "bwd"], "choose from fwd, fwd_bwd"),
        (["--geometry", "windows=5"], "windows"),
        (["--geometry", "window=0"], "must be a positive int"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_measured(flags, message, capsys):
    with pytest.raises(SystemExit):
        peers.parse(flags)
    assert message in capsys.readouterr().err


def test_defaults_are_the_shapes_of_the_tables(tmp_path):
    args = peers.parse(["--peer", f"fla={tmp_path}", "--geometry", "num_selected=8"])
    lengths = [2048, 8192, 32768, 65536]
    assert args.cases == [((64, 4, 128), lengths), ((32, 8, 128), lengths)]
    assert args.peers == {"fla": tmp_path} and args.config == nsa_jax.NSAConfig(num_selected=8)


def test_a_shape_has_lengths_of_its_own_and_a_copy_the_commit_it_is_said_to_have(run, stand_in):
    flags = ["--geometry", GEOMETRY, "--passes", "fwd", "--no-dense", "--repeats", "1", "--min-sample-s", "0"]
    cases = ["--shape", "4,2,16:24", "--shape", "2,2,16:16", "--shape", "4,2,16"]
    rows = run(*flags, *cases, "--lengths", "32", *stand_in[0], "--peer-commit", "mine=abc123")["rows"]
    rows = [row for row in rows if row["peer"] == "mine"]
    assert [(row["N"], row["T"]) for row in rows] == [(4, 24), (2, 16), (4, 32)]
    assert {row["commit"] for row in rows} == {"abc123"}
    assert rows[0]["check"] == rows[2]["check"] != rows[1]["check"]


def test_kernels_that_tune_themselves_first_see_a_timed_length(tmp_path, monkeypatch):
    args = peers.parse(["--lengths", "40", "--shape", "2,1,16", "--geometry", GEOMETRY, "--seed", "0"])
    seen = []

    class Recorded:
        def __init__(self, peer, inputs, cotangent):
            self.tokens = inputs[0].shape[1]

        def output_and_gradients(self):
            seen.append(self.tokens)
            raise MemoryError  # shows in the row of this length, not in the comparison

    monkeypatch.setattr(peers, "Run", Recorded)
    monkeypatch.setattr(peers, "check", lambda *_: seen.append("check") or {"output": 0})
    peer = peers.dataclasses.replace(peers.ours(args.config, True), framework="torch")
    table = peers.Table(args, (1, 2, 1, 16), seen.append)
    assert [table.checked("a", peer, 40), table.checked("a", peer, 80)] == [{"output": 0}] * 2
    assert seen == [40, "check"]


def test_missing_pytorch_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(peers.sys.modules, "torch", None)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    with pytest.raises(SystemExit, match="pip install torch triton"):
        peers.main(["--peer", f"fla={tmp_path}", *TINY])


def test_a_package_from_elsewhere_is_not_taken_for_the_checkouts(tmp_path):
    (tmp_path / "a_stand_in").mkdir()
    (tmp_path / "a_stand_in" / "__init__.py").write_text("")
    assert peer_adapters.import_from(tmp_path, "a_stand_in").__file__.startswith(str(tmp_path))
    assert str(tmp_path) not in peers.sys.path
    with pytest.raises(ImportError, match="json was imported from"):
        peer_adapters.import_from(tmp_path, "json")


def test_packages_that_are_not_timed_have_stand_ins_only_while_a_project_is_imported(tmp_path):
    (tmp_path / "with_stand_ins.py").write_text(
        "import no_such_package, json\nkept = no_such_package.name, json.dumps\n"
    )
    with peer_adapters.stand_ins(no_such_package={"name": 3}, json={"dumps": None}) as missing:
        module = peer_adapters.import_from(tmp_path, "with_stand_ins")
    assert missing == ["no_such_package"] and module.kept == (3, json.dumps)
    assert "no_such_package" not in peers.sys.modules
    assert peer_adapters._version("3.10.0+git") > peer_adapters._version("3.4.0")


def test_commits_are_those_of_the_checkout_itself(tmp_path):
    def git(*words):
        name = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *name, *words], check=True, capture_output=True)

    assert timing.commit_of(tmp_path) is None
    git("init")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    first = timing.commit_of(tmp_path)
    assert first is not None and len(first) == 12
    (tmp_path / "file").write_text("2")
    assert timing.commit_of(tmp_path) == first + "+"
    (tmp_path / "inside").mkdir()
    assert timing.commit_of(tmp_path / "inside") is None


def test_measure_waits_by_the_function_it_is_given():
    waited = []
    assert timing.measure(lambda x: x + 1, [(1,)], repeats=2, min_sample_s=0, wait=waited.append) > 0
    assert waited == [2, 2, 2, 2]


def test_every_shipped_adapter_says_what_it_needs(tmp_path, monkeypatch):
    monkeypatch.setitem(peers.sys.modules, "torch", None)
    for adapter in peer_adapters.ADAPTERS.values():
        with pytest.raises(SystemExit, match="PyTorch and Triton"):
            adapter(tmp_path, nsa_jax.NSAConfig())
