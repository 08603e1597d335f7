# SPDX-License-Identifier: Apache-2.0
"""Command lines of the published projects' scripts, with what their variables are by default: facts, to be run.

A line is what stands behind ``python``. ``BERT`` and ``GOOGLE`` stand for folders of theirs that a test replaces.
"""

from __future__ import annotations

from typing import NamedTuple


class Line(NamedTuple):
    """What a shell script runs."""

    source: str  # project: the shell script
    script: str  # the Python script
    flags: str
    job: str  # of ours; "" where there is none
    told: bool = True  # whether the flags tell the job


# -- OMGS-SGD: dnn=... ./horovod_mpi.sh ------------------------------------------------------------------------------

CONFIGURATIONS = (  # exp_configs/*.conf: dnn, dataset, batch size, epochs, learning rate, folder; and our job
    ("alexnet", "imagenet", 256, 95, "0.01", "/local/imagenet_hdf5", ""),
    ("fcn5net", "mnist", 128, 30, "0.01", "./data", ""),
    ("googlenet", "imagenet", 32, 95, "0.01", "/local/imagenet_hdf5", ""),
    ("inceptionv3", "imagenet", 64, 95, "0.01", "/data/imagenet_hdf5_224", ""),
    ("inceptionv4", "imagenet", 64, 95, "0.01", "/local/imagenet_hdf5", ""),
    ("lr", "mnist", 128, 30, "0.001", "./data", ""),
    ("lstm", "ptb", 20, 100, "22.0", "/data/PennTreeBank", "lstm-ptb"),
    ("lstman4", "an4", 4, 100, "0.0002", "/data/an4data", ""),
    ("mnistnet", "mnist", 128, 80, "0.01", "./data", "mnist"),
    ("resnet110", "cifar10", 128, 141, "0.1", "./data", "resnet110-cifar10"),
    ("resnet20", "cifar10", 32, 141, "0.1", "./data", "resnet20-cifar10"),
    ("resnet50", "imagenet", 32, 95, "0.01", "/local/imagenet_hdf5", "resnet50-imagenet"),
    ("resnet56", "cifar10", 128, 141, "0.1", "./data", "resnet56-cifar10"),
    ("vgg16", "cifar10", 128, 141, "0.1", "./data", "vgg16-cifar10"),
    ("vgg16i", "imagenet", 64, 95, "0.01", "/local/imagenet_hdf5", "vgg16-imagenet"),
)


def omgs() -> list[Line]:
    """Return the lines of horovod_mpi.sh for every configuration, and that of single.sh."""
    lines = []
    for dnn, dataset, batch, epochs, rate, folder, job in CONFIGURATIONS:
        flags = (
            f"--dnn {dnn} --dataset {dataset} --max-epochs {epochs} --batch-size {batch} --nworkers 4 "
            f"--data-dir {folder} --lr {rate} --nsteps-update 1 --nwpernode 4 --density 0.001 --compressor topk "
            "--threshold 8192"
        )
        lines.append(Line(f"OMGS-SGD: {dnn} horovod_mpi.sh", "horovod_trainer.py", flags, job))
    single = (
        "--dnn resnet50 --dataset imagenet --max-epochs 95 --batch-size 32 --data-dir /local/imagenet_hdf5 --lr 0.01 "
        "--nsteps-update 1"
    )
    return [*lines, Line("OMGS-SGD: single.sh", "dl_trainer.py", single, "resnet50-imagenet")]


# -- FGBuff and ADTopk: SQuAD ----------------------------------------------------------------------------------------

MODELS = {"base": "bert-base-uncased/uncased_L-12_H-768_A-12", "large": "bert-large-uncased/uncased_L-24_H-1024_A-16"}
FILES = {"base": "bert_base_wiki.pt", "large": "bert_large_pretrained_amp.pt"}
SPARSE = "--density={} --compressor={}  --threshold  8192 "


def squad(
    source: str, script: str, out: str, sparse: str, size: str = "base", epochs: str = "3.0", then: str = ""
) -> Line:
    """Return a line of a script for SQuAD: ``sparse`` goes before what all have, ``then`` after --do_eval."""
    model = f"BERT/pre-model/{MODELS[size]}"
    flags = (
        f"--init_checkpoint={model}/{FILES[size]} {sparse} --do_train --train_file=BERT/squad/train-v1.1.json "
        "--train_batch_size=4 --do_predict --predict_file=BERT/squad/dev-v1.1.json --predict_batch_size=4 "
        f"--eval_script=BERT/squad/evaluate-v1.1.py --do_eval {then} --do_lower_case "
        f"--bert_model=bert-{size}-uncased --learning_rate=3e-5 --warmup_proportion=0.1 --seed=1 "
        f"--num_train_epochs={epochs} --max_seq_length=384 --doc_stride=128 --output_dir={out} "
        f"--vocab_file={model}/vocab.txt --config_file={model}/bert_config.json --max_steps=-1"
    )
    return Line(source, script, flags, f"bert-{size}-squad")


