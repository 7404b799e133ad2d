"""What starts a plan's processes: rank order, what is asked of machines, and what linters of the tools say."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.base.errors import InputError
from planner.cost.cluster import ClusterSpec
from planner.ir.layout import Mesh
from planner.launch.job import Job, job
from planner.launch.launchers import LAUNCHERS, launched, launcher_of

SCRIPT = ("train.py", "--text", "it's $HOME")
TOLD = {"image": "registry/train:1", "topology": "example.com/rack"}


def clusters() -> dict[str, ClusterSpec]:
    """One machine, four of them, and two racks of three machines."""
    spec = ClusterSpec.preset("dgx-h100", nodes=4)
    node, outer = spec.levels
    racks = (node, outer.model_copy(update={"name": "rack", "size": 3}), outer.model_copy(update={"size": 2}))
    return {
        "one": ClusterSpec.local(4),
        "four": spec,
        "racks": spec.model_copy(update={"levels": racks, "name": "racks"}),
    }


MESHES = {
    "one": (Mesh.of(tensor=4), 1),
    "four": (Mesh.of(data=2, tensor=8), 2),
    "racks": (Mesh.of(data=6, tensor=8), 1),
}


def a_job(which: str, **given: Any) -> Job:
    return job(clusters()[which], *MESHES[which], given.pop("command", SCRIPT), **{**TOLD, **given})


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder of programs: ``torchrun`` tells its arguments, ``srun`` runs a task on each of the nodes in ``HOSTS``
    (``name:topology``), the last first, as it may.
    """
    told = 'for word in "$@"; do echo "$word"; done; echo ---'
    srun = (
        'while [[ "$1" == --* ]]; do shift; done\n'
        'for host in $(echo "$HOSTS" | tr " " "\\n" | tac); do\n'
        '  SLURMD_NODENAME="${host%%:*}" SLURM_TOPOLOGY_ADDR="${host##*:}" "$@"\ndone'
    )
    for name, body in {
        "torchrun": told,
        "srun": srun,
        "scontrol": 'echo "$HOSTS" | tr " " "\\n" | cut -d: -f1',
    }.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path


