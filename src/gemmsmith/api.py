"""The functions of the public interface: gemm, plan, simulate, tune."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any

from gemmsmith import checks
from gemmsmith.arrays import describe
from gemmsmith.binding import bind, by_name
from gemmsmith.core.bounded import Bounded
from gemmsmith.core.config import Config
from gemmsmith.core.errors import ConfigError
from gemmsmith.core.switches import switches
from gemmsmith.epilogue.frontend.fingerprint import fingerprint
from gemmsmith.plans import Backend, Plan, Simulation, run_reference, signatures
from gemmsmith.scaling import with_scales

if TYPE_CHECKING:
    from gemmsmith.arrays import Spec
    from gemmsmith.backends.cuda.run import Call
    from gemmsmith.tuning.measure import Measured

_KNOWN: dict[Hashable, tuple[Plan, Call | None]] = Bounded(1024)
"""Plans that `gemm` has made and their launches, by epilogue, signatures of the arrays, and options."""


def gemm(
    a: Any, b: Any, *, scale_a: Any = None, scale_b: Any = None, epilogue: Any = None,
    operands: Mapping[str, Any] | None = None, out: Any = None, out_dtype: Any = None, accumulate: Any = None,
    precision: Any = None, exact: bool = False, atomic: bool = False, config: Config | None = None,
    batch_invariant: bool = False, backend: Backend = "auto", **named: Any,
) -> Any:  # fmt: skip
    """out = epilogue(a @ b).

    a: (m, k) or (batch, m, k), b: (k, n) or (batch, k, n); shapes as in torch.matmul, a batch of 1 or none is
    broadcast, any extent may be 0. Row- or column-major or of any other strides >= 0. Both bf16, both fp16, fp8 (e4m3
    and e5m2 in any combination), both int8, or both fp32. Of operands of 8 bits, or of 32 with a `precision`, the
    fastest have k contiguous and rows of whole 16 bytes: others are copied by a kernel before the product (see
    `plan.why`).
    out: (m, n) or (batch, m, n), of `out_dtype`: bf16, fp16 or fp32, by default that of the operands, bf16 for fp8.
    Sums of int8 are int32, exact modulo 2^32, and stored as that by default; with scales or an epilogue they enter it
    as fp32, and the default is bf16.
    scale_a, scale_b: what a and b are multiplied by, fp32 or ue8m0 (float8_e8m0fnu, or its bytes as uint8). The shape
    says what one scale is for: () a whole tensor; (m, 1) for a and (1, n) for b a row or column; block scales, for fp8,
    (m, k/128) or (m/128, k/128) for a, (k/128, n) or (k/128, n/128) for b, rounded up. Any strides; with a batch in
    front, or without. Scales of tensors, rows and columns are multiplied in the epilogue, before all else.
    accumulate: "fp32" (the default) or "fp16" for fp16 operands, "fp32" for bf16 ones. For fp8 "promoted" (the
    default): every 128 of k are summed by the tensor core, which keeps about 13 bits, multiplied by the block scales of
    a times b, and added in fp32; or "fast": the tensor core's own sum of all.
    precision: of products of fp32 operands, which are in fp32 without one: "tf32" reads their upper 19 bits; "3xtf32"
    multiplies these and what is left, in three products that are promoted every 32 of k (16 by mma.sync), and is about
    as exact as fp32. Of operands that are not finite it gives NaN.
    epilogue: a function of the product (in fp32) and of operands by name, that returns one value, a tuple or a dict:
    matrices to be stored, or reductions; or a visitor tree. What an operand is follows from its shape against the
    product's: () a scalar, (n,) a row, (m, 1) a column, (m, n) a matrix, with a batch in front or without.
    operands: those whose names are also arguments of this function; all others are given by name.
    exact: functions by CUDA's math library instead of the special-function unit's approximations.
    atomic: sums are added to the result as they come, in no fixed order, instead of in two deterministic steps.
    config: the kernel's choices, by default those of the analytic model.
    batch_invariant: a row of every result has the same bits whatever m is, whatever other rows hold, and in whichever
    batch it is, for the same n, k, dtypes and epilogue; K is not split, so products of few rows are slower. Of
    reductions that holds for those along a row; what is reduced over rows depends on all of them. Refuses `atomic`,
    and a config with `splits` or `serpentine`. Without it a row may round differently when m changes.
    backend: "auto" runs arrays on a GPU there and arrays on the CPU by the float64 reference; "cuda", "sim"
    (the simulator) and "reference" ask for one.

    Arrays: torch, CuPy, or anything with __cuda_array_interface__ or DLPack on a GPU; torch and numpy (bf16 by
    ml_dtypes) on the CPU. Runs on the caller's current stream and does not synchronize. Gives `out`, or a new
    array of a's library, row-major; the scales of `quantize` lie along M, padded to 16 bytes, as `gemm` reads them
    fastest. Raises ArgumentError, ConfigError, DeviceError; HazardError with backend="sim".
    """
    if not (exact is False and atomic is False and batch_invariant is False):
        switches(exact=exact, atomic=atomic, batch_invariant=batch_invariant)
    given = with_scales(checks.operands(operands, named), scale_a, scale_b)
    source = fingerprint(epilogue)
    results = by_name(out)
    key, addresses = signatures(a, b, results, given)
    options = key, type(out), out_dtype, accumulate, precision, exact, atomic, config, batch_invariant, backend
    try:
        found = _KNOWN.get((source, options))
    except TypeError:  # an option is not hashable: Plan refuses it
        found = None
    if found is not None:
        plan_, call = found
        if call is not None and call.apart(addresses):
            return plan_.launch(call, addresses, results, a)
        value = plan_.run_checked(a, b, out, given)
        _KNOWN[source, options] = plan_, plan_.call_of(key)  # none where the result has another name than in `results`
        return value
    try:
        plan_ = Plan(
            a, b, out, out_dtype=out_dtype, accumulate=accumulate, precision=precision, epilogue=epilogue,
            operands=given, exact=exact, atomic=atomic, config=config, batch_invariant=batch_invariant, backend=backend,
        )  # fmt: skip
    except ConfigError:  # no kernel computes it; the reference, which has none, does
        on_cpu = describe(a, "a").device == "cpu"
        if config is not None or not on_cpu or backend not in ("auto", "reference"):
            raise
        complete = bind(
            a, b, out, given, epilogue=epilogue, out_dtype=out_dtype, accumulate=accumulate, precision=precision,
            exact=exact, atomic=atomic,
        ).complete(a)  # fmt: skip
        run_reference(complete)
        return complete.value
    binding = plan_.release()
    if plan_.fingerprint is not None:
        _KNOWN[plan_.fingerprint, options] = plan_, None
    return plan_.run_bound(binding, a, key=plan_.key(a, b, out, given))


def plan(
    a: Any, b: Any, *, scale_a: Any = None, scale_b: Any = None, epilogue: Any = None,
    operands: Mapping[str, Any] | None = None, out: Any = None, out_dtype: Any = None, accumulate: Any = None,
    precision: Any = None, exact: bool = False, atomic: bool = False, config: Config | None = None,
    batch_invariant: bool = False, backend: Backend = "auto", **named: Any,
) -> Plan:  # fmt: skip
    """A Plan for arrays like these, or for `Spec(shape, dtype, strides)` stand-ins; arguments as in `gemm`.

    Its source, ptx, sass and resources are available on any machine, also without a GPU.
    """
    given = with_scales(checks.operands(operands, named), scale_a, scale_b)
    plan_ = Plan(
        a, b, out, out_dtype=out_dtype, accumulate=accumulate, precision=precision, epilogue=epilogue, operands=given,
        exact=exact, atomic=atomic, config=config, batch_invariant=batch_invariant, backend=backend,
    )  # fmt: skip
    plan_.release()
    return plan_


def simulate(
    a: Any, b: Any, *, scale_a: Any = None, scale_b: Any = None, epilogue: Any = None,
    operands: Mapping[str, Any] | None = None, out: Any = None, out_dtype: Any = None, accumulate: Any = None,
    precision: Any = None, exact: bool = False, atomic: bool = False, config: Config | None = None,
    batch_invariant: bool = False, seed: int = 0, **named: Any,
) -> Simulation:  # fmt: skip
    """Executes the kernel that `gemm` would run, on the CPU, instruction by instruction; arguments as in `gemm`.

    Returns the result, the hazards found (an empty list for a right kernel), the timeline, and cycles of the cost
    model.
    """
    given = checks.operands(operands, named)
    plan_ = plan(
        a, b, scale_a=scale_a, scale_b=scale_b, epilogue=epilogue, operands=given, out=out, out_dtype=out_dtype,
        accumulate=accumulate, precision=precision, exact=exact, atomic=atomic, config=config,
        batch_invariant=batch_invariant, backend="sim",
    )  # fmt: skip
    return plan_.simulate(a, b, out, scale_a=scale_a, scale_b=scale_b, operands=given, seed=seed)


def tune(
    a: Spec, b: Spec, *, accumulate: Any = None, precision: Any = None, most: int = 64,
    step: Callable[[str], None] = lambda what: None,
) -> list[Measured]:  # fmt: skip
    """Times the `most` promising configs of a @ b on the GPU, on random data, and keeps the fastest for later plans.

    a (m, k), b (k, n): Specs in the layouts that will be used; accumulate and precision as in `gemm`. Gives (config,
    us) of all that ran, fastest first. The fastest is stored in the cache folder (GEMMSMITH_CACHE_DIR). GPUs of the
    same chip use it for that N and K and up to as many rows, for operands of the same kind (16 bits, fp8, int8, tf32 or
    fp32) whose sums are promoted likewise; with scales, and with an epilogue that leaves it room. `step` is told
    "compile" and "measure" after each of these. Raises ArgumentError, and DeviceError where there is no GPU of 8.0 or
    later.
    """
    from gemmsmith.tuning.search import tune as measured

    product = bind(a, b, accumulate=accumulate, precision=precision)

    def planned(config: Config) -> Plan:
        return Plan(a, b, config=config, accumulate=accumulate, precision=precision)

    return measured(a, b, product, planned, most, step)
