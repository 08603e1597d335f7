# SPDX-License-Identifier: Apache-2.0
"""Data of the catalogue: arguments, checkpoints, messages, frameworks, reports. Fields are those of `Problem`."""

from __future__ import annotations

from agmerge.errors.problems_in_training import Row

OF_SETTINGS: tuple[Row, ...] = (
    # -- arguments --------------------------------------------------------------------------------------------------
    (
        "AGM301",
        ("matches no whole name; parameters:",),
        "A pattern names no parameter of the model.",
        "Take a name from the list; patterns match whole names.",
        "compressors.md",
    ),
    (
        "AGM302",
        ("is unknown; choose from:", "got an unexpected keyword argument"),
        "A word or an argument is misspelled, or is another project's.",
        "Take one that the text offers.",
        "migrate.md",
    ),
    (
        "AGM303",
        ("op=Adasum is Horovod's alone", "has no gradient; give it tensor.detach()"),
        "This operation is not there, or cannot be differentiated.",
        "Take a sum or an average, or detach the tensor.",
        "migrate.md",
    ),
    (
        "AGM304",
        ("what rank … gave does not pickle",),
        "An object that is to be sent cannot be pickled.",
        "Send what consists of plain values and tensors.",
        "migrate.md",
    ),
    (
        "AGM305",
        ("is Horovod's, but agmerge runs on", "torch.distributed makes groups with all of its workers"),
        "The process set does not fit the backend.",
        "Give a list of ranks; all ranks make the same sets.",
        "migrate.md",
    ),
    (
        "AGM306",
        (
            "tensors on … cannot be exchanged",
            "MPI moves tensors on the CPU",
            "a message of 2 GiB or more is too large for MPI",
        ),
        "The backend cannot carry this tensor.",
        "Move it, take smaller merge buffers, or choose another backend.",
        "backends.md",
    ),
    (
        "AGM307",
        ("Parameter `num_groups` has been replaced by `groups`",),
        "Horovod has renamed this argument.",
        "Write `groups=`.",
        "migrate.md",
    ),
    # -- checkpoints ------------------------------------------------------------------------------------------------
    (
        "AGM401",
        ("the checkpoint has no residuals",),
        "The file holds a plain optimizer's state.",
        "Nothing, if that was meant: residuals start from zero.",
        "checkpoints.md",
    ),
    (
        "AGM402",
        (
            "the checkpoint is of another sync=",
            "they are dropped and start from",
            "the gradients of that step are dropped among",
        ),
        "What ranks had kept back fits this rank no more, and is dropped.",
        "Load the file of this rank, with the same `sync=` and `exchange=`; save after `step()`.",
        "checkpoints.md",
    ),
    (
        "AGM403",
        (
            "the optimizer was loaded from a checkpoint of agmerge before it was wrapped",
            "this script has saved optimizer.state_dict(), and ranks keep more",
        ),
        "The plain optimizer was saved or loaded, without what ranks have kept back.",
        "Save and load the state of the object that the text names, on every rank.",
        "checkpoints.md",
    ),
    (
        "AGM404",
        (
            "that every rank can read: what was not sent yet when it was saved is lost",
            "what is to be saved is not complete",
        ),
        "Files of some ranks are missing beside the checkpoint.",
        "Keep the folder where every rank reads it, or give each rank its own file.",
        "frameworks.md",
    ),
    (
        "AGM405",
        (
            "no group of … has a momentum any more",
            "the groups that were loaded have no momentum",
            "momentum starts from zero",
        ),
        "The momentum that a memory applies is not in the groups that were loaded.",
        "Give the groups their momentum again.",
        "checkpoints.md",
    ),
    (
        "AGM406",
        ("cannot read what was saved in", "are of different steps"),
        "A file of a rank is damaged, or saving was interrupted.",
        "Load another checkpoint, or remove the files to start from zero.",
        "checkpoints.md",
    ),
    # -- messages ---------------------------------------------------------------------------------------------------
    (
        "AGM503",
        ("is no message of this library, or one of another version",),
        "Ranks have different versions, or somebody else sends to this group.",
        "Install the same version everywhere, and give each job its own port.",
        "dev/wire.md",
    ),
    (
        "AGM504",
        ("ranks drew different coordinates in step",),
        "Seeds differ, or ranks have loaded checkpoints of different steps.",
        "Give every rank the same compressor and seed, and load the same step.",
        "exchanges.md",
    ),
    (
        "AGM501",
        (
            "its checksum is wrong",
            "has changed on its way",
            "handed round are damaged",
            "elements where … fit",
            "elements, and by region",
            "are not ascending within",
            "expects pieces of … elements and is sent",
        ),
        "A message was damaged on its way, or a sparsifier has broken its contract. Nothing of it was used.",
        "Look at the network and the memory of the named machine; check a sparsifier of your own by `conformance`.",
        "dev/wire.md",
    ),
    (
        "AGM502",
        (
            "messages do not belong together",
            "messages that do not belong together",
            "messages are laid out otherwise",
            "arrived in the place of",
            "bytes arrived where … are sent",
        ),
        "Ranks are in different steps, or have different plans.",
        "Look for a rank that left out a step, or has loaded another checkpoint.",
        "dev/wire.md",
    ),
    # -- frameworks -------------------------------------------------------------------------------------------------
    (
        "AGM601",
        ("one process trains, without a launcher",),
        "There is one worker, and so nothing to compress.",
        "Start the script with a launcher, such as torchrun.",
        "frameworks.md",
    ),
    (
        "AGM140",
        ("alone, and each rank keeps more than the checkpoint has",),
        "One rank alone has called a framework's saving, and ranks keep what they have not sent.",
        "Call it on all ranks: the framework writes the model on rank 0 alone. By default nothing is kept.",
        "frameworks.md",
    ),
    (
        "AGM141",
        ("and each would train by itself: the framework has made no process group",),
        "A launcher has started several processes on machines without GPUs, and the framework has not connected them.",
        "Ask it to use CPUs, as the text says.",
        "frameworks.md",
    ),
    (
        "AGM602",
        ("the script scales its loss with a GradScaler that compress() does not know",),
        "What ranks keep back would have the scale, which changes.",
        "Pass `scaler=` to `compress`.",
        "frameworks.md",
    ),
    (
        "AGM603",
        ("model.join() with sync='updates'", "join(divide_by_initial_world_size=False)"),
        "A rank that has joined does not step.",
        "Give every rank the same number of batches, or leave the argument out.",
        "frameworks.md",
    ),
    (
        "AGM604",
        ("a copy of a compressed DistributedDataParallel averages densely",),
        "A copied or unpickled model has no compression of its own.",
        "Call `ddp.compress()` with the copy.",
        "frameworks.md",
    ),
    # -- reports and speed ------------------------------------------------------------------------------------------
    (
        "AGM701",
        (
            "there is no plan yet",
            "measure() needs a step",
            "nothing has been measured",
            "trace(): a trace is being recorded",
            "grad_norm()",
        ),
        "The report needs something that has not happened yet.",
        "Call it after a step, or after what the text names.",
        "merging.md",
    ),
    (
        "AGM702",
        ("agmerge ignores the plan kept at", "agmerge cannot keep its plan for the next run"),
        "The cache of plans cannot be read or written. Training measures again.",
        "Set `AGMERGE_CACHE` to a folder of your own, or to `off`.",
        "merging.md",
    ),
    (
        "AGM703",
        (
            "tensors on … go through the host's memory",
            "as its kernels do not work there",
            "which is not the device of this process",
        ),
        "Tensors on GPUs take a slower way than they could.",
        "Do what the text names: build with NCCL, install Triton, or set the device of the process.",
        "gpu.md",
    ),
    (
        "AGM704",
        ("sends every gradient whole, as in Horovod",),
        "`Compression.none` means whole gradients.",
        "Leave it out, or name a compressor.",
        "compressors.md",
    ),
    (
        "AGM705",
        ("and compression=… costs less", "asks for selection, and no compressor is named"),
        "The choice costs more of the loss than another one did in our runs.",
        "Take the compressor that the text names, or name yours to end the line.",
        "compressors.md#what-a-choice-cost",
    ),
    (
        "AGM706",
        ("dense='partial': the parameters that are always sent whole",),
        "Small parameters alone fill most of the message.",
        "Raise `density`, or leave out `dense=`.",
        "compressors.md",
    ),
    (
        "AGM707",
        ("applies the momentum of … before selection", "memory='residual' goes with compression="),
        "The momentum is applied before selection, or cannot be. Training goes on.",
        "Nothing; name `memory=` to end the line.",
        "compressors.md",
    ),
    (
        "AGM708",
        ("share … here, and NCCL wants one for each",),
        "Several workers have the same GPU, so that messages go through the host's memory.",
        "Start one worker for each GPU.",
        "gpu.md",
    ),
    (
        "AGM709",
        ("the script has called hvd.init() by itself, on a host with fewer cores",),
        "Horovod waits in Open MPI, and takes a core from training.",
        "Call `agmerge.init()` before or instead, or start workers with the variables that the text names.",
        "backends.md",
    ),
    # Last: it holds the text of another error, which has a code of its own as a rule.
    (
        "AGM124",
        ("an earlier error ended this exchange", "call optimizer.reset() on each of them"),
        "Nothing can be exchanged after an error that broke an exchange.",
        "Look at the first error. If every rank is there, call `optimizer.reset()` on each; else start again.",
        "guarantees.md",
    ),
)
