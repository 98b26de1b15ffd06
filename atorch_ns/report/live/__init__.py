"""Progress of a search while it runs."""
