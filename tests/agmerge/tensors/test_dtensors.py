# SPDX-License-Identifier: Apache-2.0
"""DTensors as what this rank holds of them, on the first of two pretended ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._flat_param import FlatParameter
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from agmerge.backends import torch_objects
from agmerge.engine.grad_hooks import HandedOver
from agmerge.runtime.process_sets import by_ranks, parse_process_set
from agmerge.tensors.parameters import (
    Gradients,
    ParameterTable,
    gradient_of,
    is_dtensor,
    like,
    local_of,
    set_gradient,
    shard_of,
    why_not_exchangeable,
)
from agmerge.updates.local_replica import DeltaTable


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """Two ranks of which there is only this one: nothing is sent."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    dist.destroy_process_group()


def spread(mesh: DeviceMesh, *placements: object, rows: int = 3, all_rows: int = 5) -> nn.Parameter:
    """A parameter of which this rank holds ``rows`` of ``all_rows``."""
    local = torch.arange(rows * 4.0).view(rows, 4)
    shape = torch.Size([all_rows, 4])
    return nn.Parameter(DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=(4, 1)))


def test_a_plain_tensor_is_all_there_is_of_it() -> None:
    parameter, gradient = nn.Parameter(torch.ones(3)), torch.ones(3)
    assert not is_dtensor(parameter) and local_of(parameter) is parameter
    assert like(parameter, gradient) is gradient and shard_of(parameter) == why_not_exchangeable(parameter, "w") == ""
    set_gradient(parameter, gradient)
    assert parameter.grad is gradient is gradient_of(parameter, "w")
    set_gradient(parameter, None)
    assert parameter.grad is gradient_of(parameter, "w") is None


def test_what_a_rank_holds_lies_in_the_same_memory_and_has_no_history(mesh: DeviceMesh) -> None:
    parameter = spread(mesh["shard"], Shard(0))
    local = local_of(parameter)
    assert is_dtensor(parameter) and not is_dtensor(local)
    assert local.shape == (3, 4) and local.grad_fn is None and not local.requires_grad
    with torch.no_grad():
        local.add_(1.0)
        assert parameter.to_local()[0, 0] == 1.0


def test_an_update_is_spread_as_its_parameter_is_and_nothing_is_copied(mesh: DeviceMesh) -> None:
    parameter, update = spread(mesh["shard"], Shard(0)), torch.ones(3, 4)
    with torch.no_grad():
        set_gradient(parameter, update)
    gradient = parameter.grad
    assert isinstance(gradient, DTensor) and gradient.shape == parameter.shape == (5, 4)
    assert gradient.placements == parameter.placements and gradient.device_mesh == parameter.device_mesh
    found = gradient_of(parameter, "w")
    assert found is not None and found.data_ptr() == update.data_ptr()
    set_gradient(parameter, None)
    assert parameter.grad is None


def test_a_gradient_that_lies_where_the_last_one_lay_is_the_same_object(mesh: DeviceMesh) -> None:
    parameter, plain, gradients = spread(mesh["shard"], Shard(0)), nn.Parameter(torch.ones(2)), Gradients()
    home, other = torch.ones(3, 4), torch.zeros(3, 4)
    seen = []
    with torch.no_grad():
        for local in (home, None, home, other):
            gradients.set(parameter, local)
            seen.append(parameter.grad)
    assert seen[0] is seen[2] is not None and seen[1] is None
    assert isinstance(seen[3], DTensor) and seen[3].to_local().data_ptr() == other.data_ptr()
    gradients.set(plain, None)
    gradients.set(plain, update := torch.ones(2))
    assert plain.grad is update


def test_a_gradient_that_is_spread_otherwise_is_refused(mesh: DeviceMesh) -> None:
    parameter = spread(mesh["shard"], Shard(0))
    parameter.grad = DTensor.from_local(torch.ones(5, 4), mesh["shard"], [Partial()], run_check=False)
    with pytest.raises(ValueError, match=r"'w' has the placements \(S\(0\)\), but its gradient has \(P\(sum\)\)"):
        gradient_of(parameter, "w")


