# SPDX-License-Identifier: Apache-2.0
"""Workers start without torch's compiler, and have it as soon as they ask for it: see quick_start/sitecustomize.py."""

from __future__ import annotations

import json
import sys

import pytest
from launching import WHOLE, run

SCRIPT = """
import json, sys, torch
linear = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(linear.parameters())
linear(torch.ones(1, 2)).sum().backward()
optimizer.step()
before = "torch._dynamo.config" in sys.modules
import torch._dynamo.config as part
compiled = torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item()
print(json.dumps([before, part is torch._dynamo.config, sys.modules["torch._dynamo"].__file__ is not None, compiled]))
"""


@pytest.mark.parametrize("whole", ["", pytest.param("1", marks=pytest.mark.long)])
def test_the_compiler_is_imported_by_who_needs_it(whole: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WHOLE, whole)
    ended = run([sys.executable, "-c", SCRIPT], timeout=300)
    assert ended.code == 0, ended.output
    assert json.loads(ended.output.splitlines()[-1]) == [bool(whole), True, True, 2.0]
