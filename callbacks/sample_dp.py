"""Record-level differential privacy of training, in a federation and in a plain Lightning Trainer.

Means by class of a client's samples under SampleDP: clipped sums and counts with noise, one release of all of them.

The loader that a plain Trainer is about to train on: the one place that looks at Lightning's private source of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from fedlightning.algorithm import (
    Change,
    Client,
    Extra,
    Facts,
    Need,
    Promise,
    Server,
    Setup,
    SumCodec,
    TrainingData,
    Update,
    Wire,
    requires,
    warn,
)
from fedlightning.callbacks import sample_dp_checks as checks
from fedlightning.callbacks.sample_dp_checks import added, count, patients_of
from fedlightning.callbacks.shared.ledger import Ledger, Steps, forgotten
from fedlightning.callbacks.shared.poisson_batches import PoissonBatches, poisson_loader
from fedlightning.callbacks.shared.private_options import Accountant, Clip, Delta, Noise, Private, Scores, some_noise
from fedlightning.callbacks.shared.record_gradients import Began, RecordGradients, all_of
from fedlightning.callbacks.shared.secret_noise import digest_of, with_noise
from fedlightning.callbacks.shared.spending import merged, write_told
from fedlightning.ranges import PositiveFloat, PositiveInt, make_init
from fedlightning.tensors import entry_kinds


def replaced_train_loader(trainer: Trainer, change: Callable[[Any], Any]) -> Callable[[], None]:
    """Let a fit that starts train on `change(loader)`. A callback has no public way to do so.

    Args:
        trainer: The Trainer, in `on_fit_start`, before it asks for the loader.
        change: Function of the loader.

    Returns:
        What undoes it after the fit.
    """
    source = trainer.fit_loop._data_source
    if not source.is_module():
        before, source.instance = source.instance, change(source.instance)
        return lambda: setattr(source, "instance", before)
    owner, name = source.instance, source.name
    method = getattr(owner, name)
    own_method = vars(owner).get(name)
    setattr(owner, name, lambda: change(method()))
    return lambda: delattr(owner, name) if own_method is None else setattr(owner, name, own_method)


SURE = 3.0
"""Standard deviations of noise that a class's count has to exceed for its mean to be sent: else it would be noise alone."""


def sums_by_class(vectors: Iterable[tuple[Tensor, Tensor]], classes: int, clip: float) -> dict[str, Tensor]:
    """Return sums over samples of vectors that are cut to length 1 (in units of `clip`), and counts, by class, in float64.

    One sample moves both together by the square root of two at most. One whose vector is not finite has no part.

    Raises:
        ValueError: If a label has no class.
    """
    sums, counts = torch.zeros(0), torch.zeros(classes, dtype=torch.float64)
    for batch, labels in vectors:
        chosen = (labels >= 0).cpu() & batch.isfinite().all(1).cpu()  # -100: a sample that losses ignore
        rows, of_class = batch.detach().cpu().double()[chosen], labels.cpu()[chosen].long()
        if len(of_class) and int(of_class.max()) >= classes:
            raise ValueError(f"A label is {int(of_class.max())}, and the model has {classes} classes.")
        rows = rows / rows.norm(dim=1, keepdim=True).clamp(min=clip)
        sums = torch.zeros(classes, rows.shape[1], dtype=torch.float64) if sums.dim() == 1 else sums
        sums = sums.index_add(0, of_class, rows)
        counts = counts + torch.bincount(of_class, minlength=classes)
    return {"sums": sums, "counts": counts}


def released_means(exact: dict[str, Tensor], clip: float, noise: float, secret: str, address: str) -> dict[int, Tensor]:
    """Return the means of the classes whose noisy count says that they are there.

    Args:
        exact: Sums and counts.
        clip: Length to which vectors were cut.
        noise: Noise multiplier of the release.
        secret: What nobody else knows.
        address: What the noise is for.
    """
    std = noise * math.sqrt(2.0)
    noisy = with_noise(exact, std, secret, f"{address}|{digest_of('means', exact)}")
    sure_classes = (noisy["counts"] > max(SURE * std, 1.0)).nonzero()[:, 0].tolist()
    return {label: clip * noisy["sums"][label] / noisy["counts"][label] for label in sure_classes}


