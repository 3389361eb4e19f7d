"""FedAvg on one GPU beside hand-written loops that take the same steps: `python -m benchmarks.gpu WORK`.

    python -m benchmarks.gpu WORK [--device cpu --tiny] [--contestants "bare|stacked"]

Each line is the JSON of one contestant: seconds of each round after the first, samples a second, memory, the loss of the
final model, and whether that is the bare loop's loss. All have the same batches in the same order, so the loss may differ by
rounding alone; with dropout by its random numbers too.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedlightning  # noqa: F401  before lightning

# isort: split
from lightning.pytorch import Callback, Trainer

from benchmarks.engines import Data, Module, train
from benchmarks.work import Work, logistic
from fedlightning.datamodules import AddressedSampler
from fedlightning.seeding import first_of_permutation, generator


def tutorial_cnn() -> nn.Module:
    """Return the network of torch's tutorial on CIFAR-10: convolutions 6, 16; linear layers 120, 84."""
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def dropout_cnn() -> nn.Module:
    """Return the network of pfl's benchmark: convolutions 32, 64; a linear layer 128; dropout."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)),
        *(nn.Flatten(), nn.Linear(64 * 14 * 14, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)),
    )


def resnet18() -> nn.Module:
    """Return a ResNet-18 with group normalisation."""
    from torchvision.models import resnet18 as make

    net: nn.Module = make(num_classes=10, norm_layer=partial(nn.GroupNorm, 32))
    return net


def vit_tiny() -> nn.Module:
    """Return timm's ViT-Tiny."""
    import timm

    net: nn.Module = timm.create_model("vit_tiny_patch16_224", num_classes=10)
    return net


@dataclass(frozen=True)
class Row:
    """A work as it is run.

    Attributes:
        work: The federation.
        rounds: Number of counted rounds, after one that warms up.
        contestants: Names in :data:`CONTESTANTS`, the bare loop first.
        precision: Of training.
        tolerance: Relative difference of the loss from the bare loop's that is rounding.
        tiny: What is replaced in a rehearsal.
    """

    work: Work
    rounds: int
    contestants: tuple[str, ...]
    precision: str = "32-true"
    tolerance: float = 0.02
    tiny: dict[str, Any] = field(default_factory=dict)


CIFAR = (3, 32, 32)
FEW = {"sizes": (20,) * 4, "batch": 10, "participants": None}
ROWS = {
    "blazefl": Row(
        Work(tutorial_cnn, (500,) * 100, lr=0.1, shape=CIFAR, epochs=5),
        2,
        ("bare", "bare graph", "sequential", "stacked", "stacked, five rounds"),
        tiny=FEW | {"epochs": 2},
    ),
    "resnet": Row(
        Work(resnet18, (640,) * 10, batch=32, lr=0.01, shape=CIFAR),
        4,
        ("bare", "sequential"),
        tiny=FEW | {"sizes": (20,) * 2},
    ),
    "pfl": Row(
        Work(dropout_cnn, (50,) * 1000, batch=10, lr=0.1, participants=50, shape=CIFAR),
        29,
        ("bare", "bare graph", "sequential", "stacked", "pfl"),
        tolerance=0.2,
        tiny=FEW,
    ),
    "flute": Row(
        Work(logistic, (60,) * 1000, batch=10, lr=0.03, participants=10),
        99,
        ("bare", "bare graph", "sequential", "stacked"),
        tiny={"sizes": (20,) * 30},
    ),
    "vit": Row(
        Work(vit_tiny, (800,) * 8, batch=32, lr=0.01, shape=(3, 224, 224)),
        1,
        ("bare", "sequential", "lightning"),
        precision="bf16-mixed",
        tiny={"sizes": (4, 4), "batch": 2},
    ),
}
"""Name -> row, the most telling first."""


