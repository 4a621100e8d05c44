"""Tuning of models: measured configs that all ranks of a process group share, and calls before a model serves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed

import gemmsmith
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.scalars import as_integer
from gemmsmith.host.autotune import Autotune, active, share
from gemmsmith.tuning.measured_configs import Entry


@contextmanager
def autotune(*, group: Any = None, max_configs: int = 16, keep_bits: bool = False) -> Iterator[Autotune]:
    """Measure configs within the block as `gemmsmith.autotune` does, so that all ranks of a group use the same ones.

    The group's first rank measures. The others choose without measurements within the block, and take what it measured
    when the block ends, which every rank must reach: there they wait for one another. Without torch.distributed it is
    `gemmsmith.autotune`.

    Args:
        group: The process group; None: all ranks.
        max_configs: As in `gemmsmith.autotune`.
        keep_bits: As in `gemmsmith.autotune`.

    Yields:
        What was measured: on the first rank within the block, on the others after it.
    """
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not distributed:
        with gemmsmith.autotune(max_configs=max_configs, keep_bits=keep_bits) as block:
            yield block
        return
    first = torch.distributed.get_global_rank(group, 0) if group is not None else 0
    measures = torch.distributed.get_rank() == first
    unmeasured = active(Autotune(max_configs=0))
    with gemmsmith.autotune(max_configs=max_configs, keep_bits=keep_bits) if measures else unmeasured as block:
        yield block
    tuned: list[Any] = [[x.entry.to_json() for x in block.tuned]]
    torch.distributed.broadcast_object_list(tuned, first, group)
    if not measures:
        share(
            [Entry.from_json(row) for row in tuned[0]], torch.cuda.current_device() if torch.cuda.is_available() else 0
        )


def warmup(
    model: torch.nn.Module, tokens: Iterable[int], *, inputs: Callable[[int], Any] | None = None, group: Any = None,
    max_configs: int = 16, keep_bits: bool = False,
) -> Autotune:  # fmt: skip
    """Compile and tune all that a model needs for these numbers of tokens, before it serves or is captured.

    The model runs once for each number within `autotune`, without gradients if it is in eval mode, and with a backward
    pass from the mean of its output otherwise; the gradients are dropped.

    Args:
        model: The model, on a GPU.
        tokens: Numbers of tokens, each at least 1.
        inputs: Returns the model's arguments for a number of tokens: a tuple, or a dict of keyword arguments. Default:
            `input_ids` of one sequence, for models with a vocabulary (`model.config.vocab_size`).
        group: As in `autotune`.
        max_configs: As in `autotune`.
        keep_bits: As in `autotune`.

    Returns:
        What was measured, whose text is a summary.

    Raises:
        ArgumentError: A number of tokens is not positive, or the model's inputs are not known.
    """
    counts = [as_integer("tokens", count, least=1) for count in tokens]
    make_inputs = inputs or _input_ids_for(model)
    with autotune(group=group, max_configs=max_configs, keep_bits=keep_bits) as block:
        for count in counts:
            arguments = make_inputs(count)
            with torch.set_grad_enabled(model.training):
                result = model(**arguments) if isinstance(arguments, dict) else model(*arguments)
            if model.training:
                _mean(result).backward()
                model.zero_grad(set_to_none=True)
    return block


def _input_ids_for(model: torch.nn.Module) -> Callable[[int], dict[str, torch.Tensor]]:
    """Return a function that makes `input_ids` of one sequence. Raises ArgumentError without a vocabulary."""
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    if vocabulary is None:
        raise ArgumentError("inputs: got None for a model without config.vocab_size; use a function of the tokens")
    device = next(model.parameters()).device
    return lambda count: {"input_ids": torch.randint(0, int(vocabulary), (1, count), device=device)}


def _mean(result: Any) -> torch.Tensor:
    """Return the mean of a model's output: a tensor, the loss, logits or last hidden state, or the first of several."""
    is_named = isinstance(result, Mapping)
    named = (result.get(x) if is_named else getattr(result, x, None) for x in ("loss", "logits", "last_hidden_state"))
    parts = list(result.values()) if is_named else result
    first = parts[0] if isinstance(parts, (tuple, list)) else parts
    tensor = next((x for x in named if isinstance(x, torch.Tensor)), first)
    return tensor.float().mean()
