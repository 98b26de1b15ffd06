"""Optimizer of a job: made with it or after it, around the user's class, with fp32 copies of weights and scaled losses."""
