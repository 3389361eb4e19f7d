"""What SampleDP refuses: what would leave without noise, and settings that it cannot cover.

What SampleDP's steps spend: how many fit into a budget, what was spent before, and what a run's folder says of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder

from fedlightning.algorithm import Client, Extra, FederatedCallback, Setup, UpdateCodec, probes
from fedlightning.callbacks.shared.ledger import Ledger, Steps, forgotten
from fedlightning.callbacks.shared.poisson_batches import refuse_undrawable
from fedlightning.callbacks.shared.record_gradients import refuse_mixed_records
from fedlightning.callbacks.shared.spending import merged, most_that, solved_noise, spent_by


@dataclass(frozen=True)
class StepBudget:
    """The budget of a client's data, or of a plain Trainer's.

    Attributes:
        epsilon: What may be spent; `None`: any.
        delta: Probability with which the guarantee may fail.
        accountant: Name of Opacus' accountant.
        noise_multiplier: The one that was given; `None`: it is solved.
        ledger: Folder of the ledger; `None`: each run counts alone.
        unit: What is hidden, a `"record"` or a `"patient"`.
    """

    epsilon: float | None
    delta: float
    accountant: str
    noise_multiplier: float | None
    ledger: str | None
    unit: str = "record"

    def of(self, history: Steps) -> float:
        """Return what steps spend."""
        steps = merged(history)
        return spent_by(self.accountant, self.delta, steps) if steps else 0.0

    def fits(self, history: Steps) -> bool:
        """Return whether there is room for all of these steps."""
        return self.epsilon is None or self.of(history) <= self.epsilon * (1 + 1e-9)

    def noise(self, history: Steps, rate: float, steps: int) -> float:
        """Return the noise multiplier: the one given, that of the fits before, or one with which so many steps fit."""
        if self.noise_multiplier is not None:
            return self.noise_multiplier
        if history:
            return float(history[-1][0])
        assert self.epsilon is not None
        return solved_noise(self.epsilon, self.delta, rate, steps, self.accountant)

    def file(self, client: Client | None, secret: str = "", units: int = 0) -> Ledger:
        """Return the file that counts visits: in the ledger, or else in the client's folder of the run, if it has one.

        Args:
            client: The client; `None`: a plain Trainer, of which one file has all.
            secret: As for :class:`Ledger`.
            units: The same.

        Raises:
            ValueError: If the ledger counts these data by the other unit.
        """
        if self.ledger is not None or client is None:
            data, units = ("data", 0) if client is None else (client.id, units)
            records, patients = (Ledger(self.ledger, f"{data}{of}", secret, units) for of in ("", " by patient"))
            own, other = (records, patients) if self.unit == "record" else (patients, records)
            if other.path is not None and other.path.exists():
                raise ValueError(
                    f"The ledger {self.ledger} counts runs on these data by the other unit than {self.unit}, and the two do "
                    "not add up. Take the same unit."
                )
            return own
        return Ledger(None if client.folder is None else str(client.folder), "privacy", secret)

    def before(self, history: Steps, others: Steps) -> Steps:
        """Return what was spent before a visit: what the file has, or what the client remembers if that is more.

        The client forgets visits that the server refused. What it remembers, the file of a run may lack: it is gone, or on
        another machine. A ledger may not.

        Raises:
            ValueError: If the ledger lacks it.
        """
        counts = {(noise, rate): count for noise, rate, count in merged(others)}
        if self.ledger is not None and any(counts.get((z, rate), 0) < count for z, rate, count in merged(history)):
            raise forgotten(Path(self.ledger))
        return others if self.ledger is not None or self.of(others) >= self.of(history) else history

    def enter(self, file: Ledger, history: Steps, kind: tuple[float, float], planned: int, all_of_them: bool) -> int:
        """Write down the steps of a fit before they are taken; return for how many there is room.

        Raises:
            ValueError: If not for all of them, and they are needed.
        """
        with file.held([(*kind, planned)]) as others:
            room = room_for(self.fits, self.before(history, others), kind, planned)
            if room < planned and all_of_them:
                since = ", since others of the ledger have spent" if self.ledger is not None and others else ""
                raise ValueError(
                    f"SampleDP: {planned} more steps would exceed epsilon={self.epsilon:g}; there is room for {room}{since}. "
                    "Raise noise_multiplier, or train for fewer steps."
                )
        return room


def added(history: Steps, steps: Sequence[float]) -> list[list[float]]:
    """Return a history with more steps; those of one noise and rate are counted together."""
    return [list(one) for one in merged([*history, steps])]


def count(client: Client, key: str, steps: Sequence[float]) -> None:
    """Add steps to what a client remembers, of all visits and of this one."""
    kept, visit = client.state[key], added(client.scratch.get("private steps", []), steps)
    client.scratch["private steps"] = visit
    client.state[key] = kept | {"history": added(kept["history"], steps), "visit": visit}


def room_for(fits: Callable[[Steps], bool], before: Steps, kind: tuple[float, float], most: int) -> int:
    """Return for how many of `most` more steps, of a noise and a rate, a budget has room."""
    return most_that(lambda steps: fits([*before, (*kind, steps)]), most)


def told_of(epsilon: Mapping[str, float], private: bool, unit: str) -> dict[str, Any]:
    """Return what a run's folder says of what clients have spent."""
    return {
        "private": private,
        "epsilon": max(epsilon.values()) if private else None,
        "unit": f"{unit} of a client",
        "against": "everybody who sees what a client sends, the server too",
        "epsilon_by_client": dict(epsilon) if private else {},
    }


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
    for other in (one for one in setup.callbacks if one is not owner):
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
        refuse_undrawable(loader, owner.key)
    batch = setup.data.first_batch()
    if batch is not None:
        refuse_mixed_records(setup.module, probes.move_batch(setup.module, batch), owner.key)


