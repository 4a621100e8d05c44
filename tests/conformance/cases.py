"""All conformance cases."""

from __future__ import annotations

from tests.conformance import copies, multiply, registers, synchronisation, warps

CASES = [*copies.CASES, *synchronisation.CASES, *registers.CASES, *multiply.CASES, *warps.CASES]
