"""Grouped GEMMs against torch's, a loop of products, and a Triton kernel, with sizes drawn from 0 to twice the mean.

| kind | product | opponents |
| --- | --- | --- |
| rows | a (sum M, K) @ b (G, K, N), `offsets` | torch's grouped_mm, torch.mm in a loop, triton_grouped.py |
| masked | a (G, max M, K) @ b (G, K, N), `counts` | torch.bmm over all rows, torch.mm in a loop |
| along_k | a (M, sum K) @ b (sum K, N), `offsets`, to (G, M, N) | torch's grouped_mm, torch.mm in a loop |
| equal | as rows, but all groups have `mean` rows | torch.bmm |
| fp8 | as rows, e4m3 with scales of 1x128 and 128x128 blocks | our dense product of each group, in a loop; DeepGEMM |
| fp8_k | as along_k, e4m3 with scales of 1x128 blocks on both sides, added to C (G, M, N) in fp32 | as fp8 |

DeepGEMM is timed if it can be imported, with each group padded to 128 rows before. torch.mm in a loop is given the
sizes on the host. `dense` is our GEMM of as many rows with one B, rounded up to 64 rows for each group where groups are
small: no product of groups, but a measure of what its FLOPs cost. `floor_us` is the larger of that and the time of the
bytes: those of the operands in use and of D at the copy speed of the chip.

Timed as in contest.py.

    python -m benchmarks.speed.grouped --json benchmarks/results/grouped-h100.json --seconds 500 [--kind rows]
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import gemmsmith
from benchmarks import contest

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
SHAPES = ((6144, 7168), (7168, 3072), (4096, 4096), (4096, 2048))
UNSEEN = 40


class Job(NamedTuple):
    kind: str
    groups: int
    mean: int
    """The mean rows (or K) of a group; of masked products and those along K, the table's sum is about groups x mean."""
    n: int
    k: int
    """K, or M along K."""

    @property
    def name(self) -> str:
        return f"{self.groups} x {self.mean} of {self.n} x {self.k}"

    @property
    def is_along_k(self) -> bool:
        return self.kind in ("along_k", "fp8_k")


def job_of(row: contest.Row) -> Job:
    return Job(*(row[name] for name in Job._fields))


def jobs() -> list[Job]:
    """Return the products of DeepGEMM's benchmark and of mixtures of experts, in turn by kind."""
    listed = [Job("rows", groups, mean, n, k) for groups, mean in ((4, 8192), (8, 4096), (32, 256)) for n, k in SHAPES]
    listed += [Job("rows", groups, mean, 2816, 2048) for groups, mean in ((256, 64), (128, 8), (128, 1))]
    listed += [Job("masked", groups, mean, n, k) for groups, mean in ((32, 192), (6, 1024), (32, 20), (6, 20))
               for n, k in ((4096, 4096), (7168, 2048))]  # fmt: skip
    listed += [Job(kind, groups, mean, n, m) for kind in ("along_k", "fp8_k") for groups, mean in ((4, 8192), (8, 4096))
               for m, n in ((4096, 7168), (7168, 2048))]  # fmt: skip
    listed.append(Job("equal", 256, 64, 2816, 2048))
    listed += [Job("fp8", groups, mean, n, k) for groups, mean in ((4, 8192), (8, 4096), (32, 256))
               for n, k in ((6144, 7168), (4096, 4096))]  # fmt: skip
    return listed


def unseen() -> list[Job]:
    """Return UNSEEN products that no choice was fitted to."""
    chosen = random.Random(48)
    return [
        Job("rows", chosen.choice((2, 6, 12, 16, 24, 48, 64, 96, 128, 160, 384)), chosen.choice((3, 12, 40, 100, 160,
            320, 700, 1500)), 64 * chosen.randint(12, 120), 64 * chosen.randint(12, 120))
        for _ in range(UNSEEN)
    ]  # fmt: skip


