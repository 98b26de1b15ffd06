"""The package as users install it: without extras, with each, and as files."""
