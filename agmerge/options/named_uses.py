# SPDX-License-Identifier: Apache-2.0
"""Settings that a script sets explicitly: their purpose and their effect on the loss, in words.

docs/will_it_help.md and ``python -m agmerge advise`` show them. The figures are those of ``named_costs``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from agmerge.options.named_costs import ENOUGH, OF_UPDATES, told_cost, told_cost_of_updates
from agmerge.step.updates import UPDATES

ADAMW = "AdamW"
SGD = "SGD with momentum and weight decay"


def stand_in(kind: str) -> torch.optim.Optimizer:
    """Return an optimizer of a kind that is told, ``ADAMW`` or ``SGD``, for which a cost is looked up."""
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    if kind == ADAMW:
        return torch.optim.AdamW(parameters)
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-4)


@dataclass(frozen=True)
class Use:
    """One row of the page. ``name``: of a compressor, or ``UPDATES``; empty: something else, which has a page."""

    want: str  # the goal of a user, as the end of "you want to ..."
    take: str  # the setting, in Markdown
    page: str  # of docs/, which describes it
    name: str = ""
    bound: float | None = None  # the density or the rank at which it cost so much
    with_optimizer: str = ADAMW  # with which

    @property
    def cost(self) -> str:
        """Return its effect on the loss, in words; empty: there is no figure."""
        if self.name == UPDATES:
            return told_cost_of_updates(OF_UPDATES[0][0], stand_in(self.with_optimizer))
        return told_cost(self.name, self.bound, stand_in(self.with_optimizer)) if self.name else ""

    @property
    def row(self) -> str:
        """Return its row of the table."""
        with_kind = f" ({self.with_optimizer})" if self.name and self.name != UPDATES else ""
        effect = f"{self.cost}{with_kind}" if self.cost else "depends on the number of steps"
        return f"| {self.want} | [{self.take}]({self.page}) | {effect} |"


USES = (
    Use("send very little with SGD and momentum", '`compression="dgc"`', "compressors.md", "dgc", 0.01, SGD),
    Use("send very little with AdamW", '`sync="updates"`', "adaptive.md", UPDATES),
    Use("halve the traffic of 2 bits", '`compression="eden-1"`', "compressors.md", "eden-1"),
    Use("exchange only every few steps", "`agmerge.LocalOptimizer`", "adaptive.md"),
    Use("send low-rank factors of large matrices", '`compression="acpsgd"`', "low_rank.md", "acpsgd", 4),
    Use("send 1 % of each gradient", '`compression="topk"`', "compressors.md", "topk", 0.01),
)


def table() -> str:
    """Return the table of docs/will_it_help.md, the default's row first."""
    default = f"| train as before | nothing | less than {ENOUGH:g} % higher in our tests |"
    head = ["| you want to | set | effect on the loss |", "|---|---|---|"]
    return "\n".join([*head, default, *(use.row for use in USES)]) + "\n"


def wanted(name: str) -> str:
    """Return the purpose of a compressor, or of ``UPDATES``; empty: it has no row."""
    return next((use.want for use in USES if use.name == name), "")
