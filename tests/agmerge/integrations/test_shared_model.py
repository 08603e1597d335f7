# SPDX-License-Identifier: Apache-2.0
"""With ``sync="updates"`` a model shows what the script asks for: its own weights, shared ones, or others."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support import batch, digest, loss_of, mlp, on_ranks, seeded
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import agmerge
from agmerge.integrations.ddp import show_shared

MODEL = seeded(mlp)
X = batch(0, 99)[0]
OPTIONS: dict[str, Any] = {"every": 1, "density": 0.05, "wire": "sign", "exchange": "sparse"}
READS, WRITTEN, SAVED = "AGM146", "AGM145", "AGM147"


class Script:
    """Model with an optimizer whose updates are exchanged, after some steps."""

    def __init__(self, rank: int, model: Any, sync: agmerge.LocalSync) -> None:
        self.rank, self.model, self.sync, self.inner = rank, model, sync, sync._inner
        self.steps = 0

    def step(self, count: int = 1) -> None:
        """Train; between two steps nothing happens."""
        for _ in range(count):
            self.inner.zero_grad()
            loss_of(self.model, self.rank, self.steps).backward()
            self.inner.step()
            self.steps += 1

    def shared(self) -> Any:
        """A model of its own with the shared parameters."""
        with self.sync.shared():
            return copied(self.model)


def copied(model: nn.Module) -> Any:
    """A copy without hooks, made by no operation on the parameters."""
    copy = mlp()
    values = [torch.from_numpy(parameter.detach().numpy().copy()) for parameter in model.parameters()]
    with torch.no_grad():
        for parameter, value in zip(copy.parameters(), values, strict=True):
            parameter.copy_(value)
    return copy


@contextmanager
def script(rank: int, model: nn.Module, steps: int = 3, **options: Any) -> Iterator[Script]:
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    with agmerge.LocalSync(model, inner, **{**OPTIONS, **options}) as sync:
        end = show_shared(model, sync._reducer)
        made = Script(rank, model, sync)
        made.step(steps)
        yield made
        sync.consolidate()
        end()


def scripts(body: Callable[[Script], None], **options: Any) -> list[str]:
    """Warnings of ``body(script)`` on two ranks."""

    def on_rank(rank: int, model: nn.Module) -> None:
        with script(rank, model, **options) as made:
            body(made)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        on_ranks(2, MODEL, on_rank)
    known = (READS, WRITTEN, SAVED)
    return [
        next(one for one in known if text.startswith(one)) for w in caught if (text := str(w.message)).startswith(known)
    ]


def test_the_mode_of_the_model_decides_with_gradients_or_without() -> None:
    def body(script: Script) -> None:
        model, own, shared = script.model, copied(script.model), script.shared()
        assert digest(own) != digest(shared)
        for mode, expected in ((True, own), (False, shared), (True, own)):
            model.train(mode)
            assert torch.equal(model(X), expected(X))
            with torch.no_grad():
                assert torch.equal(model(X), expected(X))
            with torch.inference_mode():
                assert torch.equal(model(X), expected(X))
            assert digest(model.state_dict().values()) == digest(expected.state_dict().values())
        assert digest(model) == digest(own)

    assert scripts(body) == [SAVED]


def test_gradients_in_eval_mode_are_those_at_the_shared_parameters() -> None:
    """As an attack on the model needs them; and a ratio of two passes, one of them without gradients, is 1."""

    def body(script: Script) -> None:
        model, own, shared = script.model.eval(), copied(script.model), script.shared()
        x, other = X.clone().requires_grad_(), X.clone().requires_grad_()
        for at, given in ((model, x), (shared, other)):
            at.zero_grad()
            at(given).square().sum().backward()
        assert torch.equal(x.grad, other.grad)  # type: ignore[arg-type]
        for parameter, expected in zip(model.parameters(), shared.parameters(), strict=True):
            assert torch.equal(parameter.grad, expected.grad)
        assert digest(model) == digest(own)
        with torch.no_grad():
            old = model(X)
        assert torch.equal((model(X) - old).exp(), torch.ones_like(old))
        model.train()

    assert scripts(body) == []


@pytest.mark.parametrize("between", ["training", "eval", "shared"])
def test_a_pass_between_another_one_and_its_backward_changes_no_gradient(between: str) -> None:
    """Labels of the model itself, between the pass that learns and its ``backward()``."""

    def body(script: Script) -> None:
        model, own = script.model, copied(script.model)
        pending, expected = model(X), own(X)
        with torch.no_grad():
            model.train(between == "training")
            if between == "shared":
                with script.sync.shared():
                    model(X)
            else:
                model(X)
            model.train()
        model.zero_grad()
        pending.square().sum().backward()
        expected.square().sum().backward()
        for parameter, other in zip(model.parameters(), own.parameters(), strict=True):
            assert torch.equal(parameter.grad, other.grad)

    assert scripts(body) == []


def test_a_script_that_trains_in_eval_mode_computes_with_its_own() -> None:
    def body(script: Script) -> None:
        model = script.model.eval()
        for _ in range(2):
            script.step()
            own = copied(model)
            assert digest(own) != digest(script.shared())
        with torch.no_grad():
            assert torch.equal(model(X), own(X))
        assert digest(model.state_dict().values()) == digest(own.state_dict().values())
        model.train()
        script.step(2)
        model.eval()
        assert torch.equal(model(X), script.shared()(X))
        model.train()

    assert scripts(body) == [SAVED]


# -- weights that the script puts in ----------------------------------------------------------------------------------


def swap(model: nn.Module, given: list[Tensor], way: str) -> None:
    """Put weights into a model."""
    parameters: Any = list(model.parameters())
    if way == "p.data = ...":
        for parameter, value in zip(parameters, given, strict=True):
            parameter.data = value.clone()
    elif way == "p.data.copy_()":
        for parameter, value in zip(parameters, given, strict=True):
            parameter.data.copy_(value)
    elif way == "load_state_dict()":
        model.load_state_dict(dict(zip(dict(model.named_parameters()), given, strict=True)))
    else:
        with torch.no_grad():
            torch._foreach_copy_(parameters, given)


@pytest.mark.parametrize("way", ["foreach", "p.data = ...", "p.data.copy_()", "load_state_dict()"])
def test_weights_that_a_script_puts_in_are_evaluated_and_saved(way: str) -> None:
    """An average of weights, the best ones, an optimizer's of its ``eval()``; until the next step."""

    def body(script: Script) -> None:
        model, other = script.model, seeded(mlp, seed=7)
        own = [parameter.detach().clone() for parameter in copied(model).parameters()]
        for mode in (True, False):
            swap(model, [parameter.detach() for parameter in other.parameters()], way)
            model.train(mode)
            assert torch.equal(model(X), other(X))
            with torch.no_grad():
                assert torch.equal(model(X), other(X))
            assert digest(model.state_dict().values()) == digest(other.state_dict().values())
            swap(model, own, way)
        model.train()
        script.step()
        model.eval()
        assert torch.equal(model(X), script.shared()(X))
        model.train()

    assert sorted(scripts(body)) == sorted((SAVED, WRITTEN))


