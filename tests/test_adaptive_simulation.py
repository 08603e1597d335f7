"""Check the simulation of exchanging updates where what it must give is known. Its runs take minutes, these do not."""

from __future__ import annotations

import adaptive
import pytest
import torch
from adaptive_simulation import Contender, Layout, Recipe, Simulation, int4, sign
from parity_tasks import Task
from torch import Tensor, nn

RECIPE = Recipe(steps=6, lr=0.01, decay=0.1)
EPS = torch.finfo(torch.float32).eps


def regression(apart: bool = True) -> Task:
    """Return a task with one large and two small tensors; the workers' batches differ if ``apart``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 1, bias=False))

    def batch(step: int, rank: int, workers: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(100 * step + (rank if apart else 0)))
        return x, x.sum(1, keepdim=True)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(model(x), y)

    def score(model: nn.Module, final: bool) -> float:
        return loss(model, *batch(99, 0, 1)).item()

    return Task(model=model, batch=batch, loss=loss, score=score)


def trained(contender: Contender, workers: int = 3, apart: bool = True, steps: int = RECIPE.steps) -> Simulation:
    """Return a simulation after so many steps."""
    simulation = Simulation(regression(apart), contender, RECIPE, workers)
    for step in range(steps):
        simulation.step(step)
    return simulation


def mean(tensors: list[Tensor]) -> Tensor:
    """Return the mean of tensors of one shape."""
    return torch.stack(tensors).mean(0)


@pytest.mark.parametrize("way", ["hold", "apply"])
def test_sending_everything_averages_what_the_optimizers_did(way: str) -> None:
    simulation = trained(Contender(way=way), steps=1)
    alone = Simulation(regression(), Contender(way=way, every=2), RECIPE, 3)
    alone.step(0)  # no exchange is due: every worker has its own AdamW step, and nothing else
    expected = mean([worker.parameters for worker in alone.workers])
    torch.testing.assert_close(simulation.shared, expected, rtol=4 * EPS, atol=4 * EPS)
    for worker in simulation.workers:
        assert not worker.carried.any() and torch.equal(worker.parameters, simulation.shared)


@pytest.mark.parametrize("way", ["gradients", "hold", "apply"])
def test_with_the_same_batch_for_all_it_is_adamw_of_one_process(way: str) -> None:
    task = regression(apart=False)
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=RECIPE.lr, weight_decay=RECIPE.decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, RECIPE.lr, RECIPE.steps, pct_start=0.2, cycle_momentum=False
    )
    for step in range(RECIPE.steps):
        optimizer.zero_grad()
        task.loss(task.model, *task.batch(step, 0, 1)).backward()
        optimizer.step()
        schedule.step()
    expected = nn.utils.parameters_to_vector(task.model.parameters())
    shared = trained(Contender(way=way), apart=False).shared
    torch.testing.assert_close(shared, expected.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wire", ["fp32", "int4", "sign"])
@pytest.mark.parametrize("way", ["hold", "apply"])
def test_an_exchange_loses_nothing(way: str, wire: str) -> None:
    simulation = trained(Contender(way=way, density=0.05, wire=wire))
    for worker in simulation.workers:
        worker.parameters += 1e-3 * torch.randn(worker.parameters.shape)  # as an optimizer would
    held = [worker.carried if way == "hold" else 0 * worker.carried for worker in simulation.workers]
    before = mean([worker.parameters - carried for worker, carried in zip(simulation.workers, held, strict=True)])
    simulation.exchange_updates()
    after = simulation.shared - mean([worker.carried for worker in simulation.workers])
    torch.testing.assert_close(after, before, rtol=8 * EPS, atol=8 * EPS)
    for worker in simulation.workers:
        expected = simulation.shared if way == "hold" else simulation.shared - worker.carried
        assert torch.equal(worker.parameters, expected)
        assert not worker.carried[simulation.layout.small].any() and worker.carried.any()


def test_what_is_not_selected_from_gradients_is_carried() -> None:
    simulation = trained(Contender(density=0.05), steps=0)
    sums = torch.zeros_like(simulation.shared)
    simulation.step(0)
    for worker in simulation.workers:
        sums += worker.carried
    sent = 3 * simulation.workers[0].gradients
    dense = trained(Contender(), steps=1).workers[0].gradients * 3
    torch.testing.assert_close(sums + sent, dense, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(worker.parameters, simulation.shared) for worker in simulation.workers)


def test_every_tensor_sends_its_largest_and_small_ones_all() -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64))  # two tensors of 2048, two biases
    work = torch.cat([torch.arange(1.0, 2049), torch.ones(32), -torch.arange(1.0, 2049), torch.ones(64)])
    sent = Layout(model).send(work, Contender(density=0.01))
    assert sent.nonzero().flatten().tolist() == [*range(2027, 2080), *range(4107, 4192)]  # 21 of 2048: rounded up
    together = Layout(model, "model").send(2 * work * (work > 0) + work * (work < 0), Contender(density=0.01))
    assert together[:2048].count_nonzero() == 41 and together[2080:4128].count_nonzero() == 0


def test_low_bit_values() -> None:
    values = torch.randn(600)
    for block, read in zip(values.split(256), sign(values).split(256), strict=True):
        torch.testing.assert_close(read, block.abs().mean() * block.sign())
    for block, read in zip(values.split(256), int4(values).split(256), strict=True):
        assert (read - block).abs().max() <= block.abs().max() / 14 * (1 + 1e-5)
        assert len(read.unique()) <= 15
    assert not int4(torch.zeros(3)).any() and not sign(torch.zeros(3)).any()


def test_byte_factors_are_those_of_the_codecs() -> None:
    layout = Layout(regression().model)
    factors = {name: layout.fewer_bytes(contender)[0] for name, contender in adaptive.CONTENDERS.items()}
    assert factors["dense"] == 1
    assert factors["apply-5-sign"] == pytest.approx(86, rel=0.01)
    assert factors["apply-1-fp32"] == pytest.approx(79, rel=0.01)
    assert factors["apply-h8-int4"] == pytest.approx(62, rel=0.01)


def test_runs_repeat_to_the_bit() -> None:
    first, second = (trained(Contender(way="apply", density=0.05, wire="sign")) for _ in range(2))
    assert torch.equal(first.shared, second.shared)
    assert first.score(first.shared) == second.score(second.shared)
