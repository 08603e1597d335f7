# SPDX-License-Identifier: Apache-2.0
"""Answer unknown keyword arguments: those of other projects with the line to write, slips with the right name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from agmerge.options.arguments import Options
from sparsifiers.registry import alike

KNOWN = ("optimizer", "named_parameters", *(field.name for field in fields(Options)))
_PLANNER = 'merging=merging.get("threshold", bytes={} * 2**20)'
_ELEMENTS = 'merging=merging.get("threshold", bytes=4 * {value})'
_NEEDLESS = "leave it out: "
_MEASURED = _NEEDLESS + "agmerge measures times during training"
_FROM = "agmerge.from_params reads this dictionary: pass **agmerge.from_params({name})"

# By keyword, what to write: {value} is the given value, {name} the keyword.
_MEANT = {
    # ACP-SGD's and DeAR's are MB, those of MG-WFBP, OMGS-SGD and FGBuff elements.
    "threshold": f"pass {_PLANNER.format('{value}')} for MB, or for elements {_ELEMENTS}",
    "fusion_threshold": 'pass merging=merging.get("threshold", bytes={value})',
    "fusion_threshold_mb": f"pass {_PLANNER.format('{value}')}",
    "bucket_cap_mb": f"pass {_PLANNER.format('{value}')}",
    "bucket_size_mb": f"pass {_PLANNER.format('{value}')}",
    "num_nearby_layers": 'pass merging=merging.get("count", tensors={value})',
    "mgwfbp": 'pass merging="mgwfbp"',
    "asc": 'pass merging=merging.get("mgwfbp", asc=True)',
    "planner": "pass merging={value}",
    # GRACE, ADTopk and FGBuff
    "comm_params": _FROM,
    "grace": _FROM,
    "params": _FROM,
    "compressor": "pass compression={value}",
    "compression_name": "pass compression={value}",
    "compress_ratio": "pass density={value}",
    "ratio": "pass density={value}",
    "rho": "pass density={value}",
    "sparsity": "pass density=, the share of values that is sent (not the share that is left out)",
    "communicator": "pass exchange=: 'sparse' gathers the values that each rank selects",
    "comm_mode": "pass exchange=: 'sparse' gathers the values that each rank selects",
    "model_named_parameters": "pass named_parameters={value}",
    "compress_rank": "pass rank={value}",
    "matrix_approximation_rank": "pass rank={value}",
    "use_error_feedback": "error feedback is on by default: pass memory='none' to turn it off",
    "error_feedback": "error feedback is on by default: pass memory='none' to turn it off",
    # OMGS-SGD and its family
    "is_sparse": "pass compression='topk', or 'none' for uncompressed gradients",
    "fp16": "pass compression='fp16'",
    "norm_clip": "clip in the script: call synchronize(), clip, then step() inside skip_synchronize()",
    "layerwise_times": _MEASURED,
    "seq_layernames": _MEASURED,
    "rdma": _MEASURED,
    "sigma_scale": _NEEDLESS + "gaussiank adjusts its threshold automatically",
    "err_handler": _NEEDLESS + "errors are always raised, the same on all ranks",
    "gradient_path": _NEEDLESS + "optimizer.stats() has figures",
    "writer": _NEEDLESS + "optimizer.stats() has figures",
    "multi_job_scheduling": _NEEDLESS + "agmerge has no state that jobs share",
    # Horovod, torch and torchft
    "use_adasum": _NEEDLESS + "not supported, because residuals would change the update",
    "gradient_accumulation_steps": "pass backward_passes_per_step={value}",
    "process_group": "pass process_set={value}",
    "comm_hook": "pass compression=, by name",
    "sync_every": "pass every={value} to LocalOptimizer",
    "H": "pass every={value} to LocalOptimizer",
    "outer_optimizer": "pass outer=, a function that creates it from the parameters, such as agmerge.Nesterov()",
}


def refuse_unknown(what: str, given: Mapping[str, Any], known: Iterable[str] = KNOWN) -> None:
    """Raise ``TypeError`` for the first keyword of ``given`` that is not ``known``, with advice.

    ``what``: the function that was called, for the error.
    """
    known = set(known)
    for name, value in given.items():
        if name in known:
            continue
        advice = _MEANT.get(name, "")
        if not advice and (near := alike(name, sorted(known))):
            advice = f"did you mean {near!r}?"
        text = advice.format(name=name, value=_text(value))
        raise TypeError(f"AGM302: {what}() got an unexpected keyword argument {name!r}{f': {text}' if text else ''}")


def _text(value: Any) -> str:
    """Return a value as a script may write it; an ellipsis for a long one."""
    text = repr(value)
    return text if len(text) <= 40 and "<" not in text else "..."
