# SPDX-License-Identifier: Apache-2.0
"""Two-level exchange beside flat ones, where the workers of a node share its port: by the cost model. A simulation.

    python benchmarks/scale_nodes.py                  # 8 nodes of 4 and of 16 workers, 100 Gbyte/s inside
    python benchmarks/scale_nodes.py --inside 80      # Gbit/s of a worker to others of its node: PCI Express

Models, rates, compute and plans are those of ``scale.py``; there each worker has a port of its own. Here a node has
one, and flat collectives are rings that cross it once in each direction, so that it carries what one worker hands on.
Of the shards of a node's sum the port carries all, which are together as large as the selection of one worker.
A merge buffer's reduce-scatter inside and its all-gather between nodes are counted one after the other, though the
links are two, and the all-gather of updates inside follows the last one, as in training.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import scale

SHAPES = ((8, 4), (8, 16))  # nodes, and workers of each
INSIDE = 800.0  # Gbit/s of a worker to others of its node, by default: NVLink
HOP = 5e-6  # seconds of a hop inside
MODELS = ("resnet152", "bert-large", "gpt2-large")
DENSITY = 0.01


@dataclass(frozen=True)
class Cluster(scale.Network):
    """Nodes of ``local`` workers each. ``beta``: of a node's port; ``inside``: seconds a byte in a node."""

    local: int
    inside: float

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return self.workers // self.local

    def scatter(self, size: Any) -> Any:
        """A reduce-scatter, or an all-gather, of so many bytes inside each node."""
        others = self.local - 1
        return others * HOP + others / self.local * size * self.inside

    def across(self, size: Any) -> Any:
        """All-gathers between nodes, one for each place: together so many bytes of a node."""
        return math.ceil(math.log2(self.nodes)) * self.alpha + (self.nodes - 1) * size * self.beta


def cluster(rate: str, nodes: int, local: int, inside: float = INSIDE) -> Cluster:
    """Return nodes with ports of a rate of ``scale.RATES``; ``inside``: Gbit/s."""
    alpha, bits = scale.RATES[rate]
    return Cluster(nodes * local, alpha, 8 / bits, local, 8 / (1e9 * inside))


@dataclass(frozen=True)
class Predicted:
    """What one exchange takes in a step."""

    seconds: float  # of the step
    port: float  # bytes that leave a node's port


def two_level(net: Cluster, selected: scale.Strategy, whole: float) -> scale.Strategy:
    """Return the strategy that selects of a node's sum. ``whole``: bytes of gradients for one that is selected."""
    return scale.Strategy(
        True,
        selected.load,
        lambda _, size: net.scatter(size * whole) + net.across(size),
        lambda _, size: (net.nodes - 1) * size,
    )


def predicted(model: str, net: Cluster, wire: str = "fp32") -> dict[str, Predicted]:
    """Return what a step takes by each exchange, with values of this wire where elements are selected."""
    forward, tensors, dimensions = scale.profile(model)
    dense, sparse = scale.STRATEGIES["dense"], scale.sparse(DENSITY, wire)
    gradients, selected = (float(scale.loaded(one, tensors, dimensions).load.sum()) for one in (dense, sparse))
    levels = two_level(net, sparse, gradients / selected)
    step = partial(scale.step, network=net, forward=forward, tensors=tensors, dimensions=dimensions)
    shards = step(levels, select=lambda elements: scale.select(elements / net.local))
    return {
        "dense": Predicted(step(dense), float(dense.sent(net, gradients))),
        "sparse": Predicted(step(sparse), float(sparse.sent(net, selected))),
        "two-level": Predicted(shards + float(net.scatter(gradients)), float(levels.sent(net, selected))),
    }


def table(inside: float, wire: str) -> str:
    """Return the step times by model, nodes and rate, as a table in Markdown: dense, sparse, two-level."""
    lines = ["| model | nodes x workers | " + " | ".join(scale.RATES) + " |", "|---|---|" + "---|" * len(scale.RATES)]
    for model in MODELS:
        for nodes, local in SHAPES:
            cells = []
            for rate in scale.RATES:
                steps = predicted(model, cluster(rate, nodes, local, inside), wire).values()
                best = min(step.seconds for step in steps)
                cells.append(", ".join(_cell(step.seconds, step.seconds == best) for step in steps))
            lines.append(f"| {model} | {nodes} x {local} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(value: float, is_best: bool) -> str:
    text = f"{1e3 * value:.3g}" if value < 1 else f"{1e3 * value:.0f}"
    return f"**{text}**" if is_best else text


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description="two-level beside flat exchanges, simulated")
    parser.add_argument("--inside", type=float, default=INSIDE, help="Gbit/s of a worker inside its node")
    parser.add_argument("--wire", choices=scale.VALUE, default="fp32", help="of selected values")
    args = parser.parse_args()
    print("Milliseconds of a step: dense, sparse 1 %, two-level 1 %\n")
    print(table(args.inside, args.wire))
    print("\nMB that leave a node's port in a step, bert-large\n")
    for nodes, local in SHAPES:
        steps = predicted("bert-large", cluster("10 Gbit", nodes, local, args.inside), args.wire)
        print(f"{nodes} x {local}: " + ", ".join(f"{name} {one.port / 1e6:.0f}" for name, one in steps.items()))


if __name__ == "__main__":
    main()
