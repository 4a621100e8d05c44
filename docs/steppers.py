"""The pages in which kernels are stepped through: docs/conf.py makes them with the site, whose pages embed them.

    python docs/steppers.py FOLDER [NAME ...]

makes them, or those of these names, without the site. In a page they are at the comments `<!-- stepper: NAME -->`; in
docs/learn also below the picture, those of its kernels, and below the report, that of the broken kernel.
"""

from __future__ import annotations

import ast
import hashlib
import html
import json
import os
import re
import runpy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from docs import figures, gallery, tutorial  # noqa: E402

from benchmarks.rows import find  # noqa: E402
from gemmsmith import Simulation  # noqa: E402
from gemmsmith.backends.sim.run import run  # noqa: E402
from gemmsmith.cli import ladder  # noqa: E402
from gemmsmith.ladder.rungs import RUNG_CASES, RungCase  # noqa: E402

FOLDER = "_steppers"
"""The folder of the steppers in the site."""
INDEX = "index.json"
"""In this folder: the key of each stepper, and what was found."""
RACES = ROOT / "examples" / "races"
"""Kernels with a fault, one in a file, whose `simulate(mended, seed)` executes the kernel without the fault or with."""
EMBEDDED = re.compile(r"<!-- stepper: ([\w-]+) -->")
GALLERY = re.compile("<!-- gallery -->")
PICTURE = re.compile(r"!\[[^]]*\]\(\.\./pictures/learn-([\w-]+)\.png\)\n")
REPORT = re.compile(tutorial.REPORT.pattern + r"\n```\n", re.DOTALL)
SECTION, ROW = re.compile(r"(?m)^### (\w+): .*\n"), re.compile(r"(?m)^\| (\w+) \| (\w+) \|")
"""Of a rung, in docs/ladder.md and docs/reference/ladder.md."""
SOURCES = "src/gemmsmith/**/*.*", "docs/*.py", "tests/mutants/mutate.py"
"""Files on which all steppers depend."""


class Stepper(NamedTuple):
    """A page: its title; what returns the simulation, an object with `to_html`; a file on which it alone depends."""

    title: str
    simulate: Callable[[], Any]
    file: Path | None = None


@dataclass
class ChangedRun:
    """A command of `gemmsmith` with a changed file of its source, of docs/learn."""

    change: tuple[Path, str | None, str, str, str]

    def to_html(self, path: Path) -> None:
        """Write the page."""
        *change, command = self.change
        tutorial.run_changed(*change, *command.split(), "--html", str(path.resolve()))


@cache
def table() -> dict[str, Stepper]:
    """Return every stepper by its name."""
    m, n, k = gallery.SIZES
    found = {"default": Stepper(f"The default kernel, {m} x {n} x {k}", gallery.simulate)}
    for page, (before, after) in tutorial.CASES.items():
        found[f"{page}-before"] = Stepper(before.title, partial(tutorial.run, before))
        found[f"{page}-after"] = Stepper(after.title, partial(tutorial.run, after))
        file = ROOT / "docs" / "learn" / f"{page}.md"
        for report in tutorial.REPORT.finditer(file.read_text()):
            change = tutorial.change_of(report, file)
            what = f"without {change[1]}" if change[1] else f"with {change[3]} for {change[2]}"
            if not report.group(7).startswith("Error"):  # refused before it is executed
                found[f"{page}-broken"] = Stepper(f"{change[0].name} {what}", partial(ChangedRun, change), file)
    for name, x in gallery.changes().items():
        if name not in gallery.NOTES:
            found[name] = Stepper(f"The default kernel: {x.title}", partial(gallery.simulate_changed, x.number))
    for case in RUNG_CASES:
        found[rung_name(case)] = Stepper(f"{case.name} of the ladder, {case.dtype.name}", partial(simulate_rung, case))
    for race in sorted(RACES.glob("*.py")):
        title = _paragraphs(race)[0]
        found[f"race-{race.stem}"] = Stepper(title, partial(simulate_race, race, False), race)
        found[f"race-{race.stem}-mended"] = Stepper(f"{title} Mended", partial(simulate_race, race, True), race)
    return found


def rung_name(case: RungCase) -> str:
    """Return the name of a rung's stepper."""
    return f"rung-{case.name}-{case.dtype.name}"


def simulate_rung(case: RungCase) -> Simulation:
    """Simulate one tile of a rung."""
    sizes = *case.tile, case.simulated_k
    arrays = case.arrays(sizes, sizes)  # keeps the memory alive that the simulator reads by address
    launches, arguments = case.launches(*arrays)
    done = run(launches, arguments, 0, None, record=True)
    return Simulation(arrays[-1], done.hazards, done.cycles, done.verdict, done.records)


