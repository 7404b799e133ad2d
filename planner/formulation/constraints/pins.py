"""Pins: decisions that the user fixes, by recipe or by operator.

A recipe says how many ranks share each kind of work: ``data`` (the batch factor), ``replicate`` (the batch again: that
many groups of ``data`` ranks, each with all parameters), ``context`` (the query-sequence factor of attention),
``tensor`` (weight factors), see :mod:`planner.formulation.constraints.roles`. It becomes a mesh with an axis of each
name, and a filter that keeps, on that axis, the strategies that are meant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar, get_args

from planner.base.errors import PinError
from planner.cost.kernels import Scaling
from planner.formulation.constraints.grids import in_pins, read_tensor
from planner.formulation.constraints.roles import ROLES, WEIGHTS, pinnable, sharing
from planner.formulation.constraints.synonyms import meant
from planner.formulation.constraints.zero import Ways, Zero, levels_alone, read_zero, unshardings
from planner.formulation.remat.levels import COMPUTED, Level
from planner.formulation.training import Activations, ReduceDtype, Tier, Update
from planner.formulation.unsharding import PER_MICRO_BATCH, Unsharding
from planner.solve.pipeline.schedule import NAMES, VIRTUAL_STAGES, versions
from planner.tables.tables_plan import NO_SLAB, SLABS

BatchNorm = Literal["micro_batch"]
ContextKind = Literal["gather", "zigzag_gather", "ring", "zigzag", "ulysses", "hybrid"]
CONTEXT_KINDS: tuple[ContextKind, ...] = get_args(ContextKind)
COUNTS = {"pipeline": "stages", "micro_batches": "micro-batches", "virtual_stages": "stages of each rank"}
Offload = Literal["none", "host", "auto", "disk"]
SCALINGS: tuple[Scaling, ...] = get_args(Scaling)
REDUCE_DTYPES: tuple[ReduceDtype, ...] = get_args(ReduceDtype)
TIERS: Mapping[Offload, Tier] = {"none": "device", "host": "host", "auto": "either", "disk": "disk"}

Name = TypeVar("Name", bound=str)
FREE_AXES = ("all", "outer", "middle", "inner")
"""Axes of the meshes that are tried when no size is pinned."""


@dataclass(frozen=True)
class Pins:
    """What is fixed.

    Attributes:
        sizes: ranks per recipe axis; empty when the mesh is free.
        sequence_parallel: on the tensor axis, keep norms and residuals sharded along the sequence, or (``False``)
            whole; ``None`` leaves it to the search.
        context_kind: how the ranks of the context axis attend to one another's keys, see :data:`CONTEXT_KINDS`;
            ``None`` leaves it to the search, for each attention.
        whole_experts: on the tensor axis keep experts whole, and shard what they are stacked along (``True``), or shard
            each (``False``): pin ``expert_tensor`` beside ``tensor``; ``None``: beside pin ``expert`` each is sharded,
            else it is left to the search.
        zero: 0 stores parameters whole on the data axis and those of a sequence, 1, 2 and 3 sharded; on the replicate
            axis they are whole. With 1 and 2, which are one, they are held as they are used from forward to backward,
            with micro-batches for all micro-batches, with 3 gathered again in backward, with micro-batches of each
            micro-batch. Or that by glob of module path or name, of which the first that matches counts. ``None``, or
            no match, leaves it to the search. Where no size is pinned with it, every device of a stage is on the data
            axis, as if ``tensor`` were pinned to 1.
        recompute: what every block that repeats recomputes in backward: ``none``, ``selective`` (all but contractions,
            convolutions and attention) or ``full``; ``None`` leaves it to the search.
        keep: globs of module paths whose operators' results these blocks keep all the same.
        layers: glob of module path -> {axis name: strategy}.
        tables: glob of a parameter or module -> how its embedding table may lie: in slabs of ranks whole (``table``) or
            by columns (``column``), in those of nodes by rows or columns (``table-row``, ``table-column``), or in none
            (``none``), decided as any operator. Of globs the first that matches counts; what none matches is left to
            the placement.
        stages: of the pipeline, ``pipeline`` in the user's form; ``None`` leaves it to the search, as the others do.
        micro_batches: micro-batches in which a step takes the global batch.
        batch_norm: ``micro_batch`` lets batch norms normalise by the statistics of each micro-batch, where there are
            several; ``None``: by those of the global batch alone, so that there is one.
        schedule: the pipeline's, by name; see :mod:`planner.solve.pipeline.schedule`.
        virtual_stages: stages of each rank of the pipeline, for schedules that interleave them.
        offload: where model data is at home: on the ``host``; ``auto``: there, but of some blocks on the device, of as
            many as makes the step shortest; on ``disk``; ``none``: on the device; ``None``: there too, unless nothing
            fits.
        update: when parameters are updated: ``after`` all of backward, or in ``backward``, each block's as soon as its
            gradients are complete.
        activations: of how many blocks, the first ones (of each stage), what is saved for backward may leave for where
            model data is at home: a count or ``all``; ``None`` leaves it to the search.
        streamed: linear layers may be streamed, where nothing in ``layers`` says so, too.
        compile: what distinct blocks compute between collectives is compiled, each once.
        float8: linear layers of blocks that repeat multiply in float8, with a scale of each operand or each row.
        reduce_dtype: in which gradients of parameters in narrower ones are reduced over ranks; ``None``: in their own.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    sequence_parallel: bool | None = None
    context_kind: ContextKind | None = None
    whole_experts: bool | None = None
    zero: Zero | None = None
    recompute: Level | None = None
    keep: tuple[str, ...] = ()
    layers: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    tables: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    stages: int | None = None
    micro_batches: int | None = None
    batch_norm: BatchNorm | None = None
    schedule: str | None = None
    virtual_stages: int | None = None
    offload: Offload | None = None
    update: Update = "after"
    activations: Activations | None = None
    streamed: bool = False
    compile: bool = False
    reduce_dtype: ReduceDtype | None = None
    float8: Scaling | None = None

    @staticmethod
    def parse(pin: Mapping[str, object] | None) -> Pins:
        """Check a user's ``pin``.

        Raises:
            PinError: no mapping, an unknown name, a wrong value, or a decision this version cannot take.
        """
        if pin is not None and not isinstance(pin, Mapping):
            raise PinError(f"pin is {pin!r}; give a dict of decisions, e.g. {{'data': 2, 'tensor': 4}}")
        pin = dict(pin or {})
        known = {
            *pinnable(),
            *COUNTS,
            "sequence_parallel",
            "context_kind",
            "zero",
            "recompute",
            "offload",
            "update",
            "activations",
        }
        known |= {"layers", "tables", "schedule", "batch_norm", "streamed", "compile", "reduce_dtype", "float8"}
        unknown = sorted(set(pin) - known, key=str)
        if unknown:
            told = "".join(f"; {hint}" for name in unknown if (hint := meant(name, known)))
            raise PinError(
                f"pin has no decision called {', '.join(map(repr, unknown))}; known: {', '.join(sorted(known))}{told}"
            )
        counts = {name: _count(name, what, pin.pop(name, None)) for name, what in COUNTS.items()}
        schedule = _schedule(pin.pop("schedule", None), counts["virtual_stages"])
        batch_norm = _batch_norm(pin.pop("batch_norm", None))
        streamed, compiles = (_switch(name, pin.pop(name, None)) for name in ("streamed", "compile"))
        sizes = read_tensor(pin.get("tensor"), pin.get("depth") is not None)
        pin |= {"tensor": None} if sizes else {}
        for name in pinnable():
            size = pin.pop(name, None)
            if size is None:
                continue
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise PinError(
                    f"pin {name!r} is {size!r}; it says how many ranks share that work: a whole number from 1"
                )
            sizes[name] = size
        whole_experts = _whole_experts(sizes)
        zero = read_zero(pin.pop("zero", None))
        if zero is not None and not sizes:
            sizes["tensor"] = 1
        sequence_parallel = pin.pop("sequence_parallel", None)
        if sequence_parallel not in (None, True, False):
            raise PinError(f"pin 'sequence_parallel' is {sequence_parallel!r}; it is True or False")
        if sequence_parallel and all(sizes.get(name, 1) == 1 for name in sharing(WEIGHTS)):
            raise PinError("pin 'sequence_parallel' shards the sequence over the tensor axis: pin 'tensor' above 1 too")
        if sequence_parallel is not None and any(ROLES[name].pin for name in sizes):
            raise PinError(
                f"pin 'sequence_parallel' is {sequence_parallel}, but a grid, pin 'tensor' {in_pins(sizes)['tensor']}, "
                "shards norms and residuals along its own axes: leave one of both out"
            )
        context_kind = _context_kind(pin.pop("context_kind", None), sizes)
        recompute, keep = _recompute(pin.pop("recompute", None))
        offload = _offload(pin.pop("offload", None))
        update = _update(pin.pop("update", None))
        activations = _activations(pin.pop("activations", None), offload)
        layers = pin.pop("layers", {})
        if not isinstance(layers, Mapping) or not all(isinstance(axes, Mapping) for axes in layers.values()):
            raise PinError(
                f"pin 'layers' maps a module path (with * and ?) to {{axis name: strategy}}, and is {layers!r}"
            )
        for path, wanted in layers.items():
            if not all(isinstance(each, str) for each in (path, *wanted, *wanted.values())):
                raise PinError(
                    f"pin 'layers' has {dict(wanted)!r} for {path!r}; names of modules and axes, and strategies, are "
                    "text"
                )
        return Pins(
            sizes,
            sequence_parallel,
            context_kind,
            whole_experts,
            zero,
            recompute,
            keep,
            layers,
            _tables(pin.pop("tables", None)),
            counts["pipeline"],
            counts["micro_batches"],
            batch_norm,
            schedule,
            counts["virtual_stages"],
            offload,
            update,
            activations,
            streamed,
            compiles,
            _reduce_dtype(pin.pop("reduce_dtype", None)),
            _float8(pin.pop("float8", None)),
        )

    @property
    def tier(self) -> Tier:
        """Where model data is at home; on the device where that is left to the search, as it begins there."""
        return TIERS[self.offload or "none"]

    @property
    def micro_batched(self) -> bool:
        """Whether they leave only steps of several stages, of several micro-batches, or of two versions of weights."""
        return (self.stages or 1) > 1 or (self.micro_batches or 1) > 1 or versions(self.schedule) > 1

    @property
    def unshardings(self) -> tuple[Unsharding, ...]:
        """When a micro-batched step may gather parameters, first what is looked at first.

        Raises:
            PinError: some are pinned to one of both, and some to the other.
        """
        return unshardings(self.zero) if self.tier == "device" else (PER_MICRO_BATCH,)

    def levels(self, ways: Ways) -> tuple[tuple[Level, ...], tuple[Level, ...]]:
        """The levels of recomputation that they leave blocks that repeat, and others.

        Args:
            ways: what ``zero`` is for the parameters that the block reads.
        """
        alone = levels_alone(ways)
        if self.recompute is None:
            return (*alone, *COMPUTED[1:]), alone
        if self.recompute == "none":  # nor anything gathered again, unless that is pinned
            return alone[:1], alone[:1]
        return (self.recompute,), alone

    def to_dict(self) -> dict[str, object]:
        """The user's form."""
        found = in_pins(self.sizes)
        if self.sequence_parallel is not None:
            found["sequence_parallel"] = self.sequence_parallel
        if self.context_kind is not None:
            found["context_kind"] = self.context_kind
        if self.whole_experts is not None:
            found["expert_tensor"] = 1 if self.whole_experts else self.sizes.get("tensor", 1)
        if self.zero is not None:
            found["zero"] = dict(self.zero) if isinstance(self.zero, Mapping) else self.zero
        if self.recompute is not None:
            found["recompute"] = {"keep": list(self.keep)} if self.keep else self.recompute
        if self.streamed:
            found["streamed"] = True
        if self.compile:
            found["compile"] = True
        if self.reduce_dtype is not None:
            found["reduce_dtype"] = self.reduce_dtype
        if self.float8 is not None:
            found["float8"] = self.float8
        if self.layers:
            found["layers"] = {path: dict(axes) for path, axes in self.layers.items()}
        if self.tables:
            found["tables"] = {
                glob: kinds[0] if len(kinds) == 1 else list(kinds) for glob, kinds in self.tables.items()
            }
        if self.offload is not None:
            found["offload"] = self.offload
        if self.update != "after":
            found["update"] = self.update
        if self.activations is not None:
            found["activations"] = self.activations or "none"
        micro_batches = {
            "pipeline": self.stages,
            "micro_batches": self.micro_batches,
            "batch_norm": self.batch_norm,
            "schedule": self.schedule,
            "virtual_stages": self.virtual_stages,
        }
        return {**found, **{name: value for name, value in micro_batches.items() if value is not None}}


