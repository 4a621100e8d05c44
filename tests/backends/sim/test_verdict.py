"""The argument of docs/internals/simulator.md: a run that may speak for every schedule is like that of any seed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.backends.sim.tiny import run, word
from tests.instructions import load_strong

import gemmsmith
from gemmsmith import Config, hw
from gemmsmith.backends.sim import Verdict
from gemmsmith.backends.sim.execute.interpreter import Interpreter
from gemmsmith.backends.sim.execute.machine import LockstepMachine
from gemmsmith.backends.sim.execute.memory_instructions import MemoryInstructions
from gemmsmith.backends.sim.state.cta import Mbarrier
from gemmsmith.backends.sim.state.operations import InFlightOperation, Operations
from gemmsmith.core.errors import ArgumentError
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.instruction import Instruction
from gemmsmith.lang.types import F32, PRED, U32, U64
from gemmsmith.lang.values import Constant, Value

SEEDS = range(1, 9)


class Execution:
    """What a run has executed.

    `instructions`: those of each lockstep group, in order, each with the vector clocks of its threads, except waits,
    which a successful test_wait may skip. `contributors`: the arrivals and copies that completed each phase of each
    mbarrier. The elected lane, which other seeds choose otherwise, is always the first, so that agents have the same
    numbers; operations, which are numbered in order of issue, are named.
    """

    def __init__(self) -> None:
        self.instructions: defaultdict[str, list[tuple[object, ...]]] = defaultdict(list)
        self.contributors: defaultdict[object, list[object]] = defaultdict(list)
        self.issued: defaultdict[object, int] = defaultdict(int)
        self.operations: dict[int, object] = {}
        self.has_tests = False

    @contextmanager
    def recorded(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for owner, name, record in (
                (Interpreter, "simulate", self._instruction), (Operations, "add", self._issue),
                (Mbarrier, "_advance", self._phase),
            ):  # fmt: skip
                patch.setattr(owner, name, _after(record, getattr(owner, name)))
            patch.setattr(
                LockstepMachine, "elected", property(lambda machine: 0, lambda machine, lane: None), raising=False
            )
            yield

    def _instruction(self, interpreter: Interpreter, instruction: Instruction) -> None:
        group = interpreter.group
        self.has_tests |= instruction.tests_wait
        if not (instruction.tests_wait or instruction.waits_for_threads):
            clocks = [lanes.agent().clock.event_counts.tobytes() for lanes in group.active_lanes]
            executed = type(instruction).__name__, group.location, int(group.active.sum())
            self.instructions[group.title].append((executed, clocks))

    def _issue(self, operations: Operations, operation: InFlightOperation) -> None:
        key = operation.cta.index, operation.location, operation.operation.label
        self.issued[key] += 1
        for bit in operation.bits:
            self.operations[bit] = (*key, self.issued[key])

    def _phase(self, barrier: Mbarrier) -> None:
        if not barrier.pending and not barrier.tx_count:
            current = barrier.current
            copies = [self.operations[1 << i] for i in range(current.bits.bit_length()) if current.bits >> i & 1]
            arrivals = sorted(current.arrivals)
            self.contributors[barrier.name, barrier.initializer].append((arrivals, sorted(map(str, copies))))

    def equals(self, other: Execution) -> bool:
        clocks = not (self.has_tests or other.has_tests)  # a test acquires before the wait in its place would

        def instructions(x: Execution) -> dict[str, list[tuple[object, ...]]]:
            return {name: [y if clocks else y[:1] for y in executed] for name, executed in x.instructions.items()}

        return instructions(self) == instructions(other) and self.contributors == other.contributors


def _after(record: Callable[..., None], function: Callable[..., Any]) -> Callable[..., Any]:
    def both(*arguments: Any) -> Any:
        record(*arguments)
        return function(*arguments)

    return both


def execute(seed: int, *operands: np.ndarray, **options: Any) -> tuple[Verdict, Execution, bytes]:
    execution = Execution()
    with execution.recorded():
        done = gemmsmith.simulate(*operands, seed=seed, **options)
    results = done.result if isinstance(done.result, tuple) else (done.result,)
    return done.verdict, execution, b"".join(np.ascontiguousarray(x).tobytes() for x in results)


SMALL = Config("cooperative", (64, 64, 32), (1, 1), stages=3, consumers=1)
CONFIGS = [
    SMALL, SMALL.replace(design="tma"), SMALL.replace(cluster=(2, 2)), SMALL.replace(cluster=(2, 1), cluster_splits=2),
    SMALL.replace(splits=2), SMALL.replace(splits=0), SMALL.replace(alias_epilogue=True, serpentine=True),
    SMALL.replace(tile=(128, 64, 32), cluster=(1, 2), consumers=2), SMALL.replace(swap_ab=True),
    SMALL.replace(design="pingpong", consumers=2, cluster=(2, 1)), SMALL.replace(design="mma_multistage"),
]  # fmt: skip


def operands(rng: np.random.Generator, dtype: Any = np.float16) -> list[np.ndarray]:
    return [rng.standard_normal(shape, np.float32).astype(dtype) for shape in ((90, 136), (136, 200))]


def is_that_of_every_seed(*arrays: np.ndarray, **options: Any) -> None:
    verdict, execution, bits = execute(0, *arrays, **options)
    assert verdict == Verdict("every schedule")
    for seed in SEEDS:
        other_verdict, other, other_bits = execute(seed, *arrays, **options)
        assert other_verdict == verdict
        assert other.equals(execution)
        assert other_bits == bits


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_of_every_design(config: Config, rng: np.random.Generator) -> None:
    is_that_of_every_seed(*operands(rng), config=config)


def test_of_block_scales(rng: np.random.Generator) -> None:
    scales = {"scale_a": np.ones((90, 2), np.float32), "scale_b": np.ones((2, 2), np.float32)}
    is_that_of_every_seed(*operands(rng, ml_dtypes.float8_e4m3fn), **scales)


def test_of_groups_and_of_an_epilogue(rng: np.random.Generator) -> None:
    a, b = operands(rng)
    is_that_of_every_seed(a, b, config=SMALL, epilogue=lambda acc: (acc.relu(), acc.sum(dim=1)))
    groups = {"sizes": np.array([50, 0, 40], np.int32), "grouping": gemmsmith.Grouping("sizes")}
    is_that_of_every_seed(a, np.stack([b, b, b]), config=SMALL.replace(cluster=(2, 1)), **groups)


def test_sums_by_atomics_depend_on_the_schedule(rng: np.random.Generator) -> None:
    options = {"config": SMALL, "epilogue": lambda acc: acc.sum(dim=0), "deterministic": False}
    a, b = operands(rng)
    a, b = np.concatenate([a, a, a]), b[:, :136]  # five addends of each sum, of different CTAs
    runs = [execute(seed, a, b, **options) for seed in (0, *SEEDS)]
    assert {verdict.scope for verdict, _, _ in runs} == {"schedules run"}
    assert all("atomics round" in verdict.time_dependences[0].reason for verdict, _, _ in runs)
    assert len({bits for _, _, bits in runs}) > 1


def test_polls_depend_on_the_schedule(rng: np.random.Generator) -> None:
    a, b = operands(rng)
    config = SMALL.replace(tile=(64, 32, 16), sync_clusters=True)
    runs = [execute(seed, a, b, config=config) for seed in (0, *SEEDS)]
    assert {verdict.scope for verdict, _, _ in runs} == {"schedules run"}
    assert any("a poll ends" in x.reason for x in runs[0][0].time_dependences)
    assert len({bits for _, _, bits in runs}) == 1


def reasons(record: Callable[[Builder, Value], None], **options: Any) -> list[str]:
    done = run(record, **options)
    assert not done.hazards
    return [x.reason for x in done.verdict.time_dependences]


@pytest.mark.parametrize("ordered", [True, False])
def test_a_word_is_written_again_before_a_spin_has_read_it(ordered: bool) -> None:
    """Threads 32 and 64 wait for 1; thread 0 writes 2 after the answer of one of them, or of both."""

    def record(k: Builder, out: Value) -> None:
        answers = out + 128
        with k.when(k.thread == 0):
            hw.store_strong(out, Constant(U32, 1), "release", "gpu")
            hw.spin_until_equal(answers, Constant(U32, 2 if ordered else 1))
            hw.store_strong(out, Constant(U32, 2), "release", "gpu")
        for thread in (32, 64):
            with k.when(k.thread == thread):
                hw.spin_until_equal(out, Constant(U32, 1))
                if ordered or thread == 64:
                    hw.fence_acq_rel("gpu")
                    hw.red_add_u32(answers, Constant(U32, 1))

    found = reasons(record)
    assert found == ([] if ordered else ["a word is written again before all that spin on it have read it"])


@pytest.mark.parametrize("decides", ["a wait", "a store", "a variable"])
def test_what_a_test_wait_decides(decides: str) -> None:
    def record(k: Builder, out: Value) -> None:
        full = k.shared(8, alignment=8, name="full")
        with k.when(k.thread == 0):
            hw.mbarrier_init(full[0], 32)
        hw.sync_threads()
        hw.mbarrier_arrive(full[0])
        token = k.var(PRED, hw.mbarrier_test_wait(full[0], 0), "token")
        with k.when(~token.get()):
            hw.mbarrier_wait(full[0], 0)
            if decides == "a variable":
                token.set(Constant(PRED, True))
        if decides == "a store":
            hw.store_global(
                word(k, k.select(token.get(), Constant(U32, 1), Constant(U32, 2))), out + 4 * 0, k.thread == 0
            )

    found = reasons(record, threads=32)
    assert bool(found) == (decides in ("a store", "a variable"))


def test_atomics_and_strong_loads_read_what_is_there() -> None:
    def add(k: Builder, out: Value) -> None:
        hw.atom_add_u32(out, Constant(U32, 1))

    def read(k: Builder, out: Value) -> None:
        load_strong(out, "relaxed", "gpu")

    def add_unread(k: Builder, out: Value) -> None:
        hw.red_add_u32(out, Constant(U32, 1))

    def add_floats(k: Builder, out: Value) -> None:
        hw.red_add_f32(out, Constant(F32, 1.0))

    def add_apart(k: Builder, out: Value) -> None:
        hw.red_add_f32(out + (k.thread * 4).to(U64), Constant(F32, 1.0))

    assert reasons(add) == ["an atomic returns what has been written by then"]
    assert reasons(read) == ["a strong load reads what has been written by then"]
    assert reasons(add_unread) == []
    assert reasons(add_apart) == []
    for threads in (128, 32):  # of warps, and of lanes
        assert reasons(add_floats, threads=threads) == [
            "floating-point atomics round in the order in which they are executed"
        ]


def test_schedules_are_run_until_one_speaks_for_all(rng: np.random.Generator) -> None:
    """Each begins with the same memory: the epilogue reads what the last one has overwritten."""
    a, b = operands(rng)
    c = rng.standard_normal((90, 200), np.float32)
    expected = a.astype(np.float64) @ b.astype(np.float64) + c
    for config, schedules in ((SMALL, 1), (SMALL.replace(sync_clusters=True), 3)):
        out = c.copy()
        done = gemmsmith.simulate(
            a, b, out=out, out_dtype="fp32", c=out, epilogue=lambda acc, c: acc + c, config=config, schedules=3
        )
        assert done.verdict.schedules == schedules
        np.testing.assert_allclose(out, expected, rtol=0, atol=1e-3)
    with pytest.raises(ArgumentError, match="schedules: got 0"):
        gemmsmith.simulate(a, b, config=SMALL, schedules=0)


@pytest.mark.parametrize("outcomes", list(product([False, True], repeat=4)))
def test_every_outcome_of_the_first_polls(outcomes: tuple[bool, ...], rng: np.random.Generator) -> None:
    """Whether a poll gives up, poll by poll in the order in which they begin; later ones see the value."""
    remaining = iter(outcomes)
    a, b = operands(rng)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            MemoryInstructions, "_choose_polls", lambda self, limit: 0 if next(remaining, False) else math.inf
        )
        done = gemmsmith.simulate(a, b, out_dtype="fp32", config=SMALL.replace(tile=(64, 32, 16), sync_clusters=True))
    assert next(remaining, None) is None
    assert done.hazards == []
    np.testing.assert_allclose(done.result, a.astype(np.float64) @ b.astype(np.float64), rtol=0, atol=1e-3)
