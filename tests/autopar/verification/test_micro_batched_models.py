"""Micro-batched steps of many kinds of models, all stages in one process, against the original on the global batch.

The table of cases covers models, losses and outputs by schedules, numbers of stages and micro-batches, and what they
are composed with; each model is captured once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.driver.plan import assign, plan_traced, staged
from autopar.driver.trace import Traced, trace
from autopar.emit.build import MicroBatched
from autopar.measure.local_processes import LocalProcesses
from autopar.verification.float64 import exact
from autopar.verification.reference import Reference, reference
from autopar.verification.simulator import Simulation
from autopar.verification.typecheck import typecheck
from autopar.verification.verify import observed_step
from planner.base.errors import InputError, PinError, PlanError
from planner.formulation.assignment import Assignment
from planner.formulation.constraints.pins import Pins
from planner.formulation.training import Training
from planner.plan.plan import Plan
from tests.autopar import models, workers
from tests.autopar.models import HEADS, LABELS, VOCAB, WIDTH, Batch

ROWS, LENGTH = 28, 4
Pin = Mapping[str, Any]


# ---- models ----------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention with rotary positions, in a residual branch."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.norm, self.qkv, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = drop

    def forward(self, x: Tensor, mask: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k = (each * table[0] + each.flip(-1) * table[1] for each in (q, k))
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=self.drop if self.training else 0.0)
        return x + self.mix(found.transpose(1, 2).flatten(2))


class Language(nn.Module):
    """A decoder whose mask and rotary table, made once, every stage needs.

    Args:
        loss: one of :data:`LOSSES`, or of the names in ``forward``.
        frozen: so many layers, and the embedding, are not trained.
    """

    def __init__(self, loss: str = "mean", frozen: int = 0, drop: float = 0.0):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Attention(drop) for _ in range(4))
        self.early, self.head = nn.Linear(WIDTH, VOCAB), nn.Linear(WIDTH, VOCAB, bias=False)
        self.nobody, self.scale = nn.Linear(3, 2), nn.Parameter(torch.tensor(0.3))
        self.register_buffer("weights", torch.rand(VOCAB) + 0.5)
        self.loss = loss
        for module in (self.embed, *self.layers)[: frozen + 1 if frozen else 0]:
            module.requires_grad_(False)

    def forward(self, ids: Tensor, padding: Tensor, labels: Tensor) -> Any:
        length = ids.shape[1]
        angles = torch.arange(length)[:, None] * torch.linspace(0.1, 1, WIDTH // HEADS)
        table = angles.cos().to(self.scale.dtype), angles.sin().to(self.scale.dtype)
        mask = torch.ones(length, length, dtype=torch.bool).tril() & padding[:, None, None, :].bool()
        mask = mask | torch.eye(length, dtype=torch.bool)
        x, hidden = self.embed(ids), []
        for layer in self.layers:
            x = layer(x, mask, table)
            hidden.append(x)
        logits, target = self.head(x).flatten(0, 1), labels.flatten()
        if self.loss in LOSSES:
            return LOSSES[self.loss](self, logits, target)
        early = F.cross_entropy(self.early(hidden[0]).flatten(0, 1), target)
        loss = F.cross_entropy(logits, target)
        if self.loss == "two":
            return loss + 0.3 * early
        if self.loss == "outputs":
            hits = logits.argmax(-1) == target
            extra = {"mask": mask, "hits": hits.sum(), "accuracy": hits.to(x.dtype).mean(), "again": loss}
            return {"early": hidden[0].square().sum(-1), "hidden": hidden, "logits": logits, "loss": loss, **extra}
        if self.loss == "apart":
            return {"loss": loss, "early": early}
        if self.loss == "random":
            return F.cross_entropy(logits, torch.where(torch.rand(target.shape) < 0.5, target, -100))
        assert self.loss == "perplexity"
        return loss.exp()


def written_out(model: Language, logits: Tensor, target: Tensor) -> Tensor:
    counted = target >= 0
    losses = -logits.log_softmax(-1).gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (losses * counted).sum() / counted.sum()


def all_kinds(model: Language, logits: Tensor, target: Tensor) -> Tensor:
    return (
        F.cross_entropy(logits, target, reduction="sum")
        + F.cross_entropy(logits, target, reduction="none").mean()
        + F.cross_entropy(logits, target, label_smoothing=0.1)
        + F.cross_entropy(logits, target.clamp(min=0), ignore_index=5)
        + F.nll_loss(logits.log_softmax(-1), target, model.weights)
    )


LOSSES: dict[str, Callable[[Language, Tensor, Tensor], Tensor]] = {
    "mean": lambda model, logits, target: F.cross_entropy(logits, target),
    "weights": lambda model, logits, target: F.cross_entropy(logits, target, model.weights, label_smoothing=0.1),
    "all kinds": all_kinds,
    "written out": written_out,
    # Terms that no micro-batch has a share of: they are added once.
    "regularised": lambda model, logits, target: (
        F.cross_entropy(logits, target) * (-model.scale).exp() + model.scale + 0.01 * model.head.weight.square().sum()
    ),
}


class Level(nn.Module):
    def __init__(self, width: int, out: int):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, out, 3, padding=1), nn.GroupNorm(2, out)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(self.conv(x)))


class UNet(nn.Module):
    """What each level down makes, the level up of the same size reads; and all of them the time. No two are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.into, self.out = nn.Linear(4, 1), nn.Conv2d(3, 4, 1), nn.Conv2d(4, 3, 1)
        self.down = nn.ModuleList((Level(4, 4), Level(4, 8), Level(8, 12)))
        self.up = nn.ModuleList((Level(24, 12), Level(20, 8), Level(12, 4)))

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> dict[str, Tensor]:
        time = self.time(t)[:, :, None, None]
        x, skips = self.into(x), []
        for level in self.down:
            x = level(x + time)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        for level in self.up:
            x = F.interpolate(x, scale_factor=2.0)
            x = level(torch.cat([x, skips.pop() + time], 1))
        out = self.out(x)
        return {"loss": F.mse_loss(out, y), "out": out}


