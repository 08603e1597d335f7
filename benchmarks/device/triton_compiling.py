# SPDX-License-Identifier: Apache-2.0
"""Compile every kernel for a GPU that is not there: `python -m device.triton_compiling 90` prints JSON, a line a form.

With `once` behind it, one form of each kernel is compiled. `compiled_kernels.py` runs it, with a Triton of its choice.

Kernels are called as the library calls them, on the host's tensors, and what would be launched is compiled instead, for
the types and the alignments of these arguments: what a launch does.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from device.kernel_calls import calls, calls_of_one
from sparsifiers.gpu import codec, combining, compensation, records, selection
from sparsifiers.gpu.kernels import codec as codec_kernels
from sparsifiers.gpu.kernels import combining as combining_kernels
from sparsifiers.gpu.kernels import compact as compact_kernels
from sparsifiers.gpu.kernels import compensation as compensation_kernels
from sparsifiers.gpu.kernels import edge as edge_kernels
from sparsifiers.gpu.kernels import launching
from sparsifiers.gpu.kernels import records as records_kernels
from sparsifiers.gpu.kernels import rows as rows_kernels

POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.int16: "*i16",
    torch.uint8: "*u8",
    torch.float64: "*fp64",
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
    options = {**launching.OPTIONS, **{name: constants[name] for name in constants if name not in kernel.arg_names}}
    constants = {name: one for name, one in constants.items() if name in kernel.arg_names}
    given = dict(zip(kernel.arg_names, arguments, strict=False))
    free = {param.name for param in kernel.params if param.do_not_specialize}  # numbers that change
    ones = {name: 1 for name, one in given.items() if is_one(one) and name not in free}
    given = {name: one for name, one in given.items() if name not in ones}
    signature = {name: type_of(given[name]) if name in given else "constexpr" for name in kernel.arg_names}
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if name in given and name not in free and is_aligned(given[name])
    }
    source = ASTSource(kernel, signature, constexprs={**constants, **ones}, attrs=attributes)
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        result = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    ptx = result.asm["ptx"]
    said = log.getvalue()
    registers = re.search(r"(\d+) registers", said)
    assert registers is not None, said
    does = instructions(result.asm["cubin"])
    return {
        "kernel": kernel.__name__.removesuffix("_kernel"),
        "triton": triton.__version__,
        "arch": f"sm_{target}",
        "registers": int(registers[1]),
        "spills": sum(int(found) for found in re.findall(r"(\d+) bytes spill", said)),
        "popc": does["POPC"],
        "membar": does["MEMBAR"],
        "local_bytes": sum(int(found) for found in re.findall(r"(\d+) bytes stack", said)),
        "shared": result.metadata.shared,
        "wide": len(re.findall(r"ld\.global\.v4\.b32", ptx)),  # loads of 16 bytes
        "fused": len(re.findall(r"\bfma\.", ptx)),
        "flushing": len(re.findall(r"\.ftz", ptx)),
        "to_bf16": len(re.findall(r"cvt\.rn\.bf16", ptx)),
    }


def instructions(cubin: bytes) -> Counter[str]:
    """How often the machine code has each instruction, without its suffixes."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return Counter(re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?([A-Z0-9]+)", text, re.MULTILINE))


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

    for module in (codec, combining, compensation, records, selection):
        module.runs_triton = lambda tensor: True
    kernels = (
        codec_kernels, combining_kernels, compact_kernels, compensation_kernels, edge_kernels, records_kernels,
        rows_kernels,
    )  # fmt: skip
    for module in kernels:
        module.launch = instead
    triton.knobs.nvidia.dump_ptxas_log = True
    triton.knobs.compilation.always_compile = True
    for form in itertools.chain(calls(), calls_of_one()):  # noqa: B007  # `instead` reads it
        pass


if __name__ == "__main__":
    main(int(sys.argv[1]), "once" in sys.argv)
