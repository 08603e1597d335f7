# SPDX-License-Identifier: Apache-2.0
"""What scripts decide between backward() and step() under ddp.compress(): throw gradients away, add passes up, skip."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from support import digest
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import agmerge
from agmerge.integrations import ddp

STEPS = 6
HALF = 16  # of the outputs
COMPRESSORS: dict[str, dict[str, Any]] = {
    "none": {"compression": "none"},
    "default": {},
    "topk": {"compression": "topk", "density": 0.1, "exchange": "sparse"},
    "dgc": {"compression": "dgc", "density": 0.1, "exchange": "sparse"},
    "onebit": {"compression": "onebit"},
    "powersgd": {"compression": "powersgd", "rank": 2},
}
MODELS: dict[str, dict[str, Any]] = {
    "copies": {"bucket_cap_mb": 0.005},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
}
Step = Callable[[Any, torch.optim.Optimizer, int], None]


def outputs(model: nn.Module, step: int) -> Tensor:
    """Those of this rank's batch."""
    seed = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return model(torch.randn(8, 32, generator=seed))  # type: ignore[no-any-return]


def own_loss(model: nn.Module, step: int) -> Tensor:
    """A loss of the first half of the outputs."""
    return outputs(model, step)[:, :HALF].square().mean()


def plain(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    """A step."""
    optimizer.zero_grad()
    own_loss(model, step).backward()
    optimizer.step()


def other_loss(to_none: bool) -> Step:
    """A step, and a pass for another model, which leaves gradients behind that are thrown away."""

    def stepped(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
        plain(model, optimizer, step)
        outputs(model, step)[:, HALF:].sum().backward()
        optimizer.zero_grad(set_to_none=to_none)

    return stepped


def left_out(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    """A step that is left out, of two passes that add up, and one that is not."""
    optimizer.zero_grad()
    for _ in range(2):
        outputs(model, step + 100).sum().backward()
    plain(model, optimizer, step)


def sharpness_aware(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Two passes and a step: the first pass only says where the second one is made."""
    optimizer.zero_grad()
    outputs(model, step).sum().backward()
    moves = [(p, 0.01 * p.grad.sign()) for p in model.parameters()]
    with torch.no_grad():
        for p, move in moves:
            p.add_(move)
    optimizer.zero_grad()
    own_loss(model, step).backward()
    with torch.no_grad():
        for p, move in moves:
            p.sub_(move)
    optimizer.step()


def train(
    one_step: Step, compressor: str | None, model: str, *, momentum: float = 0.9, given: bool = True
) -> tuple[str, float]:
    """Bits in the end, and how far the weights have moved that the own loss does not have."""
    torch.manual_seed(0)
    net = nn.Linear(32, 2 * HALF, bias=False)
    before = net.weight.detach().clone()
    parallel = DistributedDataParallel(net, **MODELS[model])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=momentum)
    if compressor is not None:
        named = {"optimizer": optimizer} if given else {}
        compressed = ddp.compress(parallel, check_every=2, **named, **COMPRESSORS[compressor])
    for step in range(STEPS):
        one_step(parallel, optimizer, step)
    if compressor is not None:
        compressed.close()
    return digest(net), float((net.weight.detach() - before)[HALF:].abs().max())


def decided() -> dict[str, Any]:
    """Whether thrown gradients leave no trace: in bits of a training without them, and in weights without a loss."""
    found: dict[str, Any] = {"moved": {}, "bits": {}, "plain": {}}
    ways: dict[str, Step] = {"none": other_loss(True), "zero": other_loss(False), "left out": left_out}
    models = ["copies", "views", "static", "unused"]
    for number, name in enumerate(COMPRESSORS):
        for way, one_step in ways.items():
            if (name, way) == ("dgc", "left out"):
                continue  # passes that add up to a velocity are refused
            if name in ("default", "powersgd") and way != "none":
                continue
            model = models[(number + len(found["moved"])) % len(models)]
            bits, moved = train(one_step, name, model, given=name != "topk")
            found["moved"][f"{name}, {way}, {model}"] = moved
            if name in ("topk", "onebit") or (name, way) == ("dgc", "none"):
                found["bits"][f"{name}, {way}, {model}"] = bits == train(plain, name, model)[0]
            elif name == "none":
                found["plain"][f"{way}, {model}"] = bits == train(one_step, None, model)[0]
        if name in ("topk", "dgc", "powersgd"):
            found["moved"][f"{name}, sharpness"] = train(sharpness_aware, name, "views", momentum=0.0)[1]
    return found


def added_up() -> dict[str, Any]:
    """Passes that add up without no_sync(): what is conserved, with residuals; and what is said of a velocity."""
    found: dict[str, Any] = {}
    for views in (False, True):
        torch.manual_seed(0)
        net, twin = (nn.Linear(32, 32) for _ in range(2))
        twin.load_state_dict(net.state_dict())
        model = DistributedDataParallel(net, gradient_as_bucket_view=views)
        still = torch.optim.SGD(net.parameters(), lr=0.0)
        compressed = ddp.compress(model, **COMPRESSORS["topk"])
        given, applied = torch.zeros(32, 32, dtype=torch.float64), torch.zeros(32, 32, dtype=torch.float64)
        for step in range(STEPS):
            still.zero_grad(set_to_none=step % 2 == 0)
            for part in range(3):
                twin.zero_grad()
                for one in (twin, model):
                    outputs(one, 10 * step + part).square().mean().backward()
                if step % 3:
                    given += twin.weight.grad.double()
            if step % 3:  # else it is left out
                applied += net.weight.grad.double()
                still.step()
        kept = compressed.state_dict()["agmerge"]["residuals"]["weight"].double()
        found[f"worst, {views}"] = float((agmerge.allreduce(given - kept) - applied).abs().max())
        found[f"kept, {views}"] = float(kept.abs().max())
        compressed.close()
    try:
        train(left_out, "dgc", "copies")
    except agmerge.AGMergeError as error:
        found["velocity"] = str(error)
    return found


def repaired() -> dict[str, list[bool]]:
    """With ``nonfinite="skip"`` and no scaler: bits of plain DistributedDataParallel where scripts repair, or skip.

    And whether ranks are equal, and one element of a gradient was infinite, with compressors.
    """

    def run(repairs: bool, **options: Any) -> tuple[str, int]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
        model, optimizer = DistributedDataParallel(net), torch.optim.SGD(net.parameters(), lr=0.1)
        if options:
            ddp.compress(model, optimizer=optimizer, nonfinite="skip", merging="single", **options)
        bad = 0
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = outputs(model, step).square().mean()
            if step == 2 and dist.get_rank() == 1:
                loss = loss + net[0].weight[0, 0] * float("inf")
            loss.backward()
            bad += sum(int((~p.grad.isfinite()).sum()) for p in net.parameters())
            for p in net.parameters() if repairs else ():
                torch.nan_to_num_(p.grad, 0.0, 0.01, -0.01)
            if all(p.grad.isfinite().all() for p in net.parameters()):
                optimizer.step()
        return digest(net), bad

    found = {}
    for repairs in (False, True):
        theirs = run(repairs)
        others = [run(repairs, compression=name) for name in ("topk", "int8")]
        alike = [bad == 1 and len(_everywhere(bits)) == 1 for bits, bad in others]
        found[f"repairs {repairs}"] = [run(repairs, compression="none") == theirs, *alike]
    return found


def _everywhere(bits: str) -> set[str]:
    """The digests of all ranks."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, bits)
    return set(every)


def said_of(stepped: Callable[[], None]) -> list[str]:
    """The error of a training, or its warnings on rank 0."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            stepped()
        except agmerge.AGMergeError as error:
            return [str(error)]
    return [str(one.message) for one in caught]


def averaged() -> dict[str, list[str]]:
    """What is said where an optimizer steps with gradients that the model has not averaged, and where it may."""

    def made(**options: Any) -> tuple[nn.Sequential, DistributedDataParallel, torch.optim.Optimizer]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model = DistributedDataParallel(net, **options)
        ddp.compress(model, optimizer=optimizer, compression="none")
        return net, model, optimizer

    def steps(forward: Any, optimizer: torch.optim.Optimizer, count: int = 2) -> None:
        for step in range(count):
            optimizer.zero_grad()
            outputs(forward, step).square().mean().backward()
            optimizer.step()

    def replaced() -> None:
        net, model, optimizer = made(find_unused_parameters=True)
        steps(model, optimizer)
        net[1] = nn.Linear(32, 8)
        optimizer.add_param_group({"params": list(net[1].parameters())})
        steps(model, optimizer)

    def past() -> None:
        _, model, optimizer = made()
        steps(model, optimizer)
        steps(model.module, optimizer, 3)

    def anew(*, again: bool) -> Callable[[], None]:
        def stepped() -> None:
            net, first, optimizer = made()
            steps(first, optimizer)
            second = DistributedDataParallel(net)
            if again:
                ddp.compress(second, optimizer=optimizer, compression="none")
            steps(second, optimizer, 3)

        return stepped

    def two_models() -> None:
        first, second = made()[1], made()[1]
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
        steps(nn.Sequential(first, second), optimizer)
        optimizer.step()  # once more, with the same gradients

    def on_each_rank() -> None:
        _, model, optimizer = made()
        own = nn.Linear(32, 32)
        optimizer.add_param_group({"params": list(own.parameters())})
        steps(nn.Sequential(model, own), optimizer)

    def ignored() -> None:
        net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["1.weight", "1.bias"])
        model, optimizer = DistributedDataParallel(net), torch.optim.SGD(net.parameters(), lr=0.1)
        ddp.compress(model, optimizer=optimizer, compression="none")
        steps(model, optimizer)

    tried = {
        "replaced": replaced,
        "past": past,
        "anew": anew(again=False),
        "again": anew(again=True),
        "two models": two_models,
        "on each rank": on_each_rank,
        "ignored": ignored,
    }
    return {name: said_of(stepped) for name, stepped in tried.items()}
