# SPDX-License-Identifier: Apache-2.0
"""What hangs, crashes or is silently wrong with Horovod: ``python hanging_beside_horovod.py FOLDER SCENARIO...``.

A scenario is a function that makes attempts. Each runs in a thread of its own, under a deadline: one that is stuck
by then stays behind, and the rank goes on with other names.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import agmerge

sys.path.insert(0, str(Path(__file__).parent.parent))
from support import CLASSES, WIDTH, Parts, batch, digest, mlp, seeded, sgd, train, wrap  # noqa: E402

if any(name.startswith("horovod") for name in sys.argv[2:]):  # the others run without, too
    import horovod.torch as hvd

PATIENCE = 3.0  # seconds, where ranks cannot meet; what they can do takes milliseconds, and a control shows it
ENOUGH = 30.0  # for everything else, on a machine that is busy
TIMEOUT = 5.0  # of our optimizers: what ends a wait for a rank that never answers
SHORT = 2.0  # the same, where it is known to be needed
STEPS = 3


class Told:
    """What the attempts of a scenario came to on this rank: ``[outcome, seconds]`` by label, kept in a file."""

    def __init__(self, file: Path) -> None:
        self._file, self._found = file, dict[str, list[Any]]()

    def attempt(self, label: str, body: Callable[[], Any], patience: float = ENOUGH) -> None:
        """Run ``body``; the outcome is what it returns, its error, or ``stuck in`` a function."""
        begin, outcomes = time.monotonic(), list[Any]()

        def run() -> None:
            try:
                outcomes.append(body())
            except Exception as error:
                outcomes.append(f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(patience)
        if not outcomes:
            assert thread.ident is not None
            outcomes.append(f"stuck in {_innermost(thread.ident)}")
        self._note(label, outcomes[0], begin)

    def _note(self, label: str, outcome: Any, begin: float) -> None:
        self._found[label] = [outcome, time.monotonic() - begin]
        self._file.write_text(json.dumps(self._found))


def _innermost(thread: int) -> str:
    code = sys._current_frames()[thread].f_code
    return f"{Path(code.co_filename).name}: {code.co_name}"


def everybody(of: Callable[[int], list[Tensor | None]]) -> list[Tensor]:
    """The mean over both ranks of what ``of(rank)`` gives; None counts as zero. Each rank computes all of it."""
    pairs = ([gradient for gradient in pair if gradient is not None] for pair in zip(of(0), of(1), strict=True))
    return [sum(given[1:], start=given[0]) / 2 for given in pairs]


def gradients_of(model: nn.Module, loss: Callable[[nn.Module, int], Tensor], rank: int) -> list[Tensor | None]:
    """The gradients that ``rank`` alone would have."""
    model = copy.deepcopy(model)
    model.zero_grad()
    loss(model, rank).backward()
    return [parameter.grad for parameter in model.parameters()]


def error_of(model: nn.Module, expected: list[Tensor]) -> float:
    """The largest difference of a gradient from what it should be."""
    pairs = zip(model.parameters(), expected, strict=True)
    return max(float((parameter.grad - right).abs().max()) for parameter, right in pairs)


def update(model: nn.Module, optimizers: list[agmerge.DistributedOptimizer], expected: list[Tensor]) -> float:
    """A step with what ``backward`` has left; returns :func:`error_of` the combined gradients."""
    for optimizer in optimizers:
        optimizer.synchronize()
    error = error_of(model, expected)
    for optimizer in optimizers:
        with optimizer.skip_synchronize():
            optimizer.step()
    return error


# -- finding 2: one rank sends dense, the other sparse ----------------------------------------------------------


class Words(nn.Module):
    """An embedding, whose gradient may have sparse layout, and a head."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH, sparse=sparse)
        self.head = nn.Linear(WIDTH, CLASSES)

    def loss(self, rank: int, step: int) -> Tensor:
        """On words that rank and step decide."""
        classes = batch(rank, step)[1]
        return F.cross_entropy(self.head(self.embedding(classes + 10 * rank)), classes)


