"""Every supported kind of GEMM against torch and the fastest of cuBLASLt's algorithms.

| kind | ours | torch |
| --- | --- | --- |
| bf16, fp16, bmm | the dtype; bmm: batched bf16 | torch.mm, torch.bmm |
| fp8_fast | e4m3 with one scale per tensor, accumulate="fast" | torch._scaled_mm, use_fast_accum=True |
| fp8 | e4m3 with one scale per tensor, promoted | torch._scaled_mm, use_fast_accum=False |
| fp8_rows | scales of rows and columns, accumulate="fast" | torch._scaled_mm, use_fast_accum=True |
| fp8_blocks | scales of 1x128 and 128x128 blocks | torch._scaled_mm, use_fast_accum=False |
| int8 | to int32 | torch._int_mm |
| tf32, 3xtf32, fp32 | fp32 operands with that precision, or none | torch.mm in TF32; in fp32; in fp32 |

A layout's first letter is A's, row-major (n) or column-major (t), the second is B's. Timed as in contest.py. Jobs of
all kinds are mixed, so that a run that is cut short covers all of them.

    python -m benchmarks.speed.kinds --json benchmarks/results/kinds-h100.json.xz --seconds 500 [--resume] [--kind fp32]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import torch

import gemmsmith
from benchmarks import contest
from benchmarks.speed import fp8
from benchmarks.suite import block_scaled
from gemmsmith.cli import cublaslt

Shapes = Sequence[tuple[int, ...]]
"""(M, N, K), or with a batch first."""
ALL_LAYOUTS = ("nt", "nn", "tn", "tt")
NT = ("nt",)
DENSE: Shapes = [(4096, 4096, 4096), (4096, 14336, 4096), (512, 4096, 14336), (8192, 2560, 10240), (2048, 11008, 5120)]
BATCHES: list[tuple[str, tuple[int, ...]]] = [
    ("nt", (16, 4096, 4096, 128)), ("nt", (32, 2048, 2048, 128)), ("nn", (32, 2048, 128, 2048)),
    ("nt", (512, 128, 128, 512)), ("nn", (64, 512, 512, 512)), ("nt", (8, 2048, 2048, 2048)),
    ("nn", (16, 4096, 128, 4096)), ("nt", (256, 256, 256, 64)), ("nn", (128, 1024, 64, 1024)),
    ("tn", (4, 4096, 4096, 1024)),
]  # fmt: skip
EIGHT_BITS: Shapes = [
    (64, 4096, 4096), (128, 28672, 4096), (512, 4096, 14336), (1024, 8192, 8192), (2048, 10240, 8192),
    (4096, 4096, 4096), (4096, 28672, 4096), (8192, 8192, 8192), (8192, 4096, 14336), (3000, 5120, 5120),
]  # fmt: skip
SINGLE: Shapes = [
    (256, 4096, 4096), (1000, 5120, 5120), (64, 11008, 4096), (128, 4096, 4096), (512, 4096, 4096),
    (1024, 1024, 8192), (2048, 2048, 2048), (2048, 5120, 1280), (3000, 3000, 3000), (4096, 4096, 4096),
]  # fmt: skip


class Job(NamedTuple):
    kind: str
    layout: str
    batch: int
    m: int
    n: int
    k: int

    @property
    def name(self) -> str:
        sizes = self[2 if self.batch > 1 else 3 :]
        return f"{'x'.join(map(str, sizes))} {self.layout}"


def job_of(row: contest.Row) -> Job:
    return Job(*(row[name] for name in Job._fields))


@dataclass(frozen=True)
class Kind:
    """A kind of GEMM.

    `dtype` and `out` are torch's dtypes of the operands and of D, `torch` is torch's call, `products` are layouts and
    shapes, `scales` is "tensor", "rows" or "blocks", `options` are those of `gemmsmith.plan`, `lt` those of
    `cublaslt.algorithms`, `eps` is that of a rounded result, and `lost` the error of sums relative to the sum of their
    terms' magnitudes.
    """

    dtype: torch.dtype
    out: torch.dtype
    torch: Callable[[Case], Any]
    products: list[tuple[str, tuple[int, ...]]]
    scales: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    lt: dict[str, Any] = field(default_factory=dict)
    eps: float = 0.0
    lost: float = 0.0


class Case:
    """Random operands of one GEMM, their scales for each of the contenders, and D, full of NaN."""

    def __init__(self, job: Job, device: str = "cuda") -> None:
        kind, (m, n, k) = KINDS[job.kind], job[3:]
        self.scales: dict[str, torch.Tensor] = {}
        self.of_torch: tuple[torch.Tensor, ...] = ()
        if kind.scales == "blocks":
            blocks = fp8.Case(m, n, k)
            self.a, self.b = blocks.a, blocks.b
            self.scales = {"scale_a": blocks.scale_a, "scale_b": blocks.scale_b}
            self.of_torch, self.of_lt = (blocks.packed_a, blocks.scale_b), (blocks.packed_a, blocks.padded_b)
        else:
            self.a = matrix(job.batch, m, k, kind.dtype, job.layout[0], device)
            self.b = matrix(job.batch, k, n, kind.dtype, job.layout[1], device)
            if kind.scales:
                shapes: tuple[Any, ...] = ((), ()) if kind.scales == "tensor" else ((m, 1), (1, n))
                self.of_torch = tuple(torch.rand(shape, device=device) + 0.5 for shape in shapes)
                self.scales = dict(zip(("scale_a", "scale_b"), self.of_torch, strict=True))
            self.of_lt = self.of_torch
        self.d = torch.empty((*self.a.shape[:-1], n), device=device, dtype=kind.out)
        self.poison()

    @property
    def bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (self.a, self.b, self.d))

    def poison(self) -> None:
        self.d.fill_(float("nan") if self.d.is_floating_point() else 1 << 30)

    def dequantized(self) -> list[torch.Tensor]:
        """Return A and B dequantized, in float64."""
        pairs = zip((self.a, self.b), self.scales.values(), strict=True) if self.scales else ()
        return [x.double() * spread(scale, x.shape) for x, scale in pairs] or [self.a.double(), self.b.double()]


def matrix(batch: int, rows: int, columns: int, dtype: torch.dtype, layout: str, device: str) -> torch.Tensor:
    """Return a random normal matrix, or uniform int8, row-major (n) or column-major (t)."""
    sizes = (rows, columns) if layout == "n" else (columns, rows)
    shape = (batch, *sizes) if batch > 1 else sizes
    if dtype == torch.int8:
        x = torch.randint(-128, 128, shape, device=device, dtype=dtype)
    elif dtype.itemsize == 1:
        x = torch.randn(shape, device=device, dtype=torch.bfloat16).to(dtype)
    else:
        x = torch.randn(shape, device=device, dtype=dtype)
    return x if layout == "n" else x.mT


def spread(scale: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return scales of blocks of 128, or of anything that broadcasts, expanded to a matrix of that shape."""
    for i, (given, size) in enumerate(zip(scale.shape, shape, strict=False)):
        if given not in (1, size):
            scale = scale.repeat_interleave(fp8.BLOCK, i).narrow(i, 0, size)
    return scale.double()


