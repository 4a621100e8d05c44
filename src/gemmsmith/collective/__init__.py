"""What warps do together, written in the kernel language."""
