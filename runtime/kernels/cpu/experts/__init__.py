"""Mixtures of experts on a CPU, as kernels that a tape can record: the choice, the products and their weighted sum."""