def _context_kind(value: object, sizes: Mapping[str, int]) -> ContextKind | None:
    """How ranks attend to one another's keys, if there are several."""
    if value is None:
        return None
    for kind in CONTEXT_KINDS:
        if value == kind:
            if kind == "hybrid" and sizes.get("ulysses") == 1:
                raise PinError(
                    "pin 'context_kind' is 'hybrid', whose ranks share heads too, and pin 'ulysses' is 1: pin "
                    "'ulysses' above 1, or leave it out to have it chosen, or pin 'zigzag' or 'ring'"
                )
            if sizes.get("context", 1) == 1:
                raise PinError(
                    f"pin 'context_kind' is {value!r}, which says how the ranks of the context axis attend to one "
                    "another's keys: pin 'context' above 1 too"
                )
            return kind
    raise PinError(
        f"pin 'context_kind' is {value!r}; the ranks of the context axis 'gather' keys and values, pass them around in "
        "a 'ring', both as they are or so that a causal mask leaves all as much ('zigzag_gather', 'zigzag'), or share "
        "heads instead of the sequence while they attend ('ulysses'), or do that inside a node, with a ring across "
        "('hybrid')"
    )


def _whole_experts(sizes: dict[str, int]) -> bool | None:
    """Whether the tensor axis keeps experts whole, if ``expert_tensor`` says so; it is then no axis of its own."""
    tensor = sizes.get("tensor", 1)
    if tensor == 1 or "expert_tensor" not in sizes:
        return None
    ranks = sizes.pop("expert_tensor")
    if ranks not in (1, tensor):
        raise PinError(
            f"pin 'expert_tensor' is {ranks} beside pin 'tensor' {tensor}, whose ranks shard each expert, all together "
            f"({tensor}), or have whole ones (1): pin one of these, or leave out 'tensor'"
        )
    return ranks == 1


