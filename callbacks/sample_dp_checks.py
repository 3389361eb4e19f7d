"""What SampleDP refuses: what would leave without noise, and settings that it cannot cover.

What SampleDP asks of a fit: how many steps it will take, and whose records are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from string import Formatter
from typing import Any

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder

from fedlightning.algorithm import Client, Extra, FederatedCallback, Setup, UpdateCodec, isolated, probes, requires
from fedlightning.callbacks.shared.ledger import Steps
from fedlightning.callbacks.shared.poisson_batches import PoissonBatches, refuse_undrawable
from fedlightning.callbacks.shared.record_gradients import refuse_mixed_records
from fedlightning.callbacks.shared.spending import merged


def added(history: Steps, steps: Sequence[float]) -> list[list[float]]:
    """Return a history with more steps; those of one noise and rate are counted together."""
    return [list(step) for step in merged([*history, steps])]


def count(client: Client, key: str, steps: Sequence[float]) -> None:
    """Add steps to what a client remembers, of all visits and of this one."""
    kept, visit = client.state[key], added(client.scratch.get("private steps", []), steps)
    client.scratch["private steps"] = visit
    client.state[key] = kept | {"history": added(kept["history"], steps), "visit": visit}


TRIED_RECORDS = 4
"""Records with which a module is tried."""


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
        few = [loader.dataset[place] for place in range(min(TRIED_RECORDS, len(loader.dataset)))]
    batches = []
    for records in (few, *([record] for record in few[: TRIED_RECORDS - 1])):
        with isolated(0, owner, "batch"):
            batches.append(probes.move_batch(module, convert(loader.collate_fn(records))))
    refuse_mixed_records(module, batches[0], owner, alone=batches[1:])


def patients_of(client: Client) -> np.ndarray:
    """Return the group of each of a client's training samples.

    Raises:
        ValueError: If nobody knows, of one sample or of all.
    """
    groups = client.sample_groups
    if groups is None:
        raise ValueError(NO_GROUPS)
    missing = sum(name is None or name != name for name in groups.tolist())
    if missing:
        raise ValueError(
            f"Of {missing} training samples of client '{client.id}' nobody knows whose they are, and "
            "SampleDP(unit='patient') covers patients. Name their groups, or leave them out."
        )
    return groups


NO_GROUPS = (
    "SampleDP(unit='patient') has to know whose a record is, and the data module knows no groups. Give it group=..., or take "
    "unit='record'."
)
OF_BATCHES = (
    *("on_train_batch_start", "on_train_batch_end", "on_before_backward", "on_after_backward"),
    "on_before_optimizer_step",
)
"""Hooks of Lightning's that are given batches, losses or gradients without noise, or may put them into a step."""


def refuse_uncovered(owner: FederatedCallback, setup: Setup, solves: bool, unit: str) -> None:
    """Refuse callbacks that send, or make something of batches, that gets no noise; and models that mix records.

    Args:
        owner: SampleDP.
        setup: The federation.
        solves: Whether it solves for the noise.
        unit: What it hides.

    Raises:
        ValueError: With a way out.
    """
    for other in (part for part in setup.callbacks if part is not owner):
        up = {} if isinstance(other, UpdateCodec) else other.wire(setup.module).up  # a code is of what is covered
        by_class = [name for name, spec in up.items() if Extra.of(spec).by_class]
        if by_class and unit == "patient":
            raise ValueError(
                f"{other.key} sends means by class, in which SampleDP counts records: unit='patient' does not cover them. "
                "Take unit='record', or another method."
            )
        if solves and (by_class or other.claims("local_phases")):
            raise ValueError(
                "SampleDP(epsilon=...) solves for the noise of visits of one fit, and here visits have several, or release "
                "means by class too. Give noise_multiplier too: epsilon is then what no client exceeds."
            )
        extras = sorted(up.keys() - set(by_class))
        if extras:
            raise ValueError(
                f"{other.key} takes {', '.join(extras)} from clients, which SampleDP does not cover with noise. Remove "
                "one of the two."
            )
        seen = (name for name in OF_BATCHES if getattr(type(other), name) is not getattr(Callback, name))
        hook = next(seen, None)
        if hook is not None and not other.facts.keeps:
            raise ValueError(
                f"{other.key} sees batches or gradients of training ({hook}), and what it makes of them SampleDP does not "
                "cover with noise. Remove one of the two."
            )
    if unit == "patient" and not setup.data.knows_groups():
        raise ValueError(NO_GROUPS)
    refuse_coupled(setup.data.coupled_records())
    refuse_finders(setup.run.lightning_callbacks)
    refuse_trainer(setup.module, setup.run.trainer_arguments.get, len(setup.optimizers))
    for loader in setup.data.train_loaders():
        refuse_undrawable(loader, owner.key, unit == "patient")
    batch = setup.data.first_batch()
    if batch is not None:
        refuse_mixed_records(setup.module, probes.move_batch(setup.module, batch), owner.key)


def refuse_finders(callbacks: Iterable[Callback]) -> None:
    """Refuse Lightning callbacks, also those of its Tuner, that train on the data before the fit begins.

    Raises:
        ValueError: Naming one.
    """
    for part in callbacks:
        if isinstance(part, LearningRateFinder | BatchSizeFinder):
            raise ValueError(
                f"{type(part).__name__} takes steps on training data that SampleDP neither covers with noise nor counts. "
                "Choose the value on data that need no protection, and remove one of the two."
            )


