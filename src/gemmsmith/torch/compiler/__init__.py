"""Fusion of epilogues into the matmuls of graphs that torch.compile makes."""
