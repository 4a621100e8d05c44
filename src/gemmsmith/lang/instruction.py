"""Base class of instructions: operands, PTX and simulated semantics of one instruction in one small class."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, ParamSpec, get_args, get_type_hints

from gemmsmith.core.errors import KernelError
from gemmsmith.lang.current_builder import current_builder
from gemmsmith.lang.types import F32, I32, I64, PRED, TENSOR_MAP, U16, U32, U64, ScalarType
from gemmsmith.lang.values import LoopIndexedRow, RegisterArray, Value, as_value

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:  # only type checkers need it

    def dataclass_transform(**_):
        """Mark the base class of dataclasses."""
        return lambda cls: cls


P = ParamSpec("P")


@dataclass(frozen=True)
class RegisterOperand:
    """An operand that is a register array. `access` is "in", "out" or "inout"."""

    access: str


pred = Annotated[Any, PRED]
"""Annotation of an operand that is a value of this type, or a number."""
i32 = Annotated[Any, I32]
"""Annotation of an operand that is a value of this type, or a number."""
u32 = Annotated[Any, U32]
"""Annotation of an operand that is a value of this type, or a number."""
i64 = Annotated[Any, I64]
"""Annotation of an operand that is a value of this type, or a number."""
u64 = Annotated[Any, U64]
"""Annotation of an operand that is a value of this type, or a number."""
u16 = Annotated[Any, U16]
"""Annotation of an operand that is a value of this type, or a number."""
f32 = Annotated[Any, F32]
"""Annotation of an operand that is a value of this type, or a number."""
tensor_map = Annotated[Any, TENSOR_MAP]
registers_in = Annotated[Any, RegisterOperand("in")]
"""Annotation of an operand: an array of registers that is read."""
registers_out = Annotated[Any, RegisterOperand("out")]
"""Annotation of an operand: an array of registers that is written."""
registers_inout = Annotated[Any, RegisterOperand("inout")]
"""Annotation of an operand: an array of registers that is read and written."""


@dataclass_transform(eq_default=False)
class Instruction:
    """Base class of instructions.

    A subclass lists its operands and modifiers as annotated fields, in the order of its `emitter`'s parameters::

        class Prefetch(Instruction):
            level: str                        # a modifier: part of the text
            address: u64                      # an operand
            ptx = "prefetch.global.{level} [{address}];"

            def simulate(self, m): ...

    `{name}` is replaced by the operand's `%n`, and `{result}` by the result's; a register array becomes `{%n, %n+1,
    ...}`, any other attribute's name, such as a modifier's, its value.

    `result`: the type of the returned value, or None. `pure`: without side effects, so that it may be printed where its
    result is used, or dropped.
    """

    ptx: ClassVar[str] = ""
    cuda: ClassVar[str] = ""
    """A C++ expression instead of PTX."""
    wrapper: ClassVar[str] = ""
    """Name of the printed C++ function, with attributes in braces; other characters than words' become underscores.

    Empty: the mnemonic and the modifiers that are set.
    """
    result: ClassVar[ScalarType | None] = None
    result_name: ClassVar[str] = ""
    """Name of the result in printed CUDA if the kernel's author gives none; empty: a temporary."""
    pure: ClassVar[bool] = False
    required_arch: ClassVar[str] = "sm_80"
    """Minimum target architecture (PTX ISA, "Target ISA Notes"). With the suffix "a", the only one."""
    warpgroup_wide: ClassVar[bool] = False
    """Whether all threads of a warpgroup execute it together."""
    waits_for_threads: ClassVar[bool] = False
    """Whether it waits for what other threads do."""
    tests_wait: ClassVar[bool] = False
    """Whether its result says if such a wait would end now."""
    operand_types: ClassVar[dict[str, ScalarType | RegisterOperand]] = {}

    def __init_subclass__(cls) -> None:
        """Make the class a dataclass, and find which of its fields are operands: those annotated with a type."""
        dataclass(eq=False)(cls)
        cls.__init__.__annotations__["return"] = "Value" if cls.result else None  # for help() on its `emitter`
        hints = get_type_hints(cls, include_extras=True)
        annotations = ((f.name, get_args(hints[f.name])) for f in fields(cls))  # type: ignore[arg-type]
        cls.operand_types = {
            name: x[-1] for name, x in annotations if x and isinstance(x[-1], (ScalarType, RegisterOperand))
        }

    def __post_init__(self) -> None:
        """Convert operands to values of their types, and check the modifiers.

        KernelError names an operand that does not fit.
        """
        for name, operand_type in self.operand_types.items():
            operand = getattr(self, name)
            if isinstance(operand_type, ScalarType):
                try:
                    operand = getattr(operand, "address", operand)  # a SharedView is passed by its address
                    setattr(self, name, as_value(operand, operand_type))
                except KernelError as error:
                    raise KernelError(f"{self.mnemonic}, operand {name}: {error}") from None
            # a row selected by a loop index supports only reads and writes of its registers
            elif not isinstance(operand, RegisterArray) or isinstance(operand, LoopIndexedRow):
                raise KernelError(f"{self.mnemonic}, operand {name}: needs a register array, got {operand!r}")
        self.check()

    def check(self) -> None:
        """Raise KernelError for invalid modifiers. Subclasses override it."""

    def check_kernel(self, kernel: Any, location: Any) -> None:
        """Raise KernelError if the recorded `kernel` cannot have the instruction, which is at `location`.

        Subclasses override it.
        """

    # -- recording -----------------------------------------------------------------------------
    def issue(self) -> Value:
        """Record the instruction in the current builder and return its result, if it has one."""
        return current_builder().issue(self)

    # -- read by the printer, the verifier and the simulator -------------------------------------
    @property
    def mnemonic(self) -> str:
        """The class name in snake case. It is the wrapper's name if no modifiers are set."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(self).__name__).lower()

    @property
    def macs_per_thread(self) -> int:
        """Multiply-adds per thread. For warp- and warpgroup-wide instructions, the total divided by the threads."""
        return 0

    @property
    def operands(self) -> dict[str, Value | RegisterArray]:
        """The operands by name, in the order of the wrapper's parameters."""
        return {name: getattr(self, name) for name in self.operand_types}

    @property
    def wrapper_name(self) -> str:
        """The name of the C++ function, see `wrapper`. The modifiers that differ from their defaults are part of it."""
        if self.wrapper:
            return re.sub(r"\W+", "_", self._fill(self.wrapper))
        words = [self.mnemonic]
        for f in fields(self):  # type: ignore[arg-type]
            if f.name in self.operand_types:
                continue
            value = getattr(self, f.name)
            if isinstance(value, bool):
                words += [f.name] if value else []
            elif value is not None and value != f.default:
                words.append(re.sub(r"\W+", "_", str(value)))
        return "_".join(words)

    def text(self) -> str:
        """Return the PTX with `{operand}` and `{result}` placeholders; other attributes are filled in."""
        return self._fill(self.ptx)

    def _fill(self, template: str) -> str:
        """Return the template with attributes in braces, such as `{space}` or `{dtype.name}`, replaced by their values.

        Operands and the result keep their braces, for `instruction_wrapper`.
        """

        def value(match: re.Match[str]) -> str:
            is_placeholder = match[1] == "result" or match[1] in self.operand_types
            return match[0] if is_placeholder else str(attrgetter(match[1])(self))

        return re.sub(r"\{([\w.]+)\}", value, template)

    def simulate(self, m: Any) -> Any:
        """Execute the instruction on the simulator; `m` is a `machine.Machine`.

        Returns the result, or a generator if it may block.
        """
        raise KernelError(f"{self.mnemonic}: simulate() is not implemented")


class Sm90Instruction(Instruction):
    """Base class of instructions that exist from sm_90 on."""

    required_arch = "sm_90"


class InstructionFamily(Instruction):
    """Base class of a family of instructions that share code, such as loads.

    The code uses fields that each instruction declares itself, since their order is that of its operands.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


def emitter(instruction: Callable[P, Instruction]) -> Callable[P, Value]:
    """Return the function that records an instruction of the class `instruction` in the current builder.

    It has the class's parameters and docstring, and returns the instruction's result.
    """

    @wraps(instruction, updated=())
    def emit(*args: P.args, **kwargs: P.kwargs) -> Value:
        return instruction(*args, **kwargs).issue()

    return emit


class Result(Value):
    """The result of an instruction."""

    def __init__(self, instruction: Instruction, scalar_type: ScalarType) -> None:
        super().__init__(scalar_type)
        self.instruction = instruction
