# SPDX-License-Identifier: Apache-2.0
"""Every planner: a partition, the size limit, determinism, options. And the rule of each of the four."""

from __future__ import annotations

import dataclasses
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import merging
from merging import MODES, Costs, Plan, Planner, Profile, registry
from merging.planners.simple import even_counts, threshold_counts
from merging.timeline import LIMIT, cut, cut_counts

QUICK = settings(deadline=None)

SIZES = st.lists(st.integers(1, 3000) | st.integers(LIMIT // 3, LIMIT - 1), min_size=1, max_size=40)
COSTS = Costs(lambda x: 1e-9 * x, lambda x: 1e-4 + 1e-9 * x, lambda x: 1e-4 + 4e-9 * x)
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "count": [{"tensors": 1}, {"tensors": 7}],
    "threshold": [{"bytes": 0}, {"bytes": 4000}, {"bytes": 1 << 40}],
    "agmerge": [{"solver": "greedy"}, {"intra": False}, {"intra": False, "phases": 9}],
    "exact": [{"budget": 0}, {"budget": 500}],
}


def every_planner() -> list[Planner]:
    return [merging.get(name, **options) for name in merging.names() for options in [{}, *OPTIONS.get(name, [])]]


def profile(numel: list[int]) -> Profile:
    return Profile([f"p{i}" for i in range(len(numel))], numel, [1e-3 * (i % 3) for i in range(len(numel))])


@pytest.mark.parametrize("planner", every_planner(), ids=repr)
@QUICK
@given(numel=SIZES, mode=st.sampled_from(MODES))
def test_plans_partition_below_the_limit_and_are_pure(planner: Planner, numel: list[int], mode: str) -> None:
    model = profile(numel)
    plan = planner.plan(model, COSTS, mode)
    plan.check(len(numel), model.names)
    assert plan.names == model.names
    assert all(sum(numel[start:stop]) < 2**31 for start, stop in plan.bounds)
    again = merging.get(planner.name, **planner.options()).plan(profile(numel), COSTS, mode)
    assert again == plan and again.digest() == plan.digest()


@pytest.mark.parametrize("planner", every_planner(), ids=repr)
def test_common_rules(planner: Planner) -> None:
    model = profile([2**31 - 1, 1])
    assert planner.plan(model, COSTS).counts == (1, 1)
    assert planner.plan(profile([10**9]), COSTS).counts == (1,)
    with pytest.raises(ValueError, match=r"tensor 1 \('p1'\) has 2147483648 elements.*Split"):
        planner.plan(profile([3, 2**31, 4]), COSTS)
    if "dear" not in planner.modes:
        with pytest.raises(ValueError, match="is supported by the planner"):
            planner.plan(model, COSTS, mode="dear")
    with pytest.raises(ValueError, match="mode 'sideways' is unknown"):
        planner.plan(model, COSTS, mode="sideways")
    same = merging.get(planner.name, **planner.options())
    assert same == planner and hash(same) == hash(planner) and pickle.loads(pickle.dumps(planner)) == planner
    written = ", ".join(f"{key}={value!r}" for key, value in sorted(planner.options().items()))
    assert repr(planner) == f"{planner.name}({written})"
    with pytest.raises(dataclasses.FrozenInstanceError):
        planner.extra = 1  # type: ignore[attr-defined]


def test_repr_is_canonical() -> None:
    assert repr(merging.get("threshold")) == "threshold(bytes=26214400)"
    assert repr(merging.get("threshold", bytes=np.int32(8))) == "threshold(bytes=8)"
    assert repr(merging.get("count", tensors=np.int64(3))) == "count(tensors=3)"
    assert repr(merging.get("layerwise")) == "layerwise()" and repr(merging.get("single")) == "single()"


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("WFBP", "layerwise"),
        ("layer-wise", "layerwise"),
        ("SyncEA", "single"),
        ("MG-WFBP", "mgwfbp"),
        ("mg_wfbp", "mgwfbp"),
        ("OMGS-SGD", "omgs"),
        ("AGTF-SGD", "agtf"),
        ("FGBuff", "fgbuff"),
        ("DeAR", "dear"),
        ("AGMerge", "agmerge"),
    ],
)
def test_names_as_papers_and_people_write_them(said: str, name: str) -> None:
    assert merging.get(said) == merging.get(name)
    assert said not in merging.names()


