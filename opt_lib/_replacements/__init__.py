"""Replacements that ``module_replace`` can put in the place of a model's own modules.

A replacement says by itself what it requires (package, device, dtypes). Those that want the same modules
stand in order of preference: each works on what the earlier ones left, so that torch's own fused kernel,
last, takes over wherever a faster package is absent.
"""
