"""One batch of every step that a run will use, on a copy, before round 1: what a later step would raise shows now.

The module is built as a client's is (`wrap_module`), but no callback's hooks run, nothing is logged, and every global random
generator is left as it was. A loader of the user is not iterated; its dataset is read through a loader made here.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader

from fedlightning.blueprint.blueprint import Blueprint
from fedlightning.blueprint.evaluator import StepLosses, make_evaluator
from fedlightning.compat.quiet import quiet
from fedlightning.datamodules.own_generators import kept
from fedlightning.errors import ConfigurationError, users_line
from fedlightning.federation.engine import Engine, Question, Task
from fedlightning.federation.first_step import ask_first_step
from fedlightning.federation.one_batch import shapes, spread
from fedlightning.hooks import CallbackList, Phase
from fedlightning.messages import Message
from fedlightning.seeding import isolated
from fedlightning.tensors import module_state
from fedlightning.visit import fit as local_fit
from fedlightning.visit.client import Client
from fedlightning.visit.fast import evaluation as fast_evaluation
from fedlightning.visit.fast.errors import NotInFastLoop
from fedlightning.visit.record import ClientRecord
from fedlightning.visit.runner import LocalRunner
from fedlightning.wrappers import user_class

MOST_CLIENTS = 3
"""Clients that are tried before a step counts as one that fails for everybody."""


class OneBatchDone(Exception):
    """Ends a fit after its first batch.

    Args:
        monitors: Metrics that its learning-rate schedulers follow.
    """

    def __init__(self, monitors: Sequence[str] = ()) -> None:
        super().__init__()
        self.monitors = list(monitors)


class StopAfterOne(Callback):
    """Ends a fit after its first batch."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        following = [config for config in trainer.lr_scheduler_configs if config.reduce_on_plateau and config.strict]
        raise OneBatchDone([config.monitor for config in following if config.monitor is not None])


def first_tries(engine: Engine, splits: Sequence[str]) -> list[TryStep]:
    """Return the tries that :func:`check_steps` needs where each costs an exchange: none if the data are here."""
    blueprint, found = engine.runner.blueprint, []
    if engine.data_here:
        return []
    trained = ["train"] if _is_one_device(blueprint.settings.trainer_arguments) else []
    for architecture in blueprint.architectures:
        tried = [(split, False) for split in (*trained, *splits)]
        if trained and _watching(blueprint, architecture):
            tried += [("train", True), ("val", True)]
        for split, listen in tried:
            found += [TryStep(client, split, listen) for client in islice(_clients(engine, split, architecture), 1)]
    return found


def check_steps(engine: Engine, splits: Sequence[str], known: Mapping[Task[Any], Any] = MappingProxyType({})) -> None:
    """Run one batch of `training_step`, and of the evaluation steps of `splits`, on copies, where the data are.

    A step is refused only if it fails for every client that is tried: one client's data may be bad.
    """
    blueprint, tries = engine.runner.blueprint, Tries(engine, known)
    with isolated(blueprint.settings.seed, "sanity"), quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for architecture in blueprint.architectures:
            _refuse_late_layers_of(blueprint.build("server", architecture))
        for architecture in blueprint.architectures:
            if _is_one_device(blueprint.settings.trainer_arguments):
                monitors = _check(tries, "train", architecture)
                followed = [("A learning-rate scheduler", name) for name in monitors]
                _refuse_unknown_monitors(tries, followed, architecture)
            for split in splits:
                _check(tries, split, architecture)
    for architecture in blueprint.architectures:
        ask_first_step(engine, architecture, partial(_logged, tries, architecture) if "val" in splits else list)


def _logged(tries: Tries, architecture: str) -> Iterator[list[str]]:
    """Yield what the module logs in validation, for some clients."""
    with isolated(tries.engine.runner.settings.seed, "sanity"), quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = list(islice(tries.of("val", architecture, listen=True), MOST_CLIENTS))
    yield from (tried.names for tried in found if tried.refusal is None)


def _check(tries: Tries, split: str, architecture: str) -> list[str]:
    first: Tried | None = None
    for tried in islice(tries.of(split, architecture), MOST_CLIENTS):
        if tried.refusal is None:
            return tried.names
        first = first or tried
    if first is not None:
        raise ConfigurationError(first.refusal) from first.cause
    return []


