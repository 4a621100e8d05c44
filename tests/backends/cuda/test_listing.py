"""Annotated PTX and SASS: each design's tensor instructions, FFMA and DP4A a k-tile, and the lines that issue them."""

from __future__ import annotations

import linecache
import re
from collections import Counter
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gemmsmith
from gemmsmith import Config, Spec
from gemmsmith.backends.cuda.compiler import compile_source
from gemmsmith.backends.cuda.listing import Listing, build_listing, classify, disassemble
from gemmsmith.core.chip import HOPPER
from gemmsmith.core.mma import FMA, FRAGMENT_ROWS_PER_WARP, MMA_SYNC, N8_COLUMNS, WGMMA, WGMMA_M
from gemmsmith.core.spec import KernelSpec
from gemmsmith.hw.arithmetic import Dp4a, FusedMultiplyAdd
from gemmsmith.hw.mma import MmaSync
from gemmsmith.hw.wgmma import Wgmma
from gemmsmith.hw.wmma import WmmaMma
from gemmsmith.kernels.build import build
from gemmsmith.ladder.launches import LADDER_KERNELS
from gemmsmith.lang import statements as st
from gemmsmith.lang.instruction import Result
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.location import SourceLocation
from gemmsmith.lang.values import Constant

PRODUCTS = FusedMultiplyAdd, Dp4a, MmaSync, Wgmma, WmmaMma
TYPES: dict[str, dict[str, Any]] = {"fp32": {}, "tf32": {"precision": "tf32"}, "3xtf32": {"precision": "3xtf32"}}
DESIGNS = [
    ("bf16", Config()),
    ("bf16", Config(tile=(256, 192, 64), cluster=(1, 2), stages=2, serpentine=True, sync_clusters=True)),
    ("bf16", Config(tile=(128, 128, 64), cluster=(2, 1), cluster_splits=2, stages=4)),
    ("bf16", Config(splits=0)),
    ("bf16", Config("pingpong", (128, 176, 64), (2, 1), 4)),
    ("bf16", Config("tma")),
    ("int8", Config(tile=(128, 128, 128), stages=3)),
    ("tf32", Config(tile=(128, 128, 32), stages=3)),
    ("fp8_e4m3", Config(tile=(128, 128, 128), cluster=(1, 1), stages=3)),
    ("bf16", Config("mma_multistage", (128, 128, 32), (1, 1), 3, 2)),
    ("fp16", Config("mma_multistage", (256, 192, 32), (1, 1), 3, 2, chip="sm_80")),
    ("tf32", Config("mma_multistage", (128, 128, 16), (1, 1), 3, 2, chip="sm_86")),
    ("int8", Config("mma_multistage", (128, 128, 64), (1, 1), 3, 2)),
    ("fp32", Config("sgemm", (256, 128, 8), (1, 1), 4, 2)),
    ("fp32", Config("sgemm", (128, 128, 8), (1, 1), 3, 2, chip="sm_80")),
]


def spec_of(dtype: str, config: Config) -> KernelSpec:
    stored = "fp32" if dtype in TYPES else dtype
    a, b = Spec((4096, 4096), stored), Spec((4096, 4096), stored, (1, 4096))
    return gemmsmith.plan(a, b, config=config, **TYPES.get(dtype, {}))._planned.spec


def of_k_tile(spec: KernelSpec) -> int:
    """How many instructions of a warp multiply a k-tile; of a thread, on CUDA cores."""
    rows, columns, depth = spec.warpgroup_rows, spec.warpgroup_columns, spec.config.tile[2]
    if not spec.design.mma_op.uses_tensor_cores:
        return rows * columns * depth // 128
    steps = depth // spec.mma.k
    if spec.design.mma_op is WGMMA:
        return rows // WGMMA_M * steps
    return rows // (4 * FRAGMENT_ROWS_PER_WARP) * (columns // N8_COLUMNS) * steps


