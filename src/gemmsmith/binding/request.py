"""A request: what the caller of `gemm`, `plan` or `simulate` asks for."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gemmsmith.backends import Backend, check_backend
from gemmsmith.core.bools import as_bools
from gemmsmith.core.config import Config
from gemmsmith.core.errors import ArgumentError
from gemmsmith.core.grouping import Grouping


@dataclass(frozen=True, eq=False)
class Request:
    """The arrays and options of out = epilogue(a @ b), each as in `gemm`.

    Attributes:
        a: (m, k) or (batch, m, k), an array, a Spec or an ArrayInfo.
        b: (k, n) or (batch, k, n), likewise.
        operands: All epilogue operands by name, with scales under their operands' names (see `scaling.with_scales`).
        epilogue: A function, a graph, a visitor tree (an object with a method `graph()` that returns one), or None.
        fingerprint: Hash key of the epilogue, whose graph is that of this key, or None for one that is taken now.
        grouping: The groups of a grouped GEMM, whose table is one of `operands`.

    Raises:
        ArgumentError: If an option has a wrong type.
    """

    a: Any
    b: Any
    out: Any = None
    operands: Mapping[str, Any] = field(default_factory=dict)
    epilogue: Any = None
    out_dtype: Any = None
    accumulate: Any = None
    precision: Any = None
    fast_math: bool = True
    deterministic: bool = True
    config: Config | None = None
    batch_invariant: bool = False
    backend: Backend = "auto"
    fingerprint: Hashable = None
    grouping: Grouping | None = None

    def __post_init__(self) -> None:
        for name in ("fast_math", "deterministic", "batch_invariant"):
            if type(value := getattr(self, name)) is not bool:
                object.__setattr__(self, name, *as_bools(**{name: value}))
        check_backend(self.backend)
        if self.config is not None and not isinstance(self.config, Config):
            raise ArgumentError(f"config: got {type(self.config).__name__}; use a gemmsmith.Config")
