"""Other operands than fp8.py's against torch and cuBLASLt, and variants of block-scaled fp8 against each other.

| what | ours | the others |
| --- | --- | --- |
| fast | fp8 with scales of rows and columns, accumulate="fast" | torch._scaled_mm, cuBLASLt's fastest |
| int8 | to int32 | torch._int_mm, cuBLASLt's fastest |
| tf32 | fp32 operands, by TF32 | torch.mm by TF32, cuBLASLt's fastest |
| 3xtf32 | fp32 operands, precision="3xtf32" | torch.mm in fp32; with the errors of both |
| along_k | block scales, A's contiguous along K | block scales, A's along M, `along_m` |
| quantized, swiglu, gelu, added, row_sums | block scales, with this epilogue | the plain GEMM, `bare` |

Timed in CUDA graphs in alternating blocks, as in fp8.py; a ratio is the other's time over ours. Jobs of all kinds are
mixed, so that each part of a run covers all of them.

    python -m benchmarks.speed.operands --json benchmarks/results/operands-h200.json --resume --seconds 500
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import chain, zip_longest
from typing import Any

import torch

import gemmsmith
from benchmarks import cublaslt, portions
from benchmarks.speed.fp8 import Case, in_turns
from benchmarks.suite import Shape
from benchmarks.timing import FAR, L2_BYTES, block_seconds, options, save

Job = tuple[str, int, int, int]
LARGE: list[Shape] = [(4096, 7168, 16384), (8192, 8192, 8192), (4096, 24576, 1536), (4096, 4096, 4096),
                      (8192, 4096, 7168)]  # fmt: skip
MIXED: list[Shape] = [(m, n, k) for m in (16, 128, 4096) for n, k in ((4096, 4096), (28672, 4096), (4096, 14336))]
SCALED: list[Shape] = [(4096, 7168, 16384), (4096, 4096, 7168), (64, 7168, 2048), (4096, 32768, 512), (128, 2112, 7168),
                       (1024, 24576, 1536), (8192, 8192, 8192)]  # fmt: skip
FUSED: list[Shape] = [(4096, 4096, 7168), (4096, 7168, 16384), (8192, 8192, 8192), (512, 24576, 1536), (64, 7168, 2048)]


def quantized(acc: Any) -> Any:
    return gemmsmith.quantize(acc.relu(), "1x128")


def swiglu(acc: Any) -> Any:
    gate, up = gemmsmith.deinterleave(acc)
    return gemmsmith.quantize(gate.silu() * up, "1x128")


def gelu(acc: Any, bias: Any) -> Any:
    return torch.nn.functional.gelu(acc + bias, approximate="tanh")


def added(acc: Any, c: Any) -> Any:
    return acc + c


def row_sums(acc: Any) -> Any:
    return acc, acc.sum(-1)


EPILOGUES: dict[str, Callable[..., Any]] = {x.__name__: x for x in (quantized, swiglu, gelu, added, row_sums)}
SUITE: dict[str, list[Shape]] = {
    "fast": LARGE, "int8": MIXED + LARGE[1:2], "tf32": MIXED + LARGE[1:2], "3xtf32": [LARGE[3], LARGE[1], MIXED[3]],
    "along_k": SCALED, **dict.fromkeys(EPILOGUES, FUSED),
}  # fmt: skip
"""The shapes of each kind."""


def jobs() -> list[Job]:
    """Return all jobs, alternating between kinds."""
    each = [[(what, *shape) for shape in shapes] for what, shapes in SUITE.items()]
    return [job for job in chain.from_iterable(zip_longest(*each)) if job]


class Operands:
    """The operands of one GEMM, and D."""

    def __init__(self, what: str, m: int, n: int, k: int) -> None:
        def random(rows: int, columns: int) -> torch.Tensor:
            if what == "int8":
                return torch.randint(-128, 128, (rows, columns), device="cuda", dtype=torch.int8)
            x = torch.randn(rows, columns, device="cuda")
            return x.to(torch.float8_e4m3fn) if what == "fast" else x

        self.a, self.b = random(m, k), random(n, k).T
        self.scales: dict[str, torch.Tensor] = {}
        if what == "fast":
            shapes = {"scale_a": (m, 1), "scale_b": (1, n)}
            self.scales = {name: torch.rand(shape, device="cuda") + 0.5 for name, shape in shapes.items()}
        dtype = {"fast": torch.bfloat16, "int8": torch.int32}.get(what, torch.float32)
        self.d = torch.zeros(m, n, device="cuda", dtype=dtype)

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the GEMM, and the GEMM of the magnitudes, in float64."""
        a, b = self.a.double(), self.b.double()
        if self.scales:
            a, b = a * self.scales["scale_a"], b * self.scales["scale_b"]
        return a @ b, a.abs() @ b.abs()


