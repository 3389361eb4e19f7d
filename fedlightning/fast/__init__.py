"""The fast local loop: the calls that Lightning's Trainer makes on one device, in its order, and nothing else."""