def refuse_coupled(why: str) -> None:
    """Refuse data of which one record moves the features of others: its gradient alone would be covered.

    Args:
        why: What the data module says of it (`coupled_records`); empty: it does not.

    Raises:
        ValueError: With a way out.
    """
    if why:
        raise ValueError(f"SampleDP covers what each record does to a step, and here one moves others' features: {why}")


def refuse_plain(trainer: Trainer, module: LightningModule, unit: str) -> None:
    """Refuse a plain Trainer whose steps cannot be covered.

    Raises:
        ValueError: With a way out.
    """
    if unit == "patient":
        raise ValueError("In a plain Trainer nobody knows whose a record is: unit='patient' takes a federation.")
    if reload := trainer.reload_dataloaders_every_n_epochs:  # type: ignore[attr-defined]
        raise ValueError(f"SampleDP draws all batches of a fit: reload_dataloaders_every_n_epochs={reload} is 0 then.")
    entries = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    if others := sorted(module.state_dict().keys() - {name for name, _ in entries}):
        raise ValueError(
            f"Checkpoints would hold '{others[0]}', no parameter or buffer (a metric's state, get_extra_state): what "
            "training writes into it has no noise. Leave it out of the state (metric.persistent(False))."
        )
    data = getattr(trainer, "datamodule", None)
    refuse_coupled(str(getattr(data, "coupling", getattr(data, "coupled_records", ""))))
    refuse_trainer(module, lambda name, default: getattr(trainer, name, default), len(trainer.optimizers))
    if trainer.world_size > 1:
        raise ValueError(f"SampleDP trains on one device, and here are {trainer.world_size}. Use devices=1.")


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


def refuse_another_fit(history: Steps, goes_on: bool) -> None:
    """Refuse to count two fits as one: steps would be forgotten, or others taken for them.

    Args:
        history: Steps that are counted.
        goes_on: Whether a fit goes on where the count has come to.

    Raises:
        ValueError: With the way out.
    """
    if history and not goes_on:
        raise ValueError(
            f"SampleDP has counted {int(sum(steps[-1] for steps in history))} steps of another fit. Give this one a "
            "Trainer and a SampleDP of its own; with ledger=FOLDER, what both spend on the same data adds up."
        )


def refuse_monitors(trainer: Any, module: LightningModule, drop: bool) -> Callable[[], None]:
    """Let training log nothing that a learning rate, an end of training or a choice of checkpoints goes by.

    Numbers of training data have no noise, whatever they are called. So each is looked at when it is logged.

    Args:
        trainer: The Trainer.
        module: The module, whose `log` raises ValueError from here on if training calls it with such a metric.
        drop: Whether nothing at all is logged of training: no callback of a federation can go by it then.

    Returns:
        Puts back the `log` that was there.
    """
    plateaus = [config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
    watching = [(getattr(part, "monitor", None), getattr(part, "filename", None) or "") for part in trainer.callbacks]
    in_names = [field for _, filename in watching for _, field, _, _ in Formatter().parse(filename)]
    monitored = {str(name) for name in (*plateaus, *(monitor for monitor, _ in watching), *in_names) if name}
    log, before = module.log, vars(module).get("log")

    def checked(name: str, *values: Any, **options: Any) -> None:
        logged_monitors = monitored & {name, f"{name}_step", f"{name}_epoch"} if trainer.training else ()
        for monitor in logged_monitors:
            raise ValueError(
                f"A scheduler, EarlyStopping or ModelCheckpoint (or its filename) goes by '{monitor}', which training logs, "
                "and its numbers have no noise. Let it go by a metric that only validation logs, or leave it out."
            )
        if not (drop and trainer.training):
            log(name, *values, **options)

    def restore() -> None:
        if before is None:
            vars(module).pop("log", None)
        else:
            vars(module)["log"] = before

    vars(module)["log"] = checked
    return restore


def refuse_trainer(module: LightningModule, argument: Any, optimizers: int) -> None:
    """Refuse settings with which a step is not one gradient of one batch.

    Raises:
        ValueError: With the setting.
    """
    if argument("accumulate_grad_batches", 1) not in (None, 1):
        raise ValueError(
            "SampleDP clips and covers each batch alone: use accumulate_grad_batches=1 and larger batches."
        )
    precision = str(argument("precision", "32"))
    if precision in ("bf16-true", "transformer-engine") or ("16" in precision and "bf16" not in precision):
        raise ValueError(
            f"SampleDP clips gradients of single records in float32, unscaled, and got precision='{precision}'. Use "
            "'bf16-mixed' or '32-true'."
        )
    if not module.automatic_optimization or optimizers > 1:
        raise ValueError(f"SampleDP makes one optimizer's step, and {type(module).__name__} optimizes in another way.")


def refuse_union(ledger: str | None, setup: Setup) -> None:
    """Refuse a ledger beside a method that trains on all clients' data as those of one: it counts client by client.

    Raises:
        ValueError: With the way out.
    """
    for other in setup.callbacks if ledger is not None else ():
        if any(isinstance(need, requires.PooledSplit) and need.of == "train" for need in other.facts.requires):
            raise ValueError(
                f"{other.key} trains on all clients' data as those of one, and a ledger has a file for each client, which "
                "would not count these steps. Leave ledger out, so that the run counts alone, or take another method."
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
