"""The pages' Python runs as it is printed, what they refer to exists, and what they quote is what the code gives."""

from __future__ import annotations

import json
import re
import shlex
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

import gemmsmith
from gemmsmith.cli import ladder, main
from gemmsmith.ladder import STEPS, Step
from gemmsmith.tuning import limits
from gemmsmith.tuning.gpus import H200

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def executed(page: str, with_word: str = "") -> dict[str, Any]:
    """What a page's Python leaves behind, or those blocks of it that have a word."""
    text = (ROOT / page).read_text()
    scope: dict[str, Any] = {}
    for block in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if with_word not in block.group(1):
            continue
        line = text[: block.start()].count("\n") + 1
        source = "\n" * line + block.group(1)
        exec(compile(source, page, "exec"), scope)
    return scope


def test_the_epilogue_page_runs() -> None:
    assert np.isfinite(executed("docs/epilogues.md")["loss"])


@pytest.mark.slow
def test_the_fp8_page_runs() -> None:
    assert np.isfinite(executed("docs/fp8.md")["y"]).all()


def test_the_readmes_fp8_runs() -> None:
    s = executed("README.md", "relu_in_fp8")
    back = gemmsmith.dequantize(s["h"], s["scale_h"], "fp32")
    exact = np.maximum(s["x"] @ s["w"], 0)
    assert np.linalg.norm(back - exact) < 0.06 * np.linalg.norm(exact)


@pytest.mark.torch
def test_the_torch_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)  # it draws a picture
    s: Any = executed("docs/torch.md")
    assert s["value"].isfinite()


def test_the_readme_quotes_a_kernel() -> None:
    loop = next(b for b in re.findall(r"^```python\n(.*?)^```", PAGES[0].read_text(), re.M | re.S) if "k_tile" in b)
    assert textwrap.indent(loop, " " * 4) in (ROOT / "src/gemmsmith/kernels/cooperative.py").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """To a file, and if to a heading of a page, to one that is there."""
    for target, heading in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
        if "://" not in target:
            file = page.parent / target if target else page
            assert file.exists(), target
            assert not heading or heading in headings(file), f"{target}#{heading}"


def headings(page: Path) -> list[str]:
    """As GitHub names them in links."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_their_options_exist(page: Path) -> None:
    text = page.read_text()
    code = [
        *re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL),
        *re.findall(r"^```console\n\$ (.*)$", text, re.MULTILINE),
        *re.findall(r"`(gemmsmith [^`]+)`", text),
    ]
    for name, words in re.findall(r"^(?:.*&& )?gemmsmith ([a-z]+)(.*)$", "\n".join(code), re.MULTILINE):
        assert name in main.commands, name
        options = {opt for p in main.commands[name].params for opt in (*p.opts, *p.secondary_opts)}
        assert set(re.findall(r"--[a-z-]+", words)) <= options, (name, words)


def test_every_environment_variable_is_documented() -> None:
    sources = (ROOT / "src").rglob("*.py")
    read = {name for path in sources for name in re.findall(r"environ\b\W+(?:get\W+)?(\w+)", path.read_text())}
    assert read
    assert read <= set(re.findall(r"`(\w+)`", (ROOT / "docs" / "environment.md").read_text()))


def test_console_blocks_are_what_the_commands_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block begins with `$ gemmsmith …`; the rest is its standard output, but for spaces at the ends of lines."""
    monkeypatch.setenv("GEMMSMITH_CACHE_DIR", str(tmp_path))  # without configs that the user tuned
    blocks = [b for page in PAGES for b in re.findall(r"^```console\n\$ (.*)\n([^`]*)^```", page.read_text(), re.M)]
    assert blocks
    for command, expected in blocks:
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
    for name in ("examples", "benchmarks", "docs/ladder.json"):
        (tmp_path / name).symlink_to(ROOT / name)
    block = re.findall(r"^```sh\n(.*?)^```", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE | re.DOTALL)[-1]
    for command in block.replace("\\\n", "").replace(" && ", "\n").splitlines():
        program, *words = shlex.split(command)
        if program == "gemmsmith":
            result = CliRunner().invoke(main, words)
            assert result.exit_code == 0, result.output
        else:
            subprocess.run([sys.executable if program == "python" else program, *words], check=True)
    pictures = sorted(path.relative_to(ROOT) for path in (ROOT / "docs").rglob("*.png"))
    assert pictures == sorted(path.relative_to(tmp_path) for path in (tmp_path / "docs").rglob("*.png"))
    for picture in pictures:
        kept, fresh = (Image.open(folder / picture) for folder in (ROOT, tmp_path))
        if kept.text["Software"] == fresh.text["Software"]:  # another matplotlib places text otherwise
            assert kept.size == fresh.size, picture
            difference = np.abs(np.asarray(kept, int) - np.asarray(fresh, int)).max()
            assert difference <= 8, f"{picture} is not what its command in CONTRIBUTING.md draws today"


