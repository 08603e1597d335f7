# SPDX-License-Identifier: Apache-2.0
"""One training of a contender: by a real rank, or by all ranks in memory, with checkpoints that it resumes from."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import json
import statistics
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from agmerge import testing
from evidence import contenders, models, text
from evidence.contenders import DENSE
from evidence.models import AT_ONCE, CLIP, GPT, SIZES

POINTS, OF_A_POINT, AT_THE_END = 16, 1 << 13, 1 << 17  # of a curve; held-out tokens of each, of the final loss
ROWS = 32  # that are evaluated at once, at most
SENT = ("link_bytes", "link_bytes_dense")  # of stats(): by this training, and by uncompressed float32
EXPECTED = ("AGM705", "AGM707")  # warnings that a contender is named in spite of: its loss, its momentum


@dataclass(frozen=True)
class Training:
    """All that says which training it is. Equal ones have equal results."""

    size: str  # of SIZES
    contender: str  # of contenders.OPTIONS
    optimizer: str  # of OPTIMIZERS
    workers: int  # 1 for dense, whatever the number of workers
    tokens: int  # of training, of all workers together
    batch: int  # tokens of a step, of all workers together
    seed: int  # of weights and batches
    rate: float  # the highest learning rate

    @property
    def steps(self) -> int:
        """Return the number of steps."""
        return max(1, self.tokens // self.batch)

    @property
    def pair(self) -> Training:
        """Return dense training with the same seed and data, at the same rate."""
        return replace(self, contender=DENSE, workers=1)

    @property
    def name(self) -> str:
        """Return a short name that is unique, for files."""
        content = json.dumps(asdict(self), sort_keys=True).encode()
        return f"{self.contender}-{self.workers}-{self.seed}-{hashlib.sha256(content).hexdigest()[:10]}"


class Stopped(Exception):
    """End of a training that was asked to stop; its checkpoint is written."""


class Pauses:
    """Ends of steps, where the ranks of one process agree to write a checkpoint, or to stop."""

    def __init__(self, path: Path, ranks: int, every: float, stop: threading.Event) -> None:
        self._path, self._every, self._stop = path, every, stop
        self._last = time.monotonic()  # when a checkpoint was written
        self._due = self._stopping = False  # as all ranks have agreed at the end of this step
        self._parts: list[bytes] = [b""] * ranks  # what each rank keeps
        self._agreed = threading.Barrier(ranks, self._agree)
        self._complete = threading.Barrier(ranks, self._write)

    def at(self, rank: int, state: Callable[[], Any]) -> None:
        """Write a checkpoint of all ranks if one is due. Raises Stopped on all of them if the training is to stop.

        Args:
            rank: that has ended a step.
            state: returns what the rank keeps.
        """
        self._agreed.wait()
        if self._due:
            kept = io.BytesIO()
            torch.save(state(), kept)
            self._parts[rank] = kept.getvalue()
            self._complete.wait()
            if self._stopping:
                raise Stopped

    def leave(self) -> None:
        """Release the other ranks, because this one has failed."""
        self._agreed.abort()
        self._complete.abort()

    def _agree(self) -> None:
        self._stopping = self._stop.is_set()
        self._due = self._stopping or time.monotonic() - self._last >= self._every

    def _write(self) -> None:
        content = io.BytesIO()
        torch.save(self._parts, content)
        text.written(self._path, content.getvalue())
        self._last = time.monotonic()


def states_in(path: Path) -> list[Any] | None:
    """Return what each rank kept in a checkpoint; None: there is no file."""
    if not path.exists():
        return None
    parts = torch.load(path, weights_only=False)
    return [torch.load(io.BytesIO(part), weights_only=False) for part in parts]


def first_model(training: Training) -> GPT:
    """Return the model that all contenders with this seed begin with."""
    torch.manual_seed(training.seed)
    return GPT(SIZES[training.size])


@torch.no_grad()
def held_out_loss(model: GPT, tokens: torch.Tensor, context: int, amount: int) -> float:
    """Return the mean loss on rows that are spread evenly over the held-out part.

    Args:
        model: whose parameters are evaluated.
        tokens: the held-out part.
        context: tokens of a row.
        amount: tokens in all rows together, about.
    """
    starts = torch.linspace(0, len(tokens) - context - 1, max(1, amount // context)).long()
    device = model.tokens.weight.device
    parts = starts.split(ROWS)
    sums = [
        models.loss_of(model, text.windows(tokens, part, context + 1).to(device)).item() * len(part) for part in parts
    ]
    return sum(sums) / len(starts)


def train_rank(
    training: Training,
    corpus: text.Corpus,
    first: GPT,
    rank: int,
    *,
    device: str = "cpu",
    kept: Any = None,
    turn: AbstractContextManager[Any] | None = None,
    at_step_end: Callable[[Callable[[], Any]], None] = lambda state: None,
    on_progress: Callable[[int], None] = lambda step: None,
    **more: Any,
) -> dict[str, Any]:
    """Collective. Train as one of the ranks and return what it has found.

    Args:
        training: which one.
        corpus: its text.
        first: the model to begin with; a copy is trained.
        rank: of this worker, among ``training.workers``.
        device: where the model is.
        kept: of a checkpoint; None: begin.
        turn: is held during each forward and backward pass; None: ranks need not take turns.
        at_step_end: is called with a function that returns what a checkpoint keeps.
        on_progress: is called with the number of steps so far, first with those of ``kept``.
        more: arguments of the distributed optimizer beside the contender's.

    Returns:
        "loss" on held-out text and "curve" (pairs of tokens and loss) on rank 0, "seconds" of training, "digest" of the
        parameters, and "sent": bytes of all steps, by the names of ``SENT``.
    """
    size, steps, share = SIZES[training.size], training.steps, training.batch // SIZES[training.size].context
    model = copy.deepcopy(first).to(device)
    inner = models.optimizers_of(training.optimizer, model, training.rate)
    highest = [group["lr"] for one in inner for group in one.param_groups]
    whole = training.contender == DENSE
    optimizer = None if whole else contenders.wrapped(training.contender, inner, model, **more)
    begin, curve, seconds, before = 0, [], 0.0, dict.fromkeys(SENT, 0)
    if kept is not None:
        begin, curve, seconds, before = kept["step"], kept["curve"], kept["seconds"], kept["sent"]
        model.load_state_dict(kept["model"])
        for one, state in zip([optimizer] if optimizer else inner, kept["optimizers"], strict=True):
            one.load_state_dict(state)
    groups = [group for one in inner for group in one.param_groups]  # loading has replaced them

    def sent() -> dict[str, int]:  # an optimizer counts from its beginning, also if it has loaded a state
        now = optimizer.stats() if optimizer else dict.fromkeys(SENT, 0)
        return {name: before[name] + now[name] for name in SENT}

    data, held_out = corpus.part("train"), corpus.part("held_out")
    every = -(-steps // POINTS)
    on_progress(begin)
    for step in range(begin, steps):
        began = time.perf_counter()
        for group, rate in zip(groups, highest, strict=True):
            group["lr"] = rate * models.rate_factor(step, steps)
        source = torch.Generator().manual_seed(1_000_000 * training.seed + step)
        starts = torch.randint(0, len(data) - size.context - 1, (share,), generator=source)
        part = share // training.workers
        rows = text.windows(data, starts[rank * part : (rank + 1) * part], size.context + 1).to(device)
        for one in [optimizer] if optimizer else inner:
            one.zero_grad()
        with turn or contextlib.nullcontext():
            for piece in rows.split(max(1, AT_ONCE // size.context)) if whole else [rows]:
                (models.loss_of(model, piece) * (len(piece) / len(rows))).backward()
        if optimizer is None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            for one in inner:
                one.step()
        else:
            if training.contender not in contenders.CLIPS:
                optimizer.clip_grad_norm_(CLIP)
            optimizer.step()
        seconds += time.perf_counter() - began
        if rank == 0 and (step + 1) % every == 0:
            with optimizer.shared() if optimizer else contextlib.nullcontext():
                loss = held_out_loss(model, held_out, size.context, OF_A_POINT)
            curve.append(((step + 1) * training.batch, loss))
        done = step + 1

        def state(done: int = done, seconds: float = seconds) -> dict[str, Any]:
            states = [one.state_dict() for one in ([optimizer] if optimizer else inner)]
            progress = {"step": done, "curve": curve, "seconds": seconds, "sent": sent()}
            return {**progress, "model": model.state_dict(), "optimizers": states}

        if done < steps:
            at_step_end(state)
        on_progress(done)
    total = sent()
    if optimizer:
        optimizer.close()  # with updates the parameters are then the shared ones
    found = {"seconds": seconds, "digest": digest_of(model), "sent": total, "curve": curve}
    if rank == 0:
        found["loss"] = held_out_loss(model, held_out, size.context, AT_THE_END)
    return found


def digest_of(model: torch.nn.Module) -> str:
    """Return a hash of all parameters, bit for bit."""
    total = hashlib.sha256()
    for parameter in model.parameters():
        total.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]


def train_in_memory(
    training: Training,
    corpus: text.Corpus,
    checkpoint: Path,
    *,
    device: str = "cpu",
    seconds: float = 120.0,
    stop: threading.Event | None = None,
    on_progress: Callable[[int], None] = lambda step: None,
    **more: Any,
) -> dict[str, Any]:
    """Train all ranks in this process, from the checkpoint if there is one, and return the row of the table.

    Args:
        training: which one.
        corpus: its text.
        checkpoint: file that is written every ``seconds``, and removed at the end.
        device: where all ranks are.
        seconds: between checkpoints.
        stop: set from outside to write a checkpoint and raise.
        on_progress: is called with the number of steps so far.
        more: arguments of the distributed optimizer beside the contender's.

    Raises:
        Stopped: If ``stop`` was set.
        RuntimeError: If the parameters of ranks differ at the end.
    """
    first, kept = first_model(training), states_in(checkpoint)
    turn = threading.Lock()  # activations of one rank at a time
    pauses = Pauses(checkpoint, training.workers, seconds, stop or threading.Event())

    def work(rank: int) -> dict[str, Any]:
        try:
            return train_rank(
                training,
                corpus,
                first,
                rank,
                device=device,
                kept=None if kept is None else kept[rank],
                turn=turn,
                at_step_end=lambda state: pauses.at(rank, state),
                on_progress=on_progress if rank == 0 else lambda step: None,
                **more,
            )
        except BaseException:
            pauses.leave()
            raise

    with warnings.catch_warnings():
        for code in EXPECTED:
            warnings.filterwarnings("ignore", message=code)
        found = testing.run(training.workers, work, return_errors=True)
    errors = [one for one in found if isinstance(one, BaseException)]
    if errors:
        raise next((one for one in errors if isinstance(one, Stopped)), None) or next(
            (one for one in errors if not isinstance(one, threading.BrokenBarrierError)), errors[0]
        )
    if len({one["digest"] for one in found}) > 1:
        raise RuntimeError(f"{training}: the parameters of ranks differ at the end")
    checkpoint.unlink(missing_ok=True)
    return row_of(training, corpus, device, found)


def row_of(training: Training, corpus: text.Corpus, device: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of a training: what it was, its loss and its traffic per worker and step."""
    size = SIZES[training.size]
    inner = models.optimizers_of(training.optimizer, first_model(training), training.rate)
    options = contenders.options_of(training.contender, inner)
    steps = training.steps
    return {
        **asdict(training),
        "arguments": contenders.told(training.contender, options),
        "parameters": size.parameters,
        "steps": steps,
        "batch_tokens": training.batch,
        "loss": found[0]["loss"],
        "curve": found[0]["curve"],
        "digest": found[0]["digest"],
        "bytes_per_step": statistics.fmean(one["sent"]["link_bytes"] for one in found) / steps,
        "dense_bytes_per_step": statistics.fmean(one["sent"]["link_bytes_dense"] for one in found) / steps,
        "seconds": found[0]["seconds"],
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else "cpu",
        "data_digest": corpus.digest,
        "version": contenders.agmerge.__version__,
    }
