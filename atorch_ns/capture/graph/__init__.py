"""The graph of a model's operators: captured, whole or with few blocks, and named."""
