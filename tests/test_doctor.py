"""`nsa-jax doctor`: one screen, also where packages or drivers are missing or broken."""

import subprocess
from types import SimpleNamespace

import jax
import pytest

from nsa_jax import cli, doctor


def test_the_screen_names_what_an_issue_needs(capsys):
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    names = [line.split("  ")[0].strip() for line in lines]
    wanted = {"nsa_jax", "machine", "packages", "CUDA packages", "extras", "GPU", "JAX's devices", "one tiny step"}
    assert wanted <= set(names) and {"disk", "cache", "variables"} <= set(names)
    step = next(line for line in lines if line.startswith("one tiny step"))
    assert "by xla" in step and float(step.rpartition("off by ")[2]) < 2e-5
    assert "nothing wrong was found" in lines[-1]


def test_an_operator_that_is_wrong_is_a_finding(monkeypatch):
    right = doctor.nsa_self_attention

    def wrong(*arrays, implementation=None, **options):
        return right(*arrays, implementation=implementation, **options) + (0.0 if implementation else 0.1)

    monkeypatch.setattr(doctor, "nsa_self_attention", wrong)
    _, found = doctor.tiny_step()
    assert found is not None and "off by 1.0e-01" in found


def test_whatever_is_broken_is_one_line(monkeypatch, capsys):
    def broken():
        raise RuntimeError("no\nbackend")

    monkeypatch.setattr(jax, "devices", broken)
    assert doctor.main([]) == 1
    assert "JAX finds no devices: RuntimeError: no backend" in capsys.readouterr().out


def test_a_driver_that_jax_does_not_use_is_a_finding(monkeypatch):
    monkeypatch.setattr(doctor, "has_accelerator", lambda: True)
    monkeypatch.setattr(doctor, "tiny_step", lambda: ("ran", None))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert doctor.examine()[1] == ["there is a driver of a GPU, but JAX uses the CPU: JAX_PLATFORMS=cpu asks for that"]
    monkeypatch.delenv("JAX_PLATFORMS")
    assert "nsa_jax[cuda12]" in doctor.examine()[1][0]


@pytest.mark.parametrize("plain, cuda", [("| CUDA Version: 12.4     |", "12.4"), ("", "unknown")])
def test_cards_are_counted(plain, cuda, monkeypatch):
    card = "NVIDIA H100 80GB HBM3, 81559 MiB, 550.54, 9.0"

    def smi(command, **_):
        return SimpleNamespace(returncode=0, stdout=f"{card}\n{card}\n" if len(command) > 1 else plain, stderr="")

    monkeypatch.setattr(subprocess, "run", smi)
    assert doctor._gpus() == [("GPU", f"2 x {card}"), ("driver's CUDA", cuda)]


def test_a_tool_of_the_driver_that_says_nothing_or_cannot_be_run_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexit 9\n")
    tool.chmod(0o755)
    assert doctor._gpus() == [("GPU", "nvidia-smi: status 9")]
    tool.write_text("of another machine")
    assert doctor._gpus() == [("GPU", "nvidia-smi does not answer (OSError)")]


def test_what_an_interrupted_installation_left_is_passed_over(tmp_path, monkeypatch):
    (tmp_path / "~umpy-1.0.dist-info").mkdir()
    plugin = tmp_path / "jax_cuda12_plugin-0.11.2.dist-info"
    plugin.mkdir()
    (plugin / "METADATA").write_text("Name: jax_cuda12_plugin\nVersion: 0.11.2\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "jax-cuda12-plugin" in doctor._plugins()


def test_a_disk_that_cannot_be_looked_at_is_one_line(tmp_path, monkeypatch):
    assert doctor._disk("~no_such_user/x").startswith("~no_such_user/x: ")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert doctor._disk(".") == ".: No such file or directory"


def test_packages_that_an_extra_lacks_are_named(monkeypatch):
    required = [
        "jax>=0.10",
        'flax>=0.12; extra == "nn"',
        'nsa_jax[nn]; extra == "train"',
        'no-such>=1; extra == "train"',
    ]
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda _: required)
    assert doctor.missing_of("nn") == [] and doctor.missing_of("train") == ["no-such"]
    assert doctor.missing_of("wandb") is None  # the installed metadata does not know it
