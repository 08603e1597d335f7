# SPDX-License-Identifier: Apache-2.0
"""A backend around another one passes on every call, with its arguments; a hook sees all collectives that start."""

from __future__ import annotations

import inspect
from typing import Any, cast
from unittest import mock

import pytest

from agmerge.backends.base import Backend, DelegatingBackend, Handle

METHODS = [name for name, value in vars(Backend).items() if inspect.isfunction(value) and not name.startswith("_")]
COLLECTIVES = {"all_reduce", "all_gather", "all_to_all", "reduce_scatter", "broadcast", "barrier"}


class Noting(DelegatingBackend):
    """Communicator that notes the collectives that it starts."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.started: list[str] = []

    def _pass_on(self, call: str, *given: Any, **more: Any) -> Handle:
        self.started.append(call)
        return super()._pass_on(call, *given, **more)


@pytest.mark.parametrize("name", METHODS)
def test_a_call_is_passed_on_with_its_arguments(name: str) -> None:
    inner = mock.Mock(spec=[*METHODS, *Backend.__annotations__])
    inner.size = 2
    outer = Noting(cast(Backend, inner))
    signature = inspect.signature(getattr(Backend, name))
    arguments: dict[str, Any] = {key: mock.Mock(name=key) for key in list(signature.parameters)[1:]}
    result = getattr(outer, name)(**arguments)
    getattr(inner, name).assert_called_once()
    call = getattr(inner, name).call_args
    assert signature.bind(inner, *call.args, **call.kwargs).arguments == {"self": inner, **arguments}
    assert result is (None if name in ("drop", "abort", "close") else getattr(inner, name).return_value)
    assert outer.started == ([name] if name in COLLECTIVES else [])
