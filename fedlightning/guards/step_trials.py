"""One batch of every step that a run will use, before round 1: what a later step would raise shows now.

A step is tried on a copy of the client's module, built as in a visit (`wrap_module`). No callback's hooks run, nothing is
logged, and every global random generator is left as it was. A loader of the user is not iterated; its dataset is read through
a loader made here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.nn.modules.batchnorm import _BatchNorm  # no public name for all of them
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from fedlightning.client.blueprint import Blueprint
from fedlightning.client.client import Client
from fedlightning.client.client_errors import client_failure
from fedlightning.client.data_summary import count_used_samples, take_first_batch
from fedlightning.client.evaluator import StepLosses
from fedlightning.client.fit import fit
from fedlightning.client.kept import UNCOPIED, Values, is_same, values_of
from fedlightning.client.logged_metrics import NotOneNumberError
from fedlightning.client.record import ClientRecord
from fedlightning.client.requests import Fit
from fedlightning.client.runtime import ClientRuntime
from fedlightning.client.trainer_context import UnseenStepsError, VisitCallback, refuse_unseen
from fedlightning.compat.lightning_runs import detached, quiet
from fedlightning.contract import Change, FederatedCallback, FirstStep, Phase
from fedlightning.contract.messages import Message
from fedlightning.datamodules.sampling import gives_batches, preserve_generators
from fedlightning.datamodules.views import samples_at
from fedlightning.engines.contract import Engine, PlainTask
from fedlightning.errors import ConfigurationError, ControlFlow, listed, warn
from fedlightning.fast.log_sheet import FastLoopRefused
from fedlightning.guards.begins_anew import Clock, followed, taken_up, watch_clock
from fedlightning.guards.preflight_task import StepFinding
from fedlightning.guards.trial_failure import step_failure
from fedlightning.seeding import isolated
from fedlightning.tensors import State, clone, module_state, select
from fedlightning.wrappers import user_class

MOST_LOADERS = 1000
"""Clients whose loaders are looked at for a last batch of one sample."""
OF_ONE = "Expected more than 1 value per channel"
"""Beginning of what torch says of a batch that cannot be normalised."""


def corrects(callback: FederatedCallback) -> bool:
    """Return whether optimizers step with other gradients than those of the module's step."""
    return callback.claims("correct_gradient") or Change.ELSEWHERE in callback.facts.changes


def probe_first_step(runner: ClientRuntime) -> FirstStepProbe:
    """Return what a step on the first batch shows; nothing where clients' models differ."""
    batch = take_first_batch(runner) if len(runner.blueprint.architectures) == 1 else None
    return FirstStepProbe() if batch is None else _first_step(runner, batch)[0]


def refuse_sparse_gradients(blueprint: Blueprint, architecture: str, seen: FirstStepProbe) -> None:
    """Refuse callbacks that add to gradients of which the optimizer takes sparse ones only."""
    correcting = next((callback for callback in blueprint.callbacks if corrects(callback)), None)
    sparse_only = seen.sparse and any(isinstance(callback, torch.optim.SparseAdam) for callback in seen.optimizers)
    if (
        correcting is not None
        and sparse_only
        and not any(callback.claims("shared_names") for callback in blueprint.callbacks)
    ):
        name = user_class(blueprint.template_of(architecture)).__name__
        raise ConfigurationError(
            f"The gradients of '{seen.sparse}' of {name} are sparse, {correcting.key} adds to gradients, and SparseAdam "
            "steps with sparse ones only. Take another optimizer, or leave the callback out."
        )


class FirstStepReached(ControlFlow):
    """Ends a fit after its first batch.

    Args:
        probe: What was seen of it. The callback of a fit is a copy.
    """

    def __init__(self, probe: FirstStepProbe) -> None:
        super().__init__()
        self.probe = probe