class Loop:
    """FedAvg by hand with data and models on the device, in the batches that the federation draws for the same seed.

    Orders and participants are drawn before the clock starts.

    Args:
        work: The federation.
        device: Where it trains.
        precision: `"32-true"` or `"bf16-mixed"`.
        graph: Whether a whole optimizer step is captured once as a CUDA graph, and replayed.
    """

    def __init__(self, work: Work, device: torch.device, precision: str, graph: bool = False) -> None:
        self.work, self.device, self.graph = work, device, graph
        torch.manual_seed(0)
        self.model = work.make().to(device)
        self.model.train()
        self.parameters = list(self.model.parameters())
        self.state = [parameter.detach().clone() for parameter in self.parameters]
        x, y = max(work.data(), key=lambda pair: len(pair[1]))
        self.x, self.y = x.to(device), y.to(device)
        self.autocast = (
            partial(torch.autocast, device.type, torch.bfloat16) if precision == "bf16-mixed" else nullcontext
        )
        self.optimizer = torch.optim.SGD(self.parameters, lr=work.lr)
        self.rows = torch.zeros(work.batch, dtype=torch.int64, device=device)
        if graph:
            self.replayed = self._capture()

    def plan(self, number: int) -> list[tuple[int, list[Tensor]]]:
        """Return the clients of a round, and the rows of each of their steps."""
        work = self.work
        chosen = list(range(len(work.sizes)))
        if work.participants is not None:
            draws = generator(0, number, "server", "participation")
            chosen = sorted(first_of_permutation(len(work.sizes), work.participants, draws))
        plan = []
        for client in chosen:
            sampler = AddressedSampler(work.sizes[client], str(client))
            sampler.start(seed=0, round=number, epochs_per_round=work.epochs)
            steps: list[Tensor] = []
            for epoch in range(work.epochs):
                sampler.set_epoch(epoch)
                steps += sampler.permutation().to(self.device).split(work.batch)
            plan.append((client, steps))
        return plan

    def step(self, rows: Tensor) -> None:
        """Take one optimizer step."""
        self.optimizer.zero_grad()
        with self.autocast():
            loss = F.cross_entropy(self.model(self.x.index_select(0, rows)), self.y.index_select(0, rows))
        loss.backward()
        self.optimizer.step()

    def _capture(self) -> Any:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step(self.rows)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad()
        with torch.cuda.graph(graph):
            self.step(self.rows)
        return graph

    def round(self, plan: list[tuple[int, list[Tensor]]]) -> None:
        """Train every participant of a plan and average."""
        sizes = self.work.sizes
        sums = [torch.zeros_like(value, dtype=torch.float64) for value in self.state]
        with torch.no_grad():
            for client, steps in plan:
                torch._foreach_copy_(self.parameters, self.state)
                with torch.enable_grad():
                    for rows in steps:
                        if self.graph:
                            self.rows.copy_(rows)
                            self.replayed.replay()
                        else:
                            self.step(rows)
                for accumulated, parameter in zip(sums, self.parameters, strict=True):
                    accumulated.add_(parameter, alpha=sizes[client])
            total = sum(sizes[client] for client, _ in plan)
            self.state = [(accumulated / total).float() for accumulated in sums]
            torch._foreach_copy_(self.parameters, self.state)


Result = tuple[list[float], nn.Module]
"""Seconds of all rounds, the first too, and the final network."""


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def by_hand(row: Row, device: torch.device, graph: bool = False) -> Result:
    """Train with the hand-written loop."""
    if graph and device.type != "cuda":
        raise ModuleNotFoundError("CUDA graphs need a GPU", name="CUDA graphs")
    loop = Loop(row.work, device, row.precision, graph)
    seconds = []
    for number in range(row.rounds + 1):
        plan = loop.plan(number)
        synchronize(device)
        started = time.perf_counter()
        loop.round(plan)
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return seconds, loop.model


def ours(row: Row, device: torch.device, **options: Any) -> Result:
    """Train with `FederatedTrainer` and FedAvg."""
    times, trainer = train(
        row.work,
        row.rounds + 1,
        **{"accelerator": device.type, "precision": row.precision, "local_epochs": row.work.epochs} | options,
    )
    assert trainer.server is not None and not trainer.server.failures
    net = row.work.make()
    net.load_state_dict({name.removeprefix("net."): value for name, value in trainer.server.model.items()})
    return [after - before for before, after in itertools.pairwise(times)], net


