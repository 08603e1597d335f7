# SPDX-License-Identifier: Apache-2.0
"""``agmerge.from_params`` reads the dictionaries of ADTopk, GRACE and FGBuff; what cannot be is refused by its name."""

from __future__ import annotations

from copy import deepcopy
from itertools import product
from typing import Any

import pytest
import torch
from support import mlp, seeded

import agmerge
import sparsifiers
from agmerge.testing import run

QUANTISERS = "signsgd signum efsignsgd onebit qsgd qsgd_cuda natural natural_cuda terngrad 8bit".split()
ADTOPKS = "none dgc topk gaussiank redsync redsynctrim sidcoexp sidcogp sidcogam adtopk adtopk-i tradtopk powersgd"
COMBINATIONS: dict[str, dict[str, list[str]]] = {  # what each project's functions compare with
    "ADTopk": {
        "compressor": [*ADTOPKS.split(), "threshold", "randomk"],
        "memory": ["none", "residual", "residualgtopk", "dgc"],
        "comm_mode": ["allreduce", "allgather", "allgather_fast"],
    },
    "GRACE": {
        "compressor": ["none", "fp16", "dgc", "topk", "randomk", "threshold", "powersgd", *QUANTISERS],
        "memory": ["none", "residual", "dgc", "powersgd", "efsignsgd"],
        "communicator": ["allreduce", "allgather", "broadcast", "alltoall"],
    },
    "FGBuff": {
        "compressor": [*ADTOPKS.replace("tradtopk powersgd", "topkef randomk").split()[:9], "topkef", "randomk"],
        "memory": ["none", "residual", "residualgtopk", "dgc"],
        "communicator": ["allreduce", "allgather"],
    },
}


def means_something(compressor: str, memory: str, way: str) -> bool:
    """Tell which combinations are to be taken: the rule in other words than the library's."""
    if compressor in QUANTISERS or memory == "efsignsgd" or way == "alltoall":
        return False
    if compressor in ("none", "fp16", "powersgd"):
        return memory != "dgc" and (memory != "powersgd" or compressor == "powersgd")
    return memory != "powersgd" and (way != "allreduce" or compressor == "randomk")


@pytest.mark.parametrize("project", COMBINATIONS)
def test_every_combination_of_a_project_is_taken_or_refused_by_name(project: str) -> None:
    names = COMBINATIONS[project]
    taken: dict[tuple[str, ...], dict[str, Any]] = {}
    for values in product(*names.values()):
        params: dict[str, Any] = dict(zip(names, values, strict=True))
        if params["compressor"] == "threshold" and project == "GRACE":
            params |= {"compress_ratio": 0.1}
        try:
            taken[values] = agmerge.from_params(params)
        except ValueError as refused:
            assert any(f"{key}={value!r}" in str(refused) for key, value in params.items()), str(refused)
    assert {values for values in product(*names.values()) if means_something(*values)} == set(taken)
    model = seeded(mlp)

    def construct(rank: int) -> None:
        for arguments in taken.values():
            own = deepcopy(model)
            sgd = torch.optim.SGD(own.parameters(), lr=0.1)
            agmerge.DistributedOptimizer(sgd, own.named_parameters(), **deepcopy(arguments)).close()

    run(2, construct)


@pytest.mark.parametrize(
    "params, arguments",
    [
        ({}, {"compression": "none"}),
        (  # ADTopk's scripts
            {"comm_mode": "allreduce", "compressor": "none", "memory": "none", "send_size_aresame": True},
            {"compression": "none"},
        ),
        (
            {"comm_mode": "allgather_fast", "compressor": "adtopk", "memory": "residual", "send_size_aresame": False},
            {"compression": "adtopk", "memory": "residual", "exchange": "sparse", "density": 0.01},
        ),
        (  # GRACE's guide, for Horovod and for DDP
            {"compressor": "topk", "memory": "residual", "communicator": "allgather"},
            {"compression": "topk", "memory": "residual", "exchange": "sparse", "density": 0.3},
        ),
        (
            {"compressor": "fp16", "memory": "residual", "communicator": "allreduce", "world_size": 4},
            {"compression": "fp16", "memory": "residual"},
        ),
        (
            {"compressor": "powersgd", "memory": "powersgd", "compress_rank": 4},
            {"compression": "powersgd", "memory": "residual", "exchange": "sparse", "rank": 4},
        ),
        (
            {"compressor": "randomk", "memory": "residual", "compress_ratio": 0.05},
            {"compression": "randomk", "memory": "residual", "exchange": "masked", "density": 0.05},
        ),
        (  # FGBuff's scripts
            {"compressor": "gaussiank", "memory": "residual", "density": 0.05, "communicator": "allgather"},
            {"compression": "gaussiank", "memory": "residual", "exchange": "sparse", "density": 0.05},
        ),
    ],
)
def test_published_dictionaries(params: dict[str, Any], arguments: dict[str, Any]) -> None:
    before = dict(params)
    assert agmerge.from_params(params) == arguments
    assert params == before


