"""The pages' code runs, what they refer to exists, and what they quote is what the code and the measured rows give."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from docs import gallery, generate, results, steppers, tutorial
from PIL import Image

import gemmsmith
from benchmarks.rows import find, load, names
from gemmsmith.cli import ladder, main
from gemmsmith.cli.group import COMMANDS, find_command
from gemmsmith.ladder.rungs import RUNG_CASES, RungCase
from gemmsmith.tuning import roofline
from gemmsmith.tuning.costs import SM_CLOCK_MHZ
from gemmsmith.tuning.gpus import H200
from gemmsmith.tuning.model import BOUND_NORM_EXPONENT

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS, ROOT / "benchmarks" / "results" / "README.md"]
MAX_WORDS = {
    "README.md": 750,
    "docs/reference/kernels.md": 3000,
    "docs/notebook/README.md": 3000,
}
"""Of a page: 2500 if it is not named here."""
MAX_WORDS_IN_ALL = {"docs/notebook": 9000, "": 38000}
"""Of the pages below a folder; the empty one has README.md, CONTRIBUTING.md and docs, without GENERATED_REFERENCE."""
GENERATED_REFERENCE = {f"docs/reference/{name}.md" for name in ("cli", "python", "kernels", "operations", "ladder")}
"""Pages that docs/generate.py writes whole."""
LEARN = [ROOT / "docs" / "learn" / f"{page}.md" for page in tutorial.CASES]
QUOTED = {"docs/ladder.md", *(str(page.relative_to(ROOT)) for page in LEARN)}
"""Pages whose Python is quoted from the source, not executed."""
NEEDS_GPU = {"tune"}
"""Commands that pages show and that only a GPU can execute."""


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """Return a page's blocks of code in a language, with their lines."""
    text = page.read_text()
    found = re.finditer(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [(text[: x.start()].count("\n") + 1, x.group(1)) for x in found]


def python_of(page: Path) -> list[tuple[int, str]]:
    """Return a page's Python but for what it quotes from the source."""
    quoted = {x.group(3).strip() for x in generate.BLOCK.finditer(page.read_text())}
    return [(line, block) for line, block in blocks(page, "python") if f"```python\n{block}```" not in quoted]


EXECUTED = [page for page in PAGES if page_id(page) not in QUOTED and python_of(page)]
TORCH = {page for page in EXECUTED if any("torch" in block for _, block in python_of(page) if "import torch" in block)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [pytest.param(x, marks=pytest.mark.torch if x in TORCH else ()) for x in EXECUTED], ids=page_id
)
def test_every_block_of_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the page's scope, README's each in its own; what it asserts holds."""
    if page in TORCH:
        pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)  # pages may draw
    scope: dict[str, Any] = {"__name__": "__main__"}
    for line, block in python_of(page):
        if page.name == "README.md":
            scope = {"__name__": "__main__"}
        exec(compile("\n" * line + block, page_id(page), "exec", dont_inherit=True), scope)
        if page.name == "README.md" and "h" in scope:
            exact = scope["x"] @ scope["w"]
            assert np.linalg.norm(scope["h"].astype(np.float32) - exact) < 0.06 * np.linalg.norm(exact)
    if "explanation" in scope:  # gt.explain: as printed, without the last column
        shown = next(x for x in re.findall(r"\n\n```\n(.*?)```", page.read_text(), re.DOTALL) if "matmuls" in x)
        printed = re.sub(r" +\S+:\d+: .*$", "", str(scope["explanation"]), flags=re.MULTILINE)
        assert [x.split() for x in shown.splitlines()] == [x.split() for x in printed.splitlines()], printed


def test_the_race_of_the_readme_needs_more_k_tiles_than_stages() -> None:
    """K must exceed 256, as the page says: with the wait deleted, a stage must be loaded a second time."""
    assert generate.hazards_without_wait(256) == []
    assert generate.hazards_without_wait(320)[0].startswith("race")


def test_no_other_language_is_left_out() -> None:
    """Each block is executed, quoted from the source, or printed by a command."""
    languages = {x for page in PAGES for x in re.findall(r"^```(\w+)$", page.read_text(), re.MULTILINE)}
    assert languages <= {"python", "sh", "console", "cuda"}
    plain = {page_id(page) for page in PAGES if re.search(r"\n\n```\n", page.read_text())}
    # a race's reports, gt.explain's, and those of kernels with an error
    assert plain == {"README.md", "docs/getting-started.md", "docs/guides/pytorch.md", *map(page_id, LEARN)}


def test_notebooks_are_kept_without_outputs() -> None:
    """They are executed when the site is built (.ci/run), which lists them."""
    notebooks = sorted((ROOT / "docs").rglob("*.ipynb"))
    assert notebooks
    for notebook in notebooks:
        cells = json.loads(notebook.read_text())["cells"]
        assert all(not x.get("outputs") and x.get("execution_count") is None for x in cells), notebook
        assert f"({notebook.relative_to(ROOT / 'docs')})" in (ROOT / "docs/index.md").read_text()


def test_every_stepper_that_the_site_embeds_is_in_the_table() -> None:
    """And the other way round: by comments, the pictures and reports of docs/learn, rungs, races, and the gallery."""
    texts = {page_id(x).removeprefix("docs/").removesuffix(".md"): x.read_text() for x in PAGES}
    texts |= {name.removesuffix(".md"): text for name, text in steppers.pages().items()}
    found = {name: [gallery.Found("race", "race at a.py:1", 7)] for name in steppers.table()}
    shown = {name: steppers.with_steppers(text, name, found) for name, text in texts.items()}
    assert {x for text in shown.values() for x in re.findall(r"_steppers/([\w-]+)\.html", text)} == {*steppers.table()}
    for page in ("ladder", "reference/ladder"):
        rungs = set(re.findall(r"(rungs/[\w-]+\.md)\)", shown[page]))
        assert rungs <= {*steppers.pages()}
        assert len(rungs) == (len(RUNG_CASES) if page == "reference/ladder" else shown[page].count("\n### "))


RACE = """
from gemmsmith import hw

COUNT = 2


def kernel(mended: bool) -> None:
    hw.barrier_arrive(1 + COUNT if mended else 1)
    if mended:
        hw.wait()
    if mended:
        hw.fence()
        hw.meet()
    else:
        hw.meet()
        if COUNT:
            hw.fence()  # too late
    hw.barrier_sync(1 + COUNT if mended else 1)


def simulate(mended: bool = False, seed: int = 0) -> None: ...
"""


def test_the_page_of_a_race_asks_before_it_answers() -> None:
    """Its code has the fault alone; the mend is folded."""
    wanted = """\
COUNT = 2


def kernel() -> None:
    hw.barrier_arrive(1)
    hw.meet()
    if COUNT:
        hw.fence()  # too late
    hw.barrier_sync(1)"""
    assert steppers.faulty(RACE) == wanted
    for race in steppers.RACES.glob("*.py"):
        question, answer = steppers.race_page(race).split("<details>")
        assert not re.search("mended|Answer|Mend|Source", question), race
        assert all(f"{x}:" in answer for x in ("Mend", "Source")), race
        assert f"<!-- stepper: race-{race.stem} -->" in question
        assert f"<!-- stepper: race-{race.stem}-mended -->" in answer


def test_a_stepper_is_made_once(tmp_path: Path) -> None:
    """With its title, and with a frame that opens at the first hazard."""
    name = "delete-mbarrier_wait-1"
    ((first, *_),) = steppers.make(tmp_path, [name]).values()
    page = tmp_path / f"{name}.html"
    assert "<title>The default kernel: delete mbarrier_wait</title>" in page.read_text()
    made = page.stat().st_mtime_ns
    found = steppers.make(tmp_path, [name])
    assert (found[name][0], page.stat().st_mtime_ns) == (first, made)
    assert first.report.startswith(f"{first.kind} at ")
    frame = (
        f'src="../_steppers/{name}.html#step={first.step}" title="Stepper: The default kernel: delete mbarrier_wait"'
    )
    assert frame in steppers.with_steppers(f"<!-- stepper: {name} -->", "learn/page", found)
    listed = gallery.page(dict.fromkeys(gallery.changes(), found[name]), "../_steppers")
    assert listed.count(f'href="../_steppers/{name}.html#step={first.step}"') == 2  # at the line and in the table
    assert listed.count("<tr id=") == len(gallery.changes())


@pytest.mark.parametrize("page", LEARN, ids=page_id)
def test_a_page_of_the_ladder_has_a_timeline_and_a_report(page: Path) -> None:
    """Of which docs/generate.py writes the numbers and the text."""
    text = page.read_text()
    assert f"](../pictures/learn-{page.stem}.png)" in text
    assert len(tutorial.TABLE.findall(text)) == len(tutorial.CASES[page.stem]) - 1 == 1
    assert len(tutorial.REPORT.findall(text)) == text.count("\n\n```\n") == 1


def test_pages_are_short() -> None:
    words = {page_id(page): len(page.read_text().split()) for page in PAGES if "results" not in page_id(page)}
    assert {page: n for page, n in words.items() if n > MAX_WORDS.get(page, 2500)} == {}
    for folder, most in MAX_WORDS_IN_ALL.items():
        written = {page: n for page, n in words.items() if page.startswith(folder) and page not in GENERATED_REFERENCE}
        assert sum(written.values()) <= most, folder


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    """To a file, and if to a heading of a page, to one that is there."""
    for target, heading in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
        if "://" not in target:
            file = page.parent / target if target else page
            assert file.exists(), target
            assert not heading or heading in headings(file), f"{target}#{heading}"


def headings(page: Path) -> list[str]:
    """As GitHub names them in links."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in found]


def test_every_page_is_reached() -> None:
    """From README.md, by links."""
    reached, open_ = set(), [ROOT / "README.md"]
    while open_:
        page = open_.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        targets = re.findall(r"\]\(([^)#\s]+)", page.read_text())
        open_ += [(page.parent / x).resolve() for x in targets if "://" not in x]
    assert set(DOCS) <= reached, set(DOCS) - reached


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_files_that_are_named_exist(page: Path) -> None:
    """`tuning/model.py` is one of src/gemmsmith's, `clocks.py` has that name somewhere."""
    names = {
        path.name
        for folder in ("src", "tests", "benchmarks", "docs", "examples")
        for path in (ROOT / folder).rglob("*.py")
    }
    for name in re.findall(r"`([\w./-]+\.py)`", page.read_text()):
        roots = (ROOT, ROOT / "src" / "gemmsmith")
        assert name in names if "/" not in name else any((x / name).exists() for x in roots), name


def commands_of(page: Path) -> list[str]:
    """Return the commands `gemmsmith …` of a page."""
    text = page.read_text()
    code = [block.replace("\\\n", "") for _, block in blocks(page, "sh")]
    code += re.findall(r"^```console\n\$ (.*)$", text, re.MULTILINE)
    code += re.findall(r"`(gemmsmith [^`]+)`", text)
    return re.findall(r"^(?:.*&& )?(gemmsmith [a-z]+.*)$", "\n".join(code), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_and_their_options_exist(page: Path) -> None:
    for command in commands_of(page):
        _, name, *_ = command.split()
        if name == "COMMAND":
            continue
        assert name in COMMANDS, name
        options = {opt for p in find_command(name).params for opt in (*p.opts, *p.secondary_opts)} | {"--help"}
        assert set(re.findall(r"--[a-z-]+", command)) <= options, command


@pytest.mark.slow
@pytest.mark.parametrize("page", [x for x in DOCS if blocks(x, "sh")], ids=page_id)
def test_commands_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """README.md's are executed by .ci/run, CONTRIBUTING.md's pictures below."""
    monkeypatch.setenv("GEMMSMITH_CACHE_DIR", str(tmp_path / "cache"))  # without configs that the user tuned
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for _, block in blocks(page, "sh"):
        for command in block.replace("\\\n", "").splitlines():
            program, name, *words = shlex.split(command)
            assert program == "gemmsmith", command
            if name not in NEEDS_GPU:
                result = CliRunner().invoke(main, [name, *words])
                assert result.exit_code == 0, result.output


def test_every_environment_variable_is_documented() -> None:
    sources = (ROOT / "src").rglob("*.py")
    read = {name for path in sources for name in re.findall(r"environ\b\W+(?:get\W+)?(\w+)", path.read_text())}
    assert read
    assert read <= set(re.findall(r"`(\w+)`", (ROOT / "docs" / "reference" / "environment.md").read_text()))


def test_every_field_of_a_config_is_documented() -> None:
    """With its default, in order."""
    rows = re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", (ROOT / "docs/reference/config.md").read_text(), re.MULTILINE)
    config = gemmsmith.Config()
    fields = [(name, getattr(config, name)) for name in gemmsmith.Config.__dataclass_fields__]
    assert rows == [(name, json.dumps(x) if isinstance(x, str) else str(x).replace("'", '"')) for name, x in fields]


def test_console_blocks_are_what_the_commands_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block begins with `$ gemmsmith …`; the rest is its standard output, but for spaces at the ends of lines."""
    monkeypatch.setenv("GEMMSMITH_CACHE_DIR", str(tmp_path))  # without configs that the user tuned
    found = [b for page in PAGES for b in re.findall(r"^```console\n\$ (.*)\n([^`]*)^```", page.read_text(), re.M)]
    assert found
    for command, expected in found:
        name, *words = shlex.split(command)
        assert name == "gemmsmith", command
        result = CliRunner().invoke(main, words)
        assert [line.rstrip() for line in result.stdout.splitlines()] == expected.splitlines(), command


@pytest.mark.slow
def test_pictures_are_what_the_commands_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CONTRIBUTING.md's last block of commands draws every picture of the pages."""
    monkeypatch.setenv("GEMMSMITH_CACHE_DIR", str(tmp_path / "cache"))  # without configs that the user tuned
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs" / "pictures").mkdir(parents=True)
    for name in ("examples", "benchmarks", "docs/ladder.json", "docs/tutorial.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    for command in blocks(ROOT / "CONTRIBUTING.md", "sh")[-1][1].replace("\\\n", "").replace(" && ", "\n").splitlines():
        program, *words = shlex.split(command)
        if program == "gemmsmith":
            result = CliRunner().invoke(main, words)
            assert result.exit_code == 0, result.output
        else:
            subprocess.run([sys.executable if program == "python" else program, *words], check=True)
    pictures = sorted(path.relative_to(ROOT) for path in (ROOT / "docs").rglob("*.png"))
    assert pictures == sorted(path.relative_to(tmp_path) for path in (tmp_path / "docs").rglob("*.png"))
    shown = "".join(page.read_text() for page in PAGES)
    for picture in pictures:
        assert f"pictures/{picture.name})" in shown, f"{picture} is on no page"
        kept, fresh = (Image.open(folder / picture) for folder in (ROOT, tmp_path))
        if kept.text["Software"] == fresh.text["Software"]:  # another matplotlib places text otherwise
            assert kept.size == fresh.size, picture
            difference = np.abs(np.asarray(kept, int) - np.asarray(fresh, int)).max()
            assert difference <= 8, f"{picture} is not what its command in CONTRIBUTING.md draws today"


# What docs/generate.py writes: references, excerpts, and every figure of README.md and docs/performance.md


def test_generated_pages_are_up_to_date() -> None:
    """The operations, the command line, the tables of speed from their rows, the excerpts, the index of the rows.

    In a process of its own, in which no other test has registered designs.
    """
    command = [sys.executable, ROOT / "docs" / "generate.py", "--check", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_the_guide_to_why_explains_the_numbers_that_are_printed() -> None:
    """Each number of its prose is in the output of a command; the exponent is the model's."""
    text = (ROOT / "docs" / "guides" / "reading-why.md").read_text()
    printed = " ".join(x.group(3) for x in generate.CONSOLE.finditer(text))
    numbers = set(re.findall(r"\d+\.\d+", generate.CONSOLE.sub("", text)))
    assert str(BOUND_NORM_EXPONENT) in numbers
    assert numbers - {str(BOUND_NORM_EXPONENT)} <= set(re.findall(r"\d+\.\d+", printed))


@pytest.mark.slow
@pytest.mark.parametrize("page", LEARN, ids=page_id)
def test_numbers_and_reports_of_the_ladder_are_those_of_today(page: Path) -> None:
    assert generate.quoted(page, tutorial.refreshed(page)) == page.read_text()


def test_every_table_of_speed_is_generated() -> None:
    """A row of a table with a decimal fraction is computed from rows, in README.md and docs/performance.md."""
    for name in ("README.md", "docs/performance.md"):
        text = generate.BLOCK.sub("", (ROOT / name).read_text())
        assert not re.findall(r"^\|.*\d\.\d\d.*\|$", text, re.MULTILINE), name


@pytest.mark.parametrize("name", ["README.md", "docs/performance.md", "docs/guides/tuning.md", "docs/guides/fp8.md"])
def test_prose_has_no_figures_of_speed(name: str) -> None:
    """They are in generated blocks. Left are conditions, versions, and errors of sums (tests/benchmarks)."""
    text = generate.BLOCK.sub("", (ROOT / name).read_text())
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    assert not re.findall(r"\d+(?:\.\d+)? (?:us|TFLOP/s|TB/s|ms)\b", text)


def test_every_file_of_rows_is_in_the_index() -> None:
    """And the commit of a file is the one that it records, if it does."""
    assert names() == sorted(results.FILES)
    for name, (_, commit, _) in results.FILES.items():
        machine = load(name)["machine"] if ".json" in find(name).suffixes else {}
        if isinstance(machine, dict):  # not of several runs
            assert machine.get("commit", commit) == commit, name


def test_rows_that_are_named_exist() -> None:
    """A page names results as code, a docstring as words."""
    for page in (*DOCS, *(ROOT / "src").rglob("*.py")):
        quote = "`" if page.suffix == ".md" else r"\b"
        found = re.findall(rf"{quote}((?:[a-z0-9]+-)+h[12]00){quote}", page.read_text())
        assert set(found) <= set(results.FILES), page


def test_the_notebook_names_rows() -> None:
    """In the last column of "rows"; a dash is a run that was not kept."""
    for page in (ROOT / "docs" / "notebook").glob("*.md"):
        for table in re.findall(r"^\|.*\| rows \|\n\|[ -|]*\n((?:\|.*\n)+)", page.read_text(), re.MULTILINE):
            for row in table.splitlines():
                cell = row.split("|")[-2].strip()
                assert cell == "-" or re.fullmatch(r"`[\w-]+`(, `[\w-]+`)*", cell) or row.startswith("| **"), row


# The ladder

LADDER = ROOT / "docs" / "reference" / "ladder.md"


@pytest.mark.parametrize("page", [ROOT / x for x in sorted(QUOTED)], ids=page_id)
def test_the_ladder_quotes_its_files(page: Path) -> None:
    """Each excerpt stands in the file that is named before it."""
    quoted = re.findall(r"^From \[[\w.]+\]\(([^)]*)\):\n\n```python\n(.*?)^```", page.read_text(), re.M | re.S)
    assert len(quoted) == page.read_text().count("```python")
    for file, block in quoted:
        source = (page.parent / file).read_text()
        assert any(textwrap.indent(block, " " * depth) in source for depth in range(4, 32, 4)), (file, block)


def test_the_figures_of_the_ladder_are_those_of_its_rows() -> None:
    """The tables, and the rates of the loops."""
    text, name = LADDER.read_text(), "ladder-h200"
    measured = ladder.load_measurements(find(name), (4096, 4096, 4096))
    for row in json.loads((ROOT / "docs" / "ladder.json").read_text()):
        cells = ladder.format_counts(row)[:-1]
        own = ladder.format_measurements(row | measured.get((row["rung"], row["dtype"]), {}))
        assert f"| {' | '.join(cells[:10])} |" in text
        assert f"| {' | '.join((*cells[:2], *cells[10:], *own))} |" in text
    loops = (
        "FFMA {fma:.1f}, dp4a {dp4a:.1f}, mma.sync {mma_bf16:.1f} of bf16, {mma_tf32:.1f} of TF32, {mma_int8:.1f} of "
        "int8, wgmma {wgmma_bf16:.1f}."
    )
    wanted = loops.format(**{x["loop"]: x["loop_tflops"] for x in load(name)["rows"]})
    assert wanted in " ".join(text.split()), wanted


def test_the_rates_of_the_ladder_are_those_of_its_bounds() -> None:
    ffma, dp4a, mma, wgmma = (f"{roofline.TFLOPS[x]:.1f}" for x in ("fused", "dp4a", "mma", "wgmma"))
    for row in (
        f"| DRAM | {H200.dram_bytes_per_cycle * SM_CLOCK_MHZ / 1e6:.2f} TB/s |",
        f"| L2 | {roofline.L2_TO_SM_BYTES_PER_CYCLE} bytes per cycle of an SM, of {SM_CLOCK_MHZ} MHz; "
        f"{roofline.SMEM_FILL_BYTES_PER_CYCLE} with multicast |",
        f"| L1 | {roofline.WAVEFRONT_BYTES} bytes per cycle: a wavefront, or {roofline.L1_SECTORS_PER_CYCLE} sectors |",
        f"| issue | {roofline.SCHEDULERS_PER_SM} instructions per cycle |",
        f"| math | FFMA {ffma}, dp4a {dp4a}, mma.sync and wmma {mma}, wgmma {wgmma} TFLOP/s of 16 bits; ",
    ):
        assert row in LADDER.read_text(), row


def test_what_nsight_compute_counts() -> None:
    """How many numbers were compared, and how many are equal."""
    rows = [(x["part"] == "probes", y) for x in load("ladder-counters-h200")["rows"] for y in x["compared"]]
    groups = {
        "sectors of global memory": lambda probe, counter: counter.startswith("sectors"),
        "bytes of TMA": lambda probe, counter: counter.startswith("bytes"),
        "wavefronts of shared memory, rungs": lambda probe, counter: counter.startswith("wavefronts") and not probe,
        "wavefronts of shared memory, single accesses": lambda probe, counter: (
            counter.startswith("wavefronts") and probe
        ),
        "FFMA, IDP and tensor instructions": lambda probe, counter: re.match("FFMA|IDP|I?H?G?MMA", counter),
        "CTAs and warps per SM, also by the driver": lambda probe, counter: re.search("(an|per) SM$", counter),
    }
    of_group = {title: [y for probe, y in rows if has(probe, y["counter"])] for title, has in groups.items()}
    assert sum(map(len, of_group.values())) == len(rows)
    for title, found in of_group.items():
        row = f"| {title} | {len(found)} | {sum('why' not in y for y in found)} |"
        assert row in LADDER.read_text(), row


@pytest.mark.slow
@pytest.mark.parametrize("case", [RUNG_CASES[1], RUNG_CASES[8], *RUNG_CASES[-2:]], ids=lambda x: f"{x.name}-{x.dtype}")
def test_the_rows_of_the_ladder_are_what_is_counted_today(case: RungCase) -> None:
    """But for lines, and for what another compiler may do otherwise."""
    rows = json.loads((ROOT / "docs" / "ladder.json").read_text())
    (kept,) = [x for x in rows if (x["rung"], x["dtype"]) == (case.name, case.dtype.name)]
    fresh = json.loads(json.dumps(ladder.count_rung(case, (kept["m"], kept["n"], kept["k"]))))
    for name in ("registers", "ctas", "warps", "occupancy_limit", "line"):
        del kept[name], fresh[name]
    assert fresh == kept
