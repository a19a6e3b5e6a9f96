"""The runtime's side of the planner: forecasts, plans and fitted speeds of one run."""
