"""Compress what training frameworks exchange, with a line in the script: each file is for one framework.

``ddp``: ``compress(model)`` for torch's DistributedDataParallel. ``ddp_hook``: which gives its buckets to a reducer;
``ddp_refusals``: what it cannot take. ``transformers``: ``compress(trainer)``. ``accelerate``: ``compress(accelerator,
model)``. ``lightning``: ``CompressedDDPStrategy``. ``files``: what ranks keep beside the checkpoints of these three.

Nothing is imported here: a script imports the file of its framework, ``from agmerge.integrations import ddp``. Each may
import that framework and torch.distributed, and of agmerge/ all but cli/. Nothing imports this room.
"""
