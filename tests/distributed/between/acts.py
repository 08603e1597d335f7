# SPDX-License-Identifier: Apache-2.0
"""Acts: what a script may do to its own tensors between two steps, each as hooks of a short training.

A training calls ``before`` a step's forward pass, ``between`` its backward pass and the optimizer's step, and ``after``
the step; ``loss`` replaces the step's loss. `Script.check` notes a fact that has to hold on every road.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, CLASSES, BATCH, STEPS = 64, 10, 8, 8
LEFT = 0.05  # the bound of `clamp`


def network() -> nn.Sequential:
    """Return three layers; the two large matrices are compressed, the rest travels dense. Equal on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)
    )


def samples(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return inputs and labels of one worker's batch: float32[BATCH, WIDTH], int64[BATCH]."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(BATCH, WIDTH, generator=generator)
    return x, x[:, :CLASSES].argmax(1)


@dataclass
class Script:
    """State of one training, as its script sees it."""

    net: nn.Sequential
    rank: int
    optimizer: Any = None  # what the script steps with
    model: Any = None  # what the script calls: the network, or DistributedDataParallel around it
    step: int = 0
    facts: dict[str, bool] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)  # an act's own

    def check(self, fact: str, holds: bool) -> None:
        """Note that ``fact`` holds; once False it stays so."""
        self.facts[fact] = self.facts.get(fact, True) and bool(holds)

    def loss(self, forward: Callable[[Tensor], Tensor] | None = None, offset: int = 0) -> Tensor:
        """Return the loss of this step's batch, of ``forward`` or of the model."""
        x, y = samples(self.step + offset, self.rank)
        return F.cross_entropy((forward or self.model)(x), y)


class Act:
    """Act that does nothing: the training itself."""

    find_unused = False  # DistributedDataParallel's find_unused_parameters
    touches_gradients = False  # `between` reads or writes gradients
    drifts = False  # in plain DistributedDataParallel replicas drift apart, or it ends in an error of torch's
    harmless = False  # parameters move as if nothing had been done

    def start(self, script: Script) -> None:
        """Act before the model is wrapped and the optimizer is made."""

    def before(self, script: Script) -> None:
        """Act before the forward pass."""

    def loss(self, script: Script) -> Tensor:
        """Return the loss."""
        return script.loss()

    def between(self, script: Script) -> None:
        """Act when the backward pass has ended."""

    def skips(self, script: Script) -> bool:
        """Return whether the optimizer does not step; only loops that a script writes ask."""
        return False

    def after(self, script: Script) -> None:
        """Act when the optimizer has stepped."""

    def end(self, script: Script) -> None:
        """Act when the last step is over."""


ACTS: dict[str, type[Act]] = {}


def act(kind: type[Act]) -> type[Act]:
    """Add an act to the table, by its class's name in words."""
    ACTS["".join(f" {c.lower()}" if c.isupper() else c for c in kind.__name__).strip()] = kind
    return kind


def parameters(script: Script) -> list[nn.Parameter]:
    return list(script.net.parameters())


def evaluated(net: nn.Module) -> Tensor:
    """Return outputs for a fixed batch, in evaluation mode and without gradients."""
    net.eval()
    with torch.no_grad():
        out: Tensor = net(samples(99, 0)[0])
    net.train()
    return out


def put(script: Script, module: nn.Module, name: str, new: nn.Parameter) -> None:
    """Put ``new`` into a module and the optimizer in place of a parameter, with its state."""
    old = getattr(module, name)
    setattr(module, name, new)
    for group in script.optimizer.param_groups:
        group["params"] = [new if p is old else p for p in group["params"]]
    state = script.optimizer.state.pop(old, None)
    if state is not None:
        for key, value in state.items():
            if torch.is_tensor(value) and value.shape == old.shape and old.shape != new.shape:
                grown = torch.zeros_like(new)
                grown[: len(value)] = value
                state[key] = grown
        script.optimizer.state[new] = state


@act
class Nothing(Act):
    """The training itself."""


@act
class SwapWeights(Act):
    """Evaluate and save an average of weights that is copied into the model, then restore (EMA, best weights)."""

    harmless = True
    in_place = True

    def after(self, script: Script) -> None:
        average = script.kept.setdefault("average", [p.detach().clone() for p in parameters(script)])
        if script.step not in (3, 5):
            return
        other = network()
        with torch.no_grad():
            for p, value in zip(other.parameters(), average, strict=True):
                p.copy_(value)
        own = [p.detach().clone() for p in parameters(script)]
        self._write(script, average)
        script.check("evaluated are the weights put in", torch.equal(evaluated(script.net), evaluated(other)))
        saved = list(script.net.state_dict().values())
        script.check("saved are the weights put in", all(map(torch.equal, saved, average)))
        self._write(script, own)
        script.check("restored", all(map(torch.equal, parameters(script), own)))

    def _write(self, script: Script, values: list[Tensor]) -> None:
        with torch.no_grad():
            for p, value in zip(parameters(script), values, strict=True):
                if self.in_place:
                    p.copy_(value)
                else:
                    p.data = value.clone()


