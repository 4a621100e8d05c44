"""Collectives: mainloops, pipelines and accumulators of cooperating warps, written in the kernel language."""

from gemmsmith.lang.location import hide_frames

hide_frames(__file__)
