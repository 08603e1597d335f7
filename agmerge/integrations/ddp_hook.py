# SPDX-License-Identifier: Apache-2.0
"""Communication hook of a DistributedDataParallel: its buckets go to a reducer, and come back combined.

Its annotations are evaluated: DistributedDataParallel compares those of a hook with its own types.
"""

import warnings
import weakref
from collections.abc import Callable
from contextlib import ExitStack, nullcontext

import torch
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from agmerge.engine.averaged_steps import AveragedModel
from agmerge.engine.bucket_reducer import BucketReducer
from agmerge.errors import AGMergeError

FEWER = (
    "AGM603: join(divide_by_initial_world_size=False) is not supported, because residuals of ranks that joined still "
    "count in the average. Set it to True."
)
Updated = torch.futures.Future[torch.Tensor]


class Hook:
    """Hook that hands the gradients of each bucket to a reducer, and tells the model when updates are in their place.

    The model keeps it alive; it does not keep the model alive.
    """

    def __init__(self, model: DistributedDataParallel, reducer: BucketReducer, attached: ExitStack) -> None:
        self._model = weakref.ref(model)
        self.attached = attached  # whose end takes everything off the model and the optimizer that is there for it
        self._reducer: BucketReducer | None = reducer  # None: closed
        self._waiting: list[tuple[Updated, torch.Tensor]] = []  # for the last bucket of this pass, with their updates
        # Parameters that got a gradient since the last pass that was averaged; None: all get one.
        self._used: set[int] | None = None
        self._handles: list[RemovableHandle] = []
        if model.find_unused_parameters or model.static_graph:
            self._used = set()
            mark = _marking(self._used)
            for parameter in reducer.members.name_all():
                self._handles.append(parameter.register_post_accumulate_grad_hook(mark))  # type: ignore[no-untyped-call]

    def take(self, bucket: GradBucket) -> Updated:
        """Collective. Take a bucket; with the last one, write the updates into all of them.

        Returns when the bucket holds its updates. All collectives are called here, in one thread.
        """
        model, reducer = self._model(), self._reducer
        assert model is not None
        if reducer is None:
            return allreduce_hook(model.process_group, bucket)
        if not getattr(model, "_divide_by_initial_world_size", True):
            raise AGMergeError(FEWER)
        buffer = bucket.buffer()
        updated = Updated(devices=None if buffer.device.type == "cpu" else [buffer.device])
        self._waiting.append((updated, buffer))
        # In join() the model calls this by itself, with zeros: outside of any backward pass.
        joined = torch._C._current_graph_task_id() < 0
        with reducer.participation.joined() if joined else nullcontext():
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                used = self._used is None or id(parameter) in self._used
                reducer.hand_over(parameter, as_laid_out(parameter, gradient), used=used)
            if bucket.is_last():
                self._end_pass(reducer)
        return updated

    def _end_pass(self, reducer: BucketReducer) -> None:
        waiting, self._waiting = self._waiting, []
        reducer.combine()
        if self._used is not None:
            self._used.clear()
        for updated, buffer in waiting:
            updated.set_result(buffer)

    def __reduce__(self) -> tuple[object, ...]:
        # A copy of the model, or one that is loaded, has no hook: it is the process's, as groups are.
        text = (
            "AGM604: A copy of a compressed DistributedDataParallel averages uncompressed gradients. Call "
            "ddp.compress() with the copy."
        )
        warnings.warn(text, stacklevel=3)
        return str, ("agmerge, in the model that this is a copy of",)

    def close(self) -> None:
        """Exchange no more: buckets are averaged uncompressed from now on."""
        self._reducer = None
        for handle in self._handles:
            handle.remove()


def exchange(hook: Hook, bucket: GradBucket) -> Updated:
    """Collective. Take a bucket, in the form in which DistributedDataParallel calls a hook."""
    return hook.take(bucket)


# The hook of each module that is compressed, in the last DistributedDataParallel that it was put into.
_hooks: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Hook]] = weakref.WeakKeyDictionary()


def supersede(module: torch.nn.Module, hook: Hook) -> None:
    """Make ``hook`` the one of ``module``, and take off the one of another DistributedDataParallel around it."""
    before = _hooks[module]() if module in _hooks else None
    _hooks[module] = weakref.ref(hook)
    if before is not None:
        before.attached.close()


def averaged_model(model: DistributedDataParallel) -> AveragedModel:
    """Return what checks of steps ask of ``model``, which is held weakly."""
    reference, ignored = weakref.ref(model), set(model.parameters_to_ignore)

    def named() -> list[tuple[str, torch.Tensor]]:
        model = reference()
        return [] if model is None else [one for one in model.module.named_parameters() if one[0] not in ignored]

    apart = [parameter for name, parameter in model.module.named_parameters() if name in ignored]
    return AveragedModel(named, apart, reference, _is_compressed)


def _is_compressed(model: DistributedDataParallel) -> bool:
    """Return whether a model has a hook of this library."""
    return any(hook is exchange for hook, _ in getattr(model, "_comm_hooks", ()))


def as_laid_out(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a bucket in the shape of its parameter: a view, laid out as the bucket has it.

    That is in the strides of the parameter, if these leave no gap. The view that a bucket gives is in C order always,
    which for others (channels_last) mixes up the elements.
    """
    if parameter.is_contiguous() or torch.empty_like(parameter, device="meta").stride() != parameter.stride():
        return gradient
    return gradient.as_strided(parameter.shape, parameter.stride(), gradient.storage_offset())


def _marking(used: set[int]) -> Callable[[torch.Tensor], None]:
    """Return a hook that notes which parameters get gradients; it refers to nothing else."""

    def mark(parameter: torch.Tensor) -> None:
        used.add(id(parameter))

    return mark
