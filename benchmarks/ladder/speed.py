"""Every kernel of the ladder against cuBLAS at equal precision, and against a lower bound on its time.

The ladder's kernels, cuBLAS, a loop of each kernel's own instruction in registers
(peak_throughput.py) and a copy of as many bytes run in CUDA graphs, in blocks in a random order in each
round, like those of dense.py. The lower bound is the larger of the copy's time and the loop's time for as many
multiplications. cuBLAS is torch.mm; for fp32 without TF32, and for int8 the fastest of torch._int_mm and of the
algorithms that cuBLASLt's heuristic suggests. Every result is checked against float64. `gemmsmith ladder` shows the
rows next to the bounds from the simulator's counters.

    python -m benchmarks.ladder.speed --json benchmarks/results/ladder-h200.json [--resume --part 1/2]
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchmarks import portions
from benchmarks.ladder.peak_throughput import MICROBENCHMARKS, THREADS, LoopLaunch, microbenchmark
from benchmarks.suite import Shape
from benchmarks.timing import FAR, L2_BYTES, captured, fastest, options, save, shuffled
from gemmsmith.backends.cuda.run import BoundLaunches, pointer_values
from gemmsmith.cli import cublaslt
from gemmsmith.core.chip import HOPPER
from gemmsmith.core.dtypes import FP32
from gemmsmith.ladder.rungs import RUNG_CASES, RUNG_NAMES, RungCase
from gemmsmith.lang.launch import Launch, Launches

SHAPES: list[Shape] = [(4096, 4096, 4096), (8192, 8192, 8192)]
TORCH = {"bf16": torch.bfloat16, "fp32": torch.float32, "tf32": torch.float32, "int8": torch.int8, "int32": torch.int32}
CUBLAS_LAYOUT = {"fp32": "nn", "tf32": "nt", "bf16": "nt", "int8": "nt"}
TF32_ROUNDOFF = 2.0**-10
"""Relative error of an operand whose lower bits are truncated."""
BLOCK_SECONDS = 1.05
ROUNDS = 20_000
"""Iterations of a loop, which take a few milliseconds."""
CTAS = 132 * 2
"""CTAs of a loop."""
Set = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def loop_of(step: RungCase) -> str:
    """Return the loop of a kernel's own instruction."""
    if step.dtype == FP32:
        return "fma"
    if step.name == "dp4a":
        return "dp4a"
    return f"{'wgmma' if step.name in ('tma', 'pingpong', 'cooperative') else 'mma'}_{step.dtype}"


def loop_flops(name: str) -> int:
    """Return the FLOPs of a launch of ROUNDS and CTAS."""
    return 2 * ROUNDS * CTAS * THREADS * MICROBENCHMARKS[name][1]


def title(step: RungCase) -> str:
    """Return the title of a kernel's times."""
    return f"{step.name} {step.dtype}"


def row(step: RungCase, shape: Shape, us: Mapping[str, float]) -> dict[str, Any]:
    """Return a row, from the microseconds per call of everything."""
    flops, own, name, dtype = 2 * math.prod(shape), us[title(step)], loop_of(step), step.dtype.name
    floor = max(us[f"copy {nbytes(step, shape)}"], us[f"loop {name}"] * flops / loop_flops(name))
    return {
        "rung": step.name, **dict(zip("mnk", shape, strict=True)), "dtype": dtype, "layout": step.layout, "us": own,
        "tflops": flops / own / 1e6, "of_cublas": us[f"cuBLAS {dtype}"] / own, "of_roofline": floor / own,
        "cublas_us": us[f"cuBLAS {dtype}"], "floor_us": floor, "loop": name,
        "loop_tflops": loop_flops(name) / us[f"loop {name}"] / 1e6,
    }  # fmt: skip


def nbytes(step: RungCase, shape: Shape) -> int:
    """Return the bytes of A, B and D."""
    m, n, k = shape
    return (m * k + k * n) * step.dtype.bytes + m * n * step.out_dtype.bytes


