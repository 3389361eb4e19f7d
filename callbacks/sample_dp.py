"""Record-level differential privacy of training, in a federation and in a plain Lightning Trainer."""

from __future__ import annotations

import hashlib
import secrets
from typing import Annotated, Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from fedlightning.algorithm import (
    Change,
    Client,
    Extra,
    Facts,
    Need,
    Range,
    Server,
    Setup,
    TrainingData,
    Update,
    UpdateCodec,
    Wire,
    move_batch,
    warn,
)
from fedlightning.callbacks.client_dp import NO_SELECTION, UNCOUNTED
from fedlightning.callbacks.client_dp_spending import accountant_of, solved_noise, spent_by, write_told
from fedlightning.callbacks.sample_dp_fit import (
    add_to,
    added,
    planned_steps,
    refuse_forgetting,
    refuse_monitors,
    refuse_other_rounds,
    refuse_steps_before,
    refuse_trainer,
    room_for,
    told_of,
    try_records,
    visit_of,
)
from fedlightning.callbacks.shared.ledger import Ledger, Steps
from fedlightning.callbacks.shared.poisson_batches import PoissonBatches, poisson_loader
from fedlightning.callbacks.shared.record_gradients import RecordGradients, refuse_mixed_records
from fedlightning.ranges import PositiveFloat
from fedlightning.wrappers.train_loader import replaced_train_loader

COVERED = Need(
    "covers with noise what a client learns from the batches of its training, and nothing else",
    (Change.READS, Change.LOSS, Change.TAPS, Change.SHAPE, Change.BATCHES),
)
OF_BATCHES = ("on_train_batch_start", "on_train_batch_end")
"""Hooks of Lightning's that are given batches."""


