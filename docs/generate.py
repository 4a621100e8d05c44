"""Writes what the pages take from the code and from measured rows; tests/test_docs.py checks that nothing is stale.

    python docs/generate.py [--check] [--quick]

With --check it writes nothing, and fails if a page is stale. With --quick it leaves out docs/learn, which takes half a
minute.

Whole pages: operations.md, cli.md, python.md, kernels.md and ladder.md of docs/reference, benchmarks/results/README.md.
Blocks between `<!-- generated: NAME -->` and `<!-- end -->` in the pages of PAGES: the tables of docs/figures.py, the
lines of CUDA in README.md, excerpts of the source. In docs/ladder.md and docs/learn the excerpts after "From [file]",
the numbers of the timelines, and the reports of kernels with an error; in the notebook and docs/guides/reading-why.md
the output of commands.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import json
import os
import re
import shlex
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
import numpy as np
from click.testing import CliRunner

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from docs import figures, results, tutorial  # noqa: E402

from benchmarks.rows import find, load  # noqa: E402
from gemmsmith import Config, Spec, hw, plan  # noqa: E402
from gemmsmith.cli import ladder, main  # noqa: E402
from gemmsmith.cli.group import COMMANDS, find_command  # noqa: E402
from gemmsmith.graph.frontend import op_table  # noqa: E402
from gemmsmith.graph.function_costs import COSTS  # noqa: E402
from gemmsmith.graph.functions import FUNCTIONS  # noqa: E402
from gemmsmith.hw.wgmma import WgmmaWait  # noqa: E402
from gemmsmith.kernels.build import build  # noqa: E402
from gemmsmith.lang import Builder, RegisterArray, SharedView, Value, Variable  # noqa: E402
from gemmsmith.lang import statements as st  # noqa: E402
from gemmsmith.tuning import roofline  # noqa: E402
from gemmsmith.tuning.costs import SM_CLOCK_MHZ  # noqa: E402

PAGES = (
    "README.md", "docs/performance.md", "docs/guides/mixture-of-experts.md", "docs/guides/pytorch.md",
    "docs/internals/extending.md", "docs/getting-started.md", "docs/guides/tuning.md",
)  # fmt: skip
BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n)(.*?)(?=<!-- end -->)", re.DOTALL)

OPERATIONS = """\
# Operations of epilogues

What an epilogue may call: look a function up by the name that torch, numpy or math has for it. A function and a method
of the same name are the same operation (`torch.relu(x)`, `x.relu()`); arguments are torch's. Operators work, too:
`+ - * / ** < <= > >= == != & | ~ ^`, `abs(x)` and `round(x)`. Everything is computed in fp32. This page is generated
from `graph/functions.py` and `graph/frontend/op_table.py` by `python docs/generate.py`.

## Elementwise functions

The default form is within 2^-18 of the exact value, relative. *Approximate* is a cheaper form, within 2^-11. It is
taken if every result that depends on it is stored in bf16 or fp8. *Exact* is CUDA's math library and IEEE division, for
`fast_math=False`. If it is not listed, the default is exact to that degree. *Gradient*: `gemmsmith.torch`
differentiates the function; the derivative of the others is zero. *Instructions*: those of an element on Hopper, and in
parentheses those of the special-function unit, in the default and in the approximate form. `sin`, `cos`, `pow` and
`hypot` have branches.

| operation | other names | has | instructions |
| --- | --- | --- | --- |
{elementwise}

## Functions that are composed of these

{composed}

## Reductions

