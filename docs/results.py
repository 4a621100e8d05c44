"""The index of benchmarks/results: what each file answers, and at which commit its rows were measured or recorded.

`docs/generate.py` writes benchmarks/results/README.md from this table and from the files.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.rows import find, load, names

FILES: dict[str, tuple[str, str, str]] = {
    # file: question, commit, date of that commit
    "chain-h200": ("Does programmatic dependent launch speed up a chain of GEMMs?", "4e90d00", "2026-11-21"),
    "counters-h200": ("Does the L2 model predict the bytes that hardware counters measure, by raster order?",
                      "0afc505", "2026-11-22"),
    "dense-half-h200": ("fp16 operands: fp16 against fp32 accumulation, and torch.mm.", "3401c88", "2026-11-22"),
    "dense-suite-h200": ("122 GEMMs of the suite against torch.mm and cuBLASLt.", "e7bc595", "2026-11-23"),
    "dense-unseen-h200": ("200 GEMMs of layers that are not in the table of tuned configs.", "70205cb", "2026-11-23"),
    "epilogues-h200": ("Fused epilogues against plain GEMMs, torch eager and torch.compile.", "c9d5e26", "2026-11-24"),
    "fp8-h200": ("FP8 with block scales against torch, cuBLASLt and DeepGEMM, by layer.", "c9d5e26", "2026-11-24"),
    "fp8-unseen-h200": ("FP8 with block scales on layers that are not in the table.", "c9d5e26", "2026-11-24"),
    "functions-h100": ("Epilogues whose functions take the time, against torch.compile.", "ee753fe", "2026-11-26"),
    "fused-h100": ("Fused GEMMs: the chosen config against the best of a sweep of 60.", "beb0790", "2026-11-26"),
    "grouped-h100": ("Grouped GEMMs against torch's, a loop, Triton and the dense product.", "f6e1ec8", "2026-11-26"),
    "grouped-fp8-h100": ("FP8 along K of groups, added into fp32, against a loop and the dense product.", "4334851",
                         "2026-11-26"),
    "grouped-unseen-h100": ("Grouped GEMMs that no choice was fitted to.", "67011cc", "2026-11-26"),
    "heavy-h100": ("Heavy and random epilogues against the plain GEMM and a lower bound.", "ce07a936", "2026-11-26"),
    "heavy-wide-h100": ("The same before epilogues of several matrices left room for stages.", "67011cc", "2026-11-26"),
    "grouped-h200": ("The same, before rows could be gathered.", "39fb3cc", "2026-11-26"),
    "hf-models-h100": ("Steps and prefills of transformers' models against Inductor's default.", "a4a6021",
                       "2026-11-27"),
    "kinds-h100": ("Every kind of GEMM against torch and cuBLASLt; those with 32-bit results are newer.", "beb0790",
                   "2026-11-26"),
    "ladder-counters-h200": ("Are the simulator's counters those of Nsight Compute?", "3a74253", "2026-11-24"),
    "ladder-h200": ("How fast is each kernel of the ladder, and loops of its instructions alone?",
                    "bf9e60b", "2026-11-23"),
    "startup-cpu": ("How many seconds do imports and a command take?", "ab5e4785", "2026-11-29"),
    "launch-h200": ("What does a call cost on the host?", "c9d5e26", "2026-11-24"),
    "heavy-unrolled-h100": ("The same before long epilogues looped.", "85dfd21", "2026-11-26"),
    "launch-h100": ("What does a call cost on the host of an H100?", "67011cc", "2026-11-26"),
    "layers-h100": ("The three GEMMs of a training step for 20 layers.", "beb0790", "2026-11-26"),
    "layouts-h100": ("20 square and oblong GEMMs in bf16 and fp16, in all layouts.", "beb0790", "2026-11-26"),
    "lockstep-h200": ("What does `sync_clusters` gain, by tile, raster group and interval? With L2 counters.",
                      "0afc505", "2026-11-22"),
    "mma-h200": ("Which bits do mma.sync and wmma compute? Single instructions on chosen and random vectors.",
                 "2243e53", "2026-11-23"),
    "loss-heads-h200": ("Heads with cross-entropy against Inductor, Liger and Cut Cross-Entropy.", "592c7a83",
                        "2026-11-28"),
    "moe-h100": ("Layers of experts, router included, against torch's grouped_mm and Triton.", "2b0954c",
                 "2026-11-26"),
    "predicated-producer-h200": ("Unaligned operands: packing against a producer of predicated loads.",
                                 "2384011", "2026-11-21"),
    "torch-layers-h100": ("Layers, losses and small models against Inductor's default.", "a4a6021", "2026-11-27"),
    "tries-without-k-h100": ("Two epilogues on empty GEMMs, K = 0, by config and stages.", "7e84ddf", "2026-11-27"),
    "compiled-calls-h100": ("The host's time of a training step, and of an operator's call in generated code.",
                            "4624a1b", "2026-11-27"),
    "tries-gathered-h100": ("The products of layers of experts with and without gathered rows, by config.", "e198548",
                            "2026-11-26"),
    "survey-fp8-h200": ("30 and more configs of 60 FP8 shapes, to fit the model.", "cb9190c", "2026-11-23"),
    "splits-tf32-h100": ("TF32, 3xTF32: the best config with `splits` and the best without.", "3b1d783", "2026-11-26"),
    "survey-fp8-layers-h200": ("About 30 more configs for each of 12 slow FP8 layers.", "a6d1eef", "2026-11-23"),
    "autotuned-h200": ("Layers that no table holds: chosen and measured configs, torch and cuBLASLt.", "316861c9",
                       "2026-11-30"),
    "grid-h200": ("The same of products of CUDA-L2's grid of sizes.", "316861c9", "2026-11-30"),
    "kinds-h200": ("Kinds of GEMMs against torch and cuBLASLt: 76 of the 135.", "316861c9", "2026-11-30"),
    "public-models-h200": ("Layers of public models: the model's choice and the best of 16.", "177c923a", "2026-11-30"),
    "model-pairs-h200": ("Choices by two terms of the model against those without, and by their values.", "177c923a",
                         "2026-11-30"),
    "power-h200": ("Two configs of large GEMMs: short blocks in turns, blocks of a second.", "bfaad6a9", "2026-11-30"),
    "power-shares-h200": ("The same among other kernels.", "bfaad6a9", "2026-11-30"),
    "raster-h200": ("Single waves by raster, with clusters in the grid's order.", "3bd4dc76", "2026-11-30"),
    "merged-reads-h200": ("L2 reads and times of one GEMM by the order of its tiles.", "ee63ad2f", "2026-11-30"),
    "tail-h200": ("Ragged GEMMs: rows past the end filled with zeros, or not loaded.", "3bd4dc76", "2026-11-30"),
    "survey-middle-h200": ("About 20 configs of 53 GEMMs, most with 65 to 512 rows, to choose constants.", "3bd4dc76",
                           "2026-11-30"),
    "unseen-middle-h200": ("The same of 17 layers of held-out models.", "3bd4dc76", "2026-11-30"),
    "placement-h200": ("Single waves by raster, with clusters in the order of the grid or of GPCs.", "316861c9",
                       "2026-11-30"),
    "header-launch-h200": ("What does a launch by an exported header cost on the host?", "5e7da401", "2026-11-30"),
    "choice-middle-h200": (
        "35 configs for each of 116 layers that nothing was fitted to, most with 65 to 512 rows.", "133c1fa9",
        "2026-11-29",
    ),
    "survey-h200": ("64 configs for each of 324 shapes, to fit the model.", "884b1de", "2026-11-23"),
    "survey-nn-h100": ("34 configs of random shapes, layout nn, to fit the model.", "d528960", "2026-11-25"),
    "survey-nt-h100": ("The same, layout nt.", "d528960", "2026-11-25"),
    "survey-tn-h100": ("The same, layout tn.", "d528960", "2026-11-25"),
    "survey-tt-h100": ("The same, layout tt.", "d528960", "2026-11-25"),
    "sweep-again-h200": ("Second sweep: clusters along N, one warpgroup for 128 rows.", "3db7638", "2026-11-21"),
    "sweep-choice-h100": ("The chosen config against the model's next, and without `sync_clusters`, for 68 GEMMs.",
                          "66e0bfd", "2026-11-26"),
    "sweep-eighth-h200": ("Eighth sweep: swapped k-tiles of 256, tiles of 256 x 184 ….", "fcedb95", "2026-11-22"),
    "sweep-fifth-h200": ("Fifth sweep: finalists of the first four in blocks of a second.", "836a70d", "2026-11-21"),
    "sweep-fourth-h200": ("Fourth sweep of the suite, pairs of blocks in turned order.", "e252a3e", "2026-11-21"),
    "sweep-h200": ("First sweep: the tuner's search space over the suite, short blocks.", "ea12b56", "2026-11-21"),
    "sweep-layouts-h100": ("Two choices of configs for large GEMMs in all layouts, blocks of 120 ms.",
                           "6abe9e0", "2026-11-25"),
    "sweep-seventh-h200": ("Seventh sweep: raster groups, L2 hints and k-tiles of 128 for 43 shapes.",
                           "924aa6f", "2026-11-21"),
    "sweep-sixth-h200": ("Sixth sweep: k-tiles of 128 for M <= 64.", "924aa6f", "2026-11-21"),
    "sweep-swapped-h200": ("Swapped tiles for up to 1024 rows of A, 16 shapes of no table.", "c2a8341", "2026-11-23"),
    "sweep-third-h200": ("Third sweep: tiles of 256 rows, pingpong of 128 x 176.", "f9e8d1b", "2026-11-21"),
    "tries-fp32-h100": ("fp32 on CUDA cores: 756 configs and torch.mm.", "a7889f1", "2026-11-25"),
    "tries-grouped-h100": ("80 configs for each of nine grouped GEMMs.", "85dfd21", "2026-11-26"),
    "tries-grouped-h200": ("50 configs for each of ten grouped GEMMs.", "8505f59", "2026-11-26"),
    "tries-heavy-h100": ("64 configs for each of eleven heavy epilogues, of three K.", "3cb4358", "2026-11-26"),
    "tries-h200": ("Variants of the bf16 kernels that were tried, one by one.", "d43b215", "2026-11-22"),
    "tries-ladder-h200": ("Variants of sgemm, mma_multistage and wmma.", "bf9e60b", "2026-11-23"),
    "tries-read-fences-h200": ("Fences of what threads have read, where they stand.", "f88db45", "2026-11-28"),
    "tries-stores-h100": ("`streaming_stores` on batches with little K.", "97e1f5b", "2026-11-25"),
    "tries-subtiles-h100": ("Heavy epilogues by subtiles, stages, buffers and cache hints.", "86f8a57", "2026-11-26"),
    "tries-subtiles-h200": ("The same, six epilogues.", "86f8a57", "2026-11-26"),
    "tries-tf32-h100": ("TF32 with MN-major operands: fragments of A loaded by threads.", "97e1f5b", "2026-11-25"),
    "untuned-h200": ("The model's choice against the table's on the suite.", "d43b215", "2026-11-22"),
    "wgmma-h200": ("Which bits does wgmma compute? Single instructions on chosen and random vectors.",
                   "ea02338", "2026-11-23"),
}  # fmt: skip

INTRODUCTION = """\
# Measured rows