def mean_and_least(ratios: list[float], digits: int = 3) -> str:
    """The geometric mean, with so many digits, and the least, as cells of a table."""
    return f" {statistics.geometric_mean(ratios):.{digits}f} | {min(ratios):.3f} |"


@pytest.mark.parametrize("name", ["README.md", "docs/performance.md"])
def test_the_table_of_the_suite_is_of_its_results(name: str) -> None:
    """Classes, numbers of shapes, geometric means and least ratios to torch.mm and to cuBLASLt."""
    dense, ragged = (rows_of(f"dense-{which}-h200.json") for which in ("suite", "ragged"))

    def within(condition: Callable[[int, int, int], bool]) -> list[dict[str, Any]]:
        return [r for r in dense if condition(r["m"], r["n"], r["k"])]

    found = {
        "all but the ragged": dense,
        "memory-bound, M <= 64": within(lambda m, n, k: m <= 64),
        "middle, M 128 to 512": within(lambda m, n, k: 128 <= m <= 512),
        "large, 2MNK >= 1e11": within(lambda m, n, k: 2 * m * n * k >= 1e11),
        "cubes, M = N = K": within(lambda m, n, k: m == n == k),
        "ragged": ragged,
    }
    text = (ROOT / name).read_text()
    for title, rows in found.items():
        row = f"| {title} | {len(rows)} |"
        for ratio in ("ratio", "lt_ratio"):
            row += (
                mean_and_least([r[ratio] for r in rows], 2 if title == "ragged" else 3) if ratio in rows[0] else " | |"
            )
        assert row in text, row


KINDS = {"bmm": "bf16, batches", "fp8_fast": "fp8, one scale, fast accumulation",
         "fp8_rows": "fp8, scales of rows and columns", "tf32": "TF32"}  # fmt: skip


def test_the_table_of_layouts_and_kinds_is_of_its_results() -> None:
    text = (ROOT / "README.md").read_text()
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for r in rows_of("layers-h100.json"):
        found.setdefault((f"bf16, {r['role']}", r["layout"]), []).append(r)
    for r in rows_of("kinds-h100.json"):
        found.setdefault((KINDS[r["kind"]], r["layout"]), []).append(r)
    for (title, layout), rows in found.items():
        row = f"| {title} | {layout} | {len(rows)} |"
        for ratio in ("torch_ratio", "lt_ratio"):
            row += mean_and_least([r[ratio] for r in rows if ratio in r])
        assert row in text, row


def test_the_tables_of_epilogues_are_of_their_results() -> None:
    rows = rows_of("epilogues-h200.json")
    text = (ROOT / "README.md").read_text()
    for value in (lambda r: f"{r['us']:#.4g}".rstrip(".") if r["us"] > 100 else f"{r['us']:.1f}",
                  lambda r: f"{r['cost']:.2f}", lambda r: f"{r['over_eager']:.2f}",
                  lambda r: f"{min(r[x] for x in ('over_compile', 'over_max_autotune') if x in r):.2f}"):  # fmt: skip
        for shape in dict.fromkeys((r["m"], r["n"], r["k"]) for r in rows):
            of = {r["epilogue"]: value(r) for r in rows if (r["m"], r["n"], r["k"]) == shape}
            row = f"| {' x '.join(map(str, shape))} | {' | '.join(of.values())} |"
            assert row in text, row


def test_the_table_by_rows_of_a_is_of_its_results() -> None:
    text = (ROOT / "docs" / "performance.md").read_text()
    layers = [r for r in rows_of("dense-suite-h200.json") if not r["m"] == r["n"] == r["k"]]
    for m in (1, 16, 64, 128, 256, 512):
        rows = [r for r in layers if r["m"] == m]
        row = f"| M = {m} | {len(rows)} |"
        for ratio in ("ratio", "lt_ratio"):
            row += mean_and_least([r[ratio] for r in rows])
        assert row in text, row


def test_the_tables_of_packing_and_of_the_host_are_of_their_results() -> None:
    text = (ROOT / "README.md").read_text()
    packed = {(r["m"], r["n"], r["k"]): r for r in rows_of("predicated-producer-h200.json")}
    for shape in [(4097, 4093, 4095), (1001, 777, 3333), (257, 5001, 7001), (8191, 511, 129)]:
        times = (packed[shape][name] for name in ("packing_us", "torch_us"))
        row = f"| {' x '.join(map(str, shape))} | {' | '.join(f'{us:.{int(us < 20)}f}' for us in times)} |"
        assert row in text, row
    calls = {r["call"]: r["us"] for r in rows_of("launch-h200.json")}
    pairs = {
        "`gemm(a, b)`, `torch.mm(a, b)`": ("gemm", "torch.mm"),
        "the same with `out`": ("gemm(out=)", "torch.mm(out=)"),
        "bias and relu in one call of `gemm`, in two of torch": ("gemm(epilogue=)", "torch.addmm, relu"),
    }
    for name, (ours, torch) in pairs.items():
        assert f"| {name} | {calls[ours]:.1f} us | {calls[torch]:.1f} us |" in text, name
    for name, call in {"`plan.run`": "plan.run", "what `plan.prepare` returns": "plan.prepare(...)()"}.items():
        assert f"| {name} | {calls[call]:.1f} us | |" in text, name


