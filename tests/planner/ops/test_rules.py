"""Rules as text: each application of an operator, and the factors that its row finds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from planner.ir.graph import Node, Ref, TensorType
from planner.ir.layout import I, P, R, Shard
from planner.ops import OPS
from planner.ops.sharding_rule import Dims, Rule, axis_strategies
from planner.ops.table import Saved


class T(tuple[int, ...]):
    """A tensor argument of this shape (and dtype)."""

    dtype = "float32"

    def __new__(cls, *shape: int, dtype: str = "float32") -> T:
        self = super().__new__(cls, shape)
        self.dtype = dtype
        return self


def rule_of(op: str, *results: T, **args: object) -> tuple[Rule, tuple[TensorType, ...], Node]:
    """The rule of one application; equal ``T`` objects are the same tensor."""
    seen: dict[int, str] = {}

    def lower(value: object) -> object:
        if isinstance(value, T):
            return Ref(seen.setdefault(id(value), f"x{len(seen)}"))
        return tuple(map(lower, value)) if isinstance(value, (tuple, list)) else value

    def tensors(value: object) -> Iterator[T]:
        if isinstance(value, T):
            yield value
        elif isinstance(value, (tuple, list)):
            for item in value:
                yield from tensors(item)

    def typed(tensor: T) -> TensorType:
        return TensorType(tuple(tensor), tensor.dtype)

    node = Node("node", op, tuple((k, lower(v)) for k, v in args.items()), tuple(map(typed, results)))
    operands = tuple(map(typed, tensors(tuple(args.values()))))
    return OPS[op].rule(node, operands), operands, node


def text_of(rule: Rule) -> str:
    """``[d0 1 (a b)]``: dims of each tensor; whole factors are marked with ``!``; then the linear sets of operands."""

    def dims(tensor: Dims) -> str:
        marked = [[f + "!" * (f in rule.whole) for f in dim] for dim in tensor]
        return "[" + " ".join(f"({' '.join(d)})" if len(d) > 1 else d[0] if d else "1" for d in marked) + "]"

    tensors = [", ".join(map(dims, side)) for side in (rule.operands, rule.results)]
    linear = [f"linear {'+'.join(map(str, sorted(chosen)))}" for chosen in rule.linear]
    return "; ".join([" -> ".join(tensors), *linear])


x, y = T(4, 6), T(4, 6)
RULES = [
    # Elementwise: a broadcast operand lacks the factor.
    ("add.Tensor", [T(4, 6)], {"self": x, "other": y}, "[d0 d1], [d0 d1] -> [d0 d1]; linear 0+1"),
    ("add.Tensor", [T(4, 6)], {"self": x, "other": T(6)}, "[d0 d1], [d1] -> [d0 d1]; linear 0+1"),
    ("add.Tensor", [T(4, 6)], {"self": T(4, 1), "other": T(1, 6)}, "[d0 1], [1 d1] -> [d0 d1]; linear 0+1"),
    ("add.Tensor", [T(4, 6)], {"self": x, "other": 1}, "[d0 d1] -> [d0 d1]"),
    ("add.Tensor", [T(4, 6)], {"self": x, "other": 0}, "[d0 d1] -> [d0 d1]; linear 0"),
    ("add.Scalar", [T(4, 6)], {"self": x, "other": 0.0}, "[d0 d1] -> [d0 d1]; linear 0"),
    ("mul.Tensor", [T(4, 6)], {"self": x, "other": y}, "[d0 d1], [d0 d1] -> [d0 d1]; linear 0; linear 1"),
    ("mul.Tensor", [T(4, 6)], {"self": x, "other": x}, "[d0 d1], [d0 d1] -> [d0 d1]"),
    ("mul.Tensor", [T(4, dtype="int64")], {"self": T(4, dtype="int64"), "other": 2}, "[d0] -> [d0]"),
    ("div.Tensor", [T(4)], {"self": T(4), "other": T(4)}, "[d0], [d0] -> [d0]; linear 0"),
    ("gelu.default", [T(4, 1)], {"self": T(4, 1), "approximate": "none"}, "[d0 1] -> [d0 1]"),
    (
        "where.ScalarOther",
        [T(4, 6)],
        {"condition": T(4, 6, dtype="bool"), "self": T(), "other": 0.0},
        "[d0 d1], [] -> [d0 d1]; linear 1",
    ),
    ("masked_fill.Scalar", [T(4)], {"self": T(4), "mask": T(4, dtype="bool"), "value": -1e9}, "[d0], [d0] -> [d0]"),
    ("to.dtype", [T(4, dtype="int64")], {"self": T(4), "dtype": "int64"}, "[d0] -> [d0]"),
    # Views: the sequence inside batch*sequence, the heads inside 3*heads*head_dim.
    ("view.default", [T(8, 6)], {"self": T(2, 4, 6), "size": (-1, 6)}, "[d0 d1 d2] -> [(d0 d1) d2]; linear 0"),
    ("view.default", [T(2, 3, 4, 8)], {"self": T(2, 96), "size": (2, 3, 4, 8)},
     "[d0 (d1 d2 d3)] -> [d0 d1 d2 d3]; linear 0"),
    ("squeeze.dim", [T(4, 6)], {"self": T(4, 1, 6), "dim": 1}, "[d0 1 d1] -> [d0 d1]; linear 0"),
    ("transpose.int", [T(4, 2, 3)], {"self": T(4, 3, 2), "dim0": -1, "dim1": 1}, "[d0 d1 d2] -> [d0 d2 d1]; linear 0"),
    ("expand.default", [T(2, 4, 6)], {"self": T(4, 1), "size": (2, -1, 6)}, "[d1 1] -> [d0 d1 d2]; linear 0"),
    ("repeat.default", [T(8, 3)], {"self": T(4, 3), "repeats": (2, 1)}, "[d0 d1] -> [(copies0 d0) d1]; linear 0"),
    # Splits and joins: equal parts keep their common factor.
    ("split.Tensor", [T(2, 4)] * 3, {"self": T(2, 12), "split_size": 4, "dim": -1},
     "[d0 (pieces! d1)] -> [d0 d1], [d0 d1], [d0 d1]; linear 0"),
    ("split_with_sizes.default", [T(8), T(2)], {"self": T(10), "split_sizes": (8, 2), "dim": 0},
     "[d0.in0!] -> [d0.out0!], [d0.out1!]; linear 0"),
    ("cat.default", [T(2, 12)], {"tensors": (T(2, 6), T(2, 6)), "dim": 1},
     "[d0 d1], [d0 d1] -> [d0 (parts! d1)]; linear 0+1"),
    ("cat.default", [T(9)], {"tensors": (T(4), T(5)), "dim": 0}, "[d0.in0!], [d0.in1!] -> [d0.out0!]; linear 0+1"),
    ("stack.default", [T(2, 6)], {"tensors": (T(6), T(6)), "dim": 0}, "[d0], [d0] -> [stack! d0]; linear 0+1"),
    ("unbind.int", [T(6), T(6)], {"self": T(2, 6), "dim": 0}, "[d0! d1] -> [d1], [d1]; linear 0"),
    # Slices: in full, and in part.
    ("slice.Tensor", [T(4, 6)], {"self": x, "dim": 1, "start": 0, "end": 2**63 - 1, "step": 1},
     "[d0 d1] -> [d0 d1]; linear 0"),
    ("slice.Tensor", [T(4, 3)], {"self": x, "dim": 1, "start": 0, "end": 3, "step": 1},
     "[d0 d1.in0!] -> [d0 d1.out0!]; linear 0"),
    ("select.int", [T(4)], {"self": x, "dim": 1, "index": 0}, "[d0 d1!] -> [d0]; linear 0"),
    ("pad.default", [T(4, 7)], {"self": x, "pad": (1, 0), "mode": "constant", "value": 0},
     "[d0 d1.in0!] -> [d0 d1.out0!]; linear 0"),
    # Reductions: sums split, extrema do not.
    ("sum.dim_IntList", [T(4, 1)], {"self": x, "dim": (-1,), "keepdim": True}, "[d0 d1] -> [d0 1]; linear 0"),
    ("mean.default", [T()], {"self": x}, "[d0 d1] -> []; linear 0"),
    ("amax.default", [T(4)], {"self": x, "dim": (1,), "keepdim": False}, "[d0 d1!] -> [d0]"),
    ("softmax.int", [T(4, 6)], {"self": x, "dim": -1}, "[d0 classes] -> [d0 classes]"),
    ("cumsum.default", [T(4, 6)], {"self": x, "dim": 1}, "[d0 d1!] -> [d0 d1!]; linear 0"),
    ("topk.default", [T(4, 2), T(4, 2, dtype="int64")], {"self": x, "k": 2, "dim": -1},
     "[d0 d1.in0!] -> [d0 d1.out0!], [d0 d1.out1!]"),
    # Gathers: indices may be sharded, what they index may not.
    ("gather.default", [T(4, 3)], {"self": x, "dim": 1, "index": T(4, 3, dtype="int64")},
     "[d0 d1!], [d0 n] -> [d0 n]; linear 0"),
    ("index.Tensor", [T(4, 5, 3)], {"self": T(4, 6, 3), "indices": (None, T(5, dtype="int64"))},
     "[d0 d1! d2], [i0] -> [d0 i0 d2]; linear 0"),
    ("index.Tensor", [T(5, 4)], {"self": T(6, 4, 6), "indices": (T(5, dtype="int64"), None, T(5, dtype="int64"))},
     "[d0! d1 d2!], [i0], [i0] -> [i0 d1]; linear 0"),
    ("index.Tensor", [T(7)], {"self": x, "indices": (T(4, 6, dtype="bool"),)},
     "[in0.d0! in0.d1!], [in1.d0! in1.d1!] -> [out0.d0!]"),
    # Constants: whole, unless an operand of the same shape says how to lay them out.
    ("arange.default", [T(8, dtype="int64")], {"end": 8}, " -> [d0!]"),
    ("zeros_like.default", [T(4, 6)], {"self": x}, "[d0 d1] -> [d0 d1]"),
    ("new_zeros.default", [T(4, 6)], {"self": x, "size": (4, 6)}, "[d0 d1] -> [d0 d1]"),
    ("new_zeros.default", [T(3)], {"self": x, "size": (3,)}, "[other0 other1] -> [d0!]"),
]  # fmt: skip


@pytest.mark.parametrize("op, results, args, text", RULES, ids=[f"{op}-{text}" for op, _, _, text in RULES])
def test_rules(op: str, results: list[T], args: dict[str, object], text: str) -> None:
    rule, operands, node = rule_of(f"aten.{op}", *results, **args)
    rule.check(tuple(o.shape for o in operands), tuple(r.shape for r in node.results))
    assert text_of(rule) == text


def test_a_factor_behind_another_is_sharded_in_strips() -> None:
    rule, _, _ = rule_of("aten.view.default", T(2, 96), self=T(2, 3, 4, 8), size=(2, 96))
    strategies = {s.factor: s for s in axis_strategies(rule, 4)}
    assert strategies["d2"].operands == (Shard(2),)
    assert strategies["d2"].results == (Shard(1, outer=3),)
    assert "d1" not in strategies  # 3 does not divide by 4


def test_halves_of_a_fused_projection_are_sharded_alike() -> None:
    rule, _, _ = rule_of("aten.chunk.default", T(2, 8), T(2, 8), self=T(2, 16), chunks=2, dim=-1)
    (strategy,) = [s for s in axis_strategies(rule, 8) if s.factor]
    assert strategy.operands == (Shard(1, outer=2),)
    assert strategy.results == (Shard(1), Shard(1))


def test_a_new_tensor_of_another_shape_asks_nothing_of_its_operand() -> None:
    rule, _, _ = rule_of("aten.new_ones.default", T(3), self=T(4, 6), size=(3,))
    assert [(s.operands, s.results) for s in axis_strategies(rule, 2)] == [
        ((I,), (I,)), ((R,), (R,)), ((Shard(0),), (R,)), ((Shard(1),), (R,)),
    ]  # fmt: skip


def test_added_rows_are_partial_sums() -> None:
    index = T(4, dtype="int64")
    rule, _, _ = rule_of("aten.index_add.default", T(8, 6), self=T(8, 6), dim=0, index=index, source=T(4, 6))
    (strategy,) = [s for s in axis_strategies(rule, 2) if s.factor == "n"]
    assert strategy.operands == (P, Shard(0), Shard(0))
    assert strategy.results == (P,)


@pytest.mark.parametrize(
    "op, args, saved",
    [
        ("aten.mul.Tensor", {"self": x, "other": y}, ("in0", "in1")),
        ("aten.mul.Tensor", {"self": x, "other": 2.0}, ()),
        ("aten.index.Tensor", {"self": x, "indices": (None, T(6, dtype="int64"))}, ("in1",)),
        ("aten.softmax.int", {"self": x, "dim": -1}, ("out0",)),
        ("aten.where.self", {"condition": T(4, 6, dtype="bool"), "self": x, "other": y}, ("in0",)),
        ("aten.add.Tensor", {"self": x, "other": y}, ()),
    ],
)
def test_what_backward_needs(op: str, args: dict[str, object], saved: tuple[str, ...]) -> None:
    _, _, node = rule_of(op, T(4, 6), **args)
    operands = tuple(TensorType(tuple(t), t.dtype, True) for t in args.values() if isinstance(t, T))
    assert OPS[op].saved(node, operands) == tuple(map(Saved.parse, saved))


def test_a_factor_is_saved_only_for_the_gradient_of_the_other() -> None:
    _, _, node = rule_of("aten.mul.Tensor", T(4, 6), self=x, other=y)
    trained = TensorType((4, 6), "float32", True)
    fixed = replace(trained, grad=False)
    assert OPS["aten.mul.Tensor"].saved(node, (fixed, trained)) == (Saved("in", 0),)
    assert OPS["aten.mul.Tensor"].saved(node, (trained, fixed)) == (Saved("in", 1),)
