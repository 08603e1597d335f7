# SPDX-License-Identifier: Apache-2.0
"""A worker of an elastic job that trains by an Accelerator, clips, and writes a line after each step."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator

import agmerge

folder, steps, setting = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
torch.set_num_threads(1)
torch.manual_seed(os.getpid())  # each worker begins with other values
data = torch.utils.data.TensorDataset(torch.randn(96, 8, generator=torch.Generator().manual_seed(0)))
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
agmerge.init(elastic=agmerge.Elastic(suspect=5.0, patience=30.0))
sampler = agmerge.elastic.Sampler(data, batch_size=8)
loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler)
model, optimizer, loader = accelerator.prepare(model, plain, loader)
distributed = agmerge.integrations.accelerate.compress(accelerator, model, check_every=1, **setting)
state = agmerge.elastic.State(model=model, optimizer=distributed, sampler=sampler, step=0)
largest = 0.0

with open(folder / f"{os.getpid()}.lines", "a", encoding="utf-8") as lines:
    while state.step < steps:
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward((model(x) - x).square().mean())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.01)
                    largest = max(float(p.grad.norm()) for p in model.parameters() if p.grad is not None)
                optimizer.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            state.step += 1
            with distributed.shared():
                digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
            line = [state.step, agmerge.size(), f"{digest}, epoch {sampler.epoch}", time.monotonic(), largest]
            lines.write(json.dumps(line) + "\n")
            lines.flush()
            state.commit()
            time.sleep(0.03)
            if state.step >= steps or (folder / "end").exists() and state.step >= int((folder / "end").read_text()):
                steps = 0
                break
agmerge.shutdown()
