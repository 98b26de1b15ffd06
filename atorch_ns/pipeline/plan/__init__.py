"""Plans of pipelines: where a model is cut, in which order stages compute, and how many devices divide each."""
