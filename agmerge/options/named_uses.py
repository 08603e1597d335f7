# SPDX-License-Identifier: Apache-2.0
"""Settings that are had by name: what each is for, and what it costs of the loss, in words.

docs/which_setting.md shows them, ``python -m agmerge advise`` tells them; figures are those of ``named_costs``.
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

    want: str  # what a user wants
    take: str  # what to write, in Markdown
    page: str  # of docs/, where to read on, with an anchor perhaps
    name: str = ""
    bound: float | None = None  # the density or the rank at which it cost so much
    with_optimizer: str = ADAMW  # with which

    @property
    def cost(self) -> str:
        """Return what it costs of the loss, in words; empty: there is no figure."""
        if self.name == UPDATES:
            return told_cost_of_updates(OF_UPDATES[0][0], stand_in(self.with_optimizer))
        return told_cost(self.name, self.bound, stand_in(self.with_optimizer)) if self.name else ""

    @property
    def row(self) -> str:
        """Return its row of the table."""
        with_kind = f" ({self.with_optimizer})" if self.name and self.name != UPDATES else ""
        costs = f"{self.cost}{with_kind}: " if self.cost else "see "
        return f"| {self.want} | {self.take} | {costs}[{self.page.partition('.')[0].replace('_', ' ')}]({self.page}) |"


USES = (
    Use("few bytes with SGD and momentum", '`compression="dgc"`', "compressors.md", "dgc", 0.01, SGD),
    Use("few bytes with AdamW", '`sync="updates"`', "adaptive.md", UPDATES),
    Use("half the bits of `eden-2`", '`compression="eden-1"`', "compressors.md", "eden-1"),
    Use("exchanges every few steps only", "`agmerge.LocalOptimizer`", "adaptive.md"),
    Use("factors of large matrices", '`compression="acpsgd"`', "low_rank.md", "acpsgd", 4),
    Use("1 % of each gradient, whatever it costs", '`compression="topk"`', "compressors.md", "topk", 0.01),
)


def table() -> str:
    """Return the table of docs/which_setting.md, the default's row first."""
    default = f"| no loss, as fast as that can be | the default | less than {ENOUGH:g} % of the loss, in our runs |"
    return "\n".join(["| You want | Take | It costs |", "|---|---|---|", default, *(use.row for use in USES)]) + "\n"


def wanted(name: str) -> str:
    """Return what a compressor, or ``UPDATES``, is for; empty: it has no row."""
    return next((use.want for use in USES if use.name == name), "")