def test_the_table_of_shapes_that_are_not_tuned_is_of_its_results() -> None:
    rows, text = rows_of("dense-unseen-h200.json"), (ROOT / "README.md").read_text()
    classes = {"all": (1, 1 << 20), "M <= 64": (1, 64), "M 65 to 512": (65, 512), "M > 512": (513, 1 << 20)}
    for title, (fewest, most) in classes.items():
        members = [r for r in rows if fewest <= r["m"] <= most]
        row = f"| {title} | {len(members)} |"
        for ratio in ("ratio", "lt_ratio"):
            row += mean_and_least([r[ratio] for r in members])
        assert row in text, row
    again = rows_of("dense-unseen-corrected-h200.json")
    least = " and ".join(f"{min(r[ratio] for r in again):.3f}" for ratio in ("ratio", "lt_ratio"))
    assert f"Of the {len(again)} that" in text
    assert f"the least are {least}" in text


def test_the_fp8_tables_are_of_their_results() -> None:
    """By M; the shapes where another is faster; those that are further from the floor than is our goal."""
    rows, text = rows_of("fp8-h200.json"), (ROOT / "docs" / "fp8.md").read_text()
    peers = {"torch_ratio": 1, "lt_ratio": 1, "deepgemm_ratio": 0.98}
    most_over_floor = {1: 1.02, 16: 1.02, 64: 1.08, 128: 1.20}
    classes = {f"M = {m}": (m, m) for m in most_over_floor}
    classes |= {"M <= 128": (1, 128), "M = 256 to 1024": (256, 1024), "M = 4096, 8192": (4096, 8192)}
    for title, (fewest, most) in (classes | {"M > 128": (129, 1 << 20)}).items():
        members = [r for r in rows if fewest <= r["m"] <= most]
        row = f"| {title} | {len(members)} |"
        for peer in peers:
            found = [r[peer] for r in members if peer in r]
            row += mean_and_least(found) if found else " | |"
        over = [r["us"] / r["floor_us"] for r in members]
        row += f" {statistics.geometric_mean(over):.3f} | {max(over):.3f} |" if most <= 128 else " | |"
        assert row in text, row
    slower = [r for r in rows if any(r.get(peer, 1) < least for peer, least in peers.items())]
    cells = [(r, [f"{r[peer]:.3f}" for peer in peers]) for r in slower]
    for r in rows:
        if r["m"] in most_over_floor and r["us"] / r["floor_us"] > most_over_floor[r["m"]]:
            cells.append((r, [f"{r['us'] / r['floor_us']:.3f}"]))
    for r, ratios in cells:
        row = f"| {r['m']} x {r['n']} x {r['k']} | {r['us']:#.4g} | {' | '.join(ratios)} |"
        assert row in text, row
    assert len(cells) == len(re.findall(r"^\| \d+ x \d+ x \d+ \|", text, re.MULTILINE))
    for title, few in {"M <= 128": True, "M > 128": False}.items():
        found = [r["deepgemm_ratio"] for r in rows_of("fp8-unseen-h200.json") if (r["m"] <= 128) == few]
        assert f"| unseen, {title} | {len(found)} |{mean_and_least(found)}" in text


def test_the_readmes_line_of_fp8_is_of_its_results() -> None:
    rows, text = rows_of("fp8-h200.json"), (ROOT / "README.md").read_text()
    torch, deepgemm = ([r[x] for r in rows if x in r] for x in ("torch_ratio", "deepgemm_ratio"))
    found = [f"{statistics.geometric_mean(x):.3f}, least {min(x):.3f}" for x in (torch, deepgemm)]
    assert f"FP8 with block scales, {len(rows)} shapes" in text
    assert f"torch's scaled_mm: ratio {found[0]}; DeepGEMM: {found[1]}" in text


def rows_of(name: str) -> list[dict[str, Any]]:
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text())["rows"]


LADDER = ROOT / "docs" / "ladder.md"


def test_the_ladder_quotes_its_files() -> None:
    """Each excerpt stands in the file that is named before it."""
    blocks = re.findall(r"^From \[[\w.]+\]\(([^)]*)\):\n\n```python\n(.*?)^```", LADDER.read_text(), re.M | re.S)
    assert len(blocks) == LADDER.read_text().count("```python")
    for file, block in blocks:
        source = (LADDER.parent / file).read_text()
        assert any(textwrap.indent(block, " " * depth) in source for depth in range(4, 32, 4)), (file, block)


