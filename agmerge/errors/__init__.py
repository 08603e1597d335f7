# SPDX-License-Identifier: Apache-2.0
"""Errors of a step, and warnings. Mistakes in arguments are ``ValueError`` or ``TypeError`` instead.

* ``catalogue``: what each code means and what to do. Its data, by subject: ``problems_in_training``,
  ``problems_of_elastic`` and ``problems_of_settings``.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Sequence
from types import FrameType

from agmerge.errors.catalogue import code_in, command

TOO_MANY = (
    "AGM104: Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
    "backward_passes_per_step to accumulate gradients locally. Parameter {!r} got gradient number {}, but "
    "backward_passes_per_step is {}. Run backward passes of another loss inside `with optimizer.no_sync():`. Call "
    "zero_grad() to continue without this step."
)
CHANGED = (
    "AGM103: Step {}: the gradients of {} changed after backward(). agmerge already sent them, so the change would be "
    "lost; no step was made. {} If the model is in DistributedDataParallel, use "
    "agmerge.integrations.ddp.compress(model, optimizer=optimizer) instead."
)
SYNCHRONIZE = (
    "To clip by the norm, call optimizer.clip_grad_norm_(max_norm). To mask or scale gradients, or to clip them "
    "otherwise, call optimizer.synchronize() first, then step inside `with "
    "optimizer.skip_synchronize():`. To drop them, call optimizer.synchronize(), then optimizer.zero_grad()."
)
BETWEEN = "AGM111: {what} was called between backward() and step(). Call it after step()."
NO_SYNC_LATE = (
    "AGM109: backward() inside no_sync() came after the last backward() of this step, whose gradients were already "
    "sent. Accumulate first, and run the last backward() of a step outside no_sync(). After zero_grad(), training "
    "continues without this step."
)
TWICE = (
    "AGM105: optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). The "
    "gradients are averaged already, so step() uses them unchanged. To avoid this warning, step inside `with "
    "optimizer.skip_synchronize():`."
)
NOT_COMBINED = (
    "AGM110: step() inside skip_synchronize(): the gradients are not averaged yet. Call optimizer.synchronize() after "
    "the last backward(), or call step() outside skip_synchronize()."
)
DISTRIBUTED_DATA_PARALLEL = (
    "AGM107: The model is in DistributedDataParallel, which also averages gradients (for example {name!r}), so they "
    "would be exchanged twice. Pass the plain optimizer to agmerge.integrations.ddp.compress(model, "
    "optimizer=optimizer), or remove DistributedDataParallel. If you need only its forward, construct and train "
    "inside its no_sync()."
)
IN_BACKWARD = (
    "AGM106: Gradients are infinite or NaN: {where}. Parameters and residuals are unchanged and can be saved. "
    "DistributedDataParallel cannot continue after an error in its hook: restart from a checkpoint. If your script "
    "handles such gradients, pass nonfinite='skip'. For float16, pass scaler=."
)
OTHER_SHARDS = (
    "AGM402: The residuals are shards of other rows than this rank has now (exchange='two-level'), so they are reset "
    "to zero."
)
NO_GRADIENT = (
    "AGM112: No rank had a gradient for any parameter in this step. The optimizer may hold other parameters than the "
    "model: load_state_dict(assign=True) replaces the model's parameters. Create the optimizer after loading."
)

NO_SCRIPTS = ("agmerge", "torch", "weakref")  # packages: no warning points at a line of theirs

NAMED = 5  # most parameters that an error names
# Of ECMA-48: a control sequence, a string with its end (a window's title, say), a single escape.
_ESCAPES = re.compile(r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?|\x1b[ -~]")


def and_more(names: Sequence[str]) -> str:
    """Return the first of ``names``, quoted, and how many there are besides."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(map(repr, names[:NAMED])) + more


class AGMergeError(RuntimeError):
    """Base of every error that is not a mistake in an argument. Its text begins with its code.

    From Python 3.11 on, the command that explains the code is printed below the text.
    """

    def __init__(self, *given: object) -> None:
        super().__init__(*given)
        if self.code and sys.version_info >= (3, 11):
            self.add_note(command(self.code))

    @property
    def code(self) -> str:
        """The code in docs/errors.md, such as "AGM101": the first one in the text. Empty if there is none."""
        return code_in(str(self))


class RankMismatchError(AGMergeError):
    """Error: ranks differ in something that must be the same. Raised on all ranks."""


