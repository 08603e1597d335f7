"""Compile every kernel for a GPU that is not there: `python triton_compiling.py 90` prints a line of JSON a form.

With `once` behind it, one form of each kernel is compiled.

Kernels are called as the library calls them, on the host's tensors, and what would be launched is compiled instead, for
the types and the alignments of these arguments: what a launch does.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sparsifiers import gpu
from sparsifiers.gpu import add, codec, compact, compensation, edge, rows, whole
from sparsifiers.gpu.kernels import add as add_kernel
from sparsifiers.gpu.kernels import codec as codec_kernel
from sparsifiers.gpu.kernels import compact as compact_kernel
from sparsifiers.gpu.kernels import compensation as compensation_kernel
from sparsifiers.gpu.kernels import edge as edge_kernel
from sparsifiers.gpu.kernels import launching
from sparsifiers.gpu.kernels import rows as rows_kernel
from sparsifiers.gpu.kernels import whole as whole_kernel

CPU, N, K, W = torch.device("cpu"), 1 << 16, 656, 8
POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def type_of(argument: Any) -> str:
    """As Triton says it."""
    if isinstance(argument, Tensor):
        return POINTERS[argument.dtype]
    return "fp32" if isinstance(argument, float) else "i32"


def is_aligned(argument: Any) -> bool:
    place = argument.data_ptr() if isinstance(argument, Tensor) else argument
    return isinstance(place, int) and place % 16 == 0


def is_one(argument: Any) -> bool:
    """Triton takes it for a constant."""
    return isinstance(argument, int) and argument == 1


def compiled(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any], target: int) -> dict[str, Any]:
    """What the assembler says, and some of what the code does."""
    given = dict(zip(kernel.arg_names, arguments, strict=False))
    ones = {name: 1 for name, one in given.items() if is_one(one) and name != "k"}  # k changes: not specialized
    given = {name: one for name, one in given.items() if name not in ones}
    signature = {name: type_of(given[name]) if name in given else "constexpr" for name in kernel.arg_names}
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if name in given and is_aligned(given[name])
    }
    source = ASTSource(kernel, signature, constexprs={**constants, **ones}, attrs=attributes)
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        result = triton.compile(source, target=GPUTarget("cuda", target, 32), options=launching.OPTIONS)
    ptx = result.asm["ptx"]
    number = {what: re.search(rf"(\d+) {what}", log.getvalue()) for what in ("registers",)}
    assert number["registers"] is not None, log.getvalue()
    return {
        "kernel": kernel.__name__.removesuffix("_kernel"),
        "registers": int(number["registers"][1]),
        "spilled": sum(int(found) for found in re.findall(r"(\d+) bytes spill", log.getvalue())),
        "stack": sum(int(found) for found in re.findall(r"(\d+) bytes stack", log.getvalue())),
        "shared": result.metadata.shared,
        "wide": len(re.findall(r"ld\.global\.v4\.b32", ptx)),  # loads of 16 bytes
        "fused": len(re.findall(r"\bfma\.", ptx)),
        "flushing": len(re.findall(r"\.ftz", ptx)),
        "to_bf16": len(re.findall(r"cvt\.rn\.bf16", ptx)),
    }


def calls() -> Iterator[str]:
    """Call everything; says what before it is called."""
    for dtype in (torch.float32, torch.bfloat16):
        for form in ("plain", "unaligned", "uncounted", "momentum", "nesterov", "whole"):
            yield f"{str(dtype).removeprefix('torch.')}, {form}"
            home, given = torch.zeros(N + 8, dtype=dtype), slice(1, 40_001) if form == "unaligned" else slice(40_000)
            gradients = [home[given], None]
            momenta = gpu.Momenta(torch.zeros(N), torch.zeros(N), 0.9, form == "nesterov")
            gpu.compensate(
                gpu.TensorTable([0, 40_000], [40_000, 20_000], CPU),
                gradients,
                None if form == "whole" else torch.zeros(N),
                torch.zeros(N),
                largest=gpu.LargestKey(CPU),
                scratch=None if form in ("whole", "uncounted") else gpu.Scratch(N, CPU),
                momenta=momenta if form in ("momentum", "nesterov") else None,
            )
    for wire in (torch.float32, torch.float16, torch.bfloat16):
        for exact in (False, True):
            yield f"{str(wire).removeprefix('torch.')}, {'exact' if exact else 'one digit'}"
            slots, momentum = gpu.Slots.of(K, CPU, wire), torch.zeros(N) if exact else None
            layout = gpu.IndexLayout(N, K, 14 if exact else 6)
            section = gpu.IndexSection(layout, torch.zeros(layout.words, dtype=torch.int32))
            work, scratch = torch.zeros(N), gpu.Scratch(N, CPU)
            gpu.select_largest(work, K, scratch, slots, section, exact=exact, commit=exact, momentum=momentum)
    yield "rows"
    table = gpu.RowTable([(256, 256)], CPU)
    gpu.select_rows(torch.zeros(N), table, K, 0, gpu.Scratch(N, CPU), gpu.Slots.of(K, CPU), commit=True)
    for low in (-1, 0, 6, 16, 30):
        yield f"low {low}"
        layout = gpu.IndexLayout(N, K, low)
        counts, out = torch.zeros(W, dtype=torch.int32), torch.zeros(W, K, dtype=torch.int32)
        section = gpu.IndexSection(layout, torch.zeros(layout.words, dtype=torch.int32))
        for count in (K, torch.zeros((), dtype=torch.int32)):
            gpu.encode_indices(torch.zeros(K, dtype=torch.int32), count, section)
        words, tiles = (torch.zeros(W, n, dtype=torch.int32) for n in (layout.words + 7, layout.tiles))
        gpu.decode_indices(words[:, : layout.words], counts, layout, out, torch.zeros(W, dtype=torch.int32), tiles)
    for ranks, length in ((W, N), (W, add_kernel.ENOUGH), (256, N)):
        for wire in (torch.float32, torch.bfloat16):
            yield f"{ranks} ranks, {length} elements, {str(wire).removeprefix('torch.')}"
            indices, counts = torch.zeros(ranks, K, dtype=torch.int32), torch.zeros(ranks, dtype=torch.int32)
            gpu.add_ranks(torch.zeros(length), indices, torch.zeros(ranks, K, dtype=wire), counts, 0.125)
    for wire in (torch.float32, torch.bfloat16):
        yield f"whole, {str(wire).removeprefix('torch.')}"
        gpu.add_whole(torch.zeros(N), torch.zeros(W, N, dtype=wire), 0.125)


def calls_of_one() -> Iterator[str]:
    """Call everything for one element, one slot and one rank."""
    yield "one"
    table, rows = gpu.TensorTable([0], [1], CPU), gpu.RowTable([(1,)], CPU)
    scratch, slots, work = gpu.Scratch(1, CPU), gpu.Slots.of(1, CPU), torch.zeros(1)
    gpu.compensate(table, [None], work, torch.zeros(1), scratch=scratch, largest=gpu.LargestKey(CPU))
    gpu.select_rows(work, rows, 1, 0, scratch, slots, commit=True)
    for low in (-1, 0, 2):
        layout, count = gpu.IndexLayout(1, 1, low), torch.zeros(1, dtype=torch.int32)
        words, tiles = torch.zeros(1, layout.words, dtype=torch.int32), torch.zeros(1, layout.tiles, dtype=torch.int32)
        section = gpu.IndexSection(layout, words[0])
        gpu.select_largest(work, 1, scratch, slots, section, exact=True, commit=True)
        gpu.encode_indices(slots.indices, slots.count, section)
        gpu.decode_indices(words, count, layout, torch.zeros(1, 1, dtype=torch.int32), count, tiles)
    gpu.add_ranks(work, torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, 1), torch.zeros(1, dtype=torch.int32), 0.5)


def main(target: int, once: bool) -> None:
    """Print a line for each kernel in each form."""
    seen: set[str] = set()
    form = ""

    def instead(kernel: Any, programs: object, tensor: Tensor, *arguments: Any, **constants: Any) -> None:
        types = [(type_of(one), is_aligned(one), is_one(one)) for one in arguments]
        key = kernel.__name__ if once else repr((kernel.__name__, types, constants))
        if key not in seen:
            seen.add(key)
            print(json.dumps({**compiled(kernel, arguments, constants, target), "form": form}), flush=True)

    for module in (add, codec, compact, compensation, edge, rows, whole):
        module.runs_triton = lambda tensor: True
    kernels = (add_kernel, codec_kernel, compact_kernel, compensation_kernel, edge_kernel, rows_kernel, whole_kernel)
    for module in kernels:
        module.launch = instead
    triton.knobs.nvidia.dump_ptxas_log = True
    triton.knobs.compilation.always_compile = True
    for form in itertools.chain(calls(), calls_of_one()):  # noqa: B007  # `instead` reads it
        pass


if __name__ == "__main__":
    main(int(sys.argv[1]), "once" in sys.argv)
