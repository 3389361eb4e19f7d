"""The server side: rounds, models, the mean of updates, the stages at which models are scored, and what attaches."""
