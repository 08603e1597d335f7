# SPDX-License-Identifier: Apache-2.0
"""The launcher of the examples: command lines and clusters in, commands out."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import launch
import pytest
from cluster.commands import Machine, command
from cluster.hosts import Cluster, Host, read
from cluster.sbatch import sbatch

PLAIN = Machine(name="here", root=False, cores=4, env={"HOME": "/home/me"})
ROOT = Machine(name="here", root=True, cores=4, env={"PATH": "/bin", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "2"})
TWO = (Host("a", 2), Host("b", 2))
TORCHRUN = "py -m torch.distributed.run"
STATIC = "--rdzv_backend=static --rdzv_endpoint=a:29500"
MPIRUN = "mpirun -np 4 --bind-to none --map-by slot"
IN_ETH0 = "GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0"
needs_toml = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no tomllib")


def at(workers: int = 4, **more: object) -> Cluster:
    return Cluster(workers=workers, python="py", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "launcher, where, machine, lines",
    [
        ("torchrun", at(), PLAIN, [f"{TORCHRUN} --standalone --nproc_per_node=4 -- t.py a"]),
        ("torchrun", at(), ROOT, [f"{TORCHRUN} --standalone --nproc_per_node=4 -- t.py a"]),
        (
            "torchrun",
            at(hosts=TWO),
            PLAIN,
            [f"{TORCHRUN} --nnodes=2 --node_rank={n} --nproc_per_node=2 {STATIC} -- t.py a" for n in range(2)],
        ),
        (  # the first host is filled first, and what is set here goes along
            "torchrun",
            at(3, hosts=TWO, interface="eth0", port=29500),
            ROOT,
            [
                f"env NCCL_DEBUG=INFO OMP_NUM_THREADS=2 {IN_ETH0} {TORCHRUN} --nnodes=2 --node_rank={n} "
                f"--nproc_per_node={2 - n} {STATIC} -- t.py a"
                for n in range(2)
            ],
        ),
        ("torchrun", at(2, hosts=TWO), PLAIN, [f"{TORCHRUN} --standalone --nproc_per_node=2 -- t.py a"]),
        ("horovodrun", at(), ROOT, ["horovodrun -np 4 py t.py a"]),
        (
            "horovodrun",
            at(hosts=TWO, interface="eth0", environment={"A": "1"}),
            PLAIN,
            ["env A=1 horovodrun -np 4 -H a:2,b:2 --network-interfaces eth0 py t.py a"],
        ),
        ("mpirun", at(), PLAIN, [f"{MPIRUN} py t.py a"]),
        (
            "mpirun",
            at(),
            ROOT,
            [f"{MPIRUN} --allow-run-as-root -x PATH -x NCCL_DEBUG -x OMP_NUM_THREADS py t.py a"],
        ),
        ("mpirun", at(5), PLAIN, ["mpirun -np 5 --bind-to none --map-by slot --oversubscribe py t.py a"]),
        (  # slots that were named may be more than cores; what the file sets goes before what is set here
            "mpirun",
            at(5, hosts=(Host("a", 8),), interface="eth0", environment={"OMP_NUM_THREADS": "1"}),
            ROOT,
            [
                "mpirun -np 5 -H a:8 --bind-to none --map-by slot --allow-run-as-root --mca btl_tcp_if_include eth0 "
                "-x PATH -x NCCL_DEBUG -x GLOO_SOCKET_IFNAME=eth0 -x NCCL_SOCKET_IFNAME=eth0 -x OMP_NUM_THREADS=1 "
                "py t.py a"
            ],
        ),
        ("alone", at(1), PLAIN, ["py t.py a"]),
        ("alone", at(1, hosts=(Host("here"),), environment={"A": "b c"}), PLAIN, ["env 'A=b c' py t.py a"]),
    ],
)
def test_the_commands_of_every_launcher(launcher: str, where: Cluster, machine: Machine, lines: list[str]) -> None:
    assert list(map(shlex.join, command(launcher, where, "t.py", ["a"], machine))) == lines


@pytest.mark.parametrize(
    "line, why",
    [
        ("-np 2 -- no_such.py", "no script no_such.py"),
        ("-- digits.py", "how many workers"),
        ("-np 0 -- digits.py", "one worker at least"),
        ("-np 5 -H a:2,b:2 -- digits.py", "the hosts have 4 slots"),
        ("-H a:two -- digits.py", "'a:two' is no host"),
        ("-H a,,b -- digits.py", "'' is no host"),
        ("--launcher alone -np 2 -- digits.py", "alone starts one worker"),
        ("--launcher alone -H other -- digits.py", "alone starts one worker"),
        ("--launcher mpirun -np 2 --ssh -- digits.py", "--ssh is for --launcher torchrun"),
        ("-np 2 --sbatch f -- digits.py", "--sbatch is for --launcher slurm"),
        ("-np 2 --slurm time=1 -- digits.py", "--slurm is for --launcher slurm"),
        ("-np 2 --launcher slurm --each seed=1,2 -- digits.py", "--each waits for every run"),
        ("-np 3 --launcher slurm --slurm nodes=2 -- digits.py", "3 workers on 2 nodes"),
        ("-np 3 --launcher slurm --slurm nodes=0 -- digits.py", "nodes=0 of Slurm's options"),
        ("-H a:2,b:1 --launcher slurm -- digits.py", "3 workers on 2 nodes"),
        ("-np 2 --each compression -- digits.py", "write flag=value,value"),
        ("-np 2 --config no_such.toml -- digits.py", "no_such.toml"),
    ],
)
def test_what_cannot_be_is_said(line: str, why: str) -> None:
    if "--config" in line and sys.version_info < (3, 11):
        why = "cannot read TOML"
    with pytest.raises(SystemExit, match=why):
        launch.main(line.split())


@needs_toml
@pytest.mark.parametrize(
    "text, why",
    [
        ("nodes = 2", "there is no 'nodes'; a file may have launcher, workers, hosts"),
        ('workers = "2"', "workers = '2' must be of type int"),
        ("workers = true", "workers = True must be of type int"),
        ("workers = ", "c.toml: Invalid value"),
    ],
)
def test_files_with_mistakes_are_refused(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(ValueError, match=why):
        read(tmp_path / "c.toml")


def test_slurms_file() -> None:
    slurm = {"partition": "gpu", "time": "1:00:00", "exclusive": ""}
    text = sbatch(at(8, slurm={**slurm, "nodes": "2"}, interface="ib0"), "train.py", ["gpt2-wikitext2", "--lr", "1"])
    options = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert options == [
        *("job-name=gpt2-wikitext2", "nodes=2", "ntasks-per-node=4", "requeue", "open-mode=append"),
        *("output=%x-%j.out", "signal=B:USR1@120", "partition=gpu", "time=1:00:00", "exclusive"),
    ]
    assert "export GLOO_SOCKET_IFNAME=ib0\n" in text
    assert (
        'py train.py gpt2-wikitext2 --lr 1 --run-name "gpt2-wikitext2-$SLURM_JOB_ID" '
        '--checkpoint-dir "checkpoints/gpt2-wikitext2-$SLURM_JOB_ID" ${SLURM_RESTART_COUNT:+--resume} &\n'
    ) in text
    named = sbatch(at(2), "t.py", ["j", "--run-name=x", "--checkpoint-dir", "c d"])
    assert "py t.py j --run-name=x --checkpoint-dir 'c d' ${SLURM" in named
    placed = sbatch(at(4, hosts=TWO), "t.py", [])
    assert "--nodes=2\n" in placed and "--ntasks-per-node=2\n" in placed and "--nodelist=a,b\n" in placed


def test_slurms_file_is_written_and_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho submitted $1\nexit 3\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    file = tmp_path / "job.sh"
    line = ["--launcher", "slurm", "-np", "2", "--sbatch", str(file), "--", "digits.py"]
    assert launch.main(["--dry-run", *line]) == 0 and not file.exists()
    assert launch.main(line) == 3
    assert f"sbatch {file}\nsubmitted {file}\n" in capfd.readouterr().out
    assert file.read_text().startswith("#!/bin/bash\n#SBATCH --job-name=")


RUN = """
import json, pathlib, sys
at = {flag: sys.argv[sys.argv.index(flag) + 1] for flag in ("--run-name", "--log-dir", "--compression")}
if at["--compression"] == "broken":
    sys.exit(5)
