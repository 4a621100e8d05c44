"""Epilogues as graphs of what happens to the accumulator: front ends and passes.

Of the hardware it knows only what the functions of `functions.py` and `row_functions.py` lower to. To import it
registers the records of the package's operations.
"""

from gemmsmith.lang.location import hide_frames

hide_frames(__file__)

from gemmsmith.graph import functions, operations, row_functions  # noqa: E402, F401
