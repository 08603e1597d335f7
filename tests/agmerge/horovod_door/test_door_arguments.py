# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``horovodrun``, the hosts that they name, and what workers are told."""

from __future__ import annotations

import argparse
import os

import pytest

from agmerge.horovod_door import arguments
from agmerge.horovod_door.arguments import Host


def parsed(line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    arguments.add_arguments(parser)
    return parser.parse_args(line.split())


def test_what_follows_the_program_is_its_own() -> None:
    given = parsed("-np 2 --gloo python -m package -np 3 --verbose")
    assert (given.workers, given.verbose) == (2, False)
    assert given.program == ["python", "-m", "package", "-np", "3", "--verbose"]
    assert arguments.mistake(given) == ""


@pytest.mark.parametrize(
    "line, words",
    [
        ("-np 2 --autotune python train.py", "plans already follow the times"),
        ("-np 2", "python train.py"),
        ("python train.py", "-np is missing"),
        ("-np 0 python train.py", "at least one"),
        ("-np 2 -H a:2 --hostfile b python train.py", "Pass one"),
        ("-np 2 --mpi --gloo python train.py", "--mpi"),
        ("--max-np 2 python train.py", "--min-np is missing"),
    ],
)
def test_mistakes_are_said_in_a_sentence(line: str, words: str) -> None:
    assert words in arguments.mistake(parsed(line))


def test_what_has_no_effect_is_said() -> None:
    given = parsed("-np 2 --fusion-threshold-mb 32 --log-level INFO python train.py")
    assert [sentence.split()[0] for sentence in arguments.without_effect(given)] == [
        "--fusion-threshold-mb",
        "--log-level",
    ]


def test_hosts_are_read_in_all_forms() -> None:
    assert arguments.parse_hosts("a:2,b-1.net:4") == [Host("a", 2), Host("b-1.net", 4)]
    assert arguments.parse_hosts("a slots=2 # fast\n\nb slots=1 max_slots=4\nc\n", slots=3) == [
        Host("a", 2),
        Host("b", 1),
        Host("c", 3),
    ]
    with pytest.raises(ValueError, match="no machine"):
        arguments.parse_hosts("a:b")


def test_workers_are_placed_host_by_host() -> None:
    places = arguments.placed([Host("a", 2), Host("b", 1)], 3)
    assert [(place.host.name, place.rank, place.local_rank) for place in places] == [
        ("a", 0, 0),
        ("a", 1, 1),
        ("b", 2, 0),
    ]
    told = [arguments.of_worker(place, places, "10.0.0.1", 1234) for place in places]
    assert [one["LOCAL_WORLD_SIZE"] for one in told] == ["2", "2", "1"]
    assert [(one["HOROVOD_CROSS_RANK"], one["HOROVOD_CROSS_SIZE"]) for one in told] == [
        ("0", "2"),
        ("0", "1"),
        ("1", "2"),
    ]
    with pytest.raises(ValueError, match="have 3 slots"):
        arguments.placed([Host("a", 2), Host("b", 1)], 4)


def test_the_door_is_found_before_what_was_on_the_path() -> None:
    told = arguments.serving({"PYTHONPATH": "/mine"}, "eden-2")
    paths = told["PYTHONPATH"].split(os.pathsep)
    assert paths[0] == str(arguments.STAGE) and "/mine" in paths
    assert told["AGMERGE_COMPRESSION"] == "eden-2"
    assert arguments.serving(told, None) == {"PYTHONPATH": told["PYTHONPATH"]}  # nothing twice
