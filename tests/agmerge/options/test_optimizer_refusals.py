# SPDX-License-Identifier: Apache-2.0
"""No argument is accepted and ignored: what is not built, unknown or without meaning is an error that says why."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from support import mlp, on_ranks, seeded, sgd, train, wrap
from torch import nn

import agmerge
import merging
import sparsifiers
from agmerge import testing
from agmerge.exchanges.masked import MaskedExchange
from agmerge.exchanges.table import EXCHANGES

MODEL = seeded(mlp)


class HorovodStyle:
    """A compressor as Horovod has them."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, context: None) -> Any:
        return tensor


# Arguments, the error, and words that it must have.
POWERSGD = sparsifiers.low_rank("powersgd")
REFUSED: list[tuple[dict[str, Any], type[Exception], list[str]]] = [
    # not built yet
    ({"model": MODEL}, ValueError, ["model=", "model= is supported with merging="]),
    ({"density": "importanc"}, ValueError, ["density='importanc'", "expected a number", "'importance'"]),
    (
        {"merging": merging.Plan((6,), dense=(True,)), "exchange": "sparse"},
        ValueError,
        ["merging: this plan has uncompressed merge", "'auto'"],
    ),
    ({"merging": merging.Plan((6,), labels=("int8",))}, ValueError, ["labels", "'ahead'"]),
    # unknown
    ({"compression": "tokp"}, ValueError, ["tokp", "did you mean 'topk'", "auto", "none", "fp16", "bf16"]),
    ({"compression": "fp32"}, ValueError, ["fp32", "did you mean 'none'"]),
    ({"compression": "float16"}, ValueError, ["float16", "did you mean 'fp16'"]),
    ({"compression": "powersdg"}, ValueError, ["powersdg", "topk", "did you mean 'powersgd'"]),
    ({"compression": "acpsdg"}, ValueError, ["acpsdg", "did you mean 'acpsgd'"]),
    ({"compression": None}, TypeError, ["compression=None", "topk", "Compression.none"]),
    ({"compression": torch.optim.SGD}, TypeError, ["compression=", "sparsifiers.Compressor"]),
    ({"exchange": "spares"}, ValueError, ["exchange='spares'", "unknown", "'sparse'"]),
    ({"sparsify": "before"}, ValueError, ["sparsify='before'", "unknown", "'auto', 'ahead', 'behind'"]),
    ({"sparsify": True}, ValueError, ["sparsify=True", "unknown"]),
    (
        {"wire": "fp8"},
        ValueError,
        ["wire='fp8'", "unknown", "'auto', 'fp32', 'fp16', 'bf16', 'int8', 'int4', '2bit', 'sign'"],
    ),
    (
        {"wire": "sign", "exchange": "masked"},
        ValueError,
        ["wire='sign'", ", because it cannot encode zeros", "'oktopk'"],
    ),
    (
        {"wire": "2bit", "exchange": "masked"},
        ValueError,
        ["wire='2bit'", ", because it cannot encode zeros", "'sparse'"],
    ),
    ({"wire": "2bit", "compression": "none"}, ValueError, ["wire='2bit'", "compression='none'"]),
    ({"dense_sum": "orderd"}, ValueError, ["dense_sum='orderd'", "unknown", "'native', 'ordered'"]),
    ({"nonfinite": "skipp"}, ValueError, ["nonfinite='skipp'", "unknown", "'raise', 'skip'"]),
    ({"scaler": "GradScaler"}, TypeError, ["scaler='GradScaler'", "torch.amp.GradScaler"]),
    ({"unused": "zeros"}, ValueError, ["unused='zeros'", "unknown", "'none', 'zero'"]),
    ({"memory": "residul"}, ValueError, ["residul", "residual"]),
    ({"memory": 3}, TypeError, ["memory=3"]),
    ({"merging": "treshold"}, ValueError, ["treshold", "threshold"]),
    ({"merging": 5}, TypeError, ["merging=5", "threshold"]),
    ({"op": "average"}, ValueError, ["op must be agmerge.Average or agmerge.Sum", "'average'"]),
    (
        {"op": 3},
        ValueError,
        ["op must be agmerge.Average or agmerge.Sum", "3", "Residuals are added to later gradients, which"],
    ),
    ({"compression": HorovodStyle}, TypeError, ["s compressors, only none and fp16 are", "sparsifiers.Sparsifier"]),
    ({"groups": 0}, ValueError, ["groups should be a non-negative integer or a list of list of torch.Tensor."]),
    ({"groups": -1}, ValueError, ["groups should be a non-negative integer"]),
    ({"groups": True}, ValueError, ["groups should be a non-negative integer"]),
    ({"groups": "two"}, ValueError, ["groups should be a non-negative integer", "'two'"]),
    ({"groups": [torch.ones(1)]}, ValueError, ["groups should be a non-negative integer", "not a list"]),
    ({"groups": [["0.weight"]]}, ValueError, ["groups must consist of torch.Tensor.", "'0.weight'"]),
    ({"groups": [[MODEL[0].weight], [MODEL[0].weight]]}, ValueError, ["A parameter can only appear once in groups."]),
    ({"groups": [[torch.ones(3, requires_grad=True)]]}, ValueError, ["[3]", "is not a parameter of this optimizer"]),
    ({"groups": 2, "merging": "single"}, ValueError, ["merging='single'", "groups", "one of them"]),
    ({"num_groups": -1}, ValueError, ["num_groups=-1", "non-negative integer"]),
    ({"process_set": object()}, TypeError, ["process_set=", "list of ranks"]),
    ({"process_set": "01"}, TypeError, ["process_set='01'", "list of ranks"]),
    ({"process_set": [0.0]}, TypeError, ["process_set=[0.0]", "integers"]),
    ({"process_set": []}, ValueError, ["process_set=[]", "at least one rank"]),
    ({"process_set": [0, 0]}, ValueError, ["process_set=[0, 0]", "each once"]),
    ({"process_set": [-1]}, ValueError, ["process_set=[-1]", "none below 0"]),
    # out of range
    ({"density": 0.0}, ValueError, ["density=0.0"]),
    ({"density": 1.5}, ValueError, ["density=1.5"]),
    ({"density": float("nan")}, ValueError, ["density=nan"]),
    ({"backward_passes_per_step": 0}, ValueError, ["backward_passes_per_step must be > 0"]),
    ({"backward_passes_per_step": -1}, ValueError, ["backward_passes_per_step must be > 0"]),
    ({"backward_passes_per_step": 1.5}, ValueError, ["backward_passes_per_step must be a whole number", "got 1.5"]),
    ({"backward_passes_per_step": 2.0}, ValueError, ["backward_passes_per_step must be a whole number", "got 2.0"]),
    ({"backward_passes_per_step": True}, ValueError, ["backward_passes_per_step must be a whole number", "got True"]),
    ({"gradient_predivide_factor": 0.0}, ValueError, ["gradient_predivide_factor must be > 0"]),
    ({"gradient_predivide_factor": float("nan")}, ValueError, ["gradient_predivide_factor must be > 0"]),
    ({"timeout": 0}, ValueError, ["timeout", "seconds > 0"]),
    ({"timeout": float("inf")}, ValueError, ["timeout", "inf"]),
    ({"timeout": float("nan")}, ValueError, ["timeout", "nan"]),
    ({"check_every": -1}, ValueError, ["check_every", "-1"]),
    ({"check_every": 2.0}, ValueError, ["check_every", "2.0"]),
    ({"warmup": "dcg"}, ValueError, ["warmup='dcg'", "'dgc'", "a number of steps"]),
    ({"warmup": 0}, ValueError, ["warmup=0", "a number of steps > 0"]),
    ({"warmup": True}, ValueError, ["warmup=True"]),
    ({"warmup": lambda step: 1.5}, ValueError, ["the density of step 0", "(0, 1]", "1.5"]),
    ({"warmup": lambda step: 0.1 if step < 100 else None}, ValueError, ["the density of step 100", "None"]),
    ({"density": {}}, ValueError, ["density={}", "at least one pattern"]),
    ({"density": {"0.*": 2.0}}, ValueError, ["'0.*'", "2.0"]),
    ({"density": {"0.*": "much"}}, ValueError, ["'0.*'", "'much'"]),
    ({"density": {"(": 0.1}}, ValueError, ["'('"]),
    ({"density": {"weight": 0.1}}, ValueError, ["density: the pattern 'weight' matches no parameter", "0.weight"]),
    ({"rank": 0, "compression": "powersgd"}, ValueError, ["rank=0", "a whole number > 0", "{pattern: number}"]),
    ({"rank": 1.5, "compression": "acpsgd"}, ValueError, ["rank=1.5", "a whole number > 0"]),
    ({"rank": True, "compression": "powersgd"}, ValueError, ["rank=True", "a whole number > 0"]),
    ({"rank": "4", "compression": "acpsgd"}, ValueError, ["rank='4'", "a whole number > 0"]),
    ({"rank": {}, "compression": "powersgd"}, ValueError, ["rank={}", "at least one pattern"]),
    ({"rank": {"(": 4}, "compression": "powersgd"}, ValueError, ["rank={'(': 4}"]),
    ({"rank": {".*": 0}, "compression": "powersgd"}, ValueError, ["rank=0", "a whole number > 0"]),
    (
        {"rank": {"weight": 4}, "compression": "powersgd"},
        ValueError,
        ["rank: the pattern 'weight' matches no parameter"],
    ),
    # without meaning
    *(
        ({"rank": {".*": 4}, "compression": name}, ValueError, ["rank={", "sends no factors", "to 'powersgd' or"])
        for name in ("topk", "none", "auto")
    ),
    *(
        ({"rank": 4, "compression": name}, ValueError, ["rank=4", "sends no factors", "to 'powersgd' or"])
        for name in ("topk", "none", "auto", "eden", ["none", "int8"], sparsifiers.get("dgc"), {".*": "topk"})
    ),
    ({"rank": 2, "compression": POWERSGD}, ValueError, ["rank=2", "rank=4", "disagree", "one of them"]),
    *(
        (
            {"compression": name, "wire": wire},
            ValueError,
            [f"wire={wire!r}", "is not supported with low-rank factors, which", "'fp32', 'fp16', 'bf16'"],
        )
        for name in ("powersgd", {"0.weight": "topk", ".*": "acpsgd"})
        for wire in ("int8", "int4", "2bit", "sign")
    ),
    *(
        ({"compression": name, "exchange": "two-level"}, ValueError, ["'two-level'", "a shard", "'sparse' or 'auto'"])
        for name in ("acpsgd", {"0.weight": "topk", ".*": "powersgd"})
    ),
    *(
        (
            {name: value, "compression": compression},
            ValueError,
            [f"{name}=", "has no effect", "sends factors", "sparsifier"],
        )
        for compression in ("powersgd", POWERSGD)
        for name, value in {
            "exchange": "oktopk",
            "sparsify": "behind",
            "warmup": "dgc",
            "density": {".*": 0.1},
        }.items()
    ),
    (
        {"compression": "powersgd", "memory": "dgc"},
        ValueError,
        ["memory='dgc'", "applies momentum to the values that a"],
    ),
    ({"compression": "powersgd", "dense": "partial"}, ValueError, ["dense='partial'", "factors are sent"]),
    (
        {"compression": "acpsgd", "merging": "dear", "model": MODEL},
        ValueError,
        ["merging='dear'", "acpsgd", "sends low-rank factors", "another merging"],
    ),
    # a compressor for each of some patterns
    ({"compression": {}}, ValueError, ["compression={}", "at least one pattern"]),
    ({"compression": {"(": "topk"}}, ValueError, ["compression by pattern"]),
    (
        {"compression": {".*": "none"}},
        ValueError,
        ["compression by pattern", "at least one sparsifier or low-rank compressor"],
    ),
    (
        {"compression": {"x": "topk", ".*": "powersgd"}},
        ValueError,
        ["compression: the pattern 'x' matches no parameter"],
    ),
    ({"compression": {"0.*": "topk", ".*": "adtopk"}}, ValueError, ["topk", "adtopk", "of the same kind, sparse"]),
    ({"compression": {"0.*": "acpsgd", ".*": "powersgd"}}, ValueError, ["acpsgd", "of the same kind, low-rank"]),
    (
        {"compression": {"0.*": "bf16", ".*": "powersgd"}},
        ValueError,
        ["{'0.*': 'bf16'}", "Use 'none'", "or wire="],
    ),
    *(
        (
            {"compression": by_name},
            ValueError,
            ["memory='dgc'", "only: next to low-rank factors, in", "pass memory='residual'"],
        )
        for by_name in ({"0.*": "dgc", ".*": "powersgd"}, {"0.*": "powersgd", ".*": "dgc"})
    ),
    (
        {"density": {".*": 0.1}, "compression": sparsifiers.get("topk")},
        ValueError,
        ["density={'.*': 0.1} ", "compression=topk("],
    ),
    (
        {"density": {".*": 0.1}, "warmup": lambda step: 0.1},
        ValueError,
        ["warmup= ", "density= by pattern", "Pass a number"],
    ),
    (
        {"compression": "dgc", "memory": sparsifiers.memory("dgc", momentum=0.9)},
        ValueError,
        ["momentum=0.9 too", "Set momentum in one place: pass", "SGD(momentum=0)"],
    ),
    ({"compression": "dgc", "memory": sparsifiers.memory("dgc", nesterov=True)}, ValueError, ["SGD(nesterov=True)"]),
    # about selection, where nothing is selected
    *(
        (
            {name: value, "compression": compression},
            ValueError,
            [f"{name}=", "has no effect", repr(compression), "sparsifier"],
        )
        for compression in ("none", "FP16", agmerge.Compression.bf16)
        for name, value in {
            "wire": "int8",
            "dense": ["0.weight"],
            "sparsify": "ahead",
            "exchange": "masked",
            "warmup": 100,
            "density": {".*": 0.1},
        }.items()
    ),
    ({"dense": lambda name, parameter: False, "compression": "none"}, ValueError, ["dense=", "sends every element"]),
    ({"exchange": "oktopk", "compression": "none"}, ValueError, ["exchange='oktopk'", "sends every element"]),
    ({"density": "importance", "compression": "none"}, ValueError, ["density='importance'", "sends every element"]),
    ({"memory": "dgc", "compression": "none"}, ValueError, ["memory='dgc'", "applies momentum to the values that a"]),
    ({"memory": "dgc", "compression": "fp16"}, ValueError, ["memory='dgc'", "applies momentum to the values that a"]),
    ({"exchange": "dense"}, ValueError, ["exchange='dense'", "compression='none'"]),
    (
        {"memory": "residual", "compression": "none"},
        ValueError,
        ["memory='residual'", "compression='none'", "Remove memory="],
    ),
    (
        {"density": 0.5, "compression": sparsifiers.get("topk", density=0.25)},
        ValueError,
        ["density=0.5", "0.25", "disagree"],
    ),
    (
        {"gradient_predivide_factor": 2.0, "op": agmerge.Sum},
        ValueError,
        ["gradient_predivide_factor not supported with op != Average"],
    ),
    (
        {"sparsify": "behind", "merging": merging.Plan((2, 4), labels=("ahead", "ahead"))},
        ValueError,
        ["sparsify='behind'", "sparsify='ahead'", "Remove one of them"],
    ),
    ({"dense": "0.weight"}, TypeError, ["dense='0.weight'", "list of patterns"]),
    ({"dense": 5}, TypeError, ["dense=5"]),
    *(
        (
            {"dense": "partial", "compression": name},
            ValueError,
            ["dense='partial'", name, "Remove dense=, or use a sparsifier"],
        )
        for name in ("none", "fp16", "bf16")
    ),
    ({"dense": "partial", "density": {".*": 0.1}}, ValueError, ["dense='partial'", "density={", "one number"]),
    ({"dense": "partial", "density": "importance"}, ValueError, ["dense='partial'", "'importance'", "one number"]),
    ({"dense": "partial", "warmup": lambda step: 0.1}, ValueError, ["dense='partial'", "warmup", "'dgc' or a number"]),
]


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    REFUSED,
    ids=[
        ", ".join(f"{k}={v!r}".split("(")[0].split(" at 0x")[0][:40] for k, v in arguments.items())
        for arguments, _, _ in REFUSED
    ],
)
def test_refused_arguments_say_why(arguments: dict[str, Any], kind: type[Exception], words: list[str]) -> None:
    def body(rank: int, model: nn.Module) -> None:
        with pytest.raises(kind) as raised:
            agmerge.DistributedOptimizer(sgd(model), model.named_parameters(), **arguments)
        assert type(raised.value) is kind
        assert all(word in str(raised.value) for word in words), str(raised.value)
        assert testing.calls() == []  # before anything was sent
        wrap(model).close()  # and the parameters are free

    on_ranks(1, MODEL, body)


