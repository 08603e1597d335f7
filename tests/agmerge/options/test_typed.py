# SPDX-License-Identifier: Apache-2.0
"""Types of options agree with the constructor and with what is accepted; mypy refuses a slip in a script."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from torch.nn.parallel import DistributedDataParallel

import agmerge
from agmerge.exchanges.table import EXCHANGES
from agmerge.integrations.ddp_refusals import SAID_ELSEWHERE
from agmerge.options import typed
from agmerge.options.typed import Options
from agmerge.step.config import CARRIES, SYNCS, WIRES
from agmerge.tensors.nonfinite import POLICIES

ROOT = Path(__file__).resolve().parents[3]
OPTIONS = {field.name: field.default for field in fields(Options)}
LOCAL, DDP, STRATEGY = (get_type_hints(of) for of in (typed.LocalOptions, typed.DDPOptions, typed.StrategyOptions))


def test_words_with_fixed_values_are_those_that_are_accepted() -> None:
    assert get_args(typed.ExchangeName) == tuple(EXCHANGES)
    assert get_args(typed.Wire) == WIRES
    assert get_args(typed.Nonfinite) == POLICIES
    assert get_args(typed.Sync) == SYNCS and get_args(typed.Carry) == CARRIES


def test_types_and_defaults_are_those_of_the_constructor() -> None:
    parameters = inspect.signature(agmerge.DistributedOptimizer).parameters
    hints = get_type_hints(agmerge.DistributedOptimizer.__init__)
    assert {name: parameters[name].default for name in OPTIONS} == OPTIONS
    for given in (LOCAL, DDP):
        assert {name: hints[name] for name in given} == given


def test_each_function_has_all_of_its_options_and_no_other() -> None:
    for function, options in ((agmerge.LocalOptimizer, typed.LocalOptions), (agmerge.LocalSync, typed.SyncOptions)):
        parameters = inspect.signature(function).parameters
        assert set(get_type_hints(options)) == set(OPTIONS) - set(parameters) - {"sync"}
        assert parameters["options"].annotation == f"Unpack[{options.__name__}]"
    assert set(DDP) == set(OPTIONS) - set(SAID_ELSEWHERE) - {"scaler"}
    assert set(DDP) <= set(STRATEGY)


def test_options_of_lightnings_strategy_are_there() -> None:
    strategies = pytest.importorskip("lightning.pytorch.strategies")
    known = {
        *inspect.signature(strategies.DDPStrategy).parameters,
        *inspect.signature(DistributedDataParallel).parameters,
    }
    assert set(STRATEGY) - set(DDP) <= known


SCRIPT = """
import agmerge
import torch
from agmerge.integrations import ddp

model = torch.nn.Linear(2, 2)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
ddp.compress(model, optimizer=sgd, compression="topk", density=0.01, sync="updates", timeout=3.0)
agmerge.LocalOptimizer(sgd, every=4, exchange="sparse", timeout=None)
agmerge.LocalSync(model, sgd, sync_every=4, carry="hold", outer=agmerge.Nesterov(), wire="sign")
agmerge.DistributedOptimizer(sgd, wire="int8")
ddp.compress(model, densty=0.01)  # wrong
ddp.compress(model, sync="update")  # wrong
ddp.compress(model, groups=3)  # wrong
agmerge.LocalOptimizer(sgd, exchange="spars")  # wrong
agmerge.LocalOptimizer(sgd, sync="updates")  # wrong
agmerge.LocalSync(model, sgd, fragmnts=2)  # wrong
agmerge.LocalSync(model, sgd, carry="drop")  # wrong
agmerge.LocalSync(model, sgd, wire="int9")  # wrong
agmerge.DistributedOptimizer(sgd, wire="int9")  # wrong
"""


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.version_info < (3, 11), reason="typing has no Unpack before")
def test_mypy_refuses_a_slip_in_a_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "mypy.ini").write_text("[mypy]\nfollow_imports = silent\n", encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    wrong = [number for number, line in enumerate(SCRIPT.splitlines(), 1) if line.endswith("# wrong")]
    told = [
        int(line.split(":")[1])
        for line in ended.stdout.splitlines()
        if line.startswith("train.py:") and "error" in line
    ]
    assert told == wrong, ended.stdout + ended.stderr
