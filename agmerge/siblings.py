# SPDX-License-Identifier: Apache-2.0
"""Check of ``merging`` and ``sparsifiers``, which are installed with this package: other code may have such names.

A ``merging.py`` beside a script comes before an installed ``merging`` in Python's path, and another distribution may
have installed a package of that name over ours. Either is reported here, before any of it runs in place of ours.
"""

from __future__ import annotations

import importlib.util
import pkgutil
import sys
from importlib import metadata
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

OWN = {"merging": "Plan", "sparsifiers": "Sparsifier"}  # by package, a name in ours
NAME, FOLDER = "agmerge", Path(__file__).resolve().parents[1]
ANOTHER_FILE = (
    "AGM002: agmerge needs its own package {name!r}, but Python finds {found} in its place (agmerge's is {own}). "
    "Rename that file or folder, or move it out of the script's folder and of PYTHONPATH."
)
OVERWRITTEN = (
    "AGM002: agmerge needs its own package {name!r}, but {own} was overwritten: {others} a package of that name into "
    "the same folder. Uninstall the other one, then install agmerge again (pip install --force-reinstall --no-deps "
    "agmerge)."
)
NOT_THERE = "AGM002: agmerge needs its own package {name!r}, but {own} is missing. Install agmerge again."


def check() -> None:
    """Raise ``ImportError`` where ``import merging`` or ``import sparsifiers`` does not give ours. Imports neither."""
    for name in OWN:
        problem = misplaced(name)
        if problem:
            raise ImportError(problem, name=name)


def check_contents() -> None:
    """Raise ``ImportError`` where another package lies in the folder of ``merging`` or ``sparsifiers``.

    Imports both.
    """
    for name, load in (("merging", _merging), ("sparsifiers", _sparsifiers)):
        cause = None
        try:
            if hasattr(load(), OWN[name]):
                continue
        except ImportError as error:
            if (error.name or "").partition(".")[0] != name:
                raise  # it is another library that is missing
            cause = error
        found = others(name)
        said = f"{' and '.join(found)} has installed" if found else "something has written"
        raise ImportError(OVERWRITTEN.format(name=name, own=_own_file(name), others=said), name=name) from cause


def misplaced(name: str) -> str:
    """Return the error text for a package ``name`` that Python finds elsewhere; empty: it finds ours."""
    loaded = sys.modules.get(name)
    own = _own_file(name)
    try:
        spec = loaded.__spec__ if loaded is not None else importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    found = getattr(loaded, "__file__", None) or (spec.origin if spec is not None else None)
    if found is None:
        return NOT_THERE.format(name=name, own=own)
    if Path(found).resolve() == own:
        return ""
    return ANOTHER_FILE.format(name=name, found=found, own=own)


def others(name: str) -> list[str]:
    """Return the names of the other installed distributions that have a top-level package ``name``."""
    return sorted(set(metadata.packages_distributions().get(name, ())) - {NAME})


class UnderOurName(MetaPathFinder, Loader):
    """Finder of ``agmerge.merging.registry`` and the like: the module itself, as a copy would have other registries."""

    def __init__(self) -> None:
        self._specs: dict[str, ModuleSpec | None] = {}  # of modules while they are imported under our name, their own

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return a spec that loads the module of ``merging`` or ``sparsifiers``; None for other names."""
        ours, _, name = fullname.partition(".")
        if ours != NAME or name.partition(".")[0] not in OWN or importlib.util.find_spec(name) is None:
            return None
        return importlib.util.spec_from_loader(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module under its own name."""
        module: ModuleType = pkgutil.resolve_name(spec.name.partition(".")[2])  # one of OWN, see find_spec()
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back, which its import under our name has replaced."""
        spec = module.__spec__
        assert spec is not None
        vars(module)["__spec__"] = self._specs.pop(spec.name)


def _merging() -> ModuleType:
    import merging

    return merging


def _sparsifiers() -> ModuleType:
    import sparsifiers

    return sparsifiers


def _own_file(name: str) -> Path:
    """Return where the ``__init__.py`` of our package ``name`` lies."""
    return FOLDER / name / "__init__.py"


check()  # before other packages' code runs
check_contents()
sys.meta_path.insert(0, UnderOurName())
