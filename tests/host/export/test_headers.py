"""An exported header launches what Python launches, whatever the sizes, strides and addresses; or it returns an error.

The header is compiled with a stand-in for the driver, which prints the launches: on any machine with a C compiler.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import struct
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from examples.custom_design import SERIAL
from examples.own_gather import GATHER
from examples.own_grouped import GROUPED
from examples.own_int4 import INT4_WEIGHTS

import gemmsmith
from gemmsmith import ArgumentError, Config, Plan, Spec
from gemmsmith.core.arguments import TensorMap
from gemmsmith.host.export.signature import Signature
from gemmsmith.hw.cluster import MAX_CLUSTERS
from gemmsmith.lang.launch import Launches

STAND_IN = Path(__file__).parent / "stand_in"
COMPILERS = {x: shutil.which(x) for x in ("gcc", "g++", "clang")}
STRICT = ["-Wall", "-Wextra", "-Werror", "-pedantic", "-fsanitize=address,undefined", "-fno-sanitize-recover"]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not COMPILERS["gcc"], reason="needs gcc")]


def plan(layout: str = "nt", dtype: str = "bf16", batch: tuple[int, ...] = (), **options: Any) -> Plan:
    m, n, k = 512, 384, 640
    a = Spec((*batch, m, k), dtype, _strides(batch, m, k, layout[0]))
    return gemmsmith.plan(a, Spec((*batch, k, n), dtype, _strides(batch, k, n, layout[1])), **options)


def _strides(batch: tuple[int, ...], rows: int, columns: int, layout: str) -> tuple[int, ...]:
    return (rows * columns,) * len(batch) + ((columns, 1) if layout == "n" else (1, rows))


def scaled(acc: Any, bias: Any, c: Any, alpha: Any) -> Any:
    return ((acc + bias) * alpha + c).relu()


def gated(acc: Any) -> Any:
    gate, up = gemmsmith.deinterleave(acc)
    return gate.silu() * up


def named(acc: Any, x: Any, x_stride: Any) -> Any:
    return acc + x * x_stride


def two(acc: Any, scale: Any) -> Any:
    return {"half": (acc * scale).half(), "sign": acc > 0}


def block_scales(batch: tuple[int, ...] = (), layout: str = "t") -> dict[str, Any]:
    of_a, of_b = (*batch, 512, 5), (*batch, 5, 3)
    strides = (4096,) * len(batch) + ((1, 512) if layout == "t" else (8, 1))
    return {"scale_a": Spec(of_a, "fp32", strides), "scale_b": Spec(of_b, "fp32", (15,) * len(batch) + (1, 5))}


def two_weights(dtype: str = "bf16") -> Plan:
    weight, scale = Spec((640, 384), dtype, (1, 640)), Spec((5, 3), "fp32", (1, 5))
    scales = {"scale_a": Spec((512, 5), "fp32", (1, 512)), "scale_b": (scale, scale)} if dtype != "bf16" else {}
    return gemmsmith.plan(Spec((512, 640), dtype), (weight, weight), epilogue=gated, **scales)


def grouped(
    table: str = "offsets",
    count: int = 8,
    dtype: str = "bf16",
    layout: str = "n",
    along: str = "m",
    is_pair: bool = False,
    **options: Any,
) -> Plan:
    m, n, k = 512, 384, 640
    b: Any = Spec((count, k, n), dtype, (n * k, *((n, 1) if layout == "n" else (1, k))))
    a = Spec((count, m, k) if table == "counts" else (m, k), dtype)
    if along == "k":
        a, b = Spec((m, k), dtype, (1, m)), Spec((k, n), dtype)
    arrays = {"gather", "scatter"} & {*options}
    grouping = gemmsmith.Grouping(table, along, gathers="gather" in arrays, scatters="scatter" in arrays)
    if "gather" in arrays:
        a = Spec((800, k), dtype)
    return gemmsmith.plan(a, (b, b) if is_pair else b, grouping=grouping, **{table: Spec((count,), "int32")}, **options)


def packed(dtype: str, **options: Any) -> Plan:
    a, b = Spec((512, 640), dtype, (643, 1)), Spec((640, 384), dtype, (1, 641))
    return gemmsmith.plan(a, b, **options)


def whole_rows(epilogue: Any, **operands: Any) -> Plan:
    return gemmsmith.plan(Spec((512, 640), "bf16"), Spec((640, 128), "bf16"), epilogue=epilogue, **operands)


def reduced(acc: Any) -> Any:
    return {"out": acc, "all": acc.sum(), "columns": acc.mean(-2, keepdim=True)}


def logsumexp(acc: Any, bias: Any) -> Any:
    return {"out": acc + bias, "lse": (acc + bias).logsumexp(-1)}


def sums(acc: Any) -> Any:
    return {"out": acc, "columns": acc.sum(0), "all": acc.mean()}


def of_groups(acc: Any, bias: Any) -> Any:
    return {"out": acc + bias, "totals": acc.sum(-2), "norms": acc.square().sum(-1)}


def int4_weights() -> Plan:
    a, b = np.empty((512, 640), ml_dtypes.bfloat16), np.empty((384, 320), np.uint8).T
    return gemmsmith.plan(a, b, scales=Spec((10, 384), "fp32"), config=Config(INT4_WEIGHTS.name, (64, 128, 64), (1, 1)))


SERIAL_CONFIG = Config(SERIAL.name, (128, 128, 64), (1, 2), stages=2)
INDICES = Spec((512,), "int32")
VECTOR, COLUMN, MATRIX = Spec((384,), "bf16"), Spec((512, 1), "fp32"), Spec((512, 384), "bf16")
FAST: dict[str, Any] = {"accumulate": "fast"}
PLANS = {
    "chosen": lambda: plan(),
    "tn": lambda: plan("tn", config=Config("pingpong", (128, 128, 64), (1, 2), 4)),
    "swapped": lambda: plan(config=Config("cooperative", (128, 64, 64), (2, 1), 4, swap_ab=True)),
    "split": lambda: plan("nn", config=Config("cooperative", (128, 128, 64), (1, 1), 4, splits=3)),
    "stream-K": lambda: plan(config=Config("cooperative", (128, 128, 64), (2, 1), 4, splits=0)),
    "cluster splits": lambda: plan(config=Config("cooperative", (128, 64, 64), (1, 1), 4, cluster_splits=2)),
    "batch": lambda: plan("nn", "fp16", (3,)),
    "epilogue": lambda: plan(epilogue=scaled, bias=VECTOR, c=MATRIX, alpha=0.5),
    "column": lambda: plan("tt", epilogue=two, scale=COLUMN),
    "column-major": lambda: plan(out=Spec((512, 384), "bf16", (1, 512))),
    "scales": lambda: plan(dtype="fp8_e4m3", scale_a=Spec((512, 1), "fp32"), scale_b=Spec((), "fp32"), **FAST),
    "gated": lambda: plan(epilogue=gated),
    "fp8": lambda: plan(dtype="fp8_e4m3", **FAST),
    "tma": lambda: plan(config=Config("tma", (128, 128, 64), (1, 1), 4)),
    "tf32": lambda: plan("nn", "fp32", precision="tf32"),
    "block scales": lambda: plan(dtype="fp8_e4m3", **block_scales()),
    "block scales along K": lambda: plan("nt", "fp8_e4m3", (3,), **block_scales((3,), "n")),
    "two weights": lambda: two_weights(),
    "two weights with scales": lambda: two_weights("fp8_e4m3"),
    "row sums": lambda: plan(epilogue=lambda acc: acc.sum(-1)),
    "reductions": lambda: plan("nn", "fp16", (3,), epilogue=reduced),
    "logsumexp": lambda: plan(epilogue=logsumexp, bias=VECTOR),
    "added": lambda: plan(epilogue=sums, deterministic=False),
    "constant": lambda: plan(epilogue=lambda acc: {"out": acc, "most": (acc * 0 + 3).amax(0)}),
    "top-k": lambda: whole_rows(lambda acc: gemmsmith.top_k_softmax(acc, 4)),
    "quantize": lambda: plan(epilogue=lambda acc: gemmsmith.quantize(acc.relu(), "1x128")),
    "packed": lambda: packed("bf16"),
    "packed fp8": lambda: plan("tn", "fp8_e4m3", **FAST),
    "fp32": lambda: plan("nn", "fp32"),
    "3xtf32": lambda: plan("nt", "fp32", precision="3xtf32"),
    "one row": lambda: gemmsmith.plan(Spec((1, 640), "bf16"), Spec((640, 384), "bf16", (1, 640))),
    "grouped": lambda: grouped(),
    "grouped sizes": lambda: grouped("sizes", 40, layout="t"),
    "masked": lambda: grouped("counts"),
    "grouped along K": lambda: grouped(along="k"),
    "gather and scatter": lambda: grouped(
        epilogue=lambda acc, s: acc * s, s=COLUMN, out=Spec((700, 384), "bf16"), gather=INDICES, scatter=INDICES
    ),
    "grouped scales": lambda: grouped(
        dtype="fp8_e4m3",
        layout="t",
        scale_a=Spec((512, 5), "fp32", (8, 1)),
        scale_b=Spec((8, 5, 3), "fp32", (15, 1, 5)),
    ),
    "reductions of groups": lambda: grouped(epilogue=of_groups, bias=Spec((8, 1, 384), "bf16")),
    "grouped weights": lambda: grouped(layout="t", is_pair=True, epilogue=gated),
    "own design": lambda: plan("nn", epilogue=lambda acc, bias: (acc + bias).relu(), bias=VECTOR, config=SERIAL_CONFIG),
}


OF_ROWS = {"tile": (128, 128, 64), "cluster": (1, 1)}
WITH_ARRAYS: dict[str, Callable[[], Plan]] = {
    "own gather": lambda: plan("nn", rows=Spec((300,), "int32"), config=Config(GATHER.name, **OF_ROWS)),
    "own groups": lambda: gemmsmith.plan(
        Spec((300, 640), "bf16"),
        Spec((4, 640, 136), "bf16"),
        ends=Spec((4,), "int32"),
        config=Config(GROUPED.name, **OF_ROWS),
    ),
    "own int4": int4_weights,
}
"""Of own designs that read arrays."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("headers")


