"""The shapes and the further arrays of a product that is not torch.matmul's, such as a grouped GEMM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gemmsmith.core.dtypes import DType
from gemmsmith.core.errors import ConfigError

Role = Literal["a", "b"]
"""Whose rows an operand has, seen as (M or N) x K: those of A are D's rows, those of B are D's columns."""
ROLES: tuple[Role, Role] = "a", "b"


@dataclass(frozen=True)
class Product:
    """A product whose kernel reads further arrays, or whose a, b and result have shapes of their own.

    Attributes:
        name: What computes it, for messages.
        arrays: Dtypes, by name, of the contiguous arrays that the kernel reads besides A, B and the epilogue's
            operands, such as the ends of groups or the indices of rows. Callers pass them by name.
        shapes: The shapes of a, b, each of `arrays`, and the product, a letter per dimension as in einsum, such as
            "mk,gkn,g->mn"; empty: as in torch.matmul.
        is_transposable: D^T = B^T @ A^T can be computed instead.

    Raises:
        ConfigError: The shapes do not fit the arrays.
    """

    name: str
    arrays: Mapping[str, DType]
    shapes: str
    is_transposable: bool = False

    def __post_init__(self) -> None:
        """Check that `shapes` fits `arrays`. Raises ConfigError.

        The result has two or three distinct letters, all from the inputs.
        """
        inputs, _, output = self.shapes.partition("->")
        terms = inputs.split(",")
        fits = len(terms) == 2 + len(self.arrays) and all(x.isalpha() for x in terms) and set(output) <= set(inputs)
        if not (fits and len(set(output)) == len(output) in (2, 3)):
            raise ConfigError(
                f"shapes: got {self.shapes!r} with arrays {tuple(self.arrays)}; use letters for a, b, each array and "
                'the product, such as "mk,gkn,g->mn"'
            )
        for name, dtype in self.arrays.items():
            if not isinstance(dtype, DType):
                raise ConfigError(f"arrays: got {dtype!r} for {name}; use a DType of gemmsmith.core.dtypes")

    def has_operand_rows(self, operand: str) -> bool:
        """Return whether the rows of the operand "a" are the product's rows, or the columns of "b" its columns.

        Only then can a scale for each of them be applied to the product instead, by the epilogue.
        """
        a, b = self.shapes.split("->")[0].split(",")[:2]
        return (a[-2] if operand == "a" else b[-1]) == self.shapes[-2 if operand == "a" else -1]
