"""Pass runner: what a pass breaks is refused by its name, and every pass's program is there to read."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import replace
from difflib import unified_diff
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

import autopar
from autopar.capture.capture import capture
from autopar.capture.flatten import passes
from autopar.capture.pass_runner import name_of, run
from autopar.capture.repeats.repeats import Repeats
from autopar.graph import dump
from autopar.graph.dump import VARIABLE
from autopar.graph.module_walk import ModuleWalk
from autopar.graph.program import Body, Program
from autopar.verification.simulator import fake_process_group
from planner.base.errors import InputError
from planner.cost.cluster import ClusterSpec

ROOT = Path(__file__).resolve().parents[3]
X = torch.randn(4, 8)


class Layers(nn.Module):
    """Equal layers, a region without gradients, a constant, and a result that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            half = x * torch.tensor(0.5)
        for layer in self.layers:
            x = layer(x)
        x.exp()
        return (x + half).sum()


MODEL = Layers()
PASSES = passes(MODEL, Repeats(ModuleWalk(MODEL), []))


def exported() -> ExportedProgram:
    return torch.export.export(MODEL, (X,), strict=False)


def test_every_file_of_the_room_is_a_pass_of_its_name_with_a_test_of_its_name() -> None:
    files = {path.stem for path in (ROOT / "autopar/capture/passes").glob("*.py")} - {"__init__"}
    assert sorted(files) == sorted(map(name_of, PASSES))
    tests = {path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")}
    assert not files - tests


# --- passes that break something -----------------------------------------------------------------------


def unordered(program: ExportedProgram) -> ExportedProgram:
    (relu, *_) = (node for node in program.graph.nodes if node.target is torch.ops.aten.relu.default)
    relu.args[0].prepend(relu)
    return program


def without_metadata(program: ExportedProgram) -> ExportedProgram:
    next(node for node in program.graph.nodes if node.op == "call_function" and node.users).meta.pop("val")
    return program


def without_result(program: ExportedProgram) -> ExportedProgram:
    program.graph.output_node().args = ((),)
    return program


def one_name_for_all(program: Program) -> Program:
    return replace(program, calls=tuple(replace(call, names=("x",) * len(call.names)) for call in program.calls))


def without_first_call(program: Program) -> Program:
    return replace(program, calls=program.calls[1:])


def backwards(program: Program) -> Program:
    (call,) = program.calls
    return replace(program, calls=(replace(call, body=Body(call.body.nodes[::-1])),))


def without_operands(program: Program) -> Program:
    return replace(program, calls=tuple(replace(call, operands=()) for call in program.calls))


@pytest.mark.parametrize("broken", [unordered, without_metadata, without_result])
def test_a_pass_that_breaks_the_exported_program_is_named(broken: Callable[[ExportedProgram], ExportedProgram]) -> None:
    with pytest.raises(AssertionError, match=f"pass {broken.__name__} left a program that is not valid: "):
        run([*PASSES[:5], broken, *PASSES[5:]], exported())


@pytest.mark.parametrize("broken", [one_name_for_all, without_first_call, backwards, without_operands])
def test_a_pass_that_breaks_the_program_is_named(broken: Callable[[Program], Program]) -> None:
    with pytest.raises(AssertionError, match=f"pass {broken.__name__} left a program that is not valid: "):
        run([*PASSES, broken], exported())


# --- what is written down ------------------------------------------------------------------------------


@pytest.mark.parametrize("fold", [False, True])
def test_every_pass_writes_its_program(fold: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "made" / "for it"
    monkeypatch.setenv(VARIABLE, str(folder))
    folder.mkdir(parents=True)
    (folder / "03_a_pass_that_is_gone.py").write_text("")
    capture(MODEL, (X,), fold=fold)
    with dump.paused():
        capture(nn.Linear(8, 8), (X,), fold=fold)
    names = ["torch_export", *map(name_of, PASSES)]
    assert sorted(path.name for path in folder.iterdir()) == [f"{at:02}_{name}.py" for at, name in enumerate(names)]
    texts = {name: (folder / f"{at:02}_{name}.py").read_text() for at, name in enumerate(names)}
    for text in texts.values():
        assert ast.parse(text).body[-1].name == "model"  # type: ignore[attr-defined]
    assert "def submod" in texts["torch_export"] and "def submod" not in texts["region_inlining"]
    assert 'exp: "f32[4, 8]" = aten.exp.default(' in texts["causal_masks"] and "aten.exp" not in texts["dead_code"]
    assert texts["constant_order"].count("aten.linear.default(") == (2 if fold else 4)
    assert "p_layers_2_0_weight,  # param layers.2.0.weight" in texts["constant_order"]
    assert not fold or re.search(r"leaf\.default\(\d\)  # layers\.\d\.0\.weight\n", texts["identity_indexing"])


def test_the_emitted_program_is_written_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with fake_process_group(2):
        made = autopar.parallelize(MODEL, ClusterSpec.local(2), example_args=(X,))
    assert (tmp_path / "emitted_rank0.py").read_text() == made.code()


def test_the_pass_of_the_page_works_as_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/adding_a_pass.md").read_text()
    room: dict[str, Any] = {}
    exec(page.partition("```python\n")[2].partition("```")[0], room)

    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x.neg().neg())

    monkeypatch.setenv(VARIABLE, str(tmp_path))
    at = [name_of(each) for each in PASSES].index("identity_indexing") + 1
    run([*PASSES[:at], room["double_negation"], *PASSES[at:]], torch.export.export(Twice(), (X,), strict=False))
    before, after = (
        (tmp_path / f"{name}.py").read_text() for name in (f"{at:02}_identity_indexing", f"{at + 1:02}_double_negation")
    )
    assert f"diff dump/{at:02}_identity_indexing.py dump/{at + 1:02}_double_negation.py" in page
    changed = [
        line for line in unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0) if "aten" in line
    ]
    assert changed and all(f"{'<' if line[0] == '-' else '>'} {line[1:]}" in page.splitlines() for line in changed)


def test_nothing_is_written_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    capture(MODEL, (X,))
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for wrong in (tmp_path / "file", tmp_path / "file" / "folder"):
        monkeypatch.setenv(VARIABLE, str(wrong))
        with pytest.raises(InputError, match=rf"AUTOPAR_DUMP={wrong}: programs cannot be written there \("):
            capture(MODEL, (X,))
