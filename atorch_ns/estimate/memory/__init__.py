"""Peak memory of plans, in parts."""
