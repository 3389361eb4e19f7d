"""Scenes that hypothesis draws: a module, a list of callbacks, data with their loader, and arguments of the trainer.

Methods are those of the conformance suite, so that a new one is drawn without a word here.
"""

from __future__ import annotations

import copy
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import fedlightning
from fedlightning import FederatedTrainer
from fedlightning.callbacks import GlobalCheckpoint, LocalCheckpoint, RandomK, TopK
from fedlightning.datamodules.sampling import AddressedSampler
from fedlightning.engines.attempts import FederationError
from fedlightning.parallel.pool import UnpicklableError
from fedlightning.tensors import as_reals, module_state
from fedlightning.testing.runs import StopAfter, Stopped, deployed, server_of
from fedlightning.testing.toys import FEATURES, WIDTH, ToyData, ToyModule
from tests.callbacks.test_complex import OTHERS, Turned
from tests.conformance.case import Case, collect
from tests.helpers import make_trainer

# -- modules -----------------------------------------------------------------------------------------------------------


class Steps(ToyModule):
    """Optimizers of many kinds: `name` is momentum, adam, decay, schedule or two (one for the head, one for the rest)."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def configure_optimizers(self) -> Any:
        if self.name == "adam":
            return torch.optim.AdamW(self.parameters(), 0.02, weight_decay=0.1)
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9, weight_decay=0.1 * (self.name == "decay"))
        if self.name == "schedule":
            return [optimizer], [
                {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5), "interval": "step"}
            ]
        return optimizer


class Dropped(ToyModule):
    """Random masks."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Dropout(0.3), nn.Tanh())