@pytest.mark.parametrize("compression", ["none", "int8", "powersgd"])
def test_a_new_exchange_is_refused_without_a_selection(compression: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXCHANGES, "made-up", type("MadeUp", (MaskedExchange,), {}))

    def body(rank: int, model: nn.Module) -> None:
        with pytest.raises(ValueError, match="exchange='made-up' has no effect with compression"):
            wrap(model, exchange="made-up", compression=compression)
        with pytest.raises(ValueError, match="wire='sign' is not supported with exchange='made-up'"):
            wrap(model, exchange="made-up", compression="topk", wire="sign")  # it sends zeros, as masked does
        wrap(model, exchange="made-up", compression="topk")

    on_ranks(1, MODEL, body)


def test_every_argument_has_an_effect_or_is_refused() -> None:
    """An argument that joins the contract has to come by here, and then into the table or into a test of its own."""
    known = set(inspect.signature(agmerge.DistributedOptimizer.__init__).parameters)
    assert known == {
        "self", "optimizer", "named_parameters", "compression", "backward_passes_per_step", "op",
        "gradient_predivide_factor", "num_groups", "groups", "sparse_as_dense", "process_set", "density", "warmup",
        "memory", "dense", "merging", "sparsify", "exchange", "wire", "dense_sum", "scaler", "diverged",
        "nonfinite", "timeout", "check_every", "unused", "model", "sync", "carry", "every", "fragments", "overlap",
        "decay", "outer", "moments", "rank", "unknown",
    }  # fmt: skip
    with pytest.raises(TypeError, match="unexpected keyword argument 'densty': did you mean 'density'"):
        wrap(MODEL, densty=0.1)


