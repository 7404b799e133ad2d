"""Pins: what contradicts itself, the model or the cluster is refused, by name and number; what is kept is kept."""

from __future__ import annotations

import re
from typing import Any

import pytest

from planner.base.errors import ClusterError, InfeasibleError, PinError
from planner.cost.cluster import ClusterSpec
from planner.formulation.constraints.pins import Pins
from planner.formulation.resharding import Collective
from planner.formulation.training import Training
from planner.ir.graph import Graph, Ref
from planner.ir.layout import I, Layout, Mesh, Shard
from planner.plan.plan import Plan
from planner.search.search import search
from tests.planner.plans import Build, cluster, plan_of, residual_mlp, whole

GRAPH = residual_mlp(layers=2, width=64, batch=48)


def attention(length: int = 48, repeated: bool = False) -> Graph:
    """Attention over three inputs, or of projections with keys and values repeated for four heads; and a mean."""
    b, shape = Build(), (2, 4, length, 8)
    if repeated:
        x = b.leaf("x", 2, length, 32)
        heads = b.call("heads", "view.default", 2, length, 4, 8, self=b.linear("q", x, 32, "q"), size=(2, length, 4, 8))
        q = b.call("queries", "transpose.int", *shape, self=heads, dim0=1, dim1=2)
        one = (b.call(f"{n}1", "unsqueeze.default", 2, 1, length, 8, self=b.linear(n, x, 8, n), dim=1) for n in "kv")
        k, v = (b.call(f"{ref.node}4", "expand.default", *shape, self=ref, size=shape, implicit=False) for ref in one)
    else:
        q, k, v = (b.leaf(name, *shape) for name in "qkv")
    args = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
    op = "scaled_dot_product_attention.default"
    return b.mean(b.call("a", op, *shape, path="attn", query=q, key=k, value=v, **args))


@pytest.mark.parametrize(
    "pin, message",
    [
        ({"tensr": 2}, "no decision called 'tensr'; known: .*tensor"),
        ({"data": 0}, "pin 'data' is 0; .* whole number from 1"),
        ({"data": "2"}, "pin 'data' is '2'"),
        ({"tensor": True}, "pin 'tensor' is True"),
        ({"zero": 4}, r"pin 'zero' is 4; parameters are stored whole \(0\), sharded and held"),
        ({"sequence_parallel": 3, "tensor": 2}, "pin 'sequence_parallel' is 3; it is True or False"),
        ({"sequence_parallel": True}, "pin 'tensor' above 1 too"),
        ({"sequence_parallel": True, "tensor": 1}, "pin 'tensor' above 1 too"),
        (
            {"context": 2, "context_kind": "star"},
            "pin 'context_kind' is 'star'; .* 'gather' .* 'ring'.*'zigzag_gather', 'zigzag'.*'ulysses'",
        ),
        ({"context": 2, "ulysses": 1, "context_kind": "hybrid"}, "whose ranks share heads too, and pin 'ulysses' is 1"),
        ({"context_kind": "ring"}, "pin 'context_kind' is 'ring', which says how .* pin 'context' above 1 too"),
        ({"pipeline": 0}, "pin 'pipeline' is 0; it is how many stages there are: a whole number from 1"),
        ({"recompute": "some"}, "pin 'recompute' is 'some'; it is one of 'none', 'resharded', 'selective', 'full'"),
        ({"recompute": {"keep": "*.up"}}, "or says of which modules the results are kept"),
        ({"recompute": {"keep": []}}, "or says of which modules the results are kept"),
        ({"recompute": {"kept": ["*.up"]}}, "or says of which modules the results are kept"),
        (
            {"offload": "attic"},
            r"pin 'offload' is 'attic'; .* on the device \('none'\), on the host \('host'\), .*'auto'",
        ),
        ({"offload": True}, "pin 'offload' is True"),
        ({"offload": False}, "pin 'offload' is False"),
        ({"offload": ["host"]}, r"pin 'offload' is \['host'\]"),
        ({"offload": "host", "update": "before"}, "pin 'update' is 'before'; parameters are updated 'after' all"),
        (
            {"offload": "host", "activations": -1},
            "pin 'activations' is -1; it says of how many blocks .* 'all', 'none'",
        ),
        ({"offload": "host", "activations": True}, "pin 'activations' is True"),
        ({"offload": "host", "activations": 1.5}, "pin 'activations' is 1.5"),
        ({"offload": "host", "activations": "host"}, "pin 'activations' is 'host'"),
        ({"activations": "all"}, "pin 'activations' is 'all', but they leave for .* pin 'offload' 'host'"),
        (
            {"offload": "none", "activations": 2},
            "pin 'activations' is 2, but they leave for where model data is at home",
        ),
        ({"micro_batches": "8"}, "pin 'micro_batches' is '8'"),
        ({"virtual_stages": True}, "pin 'virtual_stages' is True"),
        ({"schedule": "1f2b"}, "pin 'schedule' is '1f2b'; it is one of 'gpipe', '1f1b'"),
        ({"schedule": "zbv", "virtual_stages": 3}, "'virtual_stages' is 3, but zbv has 2 of them on each rank"),
        ({"schedule": "interleaved_1f1b", "virtual_stages": 1}, "interleaved_1f1b has 2 or more of them"),
        ({"compile": "inductor"}, "pin 'compile' is 'inductor'; it is True or False"),
        ({"layers": {"head": "n"}}, "maps a module path"),
    ],
    ids=str,
)
def test_a_wrong_pin_is_refused_before_anything_is_planned(pin: dict[str, Any], message: str) -> None:
    with pytest.raises(PinError, match=message):
        Pins.parse(pin)