class Unlike(nn.Module):
    """Six layers in a row, of which no two are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 48),
            nn.Sequential(nn.LayerNorm(48), nn.Tanh()),
            nn.TransformerEncoderLayer(48, HEADS, 64, dropout=0.0, batch_first=True),
            nn.Linear(48, 80, bias=False),
            nn.GLU(),
            nn.Sequential(nn.Linear(40, 16), nn.GELU(), nn.Linear(16, WIDTH)),
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.layers(x), y)


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, y)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Linear(WIDTH, LABELS)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.encoder(x).mean(1)), y)


def tokens(length: int = LENGTH) -> Tensor:
    return torch.randint(0, VOCAB, (ROWS, length))


def labels(length: int = LENGTH) -> Tensor:
    """Micro-batches count different numbers of tokens, and one of seven none."""
    found = tokens(length)
    found[:5] = -100
    found[9, 1:] = -100
    found[20:26, ::2] = -100
    return found


def padding() -> Tensor:
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[1, 2:], mask[8, 3:], mask[27, 1:] = 0, 0, 0
    return mask


def text() -> Batch:
    return {"input_ids": tokens(), "labels": labels()}


def padded() -> Batch:
    return {**text(), "attention_mask": padding()}


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": VOCAB, "d_model": WIDTH, "d_ff": 64, "d_kv": 8, "num_heads": HEADS}
    return T5ForConditionalGeneration(T5Config(num_layers=2, decoder_start_token_id=0, **sizes))


def images() -> Batch:
    return {"pixel_values": torch.randn(ROWS, 3, 16, 16), "labels": torch.randint(0, LABELS, (ROWS,))}


def maps() -> Batch:
    return {"x": torch.randn(ROWS, 3, 8, 8), "t": torch.randn(ROWS, 4), "y": torch.randn(ROWS, 3, 8, 8)}


def language() -> Batch:
    return {"ids": tokens(), "padding": padding(), "labels": labels()}


class Keeping(Perceptron):
    """Keeps in buffers what follows from the whole batch: how many there were, a count, and averages.

    Args:
        early: its first layer reads what its last one changes.
    """

    def __init__(self, early: bool = False) -> None:
        super().__init__()
        self.early = early
        self.register_buffer("seen", torch.ones(()))
        self.register_buffer("positive", torch.tensor(2**40))
        self.register_buffer("average", torch.rand(WIDTH))
        self.register_buffer("losses", torch.rand(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.early:
            x = x + self.average
        self.positive += (x > 0).sum()
        x = self.layers[0](x * self.seen)
        self.seen = self.seen + 1
        for layer in self.layers[1:]:
            x = layer(x)
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        loss = F.mse_loss(x, y)
        self.losses = 0.9 * self.losses + 0.1 * loss.detach()
        return loss


ZOO: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "gpt2": (models.gpt2, text),
    "llama": (models.llama, padded),
    "mixtral": (models.mixtral, text),
    "qwen2-moe": (models.qwen2_moe, text),
    "qwen3-moe": (models.qwen3_moe, text),
    "deepseek-v3": (models.deepseek_v3, text),
    "gpt-oss": (models.gpt_oss, text),
    "bert": (models.bert, padded),
    "t5": (t5, padded),
    "vit": (models.vit, images),
    "unet": (UNet, maps),
    "shared layers": (models.SharedLayers, lambda: {"ids": tokens(), "labels": labels()}),
    "unlike": (Unlike, lambda: {"x": torch.randn(ROWS, LENGTH, WIDTH), "y": torch.randn(ROWS, LENGTH, WIDTH)}),
    "perceptron": (Perceptron, lambda: {"x": torch.randn(ROWS, WIDTH), "y": torch.randn(ROWS, WIDTH)}),
    "keeping": (Keeping, lambda: {"x": torch.randn(ROWS, WIDTH), "y": torch.randn(ROWS, WIDTH)}),
    "reading early": (
        functools.partial(Keeping, early=True),
        lambda: {"x": torch.randn(ROWS, WIDTH), "y": torch.randn(ROWS, WIDTH)},
    ),
    "encoder": (
        Encoder,
        lambda: {"x": torch.randn(ROWS, LENGTH, WIDTH), "y": torch.randint(0, LABELS, (ROWS,))},
    ),
    **{
        loss: (functools.partial(Language, loss), language)
        for loss in (*LOSSES, "two", "outputs", "apart", "random", "perplexity")
    },
    "frozen": (functools.partial(Language, frozen=2), language),
    "dropping": (functools.partial(Language, drop=0.3), language),
}


def made(name: str) -> tuple[nn.Module, Batch]:
    return models.Model(name, *ZOO[name]).build()


@functools.cache
def original(name: str, training: bool = True) -> Reference:
    model, batch = made(name)
    return reference(model.train(training), None, batch)


def planned(name: str, pin: Pin, training: bool = True) -> tuple[Reference, Plan]:
    ref, ranks = original(name, training), 1
    for axis in ("data", "expert", "tensor", "context", "pipeline"):
        ranks *= pin.get(axis, 1)
    return ref, plan_traced(ref.traced, workers.cluster_of(ranks), Pins.parse(pin), Training(discards=()))


def micro_batched(name: str, pin: Pin, training: bool = True) -> tuple[Reference, Assignment, MicroBatched]:
    ref, plan = planned(name, pin, training)
    assignment, found = staged(plan, assign(ref.traced, plan))
    assert found is not None
    return ref, assignment, found


# ---- values ----------------------------------------------------------------------------------------------------------


def pinned(stages: int, micro_batches: int, schedule: str = "", **others: Any) -> Pin:
    found = {"pipeline": stages, "micro_batches": micro_batches, **others}
    return {**found, "schedule": schedule} if schedule else found


CASES: list[tuple[str, Pin]] = [
    ("gpt2", pinned(2, 4, "1f1b")),
    ("llama", pinned(2, 4, "interleaved_1f1b")),
    ("gpt-oss", pinned(2, 2, "zero_bubble", expert=2)),
    ("bert", pinned(4, 2, "1f1b")),
    ("t5", pinned(2, 2, "zero_bubble", data=2, zero=3)),
    ("vit", pinned(2, 2, "1f1b", recompute="full")),
    ("unet", pinned(2, 4, "1f1b")),
    ("unet", pinned(4, 7, "zbv")),
    ("unet", pinned(4, 1, "gpipe")),
    ("unlike", pinned(2, 1, "1f1b")),
    ("unlike", pinned(4, 4, "interleaved_1f1b", tensor=2)),
    ("unlike", pinned(4, 7, "zbv")),
    ("shared layers", pinned(2, 2, "gpipe")),
    ("perceptron", pinned(4, 7, "1f1b")),
    ("encoder", pinned(2, 2, "1f1b", recompute="selective")),
    ("mean", pinned(2, 1)),
    ("weights", pinned(2, 2, "1f1b", data=2, zero=3)),
    ("all kinds", pinned(4, 4, "gpipe")),
    ("all kinds", pinned(1, 2, tensor=2)),
    ("written out", pinned(2, 2, "1f1b", data=2)),
    ("regularised", pinned(2, 7, "zero_bubble")),
    ("two", pinned(2, 2, "interleaved_1f1b", recompute={"keep": ["*.qkv", "*.norm"]})),
    ("outputs", pinned(4, 4, "1f1b")),
    ("apart", pinned(2, 2, "1f1b", context=2)),
    ("frozen", pinned(4, 2, "1f1b")),
    ("keeping", pinned(2, 2, "1f1b", data=2)),
    ("reading early", {"micro_batches": 4}),
]


def name_of(value: object) -> str:
    return "+".join(f"{k}{v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


def check(name: str, pin: Pin, training: bool = True) -> float:
    """Returns the largest relative error of any output or gradient."""
    ref, assignment, found_micro_batches = micro_batched(name, pin, training)
    with exact(), Simulation(ref.model, ref.traced.captured, assignment, 0, found_micro_batches) as simulation:
        found = observed_step(ref, assignment, simulation)
        names = set(simulation.module.state_dict())
    assert found.worst[0] <= 1e-10, found.worst
    assert found.gradients.keys() == ref.gradients.keys()
    assert not found.miscounted
    assert names == set(ref.model.state_dict())
    assert typecheck(ref.traced.captured, assignment, found_micro_batches).operators > 0
    return found.worst[0]


@pytest.mark.parametrize("name, pin", CASES, ids=name_of)
def test_a_step_is_the_original_s(name: str, pin: Pin) -> None:
    check(name, pin)


def test_eval_mode_has_gradients_too() -> None:
    check("two", pinned(2, 2, "1f1b"), training=False)


# ---- draws -----------------------------------------------------------------------------------------------------------


@functools.cache
def dropping() -> tuple[nn.Module, Batch, Traced]:
    model, batch = made("dropping")
    model = model.double()
    return model, batch, trace(model, None, batch)


def step_of(pin: Pin, training: bool = True) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients of a step with dropout."""
    model, batch, traced = dropping()
    plan = plan_traced(traced, workers.cluster_of(pin.get("pipeline", 1)), Pins.parse(pin), Training())
    assignment, found = staged(plan, assign(traced, plan))
    with Simulation(model, traced.captured, assignment, 5, found) as simulation:
        args, kwargs = simulation.inputs((), batch)
        loss = simulation.module.train(training)(*args, **kwargs)
        loss.backward()
        layouts = {leaf.name: leaf.layout for leaf in simulation.module.interface.leaves}
        gradients = {
            name: simulation.whole(p.grad, layouts[name], tuple(p.shape))
            for name, p in simulation.module.named_parameters()
            if p.grad is not None
        }
        return simulation.whole(loss, (), ()), gradients