def horovods(model: nn.Module, title: str, **options: Any) -> Any:
    """Horovod's optimizer, with names of its own: Horovod keeps what waits and what it has cached by name."""
    named = [(f"{title}.{name}", parameter) for name, parameter in model.named_parameters()]
    return hvd.DistributedOptimizer(sgd(model, momentum=0.0), named, **options)


def words_step(model: Words, optimizer: Any, rank: int, step: int) -> str:
    """One plain step."""
    optimizer.zero_grad()
    model.loss(rank, step).backward()
    optimizer.step()
    return "done"


def horovod_kinds(told: Told) -> None:
    """The calls themselves, by one name."""
    told.attempt("same", lambda: hvd.allreduce(torch.ones(4), name="gradient").tolist())
    call = hvd.allreduce if hvd.rank() == 0 else hvd.allgather
    told.attempt("different", lambda: call(torch.ones(4), name="gradient").tolist(), PATIENCE)


def horovod_layouts(told: Told) -> None:
    """Horovod's optimizer, which sends a gradient of sparse layout by all-gathers unless it is told otherwise."""
    for label, as_dense in (("told", True), ("not told", False)):
        model = seeded(lambda: Words(sparse=hvd.rank() == 1), 3)
        optimizer = horovods(model, label, sparse_as_dense=as_dense)
        patience = ENOUGH if as_dense else PATIENCE
        told.attempt(label, lambda m=model, o=optimizer: words_step(m, o, hvd.rank(), 0), patience)


def agmerge_kinds(told: Told) -> None:
    """Every way to decide by rank: at construction, and with a rule that changes its mind later."""
    first = agmerge.rank() == 0

    def attempt(label: str, build: Callable[[], nn.Module], **options: Any) -> None:
        model = seeded(build, 1)
        told.attempt(label, lambda: wrap(model, timeout=TIMEOUT, **options).stats())

    attempt("compression", mlp, compression="none" if first else "topk")
    attempt("sparse_as_dense", lambda: Words(sparse=True), sparse_as_dense=first)
    attempt("dense", mlp, dense=lambda name, parameter: first and name == "2.weight")
    told.attempt("at a later agreement", _changed_rule)


def _changed_rule() -> None:
    model, rule = seeded(mlp, 2), {"dense": False}
    model[0].requires_grad_(False)
    optimizer = wrap(model, dense=lambda name, _: rule["dense"] or name.endswith("bias"), timeout=TIMEOUT)
    for step in range(STEPS):
        if step == 1:
            rule["dense"] = agmerge.rank() == 1  # heeded at the next agreement
        if step == 2:
            model[0].requires_grad_(True)
        train(model, optimizer, agmerge.rank(), [step])


def agmerge_layouts(told: Told) -> None:
    """The layout of one gradient differs by rank, which nobody can know before it is there."""
    rank = agmerge.rank()
    for label, as_dense in (("told", True), ("not told", False)):
        model = seeded(lambda: Words(sparse=rank == 1), 3)
        timeout = TIMEOUT if as_dense else SHORT
        optimizer = wrap(model, compression="none", sparse_as_dense=as_dense, timeout=timeout)

        def body(model: Words = model, optimizer: Any = optimizer) -> float:
            dense = copy.deepcopy(model)
            dense.embedding.sparse = False
            expected = everybody(lambda r: gradients_of(dense, lambda m, r: m.loss(r, 0), r))
            model.loss(rank, 0).backward()
            optimizer.synchronize()
            return error_of(model, expected)

        told.attempt(label, body)
    if rank == 1:
        time.sleep(SHORT + 1)  # its own error came at once; rank 0 waits for a process that lives on


# -- finding 3: gradients that are ready in another order on each rank ------------------------------------------


