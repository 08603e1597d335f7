"""What a distributed optimizer can be asked: its plan, its figures, its reports and its traces."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any

import torch

import merging as planning
from agmerge import report
from agmerge.adaptation import FIRST
from agmerge.engine import Engine
from agmerge.errors import AGMergeError
from agmerge.tracing import traced
from sparsifiers.proof import Proof


class Figures:
    """The part of :class:`agmerge.DistributedOptimizer` that tells and changes nothing."""

    _engine: Engine

    @property
    def plan(self) -> planning.Plan:
        """The plan in use. There is none before the first step."""
        if self._engine.session is None:
            raise AGMergeError("there is no plan yet: ranks agree on one in the first step")
        return self._engine.session.plan

    @property
    def settings(self) -> dict[str, str]:
        """What ranks must agree on, by name and as text: the compressor, memory, planner that the arguments came to.

        ``"density"`` is the compressor's own target, ``"merging"`` a planner with its options, ``"plan"`` and a digest,
        or ``"groups"``.
        """
        return dict(self._engine.config.facts())

    def stats(self) -> dict[str, Any]:
        """Totals since construction, of this rank; ``buffers`` and ``residual_norm`` (of the L2 norm) as of now.

        ``bytes_sent``: handed to collectives for gradients, headers and padding included; ``wire``: the same bytes
        by codecs of indices and values, ``header``, and ``plain``, without codecs. ``bytes_dense``: what a
        dense float32 all-reduce would be handed. ``elements_sent``: dense lane included. ``density``: elements
        sent / elements. ``steps_skipped``: see ``nonfinite``; what they sent is counted. ``exposed_seconds``: waiting
        for messages in ``synchronize()``. ``compressor``: in use now, by its canonical name.
        """
        stats = self._engine.stats
        self._engine.averages.settle()
        norms = [float(torch.linalg.vector_norm(r.double())) for r in self._engine.residuals().values()]
        return {
            "steps": self._engine.steps,
            "steps_skipped": stats.steps_skipped,
            "compressor": self._engine.config.compressor,
            "buffers": stats.buffers,
            "bytes_sent": stats.bytes_sent,
            "wire": dict(stats.wire),
            "bytes_dense": stats.bytes_dense,
            "elements_sent": stats.elements_sent,
            "density": stats.density,
            "exposed_seconds": self._engine.averages.exposed,
            "residual_norm": sum(norm**2 for norm in norms) ** 0.5,
            **({} if stats.proof is None else {"selection": stats.proof.figures()}),
        }

    def measure_selection(self, on: bool = True) -> None:
        """Measure selections, in ``stats()["selection"]``, since the last agreement; costs a pass or two a step."""
        self._engine.stats.proof = Proof() if on else None

    def compression_report(self) -> str:
        """A table of what happens to each tensor: merge buffer, lane, density, elements. After the first step."""
        return report.compression(self.plan, self._engine.session, self._engine.config, self._engine.steps)

    def measure(self) -> planning.Measurements:
        """Measure what selection and exchanges cost now; :meth:`merge_report` predicts from it. The plan stays.

        Collective, after ``step()``; takes a few seconds at most. Planners that go by times measure by themselves in
        the first steps: this is for the others, and for what ``python -m agmerge plan`` reads.
        """
        self._engine.check_idle("measure()")
        return self._engine.measure()

    @property
    def measurements(self) -> planning.Measurements:
        """What the plan in use was made from: ``.save("profile.json")`` is what ``python -m agmerge plan`` reads."""
        found = self._engine.measured()
        if found is None:
            raise AGMergeError(
                "nothing has been measured: planners that go by times measure the first "
                f"{FIRST} steps of more than one worker; with the others call measure()"
            )
        return found

    def merge_report(self) -> str:
        """A table of the merge buffers of a typical step: ready, start, end and exposed time, beside the predicted."""
        plan = self.plan  # raises before the first step
        assert plan is not None
        return report.merge_buffers(self._engine.session, self._engine.measured(), self._engine.averages.typical())

    def trace(self, path: str | os.PathLike[str]) -> AbstractContextManager[None]:
        """Write a Chrome trace of the steps inside, to open in Perfetto; one file a rank (``trace.rank0.json``)."""
        return traced(self._engine, path)
