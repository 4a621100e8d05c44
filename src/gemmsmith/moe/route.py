"""Selects tokens' experts from a router's logits, each token's by one warp.

Lane l has the logits of experts l, l + 32, ...; the experts with the largest scores are found one after the other.
Scores are compared by keys: `_key` maps fp32 numbers to unsigned integers in the same order, since redux, which finds
a warp's maximum in one instruction, compares integers. NaN is above infinity, as for torch.topk. Key 0 belongs to no
number; it marks what cannot be selected (again).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from gemmsmith import hw
from gemmsmith.core.arguments import Pointer
from gemmsmith.core.dtypes import FP32, DType
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.scalars import ceil_div
from gemmsmith.lang.builder import Builder
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.types import F32, I32, PRED, U32, U64
from gemmsmith.lang.values import Constant, RegisterArray, Value

MAX_TOP_K = 16
"""Experts of a token at most; chosen, not measured."""
MAX_GROUPS = 32
"""Groups of experts at most: a lane has one."""
WARPS = 4
"""Warps of a CTA of `route`; chosen, not measured."""
SIGN = 1 << 31
"""The sign of an fp32."""
GREATEST_KEY = 2**32 - 1
"""The key of NaN."""
SIGMOID_EPSILON = 1e-20
"""What is added to the sum of sigmoids that divides weights (DeepSeek-V3)."""


def check_counts(experts: int, top_k: int, groups: int, top_k_groups: int) -> None:
    """Raise ArgumentError if a token cannot have `top_k` different experts within its best groups.

    The `experts` experts are divided equally into `groups` groups, of which a token's `top_k_groups` best count.
    """
    if not 0 < top_k <= experts:
        raise ArgumentError(f"top_k: got {top_k} of {experts} experts; use 1 to {experts}")
    if groups < 1 or experts % groups or (groups > 1 and experts < 2 * groups):
        raise ArgumentError(
            f"groups: got {groups} for {experts} experts; use 1, or equal groups of two experts or more, since the two "
            "best scores of each are added up"
        )
    if not 0 < top_k_groups <= groups:
        raise ArgumentError(f"top_k_groups: got {top_k_groups} of {groups} groups; use 1 to {groups}")
    if top_k > (available := experts // groups * top_k_groups):
        raise ArgumentError(
            f"top_k: got {top_k}, and {top_k_groups} of {groups} groups have {available} experts; use at most "
            f"{available}, or more top_k_groups"
        )


@dataclass(frozen=True)
class RouteSpec:
    """How experts are selected, see gemmsmith.torch.FusedMoE. `check_counts` accepts the counts.

    Attributes:
        top_k: Experts of a token, at most MAX_TOP_K.
        scores: The function that makes scores of logits. With "sigmoid" there is also a bias for each expert, which is
            added in the selection, but not to the weights.
        normalize: Whether a token's weights are divided by their sum.
        groups: Groups of at least two experts, at most MAX_GROUPS.
        top_k_groups: Groups that a token's experts are in.
        dtype: Dtype of the logits: bf16, fp16 or fp32.
    """

    experts: int
    top_k: int
    scores: Literal["softmax", "sigmoid"]
    normalize: bool
    groups: int
    top_k_groups: int
    dtype: DType

    @property
    def name(self) -> str:
        """The part of a kernel's symbol that names this selection."""
        groups = [f"{self.top_k_groups}of{self.groups}"] * (self.groups > 1)
        parts = [self.top_k, "of", self.experts, self.scores, *["normalized"] * self.normalize, *groups, self.dtype]
        return "_".join(map(str, parts))

    @property
    def experts_per_lane(self) -> int:
        """Experts whose logits a lane has in its registers: the warp of a token divides all of them."""
        return ceil_div(self.experts, 32)


@dataclass(frozen=True)
class BoundRoute:
    """Launch arguments of `route`. Arrays are at the Pointers of their names."""

    tokens: int
    scale: float


@lru_cache(maxsize=256)
def route(spec: RouteSpec) -> Kernel:
    """Build the kernel of a spec.

    Reads logits (tokens, experts), and with sigmoids bias (experts,) fp32. Writes experts (tokens, top_k) int32, in the
    order of their scores, and weights (tokens, top_k) fp32: the scores, normalized, times `scale`.
    """
    with Builder(f"route_{spec.name}", threads=32 * WARPS) as k:
        k.header += [f"gemmsmith: {k.name}", "selects experts from a router's logits"]
        k.work_clusters = lambda p: ceil_div(p.tokens, WARPS)
        router = TokenRouter(spec)
        tokens = k.parameter("tokens", compute=lambda p: p.tokens)
        hw.grid_dependency_wait()
        hw.launch_dependent_grids()
        token = (hw.block_index() * WARPS + k.warp_index).named("token")
        with k.when(token < tokens):
            router.store(token, *router.select(token))
        return k.finish()


