# SPDX-License-Identifier: Apache-2.0
"""The README is short, and each of its lines runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import on_ranks

TEXT = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
LINES = dict(re.findall(r"^\| \[([^\]|]+)\]\([^)]+\) \| `([^`]+)` \|$", TEXT, re.MULTILINE))
FULL = re.search(r"```diff\n(.*?)```", TEXT, re.DOTALL)
CLIPPED = re.search(r"```python\n(.*?)```", TEXT, re.DOTALL)


def run(source: str, **names: Any) -> dict[str, Any]:
    """Run lines of the README with these names; return all names after."""
    exec(compile(source, "README.md", "exec"), names)
    return names


def test_it_has_at_most_130_lines_and_the_words() -> None:
    assert len(TEXT.splitlines()) <= 130
    for words in ("DGC", "Gaussiank", "RedSync", "SIDCo", "ADTopk", "make train", "make test", "inter-worker"):
        assert words in TEXT, words


def test_every_framework_has_its_line() -> None:
    assert list(LINES) == ["DistributedDataParallel", "Hugging Face Trainer", "Accelerate", "Lightning", "Horovod"]


def test_the_script_and_clipping_run() -> None:
    assert FULL is not None and CLIPPED is not None
    source = "\n".join(line[1:] for line in FULL[1].splitlines() if not line.startswith("-"))

    def body(rank: int, model: torch.nn.Module) -> list[float]:
        generator = torch.Generator().manual_seed(rank)
        batches = [(torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator))] * 2
        names = run(source, Net=lambda: model, batches=batches)
        names["loss"] = torch.nn.functional.cross_entropy(model(batches[0][0]), batches[0][1])
        run(CLIPPED[1], **names)
        return [float(parameter.sum()) for parameter in model.parameters()]

    first, second = on_ranks(2, torch.nn.Linear(6, 3), body)
    assert first == second


def test_the_line_of_distributed_data_parallel_runs(tmp_path: Path) -> None:
    import torch.distributed as dist

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
        optimizer = torch.optim.AdamW(model.parameters())
        run("import agmerge\n" + LINES["DistributedDataParallel"], model=model, optimizer=optimizer)
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
    finally:
        import agmerge

        agmerge.shutdown()
        dist.destroy_process_group()


@pytest.mark.parametrize("framework", ["Hugging Face Trainer", "Accelerate", "Lightning"])
def test_the_lines_of_frameworks_name_what_is_there(framework: str) -> None:
    """They train with these lines in tests/distributed/integrations; here the names are held against the modules."""
    line = LINES[framework]
    module, name = re.search(r"agmerge\.integrations\.(\w+)\.(\w+)\(", line).groups()  # type: ignore[union-attr]
    pytest.importorskip({"transformers": "transformers", "accelerate": "accelerate"}.get(module, module))
    import agmerge

    assert callable(getattr(getattr(agmerge.integrations, module), name))
