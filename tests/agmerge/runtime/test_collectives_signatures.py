# SPDX-License-Identifier: Apache-2.0
"""The calls on tensors and objects have the arguments of ``horovod.torch``, in its order and with its defaults."""

from __future__ import annotations

import inspect

import pytest

import agmerge
from agmerge.runtime import collectives

FACTORS = "prescale_factor=1.0, postscale_factor=1.0"
REDUCE = f"average=None, name=None, op=None, {FACTORS}, process_set"
CAST_REDUCE = f"average=None, name=None, compression=none, op=None, {FACTORS}, process_set"
SCATTER = f"name=None, op=average, process_set, {FACTORS}"
CAST_SCATTER = f"name=None, compression=none, op=average, process_set, {FACTORS}"
BROADCAST = "tensor, root_rank, name=None, process_set"
CALLS = {  # as in Horovod 0.28, whose default of process_set is a constant for all ranks
    "allreduce": f"tensor, {CAST_REDUCE}",
    "allreduce_": f"tensor, {REDUCE}",
    "allreduce_async": f"tensor, {REDUCE}",
    "allreduce_async_": f"tensor, {REDUCE}",
    "grouped_allreduce": f"tensors, {CAST_REDUCE}",
    "grouped_allreduce_": f"tensors, {REDUCE}",
    "grouped_allreduce_async": f"tensors, {REDUCE}",
    "grouped_allreduce_async_": f"tensors, {REDUCE}",
    "sparse_allreduce_async": "tensor, name, op=average, process_set",
    "reducescatter": f"tensor, {CAST_SCATTER}",
    "reducescatter_async": f"tensor, {SCATTER}",
    "grouped_reducescatter": f"tensors, {CAST_SCATTER}",
    "grouped_reducescatter_async": f"tensors, {SCATTER}",
    "allgather": "tensor, name=None, process_set",
    "allgather_async": "tensor, name=None, process_set",
    "grouped_allgather": "tensors, name=None, process_set",
    "grouped_allgather_async": "tensors, name=None, process_set",
    "alltoall": "tensor, splits=None, name=None, process_set",
    "alltoall_async": "tensor, splits=None, name=None, process_set",
    "broadcast": BROADCAST,
    "broadcast_": BROADCAST,
    "broadcast_async": BROADCAST,
    "broadcast_async_": BROADCAST,
    "broadcast_object": "obj, root_rank=0, name=None, process_set",
    "allgather_object": "obj, name=None, process_set",  # the last one is ours
    "barrier": "process_set",
    "join": "device=-1",
    "poll": "handle",
    "synchronize": "handle",
}
OWN = {"as_bytes", "root_of"}  # for this library's own files


def shown(parameter: inspect.Parameter) -> str:
    """Return a parameter as ``name=default``."""
    assert parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    if parameter.default is inspect.Parameter.empty or parameter.name == "process_set":
        return parameter.name
    return f"{parameter.name}={getattr(parameter.default, 'value', parameter.default)}"


@pytest.mark.parametrize("name", CALLS)
def test_a_call_has_horovods_arguments(name: str) -> None:
    parameters = inspect.signature(getattr(agmerge, name)).parameters
    assert ", ".join(map(shown, parameters.values())) == CALLS[name]
    if "process_set" in parameters:
        assert parameters["process_set"].default is None


def test_every_call_is_compared() -> None:
    assert set(collectives.__all__) == CALLS.keys() | OWN
