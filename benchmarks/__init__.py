"""Speed and memory as ratios to a bare PyTorch loop that takes the same steps in the same run: `python -m benchmarks.run`."""