def simulate_race(file: Path, mended: bool) -> Any:
    """Simulate a kernel of examples/races, with its fault in several schedules."""
    simulate = runpy.run_path(str(file))["simulate"]
    return simulate(mended=True) if mended else gallery.in_schedules(lambda seed: simulate(seed=seed))


# -- making them -------------------------------------------------------------------------------------


def make(folder: Path, names: Iterable[str] = ()) -> dict[str, list[gallery.Found]]:
    """Make the steppers (default: all) that the folder does not have as they would be today.

    Returns the hazards that were found, by name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    index, everything = folder / INDEX, table()
    kept = json.loads(index.read_text()) if index.exists() else {}
    keys = {name: _key(name, everything[name]) for name in names or everything}
    old = [name for name, key in keys.items() if kept.get(name, {}).get("key") != key]
    with ProcessPoolExecutor() as pool:
        for name, found in zip(old, pool.map(partial(make_one, folder), old), strict=True):
            kept[name] = {"key": keys[name], "found": found}
            index.write_text(json.dumps(kept))
    return {name: [gallery.Found(*x) for x in kept[name]["found"]] for name in keys}


def make_one(folder: Path, name: str) -> list[gallery.Found]:
    """Make a stepper, and return the hazards that were found."""
    stepper, path = table()[name], folder / f"{name}.html"
    simulation = stepper.simulate()
    simulation.to_html(path)
    text, title = path.read_text("utf-8"), html.escape(stepper.title)
    path.write_text(re.sub(r"(<title>|<h1>)[^<]*(?=<)", lambda x: x.group(1) + title, text), "utf-8")
    hazards = getattr(simulation, "hazards", [])
    return [gallery.Found(x.kind, f"{x}".split("\n")[0], -1 if x.event is None else x.event) for x in hazards]


@cache
def _sources() -> bytes:
    files = sorted({x for pattern in SOURCES for x in ROOT.glob(pattern) if x.suffix != ".pyc"})
    return b"".join(x.read_bytes() for x in files)


def _key(name: str, stepper: Stepper) -> str:
    """Return a hash of all that a stepper depends on."""
    own = stepper.file.read_bytes() if stepper.file else b""
    return hashlib.sha256(b"\0".join((name.encode(), own, _sources()))).hexdigest()


# -- the pages of the site ---------------------------------------------------------------------------


def embedded(names: Sequence[str], found: Mapping[str, list[gallery.Found]], folder: str) -> str:
    """Return what a page has for the steppers of these names: a frame for the first, and links to all.

    A stepper opens at its first hazard, unless that is the answer to a question.
    """
    steppers, frame = table(), f"stepper-{names[0]}"
    links, first = [], ""
    for name in names:
        title = html.escape(steppers[name].title)
        hazard = next((x for x in found.get(name, []) if x.step >= 0 and not name.startswith("race-")), None)
        address = f"{folder}/{name}.html" + (f"#step={hazard.step}" if hazard else "")
        first = first or f'<iframe name="{frame}" src="{address}" title="Stepper: {title}" loading="lazy"></iframe>'
        shown = f'<a href="{address}" target="{frame}">{title}</a>' if len(names) > 1 else title
        links.append(f'{shown} (<a href="{address}" aria-label="Open alone: {title}">open alone</a>)')
    caption = "<br>".join(links)
    return f'<figure class="stepper">{first}<figcaption>{caption}</figcaption></figure>'


def with_steppers(text: str, name: str, found: Mapping[str, list[gallery.Found]]) -> str:
    """Return the text of the page of a name with its steppers: see the top of this file."""
    folder = os.path.relpath(FOLDER, Path(name).parent)

    def embed(*names: str) -> str:
        return embedded(names, found, folder)

    def link(x: re.Match[str]) -> str:
        broken = f"{Path(name).stem}-broken"
        if broken not in table():
            return x.group()
        return f'{x.group()}\n<p><a href="{folder}/{broken}.html">Step through this run</a></p>\n'

    text = EMBEDDED.sub(lambda x: embed(x.group(1)), text)
    text = PICTURE.sub(lambda x: f"{x.group()}\n{embed(f'{x.group(1)}-after', f'{x.group(1)}-before')}\n", text)
    text = REPORT.sub(link, text)
    if name == "ladder":
        last = {x.name: _rung_page(x) for x in RUNG_CASES}
        text = SECTION.sub(lambda x: f"{x.group()}\n[Step through it]({last[x.group(1)]})\n", text)
    if name == "reference/ladder":
        every = {(x.name, x.dtype.name): f"[{x.name}](../{_rung_page(x)})" for x in RUNG_CASES}
        text = ROW.sub(lambda x: f"| {every.get(x.groups(), x.group(1))} | {x.group(2)} |", text)
    return GALLERY.sub(lambda _: gallery.page(found, folder), text)


def _rung_page(case: RungCase) -> str:
    return f"rungs/{case.name}-{case.dtype.name}.md"


def pages() -> dict[str, str]:
    """Return the pages that only the site has, by their path in docs: the rungs and the races."""
    rows = {(x["rung"], x["dtype"]): x for x in json.loads((ROOT / "docs/ladder.json").read_text())}
    measured = ladder.load_measurements(find("ladder-h200"), (4096, 4096, 4096))
    found = {}
    for case in RUNG_CASES:
        key = case.name, case.dtype.name
        found[_rung_page(case)] = rung_page(case, rows[key] | measured.get(key, {}))
    return found | {f"races/{x.stem}.md": race_page(x) for x in sorted(RACES.glob("*.py"))}


RUNG_PAGE = """\
# {name} ({dtype})

