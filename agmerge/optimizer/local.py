# SPDX-License-Identifier: Apache-2.0
"""Local SGD, compressed: workers step by themselves, and exchange the sum of so many steps.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023, and Sarfi et al.,
"Communication Efficient LLM Pre-training with SparseLoCo", 2025, are settings of it: see docs/adaptive.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from agmerge.checkpoint import rank_state
from agmerge.engine.optimizer_group import OneOrSeveral, inner_of
from agmerge.engine.optimizer_states import as_state, check_state, load_state
from agmerge.engine.optimizer_wrapper import OptimizerHolder
from agmerge.engine.outer import ScriptsOuter
from agmerge.engine.reporting import ReportingMixin
from agmerge.engine.sharing import SharingMixin
from agmerge.engine.step_hooks import follow
from agmerge.engine.update_reducer import UpdateReducer
from agmerge.errors import and_more
from agmerge.optimizer.distributed import DistributedOptimizer
from agmerge.options import keywords
from agmerge.options.arguments import Options
from agmerge.options.defaults import EVERY, of_local_steps
from agmerge.options.prepare import prepare
from agmerge.options.typed import LocalOptions, SyncOptions, Wire
from agmerge.runtime import workers
from agmerge.tensors.parameters import ParameterTable

if TYPE_CHECKING:
    from typing import Unpack


class LocalOptimizer(DistributedOptimizer):
    """Collective. Optimizer around ``optimizer`` with local steps, and an exchange every ``every`` steps.

    It is a :class:`DistributedOptimizer` with ``sync="updates"`` and other defaults, and takes the same arguments: all
    of the pseudo-gradients is sent (``density=1.0``) in 4 bits a value. ``carry``, ``outer``, ``decay``, ``overlap``
    and ``fragments`` are described there.
    """

    def __init__(
        self,
        optimizer: OneOrSeveral,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        every: int = EVERY,
        *,
        compression: Any = "auto",
        density: Any = None,
        wire: Wire | None = None,
        **options: Unpack[LocalOptions],
    ) -> None:
        settings = of_local_steps(every, compression, density, wire, options)
        super().__init__(optimizer, named_parameters, **settings)


class LocalSync(ReportingMixin, SharingMixin, OptimizerHolder):
    """Context in which the updates that ``optimizer`` makes of ``model`` are exchanged every ``every`` steps.

    The optimizer is not wrapped: hooks on its step do it. Of several optimizers all have hooks, and an exchange follows
    when each of them has stepped once. For scripts that use torchft's ``DiLoCo`` or ``LocalSGD``: ``sync_every``,
    ``outer_optimizer`` (an optimizer of the model's parameters, which steps) and ``fragment_sync_delay`` are other
    names of ``every``, ``outer`` and ``overlap``. Other arguments are those of :class:`LocalOptimizer`.
    """

    _inner: torch.optim.Optimizer
    _reducer: UpdateReducer

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: OneOrSeveral,
        every: int = EVERY,
        *,
        compression: Any = "auto",
        density: Any = None,
        wire: Wire | None = None,
        sync_every: int | None = None,
        outer_optimizer: torch.optim.Optimizer | None = None,
        fragment_sync_delay: int | None = None,
        **options: Unpack[SyncOptions],
    ) -> None:
        given: dict[str, Any] = {**options}
        keywords.refuse_unknown(type(self).__name__, given)
        named = list(model.named_parameters())
        inner = self._inner = inner_of(optimizer, named)
        rank_state.warn_of_unread(inner, "sync = agmerge.LocalSync(model, optimizer, ...)", "sync")
        if sync_every is not None and every not in (EVERY, sync_every):
            raise ValueError("sync_every is another name of every. Pass one of them.")
        every = every if sync_every is None else sync_every
        for name, value, other in (
            ("outer", None if outer_optimizer is None else _scripts_outer(outer_optimizer, named), "outer_optimizer"),
            ("overlap", fragment_sync_delay, "fragment_sync_delay"),
        ):
            if value is not None and given.setdefault(name, value) is not value:
                raise ValueError(f"{other} is another name of {name}. Pass one of them.")
        settings = of_local_steps(every, compression, density, wire, given)
        self._reducer = UpdateReducer(ParameterTable(inner, named), prepare(Options(**settings), inner).config)
        self._unfollow: Callable[[], None] | None = None  # removes the hooks; None: there are none

    def __enter__(self) -> LocalSync:
        """Collective. Connect, and exchange from now on whenever the optimizer has made so many steps.

        Raises ``ValueError`` inside of its own ``with``.
        """
        if self._unfollow is not None:
            raise ValueError("this LocalSync is already entered, so each step would count twice. Enter it once.")
        workers.adopt()
        self._reducer.connect()
        self._unfollow = follow(self._reducer)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Collective. Receive messages under way, unless there was an error, and exchange nothing more."""
        if self._unfollow is not None:
            self._unfollow()
        self._unfollow = None
        if kind is None:
            self._reducer.flush()

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, and this rank's section under ``"agmerge"``."""
        return rank_state.whole_state(self._reducer, self._inner.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Collective. Load the result of :meth:`state_dict` on this rank, or of :func:`agmerge.gather_state` on rank 0.

        Call it once the model is loaded. The optimizer's state is loaded too.
        """
        state = as_state(state_dict)
        inner = {key: value for key, value in state.items() if key != rank_state.SECTION}
        check_state(self._inner, inner)
        own = rank_state.load(self._reducer, state.get(rank_state.SECTION))
        load_state(self._inner, own or inner)

    def close(self) -> None:
        """Close the communicators. Parameters stay as they are: call :meth:`consolidate` inside of the ``with``."""
        self._reducer.exchange.close()


def _scripts_outer(optimizer: Any, named: Sequence[tuple[str, torch.Tensor]]) -> ScriptsOuter:
    """Return the outer step that uses the script's own optimizer.

    Raises ``TypeError`` for anything but an optimizer, and ``ValueError`` where it has not got all trainable
    parameters.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"outer_optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    left_out = [name for name, parameter in named if parameter.requires_grad and parameter not in own]
    if left_out:
        raise ValueError(
            f"outer_optimizer does not have the model's parameters {and_more(left_out)}, which would never change. "
            "Create it from model.parameters()."
        )
    return ScriptsOuter(optimizer)
