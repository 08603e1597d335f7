# SPDX-License-Identifier: Apache-2.0
"""Start workers without torch's compiler, which they do not use: its import takes a third of their start.

Python imports this file at its start where the folder is on its path: see `environment` in launching.py. The first step
of any optimizer of torch imports `torch._dynamo`, for functions that do nothing outside of compiled code. Here a module
with these stands for it, until anything else of the compiler is asked for: then the real one is imported.
`make test-all` starts workers without this.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

NAME = "torch._dynamo"


class Uncompiled(ModuleType):
    """The compiler before it is needed."""

    __path__: list[str] = []  # a package, of which `Parts` finds the parts
    trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)  # nothing is cached; a new process group asks

    @staticmethod
    def disable(fn: Callable[..., Any], *_: object, **__: object) -> Callable[..., Any]:
        """Return a function that is not compiled: itself."""
        return fn

    @staticmethod
    def graph_break(*_: object, **__: object) -> None:
        """End a piece of compiled code, of which there is none."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system looks for some
            raise AttributeError(name)
        return getattr(compiler(), name)


class Parts(MetaPathFinder, Loader):
    """The import of a part of the compiler, with the whole of it."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        early = isinstance(sys.modules.get(NAME), Uncompiled) and name.startswith(f"{NAME}.")
        return ModuleSpec(name, self) if early else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        compiler()
        self.part = importlib.import_module(spec.name)
        self.spec = self.part.__spec__
        return self.part

    def exec_module(self, module: ModuleType) -> None:
        with suppress(AttributeError):  # some refuse new attributes: these have kept their own
            module.__spec__ = self.spec


def compiler() -> ModuleType:
    """Return the compiler itself, imported if this is the first that needs it."""
    if isinstance(sys.modules.get(NAME), Uncompiled):
        del sys.modules[NAME]
    return importlib.import_module(NAME)


sys.modules[NAME] = Uncompiled(NAME)
sys.meta_path.insert(0, Parts())
