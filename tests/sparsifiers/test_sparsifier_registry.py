# SPDX-License-Identifier: Apache-2.0
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
from sparsifiers import Memory, Quantiser, Sparsifier, catalogue
from sparsifiers.catalogue import spelling
from sparsifiers.largest import TopK
from sparsifiers.quantising.linear import Int8


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
    kept = [(registry, dict(registry._factories)) for registry in (catalogue._sparsifiers, catalogue._quantisers)]
    yield
    for registry, before in kept:
        registry._factories.clear()
        registry._factories.update(before)  # type: ignore[arg-type]


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
    assert ", ".join(sparsifiers.names()) in text
    assert (near is not None) is text.lower().endswith(f"did you mean {near!r}?")


@pytest.mark.parametrize(
    ("make", "published", "near"),
    [
        (sparsifiers.get, "gTopk-SGD", "topk"),
        (sparsifiers.get, "GaussiankSA", "gaussiank"),
        (sparsifiers.quantiser, "INCEPTIONN", "int8"),
        (sparsifiers.quantiser, "SketchML", "int4"),
        (sparsifiers.quantiser, "dithering", "qsgd"),
        (sparsifiers.low_rank, "batched_powerSGD", "powersgd"),
    ],
)
def test_a_published_name_that_is_none_here_says_what_comes_nearest(make: Any, published: str, near: str) -> None:
    with pytest.raises(ValueError, match=rf"unknown .*{published}.*; did you mean '{near}'\?$"):
        make(published)
    make(near)


@pytest.mark.parametrize("other", ["S-SGD", "Local SGD", "sgd"])
def test_not_every_method_that_ends_in_sgd_is_meant_for_another(other: str) -> None:
    for make in (sparsifiers.get, sparsifiers.low_rank, sparsifiers.quantiser):
        with pytest.raises(ValueError, match="unknown") as raised:
            make(other)
        assert "did you mean" not in str(raised.value)


def test_nearest_names_are_of_what_there_is_and_not_taken() -> None:
    tables: list[tuple[Any, dict[str, str], dict[str, str]]] = [
        (sparsifiers.get, catalogue.SPARSIFIERS, catalogue.NEAREST_SPARSIFIER),
        (sparsifiers.low_rank, catalogue.LOW_RANK, catalogue.NEAREST_LOW_RANK),
        (sparsifiers.quantiser, catalogue.QUANTISERS, catalogue.NEAREST_QUANTISER),
    ]
    for make, taken, nearest in tables:
        for name, known in taken.items():
            assert make(name).name == known and spelling(name) == name
        for name, known in nearest.items():
            assert make(known).name == known and spelling(name) == name
            with pytest.raises(ValueError):
                make(name)
    names = [name for _, taken, nearest in tables for name in (*taken, *nearest)]
    assert len(names) == len(set(names))  # each means one thing


@pytest.mark.parametrize("wrong", [None, 3, TopK])
def test_names_that_are_no_strings(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"the name of a sparsifier must be a string.*topk"):
        sparsifiers.get(wrong)
    with pytest.raises(TypeError, match=r"the name of a memory must be a string.*residual"):
        sparsifiers.memory(wrong)


def test_unknown_options() -> None:
    with pytest.raises(TypeError, match=r"sparsifier 'topk' has no option 'beta'. Its options: none"):
        sparsifiers.get("topk", beta=1)
    sparsifiers.register("doubled", Doubled)
    with pytest.raises(TypeError, match=r"'doubled' has no option 'fator', 'x'. Its options: factor$"):
        sparsifiers.get("doubled", factor=1, fator=2, x=3)
    with pytest.raises(TypeError, match=r"memory 'residual' has no option 'beta'. Its options: none"):
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
    with pytest.raises(ValueError, match=f"'{taken}' is already used"):
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
    with pytest.raises(TypeError, match=r"'broken' returned None, expected a Sparsifier"):
        sparsifiers.get("broken")


def test_memories_by_name() -> None:
    for name, keeps in (("none", False), ("residual", True)):
        made = sparsifiers.memory(name)
        assert isinstance(made, Memory)
        assert (made.name, made.has_residual, repr(made)) == (name, keeps, f"{name}()")
    known = "none, residual, dgc, residualgtopk"
    with pytest.raises(ValueError, match=rf"unknown memory 'residuals'. Choose from: {known}; did you mean"):
        sparsifiers.memory("residuals")


