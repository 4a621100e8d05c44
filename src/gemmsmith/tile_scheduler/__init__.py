"""The tile schedulers: which output tiles, or which splits of a tile's K, each CTA computes, and in what order."""

from gemmsmith.lang.location import hide_frames

hide_frames(__file__)
