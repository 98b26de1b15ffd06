"""Logits of which each rank holds a part of the vocabulary, and losses on them."""
