"""Whether there is a script or module to run: asked before anything starts, and without running any of it."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from perdure.schema.errors import UsageError


def check_script(script: str, is_module: bool) -> None:
    """Raises UsageError if `python SCRIPT` or `python -m MODULE` would find nothing to run."""
    if is_module:
        missing = _missing(script)
        if missing:
            raise UsageError(
                f"run: -m {script}: there is no module {missing} in {os.getcwd()} or on PYTHONPATH; "
                "give a module's name, with dots and without .py"
            )
        return
    path = Path(script)
    if script and path.is_dir() and not (path / "__main__.py").is_file():
        raise UsageError(f"run: {script} is a directory without a __main__.py; give the training script")
    if not script or not path.exists():
        what = script or "an empty name"
        raise UsageError(f"run: {what} is not a file; give the training script, or -m MODULE")


def _missing(module: str) -> str:
    """The first module on the way to `module` that is not found, or the `__main__` that a package lacks.

    Packages on the way are not imported: only their directories are searched.
    """
    names = module.split(".")
    if not all(names):
        return repr(module)
    spec = _top(names[0])
    for depth in range(1, len(names)):
        if spec is None:
            return ".".join(names[:depth])
        spec = _inside(spec, ".".join(names[: depth + 1]))
    if spec is None:
        return module
    is_package = spec.submodule_search_locations is not None
    return f"{module}.__main__" if is_package and _inside(spec, f"{module}.__main__") is None else ""


def _top(name: str) -> ModuleSpec | None:
    """As a worker finds it: the working directory comes first."""
    spec = PathFinder.find_spec(name, [os.getcwd(), *sys.path])
    try:
        return spec or importlib.util.find_spec(name)
    except ValueError:  # __main__ of this process has no spec
        return None


def _inside(package: ModuleSpec, name: str) -> ModuleSpec | None:
    places = package.submodule_search_locations
    return None if places is None else PathFinder.find_spec(name, list(places))
