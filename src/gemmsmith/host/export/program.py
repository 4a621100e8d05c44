"""The launches of all paths as one straight list of integer operations, which Python evaluates and C prints."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Union

from gemmsmith.core.arguments import Pointer, TensorMap
from gemmsmith.core.scalars import ceil_div
from gemmsmith.host.export.symbol import OPERATIONS, Expression, Inverse, Outcomes, Symbol, traced
from gemmsmith.lang.kernel import Kernel
from gemmsmith.lang.launch import Launch, Launches

COMPUTE = OPERATIONS | {"ceil_div": ceil_div, "inverse_bits": lambda x: _bits(1 / x)}
DIVISIONS = ("//", "%", "ceil_div", "inverse_bits")
_Slot = tuple[str, str, int]
"""A launch's kernel, by its source, the array that it packs, and how many such launches are before it."""
_BySlot = Mapping[int, Mapping[_Slot, Launch]]
"""Launches by their slots, by the id of the Launches that has them."""
_Leaf = Union["Launches", str]


class Node:
    """A comparison that some paths make next. `ends`: the paths of its outcomes, or what they launch."""

    def __init__(self, comparison: Expression) -> None:
        self.comparison = comparison
        self.ends: dict[bool, Node | _Leaf] = {}


class Program:
    """Operations on integers, and which of their results are the numbers of the launches.

    Attributes:
        operations: (operation, numbers of earlier ones or constants), of COMPUTE, "variable" with its name,
            "constant" with its value, and "select" with a condition and what it is if that is true, and if not.
        seconds: The variable of the second of two arrays, by that of the first.
        slots: The kernels that may be launched, in their order, each with a launch that is an example.
        outputs: The number of the operation of each output by its name: "error", 1 if nothing can be launched;
            "workspace_bytes", "flag_bytes"; and of each slot "clusters", 0 if it is not launched, and its arguments.
    """

    def __init__(self, paths: Iterable[tuple[Outcomes, _Leaf]], seconds: Mapping[str, str]) -> None:
        """Merge the paths. Outcomes that no path has are an error."""
        self.seconds = seconds
        self.operations: list[tuple[Any, ...]] = []
        self._numbers: dict[tuple[Any, ...], int] = {}
        paths = list(paths)
        root = _tree(paths)
        found = [end for _, end in paths if not isinstance(end, str)]
        self.slots = _slots(found)
        error = self._merge(root, lambda end: self._constant(isinstance(end, str)), self._constant(1))
        self.outputs = {"error": self._constant(1) if error is None else error}
        self.outputs["workspace_bytes"] = self._of_launches(root, lambda x: self._value(x.workspace_bytes))
        self.outputs["flag_bytes"] = self._of_launches(root, lambda x: self._value(x.flag_bytes))
        for i, (slot, example) in enumerate(self.slots.items()):
            self._add_slot(root, i, slot, example, {id(x): _by_slot(x) for x in found})

    @property
    def kernels(self) -> list[Kernel]:
        return [x.kernel for x in self.slots.values()]

    def _add_slot(self, root: Node | _Leaf, i: int, slot: _Slot, example: Launch, by_slot: _BySlot) -> None:

        def of_slot(name: str, field: str, all_: Launches) -> int | None:
            x = by_slot[id(all_)].get(slot)
            return self._value(_of_caller(numbers_of(x.arguments[name])[field], all_)) if x else None

        def clusters(all_: Launches) -> int:
            x = by_slot[id(all_)].get(slot)
            return self._value(x.work_clusters) if x else self._constant(0)

        self.outputs[f"{i}.clusters"] = self._of_launches(root, clusters)
        kinds = dict(zip((p.name for p in example.kernel.parameters), example.kernel.parameter_kinds, strict=True))
        for name, x in example.arguments.items():
            if kinds[name] == "f32" and isinstance(x, Pointer):
                continue
            for field in numbers_of(x):
                get = partial(of_slot, name, field)
                self.outputs[f"{i}.{name}" + f".{field}" * bool(field)] = self._of_launches(root, get)

    def _of_launches(self, root: Node | _Leaf, get: Callable[[Launches], int | None]) -> int:
        """Return the operation of a number of the launches; where there are none it may be any."""
        merged = self._merge(root, lambda end: None if isinstance(end, str) else get(end), None)
        return self._constant(0) if merged is None else merged

    def _merge(self, x: Node | _Leaf, get: Callable[[_Leaf], int | None], missing: int | None) -> int | None:
        """Return the operation of what `get` returns of the end of a path, by its outcomes; None: any number."""
        if not isinstance(x, Node):
            return get(x)
        true, false = (self._merge(x.ends[o], get, missing) if o in x.ends else missing for o in (True, False))
        if true is None or false is None or true == false:
            return false if true is None else true
        return self._add("select", self._value(x.comparison), true, false)

    def _value(self, x: Any) -> int:
        """Return the operation of an integer, an expression, an address, or the bits of a number as fp32."""
        if isinstance(x, Pointer):
            address = self._add("variable", x.name)
            if second := self.seconds.get(x.name):
                other = self._add("variable", second)
                address = self._add("select", self._add("<", address, other), address, other)
            return self._add("+", address, self._value(x.offset))
        if isinstance(x, Inverse):
            return self._add("inverse_bits", self._value(x.of))
        if isinstance(x, float):
            return self._constant(_bits(x))
        if isinstance(x, Symbol):
            x = x.expression
        if not isinstance(x, Expression):
            return self._constant(x)
        if not x.operands:
            return self._add("variable", x.op)
        if x.op == "neg" and isinstance(inner := x.operands[0], Expression) and inner.op == "//":
            negated, by = inner.operands
            if isinstance(negated, Expression) and negated.op == "neg":
                return self._add("ceil_div", self._value(negated.operands[0]), self._value(by))
        return self._add(x.op, *map(self._value, x.operands))

    def _constant(self, x: int) -> int:
        return self._add("constant", int(x))

    def _add(self, *operation: Any) -> int:
        """Return the number of an operation; each is there once, and those of constants are computed."""
        op, *operands = operation
        if op in COMPUTE:
            given = [self.operations[i] for i in operands]
            if all(x[0] == "constant" for x in given):
                return self._constant(COMPUTE[op](*(x[1] for x in given)))
            neutral = {"+": 0, "*": 1, "//": 1, "-": 0}.get(op)
            if neutral is not None and given[1] == ("constant", neutral):
                return int(operands[0])
            if op in ("+", "*") and given[0] == ("constant", neutral):
                return int(operands[1])
        if operation not in self._numbers:
            self._numbers[operation] = len(self.operations)
            self.operations.append(operation)
        return self._numbers[operation]

    def needed(self) -> list[int]:
        """Return the operations that the outputs depend on, in order."""
        needed, rest = set[int](), list(self.outputs.values())
        while rest:
            if (i := rest.pop()) not in needed:
                needed.add(i)
                op, *operands = self.operations[i]
                rest += operands if op not in ("variable", "constant") else []
        return sorted(needed)

    def evaluate(self, variables: Mapping[str, int]) -> dict[str, int]:
        """Return the outputs for these values of the variables, as C computes them: x // 0 and x % 0 are 0."""
        values: dict[int, int] = {}
        for i in self.needed():
            op, *operands = self.operations[i]
            if op in ("variable", "constant"):
                values[i] = variables[operands[0]] if op == "variable" else operands[0]
                continue
            given = [values[x] for x in operands]
            if op == "select":
                values[i] = given[1] if given[0] else given[2]
            elif (op in DIVISIONS and not given[-1]) or (op in ("<<", ">>") and not 0 <= given[1] < 63):
                values[i] = 0
            else:
                values[i] = int(COMPUTE[op](*given))
        return {name: values[i] for name, i in self.outputs.items()}

    def differences(self, numbers: Mapping[str, int], launches: Launches, addresses: Mapping[str, int]) -> str:
        """Return which of `evaluate`'s numbers are not those of launches; empty if all are.

        `addresses`: of the caller's arrays. Strides of maps whose rows, or matrices, are a single one do not count.
        """
        expected: dict[str, Any] = {"workspace_bytes": launches.workspace_bytes, "flag_bytes": launches.flag_bytes}
        slots = list(self.slots)
        for slot, launch in _by_slot(launches).items():
            i = slots.index(slot) if slot in slots else -1
            expected[f"{i}.clusters"] = launch.work_clusters
            for name, x in launch.arguments.items():
                for field, value in numbers_of(x).items():
                    if isinstance(value, Pointer):
                        value = addresses.get(_of_caller(value, launches).name, 0) + value.offset
                    if isinstance(value, float):
                        value = _bits(value)
                    expected[f"{i}.{name}" + f".{field}" * bool(field)] = value
        wrong = [
            name
            for name, x in expected.items()
            if name in numbers
            and numbers[name] != x
            and not (name[-7:-1] == "stride" and name.count(".") == 2 and numbers[f"{name[:-7]}extent{name[-1]}"] <= 1)
        ]
        return ", ".join(f"{name} is {numbers[name]}, not {expected[name]}" for name in wrong) or (
            "other kernels" if any(name.startswith("-1.") for name in expected) else ""
        )