def _recompute(value: object) -> tuple[Level | None, tuple[str, ...]]:
    """A pinned level of recomputation, and the globs of what is kept all the same."""
    if isinstance(value, Mapping) and value.keys() == {"keep"}:
        globs = value["keep"]
        if isinstance(globs, list | tuple) and globs and all(isinstance(each, str) for each in globs):
            return "full", tuple(globs)
    elif value is None:
        return None, ()
    for level in COMPUTED:
        if value == level:
            return level, ()
    raise PinError(
        f"pin 'recompute' is {value!r}; it is one of {', '.join(map(repr, COMPUTED))}, or says of which modules the "
        "results are kept: {'keep': ['*.self_attn', '*.mlp.up']}"
    )


def _tables(value: object) -> Mapping[str, tuple[str, ...]]:
    """Pinned ways in which tables may lie, by glob."""
    known = (*SLABS, NO_SLAB)
    given = value if isinstance(value, Mapping) else {} if value is None else {"*": value}
    found: dict[str, tuple[str, ...]] = {}
    for glob, each in given.items():
        kinds = (each,) if isinstance(each, str) else each
        found[glob] = tuple(kinds) if isinstance(kinds, list | tuple) else ()
        if not isinstance(glob, str) or not found[glob] or not all(kind in known for kind in found[glob]):
            raise PinError(
                f"pin 'tables' has {each!r} for {glob!r}; it says how embedding tables may lie, all in one way, "
                f"or by module path (with * and ?): {', '.join(map(repr, known))}, or a list of these"
            )
    return found


