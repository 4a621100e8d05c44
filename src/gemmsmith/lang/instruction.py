"""The base of an instruction: its operands, its PTX and its meaning, in one small class.

A subclass lists its operands as annotated fields, in the order of its wrapper's parameters:

    class MbarrierArrive(Instruction):
        barrier: u32                      # a value operand
        count: int = 1                    # a modifier: part of the text
        ptx = "mbarrier.arrive.shared::cta.b64 _, [{barrier}], {count};"

        def simulate(self, m): ...

`{name}` in `ptx` becomes the operand's place; a register array becomes its whole vector.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, get_args, get_type_hints

from gemmsmith.core.errors import KernelError
from gemmsmith.lang.recording import recorder
from gemmsmith.lang.types import F32, I32, I64, ORDER, PRED, TENSOR_MAP, U16, U32, U64, Type
from gemmsmith.lang.values import Registers, SelectedRow, Value, as_value


@dataclass(frozen=True)
class RegisterOperand:
    """An operand that is a whole register array; `access` is "in", "out" or "inout"."""

    access: str


pred = Annotated[Any, PRED]
i32 = Annotated[Any, I32]
u32 = Annotated[Any, U32]
i64 = Annotated[Any, I64]
u64 = Annotated[Any, U64]
u16 = Annotated[Any, U16]
f32 = Annotated[Any, F32]
tensor_map = Annotated[Any, TENSOR_MAP]
order = Annotated[Any, ORDER]
registers_in = Annotated[Any, RegisterOperand("in")]
registers_out = Annotated[Any, RegisterOperand("out")]
registers_inout = Annotated[Any, RegisterOperand("inout")]


class Instruction:
    """See the module. `result` is the type it gives, if any; `pure` ones may be folded and dropped."""

    ptx: ClassVar[str] = ""
    cuda: ClassVar[str] = ""
    """A C++ expression instead of PTX."""
    result: ClassVar[Type | None] = None
    pure: ClassVar[bool] = False
    architecture: ClassVar[str] = "sm_80"
    """The least that has it (PTX ISA, \"Target ISA Notes\"); with an \"a\" at its end the only one."""
    operand_types: ClassVar[dict[str, Type | RegisterOperand]] = {}

    def __init_subclass__(cls) -> None:
        dataclass(eq=False)(cls)
        hints = get_type_hints(cls, include_extras=True)
        cls.operand_types = {
            f.name: get_args(hints[f.name])[1]
            for f in fields(cls)  # type: ignore[arg-type]
            if len(get_args(hints[f.name])) == 2 and isinstance(get_args(hints[f.name])[1], (Type, RegisterOperand))
        }

    def __post_init__(self) -> None:
        for name, type in self.operand_types.items():
            given = getattr(self, name)
            if isinstance(type, Type):
                given = getattr(given, "address", given)  # a SharedView stands for its address
                try:
                    setattr(self, name, as_value(given, type))
                except KernelError as error:
                    raise KernelError(f"{self.mnemonic}, operand {name}: {error}") from None
            elif not isinstance(given, Registers) or isinstance(given, SelectedRow):
                raise KernelError(f"{self.mnemonic}, operand {name}: needs a register array, got {given!r}")
        self.check()

    def check(self) -> None:
        """Raises KernelError for modifiers that do not exist. Subclasses override it."""

    # -- recording -----------------------------------------------------------------------------
    @classmethod
    def emit(cls, *args: Any, **kwargs: Any) -> Value:
        """Records the instruction with these operands: what the functions of `hw` are."""
        return cls(*args, **kwargs).issue()

    def issue(self) -> Value:
        """Records the instruction in the current builder; gives its result, if it has one."""
        result: Value = recorder().execute(self)
        return result

    # -- what the printer, the verifier and the simulator ask -------------------------------------
    @property
    def mnemonic(self) -> str:
        """The class name in snake case, and the wrapper's name where modifiers do not vary it."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(self).__name__).lower()

    @property
    def products(self) -> int:
        """How many products a thread sums by it, of numbers of any width; of a whole warp's its share."""
        return 0

    @property
    def modifiers(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in self.operand_types}  # type: ignore[arg-type]

    @property
    def operands(self) -> dict[str, Value | Registers]:
        return {name: getattr(self, name) for name in self.operand_types}

    @property
    def wrapper_name(self) -> str:
        """The C++ function's name: the mnemonic with the modifiers that are set."""
        parts = [self.mnemonic]
        for f in fields(self):  # type: ignore[arg-type]
            if f.name in self.operand_types:
                continue
            value = getattr(self, f.name)
            if isinstance(value, bool):
                parts += [f.name] * value
            elif value is not None and value != f.default:
                parts.append(re.sub(r"\W+", "_", str(value)))
        return "_".join(parts)

    def text(self) -> str:
        """The PTX with `{operand}` places left in; modifiers are filled in."""
        result = self.ptx
        for name, value in self.modifiers.items():
            result = result.replace("{" + name + "}", str(value))
        return result

    def simulate(self, m: Any) -> Any:
        """The meaning on a Machine: gives the result's value, or is a generator where it may block."""
        raise KernelError(f"{self.mnemonic} has no meaning on a machine")


class Result(Value):
    """What an instruction gave."""

    def __init__(self, instruction: Instruction, type: Type) -> None:
        super().__init__(type)
        self.instruction = instruction
