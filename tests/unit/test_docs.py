"""The documentation is true: links lead somewhere, commands exist, the API page names what there is."""

from __future__ import annotations

import inspect
import re
import subprocess
from pathlib import Path

import pytest

from perdure.cli.main import COMMANDS
from perdure.worker.api import Job, join
from perdure.worker.data import MicroBatches
from perdure.worker.step import Step

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def tracked(*patterns: str) -> list[Path]:
    """The repository's own files."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / line for line in listed.splitlines() if (ROOT / line).is_file()]


PAGES = tracked("*.md")


def anchors(page: Path) -> set[str]:
    """What `#name` can point to: headings as they are turned into names on the web."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in LINK.findall(page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        if not found.exists() or (anchor and anchor not in anchors(found)):
            broken.append(target)
    assert not broken, f"{page.relative_to(ROOT)} links to what is not there: {broken}"


def test_the_readme_leads_to_six_files_and_the_loop_that_matters() -> None:
    readme = (ROOT / "README.md").read_text()
    tour = readme[readme.index("## Read the code") :]
    files = re.findall(r"^\d\. \[`([^`]+)`\]\(src/perdure/([^)]+)\)", tour, re.MULTILINE)
    assert len(files) == 6
    assert all(shown == path for shown, path in files)
    assert "`Job._steps`" in tour
    assert hasattr(Job, "_steps")


def test_the_readmes_commands_are_make_demo_and_make_test() -> None:
    readme = (ROOT / "README.md").read_text()
    commands = re.findall(r"^    (make [a-z-]+)", readme, re.MULTILINE)
    assert commands == ["make demo", "make test"]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for named in re.findall(r"`?make ([a-z-]+)", page.read_text()):
            assert named in targets, f"{page.name}: make {named}"
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_commands_that_pages_show_exist() -> None:
    for page in PAGES:
        shown = re.findall(r"(?:^    |`)perdure ([a-z]+)", page.read_text(), re.MULTILINE)
        unknown = sorted(set(shown) - set(COMMANDS))
        assert not unknown, f"{page.relative_to(ROOT)} shows perdure {unknown}"


def test_files_that_pages_name_exist() -> None:
    """Paths in backticks, as they are written in running text."""
    roots = (ROOT, ROOT / "src" / "perdure")
    for page in PAGES:
        for named in re.findall(r"`((?:[\w-]+/)+[\w.-]+\.(?:py|md|toml|csv))`", page.read_text()):
            found = [base / named for base in (*roots, page.parent) if (base / named).exists()]
            assert found or named.startswith("RUN_DIR/"), f"{page.relative_to(ROOT)} names {named}"


def test_the_api_page_names_every_public_word() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    for thing in (Job, Step):
        for name, member in vars(thing).items():
            if not name.startswith("_") and (callable(member) or isinstance(member, property)):
                assert f"{thing.__name__.lower()}.{name}" in page, f"{thing.__name__}.{name}"
    for function, shown in ((join, "perdure.join"), (MicroBatches, "perdure.MicroBatches")):
        names = [*inspect.signature(function).parameters]
        (signature,) = re.findall(rf"^`{re.escape(shown)}\(([^`]*)\)", page, re.MULTILINE)
        assert re.findall(r"(\w+)(?=[=,]|$)(?!\w)", re.sub(r"=[\w.]+", "", signature)) == names


def test_figures_are_quoted_from_results_alone() -> None:
    """The README's figures stand between two marks, so that nobody writes one by hand elsewhere."""
    readme = (ROOT / "README.md").read_text()
    begin, end = readme.index("<!-- figures: begin"), readme.index("<!-- figures: end")
    outside = readme[:begin] + readme[end:]
    assert not re.findall(r"\d+(?:\.\d+)? ?(?:ms|%|×)", outside)
