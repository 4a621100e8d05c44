"""The functions of the public interface: gemm, grouped_gemm, plan, simulate, free_memory, tune.

What is imported as itself is the rest of that interface, which `gemmsmith` takes from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

from gemmsmith.arrays import ArrayLike, ArrayT, Operand, Pair
from gemmsmith.arrays import Spec as Spec
from gemmsmith.backends import Backend
from gemmsmith.binding import checks
from gemmsmith.binding.groups import make_grouping, with_arrays
from gemmsmith.binding.request import Accumulate, Epilogue, Out, Precision, Request
from gemmsmith.core.config import Config as Config
from gemmsmith.core.design import Design as Design
from gemmsmith.core.design import register_design as register_design
from gemmsmith.core.errors import ArgumentError as ArgumentError
from gemmsmith.core.errors import CompileError as CompileError
from gemmsmith.core.errors import ConfigError as ConfigError
from gemmsmith.core.errors import DeviceError as DeviceError
from gemmsmith.core.errors import EpilogueError as EpilogueError
from gemmsmith.core.errors import GemmsmithError as GemmsmithError
from gemmsmith.core.errors import HazardError as HazardError
from gemmsmith.core.errors import KernelError as KernelError
from gemmsmith.core.errors import MissingPackageError as MissingPackageError
from gemmsmith.core.errors import RetraceWarning as RetraceWarning
from gemmsmith.core.grouping import Grouping as Grouping
from gemmsmith.core.scalars import as_bools, as_integer
from gemmsmith.graph.frontend.interleave import deinterleave as deinterleave
from gemmsmith.graph.frontend.interleave import interleave as interleave
from gemmsmith.graph.frontend.values import top_k_softmax as top_k_softmax
from gemmsmith.host.autotune import autotune as autotune
from gemmsmith.host.cached_run import run_cached
from gemmsmith.host.launch_kernel import launch as launch
from gemmsmith.host.launch_kernel import simulate_launch as simulate_launch
from gemmsmith.host.packing import pack as pack
from gemmsmith.host.planned_gemm import PlannedGemm
from gemmsmith.host.plans import Plan as Plan
from gemmsmith.host.quantization import dequantize as dequantize
from gemmsmith.host.quantization import quantize as quantize
from gemmsmith.host.simulation import Simulation as Simulation

if TYPE_CHECKING:
    from gemmsmith.tuning.search import Measured


@overload
def gemm(
    a: ArrayT, b: ArrayLike | Pair, *, scale_a: ArrayLike | None = None, scale_b: ArrayLike | Pair | None = None,
    epilogue: None = None, operands: Mapping[str, Operand] | None = None, out: None = None, out_dtype: Any = None,
    accumulate: Accumulate | None = None, precision: Precision | None = None, fast_math: bool = True,
    deterministic: bool = True, config: Config | None = None, batch_invariant: bool = False, backend: Backend = "auto",
    **named_operands: Operand,
) -> ArrayT: ...  # fmt: skip


@overload
def gemm(
    a: ArrayLike, b: ArrayLike | Pair, *, scale_a: ArrayLike | None = None, scale_b: ArrayLike | Pair | None = None,
    epilogue: Epilogue | None = None, operands: Mapping[str, Operand] | None = None, out: Out = None,
    out_dtype: Any = None, accumulate: Accumulate | None = None, precision: Precision | None = None,
    fast_math: bool = True, deterministic: bool = True, config: Config | None = None, batch_invariant: bool = False,
    backend: Backend = "auto", **named_operands: Operand,
) -> Any: ...  # fmt: skip


def gemm(
    a: ArrayLike, b: ArrayLike | Pair, *, scale_a: ArrayLike | None = None, scale_b: ArrayLike | Pair | None = None,
    epilogue: Epilogue | None = None, operands: Mapping[str, Operand] | None = None, out: Out = None,
    out_dtype: Any = None, accumulate: Accumulate | None = None, precision: Precision | None = None,
    fast_math: bool = True, deterministic: bool = True, config: Config | None = None, batch_invariant: bool = False,
    backend: Backend = "auto", **named_operands: Operand,
) -> Any:  # fmt: skip
    """Compute out = epilogue(a @ b).

    Shapes are as in torch.matmul; a batch of 1, or none, is broadcast, and any extent may be 0. Arrays on a GPU: torch,
    CuPy, or anything with __cuda_array_interface__ or DLPack. Arrays on the CPU: torch and numpy (bf16: ml_dtypes).
    The kernels are launched on the caller's current stream, without synchronization.

    Args:
        a: (m, k) or (batch, m, k), with any strides >= 0. bf16, fp16, fp8 (e4m3 or e5m2), int8 or fp32. 8-bit and TF32
            operands are fastest K-major with rows that are multiples of 16 bytes; others are repacked by a kernel first
            (see `Plan.why`).
        b: (k, n) or (batch, k, n), of a's dtype; the two fp8 dtypes can be combined, and the dtypes that a
            `Design` declares. A tuple (gate, up) of two such arrays is multiplied as `interleave(gate, up)`, (k, 2n),
            without the copy; an epilogue separates the products by `gate, up = deinterleave(acc)`. Both have the same
            strides, k contiguous, and n is a multiple of 8.
        scale_a: Factor of a, fp32 or ue8m0 (float8_e8m0fnu, or its bytes as uint8), with any strides. The shape defines
            the granularity: () for a tensor scale, (m, 1) for row scales; for fp8 also the block scales (m, k/128)
            and (m/128, k/128), rounded up; a leading batch dimension is optional. Tensor and row scales are applied
            in the epilogue before all else.
        scale_b: Factor of b: () for a tensor scale, (1, n) for column scales; for fp8 also the block scales
            (k/128, n) and (k/128, n/128). With a tuple b a tuple of the latter, or one array for `interleave(*b)`.
        epilogue: A function of the accumulator (fp32) and of operands by name, which returns one value, a tuple or a
            dict of matrices and reductions; or a visitor tree. An operand's shape defines how it is broadcast: () a
            scalar, (n,) a row, (m, 1) a column, (m, n) a matrix, each with an optional batch dimension in front.
        operands: Epilogue operands by name, needed only for names that collide with arguments of `gemm`.
        out: Array for the result, or a tuple, list or dict of arrays for several results. Default: new arrays of a's
            library, row-major; scales of `quantize` are M-major, padded to 16 bytes, which `gemm` reads fastest.
        out_dtype: bf16, fp16, fp32, fp8 (int32 for int8 without scales and epilogue). Default: the operands' dtype;
            bf16 for fp8, and for int8 with scales or an epilogue; int32 for int8 otherwise (sums exact modulo 2^32).
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
    return run_cached((
        a, b, out, checks.merge_operands(operands, named_operands), epilogue, scale_a, scale_b, out_dtype, accumulate,
        precision, fast_math, deterministic, config, batch_invariant, backend, None, None,
    ))  # fmt: skip