SOME_VISITS = 0.2
"""Share of visits in whose first epoch a batch is tried: of one batch, a trial costs more than the visit."""
COVERED = Need(
    "covers with noise what a client learns from the batches of its training, and nothing else",
    (Change.READS, "not by_record", "on_build", "training_batches"),
)
Vectors = Callable[[], Iterable[tuple[Tensor, Tensor]]]


@some_noise
@make_init
class SampleDP(TrainingData, Private):
    r"""Differential privacy of the records that a model trains on (DP-SGD).

    Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang, "Deep learning with differential privacy", CCS 2016
    (arXiv:1607.00133). Every training step of every client:

    * each record of the client falls into the batch with probability ``q = 1 / batches of an epoch``;
    * the gradient of each record, over all that is trained, is cut to length ``C``: ``g_i min(1, C / ||g_i||)``;
    * the optimizer gets ``(sum_i g_i + z C N(0, I)) / (q n)`` instead of the gradient; a batch of nobody is noise.

    With ``unit="patient"`` all of this is by patient: a patient falls into the batch with the records it has, `most` at most;
    ``g_i`` is the mean gradient of these, and ``n`` the number of patients. The data module has to know whose a record is
    (``group=`` of :class:`~fedlightning.datamodules.Partitioned`, of data sets in arrays and of tables).

    The module stays what it is: Opacus (``pip install opacus cryptography``) computes the gradients of single records by
    hooks, and counts epsilon; those of an `nn.Linear` that sees one row of each record are never multiplied out. **In a plain
    Trainer** it is one more callback: ``Trainer(callbacks=[SampleDP(...)])``.

    In a federation each client has an epsilon of its own, by the size of its data; `privacy.json` has all, and the largest is
    what holds. ``(epsilon, delta)`` holds for adding or removing one training record (or patient) of a client, against
    everybody who sees what the client sends: the server too. Everything that a step trains gets the noise, personal layers
    and models as well, since the gradient of what is shared depends on them; a model that trains beside the steps and that
    they never read (`APFL`, `FLDE`) gets none, has no epsilon, and must not leave the client. Values that the module logs in
    training and scores on validation data stay with the client; numbers of samples and patients count as known; what test
    scores tell of test records nobody bounds. A person with several records is hidden record by record, unless
    ``unit="patient"``; one with records at several clients spends at each.

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
            the data, over all these runs, which have to divide them alike. Needed at sites. `None`: a run counts alone, in
            its folder. Either counts every visit that was carried out, taken in or not; a run that writes no files counts
            those that were taken in. A run whose steps are gone from the ledger ends.
        noise_seed: A fixed seed instead of the secret, for tests. The run is **not private**, and says so.
        unit: What is hidden: each ``"record"``, or each ``"patient"`` with all records.
        most: With ``unit="patient"``, records of a patient in a batch at most. Any number is private; more cost more memory.
        scores: ``"in the clear"``: scores on validation data leave clients.
        means_noise: Noise multiplier of means by class, of methods that send them (`FedProto`, `FD`): one release a visit.
        means_clip: The most that a vector may be long that goes into such a mean.

    Raises:
        ValueError: If a number is out of range, or neither `noise_multiplier` nor `epsilon` is given.

    Example:
        >>> dp = SampleDP(delta=1e-5, noise_multiplier=1.5)
        >>> round(dp.epsilon_of([(1.5, 0.04, 2250)]), 4)
        7.3291
    """

    rank = -1000  # others see private gradients only
    covers_training = True
    noised = ("entries", "models", "means")

    delta: Delta
    noise_multiplier: Noise | None = None
    epsilon: PositiveFloat | None = None
    clip: Clip = 1.0
    accountant: Accountant = "rdp"
    ledger: str | None = None
    noise_seed: int | None = None
    unit: Literal["record", "patient"] = "record"
    most: PositiveInt = 16
    scores: Scores = "withheld"
    means_noise: Noise = 10.0
    means_clip: Clip = 1.0

    def __post_init__(self) -> None:
        self._fit: RecordGradients | None = None
        self._ended: RecordGradients | None = None
        self._sampler: PoissonBatches | None = None
        self._began: Began | None = None
        self._undo: list[Callable[[], None]] = []
        self._history: list[list[float]] = []
        self._secret, self._loaded, self._entry = "", False, Ledger(None, "", "")

    @property
    def facts(self) -> Facts:
        """It covers what training learns, wherever updates arrive."""
        steady = requires.SteadyData("plans its noise by the records that a client has in every round")
        return super().facts.extend(needs=[COVERED], requires=[steady], asynchronous=True, beside_sums=True)

    @property
    def promises(self) -> Sequence[Promise]:
        """What epsilon says, of everybody but the client itself."""
        what = f"whether a {self.unit} was trained on, beyond epsilon"
        provided = "no Dataset mixes records, clients' records and own models stay secret"
        return (Promise("all but the client", what, provided, "sizes, test scores, failures"),)

    # -- before round 1 ------------------------------------------------------------------------------------------------
    def check(self, setup: Setup) -> None:
        """Refuse what would leave without noise, and models whose records cannot be told apart.

        Raises:
            ValueError: With a way out.
        """
        super().check(setup)
        checks.refuse_union(self.ledger, setup)
        checks.refuse_uncovered(self, setup, self.noise_multiplier is None, self.unit)
        self.warn_of_few(setup, min(filter(None, setup.data.num_samples.values()), default=1), "records of a client")

    def on_federation_start(self, server: Server) -> None:
        """Refuse sites without a ledger, which a server could make forget what they have spent."""
        if server.sites:
            checks.refuse_forgetting(self.ledger, self.noise_seed)

    def check_changes(self, changes: Sequence[str]) -> None:
        """Refuse them: a round that was cut off is done again with the batches that it drew, and is counted once."""
        if self.noise_seed is None:
            raise ValueError(
                f"{self.key} cannot go on with another configuration ({changes[0]}): a round that was cut off would release "
                "other updates of the same batches, and count them once. Resume the run as it was, or start a new one."
            )

    def on_round_start(self, server: Server) -> None:
        """Keep what clients spend."""
        server.state.setdefault(self.key, {"epsilon": {}, "over": []})

    def wire(self, module: Any) -> Wire:
        """What a client has spent, and whether (1) it has room for another such visit, or not (0)."""
        number = Extra("scalar", low=0, told=True, due=("",))
        return Wire(up={"epsilon": number, "left": Extra("scalar", low=0, high=1, whole=True, due=("",))})

    # -- a visit -------------------------------------------------------------------------------------------------------
    def on_visit_start(self, client: Client) -> None:
        """Find the client's secret, or draw it."""
        self._close()  # of a visit, in whatever trainer, that ended between its batches and its first step
        if client.is_at_site:
            checks.refuse_forgetting(self.ledger, self.noise_seed)
        if "secret" not in client.state.get(self.key, {}):
            client.state[self.key] = {"secret": self.new_secret(client.id), "history": []}
        # Done again with other options, a round must not scale the same noise to another length.
        options = [self.noise_multiplier, self.epsilon, self.clip] if self.noise_seed is None else []
        # All that this visit starts from: what came, and what the client keeps. Where a server lets two visits of one number
        # start from two records, each is counted.
        came = [client.entries, client.training_extras, client.message.work, client.message.tag, client.training_state]
        client.scratch[self.key] = f"{client.visit}|{digest_of(options, came)}"

    def training_batches(self, client: Client, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return Poisson batches of the client's records."""
        address = f"{client.scratch[self.key]}|{client.phase.name}"
        groups = patients_of(client) if self.unit == "patient" else None
        secret = client.state[self.key]["secret"]
        batches, self._sampler = poisson_loader(loader, self.key, secret, address, groups, self.most)
        self._began = all_of(client.module)
        return batches

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach the hooks, and raise ValueError if the budget does not last for this fit."""
        if self._sampler is None:  # a phase on public data
            return
        client, planned = self._client, checks.planned_steps(trainer, self._sampler)
        if client is None:
            secret, address, history = self._secret, "", self._history
            checks.refuse_steps_before(trainer.global_step, history)
        else:
            secret, history = client.state[self.key]["secret"], client.state[self.key]["history"]
            address = f"{client.scratch[self.key]}|{client.phase.name}"
        if not history:
            checks.try_records(pl_module, trainer, self.key)
        keeps = client is not None and client.keeps_optimizers  # then the Trainer's limit is that of the whole run
        visits = 1 if client is None or keeps else client.max_rounds
        rate = self._sampler.rate
        goes_on = self.noise_multiplier is None and history  # with the noise that was solved for
        noise = float(history[-1][0]) if goes_on else self.noise_for(rate, planned * visits)
        name, folder = (None, None) if client is None else (client.id, client.folder)
        self._entry = self._file(name, folder, f"{secret}|{address}", self._sampler.units)
        room = self._enter(self._entry, history, (noise, rate), planned, all_of_them=not keeps)
        self._undo.append(checks.refuse_monitors(trainer, pl_module, client is not None))
        began, self._began = self._began, None
        self._fit = RecordGradients(pl_module, self._sampler, self.clip, noise, secret, address, room, began)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Take note of how many records there are in the batch."""
        if self._fit is not None:
            self._fit.begin()
            rarely = self._client is not None and trainer.current_epoch == 0  # round 1 was tried before it
            self._fit.try_batch(batch, self.key, SOME_VISITS if rarely else 1.0)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Put the private gradient in place of the gradient."""
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
        self._ended = fit
        fit.refuse_moved()
        steps = fit.counted
        history = self._history if client is None else client.state[self.key]["history"]
        # What was planned, and is there until now, may be more.
        self._release(self._entry, history, steps, fit.released)
        if client is not None:
            count(client, self.key, steps)
            return
        self._history = added(self._history, steps)
        if self.noise_seed is None:
            taken = sum(entry[-1] for entry in self._history)
            warn(
                f"SampleDP: epsilon={self.epsilon_of(self._history):.4g} at delta={self.delta:g} for each record, after "
                f"{taken} steps (noise_multiplier={fit.noise_multiplier:.4g}). Scores and logs are not covered."
            )

    def check_fit(self, client: Client) -> None:
        """See that no other hook of the fit has moved what leaves when training ended."""
        ended, self._ended = self._ended, None
        if ended is not None:
            ended.refuse_moved()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Take the hooks off, and count the steps that were taken."""
        fit = self._close()
        if fit is not None:
            self._entry.note([fit.counted])
            self._history = added(self._history, fit.counted) if self._client is None else self._history

    def _close(self) -> RecordGradients | None:
        fit, self._fit, self._sampler = self._fit, None, None
        if fit is not None:
            fit.close()
        while self._undo:
            self._undo.pop()()
        return fit

    def _file(self, client: str | None, folder: str | Path | None, secret: str = "", units: int = 0) -> Ledger:
        """Return the file that counts visits: in the ledger, or else in the client's folder of the run, if it has one.

        Args:
            client: The client; `None`: a plain Trainer, of which one file has all.
            folder: The client's folder.
            secret: As for :class:`Ledger`.
            units: The same.

        Raises:
            ValueError: If the ledger counts these data by the other unit.
        """
        if self.ledger is None and client is not None:
            return Ledger(None if folder is None else str(folder), "privacy", secret)
        data, units = ("data", 0) if client is None else (client, units)
        records, patients = (Ledger(self.ledger, f"{data}{suffix}", secret, units) for suffix in ("", " by patient"))
        ledger, other = (records, patients) if self.unit == "record" else (patients, records)
        if other.path is not None and other.path.exists():
            raise ValueError(
                f"The ledger {self.ledger} counts runs on these data by the other unit than {self.unit}, and the two do not "
                "add up. Take the same unit."
            )
        return ledger

    def _before(self, history: Steps, others: Steps) -> Steps:
        """Return what was spent before a visit: what the file has, or what the client remembers if that is more.

        The client forgets visits that the server refused. What it remembers, the file of a run may lack: it is gone, or on
        another machine. A ledger may not.

        Raises:
            ValueError: If the ledger lacks it.
        """
        counts = {(noise, rate): count for noise, rate, count in merged(others)}
        if self.ledger is not None and any(counts.get((z, rate), 0) < count for z, rate, count in merged(history)):
            raise forgotten(Path(self.ledger))
        return others if self.ledger is not None or self.epsilon_of(others) >= self.epsilon_of(history) else history

    def _enter(self, file: Ledger, history: Steps, kind: tuple[float, float], planned: int, all_of_them: bool) -> int:
        """Write down the steps of a fit before they are taken; return for how many there is room.

        Raises:
            ValueError: If not for all of them, and they are needed.
        """
        with file.hold([(*kind, planned)]) as others:
            room = self.room_for(self._before(history, others), kind, planned)
            if room < planned and all_of_them:
                since = ", since others of the ledger have spent" if self.ledger is not None and others else ""
                raise ValueError(
                    f"SampleDP: {planned} more steps would exceed epsilon={self.epsilon:g}; there is room for {room}{since}. "
                    "Raise noise_multiplier, or train for fewer steps."
                )
        return room

    def _release(self, file: Ledger, history: Steps, steps: Sequence[float], name: str) -> None:
        """Write down what is about to leave; other bits than a visit has released before are counted beside those.

        Raises:
            ValueError: If there is no room.
        """
        with file.hold([steps], name) as others:
            again = [step for other, taken in file.releases.items() if other != name for step in taken]
            if again and not self.fits([*self._before(history, others), *again, steps]):
                raise ValueError(
                    "SampleDP: a visit that is done again comes out differently, and both would exceed epsilon="
                    f"{self.epsilon:g}. Start a new run, with data and hardware that give the same numbers again."
                )

    def protect(self, client: Client, update: Update) -> None:
        """Send what is not trained back as it came; say what was spent, and whether there is room for another such visit."""
        for name, kind in entry_kinds(client.module).items():
            if kind != "trainable" and name in update.state.keys() & client.received.keys():
                update.state[name] = client.received[name]  # nothing covers it
        kept = client.state.get(self.key, {})
        if not kept.get("history") or client.message.work == 0:
            return
        with self._file(client.id, client.folder).hold(None) as every:
            before = self._before(kept["history"], every)
        left = self.fits([*before, *kept["visit"]])
        update.extras[self.key] = {"epsilon": self._as_told(before), "left": torch.tensor(int(left))}

    def _as_told(self, steps: Steps) -> Tensor:
        """Return what steps spend as a message has it, which holds no infinity; noise of almost 0 spends that."""
        return torch.tensor(min(self.epsilon_of(steps), torch.finfo(torch.float32).max))

    def class_means(self, client: Client, update: Update, vectors: Vectors, classes: int) -> dict[int, Tensor]:
        """Return noisy means of the classes that are there, after writing down what they spend."""
        kept, address = client.state[self.key], f"{client.scratch[self.key]}|means"
        history, secret, kind = kept["history"], kept["secret"], (self.means_noise, 1.0)
        file = self._file(client.id, client.folder, f"{secret}|{address}")
        self._enter(file, history, kind, 1, all_of_them=True)
        client.withhold_data("")
        exact = sums_by_class(vectors(), classes, self.means_clip)
        client.withhold_data(self.key)
        self._release(file, history, (*kind, 1), digest_of(f"{secret}|means", exact)[:24])
        count(client, self.key, (*kind, 1))
        client.covered_means = released_means(exact, self.means_clip, self.means_noise, secret, address)
        return client.covered_means

    # -- the server ----------------------------------------------------------------------------------------------------
    def on_update(self, server: Server, update: Update) -> None:
        """Note what a client has spent."""
        extras = update.extras.get(self.key)
        if extras is not None:
            kept = server.state[self.key]
            ended = self.epsilon is not None and not int(extras["left"])
            over = [*kept["over"], update.client] if ended else kept["over"]
            spent = kept["epsilon"] | {update.client: float(extras["epsilon"])}
            server.state[self.key] = kept | {"epsilon": spent, "over": over}

    def on_round_end(self, server: Server) -> None:
        """Write down what every client has spent, and end the run before one exceeds its budget."""
        self._write(server, kept := server.state[self.key])
        if kept["over"] and server.stopped is None:
            server.stop(self, f"client '{kept['over'][0]}' would exceed epsilon={self.epsilon:g} in another visit")

    def _write(self, server: Server, kept: Mapping[str, Any]) -> None:
        if server.run_dir is not None and kept["epsilon"]:
            spent = dict(kept["epsilon"])
            report = self.told(server, f"{self.unit} of a client", max(spent.values()), epsilon_by_client=spent)
            also = [codec.promise for codec in server.callbacks if isinstance(codec, SumCodec) and codec.promise]
            write_told(server.run_dir, report | {"also": also})

    def on_federation_end(self, server: Server) -> None:
        """Say what was spent, by visits too that were not taken in: late ones, and those under way at the end."""
        if self.key not in server.state:
            return
        kept = server.state[self.key]
        for client in () if server.sites else server.clients:
            file = self._file(client, server.blueprint.settings.folder_of(client))
            if file.path is not None and file.path.exists():
                # Of a damaged file the client has told, and failed.
                with suppress(ValueError), file.hold(None) as every:
                    kept["epsilon"][client] = max(float(self._as_told(every)), kept["epsilon"].get(client, 0.0))
        if kept["epsilon"]:
            self._write(server, kept)
            most = max(kept["epsilon"], key=kept["epsilon"].get)
            self.say_spent(
                server,
                f"epsilon={kept['epsilon'][most]:.4g} at delta={self.delta:g} for each {self.unit} of client "
                f"'{most}', the most of all clients, against everybody who sees updates.",
            )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a fit in which a finder steps before anything here has seen it begin."""
        checks.refuse_finders(trainer.callbacks)  # type: ignore[attr-defined]

    # -- a plain Trainer -----------------------------------------------------------------------------------------------
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """In a plain Trainer: give it Poisson batches; raise ValueError if they would mix records."""
        if self._client is not None:
            return
        checks.refuse_plain(trainer, pl_module, self.unit)
        apart = int(sum(steps[-1] for steps in self._history)) - trainer.global_step
        # one apart: an exception in the middle of a step
        checks.refuse_another_fit(self._history, self._loaded or (trainer.ckpt_path is None and 0 <= apart <= 1))
        self._loaded = False
        self._secret = self.new_secret()
        if self.noise_seed is not None:
            warn(self.known_noise)

        def poisson(loader: Any) -> DataLoader[Any]:
            batches, self._sampler = poisson_loader(loader, self.key, self._secret, "batches")
            return batches

        self._undo.append(replaced_train_loader(trainer, poisson))
        self._began = all_of(pl_module)

    def state_dict(self) -> dict[str, Any]:
        """Return what all fits have spent in a plain Trainer, one that runs too; the secret is in no checkpoint."""
        spent = self._history if self._fit is None else added(self._history, self._fit.counted)
        return {"history": spent} if self._client is None else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting from a checkpoint of a plain Trainer; raise ValueError if there is a count already."""
        if self._client is not None:
            return
        checks.refuse_another_fit(self._history, goes_on=False)
        self._history, self._loaded = [list(steps) for steps in state_dict.get("history", [])], True
