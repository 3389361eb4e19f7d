"""The league: many methods on several tasks, each with the same budget of tuning, chosen on validation data."""