def runs(tools: Path, text: str, *words: str, **env: str) -> list[list[str]]:
    """Run a script with these tools: the arguments of every ``torchrun``."""
    env = {"PATH": f"{tools}:{os.environ['PATH']}", **env}
    done = subprocess.run(["bash", "-c", text, "script", *words], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [each.strip().splitlines() for each in done.stdout.split("---\n") if each.strip()]


def test_on_one_machine(tools: Path) -> None:
    ((first, *rest),) = runs(tools, launched(LAUNCHERS["torchrun"], a_job("one")))
    assert [first, *rest] == ["--standalone", "--nproc-per-node=4", *SCRIPT]


def test_torchrun_is_told_which_machine_it_is_on(tools: Path) -> None:
    text = launched(LAUNCHERS["torchrun"], a_job("four"))
    (words,) = runs(tools, text, "2", MASTER_ADDR="first")
    assert words[:4] == ["--nnodes=4", "--nproc-per-node=8", "--node-rank=2", "--master-addr=first"]
    assert tuple(words[5:]) == SCRIPT
    with pytest.raises(AssertionError, match="machines 0 to 3, and not 4"):
        runs(tools, text, "4", MASTER_ADDR="first")
    with pytest.raises(AssertionError, match="MASTER_ADDR: set it to the name or address of machine 0"):
        runs(tools, text, "1")
    with pytest.raises(AssertionError, match="give the number of this machine, 0 to 3"):
        runs(tools, text)


@pytest.mark.parametrize("which, hosts, order", [
    ("four", "a:s b:s c:s d:s", "abcd"), ("racks", "a:s1 b:s0 c:s1 d:s0 e:s0 f:s1", "bdeacf"),
])  # fmt: skip
def test_nodes_of_slurm_are_in_the_order_of_the_network(tools: Path, which: str, hosts: str, order: str) -> None:
    """Whatever names they have, and in which order tasks begin."""
    text = launched(LAUNCHERS["slurm"], a_job(which))
    found = runs(tools, text, SLURM_JOB_NUM_NODES=str(len(order)), SLURM_JOB_NODELIST="all", HOSTS=hosts)
    nodes = [host.partition(":")[0] for host in reversed(hosts.split())]
    assert [words[2] for words in found] == [f"--node-rank={order.index(node)}" for node in nodes]
    assert {words[3] for words in found} == {f"--master-addr={order[0]}"}
    assert all(tuple(words[5:]) == SCRIPT for words in found)
    with pytest.raises(AssertionError, match=f"the plan is for {len(order)} nodes, and the job has 2"):
        runs(tools, text, SLURM_JOB_NUM_NODES="2", SLURM_JOB_NODELIST="all", HOSTS=hosts)


def test_slurm_is_asked_for_whole_machines() -> None:
    text = launched(LAUNCHERS["slurm"], a_job("racks"))
    asked = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert asked == ["job-name=train", "nodes=6", "ntasks-per-node=1", "gpus-per-node=8", "exclusive", "switches=2"]
    assert "gpus" not in launched(LAUNCHERS["slurm"], a_job("one"))


@pytest.mark.parametrize("which, replicas, pods", [("four", 1, 4), ("racks", 2, 3)])
def test_pods_of_a_rack_have_ranks_one_after_another(tools: Path, which: str, replicas: int, pods: int) -> None:
    manifest = yaml.safe_load(launched(LAUNCHERS["kubernetes"], a_job(which)))
    (nodes,) = manifest["spec"]["replicatedJobs"]
    spec = nodes["template"]["spec"]
    assert (nodes["replicas"], spec["completions"], spec["parallelism"]) == (replicas, pods, pods)
    assert ("annotations" in manifest["metadata"]) == (which == "racks")
    (container,) = spec["template"]["spec"]["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    ranks = []
    for unit in range(replicas):
        for index in range(pods):
            (words,) = runs(tools, container["command"][2], UNIT=str(unit), JOB_COMPLETION_INDEX=str(index))
            ranks.append(words[2])
            assert words[3] == "--master-addr=train-node-0-0.train" and tuple(words[5:]) == SCRIPT
    assert ranks == [f"--node-rank={rank}" for rank in range(replicas * pods)]


@pytest.mark.parametrize("which", ["one", "four", "racks"])
def test_a_manifest_is_a_job_set(which: str) -> None:
    """By the models that Kubeflow generates of its definition: every field is one of them, and of its type."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    manifest = yaml.safe_load(launched(LAUNCHERS["kubernetes"], a_job(which)))
    assert models.JobsetV1alpha2JobSet.from_dict(manifest).to_dict() == manifest
    manifest["spec"]["network"]["subdomains"] = manifest["spec"]["network"].pop("subdomain")
    assert models.JobsetV1alpha2JobSet.from_dict(manifest).to_dict() != manifest, "it knows what it does not know"


def test_a_manifest_is_as_kubernetes_has_it() -> None:
    """The job inside of it, by the schema of the API, strictly; that of a JobSet is not in it."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for which in ("one", "four", "racks"):
        manifest = yaml.safe_load(launched(LAUNCHERS["kubernetes"], a_job(which)))
        (nodes,) = manifest["spec"]["replicatedJobs"]
        inner = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": nodes["template"]["spec"]}
        kubernetes_validate.validate(inner, "1.30", strict=True)


@pytest.mark.parametrize("which", ["one", "four", "racks"])
@pytest.mark.parametrize("name", ["torchrun", "slurm"])
def test_scripts_have_nothing_that_shells_warn_of(tmp_path: Path, name: str, which: str) -> None:
    script = tmp_path / "script.sh"
    script.write_text(launched(LAUNCHERS[name], a_job(which)))
    subprocess.run(["bash", "-n", script], check=True)
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if shellcheck is not None:
        done = subprocess.run([shellcheck, "--severity=warning", script], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_a_script_says_what_ranks_are_for() -> None:
    assert a_job("four").about == (
        "32 ranks, planned for dgx-h100: node i has ranks 8 i to 8 i + 7.",
        "pipeline 2: 16 apart, across nodes.",
        "data 2: 8 apart, across nodes.",
        "tensor 8: neighbours, inside a node.",
    )
    assert "The 3 nodes of a rack follow one another." in a_job("racks").about
    assert a_job("one").about == (
        "4 ranks, planned for local: all on one node.",
        "tensor 4: neighbours, inside a host.",
    )


def test_levels_inside_a_machine_are_no_machines() -> None:
    """Six machines, or two of 24 devices, where a plan's innermost level is not a machine."""
    assert (a_job("racks").nodes, a_job("racks").unit) == (6, ("rack", 3))
    assert (a_job("racks", nodes=2).per_node, a_job("racks", nodes=2).unit) == (24, None)


@pytest.mark.parametrize("given, message", [
    ({"which": "four", "nodes": 8}, "8 nodes are asked for, but the plan is for 4 of 8 devices \\(each a 'node' of"),
    ({"which": "four", "nodes": 3}, "3 nodes are asked for"),
    ({"which": "four", "command": ()}, "there is nothing to run: give the script"),
    ({"which": "four", "image": ""}, "kubernetes: containers need an image: --image"),
    ({"which": "four", "name": "My_Job"}, "'My_Job' cannot be part of a host name"),
    ({"which": "racks", "topology": ""}, "the plan has 3 nodes in each 'rack', .*: --topology LABEL"),
])  # fmt: skip
def test_what_cannot_be_started_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        launched(LAUNCHERS["kubernetes"], a_job(**given))


def test_unknown_launchers() -> None:
    with pytest.raises(InputError, match="no launcher 'slrum'; did you mean 'slurm'\\? there are: torchrun"):
        launcher_of("slrum")
