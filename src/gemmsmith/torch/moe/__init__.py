"""Mixtures of experts: the layer, its experts, and those of models of transformers."""
