"""From a graph to the instructions of a kernel: pieces of a tile, what they read, and how results leave."""
