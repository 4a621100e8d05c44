"""Collectives: mainloops, pipelines and accumulators of cooperating warps, written in the kernel language."""
