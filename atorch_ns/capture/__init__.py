"""A model seen from outside: its structure, blocks, batches and fake values, without running it."""
