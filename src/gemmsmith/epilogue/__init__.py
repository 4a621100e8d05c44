"""Epilogues: graphs of what happens to the accumulator, their optimization and their lowering to kernels."""

from gemmsmith.lang.location import hide_frames

hide_frames(__file__)