@pytest.mark.parametrize(
    "params, density",
    [
        ({"comm_mode": "allgather", "compressor": "dgc"}, 0.01),
        ({"comm_mode": "allgather", "compressor": "topk", "model_named_parameters": []}, 0.01),
        ({"communicator": "allgather", "compressor": "dgc"}, 0.3),
        ({"communicator": "allgather", "compressor": "dgc", "model_named_parameters": []}, 0.3),
        ({"communicator": "allgather", "compressor": "randomk"}, 0.3),
        ({"communicator": "allgather", "compressor": "topk", "model_named_parameters": []}, 0.01),
        ({"communicator": "allgather", "compressor": "topkef", "model_named_parameters": []}, 0.1),
        ({"communicator": "allgather", "compressor": "redsync"}, 0.01),
    ],
)
def test_the_density_that_is_left_out_is_that_of_the_project(params: dict[str, Any], density: float) -> None:
    assert agmerge.from_params(params)["density"] == density


@pytest.mark.parametrize(
    "given, memory",
    [
        ({}, "dgc"),  # which takes the optimizer's momentum, else 0.9
        ({"momentum": 0.8}, "dgc(clipping=None, masking=True, momentum=0.8, nesterov=False)"),
        ({"gradient_clipping": False}, "dgc"),
        ({"gradient_clipping": 6.0}, "dgc(clipping=6.0, masking=True, momentum=None, nesterov=False)"),
    ],
)
def test_momentum_and_clipping_are_of_the_memory(given: dict[str, Any], memory: str) -> None:
    params = {"compressor": "dgc", "memory": "dgc", "communicator": "allgather", **given}
    assert str(agmerge.from_params(params)["memory"]) == memory


def test_a_fixed_threshold_is_graces_and_has_a_bound_here() -> None:
    params = {"compressor": "threshold", "memory": "residual", "communicator": "allgather", "compress_ratio": 0.2}
    for given, tau in (({}, 0.01), ({"threshold": 0.5}, 0.5)):
        compression = agmerge.from_params({**params, **given})["compression"]
        assert isinstance(compression, sparsifiers.Sparsifier)
        assert (compression.name, compression.density, compression.options()) == ("threshold", 0.2, {"tau": tau})
    follows = agmerge.from_params({"compressor": "threshold", "memory": "residual", "comm_mode": "allgather"})
    assert (follows["compression"], follows["density"]) == ("threshold", 0.01)


@pytest.mark.parametrize(
    "params, words",
    [
        ({"compresor": "topk"}, "unknown key 'compresor'. Choose from: compressor, memory, comm_mode, "),
        ({"comm_mode": "allgather", "communicator": "allgather"}, "'comm_mode' and 'communicator' mean the same"),
        ({"density": 0.1, "compress_ratio": 0.1}, "'compress_ratio' and 'density' mean the same"),
        ({"momentum": 0.9}, "momentum=0.9 has an effect with memory='dgc' only"),
        ({"compressor": "topk", "threshold": 0.1}, "threshold=0.1 has an effect with compressor='threshold' only"),
        ({"compressor": "threshold", "threshold": 0.1, "comm_mode": "allgather"}, "has no effect: ADTopk"),
        ({"compressor": "threshold", "communicator": "allgather"}, "compress_ratio=ELEMENTS / ALL"),
        ({"compressor": "imbalancetopktime"}, "compressor='imbalancetopktime' is unknown. Choose from: topk, "),
        (
            {"compressor": "topk", "memory": "residul"},
            "memory='residul' is not supported with compressor='topk': it is unknown",
        ),
        (
            {"compressor": "topk"},
            "communicator='allreduce' (the default) is not supported",
        ),
        (
            {"compressor": "topk", "comm_mode": "gather"},
            "comm_mode='gather' is unknown. Choose from: allreduce, allgather",
        ),
        ({"compressor": "signsgd", "quantum_num": 3}, "pass compression='onebit', without a memory"),
        ({"compressor": "qsgd", "quantum_num": 127, "bucket_size": 128}, "pass compression='qsgd'"),
        ({"compressor": "natural"}, "pass compression='int8'"),
        ({"compressor": "u8bit"}, "pass compression='int8'"),
        ({"compressor": "terngrad"}, "pass compression='terngrad'"),
        (
            {"compressor": "dgc", "memory": "dgc", "communicator": "allgather", "gradient_clipping": True},
            "gradient_clipping=True has almost no effect:",
        ),
    ],
)
def test_what_has_no_meaning_is_refused_with_what_to_do(params: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as refused:
        agmerge.from_params(params)
    assert words in str(refused.value)


def test_what_is_no_dictionary_is_refused() -> None:
    with pytest.raises(TypeError, match=": expected a dictionary, such as comm_params"):
        agmerge.from_params("topk")  # type: ignore[arg-type]


@pytest.mark.parametrize("wire", ["sign", "int8", "2bit"])
def test_what_refusals_advise_works(wire: str) -> None:
    """Every value of a step goes with a code of its own, and replicas stay equal."""
    model = seeded(mlp)

    def step(rank: int) -> list[torch.Tensor]:
        own = deepcopy(model)
        optimizer = agmerge.DistributedOptimizer(
            torch.optim.SGD(own.parameters(), lr=0.1), own.named_parameters(), "topk", density=1.0, wire=wire
        )
        own(torch.full((2, own[0].in_features), rank + 1.0)).sum().backward()
        optimizer.step()
        return [parameter.detach() for parameter in own.parameters()]

    first, second = run(2, step)
    assert all(map(torch.equal, first, second))
    assert not any(map(torch.equal, first, model.parameters()))
