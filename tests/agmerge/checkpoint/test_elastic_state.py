# SPDX-License-Identifier: Apache-2.0
"""``agmerge.elastic.State``: all workers begin with the oldest one's values, and refusals say why."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import agmerge
from agmerge.backends import generations
from agmerge.backends.local import Call
from agmerge.runtime import tensor_stream, workers
from tests.support import elastic


def started(worker: int, *, dies: bool = False, **options: Any) -> dict[str, Any]:
    """Return what a worker has after it has made its state; all workers begin with other values."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float(worker + 1))
    inner = torch.optim.SGD(model.parameters(), lr=0.1 * (worker + 1), momentum=0.9)
    optimizer = agmerge.DistributedOptimizer(inner, model.named_parameters(), timeout=20.0, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 2)
    changes: list[tuple[int, int]] = []
    average = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(average.weight, worker + 1.0)
    state = agmerge.elastic.State(
        model=model, optimizer=optimizer, scheduler=scheduler, step=10 * worker, words=[worker], average=average,
        on_change=lambda before, now: changes.append((before, now)),
    )  # fmt: skip
    first = (state.step, state.words, inner.param_groups[0]["lr"], float(next(model.parameters()).sum()))
    assert state.average is average and average.weight.item() == state.step / 10 + 1, "it has the oldest one's"
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
        state.step += 1
        assert state.commit()
        if dies:
            raise elastic.Killed
    return {"first": first, "step": state.step, "elastic": optimizer.stats()["elastic"], "changes": changes}


@pytest.mark.parametrize(
    "options",
    [{}, {"sync": "updates"}, {"sync": "updates", "exchange": "sparse", "overlap": 1}, {"compression": "dgc"}],
    ids=str,
)
def test_all_begin_with_the_values_of_the_oldest(options: dict[str, Any]) -> None:
    results = elastic.run(3, lambda worker: started(worker, **options))
    for result in results:
        if isinstance(result, BaseException):
            raise result
        assert result["first"] == (0, [0], 0.1, 12.0) and result["step"] == 3
        assert result["elastic"] == {"lost": 0, "left": 0, "arrived": 0, "repeated": 0, "seconds": 0.0}


def test_a_change_of_workers_is_told_before_the_next_step() -> None:
    *survivors, dead = elastic.run(3, lambda worker: started(worker, dies=worker == 2))
    assert isinstance(dead, elastic.Killed)
    for result in survivors:
        if isinstance(result, BaseException):
            raise result
        assert result["changes"] == [(3, 2)] and result["elastic"]["lost"] == 1


@pytest.mark.parametrize("catches", [True, False], ids=["commit", "step"])
def test_after_a_collective_of_the_script_has_failed_both_calls_go_on(catches: bool) -> None:
    """A worker dies in a sum of the script's; commit() and step() form the next group."""

    def train(worker: int) -> list[float]:
        model = torch.nn.Linear(8, 8)
        optimizer = agmerge.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), timeout=20.0
        )
        state, sums = agmerge.elastic.State(model=model, optimizer=optimizer), []
        for step in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
            if (worker, step) == (2, 1):
                raise elastic.Killed
            try:
                sums.append(float(agmerge.allreduce(torch.ones(1), op=agmerge.Sum)))
            except agmerge.PeerLost:
                if catches:
                    state.commit()
                    sums.append(float(agmerge.allreduce(torch.ones(1), op=agmerge.Sum)))
        return sums

    expected = [3.0, 2.0, 2.0] if catches else [3.0, 2.0]
    assert elastic.run(3, train)[:2] == [expected, expected]


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrink messages to 64 bytes, with a pause of the stream after 100: a small state takes several of both."""
    monkeypatch.setattr(tensor_stream, "MESSAGE", 64)
    monkeypatch.setattr(tensor_stream, "PAUSE", 100)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("calls", range(12))
def test_a_death_before_the_first_step_ends_nobody_else(calls: int, victim: int, in_parts: None) -> None:
    """While the state of the first one is handed over, say; should it die itself, the next one's is."""
    made: list[str] = []

    def kill(worker: int, generation: int, call: Call) -> None:
        if worker == victim and generation == 0:
            made.append(call.name)
            if len(made) > calls:
                raise elastic.Killed

    results = elastic.run(3, started, kill)
    assert isinstance(results.pop(victim), elastic.Killed)
    for result in results:
        if isinstance(result, BaseException):
            raise result
        assert result["first"] == results[0]["first"] and result["step"] == result["first"][0] + 3
        assert result["first"] == (0, [0], 0.1, 12.0) or victim == 0


