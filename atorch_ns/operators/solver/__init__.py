"""The solver: costs of operators and conversions, and the fastest plan within the memory."""