def test_one_parameter_that_is_written_does_not_hide_the_others() -> None:
    def body(script: Script) -> None:
        model, expected = script.model, script.shared()
        for each in (model, expected):
            with torch.no_grad():
                each[2].bias.clamp_(-1e-3, 1e-3)
        model.eval()
        assert torch.equal(model(X), expected(X))
        assert digest(model.state_dict().values()) == digest(expected.state_dict().values())
        model.train()

    assert scripts(body) == [WRITTEN]


@pytest.mark.parametrize("way", ["clamp_", "data.clamp_", "best weights"])
def test_a_script_that_writes_parameters_between_its_steps_is_told_once_what_that_does(way: str) -> None:
    def body(script: Script) -> None:
        for _ in range(3):
            for parameter in script.model.parameters():
                with torch.no_grad():
                    if way == "best weights":
                        parameter.copy_(torch.full_like(parameter, 0.01))
                    else:
                        (parameter if way == "clamp_" else parameter.data).clamp_(-0.05, 0.05)
            script.step()

    assert scripts(body) == [WRITTEN]


# -- averages of the weights, and other reads -------------------------------------------------------------------------


def averaging(kind: str) -> Callable[[Script], Callable[[], Any]]:
    """Return what a script has at first, which gives the call between two steps."""

    def begin(script: Script) -> Callable[[], Any]:
        model, ema = script.model, copied(script.model)

        def of(update: Callable[[Tensor, Tensor], Any]) -> Callable[[], None]:
            def call() -> None:
                with torch.no_grad():
                    for old, new in zip(ema.parameters(), model.parameters(), strict=True):
                        update(old, new)

            return call

        averaged = AveragedModel(ema)
        return {
            "teacher": of(lambda old, new: old.mul_(0.9).add_(0.1 * new)),
            "lerp": of(lambda old, new: old.lerp_(new.data, 0.1)),
            "another tensor": of(lambda old, new: old * 0.9 + new.detach() * 0.1),
            "foreach": lambda: torch._foreach_lerp_(
                [p.data for p in ema.parameters()], [p.data for p in model.parameters()], 0.1
            ),
            "state_dict": lambda: [ema.state_dict()[k].copy_(v) for k, v in model.state_dict(keep_vars=False).items()],
            "SWA": lambda: averaged.update_parameters(model),
            "a copy": lambda: copy.deepcopy(model),
        }[kind]

    return begin


