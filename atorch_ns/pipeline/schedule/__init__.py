"""Pipeline schedules: the order of actions on each rank, simulated and chosen."""