def check_of(case: Case, kind: Kind) -> Callable[[Case], str]:
    """Return a function that compares a case's D with float64 and then fills it with NaN.

    The sum of the magnitudes of a result's terms is approximated by K times the product of their means in the row and
    in the column; a sum of random terms is smaller by about sqrt(K). Fast accumulation truncates each partial sum,
    whose magnitude is about half the result's or that of a sum of random terms.
    """
    a, b = case.dequantized()
    product, k, eps, lost = a @ b, a.shape[-1], kind.eps, kind.lost
    if kind.options == FAST:
        truncated = k / FP8_K_PER_MMA * FP8_TRUNCATION
        eps, lost = eps + truncated / 2, truncated / k**0.5
    sizes = k * (a.abs_().mean(-1, keepdim=True) @ b.abs_().mean(-2, keepdim=True))
    allowed = sizes.mul_(lost + 2 * kind.eps / k**0.5).add_(product.abs(), alpha=eps)

    def check(case: Case) -> str:
        over = (case.d.double() - product).abs_().sub_(allowed)
        case.poison()
        return "" if bool((over <= 0).all()) else f"error over its bound by {over.nan_to_num(torch.inf).max():.3g}"

    return check


# -- torch's calls ---------------------------------------------------------------------------------------------------
def mm(c: Case) -> None:
    torch.mm(c.a, c.b, out=c.d)


