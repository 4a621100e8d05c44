"""Measurement of configs: kernels are compiled in parallel, then timed by successive halving."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from gemmsmith.core.config import Config
from gemmsmith.core.errors import CompileError

HALVING_ROUNDS = ((64, 1_500.0), (16, 6_000.0), (6, 20_000.0), (4, 1_050_000.0))
"""(Configs, microseconds per config) of each round of successive halving; chosen. The last duration is one period of an
H200's clock, which oscillates by 5 to 8 % at the power limit (benchmarks/speed/dense.py)."""
MIN_WARMUP_FLOPS = 5e9
"""FLOPs from which a warm-up of the same duration precedes the measurement, since the chip reaches the clock of its
power limit only after a while; chosen, not measured."""


class Measured(NamedTuple):
    """A config and its measured time per call in microseconds."""

    config: Config
    us: float


def steady_state_us(replay: Callable[[int], float], microseconds: float, flops: float) -> float:
    """Return the microseconds per replay of a GEMM of `flops`, over replays that take about `microseconds`.

    `replay(n)` runs n replays and returns their microseconds.
    """
    repeats = max(2, round(microseconds / replay(1)))
    if flops >= MIN_WARMUP_FLOPS:
        replay(repeats)
    return replay(repeats) / repeats


def successive_halving(
    configs: Sequence[Config],
    measure: Callable[[Config, float], float],
    rounds: Iterable[tuple[int, float]] = HALVING_ROUNDS,
    on_progress: Callable[[], None] = lambda: None,
) -> list[Measured]:
    """Return all measured configs, fastest first; those of later rounds, which were timed longer, before the others.

    Args:
        configs: The configs.
        measure: `measure(config, us)` times calls for about `us` microseconds and returns the microseconds per call; a
            config for which it raises is left out.
        rounds: As HALVING_ROUNDS.
        on_progress: Called after every measurement.
    """
    remaining, times, ranking = list(configs), dict[Config, float](), list[Config]()
    for count, microseconds in rounds:
        ranking = remaining[count:] + ranking
        remaining = remaining[:count]
        for config in remaining:
            try:
                times[config] = measure(config, microseconds)
            except Exception:  # a config that does not run on this GPU is left out
                times.pop(config, None)
            on_progress()
        remaining = sorted((c for c in remaining if c in times), key=times.__getitem__)
    return [Measured(config, times[config]) for config in remaining + ranking if config in times]


def compile_all(kernels: Iterable[tuple[str, ...]], on_progress: Callable[[], None] = lambda: None) -> None:
    """Fill the cubin cache with kernels, given as (source, name) for Hopper or (source, name, target), in parallel."""
    unique_kernels = sorted(set(kernels))
    if not unique_kernels:
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(len(unique_kernels), os.cpu_count() or 1), mp_context=context) as pool:
        for _ in pool.map(_compile, unique_kernels, chunksize=1):
            on_progress()


def _compile(kernel: tuple[str, ...]) -> None:
    from gemmsmith.backends.cuda.compiler import compile_source

    try:
        compile_source(*kernel)
    except CompileError:
        return  # the same error is raised when it is measured