@overload
def grouped_gemm(
    a: ArrayT, b: ArrayLike | Pair, *, offsets: ArrayLike | None = None, sizes: ArrayLike | None = None,
    counts: ArrayLike | None = None, along: Literal["m", "k"] = "m", gather: ArrayLike | None = None,
    scatter: ArrayLike | None = None, zero_fill: bool = True, scale_a: ArrayLike | None = None,
    scale_b: ArrayLike | Pair | None = None, epilogue: None = None, operands: Mapping[str, Operand] | None = None,
    out: None = None, out_dtype: Any = None, accumulate: Accumulate | None = None, precision: Precision | None = None,
    fast_math: bool = True, deterministic: bool = True, config: Config | None = None, backend: Backend = "auto",
    **named_operands: Operand,
) -> ArrayT: ...  # fmt: skip


@overload
def grouped_gemm(
    a: ArrayLike, b: ArrayLike | Pair, *, offsets: ArrayLike | None = None, sizes: ArrayLike | None = None,
    counts: ArrayLike | None = None, along: Literal["m", "k"] = "m", gather: ArrayLike | None = None,
    scatter: ArrayLike | None = None, zero_fill: bool = True, scale_a: ArrayLike | None = None,
    scale_b: ArrayLike | Pair | None = None, epilogue: Epilogue | None = None,
    operands: Mapping[str, Operand] | None = None, out: Out = None, out_dtype: Any = None,
    accumulate: Accumulate | None = None, precision: Precision | None = None, fast_math: bool = True,
    deterministic: bool = True, config: Config | None = None, backend: Backend = "auto", **named_operands: Operand,
) -> Any: ...  # fmt: skip