def test_the_arguments_horovod_has_come_in_its_order() -> None:
    def body(rank: int, model: nn.Module) -> list[tuple[str, str]]:
        optimizer = agmerge.DistributedOptimizer(
            sgd(model), model.named_parameters(), agmerge.Compression.fp16, 2, agmerge.Sum, 1.0, 0, None, True, None
        )
        return optimizer._reducer.exchange.agreed.config.facts()

    (facts,) = on_ranks(1, MODEL, body)
    expected = {"compression": "fp16", "backward_passes_per_step": "2", "op": "sum", "sparse_as_dense": "True"}
    assert expected.items() <= dict(facts).items()


@pytest.mark.parametrize("name", ["Adasum", "Min", "Max", "Product"])
def test_other_reductions_of_horovods_say_what_there_is(name: str) -> None:
    with pytest.raises(ValueError, match="op must be agmerge.Average or agmerge.Sum, got .*later gradients"):
        on_ranks(1, MODEL, lambda rank, model: wrap(model, op=getattr(agmerge, name)))
    with pytest.raises(AttributeError, match="module 'agmerge' has no attribute 'Averag'"):
        getattr(agmerge, "Averag")  # noqa: B009


class NeedsClosure(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return closure()


@pytest.mark.parametrize("make", [torch.optim.LBFGS, NeedsClosure])
def test_optimizers_that_call_closures_by_themselves_are_refused(make: Any) -> None:
    def body(rank: int, model: nn.Module) -> None:
        with pytest.raises(ValueError, match=f"{make.__name__} is not supported"):
            wrap(model, make(model.parameters()))

    on_ranks(2, MODEL, body)


def test_what_is_no_optimizer_is_refused() -> None:
    for thing in (MODEL, None, torch.optim.SGD, [MODEL]):
        with pytest.raises(TypeError, match="must be a torch.optim.Optimizer"):
            agmerge.DistributedOptimizer(thing, MODEL.named_parameters())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "module, base, words",
    [
        ("torchft.optim", torch.optim.SGD, "of torchft .* remove torchft"),
        ("deepspeed.runtime.zero.stage_1_and_2", object, "of deepspeed .* remove DeepSpeed"),
        ("deepspeed.runtime.engine", nn.Module, "of deepspeed "),
    ],
)
def test_what_exchanges_gradients_by_itself_is_refused_by_name(module: str, base: type, words: str) -> None:
    theirs = type("OptimizerWrapper", (base,), {"__module__": module, "__init__": lambda self: None})
    for kind in (theirs, type("Own", (theirs,), {})):  # a subclass of the script's
        with pytest.raises(TypeError, match=f"optimizer: a {kind.__name__} {words}"):
            agmerge.DistributedOptimizer(kind(), MODEL.named_parameters())


