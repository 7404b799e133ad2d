"""What the ranks of ``test_input_forms`` do: one parallel module is called with inputs of many forms."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _set_pg_timeout

import autopar
from autopar.runtime.module import ParallelModule
from planner.base.errors import AutoparError, InputError, PlanError, PlanWarning
from planner.plan.plan import Plan
from tests.autopar.captured_once import captured_once, made
from tests.autopar.workers import cluster_of, same, same_gradients, same_own_gradients, same_state

BATCH, SEQ, VOCAB, WIDTH = 8, 12, 24, 16
Batch = dict[str, Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(torch.relu(self.up(x)))


class Tiny(nn.Module):
    """A decoder that returns its loss given labels, and its logits always; the head is the embedding. A second head is
    for the loss alone, and before the other, which all forms have, so that each has a last stage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCAB, WIDTH), nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.second = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor | None = None, mask: Tensor | None = None) -> dict[str, Tensor]:
        x, kept = self.embed(ids), None
        if mask is not None:
            kept = mask[:, None, None, :].bool()
        for block in self.blocks:
            x = block(x, kept)
        second = None if labels is None else self.second(x)
        logits = self.head(x)
        if labels is None or second is None:
            return {"logits": logits}
        losses = [nn.functional.cross_entropy(each.flatten(0, 1), labels.flatten()) for each in (logits, second)]
        return {"loss": losses[0] + 0.5 * losses[1], "logits": logits}


def tiny() -> nn.Module:
    torch.manual_seed(0)
    return made(Tiny().double().train(), Tiny)


def batch_of(rows: int = BATCH, length: int = SEQ, seed: int = 1, *, labels: bool = True, mask: bool = False) -> Batch:
    """Labels that are ignored, and masks, are other ones in every row."""
    generator = torch.Generator().manual_seed(100 * rows + length + seed)
    ids, target = (torch.randint(0, VOCAB, (rows, length), generator=generator) for _ in range(2))
    for row in range(rows):
        target[row, length - row % 5 :] = -100
    found = {"ids": ids, "labels": target}
    if mask:
        found["mask"] = (torch.arange(length)[None] < length - torch.arange(rows)[:, None] % 4).long()
    return {name: value for name, value in found.items() if labels or name != "labels"}


def plan_of(pin: Mapping[str, Any] | None, ranks: int) -> dict[str, Any]:
    cluster = cluster_of(ranks, host="offload" in (pin or {}))
    with captured_once():
        return autopar.plan(tiny(), cluster, example_kwargs=batch_of(), pin=pin).to_dict()


def parallel(model: nn.Module, document: Mapping[str, Any], batch: Batch, **options: Any) -> ParallelModule:
    plan = Plan.from_dict(document)
    with captured_once():
        return autopar.parallelize(model, plan.cluster, plan=plan, example_kwargs=batch, **options)


def trains_and_evaluates(document: Mapping[str, Any], trained: list[Batch], evaluated: list[Batch]) -> None:
    """Gradients of steps of all forms add up to the original's, and after them parameters are the same.

    The parallel module's own original has no values any more, and is frozen after it was made.
    """
    model = tiny()
    with torch.device("meta"):
        original = made(Tiny().double(), Tiny)
    pmodel = parallel(original, document, batch_of(), state_dict=model.state_dict())
    original.requires_grad_(False)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2, eps=1e-4) for m in (model, pmodel)]
    stored = [p.data_ptr() for p in map(_local, pmodel.parameters())]
    for _ in range(2):
        for batch in (batch_of(), *trained):
            loss, ploss = model(**batch)["loss"], pmodel(**pmodel.shard(batch))["loss"]
            same(f"loss of {_form(batch)}", ploss, loss)
            loss.backward()
            ploss.backward()
        (same_gradients if pmodel.pipeline is None else same_own_gradients)(pmodel, model)
        assert len(pmodel._programs._made) == 1 + len(trained), "programs are made once"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert [p.data_ptr() for p in map(_local, pmodel.parameters())] == stored
    same_state(pmodel, model)
    for batch in evaluated:
        with torch.no_grad():
            logits = pmodel.eval()(**pmodel.shard(batch))["logits"]
            if logits is not None:  # of a pipeline the last stage has it
                same(f"logits of {_form(batch)}", logits, model.eval()(**batch)["logits"])
    model.train()
    pmodel.train()
    batch = trained[-1]
    same("loss in train mode again", pmodel(**pmodel.shard(batch))["loss"], model(**batch)["loss"])


def _local(parameter: Any) -> Tensor:
    return parameter.to_local()


def _form(batch: Batch) -> str:
    return ", ".join(f"{name} {tuple(value.shape)}" for name, value in batch.items())


