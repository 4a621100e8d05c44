"""Epilogues as graphs of what happens to the accumulator: front ends and passes.

Of the hardware it knows only what the functions of `functions.py` lower to.
"""

from gemmsmith.lang.location import hide_frames

hide_frames(__file__)
