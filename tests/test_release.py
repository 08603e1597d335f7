# SPDX-License-Identifier: Apache-2.0
"""Files that a release reads agree with each other, and the workflows call what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agmerge.version import __version__

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_changelog_and_the_citation_are_of_this_version() -> None:
    heads = re.findall(r"^## \[(.+?)\]", read("CHANGELOG.md"), re.MULTILINE)
    assert heads[0] == "Unreleased" and __version__ in heads
    assert re.search(rf"^version: {re.escape(__version__)}$", read("CITATION.cff"), re.MULTILINE)


def test_links_of_the_changelog_lead_somewhere() -> None:
    links = re.findall(r"\]\(([\w/.]+\.md)[)#]", read("CHANGELOG.md"))
    assert links and [link for link in links if not (ROOT / link).is_file()] == []


def test_workflows_say_that_they_have_not_run_and_call_what_is_there() -> None:
    yaml = pytest.importorskip("yaml")  # comes with what examples need
    commands = [
        (path.name, step["run"])
        for path in WORKFLOWS
        for job in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values()
        for step in job.get("steps", ())
        if "run" in step
    ]
    assert len(WORKFLOWS) == 4 and all("Not yet run" in path.read_text(encoding="utf-8") for path in WORKFLOWS)
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
    # The site's target comes with the site.
    called = {target for _, text in commands for target in re.findall(r"^make ([a-z-]+)", text)} - {"docs-check"}
    assert called == {"lint", "check"} and called <= targets
    assert ("ci.yml", ".ci/run") in commands


def test_issue_forms_are_complete() -> None:
    yaml = pytest.importorskip("yaml")
    forms = [path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]
    assert len(forms) == 4
    for path in forms:
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert form["name"] and form["description"]
        assert all(part["attributes"]["label"] and part["id"] for part in form["body"])
