"""What happens to the accumulator before it is D, and how D reaches memory."""
