"""PyTorch's operator that selects tokens' experts from a router's logits, and sorts their slots by the experts.

    route(Tensor logits, Tensor? bias, int top_k, str scores, bool normalize, float scale, int groups,
          int top_k_groups) -> (Tensor experts, Tensor weights, Tensor, Tensor, Tensor, Tensor, Tensor)

experts (tokens, top_k) are int32, weights (tokens, top_k) fp32; the others are those of `SortedSlots`. On a Hopper GPU
one or two kernels compute all of it. Without gradients.
"""

from __future__ import annotations

from typing import Any

import torch

from gemmsmith.core.dtypes import as_dtype
from gemmsmith.moe.launch_sort import route
from gemmsmith.moe.route import MAX_GROUPS, MAX_TOP_K, SIGMOID_EPSILON, RouteSpec, check_counts
from gemmsmith.moe.sort_by_expert import MAX_EXPERTS
from gemmsmith.torch import fallback
from gemmsmith.torch.moe.sorting import SortedSlots, fake_sort, sort_by_torch, sort_on_gpu
from gemmsmith.torch.ops import define_op


def select_experts(
    logits: Any, bias: Any, top_k: int, scores: str, normalize: bool, scale: float, groups: int, top_k_groups: int
) -> tuple[Any, Any]:  # fmt: skip
    """Return the experts (tokens, top_k) of a router's logits, and their weights, in fp32 (float64 for a float64).

    Of equal scores the first is selected, as by the kernel; on a GPU one that torch.topk selects. NaN is the greatest.

    Raises:
        ArgumentError: see `check_counts`.
    """
    check_counts(logits.shape[-1], top_k, groups, top_k_groups)
    exact = torch.float64 if logits.dtype == torch.float64 else torch.float32
    if scores == "softmax":
        values = choice = logits.softmax(-1, dtype=exact)
    else:
        values = logits.to(exact).sigmoid()
        choice = values + bias
    if groups == 1:
        experts = _greatest(choice, top_k)
    else:
        candidates = _experts_of_best_groups(choice, groups, top_k_groups)
        experts = candidates.gather(-1, _greatest(choice.gather(-1, candidates), top_k))
    weights = values.gather(-1, experts)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + (SIGMOID_EPSILON if scores == "sigmoid" else 0))
    return experts, weights * scale


def _greatest(x: Any, count: int) -> Any:
    """Return the indices of each row's greatest values, in their order."""
    if x.is_cuda:
        return x.topk(count, -1).indices
    return x.sort(stable=True, dim=-1, descending=True).indices[..., :count]  # topk takes any of equal ones


def _experts_of_best_groups(choice: Any, groups: int, top_k_groups: int) -> Any:
    """Return the experts, ascending, of the groups whose two best experts have the largest sum (DeepSeek-V3)."""
    grouped = choice.unflatten(-1, (groups, -1))
    best = _greatest(grouped.topk(2, -1).values.sum(-1), top_k_groups).sort(-1).values
    in_group = torch.ones_like(grouped[..., :1, :], dtype=torch.long).cumsum(-1) - 1  # not arange: of DTensors, too
    return (best.unsqueeze(-1) * grouped.shape[-1] + in_group).flatten(-2)


def _by_torch(logits: Any, bias: Any, top_k: int, *options: Any) -> tuple[Any, ...]:
    experts, weights = select_experts(logits, bias, top_k, *options)
    experts, weights = experts.int(), weights.float()
    return experts, weights, *sort_by_torch(experts, weights, logits.shape[1])


def _on_gpu(
    logits: Any, bias: Any, top_k: int, scores: Any, normalize: bool, scale: float, groups: int, top_k_groups: int
) -> tuple[Any, ...]:  # fmt: skip
    (tokens, count), options = logits.shape, (scores, normalize, scale, groups, top_k_groups)
    is_supported = (
        tokens > 0 and top_k <= MAX_TOP_K and count <= MAX_EXPERTS and groups <= MAX_GROUPS
        and logits.dtype in (torch.bfloat16, torch.float16, torch.float32)
    )  # fmt: skip
    if not is_supported or fallback.kernels_unsupported(logits.get_device()):
        return _by_torch(logits, bias, top_k, *options)
    dtype = as_dtype(logits.dtype, "logits")
    spec = RouteSpec(count, top_k, scores, normalize, groups, top_k_groups, dtype)
    bias = None if scores == "softmax" else bias.float().contiguous()
    results = route(logits.contiguous(), bias, spec, scale, "cuda")
    experts, weights = results["experts"], results["weights"]
    if "offsets" not in results:
        return experts, weights, *sort_on_gpu(experts, weights, count)
    return experts, weights, *(results[name] for name in SortedSlots._fields)


def _fake(logits: Any, bias: Any, top_k: int, *_: Any) -> tuple[Any, ...]:
    experts, weights = (logits.new_empty((logits.shape[0], top_k), dtype=x) for x in (torch.int32, torch.float32))
    return experts, weights, *fake_sort(experts, weights, logits.shape[1])


ROUTE = define_op(
    "route", "(Tensor logits, Tensor? bias, int top_k, str scores, bool normalize, float scale, int groups, "
    "int top_k_groups) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)", _fake, lambda *_, **__: 0,
    CPU=_by_torch, CUDA=_on_gpu,
)  # fmt: skip
"""The operator."""