class Branches(nn.Module):
    """Two branches of one shape. Backward reaches first the branch that forward took last; sums are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def loss(self, rank: int, step: int, order: str) -> Tensor:
        """``order``: of the branches in forward."""
        x, y = batch(rank, step)
        taken = {name: torch.tanh(getattr(self, name)(x)) for name in order}
        return F.cross_entropy(self.head(taken["a"] + taken["b"]), y)


def horovod_order(told: Told) -> None:
    """As GRACE does: from each hook, all-gathers of values and of indices; here of every element."""
    opposite = "ab" if hvd.rank() == 0 else "ba"
    told.attempt("same order", lambda: _gathered(0, "ab", named=False))
    told.attempt("opposite order", lambda: _gathered(1, opposite, named=False))
    told.attempt("opposite order, named", lambda: _gathered(2, opposite, named=True))


def _gathered(step: int, order: str, *, named: bool) -> dict[str, Any]:
    model, handles, ready = seeded(Branches, 4), dict[Tensor, list[int]](), list[str]()
    expected = everybody(lambda rank: gradients_of(model, lambda m, r: m.loss(r, step, "ab"), rank))

    def send(name: str, parameter: Tensor) -> None:
        ready.append(name)
        indices = parameter.grad.flatten().abs().argsort(descending=True)
        values = parameter.grad.flatten()[indices]
        handles[parameter] = [
            hvd.allgather_async(tensor, name=f"{step}.{name}.{what}" if named else None)
            for what, tensor in (("values", values), ("indices", indices))
        ]

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: send(name, p))
    model.loss(hvd.rank(), step, order).backward()
    for parameter, pair in handles.items():
        values, indices = (hvd.synchronize(handle) for handle in pair)
        total = torch.zeros(parameter.numel()).index_add_(0, indices, values)
        parameter.grad = (total / hvd.size()).view_as(parameter)
    return {"error": error_of(model, expected), "ready": ready}


def agmerge_order(told: Told) -> None:
    """Ours, at density 1: a message a tensor, and an optimizer a branch."""
    opposite = "ab" if agmerge.rank() == 0 else "ba"
    told.attempt("same order", lambda: _ours_in(["ab"] * STEPS))
    told.attempt("opposite order", lambda: _ours_in([opposite] * STEPS))
    told.attempt("opposite order after the first step", lambda: _ours_in(["ab"] + [opposite] * (STEPS - 1)))
    told.attempt("opposite order, two optimizers", lambda: _ours_in([opposite] * STEPS, split=True))


def _ours_in(orders: list[str], split: bool = False) -> dict[str, Any]:
    model, ready, worst, seen = seeded(Branches, 4), list[str](), 0.0, list[str]()
    named = list(model.named_parameters())
    parts = [named[:2], named[2:]] if split else [named]
    optimizers = [
        agmerge.DistributedOptimizer(
            torch.optim.SGD([parameter for _, parameter in part], lr=0.1, momentum=0.9),
            part,
            **{"compression": "topk", "density": 1.0, "merging": "layerwise", "timeout": TIMEOUT},
        )
        for part in parts
    ]
    for step, order in enumerate(orders):
        expected = everybody(lambda rank, s=step: gradients_of(model, lambda m, r: m.loss(r, s, "ab"), rank))
        model.zero_grad()
        hooks = [p.register_post_accumulate_grad_hook(lambda p, name=name: ready.append(name)) for name, p in named]
        model.loss(agmerge.rank(), step, order).backward()
        for hook in hooks:
            hook.remove()
        worst = max(worst, update(model, optimizers, expected))
        seen.append(digest(model))
    buffers = sum(optimizer.stats()["buffers"] for optimizer in optimizers)
    return {"error": worst, "ready": ready, "digests": seen, "buffers": buffers}


# -- finding 4: a tensor of a merge buffer that one rank does not use -------------------------------------------


def used_by(rank: int) -> str:
    """The layers of ``Parts`` that ``rank`` uses."""
    return "ab" if rank == 0 else "a"


def horovod_group(told: Told) -> None:
    """Horovod's ``groups=`` with all parameters in one."""
    model = seeded(Parts, 5)
    optimizer = horovods(model, "group", groups=[list(model.parameters())])

    def step(number: int, use: str) -> str:
        optimizer.zero_grad()
        model.loss(hvd.rank(), number, use).backward()
        optimizer.step()
        return "done"

    told.attempt("used by all", lambda: step(0, "ab"))
    told.attempt("used by one", lambda: step(1, used_by(hvd.rank())), PATIENCE)


def agmerge_group(told: Told) -> None:
    """One merge buffer by either argument, compressed or not."""
    for compression in ("none", "topk"):
        told.attempt(f"merging, {compression}", lambda c=compression: _unused(compression=c, merging="single"))
        told.attempt(f"groups, {compression}", lambda c=compression: _unused(grouped=True, compression=c))