class TokenRouter:
    """The selection of a token's experts by a warp. Kernel arguments: logits, bias, scale, experts and weights."""

    def __init__(self, spec: RouteSpec) -> None:
        k, self.spec = current_builder(), spec
        names = ("logits", "experts", "weights", *["bias"] * (spec.scores == "sigmoid"))
        self._arrays = {name: array(name) for name in names}
        self._scale = k.parameter("scale", F32, lambda p: p.scale)

    def store(self, token: Value, expert: Value, weight: Value) -> None:
        """Store the `expert` and `weight` that `select` returns for a token, one of each per lane below top_k."""
        k = current_builder()
        offset = ((token * self.spec.top_k + k.lane) * 4).to(U64)
        for name, x in (("experts", expert), ("weights", weight)):
            hw.store_global_word(self._arrays[name] + offset, x, k.lane < self.spec.top_k, name[:-1])

    def select(self, token: Value) -> tuple[Value, Value]:
        """Return (expert, weight) of a token: lane i < top_k has the token's i-th best expert and its weight."""
        k, spec = current_builder(), self.spec
        logits = k.registers(F32, spec.experts_per_lane, "logit")
        bias = k.registers(F32, spec.experts_per_lane, "bias") if spec.scores == "sigmoid" else None
        with k.unroll(spec.experts_per_lane, name="i") as i:
            logits[i] = k.select(self._exists(i), self._logit(token, self._expert(i), self._exists(i)), -math.inf)
            if bias:
                address = self._arrays["bias"] + (self._expert(i) * 4).to(U64)
                hw.load_global(bias.slice(i, 1), address, self._exists(i))
        greatest, total = self._softmax_terms(logits) if spec.scores == "softmax" else (None, None)
        keys = k.registers(U32, spec.experts_per_lane, "key_of")
        with k.unroll(spec.experts_per_lane, name="i") as i:
            score = _score(logits[i], greatest, total)
            keys[i] = k.select(self._exists(i), _key(score + bias[i] if bias else score), 0)
        if spec.groups > 1:
            self._exclude_groups(keys)
        expert = self._top_k(keys)
        weight = _score(self._logit(token, expert, Constant(PRED, True)), greatest, total)
        if spec.normalize:
            selected = _sum_of_lanes(k.select(k.lane < spec.top_k, weight, 0.0))
            weight = hw.divide_full(weight, selected + SIGMOID_EPSILON if bias else selected)
        return expert, (weight * self._scale).named("weight")

    def _expert(self, i: Value) -> Value:
        return current_builder().lane + i * 32

    def _exists(self, i: Value) -> Value:
        return self._expert(i) < self.spec.experts if self.spec.experts % 32 else Constant(PRED, True)

    def _logit(self, token: Value, expert: Value, exists: Value) -> Value:
        """Load a token's logit of an expert as fp32; 0 if `exists` is false."""
        dtype = self.spec.dtype
        element = token.to(U64) * self.spec.experts + expert.to(U64)
        address = self._arrays["logits"] + element * dtype.bytes
        if dtype == FP32:
            return hw.load_global_word(address, exists, F32, "logit")
        return hw.unpack(hw.load_global_u8_or_u16(address, exists, 16).to(U32), 0, dtype)

    def _softmax_terms(self, logits: RegisterArray) -> tuple[Value, Value]:
        """Return (greatest logit, sum of exp(logit - greatest)) of a token; both are the same in all lanes.

        If one is NaN, so are the results.
        """
        k = current_builder()
        greatest, total = k.var(F32, -math.inf, "greatest_of_lane"), k.var(F32, 0.0, "sum_of_lane")
        with k.unroll(len(logits), name="i") as i:
            greatest.set(hw.maximum_nan(greatest.get(), logits[i]))
        greatest_of_warp = _number(hw.redux(_key(greatest.get()), "max")).named("greatest")
        with k.unroll(len(logits), name="i") as i:
            total.set(total.get() + hw.math_library_call("expf", logits[i] - greatest_of_warp))
        return greatest_of_warp, _sum_of_lanes(total.get()).named("sum")

    def _exclude_groups(self, keys: RegisterArray) -> None:
        """Keep the experts of the `top_k_groups` best groups, and make those of the others the last to be selected.

        A group's score is the sum of its two best experts' scores. `keys`: those of this lane's experts; they become 1
        outside of the best groups, less than the key of any number. Lane g has the key of group g's score.
        """
        k, spec = current_builder(), self.spec
        size, group_key = spec.experts // spec.groups, k.var(U32, 0, "group_key")
        with k.range(spec.groups, name="group") as group:
            best, second = k.var(U32, 0, "best"), k.var(U32, 0, "second")
            first = (group * size).named("first_expert")
            with k.unroll(len(keys), name="i") as i:
                key = k.select((self._expert(i) - first).to(U32) < size, keys[i], 0).named("key")
                second.set(k.maximum(second.get(), k.minimum(best.get(), key)))
                best.set(k.maximum(best.get(), key))
            best_of_warp, owner = _greatest(best.get(), k.lane)
            second_of_warp = hw.redux(k.select(k.lane == owner, second.get(), best.get()), "max")
            of_group = _key(_number(best_of_warp) + _number(second_of_warp))
            group_key.set(k.select(k.lane == group, of_group, group_key.get()))
        selected = k.var(U32, 0, "selected_groups")
        with k.range(spec.top_k_groups, name="rank"):
            _, group_ = _greatest(group_key.get(), k.lane)
            selected.set(selected.get() | (Constant(U32, 1) << group_))
            group_key.set(k.select(k.lane == group_, 0, group_key.get()))
        with k.unroll(len(keys), name="i") as i:
            of_expert = k.minimum(self._expert(i) // size, spec.groups - 1)
            is_selected = (selected.get() >> of_expert & 1) != 0
            keys[i] = k.minimum(keys[i], k.select(is_selected, Constant(U32, GREATEST_KEY), 1))

    def _top_k(self, keys: RegisterArray) -> Value:
        """Return, in lane i, the expert with the i-th greatest key; of equal keys, the first expert's comes first.

        `keys`: those of this lane's experts. The keys of selected experts become 0.
        """
        k = current_builder()
        expert = k.var(I32, 0, "expert")
        with k.range(self.spec.top_k, name="rank") as rank:
            best, index = k.var(U32, 0, "best"), k.var(I32, 0, "index")
            with k.unroll(len(keys), name="i") as i:
                is_better = (keys[i] > best.get()).named("is_better")
                best.set(k.select(is_better, keys[i], best.get()))
                index.set(k.select(is_better, self._expert(i), index.get()))
            _, selected = _greatest(best.get(), index.get())
            expert.set(k.select(k.lane == rank, selected, expert.get()))
            with k.unroll(len(keys), name="i") as i:
                keys[i] = k.select(self._expert(i) == selected, 0, keys[i])
        return expert.get()


def array(name: str) -> Value:
    """Return the address of an array, at the Pointer of its name."""
    return current_builder().pointer(name, lambda _: Pointer(name))


def _score(logit: Value, greatest: Value | None, total: Value | None) -> Value:
    """Return a logit's softmax; or its sigmoid, if `greatest` and `total` (of `_softmax_terms`) are None."""
    if greatest is None or total is None:
        one = Constant(F32, 1.0)
        return hw.divide_full(one, hw.math_library_call("expf", -logit) + one)
    return hw.divide_full(hw.math_library_call("expf", logit - greatest), total)


def _greatest(key: Value, index: Value) -> tuple[Value, Value]:
    """Return (greatest key of the warp's lanes, least `index` among the lanes that have it), the same in all lanes."""
    k = current_builder()
    greatest = hw.redux(key, "max").named("greatest_key")
    first = hw.redux(k.select(key == greatest, index.to(U32), Constant(U32, GREATEST_KEY)), "min")
    return greatest, first.to(I32).named("selected")


def _key(x: Value) -> Value:
    """Return the key of an fp32 number: a u32, in the same order as the numbers. NaN has the greatest.

    The bits of positive numbers are in order already, those of negative ones in reverse: a positive number gets the
    highest bit, and a negative one is inverted.
    """
    k, bits = current_builder(), hw.as_unsigned(x)
    return k.select(x == x, k.select((bits & SIGN) != 0, ~bits, bits | SIGN), GREATEST_KEY)


def _number(key: Value) -> Value:
    """Return the fp32 number whose key this is."""
    return hw.as_float(current_builder().select((key & SIGN) != 0, key ^ SIGN, ~key))


def _sum_of_lanes(x: Value) -> Value:
    """Return the sum of an fp32 over the warp's lanes, the same in all lanes."""
    for mask in (16, 8, 4, 2, 1):
        x = x + hw.shuffle_xor_fp32(x, mask)
    return x
