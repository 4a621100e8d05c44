"""Why a config was chosen, in words."""

from __future__ import annotations

from gemmsmith.core.config import Config
from gemmsmith.core.problem import Problem
from gemmsmith.core.spec import EpilogueSpec
from gemmsmith.tuning.choose import ranked
from gemmsmith.tuning.model import estimate
from gemmsmith.tuning.space import Space

MHZ = 1600
"""About the clock of an H200 under sustained load."""
OTHERS = 3


def why(problem: Problem, config: Config, epilogue: EpilogueSpec | None, origin: str) -> str:
    """The text of `plan.why`: the model's estimate for the config and for the best alternatives.

    `problem` is that of the product that is not transposed.
    """
    beside = [c for c in ranked(problem, epilogue, OTHERS + 1) if c != config][:OTHERS]
    e = estimate(problem, Space.of([config, *beside]), epilogue)
    math, copies, step, memory, work = (float(x[0]) for x in (e.math, e.copies, e.step, e.memory, e.work))
    limit = "math" if math >= copies else "copies"
    if step > 1.2 * max(math, copies):
        limit = "their latency"
    lines = [
        f"{config}: {origin}",
        f"a k-tile: math {math:.0f} cycles, copies {copies:.0f}; each CTA works on {e.k_steps[0]:.0f}, "
        f"limited by {limit}",
        f"stores not hidden {e.stores[0]:.0f}, shares brought together {e.share[0]:.0f}; memory alone {memory:.0f}, "
        f"work alone {work:.0f}: {'memory' if memory > work else 'work'}-bound",
        f"model: {e.cycles[0]:.0f} cycles, {e.cycles[0] / MHZ:.1f} us at {MHZ} MHz",
    ]
    lines += [f"beside it: {us / MHZ:.1f} us {c}" for us, c in zip(e.cycles[1:], beside, strict=True)]
    return "\n".join(lines)
