"""Private names of torch."""
