"""The tables of speed in README.md and docs/performance.md, computed from the files in benchmarks/results.

A row is used only while gemmsmith still chooses the config that was measured (`is_current`). `docs/generate.py` writes
the tables into the pages; tests/test_docs.py compares them.
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import gemmsmith
from benchmarks.rows import Row, find, load
from benchmarks.suite import CLASSES, token_count
from gemmsmith import Spec
from gemmsmith.host import planned_gemm
from gemmsmith.tuning import gpus

DTYPES = {"bfloat16": "bf16", "float16": "fp16"}
MIN_CURRENT = 0.85
"""A geometric mean is shown if at least this fraction of its file's rows has the config that is chosen today."""


@contextmanager
def choosing_for(gpu: Any) -> Iterator[None]:
    """Let gemmsmith choose configs for `gpu`, whatever this machine has, and without configs that its user tuned."""
    with mock.patch.object(planned_gemm, "gpu_at", return_value=gpu):
        yield


def stand_in(rows: int, columns: int, layout: str, dtype: str, batch: int = 1) -> Spec:
    """Return an operand that is row-major ("n") or column-major ("t")."""
    strides = (columns, 1) if layout == "n" else (1, rows)
    if batch == 1:
        return Spec((rows, columns), dtype, strides)
    return Spec((batch, rows, columns), dtype, (rows * columns, *strides))


def plain(r: Row) -> gemmsmith.Plan:
    """Plan a GEMM without an epilogue, as benchmarks/speed/dense.py and benchmarks/speed/kinds.py have it."""
    kind, batch = r.get("kind") or DTYPES.get(r.get("dtype"), "bf16"), r.get("batch", 1)
    if kind == "fp8_blocks":
        return block_scaled(r)
    options: dict[str, Any] = {}
    if kind.startswith("fp8"):
        dtype = "fp8_e4m3"
        shapes: Any = ((r["m"], 1), (1, r["n"])) if kind == "fp8_rows" else ((), ())
        options = {"accumulate": "promoted" if kind == "fp8" else "fast", "out_dtype": "bf16"}
        options |= {name: Spec(x, "fp32") for name, x in zip(("scale_a", "scale_b"), shapes, strict=True)}
    elif kind in ("tf32", "3xtf32"):
        dtype, options = "fp32", {"precision": kind}
    else:
        dtype = "bf16" if kind == "bmm" else kind
    layout = r.get("layout", "nt")
    a = stand_in(r["m"], r["k"], layout[0], dtype, batch)
    return gemmsmith.plan(a, stand_in(r["k"], r["n"], layout[1], dtype, batch), **options)


