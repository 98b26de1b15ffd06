"""Plans of pipelines: where a model is cut, in which order stages run, and how many devices divide each."""