One tile of this rung of the [ladder](../ladder.md), {tile}:

<!-- stepper: {stepper} -->

The [figures](../reference/ladder.md) of 4096 x 4096 x 4096 on an H200, counts per million FLOPs:

{counts}

{speed}
"""


def rung_page(case: RungCase, row: dict[str, Any]) -> str:
    """Return the page of a rung. `row`: its counters and its measured speed."""
    cells, measured = ladder.format_counts(row), ladder.format_measurements(row)
    us, tflops, of_roofline, limit, line = cells[ladder.BOUND_COLUMN :]
    bound = f"bound by {limit}, {line}", us, tflops, "", of_roofline
    return RUNG_PAGE.format(
        name=case.name, dtype=case.dtype.name, stepper=rung_name(case),
        tile=" x ".join(map(str, (*case.tile, case.simulated_k))),
        counts=figures.table(
            "CTAs per SM | warps | registers | wavefronts | ideal | sectors | ideal | multiplications",
            (" | ".join(cells[2 : ladder.BOUND_COLUMN]),),
        ),
        speed=figures.table(
            "| us | TFLOP/s | of cuBLAS | of roofline", (" | ".join(x) for x in (bound, ("measured", *measured)))
        ),
    )  # fmt: skip


def _paragraphs(race: Path) -> list[str]:
    """Return the paragraphs of a race's docstring, without the command that runs it."""
    docstring = ast.get_docstring(ast.parse(race.read_text())) or ""
    return [x for x in docstring.split("\n\n") if not x.startswith("python ")]


def race_page(race: Path) -> str:
    """Return the page of a kernel with a fault: the question, the stepper, the code; folded, the answer."""
    title, *rest = (re.sub(r"(https?://\S+\w/?)", r"<\1>", x) for x in _paragraphs(race))
    first = next((i for i, x in enumerate(rest) if x.startswith("Answer:")), len(rest))
    return RACE_PAGE.format(
        title=title, question="\n\n".join(rest[:first]), name=race.stem,
        answer="\n\n".join(rest[first:]).removeprefix("Answer: "),
        code=faulty(race.read_text()), file=os.path.relpath(race, ROOT / "docs" / "races"),
    )  # fmt: skip


RACE_PAGE = """\
# {title}

{question}

<!-- stepper: race-{name} -->

```python
{code}
```

<details><summary>Answer</summary>

{answer}

<!-- stepper: race-{name}-mended -->

The kernel with and without the fault: [{name}.py](path:{file}).

</details>
"""


def faulty(code: str) -> str:
    """Return the part of a race's Python that builds the kernel, without what it has for `mended`."""

    def is_choice(x: ast.AST) -> bool:
        return isinstance(x, (ast.If, ast.IfExp)) and isinstance(x.test, ast.Name) and x.test.id == "mended"

    while choice := next((x for x in ast.walk(ast.parse(code)) if is_choice(x)), None):
        if isinstance(choice, ast.IfExp):
            whole, other = (ast.get_source_segment(code, x) or "" for x in (choice, choice.orelse))
            code = code.replace(whole, other, 1)
        elif isinstance(choice, ast.If):
            lines = code.splitlines()
            other_lines = lines[choice.orelse[0].lineno - 1 : choice.end_lineno] if choice.orelse else []
            lines[choice.lineno - 1 : choice.end_lineno] = [x.removeprefix("    ") for x in other_lines]
            code = "\n".join(lines)
    body = ast.parse(code).body
    imports = [x.end_lineno or 0 for x in body if isinstance(x, (ast.Import, ast.ImportFrom))]
    end = next(x.lineno for x in body if isinstance(x, ast.FunctionDef) and x.name == "simulate") - 1
    return "\n".join(code.splitlines()[imports[-1] : end]).strip().replace("(mended: bool)", "()")


if __name__ == "__main__":
    make(Path(sys.argv[1]), sys.argv[2:])
