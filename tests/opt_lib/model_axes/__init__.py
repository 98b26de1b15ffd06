"""Tests of opt_lib._model_axes."""
