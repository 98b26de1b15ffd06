"""Training runs that others measured and published, each expressed as model, strategy and cluster."""
