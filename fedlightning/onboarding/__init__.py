"""Clients that come when the others have trained: scored, placed, fine-tuned."""
