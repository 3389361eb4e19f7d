"""The fast local loop: what Lightning's Trainer does on one device, call for call, and nothing else."""
