# SPDX-License-Identifier: Apache-2.0
"""Data of the catalogue: elastic jobs, in which workers join and leave. The fields of a row are those of `Problem`."""

from __future__ import annotations

from agmerge.errors.problems_in_training import Row

OF_ELASTIC: tuple[Row, ...] = (
    (
        "AGM014",
        "no lighthouse",
        "The workers of an elastic job find each other through a lighthouse, but none is set, or it does not answer.",
        "Run `python -m agmerge lighthouse` on a machine that stays up. Set `AGMERGE_LIGHTHOUSE` to its address.",
        "elastic.md",
    ),
    (
        "AGM015",
        "the job is not elastic",
        "`init(elastic=True)` was not called, or it was called with a backend other than torch's.",
        "Call `agmerge.init(elastic=True)` without `backend=`.",
        "elastic.md",
    ),
    (
        "AGM209",
        "too few workers",
        "Fewer than `min_workers` workers are left, and no other one joined within `patience` seconds.",
        "Call `state.commit()` after each step, which waits for workers. Or lower `min_workers`.",
        "elastic.md",
    ),
    (
        "AGM210",
        "the other workers continued without this one",
        "The other workers received no sign of life from this worker for too long, and formed a group without it.",
        "Restart this worker: it joins as a new worker. If it was only busy, raise `suspect`.",
        "elastic.md",
    ),
    (
        "AGM211",
        "a worker of the group failed",
        "A worker failed. agmerge repeats a step with the other workers, but not a collective of the script.",
        "Put the collective into a function under `@state.retried`, which calls it again on all remaining workers.",
        "elastic.md",
    ),
    (
        "AGM212",
        "worker lost while joining",
        "A new worker was receiving its state from the others when one of them failed.",
        "Restart the new worker. It joins at the next commit.",
        "elastic.md",
    ),
    (
        "AGM213",
        "the number of workers changed",
        "Workers joined, left or failed, and training continues.",
        "Do nothing. To adapt the learning rate or the batch size, pass `on_change=` to `State`.",
        "elastic.md",
    ),
    (
        "AGM214",
        "workers disagree after a failure",
        "The remaining workers do not agree on what a step has sent. This is a bug in agmerge.",
        "Report it, with the arguments of the optimizer. Start again from a checkpoint.",
        "elastic.md",
    ),
    (
        "AGM215",
        "another job uses the lighthouse",
        "The lighthouse was restarted, and new workers formed a job before the workers of this job reconnected.",
        "End one of the two jobs. Restart its workers, which then join the other job.",
        "elastic.md",
    ),
    (
        "AGM216",
        "this worker is leaving its job",
        "agmerge was called in a worker that is ending, or that called `agmerge.shutdown()`.",
        "Do nothing if the worker has ended. Otherwise do not call agmerge after `shutdown()`.",
        "elastic.md",
    ),
    (
        "AGM217",
        "the job of this lighthouse has finished",
        "A lighthouse serves one job, and the scripts of its workers have finished.",
        "Restart the lighthouse before you start the next job. After `state.leave()` or failures it is reusable.",
        "elastic.md",
    ),
    (
        "AGM218",
        "one torchrun started several workers",
        "torchrun ends all workers that it started as soon as one of them fails.",
        "Start each worker with its own torchrun and `--nproc_per_node 1`, or without a launcher.",
        "elastic.md",
    ),
    (
        "AGM219",
        "sampler without a State",
        "A sampler that is not part of a `State` would repeat the same samples, because `commit()` counts them.",
        "Pass it to `agmerge.elastic.State(sampler=...)` before you draw the first batch.",
        "elastic.md",
    ),
    (
        "AGM220",
        "an elastic job without commit()",
        "The script does not call `commit()`, or calls it too rarely, so new workers cannot join.",
        "Call `state.commit()` after each step, on all workers.",
        "elastic.md",
    ),
    (
        "AGM308",
        "not supported in elastic training",
        "The setting requires a fixed number of workers.",
        "Remove the setting, or call `agmerge.init()` without `elastic=True`.",
        "elastic.md",
    ),
    (
        "AGM309",
        "framework setting not supported in elastic training",
        "In an elastic job, a Trainer or an Accelerator must train in one process per worker, for a number of steps, "
        "with samples that agmerge can redistribute.",
        "Follow the error text: start workers with `python`, set `max_steps`, and do not pass your own sampler.",
        "elastic.md",
    ),
    (
        "AGM310",
        "State needs the wrapped optimizer",
        "`State` received the inner optimizer instead of the one that exchanges gradients.",
        "Wrap it first: `optimizer = agmerge.DistributedOptimizer(inner, ...)`, then `State(optimizer=optimizer)`.",
        "elastic.md",
    ),
    (
        "AGM407",
        "workers of an elastic job do not match",
        "Workers run different scripts, use different data or arguments, or belong to different jobs.",
        "Use the same script, arguments and data on every worker, and a separate lighthouse for each job.",
        "elastic.md",
    ),
    (
        "AGM710",
        "this worker was not admitted",
        "This worker runs another version of agmerge, or its record at the lighthouse was damaged.",
        "Install the same version on all machines, and restart this worker. The others continue.",
        "elastic.md",
    ),
    (
        "AGM711",
        "the state of the elastic job is lost",
        "No worker is left that has the state of the job. New workers start again, or raise if `restart=False`.",
        "Load the latest checkpoint before `State(...)`. Run more workers at a time, so that one of them survives.",
        "elastic.md",
    ),
)
