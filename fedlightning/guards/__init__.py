"""Checks before round 1 and of what arrives: a run that succeeds does without them."""