def test_quantisers_by_name() -> None:
    """Also after the package `quantising` was imported: its name is not that of the function."""
    names = ("eden-1", "eden-2", "eden-3", "eden-4", "int8", "int4", "fp8", "qsgd", "terngrad", "onebit")
    assert sparsifiers.quantisers() == names
    for name in names:
        made = sparsifiers.quantiser(name)
        assert isinstance(made, Quantiser) and made.name == name and sparsifiers.is_quantiser(name)
        assert sparsifiers.quantiser(name) is not made
        assert name not in sparsifiers.names() and name not in sparsifiers.low_rank_names()
        assert not sparsifiers.is_low_rank(name)
    assert not any(map(sparsifiers.is_quantiser, (*sparsifiers.names(), *sparsifiers.low_rank_names(), "none", "fp16")))


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("eden", "eden-2"),
        ("EDEN_2", "eden-2"),
        ("eden4", "eden-4"),
        ("drive", "eden-1"),
        ("8bit", "int8"),
        ("8-bit", "int8"),
        ("u8bit", "int8"),
        ("ByteGrad", "int8"),
        ("qgZ", "int8"),
        ("INT-8", "int8"),
        ("4bit", "int4"),
        ("float8", "fp8"),
        ("E4M3", "fp8"),
        ("QSGD", "qsgd"),
        ("TernGrad", "terngrad"),
        ("signSGD", "onebit"),
        ("EFSignSGD", "onebit"),
        ("Signum", "onebit"),
        ("1bit", "onebit"),
        ("one_bit", "onebit"),
    ],
)
def test_quantisers_as_papers_and_people_write_them(said: str, name: str) -> None:
    assert sparsifiers.is_quantiser(said) and sparsifiers.quantiser(said).name == name
    assert said not in sparsifiers.quantisers()


@pytest.mark.parametrize("other", ["natural", "inceptionn", "adaq", "sketch", "topk", "powersgd", "fp16", ""])
def test_what_is_no_quantiser(other: str) -> None:
    assert not sparsifiers.is_quantiser(other)
    with pytest.raises(ValueError, match=rf"unknown quantizer '{other}'. Choose from: eden-1, .*, onebit"):
        sparsifiers.quantiser(other)


@pytest.mark.parametrize("name", ["int8", "8bit", "EDEN"])
def test_a_quantiser_is_no_sparsifier_and_the_error_says_what_to_call(name: str) -> None:
    with pytest.raises(
        ValueError, match=rf"'{name}' is a quantizer, not a sparsifier.*sparsifiers\.quantizer\('{name}'\)"
    ):
        sparsifiers.get(name)


def test_options_of_quantisers() -> None:
    assert repr(sparsifiers.quantiser("qsgd", bits=8)) == "qsgd(bits=8, norm='max')"
    with pytest.raises(TypeError, match="quantizer 'qsgd' has no option 'levels'. Its options: bits, norm"):
        sparsifiers.quantiser("qsgd", levels=7)
    for name in set(sparsifiers.quantisers()) - {"qsgd"}:
        with pytest.raises(TypeError, match=f"quantizer '{name}' has no option 'bits'. Its options: none"):
            sparsifiers.quantiser(name, bits=4)


class Halved(Int8):
    """int8 with an option, as a user would write it."""

    name = "halved"

    def __init__(self, factor: float = 0.5) -> None:
        super().__init__()
        self.factor = factor

    def options(self) -> dict[str, object]:
        return {"factor": self.factor}


def test_register_a_quantiser() -> None:
    sparsifiers.register_quantiser("halved", Halved)
    assert sparsifiers.quantisers()[-1] == "halved" and sparsifiers.is_quantiser("HALVED")
    assert repr(sparsifiers.quantiser("halved", factor=0.25)) == "halved(factor=0.25)"
    assert "halved" not in sparsifiers.names()
    sparsifiers.register_quantiser("broken", lambda: TopK())  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match=r"'broken' returned topk\(density=0.01\), expected a Quantizer"):
        sparsifiers.quantiser("broken")


def test_a_name_belongs_to_one_compressor_of_all_kinds() -> None:
    for taken in ("int8", "eden", "One_Bit"):
        with pytest.raises(ValueError, match=f"'{taken}' is already used"):
            sparsifiers.register_quantiser(taken, Halved)
    for taken in ("topk", "GlobalTopK", "powersgd", "acp"):
        with pytest.raises(ValueError, match=f"'{taken}' belongs to a compressor of another kind"):
            sparsifiers.register_quantiser(taken, Halved)
    for taken in ("int8", "8-bit", "powersgd"):
        with pytest.raises(ValueError, match=f"'{taken}' belongs to a compressor of another kind"):
            sparsifiers.register(taken, Doubled)


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