def test_the_figures_of_the_ladder_are_those_of_its_rows() -> None:
    """The tables, and below each rung its counts, its bound, and what was measured."""
    text, results = LADDER.read_text(), "ladder-h200.json"
    measured = ladder.measured(ROOT / "benchmarks" / "results" / results, (4096, 4096, 4096))
    for row in json.loads((ROOT / "docs" / "ladder.json").read_text()):
        cells = ladder.cells(row)[:-1]
        own = ladder.measured_cells(row | measured.get((row["rung"], row["dtype"]), {}))
        assert f"| {' | '.join(cells[:10])} |" in text
        assert f"| {' | '.join((*cells[:2], *cells[10:], *own))} |" in text
        name, dtype, _, _, _, waves, ideal, sectors, ideal_sectors, multiply, _, tflops, _, limit = cells
        counts = f"{waves} wavefronts (ideal {ideal}), {sectors} sectors (ideal {ideal_sectors}), {multiply}"
        wanted = (
            f"> {name}, {dtype}: {counts} multiplications;\n> at most {tflops} TFLOP/s, by {limit}; measured: "
            f"{own[1] or 'not yet'}."
        )
        assert wanted in text, wanted
    loops = (
        "FFMA {fma:.1f}, dp4a {dp4a:.1f}, mma.sync {mma_bf16:.1f} of bf16, {mma_tf32:.1f} of TF32, {mma_int8:.1f} of "
        "int8, wgmma {wgmma_bf16:.1f}."
    )
    assert loops.format(**{x["loop"]: x["loop_tflops"] for x in rows_of(results)}) in text


def test_the_rates_of_the_ladder_are_those_of_its_bounds() -> None:
    ffma, dp4a, mma, wgmma = (f"{limits.TFLOPS[x]:.1f}" for x in ("fused", "dot", "mma", "wgmma"))
    for row in (
        f"| DRAM | {H200.dram_bytes_per_cycle * limits.MHZ / 1e6:.2f} TB/s |",
        f"| L2 | {limits.SM_BYTES_PER_CYCLE} bytes a cycle of an SM, of {limits.MHZ} MHz; "
        f"{limits.FILL_BYTES_PER_CYCLE} with multicast |",
        f"| L1 | {limits.WAVEFRONT} bytes a cycle: a wavefront, or {limits.SECTORS_PER_CYCLE} sectors |",
        f"| issue | {limits.SCHEDULERS} instructions a cycle |",
        f"| math | FFMA {ffma}, dp4a {dp4a}, mma.sync and wmma {mma}, wgmma {wgmma} TFLOP/s of 16 bits; ",
    ):
        assert row in LADDER.read_text(), row


def test_what_nsight_compute_counts() -> None:
    """How many numbers were compared, and how many are equal."""
    rows = [(x["part"] == "probes", y) for x in rows_of("ladder-counters-h200.json") for y in x["compared"]]
    groups = {
        "sectors of global memory": lambda probe, counter: counter.startswith("sectors"),
        "bytes of TMA": lambda probe, counter: counter.startswith("bytes"),
        "wavefronts of shared memory, rungs": lambda probe, counter: counter.startswith("wavefronts") and not probe,
        "wavefronts of shared memory, single accesses": lambda probe, counter: (
            counter.startswith("wavefronts") and probe
        ),
        "FFMA, IDP and tensor instructions": lambda probe, counter: re.match("FFMA|IDP|I?H?G?MMA", counter),
        "CTAs and warps an SM, the driver's too": lambda probe, counter: counter.endswith("an SM"),
    }
    of_group = {title: [y for probe, y in rows if has(probe, y["counter"])] for title, has in groups.items()}
    assert sum(map(len, of_group.values())) == len(rows)
    for title, found in of_group.items():
        assert f"| {title} | {len(found)} | {sum('why' not in y for y in found)} |" in LADDER.read_text(), title


@pytest.mark.slow
@pytest.mark.parametrize("step", [STEPS[1], STEPS[8], *STEPS[-2:]], ids=lambda x: f"{x.name}-{x.dtype}")
def test_the_rows_of_the_ladder_are_what_is_counted_today(step: Step) -> None:
    """But for lines, and for what another compiler may do otherwise."""
    rows = json.loads((ROOT / "docs" / "ladder.json").read_text())
    (kept,) = [x for x in rows if (x["rung"], x["dtype"]) == (step.name, step.dtype.name)]
    fresh = json.loads(json.dumps(ladder.row(step, (kept["m"], kept["n"], kept["k"]))))
    for name in ("registers", "ctas", "warps", "occupancy_limit", "line"):
        del kept[name], fresh[name]
    assert fresh == kept
