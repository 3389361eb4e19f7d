"""The server's mean of many models, as a ratio to one pass over flat buffers: `python -m benchmarks.aggregation`.

    python -m benchmarks.aggregation [--models 100] [--repeats 9]

Contestants take turns in one process on one thread. The flat passes hold each model as one vector and add it to a vector
of sums, in float32 and in float64. The server's mean uses float64 so that rounding does not grow with clients.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import fedlightning  # noqa: F401  before lightning

# isort: split
from fedlightning.tensors import State, WeightedMean, pack

SHAPES = {
    "conv1.weight": (32, 1, 5, 5),
    "conv1.bias": (32,),
    "conv2.weight": (64, 32, 5, 5),
    "conv2.bias": (64,),
    "fc1.weight": (512, 1024),
    "fc1.bias": (512,),
    "fc2.weight": (10, 512),
    "fc2.bias": (10,),
}
"""Shapes of a network of 582 026 parameters."""


@dataclass
class Models:
    """The same models in three forms.

    Attributes:
        single: As dicts of single tensors.
        packed: As updates send them.
        flat: As vectors.
    """

    single: list[State]
    packed: list[State]
    flat: list[Tensor]

    @classmethod
    def make(cls, count: int) -> Models:
        """Return `count` random models."""
        generator = torch.Generator().manual_seed(0)
        single = [
            {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()} for _ in range(count)
        ]
        flat = [torch.cat([value.flatten() for value in state.values()]) for state in single]
        return cls(single, [pack(state) for state in single], flat)


def flat_pass(vectors: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the weighted mean, by one in-place addition for each vector."""
    sums, total = torch.zeros_like(vectors[0], dtype=dtype), 0.0
    for index, vector in enumerate(vectors):
        sums.add_(vector, alpha=index + 1.0)
        total += index + 1.0
    return (sums / total).float()


def streaming(states: list[State]) -> State:
    """Return the weighted mean as the server computes it."""
    mean = WeightedMean()
    for index, state in enumerate(states):
        mean.add(state, index + 1.0)
    return mean.result()


def measure(count: int, repeats: int) -> dict[str, float]:
    """Return the median CPU milliseconds of each contestant, after a check that they give the same mean."""
    models = Models.make(count)
    contestants: dict[str, Callable[[], object]] = {
        "flat pass, float64": lambda: flat_pass(models.flat, torch.float64),
        "flat pass, float32": lambda: flat_pass(models.flat, torch.float32),
        "server's mean": lambda: streaming(models.packed),
        "server's mean, tensors apart": lambda: streaming(models.single),
    }
    found = torch.cat([value.flatten() for value in streaming(models.packed).values()])
    assert torch.equal(found, flat_pass(models.flat, torch.float64))
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(repeats):
        for name, act in contestants.items():
            started = time.process_time()
            act()
            taken[name].append(1000 * (time.process_time() - started))
    return {name: statistics.median(values) for name, values in taken.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    costs = measure(options.models, options.repeats)
    shown = Table("mean of models", "ms", "ratio", title=f"{options.models} models of 582 026 parameters")
    for name, cost in costs.items():
        shown.add_row(name, f"{cost:.1f}", f"{cost / costs['flat pass, float64']:.2f}")
    Console().print(shown)


if __name__ == "__main__":
    main()
