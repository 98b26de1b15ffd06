"""Trials: worker processes that run one strategy for a few steps on every rank."""