class Manual(ToyModule):
    """Two optimizers stepped by hand; the first rests in every second batch, or always."""

    def __init__(self, both: bool = True) -> None:
        super().__init__()
        self.automatic_optimization, self.both = False, both

    def configure_optimizers(self) -> Any:
        rest = [*self.body.parameters(), *self.middle.parameters()]
        return torch.optim.SGD(rest, 0.1), torch.optim.SGD(self.head.parameters(), 0.1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for number, optimizer in enumerate(self.optimizers()):
            optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
            if number or (self.both and batch_idx % 2 == 0):
                optimizer.step()


class Parametrized(ToyModule):
    """A layer with a parametrization: weight_norm, orthogonal or spectral_norm."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        getattr(nn.utils.parametrizations, kind)(self.middle)


class Skips(ToyModule):
    """Steps that train nothing, and a buffer that is not a running statistic."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turn", torch.ones(2, dtype=torch.complex64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


class Counting(ToyModule):
    """Buffers that differ between clients: samples and the mean input as floats, steps and labels as integers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("samples", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("labels", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            self.samples += len(batch[1])
            self.mean.lerp_(batch[0].mean(0), 0.3)
            self.steps += 1
            self.labels += batch[1].sum()
        x = batch[0] - self.mean  # so that a wrong one shows in the parameters
        return F.cross_entropy(self(x), batch[1])


MODULES: dict[str, Callable[[], Any]] = {
    "plain": ToyModule,
    "full": lambda: ToyModule(full=True),
    **{name: (lambda name=name: Steps(name)) for name in ("momentum", "adam", "decay", "schedule")},
    **{name: (lambda name=name: Parametrized(name)) for name in ("weight_norm", "orthogonal", "spectral_norm")},
    "dropout": Dropped,
    "manual": Manual,
    "second optimizer": lambda: Manual(both=False),
    "skips": Skips,
    "counting": Counting,
    "complex": lambda: Turned(False),
    "two reals": lambda: Turned(True),
}
"""Ways to write a module, all with the layers `body`, `middle` and `head` and the same inputs."""

# -- callbacks ---------------------------------------------------------------------------------------------------------

CALLBACKS: dict[str, Case] = {
    **collect("CASES"),
    **OTHERS,
    "RandomK all": Case(RandomK(1.0)),
    "TopK all": Case(TopK(1.0, feedback=False)),
    "LocalCheckpoint": Case(LocalCheckpoint(smooth=1, min_samples=0), arguments={"evaluation": 1}),
    "GlobalCheckpoint": Case(GlobalCheckpoint(), arguments={"evaluation": 1}),
}
"""What is put into lists."""

# -- data --------------------------------------------------------------------------------------------------------------


class Data(ToyData):
    """Toy data with other loaders.

    Args:
        loader: `"shuffled"`, `"ordered"`, `"dropping"` (the last batch, if it is short), or `"whole"`: one batch.
        given: Tensors of the training splits by client, instead of toy samples.
    """

    def __init__(self, sizes: Sequence[int], loader: str = "shuffled", **options: Any) -> None:
        super().__init__(sizes, **options)
        self.loader = loader

    def _loader(self, dataset: Any, client: str, split: str) -> Any:
        train = split == "train"
        sampler = AddressedSampler(len(dataset), client, shuffle=train and self.loader in ("shuffled", "dropping"))
        return DataLoader(
            dataset,
            batch_size=max(len(dataset), 1) if train and self.loader == "whole" else self.batch_size,
            drop_last=train and self.loader == "dropping",
            sampler=sampler,
            generator=sampler.generator,
        )


LOADERS = ("shuffled", "ordered", "dropping", "whole")

# -- scenes ------------------------------------------------------------------------------------------------------------


MAY_FAIL = (
    "has no training samples",
    "Expected more than 1 value per channel",
    "has taken no step of an optimizer in a whole epoch",
)
"""Failures of a client that may be: no samples, one where batch normalisation needs two, a phase in which nothing trains."""


class Refused(Exception):
    """A scene that the package refused before round 1, with the sentence."""


@dataclass(frozen=True)
class Scene:
    """A run, before it is done; `replace` gives another one.

    Attributes:
        module: A key of `MODULES`.
        callbacks: Keys of `CALLBACKS`, cases, or callbacks.
        sizes: Training samples of the clients.
        loader: How they are read.
        options: Arguments of the trainer.
        data: Options of the data.
    """

    module: str = "plain"
    callbacks: tuple[Any, ...] = ()
    sizes: tuple[int, ...] = (12, 7, 10)
    loader: str = "shuffled"
    options: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)

    def but(self, **changes: Any) -> Scene:
        """Return this scene with some things changed; options are added."""
        changes = {name: self.options | value if name == "options" else value for name, value in changes.items()}
        return replace(self, **changes)

    def beside(self, *callbacks: Any) -> Scene:
        """Return this scene with more callbacks."""
        return replace(self, callbacks=(*self.callbacks, *callbacks))

    def cases(self) -> list[Case]:
        """Return the callbacks with what they need."""
        cases = [CALLBACKS[entry] if isinstance(entry, str) else entry for entry in self.callbacks]
        return [entry if isinstance(entry, Case) else Case(entry) for entry in cases]

    def arguments(self) -> dict[str, Any]:
        """Return the trainer's arguments: those that the methods need come before those drawn."""
        arguments: dict[str, Any] = {"max_rounds": 3, "local_steps": 3, "sanity_check": True} | self.options
        for wanted in (case.arguments for case in self.cases()):
            if "local_epochs" in wanted:
                arguments.pop("local_steps", None)
            arguments |= {key: value for key, value in wanted.items() if key not in ("full", "batch_size")}
        return arguments

    def make_data(self) -> Data:
        """Return the data module."""
        data = Data(self.sizes, self.loader, **self.data)
        for case in self.cases():
            data.batch_size = case.arguments.get("batch_size", data.batch_size)
        return data

    def make_callbacks(self) -> list[Any]:
        """Return new callbacks."""
        return [copy.deepcopy(case.algorithm) for case in self.cases()]

    def make_module(self) -> Any:
        """Return the module, always the same one."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return MODULES[self.module]()

    def run(self, root: Path | None = None, resume: Any = None, others: Sequence[Any] = ()) -> FederatedTrainer:
        """Federate.

        Raises:
            Refused: If the package says in a sentence why this cannot work, before round 1 unless the data decide.
        """
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                trainer = make_trainer(root, [*self.make_callbacks(), *others], **self.arguments())
                trainer.fit(self.make_module(), datamodule=self.make_data(), resume=resume)
            except (ValueError, FederationError) as error:
                is_refusal = is_sentence(error) and (before_round_1(error) or isinstance(error, UnpicklableError))
                if not is_refusal and not any(words in str(error) for words in MAY_FAIL):
                    raise
                raise Refused(str(error)) from error
        trainer.said = [str(warning.message) for warning in caught]
        reasons = [failure["reason"] for failure in server_of(trainer).failures]
        broken = [reason for reason in reasons if not any(words in reason for words in MAY_FAIL)]
        assert not broken, broken[0]
        return trainer

    def cut_and_resumed(self, root: Path, after: int) -> FederatedTrainer:
        """Stop in the round after so many, as a killed process does, and go on."""
        with suppress(Stopped):
            self.run(root, others=[StopAfter(after)])
        return self.run(root, resume="last")


def is_sentence(error: ValueError) -> bool:
    """Return whether an error was written here, for people."""
    place = traceback.extract_tb(error.__traceback__)[-1].filename
    package = Path(fedlightning.__file__).parent
    here = any(Path(place).resolve().is_relative_to(folder) for folder in (package, package.parent / "callbacks"))
    return here and len(str(error).split()) > 4 and str(error).rstrip()[-1] in ".:)'"


def before_round_1(error: BaseException) -> bool:
    """Return whether an error came before any client trained."""
    return not any(frame.name == "_round" for frame in traceback.extract_tb(error.__traceback__))


def results(trainer: FederatedTrainer) -> dict[str, Any]:
    """Return what a run leaves: the server's models, and the module that each client uses. Tied weights stay tied."""
    models = server_of(trainer).models
    for state in models.values():
        if {"middle.weight", "again.weight"} <= state.keys():
            assert torch.equal(state["middle.weight"], state["again.weight"]), "tied weights came apart"
    return {"server": models} | {label: dict(module_state(module)) for label, module in deployed(trainer)}


def reals(tree: Any) -> Any:
    """Return nested values with complex tensors as pairs of reals."""
    return {key: reals(value) for key, value in tree.items()} if isinstance(tree, dict) else as_reals(tree)


# -- strategies --------------------------------------------------------------------------------------------------------

OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "local_epochs": st.sampled_from([1, 2]),
        "participation": st.sampled_from([1.0, 2]),
        "optimizer_state": st.sampled_from(["reset", "keep"]),
        "float_buffers": st.sampled_from(["average", "local", "server"]),
        "lr_decay": st.just(0.8),
        "accumulate_grad_batches": st.just(2),
        "gradient_clip_val": st.just(0.5),
        "local_loop": st.sampled_from(["trainer", "fast"]),
        "evaluation": st.just(2),
    },
).map(lambda drawn: drawn | ({"local_steps": None} if "local_epochs" in drawn else {}))


def scenes(
    modules: Sequence[str] = tuple(name for name in MODULES if name != "two reals"),
    callbacks: Sequence[str] = tuple(CALLBACKS),
    loaders: Sequence[str] = LOADERS,
    most: int = 2,
    options: st.SearchStrategy[dict[str, Any]] = OPTIONS,
    sizes: Sequence[tuple[int, ...]] = ((12, 7, 10), (12, 7, 10, 15), (9, 6), (11, 1, 8)),
) -> st.SearchStrategy[Scene]:
    """Draw scenes out of what a relation is about."""
    chosen = st.lists(st.sampled_from(callbacks), max_size=most, unique_by=lambda name: name.partition(" ")[0])
    return st.builds(
        Scene, st.sampled_from(modules), chosen.map(tuple), st.sampled_from(sizes), st.sampled_from(loaders), options
    )