@pytest.mark.parametrize(
    "pin, message",
    [
        ({"data": 2, "tensor": 4}, "data 2 x tensor 4 = 8, but 'local' has 4 devices"),
        ({"data": 2}, "data 2, but 'local' has 4 devices"),
        ({"tensor": 3}, "tensor 3 does not divide the 4 devices of 'local'; pin a size that divides 4"),
        ({"zero": 3, "tensor": 4}, "pin 'zero' is 3; .* the other pins leave no data axis"),
        ({"zero": 3, "data": 1, "tensor": 4}, "the other pins leave no data axis"),
        ({"context": 4}, "F.scaled_dot_product_attention, and the model never calls it"),
        ({"layers": {"heads": {"all": "n"}}}, "no module matches 'heads'; close are: 'head'"),
        ({"layers": {"zzz": {"all": "n"}}}, "no module matches 'zzz'; there are: 'head'"),
        ({"layers": {"head": {"tensor": "n"}}, "data": 4}, "no axis 'tensor'; the mesh has data: pin 'tensor' above 1"),
        ({"layers": {"layers.0": {"all": "n"}}}, "holds no matrix product and no look-up"),
        ({"layers": {"head": {"tensor": "n"}}}, "there is no axis 'tensor'; the mesh has all"),
        ({"tensor": 4, "layers": {"head": {"inner": "n"}}}, "there is no axis 'inner'; the mesh has tensor"),
        ({"layers": {"head": {"all": "rows"}}}, r"no strategy 'rows'; shard .* m0 \(48\), k \(64\), .*, n \(64\)"),
        *(
            ({"layers": {"head": {"all": way}}}, f"no strategy '{way}'; .* n .*, or pin 'invariant' or 'replicate'")
            for way in ("n.dispatch", "n/", "n/0", "n/1", "n/x", "n/5", "partial")
        ),
        ({"layers": {"head": {"all": "n/32"}}}, "n/32 has size 2, which 4 ranks do not divide"),
    ],
    ids=str,
)  # fmt: skip
def test_a_pin_that_does_not_fit_is_refused(pin: dict[str, Any], message: str) -> None:
    with pytest.raises(PinError, match=message):
        plan_of(GRAPH, pin=pin)


@pytest.mark.parametrize(
    "graph, devices, pin, message",
    [
        (GRAPH, 5, {"data": 5}, "pin 'data' is 5 but input 'x' has a batch of 48, which it does not divide"),
        (GRAPH, 5, {"tensor": 5}, "pin 'tensor' is 5, which divides none of the sizes of the weights, 64, 256"),
        (GRAPH, 3, {"tensor": 3, "layers": {"head": {"tensor": "n"}}}, "tensor' is 3, which divides none"),
        (GRAPH, 3, {"data": 3, "layers": {"head": {"data": "n"}}}, "'head', axis 'data': n has size 64, which 3 ranks"),
        (attention(), 5, {"context": 5}, "pin 'context' is 5 but the sequence has length 48, .* pad .* to 50$"),
    ],
)
def test_a_size_that_does_not_divide_is_named(graph: Graph, devices: int, pin: dict[str, Any], message: str) -> None:
    with pytest.raises(PinError, match=message):
        plan_of(graph, cluster(devices), pin)


