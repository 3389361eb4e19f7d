"""Work at a client: what its module is built from, one visit (`visit.py`), and what that needs."""
