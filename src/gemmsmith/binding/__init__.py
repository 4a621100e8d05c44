"""From the arguments of a call to a checked problem of strided matrices."""
