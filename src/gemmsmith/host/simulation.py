"""The result of a simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.frozen import cached_property
from gemmsmith.core.scalars import as_integer
from gemmsmith.core.templates import html_table

if TYPE_CHECKING:
    from gemmsmith.backends.sim.execute.counters import Counters
    from gemmsmith.backends.sim.report.hazards import Hazard
    from gemmsmith.backends.sim.report.record import Record
    from gemmsmith.backends.sim.report.timeline import Timeline
    from gemmsmith.backends.sim.report.verdict import Verdict

MAX_LISTED_HAZARDS = 5
"""Hazards in the representation of a simulation."""
COUNTS = "instructions", "macs", "wavefronts", "ideal_wavefronts", "sectors", "ideal_sectors"
"""Counts of a kernel in the representation of a simulation."""


@dataclass(frozen=True)
class Simulation:
    """Result of a simulated GEMM, or of a launch of another kernel.

    Attributes:
        result: The results, in the form that `gemm` returns; of `simulate_launch` its arguments.
        hazards: The errors found, an empty list for a correct kernel.
        cycles: Cycles of the cost model.
        verdict: Whether every other schedule of the kernels would give the same result and hazards; if not, why.
        records: Every event of each launch, in the order of the launches, with `record=True`; else empty.
        counters: The counters that were given to `Plan.simulate`.
    """

    result: Any
    hazards: list[Hazard]
    cycles: int
    verdict: Verdict
    records: tuple[Record, ...] = ()
    counters: Counters | None = None

    def __repr__(self) -> str:
        hazards = [f"  {line}" for line in self._listed_hazards()]
        lines = [f"Simulation of {self.cycles} cycles", f"verdict  {self.verdict}"]
        lines.append(f"hazards  {len(self.hazards) or 'none'}" + ", the first:" * bool(hazards))
        return "\n".join(lines + hazards)

    def _repr_html_(self) -> str:
        """Return the representation in a notebook: with counters their sums, with a record the timeline as SVG."""
        rows = [("cycles", self.cycles), ("verdict", self.verdict), ("hazards", len(self.hazards) or "none")]
        text = f"<p>Simulation</p>{html_table([*rows, *(('', x) for x in self._listed_hazards())])}"
        if self.counters:
            sums = ((x.name, *(sum(getattr(line, name) for line in self.counters.lines(x)) for name in COUNTS))
                    for x in self.counters.kernels)  # fmt: skip
            text += html_table(sums, ("kernel", *(name.replace("_", " ") for name in COUNTS)))
        if self.record is None or find_spec("matplotlib") is None:
            return text
        with TemporaryDirectory() as folder:
            self.timeline.plot(picture := Path(folder) / "timeline.svg")
            svg = picture.read_text()
        return text + svg[svg.index("<svg") :].replace("<svg", '<svg style="max-width: 100%; height: auto"', 1)

    def _listed_hazards(self) -> list[str]:
        """Return the first line of each of the first MAX_LISTED_HAZARDS hazards."""
        return [f"{hazard}".split("\n")[0] for hazard in self.hazards[:MAX_LISTED_HAZARDS]]

    @property
    def record(self) -> Record | None:
        """The record of the longest launch; None without `record=True`."""
        return max(reversed(self.records), key=lambda record: record.cycles, default=None)

    @cached_property
    def timeline(self) -> Timeline:
        """What each engine and each warp does at which cycle of the longest launch.

        Raises ArgumentError without a record.
        """
        if self.record is None:
            raise _no_record("timeline")
        return self.record.timeline()

    def to_html(self, path: str | Path, first_step: int = 0, others: Sequence[Simulation] = ()) -> None:
        """Write one HTML file, which needs no network, to step through the longest launch in a browser.

        It has 200,000 events, from the number `first_step` on. `others`: simulations of the same with other seeds,
        between which the page changes. Raises ArgumentError if one has no record, or its record has no such event.
        """
        from gemmsmith.backends.sim.report.page import write_page

        shown = [(x.record, x.hazards, f"{x.verdict}") for x in (self, *others) if x.record is not None]
        if len(shown) <= len(others):
            raise _no_record("to_html")
        write_page(path, *shown[0], as_integer("first_step", first_step), shown[1:])

    def to_json(self) -> dict[str, Any]:
        """Return the verdict, the cycles and the hazards for JSON, as `gemmsmith simulate --json` prints them."""
        hazards = [hazard.to_json() for hazard in self.hazards]
        return self.verdict.to_json() | {"cycles": self.cycles, "hazards": hazards}


def _no_record(argument: str) -> ArgumentError:
    return ArgumentError(f"{argument}: no kernel was recorded; use simulate(..., record=True), and no empty GEMM")
