# SPDX-License-Identifier: Apache-2.0
"""What advise sees of a plain script: where it averages and clips, whose losses its passes are, and the lines then."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from agmerge.cli import advice, advise_script, advisor
from agmerge.cli.advise_watch import WATCHED, Watch

ROOT = Path(__file__).resolve().parents[3]
X = torch.ones(2, 4)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """A watch over this file, in which collectives do nothing."""
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, *_, **__: tensor)
    watch = Watch(__file__)
    watch.install()
    yield watch
    watch.uninstall()


def made(width: int = 4) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, width)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def line_of(text: str) -> int:
    """The number of the one line of this file that begins so."""
    (found,) = [number for number, line in enumerate(Path(__file__).read_text().splitlines(), 1) if text in line[:60]]
    return found


def average_each(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)  # one by one


def average_flat(model: nn.Module) -> None:
    flat = torch.cat([parameter.grad.view(-1) for parameter in model.parameters() if parameter.grad is not None])
    dist.all_reduce(tensor=flat)  # as one vector


def log_loss(model: nn.Module) -> None:
    dist.all_reduce(torch.zeros(()))


@pytest.mark.parametrize(
    ("between", "line"),
    [(average_each, "dist.all_reduce(parameter.grad)  #"), (average_flat, "dist.all_reduce(tensor=flat)  #"),
     (log_loss, None)],
)  # fmt: skip
def test_a_script_that_averages_by_itself_hears_in_which_line(between: Any, line: str | None, watch: Watch) -> None:
    model, optimizer = made()
    for _ in range(WATCHED):
        model(X).sum().backward()
        between(model)
        optimizer.step()
        watch.stepped(optimizer)
    told = watch.edits(__file__, {})
    if line is None:
        assert told == []
    else:
        assert told == [
            f"it averages gradients itself in line {line_of(f'    {line}')}. Delete this, because agmerge averages "
            "them. Then run advise again"
        ]


def test_after_it_everything_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dist.all_reduce, torch.nn.utils.clip_grad_norm_
    watch = Watch(__file__)
    watch.install()
    assert dist.all_reduce is not before[0] and torch.nn.utils.clip_grad_norm_ is not before[1]
    watch.uninstall()
    assert (dist.all_reduce, torch.nn.utils.clip_grad_norm_) == before


def test_clipping_is_written_anew_with_the_scripts_own_limit(watch: Watch) -> None:
    model, optimizer = made()
    limit = 1.0
    for _ in range(WATCHED):
        model(X).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=2 * limit)
        optimizer.step()
        watch.stepped(optimizer)
    assert watch.edits(__file__, {optimizer: "opt"}) == [
        f"Replace the clipping in line {line_of('        torch.nn.utils.clip_grad')} by opt.clip_grad_norm_(2 * limit)."
    ]


def test_a_loss_that_runs_through_anothers_parameters_is_told_and_passes_are_counted(watch: Watch) -> None:
    (first, first_steps), (second, second_steps) = made(), made()
    for _ in range(WATCHED):
        first(X).sum().backward()
        first(second(X).detach()).sum().backward()
        first_steps.step()
        watch.stepped(first_steps)
        first(second(X)).mean().backward()
        second_steps.step()
        watch.stepped(second_steps)
    (told,) = watch.edits(__file__, {first_steps: "D", second_steps: "G"})
    assert told.startswith(f"Put the backward pass in line {line_of('        first(second(X)).mean().backward')} into")
    assert "`with D.no_sync():`" in told
    assert [habits.passes for habits in watch.habits.values()] == [{2}, {1}]

    def named() -> list[tuple[str, str]]:  # as from a hook of a step, whose caller is the script
        return advise_script.pairs(__file__, [*watch.habits])

    names = named()
    assert names == [("first_steps", "first"), ("second_steps", "second")]
    lines = advice.plain_lines(names, [2, 1], "amp")
    made_lines = [line for line in lines if "DistributedOptimizer" in line]
    assert made_lines == [
        "first_steps = agmerge.DistributedOptimizer(first_steps, first.named_parameters(), "
        "backward_passes_per_step=2, scaler=amp)",
        "second_steps = agmerge.DistributedOptimizer(second_steps, second.named_parameters(), scaler=amp)",
    ]
    pasted = advice.changes(lines, [told], several=True, scaled=False)
    assert not any(re.match(r"    \S", line) for line in pasted)  # no lines that run by themselves: they do not


GAN = """
import torch
D, G = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
d_steps, g_steps = torch.optim.Adam(D.parameters()), torch.optim.Adam(G.parameters())
for step in range(3):
    x = torch.randn(8, 64)
    D.zero_grad()
    (D(x).mean() - D(G(x).detach()).mean()).backward()
    d_steps.step()
    G.zero_grad()
    D(G(x)).mean().backward()
    g_steps.step()
"""


@pytest.mark.timeout(100)
def test_a_short_script_with_two_optimizers_gets_a_line_for_each(tmp_path: Path) -> None:
    (tmp_path / "gan.py").write_text(GAN)
    ended = subprocess.run(
        [sys.executable, "-m", "agmerge", "advise", "gan.py"], cwd=tmp_path, capture_output=True, text=True, timeout=90,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RANK": "0", "WORLD_SIZE": "1"},
    )  # fmt: skip
    assert ended.returncode == advisor.NO_ANSWER, ended.stderr
    for words in (
        "Put the backward pass in line 11 into `with d_steps.no_sync():`",
        "d_steps = agmerge.DistributedOptimizer(d_steps, D.named_parameters())",
        "g_steps = agmerge.DistributedOptimizer(g_steps, G.named_parameters())",
        "agmerge.broadcast_parameters(G.state_dict(), root_rank=0)",
    ):
        assert words in ended.stderr