def plain(source: str, script: str, epochs: int, density: str, compressor: str, job: str) -> Line:
    """Return a line of a script that says nothing but how long, and what is sent."""
    flags = f"--epochs {epochs} --density {density} --compressor {compressor} --threshold 8192"
    return Line(source, script, flags, job, told=False)


def fgbuff() -> list[Line]:
    """Return the lines of the five folders of FGBuff."""
    lines = []
    for folder, scripts, cv, words, transformer, out in (
        ("FGBuff", ("run_squad_bert.sh", ""), "0.05 gaussian", "0.05 gaussian", "0.1 gaussian", "../result_train/"),
        ("omgs", ("run_squad_topk.sh", ""), "0.01 gaussian", "0.01 gaussian", "0.1 gaussian", "../result_train_omgs/"),
        ("dear", ("run_squad_topk.sh", "_time"), "0.05 gaussian", "0.01 gaussian", "0.1 gaussian", "../result_dear"),
        ("syncea", ("run_squad_topk.sh", ""), "0.05 gaussian", "0.01 gaussian", "0.01 gaussian", "../result_train/"),
        ("horovod", ("run_squad_topk.sh", "_time"), "0.05 gaussiank", "0.01 gaussiank", "0.01 gaussiank", "../hvd"),
    ):
        source = f"FGBuff: example_{folder}"
        shell, timed = scripts
        cifar = f"pytorch_cifar100_resnet50{timed}.py"
        lines += [
            plain(f"{source}/run_cifar100_resnet50.sh", cifar, 80, *cv.split(), "resnet50-cifar100"),
            plain(f"{source}/wiki2_lstm.sh", "wiki2_lstm_topk.py", 120, *words.split(), "lstm-wikitext2"),
            plain(
                f"{source}/wiki2_transformer.sh",
                "wiki2_transformer_topk.py",
                120,
                *transformer.split(),
                "transformer-wikitext2",
            ),
            squad(
                f"{source}/{shell}",
                "../run_squad_topk.py",
                out,
                SPARSE.format("0.05" if folder == "FGBuff" else "0.01", words.split()[1]),
            ),
        ]
    return lines


# -- ADTopk ------------------------------------------------------------------------------------------------------------

DOCKER = ("adtopk", "allchanneltopk", "baseline", "dgc", "gaussiank", "globaltopk", "redsync")
GPT = (
    "--dataset_name /data/dataset/nlp/openai-community/wikitext-103-raw-v1 --dataset_config_name default  "
    "--model_name_or_path /data/dataset/nlp/openai-community/gpt2 --num_train_epochs=30  --density=0.1 "
    "--compressor=dgc --memory=residual --percent=0  --per_device_train_batch_size=2"
)


def vit(size: str, epochs: int, batch: int, more: str = "") -> str:
    """Return the flags of a script for ViT."""
    return (
        f"--image_column_name image    --image_column_name image   --num_train_epochs={epochs}   "
        "--train_dir /data/imagenet/train   --validation_dir /data/imagenet/val   "
        f"--model_name_or_path GOOGLE/vit-{size}-patch16-224-in21k   --per_device_train_batch_size {batch}   "
        f"--per_device_eval_batch_size {batch}   --metric_accuracy GOOGLE/evaluate/metrics/accuracy  {more}"
    )