class NoAnswer(AGMergeError):
    """Error: a collective did not end, because a rank is missing from it.

    ``words`` is the text of the backend, ``missing`` the ranks that did not take part, as far as known.
    """

    call: str = ""  # the collective's name, such as "buffer 3"
    step: int | None = None  # committed exchanges so far; None outside of steps
    waited: float = 0.0  # seconds
    missing: tuple[int, ...] = ()  # the ranks that are not known to have come as far; empty if none is known
    advice: str = ""  # for the user, where there is any
    words: str = ""  # the backend's own, shortened

    def __init__(self, text: str = "", words: object = "", missing: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.words = shortened(str(words))
        self.missing = tuple(missing)

    def advise(self, advice: str) -> None:
        """Set the advice that :meth:`locate` adds to the text."""
        self.advice = advice

    def locate(
        self, call: str, step: int | None, waited: float, answers: str = "", missing: Sequence[int] | None = None
    ) -> None:
        """Add to the text the step of this rank, how long it waited, the answers of others, and the advice.

        ``call``: the collective. ``step``: None: outside of steps. ``waited``: seconds. ``answers``: those of the other
        ranks, and ``missing``: the ranks that have not come as far; None: they were not asked.
        """
        self.call, self.step, self.waited = call, step, waited
        if missing is not None:
            self.missing = tuple(missing)
        text = str(self)
        text += "" if step is None else f" (in step {step}, after {waited:.1f} s)"
        text += f". {answers}".rstrip(".") if answers else ""
        text += f". {self.advice}" if self.advice else ""
        self.args = (f"{text} ({self.words})" if self.words else text,)


class CollectiveTimeout(NoAnswer):
    """Error: a collective did not end within its timeout."""


class PeerLost(NoAnswer):
    """Error: another rank has failed or left, so that a collective can never end."""


class TooFewWorkers(AGMergeError):
    """Error: an elastic job had fewer workers than ``min_workers`` for longer than ``patience``."""


class MessageError(AGMergeError):
    """Error: a received message is damaged, or belongs to another step, plan or buffer."""


class NonFiniteError(AGMergeError):
    """Error: a gradient is infinite or NaN. Raised on all ranks.

    The step has no effect, and the next one works. ``where`` names the ranks and the parameters.
    """

    def __init__(self, text: str = "", where: str = "") -> None:
        super().__init__(text)
        self.where = where


class DivergenceError(AGMergeError):
    """Error: replicas are not bitwise identical."""


def shortened(words: str) -> str:
    """Return the first sentence of a library's error, without its place in the sources, guesses and advice."""
    words = re.sub(r"\[\S+\.(cc|cpp|h):\d+\] ?", "", words.strip())
    return re.split(r"\.\s|\n", words, maxsplit=1)[0][:300].rstrip(".")


def printable(text: str, most: int = 2000) -> str:
    """Return ``text`` from another process, as one line that does nothing to a terminal or a log.

    Escape sequences are left out, and runs of other characters that cannot be printed, such as newlines, become a
    space. ``most``: characters of the result.
    """
    text = _ESCAPES.sub("", text[: 2 * most])
    text = "".join(character if character.isprintable() else "\n" for character in text)
    return re.sub(r" *\n[ \n]*", " ", text).strip()[:most]


def warn(text: str, rank: int) -> None:
    """Warn on rank 0, at the script's line that has called this library, or torch, which calls its hooks.

    When the interpreter ends there is no such line, and the warning names none.

    Where warnings are errors (``python -W error``) it is raised on every rank: one that ended alone would keep the
    others waiting. So all ranks call this, each with its number ``rank``.
    """
    level = 2
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] in NO_SCRIPTS:
        level, frame = level + 1, frame.f_back
    if rank == 0 or _is_error(text, frame):
        warnings.warn(text, stacklevel=level)


def _is_error(text: str, frame: FrameType | None) -> bool:
    """Return whether the filters make an exception of this warning, which the line of ``frame`` causes."""
    module, at = ("sys", 1) if frame is None else (str(frame.f_globals.get("__name__", "<string>")), frame.f_lineno)
    for action, message, category, name, line in warnings.filters:
        about = message is None or re.compile(message).match(text)
        there = name is None or re.compile(name).match(module)
        if about and there and issubclass(UserWarning, category) and line in (0, at):
            return action == "error"
    return False
