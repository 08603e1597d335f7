# SPDX-License-Identifier: Apache-2.0
"""One worker among strangers: it meets the others, waits for a word at its input, adds up, and says what became of it.

The last line that it prints is JSON: the error of the call that fails. The first line says where it can be asked.
"""

from __future__ import annotations

import json
import sys

import torch

import agmerge
from agmerge.runtime.peers import monitor


def say(**what: object) -> None:
    """Print a line of JSON at once."""
    print(json.dumps(what), flush=True)


def main() -> None:
    """Add up twice, the second time after a word."""
    try:
        agmerge.init()
        agmerge.allreduce(torch.ones(1), name="first")
        current = monitor._current
        assert current is not None
        say(port=current.peers[agmerge.rank()].port, tokens=[peer.token for peer in current.peers])
        sys.stdin.readline()
        agmerge.allreduce(torch.ones(1), name="second")
        say(error="")
    except agmerge.AGMergeError as error:
        say(error=str(error))
    sys.stdin.readline()


if __name__ == "__main__":
    main()