@pytest.mark.parametrize("unlucky", [0, 1])
def test_who_has_got_the_state_is_no_newcomer_any_more(unlucky: int, in_parts: None) -> None:
    """It has not heard of the end, with a worker that was lost, and the others are in their first step."""
    names: list[str] = []

    def note(worker: int, generation: int, call: Call) -> None:
        if worker == unlucky and generation == 0:
            names.append(call.name)

    elastic.run(3, started, note)
    end = names.index("elastic state is there")
    for call in range(end - 4, end + 2):
        results = elastic.run(3, started, luck=elastic.BadLuck(of=unlucky, call=call, victim=2))
        assert isinstance(results[2], elastic.Killed)
        for result in results[:2]:
            if isinstance(result, BaseException):
                raise result
            assert result["first"] == (0, [0], 0.1, 12.0) and result["step"] == 3


def lone(*, steps: int, dies_after: int, **options: Any) -> list[Any]:
    """Return by worker its optimizer and parameters: of two workers one dies after ``dies_after`` steps."""

    def train(worker: int) -> tuple[agmerge.DistributedOptimizer, torch.nn.Linear]:
        torch.manual_seed(0)
        model = torch.nn.Linear(30, 30)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = agmerge.DistributedOptimizer(inner, model.named_parameters(), timeout=20.0, **options)
        state = agmerge.elastic.State(model=model, optimizer=optimizer)
        for step in range(steps):
            if worker and step == dies_after:
                raise elastic.Killed
            optimizer.zero_grad()
            model(torch.randn(4, 30)).square().sum().backward()
            optimizer.step()
            state.commit()
        return optimizer, model

    return elastic.run(2, train)


@pytest.mark.parametrize(
    "options",
    [{}, {"sync": "updates"}, {"sync": "updates", "overlap": 1, "density": 0.1}, {"sync": "updates", "every": 4}],
    ids=str,
)
def test_a_lone_worker_lets_others_in_without_an_exchange(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes none with updates, so that no message says that others wait."""
    lets_in: list[bool] = []
    regroup = workers.regroup

    def noted(**how: bool) -> Any:
        lets_in.append(how.get("lets_in", False))
        return regroup(**how)

    monkeypatch.setattr(workers, "regroup", noted)
    monkeypatch.setattr(workers, "newcomers_wait", lambda: workers.size() == 1)
    survivor, _ = lone(steps=6, dies_after=2, **options)
    assert not isinstance(survivor, BaseException)
    assert lets_in.count(True) >= 2, "not only after the exchange in which it was left alone"


@pytest.mark.parametrize("options", [{"overlap": 1}, {"carry": "apply"}, {"carry": "hold"}], ids=str)
def test_the_parameters_of_a_lone_worker_are_the_shared_ones(options: dict[str, Any]) -> None:
    """Those that it shared before are of its last exchange: a newcomer would begin there, and a file have them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="AGM145")  # the script has written nothing
        survivor, dead = lone(steps=6, dies_after=3, sync="updates", density=0.1, **options)
    assert isinstance(dead, elastic.Killed)
    optimizer, model = survivor
    own = [parameter.detach().clone() for parameter in model.parameters()]
    with optimizer.shared():
        assert all(map(torch.equal, own, model.parameters()))
    assert not any(map(torch.any, optimizer._reducer.replica.unsent().values()))
    optimizer.flush()  # no other worker is left


