"""Imports point one way: between the planner's rooms, and from autopar to the planner."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# The rooms of each package, bottom up: a room may import itself and those above it in this table.
ROOMS = {
    "planner": [
        "base",
        "ir",
        "ops",
        "cost",
        "tables",
        "solve",
        "formulation",
        "analysis",
        "sizes",
        "search",
        "interchange",
        "launch",
        "plan",
        "fleet",
    ],
    "autopar": [
        "graph",
        "functions",
        "operators",
        "tables",
        "capture",
        "runtime",
        "checkpoint",
        "emit",
        "arrays",
        "driver",
        "verification",
        "measure",
        "integrations",
        "cli",
    ],
    "autopar.runtime": ["host", "spmd", "data", "layers", "autograd", "optim", "offload", "pipeline"],
}
CAPTURES = ("planner/plan/plan.py", "autopar.driver.rebind.rebind")
"""The one way back, when it is called: a plan's method that takes a module of torch, and what captures that."""
DOORS = {"planner": {"__init__"}, "autopar": {"__init__", "__main__"}, "autopar.runtime": {"__init__", "module"}}


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def folder_of(package: str) -> Path:
    return ROOT.joinpath(*package.split("."))


def room_of(name: str, package: str) -> str:
    """The room of a package that a dotted name lies in; empty where it lies in none."""
    return name.removeprefix(f"{package}.").partition(".")[0] if name.startswith(f"{package}.") else ""


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
        if name.partition(".")[0] in {"torch", "autopar"} and (str(path.relative_to(ROOT)), name) != CAPTURES
    ]
    assert not wrong, "\n".join(["planning works without torch; move this to autopar/ or tests/autopar/:", *wrong])


def test_importing_the_whole_planner_loads_neither_torch_nor_autopar() -> None:
    assert not {"torch", "autopar"} & loaded_after_importing(modules(ROOT / "planner"))


def test_no_modules_of_the_planner_import_one_another_in_a_circle() -> None:
    known = {*modules(ROOT / "planner")}
    arrows = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): {
            name if name in known else name.rpartition(".")[0] for _, name in imports(path)
        }
        & known
        for path in files(ROOT / "planner")
    }
    TopologicalSorter(arrows).prepare()


@pytest.mark.parametrize("package", ROOMS)
def test_every_module_lies_in_a_room_that_says_what_it_is_for(package: str) -> None:
    folder = folder_of(package)
    assert {path.stem for path in folder.glob("*.py")} == DOORS[package]
    assert {path.parent.name for path in folder.glob("*/__init__.py")} == {*ROOMS[package]}, "see ROOMS"
    for room in ROOMS[package]:
        docstring = ast.get_docstring(ast.parse((folder / room / "__init__.py").read_text()))
        assert docstring, f"{package}.{room}: what turns into what here, and why?"


@pytest.mark.parametrize("package", ROOMS)
def test_rooms_import_only_rooms_below_them(package: str) -> None:
    floors = ROOMS[package]
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {room} may not import {target}"
        for room in floors
        for path in files(folder_of(package) / room)
        for line, name in imports(path)
        if (target := room_of(name, package)) in floors and floors.index(target) > floors.index(room)
    ]
    assert not wrong, "\n".join(["see ROOMS:", *wrong])


def test_no_class_name_stands_in_two_modules() -> None:
    found: dict[str, list[str]] = {}
    for path in (path for package in ("planner", "autopar") for path in files(ROOT / package)):
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    wrong = [f"{name}: {', '.join(places)}" for name, places in found.items() if len(places) > 1]
    assert not wrong, "\n".join(["one name is one idea; rename all but one:", *wrong])


@pytest.mark.parametrize("module", ["autopar", "autopar.cli.main"])
def test_importing_autopar_is_light(module: str) -> None:
    assert not {"torch", "transformers"} & loaded_after_importing([module])


def test_the_public_names_are_listed_before_any_is_used() -> None:
    code = "import sys, autopar; print(dir(autopar) == sorted(autopar.__all__), 'torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout.split() == ["True", "False"], result.stderr
