"""Both designs, with and without a cluster, on small ragged problems: to be run under compute-sanitizer.

for tool in memcheck racecheck synccheck; do
    compute-sanitizer --tool $tool --error-exitcode 1 python benchmarks/sanitize.py
done
"""

from __future__ import annotations

import numpy as np

import gemmsmith
from gemmsmith import Config
from gemmsmith.backends.cuda import launcher
from gemmsmith.backends.cuda.memory import DeviceArray
from gemmsmith.backends.reference import bounds
from gemmsmith.core.dtypes import FP16, FP32


def main() -> None:
    rng = np.random.default_rng()
    with launcher.device_guard(0):
        for design in ("warp_specialized", "multistage"):
            for tile, cluster in (((128, 128, 64), (1, 1)), ((128, 128, 64), (2, 1)), ((128, 64, 32), (1, 2))):
                for m, n, k in ((300, 264, 328), (129, 67, 45)):
                    a, b = (rng.standard_normal(s, np.float32).astype(np.float16) for s in ((m, k), (k, n)))
                    out = np.full((m, n), np.nan, np.float16)
                    on_device = [DeviceArray.from_numpy(x) for x in (a, b, out)]
                    plan = gemmsmith.plan(a, b, out=out, config=Config(design, tile, cluster, stages=3))
                    workspace = DeviceArray.from_numpy(np.zeros(max(plan.workspace_bytes, 1), np.uint8))
                    plan.run(*on_device, workspace=workspace)
                    bounds.check(on_device[2].numpy(), a, b, FP32, FP16).require()
                    print(plan.spec.name, m, n, k, "right", flush=True)


if __name__ == "__main__":
    main()