def _tree(paths: Sequence[tuple[Outcomes, _Leaf]]) -> Node | _Leaf:
    """Return the first comparison of all paths, from which their outcomes lead to their ends."""
    root: Node | _Leaf = paths[0][1] if not paths[0][0] else Node(next(iter(paths[0][0])))
    for outcomes, end in paths:
        node, steps = root, list(outcomes.items())
        for i, (comparison, outcome) in enumerate(steps):
            assert isinstance(node, Node), "a path ends where another goes on"
            assert node.comparison == comparison, "paths differ in what they compare"
            following = Node(steps[i + 1][0]) if i + 1 < len(steps) else end
            node = node.ends.setdefault(outcome, following)
    return root


def numbers_of(x: Any) -> dict[str, Any]:
    """Return the numbers of a tensor map as the driver gets them, by name; or another argument under an empty name.

    An order of clusters has none: it is the device's.
    """
    if not isinstance(x, TensorMap):
        return {} if isinstance(x, tuple) else {"": x}
    with traced({}):  # of no path
        extents, strides, box = x.encoded()
    parts = ("extent", 0, extents), ("stride", 1, strides), ("box", 0, box)
    numbers = {f"{name}{i}": y for name, first, all_ in parts for i, y in enumerate(all_, first)}
    return {"address": x.address, **numbers, "swizzle": x.swizzle}