def test_pins_come_back_as_the_user_wrote_them() -> None:
    pin = {"data": 2, "tensor": 2, "sequence_parallel": False, "zero": 3, "layers": {"head": {"tensor": "k"}}}
    assert Pins.parse(pin).to_dict() == pin
    micro_batches = {"pipeline": 4, "micro_batches": 8, "schedule": "interleaved_1f1b", "virtual_stages": 2}
    assert Pins.parse(micro_batches).to_dict() == micro_batches
    assert Pins.parse({"offload": "host"}).to_dict() == {"offload": "host"}
    assert Pins.parse({"context": 2, "context_kind": "ring"}).to_dict() == {"context": 2, "context_kind": "ring"}
    assert Pins.parse({"compile": True}).to_dict() == {"compile": True} and Pins.parse({"compile": False}) == Pins()
    early = {"offload": "host", "update": "backward"}
    assert Pins.parse(early).to_dict() == early
    for value, found in (("all", "all"), ("none", "none"), (0, "none"), (3, 3)):
        assert Pins.parse({"offload": "host", "activations": value}).to_dict()["activations"] == found
    assert Pins.parse({"activations": "none"}).activations == 0
    assert Pins.parse({**early, "update": "after"}) == Pins.parse({"offload": "host"})
    assert [Pins.parse({"offload": where}).tier for where in (None, "none", "host")] == ["device", "device", "host"]


@pytest.mark.parametrize(
    "pin, said",
    [
        ({"pipeline": 2, "schedule": "zbv"}, r"'schedule' 'zbv', which leaves gradients.* pin 'schedule' '1f1b'"),
        ({"micro_batches": 2, "schedule": "2bw"}, r"'schedule' '2bw', which leaves gradients .* later action or"),
        ({"pipeline": 2, "update": "backward"}, r"'update' is 'backward', but .*: pin 'update' 'after', or leave"),
    ],
    ids=str,
)
def test_what_steps_micro_batched_cannot_do_with_model_data_on_the_host(pin: dict[str, Any], said: str) -> None:
    spec = ClusterSpec.local(2, "1 GiB", cores=2, host_memory_bytes="1 GiB")
    with pytest.raises(PinError, match=said):
        search(GRAPH, spec, Pins.parse({"offload": "host", **pin}), Training())


def test_model_data_on_the_host_needs_a_cluster_that_has_one() -> None:
    with pytest.raises(ClusterError, match="does not say what memory its devices have beside them"):
        plan_of(GRAPH, cluster(2), {"offload": "host"})


def strategies(plan: Plan, op: str) -> set[str]:
    return {label for block in plan.blocks for name, label in block.ops.items() if name.endswith(op)}


def test_data_shards_the_batch_everywhere() -> None:
    plan = plan_of(GRAPH, pin={"data": 4})
    assert strategies(plan, "linear") == {"data:m0"}
    assert plan.inputs == {"x": "S(0)"}


def test_zero_3_stores_every_parameter_sharded_and_zero_0_none() -> None:
    sharded, whole = (plan_of(GRAPH, pin={"data": 4, "zero": zero}) for zero in (3, 0))
    assert all(layout.startswith("S") for layout in sharded.parameters.values())
    assert set(whole.parameters.values()) == {"I"}
    assert sharded.predicted.memory_bytes["optimizer"] * 4 == whole.predicted.memory_bytes["optimizer"]


@pytest.mark.parametrize("zero", [0, 3])
def test_zero_alone_puts_every_device_on_the_data_axis(zero: int) -> None:
    alone, spelled = plan_of(GRAPH, pin={"zero": zero}), plan_of(GRAPH, pin={"zero": zero, "data": 4})
    assert alone.mesh == spelled.mesh and alone.mesh.names == ("data",)
    assert (alone.blocks, alone.parameters) == (spelled.blocks, spelled.parameters)


def test_zero_means_nothing_on_one_device() -> None:
    assert set(plan_of(GRAPH, cluster(1), {"zero": 3}).parameters.values()) == {"I"}


