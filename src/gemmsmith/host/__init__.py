"""What a call does on the host: plans, launch sequences, and kernels that make new arrays."""