@lru_cache
def exported(name: str, folder: Path) -> tuple[Signature, dict[str, Any], Path]:
    """A plan's signature, the description of its header, and the program that launches what it reads."""
    made, prefix = (PLANS | WITH_ARRAYS)[name](), "x_" + name.replace(" ", "_").replace("-", "_")
    return Signature.of(made._planned), *program_of(made.export(folder, prefix))


def program_of(header: Path) -> tuple[dict[str, Any], Path]:
    """The description of a header, and a program that launches what it reads."""
    about = json.loads(header.with_suffix(".json").read_text())
    source, program = header.with_suffix(".c"), header.with_suffix("")
    source.write_text(driving(header.stem, about))
    compile_with("gcc", "-std=c99", *STRICT, source, "-o", program)
    return about, program


def compile_with(compiler: str, *arguments: Any) -> None:
    subprocess.run([compiler, f"-I{STAND_IN}", *map(str, arguments)], check=True)


def driving(name: str, about: dict[str, Any]) -> str:
    """A program that launches with each set of arguments that it reads, and prints the status and the launches."""
    addresses = {name for x in about["arrays"] for name in (x["name"], x["second"])}
    reads = [
        f"x.{v} = {'(void *)(intptr_t)' * (v in addresses)}next();" for v in (y["name"] for y in about["variables"])
    ]
    reads += [f"x.{number} = (float)next() / 8;" for number in about["numbers"]]
    lines = "\n".join([*(f'    kinds_of_function[{i}] = "{x}";' for i, x in enumerate(kinds_of(about)))])
    return f"""
#include "{name}.h"
#include "driver.h"
static int64_t next(void) {{
    long long x;
    if (scanf("%lld", &x) != 1) exit(0);
    return x;
}}
int main(void) {{
    {name}_driver driver;
    {name}_kernels kernels;
    {name}_args x;
{lines}
    if (!{name}_find_driver(&driver, find, NULL) || {name}_load(&kernels, &driver)) return 1;
    for (;;) {{
        memset(&x, 0, sizeof x);
        {" ".join(reads)}
        x.workspace = (void *)(intptr_t)(1LL << 58);
        x.flags = (void *)(intptr_t)(1LL << 59);
        x.workspace_bytes = {name}_workspace_bytes(&x);
        x.flag_bytes = {name}_flag_bytes(&x);
        printf("%lld %lld", (long long)x.workspace_bytes, (long long)x.flag_bytes);
        printf(" # %d\\n", {name}_launch(&kernels, &x, NULL));
    }}
}}
"""


