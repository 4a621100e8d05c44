"""Which tile a CTA computes when."""