CUTS = [pinned(2, 2, "gpipe"), pinned(4, 2, "1f1b", recompute="full")]


@functools.cache
def in_one_stage(training: bool) -> tuple[Tensor, dict[str, Tensor]]:
    return step_of({"micro_batches": 2}, training)


@pytest.mark.parametrize("pin", CUTS, ids=name_of)
def test_the_cut_changes_no_draw(pin: Pin) -> None:
    one, gradients = in_one_stage(training=True)
    loss, found = step_of(pin)
    assert abs(one - in_one_stage(training=False)[0]) > 1e-3
    assert torch.equal(loss, one)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert torch.allclose(found[name], gradient, rtol=1e-12, atol=1e-14), name


# ---- what is refused -------------------------------------------------------------------------------------------------

REFUSED: list[tuple[str, Pin, str]] = [
    ("mean", pinned(128, 4), r"'pipeline' is 128, but every stage needs a block, .* into 68 at most"),
    ("mean", pinned(2, 5), r"'micro_batches' is 5, which does not divide the batch of 28"),
    ("mean", pinned(2, 4, "1f2b"), r"'1f2b'; it is one of 'gpipe', '1f1b', 'interleaved_1f1b'"),
    ("reading early", pinned(2, 2), r"changes its buffer 'average' in stage 1 and reads it in stage 0: pin fewer"),
    (
        "perplexity",
        pinned(2, 4),
        r"no micro-batches can be cut from this model's batch: exp .* of shapes \(\) .*, or pin 'micro_batches' 1",
    ),
    (
        "random",
        pinned(2, 4),
        r"how many count depends on the random numbers of rand .*: plan without pipelines",
    ),
]