def drawn(job: Job) -> list[int]:
    """Return the sizes of the groups: uniform from 0 to twice the mean; along K multiples of 8, for torch's, or 128."""
    if job.kind == "equal":
        return [job.mean] * job.groups
    chosen = random.Random(f"{job}")
    sizes = [chosen.randint(0, 2 * job.mean) for _ in range(job.groups)]
    multiple = {"along_k": 8, "fp8_k": 128}.get(job.kind, 1)
    return [size // multiple * multiple for size in sizes]


class Case:
    """Random operands, the table, and D, full of NaN."""

    def __init__(self, job: Job) -> None:
        self.job, self.sizes = job, drawn(job)
        groups, n, k = job.groups, job.n, job.k
        total, table = sum(self.sizes), torch.tensor(self.sizes, device="cuda", dtype=torch.int32)
        self.offsets = table.cumsum(0).to(torch.int32)
        self.table = table if job.kind == "masked" else self.offsets

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda", dtype=BF16)

        if job.is_along_k:
            self.a, self.b, shape = normal(total, k).mT, normal(total, n), (groups, k, n)
        else:
            self.b = normal(groups, n, k).mT
            self.a = normal(groups, 2 * job.mean, k) if job.kind == "masked" else normal(total, k)
            shape = (*self.a.shape[:-1], n)  # type: ignore[assignment]
        self.scales: dict[str, torch.Tensor] = {}
        if job.kind == "fp8":
            self.a, self.b = self.a.to(E4M3), self.b.mT.to(E4M3).mT
            scale_a = torch.rand(k // 128, total, device="cuda").T + 0.5
            self.scales = {"scale_a": scale_a, "scale_b": torch.rand(groups, k // 128, n // 128, device="cuda") + 0.5}
        self.operands: dict[str, torch.Tensor] = {}
        if job.kind == "fp8_k":
            self.a, self.b = self.a.contiguous().to(E4M3), self.b.mT.contiguous().to(E4M3).mT
            scale_a, scale_b = (torch.rand(total // 128, x, device="cuda") + 0.5 for x in (k, n))
            self.scales = {"scale_a": scale_a.T, "scale_b": scale_b}
            self.operands = {"c": torch.randn(shape, device="cuda")}
        self.d = torch.empty(shape, device="cuda", dtype=torch.float32 if self.operands else BF16)
        self.made: torch.Tensor | None = None
        """A result in memory of its own."""
        self.made_rows: Any = slice(None)
        """Its rows that are D's."""
        self.poison()

    @property
    def bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (self.a, self.b, self.d, *self.operands.values()))

    @property
    def bytes_in_use(self) -> int:
        """Bytes of the operands that the groups use, and of D's rows that they write."""
        job, total, used = self.job, sum(self.sizes), sum(size > 0 for size in self.sizes)
        if job.is_along_k:
            return self.bytes
        return self.a.element_size() * (total * job.k + used * job.n * job.k) + 2 * total * job.n

    @property
    def flops(self) -> int:
        return 2 * sum(self.sizes) * self.job.n * self.job.k

    def poison(self) -> None:
        self.d.fill_(float("nan"))

    def products(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Return each group's (a, b, d), whose extents are known on the host."""
        if self.job.kind == "masked":
            groups = zip(self.a, self.b, self.d, self.sizes, strict=True)
            return [(a[:size], b, d[:size]) for a, b, d, size in groups]
        if self.job.is_along_k:
            return list(zip(self.a.split(self.sizes, 1), self.b.split(self.sizes), self.d, strict=True))
        return list(zip(self.a.split(self.sizes), self.b, self.d.split(self.sizes), strict=True))

    def exact(self, group: int, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return a group's product in float64."""
        if not self.scales:
            return a.double() @ b.double()
        begin = sum(self.sizes[:group])
        if self.job.kind == "fp8_k":
            scale_a, scale_b = self.scales_along_k(group)
            a = a.double() * scale_a.double().repeat_interleave(128, 1)
            return self.operands["c"][group] + a @ (b.double() * scale_b.double().repeat_interleave(128, 0))
        scale_a = self.scales["scale_a"][begin : begin + len(a)].double().repeat_interleave(128, 1)
        scale_b = self.scales["scale_b"][group].double().repeat_interleave(128, 0).repeat_interleave(128, 1)
        return (a.double() * scale_a) @ (b.double() * scale_b)

    def scales_along_k(self, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scales of a group's slices of K."""
        begin = sum(self.sizes[:group]) // 128
        part = slice(begin, begin + self.sizes[group] // 128)
        return self.scales["scale_a"][:, part], self.scales["scale_b"][part]


def check(case: Case) -> str:
    """Return what is wrong with a case's D, compared with float64, and fill it with NaN."""
    if case.made is not None:
        case.d.copy_(case.made[case.made_rows])
        case.made, case.made_rows = None, slice(None)
    worst = 0.0
    for group, (a, b, d) in enumerate(case.products()):
        if d.numel():
            product = case.exact(group, a, b)
            allowed = 2.0**-7 * product.abs() + 2.0**-7 * max(1, a.shape[1]) ** 0.5
            error = ((d.double() - product).abs() / allowed).nan_to_num(torch.inf).max()
            worst = max(worst, float(error))
    behind = [d[size:] for d, size in zip(case.d, case.sizes, strict=True)] if case.job.kind == "masked" else []
    if not all(bool(rows.isnan().all()) for rows in behind):
        return "rows from the count on are written"
    case.poison()
    return "" if worst <= 1 else f"error {worst:.3g} of its bound"


def add(acc: Any, c: Any) -> Any:
    return acc + c


# -- contenders ------------------------------------------------------------------------------------------------------
def loop(c: Case) -> None:
    for a, b, d in c.products():
        if d.numel():
            torch.mm(a, b, out=d)


def loop_of_ours(c: Case) -> None:
    begin = 0
    for group, (a, b, d) in enumerate(c.products()):
        if c.operands:
            scale_a, scale_b = c.scales_along_k(group)
            of_group = c.operands["c"][group]
            gemmsmith.gemm(a, b, scale_a=scale_a, scale_b=scale_b, epilogue=add, c=of_group, out=d, out_dtype="fp32")
        elif d.numel():
            scale_a = c.scales["scale_a"][begin : begin + len(a)]
            gemmsmith.gemm(a, b, scale_a=scale_a, scale_b=c.scales["scale_b"][group], out=d)
            begin += len(a)


def grouped_mm(c: Case) -> None:
    c.made = torch._grouped_mm(c.a, c.b, offs=c.offsets)  # it takes no out


def bmm(c: Case) -> None:
    torch.bmm(c.a.view(len(c.b), -1, c.job.k), c.b, out=c.d.view(len(c.b), -1, c.job.n))


class Padded:
    """The operands of a Case as DeepGEMM takes them: each group's rows padded to a multiple of 128."""

    def __init__(self, c: Case) -> None:
        sizes = torch.tensor(c.sizes, device="cuda")
        tiles = (sizes + 127) // 128
        ends, group = tiles.cumsum(0) * 128, torch.arange(len(sizes), device="cuda")
        self.groups = group.repeat_interleave(tiles * 128).int()
        row = torch.arange(int(sizes.sum()), device="cuda")
        self.rows = row + (ends - sizes.cumsum(0) - (tiles * 128 - sizes)).repeat_interleave(sizes)
        self.a = c.a.new_zeros((len(self.groups), c.job.k))
        self.a[self.rows] = c.a
        self.scale_a = torch.ones(c.job.k // 128, len(self.groups), device="cuda").T
        self.scale_a[self.rows] = c.scales["scale_a"]
        self.scale_b = c.scales["scale_b"].mT.contiguous()
        self.d = c.d.new_empty((len(self.groups), c.job.n))


def deepgemm() -> Callable[[Case], None] | None:
    """Return DeepGEMM's call, or None if it is not installed."""
    try:
        library = importlib.import_module("deep_gemm")
    except ImportError:
        return None
    multiply = getattr(library, "m_grouped_fp8_gemm_nt_contiguous", None)
    options = {"disable_ue8m0_cast": True} if multiply else {}  # from 2.0 on
    multiply = multiply or library.m_grouped_gemm_fp8_fp8_bf16_nt_contiguous
    padded: dict[int, Padded] = {}

    def call(c: Case) -> None:
        p = padded.get(id(c)) or padded.setdefault(id(c), Padded(c))
        multiply((p.a, p.scale_a), (c.b.mT, p.scale_b), p.d, p.groups, **options)
        c.made, c.made_rows = p.d, p.rows

    return call


def keyword(job: Job) -> dict[str, Any]:
    """Return the grouping and the name of its table."""
    table = "counts" if job.kind == "masked" else "offsets"
    return {"grouping": gemmsmith.Grouping(table, "k" if job.is_along_k else "m")}  # type: ignore[arg-type]


def planned(job: Job, config: gemmsmith.Config | None = None) -> gemmsmith.Plan:
    """Return the plan for stand-ins of a Case's arrays."""
    groups, n, k, total = job.groups, job.n, job.k, sum(drawn(job))
    spec, table = gemmsmith.Spec, gemmsmith.Spec((groups,), "int32")
    if job.kind == "fp8_k":
        a, b = spec((k, total), "fp8_e4m3"), spec((total, n), "fp8_e4m3", (1, total))
        scales = {"scale_a": spec((k, total // 128), "fp32", (1, k)), "scale_b": spec((total // 128, n), "fp32")}
        return gemmsmith.plan(
            a, b, offsets=table, config=config, epilogue=add, c=spec((groups, k, n), "fp32"), out_dtype="fp32",
            **scales, **keyword(job),
        )  # fmt: skip
    if job.kind == "along_k":
        a, b = spec((k, total), "bf16", (1, k)), spec((total, n), "bf16")
    else:
        b = spec((groups, k, n), "bf16", (k * n, 1, k))
        a = spec((groups, 2 * job.mean, k) if job.kind == "masked" else (total, k), "bf16")
    if job.kind == "fp8":
        a, b = spec((total, k), "fp8_e4m3"), spec((groups, k, n), "fp8_e4m3", (k * n, 1, k))
        scales = {"scale_a": spec((total, k // 128), "fp32", (1, total)),
                  "scale_b": spec((groups, k // 128, n // 128), "fp32")}  # fmt: skip
        return gemmsmith.plan(a, b, offsets=table, config=config, **scales, **keyword(job))
    if job.kind == "masked":
        return gemmsmith.plan(a, b, counts=table, config=config, **keyword(job))
    return gemmsmith.plan(a, b, offsets=table, config=config, **keyword(job))


def dense_rows(case: Case) -> int:
    """Return the rows (or K) of the dense product: all of them, of small groups rounded up to 64 each."""
    if case.job.is_along_k or case.job.mean > 512:
        return sum(case.sizes)
    return sum(-(-size // 64) * 64 for size in case.sizes)


def dense_of(case: Case) -> tuple[Callable[[], Any], str]:
    """Return a call of the dense product, and its config."""
    rows, job = dense_rows(case), case.job
    n, k = (job.n, rows) if job.is_along_k else (job.n, job.k)
    m = job.k if job.is_along_k else rows
    a = torch.randn((k, m) if job.kind == "along_k" else (m, k), device="cuda", dtype=BF16)
    b = torch.randn((k, n) if job.kind == "along_k" else (n, k), device="cuda", dtype=BF16)
    a, b = (a.mT, b) if job.kind == "along_k" else (a, b.mT)
    d = torch.empty((m, n), device="cuda", dtype=BF16)
    if job.kind in ("fp8", "fp8_k"):
        columns = n if job.kind == "fp8_k" else n // 128
        scale_a, scale_b = (torch.rand(k // 128, x, device="cuda") for x in (m, columns))
        scales = {"scale_a": scale_a.T, "scale_b": scale_b}
        a, b = a.to(E4M3), b.mT.to(E4M3).mT
        plan = gemmsmith.plan(a, b, **scales)
        return lambda: plan.run(a, b, d, **scales), str(plan.config)
    plan = gemmsmith.plan(a, b)
    return lambda: plan.run(a, b, d), str(plan.config)


def measure(job: Job, pace: contest.Pace) -> contest.Row:
    """Return the row of a product."""
    from benchmarks.speed import triton_grouped

    plan, first = planned(job), Case(job)
    sets = contest.sets_of(first, lambda: Case(job), first.bytes)
    table = "counts" if job.kind == "masked" else "offsets"
    call_dense, dense_config = dense_of(first)

    def ours(c: Case) -> None:
        plan.run(c.a, c.b, c.d, **{table: c.table}, **c.scales, **c.operands)

    def dense(c: Case) -> None:
        call_dense()

    others: dict[str, Callable[[Case], None]] = {"loop": loop_of_ours if "fp8" in job.kind else loop}
    if job.kind in ("masked", "equal"):
        others["bmm"] = bmm
    if job.kind == "fp8" and (call := deepgemm()):
        others["deepgemm"] = call
    if job.kind == "rows":
        tuned = triton_grouped.tuned(first.a, first.b, first.d, first.offsets)
        others["triton"] = lambda c: tuned(c.a, c.b, c.d, c.offsets)
    if job.kind in ("rows", "along_k"):
        others["grouped_mm"] = grouped_mm  # the last, since it replaces the result that is checked
    row = contest.compared(ours, others, dict, sets, check, pace, unchecked={"dense": dense})
    about = {"tflops": first.flops / row["us"] / 1e6, "config": str(plan.config), "rows": sum(first.sizes)}
    return {**job._asdict(), **row, **about, "bytes_us": first.bytes_in_use / COPY_SPEED[copy_chip()] / 1e6,
            "dense_config": dense_config}  # fmt: skip


COPY_SPEED = {"H100": 3.0, "H200": 4.26}
"""TB/s of a large copy, counting bytes read and written. Measured."""


def copy_chip() -> str:
    return "H200" if "H200" in torch.cuda.get_device_name() else "H100"


def told(row: contest.Row) -> str:
    """Return a line for a row."""
    names = [name for name in ("grouped_mm", "loop", "triton", "deepgemm", "bmm", "dense") if f"{name}_us" in row]
    others = "   ".join(f"{name} {row[f'{name}_us']:.1f} ({row[f'{name}_ratio']:.2f})" for name in names)
    refused = f"   refused: {row['refused']}" if "refused" in row else ""
    return (f"{row['kind']:<7} {job_of(row).name:<24} {row['us']:7.1f} us {row['tflops']:4.0f} TFLOP/s   {others}   "
            f"bytes {row['bytes_us']:.1f} us   {row['sm_mhz']} MHz   {row['config']}{refused}")  # fmt: skip


def main() -> None:
    parser = contest.parser_for(__doc__)
    parser.add_argument("--kind", action="append", help="instead of all; may be repeated")
    parser.add_argument("--unseen", action="store_true", help="products that no choice was fitted to")
    arguments = parser.parse_args()
    pace = contest.pace_of(arguments)
    listed = [job for job in (unseen() if arguments.unseen else jobs()) if job.kind in (arguments.kind or [job.kind])]
    rows = contest.measured(
        arguments, listed, job_of, lambda left: contest.built([planned(job) for job in left], arguments.dry),
        lambda job: measure(job, pace), told,
    )  # fmt: skip
    contest.write_down(arguments.json, rows, contest.summary(rows, lambda row: row["kind"], lambda r: job_of(r).name))


if __name__ == "__main__":
    main()
