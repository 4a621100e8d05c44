"""The kernels of mixtures of experts beside GEMMs: they select experts, sort slots by them, and sum a token's slots."""