def adtopk() -> list[Line]:
    """Return the lines of ADTopk's examples and of its folder wfbps."""
    out = "--with_tracking  --output_dir /data/image-classification/output"
    sparse = "--density=0.01 --compressor=dgc --memory= --percent=0"  # memory is a comment there
    hvd, plainly = "run_imagenet_no_trainer_hvd.py", "run_imagenet_no_trainer.py"
    lines = [
        Line("ADTopk: run_cifar100_no_trainer.sh", plainly, vit("base", 80, 8), "vit-base-imagenet"),
        Line("ADTopk: run_imagenet_no_trainer.sh", plainly, vit("base", 80, 8), "vit-base-imagenet"),
        Line("ADTopk: run_imagenet_no_trainer_hvd.sh", hvd, vit("base", 80000, 32, out), "vit-base-imagenet"),
        Line("ADTopk: run_cifar100_..._hvd_large.sh", hvd, vit("large", 80000, 32, out), "vit-large-imagenet"),
        Line(
            "ADTopk: run_imagenet_..._hvd_large.sh",
            hvd,
            vit("large", 80000, 32, f"--with_tracking {sparse} {out[15:]}"),
            "vit-large-imagenet",
        ),
        Line("ADTopk: lstm/run.sh", "train_lstm.py", "--dataset wikitext-2 --compressor adtopk --epochs 80",
             "lstm-wikitext2", told=False),
        Line("ADTopk: convergence_eval/run.sh", "lstm.py", "--epochs 300", "lstm-wikitext2", told=False),
        squad(
            "ADTopk: run_sqaud.sh",
            "./pytorch/train_bert_squad.py",
            "./squad_base/output",
            "",
            epochs="2.0",
            then="--compressor=adtopk",
        ),
        squad("ADTopk: pytorch/scripts/run_squad.sh", "run_squad.py", "/results", "", "large", "2.0", then="--fp16"),
        *(
            squad(f"ADTopk: docker, {name}", f"../../run_squad_{name}_docker.py", "../out", "", epochs="2.0")
            for name in DOCKER
        ),
    ]  # fmt: skip
    for folder, words, density in (("examples", "gaussian", "0.05"), ("wfbps", "gaussiank", "0.01")):
        source = f"ADTopk: {folder}"
        long = "0.1" if folder == "examples" else "0.01"
        lines += [
            plain(f"{source}/resnet152", "pytorch_imagenet_resnet152.py", 80, "0.05", "gaussian", "resnet152-imagenet"),
            plain(f"{source}/lstm", "wiki2_lstm_compress.py", 120, density, words, "lstm-wikitext2"),
            plain(f"{source}/t", "wiki2_transformer_compress.py", 120, long, words, "transformer-wikitext2"),
            squad(f"{source}/base", "../run_squad_compress.py", "../result", SPARSE.format(density, words)),
            squad(f"{source}/large", "../run_squad_compress.py", "out", SPARSE.format("0.1", "dgc"), "large", "30.0"),
            Line(f"{source}/run_clm_no_trainer_hvd_103.sh", "run_clm_no_trainer_hvd.py", GPT, "gpt2-wikitext103"),
        ]
    return lines


LINES = [*omgs(), *fgbuff(), *adtopk()]
ELSEWHERE = [  # of the same repositories, of which there is no job: a line, and words of the error
    Line("ADTopk: run_image_classification.sh", "run_image_classification.py",
         "--dataset_name beans --output_dir ./beans_outputs/ --remove_unused_columns False --label_column_name labels "
         "--do_train --do_eval --push_to_hub --num_train_epochs 5 --seed 1337", "there is no job for"),
    Line("ADTopk: run_image_classification_no_trainer.sh", "run_image_classification_no_trainer.py",
         "--image_column_name image", "there is no job for"),
    Line("ADTopk: run_glue.sh", "run_glue.py", "--task_name mrpc --do_train --train_batch_size=16 --do_lower_case "
         "--data_dir /glue/MRPC/ --bert_model bert-large-uncased --seed 2", "there is no job here"),
    Line("ADTopk: run_swag.sh", "run_swag.py", "--init_checkpoint=a.pt --do_train --train_batch_size=12 "
         "--do_lower_case --data_dir /swag/data/ --bert_model bert-large-uncased --max_seq_length 128",
         "there is no job here"),
    Line("ADTopk: run_pretraining.sh", "run_pretraining.py", "--input_dir=/data/phase1 --output_dir=/out "
         "--config_file=bert_config.json --max_seq_length=128 --max_predictions_per_seq=20", "there is no job here"),
    Line("OMGS-SGD: eval.sh", "evaluate.py", "--model-path weights/resnet110-n4-bs128-lr0.1000 --dnn resnet110 "
         "--dataset cifar10 --nepochs 140 --data-dir ./data", "--resume evaluates a checkpoint"),
]  # fmt: skip


# -- ACP-SGD: batch.sh runs perf.sh with these ---------------------------------------------------------------------

ACP = (  # model, rank, batch size, threshold in MB
    ("resnet50", 4, 64, 25),
    *(("resnet152", 4, batch, 25) for batch in (8, 16, 24, 32)),
    ("bert_base", 32, 32, 25),
    *(("bert_large", 32, 8, threshold) for threshold in (0, 25, 50, 100, 500, 1000, 1500)),
    *(("bert_large", rank, 8, 25) for rank in (64, 128, 256)),
)


def acpsgd(opt: str) -> list[str]:
    """Return the flags of the two benchmarks in batch.sh for an optimizer: ssgd, powersgd or acpsgd."""
    lines = []
    for model, rank, batch, threshold in ACP:
        length = "--sentence-len 64 " if model.startswith("bert") else ""
        lines.append(f"--model {model} {length}--batch-size {batch} --rank {rank} --threshold {threshold} --opt {opt}")
    return lines
