"""Fully sharded training, shared by fsdp and zero2."""
