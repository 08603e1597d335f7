# SPDX-License-Identifier: Apache-2.0
"""Write small data of every kind that the jobs read, in the real formats; some MB, in seconds, the same in every run.

    python examples/data/small.py DIR
    python examples/train.py resnet20-cifar10 --data DIR

Pictures are scikit-learn's digits, text is Python's own documentation: what is published is not copied.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # examples/, before the folder of this file


def write(folder: Path) -> None:
    """Write all of it, each data set in a folder of its name in ``folder``. Needs Pillow and scikit-learn."""
    from data import small_pictures, small_text

    for part in (small_pictures, small_text):
        part.write(folder)


def main() -> None:
    """Write into the folder of the command line."""
    parser = ArgumentParser(description="Write small data of every kind that the jobs read")
    parser.add_argument("folder", type=Path, metavar="DIR", help="where a folder for each data set is made")
    folder = parser.parse_args().folder
    try:
        write(folder)
    except ModuleNotFoundError as error:
        raise SystemExit(f"{error}: pip install -r requirements-examples.txt") from None
    print(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir() if path.is_dir()))}")


if __name__ == "__main__":
    main()
