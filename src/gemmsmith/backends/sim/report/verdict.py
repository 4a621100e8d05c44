"""What a simulated run proves (docs/internals/simulator.md has the argument)."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from gemmsmith.lang.instruction import Result
from gemmsmith.lang.location import SourceLocation
from gemmsmith.lang.statements import Assign, Block, Declare, Define, If, children, instructions, uses, walk
from gemmsmith.lang.values import Operation, VariableRead


class Verdict(Enum):
    """What a run says of the kernel for its arguments."""

    EVERY_SCHEDULE = "every schedule"
    """No schedule has a hazard or a deadlock, and all compute the same bits."""
    SCHEDULES_RUN = "schedules run"
    """No hazard in the schedules that were run. Others may execute other instructions, or add in another order."""
    HAZARDS = "hazards"
    """Hazards were found."""


class TimeDependence(NamedTuple):
    """Something that depends on when instructions execute, although they do not race."""

    reason: str
    location: SourceLocation

    def __str__(self) -> str:
        return f"{self.location}: {self.reason}"


def verdict_of(has_hazards: bool, time_dependences: list[TimeDependence]) -> Verdict:
    """Return the verdict on a run."""
    if has_hazards:
        return Verdict.HAZARDS
    return Verdict.SCHEDULES_RUN if time_dependences else Verdict.EVERY_SCHEDULE


def tests_only_skip_waits(block: Block) -> bool:
    """Return whether results of test_wait decide nothing but whether a blocking wait is executed."""
    derived: set[object] = set()
    statements, count = list(walk(block)), -1
    while count < len(derived):  # loops carry variables back
        count = len(derived)
        derived.update(x for statement in statements if (x := _derived(statement, derived)) is not None)
    for statement in statements:
        match statement:
            case If(condition=condition) if condition in derived:
                for child in children(statement):
                    waits = [instruction.waits_for_threads for instruction, _ in instructions(child)]
                    if not all(waits) or len(waits) < sum(1 for x in walk(child) if not isinstance(x, Define)):
                        return False
            case Define(value=Operation() | VariableRead()) | Declare() | Assign():
                pass
            case _ if not derived.isdisjoint(uses(statement)):
                return False
    return True


def _derived(statement: object, derived: set[object]) -> object:
    """Return the value or variable that a statement sets from the result of a test, if it does."""
    match statement:
        case Define(value=Result(instruction=instruction) as value) if instruction.tests_wait:
            return value
        case Define(value=VariableRead(variable=variable) as value) if variable in derived:
            return value
        case Define(value=Operation(operands=operands) as value) if not derived.isdisjoint(operands):
            return value
        case Declare(variable=variable, initial=source) | Assign(variable=variable, value=source) if source in derived:
            return variable
    return None
