"""Rules: how operators may be divided, by tables and by torch."""