def refuse_finders(callbacks: Iterable[Callback]) -> None:
    """Refuse Lightning callbacks, also those of its Tuner, that train on the data before the fit begins.

    Raises:
        ValueError: Naming one.
    """
    for one in callbacks:
        if isinstance(one, LearningRateFinder | BatchSizeFinder):
            raise ValueError(
                f"{type(one).__name__} takes steps on training data that SampleDP neither covers with noise nor counts, and "
                "what it finds would tell of them. Choose the value on data that need no protection, and remove one of the "
                "two."
            )


def refuse_coupled(why: str) -> None:
    """Refuse data of which one record moves the features of others: its gradient alone would be covered.

    Args:
        why: What the data module says of it (`coupled_records`); empty: it does not.

    Raises:
        ValueError: With a way out.
    """
    if why:
        raise ValueError(
            f"SampleDP covers what each record does to a step, and here one moves the features of others: {why}"
        )


def warn_of_few(setup: Setup, delta: float) -> None:
    """Warn where a client has so few records that the guarantee is worth little."""
    least = min((count for count in setup.data.num_samples.values() if count), default=1)
    if delta * least >= 1:
        setup.warn(f"SampleDP(delta={delta:g}) lets the guarantee fail for one of {least} records of a client.")


def refuse_plain(trainer: Trainer, module: LightningModule, unit: str) -> None:
    """Refuse a plain Trainer whose steps cannot be covered.

    Raises:
        ValueError: With a way out.
    """
    if unit == "patient":
        raise ValueError("In a plain Trainer nobody knows whose a record is: unit='patient' takes a federation.")
    if reload := trainer.reload_dataloaders_every_n_epochs:
        raise ValueError(
            f"SampleDP draws the batches of a whole fit: reload_dataloaders_every_n_epochs={reload} is 0 then."
        )
    refuse_coupled(str(getattr(getattr(trainer, "datamodule", None), "coupled_records", "")))
    refuse_trainer(module, lambda name, default: getattr(trainer, name, default), len(trainer.optimizers))
    if trainer.world_size > 1:
        raise ValueError(f"SampleDP trains on one device, and here are {trainer.world_size}. Use devices=1.")


def refuse_other_rounds(without: int, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse a resumed run with rounds whose noise was none, or another.

    Raises:
        ValueError: Saying which.
    """
    if without:
        raise ValueError(f"{without} rounds of this run were without SampleDP, and are not private. Start a new run.")
    for name, value in now.items():
        if before[name] != value:
            raise ValueError(
                f"{name} was {before[name]}, and is {value} now: what was spent was counted with that of before. Resume with "
                "it, or start a new run."
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


def refuse_another_fit(trainer: Trainer, history: Steps) -> None:
    """Refuse a fit of a plain Trainer that does not go on where the callback has counted to, without a checkpoint.

    Raises:
        ValueError: With the way out.
    """
    apart = int(sum(steps[-1] for steps in history)) - trainer.global_step
    if trainer.ckpt_path is not None or not 0 <= apart <= 1:  # 1: an exception in the middle of a step
        refuse_another_count(history)


def refuse_another_count(history: Steps) -> None:
    """Refuse to count two fits as one: steps would be forgotten, or others taken for them.

    Raises:
        ValueError: With the way out.
    """
    if history:
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
    plateaus = [one.monitor for one in trainer.lr_scheduler_configs if one.reduce_on_plateau]
    monitored = {
        str(name) for name in (*plateaus, *(getattr(one, "monitor", None) for one in trainer.callbacks)) if name
    }
    log, before = module.log, vars(module).get("log")

    def checked(name: str, *values: Any, **options: Any) -> None:
        found = monitored & {name, f"{name}_step", f"{name}_epoch"} if trainer.training else ()
        for monitor in found:
            raise ValueError(
                f"A scheduler, EarlyStopping or ModelCheckpoint goes by '{monitor}', which training logs, and its numbers "
                "have no noise: what comes of it would give them away. Let it go by a metric that only validation logs, or "
                "leave it out."
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
