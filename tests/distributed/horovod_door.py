# SPDX-License-Identifier: Apache-2.0
"""Script in Horovod's words, for workers that ``python -m agmerge horovodrun`` starts: each function is a scenario.

Arguments: a folder for files, and perhaps another thing to do. Prints ``ok NAME`` for each that holds on this rank.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import horovod
import horovod.torch as hvd
import torch
from horovod.torch.compression import Compressor
from horovod.torch.mpi_ops import allreduce_async, synchronize
from torch.nn.functional import cross_entropy

FOLDER = Path(sys.argv[1])


def model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))


def data(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(rank)
    return torch.randn(24, 20, generator=source), torch.randint(0, 3, (24,), generator=source)


def trained(optimizer: Any, net: torch.nn.Module, steps: int = 5) -> list[torch.Tensor]:
    for _ in range(steps):
        optimizer.zero_grad()
        x, y = data(hvd.rank())
        cross_entropy(net(x), y).backward()
        optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


def alone(steps: int = 5) -> list[torch.Tensor]:
    """What one process gets with all workers' batches."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    x, y = (torch.cat(parts) for parts in zip(*map(data, range(hvd.size())), strict=True))
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        optimizer.step()
    return [p.detach() for p in net.parameters()]


def wrapped(net: torch.nn.Module, **options: Any) -> Any:
    inner = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return hvd.DistributedOptimizer(inner, named_parameters=net.named_parameters(), **options)


def training_equals_one_process() -> None:
    net = model(seed=hvd.rank())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net.load_state_dict(model().state_dict() if hvd.rank() == 0 else net.state_dict())
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=net.named_parameters(), compression=hvd.Compression.none, op=hvd.Average
    )
    torch.testing.assert_close(trained(optimizer, net), alone())
    assert set(optimizer._parameter_names.values()) == {name for name, _ in net.named_parameters()}


def own_compressors_sum_what_they_send() -> None:
    class Halves(Compressor):
        @staticmethod
        def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
            return tensor.double() / 2, tensor.dtype

        @staticmethod
        def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
            return (tensor * 2).to(ctx)

    net = model()
    torch.testing.assert_close(trained(wrapped(net, compression=Halves), net), alone())
    net = model()
    optimizer = wrapped(net, compression=Halves())
    x, y = data(hvd.rank())
    cross_entropy(net(x), y).backward()
    optimizer.synchronize()
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
    with optimizer.skip_synchronize():
        optimizer.step()
    assert len(set(hvd.allgather_object(float(norm)))) == 1
    assert torch.equal(hvd.allreduce(torch.tensor([2.0]), compression=Halves), torch.tensor([2.0]))


def calls_are_matched_by_name() -> None:
    names = ["a", "b", "c"]
    order = names if hvd.rank() == 0 else names[::-1]
    handles = {name: allreduce_async(torch.full((3,), float(ord(name))), name=name, op=hvd.Sum) for name in order}
    hvd.barrier()  # while they wait
    for name in order:
        assert torch.equal(synchronize(handles[name]), torch.full((3,), float(hvd.size() * ord(name)))), name
    first = hvd.allgather_async(torch.zeros(1), name="twice")
    try:
        hvd.allgather_async(torch.zeros(1), name="twice")
    except ValueError as error:
        assert "same name" in str(error)
    else:
        raise AssertionError("the second call of this name was let through")
    unnamed = [hvd.broadcast_async_(torch.full((1,), float(hvd.rank())), 1) for _ in range(12)]
    assert [float(hvd.synchronize(one)) for one in unnamed] == [1.0] * 12
    assert len(hvd.synchronize(first)) == hvd.size()
    x = torch.ones(2, requires_grad=True)
    hvd.synchronize(hvd.allreduce_async(x, op=hvd.Sum)).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full((2,), float(hvd.size())))


def a_timeline_has_the_phases() -> None:
    path = str(FOLDER / "timeline.json")
    hvd.start_timeline(path, mark_cycles=True)
    hvd.allreduce(torch.ones(4), name="loss")
    hvd.barrier()
    hvd.stop_timeline()
    hvd.allreduce(torch.ones(4), name="unseen")
    if hvd.rank() == 0:
        events = json.loads(Path(path).read_text())
        (row,) = [event["tid"] for event in events if event.get("args", {}).get("name") == "allreduce.loss"]
        phases = [event for event in events if event["tid" if "tid" in event else "pid"] == row and event["ph"] == "X"]
        assert [event["name"] for event in phases] == ["NEGOTIATE_ALLREDUCE", "ALLREDUCE"]
        assert phases[0]["ts"] + phases[0]["dur"] <= phases[1]["ts"] + 1e-3
        assert any(event["name"] == "CYCLE_START" for event in events)
        assert "unseen" not in str(events)


