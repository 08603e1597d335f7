"""The wheel holds every module and needs no Horovod and no MPI; `make test-all` puts it where there is nothing else."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("agmerge", "sparsifiers", "merging")
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--no-input"]
FROM_HERE = ["--no-deps", "--no-build-isolation"]

FRAMEWORKS = ("transformers", "accelerate", "lightning")
FOREIGN = ("horovod", "mpi4py", "tensorboardX", "tqdm", "sklearn", "triton", *FRAMEWORKS)
# They need what they are for, Triton or a framework, and are imported for that alone.
APART = ("sparsifiers.gpu.kernels.", *(f"agmerge.integrations.{name}" for name in FRAMEWORKS))
IMPORT_ALL = f"""
import pkgutil, sys
import agmerge, merging, sparsifiers
print(*(module.name for package in (agmerge, merging, sparsifiers)
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
        if not module.name.startswith({APART}) and __import__(module.name)))
foreign = set({FOREIGN}) & {{name.split(".")[0] for name, module in sys.modules.items() if module is not None}}
assert not foreign, foreign
assert agmerge.__file__.startswith(sys.argv[1]), agmerge.__file__
from sparsifiers import kernel
assert kernel.available() == ("sparsifiers._kernel" in sys.modules), "the compiled loops are there but not used"
"""

TRAIN = """
import torch, agmerge
agmerge.init()
model = torch.nn.Linear(64, 64)
before = model.weight.detach().clone()
inner = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = agmerge.DistributedOptimizer(inner, named_parameters=model.named_parameters(), density=0.01)
model(torch.randn(8, 64)).square().sum().backward()
optimizer.step()
print((model.weight != before).sum().item(), agmerge.backend_name())
"""


def call(command: list[str], cwd: Path) -> str:
    """Output of a command that must succeed, run where the checkout cannot be imported by accident."""
    environment = {key: value for key, value in os.environ.items() if key != "AGMERGE_KERNEL"}  # the loops are used
    ended = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    return build(tmp_path_factory.mktemp("wheel"))


def build(folder: Path) -> Path:
    """A wheel in `folder`, built from a copy: a build leaves things behind, which a later one would pack."""
    source = folder / "source"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    call([*PIP, "wheel", *FROM_HERE, "--wheel-dir", str(folder), str(source)], folder)
    (path,) = folder.glob("*.whl")
    return path


def modules() -> set[str]:
    """Every Python file of the three packages, relative to the root."""
    return {str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}


def test_the_wheel_holds_every_module_and_the_typing_marker(wheel: Path) -> None:
    names = set(ZipFile(wheel).namelist())
    assert len(modules()) > 30
    assert modules() == {name for name in names if name.endswith(".py")}
    assert {f"{package}/py.typed" for package in PACKAGES} <= names


def compiled(wheel: Path) -> list[str]:
    """What the wheel holds of the compiled loops."""
    return [name for name in ZipFile(wheel).namelist() if name.startswith("sparsifiers/_kernel.")]


@pytest.mark.skipif(not (shutil.which("cc") or shutil.which("gcc")), reason="there is no C compiler")
def test_the_wheel_holds_the_compiled_loops(wheel: Path) -> None:
    assert len(compiled(wheel)) == 1
    assert "py3-none-any" not in wheel.name


def test_without_a_compiler_the_wheel_is_built_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    wheel = build(tmp_path)
    assert compiled(wheel) == []
    assert modules() <= set(ZipFile(wheel).namelist())


def works(wheel: Path, python: list[str], place: Path, before: str = "") -> None:
    """Assert that `python -c`, with the wheel in `place`, imports all of it from there and makes a step."""
    imported = call([*python, before + IMPORT_ALL, str(place)], place).split()
    expected = {name.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for name in modules()}
    expected -= {name for name in expected if name.startswith(APART)}
    assert set(imported) - {"sparsifiers._kernel"} == expected - set(PACKAGES)
    assert ("sparsifiers._kernel" in imported) == bool(compiled(wheel))
    changed, backend = call([*python, before + TRAIN, str(place)], place).split()
    assert backend == "local"
    assert int(changed) == 41  # 1 % of 64 x 64


def test_the_wheel_works_where_all_that_it_does_not_need_cannot_be_imported(wheel: Path, tmp_path: Path) -> None:
    call([*PIP, "install", "--no-deps", "--target", str(tmp_path), str(wheel)], tmp_path)
    hidden = "import sys; sys.path.insert(0, sys.argv[1]); "
    hidden += f"sys.modules.update(dict.fromkeys({FOREIGN}))\n"
    works(wheel, [sys.executable, "-I", "-c"], tmp_path, hidden)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_wheel_works_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=False)
    python = str(tmp_path / "env" / "bin" / "python")
    # torch first, pinned: a range would take the newest build and gigabytes of what only GPUs need.
    pinned = re.search(r"^torch==\S+", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    assert pinned
    call([*PIP, "--python", python, "install", pinned.group()], tmp_path)
    call([*PIP, "--python", python, "install", str(wheel)], tmp_path)
    works(wheel, [python, "-I", "-c"], tmp_path)