def lightning(row: Row, device: torch.device) -> Result:
    """Train one model with Lightning's Trainer for as many steps, with the loader of a client: nothing is averaged."""
    data = Data(row.work)
    data.setup("fit")
    module = Module(row.work.make, row.work.lr)
    clients = len(row.work.sizes)
    trainer = Trainer(
        accelerator=device.type,
        devices=1,
        precision=row.precision,
        max_epochs=clients * (row.rounds + 1),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Epochs()],
    )
    Epochs.times[:] = [time.perf_counter()]
    trainer.fit(module, data.client_dataloader("0", "train"))
    rounds = Epochs.times[::clients]
    return [after - before for before, after in itertools.pairwise(rounds)], module.net


def pfl(row: Row, device: torch.device) -> Result:
    """Train with Apple's pfl-research, if it is installed; it chooses the device itself. Its model is not looked at."""
    from benchmarks.contestants import pfl as contestant

    times = contestant(row.work, row.rounds + 1).times
    return [after - before for before, after in itertools.pairwise(times)], nn.Identity()


class Epochs(Callback):
    """Notes when epochs end."""

    times: list[float] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        synchronize(pl_module.device)
        self.times.append(time.perf_counter())


CONTESTANTS: dict[str, Callable[[Row, torch.device], Result]] = {
    "bare": by_hand,
    "bare graph": partial(by_hand, graph=True),
    "sequential": ours,
    "stacked": partial(ours, engine="vectorized"),
    "stacked, five rounds": lambda row, device: ours(replace(row, rounds=5), device, engine="vectorized"),
    "lightning": lightning,
    "pfl": pfl,
}


@torch.no_grad()
def loss_of(net: nn.Module, work: Work, device: torch.device) -> float:
    """Return the mean loss on the largest client's samples, in evaluation mode."""
    x, y = max(work.data(), key=lambda pair: len(pair[1]))
    net = net.to(device).eval()
    parts = zip(x.split(200), y.split(200), strict=True)
    losses = [F.cross_entropy(net(a.to(device)), b.to(device), reduction="sum").item() for a, b in parts]
    return sum(losses) / len(y)


def measure(name: str, row: Row, device: torch.device) -> dict[str, Any]:
    """Run one contestant: what it took, or why it did not run."""
    work = row.work
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    try:
        seconds, net = CONTESTANTS[name](row, device)
    except ModuleNotFoundError as error:
        return {"error": f"{error.name} is not there"}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    samples = work.epochs * sum(sorted(work.sizes)[-(work.participants or len(work.sizes)) :])
    median = statistics.median(seconds[1:])
    found: dict[str, Any] = {
        "first_s": seconds[0],
        "rounds_s": seconds[1:],
        "median_s": median,
        "samples_per_s": samples / median,
        "all_s": time.perf_counter() - started,
    }
    if device.type == "cuda":
        found["peak_gpu_mb"] = torch.cuda.max_memory_allocated() / 2**20
    if name not in ("lightning", "pfl", "stacked, five rounds"):
        found["loss"] = loss_of(net, work, device)
    return found


def main() -> None:
    """Measure, and print a line of JSON for each contestant."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("work", choices=ROWS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal: few samples, one counted round")
    parser.add_argument("--contestants", help="of the row's, with | between; the bare loop always runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
    row, device = ROWS[options.work], torch.device(options.device)
    if options.tiny:
        row = replace(row, work=replace(row.work, **row.tiny), rounds=1)
    card = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    wanted = options.contestants.split("|") if options.contestants else row.contestants
    bare: dict[str, Any] = {}
    for name in row.contestants:
        if name != "bare" and name not in wanted:
            continue
        found = measure(name, row, device)
        bare = bare or found
        if "median_s" in found and "median_s" in bare:
            found["ratio_to_bare"] = found["median_s"] / bare["median_s"]
        if "loss" in found and "loss" in bare:
            found["same_loss"] = abs(found["loss"] - bare["loss"]) <= row.tolerance * bare["loss"]
        line = {"work": options.work, "contestant": name, "device": card, "tiny": options.tiny, **found}
        print(json.dumps(line), flush=True)
        state = found.get("error") or f"{found['median_s']:.3f} s a round, {found.get('ratio_to_bare', 1):.2f} of bare"
        loss = "" if found.get("same_loss", True) else f", ANOTHER LOSS: {found['loss']:.4f}, bare {bare['loss']:.4f}"
        print(f"{options.work}: {name}: {state}{loss}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