def _offload(value: object) -> Offload | None:
    """Where model data is at home, if that is pinned."""
    others = (
        "parameters, gradients and optimizer state have their home on the device ('none'), on the host ('host'), there "
        "but of as many blocks on the device as makes the step shortest ('auto'), or in files ('disk')"
    )
    return _one_of(tuple(TIERS), "offload", value, others)


def _update(value: object) -> Update:
    """When parameters are updated."""
    if value in (None, "after"):
        return "after"
    if value != "backward":
        raise PinError(
            f"pin 'update' is {value!r}; parameters are updated 'after' all of backward, or in 'backward', each "
            "block's as soon as their gradients are complete"
        )
    return "backward"


def _reduce_dtype(value: object) -> ReduceDtype | None:
    """In which dtype gradients are reduced, where that is not their own."""
    others = f"gradients of parameters in narrower dtypes are reduced in {' or '.join(map(repr, REDUCE_DTYPES))}, and"
    return _one_of(REDUCE_DTYPES, "reduce_dtype", value, f"{others} left out each in its own")


def _float8(value: object) -> Scaling | None:
    """How products are scaled to float8, if they are."""
    others = (
        "linear layers multiply in float8 'tensorwise', with one scale of each operand, or 'rowwise', with one of each "
        "row, and left out in their own dtype"
    )
    return _one_of(SCALINGS, "float8", value, others)


