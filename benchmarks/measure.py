"""One measurement in a process of its own: `python -m benchmarks.measure CONTESTANT WORK ROUNDS` prints JSON."""

from __future__ import annotations

import itertools
import json
import resource
import sys
import time

import torch

from benchmarks.contestants import CONTESTANTS
from benchmarks.work import WORKS


def main() -> None:
    """Measure, and print the seconds of each round and the peak memory."""
    contestant, work, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    weight = torch.nn.Parameter(torch.zeros(1))
    torch.optim.SGD([weight], lr=0.1).step()  # torch imports much for a program's first step
    try:
        course = CONTESTANTS[contestant](WORKS[work], rounds)
    except ModuleNotFoundError as error:
        print(json.dumps({"missing": str(error.name)}))
        return
    ended, times = time.perf_counter(), course.times
    print(
        json.dumps(
            {
                "first": times[1] - times[0],
                "all": ended - times[0],
                "steps": course.steps,
                "samples": course.samples,
                "rounds": [after - before for before, after in itertools.pairwise(times[1:])],
                "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            }
        )
    )


if __name__ == "__main__":
    main()
