"""launch/: scripts parse and do what they say, the manifest is an indexed Job whose pods find each other."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
import yaml

from nsa_jax.train.processes import Cluster, detect

ROOT = Path(__file__).parents[1]
LAUNCH = ROOT / "launch"
DNS_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"

# What the manifest may hold: {key: type}, {key: {...}} for a mapping, [..] for a list of such. "!" marks required keys.
METADATA = {"name!": str}
SERVICE = {
    "apiVersion!": str, "kind!": str, "metadata!": METADATA,
    "spec!": {
        "clusterIP!": str, "publishNotReadyAddresses!": bool, "selector!": {"job-name!": str},
        "ports!": [{"name": str, "port!": int}],
    },
}  # fmt: skip
CONTAINER = {
    "name!": str, "image!": str, "workingDir": str, "command!": [str], "env!": [{"name!": str, "value!": str}],
    "ports!": [{"name": str, "containerPort!": int}],
    "resources!": {"requests!": {"cpu!": str, "memory!": str}, "limits!": {"nvidia.com/gpu!": int}},
    "volumeMounts!": [{"name!": str, "mountPath!": str}],
}  # fmt: skip
JOB = {
    "apiVersion!": str, "kind!": str, "metadata!": METADATA,
    "spec!": {
        "completionMode!": str, "completions!": int, "parallelism!": int, "backoffLimit!": int,
        "podFailurePolicy!": {
            "rules!": [
                {
                    "action!": str, "onExitCodes": {"containerName!": str, "operator!": str, "values!": [int]},
                    "onPodConditions": [{"type!": str}],
                }
            ]
        },
        "template!": {
            "spec!": {
                "subdomain!": str, "restartPolicy!": str, "terminationGracePeriodSeconds!": int,
                "containers!": [CONTAINER],
                "volumes!": [
                    {
                        "name!": str, "persistentVolumeClaim": {"claimName!": str},
                        "emptyDir": {"medium!": str, "sizeLimit!": str},
                    }
                ],
            }
        },
    },
}  # fmt: skip


def check(value, schema, where):
    """Raises if a value has another shape than the schema, a key too many or a required one too few."""
    if isinstance(schema, dict):
        assert isinstance(value, dict), where
        known = {key.rstrip("!"): key for key in schema}
        assert set(value) <= set(known), f"{where}: {set(value) - set(known)}"
        missing = {name for name, key in known.items() if key.endswith("!")} - set(value)
        assert not missing, f"{where}: {missing} missing"
        for name, entry in value.items():
            check(entry, schema[known[name]], f"{where}.{name}")
    elif isinstance(schema, list):
        assert isinstance(value, list) and value, where
        for index, entry in enumerate(value):
            check(entry, schema[0], f"{where}[{index}]")
    else:
        assert type(value) is schema, f"{where}: {value!r} is no {schema.__name__}"


@pytest.fixture(scope="module")
def manifest():
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    return service, job


def test_the_manifest_is_a_headless_service_and_an_indexed_job(manifest):
    service, job = manifest
    check(service, SERVICE, "Service")
    check(job, JOB, "Job")
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    name, spec = job["metadata"]["name"], job["spec"]
    assert re.fullmatch(DNS_LABEL, name) and re.fullmatch(DNS_LABEL, service["metadata"]["name"])
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"job-name": name}
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"] > 1
    pod = spec["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert pod["restartPolicy"] == "Never"  # which a pod failure policy needs
    (container,) = pod["containers"]
    rule, disrupted = spec["podFailurePolicy"]["rules"]
    assert disrupted == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}
    assert rule["action"] == "FailJob" and rule["onExitCodes"]["containerName"] == container["name"]
    assert rule["onExitCodes"]["operator"] == "In" and rule["onExitCodes"]["values"] == [1, 2, 3]
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert volumes == {mount["name"] for mount in container["volumeMounts"]}
    assert all(len(volume) == 2 for volume in pod["volumes"])
    assert all(mount["mountPath"].startswith("/") for mount in container["volumeMounts"])


def test_the_pods_of_the_manifest_find_each_other(manifest, monkeypatch):
    service, job = manifest
    (container,) = job["spec"]["template"]["spec"]["containers"]
    env = {entry["name"]: entry["value"] for entry in container["env"]}
    for name in list(os.environ):
        if name.startswith(("JAX_COORD", "SLURM_", "OMPI_")):
            monkeypatch.delenv(name)
    for name, value in {**env, "KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}.items():
        monkeypatch.setenv(name, value)
    (port,) = (entry["port"] for entry in service["spec"]["ports"])
    address = f"{job['metadata']['name']}-0.{service['metadata']['name']}:{port}"
    assert detect() == Cluster(address, job["spec"]["parallelism"], 1, None, "variables")
    assert container["ports"][0]["containerPort"] == port


def test_the_manifest_runs_a_command_that_train_py_accepts(manifest):
    command = manifest[1]["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[:3] == [".venv/bin/python", "-u", "train.py"]
    found = {flag.partition("=")[0]: flag.partition("=")[2] for flag in command[3:]}
    assert (ROOT / found["--config"]).is_file() and "--distributed" in found
    source = (ROOT / "nsa_jax" / "trainer.py").read_text()
    assert all(f'"{flag.lstrip("-")}"' in source for flag in found)


@pytest.mark.parametrize("script", sorted(path.name for path in LAUNCH.glob("*.sh")))
def test_scripts_parse(script):
    path = LAUNCH / script
    assert os.access(path, os.X_OK)
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    done = subprocess.run(["bash", str(path)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode != 0 and "usage:" in done.stderr


def fake(directory: Path, name: str, body: str) -> None:
    """A program of another name on the path."""
    path = directory / name
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("status", "restarts", "again"),
    [(0, 0, False), (75, 0, True), (137, 3, True), (143, 0, True), (2, 0, False), (3, 0, False), (75, 100, False)],
)
def test_the_slurm_script_starts_a_lost_run_again(tmp_path, status, restarts, again):
    fake(tmp_path, "srun", f'printf "%s\\n" "$@" > {tmp_path}/srun.txt; exit {status}')
    fake(tmp_path, "scontrol", f'echo "$@" > {tmp_path}/scontrol.txt')
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(ROOT)}
    env["SLURM_CPUS_PER_TASK"] = "32"
    command = ["bash", str(LAUNCH / "slurm.sh"), "configs/toy.py", "--config.train.steps=5"]
    done = subprocess.run(command, env={**env, "SLURM_RESTART_COUNT": str(restarts)}, cwd=tmp_path)
    assert done.returncode == status
    ran = (tmp_path / "srun.txt").read_text().split()
    assert ran[-5:] == ["-u", "train.py", "--config=configs/toy.py", "--distributed", "--config.train.steps=5"]
    assert "--cpus-per-task=32" in ran  # or Slurm 22.05 and 23.02 give each task a single CPU
    assert "--kill-on-bad-exit=0" in ran  # or srun kills the processes that are about to say who was lost
    assert (tmp_path / "scontrol.txt").exists() == again
    assert not again or (tmp_path / "scontrol.txt").read_text().split() == ["requeue", "7"]


def test_the_slurm_script_asks_for_one_process_per_host_and_a_signal():
    text = (LAUNCH / "slurm.sh").read_text()
    asked = dict(line.split(" ", 1)[1][2:].partition("=")[::2] for line in text.splitlines() if line.startswith("#SB"))
    assert asked["ntasks-per-node"] == "1" and int(asked["gpus-per-node"]) > 1 and int(asked["nodes"]) > 1
    assert asked["signal"] == "TERM@300" and "requeue" in asked and re.fullmatch(r"\d+:\d\d:\d\d", asked["time"])


@pytest.mark.parametrize("status", [0, 75, 143])
def test_the_script_for_ssh_ends_with_the_status_of_a_process_that_is_gone_before_the_signal_is_passed_on(
    tmp_path, status
):
    fake(tmp_path, "ssh", 'shift; case $1 in kill*) bash -c "$1"; sleep 1;; *) exec bash -c "$1";; esac')
    fake(tmp_path, "python", f"trap 'exit {status}' TERM; echo begun; for i in $(seq 600); do sleep 0.1; done")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "SSH": str(tmp_path / "ssh"), "PYTHON": str(tmp_path / "python"), "PORT": str(port)}
    command = ["bash", str(LAUNCH / "hosts.sh"), "left", "configs/toy.py"]
    try:
        with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as run:
            assert run.stdout.readline() == "left: begun\n"
            run.send_signal(signal.SIGTERM)
            assert run.wait(timeout=60) == status
    finally:
        Path(f"/tmp/nsa_jax-{port}.pid").unlink(missing_ok=True)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 75)])
def test_the_script_for_ssh_passes_on_who_asks_to_stop(tmp_path, number, status):
    """A person's Ctrl-C ends a run with status 0; after a scheduler's SIGTERM it is started again."""
    fake(tmp_path, "ssh", 'shift; exec env --default-signal=INT bash -c "$1"')  # a host's shell ignores no signal
    body = "trap 'exit 75' TERM; trap 'exit 0' INT; echo begun; for i in $(seq 600); do sleep 0.1; done"
    fake(tmp_path, "python", body)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "SSH": str(tmp_path / "ssh"), "PYTHON": str(tmp_path / "python"), "PORT": str(port)}
    # Where tests run in the background SIGINT is ignored, and bash cannot trap what is ignored from the beginning.
    command = ["env", "--default-signal=INT", "bash", str(LAUNCH / "hosts.sh"), "left", "configs/toy.py"]
    try:
        with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as run:
            assert run.stdout.readline() == "left: begun\n"
            run.send_signal(number)
            assert run.wait(timeout=60) == status
    finally:
        Path(f"/tmp/nsa_jax-{port}.pid").unlink(missing_ok=True)


@pytest.mark.slow
def test_one_run_over_two_hosts_is_stopped_by_a_signal(tmp_path):
    """The script for ssh with the real train.py; ssh is replaced by a shell on this machine."""
    fake(tmp_path, "ssh", 'shift; exec bash -c "$1"')
    (tmp_path / "text").mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {
        **os.environ,
        "SSH": str(tmp_path / "ssh"),
        "ADDRESS": "127.0.0.1",
        "PORT": str(port),
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": re.sub(r"(device_count=)\d+", r"\g<1>2", os.environ["XLA_FLAGS"]),
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "True",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    workdir = tmp_path / "run"
    flags = ["--config.data.source=synthetic", "--config.train.steps=4000", "--config.train.eval_every=0"]
    flags += ["--config.train.eval_batches=0", "--config.train.sample_tokens=0", "--config.guards.health=False"]
    command = ["bash", str(LAUNCH / "hosts.sh"), "left,right", "tests/train/distributed_config.py"]
    with (tmp_path / "out.txt").open("w") as out:
        command += [f"--workdir={workdir}", *flags]
        run = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=out, start_new_session=True)
    try:
        end = time.monotonic() + 240
        while not (workdir / "checkpoints" / "4").exists():
            assert run.poll() is None and time.monotonic() < end, (tmp_path / "out.txt").read_text()
            time.sleep(0.1)
        run.send_signal(signal.SIGTERM)
        assert run.wait(timeout=240) == 75, (tmp_path / "out.txt").read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        Path(f"/tmp/nsa_jax-{port}.pid").unlink(missing_ok=True)
    summary = json.loads((workdir / "summary.json").read_text())
    assert summary["stopped_by"] == "SIGTERM" and 4 <= summary["step"] < 4000
    assert (workdir / "checkpoints" / str(summary["step"])).is_dir()
    text = (tmp_path / "out.txt").read_text()
    assert re.search(r"^left: stopped by SIGTERM at step", text, re.MULTILINE) and "\nright: " in text
    assert "4 x cpu" in text
