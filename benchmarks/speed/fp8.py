"""FP8 GEMMs with block scales against torch's scaled_mm, the best of cuBLASLt's heuristics, and DeepGEMM.

A is (m, k), e4m3, with one scale per row and 128 of k, contiguous along m; B is (k, n), column-major, with one scale
per 128 x 128 block; D is bf16. All get the same operands and scales, in CUDA graphs that rotate buffers beyond the L2,
in alternating blocks like those of dense.py. A ratio is the other's time over ours. Every result is checked against
the product of the dequantized operands in float64. DeepGEMM is timed if it can be imported. `floor_us` is the memory
roofline, 2.9 us + bytes / 4.26 TB/s, which bf16 GEMMs with few rows reach.

    python -m benchmarks.speed.fp8 --json benchmarks/results/fp8-h200.json.xz
    python -m benchmarks.speed.fp8 --suite unseen --json benchmarks/results/fp8-unseen-h200.json --resume --seconds 500
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable
from typing import Any

import torch

import gemmsmith
from benchmarks import portions
from benchmarks.suite import SCALE_BLOCK as BLOCK
from benchmarks.suite import Shape, block_scaled, in_blocks, layers
from benchmarks.timing import FAR, L2_BYTES, block, block_seconds, captured, fastest, options, save
from gemmsmith.cli import cublaslt
from gemmsmith.tuning.search import compile_all

WEIGHTS = [(2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048)]
"""(N, K) of DeepSeek V3's layers, as in DeepGEMM's benchmark."""
ROWS = (1, 16, 64, 128, 256, 512, 1024, 4096, 8192)


def unseen(count: int = 60) -> list[Shape]:
    """Return layers that nothing is tuned for."""
    return in_blocks(layers(count, seed=8))


SUITES: dict[str, Callable[[], list[Shape]]] = {
    "layers": lambda: [(m, n, k) for m in ROWS for n, k in WEIGHTS] + [(x, x, x) for x in (4096, 8192)],
    "unseen": unseen,
}


class Case:
    """Operands of one GEMM: a, b, their scales, and D full of NaN.

    Each scale block along K of A's scales begins at a multiple of 16 bytes, as DeepGEMM requires, which takes `rows_b`;
    `packed_a` and `padded_b` are what torch and cuBLASLt take.
    """

    def __init__(self, m: int, n: int, k: int) -> None:
        blocks, wide = -(-k // BLOCK), -(-n // BLOCK)
        self.a = torch.randn(m, k, device="cuda").to(torch.float8_e4m3fn)
        self.b = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn).T
        self.scale_a = torch.rand(blocks, -(-m // 4) * 4, device="cuda").T[:m].add_(0.5)
        self.packed_a = self.scale_a.T.contiguous().T
        self.padded_b = torch.rand(wide, -(-blocks // 4) * 4, device="cuda").T + 0.5
        self.scale_b = self.padded_b[:blocks]
        self.rows_b = self.scale_b.T.contiguous()
        self.d = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)

    def exact(self, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the GEMM of the dequantized A and B, and the GEMM of their magnitudes."""
        k, n = self.b.shape
        a = self.a.to(dtype) * self.scale_a.repeat_interleave(BLOCK, 1)[:, :k].to(dtype)
        b_blocks = self.scale_b.repeat_interleave(BLOCK, 0)[:k].repeat_interleave(BLOCK, 1)[:, :n]
        b = self.b.to(dtype) * b_blocks.to(dtype)
        return a @ b, a.abs() @ b.abs()


