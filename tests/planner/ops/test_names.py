"""What is known of an operator stands in its row: other rooms ask the row, and do not name operators."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
NAMING = {
    "planner/formulation/decision_names.py": "takes the prefix off names that people read",
    "autopar/arrays/rules/table.py": "how torch's operators are called for several models at once, which takes torch",
    "autopar/capture/passes/contiguous_removal.py": "takes the prefix off, to ask what "
    "autopar/graph/local_arguments.py adapts",
    "autopar/graph/aten.py": "what autograd gives a gradient, and which results share memory, as traced",
    "autopar/graph/listing.py": "shortens the code of a program that people read",
    "autopar/graph/local_arguments.py": "how arguments that are sizes are written on one rank, which takes torch",
    "autopar/runtime/layers/__init__.py": "the layer that stands for an operator whose factor is sharded",
    "autopar/verification/typecheck.py": "which operators torch's type checker mistakes",
}
"""Files that name operators all the same, and what for."""


def strings(path: Path) -> Iterator[str]:
    """The strings of a module that are not its documentation."""
    tree = ast.parse(path.read_text())
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.value


def test_operators_are_named_in_the_op_table() -> None:
    files = (path for package in ("planner", "autopar") for path in sorted((ROOT / package).rglob("*.py")))
    naming = {str(path.relative_to(ROOT)) for path in files if any("aten." in text for text in strings(path))}
    assert {name for name in naming if not name.startswith("planner/ops/")} == {*NAMING}, "make it a field of the row"
