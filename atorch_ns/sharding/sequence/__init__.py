"""Sequence parallelism: blocks that run on a part of the sequence, with Ulysses or ring attention."""
