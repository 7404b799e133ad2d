"""Reads plan files of earlier versions: renames their fields to those of today."""

from __future__ import annotations

from typing import Any


def of_version_2(data: dict[str, Any]) -> dict[str, Any]:
    """A document of version 2 as one of version 3, which says some things in the words of the field.

    ``timetable`` became ``transfer_schedule``, ``turns`` of a prediction ``micro_batch_times``, and candidates that
    were ``bounded away`` are ``pruned``. What was proved of a plan with a transfer schedule was of the search's own
    cost, so nothing is proved of its step as predicted. Everything else is left as it is, right or wrong, for the
    reader to judge.
    """
    found = _renamed(data, "timetable", "transfer_schedule")
    if isinstance(found.get("predicted"), dict):
        found["predicted"] = _renamed(found["predicted"], "turns", "micro_batch_times")
    search = found.get("search")
    if isinstance(search, dict) and isinstance(search.get("candidates"), list):
        found["search"] = {**search, "candidates": [_pruned(each) for each in search["candidates"]]}
    if isinstance(search, dict) and {"status", "gap"} <= search.keys() and "transfer_schedule" in found:
        found["search"] = {**found["search"], "status": "feasible", "gap": 1.0}
    return found


def _renamed(fields: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    return {new if name == old else name: value for name, value in fields.items()}


def _pruned(candidate: Any) -> Any:
    away = isinstance(candidate, dict) and candidate.get("status") == "bounded away"
    return {**candidate, "status": "pruned"} if away else candidate
