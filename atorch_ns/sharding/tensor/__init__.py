"""Tensor parallelism: plans for the layers of a model, found, tested and applied."""
