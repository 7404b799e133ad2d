"""The command line: ``autopar plan``, ``show``, ``rebind``, ``export``, ``fleet``, ``verify`` and so on.

Only what ``--help`` needs is imported at the top; torch comes with the first command that needs it, and once its words
are known to be right (:mod:`autopar.cli.arguments`). An error of the user's is one message and exit code 2.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

import autopar
from planner.base.errors import AutoparError, InputError, PlanWarning
from planner.base.stdout import keep_stdout

if TYPE_CHECKING:
    from autopar.cli.model_loading import Named
    from planner.plan.pareto import ParetoCurve
    from planner.plan.plan import Plan


class _Commands(TyperGroup):
    """Commands whose errors for users are messages."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except AutoparError as error:
            typer.secho("error: ", fg="red", bold=True, err=True, nl=False)
            typer.echo(str(error), err=True)
            raise typer.Exit(2) from None


app = typer.Typer(cls=_Commands, no_args_is_help=True, add_completion=False, rich_markup_mode="rich")
checkpoints = typer.Typer(no_args_is_help=True, help="Branch at a checkpoint, or take its model out.")
app.add_typer(checkpoints, name="checkpoint")

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="[bold]module:function[/] or [bold]file.py:function[/] returning a model, or (model, example inputs); or "
        "a Transformers config.json.",
    ),
]
ClusterOption = Annotated[
    str,
    typer.Option(
        "--cluster", "-c", metavar="CLUSTER", help="A cluster file, preset:dgx-h100:4 (nodes), local:4, or detect."
    ),
]
Pins = Annotated[
    list[str] | None,
    typer.Option(
        "--pin",
        metavar="NAME=VALUE",
        help="Fix a decision: data=2, tensor=4, zero=3, offload=host ... (all of them: docs/reference.md)",
    ),
]
Inputs = Annotated[
    list[str] | None,
    typer.Option("--input", metavar="NAME=SHAPE:DTYPE", help="An input of the global batch: input_ids=8x128:int64."),
]
BATCH, SEQUENCE = "Global batch of a Transformers model.", "Sequence length of a Transformers model."
DType = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE",
        help="float32, bfloat16, float16 or float64: of parameters, and of what floats of inputs.",
        show_default="as a config.json says, or the model is made",
    ),
]
TimeLimit = Annotated[float, typer.Option(min=1, help="Seconds after which the search returns the best so far.")]
Trace = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write the predicted step here, as a trace that Perfetto opens."),
]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan that autopar plan --out wrote.")]
Checkpoint = Annotated[Path, typer.Argument(metavar="PATH", help="What autopar.save_checkpoint wrote.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"autopar {autopar.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Automatic parallelism for PyTorch: plan a model for a cluster, look at the plan, check it."""


@app.command()
def plan(
    model: Model,
    cluster: ClusterOption,
    batch: Annotated[int | None, typer.Option(min=1, help=BATCH, show_default="8")] = None,
    seq: Annotated[int | None, typer.Option(min=1, help=SEQUENCE, show_default="512")] = None,
    inputs: Inputs = None,
    dtype: DType = None,
    pin: Pins = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan here, as JSON.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page to look at here.")] = None,
    trace: Trace = None,
    optimizer_bytes: Annotated[
        int, typer.Option(min=0, help="Optimizer state per parameter element: Adam's; 12 with masters in float32.")
    ] = 8,
    outputs: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Outputs that training steps keep: loss,logits or all.",
            show_default="of a micro-batched step numbers, else all",
        ),
    ] = None,
    time_limit: TimeLimit = 20.0,
    gap: Annotated[
        float | None,
        typer.Option(help="Part of a step that need not be proved; 0: prove the fastest.", show_default="0.01"),
    ] = None,
    max_axes: Annotated[int, typer.Option(min=1, max=3, help="Axes of meshes that no pin makes, at most.")] = 2,
    pareto: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Trace step time against memory per device, in three times the time limit at most, and write the plan "
            "of each point here; the page of --html has the curve.",
        ),
    ] = None,
) -> None:
    """Find the fastest plan for training a model; needs neither the cluster nor a GPU."""
    _check_writable(out, html, trace)
    _check_folder(pareto)
    with _status("reading the model") as say:
        from autopar.cli import arguments
        from planner.search.search import GAP, check_gap

        where, pins = arguments.read_cluster(cluster), arguments.read_pins(pin or ())
        arguments.check_pins(pins, where)
        check_gap(GAP if gap is None else gap)
        loaded = _loaded(model, inputs, dtype, batch=batch, sequence=seq, default=(8, 512))

        from autopar.driver.plan import plan

        warnings.simplefilter("ignore", PlanWarning)  # the report begins with the same
        found = plan(
            loaded.model,
            where,
            example_kwargs=loaded.inputs,
            pin=pins,
            optimizer_bytes_per_element=optimizer_bytes,
            outputs="all" if outputs == "all" else None if outputs is None else outputs.split(","),
            time_limit_s=time_limit,
            gap=GAP if gap is None else gap,
            max_axes=max_axes,
            progress=say,
        )
    typer.echo(str(found), nl=False)
    _write(found, out, html, trace)
    if pareto is not None:
        with _status("tracing step time against memory") as say:
            curve = found.pareto(time_limit_s=3 * time_limit, gap=GAP if gap is None else gap, progress=say)
        typer.echo(f"\n{curve}", nl=False)
        _write_curve(curve, pareto, html)


@app.command()
def show(
    plan: PlanFile,
    explain: Annotated[
        str | None, typer.Option(metavar="NAME", help="Say why this module, operator or parameter is laid out so.")
    ] = None,
    block: Annotated[
        str | None, typer.Option(metavar="NAME", help="List every operator of this distinct block.")
    ] = None,
    timeline: Annotated[bool, typer.Option("--timeline", help="Draw the predicted step.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page to look at here.")] = None,
    trace: Trace = None,
) -> None:
    """Print a plan."""
    from planner.plan.plan import Plan

    found = Plan.load(plan)
    if explain is not None:
        typer.echo(str(found.explain(explain)))
    elif block is not None:
        typer.echo(_block(found, block))
    elif timeline:
        typer.echo(str(found.timeline()))
    else:
        typer.echo(str(found), nl=False)
    _write(found, None, html, trace)


@app.command()
def rebind(
    plan: PlanFile,
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
            help="The model to carry the plan to: [bold]module:function[/], [bold]file.py:function[/], or a "
            "Transformers config.json.",
        ),
    ],
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", "-c", metavar="CLUSTER", help="Carry it to this cluster.", show_default="the plan's"),
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help=BATCH, show_default="the plan's")] = None,
    seq: Annotated[int | None, typer.Option(min=1, help=SEQUENCE, show_default="the plan's")] = None,
    inputs: Inputs = None,
    dtype: DType = None,
    out: Annotated[Path | None, typer.Option(help="Write the rebound plan here, as JSON.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page to look at here.")] = None,
    trace: Trace = None,
    time_limit: Annotated[
        float, typer.Option(min=0, help="Seconds of a fresh search to compare with; 0: none is made.")
    ] = 0.0,
) -> None:
    """Carry a plan's decisions to another model, batch or cluster, and say what had to change."""
    _check_writable(out, html, trace)
    with _status("reading the model") as say:
        from autopar.cli import arguments
        from planner.plan.plan import Plan

        found = Plan.load(plan)
        where = None if cluster is None else arguments.read_cluster(cluster)
        loaded = _loaded(model, inputs, dtype, batch=batch, sequence=seq, planned=found)
        warnings.simplefilter("ignore", PlanWarning)  # the report begins with the same
        rebound = found.rebind(loaded.model, where, example_kwargs=loaded.inputs, time_limit_s=time_limit, progress=say)
    typer.echo(str(rebound), nl=False)
    _write(rebound, out, html, trace)


@app.command("export")
def export_plan(
    plan: PlanFile,
    to: Annotated[
        str,
        typer.Option(metavar="FORMAT", help="fsdp2, hf, accelerate, torchtitan, megatron or deepspeed."),
    ],
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", metavar="MODEL", help="The plan's model, to price what the format cannot say."),
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help=BATCH, show_default="the plan's")] = None,
    seq: Annotated[int | None, typer.Option(min=1, help=SEQUENCE, show_default="the plan's")] = None,
    inputs: Inputs = None,
    dtype: DType = None,
    out: Annotated[Path | None, typer.Option(help="Write the configuration here.")] = None,
    time_limit: TimeLimit = 10.0,
) -> None:
    """Write a plan as a configuration of another tool, and say what of it is lost, at which price."""
    _check_writable(out)
    with _status("reading the plan") as say:
        from planner.interchange.formats import format_of
        from planner.plan.plan import Plan

        format_of(to)
        found = Plan.load(plan)
        if model is not None:
            loaded = _loaded(model, inputs, dtype, batch=batch, sequence=seq, planned=found)
            warnings.simplefilter("ignore", PlanWarning)
            say("pricing the plan")
            found = autopar.evaluate(loaded.model, found, example_kwargs=loaded.inputs)
        exported = found.export(to, time_limit_s=time_limit)
    if out is None:
        typer.echo(exported.text)
    else:
        exported.save(out)
        typer.echo(f"written: {out}", err=True)
    typer.echo(exported.report, err=out is None)


@app.command()
def launch(
    plan: PlanFile,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- SCRIPT ...", help="A script of Python, and its arguments.")
    ] = None,
    on: Annotated[str, typer.Option(metavar="LAUNCHER", help="torchrun, slurm or kubernetes.")] = "torchrun",
    nodes: Annotated[
        int | None,
        typer.Option(min=1, help="Machines, if not units of the plan's innermost level.", show_default=False),
    ] = None,
    name: Annotated[str, typer.Option(help="Of the job.")] = "train",
    image: Annotated[str, typer.Option(help="Of the container, on Kubernetes.")] = "",
    topology: Annotated[
        str, typer.Option(metavar="LABEL", help="Of machines in one part of the network, on Kubernetes.")
    ] = "",
    out: Annotated[Path | None, typer.Option(help="Write it here.")] = None,
) -> None:
    """Write what starts a plan's processes on machines, in the order of its ranks."""
    _check_writable(out)
    with _status("reading the plan"):
        from planner.launch.job import job
        from planner.launch.launchers import launched, launcher_of
        from planner.plan.plan import Plan

        launcher, found = launcher_of(on), Plan.load(plan)
        stages = 1 if found.pipeline is None else found.pipeline.ranks
        started = job(
            *(found.cluster, found.mesh, stages, command or ()), name=name, nodes=nodes, image=image, topology=topology
        )
        text = launched(launcher, started)
    if out is None:
        typer.echo(text, nl=False)
        return
    out.write_text(text, encoding="utf-8")
    typer.echo(f"written: {out}; {launcher.start.format(file=out)}", err=True)


