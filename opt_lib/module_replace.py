"""module_replace: placeholder while being written."""
