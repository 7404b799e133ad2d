"""Every notebook runs from top to bottom, and shows what it shows today."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
RICH = {"text/html": "_repr_html_", "text/latex": "_repr_latex_"}
"""How a notebook shows a value."""
OF_TIME = r"\d+\.\d+ s \(capture [^)]*\)"
VARIES = "varies"
"""Tag of a cell whose output depends on the machine, such as rounding."""


def outputs_of(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a cell as a notebook does, and say what it shows, as a notebook keeps it."""
    tree, printed, value = ast.parse(source), io.StringIO(), None
    last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None  # type: ignore[attr-defined]
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), names)
        if last is not None:
            value = eval(compile(last, "cell", "eval"), names)
    shown: list[dict[str, Any]] = []
    if printed.getvalue():
        shown.append({"name": "stdout", "output_type": "stream", "text": printed.getvalue().splitlines(keepends=True)})
    if value is not None:
        rich = {kind: getattr(value, method)() for kind, method in RICH.items() if hasattr(value, method)}
        data = {kind: text.splitlines(keepends=True) for kind, text in {"text/plain": repr(value), **rich}.items()}
        shown.append({"data": data, "metadata": {}, "output_type": "execute_result"})
    return shown


def text_of(outputs: list[dict[str, Any]]) -> str:
    """What is printed and returned, but for the seconds that planning took."""
    lines = (line for each in outputs for line in each.get("text") or each["data"]["text/plain"])
    return re.sub(OF_TIME, "", "".join(lines))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_it_shows(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With ``UPDATE_GOLDEN=1`` in the environment, what it shows is kept."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(path.read_text(encoding="utf-8"))
    # Another Transformers writes models with other operators, which plans list.
    is_pinned = f"transformers=={version('transformers')};" in (ROOT / "constraints.txt").read_text()
    names: dict[str, Any] = {"__name__": "__main__"}
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(code, 1):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outputs = outputs_of("".join(cell["source"]), names)
        for each in outputs:
            if each["output_type"] == "execute_result":
                each["execution_count"] = number
        if os.environ.get("UPDATE_GOLDEN"):
            cell |= {"outputs": outputs, "execution_count": number}
        elif is_pinned and VARIES not in cell["metadata"].get("tags", ()):
            assert text_of(outputs) == text_of(cell["outputs"]), (
                f"cell {number} of {path.name} shows something else than it did; if the change is wanted: "
                "UPDATE_GOLDEN=1 make test ARGS=tests/autopar/cli/test_notebooks.py"
            )
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def test_pictures_and_formulas_are_kept() -> None:
    cells = [cell for path in NOTEBOOKS for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]
    shown = {kind for cell in cells for each in cell.get("outputs", ()) for kind in each.get("data", ())}
    assert {*RICH} <= shown
