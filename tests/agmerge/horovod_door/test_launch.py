# SPDX-License-Identifier: Apache-2.0
"""Which Horovod serves a script, and which words of a command line are whose."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from agmerge.__main__ import main
from agmerge.horovod_door import launch
from agmerge.horovod_door.arguments import STAGE


class Became(Exception):
    """Another program, which this process would have become."""


@pytest.fixture
def became(monkeypatch: pytest.MonkeyPatch) -> None:
    def execute(file: str, words: list[str], env: dict[str, str] | None = None) -> None:
        raise Became(words, env or {})

    for name in ("execve", "execvpe", "execv"):
        monkeypatch.setattr(os, name, execute)


def installed(monkeypatch: pytest.MonkeyPatch, is_there: bool) -> None:
    monkeypatch.setattr(launch, "has_horovod", lambda: is_there)


@pytest.mark.parametrize(
    "words, rest, compression",
    [
        ("train.py --compression none", ["train.py", "--compression", "none"], None),
        ("--compression eden-2 train.py --instead", ["train.py", "--instead"], "eden-2"),
        ("--compression=eden-2 -m package -c", ["-m", "package", "-c"], "eden-2"),
        ("--instead -c code", ["-c", "code"], None),
    ],
)
@pytest.mark.usefixtures("became")
def test_one_worker_becomes_python(
    words: str, rest: list[str], compression: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, False)
    monkeypatch.delenv("AGMERGE_COMPRESSION", raising=False)
    with pytest.raises(Became) as caught:
        main(["horovod", *words.split()])
    became, env = caught.value.args
    assert became == [sys.executable, *rest] and env.get("AGMERGE_COMPRESSION") == compression
    assert env["PYTHONPATH"].startswith(str(STAGE))


@pytest.mark.usefixtures("became")
def test_an_installed_horovod_serves_unless_it_shall_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed(monkeypatch, True)
    with pytest.raises(Became) as caught:
        main(["horovod", "train.py"])
    assert str(STAGE) not in caught.value.args[1].get("PYTHONPATH", "")
    assert "--instead" in capsys.readouterr().err
    with pytest.raises(Became) as caught:
        main(["horovodrun", "-np", "2", "python", "train.py"])
    assert caught.value.args[0][:3] == [sys.executable, "-m", "horovod.runner.launch"]
    for words in (
        ["horovod", "--compression", "eden-2", "train.py"],
        ["horovodrun", "--compression=x", "-np", "2", "a"],
    ):
        assert main(words) == 2
        assert "--compression has no effect" in capsys.readouterr().err


def test_mistakes_end_with_2_and_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed(monkeypatch, False)
    assert main(["horovod"]) == 2
    assert "script is missing" in capsys.readouterr().err
    assert main(["horovodrun", "-np", "2", "-H", "a:1", "x"]) == 2
    assert "1 slots" in capsys.readouterr().err
    assert main(["horovodrun", "-np", "1", "/no/such/program"]) == 2
    assert "cannot run" in capsys.readouterr().err
    assert main(["horovodrun", "--autotune", "-np", "1", "x"]) == 2


def test_the_build_is_shown_in_horovods_form(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["horovodrun", "--check-build"]) == 0
    text = capsys.readouterr().out
    assert "[X] PyTorch" in text and "[ ] TensorFlow" in text and "[X] Gloo" in text


def test_a_served_horovod_is_none_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    found: Any = type("Spec", (), {"origin": str(Path(STAGE) / "horovod.py")})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found)
    assert not launch.has_horovod()
