# SPDX-License-Identifier: Apache-2.0
"""The sdist builds; its wheel holds every module and needs neither Horovod nor MPI.

Without a compiler, since that is quick; `make test-all` builds the wheel with compiled loops, and tries it alone.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

import pytest

from agmerge.errors.catalogue import SOURCE
from agmerge.version import __version__

ROOT = Path(__file__).parent.parent
PACKAGES = ("agmerge", "sparsifiers", "merging")
pytestmark = pytest.mark.timeout(400)  # the first test builds
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--no-input"]
FROM_HERE = ["--no-deps", "--no-build-isolation"]

PURE, LOOPS = 1_050_000, 350_000  # bytes at most of a wheel, without the compiled loops, and of these in it

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
from sparsifiers import native
assert native.available() == ("sparsifiers._kernel" in sys.modules), "the compiled loops are there but not used"
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
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, made of a copy: a build leaves things behind, which a later one would pack."""
    source = tmp_path_factory.mktemp("sdist") / "source"
    unwanted = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info", ".*_cache", ".venv", ".git", "runs", "build")
    shutil.copytree(ROOT, source, ignore=unwanted)
    call([sys.executable, "setup.py", "--quiet", "sdist"], source)
    (path,) = (source / "dist").glob("*.tar.gz")
    return path


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout where there is no compiler."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", "no-such-compiler")
        return build(sdist, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def fast(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel with compiled loops."""
    return build(sdist, tmp_path_factory.mktemp("fast"))


def build(sdist: Path, folder: Path) -> Path:
    """A wheel in `folder`, built from the source distribution."""
    call([*PIP, "wheel", *FROM_HERE, "--wheel-dir", str(folder), str(sdist)], folder)
    (path,) = folder.glob("*.whl")
    return path


def modules() -> set[str]:
    """Every Python file of the three packages, relative to the root."""
    return {str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}


@pytest.mark.long
def test_without_a_compiler_the_wheel_is_pure_and_holds_every_module_and_the_typing_marker(wheel: Path) -> None:
    assert compiled(wheel) == [] and wheel.name.endswith("-py3-none-any.whl")
    names = set(ZipFile(wheel).namelist())
    assert len(modules()) > 30
    assert modules() == {name for name in names if name.endswith(".py")}
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    assert wheel.stat().st_size < PURE


def compiled(wheel: Path) -> list[str]:
    """What the wheel holds of the compiled loops."""
    return [name for name in ZipFile(wheel).namelist() if name.startswith("sparsifiers/_kernel.")]


COMPILER = pytest.mark.skipif(not (shutil.which("cc") or shutil.which("gcc")), reason="there is no C compiler")


@COMPILER
@pytest.mark.long
def test_a_script_above_an_editable_clone_imports_the_package_and_not_its_folder(
    sdist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tarfile.open(sdist) as packed:
        packed.extractall(tmp_path, filter="data")
    clone = tmp_path / "agmerge"  # named as the package in it is
    next(tmp_path.glob("agmerge-*")).rename(clone)
    monkeypatch.setenv("CC", "no-such-compiler")
    call([sys.executable, "setup.py", "--quiet", "editable_wheel", "--dist-dir", str(tmp_path)], clone)
    with ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "site")
    script = tmp_path / "train.py"
    script.write_text(
        f"import importlib.util, site\nsite.addsitedir({str(tmp_path / 'site')!r})\n"
        "print(importlib.util.find_spec('agmerge').origin)\n"
    )
    told = subprocess.run([sys.executable, "-S", str(script)], capture_output=True, text=True, check=True, env={})
    assert told.stdout.strip() == str(clone / "agmerge" / "__init__.py")


@pytest.mark.long
def test_one_wheel_holds_every_module_and_the_compiled_loops_for_every_python(fast: Path) -> None:
    assert "-cp310-abi3-" in fast.name
    (name,) = compiled(fast)
    assert ".abi3." in name or sys.platform == "win32"
    assert b".debug_info" not in ZipFile(fast).read(name)
    assert fast.stat().st_size < PURE + LOOPS
    assert modules() <= set(ZipFile(fast).namelist())


@pytest.mark.long
def test_a_release_needs_a_compiler(sdist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("AGMERGE_REQUIRE_KERNEL", "1")
    with pytest.raises(AssertionError, match="no-such-compiler"):
        build(sdist, tmp_path)


def test_the_source_distribution_can_test_itself(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    folders = ("tests", "docs", "examples", "benchmarks", "sparsifiers/csrc")
    kinds = (".py", ".c", ".h", ".md", ".svg", ".json", ".yaml")
    wanted = {
        str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in kinds
    }
    wanted |= {path.name for path in ROOT.glob("requirements*.txt")} | {"Makefile", "LICENSE", "README.md", ".ci/run"}
    assert len(wanted) > 200 and wanted - held == set()
    assert [name for name in held if name.endswith((".so", ".pyc"))] == []


@pytest.mark.long
def test_the_metadata_leads_somewhere(wheel: Path) -> None:
    archive = ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = message_from_bytes(archive.read(name))
    assert metadata["Author"] == "agmerge developers" and metadata["License-Expression"] == "Apache-2.0"
    links = [link.partition(", ")[0] for link in metadata.get_all("Project-URL", [])]
    assert set(links) >= {"Documentation", "Source", "Changelog", "Issues"} and metadata["Keywords"]
    assert any(line.startswith("Operating System") for line in metadata.get_all("Classifier", []))
    page = str(metadata.get_payload())
    assert f"]({SOURCE}/blob/v{__version__}/docs/" in page and f"{SOURCE}/raw/v{__version__}/docs/pictures/" in page
    targets = re.findall(r"\]\(([^)]+)\)", page) + re.findall(r'(?:src|srcset)="([^"]+)"', page)
    assert targets and [target for target in targets if not target.startswith(("https://", "#"))] == []


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


@pytest.mark.long
def test_the_wheel_works_where_all_that_it_does_not_need_cannot_be_imported(wheel: Path, tmp_path: Path) -> None:
    """And its command, ``agmerge``, is there."""
    call([*PIP, "install", "--no-deps", "--target", str(tmp_path), str(wheel)], tmp_path)
    hidden = "import sys; sys.path.insert(0, sys.argv[1]); "
    hidden += f"sys.modules.update(dict.fromkeys({FOREIGN}))\n"
    works(wheel, [sys.executable, "-I", "-c"], tmp_path, hidden)
    program = "import sys; sys.path.insert(0, sys.argv.pop(1)); from importlib.metadata import entry_points\n"
    program += "sys.exit(*(each.load()() for each in entry_points(group='console_scripts', name='agmerge')))"
    assert "doctor" in call([sys.executable, "-I", "-c", program, str(tmp_path)], tmp_path)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_wheel_works_in_a_clean_environment(fast: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=False)
    python = str(tmp_path / "env" / "bin" / "python")
    # torch first, pinned: a range would take the newest build and gigabytes of what only GPUs need.
    pinned = re.search(r"^torch==\S+", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    assert pinned
    call([*PIP, "--python", python, "install", pinned.group()], tmp_path)
    call([*PIP, "--python", python, "install", str(fast)], tmp_path)
    works(fast, [python, "-I", "-c"], tmp_path)