def test_outside_of_an_elastic_job_it_says_what_to_call() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(agmerge.AGMergeError, match=r"agmerge\.init\(elastic=True\)"):
        agmerge.elastic.State(model=model, optimizer=optimizer)


def test_horovods_names_lead_to_horovod() -> None:
    with pytest.raises(AttributeError, match=r"horovod\.torch\.elastic"):
        agmerge.elastic.TorchState  # noqa: B018


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compression": "topk", "exchange": "oktopk"}, r"exchange='oktopk'"),
        ({"compression": "topk", "exchange": "fastest"}, r"exchange='fastest'"),
        ({"compression": "powersgd"}, r"compression='powersgd'"),
        ({"process_set": [0, 1]}, r"process_set="),
        ({"sync": "updates", "every": 2, "fragments": 2, "density": 0.1}, r"fragments="),
    ],
)
def test_settings_that_cannot_go_on_are_refused_by_name(options: dict[str, Any], words: str) -> None:
    def body(worker: int) -> None:
        model = torch.nn.Linear(64, 64)
        with pytest.raises(ValueError, match=words):
            agmerge.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **options
            )

    assert elastic.run(2, body) == [None, None]


def test_distributed_data_parallel_is_refused() -> None:
    """It would train each worker by itself, without a word."""

    def body(worker: int) -> None:
        with pytest.raises(ValueError, match=r"DistributedDataParallel.* fixed number of workers.* plain PyTorch"):
            agmerge.integrations.ddp.compress(torch.nn.Linear(8, 8))  # type: ignore[arg-type]

    assert elastic.run(1, body) == [None]


def test_an_accelerator_without_an_optimizer_is_refused() -> None:
    accelerate = pytest.importorskip("accelerate")

    def body(worker: int) -> None:
        accelerator = accelerate.Accelerator(cpu=True)
        with pytest.raises(ValueError, match="0 optimizers of the model's parameters"):
            agmerge.integrations.accelerate.compress(accelerator, accelerator.prepare(torch.nn.Linear(8, 8)))

    try:
        assert elastic.run(1, body) == [None]
    finally:  # what is the process's: others look whether there is an Accelerator
        state = pytest.importorskip("accelerate.state")
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


def test_the_group_is_given_up_for_newcomers_once_all_have_ended_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is still receiving the step's messages would lose them, and the newcomer would be sent away."""
    events: list[str] = []
    regroup = elastic.Lighthouse.regroup

    def noted(self: elastic.Lighthouse, worker: int) -> Any:
        events.append("gives up")
        return regroup(self, worker)

    monkeypatch.setattr(elastic.Lighthouse, "regroup", noted)

    def train(worker: int) -> None:
        model = torch.nn.Linear(2, 2)
        optimizer = agmerge.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), timeout=20.0
        )
        state = agmerge.elastic.State(model=model, optimizer=optimizer)
        optimizer._reducer.participation.lets_in = True
        time.sleep(0.3 * worker)
        events.append("has ended the step")
        state.commit()

    for result in elastic.run(3, train):
        if isinstance(result, BaseException):
            raise result
    assert events == ["has ended the step"] * 3 + ["gives up"] * 3


def trained(worker: int, *, steps: int, commits: bool, dies_before: int = -1, first: int = 0) -> int:
    """Make ``steps`` steps, and return how many; worker 2 dies before one of them, in a function of the script."""
    model = torch.nn.Linear(8, 8)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = agmerge.DistributedOptimizer(inner, model.named_parameters(), timeout=20.0)
    state = agmerge.elastic.State(model=model, optimizer=optimizer, step=0)

    @state.retried
    def counted() -> float:
        if (worker, state.step) == (2, dies_before):
            raise elastic.Killed
        return float(agmerge.allreduce(torch.ones(1), op=agmerge.Sum))

    while state.step < steps:
        assert counted() == workers.size()
        optimizer.zero_grad()
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        state.step += 1
        if commits or state.step <= first:
            state.commit()
    return int(state.step)