@app.command()
def lint(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="A configuration of Megatron-LM, torchtitan, DeepSpeed and so on.")
    ],
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
            help="The model that it is for: [bold]module:function[/], [bold]file.py:function[/], or a Transformers "
            "config.json.",
        ),
    ],
    cluster: ClusterOption,
    format: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="fsdp2, hf, accelerate, torchtitan, megatron or deepspeed.",
            show_default="found out",
        ),
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help=BATCH, show_default="the configuration's; 8")] = None,
    seq: Annotated[int | None, typer.Option(min=1, help=SEQUENCE, show_default="the configuration's; 512")] = None,
    inputs: Inputs = None,
    dtype: DType = None,
    optimizer_bytes: Annotated[
        int, typer.Option(min=0, help="Optimizer state per parameter element: Adam's; 12 with masters in float32.")
    ] = 8,
    time_limit: Annotated[float, typer.Option(min=0, help="Seconds of planning; 0: none is made.")] = 20.0,
) -> None:
    """Say whether a configuration of another tool runs, fits, what it costs, and what to change first."""
    with _status("reading the configuration") as say:
        from autopar.cli import arguments
        from planner.interchange.formats import stated_sizes

        where = arguments.read_cluster(cluster)

        from autopar.driver.lint import lint, read_config

        sizes = stated_sizes(read_config(config), format, where.world_size, (8, 512))
        loaded = _loaded(model, inputs, dtype, batch=batch, sequence=seq, default=sizes)
        found = lint(
            config,
            loaded.model,
            where,
            example_kwargs=loaded.inputs,
            format=format,
            optimizer_bytes_per_element=optimizer_bytes,
            time_limit_s=time_limit,
            progress=say,
        )
    typer.echo(str(found))
    if not found.runs:
        raise typer.Exit(1)


