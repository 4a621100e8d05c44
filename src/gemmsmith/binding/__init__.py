"""From what the caller said to a checked problem."""
