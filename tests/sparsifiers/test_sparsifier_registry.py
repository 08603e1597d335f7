"""Names, aliases, registration, and what the package may import and shows."""

from __future__ import annotations

import ast
import doctest
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sparsifiers
from sparsifiers import Memory, Sparsifier, catalogue
from sparsifiers.topk import TopK


class Doubled(TopK):
    """topk with an option, as a user would write it."""

    name = "doubled"

    def __init__(self, density: float = 0.01, factor: int = 2) -> None:
        super().__init__(density)
        self.factor = factor

    def options(self) -> dict[str, object]:
        return {"factor": self.factor}


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = dict(catalogue._sparsifiers._factories)
    yield
    catalogue._sparsifiers._factories.clear()
    catalogue._sparsifiers._factories.update(before)


def test_names_are_canonical() -> None:
    names = sparsifiers.names()
    assert isinstance(names, tuple)
    assert "topk" in names
    assert not {"tradtopk", "globaltopk"} & set(names)
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("TopK", "topk"),
        ("top-k", "topk"),
        ("eftopk", "topk"),
        ("TopKEF", "topk"),
        ("topkA", "topk"),
        ("ADTopk", "adtopk"),
        ("ADTopk_Row", "adtopk-row"),
        ("adtopk_f", "adtopk-fill"),
        ("Gaussian-k", "gaussiank"),
        ("DGCSampling", "dgc"),
        ("redsynctrim", "redsync-trim"),
        ("SIDCo_E", "sidco-e"),
        ("sidco", "sidco-e"),
        ("sidcoexp", "sidco-e"),
        ("SIDCoGP", "sidco-gp"),
        ("sidcogam", "sidco-gamma"),
        ("random_k", "randomk"),
    ],
)
def test_names_as_papers_and_people_write_them(said: str, name: str) -> None:
    assert sparsifiers.get(said, density=0.5).name == name
    assert said not in sparsifiers.names()


def test_memories_as_people_write_them() -> None:
    assert sparsifiers.memory("Residual").name == "residual"
    assert sparsifiers.memory("DGC").name == "dgc"
    assert sparsifiers.memory("residual_gTopK").name == "residualgtopk"


@pytest.mark.parametrize("name", ["topk", "tradtopk", "globaltopk"])
def test_aliases(name: str) -> None:
    made = sparsifiers.get(name, density=0.5)
    assert isinstance(made, TopK)
    assert (made.name, made.density) == ("topk", 0.5)
    assert sparsifiers.get(name).density == 0.01
    assert sparsifiers.get(name) is not sparsifiers.get(name)


@pytest.mark.parametrize(
    ("wrong", "near"), [("TOPKK", "topk"), ("tokp", "topk"), ("tradtpk", "tradtopk"), ("zzz", None)]
)
def test_unknown_names(wrong: str, near: str | None) -> None:
    with pytest.raises(ValueError) as caught:
        sparsifiers.get(wrong)
    text = str(caught.value)
    assert f"unknown sparsifier {wrong!r}" in text
    assert "known: " + ", ".join(sparsifiers.names()) in text
    assert ("did you mean" in text) is (near is not None)
    if near is not None:
        assert text.endswith(f"did you mean {near!r}?")


@pytest.mark.parametrize("wrong", [None, 3, TopK])
def test_names_that_are_no_strings(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"a sparsifier is named by a string.*topk"):
        sparsifiers.get(wrong)
    with pytest.raises(TypeError, match=r"a memory is named by a string.*residual"):
        sparsifiers.memory(wrong)


def test_unknown_options() -> None:
    with pytest.raises(TypeError, match=r"sparsifier 'topk' has no option 'beta'; it accepts none"):
        sparsifiers.get("topk", beta=1)
    sparsifiers.register("doubled", Doubled)
    with pytest.raises(TypeError, match=r"'doubled' has no option 'fator', 'x'; it accepts factor$"):
        sparsifiers.get("doubled", factor=1, fator=2, x=3)
    with pytest.raises(TypeError, match=r"memory 'residual' has no option 'beta'; it accepts none"):
        sparsifiers.memory("residual", beta=0.9)


def test_register() -> None:
    sparsifiers.register("doubled", Doubled)
    assert sparsifiers.names()[-1] == "doubled"
    made = sparsifiers.get("doubled", 0.25, factor=3)
    assert repr(made) == "doubled(density=0.25, factor=3)"
    with pytest.raises(ValueError, match="did you mean 'doubled'"):
        sparsifiers.get("double")


def test_a_factory_may_take_whatever_it_likes() -> None:
    seen = {}

    def factory(density: float, **options: object) -> Sparsifier:
        seen.update(options, density=density)
        return TopK(density)

    sparsifiers.register("open", factory)
    sparsifiers.get("open", 0.5, anything=1)
    assert seen == {"density": 0.5, "anything": 1}


@pytest.mark.parametrize("taken", ["topk", "globaltopk", "Top-K", "redsync_trim"])
def test_taken_names(taken: str) -> None:
    with pytest.raises(ValueError, match=f"'{taken}' is taken"):
        sparsifiers.register(taken, Doubled)
    assert type(sparsifiers.get(taken)) is not Doubled


def test_register_refuses_what_is_no_name_or_factory() -> None:
    for wrong in ("", None, 3):
        with pytest.raises(TypeError, match="non-empty string"):
            sparsifiers.register(wrong, Doubled)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be callable"):
        sparsifiers.register("instance", Doubled())  # type: ignore[arg-type]
    assert "instance" not in sparsifiers.names()


def test_a_factory_must_make_a_sparsifier() -> None:
    sparsifiers.register("broken", lambda density: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match=r"'broken' returned None, which is no Sparsifier"):
        sparsifiers.get("broken")


def test_memories_by_name() -> None:
    for name, keeps in (("none", False), ("residual", True)):
        made = sparsifiers.memory(name)
        assert isinstance(made, Memory)
        assert (made.name, made.keeps, repr(made)) == (name, keeps, f"{name}()")
    known = "none, residual, dgc, residualgtopk"
    with pytest.raises(ValueError, match=rf"unknown memory 'residuals'; known: {known}; did you mean"):
        sparsifiers.memory("residuals")


def test_what_the_package_shows() -> None:
    for name in sparsifiers.__all__:
        assert hasattr(sparsifiers, name)
    assert {"names", "get", "register", "memory", "Sparsifier", "Selection", "Memory"} <= set(sparsifiers.__all__)
    assert callable(sparsifiers.memory)
    assert doctest.testmod(sparsifiers).failed == 0


def test_the_package_imports_torch_numpy_and_the_standard_library_only() -> None:
    allowed = {"sparsifiers", "torch", "numpy"} | sys.stdlib_module_names
    files = sorted(Path(sparsifiers.__file__).parent.rglob("*.py"))
    assert len(files) > 5
    for file in files:
        of_gpu = {"triton"} if file.parent.name == "kernels" else set()  # loaded where a tensor lies on one
        for node in ast.walk(ast.parse(file.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0
                modules = [str(node.module)]
            for module in modules:
                assert module.split(".")[0] in allowed | of_gpu, (file.name, module)
                assert not module.startswith("torch.distributed"), file.name
