"""Measures kernels and collectives of the machine at hand, so that its plans are priced by what it does.

All ranks measure at once, because that is how they will run: local processes share cores, caches and memory. What
is timed is what the runtime calls: torch's operators with autograd on, and the collectives of
:mod:`autopar.runtime.spmd.resharding`; how is said in :mod:`autopar.measure.timing`. A figure is the median over ranks
and rounds, taken alternately over all figures, so that a disturbance does not hit one of them alone.
"""

from __future__ import annotations

import itertools
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from autopar.measure.local_processes import LocalProcesses
from autopar.measure.timing import Act, Beside, Call, Key, Pace, Task
from autopar.runtime.host.pinned_memory import pinned
from autopar.runtime.spmd.prefetch_gather import all_gather, reduce_scatter
from autopar.runtime.spmd.resharding import convert
from planner.base import host
from planner.base.errors import ClusterError
from planner.cost.calibration import VERSION, Calibration
from planner.cost.cluster import ClusterSpec
from planner.cost.model import KINDS


@dataclass(frozen=True)
class Grids:
    """Where to measure: sizes in elements, bytes moved, and bytes passed to a collective.

    ``attended``: as many heads attend as have so many keys together, which fills a GPU, but at least :data:`HEADS`.
    """

    dtypes: tuple[str, ...] = ("float32",)
    rows: tuple[int, ...] = (16, 64, 256, 1024)
    columns: tuple[int, ...] = (32, 128, 512, 2048)
    inner: tuple[int, ...] = (32, 128, 512, 1024)
    keys: tuple[int, ...] = (32, 128, 512)
    depths: tuple[int, ...] = (32, 64, 128)
    attended: int = 0
    moved: tuple[int, ...] = (2**14, 2**18, 2**21, 2**24)
    passed: tuple[int, ...] = (2**12, 2**20, 2**22, 2**23)
    pace: Pace = field(default_factory=Pace)
    rounds: int = 3


QUICK = Grids()
ON_GPU = replace(
    QUICK,
    dtypes=("float32", "bfloat16", "float16"),
    rows=(64, 512, 4096, 16384),
    columns=(128, 1024, 4096, 8192),
    inner=(128, 1024, 4096, 8192),
    keys=(512, 2048, 8192),
    attended=2**16,
    moved=(2**16, 2**20, 2**24, 2**26, 2**28),
    passed=(2**14, 2**18, 2**22, 2**26, 2**29),
)
"""A GPU needs larger work to show its rates."""


def profile(ranks: int | None = None, grids: Grids | None = None) -> Calibration:
    """Measure with ``ranks`` processes at once, by default one per GPU, or per core on a machine without.

    Raises:
        ClusterError: fewer GPUs than ranks.
    """
    gpus = torch.cuda.device_count()
    ranks = ranks or gpus or min(8, host.cores())
    if gpus and ranks > gpus:
        raise ClusterError(f"{ranks} ranks need {ranks} GPUs, and there are {gpus}: give --ranks {gpus}")
    grids = grids or (ON_GPU if gpus else QUICK)
    with LocalProcesses(ranks, ("torch", "autopar.measure.profile")) as processes:
        found = processes.run(_measure, grids)
    medians: dict[Key, float] = {}
    for key in found[0]:
        medians[key] = statistics.median(itertools.chain.from_iterable(each[key] for each in found))
    return _calibration(grids, ranks, _device_kind(), medians)


def measured_cluster(calibration: Calibration) -> ClusterSpec:
    """This machine as it was measured: the description that is known of it, or for an unknown GPU a measured one."""
    if not torch.cuda.is_available():
        return ClusterSpec.local(calibration.ranks).calibrated(calibration)
    try:
        spec = ClusterSpec.detect()
    except ClusterError:
        spec = _unknown_gpus(calibration)
    node = spec.levels[0].model_copy(update={"size": calibration.ranks})
    return spec.model_copy(update={"levels": (node, *spec.levels[1:])}).calibrated(calibration)


def _unknown_gpus(calibration: Calibration) -> ClusterSpec:
    """Peaks from the best rates that were measured, so that efficiencies are 1; links as they were measured."""
    properties = torch.cuda.get_device_properties(0)
    peaks = {
        table.dtype: max(
            2.0 * m * n * k / seconds
            for (m, n, k), seconds in zip(itertools.product(table.m, table.n, table.k), table.seconds, strict=True)
        )
        for table in calibration.products
    }
    forward = [curve for curve in calibration.streams if not curve.backward]
    rates = [max(b / s for b, s in zip(c.bytes, c.seconds, strict=True)) for c in forward]
    sends = [c for c in calibration.collectives if c.kind == "send"]
    return ClusterSpec.from_dict(
        {
            "name": "measured",
            "device": {
                "kind": calibration.device,
                "memory_bytes": properties.total_memory,
                "peak_flops_per_s": peaks,
                "memory_bandwidth_bytes_per_s": max(rates),
                "launch_overhead_s": calibration.launch_s,
                "matmul_efficiency": 1.0,
                "memory_efficiency": 1.0,
            },
            "levels": [
                {
                    "name": "node",
                    "size": calibration.ranks,
                    "latency_s": min((c.seconds[0] for c in sends), default=0.0),
                    "bandwidth_bytes_per_s": max((c.bytes[-1] / c.seconds[-1] for c in sends), default=max(rates)),
                }
            ],
        }
    )


