"""A plan's cluster and mesh as a job: which machine has which ranks, and what each process runs."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from planner.base.errors import InputError
from planner.cost.cluster import ClusterSpec
from planner.ir.layout import MICRO, PIPELINE, Axis, Mesh


@dataclass(frozen=True)
class Job:
    """Processes on some machines: machine ``i`` has ranks ``i * per_node`` to ``(i + 1) * per_node - 1``.

    Attributes:
        name: of the job.
        nodes: machines.
        per_node: processes on each, one for every device.
        unit: a part of the network between a machine and all of them, with the number of machines that lie in it one
            after the other: ``("rack", 4)``; ``None`` where links between all machines are alike.
        on_gpu: devices are GPUs.
        command: a script of Python, and its arguments.
        about: what ranks are for, in lines.
        image: of a container, for launchers that start one.
        topology: the label of machines that says in which unit they are, for launchers that ask.
    """

    name: str
    nodes: int
    per_node: int
    unit: tuple[str, int] | None
    on_gpu: bool
    command: tuple[str, ...]
    about: tuple[str, ...]
    image: str = ""
    topology: str = ""

    @property
    def script(self) -> str:
        """The command as a shell takes it."""
        return shlex.join(self.command)

    def torchrun(self, node_rank: str, master: str, script: str) -> str:
        """What one of several machines runs; arguments are words of a shell."""
        return (
            f"torchrun --nnodes={self.nodes} --nproc-per-node={self.per_node} --node-rank={node_rank} "
            f'--master-addr={master} --master-port="${{MASTER_PORT:-29500}}" {script}'
        )


@dataclass(frozen=True)
class Launcher:
    """What starts processes.

    Attributes:
        name: as ``--on`` takes it.
        write: a job within the limits as text.
        limits: each says of a job what is wrong with it, and what to do, if it is.
        start: how what was written is started, with ``{file}``.
    """

    name: str
    write: Callable[[Job], str]
    limits: tuple[Callable[[Job], str | None], ...]
    start: str


def job(
    cluster: ClusterSpec,
    mesh: Mesh,
    stages: int,
    command: Sequence[str],
    *,
    name: str = "train",
    nodes: int | None = None,
    image: str = "",
    topology: str = "",
) -> Job:
    """The job of a plan.

    Args:
        mesh: of one rank of the pipeline.
        stages: ranks of the pipeline.
        command: a script and its arguments.
        nodes: machines; left out: units of the innermost level of the network.

    Raises:
        InputError: no command, or so many machines do not have the plan's ranks.
    """
    if not command:
        raise InputError("there is nothing to run: give the script and its arguments after --, such as -- train.py")
    count, spans = cluster.world_size, cluster.spans
    per_node = spans[0] if nodes is None else next((span for span in spans if span * nodes == count), 0)
    if not per_node:
        raise InputError(
            f"{nodes} nodes are asked for, but the plan is for {count // spans[0]} of {spans[0]} devices (each a "
            f"{cluster.levels[0].name!r} of {cluster.name!r}): leave out the number, or plan for {nodes} nodes "
            "(autopar plan, or autopar rebind)"
        )
    at = spans.index(per_node)
    between = cluster.levels[at + 1 : -1]
    unit = (between[0].name, spans[at + 1] // per_node) if between else None
    return Job(
        name,
        count // per_node,
        per_node,
        unit,
        not cluster.on_cpu,
        tuple(command),
        tuple(_about(cluster, mesh, stages, per_node, unit)),
        image,
        topology,
    )


def _about(cluster: ClusterSpec, mesh: Mesh, stages: int, per_node: int, unit: tuple[str, int] | None) -> Iterator[str]:
    """What ranks are for: of each axis how far apart its ranks are, and what its messages cross."""
    count = cluster.world_size
    order = f"node i has ranks {per_node} i to {per_node} i + {per_node - 1}" if per_node < count else "all on one node"
    yield f"{count} ranks, planned for {cluster.name}: {order}."
    if unit is not None:
        yield f"The {unit[1]} nodes of a {unit[0]} follow one another."
    for axis in (Axis(PIPELINE, stages, mesh.size), *mesh.axes):
        if axis.name != MICRO and axis.size > 1:
            at = next(at for at, span in enumerate(cluster.spans) if span % (axis.size * axis.stride) == 0)
            where = f"across {cluster.levels[at - 1].name}s" if at else f"inside a {cluster.levels[0].name}"
            yield f"{axis.name} {axis.size}: {'neighbours' if axis.stride == 1 else f'{axis.stride} apart'}, {where}."


def commented(lines: Sequence[str]) -> str:
    """Lines as comments of shells and of YAML."""
    return "".join(f"# {line}\n" for line in lines)
