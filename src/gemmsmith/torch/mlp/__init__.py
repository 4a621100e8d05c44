"""Linear layers and MLPs, gated or not."""
