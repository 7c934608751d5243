"""Rules of the house, as tests. An exception is an entry here, with its reason; none may be stale."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import perdure

ROOT = Path(__file__).parents[2]
LINES_MAX, FUNCTION_LINES_MAX, PARAMETERS_MAX = 600, 70, 6

LONG_FILES = {
    "tests/integration/test_mesh.py": "one subject and one fixture, which two files would have to share",
    "tests/unit/test_state_capture.py": "one subject: every kind of object that can be protected",
}
LONG_FUNCTIONS: dict[str, str] = {}
WIDE_CONSTRUCTORS = {
    "src/perdure/worker/data.py:MicroBatches.__init__": "DataLoader's own words, which users know",
}
PICKLES = {
    "benchmarks/failover/train_ddp.py": "a rival's checkpoint, written as its users write it",
}


def files(*folders: str) -> list[Path]:
    """The repository's own Python files below these folders."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *folders]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / line for line in listed.splitlines() if line.endswith(".py") and (ROOT / line).is_file()]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(path: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """(file:Class.function, its tree), for every function of a file."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{prefix}{child.name}", child
            inner = f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix
            yield from walk(child, inner)

    yield from walk(ast.parse(path.read_text()), f"{name(path)}:")


EVERYTHING = files("src", "tests", "examples", "benchmarks")
CODE = files("src", "examples")


def check(found: dict[str, object], allowed: dict[str, str], rule: str) -> None:
    """What breaks a rule is what is excused, no more and no less."""
    new = {where: what for where, what in found.items() if where not in allowed}
    stale = sorted(set(allowed) - set(found))
    assert not new, f"{rule}: {new}"
    assert not stale, f"excused and not needed any more: {stale}"


def test_files_are_short() -> None:
    found: dict[str, object] = {}
    for path in EVERYTHING:
        lines = len(path.read_text().splitlines())
        if lines > LINES_MAX:
            found[name(path)] = lines
    check(found, LONG_FILES, f"more than {LINES_MAX} lines")


def test_functions_are_short() -> None:
    found: dict[str, object] = {}
    for path in EVERYTHING:
        for where, tree in functions(path):
            lines = (tree.end_lineno or 0) - tree.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                found[where] = lines
    check(found, LONG_FUNCTIONS, f"more than {FUNCTION_LINES_MAX} lines")


def test_constructors_are_narrow() -> None:
    found: dict[str, object] = {}
    for path in CODE:
        for where, tree in functions(path):
            arguments = tree.args
            count = len([*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]) - 1
            if tree.name == "__init__" and count > PARAMETERS_MAX:
                found[where] = count
    check(found, WIDE_CONSTRUCTORS, f"more than {PARAMETERS_MAX} parameters")


def test_tests_wait_for_events_and_do_not_sleep() -> None:
    """A short sleep inside a loop that waits for something with a deadline is how one waits for a file.

    `jitter` is exempt: to let threads sleep is what it is for.
    """
    found = []
    for path in files("tests"):
        if path.name == "jitter.py":
            continue
        tree = ast.parse(path.read_text())
        inside = {
            id(n) for loop in ast.walk(tree) if isinstance(loop, ast.While | ast.For) for n in ast.walk(loop)
        }
        for node in ast.walk(tree):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            sleeps = (
                called in ("time.sleep", "asyncio.sleep", "sleep") and ast.unparse(node) != "asyncio.sleep(0)"
            )
            if sleeps and id(node) not in inside:
                found.append(f"{name(path)}:{node.lineno}: {ast.unparse(node)}")
    assert not found


def test_nothing_is_pickled() -> None:
    words = re.compile(
        r"^\s*(?:import|from) (?:c?[Pp]ickle|dill|cloudpickle|shelve|marshal)\b|torch\.(?:load|save)\(", re.M
    )
    found: dict[str, object] = {name(p): "pickles" for p in EVERYTHING if words.search(p.read_text())}
    check(found, PICKLES, "pickle")


def test_no_unfinished_business() -> None:
    words = re.compile(r"#.*\b(?:TODO|FIXME|XXX|HACK)\b")
    assert not [name(p) for p in EVERYTHING if p != Path(__file__) and words.search(p.read_text())]


def test_the_packages_import_only_what_they_may() -> None:
    checker = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run([checker], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_public_names_are_these() -> None:
    assert sorted(perdure.__all__) == ["Job", "MicroBatches", "Step", "join"]
    for public in perdure.__all__:
        assert getattr(perdure, public).__doc__
    assert dir(perdure) == sorted(perdure.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = perdure.nothing


def test_the_launcher_never_imports_torch() -> None:
    code = "import sys, perdure.cli.run, perdure.cli.ps, perdure.cli.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_every_dependency_has_a_decision_record() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    development = project["optional-dependencies"]["dev"]
    named = [re.split(r"[<>=!~\[; ]", line)[0] for line in (*project["dependencies"], *development)]
    records = "\n".join(path.read_text() for path in (ROOT / "docs" / "decisions").glob("*.md"))
    missing = [package for package in named if package not in records]
    assert not missing
    pinned = (ROOT / "constraints.txt").read_text().lower()
    assert not [package for package in named if f"\n{package.lower()}==" not in pinned]
    assert "\ntorch==2.13.0\n" in pinned


def test_every_record_is_in_the_index() -> None:
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text()
    assert not [
        path.name
        for path in folder.glob("*.md")
        if path.name != "README.md" and f"({path.name})" not in index
    ]


def test_the_error_tree_is_on_one_page_with_its_exit_codes() -> None:
    from perdure.schema import errors

    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, Exception)]
    for error in classes:
        assert error.__name__ in (errors.__doc__ or "")
    elsewhere = [
        f"{name(path)}: {match[0]}"
        for path in files("src")
        if path.name != "errors.py"
        for match in re.finditer(r"class \w+\((?:PerdureError|UsageError|ScriptError)\)", path.read_text())
    ]
    assert not elsewhere, f"errors of perdure's tree outside schema/errors.py: {elsewhere}"
