# SPDX-License-Identifier: Apache-2.0
"""Warn once of a script that saves the plain optimizer's state, or one rank's, and not the ranks' own states beside it.

Under ``DistributedOptimizer`` a state has both. Where the optimizer stays plain, an older script saves a state on one
rank that a training with residuals cannot continue from, and there would never be an error. The same of a script that
calls a framework's saving on one rank alone: nothing waits for the others, so only later steps show that they save
nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from agmerge.checkpoint.rank_state import KINDS, LOST
from agmerge.engine.optimizer_wrapper import AnyReducer
from agmerge.errors import warn

NOT_SAVED = (
    "AGM403: The script saved optimizer.state_dict() without the rest of the state: {what}. A training that resumes "
    "from it starts with zero residuals. Also save compressed.state_dict() on every rank (or "
    "agmerge.gather_state(compressed) on rank 0, called on all ranks), and load it with compressed.load_state_dict(). "
    "See docs/checkpoints.md."
)
SAVED_ALONE = (
    "AGM140: {folder} was saved on {saved} only, so residuals of other ranks are missing: {missing} not written "
    "agmerge-{{rank}}-of-{size}.pt. A training that resumes from it starts them from zero. Save on all ranks, without "
    "an `if`: the framework writes the model on rank 0 only."
)
RESIDUALS = "the residuals of the ranks"
UPDATES = "with sync='updates', the optimizer state and residuals of each rank"

Look = Callable[[], Mapping[str, Any]]  # returns what fills SAVED_ALONE; nothing where the checkpoint lacks nothing


class _Seen:
    """States that a rank has saved since the optimizer stepped last."""

    def __init__(self) -> None:
        self.what = ""  # missing from the saved state of the plain optimizer; "": none was saved, or it has all
        self.whole = False  # ranks' own states were saved, or loaded, too
        self.said = self.said_alone = False
        self._look: Look | None = None  # at the checkpoint that was saved last
        self._look_at = 0  # the number of exchanges from which on it is called

    def saved(self, what: str) -> None:
        """Record a saved state of the plain optimizer, from which ``what`` is missing."""
        self.what = what

    def saved_whole(self) -> None:
        """Record that ranks' own states were saved, or loaded, too."""
        self.whole = True

    def saved_alone(self, look: Look, exchanges: int) -> None:
        """Record a checkpoint to be looked at once others must have saved theirs, too.

        ``exchanges``: made so far. Of the next two one may be under way; when
        both are over, all ranks have gone on with their scripts.
        """
        self._look, self._look_at = look, exchanges + 2

    def look(self, exchanges: int) -> None:
        """Look at a checkpoint, if it is time to, and warn once where others have not saved theirs."""
        if self._look is None or exchanges < self._look_at:
            return
        look, self._look = self._look, None
        lacks = {} if self.said_alone else look()
        if lacks:
            self.said_alone = True
            warn(SAVED_ALONE.format(**lacks), 0)

    def tell(self) -> None:
        """Warn, once, of a checkpoint without ranks' own states; forget the saved states."""
        what, whole, self.what, self.whole = self.what, self.whole, "", False
        if what and not whole and not self.said:
            self.said = True
            warn(NOT_SAVED.format(what=what), 0)


def watch(
    reducer: AnyReducer, optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[Callable[[], None], Callable[[Look], None], Callable[[], None]]:
    """Warn, on rank 0, of checkpoints with the state of ``optimizers`` alone; return three functions.

    The first is to be called when the state of ``reducer`` is saved, or loaded, too; the second with a function that
    returns, some steps later, what a checkpoint lacks; the third ends all this. The warning comes with the next step,
    for only then a checkpoint has all that it will have, or at the end of training.
    """
    seen, held = _Seen(), weakref.ref(reducer)  # the optimizer may live longer

    def saved(*_: Any) -> None:
        reducer = held()
        if reducer is not None and (reducer.exchange.group.comm is None or reducer.exchange.group.comm.rank == 0):
            seen.saved(_kept(reducer))

    def stepped(*_: Any) -> None:
        if seen.what or seen.whole:
            seen.tell()
        reducer = held()
        if reducer is not None:
            seen.look(reducer.exchange.agreed.steps)

    def look_later(look: Look) -> None:
        reducer = held()
        if reducer is not None:
            seen.saved_alone(look, reducer.exchange.agreed.steps)

    handles = [one.register_state_dict_post_hook(saved) for one in optimizers]
    handles += [one.register_step_pre_hook(stepped) for one in optimizers]
    at_the_end = weakref.finalize(reducer, seen.tell)

    def end() -> None:
        at_the_end()
        for handle in handles:
            handle.remove()

    return seen.saved_whole, look_later, end


def _kept(reducer: AnyReducer) -> str:
    """Return the state of a reducer that no optimizer's state has, in words; "" for none."""
    if not reducer.combines_gradients:
        return UPDATES if reducer.replica.steps else ""
    kinds = [kind for kind, plural in KINDS.items() if plural in LOST]
    kept = (tensor for (kind, _), tensor in reducer.exchange.agreed.current.tensors.items() if kind in kinds)
    return RESIDUALS if any(bool(tensor.any()) for tensor in kept) else ""