def sets_of(m: int, n: int, k: int, least: int = 3, far: int = FAR, most: int = 1 << 30) -> list[Case]:
    """Return `least` or more sets that fill `far` times the L2 together, but at most `most`."""
    size = m * k + k * n + 2 * m * n
    return [Case(m, n, k) for _ in range(max(least, min(most, -(-far * L2_BYTES // size))))]


def peers(case: Case) -> dict[str, Callable[[Case], Any]]:
    """Return torch's call, and DeepGEMM's if it is installed."""
    contenders: dict[str, Callable[[Case], Any]] = {
        "torch": lambda c: torch._scaled_mm(
            c.a, c.b, c.packed_a, c.scale_b, out_dtype=torch.bfloat16, out=c.d  # type: ignore[call-overload]
        )
    }  # fmt: skip
    try:
        deep_gemm = importlib.import_module("deep_gemm")
    except ImportError:
        return contenders
    contenders["deepgemm"] = lambda c: deep_gemm.fp8_gemm_nt(
        (c.a, c.scale_a), (c.b.T, c.rows_b), c.d, recipe=(1, 128, 128), disable_ue8m0_cast=True
    )
    return contenders


def of_lt(case: Case) -> dict[Any, Callable[[Case], Any]]:
    """Return cuBLASLt's algorithms."""
    contenders = cublaslt.algorithms(case.a, case.b, case.d, ("1x128", "128x128"), (case.packed_a, case.padded_b))
    return {x: lambda c, x=x: x(c.a, c.b, c.d, c.packed_a, c.padded_b) for x in contenders}


def wrong(call: Callable[[Any], Any], case: Any, exact: tuple[torch.Tensor, torch.Tensor]) -> str:
    """Return what is wrong with a call's result, or "": tensor cores keep 13 bits of a sum of 32."""
    product, magnitudes = exact
    case.d.fill_(float("nan") if case.d.is_floating_point() else 1 << 30)
    call(case)
    off = (case.d.double() - product).abs() - product.abs() * 2.0**-8 - magnitudes * 2.0**-12
    return "" if bool((off <= 0).all()) else f"largest error over its bound by {off.nan_to_num(torch.inf).max():.3g}"


def in_turns(
    calls: dict[str, Callable[[Any], Any]], algorithms: dict[Any, Callable[[Any], Any]], sets: list[Any], exact: Any,
    seconds: float, rounds: int,
) -> dict[str, float]:  # fmt: skip
    """Return microseconds of the calls and of the fastest of cuBLASLt's algorithms, and their ratios to "ours".

    They run in alternating blocks, "ours" first. Calls that raise, or whose result is not the `exact` one, if it is
    given, are reported and left out.
    """
    contenders, suggested = {}, {}
    for name, call in {**calls, **algorithms}.items():
        try:
            why = wrong(call, sets[0], exact) if exact else ""
        except (RuntimeError, cublaslt.CublasLtError) as error:
            why = str(error).splitlines()[0]
        if why and name == "ours":
            raise SystemExit(f"ours is wrong: {why}, {tuple(sets[0].a.shape)} x {tuple(sets[0].b.shape)}")
        if why:
            print(f"    {name}: {why}", flush=True)
        else:
            (contenders if name in calls else suggested)[name] = captured(lambda c, f=call: f(c), [(c,) for c in sets])
    if fastest_algorithm := fastest(suggested, len(sets)):
        contenders["lt"] = suggested[fastest_algorithm]
    del suggested
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(rounds):
        for name in list(contenders)[:: -1 if i % 2 else 1]:
            times[name].append(block(contenders[name], len(sets), seconds))
    us = {name: statistics.median(t) for name, t in times.items()}
    ratios = {
        f"{name}_ratio": statistics.median(t / o for o, t in zip(times["ours"], times[name], strict=True))
        for name in times
        if name != "ours"
    }
    return {"us": us.pop("ours"), **{f"{name}_us": x for name, x in us.items()}, **ratios}


def measure(m: int, n: int, k: int, rounds: int) -> dict[str, Any]:
    """Return one row: a shape, the times in us, and the ratios over ours."""
    sets = sets_of(m, n, k)
    case, exact = sets[0], sets[0].exact()
    plan = gemmsmith.plan(case.a, case.b, scale_a=case.scale_a, scale_b=case.scale_b, out=case.d)
    calls: dict[str, Callable[[Case], Any]] = {
        "ours": lambda c: plan.run(c.a, c.b, c.d, scale_a=c.scale_a, scale_b=c.scale_b)
    }
    times = in_turns(calls | peers(case), of_lt(case), sets, exact, block_seconds(m), rounds)
    floor = 2.9 + (m * k + k * n + 2 * m * n + 4 * (m * k // BLOCK + k * n // BLOCK**2)) / 4.26e6
    return {
        "m": m, "n": n, "k": k, "recipe": "1x128, 128x128", **times, "floor_us": floor, "config": str(plan.config),
    }  # fmt: skip


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Return a line per peer and class: the number of shapes, the geometric mean of the ratios, and the minimum."""
    lines = []
    for title, fewest, most in (("M <= 128", 1, 128), ("M > 128", 129, 1 << 30)):
        members = [r for r in rows if fewest <= r["m"] <= most]
        for name in ("torch", "lt", "deepgemm"):
            contenders = [r[f"{name}_ratio"] for r in members if f"{name}_ratio" in r]
            if contenders:
                mean, least = statistics.geometric_mean(contenders), min(contenders)
                lines.append(f"{title:<9} {len(contenders):>3} shapes   {name} / ours {mean:.3f}, least {least:.3f}")
        for m in sorted({r["m"] for r in members if r["m"] <= 128}):
            over = [r["us"] / r["floor_us"] for r in members if r["m"] == m]
            lines.append(f"M = {m:<5} {len(over):>3} shapes   ours / floor {statistics.geometric_mean(over):.3f}, "
                         f"most {max(over):.3f}")  # fmt: skip
    return lines


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="pairs of blocks a shape; an even number")
    parser.add_argument("--suite", default="layers", choices=list(SUITES))
    parser.add_argument("--shape", action="append", help="MxNxK instead of a suite; may be repeated")
    portions.add_options(parser)
    arguments = parser.parse_args()
    all_shapes = [tuple(map(int, s.split("x"))) for s in arguments.shape or ()] or SUITES[arguments.suite]()
    rows = portions.load_rows(arguments)
    shapes = portions.missing(all_shapes, rows, lambda r: (r["m"], r["n"], r["k"]), arguments.part)
    compile_all((plan.source, plan._planned.kernel.name) for plan in map(planned, shapes))
    for m, n, k in portions.in_time(shapes, arguments.seconds):
        rows.append(measure(m, n, k, arguments.rounds))
        r = rows[-1]
        others = "   ".join(f"{name} {r[f'{name}_us']:8.1f} us, {r[f'{name}_ratio']:.3f}"
                            for name in ("torch", "lt", "deepgemm") if f"{name}_us" in r)  # fmt: skip
        print(f"{m:>6} {n:>6} {k:>6}  {r['us']:8.1f} us {2 * m * n * k / r['us'] / 1e6:5.0f} TFLOP/s, "
              f"{r['us'] / r['floor_us']:.2f} of the floor   {others}   {r['config']}", flush=True)  # fmt: skip
        save(arguments.json, rows)
    print("\n".join(summary(rows)))


def planned(shape: Shape, config: gemmsmith.Config | None = None) -> gemmsmith.Plan:
    """Return the plan for stand-ins of a Case's arrays."""
    (a, b), scales = block_scaled(shape)
    return gemmsmith.plan(a, b, **scales, out_dtype="bf16", config=config)


if __name__ == "__main__":
    main()
