"""Speed and memory as ratios to a bare PyTorch loop doing the same steps in the same run: `python -m benchmarks.run`."""
