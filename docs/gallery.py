"""The gallery "delete this wait": the default kernel with one of its synchronizing statements deleted or changed.

docs/steppers.py simulates each change; here they are listed beside the kernel's lines.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import CudaLexer
from tests.mutants.mutate import _changes

import gemmsmith
from gemmsmith import Config, Plan, Simulation
from gemmsmith.kernels.build import build

SIZES = 512, 512, 320
"""M, N, K: two tiles for each of four CTAs, and one k-tile more than there are stages."""
SEEDS = 3
"""Schedules of a broken kernel that are shown."""
SHOWN = "delete", "flip", "pending", "arrivals", "stages", "threads"
"""Words of the changes that are shown. Others move statements, or need other arguments of the launch."""
CONTEXT = 10
"""Lines of CUDA that are shown before the first change."""
NOTES = {
    "delete-grid_dependency_wait-2": "The thread that issues the loads has a griddepcontrol.wait of its own, and "
    "the others access global memory only after they have waited for what it loads.",
    "delete-set_max_nreg-2": "The compiler then gives the consumers no more registers than a thread has at the launch.",
}
"""Why nothing breaks, by the change's name."""


class Change(NamedTuple):
    """A change of the kernel: the `number` of it in `_changes`, what it is, and its line of CUDA, from 1 on."""

    number: int
    title: str
    line: int


class Found(NamedTuple):
    """A hazard that was found: its kind, the first line of its report, and its step in the page, -1 for none."""

    kind: str
    report: str
    step: int


def plan() -> tuple[Plan, np.ndarray, np.ndarray]:
    """Return a plan of the default kernel, freshly built so that it may be changed, and its operands."""
    build.cache_clear()
    m, n, k = SIZES
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(x).astype(ml_dtypes.bfloat16) for x in ((m, k), (n, k)))
    return gemmsmith.plan(a, b.T, config=Config(), backend="sim"), a, b.T


class Schedules(NamedTuple):
    """Simulations of a kernel in several schedules, those with hazards first."""

    simulations: list[Simulation]

    @property
    def hazards(self) -> list[Any]:
        """Those of the first one."""
        return self.simulations[0].hazards

    def to_html(self, path: Path) -> None:
        """Write a page of all."""
        first, *others = self.simulations
        first.to_html(path, others=others)


def in_schedules(simulate: Callable[[int], Simulation]) -> Schedules:
    """Simulate several schedules; `simulate`: one of them, by its seed."""
    return Schedules(sorted(map(simulate, range(SEEDS)), key=lambda x: not x.hazards))


def simulate() -> Simulation:
    """Simulate the kernel as it is."""
    fresh, a, b = plan()
    return fresh.simulate(a, b, record=True)


def simulate_changed(number: int) -> Schedules:
    """Simulate the kernel with a change, by its number."""
    fresh, a, b = plan()
    *_, apply = next(islice(_changes(fresh._planned.kernel), number, None))
    apply()
    found = in_schedules(lambda seed: fresh.simulate(a, b, seed=seed, record=True))
    build.cache_clear()
    return found


@cache
def source() -> tuple[str, dict[int, int]]:
    """Return the kernel's CUDA, and the line of each statement by its number."""
    kernel = plan()[0]._planned.kernel
    return kernel.source, kernel.cuda_lines


@cache
def changes() -> dict[str, Change]:
    """Return the changes that are shown, in the order of their lines, by name."""
    _, lines = source()
    found = [
        Change(number, f"{what} {target}", lines[where.number])
        for number, (what, target, where, _) in enumerate(_changes(plan()[0]._planned.kernel))
        if any(word in SHOWN for word in what.split())
    ]
    build.cache_clear()
    seen, result = Counter[str](), dict[str, Change]()
    for change in sorted(found, key=lambda x: x.line):
        seen[change.title] += 1
        name = f"{change.title} {seen[change.title]}".replace(" of", "").replace(" ", "-")
        result[re.sub("^[+-]", lambda x: {"+": "more-", "-": "fewer-"}[x.group()], name)] = change
    return result


def page(found: Mapping[str, list[Found]], folder: str) -> str:
    """Return the HTML of the gallery: the kernel with links at its lines, and a table of what was found.

    `found`: the hazards of each change by its name. `folder`: that of the steppers, as seen from the page.
    """
    text, links, rows = source()[0], dict[int, list[str]](), []
    for name, (_, title, line) in changes().items():
        if hazards := found.get(name):
            (kind, report, step), style = hazards[0], ""
            address = f"{folder}/{name}.html" + f"#step={step}" * (step >= 0)
        else:
            kind, style, address = "nothing breaks", ' class="none"', f"#{name}"
            report = f"{kind}: {NOTES[name]}"
        sentence, rest, _ = report.partition("; ")
        label = html.escape(f"{title}: {kind}")
        what = title.rpartition(" ")[0].removesuffix(" of").removesuffix(" start")
        links.setdefault(line, []).append(f'<a href="{address}"{style} aria-label="{label}" title="{label}">{what}</a>')
        rows.append(f'<tr id="{name}"><td>{line}</td><td><a href="{address}">{html.escape(title)}</a></td>'
                    f"<td>{html.escape(sentence + '; …' * bool(rest))}</td></tr>")  # fmt: skip
    lines = highlight(text, CudaLexer(), HtmlFormatter(nowrap=True)).splitlines()
    listing = []
    for i in range(min(links) - CONTEXT, len(lines) + 1):
        listing.append(f'<span class="linenos">{i}</span> {lines[i - 1]}')
        if i in links:
            code = text.splitlines()[i - 1]
            listing.append(f'<span class="linenos">   </span> {code[: -len(code.lstrip())]}{" ".join(links[i])}')
    return PAGE.format(listing="\n".join(listing), rows="".join(rows))


PAGE = """\
<div class="highlight gallery"><pre tabindex="0" aria-label="The kernel in CUDA">{listing}
</pre></div>
<div class="table-wrapper"><table class="docutils changes">
<thead><tr><th>line</th><th>change</th><th>what the simulator reports</th></tr></thead>
<tbody>{rows}</tbody></table></div>
"""
