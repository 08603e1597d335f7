# SPDX-License-Identifier: Apache-2.0
"""A worker that never answers: the other must end by itself, within its deadline. ``python waiting.py``."""

from __future__ import annotations

import time

import torch

import agmerge

agmerge.init()
torch.manual_seed(0)  # replicas start equal
model = torch.nn.Linear(40, 40)
inner = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = agmerge.DistributedOptimizer(inner, model.named_parameters(), timeout=3.0)
for step in range(3):
    if agmerge.rank() == 1 and step == 2:
        time.sleep(300)  # longer than the test lets it live
    optimizer.zero_grad()
    model(torch.randn(4, 40)).sum().backward()
    optimizer.step()