def _of_caller(x: Any, launches: Launches) -> Any:
    """Return an argument that is a Pointer by the caller's name; others as they are.

    The kernel's a is the caller's b if it computes D^T: a launch exchanges the addresses (backends/cuda/run.py).
    """
    is_exchanged = launches.swapped and isinstance(x, Pointer) and x.name in ("a", "b")
    return replace(x, name="b" if x.name == "a" else "a") if is_exchanged else x


def _bits(x: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", x))[0])


def _by_slot(launches: Launches) -> dict[_Slot, Launch]:
    counts, slots = Counter[tuple[str, str]](), {}
    for launch in launches.all:
        source = launch.arguments.get("source")
        key = launch.kernel.source, source.name if isinstance(source, Pointer) else ""
        slots[(*key, counts[key])] = launch
        counts[key] += 1
    return slots


def _slots(found: Iterable[Launches]) -> dict[_Slot, Launch]:
    """Return all slots in an order that suits all launches, each with a launch."""
    order: list[_Slot] = []
    examples: dict[_Slot, Launch] = {}
    for launches in sorted(found, key=lambda x: -len(x.all)):
        position = len(order)
        for slot, launch in reversed(_by_slot(launches).items()):
            if slot in order:
                position = order.index(slot)
            else:
                order.insert(position, slot)
                examples[slot] = launch
    return {slot: examples[slot] for slot in order}
