"""All conformance cases."""

from __future__ import annotations

from tests.conformance import copies, multiply, registers, synchronization, warps

CASES = [*copies.CASES, *synchronization.CASES, *registers.CASES, *multiply.CASES, *warps.CASES]
