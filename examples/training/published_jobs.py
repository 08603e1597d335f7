# SPDX-License-Identifier: Apache-2.0
"""Find the job that a published command line means: by its script's name, its flags, or the names of its folders."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path
from typing import Any, NamedTuple

import jobs
from jobs import squad

ALL = "*"
SCRIPTS = {  # published scripts, without ".py", as patterns: models and data of the jobs that they train, as patterns
    **dict.fromkeys(("horovod_trainer", "dl_trainer"), (ALL, ALL)),  # OMGS-SGD; --dnn and --dataset say it
    "pytorch_cifar100_resnet50*": ("resnet50", "cifar100"),  # FGBuff, ADTopk
    "pytorch_cifar100_vgg16*": ("vgg16", "cifar100"),
    "pytorch_imagenet_resnet152*": ("resnet152", "imagenet"),
    "pytorch_imagenet_vgg19*": ("vgg19", "imagenet"),
    "wiki2_lstm*": ("lstm", "wikitext2"),
    "wiki2_transformer*": ("transformer", "wikitext2"),
    "train_lstm": ("lstm", ALL),  # with --dataset
    "run_squad*": ("bert-*", "squad"),  # with --bert_model
    "train_bert_squad": ("bert-*", "squad"),
    "run_clm_no_trainer*": ("gpt2*", ALL),
    "run_imagenet_no_trainer*": ("vit-*", ALL),
    "run_image_classification*": ("vit-*", "beans"),  # for which there is no job, as for the next three
    "run_glue": ("bert-*", "glue"),
    "run_swag": ("bert-*", "swag"),
    "run_pretraining": ("bert-*", "pretraining"),
    "lstm": ("lstm", "wikitext2"),  # convergence_eval of ADTopk
    "transformer": ("transformer", "wikitext2"),
    "bert": ("bert-base", "squad"),
    "resnet50": ("resnet50", "cifar100"),
    "vgg16": ("vgg16", "cifar100"),
    "pytorch_mnist": ("mnist", "mnist"),  # ACP-SGD
}
SENT: dict[str, dict[str, Any]] = {  # what scripts send of themselves, where the line names no compressor
    **dict.fromkeys(("dl_trainer", "run_squad", "run_squad_baseline_docker"), {"compression": "none"}),
    **{f"run_squad_{name}_docker": {"compression": name} for name in ("adtopk", "dgc", "gaussiank", "redsync")},
    **{f"run_squad_{name}_docker": {"compression": name} for name in ("allchanneltopk", "globaltopk")},
    "run_imagenet_no_trainer": {"compression": "none"},
    "run_imagenet_no_trainer_hvd": {"compression": "dgc", "density": 0.01, "memory": "residual"},
    "pytorch_mnist": {"compression": "acpsgd", "rank": 4},
}
MODELS = {"vgg16i": "vgg16", "mnistnet": "mnist", "gpt-2": "gpt2"}  # published names that are others here
DATA = {"penntreebank": "ptb"}
BERTS = {"bert-base-uncased": "bert-base", "bert-large-uncased": "bert-large"}  # of --bert_model
SQUAD = ("init_checkpoint", "vocab_file")  # flags that only jobs of BERT have


class Evidence(NamedTuple):
    """What a part of the command line says about the job: patterns of its model and of its data."""

    said: str  # that part
    model: str = ALL
    data: str = ALL

    def fits(self, name: str) -> bool:
        """Return whether the job called ``name`` is meant."""
        model, data = parts(name)
        return fnmatchcase(model, self.model) and fnmatchcase(data, self.data)

    def touches(self, name: str) -> bool:
        """Return whether the job has the model that is said here, or the data."""
        pairs = zip(parts(name), (self.model, self.data), strict=True)
        return any(pattern != ALL and fnmatchcase(part, pattern) for part, pattern in pairs)


def job_of(args: Namespace, script: str | None = None) -> str | None:
    """Return the name of the job that the command line means; None if nothing there says it.

    The job's own name, the published script's, and flags that say a model or data must agree. Where they leave several
    jobs, the names of folders choose among them.

    Args:
        args: with what the parser has found: job, dnn, model_net, dataset, bert_model, config_file, ...
        script: the name under which this script was started, which may be a published one's.

    Raises ``ValueError`` that lists jobs where no job fits, or several do; ``OSError`` if --config_file is missing.
    """
    found = list(_flags(args))
    if script is not None and (meant := of_script(script)):
        found.append(meant)
    if args.job is not None and not args.job.endswith(".py"):
        return _agreed(args.job, found)
    if args.job is not None:
        if not (meant := of_script(args.job)):
            raise ValueError(f"{args.job} is no published script that trains one of the jobs: --list shows them")
        found.insert(0, meant)
    fitting = [name for name in jobs.JOBS if all(one.fits(name) for one in found)]
    if not fitting:
        raise ValueError(_none(found))
    for hint in _hints(args):
        fitting = [name for name in fitting if hint.fits(name)] or fitting
    if len(fitting) == len(jobs.JOBS):
        return None
    if len(fitting) > 1:
        raise ValueError(f"which job? {_and(found)} may be {', '.join(fitting)}: write one of them behind train.py")
    return fitting[0]


def of_script(script: str) -> Evidence | None:
    """Return what the name of a published script says, with its folder or without; None if it is no such script."""
    stem = Path(script).stem
    for pattern, (model, data) in SCRIPTS.items():
        if fnmatchcase(stem, pattern):
            return Evidence(Path(script).name, model, data)
    return None


def sent(args: Namespace, script: str | None = None) -> dict[str, Any]:
    """Return arguments of the library that follow from the published script's name, where the line names no compressor.

    They are what that script has in its code; what the line says goes before.
    """
    if args.compression is not None or args.fp16_allreduce:
        return {}
    named = next((name for name in (args.job, script) if name is not None and name.endswith(".py")), "")
    own = SENT.get(Path(named).stem, {})
    return {name: value for name, value in own.items() if getattr(args, name, None) is None}


def parts(name: str) -> tuple[str, str]:
    """Return the model and the data of a job; both are its whole name where that has one part."""
    model, dash, data = name.rpartition("-")
    return (model, data) if dash else (name, name)


def _flags(args: Namespace) -> Iterator[Evidence]:
    """Yield what flags say that name a model or data, or are about BERT alone."""
    for flag, name in (("--dnn", args.dnn), ("--model-net", args.model_net)):
        if name is not None:
            plain = name.casefold().replace("_", "-")
            yield Evidence(f"{flag} {name}", escape(MODELS.get(plain, plain)))
    if args.dataset is not None:
        yield Evidence(f"--dataset {args.dataset}", data=escape(_spelled(args.dataset)))
    if args.bert_model is not None:
        yield Evidence(f"--bert_model {args.bert_model}", BERTS.get(args.bert_model, ""), "squad")
    if args.config_file is not None:
        yield Evidence(f"--config_file {args.config_file}", squad.size_of(args.config_file), "squad")
    for flag in SQUAD:
        if getattr(args, flag) is not None:
            yield Evidence(f"--{flag}", "bert-*", "squad")


def _hints(args: Namespace) -> Iterator[Evidence]:
    """Yield what the folder of weights says about the model, and those of the data about these."""
    if args.weights is not None:
        name = Path(args.weights).name.casefold()
        sized = sorted({parts(job)[0] for job in jobs.JOBS}, key=len, reverse=True)
        for model in sized:  # "vit-base-patch16-224" is a vit-base, and "gpt2-xl" no gpt2
            if name == model or ("-" in model and name.startswith(f"{model}-")):
                yield Evidence(name, model)
                break
    for path in (args.data, *(Path(part).parent for part in (args.train_part, args.val_part) if part is not None)):
        if path is not None:
            spelled = _spelled(Path(path).name)
            known = sorted({parts(job)[1] for job in jobs.JOBS}, key=len, reverse=True)
            yield from (Evidence(str(path), data=data) for data in known if spelled.startswith(data))


def _spelled(data: str) -> str:
    """Return the name of data as jobs spell it: "wikitext-2-raw-v1" is "wikitext2"."""
    plain = re.sub(r"[^a-z0-9]", "", re.sub(r"(-raw)?-v1$", "", data.casefold()))
    return DATA.get(plain, plain)


def _agreed(name: str, found: Sequence[Evidence]) -> str:
    """Return the job's ``name``, which was given. Raises ``ValueError`` if what was found besides means another."""
    for one in found:
        if name in jobs.JOBS and not one.fits(name):
            others = [job for job in jobs.JOBS if one.fits(job)]
            meant = f"which means {' or '.join(others)}" if others else "for which there is no job"
            raise ValueError(f"job: {name} is given, and {one.said}, {meant}")
    return name


def _none(found: Sequence[Evidence]) -> str:
    """Return the sentence that there is no job for all that was found, and which ones there are for a part of it."""
    near = [name for name in jobs.JOBS if any(one.touches(name) for one in found)]
    others = f"for a part of it there is {', '.join(near)}" if near else "--list shows the jobs"
    return f"there is no job for {_and(found)}; {others}"


def _and(found: Sequence[Evidence]) -> str:
    return " with ".join(one.said for one in found) or "what the folders are called"