def _one_of(known: Sequence[Name], pin: str, value: object, others: str) -> Name | None:
    """A pin's value, which is one of a few names or left out."""
    for name in known:
        if value == name:
            return name
    if value is not None:
        raise PinError(f"pin {pin!r} is {value!r}; {others}")
    return None


def _activations(value: object, offload: Offload | None) -> Activations | None:
    """Of how many blocks what is saved may leave, if there is anywhere to go."""
    if value is None:
        return None
    if value in ("none", "all"):
        found: Activations = 0 if value == "none" else "all"
    elif isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        found = value
    else:
        raise PinError(
            f"pin 'activations' is {value!r}; it says of how many blocks what is saved for backward may leave the "
            "device: 'all', 'none', or a whole number, of the first blocks"
        )
    if found and offload in (None, "none"):
        raise PinError(
            f"pin 'activations' is {value!r}, but they leave for where model data is at home, and that is the device: "
            "pin 'offload' 'host', 'auto' or 'disk' too"
        )
    return found


def _batch_norm(value: object) -> BatchNorm | None:
    """By whose statistics batch norms normalise."""
    if value is None:
        return None
    if value != "micro_batch":
        raise PinError(
            f"pin 'batch_norm' is {value!r}; it is 'micro_batch' (each micro-batch is normalised by its own "
            "statistics, as where gradients are accumulated), or left out (by those of the global batch, in one piece)"
        )
    return "micro_batch"


def _schedule(schedule: object, virtual_stages: int | None) -> str | None:
    """A pinned schedule, if it is one and has so many stages on a rank."""
    if schedule is not None and (not isinstance(schedule, str) or schedule not in NAMES):
        raise PinError(f"pin 'schedule' is {schedule!r}; it is one of {', '.join(map(repr, NAMES))}")
    least, most = VIRTUAL_STAGES[schedule or ("interleaved_1f1b" if virtual_stages != 1 else "1f1b")]
    if virtual_stages is not None and not least <= virtual_stages <= (most or virtual_stages):
        number = str(least) if least == most else f"{least} or more"
        raise PinError(f"pin 'virtual_stages' is {virtual_stages}, but {schedule} has {number} of them on each rank")
    return schedule


def _switch(name: str, value: object) -> bool:
    """A pin that is on or off; off where it is left out."""
    if value not in (None, True, False):
        raise PinError(f"pin {name!r} is {value!r}; it is True or False")
    return bool(value)


def _count(name: str, what: str, value: object) -> int | None:
    """A pinned number, if it is one."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise PinError(f"pin {name!r} is {value!r}; it is how many {what} there are: a whole number from 1")
    return value
