"""Examples for launchers of clusters: what they say is well-formed, and what they start runs."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace

import pytest

from ipv6 import needs_ipv6
from outergrad.core.addresses import listen_at
from outergrad.launch.traffic import loopback_name
from places import REPOSITORY

yaml = pytest.importorskip("yaml")
EXAMPLES = REPOSITORY / "examples"
KUBEFLOW = EXAMPLES / "kubeflow.yaml"
RAY = EXAMPLES / "ray_train.py"
RUNTIME, JOB = yaml.safe_load_all(KUBEFLOW.read_text())
(NODE,) = RUNTIME["spec"]["template"]["spec"]["replicatedJobs"]
(CONTAINER,) = NODE["template"]["spec"]["template"]["spec"]["containers"]

# Of manifests/base/crds in kubeflow/trainer, v2.3.0.
FIELDS_OF_RUNTIME = {"mlPolicy", "podGroupPolicy", "template"}
FIELDS_OF_JOB = {
    *("activeDeadlineSeconds", "initializer", "managedBy", "runtimePatches", "runtimeRef"),
    *("suspend", "trainer"),
}
FIELDS_OF_TRAINER = {
    *("args", "command", "env", "image", "numNodes", "numProcPerNode", "resourcesPerNode")
}
# What Trainer sets as PET_NNODES and so on (pkg/runtime/framework/plugins/torch there).
PET = ["NNODES", "NPROC_PER_NODE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"]


@pytest.mark.parametrize("file", [KUBEFLOW, RAY], ids=lambda file: file.name)
def test_what_was_not_run_says_so_at_the_top(file):
    assert "Not run by us: " in "\n".join(file.read_text().splitlines()[:4])


def test_the_documents_have_the_fields_that_trainer_knows():
    assert {one["apiVersion"] for one in (RUNTIME, JOB)} == {"trainer.kubeflow.org/v1alpha1"}
    assert (RUNTIME["kind"], JOB["kind"]) == ("ClusterTrainingRuntime", "TrainJob")
    assert RUNTIME["spec"].keys() <= FIELDS_OF_RUNTIME
    assert JOB["spec"].keys() <= FIELDS_OF_JOB
    assert JOB["spec"]["trainer"].keys() <= FIELDS_OF_TRAINER
    assert RUNTIME["spec"]["mlPolicy"] == {"numNodes": 2, "torch": {}}


def test_trainer_finds_the_container_that_trains():
    labels = NODE["template"]["metadata"]["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert NODE["name"] == CONTAINER["name"] == "node"
    reserved = {f"PET_{name}" for name in PET}
    assert not reserved & {one["name"] for one in CONTAINER["env"]}


def test_the_job_is_of_the_runtime_with_a_site_per_node():
    assert JOB["spec"]["runtimeRef"] == {"name": RUNTIME["metadata"]["name"]}
    assert JOB["spec"]["trainer"]["numNodes"] == RUNTIME["spec"]["mlPolicy"]["numNodes"]
    assert JOB["spec"]["trainer"]["numProcPerNode"] == 1


def free_port(host: str) -> int:
    with listen_at(host) as listener:
        return listener.getsockname()[1]


def run_sites(command: Sequence[str], variables: Sequence[dict[str, str]]) -> list[str]:
    """Runs a command once per site, each with variables of its own; returns what they print."""
    own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback_name() or "lo"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    sites = [
        subprocess.Popen([*command], env={**kept, **own, **theirs}, **pipes) for theirs in variables
    ]
    try:
        told = [site.communicate(timeout=120) for site in sites]
    finally:
        for site in sites:
            site.kill()
    assert [site.returncode for site in sites] == [0, 0], told
    return [printed for printed, _ in told]


HOSTS = ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)]


@pytest.mark.slow
@pytest.mark.parametrize("host", HOSTS)
def test_the_command_of_the_runtime_takes_what_trainer_sets(host):
    torchrun, script = CONTAINER["command"]
    assert torchrun == "torchrun"
    assert script == "/scripts/train.py"
    command = [sys.executable, "-m", "torch.distributed.run", str(EXAMPLES / "train.py")]
    values = ["2", "1", "{}", host, str(free_port(host))]
    variables = [
        {f"PET_{name}": value.format(rank) for name, value in zip(PET, values, strict=True)}
        for rank in range(2)
    ]
    first, second = run_sites(command, variables)
    (accuracy,) = re.findall(r"^epoch 5: test accuracy ([\d.]+)%", first, re.M)
    assert float(accuracy) > 90
    assert second == ""


ALONE = "import ray_train; ray_train.train({'lr': 1e-3, 'epochs': 3})"
GROUPED = f"import torch.distributed as dist; dist.init_process_group('gloo'); {ALONE}"


@pytest.mark.slow
@pytest.mark.parametrize("code", [ALONE, GROUPED], ids=["no group yet", "a group, as of Ray"])
def test_the_training_of_ray_takes_what_torchrun_sets(code):
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1"))}
    paths = os.pathsep.join([str(EXAMPLES), *sys.path])
    variables = [
        {**where, "RANK": str(rank), "WORLD_SIZE": "2", "PYTHONPATH": paths} for rank in range(2)
    ]
    first, second = run_sites([sys.executable, "-c", code], variables)
    losses = [float(loss) for loss in re.findall(r"^epoch \d: loss ([\d.]+)", first, re.M)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert second == ""


def stand_in(noted: list) -> dict[str, ModuleType]:
    """Modules in place of Ray's, whose functions take the arguments that its pages name."""

    def scaling(num_workers=1, use_gpu=False, resources_per_worker=None, placement_strategy="PACK"):
        return num_workers, use_gpu, placement_strategy

    def torch_config(backend=None, init_method="env", timeout_s=1800):
        return backend, init_method

    def trainer(
        train_loop_per_worker, *, train_loop_config=None, torch_config=None, scaling_config=None
    ):
        about = (train_loop_per_worker, train_loop_config, torch_config, scaling_config)
        return SimpleNamespace(fit=lambda: noted.append(about))

    modules = {name: ModuleType(name) for name in ("ray", "ray.train", "ray.train.torch")}
    modules["ray.train"].ScalingConfig = scaling
    modules["ray.train.torch"].TorchConfig = torch_config
    modules["ray.train.torch"].TorchTrainer = trainer
    return modules


def test_the_program_calls_ray_as_its_documentation_says(monkeypatch):
    noted = []
    for name, module in stand_in(noted).items():
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.util.spec_from_file_location("ray_train", RAY)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    program.main()
    ((train, settings, backend, scaling),) = noted
    assert train is program.train
    assert settings.keys() == {"lr", "epochs"}
    assert backend == ("gloo", "env")
    assert scaling == (program.SITES, False, "SPREAD")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.timeout(300)
def test_the_program_trains_by_ray():
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    settings = {"env": variables, "capture_output": True, "text": True, "timeout": 280}
    done = subprocess.run([sys.executable, str(RAY)], **settings)
    assert done.returncode == 0, done.stderr
    told = done.stdout + done.stderr
    losses = {
        int(epoch): float(loss) for epoch, loss in re.findall(r"epoch (\d): loss ([\d.]+)", told)
    }
    assert losses.keys() == {1, 2, 3, 4, 5}
    assert losses[5] < losses[1]