def kinds_of(about: dict[str, Any]) -> list[str]:
    """The sizes of each kernel's parameters, for the stand-in."""
    sizes = {"i32": "4", "u32": "4", "f32": "4", "tensor_map": "t", "cluster_permutation": "o"}
    return ["".join(sizes.get(kind, "8") for kind in x["parameters"].values()) for x in about["kernels"]]


def run(program: Path, problems: list[list[int]]) -> list[tuple[int, list[int], list[list[int]]]]:
    """Of each problem the status, the bytes of the workspace and of the flags, and the launches."""
    text = "\n".join(" ".join(map(str, x)) for x in problems)
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run([program], input=text, capture_output=True, text=True, check=True, env=environment)
    return list(map(_parsed, done.stdout.splitlines()))


def _parsed(line: str) -> tuple[int, list[int], list[list[int]]]:
    start, status = line.split(" # ")
    needed, *launches = ([int(x) for x in part.split()] for part in start.split("|"))
    return int(status), needed, launches


def expected(signature: Signature, launches: Launches, values: dict[str, int], numbers: dict[str, float]) -> Any:
    """What the stand-in prints of Python's launches."""
    addresses = {"workspace": 1 << 58, "flags": 1 << 59, **values, **signature.addresses(values), **numbers}
    if launches.swapped:
        addresses["a"], addresses["b"] = addresses["b"], addresses["a"]
    result = []
    for i, launch in enumerate(launches.all):
        kernel, arguments = launch.kernel, launch.resolve(addresses)
        resident = 66 if kernel.cluster[0] > 1 else 132
        clusters = min(launch.work_clusters, resident) if kernel.persistent else launch.work_clusters
        row = [kernel.name, clusters * kernel.cluster[0], kernel.threads, kernel.shared_bytes, int(i > 0)]
        for p, kind in zip(kernel.parameters, kernel.parameter_kinds, strict=True):
            if kind == "cluster_permutation":
                row += stand_ins_order(kernel.cluster[0], clusters)
            else:
                row += _numbers(kind, arguments[p.name or ""])
        result.append(row)
    return [launches.workspace_bytes, launches.flag_bytes], result