def bmm(c: Case) -> None:
    torch.bmm(c.a, c.b, out=c.d)


def int_mm(c: Case) -> None:
    torch._int_mm(c.a, c.b, out=c.d)


def mm_tf32(c: Case) -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.mm(c.a, c.b, out=c.d)


def mm_fp32(c: Case) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.mm(c.a, c.b, out=c.d)


def scaled_mm(c: Case) -> None:
    torch._scaled_mm(c.a, c.b, *c.of_torch, out_dtype=c.d.dtype, out=c.d)


def scaled_mm_fast(c: Case) -> None:
    torch._scaled_mm(c.a, c.b, *c.of_torch, out_dtype=c.d.dtype, use_fast_accum=True, out=c.d)


def pairs(layouts: Sequence[str], shapes: Shapes) -> list[tuple[str, tuple[int, ...]]]:
    return [(layout, tuple(shape)) for shape in shapes for layout in layouts]


BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
FAST = {"accumulate": "fast"}
OF_BF16 = {"eps": 2.0**-7}
FP8_K_PER_MMA = 32
"""K of an fp8 wgmma, after which its sum is truncated (PTX ISA)."""
FP8_TRUNCATION = 2.0**-13
"""Relative error of a sum of an fp8 wgmma and its accumulator: 13 bits are kept (hw/mma.py)."""
OF_FP8 = {"eps": 2.0**-7, "lost": 2 * FP8_TRUNCATION}
"""Tolerance of fp8 with promotion. With fast accumulation `check_of` computes `lost` from K."""
KINDS = {
    "bf16": Kind(BF16, BF16, mm, pairs(ALL_LAYOUTS, DENSE), **OF_BF16),
    "fp16": Kind(FP16, FP16, mm, pairs(ALL_LAYOUTS, DENSE), eps=2.0**-10),
    "bmm": Kind(BF16, BF16, bmm, BATCHES, **OF_BF16),
    "fp8_fast": Kind(E4M3, BF16, scaled_mm_fast, pairs(NT, EIGHT_BITS), "tensor", FAST,
                     {"modes": ("tensor", "tensor"), "fast": True}, **OF_FP8),
    "fp8": Kind(E4M3, BF16, scaled_mm, pairs(NT, EIGHT_BITS), "tensor", {}, {"modes": ("tensor", "tensor")}, **OF_FP8),
    "fp8_rows": Kind(E4M3, BF16, scaled_mm_fast, pairs(NT, EIGHT_BITS), "rows", FAST,
                     {"modes": ("rows", "rows"), "fast": True}, **OF_FP8),
    "fp8_blocks": Kind(E4M3, BF16, scaled_mm, pairs(NT, EIGHT_BITS), "blocks", {}, {"modes": ("1x128", "128x128")},
                       **OF_FP8),
    "int8": Kind(torch.int8, torch.int32, int_mm, pairs(NT, EIGHT_BITS)),
    "tf32": Kind(FP32, FP32, mm_tf32, pairs(ALL_LAYOUTS, DENSE), options={"precision": "tf32"}, lost=2.0**-9),
    "3xtf32": Kind(FP32, FP32, mm_fp32, pairs(NT, SINGLE[-5:]), options={"precision": "3xtf32"}, lt={"tf32": False},
                   lost=2.0**-16),
    "fp32": Kind(FP32, FP32, mm_fp32, pairs(NT, SINGLE), lt={"tf32": False}, lost=2.0**-18),
}  # fmt: skip


def jobs(names: Sequence[str] = (), shapes: Shapes = ()) -> list[Job]:
    """Return the jobs of these kinds (default all) in turn, of these shapes or of the kinds' own."""
    jobs_by_kind = []
    for name in names or KINDS:
        products = KINDS[name].products
        asked = pairs(list(dict.fromkeys(layout for layout, _ in products)), shapes) or products
        jobs_by_kind.append([Job(name, layout, *(1, *shape)[-4:]) for layout, shape in asked])
    return [job for job in chain.from_iterable(zip_longest(*jobs_by_kind)) if job]


