# SPDX-License-Identifier: Apache-2.0
"""Every public name of ``horovod.torch`` 0.28.1, and those of its modules that scripts import from."""

from __future__ import annotations

import inspect

import pytest

from agmerge.horovod_door import compression
from agmerge.horovod_door.stage import horovod

NAMES = {  # by module in `horovod`
    "torch": """
        allgather allgather_async allgather_object allreduce allreduce_ allreduce_async allreduce_async_ alltoall
        alltoall_async barrier broadcast broadcast_ broadcast_async broadcast_async_ broadcast_object
        broadcast_optimizer_state broadcast_parameters ccl_built cross_rank cross_size cuda_built ddl_built gloo_built
        gloo_enabled grouped_allgather grouped_allgather_async grouped_allreduce grouped_allreduce_
        grouped_allreduce_async grouped_allreduce_async_ grouped_reducescatter grouped_reducescatter_async init
        is_initialized join local_rank local_size mpi_built mpi_enabled mpi_threads_supported nccl_built poll rank
        reducescatter reducescatter_async rocm_built shutdown size sparse_allreduce_async start_timeline stop_timeline
        synchronize Adasum Average Compression DistributedOptimizer HorovodInternalError Max Min ProcessSet Product Sum
        SyncBatchNorm add_process_set global_process_set remove_process_set
    """,
    "torch.mpi_ops": "allreduce_async_ barrier is_homogeneous join poll synchronize Average Sum gpu_available",
    "torch.functions": "allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters",
    "torch.optimizer": "DistributedOptimizer",
    "torch.compression": "Compression Compressor FP16Compressor NoneCompressor",
    "torch.sync_batch_norm": "SyncBatchNorm",
    "torch.elastic": "ElasticSampler TorchState init run shutdown run_fn",
    "torch.elastic.sampler": "ElasticSampler",
    "torch.elastic.state": """
        ModelStateHandler OptimizerStateHandler SamplerStateHandler StateHandler TorchState get_handler_registry
        set_handler_registry ObjectState
    """,
    "common.elastic": "ObjectState State run_fn",
    "common.exceptions": "HorovodInternalError HorovodVersionMismatchError HostsUpdatedInterrupt",
    "common.process_sets": "ProcessSet add_process_set global_process_set remove_process_set",
    "common.util": "gloo_built gpu_available mpi_built nccl_built",
}
ARGUMENTS = {  # Horovod's, in their order
    "DistributedOptimizer": """
        optimizer named_parameters compression backward_passes_per_step op gradient_predivide_factor num_groups groups
        sparse_as_dense process_set
    """,
    "allreduce": "tensor average name compression op prescale_factor postscale_factor process_set",
    "allreduce_async_": "tensor average name op prescale_factor postscale_factor process_set",
    "allgather": "tensor name process_set",
    "broadcast_async": "tensor root_rank name process_set",
    "alltoall": "tensor splits name process_set",
    "reducescatter": "tensor name compression op process_set prescale_factor postscale_factor",
    "init": "comm process_sets",
    "start_timeline": "file_path mark_cycles",
}


@pytest.mark.parametrize("module", NAMES)
def test_every_name_is_there(module: str) -> None:
    assert set(NAMES[module].split()) <= set(horovod.MODULES[module])


def test_every_module_is_known() -> None:
    assert set(NAMES) | {"common", "common.basics"} == set(horovod.MODULES)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_are_horovods(name: str) -> None:
    given = list(inspect.signature(horovod.MODULES["torch"][name]).parameters)
    assert given == ARGUMENTS[name].split()


def test_names_that_are_not_here_are_refused_with_the_remedy() -> None:
    refusals = horovod.Refusals()
    horovods = horovod.refusal("spark.lightning", "horovod")
    assert "horovodrun" in horovods and "horovod.spark.lightning" in horovods
    assert refusals.find_spec("numpy.linalg", None) is None  # another's module is none of ours
    with pytest.raises(NotImplementedError, match="horovodrun"):
        horovod.run(print, np=2)


def test_a_scripts_own_compressor_has_no_name() -> None:
    class Own(compression.Compressor):
        pass

    named = [compression.name_of(one) for one in (compression.Compression.none, compression.FP16Compressor(), Own)]
    assert named == ["none", "fp16", None]