def described(kernel: Kernel) -> Counter[SourceLocation]:
    """How many products a turn of the mainloop has by the kernel's description, by line."""

    def products(block: st.Block) -> Counter[SourceLocation]:
        found: Counter[SourceLocation] = Counter()
        for s in block.statements:
            made = s.value if isinstance(s, st.Define) else None
            issued = made.instruction if isinstance(made, Result) else getattr(s, "instruction", None)
            found[s.location] += isinstance(issued, PRODUCTS)
            turns = 1
            if isinstance(s, st.Loop) and s.index.unrolled:
                start, stop, step = (x.value for x in (s.start, s.stop, s.step) if isinstance(x, Constant))
                turns = len(range(start, stop, step))
            for child in st.children(s):
                found.update({where: n * turns for where, n in products(child).items()})
        return +found

    loops = [s for s in st.walk(kernel.body) if isinstance(s, st.Loop) and not s.index.unrolled]
    holding = [s for s in loops if products(s.body)]
    found = [products(s.body) for s in holding if not any(x in holding for x in st.walk(s.body))]
    assert all(x == found[0] for x in found)  # k-tiles that are inside may have a loop of their own
    return found[0]


def multiplied(listing: Listing) -> Counter[str]:
    """The products of each mainloop, by the line that they name."""
    loops = [[listing.instructions[i] for i in loop.unconditional] for loop in listing.mainloops]
    found = [Counter(str(x.location) for x in lines if x.kind in ("tensor", "multiply-add")) for lines in loops]
    assert all(x == found[0] for x in found)
    return found[0]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "config"), DESIGNS, ids=lambda x: f"{x}".replace(" ", "-"))
def test_products_of_a_k_tile(dtype: str, config: Config) -> None:
    """As many as the config says, and the description, at the lines that issue them; in SASS and in PTX."""
    spec = spec_of(dtype, config)
    kernel = build(spec)
    described_ = described(kernel)
    assert described_.total() == of_k_tile(spec)
    for where in described_:
        assert "multiply(" in linecache.getline(where.file, where.line)
    for code in ("sass", "ptx"):
        listing = build_listing(kernel, code)  # type: ignore[arg-type]
        found, wanted = multiplied(listing), Counter({str(where): n for where, n in described_.items()})
        assert found.total() == wanted.total(), code
        # ptxas gives some FFMAs the line of a neighbor, depending on the line numbers: 8 of 512 of sgemm, or none.
        assert (found & wanted).total() >= (wanted.total() if code == "ptx" else 0.98 * wanted.total()), code
        loops = {FMA: 0, MMA_SYNC: 2, WGMMA: 1}[spec.design.mma_op]
        assert listing.count()["tensor"] == loops * of_k_tile(spec)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name, rung in LADDER_KERNELS.items() for dtype in rung.dtypes], ids=str
)
def test_products_of_a_rung(name: str, dtype: Any) -> None:
    """A WMMA is two of SASS's instructions."""
    kernel = LADDER_KERNELS[name].make(dtype, HOPPER)
    lines = {str(where): n for where, n in described(kernel).items()}
    assert multiplied(build_listing(kernel, "ptx")) == Counter(lines)
    each = 2 if name.startswith("wmma") else 1
    assert multiplied(build_listing(kernel, "sass")) == Counter({where: each * n for where, n in lines.items()})


@pytest.mark.slow
@pytest.mark.parametrize("config", [Config(), Config("pingpong", (128, 128, 64)), Config("tma")], ids=str)
def test_line_information_leaves_the_code_as_it_is(config: Config) -> None:
    """And `#line` directives do."""
    kernel = build(spec_of("bf16", config))
    own = re.findall(r"/\*(\w+)\*/(.*?);", disassemble(compile_source(kernel.source, kernel.name).cubin))
    lines = build_listing(kernel, "sass").instructions
    assert [(x.address, f"{x.guard}{x.text}".replace(" ", "")) for x in lines] == [
        (f"0x{address}", text.replace(" ", "")) for address, text in own
    ]


def test_loads_stores_and_barriers() -> None:
    """Of a k-tile of mma_multistage: each warp's ldmatrix, each thread's copies, their commit and wait, a barrier."""
    listing = build_listing(build(spec_of("bf16", Config("mma_multistage", (128, 128, 32), (1, 1), 3, 2))), "ptx")
    whole, ragged = (listing.count(loop.unconditional) for loop in listing.mainloops)
    blocks, pairs, steps = 2, 4, 2
    copies = (128 + 128) * 32 * 2 // 16 // 256
    assert whole["shared load"] == ragged["shared load"] == (blocks + pairs) * steps
    assert whole["barrier"] == ragged["barrier"] == 3
    assert whole["async load"] == copies
    assert not ragged["async load"]  # one of two ways
    assert not listing.mainloops[0].conditional
    assert listing.count(listing.mainloops[1].conditional)["async load"] == 2 * copies
    (stored,) = {x.location for x in listing.instructions if x.kind == "async store"}
    assert stored is not None
    assert "epilogue.store(" in linecache.getline(stored.file, stored.line)


