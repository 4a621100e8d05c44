"""The C header of a plan, and a function of TVM-FFI by it: header.h and tvm_ffi.cc with their parts filled in."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from gemmsmith.arrays.dlpack import DLPACK_DTYPES
from gemmsmith.backends.cuda.cluster_placement import PROBE
from gemmsmith.backends.cuda.compiler import compile_source
from gemmsmith.backends.cuda.driver import tensor_map_names
from gemmsmith.core.arguments import Pointer, TensorMap
from gemmsmith.core.chip import Chip
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.problem import SCALE_NAMES
from gemmsmith.core.scalars import ceil_div
from gemmsmith.core.templates import fill_template
from gemmsmith.host.export.program import Program, numbers_of
from gemmsmith.host.export.signature import Array, Signature
from gemmsmith.hw.cluster import MAX_CLUSTERS
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.launch import Launch

FUNCTIONS = {
    "+": "add", "-": "sub", "*": "mul", "//": "div", "%": "mod", "ceil_div": "ceil_div", "<<": "shl", ">>": "shr",
    "neg": "neg", "bit_length": "bit_length", "inverse_bits": "inverse_bits",
}  # fmt: skip
"""Operations of a Program that are functions in C; the others are C's operators."""
C_TYPES = {
    "i32": "int32_t", "u32": "uint32_t", "i64": "int64_t", "u64": "uint64_t", "pointer": "uint64_t",
    "fast_divmod": "uint64_t",
}  # fmt: skip
"""Types of parameters by their kinds."""


