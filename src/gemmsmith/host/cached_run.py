"""Runs of arrays. Plans and their launches are cached by the signatures (dtype, shape, strides) of all arguments."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextvars import ContextVar
from copy import copy
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from gemmsmith.arrays import describe, row_major
from gemmsmith.binding.bind import bind
from gemmsmith.binding.request import OPTIONS, Key, Request, read_arrays, without_rows
from gemmsmith.binding.results import outputs_by_name
from gemmsmith.core.dicts import BoundedCache
from gemmsmith.core.errors import ConfigError
from gemmsmith.graph.frontend.fingerprint import fingerprint
from gemmsmith.host.autotune import on_entry, tune_first_call
from gemmsmith.host.planned_gemm import PlannedGemm, run_reference
from gemmsmith.tuning.choice import rounded_rows

if TYPE_CHECKING:
    from gemmsmith.backends.cuda.run import BoundLaunches

_PLAN_CACHE: dict[Key, tuple[PlannedGemm, BoundLaunches | None]] = BoundedCache(1024)
"""Plans by the keys of requests, each with its launches for these arrays; None if these are not cached."""
_PLANS_BY_ROWS: dict[Hashable, PlannedGemm] = BoundedCache(1024)
"""Plans that serve other M, by what is equal for all of these."""
for _cache in (_PLAN_CACHE, _PLANS_BY_ROWS):
    on_entry(_cache.clear)


class CachedRun(NamedTuple):
    """A plan with its launches for arrays of one signature. A call checks nothing, and allocates all results."""

    planned: PlannedGemm
    launches: BoundLaunches

    def __call__(self, pointers: dict[str, Any], like: Any) -> Any:
        """Launch, and return the results in the form in which `run_cached` returns them.

        `pointers`: addresses of the arrays, and the numbers, by Pointer name; the results' addresses are added. Results
        are allocated as `like`.
        """
        if (runs := _RECORD.get()) is not None:
            runs.append(self)
        return self.planned.launch(self.launches, pointers, {}, like)

    def with_result_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> CachedRun:
        """Return the run with results of other shapes, by name, such as (n,) for the gradient (1, n) of a bias.

        So a result needs no `reshape` after each call. A result that is not contiguous, or whose shape here has another
        number of elements, keeps its own shape.
        """

        def changed_layout(name: str, layout: Any) -> Any:
            """Return a result's (shape, dtype, strides) with its new shape, or as it is if that is not a reshape."""
            shape, dtype, strides = layout
            other = tuple(shapes.get(name, shape))
            keeps_order = strides == row_major(shape) and prod(other) == prod(shape)
            return (other, dtype, row_major(other)) if keeps_order else layout

        launches = copy(self.launches)
        launches.unallocated_results = [
            (name, pointer, changed_layout(name, layout)) for name, pointer, layout in launches.unallocated_results
        ]
        return CachedRun(self.planned, launches)


_RECORD: ContextVar[list[CachedRun | None] | None] = ContextVar("record", default=None)


def record_runs(call: Callable[[], Any]) -> tuple[Any, list[CachedRun | None]]:
    """Call a function; return its results, and the run of each GEMM that it computed, which can be repeated later.

    A GEMM whose launches are not cached has None instead of a run. If calls are nested, the outer one also gets the
    runs of the inner one.
    """
    outer, runs = _RECORD.get(), list[CachedRun | None]()
    token = _RECORD.set(runs)
    try:
        return call(), runs
    finally:
        _RECORD.reset(token)
        if outer is not None:
            outer += runs


def record_run(call: Callable[[], Any]) -> tuple[Any, CachedRun | None]:
    """Call a function; return its results, and the run of its only GEMM, which can be repeated later.

    The run is None if the function computes no GEMM or several, or if the GEMM's launches are not cached.
    """
    results, runs = record_runs(call)
    return results, runs[0] if len(runs) == 1 else None


def run_cached(request: Request | tuple[Any, ...]) -> Any:
    """Compute the GEMM that is asked for, with the plan of an earlier request that has an equal key, if there is one.

    `request` may be a plain tuple of a Request's fields: to make one takes a fifth of the time. Returns and raises as
    `api.gemm`.
    """
    a, b, out, operands, epilogue, scale_a, scale_b = request[:7]
    results = {} if out is None else outputs_by_name(out)
    arrays, pointers = read_arrays(a, b, results, operands, scale_a, scale_b)
    source = request[-1] or fingerprint(epilogue)
    key = source, arrays, (type(out), request[OPTIONS])  # as `request.key`, which takes longer
    try:
        cached = _PLAN_CACHE.get(key)
    except TypeError:  # an option is not hashable
        bind(Request._make(request))  # raises an error that says so
        raise
    if cached is not None:
        planned, call = cached
        if call is not None and _RECORD.get() is None and call.outputs_do_not_overlap(pointers):
            return planned.launch(call, pointers, results, a)
        value = planned.run(a, b, out, operands, scale_a, scale_b)
        # The launches are None if the plan names the result otherwise than `results` does: then its key is another one
        _PLAN_CACHE[key] = planned, planned.calls.get(arrays)
    else:
        request = Request._make(request)._replace(fingerprint=source)
        made, value = _run_uncached(request, key, pointers, results)
        if made is None:
            return value
        planned = made
    if (runs := _RECORD.get()) is not None:
        launches = planned.calls.get(arrays)
        runs.append(None if out is not None or launches is None else CachedRun(planned, launches))
    return value


def _run_uncached(
    request: Request, key: Key, pointers: dict[str, Any], results: dict[str, Any]
) -> tuple[PlannedGemm | None, Any]:  # fmt: skip
    """Run a request whose key has no plan. Return its plan, or None if there is no kernel for it, and the results.

    `pointers`: of `read_arrays`. `results`: the caller's arrays, by name.
    """
    source, arrays, options = key
    tune_later = tune_first_call(request)
    is_cached = source is not None and not tune_later
    m = next(iter(getattr(request.a, "shape", (0,))), 0)
    by_rows = source, without_rows(arrays, m), rounded_rows(m), options
    if is_cached and (planned := _PLANS_BY_ROWS.get(by_rows)):
        _PLAN_CACHE[key] = planned, None
        value = planned.run_other_rows(m, pointers, results, request.a, arrays)
        if value is not None:
            return planned, value
    try:
        planned = PlannedGemm(request)
    except ConfigError:  # no kernel computes it, but the reference, which has none, does
        on_cpu = describe(request.a, "a").device == "cpu"
        if request.config is not None or not on_cpu or request.backend not in ("auto", "reference"):
            raise
        binding = bind(request).allocate_results()
        run_reference(binding)
        return None, binding.value
    binding = planned.detach_arrays()
    # `arrays` is the plan's key, too, unless the plan names the result otherwise than `results` does
    cache_key = arrays if results.keys() == binding.results.keys() and not tune_later else None
    if is_cached:
        _PLAN_CACHE[key] = planned, None
        if cache_key is not None and planned.serves_other_rows:
            _PLANS_BY_ROWS[by_rows] = planned
    return planned, planned.run_bound(binding, cache_key=cache_key)
