"""The commands: ``python -m agmerge doctor`` and ``python -m agmerge build-horovod``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from agmerge.errors import AGMergeError


def parser() -> argparse.ArgumentParser:
    """The usage."""
    whole = argparse.ArgumentParser(
        prog="python -m agmerge", description="Which backends and launchers work here, and how to get the others."
    )
    commands = whole.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser("doctor", help="show what works here, and the command that fixes what does not")
    build = commands.add_parser(
        "build-horovod",
        help="build Horovod for the torch installed here, and install it",
        epilog="Variables of Horovod's own build pass through, e.g. HOROVOD_GPU_OPERATIONS=NCCL or "
        "HOROVOD_WITHOUT_MPI=1. Wheels are kept in $XDG_CACHE_HOME/agmerge/wheels (~/.cache if it is not set).",
    )
    build.add_argument("--force", action="store_true", help="build anew, also where the cache has a wheel")
    return whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    chosen = parser().parse_args(arguments)
    if chosen.command == "doctor":
        from agmerge import doctor

        return doctor.main()
    from agmerge import build_horovod

    try:
        build_horovod.build(force=chosen.force)
    except AGMergeError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
