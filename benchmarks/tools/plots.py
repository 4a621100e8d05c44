"""Plots of a benchmark's rows: the ratio to torch.mm over the suite, and both on the chip's roofline.

python -m benchmarks.tools.plots dense-suite-h200 --folder docs/pictures
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rows import load
from gemmsmith.core import pictures

TFLOPS = 737
"""Compute ceiling of an H200 under load: the best in dense-suite-h200.json, of large GEMMs."""
BYTES_PER_SECOND = 4.50e12
"""Memory ceiling of an H200 under load: the best in dense-suite-h200.json, of M = 1."""
OURS, THEIRS = pictures.PALETTE[0], pictures.PALETTE[1]
DTYPES = {"bfloat16": "bf16", "float16": "fp16"}


def conditions(data: dict[str, Any]) -> str:
    """Return the GPU, the dtypes and the layout of a file's rows."""
    rows = data["rows"]
    layouts = ", ".join(sorted({r.get("layout", "nt") for r in rows}))
    dtypes = ", ".join(sorted({DTYPES.get(r.get("dtype", "bf16"), r.get("dtype", "bf16")) for r in rows}))
    return f"{data['machine']['gpu'].removeprefix('NVIDIA ')}, {dtypes}, layout {layouts}"


def ratios(rows: list[dict[str, Any]], where: str, path: Path) -> None:
    """Plot a point per shape, by its FLOPs, colored by M. `where`: the conditions."""
    flops = np.array([2 * r["m"] * r["n"] * r["k"] for r in rows], float)
    ratio = np.array([r["ratio"] for r in rows])
    mean = float(np.exp(np.log(ratio).mean()))
    with pictures.drawing(path, 9, 4.5, f"{where}: {len(rows)} shapes, geometric mean {mean:.3f} (dashed)") as figure:
        axes = figure.subplots()
        dots = axes.scatter(flops, ratio, c=np.log2([r["m"] for r in rows]), cmap=pictures.gradient(), s=28)
        axes.axhline(1, color=pictures.TEXT, linewidth=0.8)
        axes.axhline(mean, color=OURS, linewidth=0.8, linestyle="--")
        bar = figure.colorbar(dots, ax=axes, label="M")
        ticks = sorted({int(np.log2(r["m"])) for r in rows})
        bar.set_ticks(ticks, labels=[str(2**t) for t in ticks])
        axes.set_xscale("log")
        axes.set_xlabel("FLOPs of the GEMM")
        axes.set_ylabel("time of torch.mm / time of gemmsmith")
    print(path)


def roofline(rows: list[dict[str, Any]], where: str, path: Path) -> None:
    """Plot TFLOP/s over FLOPs per byte of compulsory memory traffic. `where`: the conditions."""
    flops = np.array([2 * r["m"] * r["n"] * r["k"] for r in rows], float)
    nbytes = np.array([2 * (r["m"] * r["k"] + r["k"] * r["n"] + r["m"] * r["n"]) for r in rows], float)
    with pictures.drawing(path, 9, 4.5, f"{where}: {len(rows)} shapes") as figure:
        axes = figure.subplots()
        for name, key, color, size in (("torch.mm", "torch_us", THEIRS, 34), ("gemmsmith", "us", OURS, 14)):
            speed = flops / np.array([r[key] for r in rows]) / 1e6
            axes.scatter(flops / nbytes, speed, s=size, color=color, label=name)
        reach = np.geomspace(min(0.5, float((flops / nbytes).min())), max(4000, float((flops / nbytes).max())), 200)
        axes.plot(reach, np.minimum(TFLOPS, reach * BYTES_PER_SECOND / 1e12), color=pictures.TEXT, linewidth=0.8,
                  label=f"{TFLOPS} TFLOP/s, {BYTES_PER_SECOND / 1e12:.2f} TB/s")  # fmt: skip
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("FLOPs per byte")
        axes.set_ylabel("TFLOP/s")
        axes.legend(loc="lower right")
    print(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", help="name of a file of benchmarks/results that dense.py wrote")
    parser.add_argument("--folder", type=Path, default=Path())
    arguments = parser.parse_args()
    data = load(arguments.results)
    rows = list({(r["m"], r["n"], r["k"]): r for r in data["rows"]}.values())
    ratios(rows, conditions(data), arguments.folder / "ratios.png")
    roofline(rows, conditions(data), arguments.folder / "roofline.png")


if __name__ == "__main__":
    main()