def grouped_gemm(
    a: ArrayLike, b: ArrayLike | Pair, *, offsets: ArrayLike | None = None, sizes: ArrayLike | None = None,
    counts: ArrayLike | None = None, along: Literal["m", "k"] = "m", gather: ArrayLike | None = None,
    scatter: ArrayLike | None = None, zero_fill: bool = True, scale_a: ArrayLike | None = None,
    scale_b: ArrayLike | Pair | None = None, epilogue: Epilogue | None = None,
    operands: Mapping[str, Operand] | None = None, out: Out = None, out_dtype: Any = None,
    accumulate: Accumulate | None = None, precision: Precision | None = None, fast_math: bool = True,
    deterministic: bool = True, config: Config | None = None, backend: Backend = "auto", **named_operands: Operand,
) -> Any:  # fmt: skip
    """Compute a product for each of G groups, whose lengths are known to the device only.

    Which rows, or which slice of K, a group has is read from a table on the device when the kernel starts, without
    synchronization; a captured CUDA graph reads it at each replay. Groups may be empty and end anywhere. Exactly one
    table is given:

    - `offsets` (as in torch.nn.functional.grouped_mm) or `sizes`: D (M, N), whose rows are divided, of a (M, K) and
      b (G, K, N): D[rows of g] = epilogue(a[rows of g] @ b[g]).
    - `counts`: D (G, max M, N) of a (G, max M, K) and b (G, K, N), of which the first counts[g] rows are computed, and
      no others written.
    - `offsets` or `sizes` with along="k": D (G, M, N) of a (M, K) and b (K, N): D[g] = epilogue(a[:, slice of g] @
      b[slice of g]), for the gradients of weights. An empty group yields epilogue(0).

    A mixture-of-experts layer, without copies of its rows, is h = grouped_gemm(x, w1, gather=token_of_row, …), then
    grouped_gemm(h, w2, scatter=slot_of_row, out=y, …), and a sum over the slots of each token.

    A table with a negative size or with more rows than there are is invalid: every result is NaN (the least integer,
    for int32), and nothing outside of the arrays is read or written.

    Args:
        a: bf16, fp16, fp8, int8, or fp32 with `precision`. Fastest with contiguous rows; with along="k" 16-bit operands
            are fastest with contiguous columns (a) and rows (b). Others are repacked by a kernel first.
        b: Of a's dtype, as in `gemm`; also a tuple, with groups along "m".
        offsets: (G,), int32: the end of each group. 1 to 1024 groups.
        sizes: (G,), int32: the length of each group.
        counts: (G,), int32: the valid rows of each group's matrix.
        along: What the groups divide: the rows of a and D ("m"), or K ("k"). K of 8-bit operands is divided at
            multiples of 128.
        gather: (M,), int32, with groups along "m" by offsets or sizes: row i of the product's A is row gather[i] of a,
            which is (T, K) with any T; a row of zeros if the index is negative, or T or more. scale_a has the rows of
            a, operands of the epilogue those of D. a is read in place if its rows are contiguous and multiples of 16
            bytes, and repacked otherwise.
        scatter: (M,), int32, likewise: row i of D is row scatter[i] of `out`, which is (S, N) with any S, and must be
            given; it is not written if the index is negative, or S or more. The other indices are unique: rows are
            stored; with deterministic=False they are added, and several may have one index. Rows of `out` that are no
            index keep what they hold.
        zero_fill: Rows of D behind the last group become zero; False, or with scatter: they are not written.
        scale_a: As in `gemm`; a block scale has one row of a, not 128, if rows are divided at any row.
        scale_b: As in `gemm`, with a leading dimension of G.
        epilogue: As in `gemm`. With groups along "m", reductions over rows are (G, N), over rows and columns (G,). A
            parameter `group` that is no operand and has no default is the index of the group, a float.
        operands: As in `gemm`. Further shapes: (G,) or (G, 1, 1), a value for each group; (G, N) or (G, 1, N), a row
            for each group.
        out: As in `gemm`.
        out_dtype: As in `gemm`.
        accumulate: As in `gemm`.
        precision: As in `gemm`, "tf32" or "3xtf32".
        fast_math: As in `gemm`.
        deterministic: As in `gemm`; False also adds rows that are scattered to those of `out`, which is fp32, bf16 or
            fp16 (not bf16 before sm_90), by atomics: in no fixed order, each addition rounded to its dtype.
        config: The kernel's configuration, without split-K. Default: the analytic model's choice for equal groups.
        backend: As in `gemm`.
        **named_operands: As in `gemm`.

    Returns:
        `out`, or new arrays in the form that the epilogue returns.

    Raises:
        ArgumentError: If an argument has a wrong type, dtype, shape, layout or device.
        EpilogueError: If the epilogue cannot be traced.
        ConfigError: If no config, or not the given one, can compute it.
        DeviceError: If the GPU or driver does not support it.
        HazardError: With backend="sim", if the simulator finds hazards.
    """
    given = {"offsets": offsets, "sizes": sizes, "counts": counts, "gather": gather, "scatter": scatter}
    grouping, arrays = make_grouping(given, along, zero_fill)
    all_operands = with_arrays(checks.merge_operands(operands, named_operands), arrays)
    return run_cached((
        a, b, out, all_operands, epilogue, scale_a, scale_b, out_dtype, accumulate, precision, fast_math, deterministic,
        config, False, backend, grouping, None,
    ))  # fmt: skip


