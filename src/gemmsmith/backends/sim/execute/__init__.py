"""Execution of statements and instructions by a lockstep group."""
