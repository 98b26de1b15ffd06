"""Numerics: does a strategy train a model as one process does? One reference, one measure, one verdict."""