def stand_ins_order(size: int, clusters: int) -> list[int]:
    """The places of clusters in the order of the stand-in's chip: they go round-robin over eleven GPCs."""
    order = list(range(MAX_CLUSTERS))
    if clusters <= 132 // size:
        for place, cluster in enumerate(sorted(range(clusters), key=lambda x: x % 11)):
            order[cluster] = place
    return order


def _numbers(kind: str, x: Any) -> Iterator[int]:
    if isinstance(x, TensorMap):
        codes = {"bf16": 9, "fp16": 6, "fp32": 7, "tf32": 7, "int32": 4}
        extents, strides, box = x.encoded()
        yield from (x.address, codes.get(f"{x.dtype}", 0) * 256 + {0: 0, 32: 1, 64: 2, 128: 3}[x.swizzle])
        yield from ([extent << 32 | y for extent, y in zip(extents, box, strict=True)] + [0] * 5)[:5]
        yield from (list(strides) + [0] * 9)[:9]
    elif kind == "f32":
        yield struct.unpack("<I", struct.pack("<f", x))[0]
    else:
        yield x % (1 << 32 if kind in ("i32", "u32") else 1 << 64)


def arguments_of(
    signature: Signature, values: dict[str, int], dice: random.Random
) -> tuple[list[int], dict[str, float]]:
    numbers = {name: dice.randrange(-80, 80) for name in signature.numbers}
    return [*values.values(), *numbers.values()], {name: x / 8 for name, x in numbers.items()}


