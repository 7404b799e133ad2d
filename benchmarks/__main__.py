"""Measure plan time and step time, and record both under ``benchmarks/results``; ``make bench`` runs this.

python -m benchmarks [plan] [step] [stages] [context] [shards] [predicted] [observed] [published] [runs] [imitated]
                     [family] [iopddl] [memory] [million] [rsa] [integrations] [exporters] [pipeline] [schedules]
                     [transfer schedule] [offload] [compiled] [tables] [cached] [array] [elastic] [fleet]
                     [fuzz [files]] [exact [problems [seed]]] [gpu_steps] [gpu_offload] [gpu_largest]

Those of a GPU run where there is one; gpu_largest, which takes longer, when it is named.
"""

from __future__ import annotations

import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

from autopar.measure.profile import measured_cluster, profile
from benchmarks import (
    array,
    cached_table,
    compiled,
    context,
    elastic,
    exact,
    exporters,
    family,
    fleet,
    fuzz,
    imitated,
    integrations,
    iopddl,
    largest,
    memory,
    memory_micro_batched,
    million,
    observed,
    offload,
    one_gpu,
    pipeline,
    plan_time,
    planned_mixtures,
    planned_runs,
    predicted,
    published,
    record,
    rsa,
    schedules,
    step_time,
    tables,
    transfer_schedule,
)
from benchmarks.gpt import Shape

LARGEST_S = 540.0
"""A call of gpu_largest ends before ten minutes are over."""
STARTS = 5
STEP_CASES = tuple(
    step_time.Case(kind, ranks, heap) for kind in ("data", "tensor") for ranks in (2, 4) for heap in ("default", "kept")
)
STAGE_CASES = tuple(step_time.Case("pipeline", ranks) for ranks in (2, 4))
EXPERT_CASES = tuple(
    step_time.Case("expert", ranks, heap, steps=32) for ranks in (2, 4) for heap in ("default", "kept")
)
SHARD_CASES = tuple(step_time.Case(kind, ranks) for kind in ("zero 2", "zero 3") for ranks in (2, 4))
COMPILED_CASES = (
    *(compiled.Case(kind, 2, shape) for shape in compiled.SHAPES.values() for kind in compiled.KINDS),
    compiled.Case("zero 3", 4, compiled.SHAPES["wide"]),
)
THEIRS = {
    "data": "DDP",
    "zero 2": "fully_shard, kept",
    "zero 3": "fully_shard",
    "tensor": "parallelize_module",
    "pipeline": "Schedule1F1B",
    "expert": "all_to_all_single by hand",
}
MODELS = {**dict.fromkeys(step_time.ZERO, "Transformers GPT-2"), "expert": "mixture of 8 experts, 2 each, in one layer"}


def main(what: list[str]) -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    for part, run in PARTS.items():
        by_default = not part.startswith("gpu_") or (torch.cuda.is_available() and part != "gpu_largest")
        if part in what or (not what and by_default):
            run()
    if not what or "fuzz" in what:
        damages(next((int(each) for each in what if each.isdigit()), fuzz.FILES))
    if not what or "exact" in what:
        optima(*(int(each) for each in what if each.isdigit()))


def plans() -> None:
    """Every case in a process of its own."""
    facts = record.circumstances()
    plan_time.measured(0)  # leaves bytecode behind, and files of torch in the system's cache
    results = []
    for number, case in enumerate(plan_time.CASES):
        results.append(plan_time.measured(number))
        print(f"planned {case.model} for {case.where}: {results[-1].start_s:.1f} s", flush=True)
    notes = (
        "Transformers' Llama, GPT-2 and GPT-3 in published shapes, and a Llama of 1,000 narrow layers, on the meta "
        "device in bfloat16; *batch* is of sequences of so many tokens. Each is planned once in a process of its own, "
        "with the arguments by default. *From the start* goes from the start of `python` to the plan: it imports torch "
        "and Transformers and makes the model. *From the call* is `autopar.plan` alone, with all that it imports. A "
        f"process is ended after {plan_time.CAP_S:g} s. *Step* and *peak* are what the plan predicts."
    )
    table = record.write("plan_time", "Plan time", notes, plan_time.rows(results), plan_time.raw(results), facts)
    print(table, flush=True)


def pipelines() -> None:
    """Schedules simulated, and a chain cut, by every schedule."""
    facts = record.circumstances()
    simulated, found = pipeline.simulations(), pipeline.cuts()
    simulating = [
        {
            "schedule": r.schedule,
            "virtual stages": str(r.virtual_stages),
            "micro-batches": str(r.micro_batches),
            "step, first ms": f"{r.first_s * 1e3:.1f}",
            "step, again ms": f"{r.again_s * 1e3:.1f}",
            "timeline ms": f"{r.whole_s * 1e3:.1f}",
        }
        for r in simulated
    ]
    cutting = [
        {
            "schedule": r.schedule,
            "virtual stages": str(r.virtual_stages),
            "micro-batches": str(r.micro_batches),
            "limit GiB": str(r.limit_gib or "none"),
            "cut s": f"{r.search_s:.2f}",
            "step": "does not fit" if r.step_s is None else f"{r.step_s:.1f}",
            "gap": "" if r.gap is None else f"{r.gap:.2%}",
        }
        for r in found
    ]
    notes = (
        f"{pipeline.RANKS} ranks, random times; CPU time. *Step* is what a search asks for, the first time and with "
        "the order at hand; *timeline* is every action's start and end."
    )
    raw = [asdict(r) for r in simulated]
    print(record.write("pipeline_simulated", "Simulated schedules", notes, simulating, raw, facts), flush=True)
    notes = (
        "A chain of an embedding, 126 equal layers that may recompute in two ways, and a head, on "
        f"{pipeline.RANKS} ranks. *Cut* is CPU time; *step* is in units of a layer's forward; *gap* is what "
        "is left between it and the proved bound on all cuts."
    )
    raw = [asdict(r) for r in found]
    print(record.write("pipeline_cuts", "Cuts of a chain of 126 equal blocks", notes, cutting, raw, facts), flush=True)


def peaks() -> None:
    """Predicted peak memory beside what a tracker sees, without micro-batches and in several."""
    facts = record.circumstances()
    notes = (
        "Predicted peak bytes of one rank over those that torch's `MemTracker` sees while the emitted program runs "
        "forward and backward, with parameters and AdamW's state."
    )
    _write_peaks("memory", "Predicted against observed memory", notes, memory.compare(), facts)
    notes = (
        "Predicted peak bytes over those that are alive on the fullest rank of the pipeline while it takes a "
        "step, with parameters and AdamW's state."
    )
    title = "Predicted against observed micro-batched memory"
    _write_peaks("memory_micro_batched", title, notes, memory_micro_batched.compare(), facts)


