"""Types of arrays for annotations: what a type checker accepts as an array, without any array library."""

from __future__ import annotations

from typing import Any, Protocol, SupportsFloat, TypeAlias, TypeVar

from gemmsmith.arrays.array_info import Spec


class SupportsDLPack(Protocol):
    """An array that can be exchanged by DLPack: of numpy, torch, CuPy, JAX."""

    def __dlpack_device__(self) -> Any: ...  # not __dlpack__, which numpy declares for its own dtypes only


class SupportsCudaArrayInterface(Protocol):
    """An array on a GPU that describes itself: of CuPy, Numba, torch."""

    @property
    def __cuda_array_interface__(self) -> Any: ...


ArrayLike: TypeAlias = SupportsDLPack | SupportsCudaArrayInterface | Spec
"""An array of any library, or a `Spec`, a stand-in for one."""
Operand: TypeAlias = ArrayLike | SupportsFloat
"""An operand of an epilogue: an array or a number."""
Pair: TypeAlias = tuple[ArrayLike, ArrayLike]
"""Two arrays b that are multiplied as one, or their scales."""
ArrayT = TypeVar("ArrayT", bound=ArrayLike)
"""The type of a, which a result without an epilogue has, too."""
