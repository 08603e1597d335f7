# SPDX-License-Identifier: Apache-2.0
"""Module ``horovod`` of a script that ``python -m agmerge horovodrun`` or ``python -m agmerge horovod`` has started.

It makes the modules that scripts import from, each with the names of files of ``agmerge.horovod_door``. Others, such as
``horovod.tensorflow``, raise an error with the remedy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from agmerge.horovod_door import batch_norm, compression, distributed_optimizer, elastic, torch_names

__version__ = torch_names.VERSION
__path__: list[str] = []  # it is a package, without files


def exported(*files: ModuleType) -> dict[str, Any]:
    """Return what the ``__all__`` of files names."""
    return {name: getattr(file, name) for file in files for name in file.__all__}


MODULES: dict[str, dict[str, Any]] = {  # by module in `horovod`: its names
    "common": {},
    **dict.fromkeys(("common.basics", "common.process_sets", "common.util"), torch_names.NAMES),
    **dict.fromkeys(("common.elastic", "common.exceptions"), exported(elastic)),
    "torch": {**torch_names.NAMES, **exported(distributed_optimizer, batch_norm)},
    "torch.compression": exported(compression),
    **dict.fromkeys(("torch.elastic", "torch.elastic.sampler", "torch.elastic.state"), exported(elastic)),
    **dict.fromkeys(("torch.functions", "torch.mpi_ops"), {**torch_names.NAMES, **exported(distributed_optimizer)}),
    "torch.optimizer": exported(distributed_optimizer),
    "torch.sync_batch_norm": exported(batch_norm),
}
OUTSIDE = "start the script itself, with `python -m agmerge horovodrun -np N python script.py`"
REMEDIES = {  # by the first name in `horovod`
    **dict.fromkeys(("run", "runner", "spark", "ray"), OUTSIDE),
    **dict.fromkeys(("tensorflow", "keras", "mxnet"), "agmerge is for PyTorch; install Horovod for this framework"),
}


def refusal(name: str, module: str = __name__) -> str:
    """Return why a name of a module is not here, and what to do instead."""
    remedy = REMEDIES.get(name.partition(".")[0], "agmerge has what torch scripts use of Horovod, in horovod.torch")
    return f"{module}.{name} is Horovod's, and agmerge serves {__name__} here. Instead: {remedy}."


def run(*_: Any, **__: Any) -> NoReturn:
    """Raise ``NotImplementedError``: workers are started from the command line."""
    raise NotImplementedError(refusal("run"))


class Refusals(MetaPathFinder):
    """Finder that refuses the modules of Horovod that are not here."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Raise ``ModuleNotFoundError`` for a module in ``horovod``."""
        top, _, rest = name.partition(".")
        if top == __name__ and rest:
            raise ModuleNotFoundError(refusal(rest), name=name)


def _getter(module: str) -> Callable[[str], NoReturn]:
    """Return the ``__getattr__`` of a module: what its missing names raise."""

    def missing(name: str) -> NoReturn:
        raise AttributeError(refusal(name, module))

    return missing


def _make() -> None:
    """Make the modules of the table, known to Python and to the packages that they are in."""
    for rest, names in MODULES.items():
        name = f"{__name__}.{rest}"
        spec = ModuleSpec(name, None, is_package=True)
        module = sys.modules[name] = ModuleType(name)
        vars(module).update(names, __spec__=spec, __package__=name, __path__=[], __getattr__=_getter(name))
        above, _, last = name.rpartition(".")
        setattr(sys.modules[above], last, module)


if __name__ == "horovod":  # as a script imports it
    _make()
    sys.meta_path.insert(0, Refusals())