def replicas_may_differ_and_infinities_stay() -> None:
    net = model(seed=hvd.rank())
    trained(wrapped(net), net, steps=2)  # with a warning, as the launcher's test sees
    net = model()
    optimizer = wrapped(net)
    x, y = data(hvd.rank())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = [p.detach().clone() for p in net.parameters()]
    loss = cross_entropy(net(x), y) * (float("inf") if hvd.rank() == 1 else 1.0)
    scaler.scale(loss).backward()
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0, "the scaler of a rank has not seen the infinity of another"
    assert all(map(torch.equal, before, net.parameters()))


def batch_norm_is_that_of_the_joint_batch() -> None:
    torch.manual_seed(1)
    rows = torch.randn(10, 3, 4)
    own = rows[:3] if hvd.rank() == 0 else rows[3:]
    plain, synced = torch.nn.BatchNorm1d(3), hvd.SyncBatchNorm(3)
    synced.load_state_dict(copy.deepcopy(plain.state_dict()))
    x, whole = own.clone().requires_grad_(), rows.clone().requires_grad_()
    weights = torch.randn(10, 3, 4)
    (plain(whole) * weights).sum().backward()
    (synced(x) * (weights[:3] if hvd.rank() == 0 else weights[3:])).sum().backward()
    assert whole.grad is not None and x.grad is not None and synced.weight.grad is not None
    torch.testing.assert_close(x.grad, whole.grad[:3] if hvd.rank() == 0 else whole.grad[3:])
    torch.testing.assert_close(hvd.allreduce(synced.weight.grad, op=hvd.Sum), plain.weight.grad)
    torch.testing.assert_close(synced.running_var, plain.running_var)


def a_rank_without_batches_joins() -> None:
    net = model()
    optimizer = wrapped(net)
    trained(optimizer, net, steps=4 if hvd.rank() == 0 else 1)
    assert hvd.join() == 0, "rank 0 comes last"
    assert len(set(hvd.allgather_object(str([p.tolist() for p in net.parameters()])))) == 1
    del optimizer
    total = hvd.allreduce(torch.ones(1), name="more", op=hvd.Sum) if hvd.rank() == 1 else torch.ones(1)
    assert float(total) == 1.0 and hvd.join() == 1


def answers_are_those_of_this_machine() -> None:
    assert hvd.gloo_built() and hvd.gloo_enabled() and not hvd.mpi_enabled()
    assert not hvd.nccl_built() and not hvd.ddl_built() and not hvd.ccl_built()
    assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (0, 1, True)
    assert (hvd.local_rank(), hvd.local_size()) == (hvd.rank(), hvd.size()) == (int(os.environ["HOROVOD_RANK"]), 2)
    assert "agmerge" in str(horovod.__file__) and horovod.__version__ == "0.28.1"


def it_begins_again_after_shutdown() -> None:
    for _ in range(2):
        hvd.shutdown()
        assert not hvd.is_initialized()
        hvd.init(process_sets=[hvd.ProcessSet([0])])
        assert hvd.size() == 2


def refusals_name_the_remedy() -> None:
    for refused, words in (
        (lambda: __import__("horovod.tensorflow"), "install Horovod"),
        (lambda: __import__("horovod.spark"), "horovodrun"),
        (lambda: hvd.no_such_name, "agmerge"),
        (lambda: horovod.run(print), "horovodrun"),
        (lambda: wrapped(model(), op=hvd.Adasum), "Adasum"),
        (lambda: hvd.allreduce(torch.ones(1), op=hvd.Adasum), "Adasum"),
    ):
        try:
            refused()
        except (ImportError, AttributeError, NotImplementedError, RuntimeError, ValueError) as error:
            assert words in str(error), error
        else:
            raise AssertionError(words)


SCENARIOS = (
    training_equals_one_process,
    own_compressors_sum_what_they_send,
    calls_are_matched_by_name,
    a_timeline_has_the_phases,
    replicas_may_differ_and_infinities_stay,
    batch_norm_is_that_of_the_joint_batch,
    a_rank_without_batches_joins,
    answers_are_those_of_this_machine,
    refusals_name_the_remedy,
    it_begins_again_after_shutdown,
)


def main() -> None:
    hvd.init()
    if sys.argv[2:] == ["compression"]:  # the script's own word is fp16
        net = model()
        optimizer = wrapped(net, compression=hvd.Compression.fp16)
        print(optimizer.stats()["compressor"], flush=True)
    elif sys.argv[2:] == ["waits"]:
        (FOLDER / f"waits {hvd.rank()}").write_text(str(os.getpid()))
        time.sleep(300)
    else:
        for scenario in SCENARIOS:
            scenario()
            print(f"ok {scenario.__name__}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