start = dict(kind="start", job="j", run=at["--run-name"], settings={}, optimizer={"compression": at["--compression"]},
             metric="accuracy", unit="images", workers=1, step=0)
epoch = dict(kind="epoch", epoch=1, step=1, metrics={"accuracy": 0.5}, train_seconds=1, wall_seconds=1,
             samples_per_second=1, stats={})
folder = pathlib.Path(at["--log-dir"], at["--run-name"])
folder.mkdir(parents=True)
(folder / "log.jsonl").write_text(json.dumps(start) + "\\n" + json.dumps(epoch) + "\\n")
"""


@pytest.mark.slow
def test_a_sweep_goes_on_after_a_failure_and_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.py").write_text(RUN)
    line = ["--launcher", "alone", "--each", "compression=broken,none,topk"]
    line += ["--", str(tmp_path / "t.py"), "j", "--log-dir", str(tmp_path / "runs")]
    assert launch.main(line) == 1
    out, err = capsys.readouterr()
    shown = out.splitlines()
    assert shown[3] == f"{tmp_path / 'runs'}/*/log.jsonl:" and shown[4].startswith("job")
    assert len(shown) == 7 and "none" in shown[5] and "topk" in shown[6]
    assert "1 of 3 runs failed or were not made: j_compression=broken (status 5)" in err
    with pytest.raises(SystemExit, match="is there already"):
        launch.main([*line[:3], "compression=none", *line[4:]])