class Tries:
    """Tries steps, those besides that are known already.

    Args:
        engine: Carries them out.
        known: Answers of tries that were carried out.
    """

    def __init__(self, engine: Engine, known: Mapping[Task[Any], Any]) -> None:
        self.engine = engine
        self._known = dict(known)

    def of(self, split: str, architecture: str, listen: bool = False) -> Iterator[Tried]:
        """Try clients of an architecture with samples of a split, one after another, as long as there are batches to try."""
        for client in _clients(self.engine, split, architecture):
            task = TryStep(client, split, listen)
            tried = self._known[task] if task in self._known else self.engine.ask(task)
            if tried.has_batches is None:
                return
            if tried.has_batches:
                yield tried


def _clients(engine: Engine, split: str, architecture: str) -> Iterator[str]:
    known, architecture_of = engine.runner.described, engine.runner.blueprint.architecture_of
    for client in known.client_ids:
        if known.num_samples(client, split) and architecture_of(client) == architecture:
            yield client


@dataclass(frozen=True)
class Tried:
    """What a try gave.

    Attributes:
        has_batches: `False`: this client has no batch; `None`: loaders of this kind cannot be tried.
        refusal: The sentence, if the step fails.
        names: Metrics that schedulers follow; or those that the module logs, where it was listened to.
        cause: What the step raised, where that is in this process.
    """

    has_batches: bool | None
    refusal: str | None = None
    names: list[str] = field(default_factory=list)
    cause: Exception | None = None

    def __reduce__(self) -> Any:
        return Tried, (self.has_batches, self.refusal, self.names)


@dataclass(frozen=True)
class TryStep(Question):
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

    def run(self, runner: LocalRunner, record: ClientRecord) -> tuple[Tried, None]:
        """Try the step on a copy."""
        with isolated(runner.settings.seed, "sanity"), quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = runner.data.client_dataloader(self.client, self.split)
            loader = None if made is None else spread(made, whole=self.split == "train")
            if loader is None or len(loader) == 0:
                return Tried(None if loader is None else False), None
            plain = runner.beside(runner.blueprint.without_callbacks([StopAfterOne()]))
            module = runner.blueprint.build(self.client)
            with kept(loader.dataset):
                try:
                    return Tried(True, None, self._try(plain, module, loader)), None
                except Exception as error:  # whatever the user's code may raise
                    if self.listen:
                        raise
                    text = _sentence(error, module, self.split, self.client, loader, runner.callbacks)
                    return Tried(True, text, cause=error), None

    def _try(self, plain: LocalRunner, module: LightningModule, loader: DataLoader[Any]) -> list[str]:
        if not self.listen:
            if self.split == "train":
                return _train(plain, module, loader, self.client)
            _score(plain, self.split, module, loader, self.client)
            return []
        if self.split == "val":
            return list(plain.scorer.score(module, loader, "val"))
        names: set[str] = set()
        module.log = partial(_listen, names, module.log)  # type: ignore[method-assign]
        _train(plain, module, loader, self.client)
        return sorted(names)

    def lost(self, reason: str) -> Tried:
        """An answer that says why the step could not be tried."""
        return Tried(True, f"A step of {self.split} data could not be tried for client '{self.client}': {reason}.")


def _train(runner: LocalRunner, module: LightningModule, loader: DataLoader[Any], client: str) -> list[str]:
    """Train one batch; return the metrics that learning-rate schedulers follow."""
    for attempt in range(2):
        message = Message(0, client, {}, ())
        visitor = Client(runner, message, ClientRecord(), module if attempt == 0 else runner.blueprint.build(client))
        visitor.num_samples = runner.used_samples(loader)
        phase = Phase()
        try:
            local_fit.fit(
                visitor,
                CallbackList([]),
                runner.settings,
                loader,
                lambda *args: None,
                runner.surroundings(visitor, phase),
                phase=phase,
                work=runner.settings.work,
                fast_trainer=runner.loop.fast_trainer(visitor.module, loader),
            )
        except OneBatchDone as done:
            return done.monitors
        except NotInFastLoop as reason:
            runner.loop.give_up(str(reason))
        else:
            break
    return []


