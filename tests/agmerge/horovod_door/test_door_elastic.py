# SPDX-License-Identifier: Apache-2.0
"""States, samplers and batch norm in Horovod's form."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from agmerge import testing
from agmerge.horovod_door import elastic
from agmerge.horovod_door.batch_norm import SyncBatchNorm


def test_a_state_returns_to_its_commit_and_takes_that_of_rank_0() -> None:
    net = torch.nn.Linear(2, 2)

    def body(rank: int) -> Any:
        own = copy.deepcopy(net)
        with torch.no_grad():
            own.weight.fill_(float(rank))
        state = elastic.TorchState(own, torch.optim.SGD(own.parameters(), lr=0.1 * (rank + 1)), step=rank)
        state.sync()
        assert (float(own.weight.detach()[0, 0]), state.step, state.optimizer.param_groups[0]["lr"]) == (0.0, 0, 0.1)
        state.step = 5
        state.commit()
        state.step, own.weight.data[0, 0] = 9, 9.0
        state.restore()
        return state.step, float(own.weight.detach()[0, 0])

    assert testing.run(2, body) == [(5, 0.0)] * 2


def test_a_function_begins_again_after_a_loss_and_after_changes_of_hosts() -> None:
    class Script(elastic.ObjectState):
        pass

    told: list[Any] = []
    ends = iter([elastic.HostsUpdatedInterrupt(skip_sync=True), elastic.HorovodInternalError("a worker is lost")])
    state = Script(lambda value: told.append("sync") or value, lambda: 0, step=0)
    state.register_reset_callbacks([lambda: told.append("reset")])

    def train(given: Any) -> str:
        told.append(given.step)
        given.step += 1
        end = next(ends, None)
        if isinstance(end, elastic.HostsUpdatedInterrupt):
            given.save()
        if end is not None:
            raise end
        return "end"

    assert elastic.run_fn(train, lambda: told.append("regroup"))(state) == "end"
    assert told == ["sync", 0, "regroup", "reset", 1, "regroup", "reset", "sync", 1]  # the second 1 is the commit's


def test_samples_that_are_left_are_dealt_out_again() -> None:
    def body(rank: int) -> Any:
        sampler = elastic.ElasticSampler(range(10), shuffle=True, seed=3)
        first = list(sampler)[:2]
        sampler.record_batch(0, 2)
        state = elastic.TorchState(sampler=sampler)
        state.sync()
        return first, list(sampler), len(sampler), sampler.state_dict()

    (first_0, left_0, length, saved), (first_1, left_1, _, _) = testing.run(2, body)
    assert sorted(first_0 + first_1 + left_0 + left_1) == list(range(10)) and length == 3
    assert saved == {"epoch": 0, "processed_num": 4}


@pytest.mark.parametrize("rows", [(3, 5), (1, 7), (0, 8)])
def test_batch_norm_is_that_of_one_process_on_the_joint_batch(rows: tuple[int, int]) -> None:
    torch.manual_seed(0)
    whole = torch.randn(sum(rows), 3, 4, requires_grad=True)
    weights = torch.randn(sum(rows), 3, 4)
    plain = torch.nn.BatchNorm1d(3, momentum=None)
    synced = SyncBatchNorm(3, momentum=None)
    for _ in range(2):
        output = plain(whole)
    (output * weights).sum().backward()

    def body(rank: int) -> Any:
        own, begin = copy.deepcopy(synced), sum(rows[:rank])
        x = whole.detach()[begin : begin + rows[rank]].clone().requires_grad_()
        for _ in range(2):
            output = own(x)
        (output * weights[begin : begin + rows[rank]]).sum().backward()
        return output.detach(), x.grad, own

    (out_0, grad_0, net_0), (out_1, grad_1, net_1) = testing.run(2, body)
    torch.testing.assert_close(torch.cat([out_0, out_1]), output.detach())
    torch.testing.assert_close(torch.cat([grad_0, grad_1]), whole.grad)
    torch.testing.assert_close(net_0.weight.grad + net_1.weight.grad, plain.weight.grad)
    torch.testing.assert_close(net_0.bias.grad + net_1.bias.grad, plain.bias.grad)
    for name, value in plain.state_dict().items():
        assert torch.equal(net_0.state_dict()[name], net_1.state_dict()[name]), name
        torch.testing.assert_close(net_0.state_dict()[name], value)
