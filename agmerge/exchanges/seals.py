"""Checksums of parts of a message that follow no header: the first four bytes are the CRC-32 of the others.

As in a header, a device computes none: there it is 0 and not looked at.
"""

from __future__ import annotations

import torch

from agmerge.checksum import checksum

HEAD = 4  # bytes


def close(part: torch.Tensor, sealed: bool) -> None:
    """Write the checksum of ``part``, uint8, or 0, into its beginning."""
    part[:HEAD].view(torch.int32).fill_(_sum(part) if sealed and part.device.type == "cpu" else 0)


def intact(part: torch.Tensor, sealed: bool) -> bool:
    """Whether ``part`` is as it was when it was closed, as far as one can tell."""
    if not sealed or part.device.type != "cpu":
        return True
    return int(part[:HEAD].view(torch.int32)[0]) == _sum(part)


def _sum(part: torch.Tensor) -> int:
    return checksum(part[HEAD:].numpy().data)
