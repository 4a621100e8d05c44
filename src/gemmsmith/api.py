"""The functions of the public interface: gemm, plan, simulate, tune."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any

from gemmsmith.arrays import describe
from gemmsmith.backends import Backend
from gemmsmith.binding import checks
from gemmsmith.binding.bind import bind, outputs_by_name
from gemmsmith.binding.request import Request
from gemmsmith.binding.scaling import with_scales
from gemmsmith.core.bools import as_bools
from gemmsmith.core.bounded_cache import BoundedCache
from gemmsmith.core.config import Config
from gemmsmith.core.errors import ConfigError
from gemmsmith.graph.frontend.fingerprint import fingerprint
from gemmsmith.host.plans import Plan, Simulation, read_signatures, run_reference

if TYPE_CHECKING:
    from gemmsmith.arrays import Spec
    from gemmsmith.backends.cuda.run import BoundLaunches
    from gemmsmith.tuning.measure import Measured

_PLAN_CACHE: dict[Hashable, tuple[Plan, BoundLaunches | None]] = BoundedCache(1024)
"""Plans that `gemm` has made, with their launches, by epilogue, signatures of the arrays, and options."""


def gemm(
    a: Any, b: Any, *, scale_a: Any = None, scale_b: Any = None, epilogue: Any = None,
    operands: Mapping[str, Any] | None = None, out: Any = None, out_dtype: Any = None, accumulate: Any = None,
    precision: Any = None, fast_math: bool = True, deterministic: bool = True, config: Config | None = None,
    batch_invariant: bool = False, backend: Backend = "auto", **named_operands: Any,
) -> Any:  # fmt: skip
    """Compute out = epilogue(a @ b).

    Shapes are as in torch.matmul; a batch of 1, or none, is broadcast, and any extent may be 0. Arrays on a GPU: torch,
    CuPy, or anything with __cuda_array_interface__ or DLPack. Arrays on the CPU: torch and numpy (bf16: ml_dtypes).
    The kernels are launched on the caller's current stream, without synchronization.

    Args:
        a: (m, k) or (batch, m, k), with any strides >= 0. bf16, fp16, fp8 (e4m3 or e5m2), int8 or fp32. 8-bit and TF32
            operands are fastest K-major with rows that are multiples of 16 bytes; others are repacked by a kernel first
            (see `Plan.why`).
        b: (k, n) or (batch, k, n), of a's dtype; the two fp8 dtypes can be combined.
        scale_a: Factor of a, fp32 or ue8m0 (float8_e8m0fnu, or its bytes as uint8), with any strides. The shape defines
            the granularity: () for a tensor scale, (m, 1) for row scales; for fp8 also the block scales (m, k/128)
            and (m/128, k/128), rounded up; a leading batch dimension is optional. Tensor and row scales are applied
            in the epilogue before all else.
        scale_b: Factor of b: () for a tensor scale, (1, n) for column scales; for fp8 also the block scales
            (k/128, n) and (k/128, n/128).
        epilogue: A function of the accumulator (fp32) and of operands by name, which returns one value, a tuple or a
            dict of matrices and reductions; or a visitor tree. An operand's shape defines how it is broadcast: () a
            scalar, (n,) a row, (m, 1) a column, (m, n) a matrix, each with an optional batch dimension in front.
        operands: Epilogue operands by name, needed only for names that collide with arguments of `gemm`.
        out: Array for the result, or a tuple, list or dict of arrays for several results. Default: new arrays of a's
            library, row-major; scales of `quantize` are M-major, padded to 16 bytes, which `gemm` reads fastest.
        out_dtype: bf16, fp16 or fp32 (int32 for int8 without scales and epilogue). Default: the operands' dtype; bf16
            for fp8, and for int8 with scales or an epilogue; int32 for int8 otherwise (sums are exact modulo 2^32).
        accumulate: "fp32" (default) or "fp16" for fp16 operands, "fp32" for bf16. For fp8 "promoted" (default): sums
            over 128 of k by the tensor core, which keeps about 13 bits, are multiplied by the block scales and added in
            fp32; or "fast": the tensor core sums over all of k.
        precision: For fp32 operands. None: multiplied in fp32 on CUDA cores; "tf32": their upper 19 bits are used;
            "3xtf32": also the remaining bits, in three MMAs whose sums are promoted every 32 of k (16 by mma.sync),
            about as accurate as fp32. "3xtf32" returns NaN for operands that are not finite.
        fast_math: Use approximate SFU instructions for functions in the epilogue; False: the CUDA math library and IEEE
            division.
        deterministic: Reduce sums in two passes of fixed order; False: with atomics, in no fixed order.
        config: The kernel's configuration. Default: a tuned one, or the analytic model's choice.
        batch_invariant: Compute each row of a result with the same bits for any m, any contents of other rows and any
            batch, for the same n, k, dtypes and epilogue. K is not split, so GEMMs with few rows are slower. This holds
            for reductions along a row, not over rows. Requires `deterministic` and a config without `splits` and
            `serpentine`.
        backend: "auto" (the GPU for arrays on a GPU, the float64 reference for arrays on the CPU), "cuda", "sim" (the
            simulator) or "reference".
        **named_operands: Epilogue operands by name, arrays on a's device or numbers; also the arrays that the
            config's design reads (`Design.arrays`).

    Returns:
        `out`, or new arrays in the form that the epilogue returns: one array, a tuple or a dict.

    Raises:
        ArgumentError: If an argument has a wrong type, dtype, shape, layout or device.
        EpilogueError: If the epilogue cannot be traced.
        ConfigError: If no config, or not the given one, can compute it.
        DeviceError: If the GPU or driver does not support it.
        HazardError: With backend="sim", if the simulator finds hazards.
    """
    if not (fast_math is True and deterministic is True and batch_invariant is False):
        as_bools(fast_math=fast_math, deterministic=deterministic, batch_invariant=batch_invariant)
    all_operands = with_scales(checks.merge_operands(operands, named_operands), scale_a, scale_b)
    source = fingerprint(epilogue)
    results = outputs_by_name(out)
    key, addresses = read_signatures(a, b, results, all_operands)
    options = (
        key, type(out), out_dtype, accumulate, precision, fast_math, deterministic, config, batch_invariant, backend,
    )  # fmt: skip
    try:
        cached = _PLAN_CACHE.get((source, options))
    except TypeError:  # an option is not hashable: Plan refuses it
        cached = None
    if cached is not None:
        plan_, call = cached
        if call is not None and call.outputs_do_not_overlap(addresses):
            return plan_.launch(call, addresses, results, a)
        value = plan_.run_checked(a, b, out, all_operands)
        # None if the result has another name than in `results`
        _PLAN_CACHE[source, options] = plan_, plan_.cached_launches(key)
        return value
    request = Request(
        a, b, out, all_operands, epilogue, out_dtype, accumulate, precision, fast_math, deterministic, config,
        batch_invariant, backend,
    )  # fmt: skip
    try:
        plan_ = Plan(request)
    except ConfigError:  # no kernel computes it, but the reference, which has none, does
        on_cpu = describe(a, "a").device == "cpu"
        if config is not None or not on_cpu or backend not in ("auto", "reference"):
            raise
        binding = bind(request).allocate_results(a)
        run_reference(binding)
        return binding.value
    binding = plan_.detach_arrays()
    if plan_.fingerprint is not None:
        _PLAN_CACHE[plan_.fingerprint, options] = plan_, None
    # None if the result has another name than in `results`
    return plan_.run_bound(binding, a, cache_key=key if results.keys() == binding.results.keys() else None)


def plan(
    a: Any, b: Any, *, scale_a: Any = None, scale_b: Any = None, epilogue: Any = None,
    operands: Mapping[str, Any] | None = None, out: Any = None, out_dtype: Any = None, accumulate: Any = None,
    precision: Any = None, fast_math: bool = True, deterministic: bool = True, config: Config | None = None,
    batch_invariant: bool = False, backend: Backend = "auto", **named_operands: Any,
) -> Plan:  # fmt: skip
    """Return a plan for GEMMs with these dtypes, layouts, alignments and epilogue; nothing is computed.

    The arguments are those of `gemm`, whose arrays may be `Spec(shape, dtype, strides)`. The plan's source, PTX, SASS
    and resources are available on any machine, also without a GPU.

    Returns:
        The plan, which keeps no reference to the arrays.

    Raises:
        ArgumentError: If an argument has a wrong type, dtype, shape, layout or device.
        EpilogueError: If the epilogue cannot be traced.
        ConfigError: If no config, or not the given one, can compute it.
    """
    all_operands = with_scales(checks.merge_operands(operands, named_operands), scale_a, scale_b)
    plan_ = Plan(Request(
        a, b, out, all_operands, epilogue, out_dtype, accumulate, precision, fast_math, deterministic, config,
        batch_invariant, backend,
    ))  # fmt: skip
    plan_.detach_arrays()
    return plan_


def simulate(
    a: Any, b: Any, *, scale_a: Any = None, scale_b: Any = None, epilogue: Any = None,
    operands: Mapping[str, Any] | None = None, out: Any = None, out_dtype: Any = None, accumulate: Any = None,
    precision: Any = None, fast_math: bool = True, deterministic: bool = True, config: Config | None = None,
    batch_invariant: bool = False, seed: int = 0, **named_operands: Any,
) -> Simulation:  # fmt: skip
    """Execute the kernel that `gemm` would run, on the CPU, instruction by instruction.

    The arguments are those of `gemm`, with arrays on the CPU, and `seed`, the schedule of the execution: 0 follows the
    cost model, others are random.

    Returns:
        The result, the hazards (an empty list for a correct kernel), the timeline, and the cycles of the cost model.

    Raises:
        ArgumentError: If an argument has a wrong type, dtype, shape, layout or device.
        EpilogueError: If the epilogue cannot be traced.
        ConfigError: If no config, or not the given one, can compute it.
    """
    all_operands = checks.merge_operands(operands, named_operands)
    request = Request(
        a, b, out, with_scales(all_operands, scale_a, scale_b), epilogue, out_dtype, accumulate, precision, fast_math,
        deterministic, config, batch_invariant, "sim",
    )  # fmt: skip
    return Plan(request).simulate(a, b, out, scale_a=scale_a, scale_b=scale_b, operands=all_operands, seed=seed)


def tune(
    a: Spec, b: Spec, *, accumulate: Any = None, precision: Any = None, max_configs: int = 64,
    on_progress: Callable[[str], None] = lambda stage: None,
) -> list[Measured]:  # fmt: skip
    """Time the most promising configs of a @ b on the GPU, on random data, and store the fastest for later plans.

    The fastest config is stored in the cache folder (GEMMSMITH_CACHE_DIR). Plans for GPUs of the same chip use it for
    the same N and K and up to as many rows, for operands of the same kind (16-bit, fp8, int8, tf32 or fp32) and the
    same promotion of sums; also with scales, and with an epilogue that fits next to it.

    Args:
        a: (m, k), in the layout that will be used.
        b: (k, n), in the layout that will be used.
        accumulate: As in `gemm`.
        precision: As in `gemm`.
        max_configs: Number of configs that are compiled.
        on_progress: Called with "compile" after each compilation and with "measure" after each measurement.

    Returns:
        (config, microseconds per GEMM) of all configs that ran, fastest first.

    Raises:
        ArgumentError: If an argument has a wrong dtype or shape.
        DeviceError: If there is no GPU of compute capability 8.0 or later.
    """
    from gemmsmith.tuning.search import tune as tune_on_gpu

    return tune_on_gpu(Request(a, b, accumulate=accumulate, precision=precision), Plan, max_configs, on_progress)