def planned(job: Job, config: gemmsmith.Config | None = None) -> gemmsmith.Plan:
    """Return the plan for stand-ins of a Case's arrays."""
    kind, (m, n, k) = KINDS[job.kind], job[3:]
    scales: dict[str, gemmsmith.Spec] = {}
    if kind.scales == "blocks":
        scales = block_scaled((m, n, k))[1]
    elif kind.scales:
        shapes: tuple[Any, ...] = ((), ()) if kind.scales == "tensor" else ((m, 1), (1, n))
        scales = {name: gemmsmith.Spec(x, "fp32") for name, x in zip(("scale_a", "scale_b"), shapes, strict=True)}
    a, b = (stand_in(job.batch, *sizes, kind.dtype, layout)
            for sizes, layout in zip(((m, k), (k, n)), job.layout, strict=True))  # fmt: skip
    return gemmsmith.plan(a, b, **scales, out_dtype=NAMES[kind.out], config=config, **kind.options)


NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32", E4M3: "fp8_e4m3", torch.int8: "int8", torch.int32: "int32"}
"""gemmsmith's names of dtypes by torch's."""


def stand_in(batch: int, rows: int, columns: int, dtype: torch.dtype, layout: str) -> gemmsmith.Spec:
    """Return a Spec for a `matrix`."""
    strides = (columns, 1) if layout == "n" else (1, rows)
    if batch == 1:
        return gemmsmith.Spec((rows, columns), NAMES[dtype], strides)
    return gemmsmith.Spec((batch, rows, columns), NAMES[dtype], (rows * columns, *strides))


def measure(job: Job, pace: contest.Pace, device: str = "cuda") -> contest.Row:
    """Return the row of a GEMM."""
    kind, plan, first = KINDS[job.kind], planned(job), Case(job, device)
    sets, check = contest.sets_of(first, lambda: Case(job, device), first.bytes), check_of(first, kind)

    def algorithms() -> dict[Any, contest.Call]:
        jobs_by_kind = cublaslt.algorithms(first.a, first.b, first.d, scales=first.of_lt or None, **kind.lt)
        return {x: lambda c, x=x: x(c.a, c.b, c.d, *c.of_lt) for x in jobs_by_kind}

    def ours(c: Case) -> None:
        plan.run(c.a, c.b, c.d, **c.scales)

    row = contest.compared(ours, {"torch": kind.torch}, algorithms, sets, check, pace)
    flops = 2 * job.batch * job.m * job.n * job.k
    about = {"tflops": flops / row["us"] / 1e6, "config": str(plan.config), "origin": plan.origin}
    return {**job._asdict(), **row, **about}


def told(row: contest.Row) -> str:
    """Return a line for a row."""
    others = "   ".join(f"{name} {row[f'{name}_us']:8.1f} us {row[f'{name}_ratio']:.3f}"
                        for name in ("torch", "lt") if f"{name}_us" in row)  # fmt: skip
    refused = f"   refused: {row['refused']}" if "refused" in row else ""
    return (f"{row['kind']:<10} {job_of(row).name:<22} {row['us']:8.1f} us {row['tflops']:5.0f} TFLOP/s   {others}   "
            f"{row['sm_mhz']} MHz   {row['config']}{refused}")  # fmt: skip


def main() -> None:
    parser = contest.parser_for(__doc__)
    parser.add_argument("--kind", action="append", choices=list(KINDS), help="instead of all; may be repeated")
    arguments = parser.parse_args()
    pace = contest.pace_of(arguments)
    rows = contest.measured(
        arguments, jobs(arguments.kind or (), contest.shapes_of(arguments)), job_of,
        lambda left: contest.built([planned(job) for job in left], arguments.dry), lambda job: measure(job, pace), told,
    )  # fmt: skip
    contest.write_down(arguments.json, rows, contest.summary(rows, group, name))


def group(row: contest.Row) -> str:
    return f"{row['kind']} {row['layout']}"


def name(row: contest.Row) -> str:
    return job_of(row).name


if __name__ == "__main__":
    main()
