"""Helpers of the methods that divide a model over axes of the mesh."""
