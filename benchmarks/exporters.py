"""Exported configurations, run or read by their own tool.

What is run is in ``tests/autopar/exported.py``; the test runs the same. A tool that is not there is left out, so that
its record is made where it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec

from autopar.measure.local_processes import LocalProcesses
from planner.interchange.formats import FORMATS
from planner.plan.plan import Plan

RUN_BY = {"fsdp2": "torch", "hf": "transformers"}
"""Format -> the package that runs it."""


@dataclass(frozen=True)
class Executed:
    """A format, and what was executed of it.

    Attributes:
        tool: the package, with its version.
        of: what was run, or which plans were read.
        check: what was found.
    """

    format: str
    tool: str
    of: str
    check: str


def executed() -> list[Executed]:
    """Run all that can be run here."""
    found = [*_run(), *_read()]
    order = list(FORMATS)
    return sorted(found, key=lambda each: order.index(each.format))


def _run() -> Iterator[Executed]:
    from tests.autopar.exported import GRADIENTS, PINS, gradients_alike

    with LocalProcesses(4, ("torch", "tests.autopar.exported"), timeout_s=60) as processes:
        for name, pins in PINS.items():
            for what, pin in pins.items():
                count = gradients_alike(processes, name, what)
                assert count == GRADIENTS
                told = ", ".join(f"{word} {value}" for word, value in pin.items())
                check = f"loss and {count} gradients of a step on four processes, equal to the original's"
                yield Executed(name, _tool(RUN_BY[name]), told, check)


def _read() -> Iterator[Executed]:
    from tests.autopar.exported import EXPORTED, READERS

    for name, reader in READERS.items():
        if find_spec(reader.module.partition(".")[0]) is None:
            continue
        for plan in reader.plans:
            reader.check(Plan.load(EXPORTED / f"{plan}.json").export(name))
        told = ", ".join(reader.plans)
        yield Executed(name, _tool(reader.package), f"plans: {told}", f"read as meant by {reader.what}")


def _tool(package: str) -> str:
    return f"{package} {version(package)}"
