"""All conformance cases."""

from __future__ import annotations

from tests.conformance import copies, multiply, registers, synchronisation

CASES = [*copies.CASES, *synchronisation.CASES, *registers.CASES, *multiply.CASES]