def rotated(first: Any, make: Callable[[], Any]) -> list[Any]:
    """Return three or more sets of operands that fill FAR times the L2 together."""
    size = sum(x.numel() * x.element_size() for x in (first.a, first.b, first.d))
    return [first, *(make() for _ in range(max(3, -(-FAR * L2_BYTES // size)) - 1))]


def of_torch(what: str) -> Callable[[Operands], Any]:
    """Return torch's call for the same GEMM."""
    if what == "fast":
        return lambda c: torch._scaled_mm(
            c.a, c.b, c.scales["scale_a"], c.scales["scale_b"], out_dtype=torch.bfloat16, use_fast_accum=True, out=c.d
        )  # type: ignore[call-overload]
    if what == "int8":
        return lambda c: torch._int_mm(c.a, c.b, out=c.d)

    def multiply(c: Operands) -> None:
        torch.backends.cuda.matmul.allow_tf32 = what == "tf32"
        torch.mm(c.a, c.b, out=c.d)

    return multiply


def error(call: Callable[[Any], Any], c: Operands, product: torch.Tensor) -> float:
    """Return the error of all elements in the Frobenius norm, relative to the exact result."""
    call(c)
    return float((c.d.double() - product).norm() / product.norm())


def of_operands(what: str, m: int, n: int, k: int, rounds: int) -> dict[str, Any]:
    """Return the row of a GEMM of other operands."""
    first = Operands(what, m, n, k)
    sets = rotated(first, lambda: Operands(what, m, n, k))
    asked = {"fast": {"accumulate": "fast"}, "int8": {}}.get(what, {"precision": what})
    plan = gemmsmith.plan(first.a, first.b, out=first.d, **first.scales, **asked)
    calls = {"ours": lambda c: plan.run(c.a, c.b, c.d, **c.scales), "torch": of_torch(what)}
    algorithms = {}
    if what != "3xtf32":
        modes, scales = (("rows", "rows"), tuple(first.scales.values())) if first.scales else (None, None)
        algorithms_ = cublaslt.algorithms(first.a, first.b, first.d, modes, scales, fast=what == "fast")
        algorithms = {x: lambda c, x=x: x(c.a, c.b, c.d, *c.scales.values()) for x in algorithms_}
    exact = first.exact()
    row = in_turns(calls, algorithms, sets, exact, block_seconds(m), rounds)
    errors = {f"{name}_error": error(call, first, exact[0]) for name, call in calls.items()}
    return {"what": what, "m": m, "n": n, "k": k, **row, **errors, "config": str(plan.config)}


class Scaled(Case):
    """fp8 with block scales, with what an epilogue reads and writes."""

    def __init__(self, what: str, m: int, n: int, k: int) -> None:
        super().__init__(m, n, k)
        self.along_k = self.scale_a.contiguous()
        made = {"gelu": ("bias", (n,)), "added": ("c", (m, n))}.get(what)
        self.read = {made[0]: torch.randn(made[1], device="cuda").bfloat16()} if made else {}
        self.results: Any = self.d
        if what in ("quantized", "swiglu"):
            columns = n // 2 if what == "swiglu" else n
            values = torch.empty(m, columns, device="cuda", dtype=torch.float8_e4m3fn)
            self.results = values, torch.empty(-(-columns // 128), -(-m // 4) * 4, device="cuda").T[:m]
        elif what == "row_sums":
            self.results = self.d, torch.empty(m, device="cuda")


def of_scales(what: str, m: int, n: int, k: int, rounds: int) -> dict[str, Any]:
    """Return the row of a block-scaled GEMM, compared with another of ours."""
    first = Scaled(what, m, n, k)
    sets = rotated(first, lambda: Scaled(what, m, n, k))
    scales = {"scale_a": first.scale_a, "scale_b": first.scale_b}
    bare = gemmsmith.plan(first.a, first.b, out=first.d, **scales)
    baseline = lambda c: bare.run(c.a, c.b, c.d, scale_a=c.scale_a, scale_b=c.scale_b)  # noqa: E731
    if what == "along_k":
        plan = gemmsmith.plan(first.a, first.b, out=first.d, scale_a=first.along_k, scale_b=first.scale_b)
        ours = lambda c: plan.run(c.a, c.b, c.d, scale_a=c.along_k, scale_b=c.scale_b)  # noqa: E731
        calls = {"ours": ours, "along_m": baseline}
    else:
        given = {"epilogue": EPILOGUES[what], "operands": first.read, "out": first.results}
        plan = gemmsmith.plan(first.a, first.b, **scales, **given)

        def fused(c: Scaled) -> None:
            plan.run(c.a, c.b, c.results, scale_a=c.scale_a, scale_b=c.scale_b, operands=c.read)

        calls = {"ours": fused, "bare": baseline}
    row = in_turns(calls, {}, sets, first.exact() if what == "along_k" else None, block_seconds(m), rounds)
    return {"what": what, "m": m, "n": n, "k": k, **row, "config": str(plan.config)}


def measure(job: Job, rounds: int) -> dict[str, Any]:
    what, *shape = job
    return (of_scales if what in ("along_k", *EPILOGUES) else of_operands)(what, *shape, rounds)


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Return a line per kind and peer: the number of shapes, the geometric mean of the ratios, and the minimum."""
    lines = []
    for what in SUITE:
        members = [r for r in rows if r["what"] == what]
        for name in dict.fromkeys(key for r in members for key in r if key.endswith("_ratio")):
            algorithms_ = [r[name] for r in members if name in r]
            mean, least = statistics.geometric_mean(algorithms_), min(algorithms_)
            other = name.removesuffix("_ratio")
            lines.append(f"{what:<10} {len(algorithms_):>3} shapes   {other} / ours {mean:.3f}, least {least:.3f}")
        errors = [r["ours_error"] / r["torch_error"] for r in members if r.get("torch_error")]
        if errors:
            lines.append(f"{what:<10} {len(errors):>3} shapes   error, ours / torch's, at most {max(errors):.2f}")
    return lines


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="pairs of blocks a job; an even number")
    parser.add_argument("--what", action="append", choices=list(SUITE), help="instead of all; may be repeated")
    portions.add_options(parser)
    arguments = parser.parse_args()
    asked = [job for job in jobs() if job[0] in (arguments.what or SUITE)]
    rows = portions.load_rows(arguments)
    left = portions.missing(asked, rows, lambda r: (r["what"], r["m"], r["n"], r["k"]), arguments.part)
    for job in portions.in_time(left, arguments.seconds):
        rows.append(measure(job, arguments.rounds))
        r = rows[-1]
        others = "   ".join(f"{key.removesuffix('_ratio')} {r[key]:.3f}" for key in r if key.endswith("_ratio"))
        print(f"{r['what']:<10} {r['m']:>6} {r['n']:>6} {r['k']:>6}  {r['us']:8.1f} us   {others}   {r['config']}",
              flush=True)  # fmt: skip
        save(arguments.json, rows)
    print("\n".join(summary(rows)))


if __name__ == "__main__":
    main()
