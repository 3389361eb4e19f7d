"""What SampleDP asks of a fit: how many steps it will take, what it is addressed by, and settings that it cannot cover."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EarlyStopping

from fedlightning.algorithm import Client, isolated, move_batch
from fedlightning.callbacks.shared.ledger import Steps
from fedlightning.callbacks.shared.poisson_batches import PoissonBatches
from fedlightning.callbacks.shared.record_gradients import refuse_mixed_records

FEW = 4
"""Records with which a module is tried."""


def add_to(digest: Any, value: Any) -> None:
    """Add what came from the server to a hash: another message has other batches."""
    if isinstance(value, Mapping):
        for name in sorted(value, key=str):
            digest.update(f"|{name}=".encode())
            add_to(digest, value[name])
    elif isinstance(value, list | tuple):
        for one in value:
            add_to(digest, one)
    elif isinstance(value, torch.Tensor):
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    else:
        digest.update(f"|{value!r}".encode())


def added(history: Steps, steps: Sequence[float]) -> list[list[float]]:
    """Return a history with more steps; those of one noise and rate are counted together."""
    counted = {(float(noise), float(rate)): int(count) for noise, rate, count in history}
    noise, rate, count = steps
    counted[noise, rate] = counted.get((noise, rate), 0) + int(count)
    return [[noise, rate, count] for (noise, rate), count in counted.items()]


def visit_of(client: Client, steps: Sequence[float]) -> list[list[float]]:
    """Return the steps of this visit so far, this fit's too."""
    client.scratch["private steps"] = added(client.scratch.get("private steps", []), steps)
    found: list[list[float]] = client.scratch["private steps"]
    return found


def room_for(fits: Callable[[Steps], bool], before: Steps, kind: tuple[float, float], most: int) -> int:
    """Return for how many of `most` more steps, of a noise and a rate, a budget has room."""
    if fits([*before, (*kind, most)]):
        return most
    low, high = 0, most - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits([*before, (*kind, middle)]) else (low, middle - 1)
    return low


def planned_steps(trainer: Any, sampler: PoissonBatches) -> int:
    """Return the optimizer steps of a fit.

    Raises:
        ValueError: If nobody knows.
    """
    batches, done = min(int(trainer.num_training_batches), len(sampler)), int(trainer.global_step)
    if trainer.max_steps is not None and trainer.max_steps >= 0:
        return max(int(trainer.max_steps) - done, 0)
    if trainer.max_epochs is None or trainer.max_epochs < 0:
        raise ValueError("SampleDP has to know how long training goes on. Give the Trainer max_epochs or max_steps.")
    return max(int(trainer.max_epochs) * batches - done, 0)


def try_records(module: LightningModule, trainer: Any, owner: str) -> None:
    """Try a few records of a loader, together and each by itself.

    Raises:
        ValueError: If they are mixed on the way to their gradients.
    """
    loader, convert = trainer.train_dataloader, trainer.precision_plugin.convert_input
    with isolated(0, owner):
        few = [loader.dataset[place] for place in range(min(FEW, len(loader.dataset)))]
    batches = []
    for records in (few, *([one] for one in few[: FEW - 1])):
        with isolated(0, owner, "batch"):
            batches.append(move_batch(module, convert(loader.collate_fn(records))))
    refuse_mixed_records(module, batches[0], owner, alone=batches[1:])


def refuse_other_rounds(without: int, seed: int | None, now: int | None) -> None:
    """Refuse a resumed run with rounds whose noise was none, or another.

    Raises:
        ValueError: Saying which.
    """
    if without:
        raise ValueError(f"{without} rounds of this run were without SampleDP, and are not private. Start a new run.")
    if seed != now:
        raise ValueError(
            f"noise_seed was {seed}, and is {now} now: clients keep the noise of before. Resume with that one, or start a "
            "new run."
        )


def refuse_steps_before(taken: int, history: Steps) -> None:
    """Refuse a plain Trainer's checkpoint with steps that nobody has counted.

    Raises:
        ValueError: With their number.
    """
    counted = int(sum(steps[-1] for steps in history))
    if taken > counted:
        raise ValueError(
            f"SampleDP goes on from {taken} steps, of which it has counted {counted}: the others were without noise. Start "
            "anew, or from weights whose training data need no protection."
        )


def refuse_monitors(trainer: Any) -> None:
    """Refuse learning rates and ends of training that go by numbers of the training data, which have no noise.

    Raises:
        ValueError: With the metric.
    """
    plateaus = [one.monitor for one in trainer.lr_scheduler_configs if one.reduce_on_plateau]
    stops = [one.monitor for one in trainer.callbacks if isinstance(one, EarlyStopping)]
    for monitor in (one for one in (*plateaus, *stops) if not str(one).startswith("val")):
        raise ValueError(
            f"A scheduler or EarlyStopping goes by '{monitor}', and numbers of the training data have no noise: what comes "
            "of it would give them away. Let it go by a metric of validation data, named val..., or leave it out."
        )


def told_of(epsilon: Mapping[str, float], private: bool) -> dict[str, Any]:
    """Return what a run's folder says of what clients have spent."""
    return {
        "private": private,
        "epsilon": max(epsilon.values()) if private else None,
        "unit": "record of a client",
        "against": "everybody who sees what a client sends, the server too; not scores and sample counts",
        "epsilon_by_client": dict(epsilon) if private else {},
    }


def refuse_trainer(module: LightningModule, argument: Any, optimizers: int) -> None:
    """Refuse settings with which a step is not one gradient of one batch.

    Raises:
        ValueError: With the setting.
    """
    if argument("accumulate_grad_batches", 1) not in (None, 1):
        raise ValueError(
            "SampleDP clips and covers every batch by itself: use accumulate_grad_batches=1 and larger batches."
        )
    if argument("precision", "32") in ("bf16-true", "transformer-engine"):
        raise ValueError(
            "SampleDP takes gradients of single records in float32: use precision='bf16-mixed' or '32-true'."
        )
    if "16" in str(argument("precision", "32")) and "bf16" not in str(argument("precision", "32")):
        raise ValueError(
            "SampleDP cannot clip gradients that a scaler has scaled: use precision='bf16-mixed' or '32-true'."
        )
    if not module.automatic_optimization or optimizers > 1:
        raise ValueError(
            f"SampleDP makes the step of one optimizer, and {type(module).__name__} optimizes in another way."
        )


def refuse_forgetting(ledger: str | None, noise_seed: int | None) -> None:
    """Refuse a site that counts only in what it keeps: a server names the visit from which it is to go on.

    Raises:
        ValueError: With the way out.
    """
    if ledger is None and noise_seed is None:
        raise ValueError(
            "SampleDP at sites needs ledger=FOLDER, a folder of each site's own: a server could let a site go on from an "
            "earlier visit, and what was spent since would be forgotten."
        )