def test_another_packages_plain_optimizer_is_taken() -> None:
    fused = type("FusedAdam", (torch.optim.Adam,), {"__module__": "deepspeed.ops.adam.fused_adam"})
    on_ranks(2, MODEL, lambda rank, model: wrap(model, fused(model.parameters()), compression="none").close())


NAMED: dict[str, tuple[Any, str]] = {
    "not pairs": (
        lambda m: list(m.parameters()),
        "named_parameters should be a sequence of tuples (name, parameter), ",
    ),
    "repeated": (lambda m: [("same", p) for p in m.parameters()], "must be unique. Found duplicates: same"),
    "too few": (lambda m: list(m.named_parameters())[1:], "were not named. Not named: parameter 0 of group 0"),
    "another model": (lambda m: copy.deepcopy(m).named_parameters(), "one or more model parameters were not named."),
}


@pytest.mark.parametrize("case", NAMED)
def test_named_parameters_that_do_not_fit_are_refused_in_horovods_words(case: str) -> None:
    make, words = NAMED[case]

    def body(rank: int, model: nn.Module) -> None:
        with pytest.raises(ValueError) as raised:
            agmerge.DistributedOptimizer(sgd(model), make(model))
        assert words in str(raised.value)

    on_ranks(1, MODEL, body)