def check_name(name: str) -> None:
    """Raise ArgumentError for a prefix of functions that is no C identifier."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name):
        raise ArgumentError(f"name: got {name!r}; use a C identifier that begins with a letter, such as 'my_gemm'")


def make_header(
    name: str, signatures: Sequence[Signature], program: Program, cubins: Mapping[Kernel, bytes]
) -> str:  # fmt: skip
    """Return the header of a plan, or of several, with their cubins.

    Args:
        name: The prefix of its functions.
        signatures: The arguments of each plan, which are alike.
        program: The launches.
        cubins: Of each kernel of the program.
    """
    signature = signatures[0]
    configs = ", or ".join(f"{x.planned.config}" for x in signatures)
    kernels = program.kernels
    images, rows = [*_images(name, kernels, cubins)], [_kernel(name, i, kernel) for i, kernel in enumerate(kernels)]
    placement = place = ""
    if any("cluster_permutation" in x.parameter_kinds for x in kernels):
        chip, probe = kernels[0].chip, f"{name}_image_{len(kernels)}_"
        images.append(_image(probe, compile_source(PROBE, "probe", chip.target).cubin))
        rows.append(f'    {{{probe}, "probe", 32, 1, {chip.max_shared_bytes_per_cta}}},')
        placement, place = _filled("placement.h", {}), f"    {name}_place_(kernels);"
    parts = {
        "about": f"{name}: out = epilogue(a @ b), {configs}. Made by gemmsmith; see {name}.cu for the kernel.",
        "arguments": "\n".join(_arguments(signature)),
        "numbers": "\n".join(f"    int64_t {_field(x)};" for x in list(program.outputs)[3:]),
        "operations": "\n".join(_operations(name, signature, program)),
        "checks": "\n".join(_checks(name, signature)),
        "images": "\n".join(images),
        "kernels": "\n".join(rows),
        "placement": placement,
        "place": place,
        "count": f"{len(rows)}",
        "most": f"{MAX_CLUSTERS}",
        "target": kernels[0].chip.target,
        "device": _device(kernels[0].chip),
        "launches": "\n".join(_launch(name, i, x) for i, x in enumerate(program.slots.values())),
        "name": name,
    }
    return _filled("header.h", parts)


def make_tvm_ffi(name: str, signature: Signature) -> str:
    """Return the source of the function of the header `name`: of a, b, operands, results, and numbers.

    Raises ArgumentError for two arrays as b, and for a dtype that DLPack has not.
    """
    arrays = sorted(signature.arrays, key=lambda x: x.info.writable)
    for x in arrays:
        if x.second or x.info.dtype not in DLPACK_DTYPES.values():
            what = "two arrays" if x.second else f"{x.info.dtype}"
            raise ArgumentError(f"tvm_ffi: got {what} as {x.name}, which no function of TVM-FFI takes; use the header")
    names, numbers = [x.name for x in arrays], signature.numbers
    parts = {
        "signature": ", ".join(x.removeprefix("in_") for x in (*names, *numbers)),
        "parameters": ", ".join([*(f"TensorView {x}" for x in names), *(f"float {x}" for x in numbers)]),
        "sizes": " = ".join(f"x.{size}" for size in signature.sizes),
        "arguments": "\n".join([*map(_bind, arrays), *(f"    x.{number} = {number};" for number in numbers)]),
        "values": '\n            << ", '.join(f'{v.name} = " << x.{v.name}' for v in signature.variables),
        "name": name,
    }
    return _filled("tvm_ffi.cc", parts)


def _bind(x: Array) -> str:
    """Return the statement that checks an array, and reads its address, sizes and strides."""
    dtype = str(next(key for key, dtype in DLPACK_DTYPES.items() if dtype is x.info.dtype))[1:-1]
    axes = []
    for (size, by), stride in zip(x.sizes, x.strides or [-1] * len(x.sizes), strict=True):
        whole, step = (f"&x.{y}" if isinstance(y, str) else "nullptr" for y in (size, stride))
        divisor = by if isinstance(size, str) else ceil_div(size, by)
        axes.append(f"{{{whole}, {divisor}, {step}, {0 if isinstance(stride, str) else stride}}}")
    return (
        f'    x.{x.name} = bind({x.name}, "{x.name.removeprefix("in_")}", {{{dtype}}}, device, {{{", ".join(axes)}}});'
    )


def _filled(template: str, parts: Mapping[str, str]) -> str:
    """Return a template of this folder with its parts, in order, filled in."""
    return with_identifiers(fill_template(Path(__file__).with_name(template), parts))


def with_identifiers(text: str) -> str:
    """Return a text with the names of scales as identifiers."""
    for scale in SCALE_NAMES.values():
        text = text.replace(scale, scale.replace(" ", "_"))
    return text


def _arguments(signature: Signature) -> Iterator[str]:
    """Yield the members of the struct of arguments."""
    arrays = {name: x for x in signature.arrays for name in (x.name, x.second)}
    for x in signature.variables:
        if array := arrays.get(x.name):
            yield f"    {'' if array.info.writable else 'const '}void *{x.name}; /* {_shape(array)} */"
        else:
            yield f"    int64_t {x.name};" + f" /* {x.what} */" * bool(x.what)
    for name in signature.numbers:
        yield f"    float {name};"


def _shape(x: Array) -> str:
    """Return an array's dtype, shape and strides, for a comment."""
    sizes = ", ".join(f"ceil({size} / {by})" if by > 1 else f"{size}" for size, by in x.sizes)
    strides = "contiguous" if x.strides is None else f"strides ({', '.join(map(str, x.strides))})"
    return f"{x.info.dtype} ({sizes}), {strides}" if x.sizes else f"{x.info.dtype}, one"


def _field(output: str) -> str:
    slot, _, rest = output.partition(".")
    return f"k{slot}_{rest.replace('.', '_')}" if rest else slot


def _operations(name: str, signature: Signature, program: Program) -> Iterator[str]:
    addresses = {x.name for x in signature.variables if x.is_address} | {"workspace", "flags"}
    for i in program.needed():
        op, *operands = program.operations[i]
        if op == "constant":
            continue
        if op == "variable":
            text = f"(int64_t)(intptr_t)x->{operands[0]}" if operands[0] in addresses else f"x->{operands[0]}"
        elif op == "select":
            text = "{} ? {} : {}".format(*(_value(program, x) for x in operands))
        elif op in FUNCTIONS:
            text = f"{name}_{FUNCTIONS[op]}_({', '.join(_value(program, x) for x in operands)})"
        else:
            text = f" {op} ".join(_value(program, x) for x in operands)
        yield f"    const int64_t v{i} = {text};"
    for output, number in program.outputs.items():
        yield f"    out->{_field(output)} = {_value(program, number)};"


def _value(program: Program, i: int) -> str:
    op, *operands = program.operations[i]
    if op != "constant":
        return f"v{i}"
    return f"INT64_C({operands[0]})" if abs(operands[0]) >= 1 << 31 else f"{operands[0]}"


