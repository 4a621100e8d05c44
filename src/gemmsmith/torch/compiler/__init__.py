"""Fusing what follows products in graphs of torch.compile."""