def refuses_and_goes_on(document: Mapping[str, Any]) -> None:
    """What is refused is so on every rank, and leaves the module as it was."""
    model, batch, rank = tiny(), batch_of(), dist.get_rank()
    pmodel = parallel(model, document, batch)

    with pytest.raises(PlanError, match=r"different inputs: rank 0 has ids 4x12 .*, rank 1 has ids 2x12"):
        pmodel(**pmodel.shard(batch_of(4 if rank == 0 else 2)))
    for call in (pmodel, pmodel.shard):
        with pytest.raises(InputError, match=r"by position \(1\), but the model was planned with inputs by name"):
            call(batch["ids"]) if call is pmodel else call((batch["ids"],))
    with pytest.raises(AutoparError, match="nothing"):
        pmodel(**pmodel.shard(batch), nothing=1)

    # Parts that others made: of as many rows as 2 ranks may share, and of one that may be the whole of a batch.
    small = batch_of(4)
    parts = {name: value.chunk(2)[rank].clone() for name, value in small.items()}
    same("loss of unmarked parts", pmodel(**parts)["loss"], model(**small)["loss"])
    with pytest.raises(InputError, match=r"'ids' has shape \(3, 12\) on this rank.*of 6 rows over 2 ranks, or a batch"):
        pmodel(**batch_of(3))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copied = copy.deepcopy(pmodel)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(0.5)
    same("loss", pmodel(**pmodel.shard(small))["loss"], model(**small)["loss"])
    model.load_state_dict(copied.full_state_dict())
    for given in (small, batch_of(3)):
        same("loss of a copy", copied(**copied.shard(given))["loss"], model(**given)["loss"])
    same_state(copied, model)
    gathered = copied.gather_module()
    assert gathered is pmodel.gather_module(), "a copy has the same original"

    # Rank 0 has a program for what it is given, and no way to know that rank 1 has none.
    _set_pg_timeout(timedelta(seconds=2), dist.group.WORLD)
    expected = (RuntimeError, "") if rank == 0 else (PlanError, "ids 2x12 .* yet, and some ranks did not come")
    with pytest.raises(expected[0], match=expected[1]):
        pmodel(**pmodel.shard(batch_of(4 if rank == 0 else 2)))


def warns_of_programs(document: Mapping[str, Any]) -> None:
    """Of each once, and once of how many there are, on rank 0."""
    pmodel = parallel(tiny(), document, batch_of())
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("default")
        for length in [*range(2, 12), 2]:
            pmodel(**pmodel.shard(batch_of(2, length)))
    said = [str(each.message) for each in caught if each.category is PlanWarning]
    if dist.get_rank():
        assert not said
        return
    for length in range(2, 12):
        start = f"planned a further program for inputs ids 2x{length} int64, labels 2x{length} int64 in "
        assert sum(text.startswith(start) for text in said) == 1
    many = [text for text in said if "planned a further" not in text]
    assert many == [
        "8 further programs were planned so far, all of which are kept: ids, labels came in 9 forms, and each new one "
        "takes a capture and a plan; pad batches to a few sizes"
    ]
    assert said.index(many[0]) == 8


class Scaled(nn.Module):
    """Holds tensors that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale, self.tables = nn.Linear(4, 2), torch.arange(2) + 1.0, [torch.ones(2)]

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x) * self.scale.to(x.dtype) * self.tables[0]


def scaled() -> Scaled:
    torch.manual_seed(0)
    return Scaled().double()


def computes_with_what_was_planned(document: Mapping[str, Any]) -> None:
    """Programs have constants of their own, and none is made with others than the first."""
    model, plan, x = scaled(), Plan.from_dict(document), rows(8)["x"]
    expected = scaled()(x[:6])
    pmodel = autopar.parallelize(model, plan.cluster, plan=plan, example_kwargs={"x": x})
    filled = x[:6].clone()
    part = pmodel.shard({"x": filled})
    filled.zero_()  # as a caller does that fills one batch again and again
    same("outputs", pmodel(**part), expected)
    other = pmodel.shard({"x": x[:4]})
    if dist.get_rank() == 0:
        model.scale.fill_(3)
    with pytest.raises(PlanError, match=r"change of the model's constants: rank 0 has scale, rank 1 has none"):
        pmodel(**other)
    model.scale.fill_(3)
    same("outputs", pmodel(**pmodel.shard({"x": x[:6]})), expected)
    with pytest.raises(InputError, match="the model's scale has other values than when it was planned"):
        pmodel(**other)
    model.scale = 2.0  # type: ignore[assignment]
    with pytest.raises(InputError, match="the model's scale is now no tensor, and was float32 2 when it was planned"):
        pmodel(**other)
    model.scale = torch.arange(2) + 1.0
    model.tables[0] = torch.ones(1)
    with pytest.raises(InputError, match=r"the model's tables\.0 is now float32 1, and was float32 2"):
        pmodel(**other)
    model.tables[0] = torch.ones(2)
    same("outputs", pmodel(**other), scaled()(x[:4]))


class Normed(nn.Module):
    """Batch norm, whose eval mode computes something else, unless it keeps no statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.last = nn.BatchNorm1d(2, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.down(torch.relu(self.norm(self.up(x)))))


