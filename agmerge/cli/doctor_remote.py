# SPDX-License-Identifier: Apache-2.0
"""Ask a host over ssh: the doctor's agent runs there for as long as its input stays open."""

from __future__ import annotations

import json
import queue
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from agmerge.cli import doctor_agent
from agmerge.errors import AGMergeError

CONNECT = 10  # seconds for ssh to be let in


class HostError(AGMergeError):
    """Error of a host that cannot be asked; its text says why."""


def command(host: str) -> list[str]:
    """Return the command that starts an agent on ``host``, by a Python at the place of this one.

    This machine itself needs no ssh: launchers use none, either.
    """
    source = Path(doctor_agent.__file__).read_text(encoding="ascii")
    python = [sys.executable, "-u", "-c", f"import sys; exec(sys.stdin.read({len(source)}))"]
    if host in ("localhost", "127.0.0.1", socket.gethostname()):
        return python
    return ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT}", host, f"exec {shlex.join(python)}"]


class Remote:
    """Agent of the doctor on one host. ``run``: the command that starts it, see :func:`command`."""

    def __init__(self, run: Sequence[str]) -> None:
        self._errors = tempfile.TemporaryFile()  # messages of it, or of ssh
        self._lines: queue.Queue[str | None] = queue.Queue()  # that it has printed; None: it has ended
        try:
            self._process = subprocess.Popen(
                list(run), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
            )
        except OSError as error:
            raise HostError(str(error)) from error
        threading.Thread(target=self._read, daemon=True).start()
        self._write(Path(doctor_agent.__file__).read_text(encoding="ascii"))

    def ask(self, call: str, timeout: float, **arguments: object) -> Any:
        """Return the agent's answer; :class:`HostError` if there is none within ``timeout`` seconds.

        ``call``: the name of one of its functions, which gets ``arguments``.
        """
        self._write(json.dumps({"call": call, "arguments": arguments}) + "\n")
        while True:
            try:
                line = self._lines.get(timeout=timeout)
            except queue.Empty:
                raise HostError(f"AGM208: no answer within {timeout:g} s") from None
            if line is None:
                raise HostError(self._last_words())
            if line.startswith(doctor_agent.MARK):
                return json.loads(line.removeprefix(doctor_agent.MARK))

    def close(self) -> None:
        """End the agent: it ends with its input."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except OSError:
            pass
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _write(self, text: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(text)
            self._process.stdin.flush()
        except OSError:
            pass  # it has ended, and its last words say why

    def _last_words(self) -> str:
        """Return the last line that it, or ssh, has complained with."""
        self._process.wait()
        self._errors.seek(0)
        lines = [line for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip() if lines else f"ends with exit code {self._process.returncode}"
