"""Products that run again and again: drawn, computed once alone, judged against that and against float64."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.gpu import judges

import gemmsmith
from gemmsmith import Config, ConfigError

Results = list[torch.Tensor]


def row_sums(acc: Any, bias: Any) -> Any:
    x = (acc + bias).relu()
    return x, x.sum(-1)


def amax(acc: Any) -> Any:
    return acc * 0.5, acc.abs().max()


def swiglu(acc: Any) -> Any:
    gate, up = gemmsmith.deinterleave(acc)
    return torch.nn.functional.silu(gate) * up


def residual(acc: Any, c: Any) -> Any:
    return acc + c


def total(acc: Any) -> Any:
    return acc, acc.sum()


EPILOGUES: dict[str, Callable[..., Any] | None] = {
    "bare": None, "row_sums": row_sums, "amax": amax, "swiglu": swiglu, "residual": residual, "atomic": total,
}  # fmt: skip
"""Of the product as gemmsmith traces it, and as a float64 tensor. The last one's sums are atomic."""
SIZES = {
    "cuda": ((1, 33, 128, 500, 1024, 2500, 4096), (128, 1008, 2112, 4096, 6144), (64, 1000, 4096, 7168)),
    "cpu": ((1, 33, 70), (16, 48), (16, 40)),
}
"""M, N, K."""


@dataclass
class Product:
    """Operands, a config and an epilogue; what results should be, within which bounds, and what they were alone."""

    a: torch.Tensor
    b: torch.Tensor
    config: Config | None
    epilogue: str
    operands: dict[str, torch.Tensor]
    control: bool
    wants: Results = field(default_factory=list)
    bounds: Results = field(default_factory=list)
    isolated_results: Results = field(default_factory=list)

    def __str__(self) -> str:
        m, k = self.a.shape
        return f"{m}x{self.b.shape[1]}x{k} {self.epilogue}, {self.config or 'auto'}"

    def __call__(self, outs: Results | None = None) -> Results:
        """Computes it on the current stream, into `outs` where given."""
        if self.control:
            return [torch.mm(self.a, self.b, out=outs[0] if outs else None)]
        return several(gemmsmith.gemm(self.a, self.b, out=given(outs), config=self.config, **self._epilogue))

    @property
    def _epilogue(self) -> dict[str, Any]:
        atomic = self.epilogue == "atomic"
        return {"epilogue": EPILOGUES[self.epilogue], "operands": self.operands, "deterministic": not atomic}

    def prepare(self, outs: Results) -> Callable[[], Any]:
        """A prepared run into `outs`."""
        if self.control:
            return lambda: self(outs)
        return self.plan().prepare(self.a, self.b, given(outs), operands=self.operands)

    def plan(self) -> gemmsmith.Plan:
        return gemmsmith.plan(self.a, self.b, config=self.config, **self._epilogue)

    def empty(self) -> Results:
        """Arrays for its results, full of NaN."""
        return [torch.full_like(x, float("nan")) for x in self.isolated_results]

    def for_graph(self) -> Product:
        """What a graph of it has."""
        return self

    def renew(self, rng: random.Random) -> None:
        """Changes what a graph of it reads before a replay: nothing."""

    def expect(self) -> None:
        """Computes it alone, and in float64."""
        self.isolated_results = self()
        product = judges.exact(self.a, self.b)
        epilogue = EPILOGUES[self.epilogue]
        more = {name: x.double() for name, x in self.operands.items()}
        self.wants = several(epilogue(product, **more) if epilogue else product)
        for x, want in zip(self.isolated_results, self.wants, strict=True):
            if epilogue is None:
                bound = judges.product_bound(self.a, self.b, want, "fp32", x.dtype)
            else:
                summed = want.ndim < 2 and self.epilogue != "amax"
                bound = judges.epilogue_bound(want, product, x.dtype, summed=summed)
            self.bounds.append(bound)

    def judge(self, results: Results) -> Counter[str]:
        """One run, counted: atomic sums may differ, but not be wrong."""
        same = all(map(judges.same_bits, results, self.isolated_results))
        wrong = not same and any(map(judges.wrong, results, self.wants, self.bounds))
        return Counter(runs=1, wrong=int(wrong), different=int(not same and self.epilogue != "atomic"))


def several(x: Any) -> Results:
    return list(x) if isinstance(x, tuple) else [x]


def given(outs: Results | None) -> Any:
    return outs[0] if outs is not None and len(outs) == 1 else tuple(outs) if outs else None


def drawn(
    configs: Sequence[Config | None], epilogues: Sequence[str], ragged: bool, device: str, count: int,
    rng: random.Random, control: bool,
) -> Iterable[Product]:  # fmt: skip
    """`count` products or more, with each of the configs; `ragged` ones have rows that TMA cannot read."""
    dice = torch.Generator().manual_seed(rng.getrandbits(32))
    for i in range(max(count, len(configs))):
        m, n, k = (rng.choice(sizes) for sizes in SIZES[device])
        if ragged:
            n, k = n + rng.choice([0, 1, 3]), k + rng.choice([1, 2, 5])
        config, epilogue = configs[i % len(configs)], rng.choice(epilogues)
        if epilogue == "swiglu":
            n = n // 16 * 16

        def matrix(rows: int, columns: int, turned: bool = False) -> torch.Tensor:
            x = torch.randn(*((columns, rows) if turned else (rows, columns)), generator=dice)
            x = x.to(device, torch.bfloat16)
            return x.T if turned else x

        a, b = matrix(m, k, rng.random() < 0.2), matrix(k, n, rng.random() < 0.7)
        shapes = {"row_sums": {"bias": (1, n)}, "residual": {"c": (m, n)}}.get(epilogue, {})
        more = {name: matrix(*shape) for name, shape in shapes.items()}
        more = {name: x[0] if name == "bias" else x for name, x in more.items()}
        yield Product(a, b, config, "bare" if control else epilogue, {} if control else more, control)


def expected(some: Iterable[Product], tell: Callable[[str], None]) -> list[Product]:
    """Those whose configs suit them, computed alone, one after another; kernels are compiled several at a time."""

    def compiled(p: Product) -> Product | None:
        tell(f"compiling {p}")
        try:
            plan = p.plan()
            _ = plan._planned.compiled if p.a.is_cuda and not p.control else plan._planned.kernel
        except ConfigError:
            return None
        return p

    with ThreadPoolExecutor() as pool:
        built = [p for p in pool.map(compiled, some) if p]
    for p in built:
        tell(f"alone, {p}")
        p.expect()
    if built and built[0].a.is_cuda:
        torch.cuda.synchronize()
    return built
