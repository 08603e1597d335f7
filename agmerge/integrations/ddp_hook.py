"""Be the communication hook of a DistributedDataParallel: its buckets go to a reducer, and come back combined."""

import weakref

import torch
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from agmerge.engine.bucket_reducer import BucketReducer

Updated = torch.futures.Future[torch.Tensor]

# Annotations are evaluated in this file: DistributedDataParallel compares those of a hook with its own types.


class Hook:
    """Hand the gradients of each bucket to a reducer, and tell the model when updates are in their place."""

    def __init__(self, model: DistributedDataParallel, reducer: BucketReducer) -> None:
        self._model = weakref.ref(model)
        self._reducer: BucketReducer | None = reducer  # None: closed
        self._waiting: list[tuple[Updated, torch.Tensor]] = []

    def __call__(self, bucket: GradBucket) -> Updated:
        """Collective. Take a bucket; with the last one, write the updates into all of them."""
        model = self._model()
        assert model is not None
        if self._reducer is None:
            return allreduce_hook(model.process_group, bucket)
        buffer = bucket.buffer()
        future: Updated = torch.futures.Future(devices=None if buffer.device.type == "cpu" else [buffer.device])
        self._waiting.append((future, buffer))
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            self._reducer.hand_over(parameter, gradient)
        if bucket.is_last():
            waiting, self._waiting = self._waiting, []
            self._reducer.combine()
            for one, flat in waiting:
                one.set_result(flat)
        return future

    def close(self) -> None:
        """Exchange no more: buckets are averaged whole from now on."""
        self._reducer = None


def exchange(hook: Hook, bucket: GradBucket) -> Updated:
    """Collective. Take a bucket, in the form in which DistributedDataParallel calls a hook."""
    return hook(bucket)
