"""The CUDA C++ file of a kernel: what it is, what it needs, the functions that it uses, and its body."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod

from gemmsmith.lang import statements as st
from gemmsmith.lang.cpp import comment, device_function, functions, wrapped
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.printer import Printer, is_pure, literal, name_of
from gemmsmith.lang.types import ORDER, ORDER_LENGTH, TENSOR_MAP
from gemmsmith.lang.values import Value

_PRELUDE = """\
#ifdef __CUDACC_RTC__  // NVRTC has no headers
typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned int uint32_t;
typedef unsigned long long uint64_t; typedef long long int64_t;
#else
#include <cstdint>
#endif
"""
_TENSOR_MAP = "struct alignas(64) TensorMap { uint64_t opaque[16]; };  // CUtensorMap\n"
_ORDER = f"struct Order {{ uint16_t of[{ORDER_LENGTH}]; }};  // a permutation of a grid's clusters\n"
_BUILTINS = {
    "thread": "const int thread = threadIdx.x;",
    "lane": "const int lane = threadIdx.x % 32;",
    "warp": "const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);  // the same in all lanes, and known so",
    "warpgroup": "const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);",
    "smem": "const uint32_t smem = (uint32_t)__cvta_generic_to_shared(shared_memory);",
    # A CTA's shared addresses carry its cluster rank above the 18 bits that matrix descriptors have room for.
    "smem_chunk": "const uint32_t smem_chunk = ((uint32_t)__cvta_generic_to_shared(shared_memory) & 0x3ffff) >> 4;",
}


def _count_uses(block: st.Block, results: Sequence[Value] = ()) -> Counter[Value]:
    """How often each value is used by what is not dead itself; `results` are."""
    uses = Counter(results)
    for statement in reversed(list(st.walk(block))):  # a value's uses come before it
        dead = isinstance(statement, st.Bind) and is_pure(statement.value) and not uses[statement.value]
        if not dead and not (isinstance(statement, st.Call) and not any(uses[r] for r in statement.results)):
            uses.update(st.uses(statement))
    return uses


def _function_names(kernel: Kernel) -> set[str]:
    """Names no variable may take."""
    used = {instruction.wrapper_name for instruction, _ in st.instructions(kernel.body)}
    return used | {function.name for function in kernel.functions}


def _print_function(function: st.Function, threads: int, wrappers: dict[str, None], taken: set[str]) -> str:
    """A device function; several results are a structure, whose members have their names."""
    p = Printer(threads, _count_uses(function.body, function.results), wrappers, taken=Counter(taken))
    inputs = [*function.parameters, *function.captured]
    parameters = [f"{v.type.cpp} {p.name(v, name_of(v))}" for v in inputs]
    p.block(function.body)
    results = ", ".join(p.text(r) for r in function.results)
    if len(function.results) == 1:
        p.line(f"return {results};")
        return device_function(function.results[0].type.cpp, function.name, parameters, "\n".join(p.lines))
    p.line(f"return {{{results}}};")
    structure = function.name.title().replace("_", "")
    members = "".join(f" {r.type.cpp} {r.name};" for r in function.results)
    body = device_function(structure, function.name, parameters, "\n".join(p.lines))
    return f"struct {structure} {{{members} }};\n{body}"


def print_kernel(kernel: Kernel, located: bool = False) -> str:
    """The kernel's CUDA C++ file. Only the wrappers of instructions it uses are in it. `located`: with `#line`
    directives that name the lines of the Python file, for the compiler's line information."""
    taken = {*_BUILTINS, "shared_memory", kernel.name, *_function_names(kernel)}
    wrappers: dict[str, None] = {}
    p = Printer(kernel.threads, _count_uses(kernel.body), wrappers, taken=Counter(taken), located=located)
    parameters = []
    for parameter in kernel.parameters:
        name = p.name(parameter, parameter.name or "p")
        const = "const __grid_constant__ " if parameter.type in (TENSOR_MAP, ORDER) else "const "
        parameters.append(f"{const}{parameter.type.cpp} {name}")
    p.block(kernel.body)
    own = [_print_function(f, kernel.threads, wrappers, taken) for f in kernel.functions]
    cluster = "" if kernel.cluster == (1, 1, 1) else f"__cluster_dims__({', '.join(map(str, kernel.cluster))}) "
    signature = (
        f'extern "C" __global__ void {cluster}__launch_bounds__({kernel.threads}, {kernel.resident})\n'
        f"{kernel.name}(\n{wrapped(', '.join(parameters), '    ', '')})\n{{\n"
    )
    shared = "extern __shared__ __align__(1024) uint8_t shared_memory[];"
    opening = [shared] * bool({"smem", "smem_chunk"} & p.builtins) + [
        text for name, text in _BUILTINS.items() if name in p.builtins
    ]
    header = [
        *kernel.header,
        f"compile: nvcc -std=c++17 -fmad=false -arch={kernel.chip.target} -cubin, or NVRTC for {kernel.chip.target}",
        f"launch: grid a multiple of {prod(kernel.cluster)}, block {kernel.threads}, "
        f"{kernel.shared_bytes} bytes of dynamic shared memory",
    ]
    kinds = {q.type for q in kernel.parameters}
    structs = _TENSOR_MAP * (TENSOR_MAP in kinds) + _ORDER * (ORDER in kinds)
    sizes = {b.start.name: f"  // shared memory: {b.count} x {b.slot_bytes} bytes" for b in kernel.buffers}
    constants = [
        f"constexpr {c.type.cpp} {name} = {literal(c.type, c.number)};{sizes.get(c.name, '')}"
        for name, c in sorted(p.constants.items(), key=lambda x: (x[1].name not in sizes, x[1].number))
    ]
    return (
        "\n".join(map(comment, header))
        + f"\n\n{_PRELUDE}{structs}\n"
        + functions((*wrappers, *own))
        + f"\n{signature}"
        + "".join(f"    {line}\n" for line in (*constants, *opening))
        + "\n".join(p.lines)
        + "\n}\n"
    )
