# SPDX-License-Identifier: Apache-2.0
"""SECURITY.md names every place of the library that listens or unpickles, and what it names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agmerge.runtime.peers import monitor, status_server

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
DANGERS = {
    "listens": r"create_server\(|TCPStore\(|\.listen\(\d*\)|HTTPServer\(",
    "unpickles": r"pickle\.loads?\(|Unpickler\(|read_metadata\(|allow_pickle=True|weights_only=False",
}
# Not on a network: a method of ours, and pickles that a check has just made.
HARMLESS = ("agmerge/engine/participation.py", "sparsifiers/conformance")
FILES = [path for room in ("agmerge", "sparsifiers", "merging") for path in sorted((ROOT / room).rglob("*.py"))]


@pytest.mark.parametrize("danger", DANGERS)
def test_every_file_that_is_dangerous_is_named(danger: str) -> None:
    names = [str(path.relative_to(ROOT)) for path in FILES if re.search(DANGERS[danger], path.read_text("utf-8"))]
    named = [name for name in names if not name.startswith(HARMLESS)]
    assert named and [name for name in named if f"`{name}`" not in PAGE] == []


def test_every_file_that_is_named_is_there() -> None:
    names = re.findall(r"`([\w/]+\.py)`", PAGE) + re.findall(r"\]\(([\w/.]+)[)#]", PAGE)
    assert len(names) > 5 and [name for name in names if not (ROOT / name).is_file()] == []


def test_files_are_loaded_without_code() -> None:
    calls = [
        (path.name, call)
        for path in FILES
        for call in re.findall(r"torch\.load\((.*)", re.sub(r"``.*?``", "", path.read_text("utf-8")))
    ]
    assert calls and [call for call in calls if "weights_only=True" not in call[1]] == []


@pytest.mark.parametrize("words", ["networks that you trust", "run code on all the others", "on all interfaces"])
def test_the_truth_is_said_in_these_words(words: str) -> None:
    assert words in " ".join(PAGE.split())


def test_what_is_said_of_the_status_server_is_so() -> None:
    """In the page of guarantees' tests, too, which once said that it answers those that know its token, and no more."""
    guarantees = " ".join((ROOT / "docs" / "dev" / "guarantees_tests.md").read_text(encoding="utf-8").split())
    assert f"three seconds at most, and {status_server.MOST} of them" in guarantees and status_server.SILENCE == 3.0
    assert f"at most {status_server.MOST} connections" in " ".join(PAGE.split())
    assert "anybody who reaches `MASTER_PORT` can read" in guarantees and "is no protection from" in guarantees
    assert f"{monitor.AGAIN:g} more where a connection is refused" in guarantees


@pytest.mark.parametrize(
    "page",
    ["README.md", *(f"docs/{page}.md" for page in ("security", "launching", "guarantees", "checkpoints", "elastic"))],
)
def test_who_reads_another_page_is_led_here(page: str) -> None:
    assert re.search(r"\b(SECURITY|security)\.md[)#]", (ROOT / page).read_text(encoding="utf-8"))


def test_the_network_policy_lets_a_jobs_own_pods_in_and_nobody_else() -> None:
    yaml = pytest.importorskip("yaml")  # comes with what examples need
    folder = ROOT / "docs" / "kubernetes"
    policies = list(yaml.safe_load_all((folder / "networkpolicy.yaml").read_text(encoding="utf-8")))
    jobs = {yaml.safe_load(file.read_text("utf-8"))["metadata"]["name"] for file in folder.glob("*job.yaml")}
    for policy in policies:
        spec = policy["spec"]
        (rule,) = spec["ingress"]
        assert policy["kind"] == "NetworkPolicy" and spec["policyTypes"] == ["Ingress"]
        assert rule == {"from": [{"podSelector": spec["podSelector"]}]}
        assert set(spec["podSelector"]["matchLabels"].values()) == jobs
    assert len(policies) == 2
