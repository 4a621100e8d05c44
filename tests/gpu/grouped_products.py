"""Grouped products for the program that runs products again and again, with tables that change between replays."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from tests.gpu import judges
from tests.gpu.products import Product, Results, given

import gemmsmith
from gemmsmith import Config, Grouping

Form = Literal["rows", "scattered", "k", "masked"]
GROUPS = {"cuda": (1, 5, 32, 100), "cpu": (1, 3, 5)}
SIZES = {"cuda": ((1, 33, 500, 3000), (128, 520, 1024), (64, 264, 1024)), "cpu": ((1, 30, 70), (16, 48), (16, 40))}
"""M, N, K of all groups; M of each where rows are masked."""
VARIANTS = 3
"""Tables of one product."""
GROUPINGS: dict[Form, Grouping] = {
    "rows": Grouping("offsets"),
    "scattered": Grouping("offsets", gathers=True, scatters=True),
    "k": Grouping("offsets", "k"),
    "masked": Grouping("counts"),
}


@dataclass
class GroupedProduct(Product):
    """A product of groups. `variants`: the same one with other tables, of which each has its own results."""

    form: Form = "rows"
    tables: dict[str, torch.Tensor] = field(default_factory=dict)
    variants: list[GroupedProduct] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.form} of {tuple(self.a.shape)} x {tuple(self.b.shape)}, {self.config or 'auto'}"

    def __call__(self, outs: Results | None = None) -> Results:
        outs = outs or self._needed_outs()
        along = "k" if self.form == "k" else "m"
        return [gemmsmith.grouped_gemm(self.a, self.b, **self.tables, along=along, out=given(outs), config=self.config)]

    def plan(self) -> gemmsmith.Plan:
        out = given(self._needed_outs())
        return gemmsmith.plan(
            self.a, self.b, out=out, grouping=GROUPINGS[self.form], config=self.config, **self.tables
        )  # fmt: skip

    def _needed_outs(self) -> Results | None:
        """What scattered rows are written into, if nothing is given: all of it is."""
        if self.form != "scattered":
            return None
        return [self.a.new_full((len(self.tables["scatter"]), self.b.shape[-1]), float("nan"))]

    def expect(self) -> None:
        for p in [self, *self.variants]:
            p.isolated_results = [p.with_zeros(x) for x in p()]
            p.wants, p.bounds = p._exact(p.isolated_results[0])

    def for_graph(self) -> GroupedProduct:
        """The product with tables of its own, which `renew` overwrites."""
        own = {name: x.clone() for name, x in self.tables.items()}
        return replace(self, tables=own, variants=[self, *self.variants])

    def renew(self, rng: random.Random) -> None:
        """Write the tables of a variant into this product's, on the current stream."""
        selected = rng.choice(self.variants)
        for name, x in selected.tables.items():
            self.tables[name].copy_(x)
        self.wants, self.bounds = selected.wants, selected.bounds
        self.isolated_results = selected.isolated_results

    def judge(self, results: Results) -> Counter[str]:
        return super().judge([self.with_zeros(x) for x in results])

    def with_zeros(self, d: torch.Tensor) -> torch.Tensor:
        """D, with zeros in the rows that a masked product does not write."""
        if self.form != "masked":
            return d
        rows = torch.arange(d.shape[1], device=d.device) < self.tables["counts"][:, None]
        return torch.where(rows[..., None], d, 0)

    def _exact(self, d: torch.Tensor) -> tuple[Results, Results]:
        """The result and its bounds, group by group; rows of no group are zero."""
        want, bound = torch.zeros_like(d, dtype=torch.float64), torch.zeros_like(d, dtype=torch.float64)
        (first,) = (self.tables[name].tolist() for name in ("offsets", "counts") if name in self.tables)
        for group, (begin, end) in enumerate(zip([0, *first], first, strict=False)):
            part: Any = slice(begin, end)
            if self.form == "k":
                a, b, place = self.a[:, part], self.b[part], group
            elif self.form == "masked":
                a, b, place = self.a[group, :end], self.b[group], (group, slice(end))
            elif self.form == "scattered":
                rows = self.tables["gather"][part, None].long()
                a, b = torch.where(rows < 0, 0, self.a[rows[:, 0].clamp(0)]), self.b[group]
                place = self.tables["scatter"][part].long()
            else:
                a, b, place = self.a[part], self.b[group], part
            want[place] = judges.exact(a, b)
            bound[place] = judges.product_bound(a, b, want[place], "fp32", d.dtype)
        return [want], [bound]


def drawn_groups(
    form: Form, configs: Sequence[Config | None], device: str, count: int, rng: random.Random
) -> Iterator[Product]:
    """`count` products or more of a form, with each of the configs."""
    dice = torch.Generator().manual_seed(rng.getrandbits(32))

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=dice).to(device, torch.bfloat16)

    def ends(groups: int, extent: int, whole: bool) -> torch.Tensor:
        inner = torch.randint(0, extent + 1, (groups,), generator=dice)
        if whole:
            inner[-1] = extent
        return inner.sort().values

    for i in range(max(count, len(configs))):
        groups, (m, n, k) = rng.choice(GROUPS[device]), (rng.choice(sizes) for sizes in SIZES[device])
        if form == "k":
            groups = min(groups, 5)  # D of every group is a whole matrix
        b_shape = {"k": (k, n)}.get(form, (groups, k, n))
        a_shape = {"masked": (groups, min(m, 200), k), "k": (m, k)}.get(form, (m, k))
        a = matrix(k, m).T if form == "k" else matrix(*a_shape)
        b = matrix(*b_shape) if form == "k" or rng.random() < 0.3 else matrix(*b_shape[:-2], n, k).mT
        variants = []
        for _ in range(VARIANTS):
            tables = {"offsets": ends(groups, k if form == "k" else m, form == "scattered")}
            if form == "masked":
                tables = {"counts": torch.randint(0, a_shape[1] + 1, (groups,), generator=dice)}
            if form == "scattered":
                tables["gather"] = torch.randint(-1, m, (m,), generator=dice)
                tables["scatter"] = torch.randperm(m, generator=dice)
            on_device = {name: x.to(device, torch.int32) for name, x in tables.items()}
            variants.append(GroupedProduct(a, b, configs[i % len(configs)], "bare", {}, False, form=form,
                                           tables=on_device))  # fmt: skip
        first, *others = variants
        yield replace(first, variants=others)
