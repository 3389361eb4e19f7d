"""Training and evaluation of clients in stacks: the parts of the engine `vectorized`."""