def _write_peaks(name: str, title: str, notes: str, found: list[memory.Compared], facts: dict[str, Any]) -> None:
    plans = list(dict.fromkeys(each.plan for each in found))
    errors = {(each.model, each.plan): f"{each.error:+.1%}" for each in found}
    rows = [
        {"model": model, **{plan: errors.get((model, plan), "n/a") for plan in plans}}
        for model in dict.fromkeys(each.model for each in found)
    ]
    notes = f"{notes} {memory.summary(found)}."
    print(record.write(name, title, notes, rows, [asdict(each) for each in found], facts), flush=True)


def _peaks_of(found: step_time.Compared) -> dict[str, str]:
    sizes = {"ours": found.ours_bytes, "theirs": found.theirs_bytes}
    return {f"{side} peak MiB": f"{size / 2**20:.0f}" for side, size in sizes.items()}


def steps(name: str, title: str, cases: Sequence[step_time.Case]) -> None:
    """Ours beside theirs."""
    facts = record.circumstances()
    results, ratios = [], []
    for case in cases:
        starts = step_time.compare(case, STARTS)
        results.append(starts[STARTS // 2])
        ratios.append(", ".join(f"{start.ratio:.3f}" for start in starts))
        print(f"stepped {case.kind} {case.ranks} {case.heap}: ratio {ratios[-1]}", flush=True)
    rows = [
        {
            "model": MODELS.get(r.case.kind, "hand-written GPT"),
            "ours": ", ".join(f"{k}={v}" for k, v in r.case.pin.items()),
            "theirs": THEIRS[r.case.kind],
            "ranks": str(r.case.ranks),
            "heap": r.case.heap,
            "ours s": f"{statistics.median(r.ours_s):.3f}",
            "theirs s": f"{statistics.median(r.theirs_s):.3f}",
            "tokens/s": f"{r.case.shape.batch * r.case.shape.sequence / statistics.median(r.ours_s):,.0f}",
            "ratio": f"{r.ratio:.3f}",
            "of all starts": each,
            "ours CPU s": f"{statistics.median(r.ours_cpu_s):.3f}",
            "theirs CPU s": f"{statistics.median(r.theirs_cpu_s):.3f}",
            "CPU ratio": f"{r.cpu_ratio:.3f}",
            "loss differs by": f"{r.loss_difference:.1e}",
            **(_peaks_of(r) if r.ours_bytes else {}),
        }
        for r, each in zip(results, ratios, strict=True)
    ]
    shape, case = results[0].case.shape, results[0].case
    sizes = f"{shape.layers} layers of width {shape.hidden}, {shape.vocab} tokens of vocabulary"
    if case.kind == "expert":
        sizes = f"one layer of width {shape.hidden} without a vocabulary"
    notes = (
        f"One training step (forward, backward, fused AdamW) on local gloo processes: {sizes}, "
        f"{shape.batch} x {shape.sequence} tokens, float32. Medians of {case.steps} steps, taken "
        f"alternately in one run; of {STARTS} starts the one of median ratio. "
        "CPU seconds are those of the busiest rank: they say what each side costs where the wall clock also measures "
        "other users of the machine. *Heap*: as the C library comes, or kept between steps."
    )
    print(record.write(name, title, notes, rows, [asdict(r) for r in results], facts), flush=True)


def compiled_blocks() -> None:
    """Compiled blocks beside eager ones and beside torch's, and what compiling takes by depth."""
    facts = record.circumstances()
    found = []
    for case in COMPILED_CASES:
        found.append(compiled.compare(case))
        print(f"stepped {case.kind}: {found[-1].ratio('cpu', 'compiled', 'eager'):.3f} of eager", flush=True)
    depths = compiled.depths()
    names = {shape: name for name, shape in compiled.SHAPES.items()}
    rows = [
        {
            "model": names[r.case.shape],
            "plan": ", ".join(f"{k}={v}" for k, v in r.case.pin.items()),
            "theirs": THEIRS[r.case.kind],
            "graphs": str(r.starts[0].graphs),
            **{f"{side} s": f"{r.seconds('wall', side):.3f}" for side in compiled.SIDES},
            "of eager": f"{r.ratio('wall', 'compiled', 'eager'):.3f}",
            "of theirs": f"{r.ratio('wall', 'compiled', 'theirs'):.3f}",
            "theirs of their eager": f"{r.ratio('wall', 'theirs', 'theirs eager'):.3f}",
            **{f"{side} CPU s": f"{r.seconds('cpu', side):.3f}" for side in compiled.SIDES},
            "CPU of eager": f"{r.ratio('cpu', 'compiled', 'eager'):.3f}",
            "CPU of theirs": f"{r.ratio('cpu', 'compiled', 'theirs'):.3f}",
            "CPU of theirs of their eager": f"{r.ratio('cpu', 'theirs', 'theirs eager'):.3f}",
            "loss differs by": f"{max(each.loss_difference for each in r.starts):.1e}",
        }
        for r in found
    ]
    taken = "; ".join(
        f"{d.layers} layers: {d.compile_s:.1f} s, {d.again_s:.1f} s again, {d.graphs} graphs" for d in depths
    )
    sizes = "; ".join(
        f"*{name}*: {shape.layers} layers of width {shape.hidden}, {shape.vocab} tokens of vocabulary, "
        f"{shape.batch} x {shape.sequence} tokens"
        for name, shape in compiled.SHAPES.items()
    )
    notes = (
        f"One training step (forward, backward, fused AdamW) of a Llama on local gloo processes, in float32 ({sizes}): "
        "ours with compiled and with eager blocks, and torch's own with every layer under `torch.compile`, and eager. "
        f"Steps of all sides are interleaved; figures are medians over {compiled.STARTS} starts of the median of "
        f"{compiled.STEPS} steps, and of its ratios within a start; CPU seconds are those of the busiest rank. CPU "
        "seconds of compiling a narrow Llama with inductor's cache empty, and again with what that left there: "
        f"{taken}."
    )
    raw = {"steps": [asdict(r) for r in found], "depths": [asdict(d) for d in depths]}
    print(record.write("compiled", "Compiled blocks", notes, rows, raw, facts), flush=True)


def attended() -> None:
    """Ways to attend over a sharded sequence."""
    facts = record.circumstances()
    found = context.compare()
    rows = [
        {
            "attends": r.kind,
            "causal": "yes" if r.causal else "no",
            "step s": f"{statistics.median(r.seconds):.2f}",
            "CPU s, busiest": f"{max(r.cpu_s):.2f}",
            "busiest / mean": f"{r.imbalance:.2f}",
            "sent MiB": f"{r.sent_bytes / 2**20:.1f}",
            "as planned": "yes" if r.as_planned else "no",
            "loss differs by": f"{r.loss_difference:.0e}",
        }
        for r in found
    ]
    notes = (
        f"One layer of attention, {context.HEADS} heads of {context.HEAD} with {context.KV} of keys and values, on "
        f"{context.TOKENS:,} tokens in float32: forward and backward on {context.RANKS} local gloo processes, "
        f"alternately in one run. Medians of {context.STEPS} steps of the slowest rank; CPU seconds are those of the "
        "median step. *Sent* is what leaves a rank in a step, gradients of weights included; *as planned*, whether "
        "every collective of every rank is predicted. Cores share one memory, so messages cost copies alone; where "
        "others use the machine, CPU seconds are what compares."
    )
    title = "Attention over a sharded sequence"
    print(record.write("context", title, notes, rows, [asdict(r) for r in found], facts), flush=True)


def integrated() -> None:
    """Recipes of other training loops."""
    facts = record.circumstances() | integrations.versions()
    found = integrations.executed()
    rows = [
        {
            "recipe": r.recipe,
            "processes": str(r.processes),
            "plan": ", ".join(f"{name} {value}" for name, value in r.pin.items()),
            "goes on": "from another plan's state" if r.goes_on else "",
            "values": str(r.values),
            "differ by": f"{r.error:.0e}",
        }
        for r in found
    ]
    notes = (
        "The recipes of docs/integrations.md, as they stand, on local gloo processes in float64, beside the same lines "
        "with the framework's own class and model in one process: largest relative difference of any loss, norm of "
        "gradients, rate, metric or weight, on any process. TRL computes its losses in float32."
    )
    title = "Recipes of other training loops"
    print(record.write("integrations", title, notes, rows, [asdict(r) for r in found], facts), flush=True)


def exported() -> None:
    """Exported configurations."""
    facts = record.circumstances()
    found = exporters.executed()
    rows = [{"format": r.format, "tool": r.tool, "of": r.of, "check": r.check} for r in found]
    notes = (
        "What `plan.export` writes, executed: FSDP2 code, and models that Transformers makes of its configuration, as "
        "a step of a Qwen3 of four layers in float64 on four local gloo processes, beside the original; other formats "
        "by their tool's own reader, where it was installed, on the plans of tests/planner/golden/export."
    )
    print(record.write("exporters", "Exported configurations", notes, rows, [asdict(r) for r in found], facts))


def predictions() -> None:
    """Step times as planned for the profiled machine, beside measured ones."""
    facts = record.circumstances()
    shape, results = Shape(), []
    for _ in range(predicted.REPEATS):
        for ranks in predicted.RANKS:
            found = predicted.compare(ranks, shape)
            results += found
            print("\n".join(f"predicted {r.case.pin}: {r.error:+.1%}" for r in found), flush=True)
    write_predictions(results, shape, facts)


def write_predictions(results: Sequence[predicted.Compared], shape: Shape, facts: dict[str, Any]) -> None:
    """All comparisons of each case in a row."""
    rows = []
    for case in predicted.CASES:
        found = [r for r in results if r.case == case]
        uses = {use: statistics.median(r.predicted[use] for r in found) for use in found[0].predicted}
        rows.append(
            {
                "ranks": str(case.ranks),
                "plan": ", ".join(f"{k}={v}" for k, v in case.pin.items()),
                "predicted s": f"{statistics.median(r.predicted_s for r in found):.3f}",
                "measured s": f"{statistics.median(r.median_s for r in found):.3f}",
                "error": f"{100 * predicted.median_error(found):+.1f} %",
                "of all": ", ".join(f"{100 * error:+.1f}" for error in sorted(r.error for r in found)),
                "of which": ", ".join(f"{use} {s:.3f}" for use, s in uses.items() if s >= 0.0005),
                "CPU s": f"{statistics.median(s for r in found for s in r.cpu_s):.3f}",
                "profiled in s": f"{statistics.median(r.profile_s for r in found):.0f}",
            }
        )
    notes = (
        f"The hand-written GPT ({shape.layers} layers of width {shape.hidden}, {shape.vocab} tokens of vocabulary, "
        f"{shape.batch} x {shape.sequence} tokens, float32) on local gloo processes: a step as the plan predicts it "
        f"for the machine as `autopar profile` has just measured it, and the median of {predicted.STEPS} steps, "
        f"taken alternately. Profiled, planned and measured {len(results) // len(rows)} times; all figures are "
        "medians of those, of errors *all* are shown. CPU seconds are those of the busiest rank: times the ranks that "
        "share a core, they are what of a step the cores were at work."
    )
    raw = [asdict(r) for r in results]
    print(record.write("predicted", "Predicted step time", notes, rows, raw, facts), flush=True)


def published_runs() -> None:
    """Textbook estimates beside published step times."""
    facts = record.circumstances()
    found = published.estimates()
    rows = [{"set": name, **row} for name, each in found.items() for row in published.table(each)]
    errors = {name: published.errors(each) for name, each in found.items()}
    notes = "\n\n".join(
        [
            "Step times of published runs, and what the presets' constants give for them in textbook formulas "
            "(`benchmarks/published.py`). "
            + "; ".join(f"{name}: mean error {mean:.1%}, worst {worst:.1%}" for name, (mean, worst) in errors.items())
            + ".",
            "Assumed where a source is silent. " + " ".join(f"{text}." for text in published.ASSUMED),
        ]
    )
    raw = {name: [asdict(e) for e in each] for name, each in found.items()}
    print(record.write("published", "Published runs", notes, rows, raw, facts), flush=True)


def observed_steps() -> None:
    """Intervals of predictions that observed steps correct, beside what was held out."""
    facts = record.circumstances()
    cluster = measured_cluster(profile(observed.RANKS))
    rows = observed.held_out(observed.observe(cluster)[0])
    notes = (
        f"GPTs written by hand, of {len(observed.SHAPES)} shapes (layers x width), train on {observed.RANKS} local "
        f"gloo processes, {observed.STEPS} steps each, every second one under torch's profiler; the machine was "
        "profiled before. Each model in turn is held out: what was observed of the others corrects its predictions "
        "and gives their intervals. Rows are what distinct blocks compute forward and backward, and kinds of "
        f"collectives; *off by* is the median factor. {observed.told(rows)}."
    )
    raw = [asdict(row) for row in rows]
    print(record.write("observed", "Observed steps", notes, observed.table(rows), raw, facts), flush=True)


def planned() -> None:
    """Published configurations as the planner prices them."""
    facts = record.circumstances()
    found = planned_runs.runs()
    notes = "\n\n".join(
        [
            "Step times of published runs, and what the planner predicts for them: a model on the meta device is "
            "captured, and the published configuration pinned. " + planned_runs.summary(found) + ".",
            "The program that is priced is not that of the run. " + " ".join(f"{t}." for t in planned_runs.DIFFERS),
            "*Free* is what search picks for the same cluster within "
            f"{planned_runs.FREE_LIMIT_S:.0f} s, with pipelines; then with the run's recomputation pinned; then the "
            "best of what Megatron could be told in 2021. The place of the published configuration is that among the "
            "best plans found of each configuration, and *x* its step over that of the plan picked, both predicted.",
        ]
    )
    raw = [{name: value for name, value in asdict(each).items() if name != "plan_s"} for each in found]
    print(record.write("planned_runs", "Planned runs", notes, planned_runs.table(found), raw, facts), flush=True)


def imitated_stacks() -> None:
    """Published runs of modern stacks, priced as what their software does."""
    facts = record.circumstances()
    sets = {"looked at": imitated.RUNS, "held out": imitated.HELD_OUT}
    found = {name: imitated.runs(rows) for name, rows in sets.items()}
    told = "; ".join(f"{name}: {imitated.errors(each)}" for name, each in found.items())
    notes = "\n\n".join(
        [
            "Step times and peaks of published runs of torchtitan, and what the planner predicts where the cluster's "
            f"`software` says what that stack compiles and overlaps (`benchmarks/imitated.py`). {told}.",
            f"{imitated.DIFFERS}.",
        ]
    )
    rows = [{"set": name, **row} for name, each in found.items() for row in imitated.table(sets[name], each)]
    raw = {
        name: [{key: value for key, value in asdict(run).items() if key != "plan_s"} for run in each]
        for name, each in found.items()
    }
    print(record.write("imitated", "Imitated stacks", notes, rows, raw, facts), flush=True)


def mixtures() -> None:
    """Published configurations of mixtures of experts as the planner prices them."""
    facts = record.circumstances()
    found = planned_mixtures.runs()
    notes = "\n\n".join(
        [
            "Step times of published runs of mixtures of experts on H100, and what the planner predicts for them: "
            f"{planned_mixtures.summary(found)}.",
            "The program that is priced is not that of the run. " + " ".join(f"{t}." for t in planned_mixtures.DIFFERS),
        ]
    )
    raw = [{name: value for name, value in asdict(each).items() if name != "plan_s"} for each in found]
    table = [{name: text for name, text in row.items() if name != "free"} for row in planned_runs.table(found)]
    print(record.write("planned_mixtures", "Planned mixtures of experts", notes, table, raw, facts), flush=True)


def million_tokens() -> None:
    """Plans for one sequence of a million tokens, and a published run of such a one."""
    facts, found = record.circumstances(), million.plans()
    rows = [
        {
            "model": each.model,
            "GPUs": str(each.gpus),
            "attention": each.kernel,
            "step s": f"{each.step_s:.0f}",
            "GiB": f"{each.peak_bytes / 2**30:.1f}",
            "measured s": "" if each.measured_s is None else f"{each.measured_s:.0f}",
            "error": "" if each.measured_s is None else f"{100 * (each.step_s / each.measured_s - 1):+.0f} %",
            "GiB, as the run": f"{(each.peak_bytes - each.kept_bytes) / 2**30:.1f}" if each.kept_bytes else "",
            "measured GiB": "" if each.measured_bytes is None else f"{each.measured_bytes / 2**30:.1f}",
            "plan": each.sentence,
        }
        for each in found
    ]
    notes = (
        f"One sequence of {million.TOKENS:,} tokens on H100s, with logits of one in {million.PARTS} tokens at a time "
        "(`LossInParts` in `benchmarks/million.py`), parameters sharded and layers recomputed. The published run is of "
        "8 GPUs with keys gathered in zigzag order, its loss in chunks and activations on the host; it is priced with "
        "these on the device, which is given the memory. *As the run*: without what enters each layer, which the run "
        "has on the host. Which kernel of attention it had is not told; the preset has torch's, FlashAttention-2, and "
        "the rates of others (Shah et al. 2024, figure 5)."
    )
    print(record.write("million", "A million tokens", notes, rows, [asdict(each) for each in found], facts), flush=True)


def ring_self_attention() -> None:
    """The batch and the length that a ring holds beside tensor parallelism, and what a paper claims."""
    facts, found, each_more = record.circumstances(), rsa.found(), rsa.per_sample()
    ratios = {kept: rsa.ratios(found, kept) for kept in get_args(rsa.Kept)}
    rows = [
        {
            "shared by": f"{each.name}, {each.ranks} GPUs",
            "kept": each.kept,
            f"largest batch of {rsa.LENGTH} tokens": str(each.batch),
            f"longest sequences, {rsa.BATCH} of them": str(each.length),
            "times as much": "" if each.name != "ring" else "{batch:.1f} and {length:.1f}".format(**ratios[each.kept]),
        }
        for each in found
    ]
    measured = "; ".join(
        f"{each.name} on {each.ranks} {each.measured / 2**20:.2f} MiB measured, {each.predicted / 2**20:.2f} predicted"
        for each in each_more
    )
    tensor, ring = each_more
    notes = (
        "BERT base in float32 with Adam on P100s of 16 GB, planned: a ring of 64 (Li et al. 2021) against tensor "
        "parallelism on 12, as many as it has heads, whose residuals are whole on every rank, as in Megatron then. The "
        f"paper has {rsa.CLAIMED['batch']} x the batch and {rsa.CLAIMED['length']:.1f} x the length.\n\n"
        "**How much more a ring holds is decided by what is kept.** Of what tensor parallelism shares, such as scores, "
        "a rank of the ring has 12/64, so that 5.3 x fit; of residuals, which tensor parallelism has whole, 64 x. So "
        f"stored scores, as programs had them then, leave {ratios['scores, too']['batch']:.1f} x of the "
        f"{ratios['all but scores']['batch']:.1f} x of today's kernels, and where layers are recomputed it is "
        f"{ratios['what enters layers']['batch']:.1f} x. How long the paper's sequences were (512 is assumed), and "
        "what its programs kept besides, is not told. Scores grow with the square of the length on both sides, so "
        f"that length gains less with them: {ratios['scores, too']['length']:.1f} x.\n\n"
        f"**In small, measured** (torch's `MemTracker`, the program of one rank with {rsa.SMALL_LAYERS} layers and "
        f"{rsa.SMALL_VOCAB} words, on a CPU): one more sequence of {rsa.LENGTH} tokens takes at the peak, {measured}. "
        f"A rank of the ring takes 1/{tensor.measured / ring.measured:.0f}."
    )
    raw = [*map(asdict, found), *map(asdict, each_more)]
    print(record.write("rsa", "Ring self-attention", notes, rows, raw, facts), flush=True)


def families() -> None:
    """What papers on the tensor-parallel family claim beside what their algorithms send and take here."""
    facts = record.circumstances()
    found = family.rows()
    raw = [asdict(each) for each in found]
    print(record.write("family", "The tensor-parallel family", family.notes(found), family.table(found), raw, facts))


def problems() -> None:
    """The public problems within their time limits."""
    facts = record.circumstances()
    results = []
    for case in iopddl.CASES:
        results.append(iopddl.measure(case))
        print(f"solved {case.name}: {results[-1].ratio:.4f} of the contest's best", flush=True)
    rows = [
        {
            "instance": r.case.name,
            "what": r.case.what,
            "limit s": f"{r.case.limit_s:.0f}",
            "seconds": f"{r.seconds:.1f}",
            "status": r.status,
            "cost": "none" if r.cost is None else f"{r.cost:.0f}",
            "bound": "none" if r.bound is None else f"{r.bound:.0f}",
            "gap": f"{100 * r.gap:.2f} %",
            "contest's best": str(r.case.best),
            "ratio": f"{r.ratio:.4f}",
            "bound known before": str(r.case.known_bound),
        }
        for r in results
    ]
    notes = (
        "Public instances of the ASPLOS / EuroSys 2025 contest on intra-operator parallelism, solved by `python -m "
        f"planner.solve` within {iopddl.SHARE:.0%} of the contest's time limits, reading the file included. *Ratio* is "
        "cost over the best of the contest."
    )
    title = "Public problems of intra-operator parallelism"
    print(record.write("iopddl", title, notes, rows, [asdict(r) for r in results], facts), flush=True)


def schedules_run() -> None:
    """Steps of sleeping stages, as simulated and as run."""
    facts = record.circumstances()
    results = schedules.compare()
    rows = [
        {
            "schedule": r.schedule,
            "virtual stages": str(r.virtual_stages),
            "micro-batches": str(r.micro_batches),
            "simulated s": f"{r.simulated_s:.3f}",
            "run s": f"{r.median_s:.3f}",
            "error": f"{r.error:+.1%}",
            "bubble simulated": f"{r.bubble:.1%}",
            "bubble run": f"{r.observed_bubble:.1%}",
        }
        for r in results
    ]
    notes = (
        f"Micro-batched steps on {schedules.RANKS} local gloo processes whose stages sleep: {schedules.NAP_S:g} s in "
        "every stage for a forward, a backward for inputs and one for weights. Medians of "
        f"{schedules.REPEATS} steps of the slowest rank; the simulator's schedules are run by the runtime's own step."
    )
    print(record.write("schedules", "Schedules", notes, rows, [asdict(r) for r in results], facts), flush=True)


def offloads() -> None:
    """A model on devices of ever less memory."""
    facts = record.circumstances()
    found = offload.measure()
    held = {row.micro_batches: row for row in found if row.share is None}
    rows = [
        {
            "micro-batches": str(row.micro_batches),
            "device": "all" if row.share is None else f"1/{row.share} of model data",
            "budget MiB": "" if row.share is None else f"{row.budget_bytes / 2**20:.1f}",
            "taken MiB": "" if row.share is None else f"{row.high_water_bytes / 2**20:.1f}",
            "fetched MiB": f"{row.moved.get('fetch', 0) / 2**20:.1f}",
            "evicted MiB": f"{row.moved.get('evict', 0) / 2**20:.1f}",
            "as planned": "yes" if row.moved == {w: n for w, n in row.planned.items() if n} else "no",
            "step ms": f"{row.seconds * 1e3:.0f}",
            "ratio": f"{row.seconds / held[row.micro_batches].seconds:.2f}",
            "predicted ratio": f"{row.predicted_s / held[row.micro_batches].predicted_s:.2f}",
            "loss differs by": f"{row.differs:.0e}",
        }
        for row in found
    ]
    notes = (
        f"A GPT of {offload.SHAPE} with {found[0].data_bytes / 2**20:.0f} MiB of parameters, gradients and Adam's "
        "moments in float32, one CPU process whose device is a budget of host memory, "
        f"{offload.ROUNDS} steps of each with micro-batches, medians without the first two. Nothing hides what is "
        "moved here: copies take the core that computes. *Taken* is the most that chunks and what is beside them took. "
        "Ratios are to the same micro-batches on a device that holds all; a device that is left out is too small for "
        "them."
    )
    print(record.write("offload", "Model data on the host", notes, rows, [asdict(row) for row in found], facts))


def gpu_steps() -> None:
    """Predicted and measured steps and peaks of plans that a GPU holds."""
    facts = {**record.circumstances(), "gpu": torch.cuda.get_device_name()}
    found = one_gpu.steps()
    rows = [
        {
            "model": str(r.case["model"]),
            "dtype": str(r.case["dtype"]),
            "recompute": str(r.case["pin"]["recompute"]),
            "parameters": f"{r.parameters / 1e9:.2f}e9",
            "step ms": f"{r.median_s * 1e3:.1f}",
            **{f"{name} ms": f"{s * 1e3:.1f} ({s / r.median_s - 1:+.1%})" for name, s in r.predicted_s.items()},
            "peak GiB": f"{r.peak_bytes / 2**30:.2f}",
            "predicted GiB": _error_of(r.predicted_bytes["profiled"], r.peak_bytes, 2**30),
        }
        for r in found
    ]
    notes = (
        "One GPU that holds all: steps (forward, backward, fused AdamW) as predicted for the machine as it is "
        f"*detected* (a preset) and as `autopar profile` measured it, and the median of {one_gpu.STEPS}; the peak is "
        "torch's `max_memory_allocated`. Each row in a process of its own."
    )
    print(record.write("gpu_steps", "Steps on one GPU", notes, rows, [asdict(r) for r in found], facts), flush=True)


def gpu_offloads() -> None:
    """Model data on the host, beside FSDP2's offload at the same memory."""
    facts = {**record.circumstances(), "gpu": torch.cuda.get_device_name()}
    found = one_gpu.offloads()
    theirs: dict[str, float] = {}
    for r in found:
        if r.side.startswith("fsdp2"):
            key = str(r.case["model"]) + str(r.case["limit_gib"])
            theirs[key] = min(r.median_s, theirs.get(key, r.median_s))
    rows = [
        {
            "model": str(r.case["model"]),
            "GiB": str(r.case["limit_gib"]),
            "side": r.side,
            "parameters": f"{r.parameters / 1e9:.2f}e9",
            "step ms": f"{r.median_s * 1e3:.0f}",
            "of FSDP2": f"{r.median_s / fastest:.2f}" if fastest else "",
            "predicted ms": _error_of(r.predicted_s["profiled"], r.median_s, 1e-3) if r.predicted_s else "",
            "peak GiB": f"{r.peak_bytes / 2**30:.2f}",
            "fetched": _moved_text(r.link["fetch"]),
            "evicted": _moved_text(r.link["evict"]),
        }
        for r in found
        for fastest in [theirs.get(str(r.case["model"]) + str(r.case["limit_gib"]))]
    ]
    notes = (
        "One GPU whose process may take so many GiB; model data in bfloat16, 8 bytes a parameter, on the host where it "
        "must. Ours: pin {'offload': 'auto'}, planned for the machine as `autopar profile` "
        "measured it. FSDP2: `fully_shard` of every layer with `CPUOffloadPolicy` and fused AdamW, with and without "
        "recomputing every layer; what runs out of memory is left out, and *of FSDP2* is of the faster. "
        f"Medians of {one_gpu.STEPS} steps. *Fetched*, *evicted*: bytes of one step, their speed, and what part of "
        "their time kernels run beside. Each row in a process of its own."
    )
    raw = [asdict(r) for r in found]
    print(record.write("gpu_offload", "Model data on the host of a GPU", notes, rows, raw, facts), flush=True)


def gpu_largest() -> None:
    """The largest models, by tries of which all are recorded; what there is no time for is left to the next call."""
    until = time.monotonic() + LARGEST_S
    told = largest.Record.open(largest.search_here)
    for found in largest.go_on(told, until):
        told_s = " ".join(f"{seconds:.2f}" for seconds in found.seconds)
        print(f"{found.job}: {found.short_of or 'trains'} {told_s} {found.said}", flush=True)
    print(told.write(), flush=True)
    if largest.next_job(told.search, told.tries) is not None:
        print("some tries are left: run it again, with benchmarks/results/gpu_largest.json in its place", flush=True)


def _error_of(predicted: float, measured: float, unit: float) -> str:
    return f"{predicted / unit:.2f} ({predicted / measured - 1:+.1%})"


def _moved_text(moved: tuple[int, float, float]) -> str:
    size, seconds, beside = moved
    return f"{size / 1e9:.1f} GB at {size / seconds / 1e9:.0f} GB/s, {beside:.0%} beside" if size else ""


def placements() -> None:
    """Embedding tables on ranks, beside largest first."""
    facts = record.circumstances()
    found = tables.compare()
    rows = [
        {
            "set": str(r.seed),
            "tables": str(r.tables),
            "ranks": str(r.ranks),
            "largest first ms": f"{r.greedy_s * 1e3:.3f}",
            "whole tables ms": f"{r.whole_s * 1e3:.3f}",
            "gap": f"{1 - r.whole_bound_s / r.whole_s:.3%}",
            "CPU s": f"{r.whole_solve_s:.1f}",
            "every dimension ms": f"{r.every_s * 1e3:.3f}",
            "its gap": f"{1 - r.every_bound_s / r.every_s:.3%}",
            "its CPU s": f"{r.every_solve_s:.1f}",
        }
        for r in found
    ]
    slower = sum(r.whole_s > r.greedy_s or r.every_s > r.greedy_s for r in found)
    whole, every = (
        statistics.mean(r.greedy_s / s for r, s in zip(found, each, strict=True))
        for each in ([r.whole_s for r in found], [r.every_s for r in found])
    )
    notes = (
        f"Seconds of a step on the slowest rank, as the planner prices them, for {len(found)} random sets of embedding "
        f"tables on eight or sixteen H100, batch {tables.BATCH:,}, Adagrad. *Largest first* puts each whole table on "
        f"the rank that is fastest so far. Whole tables are placed {whole:.3f} times as fast on average, and "
        f"{every:.3f} times where they may also be cut or copied; {slower} sets are slower. *Gap* is what the proven "
        f"bound leaves open; the solver has {tables.LIMIT_S:g} s."
    )
    print(record.write("tables", "Placed embedding tables", notes, rows, [asdict(r) for r in found], facts), flush=True)


def cached() -> None:
    """Cached tables in a file: Criteo's whole, of which trained rows take space, and a part that is on disk."""
    facts = record.circumstances()
    with tempfile.TemporaryDirectory() as folder:
        found: list[cached_table.CachedRun] = []
        for part in cached_table.PARTS:
            found += cached_table.runs(Path(folder), part)
            _record_cached(found, facts)


def moved() -> None:
    """A run that goes on with 3 of 4 processes: from memory, and through a checkpoint."""
    facts = record.circumstances()
    with tempfile.TemporaryDirectory() as folder:
        found = elastic.runs(Path(folder))
    columns = {"emptying the rank": "hold_s", "all": "live_s", "save": "save_s", "load": "load_s"}
    rows = [
        {
            "state MB": f"{r.state_bytes / 1e6:.0f}",
            "sent MB": f"{r.sent_bytes / 1e6:.1f}",
            **{f"{name} s": f"{getattr(r, column):.2f}" for name, column in columns.items()},
            "memory / files": f"{r.live_s / (r.save_s + r.load_s):.2f}",
        }
        for r in found
    ]
    notes = (
        f"{elastic.LAYERS} pairs of linear layers of {elastic.WIDTH} features with Adam, sharded over "
        f"{elastic.RANKS[0]} processes (ZeRO 3), go on sharded over {elastic.RANKS[1]} of them. *From memory*: "
        "`autopar.hold(leaving=...)` sends what only the rank that leaves holds to the others' hosts, and "
        "`autopar.reshard` fills a module of the other plan. *Through files*: `save_checkpoint` and `load_checkpoint` "
        "of the same run. Seconds until the slowest rank is done."
    )
    print(record.write("elastic", "Going on with other ranks", notes, rows, [*map(asdict, found)], facts), flush=True)


def _record_cached(found: Sequence[cached_table.CachedRun], facts: dict[str, Any]) -> None:
    rows = [
        {
            "table GB": f"{r.table_bytes / 1e9:.1f}",
            "on disk": "every row" if r.part.is_full else "trained rows",
            "disk GB": f"{r.disk_bytes / 1e9:.1f}",
            "rows cached": f"{r.cache_share:.1%}",
            "cache GB": f"{r.cache_bytes / 1e9:.2f}",
            "prefetch": "yes" if r.prefetches else "no",
            "hit rate": f"{r.hit_rate:.2%}",
            "predicted": f"{r.predicted_hit_rate:.2%}",
            "fetched MB": f"{r.fetched_bytes / 1e6:.2f}",
            "written MB": f"{r.written_bytes / 1e6:.2f}",
            "read ms": f"{r.read_s * 1e3:.1f}",
            "write ms": f"{r.written_s * 1e3:.1f}",
            "look-up ms": f"{r.lookup_s * 1e3:.1f}",
            "step ms": f"{r.step_s * 1e3:.1f}",
        }
        for r in found
    ]
    notes = (
        "`CachedEmbeddingBag` with row-wise Adagrad and its home in a file: Criteo's terabyte with "
        f"{cached_table.FEATURES} features; {cached_table.BATCHES} Zipf batches (exponent {cached_table.EXPONENT}) of "
        f"{cached_table.SAMPLES:,} samples with {cached_table.LOOKUPS} look-ups each, a dense tower behind it, all on "
        "CPUs. *On disk*: the rows that were trained, since others are drawn when they are first fetched; or, of an "
        "eighth of the table, every row, written before, and forgotten by the system. The hit rate is of the distinct "
        "rows of a batch. Rows are read or drawn, and written back, on a thread behind: mean milliseconds a batch. "
        "Look-ups and steps are medians."
    )
    raw = [*map(asdict, found)]
    print(record.write("cached_table", "A table that is cached", notes, rows, raw, facts), flush=True)


def fleets() -> None:
    """Jobs that arrive on 64 GPUs under every rule, and small fleets beside what CP-SAT proves."""
    facts = record.circumstances()
    known = []
    for curve in fleet.curves():
        known.append(curve)
        print(f"planned {curve.model}: {len(curve.steps)} step times, {curve.cpu_s:.0f} s of CPU", flush=True)
    found = []
    for each in fleet.arrivals(known):
        found.append(each)
        print(f"simulated seed {each.seed}: {each.mean_s[fleet.EVOLUTION] / 60:.1f} min", flush=True)
    write_fleets(known, found, [*fleet.small_fleets(known)], facts)


def write_fleets(
    known: Sequence[fleet.PlannedCurve],
    found: Sequence[fleet.SimulatedFleet],
    small: Sequence[fleet.SimulatedFleet],
    facts: dict[str, Any],
) -> None:
    """A row for each rule, and small fleets in words."""
    rows = [
        {
            "rule": name,
            "average completion min": f"{statistics.mean(r.mean_s[name] for r in found) / 60:.1f}",
            "over evolution": f"{statistics.mean(ratios):.2f}",
            "of all seeds": f"{min(ratios):.2f} to {max(ratios):.2f}",
            "evolution is faster in": f"{sum(ratio > 1 for ratio in ratios)} of {len(found)}"
            if name != fleet.EVOLUTION
            else "",
            "moves": f"{statistics.mean(r.moves[name] for r in found):.0f}",
            "devices busy": f"{statistics.mean(r.busy[name] for r in found):.0%}",
        }
        for name in found[0].mean_s
        for ratios in [[r.mean_s[name] / r.mean_s[fleet.EVOLUTION] for r in found]]
    ]
    proved = [r for r in small if r.exact_s is not None and r.bound_s >= r.exact_s * (1 - fleet.GAP)]
    over = {
        name: f"{name} {statistics.mean(ratios):.1%} on average and {max(ratios):.1%} at most"
        for name in found[0].mean_s
        for ratios in [[r.mean_s[name] / r.bound_s - 1 for r in proved]]
    }
    within = sum(r.mean_s[fleet.EVOLUTION] <= 1.05 * r.bound_s for r in proved)
    solving_s = statistics.mean(r.cpu_s for r in small)
    notes = (
        f"{fleet.JOBS} jobs arrive at random on 64 H100 in {fleet.NODES} nodes, in {len(found)} seeds: training of "
        f"{' or '.join(fleet.MODELS)} on sequences of {fleet.SEQUENCE:,}, with limits of the batch between 16 and "
        f"{fleet.BATCHES[1]:,} and step times from plans; a move takes {fleet.RESTART_S:g} s and the state over the "
        "network. Rules know a job when it arrives, and how many samples remain. Fixed sizes of the first two are the "
        "most devices at which a job is at least half as efficient as on its fewest. The search takes "
        f"{statistics.mean(r.cpu_s for r in found):.1f} CPU seconds a seed. Of {len(small)} fleets of "
        f"{fleet.SMALL_JOBS} jobs on one node, half of them at once, CP-SAT proves {len(proved)} to a thousandth ("
        f"{solving_s:.1f} CPU seconds on average, {fleet.LIMIT_S:g} s of work at most). Over the bound are there "
        f"{', '.join(over.values())}; the search, which knows no arrivals beforehand, is within 5 % in {within}."
    )
    raw = {"curves": [*map(asdict, known)], "arrivals": [*map(asdict, found)], "small": [*map(asdict, small)]}
    print(record.write("fleet", "Fleets", notes, rows, raw, facts), flush=True)


def arrays() -> None:
    """Sweeps of small models as arrays, one after another, in processes of their own; and on paper on a V100."""
    facts = record.circumstances()
    measured, predicted_ = array.measure(), array.on_paper()
    ways = [way for way in array.WAYS if way != "array"]
    rows = []
    for priced in predicted_:
        sweep = next((each for each in measured if each.model == priced.model), None)
        took = {"CPU ms": "", "wall ms": "", **dict.fromkeys(ways, "")}
        if sweep is not None:
            took = {
                "CPU ms": f"{1e3 * sweep.median_s('array', False):.2f}",
                "wall ms": f"{1e3 * sweep.median_s('array', True):.2f}",
                **{way: f"{sweep.times(way, False):.1f} x, {sweep.times(way, True):.1f} x" for way in ways},
            }
        rows.append(
            {
                "model": priced.model,
                **took,
                "V100 ms of one": f"{1e3 * priced.steps[0][1]:.2f}",
                **{f"x by {count}": _times(priced.speedup(count)) for count in array.COUNTS[1:]},
                "x by 16, slow host": _times(priced.speedup(16, host_bound=True)),
            }
        )
    points = next(each for each in predicted_ if each.model == "PointNet")
    notes = (
        f"Sweeps of {array.MEMBERS} learning rates with AdamW. *CPU ms*, *wall ms*: for a step of all members as one "
        "array, on one thread, of the processor and by the clock; behind it how many times as long, of processors and "
        f"by the clock, the members take one after another, in {array.MEMBERS} processes at once, with torch's fused "
        "AdamW, and in two arrays of half of them in a process each, one for each core: medians of "
        f"{array.ROUNDS} rounds, in each of which every way makes {array.STEPS} steps, one way after the other. Inputs "
        "and optimizers are the same. *V100*: predicted by the cost model for one V100 in half precision with the "
        "batch in `benchmarks/array.py`: a step of one model, and how many times the throughput of one model after "
        f"another an array has; *slow host*: where the host takes {1e6 * array.HOST_S:.0f} us for every kernel, in "
        f"place of 4. {points.steps[-1][0]} PointNets, as many as fit, have 15.1 times the throughput of one after "
        f"another where a batch takes {1e3 * points.loading_s(15.1):.0f} ms to load, for one or for all."
    )
    raw = {"measured": [asdict(each) for each in measured], "predicted": [asdict(each) for each in predicted_]}
    print(record.write("array", "Arrays of models", notes, rows, raw, facts), flush=True)


def _times(speedup: float | None) -> str:
    return "does not fit" if speedup is None else f"{speedup:.1f}"


def transfer_schedules() -> None:
    """Bytes that planned transfer schedules move beside those of other rules."""
    facts = record.circumstances()
    results = []
    for row in transfer_schedule.compare():
        results.append(row)
        print(f"planned {row.model}, update on the {row.update}, {row.share:.0%}", flush=True)
    rows = [
        {
            "model": r.model,
            "update": r.update,
            "chunks": str(r.items),
            "budget GiB": f"{r.budget_bytes / transfer_schedule.GIB:.1f}",
            "LRU GB": f"{r.lru_bytes / 1e9:.2f}",
            "static GB": f"{r.static_bytes / 1e9:.2f}",
            "Belady GB": f"{r.belady_bytes / 1e9:.2f}",
            "fewest GB": f"{r.ours_bytes / 1e9:.2f}",
            "bound GB": f"{r.bound_bytes / 1e9:.2f}",
            "CPU s": f"{r.solve_s:.2f}",
            "its step s": f"{r.fewest_step_s:.3f}",
            "shortest step s": f"{r.shortest_step_s:.3f}",
            "GB of it": f"{r.shortest_bytes / 1e9:.2f}",
            "CPU s of it": f"{r.shortest_solve_s:.2f}",
            "compute s": f"{r.compute_s:.3f}",
        }
        for r in results
    ]
    notes = (
        "Bytes of one training step, fetched and evicted, over a link of 25 GB/s each way, for traces made of models' "
        "block sizes: bf16 parameters and gradients, fp32 master weights and two moments, each a chunk; the update of "
        "a block follows its backward, on the device or on the host. Budgets: the largest working set of a moment, and "
        f"{', '.join(f'{share:.0%}' for share in transfer_schedule.SHARES)} of all chunks beside it. *LRU* and "
        "*Belady* fetch on demand and evict what was used longest ago, or is used last; *static*: a fixed set stays. "
        "*Fewest* is `fewest_bytes`, whose bytes nothing beats by more than down to the proved *bound*; *shortest "
        "step* is `shortest_step`, simulated. With the update on the host only parameters between forward and backward "
        "may stay, which come back in reverse order: there LRU is as good as anything."
    )
    raw = [asdict(r) for r in results]
    print(record.write("transfer_schedule", "Transfer schedules of chunks", notes, rows, raw, facts), flush=True)


def damages(files: int) -> None:
    """What becomes of damaged plan and cluster files; a fault is an error."""
    facts = record.circumstances()
    found = fuzz.run(files)
    rows = [
        {
            "file": r.kind,
            "damaged": f"{r.files:,}",
            "refused": f"{r.outcomes['refused']:,}",
            "loaded": f"{r.outcomes['used'] + r.outcomes['unfit']:,}",
            "of these not of their model": f"{r.outcomes['unfit']:,}",
            "raw errors": str(len(r.faults)),
            "ms a file": f"{1e3 * r.seconds / max(1, r.files):.1f}",
            "slowest s": f"{r.slowest_s:.2f}",
        }
        for r in found
    ]
    notes = (
        "Plan files (JSON) of four kinds of plan of a small model, and cluster files (YAML and JSON) of two presets, "
        "with something wrong in one to three places: a value gone, of another type, from elsewhere in the file, huge, "
        "negative, not finite, renamed, nested; lists longer or shorter; text that breaks off, has a part twice, or "
        "holds what JSON and YAML allow and a file cannot mean. Loading refuses in words, or all that a plan can do is "
        "done with it: print, sentence, page, explanations, timeline, save and load again, and for one in "
        f"{fuzz.PRICED} pricing it for its model. A raw error is anything else that is raised."
    )
    raw = [{**vars(r), "outcomes": dict(r.outcomes)} for r in found]
    print(record.write("fuzz", "Damaged files", notes, rows, raw, facts), flush=True)
    if any(r.faults for r in found):
        raise SystemExit("some files raised raw errors: their seeds and tracebacks stand above")


def optima(problems: int = exact.PROBLEMS, seed: int = 0) -> None:
    """What a search says against brute force; a violation is an error."""
    facts = record.circumstances()
    found = exact.run(problems, seed)
    notes = (
        "Random models of a few operators on random clusters of one to four devices, each within ample memory and two "
        "limits around what its fastest plan needs. Brute force prices every plan: stages, micro-batches, schedules, "
        "virtual stages, meshes, strategies, cuts, every block's level of recomputation, when parameters are gathered. "
        "*missed*: said to be optimal, and something is faster; *bound*, *row*: a bound of all plans, or of one "
        "configuration's, that a plan is below; *unfolded*: a plan found with folding is below a bound without, or the "
        "other way round. *Home*: it holds of plans with model data on the device; *offload*: its home is pinned to "
        f"the host. Seeds from {seed} on: {found}."
    )
    raw = {**vars(found), "violations": [asdict(each) for each in found.violations]}
    print(record.write("exact", "Exactness", notes, exact.table(found), raw, facts), flush=True)
    if found.violations:
        raise SystemExit(f"{len(found.violations)} violations, which stand above")


PARTS: dict[str, Callable[[], None]] = {
    "plan": plans,
    "step": partial(steps, "step_time", "Step time", STEP_CASES),
    "stages": partial(steps, "stages", "Step time of pipelines", STAGE_CASES),
    "experts": partial(steps, "experts", "Step time of experts", EXPERT_CASES),
    "compiled": compiled_blocks,
    "context": attended,
    "shards": partial(steps, "shards", "Step time of sharded parameters", SHARD_CASES),
    "predicted": predictions,
    "published": published_runs,
    "observed": observed_steps,
    "runs": planned,
    "imitated": imitated_stacks,
    "mixtures": mixtures,
    "million": million_tokens,
    "rsa": ring_self_attention,
    "integrations": integrated,
    "exporters": exported,
    "family": families,
    "iopddl": problems,
    "memory": peaks,
    "pipeline": pipelines,
    "schedules": schedules_run,
    "transfer_schedule": transfer_schedules,
    "tables": placements,
    "cached": cached,
    "array": arrays,
    "elastic": moved,
    "fleet": fleets,
    "offload": offloads,
    "gpu_offload": gpu_offloads,
    "gpu_steps": gpu_steps,
    "gpu_largest": gpu_largest,
}

if __name__ == "__main__":
    main(sys.argv[1:])