def _score(runner: LocalRunner, split: str, module: LightningModule, loader: DataLoader[Any], client: str) -> None:
    testing = split == "test" and is_overridden("test_step", module)
    if not testing and not is_overridden("validation_step", module):
        return
    settings, trainer = runner.settings, runner.blueprint.trainer
    runner.scorer.client = client
    runner.scorer.set_up(module)
    try:
        if runner.scorer.fast and fast_evaluation.refusal(module, loader, trainer, testing) is None:
            mode = bool(settings.trainer_arguments.get("inference_mode", True))
            try:
                fast_evaluation.evaluate(module, loader, trainer, testing, _done, mode)
            except NotInFastLoop:
                module = runner.blueprint.build(client)
            else:
                return
        evaluator = make_evaluator(settings.trainer_arguments, OneLoss())
        vars(evaluator)["datamodule"] = vars(trainer)["datamodule"]
        runner.scorer.set_up(module)
        (evaluator.test if testing else evaluator.validate)(module, dataloaders=loader, verbose=False)
    except OneBatchDone:
        return


def _done(outputs: Any, batch: Any) -> None:
    raise OneBatchDone


class OneLoss(StepLosses):
    """Ends an evaluation after its first batch."""

    def add(self, outputs: Any, batch: Any) -> None:
        raise OneBatchDone


def _is_one_device(arguments: Mapping[str, Any]) -> bool:
    """Return True if a fit starts no other process."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return False
    one = arguments.get("devices", 1) in (1, "1")
    return one and arguments.get("num_nodes", 1) == 1 and arguments.get("strategy", "auto") in ("auto", "single_device")


def _refuse_late_layers_of(module: LightningModule) -> None:
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


# -- monitors ----------------------------------------------------------------------------------------------------------
def _watching(blueprint: Blueprint, architecture: str) -> list[tuple[str, str]]:
    """Return callbacks and what they monitor; none where the module may log it at an epoch's end, which no try reaches."""
    if is_overridden("on_train_epoch_end", blueprint.template_of(architecture)):
        return []
    strict = [callback for callback in blueprint.settings.callbacks if getattr(callback, "strict", True)]
    watching = [(type(callback).__name__, getattr(callback, "monitor", None)) for callback in strict]
    return [(owner, monitor) for owner, monitor in watching if isinstance(monitor, str)]


def _refuse_unknown_monitors(tries: Tries, followed: list[tuple[str, str]], architecture: str) -> None:
    """Refuse callbacks and schedulers that monitor what the module logs neither in training nor in validation."""
    blueprint = tries.engine.runner.blueprint
    template = blueprint.template_of(architecture)
    monitors = followed + _watching(blueprint, architecture)
    if not monitors or is_overridden("on_train_epoch_end", template):
        return
    try:
        found = [one for split in ("train", "val") for one in islice(tries.of(split, architecture, listen=True), 1)]
    except Exception:  # the step that fails is found by the checks
        return
    if any(one.refusal is not None for one in found):  # elsewhere, where it cannot raise here
        return
    known = {name for one in found for name in one.names}
    for owner, monitor in monitors:
        if not {monitor, monitor.removesuffix("_step"), monitor.removesuffix("_epoch")} & known:
            raise ConfigurationError(
                f"{owner} monitors '{monitor}', which {type(template).__name__} does not log. It logs "
                f"{', '.join(sorted(known)) or 'nothing'}."
            )


def _listen(names: set[str], log: Callable[..., None], name: str, *args: Any, **kwargs: Any) -> None:
    names.add(name)
    log(name, *args, **kwargs)


# -- the sentence ------------------------------------------------------------------------------------------------------
def _sentence(
    error: Exception, module: LightningModule, split: str, client: str, loader: DataLoader[Any], callbacks: CallbackList
) -> str:
    step = {"train": "training_step", "val": "validation_step", "test": "test_step"}[split]
    if split == "test" and not is_overridden("test_step", module):
        step = "validation_step"
    wrapping = [callback.key for callback in callbacks if callback.claims("wrap_module")]
    wrapped = f" The module is wrapped by {' and then '.join(wrapping)}." if len(wrapping) > 1 else ""
    ran = step in {frame.name for frame in traceback.extract_tb(error.__traceback__)}
    what = f"{type(module).__name__}.{step}" if ran else f"The {'fit' if split == 'train' else 'evaluation'}"
    text = " ".join(str(error).split()).rstrip(".")
    place = users_line(error)
    shape = f" Its batch: {shapes(loader)}." if ran else ""
    return (
        f"{what} fails for client '{client}' on a batch of {split} data, tried before round 1: {type(error).__name__}: "
        f"{text}{f' ({place})' if place else ''}.{shape}{wrapped}"
    )
