"""Optimizer of a job: made with it or after it, around the user's class, with fp32 masters and loss scale."""
