"""Running batches through the stages of a pipeline."""