def test_tensor_shards_weights() -> None:
    plan = plan_of(GRAPH, pin={"tensor": 4})
    assert strategies(plan, "linear") <= {"tensor:n", "tensor:k"}


def normed(sequence: int, width: int, layers: int = 3) -> Graph:
    """``mean(x + down(relu(up(norm(x)))) ...)``; no attention."""
    b = Build()
    value = b.linear("stem", b.leaf("x", 8, sequence, width), width, "stem")
    for i in range(layers):
        scale = {"weight": b.leaf(f"scale{i}", width, op="param"), "bias": None, "eps": 1e-5}
        given = {"path": f"norm{i}", "input": value, "normalized_shape": (width,), **scale}
        norm = b.call(f"norm{i}", "layer_norm.default", 8, sequence, width, **given)
        hidden = b.relu(f"relu{i}", b.linear(f"up{i}", norm, 4 * width, f"up{i}"), f"relu{i}")
        value = b.add(f"add{i}", value, b.linear(f"down{i}", hidden, width, f"down{i}"), f"add{i}")
    return b.mean(value)


def test_without_sequence_parallel_norms_and_residuals_are_whole() -> None:
    """However attention is written, and along the hidden dim too; left to it, the search shares their work."""
    graph, spec = normed(sequence=2048, width=4096), ClusterSpec.preset("dgx-a100", devices=4)
    free, pinned = ({"tensor": 4}, {"tensor": 4, "sequence_parallel": False})
    assert shared(plan_of(graph, spec, free), "layer_norm", "add")
    whole = plan_of(graph, spec, pinned)
    assert not shared(whole, "layer_norm", "add") and shared(whole, "relu")
    assert strategies(whole, "linear") <= {"tensor:n", "tensor:k"}


def shared(plan: Plan, *ops: str) -> set[str]:
    """The strategies of these operators that shard anything."""
    labels = {label for block in plan.blocks for name, label in block.ops.items() if any(op in name for op in ops)}
    assert labels
    return {
        label
        for label in labels
        if label.partition(":")[2].partition("/")[0] not in ("replicate", "invariant", "partial")
    }


def test_context_shards_the_query_sequence() -> None:
    plan = plan_of(attention(), pin={"context": 4})
    assert strategies(plan, "attention") == {"context:query"}


def test_context_gathers_keys_and_values_before_they_are_repeated() -> None:
    plan = plan_of(attention(repeated=True), pin={"context": 4, "context_kind": "gather"})
    assert strategies(plan, "attention") == {"context:query"}
    gathers = {call: count for call, count in plan.predicted.collectives if call.kind == "all_gather"}
    part = 2 * 48 // 4 * 8 * 4  # two samples' quarter of the sequence, one head of eight float32, not four
    assert gathers == {Collective("all_gather", "context", part, "forward"): 2}


@pytest.mark.parametrize("strategy", ["n", "k"])
def test_layers_fix_one_module(strategy: str) -> None:
    plan = plan_of(GRAPH, pin={"tensor": 4, "layers": {"he*d": {"tensor": strategy}}})
    (op,) = (op for op in plan.explain("head").ops if op.name.endswith("linear"))
    assert op.strategy == f"tensor:{strategy}"


# ---- clusters that are too small -------------------------------------------------------------------------------------


def test_a_cluster_too_small_says_by_how_much_and_what_would_fit() -> None:
    graph = residual_mlp(layers=1, width=64, batch=64)
    with pytest.raises(InfeasibleError) as error:
        plan_of(graph, cluster(4, memory="64 KiB"))
    text = str(error.value)
    limit, needs, over = (
        int(number.replace(",", ""))
        for number in re.search(r"can use ([\d,]+) bytes.*needs ([\d,]+) .*, ([\d,]+) bytes .* too many", text).groups()  # type: ignore[union-attr]
    )
    assert needs - limit == over > 0
    memory = int(re.search(r"memory_bytes of at least ([\d,]+)", text)[1].replace(",", ""))  # type: ignore[index]
    assert plan_of(graph, cluster(4, memory)).predicted.peak_bytes <= ClusterSpec.local(4, memory).device.usable_bytes
    with pytest.raises(InfeasibleError):
        plan_of(graph, cluster(4, memory - 1024))


# ---- hierarchical sharding -------------------------------------------------------------------------------------------

HIERARCHICAL = {"replicate": 2, "data": 4, "zero": 3}