Which file answers which question. Each was written by a script of `benchmarks/` (its `machine` entry has the command,
the GPU and the versions). Measured values are never changed; configs are written as `str(Config)`
has them today, texts in the words of their time. *Commit*: the tree
that was measured if the file records it, else the one that added the rows; a file that was resumed may have rows of
earlier trees. The pages that use a file are in the last column. Everything ran with CUDA 13.0 and torch 2.11.0.
`benchmarks/rows.py` reads the files; those larger than 20 kB are compressed by xz, and sweeps are one file, with a row
for each config that was timed. `python docs/generate.py` writes this page from `docs/results.py`.

| file | question | GPU | rows | commit | date | used in |
| --- | --- | --- | --- | --- | --- | --- |
"""


def _about(name: str) -> tuple[str, int | str]:
    """Return the GPU and the number of rows of a file."""
    return name.rsplit("-", 1)[1].upper(), "bits" if ".npz" in find(name).suffixes else len(load(name)["rows"])


def _users(name: str, pages: dict[str, str]) -> list[str]:
    """Return the pages that name the file, in a link or as code."""
    return [page for page, text in pages.items() if f"/{find(name).name})" in text or f"`{name}`" in text]


def index(root: Path) -> str:
    """Return the text of benchmarks/results/README.md."""
    pages = {str(page.relative_to(root)): page.read_text()
             for page in (root / "README.md", *sorted((root / "docs").rglob("*.md")))}  # fmt: skip
    lines = []
    for name in names():
        question, commit, date = FILES[name]
        gpu, count = _about(name)
        users = ", ".join(f"[{page.removeprefix('docs/').removesuffix('.md')}](../../{page})"
                          for page in _users(name, pages))  # fmt: skip
        lines.append(f"| [{name}]({find(name).name}) | {question} | {gpu} | {count} | {commit} | {date} | {users} |\n")
    return INTRODUCTION + "".join(lines)