@pytest.mark.parametrize(("ptx", "sass", "name"), [
    ("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1}", "HGMMA.64x8x16.F32.BF16 R24, gdesc[UR8]", "tensor"),
    ("wmma.mma.sync.aligned.row.col.m16n16k16.f32.f16.f16.f32", "IMMA.16832.S8.S8 R4, R8", "tensor"),
    ("wmma.load.a.sync.aligned.row.m16n16k16.global.bf16 {%r1}", "LDG.E.128 R4, desc[UR4][R2.64]", "global load"),
    ("wmma.store.d.sync.aligned.row.m16n16k16.shared.f32 [%r1]", "STS.64 [R1], R2", "shared store"),
    ("fma.rn.f16x2 %r1, %r2, %r3, %r4", "HFMA2 R1, R2, R3, R4", "multiply-add"),
    ("mov.b32 %r1, 0", "HFMA2.MMA R3, -RZ, RZ, 0, 0", None),
    ("fma.rn.f32 %f1, %f2, %f3, %f4", "FFMA R1, R2, R3, R4", "multiply-add"),
    ("cp.async.cg.shared.global [%r1], [%rd1], 16, %r2", "LDGSTS.E.BYPASS.128 [R1], [R2.64]", "async load"),
    ("cp.async.bulk.tensor.3d.shared::cluster.global.tile", "UTMALDG.3D.MULTICAST [UR8], [UR4]", "async load"),
    ("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%rd1]", "UTMASTG.3D [UR8], [UR4]", "async store"),
    ("cp.async.bulk.wait_group.read 0", "UTMACMDFLUSH", "barrier"),
    ("mbarrier.try_wait.parity.shared::cta.b64 p, [%r1], %r2", "SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR8]", "barrier"),
    ("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32", "STAS.128 [R1.64], R4", "shared store"),
    ("ld.local.b32 %r1, [%rd1]", "LDL R1, [R2]", "spill"),
    ("ret", "EXIT", "branch"),
    ("setp.ne.b32 %p1, %r1, 0", "ISETP.NE.AND P0, PT, R1, RZ, PT", "integer"),
    ("cvt.rn.bf16x2.f32 %r1, %f1, %f2", "F2FP.BF16.F32.PACK_AB R1, R2, R3", "other"),
])  # fmt: skip
def test_classes(ptx: str, sass: str, name: str | None) -> None:
    assert classify("ptx", ptx) == (name or "integer")
    assert classify("sass", sass) == (name or "other")


@pytest.mark.parametrize(("dtype", "config", "instruction"), [
    ("bf16", Config(tile=(64, 64, 64), cluster=(1, 1), consumers=1), Wgmma),
    ("bf16", Config("mma_multistage", (64, 32, 32), (1, 1), 3, 1), MmaSync),
    ("fp32", Config("sgemm", (64, 32, 8), (1, 1), 3, 1), FusedMultiplyAdd),
], ids=str)  # fmt: skip
def test_what_the_simulator_executes(
    dtype: str, config: Config, instruction: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many instructions of a math thread as SASS has, for each k-tile more."""
    rows, columns, depth = config.tile
    executed, simulate = [0], instruction.simulate

    def counted(self: Any, m: Any) -> Any:
        executed[0] += int(m.active.sum())
        return simulate(self, m)

    monkeypatch.setattr(instruction, "simulate", counted)
    counts = []
    for k_tiles in (2, 3):
        executed[0] = 0
        stored = np.float32 if dtype == "fp32" else ml_dtypes.bfloat16
        a, b = np.ones((rows, depth * k_tiles), stored), np.ones((columns, depth * k_tiles), stored).T
        plan = gemmsmith.plan(a, b, config=config)
        assert not plan.simulate(a, b).hazards
        counts.append(executed[0] // (128 * config.consumers))
    assert multiplied(build_listing(plan._planned.kernel, "sass")).total() == counts[1] - counts[0]
