"""Step time of plans, in parts."""