def test_names_and_unknown_names() -> None:
    canonical = "layerwise single count threshold horovod mgwfbp omgs dear fgbuff agmerge agtf exact".split()
    assert merging.names() == tuple(canonical)
    assert [merging.get(name).name for name in merging.names()] == list(merging.names())
    with pytest.raises(
        ValueError, match="planner 'treshold' is unknown; did you mean 'threshold'.*layerwise, single, count"
    ):
        merging.get("treshold")
    with pytest.raises(ValueError, match=r"planner 'zzz' is unknown \(there are layerwise"):
        merging.get("zzz")


@pytest.mark.parametrize(
    ("name", "options", "error", "says"),
    [
        ("threshold", {"byte": 3}, TypeError, "'threshold' has no option 'byte'. Its options: bytes"),
        ("layerwise", {"tensors": 3}, TypeError, "'layerwise' has no option 'tensors'. Its options: no options"),
        ("single", {"name": "x"}, TypeError, "'single' has no option 'name'"),
        ("threshold", {"bytes": -1}, ValueError, "threshold: bytes is -1.*at least 0"),
        ("threshold", {"bytes": 2.5e7}, TypeError, "threshold: bytes is 25000000.0.*as an int"),
        ("threshold", {"bytes": True}, TypeError, "threshold: bytes is True"),
        ("count", {"tensors": 0}, ValueError, "count: tensors is 0.*at least 1"),
        ("count", {"tensors": "4"}, TypeError, "count: tensors is '4'"),
    ],
)
def test_refuses_options(name: str, options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        merging.get(name, **options)


def test_what_training_does_with_plans_is_a_class_variable_of_every_planner() -> None:
    for name in merging.names():
        planner = merging.get(name)
        asked = (planner.recheck_every, planner.min_gain, planner.max_messages)
        assert asked == ((25, 0.03, 8) if name == "agmerge" else (0, 0.0, 1))
    chosen = merging.get("agmerge", check_every=3, gain=0.5, parts=2)
    assert (chosen.recheck_every, chosen.min_gain, chosen.max_messages) == (3, 0.5, 2)
    assert sorted(chosen.options()) == ["check_every", "gain", "intra", "parts", "phases", "solver"]


@dataclass(frozen=True, repr=False, kw_only=True)
class Pairs(Planner):
    """Two tensors a merge buffer, as a script would write it."""

    name: ClassVar[str] = "two-by-two"
    least: int = 1

    def partition(self, profile: Profile, costs: Costs, mode: str) -> Plan:
        return Plan(even_counts(len(profile), 2))


@pytest.fixture
def registry_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_planners", dict(registry._planners))


@pytest.mark.usefixtures("registry_restored")
def test_a_registered_planner_is_one_of_all() -> None:
    merging.register("two-by-two", Pairs)
    assert merging.names()[-1] == "two-by-two"
    assert merging.get("Two_By_Two", least=3) == Pairs(least=3)
    assert merging.get("two-by-two").plan(profile([1] * 5), COSTS).counts == (2, 2, 1)
    with pytest.raises(ValueError, match="did you mean 'two-by-two'"):
        merging.get("two-by-tow")
    with pytest.raises(TypeError, match="'two-by-two' has no option 'most'. Its options: least"):
        merging.get("two-by-two", most=3)


@pytest.mark.usefixtures("registry_restored")
def test_the_planner_of_the_documentation_works() -> None:
    text = (Path(__file__).parents[2] / "docs" / "extend.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(@dataclass.*?)```", text, re.DOTALL)
    exec(example, {"dataclass": dataclass, "ClassVar": ClassVar, "merging": merging, "__name__": __name__})
    assert merging.get("halves", most=10).plan(profile([1] * 5), COSTS).counts == (3, 2)
    assert merging.get("halves", most=2).plan(profile([1] * 5), COSTS).counts == (2, 2, 1)


@pytest.mark.usefixtures("registry_restored")
@pytest.mark.parametrize("taken", ["single", "SyncEA", "MG-WFBP"])
def test_a_taken_name_is_refused(taken: str) -> None:
    with pytest.raises(ValueError, match=f"'{taken}' is already used. Choose a name other than layerwise, single"):
        merging.register(taken, Pairs)


@pytest.mark.usefixtures("registry_restored")
def test_register_refuses_what_is_no_name_or_planner() -> None:
    @dataclass(frozen=True, repr=False, kw_only=True)
    class Needy(Pairs):
        name: ClassVar[str] = "needy"
        most: int

    for wrong in ("", None, 3):
        with pytest.raises(TypeError, match="non-empty string"):
            merging.register(wrong, Pairs)  # type: ignore[arg-type]
    for other in (Pairs(), int, None):
        with pytest.raises(TypeError, match="'pairs' must be a subclass of merging.Planner"):
            merging.register("pairs", other)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Pairs.name is 'two-by-two'.*Register it under this name"):
        merging.register("pairs", Pairs)
    with pytest.raises(TypeError, match="must have a default for its option 'most'"):
        merging.register("needy", Needy)
    assert not {"pairs", "needy", "two-by-two"} & set(merging.names())


@QUICK
@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(0, 200))
def test_threshold_closes_as_soon_as_it_is_reached(numel: list[int], elements: int) -> None:
    plan = Plan(threshold_counts(numel, elements))
    plan.check(len(numel))
    for start, stop in plan.bounds:
        assert sum(numel[start : stop - 1]) < elements or stop - start == 1
        assert sum(numel[start:stop]) >= elements or stop == len(numel)


