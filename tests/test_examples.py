"""The examples' command lines and models; ``tests/distributed`` runs the scripts."""

from __future__ import annotations

import mnist
import models
import pytest
import synthetic_benchmark
import torch

SCRIPTS = {"mnist": mnist.arguments, "synthetic_benchmark": synthetic_benchmark.arguments}
HOROVODS = {  # flag, and what it is without one
    "mnist": {
        "test_batch_size": 1000,
        "epochs": 10,
        "lr": 0.01,
        "momentum": 0.5,
        "no_cuda": False,
        "seed": 42,
        "log_interval": 10,
        "fp16_allreduce": False,
        "gradient_predivide_factor": 1.0,
    },
    "synthetic_benchmark": {
        "fp16_allreduce": False,
        "model": "resnet50",
        "batch_size": 32,
        "num_warmup_batches": 10,
        "num_batches_per_iter": 10,
        "num_iters": 10,
        "no_cuda": False,
    },
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_horovods_flags_have_horovods_defaults(script: str) -> None:
    assert HOROVODS[script].items() <= vars(SCRIPTS[script]([])).items()


@pytest.mark.parametrize(
    "script, line, words",
    [
        ("mnist", "--use-adasum", "does not combine gradients by Adasum"),
        ("mnist", "--fp16-allreduce --compression topk", "contradict"),
        ("synthetic_benchmark", "--use-adasum", "does not combine gradients by Adasum"),
        ("synthetic_benchmark", "--fp16-allreduce --compression topk", "contradict"),
        ("synthetic_benchmark", "--num-iters 0", "less than 1"),
    ],
)
def test_what_cannot_be_done_is_refused(capsys: pytest.CaptureFixture[str], script: str, line: str, words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        SCRIPTS[script](line.split())
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "line, compression",
    [("", "none"), ("--fp16-allreduce", "fp16"), ("--fp16-allreduce --compression fp16", "fp16")],
)
def test_the_benchmark_is_dense_as_horovods_unless_told(line: str, compression: str) -> None:
    assert synthetic_benchmark.arguments(line.split()).compression == compression


@pytest.mark.parametrize(
    "env, launcher",
    [
        ({}, "none known"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "mpirun"),
        ({"HOROVOD_RANK": "0", "OMPI_COMM_WORLD_RANK": "0"}, "horovodrun"),
        ({"TORCHELASTIC_RUN_ID": "none"}, "torchrun"),
    ],
)
def test_the_launcher_is_known_by_its_variables(env: dict[str, str], launcher: str) -> None:
    assert synthetic_benchmark.launcher(env) == launcher


@pytest.mark.parametrize(
    "name, parameters, unit",
    [("resnet50", 25_557_032, "img"), ("cnn", 606_472, "img"), ("gpt2", 13_842_432, "sequences")],
)
def test_a_model_has_its_size_and_learns(name: str, parameters: int, unit: str) -> None:
    if name == "gpt2":
        pytest.importorskip("transformers")
    work = models.build(name, batch_size=2, image_size=64).to(torch.device("cpu"))
    assert sum(parameter.numel() for parameter in work.model.parameters()) == parameters
    assert work.unit == unit and len(work.x) == 2
    loss = work.loss()
    loss.backward()
    assert torch.isfinite(loss) and all(p.grad is not None for p in work.model.parameters())


def test_an_unknown_model_is_told_the_names() -> None:
    with pytest.raises(ValueError, match=r"unknown model 'resnet5'; models: .*cnn, .*gpt2, .*resnet50"):
        models.build("resnet5", batch_size=2)


def test_a_model_whose_library_is_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install transformers"):
        models.build("gpt2", batch_size=2)
