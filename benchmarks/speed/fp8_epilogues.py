"""FP8 GEMMs with block scales and an epilogue, or with A's scales contiguous along K, against the plain GEMM.

| what | ours | the other |
| --- | --- | --- |
| along_k | A's scales contiguous along K | A's scales contiguous along M, `along_m` |
| quantized, swiglu, gelu, added, row_sums | with this epilogue | the plain GEMM, `bare` |

Timed in CUDA graphs in alternating blocks, as in fp8.py; a ratio is the other's time over ours. Jobs of all kinds are
mixed, so that each part of a run covers all of them.

    python -m benchmarks.speed.fp8_epilogues --json rows.json --resume --seconds 500
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import chain, zip_longest
from typing import Any

import torch

import gemmsmith
from benchmarks import portions
from benchmarks.speed.fp8 import Case, in_turns
from benchmarks.suite import Shape
from benchmarks.timing import FAR, L2_BYTES, block_seconds, options, save

Job = tuple[str, int, int, int]
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
SUITE: dict[str, list[Shape]] = {"along_k": SCALED, **dict.fromkeys(EPILOGUES, FUSED)}
"""The shapes of each kind."""


def jobs() -> list[Job]:
    """Return all jobs, alternating between kinds."""
    each = [[(what, *shape) for shape in shapes] for what, shapes in SUITE.items()]
    return [job for job in chain.from_iterable(zip_longest(*each)) if job]


def rotated(first: Any, make: Callable[[], Any]) -> list[Any]:
    """Return three or more sets of operands that fill FAR times the L2 together."""
    size = sum(x.numel() * x.element_size() for x in (first.a, first.b, first.d))
    return [first, *(make() for _ in range(max(3, -(-FAR * L2_BYTES // size)) - 1))]


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


def measure(what: str, m: int, n: int, k: int, rounds: int) -> dict[str, Any]:
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


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Return a line per kind and peer: the number of shapes, the geometric mean of the ratios, and the minimum."""
    lines = []
    for what in SUITE:
        members = [r for r in rows if r["what"] == what]
        for name in dict.fromkeys(key for r in members for key in r if key.endswith("_ratio")):
            ratios = [r[name] for r in members if name in r]
            mean, least = statistics.geometric_mean(ratios), min(ratios)
            other = name.removesuffix("_ratio")
            lines.append(f"{what:<10} {len(ratios):>3} shapes   {other} / ours {mean:.3f}, least {least:.3f}")
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
        rows.append(measure(*job, arguments.rounds))
        r = rows[-1]
        others = "   ".join(f"{key.removesuffix('_ratio')} {r[key]:.3f}" for key in r if key.endswith("_ratio"))
        print(f"{r['what']:<10} {r['m']:>6} {r['n']:>6} {r['k']:>6}  {r['us']:8.1f} us   {others}   {r['config']}",
              flush=True)  # fmt: skip
        save(arguments.json, rows)
    print("\n".join(summary(rows)))


if __name__ == "__main__":
    main()
