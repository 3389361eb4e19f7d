"""Work at a client: one visit (`visit.py`), and what it needs."""