def test_a_saved_plan_that_is_no_plan_is_refused_with_its_path(tmp_path: Path) -> None:
    def body(rank: int, model: nn.Module) -> None:
        path = tmp_path / "plan.json"
        with pytest.raises((ValueError, OSError), match=str(path)):
            wrap(model, merging=path)
        path.write_text('{"counts": [6]}')
        with pytest.raises(ValueError, match=str(path)):
            wrap(model, merging=str(path))

    on_ranks(1, MODEL, body)


def test_density_may_stay_where_the_compressor_is_swapped_by_name() -> None:
    """It is about the sparse tensor class, which is then empty."""

    def body(rank: int, model: nn.Module, **options: Any) -> str:
        return train(model, wrap(model, compression="fp16", **options), rank, range(2))[-1]

    assert on_ranks(2, MODEL, lambda r, m: body(r, m, density=0.5)) == on_ranks(2, MODEL, body)


def test_before_init_it_says_what_to_do_and_leaves_no_hooks() -> None:
    model = copy.deepcopy(MODEL)
    with pytest.raises(agmerge.AGMergeError, match=r"use agmerge.init\(\)"):
        wrap(model)
    for _ in range(2):
        model(torch.ones(1, 32)).sum().backward()


@pytest.mark.parametrize("name", ["merge_report"])
def test_methods_that_are_not_built_are_not_there(name: str) -> None:
    def body(rank: int, model: nn.Module) -> None:
        with pytest.raises((AttributeError, agmerge.AGMergeError)):
            getattr(wrap(model), name)()

    on_ranks(1, MODEL, body)
