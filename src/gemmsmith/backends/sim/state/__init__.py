"""State of a grid while it executes: barriers, CTAs, lockstep groups, operations in flight."""