@pytest.mark.parametrize("dies_before", [0, 2])
def test_a_step_that_has_lost_its_workers_before_it_began_is_ended_with_too_few(
    dies_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were there at the last commit, and the next one waits for others."""
    waits: list[int] = []
    few = lambda: workers.size() < 3  # noqa: E731
    monkeypatch.setattr(workers, "has_too_few", few)

    def let_in(self: agmerge.elastic.State) -> None:
        waits.append(self.step)
        monkeypatch.setattr(workers, "has_too_few", lambda: False)  # one has come

    monkeypatch.setattr(agmerge.elastic.State, "_let_in", let_in)
    results = elastic.run(3, lambda worker: trained(worker, steps=5, commits=True, dies_before=dies_before))
    assert results[:2] == [5, 5] and set(waits) == {dies_before + 1}


def test_without_commit_a_second_step_with_too_few_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "has_too_few", lambda: workers.size() < 3)
    results = elastic.run(3, lambda worker: trained(worker, steps=5, commits=False, dies_before=2))
    for result in results[:2]:
        assert isinstance(result, agmerge.TooFewWorkers) and "Call commit()" in str(result)


@pytest.mark.parametrize("commits", [True, False])
def test_many_steps_without_commit_are_told_once(commits: bool) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert elastic.run(2, lambda worker: trained(worker, steps=50, commits=commits, first=3)) == [50, 50]
    told = [str(one.message) for one in said if "AGM220" in str(one.message)]
    assert len(told) == (0 if commits else 1)


def refused(make: Callable[[int], dict[str, Any]]) -> str:
    """Return why worker 1 cannot have the state of worker 0: with ``make(worker)``, arguments of State."""

    def body(worker: int) -> None:
        arguments = make(worker)
        model = arguments.setdefault("model", torch.nn.Linear(4, 4))
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        arguments.setdefault("optimizer", agmerge.DistributedOptimizer(inner, model.named_parameters(), timeout=20.0))
        agmerge.elastic.State(**arguments)

    _, result = elastic.run(2, body)
    assert isinstance(result, agmerge.AGMergeError), result
    return str(result)


def test_who_comes_with_other_arguments_is_told_what_differs() -> None:
    data = list(range(60))
    sampler = agmerge.elastic.Sampler
    assert "Sampler has batch_size=16 on this worker and 8 on the others" in refused(
        lambda worker: {"sampler": sampler(data, 8 * (worker + 1))}
    )
    assert "Sampler has seed=1 on this worker and 0 on the others" in refused(
        lambda worker: {"sampler": sampler(data, 8, seed=worker)}
    )
    words = refused(lambda worker: {"model": torch.nn.Linear(4, 4 + worker)})
    assert "AGM407" in words and "size mismatch" in words
    assert "AGM407" in words


def test_the_optimizer_that_is_wrapped_is_refused_before_anything_is_sent() -> None:
    def body(worker: int) -> None:
        model = torch.nn.Linear(4, 4)
        inner = torch.optim.AdamW(model.parameters())
        with pytest.raises(agmerge.AGMergeError, match=r"AGM310: .*AdamW.*agmerge\.DistributedOptimizer"):
            agmerge.elastic.State(model=model, optimizer=inner)

    assert elastic.run(2, body) == [None, None]


def test_a_name_without_an_address_is_told_at_once() -> None:
    with pytest.raises(agmerge.AGMergeError, match=r"No lighthouse answers at no\.such\.host\.invalid.*no address"):
        agmerge.init(elastic=agmerge.Elastic(lighthouse="no.such.host.invalid:29510"))


def test_who_finds_no_lighthouse_says_so_while_it_looks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generations, "TELLS", 0.1)
    with pytest.raises(agmerge.AGMergeError, match="No lighthouse answers at 127.0.0.1, port 9, within 0.5 s"):
        agmerge.init(elastic=agmerge.Elastic(lighthouse="127.0.0.1:9", patience=0.5))
    assert "init() waits for a lighthouse at 127.0.0.1:9, which does not answer, for 0.5 s" in capsys.readouterr().err