def _checks(name: str, signature: Signature) -> Iterator[str]:
    """Yield the statements that check the arguments' bounds, leave if there is nothing to do, and refuse overlaps."""
    sizes = signature.variables[: len(signature.sizes)]
    empties = signature.empties
    for v in sizes:
        divides = f" || x->{v.name} % {v.multiple}" * (v.multiple > 1)
        least = 0 if v.name in empties else v.least
        yield f"    if (x->{v.name} < {least} || x->{v.name} > {v.most}{divides}) return {name}_ERROR_SIZE;"
    if empties:
        yield f"    if ({' || '.join(f'!x->{v}' for v in empties)}) return {name}_OK;"
    for v in signature.variables[len(sizes) :]:
        value, least = (f"(int64_t)(intptr_t)x->{v.name}" if v.is_address else f"x->{v.name}"), v.least
        yield f"    if ({value} < {least} || {value} > INT64_C({v.most})) return {name}_ERROR_SIZE;"
    for x in signature.arrays:
        yield f"    const int64_t {x.name}_bytes = {_bytes(name, x, empties)};"
    parts = [(y, x) for x in signature.arrays for y in (x.name, x.second) if y]
    yield f"    if ({' || '.join(f'(!x->{y} && {x.name}_bytes)' for y, x in parts)}) return {name}_ERROR_SIZE;"
    if unaligned := [f"(uintptr_t)x->{y} % {x.info.itemsize}" for y, x in parts if x.info.itemsize > 1]:
        yield f"    if ({' || '.join(unaligned)}) return {name}_ERROR_LAYOUT;"
    results = [x for x in signature.arrays if x.info.writable]
    conditions = [_self_overlap(name, x) for x in results if x.strides is not None]
    for x in results:
        for pointer, y in parts:
            if y not in results[: results.index(x) + 1]:
                overlap = f"{name}_overlap_(x->{x.name}, {x.name}_bytes, x->{pointer}, {y.name}_bytes)"
                may_be_same = x.sizes == y.sizes and x.strides is not None and not signature.is_read_before(y)
                conditions.append(f"{overlap} && !({_is_same(x, y)})" if may_be_same else overlap)
    yield from (f"    if ({condition}) return {name}_ERROR_OVERLAP;" for condition in conditions)


def _self_overlap(name: str, x: Array) -> str:
    """Return the condition under which elements of an array share memory, in C."""
    assert x.strides is not None
    axes = range(len(x.strides))
    strides = ", ".join([*map(in_c, x.strides)] + ["1"] * (3 - len(axes)))
    sizes = ", ".join([in_c(*size) for size in x.sizes] + ["1"] * (3 - len(axes)))
    return f"{name}_shares_({sizes}, {strides})"


def _is_same(x: Array, y: Array) -> str:
    """Return the condition under which two arrays are one, in C: each element is read before it is written."""
    if x.info.itemsize != y.info.itemsize or x.strides is None or y.strides is None:
        return "0"
    pairs = zip(map(in_c, x.strides), map(in_c, y.strides), strict=True)
    return " && ".join([f"x->{x.name} == x->{y.name}", *(f"{s} == {t}" for s, t in pairs if s != t)])


def in_c(x: str | int, by: int = 1, struct: str = "x->") -> str:
    """Return a variable, a member of a struct, or a number, divided by a number and rounded up, in C."""
    whole = f"{struct}{x}" if isinstance(x, str) else f"{x}"
    return f"(({whole} + {by - 1}) / {by})" if by > 1 else whole


def _bytes(name: str, x: Array, positive: Sequence[str]) -> str:
    """Return the bytes from the first to the last of an array, in C; 0 if it is empty.

    `positive`: sizes that are not 0.
    """
    text = "1"
    for i, size in enumerate(x.sizes):
        if x.strides is None:
            text = f"{name}_mul_({text}, {in_c(*size)})"
        else:
            text = f"{name}_add_({text}, {name}_mul_({in_c(*size)} - 1, {in_c(x.strides[i])}))"
    count = f"{name}_mul_({text}, {x.info.itemsize})"
    empty = [f"x->{size}" for size, _ in x.sizes if isinstance(size, str) and size not in positive]
    return f"{' && '.join(empty)} ? {count} : 0" if empty else count


