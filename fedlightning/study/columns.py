"""Words in the columns of `metrics.csv` and `summary.json`; see :class:`fedlightning.scores.rows.Row`."""

LOCAL, POOLED = "local", "pooled"
"""Column `data`: a client's own samples, or the union of all clients' samples."""
PERSONAL, GLOBAL, UNSEEN = "personal", "global", "unseen"
"""Column `model`: a client's model, the server's, or what a client gets that takes no part in training."""
STAGES = ("G", "L1", "L2")
"""Column `stage`: the server's model, a client's model as received, and the same after local training."""
FEWEST_SITES = 3
"""Fewest sites of leave-one-site-out: without one of two, one alone is left, which is no federation."""
