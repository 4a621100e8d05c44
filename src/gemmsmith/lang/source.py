"""Assembles the CUDA C++ file of a kernel: header comment, prelude, device functions, body."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod

from gemmsmith.lang import statements as st
from gemmsmith.lang.cpp import comment_lines, device_function, join_definitions, wrap_line
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.merge import is_live, merge_statements
from gemmsmith.lang.printer import Printer, identifier_hint, literal
from gemmsmith.lang.values import Builtin, Value

_PRELUDE = """\
#ifdef __CUDACC_RTC__  // NVRTC has no headers
typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned int uint32_t;
typedef unsigned long long uint64_t; typedef long long int64_t;
#else
#include <cstdint>
#endif
"""
_SHARED_ARRAY = """\
template <uint32_t offset, int slot_bytes> struct SharedArray {  // addresses of slots of shared memory
    uint32_t smem;
    __device__ __forceinline__ uint32_t operator[](int slot) const { return smem + slot * slot_bytes + offset; }
    __device__ __forceinline__ uint32_t at(int slot, uint32_t byte) const {
        return smem + slot * slot_bytes + byte + offset;
    }
};
"""
_BUILTINS = {
    "thread": "const int thread = threadIdx.x;",
    "lane": "const int lane = threadIdx.x % 32;",
    "warp": "const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);  // warp-uniform for the compiler",
    "warpgroup": "const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);",
    "smem": "const uint32_t smem = (uint32_t)__cvta_generic_to_shared(shared_memory);",
}


def _count_uses(block: st.Block, results: Sequence[Value] = ()) -> Counter[Value]:
    """Return how often each value is used by live statements; `results`: values that count as used, too.

    An `if` without live statements is dead.
    """
    uses = Counter(results)

    def count(block: st.Block) -> bool:
        """Count a block's uses, from its end on: a value's uses before its definition. Return whether any is live."""
        any_live = False
        for statement in reversed(block.statements):
            # A list: all blocks are counted, also after a live one.
            living_blocks = [count(child) for child in reversed(st.children(statement))]
            if any(living_blocks) if isinstance(statement, st.If) else is_live(statement, uses):
                uses.update(st.uses(statement))
                any_live = True
        return any_live

    count(block)
    return uses


def _all_lines(block: st.Block, printed: dict[int, int], uses_at: dict[object, int], around: int) -> dict[int, int]:
    """Return the line of each statement in a block, by the statement's number.

    `printed`: those of the statements that are printed as lines of their own. `uses_at`: the line at which each value
    is used, where an inlined value is printed; modified. `around`: that of the statement around the block, for
    statements that have become part of it.
    """
    lines: dict[int, int] = {}
    for statement in reversed(block.statements):
        value = statement.value if isinstance(statement, st.Define) else None
        line = printed.get(statement.location.number, uses_at.get(value, around))
        for child in reversed(st.children(statement)):
            lines |= _all_lines(child, printed, uses_at, line)
        for used in st.uses(statement):
            uses_at.setdefault(used, line)
        lines[statement.location.number] = line
    return lines


def _print_function(
    function: st.Function, threads: int, wrappers: dict[str, None], used_names: set[str]
) -> tuple[str, dict[int, int]]:
    """Return the C++ of a device function, and the line of each statement (from 0) by its number.

    Several results are returned as a struct with one member each. `wrappers`: those in use; modified.
    """
    p = Printer(threads, _count_uses(function.body, function.results), wrappers, used_names=Counter(used_names))
    inputs = [*function.parameters, *function.captured]
    types = [v.type.constant if v.type.struct else v.type.cpp for v in inputs]
    parameters = [f"{kind} {p.name(v, identifier_hint(v))}" for kind, v in zip(types, inputs, strict=True)]
    p.block(function.body)
    end: dict[object, int] = dict.fromkeys(function.results, len(p.lines))  # the line of the return statement
    results, structure = ", ".join(p.text(r) for r in function.results), ""
    if len(function.results) == 1:
        return_type = function.results[0].type.cpp
        p.line(f"return {results};")
    else:
        return_type = function.name.title().replace("_", "")
        members = "".join(f" {r.type.cpp} {r.name};" for r in function.results)
        structure = wrap_line(f"struct {return_type} {{{members} }};", "") + "\n"
        p.line(f"return {{{results}}};")
    text = structure + device_function(return_type, function.name, parameters, "\n".join(p.lines))
    first = max(0, text.count("\n") - len(p.lines))  # 0 if all is one line
    lines = _all_lines(function.body, p.first_lines, end, 0)
    return text, {number: first + line for number, line in lines.items()}


def print_kernel(kernel: Kernel, line_directives: bool = False) -> tuple[str, dict[int, int]]:
    """Return the CUDA C++ file of a kernel, and the line of each statement (from 1) by its number.

    `line_directives`: add `#line` directives that name the lines of the Python file, for the compiler's line
    information.
    """
    uses = _count_uses(kernel.body)
    builtins = _BUILTINS | {
        v.name or "": f"const {v.type.cpp} {v.name} = {v.initializer};"
        for v in uses if isinstance(v, Builtin) and v.initializer
    }  # fmt: skip
    functions = [x.wrapper_name for x, _ in st.instructions(kernel.body)] + [x.name for x in kernel.functions]
    used_names = {*builtins, "shared_memory", kernel.name, *functions}
    wrappers: dict[str, None] = {}
    p = Printer(kernel.threads, uses, wrappers, used_names=Counter(used_names), line_directives=line_directives)
    parameters = []
    for parameter in kernel.parameters:
        name = p.name(parameter, parameter.name or "p")
        const = "const __grid_constant__ " if parameter.type.struct else "const "
        parameters.append(f"{const}{parameter.type.cpp} {name}")
    offsets = [buffer.offset_constant for buffer in kernel.buffers]
    for offset in offsets:
        p.shared_array(offset)
    p.block(merge_statements(kernel.body, uses))
    printed = [_print_function(f, kernel.threads, wrappers, used_names) for f in kernel.functions]
    cluster = "" if kernel.cluster == (1, 1, 1) else f"__cluster_dims__({', '.join(map(str, kernel.cluster))}) "
    signature = (
        f'extern "C" __global__ void {cluster}__launch_bounds__({kernel.threads}, {kernel.min_ctas_per_sm})\n'
        f"{kernel.name}(\n{wrap_line(', '.join(parameters), '    ', '')})\n{{\n"
    )
    opening = [text for name, text in builtins.items() if name in p.builtins]
    if any("shared_memory" in text for text in opening):
        opening.insert(0, "extern __shared__ __align__(1024) uint8_t shared_memory[];")
    arrays = {name: text for name in map(p.shared_array, offsets) if (text := p.shared_arrays.get(name))}
    opening += [f"const SharedArray<{offset}, {size}> {name}{{smem}};" for name, (offset, size) in arrays.items()]
    ctas = prod(kernel.cluster)
    header = [
        *kernel.header,
        f"compile: nvcc -std=c++17 -fmad=false -arch={kernel.chip.target} -cubin, or NVRTC for {kernel.chip.target}",
        f"launch: {f'grid a multiple of {ctas}' if ctas > 1 else 'any grid'}, block {kernel.threads}, "
        f"{kernel.shared_bytes} bytes of dynamic shared memory",
    ]
    structs = "".join(sorted({q.type.struct for q in kernel.parameters}, key=len))
    structs += _SHARED_ARRAY if p.shared_arrays else ""
    sizes = {b.offset_constant.name: f"  // shared memory: {b.count} x {b.slot_bytes} bytes" for b in kernel.buffers}
    constants = [
        f"constexpr {c.type.cpp} {name} = {literal(c.type, c.value)};{sizes.get(c.name, '')}"
        for name, c in sorted(p.constants.items(), key=lambda x: (x[1].name not in sizes, x[1].value))
    ]
    opening_text = (
        "\n".join(map(comment_lines, header))
        + f"\n\n{_PRELUDE}{structs}\n"
        + join_definitions((*wrappers, *(text for text, _ in printed)))
        + f"\n{signature}"
        + "".join(f"    {line}\n" for line in (*constants, *opening))
    )
    parts = [(opening_text.index(text), lines) for text, lines in printed]
    parts.append((len(opening_text), _all_lines(kernel.body, p.first_lines, {}, 0)))
    lines = {n: 1 + opening_text.count("\n", 0, first) + line for first, part in parts for n, line in part.items()}
    return opening_text + "\n".join(p.lines) + "\n}\n", lines
