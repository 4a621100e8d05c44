"""The cost of a launch on the host by an exported header, beside cublasLtMatmul's: medians of rounds in turns, in C.

Of GEMMs of 64 x 64 x 64, too small to wait for. `launch_us` and `encode_us` are of the driver's calls that the header
makes, cuLaunchKernelEx and cuTensorMapEncodeTiled, repeated alone; `empty_us` and `empty_many_us` are of
cuLaunchKernelEx of an empty kernel, without parameters and with 896 bytes of them. Needs gcc and the CUDA toolkit.

    python -m benchmarks.speed.header_launch --json benchmarks/results/header-launch-h200.json
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import gemmsmith
from benchmarks.suite import specs
from benchmarks.timing import options, save
from gemmsmith import Config

HOME = Path("/usr/local/cuda")
COLUMNS = ("us", "lt_us", "launch_us", "encode_us", "empty_us", "empty_many_us")
CONFIGS = {
    "chosen": None,
    "pingpong, cluster of 2": Config("pingpong", (64, 64, 64), (2, 1), 4),
    "split-K": Config("cooperative", (64, 64, 64), (1, 1), 4, consumers=1, splits=2),
}


def build(config: Config | None, folder: Path) -> Path:
    """Return a program that prints the microseconds of all."""
    gemmsmith.plan(*specs((64, 64, 64)), config=config).export(folder)
    command = ["gcc", "-O2", f"-I{folder}", f"-I{HOME}/include", str(Path(__file__).with_suffix(".c")), "-o", "launch",
               f"-L{HOME}/lib64", f"-Wl,-rpath,{HOME}/lib64", "-lcublasLt", "-lcudart", "-ldl"]  # fmt: skip
    subprocess.run(command, check=True, cwd=folder)
    return folder / "launch"


def main() -> None:
    arguments = options(__doc__).parse_args()
    rows = []
    for name, config in CONFIGS.items():
        with tempfile.TemporaryDirectory() as folder:
            program = build(config, Path(folder))
            done = subprocess.run([program], check=True, capture_output=True, text=True)
            row = dict(zip(COLUMNS, map(float, done.stdout.split()), strict=True))
        rows.append({"config": name, **row})
        print(f"{name}: {'; '.join(f'{x} {us:.2f}' for x, us in row.items())}")
    save(arguments.json, rows)


if __name__ == "__main__":
    main()
