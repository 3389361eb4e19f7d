"""Clients trained and scored in stacks: the parts of the engine `vectorized`."""
