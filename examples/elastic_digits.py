# SPDX-License-Identifier: Apache-2.0
"""Train scikit-learn's digits with workers that die and come: the others go on, and a newcomer begins where they are.

python examples/elastic_digits.py --show      # all of it on this machine: one of three is killed, one comes, one leaves
python -m agmerge lighthouse --port 29510                                # or by hand: once, on a machine that stays up
AGMERGE_LIGHTHOUSE=head:29510 python examples/elastic_digits.py          # and a worker, at any time, on any machine
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import torch
from digits import DigitsCNN, load
from torch.nn.functional import cross_entropy

import agmerge

BATCH = 16  # images of a worker and step


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=80)
    parser.add_argument("--every", type=int, default=10, help="epochs from one evaluation to the next")
    parser.add_argument("--show", action="store_true", help="start a lighthouse and workers here, kill one, and so on")
    return parser.parse_args(argv)


def train(args: argparse.Namespace) -> None:
    """One worker."""
    torch.set_num_threads(1)
    train_x, train_y, test_x, test_y = load()
    data = torch.utils.data.TensorDataset(train_x, train_y)
    model = DigitsCNN()
    agmerge.init(elastic=True)
    inner = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    optimizer = agmerge.DistributedOptimizer(inner, model.named_parameters())
    sampler = agmerge.elastic.Sampler(data, batch_size=BATCH)
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=sampler)
    state = agmerge.elastic.State(model=model, optimizer=optimizer, sampler=sampler, step=0, evaluated=0)
    signal.signal(signal.SIGTERM, lambda *_: state.leave())

    @state.retried
    def accuracy() -> float:
        """Collective. The share of test images that are classified right; each worker looks at its part of them."""
        mine = slice(agmerge.rank(), None, agmerge.size())
        with torch.no_grad():
            right = (model(test_x[mine]).argmax(1) == test_y[mine]).sum()
        return float(agmerge.allreduce(right.float(), op=agmerge.Sum)) / len(test_y)

    while True:
        # The state says whether it is time: one who was let in just now evaluates with the others.
        if sampler.epoch >= state.evaluated + args.every:
            state.evaluated = sampler.epoch
            share = accuracy()
            if agmerge.rank() == 0:
                print(f"epoch {sampler.epoch}, step {state.step}: accuracy {share:.4f}, {agmerge.size()} workers")
        if sampler.epoch >= args.epochs:
            break
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            state.step += 1
            if not state.commit():
                print(f"leaves after step {state.step}")
                return
    agmerge.shutdown()


class Show:
    """A lighthouse and workers of this machine, with all that they say, and when."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.began = time.monotonic()
        self.command = [sys.executable, "-u", __file__, "--epochs", str(args.epochs), "--every", str(args.every)]
        lighthouse = [sys.executable, "-m", "agmerge", "lighthouse", "--port", "0"]
        self.lighthouse = subprocess.Popen(lighthouse, stdout=subprocess.PIPE, text=True)
        assert self.lighthouse.stdout is not None
        port = self.lighthouse.stdout.readline().strip().rpartition(":")[2]
        self.environment = {**os.environ, "AGMERGE_LIGHTHOUSE": f"127.0.0.1:{port}"}
        self.workers: list[subprocess.Popen[str]] = []
        self.has_trained = threading.Event()  # a worker has said something

    def say(self, text: str) -> None:
        """Print a line with the seconds so far."""
        print(f"{time.monotonic() - self.began:5.1f} s  {text}", flush=True)

    def start(self) -> None:
        """Start a worker."""
        number = len(self.workers) + 1
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        self.workers.append(subprocess.Popen(self.command, env=self.environment, **pipes))  # type: ignore[call-overload]
        self.say(f"worker {number} is started")
        threading.Thread(target=self._listen, args=(number,), daemon=True).start()

    def _listen(self, number: int) -> None:
        for line in self.workers[number - 1].stdout or ():
            self.say(f"worker {number}: {line.rstrip()}")
            self.has_trained.set()

    def send(self, number: int, told: signal.Signals) -> None:
        """Send a signal to a worker."""
        self.say(f"worker {number} gets {told.name}")
        self.workers[number - 1].send_signal(told)

    def run(self) -> None:
        """One of three is killed, another comes, one leaves, and two end the training."""
        for _ in range(3):
            self.start()
        self.has_trained.wait()
        self.send(1, signal.SIGKILL)
        self.has_trained.clear()
        self.start()
        self.has_trained.wait()
        time.sleep(10)
        self.send(2, signal.SIGTERM)
        codes = [worker.wait() for worker in self.workers[1:]]
        self.say(f"workers 2 to 4 have ended with {codes}")

    def close(self) -> None:
        """End all processes."""
        for process in (*self.workers, self.lighthouse):
            process.kill()
            process.wait()


def main(argv: Sequence[str] | None = None) -> None:
    """Train as one worker, or show all."""
    args = arguments(argv)
    if not args.show:
        train(args)
        return
    show = Show(args)
    try:
        show.run()
    finally:
        show.close()


if __name__ == "__main__":
    main()