def plan(
    a: ArrayLike, b: ArrayLike | Pair, *, scale_a: ArrayLike | None = None, scale_b: ArrayLike | Pair | None = None,
    epilogue: Epilogue | None = None, operands: Mapping[str, Operand] | None = None, out: Out = None,
    out_dtype: Any = None, accumulate: Accumulate | None = None, precision: Precision | None = None,
    fast_math: bool = True, deterministic: bool = True, config: Config | None = None, batch_invariant: bool = False,
    backend: Backend = "auto", grouping: Grouping | None = None, **named_operands: Operand,
) -> Plan:  # fmt: skip
    """Return a plan for GEMMs with these dtypes, layouts, alignments and epilogue; nothing is computed.

    The arguments are those of `gemm`, whose arrays may be `Spec(shape, dtype, strides)`. For a grouped GEMM also
    `grouping`, and its table by name, such as `grouping=Grouping("offsets"), offsets=offsets`. The plan's source, PTX,
    SASS and resources are available on any machine, also without a GPU.

    Returns:
        The plan, which keeps no reference to the arrays.

    Raises:
        ArgumentError: If an argument has a wrong type, dtype, shape, layout or device.
        EpilogueError: If the epilogue cannot be traced.
        ConfigError: If no config, or not the given one, can compute it.
    """
    planned = PlannedGemm(Request(
        a, b, out, checks.merge_operands(operands, named_operands), epilogue, scale_a, scale_b, out_dtype, accumulate,
        precision, fast_math, deterministic, config, batch_invariant, backend, grouping,
    ))  # fmt: skip
    planned.detach_arrays()
    return Plan(planned)


def simulate(
    a: ArrayLike, b: ArrayLike | Pair, *, scale_a: ArrayLike | None = None, scale_b: ArrayLike | Pair | None = None,
    epilogue: Epilogue | None = None, operands: Mapping[str, Operand] | None = None, out: Out = None,
    out_dtype: Any = None, accumulate: Accumulate | None = None, precision: Precision | None = None,
    fast_math: bool = True, deterministic: bool = True, config: Config | None = None, batch_invariant: bool = False,
    grouping: Grouping | None = None, seed: int = 0, schedules: int = 1, record: bool = False,
    **named_operands: Operand,
) -> Simulation:  # fmt: skip
    """Execute the kernel that `gemm` would run, on the CPU, instruction by instruction.

    The arguments are those of `gemm`, with arrays on the CPU, and `grouping`, as in `plan`. `seed`: the schedule of the
    execution; 0 follows the cost model, others are random. `schedules`: the most schedules to run, with the seeds from
    `seed` on, where none speaks for all of them (`Simulation.verdict`). `record`: record every event, for
    `Simulation.record` and `Simulation.timeline`.

    Returns:
        The result, the hazards (an empty list for a correct kernel), the cycles of the cost model, and the records.

    Raises:
        ArgumentError: If an argument has a wrong type, dtype, shape, layout or device.
        EpilogueError: If the epilogue cannot be traced.
        ConfigError: If no config, or not the given one, can compute it.
    """
    request = Request(
        a, b, out, checks.merge_operands(operands, named_operands), epilogue, scale_a, scale_b, out_dtype, accumulate,
        precision, fast_math, deterministic, config, batch_invariant, "sim", grouping,
    )  # fmt: skip
    plan_ = Plan(PlannedGemm(request))
    return plan_.simulate(a, b, out, **request.inputs, seed=seed, schedules=schedules, record=record)


def free_memory(*, graphs: bool = False) -> int:
    """Free the GPU memory that the library holds between calls, after waiting for all work on these GPUs.

    It holds the words by which clusters synchronize: those of each stream that has been used, and those of each launch
    that has been captured into a CUDA graph. Later calls allocate what they need again. Workspaces and results are not
    held, since the arrays' library allocates and frees them; loaded kernels stay. No stream may be captured meanwhile.

    Args:
        graphs: Free those of captured launches, too. No graph that was captured before may be launched afterwards, nor
            what `Plan.prepare` has returned before: they have the addresses of freed memory.

    Returns:
        The bytes freed.

    Raises:
        ArgumentError: If `graphs` is not a bool.
        DeviceError: If the driver cannot wait for a GPU, such as during a capture; nothing of it is freed then.
    """
    (graphs,) = as_bools(graphs=graphs)
    from gemmsmith.backends.cuda.flag_pool import free_flags

    return free_flags(graphs)


def tune(
    a: ArrayLike, b: ArrayLike, *, accumulate: Accumulate | None = None, precision: Precision | None = None,
    max_configs: int = 64, on_progress: Callable[[str], None] = lambda stage: None,
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

    max_configs = as_integer("max_configs", max_configs, least=1)
    if not callable(on_progress):
        raise ArgumentError(f"on_progress: got {on_progress!r}; use a function of the stage")
    return tune_on_gpu(Request(a, b, accumulate=accumulate, precision=precision), PlannedGemm, max_configs, on_progress)