def test_a_shard_is_named_by_its_place_in_each_dimension_of_the_mesh(mesh: DeviceMesh) -> None:
    assert shard_of(spread(mesh["shard"], Shard(0))) == "shard 0/2 S(0)"
    assert shard_of(spread(mesh, Replicate(), Shard(1))) == "replicate 0/1 R, shard 0/2 S(1)"
    nameless = DeviceMesh("cpu", [0, 1])
    assert shard_of(spread(nameless, Shard(0))) == "mesh dimension 0 0/2 S(0)"


def test_what_is_no_shard_is_refused_by_name(mesh: DeviceMesh) -> None:
    assert why_not_exchangeable(spread(mesh["shard"], Shard(0)), "w") == ""
    assert "'w' is replicated over mesh dimension 'replicate'" in why_not_exchangeable(
        spread(mesh, Replicate(), Shard(0)), "w"
    )
    text = why_not_exchangeable(spread(mesh["shard"], Partial()), "w")
    assert "'w' is a partial sum over mesh dimension 'shard' (P(sum))" in text


def test_parameters_of_fsdp1_are_refused_by_name() -> None:
    flat, view = FlatParameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    view._fsdp_flattened = True  # type: ignore[attr-defined]  # with use_orig_params=True
    for parameter in (flat, view):
        assert "'w' belongs to FullyShardedDataParallel (FSDP1)" in why_not_exchangeable(parameter, "w")


def test_a_table_of_parameters_has_the_shapes_of_shards_and_notices_another_memory(mesh: DeviceMesh) -> None:
    parameter, empty = spread(mesh["shard"], Shard(0)), spread(mesh["shard"], Shard(0), rows=0, all_rows=1)
    table = ParameterTable(torch.optim.SGD([parameter, empty]), [("w", parameter), ("v", empty)])
    first, second = table.active()
    assert first.shape == (3, 4) and first.local.numel() == 12 and first.shard == "shard 0/2 S(0)"
    assert second.shape == (0, 4) and second.local.numel() == 0
    deltas = DeltaTable(table)
    before = deltas.snapshot()
    assert deltas.snapshot() == before
    parameter._local_tensor = parameter.to_local().detach().clone()  # as FSDP2 does when a module has been moved
    assert deltas.snapshot() != before


@pytest.mark.parametrize("change", ["foreach", "as a whole", "in place", "replaced"])
def test_a_gradient_that_is_changed_after_it_was_handed_over_is_found(mesh: DeviceMesh, change: str) -> None:
    parameter, other = spread(mesh["shard"], Shard(0)), nn.Parameter(torch.ones(2))
    table = ParameterTable(torch.optim.SGD([parameter, other]), [("w", parameter), ("b", other)])
    handed = HandedOver()
    with torch.no_grad():
        set_gradient(parameter, torch.ones(3, 4))
        other.grad = torch.ones(2)
        handed.add("w", parameter)
        handed.add("b", other)
        assert handed.error(table, 3, "") is None
        gradient = parameter.grad
        assert isinstance(gradient, DTensor)
        if change == "foreach":
            torch._foreach_mul_([gradient], torch.tensor(0.5))
        elif change == "as a whole":
            gradient.mul_(0.5)
        elif change == "in place":
            gradient.to_local().mul_(0.5)
        else:
            set_gradient(parameter, torch.ones(3, 4))
    error = handed.error(table, 3, "")
    assert error is not None and str(error).startswith("AGM103: Step 3: the gradients of 'w' ")


def test_a_process_set_is_a_group_of_torchs_or_one_dimension_of_its_mesh(mesh: DeviceMesh) -> None:
    assert parse_process_set(mesh["shard"]).members == [0, 1]
    assert parse_process_set(mesh["replicate"]).members == [0]
    assert parse_process_set(mesh["shard"].get_group()).members == [0, 1]
    assert by_ranks(mesh["shard"]) == [0, 1] and by_ranks([1]) == [1] and by_ranks(None) is None
    assert torch_objects.ranks_of([0, 1]) is None
    with pytest.raises(ValueError, match=r"has 2 dimensions. Pass one of them, such as mesh\['replicate'\]"):
        parse_process_set(mesh)
