"""`gemmsmith tune`: measure configs on the GPU, and save the fastest for later plans."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import click
import numpy as np

from gemmsmith import api
from gemmsmith.arrays import Spec
from gemmsmith.binding.bind import bind
from gemmsmith.binding.request import Request
from gemmsmith.cli import options
from gemmsmith.cli.model_layers import Layer, layers_of
from gemmsmith.cli.options import progress_bar
from gemmsmith.cli.problem import matrix
from gemmsmith.core.scalars import ceil_div
from gemmsmith.host.planned_gemm import PlannedGemm
from gemmsmith.tuning import measured_configs
from gemmsmith.tuning.search import HALVING_ROUNDS, require_gpu


@click.command()
@click.argument("shapes", nargs=-1, type=options.joined_sizes(3, "512x4096x4096"), metavar="[MxNxK...]")
@click.option("--model", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Tune the layers of this config.json, as Hugging Face publishes it, instead of SHAPES.")  # fmt: skip
@click.option("--tokens", default="1,16,64,256,1024,4096", show_default=True,
              type=options.Integers(",", "positive integers joined by commas", lambda numbers: min(numbers) > 0),
              help="Rows of the model's layers.")  # fmt: skip
@click.option("--training", is_flag=True, help="Tune the gradients of the model's layers, too.")
@options.kind
@click.option("--max-configs", type=click.IntRange(min=1), default=None,
              help=f"Configs measured per shape. [default: {HALVING_ROUNDS[0][0]}; 16 with --model]")  # fmt: skip
@click.option("--force", is_flag=True, help="Re-tune shapes that already have an entry.")
@options.as_json
def tune(
    shapes: tuple[tuple[int, int, int], ...], model: Path | None, tokens: tuple[int, ...], training: bool,
    max_configs: int | None, force: bool, as_json: bool, **choices: Any,
) -> None:  # fmt: skip
    """Measure configs on the GPU, and save the fastest for later plans.

    Shapes that already have an entry are skipped, so the command can be stopped and restarted. With --json it prints
    one line per shape, an object with its configs, fastest first.

    \b
    Example: gemmsmith tune 512x4096x4096 1024x4096x4096
    """
    precision_options: dict[str, Any] = {name: choices[name] for name in ("accumulate", "precision")}
    dtype, layout = choices["dtype"], choices["layout"]
    is_plain = not any(choices[name] for name in _OF_OTHER_KINDS)
    if bool(shapes) == bool(model):
        raise click.UsageError(f"SHAPES, --model: got {'both' if model else 'neither'}; use one")
    if model and not is_plain:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in _OF_OTHER_KINDS if choices[name])
        raise click.UsageError(f"--model: got it with {names}; use it without, its layers are plain GEMMs")
    if model:
        _tune_model(model, tokens, training, dtype, precision_options, max_configs or 16, force, as_json)
    for m, n, k in shapes:
        if not is_plain:
            _tune_kind((m, n, k), choices, max_configs or 16, force, as_json)
            continue
        a, b = matrix((m, k), dtype, layout[0]), matrix((k, n), dtype, layout[1])
        binding = bind(Request(a, b, **precision_options))
        key = measured_configs.key_of(binding.problem, binding.spec, require_gpu())
        shape_label, flops = f"{m}x{n}x{k}", 2 * m * n * k
        entry = None if force else measured_configs.find(key)
        before = entry and entry.config
        rows: list[dict[str, Any]] = [] if before is None else [{"name": f"{before}", "config": vars(before)}]
        if not before:
            limit = max_configs or HALVING_ROUNDS[0][0]
            for config, us in _tune_shape(a, b, precision_options, limit, shape_label):
                rows.append({"name": f"{config}", "config": vars(config), "time_us": us, "tflops": flops / us / 1e6})
        if as_json:
            click.echo(json.dumps({"m": m, "n": n, "k": k, "operands": dtype, "tuned_before": bool(before),
                                   "configs": rows}))  # fmt: skip
        elif before:
            click.echo(f"{shape_label}: {before}, tuned before")
        elif rows:
            best = rows[0]
            click.echo(f"{shape_label}: {best['time_us']:.1f} us, {best['tflops']:.0f} TFLOP/s, {best['name']}")


_OF_OTHER_KINDS = ("batch", "groups", "dtype_b", "out_dtype", "scale_a", "scale_b", "epilogue", "operands",
                   "batch_invariant")  # fmt: skip
"""Options of GEMMs that are not plain ones, which `gemmsmith.tune` does not take."""


def _tune_kind(
    sizes: tuple[int, int, int], choices: dict[str, Any], max_configs: int, force: bool, as_json: bool
) -> None:  # fmt: skip
    from gemmsmith.backends.cuda.kernel_loader import device_guard
    from gemmsmith.backends.cuda.memory import DeviceArray
    from gemmsmith.cli.execute import random_arrays
    from gemmsmith.cli.problem import make_request
    from gemmsmith.host.autotune import Autotune, active, tune_first_call

    request = make_request(choices, sizes)
    require_gpu()
    arrays, label = random_arrays(request, choices["groups"], 0), "x".join(map(str, sizes))

    def on_gpu(x: Any) -> Any:
        return DeviceArray.from_numpy(x) if isinstance(x, np.ndarray) else x

    with device_guard(0), active(Autotune(max_configs=max_configs)) as block:
        names = ("a", "b", "scale_a", "scale_b")
        operands = {name: on_gpu(x) for name, x in arrays.operands.items()}
        copied = arrays._replace(**{name: on_gpu(getattr(arrays, name)) for name in names}, operands=operands, out=None)
        tune_first_call(copied, force=force)
        plan = PlannedGemm(copied)
    tuned = block.tuned[0] if block.tuned else None
    if as_json:
        row = {"name": f"{plan.config}", "config": vars(plan.config)} | ({"time_us": tuned.entry.us} if tuned else {})
        of_problem = dict(zip("mnk", sizes, strict=True)) | {"operands": choices["dtype"], "tuned_before": not tuned}
        click.echo(json.dumps({**of_problem, "configs": [row]}))
    elif tuned:
        click.echo(f"{label}: {tuned.entry.us:.1f} us, untuned {tuned.untuned_us:.1f} us, {plan.config}")
    else:
        click.echo(f"{label}: {plan.config}, tuned before, or there is no other config")


def _tune_shape(a: Any, b: Any, precision_options: dict[str, Any], max_configs: int, shape_label: str) -> Any:
    """Tune a GEMM, with progress on stderr; return (config, microseconds) of the configs that ran, fastest first."""
    totals = {"compile": max_configs, "measure": sum(min(max_configs, count) for count, _ in HALVING_ROUNDS)}
    done: Counter[str] = Counter()
    with progress_bar() as progress:

        def on_progress(step: str) -> None:
            done[step] += 1
            progress(f"{shape_label} {step}", done[step] / totals[step])

        return api.tune(a, b, **precision_options, max_configs=max_configs, on_progress=on_progress)


def _tune_model(
    file: Path, tokens: tuple[int, ...], training: bool, dtype: str, precision_options: dict[str, Any],
    max_configs: int, force: bool, as_json: bool,
) -> None:  # fmt: skip
    """Tune the layers of a model for each number of tokens, with progress on stderr, and print a line for each."""
    from gemmsmith.backends.cuda.kernel_loader import device_guard
    from gemmsmith.host.autotune import Autotune, active, tune_first_call

    try:
        layers = layers_of(json.loads(file.read_text()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise click.UsageError(f"--model: {file}: {type(error).__name__}: {error}; use a model's config.json") from None
    require_gpu()
    requests = [
        (f"{layer.name}, {count} tokens", request)
        for layer in layers for count in tokens
        for request in _requests(layer, count, dtype, training, precision_options)
    ]  # fmt: skip
    with progress_bar() as progress, device_guard(0), active(Autotune(max_configs=max_configs)) as block:
        for i, (name, make_request) in enumerate(requests):
            progress("layers", i / len(requests))
            before = len(block.tuned)
            tune_first_call(make_request(), force=force)
            for x in block.tuned[before:]:
                if as_json:
                    click.echo(json.dumps({"layer": name, "untuned_us": x.untuned_us, **x.entry.to_json()}))
                else:
                    click.echo(f"{name}: {x.problem}: {x.entry.us:.1f} us, untuned {x.untuned_us:.1f} us")
    if not as_json:
        click.echo(f"{len(block.tuned)} of {len(requests)} GEMMs tuned, the others before or not at all")


def _requests(layer: Layer, tokens: int, dtype: str, training: bool, precision_options: dict[str, Any]) -> Any:
    """Yield functions that make the requests of a layer: the product and, for training, its two gradients.

    The experts' groups have equal sizes.
    """
    from gemmsmith.core.dtypes import as_dtype
    from gemmsmith.core.grouping import Grouping
    from gemmsmith.tuning.search import random_device_arrays

    out = as_dtype(dtype) if as_dtype(dtype).bits > 8 else as_dtype("bf16")
    experts = layer.experts
    m = ceil_div(tokens * layer.experts_per_token, experts) * experts if experts else tokens
    n, k = layer.n, layer.k

    def request(a: Spec, b: Spec, d: tuple[int, ...], along: str = "m") -> Any:
        def make() -> Request:
            arrays = random_device_arrays({"a": a, "b": b, "out": Spec(d, out)}, 0)
            if not experts:
                return Request(**arrays, **precision_options)
            from gemmsmith.backends.cuda.memory import DeviceArray

            extent = m if along == "m" else a.shape[1]
            ends = np.arange(1, experts + 1, dtype=np.int32) * (extent // experts)
            grouping = Grouping("offsets", along)  # type: ignore[arg-type]
            offsets = DeviceArray.from_numpy(ends)
            return Request(**arrays, operands={"offsets": offsets}, grouping=grouping, **precision_options)

        return make

    weights = (experts,) if experts else ()
    yield request(matrix((m, k), dtype, "n"), matrix((*weights, k, n), dtype, "t"), (m, n))
    if training:
        yield request(matrix((m, n), dtype, "n"), matrix((*weights, n, k), dtype, "n"), (m, k))
        yield request(matrix((n, m), dtype, "t"), matrix((m, k), dtype, "n"), (*weights, n, k), "k")
