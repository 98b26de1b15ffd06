"""Capture of a model without running it: its structure, repeated blocks, batches and fake values."""
