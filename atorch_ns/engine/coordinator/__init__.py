"""Coordinator: hands trials to all ranks and gathers what they report."""
