# SPDX-License-Identifier: Apache-2.0
"""Data of the catalogue: jobs with workers that come and go. The fields of a row are those of `Problem`."""

from __future__ import annotations

from agmerge.errors.problems_in_training import Row

OF_ELASTIC: tuple[Row, ...] = (
    (
        "AGM014",
        ("is no host:port. Start `python -m agmerge lighthouse`", "no lighthouse answers at"),
        "The workers of an elastic job find each other at a lighthouse, and none was named, or none answers there.",
        "Run `python -m agmerge lighthouse` on a machine that stays up; set `AGMERGE_LIGHTHOUSE` to what it prints.",
        "elastic.md",
    ),
    (
        "AGM015",
        ("workers that come and go are connected by torch's Gloo", "agmerge.elastic.State is for a job with"),
        "`init(elastic=True)` was left out, or was called with another backend than torch's.",
        "Call `agmerge.init(elastic=True)` and name no backend.",
        "elastic.md",
    ),
    (
        "AGM209",
        ("an elastic job of at least … workers", "an elastic job has … workers, fewer than"),
        "Fewer workers are left than `min_workers`, and no other one has come within `patience` seconds.",
        "Call `state.commit()` after each step, which waits for others; save what is in memory; lower `min_workers`.",
        "elastic.md",
    ),
    (
        "AGM215",
        ("the lighthouse was started again, and other workers",),
        "A lighthouse was started again, and new workers found each other there before those of the job came back.",
        "End one of the two jobs; start its workers again, as newcomers of the other.",
        "elastic.md",
    ),
    (
        "AGM216",
        ("this worker leaves its elastic job",),
        "A worker that ends, or has called `agmerge.shutdown()`, was to form a group with the others.",
        "Nothing, where it has ended; else call nothing of agmerge after `shutdown()`.",
        "elastic.md",
    ),
    (
        "AGM210",
        ("the other workers go on without this one",),
        "The others have heard nothing of this worker for too long, and have formed a group without it.",
        "Start it again: it comes back as a newcomer. If it was only busy, raise `suspect`.",
        "elastic.md",
    ),
    (
        "AGM211",
        (
            "a worker of this group is lost",
            "the workers of a generation could not connect",
            "which serves this group, cannot be read",
        ),
        "A worker has died. A step goes on with the others by itself; a collective of the script does not.",
        "Put it into a function under `@state.retried`: the survivors call that again, all of them or none.",
        "elastic.md",
    ),
    (
        "AGM212",
        ("a worker was lost while rank … was let in",),
        "A newcomer was to be given the state of the others, when one of these died.",
        "Start it again: it is let in at the next commit.",
        "elastic.md",
    ),
    (
        "AGM213",
        ("a worker was lost: … workers go on", "train from now on, … before"),
        "The number of workers has changed, and training goes on.",
        "Nothing. To change the learning rate or the batch then, give `State` an `on_change`.",
        "elastic.md",
    ),
    (
        "AGM214",
        ("bytes were expected of a rank that is ahead", "was started in a replay, which has ended"),
        "Survivors of a lost worker do not agree on what a step has sent. That is a fault of ours.",
        "Report it, with the arguments of the optimizer. Start again from a file.",
        "elastic.md",
    ),
    (
        "AGM217",
        ("the job at this lighthouse has ended",),
        "A lighthouse serves one job, and the scripts of its workers have come to their ends.",
        "Start a lighthouse for the next job, or the same one anew. After `state.leave()`, or deaths, none is needed.",
        "elastic.md",
    ),
    (
        "AGM218",
        ("one torchrun has started … workers, and ends all of them",),
        "The agent of torchrun ends all workers that it has started when one of them dies.",
        "Start each worker by a torchrun of its own, with `--nproc_per_node 1`, or without a launcher.",
        "elastic.md",
    ),
    (
        "AGM220",
        ("exchanges of an elastic job without commit()",),
        "A script of an elastic job does not call `commit()`, or too seldom: those that come wait in vain.",
        "Call `state.commit()` after each step, on all workers.",
        "elastic.md",
    ),
    (
        "AGM310",
        ("agmerge.elastic.State(optimizer=...) was given",),
        "`State` was made with the optimizer that is wrapped, in place of the one that exchanges.",
        "Wrap it first: `optimizer = agmerge.DistributedOptimizer(inner, ...)`, then `State(optimizer=optimizer)`.",
        "elastic.md",
    ),
    (
        "AGM308",
        ("cannot go on without a worker that is lost", "pretends a link for a fixed number of workers"),
        "The setting depends on a fixed number of workers, so an elastic job refuses it.",
        "Leave it out, or start without `elastic=True`.",
        "elastic.md",
    ),
    (
        "AGM219",
        ("agmerge.elastic.Sampler does not know which samples",),
        "A sampler that no `State` has would give the same samples again and again: `commit()` counts what is trained.",
        "Give it to `agmerge.elastic.State(sampler=...)`, before the first batch is drawn.",
        "elastic.md",
    ),
    (
        "AGM309",
        (
            "a launcher has told accelerate of a fixed number of workers",
            "fp16 scales the loss, and an elastic job cannot",
            "in an elastic job the number of steps of an epoch depends",
            "workers of an elastic job share samples that are drawn",
            "a Trainer of an elastic job: call agmerge.init(elastic=True) before",
            "optimizers of the model's parameters, and an elastic job",
            "agmerge.elastic.Sampler: … samples in batches of …",
        ),
        "A Trainer or an Accelerator of an elastic job trains in one process, for a number of steps, with samples that "
        "can be dealt out anew.",
        "Do what the error says: start workers by `python`, set `max_steps`, leave the sampler to agmerge.",
        "elastic.md",
    ),
    (
        "AGM407",
        (
            "agmerge.elastic.State has … here and",
            "samples here, and … where its place was recorded",
            "agmerge.elastic.Sampler has … here, and the others",
            "this worker cannot take over the state of the others",
        ),
        "Workers run other scripts, or have other data or arguments, or are of another job: their states do not fit.",
        "Give every worker the same script, arguments and data, and every job a lighthouse of its own.",
        "elastic.md",
    ),
    (
        "AGM710",
        ("the workers of this elastic job do not let this one in",),
        "A newcomer runs another version of agmerge, or what it has written at the lighthouse was damaged.",
        "Install the same version on all machines, and start it again. The others train on.",
        "elastic.md",
    ),
    (
        "AGM711",
        ("the last worker that had the state of this elastic job is gone",),
        "No worker is left that has the job's state. Those that wait begin again, or raise this with `restart=False`.",
        "Load the latest file before `State(...)`. Start more workers at a time, so that one of them survives.",
        "elastic.md",
    ),
)