def compared(name: str, folder: Path, drawn: list[dict[str, int]]) -> Counter[tuple[bool, int]]:
    """How many problems Python can launch or not, with which status of the header, whose launches are Python's."""
    signature, about, program = exported(name, folder)
    dice, counts = random.Random(), Counter[tuple[bool, int]]()
    given = [arguments_of(signature, x, dice) for x in drawn]
    for values, (_, numbers), (status, needed, launches) in zip(
        drawn, given, run(program, [x for x, _ in given]), strict=True
    ):
        is_empty = 0 in [values[x] for x in signature.shape] and not signature.has_reductions
        python = None if is_empty else pythons(signature, values)
        if status or python is None:
            assert launches == [], values
        else:
            named = [[about["kernels"][x[0]]["name"], *x[1:]] for x in launches]
            assert (needed, named) == expected(signature, python, values, numbers), values
        counts[python is not None, status] += 1
    return counts


def pythons(signature: Signature, values: dict[str, int]) -> Launches | None:
    """Python's launches of these arrays, bound anew; with a single row, column or matrix, as the header has strides."""
    if signature.has_single(values):
        traced = signature.launches(values)
        return None if isinstance(traced, str) else traced
    try:
        return signature.rebound(values)
    except gemmsmith.GemmsmithError:
        return None


@pytest.mark.parametrize("name", [*PLANS, "own gather", "own groups"])
def test_launches_are_pythons(name: str, folder: Path) -> None:
    """For random problems: those that the kernel takes are not refused."""
    signature, _, _ = exported(name, folder)
    dice = random.Random()
    counts = compared(name, folder, [signature.draw(dice) for _ in range(200)])
    assert counts[True, 0] > 50
    assert counts[True, 2] + counts[True, 3] <= 2  # paths that the search has not found