class FirstStepProbe(Callback):
    """Looks at the first step of a fit, and ends it.

    Attributes:
        optimizers: Optimizers of the fit.
        sparse: Name of a parameter whose gradient is sparse; empty: there is none.
        clips: Hook in which the module changes its gradients; empty: in none.
        without_gradient: Names of parameters that are to train and that no optimizer's step had a gradient for.
    """

    def __init__(self) -> None:
        self.optimizers: list[Optimizer] = []
        self.without_gradient: tuple[str, ...] = ()
        self._with_gradient: set[str] = set()
        self.sparse = self.clips = ""

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Note gradients that are sparse."""
        sparse = (n for n, p in pl_module.named_parameters() if p.grad is not None and p.grad.layout != torch.strided)
        self.sparse = self.sparse or next(sparse, "")
        self._with_gradient |= {name for name, entry in pl_module.named_parameters() if entry.grad is not None}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Note the optimizers, and end the fit."""
        mine = {id(parameter) for parameter in pl_module.parameters()}
        stepped = {id(o): {id(p) for group in o.param_groups for p in group["params"]} for o in trainer.optimizers}
        # without Lightning's stand-in for none
        self.optimizers = [o for o in trainer.optimizers if stepped[id(o)] & mine]
        kind = user_class(pl_module)
        hooks = ("configure_gradient_clipping", "on_before_optimizer_step", "on_after_backward")
        self.clips = next((hook for hook in hooks if getattr(kind, hook) is not getattr(LightningModule, hook)), "")
        trained = [name for name, entry in pl_module.named_parameters() if entry.requires_grad]
        self.without_gradient = tuple(
            name for name in trained if self._with_gradient and name not in self._with_gradient
        )
        raise FirstStepReached(self)


def _first_step(runner: ClientRuntime, batch: Any) -> tuple[FirstStepProbe, Exception | None]:
    """Take one step on a copy of the module; return what was seen, and what the step raised."""
    client = next(client_id for client_id in runner.described.client_ids if runner.described.num_samples(client_id))
    loader: DataLoader[Any] = DataLoader([batch], batch_size=None, collate_fn=_as_it_is)  # type: ignore[arg-type]
    with isolated(runner.settings.seed, "first step"), quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = runner.beside(runner.blueprint.without_callbacks([FirstStepProbe()], local_loop="trainer"))
        visitor = Client(alone, Message(0, client, {}, ()), ClientRecord(), runner.blueprint.build(client))
        visitor.num_samples = 1
        try:
            fit(alone, Fit(visitor, visitor.message, Phase(), alone.settings.work, loader))
        except FirstStepReached as done:
            return done.probe, None
        except Exception as error:  # of the user's code: a step that fails is refused where all steps are tried
            return FirstStepProbe(), error
    return FirstStepProbe(), None


def _as_it_is(batch: Any) -> Any:
    return batch


# -- batches of one sample ---------------------------------------------------------------------------------------------
def warn_single_sample_batches(runner: ClientRuntime) -> None:
    """Say which clients' last batch is a single sample, which BatchNorm cannot normalise: their visits would fail."""
    clients: dict[str, tuple[Any, int]] = {}  # client -> its loader, and its samples
    for client in runner.described.client_ids[:MOST_LOADERS]:
        loader: Any = runner.data.client_dataloader(client, "train")
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) or loader.drop_last:
            continue
        counts = runner.described.over_rounds.get(client) or [len(loader.dataset)]  # type: ignore[arg-type]
        count = next((length for length in counts if loader.batch_size and length % loader.batch_size == 1), None)
        if count is not None:
            clients[client] = loader, count
    if not clients:
        return
    client, (loader, count) = next(iter(clients.items()))
    with preserve_generators(loader.dataset):
        alone = runner.blueprint.precision.convert_input(loader.collate_fn(samples_at(loader.dataset, [0])))
    _, error = _first_step(runner, alone)
    if error is None or OF_ONE not in str(error):
        return
    way_out = (
        "Set drop_last=True in the data (batches are drawn anew in every epoch, so that no sample is left out for good), or "
        "another batch_size."
    )
    if count == 1:
        way_out = (
            "Give the client more samples or leave the client out, or take another normalisation, such as GroupNorm."
        )
    warn(
        f"The last batch of {len(clients)} of {len(runner.described.client_ids)} clients ({listed(clients)}) is a single "
        f"sample, which BatchNorm cannot normalise: client '{client}' has {count} training sample{'s' * (count > 1)} in "
        f"batches of {loader.batch_size}. Their visits will fail. {way_out}"
    )