`dim` is -1 (columns), -2 (rows), 0 (the batch), a tuple of these, or None (everything). In a grouped GEMM each
[group](../guides/grouped.md#reductions) is reduced by itself.

{reductions}

## Functions of gemmsmith

| function | what it computes | limits |
| --- | --- | --- |
| `gemmsmith.quantize(x, "1x128")` | fp8 values, one scale per row and 128 columns | multiples of 16 up to 256 |
| `gemmsmith.top_k_softmax(x, k)` | softmax over the k largest of a row, 0 elsewhere | at most 256 columns |
| `gemmsmith.deinterleave(acc)` | gate and up of columns interleaved in groups of 8 | |

## What is not supported, and what to write instead

| functions | use instead |
| --- | --- |
{unsupported}
"""

CLI = """\
# Command line

Look up a command's options here, or with `gemmsmith COMMAND --help`. Sizes are M, N and K joined by x, such as
`gemmsmith show 512x4096x4096`, or `--m`, `--n` and `--k`. All commands take the config that `gemm` takes. Errors are
one line on stderr; with `--json`, one object on stdout. This page is generated from the commands by
`python docs/generate.py`.

| exit code | meaning |
| --- | --- |
| 0 | done |
| 1 | the result is wrong, a hazard was found, or `doctor` found something broken |
| 2 | the request cannot be served |
"""

PYTHON = """\
# Python

Look up a public name ([which are public](../support.md#deprecations)). What it takes, returns and raises (shapes,
dtypes, units, errors) is in its docstring: `help(gemmsmith.gemm)`, or the page of the site that the name leads to. This
page is generated from the docstrings by `python docs/generate.py`.

## Functions and classes

{names}

## Errors

Each message names the argument, what came, and what works. All but the warning are subclasses of
`gemmsmith.GemmsmithError`.

{errors}

## gemmsmith.graph

Visitor trees in CUTLASS's terms ([guide](../guides/epilogues.md#the-worked-example-a-loss)), and what operations of
your own need ([how to add one](../internals/extending.md#an-elementwise-function)).

{graph}

## gemmsmith.lang

What records kernels ([guide](../guides/write-a-kernel.md)). Its methods are on [a page of their own](kernels.md).

{lang}

## gemmsmith.hw

[The instructions](kernels.md#hw), and what one of your own needs
([example](../guides/write-a-kernel.md#an-instruction-of-your-own)).

{hw}

## gemmsmith.kernels

What a kernel or a design of your own is composed of ([how](../internals/extending.md#a-design)).

{kernels}

## gemmsmith.torch

With gradients, and for torch.compile ([guide](../guides/pytorch.md)).

{torch}

## gemmsmith.torch.parallel

For torch's tensor and expert parallelism ([guide](../guides/pytorch.md#on-several-devices)).

{parallel}
"""

KERNELS = """\
# Kernels: k. and hw.

Look up a name of the language that kernels are written in. `k` is the `gemmsmith.lang.Builder` of a kernel, and
`gemmsmith.hw` has the instructions. The [guide](../guides/write-a-kernel.md) explains them with an example. This page
is generated from the docstrings by `python docs/generate.py`.

## k

| name | what it does |
| --- | --- |
{builder}

## What k returns

`x` is a value, `v` a variable (`k.var`), `r` an array of registers (`k.registers`), `s` shared memory (`k.shared`),
whose `s[i]` is the view of a stage, at `s[i].address` (u32). Operators (`+ - * / // % << >> & | ^ ~ < <= > >= == !=`)
take values and Python's numbers.

| name | what it does |
| --- | --- |
{value}

## hw

Types of operands are PTX's. Instructions record themselves in the current kernel.

| name | what it does | from |
| --- | --- | --- |
{instructions}
"""

LADDER = """\
# Figures of the ladder

Look up what each rung of the [ladder](../ladder.md) needs, counts and reaches. This page is generated from
`docs/ladder.json` (`gemmsmith ladder --json`) and from measured rows by `python docs/generate.py`.

A **wavefront** moves up to 128 bytes of shared memory, one word in each of its 32 banks. A **sector** is 32 bytes of
global memory. **Ideal** is the count if the warp's lanes accessed the same bytes contiguously, each byte once. A
**multiplication** is an instruction of a warp: FFMA, dp4a, or one of the tensor cores'. All three are per million
FLOPs.

{counts}

## Bounds and measurements

The counts bound the time of 4096 x 4096 x 4096 on an H200 from below, each resource at full rate, without latency. The
resources are DRAM, the L2, the L1 (wavefronts of shared memory, and sectors that threads load), the issue of these
instructions, and the multiplications (math). The roofline is the longer of math and DRAM, which no kernel can change.

| resource | at most |
| --- | --- |
{rates}

The rates of FFMA and mma.sync were measured with loops of these instructions. Those of DRAM, the L2 and wgmma are
constants of the [cost model](../internals/decisions.md#choosing-configs). The others are NVIDIA's.

The last four columns were measured on an H200 (CUDA {cuda}, torch {torch}, commit {commit}) under sustained load
([rows](../../benchmarks/results/ladder-h200.json)) by `python -m benchmarks.ladder.speed --rounds 2 --shape
4096x4096x4096`. cuBLAS has the same dtype and accumulation. The measured roofline is the longer of a copy of as many
bytes and of a loop of the rung's own instruction in registers. Loops need less power than GEMMs, so they run at a
higher clock. Loops reached, in TFLOP/s: {loops}.

{bounds}

## What Nsight Compute counts

Each rung at 512 x 512 x 512, and [71 single accesses](../../benchmarks/ladder/shared.py) to shared memory
([rows](../../benchmarks/results/ladder-counters-h200.json.xz)). Wavefronts are equal within 2 %, everything else
exactly. The [notebook](../notebook/simulator-counters.md) has the reasons of the differences.

{compared}

ptxas joins loads of neighbors to loads of 16 bytes in `block_tile` and `thread_tile`. So the hardware has 0.75 and 0.51
times as many wavefronts of loads as the simulator counts, and `thread_tile` is faster than its bound.
"""


def _names(op: str) -> list[str]:
    """Return the names of torch, numpy and math for an entry of the table of operations."""
    return [op, *op_table._OP_ALIASES.get(op, "").split()]


def _code(names: list[str]) -> str:
    return ", ".join(f"`{x}`" for x in names)


def operations() -> str:
    """Return docs/reference/operations.md."""
    canonical = [op for op in op_table.OPS if not any(op in x.split() for x in op_table._OP_ALIASES.values())]
    own = {"gelu_tanh": ["gelu(x, approximate='tanh')"]}
    rows = []
    for f in FUNCTIONS.values():
        if f.name in ("ndtr", "softplus_of_sigmoid"):  # only made by the passes
            continue
        names = own.get(f.name) or [x for x in f.names.split() or _names(f.name) if x != f.name]
        has = {"approximate": f.approx, "exact": f.exact, "gradient": f.has_gradient}
        flags = [", ".join(x for x in has if has[x])]
        found = [cost for p in ("default", "approx") if (cost := COSTS[f.name].get(p))]
        flags.append(", ".join(f"{x.instructions:.0f} ({x.special:.0f})" for x in found))
        rows.append(f"| `{f.name}` | {_code(names)} | {' | '.join(flags)} |".replace("  ", " "))
    kinds = ("sum", "mean", "max", "min", "logsumexp", "count_nonzero")
    composed = [op for op in canonical if op not in FUNCTIONS and op not in kinds]
    hints: dict[str, list[str]] = {}
    for name, hint in op_table.UNSUPPORTED_HINTS.items():
        hints.setdefault(hint, []).append(name)
    return OPERATIONS.format(
        elementwise="\n".join(rows),
        composed="\n".join(textwrap.wrap(_code([x for op in composed for x in _names(op)]), 120)),
        reductions="\n".join(textwrap.wrap(_code([x for op in kinds for x in _names(op)]), 120)),
        unsupported="\n".join(f"| {_code(names)} | {hint} |" for hint, names in hints.items()),
    )


ACTION = re.compile(r"^(\S.*?) {2,}(.*(?:\n +.*)*)", re.MULTILINE)
"""In a command's help, an action with its arguments, and its meaning."""


def _options(command: click.Command) -> Iterator[str]:
    """Yield a row per option of a command; the fields of a config have one row, and actions stand for arguments."""
    context = click.Context(command)
    actions = ACTION.findall(inspect.cleandoc(command.help or ""))
    for name, text in actions:
        yield f"| `{name}` | {' '.join(text.split())} |"
    fields = [p for p in command.params if p.name in Config.__dataclass_fields__]
    if fields:
        names = ", ".join(f"`{p.opts[0]}`" for p in fields)
        forms = "`--tile 128x256x64`, `--cluster 2x1`, `--evict first normal`, `--no-swap-ab`"
        yield f"| {names} | The fields of [Config](config.md): {forms}. |"
    for parameter in command.params:
        if parameter in fields:
            continue
        record = parameter.get_help_record(context)
        if isinstance(parameter, click.Argument):
            if not actions:
                yield f"| `{parameter.make_metavar(context)}` | the argument |"
        elif record is not None:
            name, text = (x.replace("|", "\\|") for x in record)
            yield f"| `{name}` | {' '.join(text.split())} |"


def _line(command: click.Command) -> str:
    return (command.help or "").strip().split("\n\n")[0].replace("\n", " ")


MIN_SHARED = 6
"""Options that a command has in common with an earlier one are not listed again if they are so many."""


def command_line() -> str:
    """Return docs/reference/cli.md."""
    sections, written = [CLI], {}
    for name in COMMANDS:
        command = find_command(name)
        rows = list(_options(command))
        sections.append(f"## gemmsmith {name}\n\n{_line(command)}\n")
        base = max(written, key=lambda x: len(written[x] & set(rows)), default="")
        shared = written.get(base, set()) & set(rows)
        written[name] = set(rows)
        if len(shared) >= MIN_SHARED:
            omitted = (re.match(r"\| `(--[\w-]+)", row) for row in sorted(written[base] - shared))
            without = ", ".join(f"`{x.group(1)}`" for x in omitted if x)
            note = f"The options of [`gemmsmith {base}`](#gemmsmith-{base})" + f" without {without}" * bool(without)
            rows = [row for row in rows if row not in shared]
            sections.append(note + (", and:" if rows else ".") + "\n")
        if rows:
            sections.append("\n".join(("| option | meaning |", "| --- | --- |", *rows, "")))
    return "\n".join(sections)


def _items(documented: dict[str, str | None]) -> str:
    """Return a list of names and the first sentences of their docstrings; names with the same one share an item."""
    names: dict[str, list[str]] = {}
    for name, doc in documented.items():
        names.setdefault(_sentence(doc or ""), []).append(name)
    return "\n".join(f"- {_code(names[sentence])}: {sentence}" for sentence in names)


def _sentence(doc: str) -> str:
    return re.split(r"(?<=\.)\s", " ".join(doc.split("\n\n")[0].split()))[0].replace("|", "\\|")


@cache
def public(module: str) -> dict[str, str | None]:
    """Return the docstrings of the names that a module defines or exports, by its source: to import it may need torch.

    Packages export what they import; a module what it imports as itself.
    """
    path, found = ROOT / "src" / module.replace(".", "/"), dict[str, str | None]()
    is_package = path.is_dir()
    tree = ast.parse((path / "__init__.py" if is_package else path.with_suffix(".py")).read_text())
    for x, after in zip(tree.body, [*tree.body[1:], None], strict=False):
        if isinstance(x, ast.FunctionDef | ast.ClassDef):
            found[x.name] = ast.get_docstring(x)
        elif isinstance(x, ast.Assign | ast.AnnAssign):
            documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            target = x.target if isinstance(x, ast.AnnAssign) else x.targets[0]
            found[ast.unparse(target)] = str(after.value.value) if documented else None
    if module == "gemmsmith.hw":
        found |= {name: x.__doc__ for name, x in _instructions().items()}
    for x in ast.walk(tree):
        if isinstance(x, ast.ImportFrom) and str(x.module).startswith("gemmsmith.") and x.module != module:
            names = [y.name for y in x.names if y.asname == y.name or (is_package and y.asname is None)]
            of_module = public(str(x.module)) if names else {}
            found |= of_module if names == ["*"] else {name: of_module[name] for name in names if name in of_module}
    return {name: found[name] for name in sorted(found, key=str.lower) if name[0] != "_"}


PACKAGES = ("gemmsmith", *re.findall(r"^## (gemmsmith\.[\w.]+)", PYTHON, re.MULTILINE))
"""The packages whose names are public."""


def python() -> str:
    """Return docs/reference/python.md. It does not need torch."""

    def table(package: str, names: Iterable[str]) -> str:
        return _items({f"{package}.{x}": public(package)[x] for x in names})

    names = public("gemmsmith")
    errors = [x for x in names if x.endswith(("Error", "Warning"))]
    tables = {package.split(".")[-1]: table(package, public(package)) for package in PACKAGES[1:]}
    tables["hw"] = table("gemmsmith.hw", [x for x in public("gemmsmith.hw") if x not in _instructions()])
    return PYTHON.format(
        names=table("gemmsmith", [x for x in names if x not in errors]), errors=table("gemmsmith", errors), **tables
    )


def _call(name: str, function: Callable[..., Any]) -> str:
    return f"`{name}({', '.join(x for x in inspect.signature(function).parameters if x != 'self')})`"


def _instructions() -> dict[str, Any]:
    """Return the instructions by name."""
    return {name: x for name, x in vars(hw).items() if getattr(x, "__module__", "").startswith("gemmsmith.hw")}


def kernels() -> str:
    """Return docs/reference/kernels.md."""

    def members(prefix: str, cls: type) -> str:
        attributes = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", inspect.getdoc(cls).partition("Attributes:")[2], re.M)
        found = {f"`{prefix}{name}`": text for name, text in attributes}
        for name, x in vars(cls).items():
            if name[0] != "_" and callable(x):
                found[_call(prefix + name, x)] = x.__doc__
        return "\n".join(f"| {name} | {_sentence(text)} |" for name, text in found.items())

    instructions = []
    for name, x in _instructions().items():
        arch = x.__wrapped__.required_arch if hasattr(x, "__wrapped__") else ""
        arch = arch if isinstance(arch, str) else "by its operands"
        instructions.append(f"| {_call(f'hw.{name}', x)} | {_sentence(x.__doc__ or '')} | {arch} |")
    returned = {"x.": Value, "v.": Variable, "r.": RegisterArray, "s[i].": SharedView}
    return KERNELS.format(
        builder=members("k.", Builder), instructions="\n".join(instructions),
        value="\n".join(members(prefix, cls) for prefix, cls in returned.items()),
    )  # fmt: skip


COMPARED: dict[str, Callable[[bool, str], Any]] = {
    "sectors of global memory": lambda probe, counter: counter.startswith("sectors"),
    "bytes of TMA": lambda probe, counter: counter.startswith("bytes"),
    "wavefronts of shared memory, rungs": lambda probe, counter: counter.startswith("wavefronts") and not probe,
    "wavefronts of shared memory, single accesses": lambda probe, counter: counter.startswith("wavefronts") and probe,
    "FFMA, IDP and tensor instructions": lambda probe, counter: re.match("FFMA|IDP|I?H?G?MMA", counter),
    "CTAs and warps per SM, also by the driver": lambda probe, counter: re.search("(an|per) SM$", counter),
}
"""What is compared with Nsight Compute: whether a counter, of a single access or not, is of that group."""


def ladder_figures() -> str:
    """Return docs/reference/ladder.md."""
    name = "ladder-h200"
    measured = ladder.load_measurements(find(name), (4096, 4096, 4096))
    rows = json.loads((ROOT / "docs/ladder.json").read_text())
    cells = [ladder.format_counts(x)[:-1] for x in rows]
    own = [ladder.format_measurements(x | measured.get((x["rung"], x["dtype"]), {})) for x in rows]
    loops = {x["loop"]: f"{x['loop_tflops']:.1f}" for x in load(name)["rows"]}
    ffma, dp4a, mma, wgmma = (f"{roofline.TFLOPS[x]:.1f}" for x in ("fused", "dp4a", "mma", "wgmma"))
    rates = {
        "DRAM": f"{figures.gpus.H200.dram_bytes_per_cycle * SM_CLOCK_MHZ / 1e6:.2f} TB/s",
        "L2": f"{roofline.L2_TO_SM_BYTES_PER_CYCLE} bytes per cycle of an SM, of {SM_CLOCK_MHZ} MHz; "
        f"{roofline.SMEM_FILL_BYTES_PER_CYCLE} with multicast",
        "L1": f"{roofline.WAVEFRONT_BYTES} bytes per cycle: a wavefront, or {roofline.L1_SECTORS_PER_CYCLE} sectors",
        "issue": f"{roofline.SCHEDULERS_PER_SM} instructions per cycle",
        "math": f"FFMA {ffma}, dp4a {dp4a}, mma.sync and wmma {mma}, wgmma {wgmma} TFLOP/s of 16 bits; of TF32 half, "
        "of 8 bits twice as much",
    }
    compared = [(x["part"] == "probes", y) for x in load("ladder-counters-h200")["rows"] for y in x["compared"]]
    groups = {title: [y for probe, y in compared if has(probe, y["counter"])] for title, has in COMPARED.items()}
    machine = load(name)["machine"]
    return LADDER.format(
        counts=figures.table(
            "rung | dtype | CTAs per SM | warps | registers | wavefronts | ideal | sectors | ideal | multiplications",
            (" | ".join(x[: ladder.BOUND_COLUMN]) for x in cells),
        ),
        bounds=figures.table(
            "rung | dtype | at least us | at most TFLOP/s | of roofline | bound by | us | TFLOP/s | of cuBLAS | of "
            "roofline",
            (" | ".join((*x[:2], *x[ladder.BOUND_COLUMN :], *y)) for x, y in zip(cells, own, strict=True)),
        ),
        compared=figures.table(
            "compared | numbers | equal",
            (f"{title} | {len(found)} | {sum('why' not in x for x in found)}" for title, found in groups.items()),
        ),
        rates="\n".join(f"| {title} | {rate} |" for title, rate in rates.items()),
        loops=f"FFMA {loops['fma']}, dp4a {loops['dp4a']}, mma.sync {loops['mma_bf16']} of bf16, "
        f"{loops['mma_tf32']} of TF32, {loops['mma_int8']} of int8, wgmma {loops['wgmma_bf16']}",
        cuda=machine["cuda"], torch=machine["torch"].split("+")[0], commit=results.FILES[name][1],
    )  # fmt: skip


def cuda() -> str:
    """Return the first half of the default kernel's mainloop, as it is printed."""
    a, b = Spec((4096, 4096), "bf16"), Spec((4096, 4096), "bf16", (1, 4096))
    with figures.choosing_for(figures.gpus.H200):
        lines = plan(a, b).source.splitlines()
    first = next(
        i for i, x in enumerate(lines) if "for (" in x and "k_tile" in x and "wgmma" in "".join(lines[i : i + 14])
    )
    last = next(i for i in range(first, len(lines)) if "wgmma_wait" in lines[i])
    return "```cuda\n" + textwrap.dedent("\n".join(lines[first : last + 1])) + "\n    ...\n```"


def hazards_without_wait(depth: int) -> list[str]:
    """Return what the simulator finds in the default kernel without `accumulator.wait(pending=1)`, for K = `depth`."""
    build.cache_clear()
    a = np.ones((256, depth), np.float16)
    broken = plan(a, a.T, config=Config(), backend="sim")
    waits = [
        (block, x)
        for statement in st.walk(broken._planned.kernel.body)
        for block in st.children(statement)
        for x in block.statements
        if isinstance(x, st.IssueInstruction) and isinstance(x.instruction, WgmmaWait) and x.instruction.pending == 1
    ]
    for block, wait in waits:
        block.statements.remove(wait)
    found = [str(x) for x in broken.simulate(a, a.T).hazards]
    build.cache_clear()
    return found


@cache
def _report() -> list[str]:
    """Return the lines of the first hazard."""
    lines = hazards_without_wait(512)[0].split("\n")
    return [textwrap.fill(x, 118, subsequent_indent="    ") for x in lines]


def report() -> str:
    """Return all of the report."""
    return "```\n" + "\n".join(_report()) + "\n```"


def race() -> str:
    """Return the report's first sentence."""
    return f"```\n{_report()[0]}\n```"


def excerpt(file: str, first: str, last: str) -> str:
    """Return a block of Python: lines of a file, from one that begins with `first` to one that begins with `last`."""
    lines = (ROOT / file).read_text().splitlines()
    end = next(i for i, x in enumerate(lines) if x.strip().startswith(last))
    begin = max(i for i, x in enumerate(lines[:end]) if x.strip().startswith(first))
    return "```python\n" + textwrap.dedent("\n".join(lines[begin : end + 1])) + "\n```"


def elementwise_function() -> str:
    """Return the record of an elementwise function."""
    return excerpt("examples/own_functions.py", "ATAN = Function", "register_operation(ATAN)")


def row_function() -> str:
    """Return the record of a function of a whole row, and the function that users call."""
    return excerpt("examples/own_functions.py", "SOFTMAX = RowFunction", "return call_row_function(SOFTMAX")


def reduction() -> str:
    """Return the record of a reduction."""
    return excerpt("examples/own_functions.py", "LENGTH = ReductionKind", "register_reduction(LENGTH)")


QUOTE = re.compile(r"(From \[[\w.]+\]\(([^)]*)\):\n\n```python\n)(.*?)(?=\n```)", re.DOTALL)


def quoted(page: Path, text: str = "") -> str:
    """Return a page's text (default: as it is) with each excerpt as its file has it today: the most similar lines."""

    def refresh(x: re.Match[str]) -> str:
        source = (page.parent / x.group(2)).read_text()
        if any(textwrap.indent(x.group(3), " " * depth) in source for depth in range(0, 32, 4)):
            return x.group()
        lines, count = source.splitlines(), x.group(3).count("\n") + 1
        spans = [lines[i : i + n] for n in range(max(1, count - 3), count + 9) for i in range(len(lines) - n + 1)]
        spans = [span for span in spans if span[0].strip() and span[-1].strip()]
        texts = [text for text in map(textwrap.dedent, map("\n".join, spans)) if text[0] != " " and _is_complete(text)]
        return x.group(1) + max(texts, key=lambda text: difflib.SequenceMatcher(None, text, x.group(3), False).ratio())

    return QUOTE.sub(refresh, text or page.read_text())


CONSOLE = re.compile(r"(```console\n\$ gemmsmith (.*)\n)([^`]*)(?=```)")


def consoles(page: Path) -> str:
    """Return a page's text with the output of each command in a `console` block as it is printed today."""

    def refresh(x: re.Match[str]) -> str:
        output = CliRunner().invoke(main, shlex.split(x.group(2))).stdout
        return x.group(1) + "".join(line.rstrip() + "\n" for line in output.splitlines())

    return CONSOLE.sub(refresh, page.read_text())


def _is_complete(text: str) -> bool:
    try:
        return bool(ast.parse(text))
    except SyntaxError:
        return False


def pages(*, quick: bool = False) -> Iterator[tuple[Path, str]]:
    """Yield every page with generated text, and that text; if `quick`, not those of docs/learn, which are simulated."""
    blocks = {**figures.BLOCKS, "cuda": cuda, "elementwise_function": elementwise_function,
              "row_function": row_function, "reduction": reduction,
              "report": report, "race": race}  # fmt: skip
    yield ROOT / "docs/reference/operations.md", operations()
    yield ROOT / "docs/reference/cli.md", command_line()
    yield ROOT / "docs/reference/python.md", python()
    yield ROOT / "docs/reference/kernels.md", kernels()
    yield ROOT / "docs/reference/ladder.md", ladder_figures()
    yield ROOT / "docs/ladder.md", quoted(ROOT / "docs/ladder.md")
    for page in () if quick else sorted((ROOT / "docs/learn").glob("*.md")):
        yield page, quoted(page, tutorial.refreshed(page))
    for name in ("docs/notebook/l2-and-dram.md", "docs/guides/reading-why.md"):
        yield ROOT / name, consoles(ROOT / name)
    for name in PAGES:
        text = (ROOT / name).read_text()
        yield ROOT / name, BLOCK.sub(lambda x: x.group(1) + "\n" + blocks[x.group(2)]() + "\n\n", text)
    yield ROOT / "benchmarks/results/README.md", results.index(ROOT)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GEMMSMITH_CACHE_DIR"] = folder  # without configs that the user tuned
        for path, text in pages(quick="--quick" in sys.argv):
            if "--check" not in sys.argv:
                path.write_text(text)
            elif path.read_text() != text:
                sys.exit(f"{path} is stale; run python docs/generate.py")
