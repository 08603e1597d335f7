# SPDX-License-Identifier: Apache-2.0
"""Show a bar while a script trains, and draw curves for TensorBoard: on the first worker, where they are asked for."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm


def add_log_dir(parser: ArgumentParser) -> None:
    """Add the flag that asks for curves, in the words of ``train.py``."""
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="draw curves for TensorBoard there")


def shows_bars(first: bool) -> bool:
    """Return whether this worker shows bars: the ``first`` one does, if somebody sees its stderr."""
    return first and sys.stderr.isatty()


def bar(
    head: str, batches: Iterable[Any] | None = None, *, steps: int | None = None, done: int = 0, first: bool = True
) -> Any:
    """Return a bar of tqdm on stderr, which goes away at its end; where none is shown it shows nothing.

    Args:
        head: what stands before it, such as the epoch.
        batches: what it yields, a step each; None: it is moved by ``update()``.
        steps: how many there are; None: as many as ``batches``.
        done: how many of them were made before.
        first: whether this is the first worker.
    """
    off = not shows_bars(first)
    return tqdm(batches, total=steps, initial=done, desc=head, unit="step", leave=False, disable=off)


def say(text: str) -> None:
    """Print a line; a bar that is shown makes way for it."""
    with tqdm.external_write_mode():
        print(text, flush=True)


class Curves:
    """Figures over steps, as TensorBoard's events in ``folder``.

    folder: None: nothing is written, and nothing imported that could. first: nothing is written by other workers.
    """

    def __init__(self, folder: Path | None, first: bool = True) -> None:
        self._board: Any = None
        if folder is not None and first:
            from tensorboardX import SummaryWriter  # takes a second, and a package that not everybody has

            self._board = SummaryWriter(str(folder))

    def add(self, step: int, figures: Mapping[str, float | Tensor]) -> None:
        """Write ``figures`` by their tags, such as "train/loss". A device is waited for only if they are written."""
        if self._board is not None:
            for tag, value in figures.items():
                self._board.add_scalar(tag, value.item() if isinstance(value, Tensor) else value, step)

    def close(self) -> None:
        """Write what is still to be written."""
        if self._board is not None:
            self._board.close()
