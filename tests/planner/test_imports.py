"""Imports point one way: between the planner's rooms, and from autopar to the planner."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLANNER = ROOT / "planner"

# Room -> the rooms it may import, bottom up. A room is a module or a package right under planner/.
BASE = {"errors", "graph", "layout"}
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "layout": {"errors"},
    "node": set(),
    "columns": {"node"},
    "graph": {"node", "columns"},
    "rules": {"errors", "layout"},
    "ops": {*BASE, "rules"},
    "stacks": {"graph", "columns"},
    "fold": {"graph", "columns", "stacks"},
    "pipeline": {"errors", "words"},
    "files": {"errors"},
    "quantity": {"errors"},
    "host": {"errors"},
    "kernel": set(),
    "calibration": {"errors", "files", "quantity", "kernel"},
    "cluster": {"errors", "files", "quantity", "host", "calibration"},
    "tiles": {"cluster", "kernel"},
    "mesh": {"errors", "layout", "cluster"},
    "cost": {*BASE, "cluster", "mesh", "kernel", "tiles"},
    "problem": {"errors"},
    "highs": set(),
    "stdout": set(),
    "solve": {"errors", "problem", "highs", "stdout"},
    "conversion": {*BASE, "cost", "problem"},
    "strategy": {*BASE, "rules", "ops"},
    "seams": {"graph", "rules", "ops", "stacks", "fold"},
    "recompute": {"fold"},
    "again": {"graph", "ops", "fold", "recompute"},
    "working": {*BASE, "ops"},
    "charges": {*BASE, "ops", "fold", "recompute", "again"},
    "traffic": {*BASE, "ops", "again"},
    "skeleton": {*BASE, "rules", "ops", "fold", "strategy", "recompute", "again", "working", "charges", "traffic"},
    "pace": {"fold", "skeleton"},
    "keep": {"errors", "graph", "ops", "kernel", "cost", "recompute", "again", "skeleton"},
    "prices": {
        "conversion",
        "cost",
        "graph",
        "kernel",
        "layout",
        "ops",
        "problem",
        "recompute",
        "rules",
        "skeleton",
        "strategy",
        "traffic",
        "training",
    },
    "formulate": {
        *BASE,
        "conversion",
        "cost",
        "fold",
        "pace",
        "problem",
        "recompute",
        "rules",
        "skeleton",
        "strategy",
        "training",
        "prices",
    },
    "training": set(),
    "assignment": {"conversion", "fold", "formulate", "graph", "layout", "recompute", "skeleton", "strategy"},
    "pins": {"errors", "mesh", "pipeline", "recompute", "training"},
    "filters": {*BASE, "rules", "ops", "mesh", "strategy", "formulate", "pins", "zero"},
    "runs": {"graph", "stacks", "assignment", "skeleton"},
    "positions": {"errors", "graph"},
    "asked": {"graph", "ops", "fold", "recompute", "formulate", "assignment"},
    "heap": set(),
    "tape": {"again", "fold", "heap"},
    "saved": {"training", "heap"},
    "memory": {*BASE, "fold", "conversion", "again", "assignment", "ops", "runs", "heap", "tape", "exchange", "asked"},
    "words": set(),
    "exchange": {"graph", "fold", "conversion", "assignment"},
    "timeline": {"errors", "files", "pipeline", "words"},
    "timetable": {"errors", "words", "highs"},
}
ROOMS["typed"] = {"quantity"}
ROOMS["timetable"] |= {"typed"}
ROOMS["zero"] = {"errors", "graph", "fold", "recompute", "training"}
ROOMS["pins"] |= {"zero"}
ROOMS["polynomial"] = set()
ROOMS["seconds"] = {"polynomial"}
ROOMS["names"] = {"graph", "formulate", "skeleton"}
ROOMS["own"] = {"graph", "ops"}
ROOMS["memory"] |= {"own"}
ROOMS["prices"] |= {"own"}
ROOMS["leaves"] = {*BASE, "conversion", "assignment"}
ROOMS["brought"] = {*BASE, "conversion", "fold", "assignment", "recompute"}
ROOMS["chain"] = {*BASE, "conversion", "exchange", "assignment", "ops", "pipeline", "recompute", "seconds"}
ROOMS["chain"] |= {"brought", "charges", "leaves"}
ROOMS["alive"] = {"assignment", "brought", "chain", "heap", "pipeline", "recompute"}
ROOMS["turns"] = {"errors", "fold", "pipeline", "problem", "recompute", "chain", "alive", "seconds"}
ROOMS["fullest"] = {*BASE, "conversion", "assignment", "heap", "pipeline", "recompute", "charges", "working", "names"}
ROOMS["fullest"] |= {"alive", "brought", "leaves", "turns", "exchange"}
ROOMS["division"] = {*BASE, "cluster", "cost", "training", "kernel", "mesh", "ops", "pins", "pipeline", "skeleton"}
ROOMS["division"] |= {"words", "pace"}
ROOMS["predict"] = {
    *BASE,
    "fold",
    "cost",
    "conversion",
    "strategy",
    "recompute",
    "assignment",
    "skeleton",
    "memory",
    "exchange",
}
ROOMS["memory"] |= {"saved", "names"}
ROOMS["predict"] |= {"words", "turns", "seconds", "asked", "fullest"}
ROOMS["chunks"] = {"graph", "saved", "conversion", "assignment", "heap", "memory"}
ROOMS["rank_step"] = {
    "cluster",
    "graph",
    "layout",
    "conversion",
    "assignment",
    "training",
    "heap",
    "memory",
    "pipeline",
}
ROOMS["rank_step"] |= {"leaves", "exchange", "chain", "turns", "recompute", "timetable", "chunks"}
ROOMS["offload"] = {"errors", "assignment", "memory", "predict", "turns", "timetable", "words", "chunks", "rank_step"}
ROOMS["amounts"] = {"errors", "formulate", "assignment", "memory", "offload", "recompute"}
ROOMS["certificate"] = {
    *BASE,
    "fold",
    "conversion",
    "strategy",
    "problem",
    "recompute",
    "skeleton",
    "formulate",
    "assignment",
}
ROOMS["looks"] = {
    *BASE,
    "rules",
    "cost",
    "problem",
    "solve",
    "strategy",
    "recompute",
    "skeleton",
    "formulate",
    "assignment",
    "training",
    "pins",
}
ROOMS["looks"] |= {"filters", "pace", "pipeline", "chain", "turns", "division", "certificate"}
ROOMS["apart"] = {*BASE, "fold", "problem", "strategy", "recompute", "skeleton", "formulate", "assignment", "looks"}
ROOMS["lean"] = {
    "problem",
    "conversion",
    "formulate",
    "assignment",
    "solve",
    "chain",
    "turns",
    "division",
    "memory",
    "offload",
    "looks",
}
ROOMS["recipes"] = {"errors", "layout", "strategy", "division", "looks"}
ROOMS["refusal"] = {*BASE, "ops", "problem", "strategy", "formulate", "division", "looks", "lean", "names", "words"}
ROOMS["explore"] = {"assignment", "memory", "offload", "problem", "recompute", "skeleton", "turns", "words"}
ROOMS["filling"] = {"division", "formulate", "assignment", "problem", "recompute", "solve", "chain", "turns", "looks"}
ROOMS["explore"] |= {"division", "looks", "filling", "apart", "refusal", "predict", "timetable"}
ROOMS["fitting"] = {"problem", "skeleton", "solve", "looks", "apart", "lean", "recipes", "refusal"}
ROOMS["fitting"] |= {"explore"}
ROOMS["elsewhere"] = {"errors", "cluster", "division", "looks", "offload", "pins", "problem", "recompute", "skeleton"}
ROOMS["elsewhere"] |= {"pace", "amounts", "explore", "fitting"}
ROOMS["search"] = {
    *BASE,
    "cluster",
    "cost",
    "division",
    "fold",
    "formulate",
    "training",
    "keep",
    "looks",
    "pins",
    "recompute",
}
ROOMS["search"] |= {"zero", "mesh", "seams", "skeleton", "explore", "fitting", "elsewhere"}
ROOMS["detail"] = {"conversion"}
ROOMS["account"] = (
    ROOMS["filters"] | {"filters"} | {"conversion", "assignment", "skeleton", "pins", "predict", "detail", "names"}
)
ROOMS["document"] = {
    "errors",
    "layout",
    "cluster",
    "assignment",
    "training",
    "division",
    "predict",
    "detail",
    "account",
}
ROOMS["document"] |= {"graph", "mesh", "chunks", "certificate", "pipeline", "timeline", "timetable", "turns"}
ROOMS["follow"] = {"errors", "graph", "positions", "rules", "strategy", "polynomial"}
ROOMS["scale"] = ROOMS["follow"] | {
    "alive",
    "layout",
    "fold",
    "skeleton",
    "formulate",
    "assignment",
    "memory",
    "predict",
    "follow",
    "turns",
}
ROOMS["capacity"] = {"errors", "polynomial", "scale", "words"}
ROOMS["closed"] = {*ROOMS["formulate"], "traffic", "formulate", "ops", "filters", "seconds", "polynomial"}
ROOMS["formulas"] = {*ROOMS["scale"], "heap", "conversion", "pipeline", "scale", "closed", "seconds"}
ROOMS["encode"] = {*BASE, "cluster", "conversion", "exchange", "turns", "predict", "detail", "document", "names"}
ROOMS["encode"] |= {"timetable", "quantity", "training", "typed"}
ROOMS["consistent"] = {"errors", "document", "division", "pins", "pipeline"}
ROOMS["levels"] = {"errors", "again", "formulate", "assignment", "recompute", "turns", "names", "document"}
VIEWS = {*ROOMS} - {
    "amounts",
    "keep",
    "explore",
    "fitting",
    "elsewhere",
    "search",
    "looks",
    "apart",
    "lean",
    "recipes",
    "refusal",
    "highs",
}
ROOMS["report"] = VIEWS
ROOMS["explain"] = VIEWS | {"report"}
ROOMS["advice"] = {
    "errors",
    "graph",
    "cluster",
    "mesh",
    "pins",
    "training",
    "looks",
    "explore",
    "search",
    "scale",
    "capacity",
}
ROOMS["conflict"] = {*BASE, "cluster", "mesh", "pins", "assignment", "explore", "search", "words"}
ROOMS["why"] = {
    *BASE,
    "pins",
    "problem",
    "assignment",
    "skeleton",
    "certificate",
    "conflict",
    "document",
    "heap",
    "memory",
    "names",
    "predict",
    "words",
    "explore",
    "search",
    "looks",
}
ROOMS["facts"] = {"graph", "names", "ops"}
ROOMS["mismatch"] = {"graph", "fold", "document", "names", "words"}
ROOMS["entries"] = {"errors", "document"}
ROOMS["plan"] = VIEWS - {"solve"} | {"zero", "report", "explain", "why"}
ROOMS["plan"] |= {"facts", "mismatch", "entries"}


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def room_of(path: Path) -> str:
    """The room that a file of planner/ belongs to; ``planner/__init__.py`` is ``""``, the door."""
    return path.relative_to(PLANNER).parts[0].removesuffix(".py").replace("__init__", "")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything that a file imports, at any depth."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            source = ".".join([*above, *filter(None, [node.module])])
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)


def modules(folder: Path) -> list[str]:
    names = (path.relative_to(ROOT).with_suffix("").parts for path in files(folder))
    return sorted(".".join(parts).removesuffix(".__init__") for parts in names)


def loaded_after_importing(names: list[str]) -> set[str]:
    """Top-level packages in a fresh interpreter that imported ``names`` and nothing else."""
    code = f"import sys, {', '.join(names)}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


@pytest.mark.parametrize("folder", ["planner", "tests/planner"])
def test_the_planner_never_imports_torch_or_autopar(folder: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files(ROOT / folder)
        for line, name in imports(path)
        if name.partition(".")[0] in {"torch", "autopar"}
    ]
    assert not wrong, "\n".join(["planning works without torch; move this to autopar/ or tests/autopar/:", *wrong])


def test_importing_the_whole_planner_loads_neither_torch_nor_autopar() -> None:
    assert not {"torch", "autopar"} & loaded_after_importing(modules(PLANNER))


def test_every_room_of_the_planner_has_a_row() -> None:
    unknown = {room_of(path) for path in files(PLANNER)} - ROOMS.keys() - {""}
    assert not unknown, (
        f"planner/ has new rooms: {', '.join(sorted(unknown))}. "
        "Add a row for each to ROOMS in tests/planner/test_imports.py: which rooms may it import?"
    )


def test_the_allowed_arrows_have_no_cycle() -> None:
    TopologicalSorter(ROOMS).prepare()


def test_no_modules_of_the_planner_import_one_another_in_a_circle() -> None:
    known = {*modules(PLANNER)}
    arrows = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): {
            name if name in known else name.rpartition(".")[0] for _, name in imports(path)
        }
        & known
        for path in files(PLANNER)
    }
    TopologicalSorter(arrows).prepare()


def test_rooms_import_only_what_their_row_allows() -> None:
    wrong = []
    for path in files(PLANNER):
        room = room_of(path)
        for line, name in imports(path):
            target = name.split(".")[1] if name.startswith("planner.") else ""
            if room in ROOMS and target in ROOMS and target not in ROOMS[room] | {room}:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {room} may not import {target}")
    assert not wrong, "\n".join(["see ROOMS in tests/planner/test_imports.py:", *wrong])


@pytest.mark.parametrize("module", ["autopar", "autopar.cli"])
def test_importing_autopar_is_light(module: str) -> None:
    assert not {"torch", "transformers"} & loaded_after_importing([module])


def test_the_public_names_are_listed_before_any_is_used() -> None:
    code = "import sys, autopar; print(dir(autopar) == sorted(autopar.__all__), 'torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout.split() == ["True", "False"], result.stderr
