"""Clients in worker processes, on this machine or on others with Ray."""
