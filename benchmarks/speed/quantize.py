"""Quantization and dequantization against torch's copy_ of as many bytes, in one run.

Both are captured in CUDA graphs that rotate enough buffers to exceed the L2, and run in alternating blocks with a
warm-up each. `of_copy` is the copy's time over ours. Bytes are those read and written once; with the recipe "tensor",
whose scale must be known first, those read count twice. "groups" is the recipe "128x1" of rows in GROUPS groups, of
equal chances for each row, that are filled to multiples of 128: bytes are those of the rows. `pack` transposes a
row-major weight of one byte per element.

    python -m benchmarks.speed.quantize --json benchmarks/results/quantize-h200.json
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

import gemmsmith
from benchmarks import portions
from benchmarks.timing import FAR, L2_BYTES, captured, options, save, shuffled

SHAPES = [(128, 4096), (1024, 4096), (4096, 4096), (8192, 8192), (4096, 28672), (16384, 7168)]
RECIPES = ["1x128", "128x128", "rows", "tensor"]
GROUPS = 32
LAYOUTS = ["row-major", "column-major", "unaligned"]


Job = tuple[int, int, str, str, bool]


def jobs(shapes: list[tuple[int, int]], recipes: list[str], layouts: list[str]) -> list[Job]:
    """Return the jobs. The recipe "" is pack; full rows are not transposed in one read."""
    result: list[Job] = []
    for m, k in shapes:
        for recipe in recipes:
            for layout in layouts if recipe in RECIPES else LAYOUTS[:1]:
                ways = {"": (True,), "groups": (True,), "rows": (False,)}.get(recipe, (False, True))
                result += [(m, k, recipe, layout, transposed) for transposed in ways]
    return result


def matrix(m: int, k: int, dtype: torch.dtype, layout: str) -> torch.Tensor:
    """Return a random normal matrix; unaligned rows have k - 1 elements."""
    if layout == "column-major":
        return matrix(k, m, dtype, "row-major").T
    return torch.randn((m, k - (layout == "unaligned")), device="cuda").to(dtype)


def bytes_of(*arrays: torch.Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in arrays)


def against_copy(call: Any, inputs: list[Any], moved: int, rounds: int) -> dict[str, Any]:
    """Return microseconds of a call, and of a copy of `moved` bytes, read and written together."""
    results: list[Any] = []  # results of other calls do not take the same memory
    ours = captured(lambda *x: results.append(call(*x)), inputs)
    halves = [tuple(torch.empty(moved // 2, dtype=torch.uint8, device="cuda") for _ in range(2)) for _ in inputs]
    graphs = {"ours": ours, "copy": captured(lambda x, y: y.copy_(x), halves)}
    times, clocks = shuffled(graphs, len(inputs), 0.3, rounds)
    us, copy_us = (statistics.median(times[name]) for name in ("ours", "copy"))
    ratio = statistics.median(c / o for o, c in zip(times["ours"], times["copy"], strict=True))
    return {"us": us, "copy_us": copy_us, "of_copy": ratio, "gb_s": moved / us / 1e3, "sm_mhz": clocks}


def measure(
    m: int, k: int, dtype: torch.dtype, recipe: str, layout: str, transposed: bool, rounds: int
) -> list[dict[str, Any]]:
    """Return the rows of quantize, and of dequantize if nothing is transposed."""
    made = matrix(m, k, dtype, layout)
    result = gemmsmith.quantize(made, recipe, transposed=transposed)
    moved = bytes_of(made) * (1 + (recipe == "tensor")) + bytes_of(*result)
    count = max(3, FAR * L2_BYTES // 4 // moved + 1)
    inputs = [(matrix(m, k, dtype, layout),) for _ in range(count)]
    about = {"m": m, "k": k, "dtype": str(dtype).removeprefix("torch."), "recipe": recipe, "layout": layout}
    call = lambda x: gemmsmith.quantize(x, recipe, transposed=transposed)  # noqa: E731
    rows = [{"what": "quantize", **about, "transposed": transposed, **against_copy(call, inputs, moved, rounds)}]
    if not transposed:
        moved = bytes_of(made) + bytes_of(*result)
        pairs = [gemmsmith.quantize(x, recipe) for (x,) in inputs]
        call = lambda q, s: gemmsmith.dequantize(q, s, made.dtype)  # noqa: E731
        rows.append({"what": "dequantize", **about, "transposed": False, **against_copy(call, pairs, moved, rounds)})
    for r in rows:
        print(f"{r['what']:<10} {m:>6} {k:>6} {r['dtype']:<9} {recipe:<8} {layout:<13} {'transposed' * transposed:<10} "
              f"{r['us']:8.2f} us {r['gb_s']:6.0f} GB/s  copy {r['copy_us']:8.2f} us  {r['of_copy']:.3f}",
              flush=True)  # fmt: skip
    return rows


def grouped(m: int, k: int, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """Return the row of quantize with groups."""
    offsets = torch.randint(0, GROUPS, (m,)).bincount(minlength=GROUPS).cumsum(0).to(torch.int32).cuda()
    moved = m * k * (dtype.itemsize + 1) + m // 128 * k * 4
    inputs = [(matrix(m, k, dtype, "row-major"),) for _ in range(max(3, FAR * L2_BYTES // 4 // moved + 1))]
    row = {"what": "quantize", "m": m, "k": k, "dtype": str(dtype).removeprefix("torch."), "recipe": "groups",
           "layout": "row-major", "transposed": True}  # fmt: skip
    call = lambda x: gemmsmith.quantize(x, "128x1", offsets=offsets)  # noqa: E731
    row |= against_copy(call, inputs, moved, rounds)
    print(f"groups     {m:>6} {k:>6}  {row['us']:8.2f} us {row['gb_s']:6.0f} GB/s  copy {row['copy_us']:8.2f} us  "
          f"{row['of_copy']:.3f}", flush=True)  # fmt: skip
    return row


def packed(m: int, k: int, rounds: int) -> dict[str, Any]:
    """Return the row of pack, for a weight (k, m)."""
    made = [(torch.randint(-128, 128, (k, m), device="cuda", dtype=torch.int8),)]
    made += [(made[0][0].clone(),) for _ in range(max(2, FAR * L2_BYTES // 4 // (m * k)))]
    row = {"what": "pack", "m": m, "k": k, "dtype": "int8", "recipe": "", "layout": "row-major", "transposed": True}
    row |= against_copy(gemmsmith.pack, made, 2 * m * k, rounds)
    print(f"pack       {m:>6} {k:>6}  {row['us']:8.2f} us {row['gb_s']:6.0f} GB/s  copy {row['copy_us']:8.2f} us  "
          f"{row['of_copy']:.3f}", flush=True)  # fmt: skip
    return row


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument(
        "--recipe", action="append", choices=[*RECIPES, "groups"], help="instead of all; may be repeated"
    )
    parser.add_argument("--layout", action="append", choices=LAYOUTS, help="instead of row-major; may be repeated")
    parser.add_argument("--shape", action="append", help="MxK instead of the suite; may be repeated")
    portions.add_options(parser)
    arguments = parser.parse_args()
    shapes = [tuple(map(int, s.split("x"))) for s in arguments.shape] if arguments.shape else SHAPES
    asked = jobs(shapes, arguments.recipe or [*RECIPES, "groups", ""], arguments.layout or LAYOUTS[:1])
    rows, dtype = portions.load_rows(arguments), getattr(torch, arguments.dtype)
    for m, k, recipe, layout, transposed in portions.in_time(
        portions.missing(asked, rows, lambda r: (r["m"], r["k"], r["recipe"], r["layout"], r["transposed"]),
                         arguments.part), arguments.seconds,
    ):  # fmt: skip
        if recipe == "groups":
            rows.append(grouped(m, k, dtype, arguments.rounds))
        elif recipe:
            rows += measure(m, k, dtype, recipe, layout, transposed, arguments.rounds)
        else:
            rows.append(packed(m, k, arguments.rounds))
        save(arguments.json, rows)


if __name__ == "__main__":
    main()