@app.command()
def fleet(
    jobs: Annotated[
        Path, typer.Argument(metavar="JOBS", help="A YAML file of jobs: samples, batch limits, step times or models.")
    ],
    cluster: ClusterOption,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw devices over time here.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the evolutionary search.")] = 0,
    time_limit: Annotated[
        float, typer.Option(min=0, help="Seconds of solving a small fleet exactly, and of planning each model.")
    ] = 20.0,
) -> None:
    """Schedule several jobs on one cluster: which has how many devices, with which batch, from when to when."""
    _check_writable(svg)
    with _status("reading the jobs") as say:
        from autopar.cli import arguments
        from planner.fleet.curves import fleet_jobs
        from planner.fleet.jobs_file import FleetFile
        from planner.fleet.plan_fleet import plan_fleet

        where, file, planned = arguments.read_cluster(cluster), FleetFile.load(jobs), {}
        if any(job.model is not None for job in file.jobs):
            from autopar.cli.fleet import planned as plan_models

            planned = plan_models(file, where, time_limit, say)
        found = plan_fleet(
            fleet_jobs(file, where, planned),
            where,
            until_s=file.until_s,
            seed=seed,
            time_limit_s=time_limit,
            progress=say,
        )
    typer.echo(str(found))
    if svg is not None:
        svg.write_text(found.to_svg(), encoding="utf-8")
        typer.echo(f"written: {svg}", err=True)


