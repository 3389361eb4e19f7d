"""Scores inside a run: metrics, rows, and the tasks that find them."""
