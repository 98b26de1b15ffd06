"""Models of the sweep: where they come from, and how one of them is trained and compared."""