def _device_kind() -> str:
    """As presets and :meth:`ClusterSpec.local` name it, or as the driver does."""
    if not torch.cuda.is_available():
        return "cpu"
    try:
        return ClusterSpec.detect().device.kind
    except ClusterError:
        return torch.cuda.get_device_name()


def _measure(grids: Grids) -> dict[Key, list[float]]:
    """One rank: every figure, once per round."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", dist.get_rank())
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    found: dict[Key, list[float]] = {}
    makers = [*_compute(grids, device), *_collectives(grids, device)]
    for _ in range(grids.rounds):
        for make in makers:
            for figure in make():
                found.setdefault(figure.key, []).append(figure.seconds(found, grids.pace, device))
    return found


# ---- computing -------------------------------------------------------------------------------------------------------


def _compute(grids: Grids, device: torch.device) -> Iterator[Callable[[], Iterator[Task]]]:
    yield partial(_launch, device)
    for name in grids.dtypes:
        dtype = getattr(torch, name)
        yield partial(_products, grids, device, dtype)
        yield partial(_attention, grids, device, dtype)
    yield partial(_streams, grids, device, getattr(torch, grids.dtypes[-1]))
    yield partial(_optimizer, grids, device)
    if device.type == "cuda":
        yield partial(_host, grids, device)


def _launch(device: torch.device) -> Iterator[Task]:
    x = torch.ones(1, device=device)
    yield Task(("launch",), lambda: x + x)


def _products(grids: Grids, device: torch.device, dtype: torch.dtype) -> Iterator[Task]:
    for m, n, k in _shapes(grids):
        x, w = (torch.randn(rows, k, device=device, dtype=dtype) for rows in (m, n))
        yield Task(("product", _name(dtype), m, n, k), partial(F.linear, x, w))


def _shapes(grids: Grids) -> list[tuple[int, int, int]]:
    return list(itertools.product(grids.rows, grids.columns, grids.inner))


HEADS = 8


def _attention(grids: Grids, device: torch.device, dtype: torch.dtype) -> Iterator[Task]:
    for keys, depth in itertools.product(grids.keys, grids.depths):
        heads = max(HEADS, grids.attended // keys)
        sizes = (1, heads, keys, depth)
        copies = COPIES if 4 * heads * keys * depth < LARGE else 1
        forward, both = _with_backward([_applied(_causal, 3, sizes, device, dtype) for _ in range(copies)])
        key = ("attention", _name(dtype), False, keys, depth)
        yield Task(key, forward, copies * heads)
        yield Task(("attention", _name(dtype), True, keys, depth), both, copies * heads, key)


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


WIDTH = 512
"""Size of the last dim of streamed tensors: that over which norms and softmaxes run."""
VOCABULARY = 4096
COPIES = 8
"""Operators that go into one backward, while they are small."""
LARGE = 2**20
"""Bytes from which starting a backward does not show any more."""


def _streams(grids: Grids, device: torch.device, dtype: torch.dtype) -> Iterator[Task]:
    """An operator of each family, with as many rows as make its operands and results so many bytes together."""
    for moved in grids.moved:
        for family, (make, row) in STREAMS.items():
            rows = max(1, moved // (row * dtype.itemsize))
            copies = COPIES if moved < LARGE else 1
            forward, both = _with_backward([make(rows, device, dtype) for _ in range(copies)])
            key = ("stream", family, False, moved)
            yield Task(key, forward, copies)
            yield Task(("stream", family, True, 2 * moved), both, copies, key)


@dataclass(frozen=True)
class Applied:
    """An operator with its operands; those that have gradients stand in ``leaves``."""

    act: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]


def _applied(
    function: Callable[..., Tensor], operands: int, sizes: Sequence[int], device: torch.device, dtype: torch.dtype
) -> Applied:
    """A function of tensors of one shape."""
    leaves = tuple(torch.randn(*sizes, device=device, dtype=dtype, requires_grad=True) for _ in range(operands))
    return Applied(lambda: function(*leaves), leaves)


Maker = Callable[[int, torch.device, torch.dtype], Applied]


def _elementwise(operands: int, function: Callable[..., Tensor]) -> tuple[Maker, int]:
    return lambda rows, device, dtype: _applied(function, operands, (rows, WIDTH), device, dtype), (
        operands + 1
    ) * WIDTH


def _norm(rows: int, device: torch.device, dtype: torch.dtype) -> Applied:
    x = torch.randn(rows, WIDTH, device=device, dtype=dtype, requires_grad=True)
    scale, shift = (torch.ones(WIDTH, device=device, dtype=dtype, requires_grad=True) for _ in range(2))
    return Applied(lambda: F.layer_norm(x, (WIDTH,), scale, shift), (x, scale, shift))


def _loss(rows: int, device: torch.device, dtype: torch.dtype) -> Applied:
    logits = torch.randn(rows, VOCABULARY, device=device, dtype=dtype, requires_grad=True)
    labels = torch.zeros(rows, device=device, dtype=torch.long)
    return Applied(lambda: F.cross_entropy(logits, labels), (logits,))


def _embedding(rows: int, device: torch.device, dtype: torch.dtype) -> Applied:
    """The table counts as read: backward writes a gradient as large as it, and it has as many rows as are taken."""
    table = torch.randn(rows, WIDTH, device=device, dtype=dtype, requires_grad=True)
    ids = torch.randint(0, rows, (rows,), device=device)
    return Applied(lambda: F.embedding(ids, table), (table,))


STREAMS: dict[str, tuple[Maker, int]] = {
    "add": _elementwise(2, torch.add),
    "multiply": _elementwise(2, torch.mul),
    "activation": _elementwise(1, lambda x: F.gelu(x, approximate="tanh")),
    "normalization": (_norm, 2 * WIDTH),
    "softmax": _elementwise(1, lambda x: F.softmax(x, -1)),
    "loss": (_loss, VOCABULARY),
    "embedding": (_embedding, 2 * WIDTH),
    "random": _elementwise(1, lambda x: F.dropout(x, 0.1)),
    "copy": _elementwise(1, torch.clone),
    "reduction": (lambda rows, device, dtype: _applied(torch.sum, 1, (rows, WIDTH), device, dtype), WIDTH),
}
"""What stands for each family of :mod:`planner.cost.kernels`, and its elements of operands and results per row."""


def _with_backward(applied: Sequence[Applied]) -> tuple[Act, Act]:
    """Acts with autograd on; and the same with their backward, from gradients that are there already.

    Several at once, because autograd is called once for all operators of a step, not once for each.
    """
    gradients = [torch.ones_like(each.act()) for each in applied]
    leaves = [leaf for each in applied for leaf in each.leaves]

    def forward() -> list[Tensor]:
        return [each.act() for each in applied]

    def both() -> None:
        torch.autograd.grad(forward(), leaves, gradients)

    return forward, both


PARAMETERS = 16
STATE_BYTES = 28
"""Per float32 element: parameter, gradient and two moments read, parameter and moments written."""


def _optimizer(grids: Grids, device: torch.device) -> Iterator[Task]:
    """The fused AdamW; seconds of one of several parameters."""
    for moved in grids.moved:
        count = max(1, moved // STATE_BYTES)
        parameters = [torch.ones(count, device=device, requires_grad=True) for _ in range(PARAMETERS)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        yield Task(("optimizer", moved), torch.optim.AdamW(parameters, fused=True).step, PARAMETERS)


HOST_BYTES = 2**31
"""More than caches hold."""


def _host(grids: Grids, device: torch.device) -> Iterator[Task]:
    """Copies from the host of a GPU, and what its cores pass over in the fused AdamW."""
    source = pinned(HOST_BYTES)
    target = torch.empty(HOST_BYTES, dtype=torch.uint8, device=device)
    yield Task(("host_link",), lambda: target.copy_(source, non_blocking=True))
    for dtype in grids.dtypes:
        parameter = torch.ones(HOST_BYTES // STATE_BYTES, dtype=getattr(torch, dtype), requires_grad=True)
        parameter.grad = torch.ones_like(parameter)
        yield Task(("host_update", dtype), torch.optim.AdamW([parameter], fused=True).step, on_host=True)


def _updated_bytes(dtype: str) -> int:
    """What an update passes over of as many elements as have :data:`HOST_BYTES` in float32."""
    itemsize: int = getattr(torch, dtype).itemsize
    return HOST_BYTES // STATE_BYTES * (STATE_BYTES // 4) * itemsize


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- communicating ---------------------------------------------------------------------------------------------------


def group_sizes(ranks: int) -> list[int]:
    """Group sizes to measure: every divisor of the number of ranks but 1."""
    return [size for size in range(2, ranks + 1) if ranks % size == 0]


def _collectives(grids: Grids, device: torch.device) -> Iterator[Callable[[], Iterator[Call | Beside]]]:
    """Groups of consecutive ranks, all at once."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    backend = "nccl" if device.type == "cuda" else "gloo"
    for size in group_sizes(ranks):
        groups = [dist.new_group(list(range(i, i + size)), backend=backend) for i in range(0, ranks, size)]
        yield partial(_in_group, grids, device, groups[rank // size], size)


def _in_group(grids: Grids, device: torch.device, group: Any, size: int) -> Iterator[Call | Beside]:
    start = dist.get_rank() // size * size
    place = dist.get_rank() - start
    after, before = (start + (place + step) % size for step in (1, -1))
    for passed in grids.passed:
        count = max(1, passed // 4 // size) * size
        x, received = (torch.ones(count, device=device) for _ in range(2))
        table = x.view(size, count // size)

        acts: dict[str, Act] = {
            "all_reduce": partial(convert, x, group, "P", "I"),
            "all_gather": partial(convert, x, group, "S(0)", "R"),
            "reduce_scatter": partial(convert, x, group, "P", "S(0)"),
            "all_to_all": partial(convert, table, group, "S(1)", "S(0)"),
            "broadcast": partial(dist.broadcast, x, start, group=group),
            "send": partial(_pass_on, x, received, after, before, group),
        }
        for kind in KINDS:
            yield Call(("collective", kind, size, passed, False), acts[kind])
        for kind in BROUGHT if device.type == "cpu" else ():
            key = ("collective", kind, size, passed)
            yield Beside((*key, True), partial(_sent, kind, x, group), (*key, False))


BROUGHT = ("all_reduce", "all_gather", "reduce_scatter")
"""What blocks do with all of their parameters at once, while another block computes."""


def _sent(kind: str, x: Tensor, group: Any) -> Act:
    """A collective on its way, as :mod:`autopar.runtime.spmd.parameters` sends it; returns what waits for it."""
    ranks = group.size()
    if kind == "all_reduce":
        work = dist.all_reduce(x, group=group, async_op=True)
    elif kind == "all_gather":
        work = all_gather(x.new_empty(ranks * x.numel()), x, group=group, async_op=True)
    else:
        work = reduce_scatter(x.new_empty(x.numel() // ranks), x, group=group, async_op=True)
    return work.wait


def _pass_on(x: Tensor, received: Tensor, after: int, before: int, group: Any) -> None:
    """Send to one neighbour and receive from the other."""
    ops = [dist.P2POp(dist.isend, x, after, group), dist.P2POp(dist.irecv, received, before, group)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


# ---- the file --------------------------------------------------------------------------------------------------------


def _calibration(grids: Grids, ranks: int, device: str, found: dict[Key, float]) -> Calibration:
    def seconds(keys: Sequence[Key]) -> list[float]:
        return [float(f"{found[key]:.3g}") for key in keys]

    products = [
        {
            "dtype": name, "m": grids.rows, "n": grids.columns, "k": grids.inner,
            "seconds": seconds([("product", name, *p) for p in _shapes(grids)]),
        }
        for name in grids.dtypes
    ]  # fmt: skip
    attention = [
        {
            "dtype": name, "backward": backward, "keys": grids.keys, "depth": grids.depths,
            "seconds": seconds([("attention", name, backward, k, d) for k in grids.keys for d in grids.depths]),
        }
        for name in grids.dtypes
        for backward in (False, True)
    ]  # fmt: skip
    streams = [
        {
            "family": family, "backward": backward, "bytes": [moved * (2 if backward else 1) for moved in grids.moved],
            "seconds": seconds([("stream", family, backward, moved * (2 if backward else 1)) for moved in grids.moved]),
        }
        for family in STREAMS
        for backward in (False, True)
    ]  # fmt: skip
    streams.append(
        {
            "family": "optimizer", "backward": False, "bytes": list(grids.moved),
            "seconds": seconds([("optimizer", moved) for moved in grids.moved]),
        }
    )  # fmt: skip
    collectives = [
        {
            "kind": kind, "size": size, "beside": beside, "bytes": grids.passed,
            "seconds": seconds([("collective", kind, size, passed, beside) for passed in grids.passed]),
        }
        for kind in KINDS
        for size in group_sizes(ranks)
        for beside in (False, True)
        if ("collective", kind, size, grids.passed[0], beside) in found
    ]  # fmt: skip
    host_rates: dict[str, object] = {}
    if ("host_link",) in found:
        rates = {name: _updated_bytes(name) / found[("host_update", name)] for name in grids.dtypes}
        host_rates["host_link_bytes_per_s"] = HOST_BYTES / found[("host_link",)]
        host_rates["host_updates"] = [{"dtype": name, "bytes_per_s": rate} for name, rate in rates.items()]
    return Calibration.from_dict(
        {
            "format": "autopar-calibration", "version": VERSION, "device": device, "ranks": ranks,
            "launch_s": seconds([("launch",)])[0], **host_rates,
            "products": products, "attention": attention, "streams": streams, "collectives": collectives,
        }
    )  # fmt: skip
