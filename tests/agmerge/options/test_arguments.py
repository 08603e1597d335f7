# SPDX-License-Identifier: Apache-2.0
"""Options are the constructor's arguments: the same names, order and defaults."""

from __future__ import annotations

from dataclasses import fields
from inspect import signature

import agmerge
from agmerge.options.typed import Options


def test_options_have_the_names_order_and_defaults_of_the_constructor() -> None:
    arguments = list(signature(agmerge.DistributedOptimizer.__init__).parameters.values())
    arguments, unknown = arguments[3:-1], arguments[-1]  # self and what is wrapped come first
    assert unknown.kind is unknown.VAR_KEYWORD  # to say what was meant
    assert [(field.name, field.default) for field in fields(Options)] == [(a.name, a.default) for a in arguments]


def test_options_of_another_release_are_completed_and_what_is_gone_is_left_out() -> None:
    options = Options.from_saved({"compression": "topk", "wire_check": "header"})
    assert options.compression == "topk" and options.wire == "auto" and not hasattr(options, "wire_check")
