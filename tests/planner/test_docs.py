"""What pages name exists: files, modules, links and anchors. The rooms that are drawn are today's."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PATH = r"(?<![\w/.])(?:planner|autopar|tests|docs|notebooks|benchmarks)/[\w./-]*\w"
WRITTEN = {
    "autopar/capture/passes/double_negation.py",
    "tests/autopar/capture/test_double_negation.py",
    "autopar/capture/passes/unit_products.py",
    "tests/autopar/capture/test_unit_products.py",
}
"""What the first hour and the page on passes have their reader write."""
DOTTED = r"`(?:python -m )?((?:planner|autopar|benchmarks)(?:\.\w+)+)"


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def leads_somewhere(name: str) -> bool:
    """Whether a dotted name is a module, or a name that the module or package before it defines or imports."""
    path = ROOT.joinpath(*name.split("."))
    if path.is_dir() or path.with_suffix(".py").exists():
        return True
    above = path.parent
    source = above / "__init__.py" if above.is_dir() else above.with_suffix(".py")
    if not source.exists():
        return False
    named = {
        found
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8")))
        for found in (getattr(node, "name", None), getattr(node, "asname", None), getattr(node, "id", None))
    }
    listed = f'"{path.name}"' in source.read_text(encoding="utf-8")  # as lazy imports do
    return path.name in named or listed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    prose = re.sub(r"\]\([^)]*\)|https?:\S+", "", text)
    missing = [path for path in {*re.findall(PATH, prose)} - WRITTEN if not (ROOT / path).exists()]
    missing += [name for name in re.findall(DOTTED, text) if not leads_somewhere(name)]
    for link, anchor in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", text):
        target = page.parent / link if link else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            missing.append(f"{link}#{anchor}" if anchor else link)
    assert not missing


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts that write pages can be imported."""
    monkeypatch.syspath_prepend(ROOT / "docs")


@pytest.mark.usefixtures("scripts")
def test_what_works_with_what_is_what_records_have() -> None:
    import compatibility

    assert compatibility.PAGE.read_text(encoding="utf-8") == compatibility.page(), "run python docs/compatibility.py"
    ran, pinned = compatibility.record("integrations"), (ROOT / "constraints.txt").read_text(encoding="utf-8")
    for name in ("accelerate", "lightning", "peft", "trl", "transformers"):
        assert f"{name}=={ran['circumstances'][name]}" in pinned, "run python -m benchmarks integrations"
    assert max(run["error"] for run in ran["results"] if not run["recipe"].startswith("TRL")) < 1e-9


@pytest.mark.usefixtures("scripts")
def test_the_picture_and_the_tables_of_rooms_are_todays() -> None:
    import rooms

    assert rooms.PICTURE.read_text(encoding="utf-8") == rooms.picture(), "run python docs/rooms.py"
    page = rooms.PAGE.read_text(encoding="utf-8")
    assert page == rooms.page(page), "run python docs/rooms.py"


def test_pages_that_code_names_exist() -> None:
    code = [*(ROOT / "planner").rglob("*.py"), *(ROOT / "autopar").rglob("*.py")]
    named = {page for file in code for page in re.findall(r"docs/\w+\.md", file.read_text(encoding="utf-8"))}
    assert not [page for page in named if not (ROOT / page).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_differences_that_a_page_shows_apply(page: Path) -> None:
    """What is taken out, or stays around it, stands so in a file that the page names or has its reader write."""
    text = page.read_text(encoding="utf-8")
    files = [ROOT / path for path in {*re.findall(PATH, text)} if (ROOT / path).is_file() and path[-4:] != ".png"]
    sources = [file.read_text(encoding="utf-8") for file in files] + re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for shown in re.findall(r"```diff\n(.*?)```", text, re.DOTALL):
        before = "".join(f"{line[1:]}\n" for line in shown.splitlines() if line[0] != "+")
        assert any(before in source for source in sources), f"nothing that {page.name} names has\n{before}"


def test_the_first_hour_shows_differences() -> None:
    assert (ROOT / "docs/first_hour.md").read_text(encoding="utf-8").count("```diff") == 3