def stored(
    graph: Graph, spec: ClusterSpec, pin: dict[str, Any] | None, op: str, target: str = ""
) -> tuple[Mesh, set[Layout]]:
    """The mesh, and the layouts of the leaves of a kind."""
    found = search(graph, spec, whole(pin), Training()).assignment
    leaves = [leaf for leaf in graph.leaves if leaf.op == op and leaf.target.endswith(target)]
    return found.space.mesh, {found.produced(Ref(leaf.name)) for leaf in leaves}


def test_the_outer_axis_replicates_and_the_inner_one_shards() -> None:
    assert stored(GRAPH, cluster(8), HIERARCHICAL, "param") == (Mesh.of(replicate=2, data=4), {(I, Shard(0))})
    assert stored(GRAPH, cluster(8), HIERARCHICAL, "input")[1] == {(Shard(0), Shard(0))}


@pytest.mark.parametrize(
    "extra, times",
    [
        ({}, 1),
        ({"zero": 1}, 1),
        ({"zero": 2}, 1),
        ({"recompute": "full"}, 1),
        ({"zero": 2, "micro_batches": 2}, 1),
        ({"micro_batches": 2}, 2),
    ],
    ids=str,
)
def test_gradients_are_scattered_inside_before_what_is_left_of_them_is_summed_outside(
    extra: dict[str, Any], times: int
) -> None:
    """Of every parameter a rank passes its own quarter to the ranks of the other node, and to nobody more."""
    whole = sum(leaf.results[0].size_bytes for leaf in GRAPH.leaves if leaf.op == "param")
    moved: dict[tuple[str, str], int] = {}
    predicted = plan_of(GRAPH, cluster(8), {**HIERARCHICAL, **extra}).predicted
    for call, count in predicted.collectives:
        if call.phase == "backward" and call.bytes_in > 64:
            moved[call.kind, call.axis] = moved.get((call.kind, call.axis), 0) + call.bytes_in * count
    assert moved.pop(("reduce_scatter", "data")) == whole * times
    assert moved.pop(("all_reduce", "replicate")) == whole // 4  # once a step
    assert all(kind == "all_gather" and axis == "data" for kind, axis in moved)


def test_the_rest_of_the_devices_shard_inside() -> None:
    for pin, mesh in (({"zero": 3}, {"data": 4}), ({"tensor": 2}, {"data": 2, "tensor": 2})):
        assert stored(GRAPH, cluster(8), {"replicate": 2, **pin}, "param")[0] == Mesh.of(replicate=2, **mesh)


@pytest.mark.parametrize(
    "devices, pin, message",
    [
        (8, {"replicate": 8, "zero": 3}, "the other pins leave no data axis"),
        (8, {"replicate": 3, "zero": 3}, "pinned replicate 3 does not divide the 8 devices"),
        (8, {"replicate": 2, "data": 2}, "pinned replicate 2 x data 2 = 4, but 'local' has 8 devices"),
        (32, HIERARCHICAL | {"data": 16}, "pins 'replicate' and 'data' is 32 but input 'x' has a batch of 48"),
        (8, HIERARCHICAL | {"micro_batches": 12}, "pins 'replicate' and 'data' is 8, which does not divide a"),
        (8, {"replicate": 0}, "pin 'replicate' is 0"),
    ],
)  # fmt: skip
def test_wrong_hierarchies_say_what_is_wrong(devices: int, pin: dict[str, Any], message: str) -> None:
    with pytest.raises(PinError, match=message):
        plan_of(GRAPH, cluster(devices), pin)


def test_the_search_shards_inside_nodes_by_itself() -> None:
    """Two nodes of two GPUs with slow links between them, and too little memory for all parameters on each."""
    spec = ClusterSpec.preset("dgx-a100", nodes=2)
    spec = spec.model_copy(update={"levels": (spec.levels[0].model_copy(update={"size": 2}), spec.levels[1])})
    graph = residual_mlp(layers=6, width=384, batch=2**14)
    needed = plan_of(graph, spec, {"data": 4, "zero": 0, "recompute": "full"}).predicted.peak_bytes
    device = spec.device.model_copy(update={"memory_bytes": int(needed / 0.9)})
    spec = spec.model_copy(update={"device": device})
    assert stored(graph, spec, None, "param", "up.weight") == (Mesh.of(replicate=2, data=2), {(I, Shard(0))})