@act
class SwapWeightsByData(SwapWeights):
    """The same, by ``p.data = ...``."""

    in_place = False


@act
class Clamp(Act):
    """Clip weights after each step (WGAN, a logit scale)."""

    def after(self, script: Script) -> None:
        with torch.no_grad():
            for p in parameters(script):
                p.clamp_(-LEFT, LEFT)

    def end(self, script: Script) -> None:
        script.check("bounded", all(float(p.detach().abs().max()) <= LEFT + 1e-6 for p in parameters(script)))


@act
class ReplaceSameShape(Act):
    """Put a parameter of the same shape in the place of another one."""

    drifts = True
    when = (3,)

    def after(self, script: Script) -> None:
        if script.step in self.when:
            put(script, script.net[2], "weight", nn.Parameter(script.net[2].weight.detach().clone()))


@act
class ReplaceTenTimes(ReplaceSameShape):
    """Do so after every step."""

    when = tuple(range(STEPS))


@act
class ReplaceLonger(Act):
    """Put a longer parameter in the place of another one: more classes."""

    drifts = True

    def after(self, script: Script) -> None:
        if script.step in (2, 4):
            head = script.net[4]
            for name in ("weight", "bias"):
                value = getattr(head, name).detach()
                put(script, head, name, nn.Parameter(torch.cat([value, torch.zeros_like(value[:2])])))


@act
class ToggleRequiresGrad(Act):
    """Switch gradients of a layer off for a step and on again, in turns."""

    find_unused = True

    def before(self, script: Script) -> None:
        script.net[0].requires_grad_(script.step % 2 == 0)
        script.kept["was"] = script.net[0].weight.detach().clone()

    def after(self, script: Script) -> None:
        if script.step % 2:
            script.check("a layer without gradients rests", torch.equal(script.kept["was"], script.net[0].weight))
        script.net[0].requires_grad_(True)


@act
class Freeze(Act):
    """Freeze a layer for good, in the middle."""

    find_unused = True

    def after(self, script: Script) -> None:
        if script.step == 3:
            script.net[0].requires_grad_(False)
            script.net[0].weight.grad = script.net[0].bias.grad = None
            script.kept["was"] = script.net[0].weight.detach().clone()

    def end(self, script: Script) -> None:
        script.check("a frozen layer rests", torch.equal(script.kept["was"], script.net[0].weight))


@act
class Unfreeze(Act):
    """Train a layer from the middle on, which was frozen when the model was wrapped; add it to the optimizer then."""

    drifts = True
    find_unused = True

    def start(self, script: Script) -> None:
        script.net[0].requires_grad_(False)

    def after(self, script: Script) -> None:
        if script.step == 3:
            script.net[0].requires_grad_(True)
            script.optimizer.add_param_group({"params": list(script.net[0].parameters())})


@act
class KeepGradients(Act):
    """Keep gradients by reference beyond the step."""

    harmless = True

    def after(self, script: Script) -> None:
        kept = script.kept.get("gradients", [])
        if kept:
            script.check("kept gradients stay", all(torch.equal(one, copied) for one, copied in kept))
        gradients = [p.grad for p in parameters(script) if p.grad is not None]
        script.kept["gradients"] = [(one, one.clone()) for one in gradients]


@act
class GradientByHand(Act):
    """Give parameters other gradients between backward and step: new tensors."""

    touches_gradients = True

    def between(self, script: Script) -> None:
        for p in parameters(script):
            if p.grad is not None:
                p.grad = -p.grad if script.step == 3 else 0.5 * p.grad


@act
class GradientInPlace(Act):
    """Scale gradients in place between backward and step."""

    touches_gradients = True

    def between(self, script: Script) -> None:
        for p in parameters(script):
            if p.grad is not None:
                p.grad.mul_(-1.0 if script.step == 3 else 0.5)


@act
class GradientNone(Act):
    """Take a layer's gradient away between backward and step, on all ranks alike."""

    touches_gradients = True

    def between(self, script: Script) -> None:
        if script.step in (3, 4):
            script.net[2].weight.grad = None
            script.kept["was"] = script.net[2].weight.detach().clone()

    def after(self, script: Script) -> None:
        if script.step in (3, 4):
            script.check("without a gradient it rests", torch.equal(script.kept["was"], script.net[2].weight))


@act
class ThrowAPassAway(Act):
    """Run a backward pass and drop its gradients before the step's own pass."""

    harmless = True

    def before(self, script: Script) -> None:
        if script.step in (2, 3):
            script.loss(offset=50).backward()
            script.net.zero_grad()


