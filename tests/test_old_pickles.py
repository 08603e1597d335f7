"""What earlier releases have pickled and saved can still be loaded, wherever its classes live by now.

``data/before_rooms`` was written by the last release whose modules lay side by side: ``things.pickle`` has one of
everything that can be pickled, ``optimizer.pickle`` a wrapper and its model after three steps of one worker, and
``checkpoint.pt`` their ``state_dict()``s.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import agmerge
import merging
import sparsifiers

SAVED = Path(__file__).parent / "data" / "before_rooms"


@pytest.fixture
def one_worker() -> Iterator[None]:
    """This process, initialised; tests of what may be done before that come later in it."""
    agmerge.init()
    yield
    agmerge.shutdown()


def load(name: str) -> dict[str, object]:
    return pickle.loads((SAVED / name).read_bytes())


def test_everything_that_could_be_pickled_can_be_loaded() -> None:
    things = load("things.pickle")
    assert {f"planner {name}" for name in merging.names()} <= set(things)
    assert {f"sparsifier {name}" for name in sparsifiers.names()} <= set(things)
    for what, thing in things.items():
        kind, _, name = what.partition(" ")
        if kind == "planner":
            assert repr(thing) == repr(merging.get(name))
        elif kind == "sparsifier":
            assert repr(thing) == repr(sparsifiers.get(name, density=0.1))
        elif kind == "op":
            assert thing is getattr(agmerge, name)
        elif hasattr(agmerge, what) and isinstance(thing, Exception):
            assert type(thing) is getattr(agmerge, what)
    assert things["ProcessSet"].ranks == [0]
    assert things["plan"].names == ("a", "b")


@pytest.mark.usefixtures("one_worker")
@pytest.mark.filterwarnings("ignore:memory 'dgc' applies the momentum")
def test_a_pickled_wrapper_and_a_checkpoint_go_on_alike() -> None:
    """Both have the residuals; from them the next step is the same, to the bit."""
    pickled, saved = load("optimizer.pickle"), torch.load(SAVED / "checkpoint.pt", weights_only=True)
    models = pickled["model"], torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Tanh(), torch.nn.Linear(30, 4))
    models[1].load_state_dict(saved["model"])
    fresh = agmerge.DistributedOptimizer(
        torch.optim.SGD(models[1].parameters(), lr=0.1, momentum=0.9),
        named_parameters=models[1].named_parameters(),
        density=0.1,
        merging="mgwfbp",
    )
    fresh.load_state_dict(saved["optimizer"])
    for model, optimizer in zip(models, (pickled["optimizer"], fresh), strict=True):
        optimizer.zero_grad()
        model(torch.arange(80.0).view(2, 40).sin()).square().sum().backward()
        optimizer.step()
    before = torch.load(SAVED / "checkpoint.pt", weights_only=True)["model"]
    for name, parameter in models[0].state_dict().items():
        assert torch.equal(parameter, models[1].state_dict()[name])
        assert not torch.equal(parameter, before[name]) or name.endswith("bias")
