# SPDX-License-Identifier: Apache-2.0
"""``hvd.DistributedOptimizer``: agmerge's, with Horovod's arguments, defaults and tolerance."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

import agmerge
from agmerge.errors import DivergenceError, warn
from agmerge.horovod_door import compression as compressors
from agmerge.horovod_door.compression import Compression

__all__ = ["DistributedOptimizer"]

VARIABLE = "AGMERGE_COMPRESSION"  # a name that counts before the script's word
TRAVEL = "agmerge: horovod.torch is agmerge {version} here. Gradients travel as {name}, as {who}.{more}"
MORE = " `--compression default` sends up to 8 times less."
DIVERGED = (
    "hvd.DistributedOptimizer: {error} As with Horovod, training continues. To begin with equal models, call "
    "hvd.broadcast_parameters(model.state_dict(), root_rank=0)."
)

_said = ""  # the line that was written last


class DistributedOptimizer(agmerge.DistributedOptimizer):
    """Optimizer that averages gradients over workers, for a script that knows Horovod's.

    The arguments are Horovod's, with its defaults: gradients travel as they are, unless ``AGMERGE_COMPRESSION`` or
    ``compression`` names something else. As with Horovod, parameters that no rank has used get zeros, infinite
    gradients are applied, so that a ``GradScaler`` finds them, and replicas may differ (with a warning).
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        compression: Any = Compression.none,
        backward_passes_per_step: int = 1,
        op: Any = agmerge.Average,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: Any = None,
        sparse_as_dense: bool = False,
        process_set: Any = agmerge.global_process_set,
    ) -> None:
        name = chosen(compression)
        self._has_diverged = False
        super().__init__(
            optimizer,
            named_parameters,
            name,
            backward_passes_per_step,
            op,
            gradient_predivide_factor,
            num_groups,
            groups,
            sparse_as_dense and not isinstance(optimizer, torch.optim.SparseAdam),  # it steps with sparse ones alone
            process_set,
            nonfinite="keep" if name == "none" else None,
            unused="zero",
        )
        _say(name)

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        """Names by parameter, an attribute that scripts read."""
        members = self._reducer.members
        return {parameter: members.name_of(parameter) for parameter in members.name_all()}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Collective. Average the gradients over all workers, then step the inner optimizer."""
        try:
            return super().step(closure)
        except DivergenceError as error:  # the step is made
            if not self._has_diverged:
                warn(DIVERGED.format(error=error), agmerge.rank())
            self._has_diverged = True
            return None


def chosen(compression: Any) -> Any:
    """Return what gradients travel as: the user's word, else the script's ``compression=``, as agmerge names it."""
    name = os.environ.get(VARIABLE)
    if name:
        return "auto" if name == "default" else name
    return compressors.name_of(compression) or compression


def _say(name: Any) -> None:
    """Write what gradients travel as, on rank 0, where that was not said yet."""
    global _said
    who = f"{VARIABLE} says" if os.environ.get(VARIABLE) else "the script says"
    shown = {"none": "they are", "auto": "agmerge's default has it"}.get(name, str(name))
    shown = "they are, uncompressed" if name == "none" else repr(name)
    line = TRAVEL.format(version=agmerge.__version__, name=shown, who=who, more=MORE if name == "none" else "")
    if agmerge.rank() == 0 and line != _said:
        sys.stderr.write(f"{line}\n")
    _said = line
