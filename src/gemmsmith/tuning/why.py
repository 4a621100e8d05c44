"""Why a config was chosen, in words."""

from __future__ import annotations

from gemmsmith.core.config import Config
from gemmsmith.core.problem import Problem
from gemmsmith.core.spec import EpilogueSpec
from gemmsmith.tuning.space import estimate, ranked

MHZ = 1600
"""About what an H200 holds under load."""
OTHERS = 3


def why(problem: Problem, config: Config, epilogue: EpilogueSpec | None, origin: str) -> str:
    """What the model says of the config, and of the best ones beside it. `problem` is that of the unswapped product."""
    e = estimate(problem, config)
    limit = "math" if e.math >= e.copies else "copies"
    if e.step > 1.2 * max(e.math, e.copies):
        limit = "their latency"
    work = e.k_steps * e.step + e.stores
    lines = [
        f"{config}: {origin}",
        f"a k-tile: math {e.math:.0f} cycles, copies {e.copies:.0f}; each CTA works on {e.k_steps:.0f}, "
        f"limited by {limit}",
        f"stores not hidden {e.stores:.0f}, shares brought together {e.share:.0f}; memory alone {e.memory:.0f}, "
        f"work alone {work:.0f}: {'memory' if e.memory > work else 'work'}-bound",
        f"model: {e.cycles:.0f} cycles, {e.cycles / MHZ:.1f} us at {MHZ} MHz",
    ]
    beside = [c for c in ranked(problem, epilogue, OTHERS + 1) if c != config][:OTHERS]
    lines += [f"beside it: {estimate(problem, c).cycles / MHZ:.1f} us {c}" for c in beside]
    return "\n".join(lines)