def normed() -> nn.Module:
    torch.manual_seed(0)
    return Normed().double()


def squares(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return (output - batch["target"]).square().mean()


def rows(count: int) -> Batch:
    generator = torch.Generator().manual_seed(count)
    found = {"x": torch.randn(count, 4, generator=generator), "target": torch.randn(count, 2, generator=generator)}
    return {name: value.double() for name, value in found.items()}


def normalises(document: Mapping[str, Any]) -> None:
    """Running statistics are those of all batches; without a target the model's own outputs are returned."""
    model = normed().train()
    pmodel = parallel(model, document, rows(8), loss_fn=squares)
    for count in (8, 6, 5, 8, 5):
        given = rows(count)
        loss, ploss = squares(model(given["x"]), given), pmodel(**pmodel.shard(given))
        same(f"loss of {count} rows", ploss, loss)
        loss.backward()
        ploss.backward()
    same_gradients(pmodel, model)
    same_state(pmodel, model)
    model.eval()
    pmodel.eval()
    for count in (8, 3, 2):
        given = rows(count)
        with torch.no_grad():
            same(f"loss of {count} rows in eval mode", pmodel(**pmodel.shard(given)), squares(model(given["x"]), given))
            output = pmodel(**pmodel.shard({"x": given["x"]}))
        same("outputs", output, model(given["x"]))
    same_state(pmodel, model)


def trains_what_was_planned_to_evaluate(document: Mapping[str, Any]) -> None:
    model = tiny().eval()
    pmodel = parallel(model, document, batch_of())
    assert not pmodel.training
    model.train()
    pmodel.train()
    for m in (model, pmodel):
        m(**(m.shard(batch_of()) if isinstance(m, ParallelModule) else batch_of()))["loss"].backward()
    same_gradients(pmodel, model)


def refuses_where_model_data_moves(document: Mapping[str, Any]) -> None:
    pmodel = parallel(tiny(), document, batch_of())
    pmodel(**pmodel.shard(batch_of()))["loss"].backward()
    for given in (batch_of(4), batch_of(labels=False)):
        with pytest.raises(PlanError, match=r"transfer schedule holds for the inputs.*drop_last"):
            pmodel(**pmodel.shard(given))


class Nesting(nn.Module):
    """Takes its inputs by position, or nested in one; a number among them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 2)

    def forward(self, x: Any, more: Tensor | None = None, scale: float = 1.0) -> Tensor:
        if isinstance(x, dict):
            x, more = x["own"], x.get("others", [None])[0]
        found = self.up(x) * scale
        return found if more is None else found + more


def nesting() -> nn.Module:
    torch.manual_seed(0)
    return Nesting().double()


def squares_of(output: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """A sum, which is other than that of parts, or of a batch that each rank takes for its own."""
    return (output - batch["target"]).square().sum()


def takes_nested_and_positional_inputs(nested: Mapping[str, Any], positional: Mapping[str, Any]) -> None:
    given = rows(8)
    x, target = given["x"], given["target"]

    model = nesting()
    pmodel = parallel(nesting(), nested, {"x": {"own": x}, "target": target}, loss_fn=squares_of)
    forms: list[dict[str, Any]] = [
        {"x": {"own": x[:3]}, "target": target[:3]},
        {"x": {"own": x[:4], "others": [target[4:]]}, "target": target[:4], "scale": 2.0},
    ]
    for form in forms:
        loss, ploss = squares_of(model(form["x"], scale=form.get("scale", 1.0)), form), pmodel(**pmodel.shard(form))
        same("loss", ploss, loss)
        loss.backward()
        ploss.backward()
    same_gradients(pmodel, model)
    same("outputs", pmodel(**pmodel.shard({"x": {"own": x[:6]}})), model(x[:6]))

    plan = Plan.from_dict(positional)
    pmodel = autopar.parallelize(nesting(), plan.cluster, plan=plan, example_args=(x, target))
    for args in ((x[:6], target[:6]), (x[:3],)):
        same("outputs", pmodel(*pmodel.shard(args)), model(*args))
    model.zero_grad()
    model(x[:6], target[:6]).square().sum().backward()
    pmodel(*pmodel.shard((x[:6], target[:6]))).square().sum().backward()
    same_gradients(pmodel, model)
