"""Measuring configs: kernels are compiled in parallel, then timed in rounds, each with the fastest of the last one."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from gemmsmith.core.config import Config
from gemmsmith.core.errors import CompileError

ROUNDS = ((64, 1_500.0), (16, 6_000.0), (6, 20_000.0), (4, 1_050_000.0))
"""How many configs are timed in a round, and each for how many microseconds: at last for a period of an H200's clock,
which swings by 5 to 8 % where the power limit holds it (benchmarks/dense.py)."""
HOT = 5e9
"""FLOPs from which a warm-up as long as what is timed comes first: under its power limit the chip takes a while to slow
down, and an idle moment to recover."""


class Measured(NamedTuple):
    """A config and the microseconds of a call."""

    config: Config
    us: float


def settled(replay: Callable[[int], float], microseconds: float, flops: float) -> float:
    """Microseconds of a replay of a product of `flops`, over replays that take about that long.

    `replay(n)` gives the microseconds of n of them."""
    repeats = max(2, round(microseconds / replay(1)))
    if flops >= HOT:
        replay(repeats)
    return replay(repeats) / repeats


def halving(
    configs: Sequence[Config],
    measure: Callable[[Config, float], float],
    rounds: Iterable[tuple[int, float]] = ROUNDS,
    step: Callable[[], None] = lambda: None,
) -> list[Measured]:
    """All configs, fastest first; those that came further, and were timed longer, before the others.

    `measure(config, us)` times calls for about that long and gives a call's microseconds; a config for which it raises
    is left out. `step` is called after every measurement.
    """
    remaining, times, ranking = list(configs), dict[Config, float](), list[Config]()
    for most, microseconds in rounds:
        ranking = remaining[most:] + ranking
        remaining = remaining[:most]
        for config in remaining:
            try:
                times[config] = measure(config, microseconds)
            except Exception:  # a config that does not run on this GPU is left out
                times.pop(config, None)
            step()
        remaining = sorted((c for c in remaining if c in times), key=times.__getitem__)
    return [Measured(config, times[config]) for config in remaining + ranking if config in times]


def compile_all(kernels: Iterable[tuple[str, ...]], step: Callable[[], None] = lambda: None) -> None:
    """Fills the cubin cache with kernels, given as (source, name), for Hopper, or (source, name, target), in as many
    processes as there are CPUs."""
    wanted = sorted(set(kernels))
    if not wanted:
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(len(wanted), os.cpu_count() or 1), mp_context=context) as pool:
        for _ in pool.map(_compile, wanted, chunksize=1):
            step()


def _compile(kernel: tuple[str, ...]) -> None:
    from gemmsmith.backends.cuda.compiler import compile_source

    try:
        compile_source(*kernel)
    except CompileError:
        return  # the same error is raised when it is measured
