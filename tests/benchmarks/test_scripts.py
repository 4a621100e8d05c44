"""Each script of benchmarks/ answers --help, and runs on tiny shapes with a stubbed GPU: rows come out, a wrong result
is refused. Times need a GPU."""

from __future__ import annotations

import importlib
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from tests.benchmarks.stubs import on_the_cpu  # noqa: E402

import gemmsmith  # noqa: E402
from benchmarks import contest, portions, refresh, timing  # noqa: E402
from benchmarks.fit import power  # noqa: E402
from benchmarks.ladder import speed as ladder  # noqa: E402
from benchmarks.rows import find, read, write  # noqa: E402
from benchmarks.speed import autotuned, dense, fp8, fp8_epilogues, fused, heavy, invariant, kinds, layers, quantize  # noqa: E402
from benchmarks.speed import epilogues as epilogues_  # noqa: E402
from benchmarks.suite import OBLONG, SQUARES, SUITE, TRAINED, TRAINING, UNALIGNED, UNSEEN  # noqa: E402
from benchmarks.torch import layers as torch_layers  # noqa: E402
from gemmsmith.ladder.rungs import RUNG_CASES  # noqa: E402
from gemmsmith.tuning.tuned_table import builtin_table  # noqa: E402

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "benchmarks").rglob("*.py")
    if "\ndef main(" in (text := path.read_text()) and "parse_args(" in text
)
PACE = contest.Pace(1e-5, 2, 1e-5)