MOST_CLIENTS = 3
"""Clients that are tried before a step counts as one that fails for everybody."""
USUAL = {"running_mean", "running_var", "num_batches_tracked", "_u", "_v"}
"""Last names of buffers that are known to be right as they are combined: statistics of normalisation, spectral norms."""
Entries = tuple[set[str], State]
"""Names of a model's entries, and those of its buffers whose meaning is not known by their names."""


# -- a step ------------------------------------------------------------------------------------------------------------
class OneBatchDone(ControlFlow):
    """Ends a fit after its first batch.

    Args:
        monitors: Metrics that the fit's learning-rate schedulers follow.
        visit: What the fit did.
        entries: Names of the model's entries, and its buffers, as the batch left them.
    """

    def __init__(self, monitors: Sequence[str], visit: VisitCallback, entries: Entries) -> None:
        super().__init__()
        self.monitors, self.visit, self.entries = list(monitors), visit, entries
        self.changed: list[str] = []
        self.refusal: str | None = None


class StopAfterOne(Callback):
    """Ends a fit after its first batch; the module sees the end of it and of the epoch, where errors count if `strict`."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        pl_module.on_train_batch_end(*args)
        following = [config for config in trainer.lr_scheduler_configs if config.reduce_on_plateau and config.strict]
        visit = next(callback for callback in trainer.callbacks if isinstance(callback, VisitCallback))  # type: ignore[attr-defined]
        visit.check_moves()
        monitors = [config.monitor for config in following if config.monitor is not None]
        done = OneBatchDone(monitors, visit, _entries(pl_module))
        with nullcontext() if self.strict else suppress(Exception, ControlFlow):  # one batch is not a whole epoch
            pl_module.on_train_epoch_end()
        raise done


@dataclass(frozen=True)
class StepTrial(PlainTask):
    """One batch of a step of one client, as a task.

    Attributes:
        client: The client's id.
        split: `"train"`: the training step; `"val"` or `"test"`: that evaluation.
        listen: Only find out what the module logs for a batch; of validation, for a batch as a whole epoch.
    """

    client: str
    split: str
    listen: bool = False

    @property
    def address(self) -> tuple[int, str, str]:
        return 0, f"a step of {self.split}", self.client

    def run(self, runner: ClientRuntime, record: ClientRecord) -> tuple[StepFinding, None]:
        """Try the step on a copy."""
        with isolated(runner.settings.seed, "sanity"), quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("default", f".*{UNCOPIED}")  # said once, which is here
            source = runner.data.at_round(0).client_dataloader(self.client, self.split)
            loader = None if source is None else spread(source, whole=self.split == "train")
            if loader is None or len(loader) == 0:
                return StepFinding(None if loader is None else False), None
            module = runner.blueprint.build(self.client)
            with preserve_generators(loader.dataset):
                try:
                    return self._try(runner, module, loader), None
                except UnseenStepsError as error:
                    return StepFinding(refusal=str(error)), None
                except NotOneNumberError as error:
                    return StepFinding(refusal=f"{error}.", cause=error), None
                except BaseException as error:  # whatever the user's code may raise
                    client_failure(error)
                    if self.listen:
                        raise
                    text = step_failure(error, module, self.split, self.client, loader, runner.callbacks)
                    return StepFinding(refusal=text, cause=error), None

    def _try(self, runner: ClientRuntime, module: LightningModule, loader: DataLoader[Any]) -> StepFinding:
        """Run the step, and return what it shows."""
        names: set[str] = set()
        try:
            if self.split == "train":
                if self.listen:
                    module.log = partial(_listen, names, module.log)  # type: ignore[method-assign]
                self._train(runner, module, loader)
            else:
                runner.scorer.client = self.client
                with _noting(runner.blueprint.losses) as stepped:
                    try:
                        names |= runner.scorer.score(module, loader, self.split).keys()
                    except NotOneNumberError:
                        raise
                    except Exception:  # what an epoch's end makes of one batch tells nothing of a whole epoch
                        if self.listen or not stepped:
                            raise
        except OneBatchDone as done:
            if done.visit.unseen:
                refuse_unseen(runner.callbacks, module, done.visit, runner.settings.unit)
            return StepFinding(True, done.refusal, sorted(names) if self.listen else done.monitors, done.changed)
        return StepFinding(names=sorted(names))

    def _train(self, runner: ClientRuntime, module: LightningModule, loader: DataLoader[Any]) -> None:
        alone = runner.beside(runner.blueprint.without_callbacks([StopAfterOne(self.listen)]))
        while True:
            before, attributes, clock = _entries(module), values_of(module), watch_clock(module)
            try:
                self._fit(alone, module, loader)
            except FastLoopRefused as reason:
                alone.loop.give_up(str(reason))
                module = runner.blueprint.build(self.client)
            except OneBatchDone as done:
                done.refusal = _other_shapes(module, before, done.entries)
                if done.refusal is None:
                    buffers = _entries(module)[1].items()
                    done.changed = [name for name, value in buffers if not is_same(value, before[1].get(name))]
                    done.changed += [] if self.listen else self._begins_anew(alone, loader, attributes, module, clock)
                detached(module)
                raise
            else:
                return

    def _fit(self, alone: ClientRuntime, module: LightningModule, loader: DataLoader[Any]) -> None:
        message = Message(0, self.client, {}, ())
        visitor = Client(alone, message, ClientRecord(), module)
        visitor.num_samples = count_used_samples(alone, loader)
        try:
            with isolated(alone.settings.seed, "sanity"), preserve_generators(loader.dataset):
                fit(alone, Fit(visitor, message, Phase(), alone.settings.work, loader))
        except OneBatchDone:
            visitor.scratch.clear()  # it ends in a cycle with its trainer, and is as large as a model
            raise

    def _begins_anew(
        self, alone: ClientRuntime, loader: DataLoader[Any], before: Values, trained: LightningModule, clock: Clock
    ) -> list[str]:
        """Return the attributes and clocks by which a step goes, and which begin anew in every visit."""

        def step(module: LightningModule) -> None:
            with suppress(OneBatchDone):
                self._fit(alone, module, loader)

        build = partial(alone.blueprint.build, self.client)
        clocks = followed(build, step, trained, clock) if alone.settings.optimizer_state == "reset" else []
        return taken_up(build, step, before, values_of(trained)) + clocks

    def lost(self, reason: str) -> StepFinding:
        """An answer that says why the step could not be tried."""
        return StepFinding(
            refusal=f"A step of {self.split} data could not be tried for client '{self.client}': {reason}."
        )


@contextmanager
def _noting(losses: StepLosses) -> Iterator[list[bool]]:
    """Within the block, each batch of an evaluation that is through is noted in a list."""
    add, stepped = losses.add, list[bool]()

    def note(outputs: Any, batch: Any) -> None:
        stepped.append(True)
        add(outputs, batch)

    losses.add = note  # type: ignore[method-assign]
    try:
        yield stepped
    finally:
        del losses.add


def _entries(module: LightningModule) -> Entries:
    state = module_state(module)
    names = [name for name, _ in module.named_buffers() if name in state and name.rpartition(".")[2] not in USUAL]
    return {*state}, clone(select(state, names), "cpu")


def _other_shapes(module: LightningModule, entries: Entries, entries_after: Entries) -> str | None:
    """Return the refusal of entries that training adds or removes, and of a buffer whose shape it changes.

    The server's model and those of all clients have the same.
    """
    (names, before), (names_after, after) = entries, entries_after
    for name in sorted(names ^ names_after):
        return (
            f"Training adds or removes '{name}' of {user_class(module).__name__}, and models have the server's entries. "
            "Make all of them in __init__ or configure_model()."
        )
    for name in (name for name in before if name in after and before[name].shape != after[name].shape):
        return (
            f"Training changes the shape of '{name}' of {user_class(module).__name__}, from {tuple(before[name].shape)} to "
            f"{tuple(after[name].shape)}, and entries of models have the shapes of the server's. Give it its full size from "
            "the start, or register it with persistent=False: it is not an entry of the model then, and begins anew in every "
            "visit."
        )
    return None


def _listen(names: set[str], log: Callable[..., None], name: str, *args: Any, **kwargs: Any) -> None:
    names.add(name)
    log(name, *args, **kwargs)


def spread(loader: Any, whole: bool = True) -> DataLoader[Any] | None:
    """Return a loader of the same batches' shape over the same dataset, without a random order or a state of its own.

    `None` if the loader is of a kind for which there is none.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    ready = gives_batches(loader)
    if loader.batch_size is None and not ready:
        return None
    samples, size = len(loader.dataset), loader.batch_size or 1  # type: ignore[arg-type]
    batches = max(samples // size, 1)
    order = [index for start in range(batches) for index in range(start, samples, batches)]
    return DataLoader(
        loader.dataset,
        batch_size=None if ready else size,
        sampler=order if whole else order[:size],
        drop_last=loader.drop_last and whole,
        collate_fn=loader.collate_fn,
        num_workers=min(loader.num_workers, 1),
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context if loader.num_workers else None,
        generator=torch.Generator(),
    )


# -- every step --------------------------------------------------------------------------------------------------------
class StepTrials:
    """Tries the steps that a run will use.

    Args:
        engine: Carries out tries.
        splits: Splits that models will be scored on.
        findings_by_trial: Those of trials that were carried out already.
    """

    def __init__(
        self, engine: Engine, splits: Sequence[str], findings_by_trial: Mapping[StepTrial, StepFinding]
    ) -> None:
        self.engine, self.splits, self.findings_by_trial = engine, splits, findings_by_trial
        self.blueprint = engine.runner.blueprint
        self._first_steps: dict[str, FirstStep] = {}
        self.changed: dict[str, list[str]] = {}  # by architecture: what a training step changes or goes by

    def check(self, modules: Mapping[str, LightningModule]) -> None:
        """Run one batch of every step on copies; refuse layers that come late, and metrics that nobody logs.

        A step is refused only if it fails for every client that is tried: one client's data may be bad.

        Args:
            modules: By architecture, a module of which `setup` may be called.
        """
        with isolated(self.blueprint.settings.seed, "sanity"), quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for module in modules.values():
                _refuse_late_layers(module)
            for architecture in modules:
                if self._trains_here:
                    monitors = self._step("train", architecture)
                    followed = [("A learning-rate scheduler", name) for name in monitors]
                    self._refuse_unknown_monitors(followed + self._watching(), architecture)
                for split in self.splits:
                    self._step(split, architecture)
        if self.engine.data_here and len(modules) == 1 and _normalises(self.blueprint.template):
            warn_single_sample_batches(self.engine.runner)
        if self.engine.data_here and any(map(corrects, self.blueprint.callbacks)):
            for architecture in modules:
                refuse_sparse_gradients(self.blueprint, architecture, self._probe)

    @cached_property
    def _probe(self) -> FirstStepProbe:
        return probe_first_step(self.engine.runner) if self.engine.data_here else FirstStepProbe()

    def first_step(self, architecture: str) -> FirstStep:
        """Return what a step of training and one of validation show; a step that fails is refused by :meth:`check`."""
        if architecture in self._first_steps:
            return self._first_steps[architecture]
        try:
            with isolated(self.blueprint.settings.seed, "sanity"), quiet(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                trials = [*islice(self._tries("val", architecture, listen=True), MOST_CLIENTS)]
        except Exception:
            trials = []
        logged = [trial.names for trial in trials if trial.refusal is None]
        # one client may lack what another has
        names = tuple(dict.fromkeys(name for trial_names in logged for name in trial_names))
        seen = self._probe
        step = FirstStep(
            tuple(seen.optimizers), seen.clips, names if logged else None, "val" in self.splits, seen.without_gradient
        )
        self._first_steps[architecture] = step
        return step

    def _step(self, split: str, architecture: str) -> list[str]:
        """Try a step; return the metrics that learning-rate schedulers follow."""
        first: StepFinding | None = None
        for tried in islice(self._tries(split, architecture), MOST_CLIENTS):
            if tried.refusal is None:
                self.changed |= {architecture: tried.said} if split == "train" else {}
                return tried.names
            first = first or tried
        if first is not None:
            raise ConfigurationError(first.refusal) from first.cause
        return []

    def _tries(self, split: str, architecture: str, listen: bool = False) -> Iterator[StepFinding]:
        """Try clients of an architecture with samples of a split, one after another, as long as there are batches to try."""
        for client in self._clients(split, architecture):
            task = StepTrial(client, split, listen)
            finding = self.findings_by_trial[task] if task in self.findings_by_trial else self.engine.ask(task)
            if finding.has_batches is None:
                return
            if finding.has_batches:
                yield finding

    def _clients(self, split: str, architecture: str) -> Iterator[str]:
        data = self.engine.runner.described
        for client in data.client_ids:
            if data.num_samples(client, split) and self.blueprint.architecture_of(client) == architecture:
                yield client

    def first(self) -> Iterator[StepTrial]:
        """Yield the tries that :meth:`check` needs, for a server that asks for all of them at once."""
        for architecture in self.blueprint.architectures:
            trained = ["train"] if self._trains_here else []
            tried = [(split, False) for split in (*trained, *self.splits)]
            tried += [("train", True), ("val", True)] if trained and self._watching() else []
            for split, listen in tried:
                for client in islice(self._clients(split, architecture), 1):
                    yield StepTrial(client, split, listen)

    @property
    def _trains_here(self) -> bool:
        """Whether a fit starts no other process."""
        arguments = self.blueprint.settings.trainer_arguments
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return False
        single = arguments.get("devices", 1) in (1, "1") and arguments.get("num_nodes", 1) == 1
        return single and arguments.get("strategy", "auto") in ("auto", "single_device")

    # -- monitors ------------------------------------------------------------------------------------------------------
    def _watching(self) -> list[tuple[str, str]]:
        """Return callbacks and what they monitor; none beside a callback of the user's, which may log it and is not tried."""
        callbacks = self.blueprint.settings.callbacks
        if not all(
            type(callback).__module__.startswith(("lightning.", "pytorch_lightning.")) for callback in callbacks
        ):
            return []
        strict = [callback for callback in callbacks if getattr(callback, "strict", True)]
        watching = [(type(callback).__name__, getattr(callback, "monitor", None)) for callback in strict]
        return [(owner, monitor) for owner, monitor in watching if isinstance(monitor, str)]

    def _refuse_unknown_monitors(self, monitors: Sequence[tuple[str, str]], architecture: str) -> None:
        """Refuse callbacks and schedulers that monitor what the module logs neither in training nor in validation."""
        template = self.blueprint.template_of(architecture)
        if not monitors:
            return
        try:
            trials = [
                trial for split in ("train", "val") for trial in islice(self._tries(split, architecture, True), 1)
            ]
        except Exception:  # the step that fails is found by the checks; of an epoch's end one batch tells nothing
            return
        if any(trial.refusal is not None for trial in trials):  # elsewhere, where it cannot raise here
            return
        logged = {name for trial in trials for name in trial.names}
        for owner, monitor in monitors:
            if not {monitor, monitor.removesuffix("_step"), monitor.removesuffix("_epoch")} & logged:
                raise ConfigurationError(
                    f"{owner} monitors '{monitor}', which {type(template).__name__} does not log. It logs "
                    f"{', '.join(sorted(logged)) or 'nothing'}."
                )


def _normalises(module: LightningModule) -> bool:
    return any(isinstance(child, _BatchNorm) for child in module.modules())


def _refuse_late_layers(module: LightningModule) -> None:
    """Refuse layers that `setup` adds, which the server's model does not have. It is called on the module."""
    if not is_overridden("setup", module):
        return
    before = set(module_state(module))
    try:
        module.setup("fit")
    except Exception:  # it needs a trainer
        return
    late = [name for name in module_state(module) if name not in before]
    if late:
        raise ConfigurationError(
            f"{user_class(module).__name__}.setup makes '{late[0]}', which the server's model does not have "
            "before a fit starts. Make layers in __init__ or configure_model."
        )
