"""Recording one training step: operators, memory, boundaries of modules."""