def block_scaled(r: Row) -> gemmsmith.Plan:
    """Plan an FP8 GEMM with block scales, as benchmarks/speed/fp8.py has it."""
    m, n, k = r["m"], r["n"], r["k"]
    blocks, wide = -(-k // 128), -(-n // 128)
    a, b = stand_in(m, k, "n", "fp8_e4m3"), stand_in(k, n, "t", "fp8_e4m3")
    scale_a = Spec((m, blocks), "fp32", (1, -(-m // 4) * 4))
    scale_b = Spec((blocks, wide), "fp32", (1, -(-blocks // 4) * 4))
    return gemmsmith.plan(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype="bf16")


def _bias_gelu(acc: Any, bias: Any) -> Any:
    return (acc + bias).gelu(approximate="tanh")


def _bias_residual(acc: Any, bias: Any, residual: Any) -> Any:
    return acc + bias + residual


def _swiglu(acc: Any) -> Any:
    gate, up = gemmsmith.deinterleave(acc)
    return gate.silu() * up


def _bias_relu_rows(acc: Any, bias: Any) -> Any:
    x = (acc + bias).relu()
    return x, x.sum(-1)


EPILOGUES: dict[str, tuple[str, Callable[..., Any], tuple[str, ...]]] = {
    "bias_gelu": ("bias, gelu (tanh)", _bias_gelu, ("bias",)),
    "bias_residual": ("bias, residual", _bias_residual, ("bias", "residual")),
    "swiglu": ("SwiGLU", _swiglu, ()),
    "bias_relu_rows": ("bias, relu, row sums", _bias_relu_rows, ("bias",)),
}


def fused(r: Row) -> gemmsmith.Plan:
    """Plan a GEMM with an epilogue, as benchmarks/speed/epilogues.py has it."""
    m, n, k = r["m"], r["n"], r["k"]
    _, epilogue, names = EPILOGUES[r["epilogue"]]
    operands = {name: Spec({"bias": (n,), "residual": (m, n)}[name], "bf16") for name in names}
    return gemmsmith.plan(
        stand_in(m, k, "n", "bf16"), stand_in(k, n, "t", "bf16"), epilogue=epilogue, operands=operands
    )


def is_current(r: Row, planned: Callable[[Row], gemmsmith.Plan]) -> bool:
    """Return whether gemmsmith still chooses the config that the row was measured with."""
    return r["chosen" if "chosen" in r else "config"] == str(planned(r).config)


@cache
def current(name: str, planned: Callable[[Row], gemmsmith.Plan] = plain) -> list[Row]:
    """Return a file's rows whose config is still chosen, for the GPU that they were measured on."""
    with choosing_for(gpus.H100 if name.endswith("h100") else gpus.H200):
        return [r for r in load(name)["rows"] if is_current(r, planned)]


def mostly_current(name: str, planned: Callable[[Row], gemmsmith.Plan] = plain) -> list[Row]:
    """Return the current rows of a file, if they are enough for a mean."""
    rows, count = current(name, planned), len(load(name)["rows"])
    assert len(rows) >= MIN_CURRENT * count, f"{name}: only {len(rows)} of {count} rows are current: withdraw its table"
    return rows


def means(rows: Iterable[Row], *ratios: str) -> str:
    """Return two cells per ratio: its geometric mean and its minimum; empty ones where no row has it."""
    cells = []
    for ratio in ratios:
        values = [r[ratio] for r in rows if ratio in r]
        cells += [f"{statistics.geometric_mean(values):.3f}", f"{min(values):.3f}"] if values else ["", ""]
    return " | ".join(cells)


def table(header: str, rows: Iterable[str]) -> str:
    """Return a Markdown table of its header's cells and its rows' cells."""
    return "\n".join((f"| {header} |", "| --- " * (header.count("|") + 1) + "|", *(f"| {row} |" for row in rows)))


def source(name: str, used: int | None = None, root: str = "..") -> str:
    """Return the line below a table: its file, GPU, versions, commit, and how many rows are left out.

    `root`: the repository's root, from the page.
    """
    from docs.results import FILES

    file, commit = load(name), FILES[name][1]
    machine, count = file["machine"], len(file["rows"])
    gpu = machine["gpu"].removeprefix("NVIDIA ").removesuffix(" 80GB HBM3")
    torch = machine["torch"].split("+")[0]
    left_out = "" if used in (None, count) else f" {used} of {count} rows: other configs changed."
    return (
        f"*{gpu}, CUDA {machine['cuda']}, torch {torch}, commit {commit}, "
        f"[rows]({root}/benchmarks/results/{find(name).name}).{left_out}*"
    )


def shape(r: Row) -> str:
    return f"{r['m']} x {r['n']} x {r['k']}"


RATIOS = "torch.mm: mean | minimum | cuBLASLt: mean | minimum"


def suite() -> str:
    rows = mostly_current("dense-suite-h200")
    cubes = [r for r in rows if r["m"] == r["n"] == r["k"]]
    classes = {f"M = {m}": [r for r in rows if r["m"] == m and r not in cubes]
               for m in (1, 16, 64, 128, 256, 512, 2048, 4096, 8192)}  # fmt: skip
    classes |= {"cubes, M = N = K from 256 to 16384": cubes, "all": rows}
    assert sum(map(len, classes.values())) == 2 * len(rows)
    cells = (f"{title} | {len(x)} | {means(x, 'ratio', 'lt_ratio')}" for title, x in classes.items())
    return table(f"H200, bf16, layout nt | GEMMs | {RATIOS}", cells) + "\n\n" + source("dense-suite-h200", len(rows))


KINDS = {"bmm": "bf16, batched", "fp8_fast": "fp8, one scale, fast", "fp8": "fp8, one scale, promoted",
         "fp8_rows": "fp8, row and column scales, fast", "int8": "int8",
         "tf32": "TF32", "3xtf32": "3xTF32; torch: fp32", "fp32": "fp32"}  # fmt: skip


def layouts() -> str:
    """Return the table of kinds: of each the H200's rows, else the H100's, if most of them are current."""
    cells, used = [], set()
    for kind, title in KINDS.items():
        for gpu in ("h200", "h100"):
            name = f"kinds-{gpu}"
            rows, count = ([r for r in x if r["kind"] == kind] for x in (current(name), load(name)["rows"]))
            if rows and len(rows) >= MIN_CURRENT * len(count):
                groups = {x: [r for r in rows if r["layout"] == x] for x in ("nn", "nt", "tn", "tt")}
                cells += [f"{title}, {gpu.upper()} | {layout} | {len(x)} | {means(x, 'torch_ratio', 'lt_ratio')}"
                          for layout, x in groups.items() if x]  # fmt: skip
                used.add(name)
                break
    header = f"kind | layout | count | {RATIOS.replace('.mm', '')}"
    return "\n\n".join([table(header, cells), *map(source, sorted(used))])


def tuned_layers() -> str:
    """Return the table of layers and products that no table holds, with configs of `autotune`."""
    cells, files = [], {"autotuned-h200": "layers", "grid-h200": "products of CUDA-L2's grid"}
    for file, what in files.items():
        ratios = [{**r, **{f"{x}_ratio": r[f"{x}_us"] / r["tuned_us"] for x in ("torch", "lt")}}
                  for r in load(file)["rows"]]  # fmt: skip
        for name, ms in CLASSES.items():
            some = [r for r in ratios if token_count(r) in ms]
            cells.append(f"{what}, {name} | {len(some)} | {means(some, 'torch_ratio', 'lt_ratio')}")
    return "\n\n".join([table(f"H200, bf16, autotune | count | {RATIOS}", cells),
                        *(source(file, root="../..") for file in files)])  # fmt: skip


def measured_fused() -> list[Row]:
    """Return the rows of fused GEMMs; those of the plain GEMM beside them have to be current, too."""
    rows = current("epilogues-h200", fused)
    with choosing_for(gpus.H200):
        return [r for r in rows if is_current({**r, "config": r["bare_config"]}, plain)]


def over_compile(r: Row) -> float:
    """Return the time of the faster mode of torch.compile over the fused kernel's."""
    return min(r[x] for x in ("over_compile", "over_max_autotune") if x in r)


def epilogues() -> str:
    rows = [{**r, "compile": over_compile(r)} for r in measured_fused()]
    cells = []
    for name, (title, *_) in EPILOGUES.items():
        x = [r for r in rows if r["epilogue"] == name]
        costs = [r["cost"] for r in x]
        cost = f"{statistics.geometric_mean(costs):.3f} | {max(costs):.3f}"
        cells.append(f"{title} | {len(x)} | {cost} | {means(x, 'over_eager', 'compile')}")
    header = (
        "H200, bf16 | GEMMs | over the plain GEMM: mean | maximum | torch eager: mean | minimum | "
        "torch.compile: mean | minimum"
    )
    return table(header, cells) + "\n\n" + source("epilogues-h200", len(rows))


FP8_RATIOS = ("torch_ratio", "lt_ratio", "deepgemm_ratio")


def fp8() -> str:
    rows = mostly_current("fp8-h200", block_scaled)
    classes = {"M = 1": (1, 1), "M = 16": (16, 16), "M = 64": (64, 64), "M = 128": (128, 128),
               "M = 256 to 1024": (256, 1024), "M = 4096, 8192": (4096, 8192), "all": (1, 8192)}  # fmt: skip
    members = {title: [r for r in rows if low <= r["m"] <= high] for title, (low, high) in classes.items()}
    cells = (f"{title} | {len(x)} | {means(x, *FP8_RATIOS)}" for title, x in members.items())
    header = (
        "H200, e4m3, block scales | GEMMs | torch: mean | minimum | cuBLASLt: mean | minimum | DeepGEMM: mean | minimum"
    )
    return table(header, cells) + "\n\n" + source("fp8-h200", len(rows))


def fp8_losses() -> str:
    rows = [r for r in current("fp8-h200", block_scaled) if round(min(r.get(x, 1) for x in FP8_RATIOS), 3) < 0.99]
    return table(
        "H200, e4m3, M x N x K | us | torch | cuBLASLt | DeepGEMM",
        (f"{shape(r)} | {r['us']:#.4g} | " + " | ".join(f"{r[x]:.3f}" for x in FP8_RATIOS) for r in rows),
    )


def half() -> str:
    rows = current("dense-half-h200")
    ratio, saved = (statistics.geometric_mean(x) for x in ([r["ratio"] for r in rows],
                                                           [r["half_us"] / r["us"] for r in rows]))  # fmt: skip
    text = (
        f"H200, fp16, {len(rows)} large GEMMs: torch.mm takes {ratio:.3f} of gemmsmith's time; fp16 accumulation takes "
        f"{saved:.2f} of the time of fp32 accumulation."
    )
    return "\n".join(textwrap.wrap(text, 120)) + "\n\n" + source("dense-half-h200")


CALLS = {
    "`gemm(a, b)`": ("gemm", "torch.mm"),
    "`gemm(a, b, out=d)`": ("gemm(out=)", "torch.mm(out=)"),
    "`gemm` with bias and relu; torch: two calls": ("gemm(epilogue=)", "torch.addmm, relu"),
    "the same with `out=`": ("gemm(epilogue=, out=)", "torch.addmm(out=), relu_"),
    "`Plan.run`": ("plan.run", ""),
    "the callable that `Plan.prepare` returns": ("plan.prepare(...)()", ""),
}


def host() -> str:
    us = {r["call"]: f"{r['us']:.1f}" for r in load("launch-h200")["rows"]} | {"": ""}
    cells = (f"{title} | {us[ours]} | {us[torch]}" for title, (ours, torch) in CALLS.items())
    return table("H200, call | gemmsmith, us | torch, us", cells) + "\n\n" + source("launch-h200")


def startup() -> str:
    file = load("startup-cpu")
    seconds, machine = {r["what"]: f"{r['seconds']:.2f} s" for r in file["rows"]}, file["machine"]
    text = (
        f"A process with `import gemmsmith` takes {seconds['import gemmsmith']}, `from gemmsmith import gemm` "
        f"{seconds['import gemmsmith, gemm']} (numpy alone {seconds['import numpy']}), `gemmsmith --version` "
        f"{seconds['gemmsmith --version']}, `import gemmsmith.torch` {seconds['import gemmsmith.torch']} (torch alone "
        f"{seconds['import torch']}): the least of {file['rows'][0]['rounds']}, Python {machine['python']}, torch "
        f"{machine['torch'].split('+')[0]}, {machine['cpu']}, files in memory, "
        f"[rows](../benchmarks/results/{find('startup-cpu').name})."
    )
    return "\n".join(textwrap.wrap(text, 120, break_on_hyphens=False))


def ceilings() -> str:
    rows = current("dense-suite-h200")
    loops = {r["loop"]: r["loop_tflops"] for r in load("ladder-h200")["rows"]}
    fastest = max(rows, key=lambda r: r["tflops"])
    read = max(rows, key=lambda r: r["n"] * r["k"] / r["us"] if r["m"] == 1 else 0)
    bandwidth = 2 * read["n"] * read["k"] / read["us"] / 1e6  # of B alone
    return "\n\n".join((
        table("resource of an H200 | ceiling | measured as", (
            f"tensor cores, bf16 wgmma | {loops['wgmma_bf16']:.0f} TFLOP/s | wgmma alone, without loads",
            f"bf16 GEMM at the power limit | {fastest['tflops']:.0f} TFLOP/s | the fastest GEMM, {shape(fastest)}",
            f"DRAM, read | {bandwidth:.2f} TB/s | the fastest GEMM with one row, {shape(read)}",
        )),
        "Loop: " + source("ladder-h200"), "GEMMs: " + source("dense-suite-h200"),
    ))  # fmt: skip


def chosen() -> str:
    rows = load("fused-h100")["rows"]
    over = [1 / r["best_ratio"] for r in rows]
    text = (
        f"Of {len(rows)} fused GEMMs on an H100 (`python -m benchmarks.speed.fused`), the chosen config takes "
        f"{statistics.geometric_mean(over):.3f} of the time of the fastest of 60 in the mean, and {max(over):.3f} at "
        "most."
    )
    return "\n".join(textwrap.wrap(text, 120)) + "\n\n" + source("fused-h100")


def layers_of_experts() -> list[Row]:
    """Return the rows of forward passes, but for those of earlier commits."""
    return [row for row in load("moe-h100")["rows"] if not row["training"] and "commit" not in row]


def experts() -> str:
    rows = layers_of_experts()

    def over(contender: str) -> str:
        ratios = [row[f"{contender}_us"] / row["ours_us"] for row in rows]
        return f"{statistics.geometric_mean(ratios):.2f} in the mean, {min(ratios):.2f} at least"

    def us(row: Row, contender: str) -> str:
        return f"{row[f'{contender}_us']:.0f} us" if f"{contender}_us" in row else "-"

    cells = (
        " | ".join(
            (row["layer"], str(row["tokens"]), *(us(row, x) for x in ("ours", "fp8", "grouped_mm", "triton", "bytes")))
        )
        for row in rows
        if row["tokens"] in (1, 128, 4096)
    )
    text = (
        f"Of {len(rows)} layers, those with 16 and 1024 tokens included, the other library's time divided by "
        f"gemmsmith's: grouped_mm {over('grouped_mm')}; Triton {over('triton')}."
    )
    text = "\n".join(textwrap.wrap(text, 120))
    header = (
        "layer on an H100 | tokens | gemmsmith, bf16 | in FP8 | torch's grouped_mm | Triton | weights in use, copied"
    )
    return "\n\n".join((table(header, cells), text, source("moe-h100", root="../..")))


def headline() -> str:
    dense, fp8_rows = mostly_current("dense-suite-h200"), mostly_current("fp8-h200", block_scaled)
    fused_rows = [{"ratio": over_compile(r)} for r in measured_fused()]
    moe = [{"ratio": r["grouped_mm_us"] / r["ours_us"]} for r in layers_of_experts()]
    shown = (
        f"bf16, H200 | {len(dense)} | torch.mm (cuBLAS) | {means(dense, 'ratio')}",
        f"bf16 with epilogue, H200 | {len(fused_rows)} | torch.compile | {means(fused_rows, 'ratio')}",
        f"FP8, block scales, H200 | {len(fp8_rows)} | DeepGEMM | {means(fp8_rows, 'deepgemm_ratio')}",
        f"bf16 layers of experts, H100 | {len(moe)} | torch's grouped_mm | {means(moe, 'ratio')}",
        *(f"{name}, H100 | {len(x)} | torch.compile | {means(x, 'ratio')}" for name, x in whole_models().items()),
    )
    return table("GEMM | count | compared with | speedup, geometric mean | minimum", shown)


def whole_models() -> dict[str, list[dict[str, Any]]]:
    """Return the latest rows of models of transformers: of training steps, and of forward passes."""
    latest = {r["case"]: r for r in load("hf-models-h100")["rows"]}.values()
    names = {True: "models' training steps", False: "models' prefills"}
    return {name: [r for r in latest if r["training"] == training] for training, name in names.items()}


MODELS = {
    "llama-3-8b": "Llama 3 8B", "qwen2-7b": "Qwen2 7B", "mistral-7b": "Mistral 7B", "qwen3-8b": "Qwen3 8B",
    "gemma-2b": "Gemma 2B", "gpt2-xl": "GPT-2 XL", "bert-large": "BERT large", "vit-large": "ViT large",
}  # fmt: skip


def models() -> str:
    latest = {(r["model"], r["training"]): r for r in load("hf-models-h100")["rows"]}

    def cells(model: str, training: bool) -> str:
        r = latest.get((model, training))
        return f"{r['inductor_us'] / 1000:.1f} | {r['compiled_us'] / 1000:.1f} | {r['ratio']:.2f}" if r else " | | "

    rows = (f"{name} | {cells(model, True)} | {cells(model, False)}" for model, name in MODELS.items())
    header = "H100, bf16 | training, ms: Inductor | gemmsmith | ratio | prefill, ms: Inductor | gemmsmith | ratio"
    return table(header, rows) + "\n\n" + source("hf-models-h100")


def losses() -> str:
    chosen = [
        r | {"ratio": r["torch_us"] / r["chosen_us"]}
        for name in ("autotuned-h200", "grid-h200", "raster-h200")
        for r in current(name)
        if r["torch_us"]
    ]
    worst = min(chosen, key=lambda r: r["ratio"])
    fp8_worst = min((r for r in current("fp8-h200", block_scaled)), key=lambda r: r.get("deepgemm_ratio", 9))
    kinds = current("kinds-h200")
    scaled = min((r for r in kinds if r["kind"] == "fp8_blocks"), key=lambda r: r["torch_ratio"])
    fp32 = min((r for r in kinds if r["kind"] == "fp32"), key=lambda r: r["lt_ratio"])
    return "\n".join(textwrap.wrap(
        f"It loses on some shapes of an H200: down to {worst['ratio']:.2f} of torch.mm's speed ({shape(worst)}), "
        f"{scaled['torch_ratio']:.2f} in FP8 with block scales ({shape(scaled)}), {fp8_worst['deepgemm_ratio']:.2f} of "
        f"DeepGEMM's, {fp32['lt_ratio']:.2f} of cuBLASLt's in fp32.", 120
    ))  # fmt: skip


def loss_heads() -> str:
    def cells(row: Row) -> Iterator[str]:
        yield f"{row['tokens']}x{row['dim']}x{row['classes']}"
        for contender in ("fused", "low_memory", "inductor", "liger", "cce"):
            us, extra = row[f"{contender}_us"], row[f"{contender}_extra_bytes"]
            yield f"{us / 1000:.1f}, {extra / 2**30:.2f}"

    header = "H200, rows x dim x classes | default | low_memory | torch.compile | Liger | Cut Cross-Entropy"
    rows = sorted(load("loss-heads-h200")["rows"], key=lambda r: r["tokens"] * r["dim"] * r["classes"])
    return "\n\n".join((table(header, (" | ".join(cells(r)) for r in rows)), source("loss-heads-h200", root="../..")))


BLOCKS: dict[str, Callable[[], str]] = {
    f.__name__: f
    for f in (
        headline,
        losses,
        suite,
        layouts,
        tuned_layers,
        chosen,
        half,
        epilogues,
        fp8,
        fp8_losses,
        host,
        startup,
        ceilings,
        experts,
        loss_heads,
        models,
    )
}
