"""The default process group and this rank's device, as ``torchrun`` prepared them."""

from __future__ import annotations

import atexit
import os

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from planner.base import host as machine
from planner.base.errors import PlanError
from planner.cost.cluster import ClusterSpec


def start_process_group(cluster: ClusterSpec) -> torch.device:
    """Initialise the default process group if ``torchrun`` prepared one and nobody has; returns this rank's device.

    Raises:
        PlanError: not started by ``torchrun``, or no GPU where the cluster has them.
    """
    on_gpu = cluster.backend == "nccl"
    if on_gpu and not torch.cuda.is_available():
        raise PlanError(
            f"cluster {cluster.name!r} communicates over nccl, but this machine has no GPU: use ClusterSpec.local"
        )
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            raise PlanError(
                f"autopar.parallelize runs in {cluster.world_size} processes, but no process group is initialised: "
                f"start the program with `torchrun --nproc-per-node {cluster.world_size} ...`; to check a plan in one "
                "process use autopar.verify, to only plan use autopar.plan"
            )
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else cluster.backend)  # the plan may offload
        atexit.register(_end)
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def share_host(cluster: ClusterSpec) -> None:
    """Prepare for gradients on the host, which are communicated too, such as their norm: beside GPUs the host's cores
    are shared out among the processes, which step with them.

    Raises:
        PlanError: the process group that there is communicates on GPUs alone.
    """
    if torch.device("cpu") not in distributed_c10d._get_default_group()._device_types:
        raise PlanError(
            "the plan keeps gradients on the host, where this process group does not communicate: initialise it with "
            "torch.distributed.init_process_group('cpu:gloo,cuda:nccl'), or leave that to autopar.parallelize"
        )
    if cluster.backend == "nccl":  # torchrun leaves each process one thread, and now the host updates
        share = machine.cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(share, torch.get_num_threads()))


def _end() -> None:
    """End the group that was started here, unless the user has: threads of gloo may abort a process that exits beside
    them.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