@pytest.mark.parametrize("name, pin, message", REFUSED, ids=name_of)
def test_what_cannot_be_is_refused(name: str, pin: Pin, message: str) -> None:
    def refused() -> None:
        ref, assignment, found = micro_batched(name, pin)
        typecheck(ref.traced.captured, assignment, found)

    with pytest.raises((PinError, PlanError), match=message):
        refused()


@pytest.mark.parametrize(
    "stages, message",
    [
        (["0-2", "3-6"], r"7 blocks into 2 stages, but the model has 6"),
        (["0-2"], r"has 1 'stages', and 2 ranks of 1 are 2"),
        (["0-2", "4-5"], "not every block once, in order"),
        (["0-3", "3-5"], "not every block once, in order"),
        (["0-5", ""], "not every block once, in order"),
    ],
    ids=str,
)
def test_wrong_cuts_in_a_plan_are_refused(stages: list[str], message: str) -> None:
    ref, plan = planned("mean", pinned(2, 4, "1f1b"))
    document = plan.to_dict()
    document["pipeline"]["stages"] = stages

    def refused() -> None:
        edited = Plan.from_dict(document)
        staged(edited, assign(ref.traced, edited))

    with pytest.raises(PlanError, match=message):
        refused()


def test_a_batch_of_another_size_is_refused() -> None:
    ref, assignment, found = micro_batched("mean", pinned(2, 4, "1f1b"))
    with exact(), Simulation(ref.model, ref.traced.captured, assignment, 0, found) as simulation:
        args, kwargs = simulation.inputs(ref.args, ref.kwargs)
        with pytest.raises(InputError, match=r"shape \(14, 4\), but this rank's part was planned as \(28, 4\)"):
            simulation.module(*args, **{name: value[:14] for name, value in kwargs.items()})