def _unused(grouped: bool = False, **options: Any) -> dict[str, Any]:
    model, worst, seen = seeded(Parts, 5), 0.0, list[str]()
    if grouped:
        options["groups"] = [list(model.parameters())]
    optimizer = wrap(model, density=1.0, timeout=TIMEOUT, **options)
    for step in range(STEPS):
        # The first step too: the plan is then agreed on by ranks of which one has not seen all tensors.
        expected = everybody(lambda rank, s=step: gradients_of(model, lambda m, r: m.loss(r, s, used_by(r)), rank))
        optimizer.zero_grad()
        model.loss(agmerge.rank(), step, used_by(agmerge.rank())).backward()
        worst = max(worst, update(model, [optimizer], expected))
        seen.append(digest(model))
    return {"error": worst, "digests": seen, "buffers": optimizer.stats()["buffers"]}


# -- finding 11: a rank that has less data ----------------------------------------------------------------------


def horovod_join(told: Told) -> None:
    """Rank 0 joins a step before rank 1: with all-reduces alone, and with an embedding's all-gathers."""
    for label, sparse, patience in (("all-reduce", False, ENOUGH), ("all-gather", True, PATIENCE)):
        model = seeded(lambda sparse=sparse: Words(sparse=sparse), 6)
        optimizer = horovods(model, label)

        def common(model: Words = model, optimizer: Any = optimizer) -> str:
            for step in range(STEPS - 1):
                words_step(model, optimizer, hvd.rank(), step)
            return "done"

        def uneven(model: Words = model, optimizer: Any = optimizer) -> str:
            if hvd.rank() == 1:
                words_step(model, optimizer, 1, STEPS - 1)
            return f"rank {hvd.join()} was last"

        told.attempt(f"{label}, common", common)
        told.attempt(f"{label}, uneven", uneven, patience)
    if hvd.rank() == 0:
        time.sleep(PATIENCE)  # mpirun would end the other rank with this one


def agmerge_join(told: Told) -> None:
    """Rank 0 joins a step before rank 1, with all-gathers; going on is possible."""
    model = seeded(mlp, 7)
    optimizer = wrap(model, timeout=TIMEOUT)
    told.attempt("before", lambda: train(model, optimizer, agmerge.rank(), range(STEPS + agmerge.rank())))
    told.attempt("join", lambda: f"rank {optimizer.join()} was last")
    told.attempt("after", lambda: train(model, optimizer, agmerge.rank(), range(STEPS)))


def leaving_by_exit(told: Told) -> None:
    """Rank 1 has a batch less; its script ends, without a word, while rank 0 waits."""
    _uneven(told, rest=0.0)


def leaving_by_shutdown(told: Told) -> None:
    """Rank 1 has a batch less, says ``agmerge.shutdown()``, and its process lives on for a while."""
    _uneven(told, rest=TIMEOUT + 1)


def _uneven(told: Told, rest: float) -> None:
    rank = agmerge.rank()
    pairs = [(model, wrap(model, timeout=TIMEOUT)) for model in (seeded(mlp, 8), seeded(mlp, 9))]
    told.attempt("common", lambda: [train(*pair, rank, range(STEPS - 1)) for pair in pairs])
    if rank == 0:
        told.attempt("waiting", lambda: train(*pairs[0], rank, [STEPS]))
        told.attempt("afterwards", lambda: train(*pairs[1], rank, [STEPS]))  # rank 1 is gone by then
    else:
        time.sleep(1)
        if rest:
            agmerge.shutdown()
            time.sleep(rest)


def main(folder: Path, names: list[str]) -> None:
    """The scenarios in order."""
    sgd(nn.Linear(1, 1))  # the first optimizer imports much; on a busy machine that alone may outlast TIMEOUT
    for name in names:
        theirs = name.startswith("horovod")
        hvd.init() if theirs else agmerge.init()
        rank = hvd.rank() if theirs else agmerge.rank()
        globals()[name](Told(folder / f"{name}.{rank}.json"))
    if names[-1].startswith("horovod"):
        time.sleep(1)  # the other rank's deadline; it would take the end of this one for an answer
        os._exit(0)  # past the threads that are stuck


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