@app.command()
def verify(
    model: Model,
    cluster: Annotated[
        str | None, typer.Option("--cluster", "-c", metavar="CLUSTER", help="Plan for this cluster, then check.")
    ] = None,
    plan: Annotated[Path | None, typer.Option("--plan", metavar="PLAN", help="Check this plan.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help=BATCH, show_default="the plan's; 8 with a cluster")] = None,
    seq: Annotated[int | None, typer.Option(min=1, help=SEQUENCE, show_default="the plan's; 32 with a cluster")] = None,
    inputs: Inputs = None,
    dtype: DType = None,
    pin: Pins = None,
    time_limit: TimeLimit = 60.0,
) -> None:
    """Check that a plan computes what the model computes; one process plays all ranks."""
    if cluster is None and plan is None:
        raise InputError("say what to check: --plan, a plan file, or --cluster, to plan for it")
    with _status("reading the model") as say:
        from autopar.cli import arguments
        from planner.plan.plan import Plan

        what = Plan.load(plan) if plan is not None else arguments.read_cluster(str(cluster))
        if isinstance(what, Plan) and cluster is not None:
            arguments.check_cluster(what, cluster)
        pins = arguments.read_pins(pin or ())
        arguments.check_pins(pins, what.cluster if isinstance(what, Plan) else what)
        planned = what if isinstance(what, Plan) else None
        loaded = _loaded(model, inputs, dtype, batch=batch, sequence=seq, default=(8, 32), planned=planned, real=True)

        from autopar.verification.verify import verify as check

        say("checking types, then values on every rank")
        result = check(loaded.model, what, example_kwargs=loaded.inputs, pin=pins, time_limit_s=time_limit)
    typer.echo(str(result))


@app.command()
def profile(
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Processes that measure at once; one per GPU, or per core without.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Write what was measured here.")] = Path("calibration.yaml"),
    cluster: Annotated[
        Path | None, typer.Option("--cluster", "-c", help="Write a description of this machine that refers to it here.")
    ] = None,
    observed: Annotated[
        list[Path] | None,
        typer.Option("--from", help="Measure nothing: correct prices by what pmodel.compare().save(...) wrote."),
    ] = None,
) -> None:
    """Measure this machine, so that plans for it are priced by what it does."""
    _check_writable(out, cluster)
    if observed:
        _correct(observed, out, cluster)
        return
    with _status("importing torch") as say:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin starve the processes
        from autopar.measure import profile as profiling

        say("measuring")
        found = profiling.profile(ranks)
        spec = profiling.measured_cluster(found)
    found.save(out)
    typer.echo(spec.describe())
    typer.echo(f"written: {out}", err=True)
    if cluster is not None:
        spec.save(cluster, calibration=out)
        typer.echo(f"written: {cluster}; plan with --cluster {cluster}", err=True)


def _correct(observed: list[Path], out: Path, cluster: Path | None) -> None:
    """Write the calibration that some records of steps come to."""
    from planner.cost.correction import CONFIDENCE
    from planner.plan.comparison import Comparison, recalibrated

    spec = recalibrated([Comparison.load(path) for path in observed])
    assert spec.calibration is not None
    for each in spec.calibration.corrections:
        ends = each.factors
        within = "" if ends is None else f", {CONFIDENCE:.0%} within {ends[0] - 1:+.0%} and {ends[1] - 1:+.0%} of that"
        typer.echo(f"{each.work}: {each.ratio:.2f} times as long as was predicted ({each.count} observed{within})")
    spec.calibration.save(out)
    typer.echo(f"written: {out}", err=True)
    if cluster is not None:
        spec.save(cluster, calibration=out)
        typer.echo(f"written: {cluster}; plan with --cluster {cluster}", err=True)


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 20,
    ranks: Annotated[int, typer.Option(min=1, help="Local processes.")] = 4,
    layers: Annotated[int, typer.Option(min=1)] = 4,
    hidden: Annotated[int, typer.Option(min=8, help="Hidden size, a multiple of 8.")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Passages in the global batch.")] = 8,
    text: Annotated[
        str | None, typer.Option(metavar="FILE", help="Text to train on; by default Python's own language reference.")
    ] = None,
    pin: Pins = None,
) -> None:
    """Plan a small GPT-2, train it on local processes, compare with one process. Writes plan.json and plan.html."""
    from rich.console import Console

    if hidden % 8:
        raise InputError(f"--hidden {hidden} does not divide into 8 heads: give a multiple of 8")
    console = Console()
    with console.status("importing torch"):
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin starve the processes
        from autopar.cli import arguments
        from planner.cost.cluster import ClusterSpec

        pins = arguments.read_pins(pin or ())
        arguments.check_pins(pins, ClusterSpec.local(ranks))

        from autopar.cli import demo as demonstration

    settings = demonstration.Settings(ranks, steps, layers, hidden, batch=batch, text=text, pin=pins)
    if not demonstration.run(settings, console, Path.cwd()):
        raise typer.Exit(1)


@checkpoints.command()
def inspect(path: Checkpoint) -> None:
    """Print what a checkpoint holds, and check its files."""
    with _status("reading the checkpoint"):
        from autopar.checkpoint.inspect import inspected

        text = inspected(path)
    typer.echo(text)


@checkpoints.command()
def export(
    path: Checkpoint,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A directory, or a file that ends in .safetensors.")],
    file_bytes: Annotated[int, typer.Option(min=1, help="Start another file of the directory after this size.")] = (
        5 * 10**9
    ),
) -> None:
    """Write a checkpoint's model as safetensors; takes little memory, and one process."""
    with _status("reading the checkpoint"):
        written = autopar.export_safetensors(path, out, file_bytes=file_bytes)
    for file in written:
        typer.echo(f"written: {file}", err=True)


# ---- what commands share ---------------------------------------------------------------------------------------------


class _status:
    """A line on the terminal that says what is going on; gives a function that changes it."""

    def __init__(self, text: str):
        from rich.console import Console

        self._status = Console(stderr=True).status(f"{text} ...")

    def __enter__(self) -> Any:
        self._status.__enter__()
        return lambda text: self._status.update(f"{text} ...")

    def __exit__(self, *exc: Any) -> None:
        self._status.__exit__(*exc)


def _loaded(
    model: str,
    inputs: list[str] | None,
    dtype: str | None,
    *,
    batch: int | None,
    sequence: int | None,
    default: tuple[int, int] | None = None,
    planned: Plan | None = None,
    real: bool = False,
) -> Named:
    """A model and its inputs; torch is imported after what names them was read.

    Args:
        default: sizes that nobody gives; ``None``: those of the plan.
        planned: a plan whose inputs are taken where no sizes are given.
    """
    from autopar.cli import arguments

    cast = None if dtype is None else arguments.read_dtype(dtype)
    name, forms = arguments.read_model(model, cast), arguments.read_inputs(inputs or ())

    from autopar.cli import model_loading

    if default is None:
        assert planned is not None
        default = model_loading.planned_sizes(planned)
    like = planned if batch is None and sequence is None else None
    return model_loading.load(name, batch, sequence, forms, default, real=real, planned=like, dtype=cast)


def _check_writable(*paths: Path | None) -> None:
    """Before a long search, not after it."""
    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            raise InputError(f"cannot write {str(path)!r}: there is no directory {str(path.absolute().parent)!r}")
        if path is not None and path.is_dir():
            raise InputError(f"cannot write {str(path)!r}: it is a directory; give the name of a file in it")


def _check_folder(folder: Path | None) -> None:
    """Refuse a folder that cannot be made."""
    if folder is None:
        return
    if folder.exists() and not folder.is_dir():
        raise InputError(f"cannot write plans into {str(folder)!r}: it is a file; give the name of a folder")
    if not folder.absolute().parent.is_dir():
        raise InputError(f"cannot make {str(folder)!r}: there is no directory {str(folder.absolute().parent)!r}")


def _write_curve(curve: ParetoCurve[Plan], folder: Path, html: Path | None) -> None:
    """Write the plan of every point, the leanest first, and the page with the curve; say which plans are older."""
    folder.mkdir(exist_ok=True)
    for number, point in enumerate(curve.points):
        point.plan.save(folder / f"plan_{number}.json")
    typer.echo(f"written: {folder}, plan_0.json to plan_{len(curve.points) - 1}.json", err=True)
    if earlier := sorted({*folder.glob("plan_*.json")} - {folder / f"plan_{n}.json" for n in range(len(curve.points))}):
        typer.echo(f"not of this curve: {', '.join(path.name for path in earlier)}, which were there before", err=True)
    if html is not None:
        curve.save_html(html)
        typer.echo(f"written: {html}, with the curve", err=True)


def _write(plan: Plan, out: Path | None, html: Path | None, trace: Path | None) -> None:
    _check_writable(out, html, trace)
    if out is not None:
        plan.save(out)
        typer.echo(f"written: {out}", err=True)
    if html is not None:
        plan.save_html(html)
        typer.echo(f"written: {html}", err=True)
    if trace is not None:
        plan.save_trace(trace)
        typer.echo(f"written: {trace}; https://ui.perfetto.dev opens it", err=True)


def _block(plan: Plan, name: str) -> str:
    """Every operator of a block and its strategy, as the plan file has them."""
    for block in plan.blocks:
        if block.name == name:
            width = max((len(op) for op in block.ops), default=0)
            lines = [f"  {op:<{width}}  {strategy}" for op, strategy in block.ops.items()]
            return "\n".join([f"{block.name}  x {block.count}", *lines])
    raise InputError(f"the plan has no block {name!r}; it has: {', '.join(block.name for block in plan.blocks)}")


def main() -> None:
    """Entry point of the ``autopar`` command."""
    keep_stdout()
    app()


if __name__ == "__main__":
    main()