def test_gradients_of_other_outputs_are_refused() -> None:
    """They would be lost without a word: the step has been backward when the model returns."""
    ref, assignment, found = micro_batched("apart", pinned(2, 2, "1f1b"))
    with exact(), Simulation(ref.model, ref.traced.captured, assignment, 0, found) as simulation:
        args, kwargs = simulation.inputs(ref.args, ref.kwargs)
        for combine in (lambda out: out["loss"] + out["early"], lambda out: out["early"]):
            with pytest.raises(InputError, match="asked for those of another output: detach it, or add it to the loss"):
                combine(simulation.module(*args, **kwargs)).backward()
        out = simulation.module(*args, **kwargs)
        (out["loss"] + out["early"].detach()).backward()


# ---- processes -------------------------------------------------------------------------------------------------------


@exact()
def trains_beside_frozen_stages(name: str, document: Mapping[str, Any]) -> float:
    """On a rank: the step of a model whose first stage is frozen, and that sends masks and integers on."""
    model, batch = made(name)
    model, plan = model.double(), Plan.from_dict(document)
    pmodel = autopar.parallelize(model, plan.cluster, plan=plan, example_kwargs=batch)
    loss, expected = pmodel(**pmodel.shard(batch)), model(**batch)
    loss.backward()
    expected.backward()
    workers.same("loss", loss, expected)
    own = dict(pmodel.named_parameters())
    trained = {n: p for n, p in model.named_parameters() if n in own and p.grad is not None}
    for each, parameter in trained.items():
        workers.same(f"gradient of {each}", own[each].grad, parameter.grad)
    assert all(own[each].grad is None for each in own.keys() - trained.keys())
    started, state = model.state_dict(), pmodel.full_state_dict()
    assert state.keys() == started.keys()
    assert all(torch.equal(state[each], value) for each, value in started.items())
    return len(trained)


@pytest.mark.processes
def test_a_rank_of_frozen_parameters_takes_part(pool: LocalProcesses) -> None:
    with exact():
        model, batch = made("frozen")
        pins = Pins.parse(pinned(2, 4, "1f1b"))
        plan = plan_traced(trace(model.double(), None, batch), workers.cluster_of(2), pins, Training())
    document = plan.to_dict()
    document["pipeline"]["stages"] = ["0-1", f"2-{document['pipeline']['stages'][-1].split('-')[-1]}"]
    first, second = pool.run(trains_beside_frozen_stages, "frozen", document, ranks=2)
    assert first == 0 < second