def _images(name: str, kernels: Sequence[Kernel], cubins: Mapping[Kernel, bytes]) -> Iterator[str]:
    """Yield the arrays of the kernels' cubins, or their declarations."""
    files = [*cubins]
    yield f"#ifdef {name}_EXTERN_CUBINS /* define the arrays yourself, for instance by an assembler's .incbin */"
    for i, kernel in enumerate(kernels):
        at = files.index(kernel)
        yield f"extern const unsigned char {name}_image_{i}_[]; /* {cubin_name(name, at)} */"
    yield "#else"
    for i, kernel in enumerate(kernels):
        yield _image(f"{name}_image_{i}_", cubins[kernel])
    yield "#endif"


def _image(name: str, cubin: bytes) -> str:
    rows = (", ".join(map(str, cubin[at : at + 32])) for at in range(0, len(cubin), 32))
    return f"static const unsigned char {name}[] = {{\n" + ",\n".join(rows) + "};"


def cubin_name(name: str, i: int) -> str:
    """Return the name of the file of an export's cubin `i`."""
    return f"{name}_{i}.cubin" if i else f"{name}.cubin"


def _kernel(name: str, i: int, x: Kernel) -> str:
    return f'    {{{name}_image_{i}_, "{x.name}", {x.threads}, {x.cluster[0]}, {x.shared_bytes}}},'


def _device(chip: Chip) -> str:
    """Return the condition for a device that can run cubins of a chip."""
    major, minor = divmod(chip.capability, 10)
    return f"major == {major} && minor {'==' if chip.target.endswith('a') else '>='} {minor}"


def _launch(name: str, i: int, launch: Launch) -> str:
    """Return the block that launches a kernel if it has work."""
    kernel, encoded = launch.kernel, list[str]()
    lines, parameters = [f"int64_t clusters = n.k{i}_clusters;"], list[str]()
    maps = kernel.parameter_kinds.count("tensor_map")
    if maps:
        lines += [
            "typedef struct { unsigned char bytes[128]; } map; /* a CUtensorMap, which C99 does not align */",
            f"map storage[{maps + 1}], *const maps = (map *)(((uintptr_t)storage + 63) & ~(uintptr_t)63);",
        ]
    for p, kind in zip(kernel.parameters, kernel.parameter_kinds, strict=True):
        x = launch.arguments[p.name or ""]
        if kind == "cluster_permutation":
            lines.append(f"uint16_t order[{MAX_CLUSTERS}];")
            parameters.append("order")
        elif isinstance(x, TensorMap):
            parameters.append(f"maps + {len(encoded)}")
            encoded.append(_encode(name, f"n.k{i}_{p.name}_", parameters[-1], x))
        else:
            value, c_type = f"n.k{i}_{p.name}", C_TYPES["u32" if kind == "f32" else kind]
            if kind == "f32" and isinstance(x, Pointer):
                value, c_type = f"x->{x.name}", "float"
            lines.append(f"{c_type} p_{p.name} = ({c_type}){value};")
            parameters.append(f"&p_{p.name}")
    lines += [f"void *parameters[] = {{{', '.join(parameters)}}};", *encoded]
    if kernel.persistent:
        lines.append(f"if (clusters > kernels->resident[{i}]) clusters = kernels->resident[{i}];")
        if most := kernel.max_clusters:
            wave = f"(kernels->sms / {kernel.cluster[0]})"
            lines.append(f"if (clusters > {most}) clusters = {most} / {wave} ? {most} / {wave} * {wave} : {most};")
    if "order" in parameters:
        lines.append(f"{name}_order_(kernels, {i}, clusters, order);")
    pdl = "launched" if kernel.chip.supports("sm_90") else "0"
    lines += [f"{name}_TRY_({name}_start_(kernels, {i}, clusters, {pdl}, stream, parameters));", "launched = 1;"]
    return "\n".join([f"    if (n.k{i}_clusters > 0) {{", *(f"        {x}" for x in lines), "    }"])


def _encode(name: str, fields: str, place: str, x: TensorMap) -> str:
    address, *numbers = numbers_of(x)
    rank, (kind, _) = len(numbers) // 3, tensor_map_names(x.dtype, x.swizzle)
    values = ", ".join(f"(uint64_t){fields}{y}" for y in numbers)
    call = f"{name}_encode_(kernels, {place}, {kind}, {rank}, {fields}{address}, numbers)"
    return f"{{ const uint64_t numbers[] = {{{values}}}; {name}_TRY_({call}); }}"
