"""What ranks do with an array of models; a worker of ``test_processes``."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from tests.autopar.workers import cluster_of, same

RATES = {"lr": [0.1, 0.3, 0.05, 0.2], "weight_decay": [0.0, 0.1, 0.2, 0.01]}
MEMBERS, STOPPED = 4, 2


class Member(nn.Module):
    """Linear layers, a convolution and a batch norm, whose statistics are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)
        self.mix, self.norm = nn.Conv1d(2, 2, 3, padding=1), nn.BatchNorm1d(2)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = self.norm(self.mix(self.up(x).unflatten(-1, (2, 4))))
        return F.cross_entropy(self.down(torch.relu(h).flatten(1)), target)


def batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 6, dtype=torch.float64, generator=generator)
    return {"x": x, "target": torch.randint(4, (8,), generator=generator)}


def trains_members_on_ranks() -> None:
    """Each rank has half of the members, steps them by their own rates, and stops one of them.

    For the last step all of it moves to an array whose members are sharded inside, as a checkpoint would have it.
    """
    torch.manual_seed(0)
    members = [Member().double() for _ in range(MEMBERS)]
    array = autopar.array(copy.deepcopy(members), vary=RATES)
    pmodel = autopar.parallelize(array, cluster_of(2), example_kwargs=batch(0), pin={"model": 2})
    assert {tuple(p._local_tensor.shape[:1]) for p in pmodel.parameters()} == {(2,)}  # type: ignore[attr-defined]
    optimizer = array.optimizer(torch.optim.SGD, pmodel, momentum=0.9)
    assert len(optimizer.param_groups) == 2
    each = [
        torch.optim.SGD(member.parameters(), momentum=0.9, **{name: values[number] for name, values in RATES.items()})
        for number, member in enumerate(members)
    ]
    for step in range(4):
        if step == 2:
            array.stop(STOPPED)
        if step == 3:
            held = autopar.hold(pmodel, optimizer)
            array = autopar.array([Member().double() for _ in range(MEMBERS)], vary={"lr": [1.0] * MEMBERS})
            pin = {"model": 1, "data": 2, "zero": 3}
            pmodel = autopar.parallelize(array, cluster_of(2), example_kwargs=batch(0), pin=pin)
            optimizer = array.optimizer(torch.optim.SGD, pmodel)
            autopar.reshard(held, pmodel, optimizer)
            assert array.stopped == (STOPPED,)
        out = pmodel(**pmodel.shard(batch(step)))
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for number, (member, alone) in enumerate(zip(members, each, strict=True)):
            if step < 2 or number != STOPPED:
                loss = member(**batch(step))
                same(f"loss of {number}", out.members[number], loss)
                loss.backward()
                alone.step()
                alone.zero_grad()
    array.load_state_dict(pmodel.full_state_dict())
    assert array.stopped == (STOPPED,)
    pmodel.get_buffer("running_members").fill_(True)
    array.optimizer(torch.optim.SGD, pmodel)
    assert [*pmodel.full_state_dict()["running_members"]] == [n != STOPPED for n in range(MEMBERS)], "it is told"
    for number, member in enumerate(members):
        found = array.member(number).state_dict()
        for name, value in member.state_dict().items():
            same(f"{name} of {number}", found[name].double(), value.double())