def test_the_four_rules() -> None:
    model = profile([100, 200, 300, 50, 700, 20])

    def counts(name: str, **options: Any) -> tuple[int, ...]:
        return merging.get(name, **options).plan(model, COSTS).counts

    assert counts("layerwise") == (1,) * 6 and counts("single") == (6,) == counts("threshold")
    assert counts("count", tensors=4) == (4, 2) and counts("count", tensors=3) == (3, 3)
    assert counts("threshold", bytes=1200) == (2, 1, 2, 1)  # exactly 1200 bytes at 100 + 200 elements
    assert counts("threshold", bytes=1201) == (3, 2, 1)
    assert counts("threshold", bytes=0) == (1,) * 6
    assert even_counts(7, 10) == (7,) and even_counts(20, 10) == (10, 10)
    eleven = profile([1] * 11)
    assert merging.get("count").plan(eleven, COSTS).counts == (10, 1)
    quarter = profile([6_553_599, 1, 1])
    assert merging.get("threshold").plan(quarter, COSTS).counts == (2, 1)


@QUICK
@given(st.lists(st.integers(1, 12), min_size=1, max_size=20), st.integers(10, 30))
def test_cut_closes_only_where_it_must(numel: list[int], limit: int) -> None:
    counts = cut_counts(numel, limit)
    plan = Plan(counts)
    plan.check(len(numel))
    for start, stop in plan.bounds:
        assert sum(numel[start:stop]) < limit or stop - start == 1
        assert stop == len(numel) or sum(numel[start : stop + 1]) >= limit


def test_cut_keeps_flags_labels_and_small_buffers() -> None:
    model = profile([1, 2, 2**30, 2**30, 2**30, 5])
    plan = Plan((2, 3, 1), (False, True, False), ("a", "b", "c"), model.names)
    assert cut(plan, model) == Plan(
        (2, 1, 1, 1, 1), (False, True, True, True, False), ("a", "b", "b", "b", "c"), model.names
    )
    assert cut(Plan((3,)), profile([2**30, 2**30 - 1, 1])).counts == (2, 1)


def test_a_planner_is_its_rule_and_nothing_else() -> None:
    """What a new planner writes, and what the base catches for it."""

    @dataclass(frozen=True, repr=False, kw_only=True)
    class Halves(Planner):
        name: ClassVar[str] = "halves"
        z: float = 0.5
        a: str = "x"

        def partition(self, profile: Profile, costs: Costs, mode: str) -> Plan:
            half = len(profile) // 2
            return Plan((half, half), dense=(True, False), labels=("l", mode))

    assert repr(Halves(z=0.25)) == "halves(a='x', z=0.25)" and list(Halves().options()) == ["a", "z"]
    plan = Halves().plan(profile([2**30, 2**30, 3, 4]), COSTS, "behind")
    assert plan == Plan((1, 1, 2), (True, True, False), ("l", "l", "behind"), ("p0", "p1", "p2", "p3"))
    with pytest.raises(ValueError, match="covers 4 tensors, but the model has 5"):
        Halves().plan(profile([1] * 5), COSTS)
    with pytest.raises(TypeError):
        Planner()  # type: ignore[abstract]