class SampleDP(TrainingData):
    r"""Differential privacy of the records that a model trains on (DP-SGD).

    Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang, "Deep learning with differential privacy", CCS 2016
    (arXiv:1607.00133). Every training step of every client:

    * each record of the client falls into the batch with probability ``q = 1 / batches of an epoch``;
    * the gradient of each record, over all that is trained, is cut to length ``C``: ``g_i min(1, C / ||g_i||)``;
    * the optimizer gets ``(sum_i g_i + z C N(0, I)) / (q n)`` in the place of the gradient; a batch of nobody is noise.

    The module stays what it is: Opacus (``pip install fedlightning[privacy]``) computes the gradients of single records by
    hooks, and counts epsilon. **In a plain Trainer** it is one more callback: ``Trainer(callbacks=[SampleDP(...)])``.

    In a federation each client has an epsilon of its own, by the size of its data; `privacy.json` has all, and the largest
    is what holds. ``(epsilon, delta)`` holds for adding or removing one record of a client, against everybody who sees what
    the client sends: the server too. Everything that a client trains gets the noise, personal layers and models as well,
    since the gradient of what is shared depends on them. What the module logs in training stays with the client. It does
    **not** cover sample counts and scores.
    A person with several records is covered less: by each record alone.

    Noise and batches are drawn from a secret of the operating system's, which lies in what the client keeps (in a plain
    Trainer: nowhere), never from the run's seed. A visit that is carried out again gives the same bits; where the model that
    came is another one, so are batches and noise. Attacks on the rounding of floating-point noise are not countered.

    Args:
        delta: Probability with which the guarantee may fail; well below one over the number of records.
        noise_multiplier: ``z``. Leave it out where `epsilon` is given: each client then solves it for all its rounds.
        epsilon: The budget. Training ends before it is exceeded.
        clip: ``C``, the most that a record's gradient may be long. Default 1.
        accountant: ``"rdp"`` (default; Rényi, orders of Opacus) or ``"prv"`` (tighter, slower).
        ledger: Folder with a file for each client of what all runs have spent on its data; `epsilon` is then the budget of
            the data, over all these runs, and every visit counts that was carried out. Needed at sites. `None`: a run
            counts alone, by what its clients keep.
        noise_seed: A fixed seed in the place of the secret, for tests. The run is **not private**, and says so.

    Raises:
        ValueError: If a number is out of range, or neither `noise_multiplier` nor `epsilon` is given.

    Example:
        >>> dp = SampleDP(delta=1e-5, noise_multiplier=1.5)
        >>> round(dp.epsilon_of([(1.5, 0.04, 2250)]), 4)
        7.3291
    """

    rank = -1000  # others see private gradients only

    def __init__(
        self,
        delta: Annotated[float, Range("(0, 1)")],
        noise_multiplier: PositiveFloat | None = None,
        epsilon: PositiveFloat | None = None,
        clip: PositiveFloat = 1.0,
        accountant: Literal["rdp", "prv"] = "rdp",
        ledger: str | None = None,
        noise_seed: int | None = None,
    ) -> None:
        if noise_multiplier is None and epsilon is None:
            raise ValueError("SampleDP has neither noise_multiplier nor epsilon. Give one of them, or both.")
        self.delta = delta
        self.noise_multiplier = noise_multiplier
        self.epsilon = epsilon
        self.clip = clip
        self.accountant = accountant
        self.ledger = ledger
        self.noise_seed = noise_seed
        self._fit: RecordGradients | None = None
        self._sampler: PoissonBatches | None = None
        self._restore: Any = None
        self._secret = ""
        self._entry = Ledger(None, "", "")
        self._history: list[list[float]] = []

    @property
    def facts(self) -> Facts:
        """It covers what training learns, wherever updates arrive, and lets no selection by scores beside it."""
        return super().facts.extend(needs=[COVERED, NO_SELECTION], asynchronous=True, no_statistics=UNCOUNTED)

    def epsilon_of(self, history: Steps) -> float:
        """Return what steps spend, at :attr:`delta`.

        Args:
            history: Noise multiplier, rate and number of steps, for each kind of step.
        """
        steps = tuple((float(noise), float(rate), int(count)) for noise, rate, count in history if count)
        return spent_by(self.accountant, self.delta, steps) if steps else 0.0

    # -- before round 1 ------------------------------------------------------------------------------------------------
    def check(self, setup: Setup) -> None:
        """Refuse what would leave without noise, and models whose records cannot be told apart.

        Raises:
            ValueError: With a way out.
        """
        accountant_of(self.accountant)
        for other in setup.callbacks:
            own = other is self or isinstance(other, UpdateCodec)  # a code is of what is covered
            extras = [] if own else sorted(other.wire(setup.module).up)
            if extras:
                raise ValueError(
                    f"{other.key} takes {', '.join(extras)} from clients, which SampleDP does not cover with noise. Remove "
                    "one of the two."
                )
            seen = (name for name in OF_BATCHES if getattr(type(other), name) is not getattr(Callback, name))
            hook = next(seen, None)
            if other is not self and hook is not None and not other.facts.keeps:
                raise ValueError(
                    f"{other.key} sees the batches of training ({hook}), and what it makes of them SampleDP does not cover "
                    "with noise. Remove one of the two."
                )
        if self.noise_multiplier is None and any(other.claims("local_phases") for other in setup.callbacks):
            raise ValueError(
                "SampleDP(epsilon=...) solves for the noise of visits of one fit, and here visits have several. Give "
                "noise_multiplier too: epsilon is then what no client exceeds."
            )
        refuse_trainer(setup.module, setup.trainer_arguments.get, len(setup.optimizers))
        batch = setup.first_batch()
        if batch is not None:
            refuse_mixed_records(setup.module, move_batch(setup.module, batch), self.key)
        least = min((count for count in setup.num_samples.values() if count), default=1)
        if self.delta * least >= 1:
            setup.warn(
                f"SampleDP(delta={self.delta:g}) lets the guarantee fail for one of {least} records of a client."
            )
        if self.noise_seed is not None:
            setup.warn("SampleDP(noise_seed=...): whoever knows the seed can subtract the noise. It is not private.")

    def on_federation_start(self, server: Server) -> None:
        """Refuse sites without a ledger, which a server could make forget what they have spent."""
        if server.sites:
            refuse_forgetting(self.ledger, self.noise_seed)

    def on_round_start(self, server: Server) -> None:
        """See that all rounds were private: with it, and with the same `noise_seed`."""
        before = server.state.get(self.key, {"epsilon": {}, "over": [], "seed": self.noise_seed})
        without = server.round if self.key not in server.state else 0
        refuse_other_rounds(without, before.get("seed"), self.noise_seed)
        server.state[self.key] = before

    def wire(self, module: Any) -> Wire:
        """What a client has spent, and whether (1) it has room for another such visit, or not (0)."""
        number = Extra("scalar", low=0, due=("",))
        return Wire(up={"epsilon": number, "left": Extra("scalar", low=0, high=1, whole=True, due=("",))})

    # -- a visit -------------------------------------------------------------------------------------------------------
    def on_visit_start(self, client: Client) -> None:
        """Let nobody read the client's samples but the steps of its training; find the client's secret, or draw it."""
        client.withhold_data(
            f"Client '{client.id}' gives its samples to the steps of training only, which SampleDP covers with noise. Remove "
            "SampleDP, or the callback that reads samples otherwise."
        )
        if client.is_at_site:
            refuse_forgetting(self.ledger, self.noise_seed)
        kept = client.state.get(self.key, {})
        if "secret" not in kept:
            secret = secrets.token_hex(16) if self.noise_seed is None else f"seed {self.noise_seed} {client.id}"
            client.state[self.key] = {"secret": secret, "history": []}
        came = hashlib.sha256()
        add_to(
            came, [client.entries, client.message.extras, client.message.work, client.message.tag, kept.get("history")]
        )
        client.scratch[self.key] = f"{client.visit}|{came.hexdigest()}"

    def training_batches(self, client: Client, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return Poisson batches of the client's records."""
        address = f"{client.scratch[self.key]}|{client.phase.name}"
        made, self._sampler = poisson_loader(loader, self.key, client.state[self.key]["secret"], address)
        return made

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach the hooks, and see that the budget lasts for this fit.

        Raises:
            ValueError: If it does not.
        """
        if self._sampler is None:  # a phase on public data
            return
        client, planned = self._client, planned_steps(trainer, self._sampler)
        if client is None:
            secret, address, history = self._secret, "", self._history
            refuse_steps_before(trainer.global_step, history)
        else:
            secret, history = client.state[self.key]["secret"], client.state[self.key]["history"]
            address = f"{client.scratch[self.key]}|{client.phase.name}"
        if not history:
            try_records(pl_module, trainer, self.key)
        refuse_monitors(trainer)
        keeps = client is not None and client.keeps_optimizers  # then the Trainer's limit is that of the whole run
        visits = 1 if client is None or keeps else client.max_rounds
        noise = self._noise(history, self._sampler.rate, planned * visits)
        self._entry = Ledger(self.ledger, "data" if client is None else client.id, f"{secret}|{address}")
        with self._entry.held([(noise, self._sampler.rate, planned)]) as others:
            before = history if self.ledger is None else others
            room = room_for(self._fits, before, (noise, self._sampler.rate), planned)
            if room < planned and not keeps:
                raise ValueError(
                    f"SampleDP: {planned} more steps would exceed epsilon={self.epsilon:g}; there is room for {room}"
                    f"{', since others of the ledger have spent' if others else ''}. Raise noise_multiplier, or train "
                    "for fewer steps."
                )
        self._fit = RecordGradients(pl_module, self._sampler, self.clip, noise, secret, address, room)

    def _fits(self, history: Steps) -> bool:
        """Return whether the budget has room for all of these steps."""
        return self.epsilon is None or self.epsilon_of(history) <= self.epsilon * (1 + 1e-9)

    def _noise(self, history: Steps, rate: float, steps: int) -> float:
        """Return the noise multiplier: that of the fits before, the one given, or one that fits the budget."""
        if self.noise_multiplier is not None:
            return self.noise_multiplier
        if history:
            return float(history[-1][0])
        assert self.epsilon is not None
        return solved_noise(self.epsilon, self.delta, rate, steps, self.accountant)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Take note of how many records there are in the batch."""
        if self._fit is not None:
            self._fit.begin()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Put the private gradient in the place of the gradient."""
        if self._fit is not None:
            self._fit.privatise(optimizer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """See that the step was covered."""
        if self._fit is not None:
            self._fit.end()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the hooks off, and count the steps."""
        fit, client = self._close(), self._client
        if fit is None:
            return
        fit.refuse_other_memory()
        steps = fit.counted
        with self._entry.held([steps]):  # what was planned, and is there until now, may be more
            pass
        if client is not None:
            kept = client.state[self.key]
            counted = {"history": added(kept["history"], steps), "visit": visit_of(client, steps)}
            client.state[self.key] = kept | counted
            return
        self._history = added(self._history, steps)
        if self.noise_seed is None:
            warn(
                f"SampleDP: epsilon={self.epsilon_of(self._history):.4g} at delta={self.delta:g} for each record, after "
                f"{sum(one[-1] for one in self._history)} steps (noise_multiplier={fit.noise_multiplier:.4g}). Scores and "
                "logs are not covered."
            )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Take the hooks off; in a plain Trainer, count the steps that were taken."""
        fit = self._close()
        if fit is not None and self._client is None:
            self._history = added(self._history, fit.counted)

    def _close(self) -> RecordGradients | None:
        fit, self._fit, self._sampler = self._fit, None, None
        if fit is not None:
            fit.close()
        if self._restore is not None:
            self._restore()
            self._restore = None
        return fit

    def on_send(self, client: Client, update: Update) -> None:
        """Say what was spent, and whether the budget has room for another such visit; what was logged does not leave."""
        update.metrics, update.logs = {}, []
        kept = client.state.get(self.key, {})
        if not kept.get("history") or client.message.work == 0:
            return
        with Ledger(self.ledger, client.id, "").held(None) as every:
            before = kept["history"] if self.ledger is None else every
            spent, left = self.epsilon_of(before), self._fits([*before, *kept["visit"]])
        update.extras[self.key] = {"epsilon": torch.tensor(spent), "left": torch.tensor(int(left))}

    # -- the server ----------------------------------------------------------------------------------------------------
    def on_update(self, server: Server, update: Update) -> None:
        """Note what a client has spent."""
        said = update.extras.get(self.key)
        if said is not None:
            kept = server.state[self.key]
            ended = self.epsilon is not None and not int(said["left"])
            over = [*kept["over"], update.client] if ended else kept["over"]
            spent = kept["epsilon"] | {update.client: float(said["epsilon"])}
            server.state[self.key] = kept | {"epsilon": spent, "over": over}

    def on_round_end(self, server: Server) -> None:
        """Write down what every client has spent, and end the run before one exceeds its budget."""
        kept = server.state[self.key]
        if server.run_dir is not None and kept["epsilon"]:
            told = told_of(kept["epsilon"], self.noise_seed is None)
            own = {"delta": self.delta, "rounds": server.round + 1, "clip": self.clip, "accountant": self.accountant}
            write_told(server.run_dir, told | own)
        if kept["over"] and server.stopped is None:
            server.stop(self, f"client '{kept['over'][0]}' would exceed epsilon={self.epsilon:g} in another visit")

    def on_federation_end(self, server: Server) -> None:
        """Say what was spent."""
        kept = server.state.get(self.key)
        if kept is not None and kept["epsilon"] and self.noise_seed is None:
            most = max(kept["epsilon"], key=kept["epsilon"].get)
            warn(
                f"SampleDP: epsilon={kept['epsilon'][most]:.4g} at delta={self.delta:g} for each record of client '{most}', "
                "the most of all clients, against everybody who sees updates. Scores are not covered."
            )

    # -- a plain Trainer -----------------------------------------------------------------------------------------------
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """In a plain Trainer: give it Poisson batches.

        Raises:
            ValueError: If the Trainer or the module would mix records.
        """
        if self._client is not None:
            return
        refuse_trainer(pl_module, lambda name, default: getattr(trainer, name, default), len(trainer.optimizers))
        if trainer.world_size > 1:
            raise ValueError(f"SampleDP trains on one device, and here are {trainer.world_size}. Use devices=1.")
        self._secret = secrets.token_hex(16) if self.noise_seed is None else f"seed {self.noise_seed}"
        if self.noise_seed is not None:
            warn("SampleDP(noise_seed=...): whoever knows the seed can subtract the noise. This run is not private.")

        def poisson(loader: Any) -> DataLoader[Any]:
            made, self._sampler = poisson_loader(loader, self.key, self._secret, "batches")
            return made

        self._restore = replaced_train_loader(trainer, poisson)

    def state_dict(self) -> dict[str, Any]:
        """Return what has been spent in a plain Trainer; the secret is in no checkpoint."""
        return {"history": self._spent()} if self._client is None else {}

    def _spent(self) -> list[list[float]]:
        """Return the steps of all fits, those of the one that runs too."""
        return self._history if self._fit is None else added(self._history, self._fit.counted)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting from a checkpoint of a plain Trainer."""
        self._history = [list(steps) for steps in state_dict.get("history", [])]
