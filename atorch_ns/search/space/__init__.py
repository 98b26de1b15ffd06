"""The space of a search: which strategies there are, and what each is predicted to cost."""
