"""The search over kernel configurations: what it would try, what it keeps and what it refuses; figures need a GPU."""

import dataclasses
import json
import typing

import jax
import jax.numpy as jnp
import pytest

from benchmarks import tune
from nsa_jax.ops import tiles as tuning

A100_BACKWARD = {"ranged_dq_config", "ranged_dkv_config"}
if jax.__version_info__ >= (0, 11):
    A100_BACKWARD = {"ranged_sm80_dq_config", "ranged_sm80_dkv_config"}


@pytest.mark.parametrize(
    ("arguments", "kernels"),
    [
        (["--op", "selected"], {"selected_config"}),
        (["--op", "selected", "--shape", "12,2,64,64"], {"selected_config", "selected_gather_config"}),
        (["--op", "selected", "--shape", "32,8,128,128"], {"selected_config", "selected_gather_config"}),
        (["--op", "selected", "--pass", "bwd"], {"selected_backward_config"}),
        (["--op", "select"], {"select_hopper_config"}),
        (["--op", "select", "--gpu", "a100-80gb"], {"select_config"}),
        (["--op", "compressed", "--pass", "bwd"], {"ranged_hopper_dq_config", "ranged_hopper_dkv_config"}),
        (["--op", "window", "--pass", "bwd", "--gpu", "l40s"], {"ranged_dq_config", "ranged_dkv_config"}),
        (["--op", "window", "--pass", "bwd", "--gpu", "a100-80gb"], A100_BACKWARD),
    ],
)
def test_dry_runs_list_the_neighbours_of_the_heuristics_choice(arguments, kernels, tmp_path, capsys):
    path = tmp_path / "tuned.json"
    rows = tune.main([*arguments, "--dry", "--length", "65536", "--json", str(path)])
    assert {row["kernel"] for row in rows} == kernels
    for name in kernels:
        mine = [row for row in rows if row["kernel"] == name]
        assert mine[0]["changed"] == {} and all(len(row["changed"]) == 1 for row in mine[1:])
        values = sum(len(values) for values in tune.SPACES[name].values())
        assert values - len(tune.SPACES[name]) <= len(mine) - 1 <= values
    assert json.loads(path.read_text())["rows"] == rows
    assert f"heuristic {rows[0]['base']}" in capsys.readouterr().out


def test_spaces_name_functions_and_fields_that_exist():
    for name, space in tune.SPACES.items():
        made = typing.get_type_hints(getattr(tune.rules(name), name))["return"]
        assert set(space) <= {field.name for field in dataclasses.fields(made)}, name
        assert getattr(tune.rules(name), name).__module__ == tune.rules(name).__name__, "defined where it is replaced"


def test_search_keeps_what_is_fastest_and_right(monkeypatch):
    """A kernel that is fastest at 4 keys and 2 stages; 8 keys are wrong, 16 do not compile."""
    monkeypatch.setitem(tune.SPACES, "ranged_hopper_config", {"keys": (2, 4, 8, 16), "stages": (1, 2, 3)})
    chosen = tuning.ranged_hopper_config(128, 128, None, 4095)
    config = None

    def kernel(x):
        nonlocal config
        config = tuning.ranged_hopper_config(128, 128, None, 4095)
        if config.keys == 16:
            raise ValueError("does not fit")
        return x * (2.0 if config.keys == 8 else 1.0)

    def timer(function, arguments):
        return {2: 3.0, 4: 2.0, 128: 4.0}[config.keys] + abs(config.stages - 2)

    base = tuning.RangedHopperConfig(128, 3)
    rows = tune.search(lambda: (kernel, (jnp.ones(3),)), "ranged_hopper_config", base, timer)
    assert [row["changed"] for row in rows if row["best"]] == [{"keys": 4, "stages": 2}]
    assert {str(row["changed"]): row["ms"] for row in rows if row["ms"]} == {
        "{}": 5.0,
        "{'keys': 2}": 4.0,
        "{'keys': 4}": 3.0,
        "{'keys': 4, 'stages': 1}": 3.0,
        "{'keys': 4, 'stages': 2}": 2.0,
    }
    errors = {row["changed"]["keys"]: row["error"] for row in rows if row["error"]}
    assert "differs from the heuristic's result by 1.0e+00" in errors[8] and "does not fit" in errors[16]
    assert tuning.ranged_hopper_config(128, 128, None, 4095) == chosen != base  # put back
