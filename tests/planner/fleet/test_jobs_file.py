"""Files of jobs: the one of the page, what is wrong with others, by line, and curves of models."""

import os
import re
from pathlib import Path
from textwrap import dedent

import pytest

from planner.base.errors import FleetError, InfeasibleError
from planner.base.formatting import in_duration
from planner.cost.cluster import ClusterSpec
from planner.fleet.curves import batches_within, fleet_jobs, part_of, planned_steps, sizes_of
from planner.fleet.jobs_file import FleetFile, StatedJob
from planner.fleet.plan_fleet import plan_fleet
from planner.plan.document.fingerprint import model_facts
from tests.planner.plans import cluster, residual_mlp

PAGE = Path(__file__).resolve().parents[3] / "docs" / "fleets.md"
NODE = ClusterSpec.preset("dgx-h100")
STEPS = "steps: [{devices: 4, batch: 8, step_s: 1 s}]"


def load(text: str, folder: Path) -> FleetFile:
    path = folder / "jobs.yaml"
    path.write_text(dedent(text))
    return FleetFile.load(path)


def test_the_page_shows_what_its_jobs_come_to(tmp_path: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    quoted = r"```yaml\n(.*?)```\n\n```\nautopar fleet jobs.yaml --cluster preset:dgx-h100\n```\n\n```\n(.*?)```\n\n"
    [(jobs, shown)] = re.findall(quoted, page, re.DOTALL)
    text = f"{plan_fleet(fleet_jobs(load(jobs, tmp_path), NODE, {}), NODE)}\n"
    if os.environ.get("UPDATE_GOLDEN"):
        PAGE.write_text(page.replace(shown, text), encoding="utf-8")
    assert shown == text, f"{PAGE} differs; if the change is wanted, run this test with UPDATE_GOLDEN=1"


@pytest.mark.parametrize(
    "text, says",
    [
        ("jobs: [", "is neither YAML nor JSON.*line 1, column 8"),
        ("jobs: []", "line 1: jobs is .*at least 1 entries"),
        (f"jobs:\n  - {{name: a, samples: -5, {STEPS}}}", "line 2: jobs.0..samples is -5: must be greater than 0"),
        (f"jobs:\n  - name: a\n    sample: 5\n    {STEPS}", "line 3: jobs.0..sample: .*did you mean 'samples'"),
        (f"jobs:\n  - name: a\n    {STEPS}", "line 2: jobs.0..samples is missing; write for example samples: 1e6"),
        (f"jobs:\n  - &a {{name: a, samples: 1, {STEPS}}}\n  - *a", r"jobs\[1\].name is 'a', as that of jobs\[0\]"),
        ("jobs:\n  - {name: a, samples: 1}", "line 2: .*job 'a' has neither steps nor model"),
        (f"jobs:\n  - {{name: a, samples: 1, model: m, {STEPS}}}", "has both steps and model"),
        ("jobs:\n  - {name: a, samples: 1, model: m}", "job 'a': batch is missing"),
        (f"jobs:\n  - name: a\n    samples: 1\n    batch: [9, 8]\n    {STEPS}", r"batch is \[9, 8\]: give the least"),
        (f"jobs:\n  - {{name: a, samples: 1, batch: [9, 16], {STEPS}}}", r"has batches 8, none within \[9, 16\]"),
        (
            "jobs:\n  - name: a\n    samples: 1\n    steps:\n    - {devices: 1, batch: 8, step_s: 1 s}\n"
            "    - {devices: 1, batch: 8, step_s: -2 s}",
            r"line 6: jobs\[0\].steps\[1\].step_s is -2.0: must be greater than 0",
        ),
        (
            f"jobs:\n  - name: a\n    samples: 1\n    arrival_s: 70\n    {STEPS}\nuntil_s: 60",
            r"line 4: jobs\[0\].arrival_s is 70: 'a' arrives 10 s after the end, until_s 60",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_line(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(FleetError, match=f"(?s)^jobs file .*{says}"):
        load(text, tmp_path)


def test_jobs_that_do_not_fit_are_named_with_what_they_lack() -> None:
    def of(until_s: float | None = None, **steps: float) -> FleetFile:
        stated = [{"devices": int(name[1:]), "batch": 8, "step_s": step_s} for name, step_s in steps.items()]
        return FleetFile.from_dict({"jobs": [{"name": "a", "samples": 8000, "steps": stated}], "until_s": until_s})

    with pytest.raises(InfeasibleError, match="'a' takes 16 devices at least, and 'dgx-h100' has 8, 8 fewer"):
        fleet_jobs(of(d16=1.0), NODE, {})
    with pytest.raises(
        InfeasibleError, match=r"'a' cannot end by until_s 900: .* takes 16 min 40 s and ends 1 min 40 s"
    ):
        fleet_jobs(of(900.0, d1=2.0, d8=1.0), NODE, {})
    with pytest.raises(FleetError, match=r"2 devices \(job 'a'\) and 3 \(job 'a'\) do not divide"):
        fleet_jobs(of(d2=2.0, d3=1.0), NODE, {})
    (job,) = fleet_jobs(of(d1=4.0, d4=1.0, d8=1.5), NODE, {})
    assert [each.devices for each in job.allocations] == [1, 4]  # 8 devices are slower than 4


def test_parts_of_a_cluster_are_halves_of_nodes_and_doublings_of_them() -> None:
    three = ClusterSpec.preset("dgx-h100", nodes=3)
    assert sizes_of(three) == (1, 2, 4, 8, 16, 24)
    assert [tuple(level.size for level in part_of(three, n).levels) for n in (4, 8, 16)] == [(4, 1), (8, 1), (8, 2)]
    assert [*batches_within((10, 100))] == [100, 50, 25]


def test_a_model_is_planned_on_every_part_and_followed_to_other_batches() -> None:
    job = StatedJob(name="a", samples=1e6, batch=(8, 64), model="m.py:m")

    def captured(batch: int):  # type: ignore[no-untyped-def]
        graph = residual_mlp(batch=batch)
        return graph, model_facts(graph, "mlp", "train")

    found = [*planned_steps(job, cluster(2), captured, 5.0)]
    assert {(each.devices, each.batch) for each in found} == {(n, batch) for n in (1, 2) for batch in (8, 16, 32, 64)}
    assert all(each.step_s > 0 for each in found)
    with pytest.raises(InfeasibleError, match="job 'a' fits on no part of 'local', not even with batch 8 on all 2 dev"):
        [*planned_steps(job, cluster(2, memory="1 KiB"), captured, 5.0)]


def test_durations_are_read_at_a_glance() -> None:
    seconds = (0.25, 59.4, 59.6, 60, 3599.7, 12300, 90061)
    told = ["250.0 ms", "59.40 s", "1 min", "1 min", "1 h", "3 h 25 min", "1 d 1 h"]
    assert [*map(in_duration, seconds)] == told