@act
class SeveralPasses(Act):
    """Add up the gradients of two backward passes."""

    def before(self, script: Script) -> None:
        script.loss(offset=50).backward()


@act
class SkipAStep(Act):
    """Run a backward pass, and neither step nor keep its gradients."""

    def skips(self, script: Script) -> bool:
        return script.step in (2, 5)


@act
class NoGradBetween(Act):
    """Run a forward pass without gradients between a forward pass and its backward pass (FixMatch)."""

    def loss(self, script: Script) -> Tensor:
        loss = script.loss()
        with torch.no_grad():
            target = script.model(samples(script.step, script.rank)[0] + 0.1)
        return loss + 0.1 * (script.model(samples(script.step, script.rank)[0]) - target).square().mean()


@act
class OtherWeights(Act):
    """Run forward passes with other weights between a forward pass and its backward pass: a copy, a call."""

    harmless = True

    def loss(self, script: Script) -> Tensor:
        loss = script.loss()
        others = {name: 0.5 * p.detach() for name, p in script.net.named_parameters()}
        x = samples(script.step, script.rank)[0]
        with torch.no_grad():
            called = torch.func.functional_call(script.net, others, (x,))
            copied = copy.deepcopy(script.net)
            for p, value in zip(copied.parameters(), others.values(), strict=True):
                p.copy_(value)
            script.check("both have the other weights", torch.equal(called, copied(x)))
        return loss


@act
class LoadState(Act):
    """Go back to the model and the optimizer of an earlier step."""

    def after(self, script: Script) -> None:
        if script.step == 2:
            script.kept["state"] = copy.deepcopy((script.net.state_dict(), script.optimizer.state_dict()))
        if script.step == 4:
            model, optimizer = script.kept["state"]
            script.net.load_state_dict(model)
            script.optimizer.load_state_dict(optimizer)
            script.check("loaded", all(map(torch.equal, script.net.state_dict().values(), model.values())))


@act
class LoadWeights(Act):
    """Go back to the weights of an earlier step, and keep the optimizer."""

    def after(self, script: Script) -> None:
        if script.step == 2:
            script.kept["state"] = copy.deepcopy(script.net.state_dict())
        if script.step == 4:
            script.net.load_state_dict(script.kept["state"])
            found = list(script.net.state_dict().values())
            script.check("loaded", all(map(torch.equal, found, script.kept["state"].values())))


@act
class AddAGroup(Act):
    """Give the optimizer a layer that it did not have; its gradients were there from the beginning."""

    def start(self, script: Script) -> None:
        script.kept["later"] = list(script.net[2].parameters())

    def after(self, script: Script) -> None:
        if script.step == 3:
            script.optimizer.add_param_group({"params": script.kept["later"]})


@act
class Fork(Act):
    """Fork a process that evaluates, as a loader of data or a logger does."""

    harmless = True

    def after(self, script: Script) -> None:
        if script.step != 3:
            return
        child = os.fork()
        if not child:
            code = 1
            try:
                evaluated(script.net)
                code = 0
            finally:
                os._exit(code)
        script.check("the child ends well", os.waitpid(child, 0)[1] == 0)


@act
class SaveOnOneRank(Act):
    """Ask for the states of model and optimizer on rank 0 alone."""

    harmless = True

    def after(self, script: Script) -> None:
        if script.step == 3 and script.rank == 0:
            copy.deepcopy((script.net.state_dict(), script.optimizer.state_dict()))


@act
class EvaluateOnOneRank(Act):
    """Evaluate on rank 0 alone."""

    harmless = True

    def after(self, script: Script) -> None:
        if script.step == 3 and script.rank == 0:
            evaluated(script.net)


@act
class AverageOfWeights(Act):
    """Keep an average of the student's weights on every rank (DINO, mean teacher)."""

    harmless = True

    def after(self, script: Script) -> None:
        if "teacher" not in script.kept:
            script.kept["teacher"] = network()
        with torch.no_grad():
            for mean, p in zip(script.kept["teacher"].parameters(), parameters(script), strict=True):
                mean.lerp_(p.detach(), 0.5)


@act
class Sam(Act):
    """Move weights along the gradient of a first pass, and step with that of a second one (sharpness-aware)."""

    def before(self, script: Script) -> None:
        script.kept["was"] = [p.detach().clone() for p in parameters(script)]
        script.loss().backward()
        with torch.no_grad():
            for p in parameters(script):
                if p.grad is not None:
                    p.add_(p.grad, alpha=0.1)
        script.net.zero_grad()

    def between(self, script: Script) -> None:
        with torch.no_grad():
            for p, value in zip(parameters(script), script.kept["was"], strict=True):
                p.copy_(value)