@pytest.mark.parametrize("kind", ["teacher", "lerp", "another tensor", "foreach", "state_dict", "SWA", "a copy"])
def test_an_average_of_a_ranks_own_parameters_is_told_once(kind: str) -> None:
    def body(script: Script) -> None:
        call = averaging(kind)(script)
        for _ in range(3):
            call()
            script.step()

    assert [text for text in scripts(body) if text != SAVED] == [READS]


def test_the_warning_points_at_the_line_of_the_script_and_names_the_remedy() -> None:
    def body(rank: int, model: Any) -> None:
        with script(rank, model) as made:
            made.model[0].weight.detach().clone()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        on_ranks(2, MODEL, body)
    (found,) = (warning for warning in caught if str(warning.message).startswith(READS))
    text = str(found.message)
    assert found.filename == __file__ and "clone() of '0.weight'" in text
    assert "average" in text and "shared()" in text


def harmless(script: Script) -> None:
    """What many scripts do between two steps."""
    model, ema = script.model, copied(script.model)
    norms = torch.stack([parameter.norm() for parameter in model.parameters()]).sum()
    torch._foreach_norm(list(model.parameters()))
    assert norms.isfinite() and X.clone().mul_(2).add_(1).numel()
    with script.sync.shared(), torch.no_grad():
        for old, new in zip(ema.parameters(), model.parameters(), strict=True):
            old.lerp_(new, 0.1)
    with torch.no_grad():
        model.eval()
        model(X)
        model.state_dict()
        model.train()
    copy.deepcopy(script.sync.state_dict())
    copy.deepcopy(script.inner.state_dict())
    script.inner.zero_grad()


def test_nothing_is_said_of_norms_of_evaluation_and_of_reads_inside_of_shared() -> None:
    def body(script: Script) -> None:
        for _ in range(3):
            harmless(script)
            script.step()

    assert scripts(body) == []


def test_nothing_is_said_where_ranks_have_the_same_parameters_after_each_step() -> None:
    def body(script: Script) -> None:
        for _ in range(3):
            copy.deepcopy(script.model)
            script.model.state_dict()
            script.step()

    assert scripts(body, compression="none", density=None, wire=None) == []


def test_a_look_ends_with_the_next_forward_pass_and_leaves_the_scripts_own_modes() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

    base: Any = TorchDispatchMode

    class Mode(base):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    def body(script: Script) -> None:
        assert len(_get_current_dispatch_mode_stack()) == 1
        script.model(X)
        assert _get_current_dispatch_mode_stack() == []
        script.step()
        with Mode() as later:
            script.model(X)
            assert _get_current_dispatch_mode_stack()[-1] is later
        script.step()
        with Mode() as around:
            script.step(2)
            assert _get_current_dispatch_mode_stack()[-1] is around
        script.step(10)
        assert _get_current_dispatch_mode_stack() == []

    assert scripts(body) == []
