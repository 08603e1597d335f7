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
from agmerge.engine.gradient_clipping import ClippingMixin
from agmerge.engine.optimizer_group import OneOrSeveral, as_state, check_state, inner_of, load_state
from agmerge.engine.optimizer_wrapper import OptimizerHolder, SharingMixin
from agmerge.engine.reporting import ReportingMixin
from agmerge.engine.step_hooks import follow
from agmerge.engine.update_reducer import UpdateReducer
from agmerge.errors import and_more
from agmerge.optimizer.distributed import DistributedOptimizer
from agmerge.options import typed
from agmerge.options.defaults import EVERY, of_local_steps
from agmerge.options.resolve import prepare
from agmerge.options.typed import LocalOptions, Options, SyncOptions, Wire
from agmerge.runtime import workers
from agmerge.tensors.parameters import ParameterTable
from agmerge.updates.outer_steps import ScriptsOuter

if TYPE_CHECKING:
    from typing import Unpack


class LocalOptimizer(DistributedOptimizer):
    """Collective. Wrap an optimizer so that workers step by themselves and exchange the sum of every few steps.

    This is local SGD. It is a :class:`DistributedOptimizer` with ``sync="updates"`` and other defaults, and has the
    same methods. Use it if latency or a slow network makes an exchange per step too expensive (docs/adaptive.md).

    Args:
        optimizer (torch.optim.Optimizer or list): The optimizer to wrap.
        named_parameters (iterable of pairs): Pass ``model.named_parameters()``.
        every (int): Exchange after so many steps. Default: 4. A larger number sends less, and increases the loss more.
        compression (str, list, dict or object): Compressor of the updates. ``"auto"`` is ``"eden-2"``, 2 bits per
            value, if ``every / fragments`` is at most 4. Otherwise, with ``outer``, ``carry="hold"`` and with arguments
            about selection, it is ``"topk"``.
        density (float, dict or str): Fraction of the values that a sparsifier sends. Default: 1.0, all values.
        wire (str): Format of the values. Default: ``"int4"`` for sparsifiers.
        **options: Other arguments of :class:`DistributedOptimizer`, such as ``outer``, ``overlap`` or ``fragments``.

    Raises:
        TypeError: For ``sync=``, which is always ``"updates"`` here.
        ValueError: As in :class:`DistributedOptimizer`.
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


class LocalSync(ReportingMixin, SharingMixin, ClippingMixin, OptimizerHolder):
    """Exchange the updates of a plain optimizer every few steps, inside a ``with`` block.

    The optimizer is not wrapped: hooks on its step do the work. Use this class for scripts that use torchft's
    ``DiLoCo`` or ``LocalSGD``, or if another library must keep the plain optimizer (docs/adaptive.md). With several
    optimizers, an exchange follows when each of them has stepped once.

    Example::

        with agmerge.LocalSync(model, optimizer, every=8) as sync:
            for x, y in batches:
                optimizer.zero_grad()
                loss_of(model(x), y).backward()
                optimizer.step()

    Args:
        model (torch.nn.Module): The model.
        optimizer (torch.optim.Optimizer or list): The optimizer that steps, or several.
        every (int): Exchange after so many steps. Default: 4.
        compression (str, list, dict or object): As in :class:`LocalOptimizer`.
        density (float, dict or str): As in :class:`LocalOptimizer`.
        wire (str): As in :class:`LocalOptimizer`.
        sync_every (int): torchft's name of ``every``.
        outer_optimizer (torch.optim.Optimizer): torchft's name of ``outer``: an optimizer of the model's parameters.
            Its groups, state and schedulers are used.
        fragment_sync_delay (int): torchft's name of ``overlap``.
        **options: Other arguments of :class:`LocalOptimizer`.

    Raises:
        ValueError: If an argument is given under both of its names, or has no effect.
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
        typed.refuse_unknown(type(self).__name__, given)
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
        """Collective. Connect to the other workers, and exchange from now on.

        Raises:
            ValueError: If it is entered already.
        """
        if self._unfollow is not None:
            raise ValueError("this LocalSync is already entered, so each step would count twice. Enter it once.")
        workers.adopt()
        self._reducer.connect()
        self._unfollow = follow(self._reducer)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Collective. Receive the updates under way, unless an exception is raised, and stop exchanging."""
        if self._unfollow is not None:
            self._unfollow()
        self._unfollow = None
        if kind is None:
            self._reducer.flush()

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, with this rank's residuals under the key ``"agmerge"``."""
        return rank_state.whole_state(self._reducer, self._inner.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Collective. Load a saved state, the optimizer's included. Load the model first.

        Args:
            state_dict (dict or list): The result of :meth:`state_dict` on this rank, or of :func:`agmerge.gather_state`
                on rank 0.
        """
        state = as_state(state_dict)
        inner = {key: value for key, value in state.items() if key != rank_state.SECTION}
        check_state(self._inner, inner)
        own = rank_state.load(self._reducer, state.get(rank_state.SECTION))
        load_state(self._inner, own or inner)

    def close(self) -> None:
        """Close the connections. Parameters stay as they are, so call :meth:`consolidate` inside the ``with`` block
        before."""
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
