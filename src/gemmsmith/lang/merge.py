"""Merges statements that read better as one statement of C++."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from gemmsmith.lang import statements as st
from gemmsmith.lang.instruction import Result
from gemmsmith.lang.types import PRED
from gemmsmith.lang.values import Operation, RegisterRead, Value, VariableRead


def is_pure(value: Value) -> bool:
    """Return whether a value is computed without side effects."""
    return not isinstance(value, Result) or value.instruction.pure


def is_inlined(value: Value, uses: Counter[Value]) -> bool:
    """Return whether a pure value is printed as part of the expression that uses it, not as a named constant.

    So it is if it has no name of its own, and is used once or only reads a variable.
    """
    return not value.name and (uses[value] == 1 or isinstance(value, VariableRead))


def is_live(statement: st.Statement, uses: Counter[Value]) -> bool:
    """Return whether a statement must be printed: it has an effect, or a result that is used."""
    match statement:
        case st.Define(value=value) if is_pure(value):
            return uses[value] > 0
        case st.Call(results=results):
            return any(uses[x] for x in results)
    return True


def _is_line(statement: st.Statement, uses: Counter[Value]) -> bool:
    """Return whether a statement is printed as a line of its own: it is live, and no inlined value."""
    match statement:
        case st.Define(value=value) | st.Call(results=[value]) if is_pure(value) and is_inlined(value, uses):
            return False
    return is_live(statement, uses)


def _last_line(statements: list[st.Statement], uses: Counter[Value]) -> st.Statement | None:
    return next((x for x in reversed(statements) if _is_line(x, uses)), None)


def merge_statements(block: st.Block, uses: Counter[Value]) -> st.Block:
    """Return a block to print, with these statements merged if nothing is printed between them. `uses`: of each value.

    - The declaration of a register that is no array, and its first assignment.
    - An instruction, and the `if` on its result, if that has no other use.
    - An `if`, and the next one on the same condition, since values never change.
    - An `if`, and the only statement inside it, an `if`. One without statements is dropped.
    """
    merged: list[st.Statement] = []
    for statement in block.statements:
        new: st.Statement | None = statement
        match statement:
            case st.AssignRegister(registers=registers, value=value):
                last = _last_line(merged, uses)
                if isinstance(last, st.DeclareRegisters) and last.initial is None and last.is_scalar(registers):
                    merged.remove(last)
                    new = replace(last, initial=value)
            case st.Loop(body=body) | st.Role(body=body):
                new = replace(statement, body=merge_statements(body, uses))
            case st.If():
                new = _merge_if(merged, statement, uses)
        if new:
            new.location = statement.location
            merged.append(new)
    return st.Block(merged)


def _merge_if(merged: list[st.Statement], branch: st.If, uses: Counter[Value]) -> st.If | None:
    """Return an `if` as it is printed after the statements `merged`.

    Returns None if it is empty, or is now part of the last `if` of these. Statements between two merged ones define
    values that are inlined; they move before the merged one.
    """
    condition, then = branch.condition, merge_statements(branch.then, uses)
    otherwise = merge_statements(branch.otherwise, uses) if branch.otherwise else None
    match _last_line(merged, uses):
        case st.Define(value=value) as call if value is condition and is_inlined(value, uses) and not st.defs(call):
            merged.remove(call)
        case st.If(condition=same, otherwise=None) as last if same is condition:
            between = merged[merged.index(last) + 1 :]
            # A read must not move before the first `if`, which may assign what it reads.
            if not any(isinstance(x, st.Define) and isinstance(x.value, (VariableRead, RegisterRead)) for x in between):
                merged.remove(last)
                merged.append(last)
                last.then.statements += then.statements
                last.otherwise = otherwise
                return None
    lines = [x for x in then.statements if _is_line(x, uses)]
    if not lines and not otherwise:
        return None
    match lines:
        case [st.If(otherwise=None) as only] if not otherwise:
            merged += [x for x in then.statements if x is not only]
            both = Operation("&", PRED, (condition, only.condition))
            return st.If(both, only.then, merged=only.merged + 1)
    return st.If(condition, then, otherwise)