def test_launches_of_int4_weights_are_pythons(folder: Path) -> None:
    """Of a design that refuses another number of scales than K has groups."""
    signature, _, _ = exported("own int4", folder)
    dice = random.Random()
    some = [signature.draw(dice) for _ in range(200)]
    counts = compared("own int4", folder, [x | {"groups": -(-x["k"] // 64)} for x in some])
    assert counts[True, 0] > 50
    assert counts[True, 2] + counts[True, 3] <= 2
    assert compared("own int4", folder, [x | {"groups": x["k"] // 64 + 2} for x in some])[False, 2] == 200


@pytest.mark.parametrize(
    "name", ["chosen", "split", "batch", "epilogue", "block scales", "two weights", "row sums", "grouped"]
)
def test_wrong_arguments_are_refused(name: str, folder: Path) -> None:
    """Any numbers: what is launched is what Python launches with the plan's kernel alone."""
    signature, _, _ = exported(name, folder)
    dice, drawn = random.Random(), []
    for _ in range(500):
        values = signature.draw(dice)
        for x in dice.sample(signature.variables, dice.choice((1, 1, 2, 3))):
            x_or_other = (0, 1, -1, values[x.name] + 1, values[x.name] * 3 + 2, x.most, x.most + 1)
            values[x.name] = dice.choice((*x_or_other, 2**63 - 1, -(2**63), dice.randrange(2**62)))
        drawn.append(values)
    counts = compared(name, folder, drawn)
    assert {0, 1, 2, 3} <= {status for _, status in counts}


@pytest.mark.parametrize(
    ("name", "changes", "status"),
    [
        ("chosen", {"k": 0, "a": 0, "b": 0, "a_stride": 0}, 0),
        ("chosen", {"m": 1, "n": 8, "a_stride": 0, "out_stride": 0}, 0),
        ("chosen", {"out_stride": 0}, 3),
        ("chosen", {"a": 0}, 1),
        ("epilogue", {"in_bias": 0}, 1),
        ("epilogue", {"in_bias": (1 << 40) + 1}, 2),
        ("block scales", {"k": 0, "a": 0, "b": 0, "in_scale of a": 0, "in_scale of b": 0}, 0),
        ("two weights", {"k": 0, "a": 0, "b": 0, "b2": 0}, 0),
        ("two weights", {"b2": 2 << 40}, 2),  # as b
        ("row sums", {"n": 0, "b": 0}, 0),
        ("row sums", {"m": 0, "a": 0, "out": 0}, 0),
        ("row sums", {"k": 0}, 0),
        ("constant", {"m": 0}, 2),  # the maximum of nothing
        ("grouped", {"groups": 0}, 1),
        ("grouped", {"groups": 33}, 1),
        ("grouped", {"groups": 1, "m": 1}, 0),
        ("grouped", {"m": 0, "a": 0}, 0),
        ("top-k", {"n": 257}, 1),
    ],
)
def test_edges(name: str, changes: dict[str, int], status: int, folder: Path) -> None:
    """Sizes of 0 and 1, null pointers of empty arrays, strides of single rows."""
    signature, _, _ = exported(name, folder)
    counts = compared(name, folder, [signature.own_values() | changes])
    assert [x for _, x in counts] == [status]


@pytest.mark.parametrize("name", ["epilogue", "column", "added", "two weights with scales", "gather and scatter"])
def test_overlaps_are_refused(name: str, folder: Path) -> None:
    """Whatever Python refuses as an overlap, of arrays at random distances; and not the same array, where it may be."""
    signature, _, program = exported(name, folder)
    on_gpu = [x._replace(info=x.info._replace(device="cuda")) for x in signature.arrays]  # Specs have no addresses
    there = replace(signature, arrays=on_gpu)
    dice, drawn = random.Random(), []
    pointers = [x.name for x in signature.variables if x.is_address]
    results = [x.name for x in signature.arrays if x.info.writable]
    for _ in range(300):
        values = signature.draw(dice)
        result, other = dice.choice(results), dice.choice(pointers)
        distance = dice.choice((0, 0, 16, -16, 4096, -4096, dice.randrange(-(1 << 20), 1 << 20) * 16))
        values[other] = values[result] + distance
        if other != result and values[other] > 0 and not signature.has_single(values):
            drawn.append(values)
    statuses = Counter[tuple[bool, int]]()
    for values, (status, *_) in zip(
        drawn, run(program, [arguments_of(signature, x, dice)[0] for x in drawn]), strict=True
    ):
        refusal = ""
        try:
            there.rebound(values)
        except ArgumentError as error:
            refusal = f"{error}"
        assert status or not refusal, (refusal, values)
        statuses["overlaps" in refusal, status] += 1
    assert statuses[True, 3]
    assert statuses[False, 0]


def test_two_headers_in_one_program(folder: Path) -> None:
    """As C++, too; and by other compilers where they are."""
    names = []
    for name in ("chosen", "split"):
        _, _, program = exported(name, folder)
        names.append(program.name)
    includes = "".join(f'#include "{x}.h"\n' for x in names)
    calls = " + ".join(f"{x}_supports(&{x})" for x in names)
    declared = " ".join(f"{x}_args {x}; memset(&{x}, 0, sizeof {x});" for x in names)
    source = folder / "two.c"
    source.write_text(f"{includes}int main(void) {{ {declared} return {calls} != 0; }}\n")
    for compiler, options in (("gcc", ["-std=c99"]), ("clang", ["-std=c99"]), ("g++", ["-std=c++17", "-x", "c++"]),
                              ("clang", ["-std=c++17", "-x", "c++"])):  # fmt: skip
        if COMPILERS[compiler]:
            compile_with(compiler, *options, *STRICT, source, "-o", folder / "two")
            subprocess.run([folder / "two"], check=True)


THREADS = """
#include "{name}.h"
#include "driver.h"
#include <pthread.h>
static {name}_kernels kernels;
static void *work(void *x) {{
    int i;
    for (i = 0; i < 200; ++i)
        if ({name}_launch(&kernels, (const {name}_args *)x, NULL)) return x;
    return NULL;
}}
int main(void) {{
    {name}_driver driver;
    {name}_args x;
    pthread_t threads[4];
    void *failed = NULL, *result;
    int i;
    memset(&x, 0, sizeof x);
    x.m = x.n = x.k = 256, x.a_stride = x.b_stride = x.out_stride = 256;
    x.a = (void *)(1 << 20), x.b = (void *)(1 << 24), x.out = (void *)(1 << 28);
    x.workspace = (void *)(1 << 30), x.workspace_bytes = 1 << 26, x.flags = (void *)(3LL << 29), x.flag_bytes = 1 << 20;
    if (!{name}_find_driver(&driver, find, NULL) || {name}_load(&kernels, &driver)) return 1;
    for (i = 0; i < 4; ++i) pthread_create(&threads[i], NULL, work, &x);
    for (i = 0; i < 4; ++i) pthread_join(threads[i], &result), failed = result ? result : failed;
    return failed != NULL;
}}
"""


def test_threads_share_the_kernels(folder: Path) -> None:
    """A launch writes nothing but memory of its own, by gcc's thread sanitizer."""
    _, _, program = exported("split", folder)
    source = folder / "threads.c"
    source.write_text(THREADS.format(name=program.name))
    compile_with("gcc", "-std=gnu99", "-fsanitize=thread", source, "-o", folder / "threads", "-pthread")
    done = subprocess.run([folder / "threads"], capture_output=True, text=True)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("gcc's thread sanitizer does not run on this kernel")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count(" | ") == 4 * 200


def test_cubins_may_be_linked_from_their_files(folder: Path) -> None:
    signature, about, program = exported("reductions", folder)
    text, source = program.with_suffix(".h").read_text(), program.with_suffix(".c")
    files = dict(re.findall(r"extern const unsigned char (\w+)\[\]; /\* (\S+) \*/", text))
    arrays = dict(re.findall(r"static const unsigned char (\w+)\[\] = \{([\d,\s]+)\};", text))
    assert len(files) == len(about["kernels"]) > 1
    assert {x: bytes(map(int, y.split(","))) for x, y in arrays.items()} == {
        x: (folder / y).read_bytes() for x, y in files.items()
    }
    lines = (f'.globl {x}\n{x}: .incbin "{folder / y}"\n' for x, y in files.items())
    assembly = folder / "cubins.s"
    assembly.write_text(f'.section .rodata\n{"".join(lines)}.section .note.GNU-stack,"",@progbits\n')
    linked = folder / "linked"
    compile_with("gcc", "-std=c99", *STRICT, f"-D{program.name}_EXTERN_CUBINS", source, assembly, "-o", linked)
    dice = random.Random()
    problems = [arguments_of(signature, signature.draw(dice), dice)[0] for _ in range(20)]
    assert run(linked, problems) == run(program, problems)


def test_what_cannot_be_exported() -> None:
    """One error, which says what."""
    numbers = iter(range(1, 100))
    with pytest.warns(gemmsmith.RetraceWarning):
        retraced = plan(epilogue=lambda acc: acc * next(numbers))
    for refused, error in (
        (
            plan(epilogue=lambda acc: acc * (1 / acc.shape[-1])),
            "depends on its sizes, as with .* epilogue: .* pass sizes that",
        ),
        (plan(epilogue=named, x=MATRIX, x_stride=VECTOR), "two are equal; rename the operand"),
        (retraced, "got one with an epilogue that is traced at each call"),
        (gemmsmith.plan(Spec((64, 64), "bf16"), Spec((64, 1), "bf16")), "b: got the shape .* does not tell rows from"),
        (plan(batch=(1,)), "a, b: got batch = 1; export a plan for 2 or more, which serves any"),
        (gemmsmith.plan(Spec((0, 64), "bf16"), Spec((64, 64), "bf16")), "a, b: got m = 0; export a plan for 1 or more"),
    ):
        with pytest.raises(ArgumentError, match=error):
            refused.export("unused")
    with pytest.raises(ArgumentError, match="name: got '2x'; use a C identifier"):
        plan().export("unused", "2x")