def called(monkeypatch: pytest.MonkeyPatch, script: Any, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", [script.__name__, *words])
    script.main()


@pytest.mark.parametrize("name", SCRIPTS)
def test_help(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "benchmarks.torch.moe":
        pytest.importorskip("triton")
    with pytest.raises(SystemExit) as ended:
        called(monkeypatch, importlib.import_module(name), "--help")
    assert ended.value.code == 0
    assert "--" in capsys.readouterr().out


# -- contests --------------------------------------------------------------------------------------------------------
@pytest.fixture
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_cpu(monkeypatch, fused)
    for name, stub in (
        ("compile_all", lambda kernels: None), ("machine", lambda: {"gpu": "a chip"}), ("known_us", lambda: 207.0),
    ):  # fmt: skip
        monkeypatch.setattr(contest, name, stub)
    monkeypatch.setattr(contest.torch.cuda, "empty_cache", lambda: None)
    measure = kinds.measure, heavy.measure
    for script, of in ((kinds, measure[0]), (layers, measure[0]), (heavy, measure[1])):
        monkeypatch.setattr(script, "measure", lambda job, pace, of=of: of(job, PACE, "cpu"))
    monkeypatch.setattr(kinds.cublaslt, "algorithms", lambda a, b, d, scales=None, **_: [_wrong])


def _wrong(a: Any, b: Any, d: Any, *scales: Any) -> None:
    d.zero_()


@pytest.mark.parametrize(
    ("script", "words", "count"),
    [(layers, [], 3), (layers, ["--layouts"], 8), (heavy, ["--layout", "nn", "--random", "2"], 1 + len(heavy.CASES))]
    + [(kinds, ["--kind", name], None) for name in kinds.KINDS if name != "fp8_blocks"],  # whose operands need a GPU
)
def test_rows_are_measured_and_resumed(
    script: Any, words: list[str], count: int | None, without_a_gpu: None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """cuBLASLt's algorithm computes something else, and is refused."""
    monkeypatch.setattr(heavy, "RANDOM_SHAPES", [(64, 48, 96)])
    file = tmp_path / "rows.json"
    shape = "3x64x48x96" if "bmm" in words else "64x48x96"
    for _ in range(2):
        called(monkeypatch, script, *words, "--shape", shape, "--json", str(file), "--resume")
    rows = json.loads(file.read_text())["rows"]
    assert rows
    assert count in (None, len(rows))
    assert not [row["error"] for row in rows if "error" in row]
    assert all(row["us"] == 10 for row in rows)
    if script is not heavy:
        refused = [x for row in rows for x in row["refused"].items() if x[0].startswith("lt: ")]
        assert all("over its bound" in why for _, why in refused)  # a torch may have no kernel of the CPU for some kind
    text = capsys.readouterr().out
    assert f"\n0 of {len(rows)} GEMMs\n" in text
    assert ("geometric mean" in text) == any(name.endswith("ratio") for row in rows for name in row)


def test_what_fails_is_told_and_tried_again(
    without_a_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--kind", "fp32", "--shape", "16x16x16", "--json", str(tmp_path / "rows.json"), "--resume"]
    with monkeypatch.context() as patch:
        patch.setattr(kinds, "check_of", lambda case, kind: lambda c: "off by one")
        called(monkeypatch, kinds, *words)
    assert "WrongError: ours: off by one" in capsys.readouterr().out
    called(monkeypatch, kinds, *words)
    assert not any("error" in row for row in json.loads((tmp_path / "rows.json").read_text())["rows"])


@pytest.mark.parametrize("name", ["layer_norm_statistics", "cross_entropy", "random 12"])
def test_columns_that_are_missing_are_noticed(name: str) -> None:
    job = fused.Job(name, "nt", 64, 4096, 64)
    case = fused.Case(job, "cpu")
    check, plan = fused.check_of(case, job), fused.planned(job)
    plan.run(case.a, case.b, case.out, operands=case.operands)
    assert not check(case)
    assert check(case), "poisoned"
    case.b[:, -64:] = 0
    plan.run(case.a, case.b, case.out, operands=case.operands)
    assert check(case)


@pytest.mark.parametrize("name", [x for x in kinds.KINDS if x != "fp8_blocks"])
def test_an_element_that_is_off_is_noticed(name: str) -> None:
    layout, _ = kinds.KINDS[name].products[0]
    case = kinds.Case(kinds.Job(name, layout, 3 if name == "bmm" else 1, 64, 48, 96), "cpu")
    check = kinds.check_of(case, kinds.KINDS[name])
    assert check(case), "poisoned"
    case.d.copy_(torch.matmul(*case.dequantized()))
    assert not check(case)
    case.d.copy_(torch.matmul(*case.dequantized()))
    case.d[..., -1, -1] = 4 * case.d.abs().max() + 1
    assert check(case)


def test_fused_products_are_swept(without_a_gpu: None) -> None:
    job = fused.Job("random 19", "tn", 128, 192, 64)
    configs = fused.contenders(job, 6)
    row = fused.swept(job, configs, PACE, "cpu")
    assert not row["wrong"]
    assert len(row["configs"]) == len(configs)
    assert job.name in fused.told(row)
    assert "1 GEMMs   chosen / fastest" in fused.summary([row])[0]


# -- scripts of one loop ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("script", "ended", "words", "count"),
    [
        (epilogues_, 6, [], len(epilogues_.SHAPES) * len(epilogues_.CASES)),
        (invariant, 10, [], len(invariant.LAYERS) * len(invariant.ROWS)),
        (ladder, 2, [], len(ladder.SHAPES)),
        (dense, 2, ["--shape", "1x16x16", "--shape", "2x16x16", "--shape", "3x16x16"], 3),
    ],
)
def test_a_run_goes_on_where_one_was_ended(
    script: Any, ended: int, words: list[str], count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In its n-th measurement, which may be amid a job's."""
    begun: list[Any] = []

    def measure(*job: Any) -> Any:
        begun.append(job)
        if len(begun) == ended:
            raise KeyboardInterrupt
        if script is ladder:
            return [defaultdict(lambda: 1.0, zip("mnk", job[1], strict=True))]
        if script is dense:
            config = str(gemmsmith.plan(*dense.specs(job[:3])).config)
            return defaultdict(lambda: 1.0, zip("mnk", job, strict=False), config=config)
        return defaultdict(lambda: 1.0, zip(("m", "n", "k", "epilogue"), job, strict=False))

    monkeypatch.setattr(script, "measure", measure)
    monkeypatch.setattr(invariant, "require_same_rows", lambda n, k: None)
    monkeypatch.setattr(dense, "compile_all", lambda kernels: None)
    monkeypatch.setattr(timing, "machine", dict)  # there is no GPU to name
    file = tmp_path / "rows.json"
    words = [*words, "--json", str(file), "--resume"]
    with pytest.raises(KeyboardInterrupt):
        called(monkeypatch, script, *words)
    loaded = json.loads(file.read_text())["rows"]
    called(monkeypatch, script, *words)
    rows = json.loads(file.read_text())["rows"]
    assert 0 < len(loaded) < ended
    assert rows[: len(loaded)] == loaded
    assert len({(r["m"], r["n"], r["k"], r.get("epilogue")) for r in rows}) == len(rows) == count


def test_parts_have_every_job_once_and_none_begins_late(capsys: pytest.CaptureFixture[str]) -> None:
    jobs, clock = list(range(10)), iter(range(100))
    parts = [portions.missing(jobs, [], lambda row: row["job"], f"{i}/3") for i in range(3)]
    assert sorted(job for part in parts for job in part) == jobs
    assert list(portions.in_time("abcdef", 3, lambda: next(clock))) == ["a", "b", "c"]
    assert capsys.readouterr().out == "3 of 6 are left, for --resume\n"


def test_jobs_are_as_many_as_the_pages_say() -> None:
    for jobs, count in (
        (layers.products(TRAINED), 60), (layers.layouts(SQUARES + OBLONG), 160), (fused.jobs(), 40),
        (heavy.jobs(30), 8 * len(heavy.CASES) + 30), (fp8.unseen(), 60),
        (fp8_epilogues.jobs(), sum(map(len, fp8_epilogues.SUITE.values()))),
        (quantize.jobs([(1, 2)], [*quantize.RECIPES, ""], quantize.LAYOUTS), 22),
    ):  # fmt: skip
        assert len(set(jobs)) == len(jobs) == count
    assert not {(n, k) for _, n, k in fp8.unseen()} & {*fp8.WEIGHTS}
    elsewhere = {*SUITE, *UNALIGNED, *UNSEEN, *TRAINING, *SQUARES, *OBLONG, *epilogues_.SHAPES, *fused.LAYERS}
    assert not {shape[1:] for shape in heavy.RANDOM_SHAPES} & {shape[1:] for shape in elsewhere}


def test_every_product_has_a_plan_for_its_operands() -> None:
    for job in kinds.jobs():
        plan = kinds.planned(job)
        problem = plan._planned.binding.problem.T if plan.config.swap_ab else plan._planned.binding.problem
        assert problem.m * problem.batch == job.batch * job.m, job  # a batch may be folded into M
        assert (problem.n, problem.k) == job[4:], job


def test_costs_of_an_element() -> None:
    """Special functions and bytes; reductions and rare paths count."""
    for name, special, nbytes in (
        ("bce", 2, 4), ("cross_entropy", 1, 0), ("dgelu", 2, 4), ("dropout_residual", 0, 5), ("rms_statistics", 0, 2),
        ("dswiglu", 2, 10), ("swiglu_with_inputs", 0.5, 3),
    ):  # fmt: skip
        floors = heavy.floors(fused.Job(name, "nt", 4096, 14336, 1024), 1500)
        assert (floors["special_per_element"], floors["bytes_per_element"]) == (special, nbytes)
        assert floors["special_us"] == pytest.approx(special * 4096 * 14336 / (16 * 132 * 1500))
        assert floors["floor_us"] == max(floors["bytes_us"], floors["special_us"], floors["issue_us"])


# -- results ---------------------------------------------------------------------------------------------------------
def right(a: Any, b: Any, d: Any) -> None:
    d.copy_(a.double() @ b.double())


def one_is_missing(a: Any, b: Any, d: Any) -> None:
    d[:-1], d[-1, :-1] = a[:-1].double() @ b.double(), a[-1].double() @ b[:, :-1].double()


def a_step_is_missing(a: Any, b: Any, d: Any) -> None:
    d.copy_(a[:, :-16].double() @ b[:-16].double())


@pytest.mark.parametrize(("dtype", "output"), [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16"), ("int8", "int32")])
def test_a_result_is_right_only_where_every_element_is(dtype: str, output: str) -> None:
    torch.manual_seed(0)
    a, b = (torch.randn(size) if dtype != "int8" else torch.randint(-128, 128, size) for size in ((48, 256), (256, 80)))
    a, b, d = a.to(ladder.TORCH[dtype]), b.to(ladder.TORCH[dtype]), torch.empty(48, 80, dtype=ladder.TORCH[output])

    def cut(a: Any, b: Any, d: Any) -> None:
        d.copy_((a.view(torch.int32) & -0x2000).view(torch.float32).double() @ b.double())

    def larger(a: Any, b: Any, d: Any) -> None:
        d.copy_(1.05 * (a.double() @ b.double()))

    for call in (right, one_is_missing, a_step_is_missing, larger):
        assert ladder.is_right(call, a, b, d) == (call is right), call
        if output == "bf16":
            assert timing.is_right(call, a, b, d, timing.exact(a, b)) == (call is right), call
    if dtype == "fp32":
        assert not ladder.is_right(cut, a, b, d)
        assert ladder.is_right(cut, a, b, d, "tf32")


def test_rows_of_the_ladder() -> None:
    """The floor is the slower of a copy and the loop; cuBLAS and loops are those of the dtype and the instruction."""
    shape = m, n, k = 512, 256, 1024
    flops, us = 2 * m * n * k, {}
    for x in RUNG_CASES:
        us |= {ladder.title(x): 40.0, f"copy {ladder.nbytes(x, shape)}": 3.0}
    us |= {f"cuBLAS {name}": float(i) for i, name in enumerate(ladder.CUBLAS_LAYOUT, 8)}  # 8 us, 9 ...
    slowdowns = {name: 10.0 if name == "fma" else 2.0 for name in ladder.MICROBENCHMARKS}
    us |= {f"loop {name}": ladder.loop_flops(name) / flops * slowdown for name, slowdown in slowdowns.items()}
    for r in (ladder.row(x, shape, us) for x in RUNG_CASES):
        assert r["tflops"] == pytest.approx(flops / 40e6)
        assert r["of_cublas"] == {"fp32": 0.2, "tf32": 0.225, "bf16": 0.25, "int8": 0.275}[r["dtype"]]
        assert r["of_roofline"] == pytest.approx(10 / 40 if r["dtype"] == "fp32" else 3 / 40)


def test_the_fastest_algorithm_is_found_in_ever_longer_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shorter a block, the further off it may be, as on a chip at its power limit."""
    noise = dict(zip((seconds for _, seconds in timing.SELECTION), (0.05, 0.009, 0), strict=True))
    measured: list[float] = []

    def block(graph: float, calls: int, seconds: float, warm_up: float) -> float:
        measured.append(seconds)
        return float(graph * (1 + noise[seconds] * torch.rand(()).item()))

    monkeypatch.setattr(timing, "block", block)
    graphs: dict[Any, Any] = {f"algorithm {i}": 10 + 0.1 * i for i in range(32)}
    assert timing.fastest(graphs, 3) == "algorithm 0"
    assert [measured.count(seconds) for _, seconds in timing.SELECTION] == [32, 8, 2]
    assert timing.fastest({}, 3) is None


# -- PyTorch's layers and models -------------------------------------------------------------------------------------
@pytest.fixture
def without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "machine", dict)


@pytest.mark.slow
def test_every_layer_runs(without_a_name: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    called(monkeypatch, torch_layers, "--tiny", "--json", str(tmp_path / "rows.json"))
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert {r["case"] for r in rows} == {"host", *torch_layers.CASES}
    for r in rows:
        if r["case"] != "host":
            names = {key.removesuffix("_us") for key in r if key.endswith("_us")}
            assert {"eager", "inductor", "max_autotune", "compiled", r["ours"]} <= names
            assert r["training"] == ("reduce_overhead" in names)
            assert all(r[f"{name}_error"] < 1e-5 for name in names)


def test_a_step_that_is_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(torch_layers.Head):
        def load_state_dict(self, state: Any, assign: bool) -> None:
            super().load_state_dict(state, assign=assign)

        def forward(self, x: Any, target: Any) -> Any:
            return 1.01 * super().forward(x, target)

    monkeypatch.setattr(torch_layers.gt, "FusedLinearCrossEntropy", lambda dim, classes, **_: Wrong(dim, classes))
    with pytest.raises(SystemExit, match="cross-entropy: fused is off the exact step by 0.01"):
        torch_layers.measure("cross-entropy", torch_layers.CASES["cross-entropy"], True, 0, 0)


@pytest.mark.parametrize("name", ["qwen3-8b", "gpt2-xl-prefill", "bert-large", "vit-large-prefill"])
def test_a_model_of_transformers_runs(
    name: str, without_a_name: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    from benchmarks.torch import hf_models

    monkeypatch.setattr(sys, "argv", ["", "--tiny", "--json", str(tmp_path / "rows.json"), "--case", name])
    torch_layers.main(hf_models.__doc__, hf_models.CASES)
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert row["training"] != name.endswith("prefill")
    assert row["compiled_error"] <= 2 * row["eager_error"] + 1e-6


def test_layers_of_no_table_are_of_three_classes() -> None:
    jobs = autotuned.jobs()
    assert len(set(jobs)) == len(jobs) == 210
    assert not {(n, k) for layout, _, n, k in jobs if layout == "nt"} & {
        (n, k) for n, k, operands, _ in builtin_table()._entries if operands == "16 bits"
    }


def test_two_designs_in_short_and_in_long_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """And among other kernels, for each share of their time."""
    a, b = (torch.randn(64, 64).bfloat16() for _ in range(2))
    for name, stub in (
        ("rotated", lambda *_, least: [(a, b, torch.empty(64, 64).bfloat16())] * least), ("MAX_ELEMENTS", 1 << 16),
        ("captured", lambda call, sets: [call(*s) for s in sets]),
        ("medians", lambda graphs, *_: dict.fromkeys(graphs, 8.0)),
        ("in_long_blocks", lambda graphs, calls: dict.fromkeys(graphs, 6.0)),
    ):  # fmt: skip
        monkeypatch.setattr(power, name, stub)
    job = ("nn", 64, 64, 64)
    configs = {str(x) for x in power.contenders(*job)}
    assert {x.split()[0] for x in configs} == {"cooperative", "pingpong"}
    row = power.measured(job)
    assert row["us"] == {x: {"short": 4.0, "long": 6.0} for x in ("torch", *configs)}
    rows = power.among_others(job, [0.25, 0.5])
    assert [(r["share"], r["us"]) for r in rows] == [(x, dict.fromkeys({"other", *configs}, 6.0)) for x in (0.25, 0.5)]
    assert {x[1:] for x in power.long_jobs()} <= {x[1:] for x in autotuned.jobs()}


def test_stale_rows_are_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are removed, and the file's benchmark adds what is missing."""
    file, runs = tmp_path / "kinds-h200.json.xz", list[list[str]]()
    row = refresh.figures.current("kinds-h200")[0]
    write(file, {**read(find("kinds-h200")), "rows": [row, {**row, "config": "another"}]})
    monkeypatch.setattr(refresh, "find", lambda name: file)
    monkeypatch.setattr(refresh, "load", lambda name: read(file))
    monkeypatch.setattr(refresh.figures, "load", lambda name: read(file))
    monkeypatch.setattr(refresh.subprocess, "run", lambda words, **options: runs.append(words))
    refresh.figures.current.cache_clear()
    refresh.measure("kinds", "h200", 100.0)
    refresh.figures.current.cache_clear()
    assert read(file)["rows"] == [row]
    assert runs == [
        [sys.executable, "-m", "benchmarks.speed.kinds", "--json", str(file), "--resume", "--seconds", "100"]
    ]
