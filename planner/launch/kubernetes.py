"""Kubernetes: a manifest of a JobSet (jobset.x-k8s.io), whose indexed pods are the nodes of a plan."""

from __future__ import annotations

import re
from typing import Any

import yaml

from planner.launch.job import Job, Launcher, commented

LABEL = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
"""Names of which pods' host names are made, with numbers behind, that have 63 characters at most."""


def write(job: Job) -> str:
    """A manifest. Each unit of the network is a job of its own whose pods have one topology; the rank of a node follows
    from the numbers of its job and of its pod.
    """
    each = job.unit[1] if job.unit else job.nodes
    placed = {"annotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": job.topology}} if job.unit else {}
    run = job.torchrun(f'"$((UNIT * {each} + JOB_COMPLETION_INDEX))"', f"{job.name}-node-0-0.{job.name}", job.script)
    container: dict[str, Any] = {
        "name": "train",
        "image": job.image,
        "command": ["bash", "-c", f"exec {run}"],
        "env": [_from_label("UNIT", "jobset.sigs.k8s.io/job-index")],
        **({"resources": {"limits": {"nvidia.com/gpu": job.per_node}}} if job.on_gpu else {}),
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    pod = {
        "restartPolicy": "Never",
        "containers": [container],
        "volumes": [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}],
    }
    nodes = {
        "name": "node",
        "replicas": job.nodes // each,
        "template": {
            "spec": {
                "backoffLimit": 0,
                "completionMode": "Indexed",
                "completions": each,
                "parallelism": each,
                "template": {"spec": pod},
            }
        },
    }
    manifest = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name, **placed},
        "spec": {"network": {"enableDNSHostnames": True, "subdomain": job.name}, "replicatedJobs": [nodes]},
    }
    return commented(job.about) + yaml.safe_dump(manifest, sort_keys=False, width=2**16)


def _from_label(name: str, label: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{label}']"}}}


def no_image(job: Job) -> str | None:
    """Containers are made of one."""
    told = "containers need an image: --image registry/name:tag, with torch, autopar and the script"
    return None if job.image else told


def no_name(job: Job) -> str | None:
    """Names of hosts begin with that of the job."""
    told = "cannot be part of a host name: give --name small letters, digits and dashes, at most 40 of them"
    return None if LABEL.fullmatch(job.name) else f"{job.name!r} {told}"


def no_topology(job: Job) -> str | None:
    """Only a label tells which machines have short ways between them."""
    if not job.unit or job.topology:
        return None
    name, count = job.unit
    return (
        f"the plan has {count} nodes in each {name!r}, and any may be given to any pod: say by which label of machines "
        f"those of one {name!r} are alike: --topology LABEL"
    )


LAUNCHER = Launcher("kubernetes", write, (no_image, no_name, no_topology), "kubectl apply -f {file}")
