"""Which config a problem gets."""
