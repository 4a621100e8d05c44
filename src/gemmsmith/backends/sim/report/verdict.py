"""What a simulated run proves (docs/internals/simulator.md has the argument)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from gemmsmith.lang.instruction import Result
from gemmsmith.lang.location import SourceLocation
from gemmsmith.lang.statements import Assign, Block, Declare, Define, If, children, instructions, uses, walk
from gemmsmith.lang.values import Operation, VariableRead


class TimeDependence(NamedTuple):
    """Something that depends on when instructions execute, though it is no race. `reason` says what."""

    reason: str
    location: SourceLocation

    def __str__(self) -> str:
        return f"{self.location}: {self.reason}"


@dataclass(frozen=True)
class Verdict:
    """What a run says of a kernel and its arguments.

    Attributes:
        scope: "every schedule": no schedule has a hazard or a deadlock, and all compute the same bits. "schedules run":
            the schedules that were run have no hazard; others may execute other instructions or add in another order.
            "hazards": there are some.
        time_dependences: Why other schedules may differ.
        schedules: How many were run.
    """

    scope: Literal["every schedule", "schedules run", "hazards"]
    time_dependences: tuple[TimeDependence, ...] = ()
    schedules: int = 1

    def to_json(self) -> dict[str, Any]:
        """Return it for JSON."""
        reasons = [{"location": f"{x.location}", "reason": x.reason} for x in self.time_dependences]
        return {"verdict": self.scope, "schedules": self.schedules, "time_dependences": reasons}

    def __str__(self) -> str:
        if self.scope == "every schedule":
            return "every schedule is free of hazards and gives the same bits"
        if self.scope == "hazards":
            return "hazards"
        count = f"{self.schedules} schedule{'s' * (self.schedules > 1)}"
        return "\n".join([f"{count} run, free of hazards; others may differ:", *map(str, self.time_dependences)])


def tests_only_skip_waits(block: Block) -> bool:
    """Return whether results of test_wait decide nothing but whether a blocking wait is executed.

    Then they do not make the kernel depend on time: without the test, the wait would end at once. The values derived
    from results of tests may only be operands of further values, or the condition of an `if` around waits.
    """
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
    """Return the value or variable that a statement computes from the result of a test_wait, or None."""
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
