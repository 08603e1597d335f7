# SPDX-License-Identifier: Apache-2.0
"""Draw what ``sync="updates"`` does to one parameter of two workers: ``docs/pictures/adaptive.svg``.

    python benchmarks/adaptive_picture.py

Both workers have eight parameters and AdamW, and send one of the eight after each step. Nothing in it is measured.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

WORKERS, ELEMENTS, STEPS, SHOWN, RATE = 2, 8, 24, 3, 0.05
GOALS = (1.0, 0.5)  # of the two workers' losses, which are noisy parabolas


@dataclass
class Course:
    """Hold where the shown parameter was after each step."""

    base: list[float] = field(default_factory=lambda: [0.0])  # what all workers share
    own: list[list[float]] = field(default_factory=lambda: [[0.0] for _ in range(WORKERS)])
    sent: list[list[int]] = field(default_factory=lambda: [[] for _ in range(WORKERS)])  # the steps after which it was


def course(carry: str, seed: int = 4) -> Course:
    """Return the course of one parameter with ``carry`` "apply" or "hold"."""
    source = torch.Generator().manual_seed(seed)
    base, seen = torch.zeros(ELEMENTS), Course()
    kept = [torch.zeros(ELEMENTS) for _ in range(WORKERS)]
    own = [torch.zeros(ELEMENTS, requires_grad=True) for _ in range(WORKERS)]
    inner = [torch.optim.AdamW([parameter], lr=RATE) for parameter in own]
    for step in range(1, STEPS + 1):
        total = torch.zeros(ELEMENTS)
        for worker, (parameter, optimizer) in enumerate(zip(own, inner, strict=True)):
            noise = 0.4 * torch.randn(ELEMENTS, generator=source)
            parameter.grad = parameter.detach() - GOALS[worker] + noise
            optimizer.step()
            seen.own[worker].append(parameter[SHOWN].item())
            way = base - parameter.detach() + (kept[worker] if carry == "hold" else 0.0)
            selected = int(way.abs().argmax())
            message = torch.zeros(ELEMENTS)
            message[selected] = way[selected]
            kept[worker], total = way - message, total + message
            if selected == SHOWN:
                seen.sent[worker].append(step)
        base = base - total / WORKERS
        _put_back(own, base, kept, carry)
        seen.base.append(base[SHOWN].item())
    return seen


@torch.no_grad()
def _put_back(own: list[Tensor], base: Tensor, kept: list[Tensor], carry: str) -> None:
    """Set every worker's parameters to what it computes with in the next step."""
    for parameter, left in zip(own, kept, strict=True):
        parameter.copy_(base - left if carry == "apply" else base)


def draw(file: Path) -> None:
    """Write the picture."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "adaptive"
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True)
    titles = {
        "apply": 'carry="apply": a worker goes on from what it has done',
        "hold": 'carry="hold": all go on from what they share',
    }
    for panel, (carry, title) in zip(axes, titles.items(), strict=True):
        seen = course(carry)
        panel.step(range(STEPS + 1), seen.base, where="post", color="black", linewidth=2, label="shared")
        for worker, colour in enumerate(("tab:blue", "tab:orange")):
            line = seen.own[worker]
            panel.plot(
                line, color=colour, linewidth=1, marker=".", markersize=4, label=f"after a step of worker {worker}"
            )
            steps = seen.sent[worker]
            panel.scatter(steps, [line[step] for step in steps], s=60, facecolors="none", edgecolors=colour, zorder=3)
        panel.scatter([], [], s=60, facecolors="none", edgecolors="grey", label="sent after this step")
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("step")
    axes[0].set_ylabel("one parameter")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    """Draw it."""
    parser = argparse.ArgumentParser(description="a picture of what is exchanged with sync='updates'")
    parser.add_argument("--file", type=Path, default=Path("docs/pictures/adaptive.svg"))
    draw(parser.parse_args().file)


if __name__ == "__main__":
    main()
