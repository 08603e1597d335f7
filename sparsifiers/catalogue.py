"""The sparsifiers and memories that exist, by name. A new one is a file of its own and a line here."""

from __future__ import annotations

from collections.abc import Callable

from sparsifiers.base import Sparsifier
from sparsifiers.memories import Memory, NoMemory, Residual
from sparsifiers.registry import Registry
from sparsifiers.topk import TopK

_sparsifiers: Registry[Sparsifier] = Registry(
    "sparsifier", Sparsifier, aliases={"tradtopk": "topk", "globaltopk": "topk"}
)
_sparsifiers.register("topk", TopK)

_memories: Registry[Memory] = Registry("memory", Memory)
_memories.register("none", NoMemory)
_memories.register("residual", Residual)


def names() -> tuple[str, ...]:
    """The canonical names of the sparsifiers, registered ones last."""
    return _sparsifiers.names()


def get(name: str, density: float = 0.01, **options: object) -> Sparsifier:
    """Make a sparsifier by canonical name or alias.

    ValueError for an unknown name or a density outside (0, 1]; TypeError for an option it does not have.
    """
    return _sparsifiers.create(name, density, **options)


def register(name: str, factory: Callable[..., Sparsifier]) -> None:
    """Let `get(name, density, **options)` call `factory(density, **options)`. ValueError for a taken name."""
    _sparsifiers.register(name, factory)


def memory(name: str, **options: object) -> Memory:
    """Make a memory by name. ValueError for an unknown name; TypeError for an option it does not have."""
    return _memories.create(name, **options)
