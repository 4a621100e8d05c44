"""The tile schedulers: which output tiles, or which splits of a tile's K, each CTA computes, and in what order."""