def sets_of(shape: Shape, dtype: str, output: str, layout: str) -> list[Set]:
    """Return sets of random operands and an empty D that fill FAR times the L2."""
    m, n, k = shape

    def matrix(rows: int, columns: int, order: str) -> torch.Tensor:
        size = (rows, columns) if order == "n" else (columns, rows)
        x = torch.randint(-128, 128, size, device="cuda") if dtype == "int8" else torch.randn(size, device="cuda")
        return x.to(TORCH[dtype]) if order == "n" else x.to(TORCH[dtype]).T

    size = (m * k + k * n) * TORCH[dtype].itemsize + m * n * TORCH[output].itemsize
    return [
        (matrix(m, k, layout[0]), matrix(k, n, layout[1]), torch.empty((m, n), device="cuda", dtype=TORCH[output]))
        for _ in range(max(3, FAR * L2_BYTES // size))
    ]


def is_right(
    call: Callable[..., Any], a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, dtype: str = ""
) -> bool:  # fmt: skip
    """Return whether call(a, b, d) computes a @ b.

    Integers must be exact, others within the error of fp32 sums rounded to D's dtype, and within TF32's error if
    `dtype` is "tf32".
    """
    whole = not d.dtype.is_floating_point
    d.fill_(-(2**31) if whole else float("nan"))
    call(a, b, d)
    exact = a.double() @ b.double()
    if whole:
        return bool((d.double() == exact).all())
    of_product = (a.shape[1] + 2) * FP32.roundoff * 2 + (dtype == "tf32") * 2 * TF32_ROUNDOFF
    error = (a.double().abs() @ b.double().abs()) * of_product
    return bool(((d.double() - exact).abs() <= error + exact.abs() * torch.finfo(d.dtype).eps).all())


def prepared(step: RungCase, a: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> Callable[[], None]:
    """Return a call that launches a kernel of the ladder on these arrays, which it keeps alive."""
    arrays = a, b, d
    launches, arguments = step.launches(*arrays)
    call = BoundLaunches(launches, arguments, a, {})
    return lambda: call.launch(pointer_values(arguments), arrays[0], None)


def run(step: RungCase) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """Return a kernel of the ladder as a function of arrays."""
    return lambda a, b, d: prepared(step, a, b, d)()


def looped(name: str) -> Callable[[], None]:
    """Return a loop's launch."""
    out = torch.empty(CTAS * THREADS, dtype=torch.int32, device="cuda")
    call = BoundLaunches(
        Launches(None, False, (Launch.from_kernel(microbenchmark(name, HOPPER), LoopLaunch(ROUNDS, CTAS)),)),
        {},
        out,
        {},
    )
    return lambda: call.launch({"out": out.data_ptr()}, out, None)


def cublas(dtype: str, sets: list[Set]) -> Callable[..., Any]:
    """Return cuBLAS's best call for these sets."""

    def mm(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> None:
        torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
        torch.mm(a, b, out=d)

    if dtype != "int8":
        return mm
    graphs: dict[Any, torch.cuda.CUDAGraph] = {}
    for call in (lambda a, b, d: torch._int_mm(a, b, out=d), *cublaslt.algorithms(*sets[0])):
        try:
            if is_right(call, *sets[0]):
                graphs[call] = captured(call, sets)
        except cublaslt.CublasLtError:
            continue
    fastest_call: Callable[..., Any] = fastest(graphs, len(sets))
    return fastest_call


def halves(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a buffer to read and a buffer to write, of `size` bytes together."""
    first, second = (torch.empty(size // 2, dtype=torch.uint8, device="cuda") for _ in range(2))
    return first, second


def measure(steps: Sequence[RungCase], shape: Shape, rounds: int) -> list[dict[str, Any]]:
    """Return the rows of a shape."""
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    calls: dict[str, int] = {}
    buffers: list[Any] = []  # what graphs read and write

    def add(name: str, call: Callable[..., Any], sets: list[Any]) -> None:
        if name not in graphs:
            graphs[name], calls[name] = captured(call, sets), len(sets)
            buffers.append(sets)

    for step in steps:
        dtype, output = step.dtype.name, step.out_dtype.name
        sets = sets_of(shape, dtype, output, step.layout)
        if not is_right(run(step), *sets[0], dtype):
            raise SystemExit(f"{title(step)}: off the float64 product")
        add(title(step), lambda start: start(), [(prepared(step, *x),) for x in sets])
        add(f"loop {loop_of(step)}", lambda start: start(), [(looped(loop_of(step)),)])
        size = nbytes(step, shape)
        if f"copy {size}" not in graphs:
            add(f"copy {size}", lambda x, y: y.copy_(x), [halves(size) for _ in sets])
        if f"cuBLAS {dtype}" not in graphs:
            own = sets_of(shape, dtype, output if dtype == "int8" else dtype, CUBLAS_LAYOUT[dtype])
            add(f"cuBLAS {dtype}", cublas(dtype, own), own)
    times, _ = shuffled(graphs, 1, BLOCK_SECONDS, rounds)
    us = {name: statistics.median(each) / calls[name] for name, each in times.items()}
    return [row(step, shape, us) for step in steps]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="blocks of everything, in a random order each")
    parser.add_argument("--shape", action="append", help="MxNxK, multiples of 16; may be repeated")
    parser.add_argument("--rung", action="append", choices=RUNG_NAMES, help="these alone")
    portions.add_options(parser)
    arguments = parser.parse_args()
    shapes = [tuple(map(int, x.split("x"))) for x in arguments.shape] if arguments.shape else SHAPES
    steps = [x for x in RUNG_CASES if not arguments.rung or x.name in arguments.rung]
    rows = portions.load_rows(arguments)
    left = portions.missing(shapes, rows, lambda r: (r["m"], r["n"], r["k"]), arguments.part)
    for shape in portions.in_time(left, arguments.seconds):
        fresh = measure(steps, shape, arguments.rounds)
        for r in fresh:
            print(f"{r['rung']:<16}{r['dtype']:<6}{r['m']:>6} {r['n']:>6} {r['k']:>6}  {r['us']:10.1f} us "
                  f"{r['tflops']:7.1f} TFLOP/s  {r['of_cublas']:6.3f} of cuBLAS  {r['of_roofline']:6.3f} of roofline",
                  flush=True)  # fmt: skip
        rows += fresh
        save(arguments.json, rows)


if __name__ == "__main__":
    main()
