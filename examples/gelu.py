"""gelu's tanh approximation written out, which gemmsmith recognizes as one function.

gemmsmith explain --epilogue examples/gelu.py:gelu --operand bias=row --picture gelu.png
"""

from __future__ import annotations

from typing import Any


def gelu(acc: Any, bias: Any) -> Any:
    """Return gelu(acc + bias) for acc (m, n) and bias (n,), in the tanh approximation of torch.nn.functional.gelu."""
    x = acc + bias
    return 0.5 * x * (1 + (0.7978845608 * (x + 0.044715 * x**3)).tanh())
