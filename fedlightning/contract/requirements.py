"""What a callback requires of the module, the data and the run, in words: each is a phrase after the callback's name.

A callback lists them in its facts, `Facts(requires=[AutomaticOptimization("replaces the gradient of the step")])`, and they
are asked before its own `check`. Words about features and predictions are beside what they look with, in
`fedlightning/callbacks/shared/`; a word of your own is a :class:`Requirement` with a method `refuse`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedlightning.datamodules.public import has_positions
from fedlightning.errors import listed

if TYPE_CHECKING:
    from fedlightning.contract.callback import FederatedCallback
    from fedlightning.contract.setup import Setup


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """Something that a callback requires of a federation.

    In the words below, `why` is what the callback does that requires it, as the middle of a sentence after its name, and
    `instead` the way out.

    Attributes:
        when: The option or property of the callback that has to be set (to what counts as true) for it to be required, or a
            method that says so of the setup; empty: always.
    """

    when: str = ""

    def check(self, owner: FederatedCallback, setup: Setup) -> None:
        """Refuse a federation that is not so, or warn of it, where the callback's options require it.

        Raises:
            ValueError: With a sentence.
        """
        applies = getattr(owner, self.when) if self.when else True
        if applies(setup) if callable(applies) else applies:
            self.refuse(owner, setup)

    def refuse(self, owner: FederatedCallback, setup: Setup) -> None:
        """Refuse a federation that is not so, or warn of it. Override."""
        raise NotImplementedError


@dataclass(frozen=True)
class AutomaticOptimization(Requirement):
    """The module does not optimize manually."""

    why: str
    instead: str = "Use automatic optimization."

    def refuse(self, owner: FederatedCallback, setup: Setup) -> None:
        if not setup.module.automatic_optimization:
            name = type(setup.template).__name__
            raise ValueError(f"{owner.key} {self.why}, but {name} optimizes manually. {self.instead}")


@dataclass(frozen=True)
class SteadyData(Requirement):
    """The clients' training data do not change from round to round."""

    why: str

    def refuse(self, owner: FederatedCallback, setup: Setup) -> None:
        if setup.data.drifts:
            raise ValueError(
                f"{owner.key} {self.why}, and here the clients' training data change from round to round. Remove "
                f"{owner.key}, or give data that stay."
            )


@dataclass(frozen=True)
class NumberedSamples(Requirement):
    """Training samples can be had one by one, unlike those of streams and of ready batches."""

    why: str

    def refuse(self, owner: FederatedCallback, setup: Setup) -> None:
        other = next((loader for loader in setup.data.train_loaders() if not has_positions(loader)), None)
        if other is not None:
            raise ValueError(
                f"{owner.key} {self.why}, and those of {type(getattr(other, 'dataset', other)).__name__} have no position: "
                "it gives a stream or ready batches. Use a map-style dataset of samples, and a batch_size."
            )


@dataclass(frozen=True)
class Split(Requirement):
    """Some client has samples of a split."""

    split: str
    why: str
    instead: str

    def refuse(self, owner: FederatedCallback, setup: Setup) -> None:
        if not setup.data.has_split(self.split):
            raise ValueError(f"{owner.key} {self.why}, but no client has any. {self.instead}")


@dataclass(frozen=True)
class PooledSplit(Requirement):
    """The union of the clients' data of a split can be had in one place; `why` ends with it."""

    split: str
    why: str
    instead: str

    def refuse(self, owner: FederatedCallback, setup: Setup) -> None:
        if not setup.data.has_pooled(self.split):
            raise ValueError(f"{owner.key} {self.why}, which cannot be had in one place here. {self.instead}")


@dataclass(frozen=True)
class PublicData(Requirement):
    """There are public data, whose samples have positions."""

    why: str = "trains on public data"
    instead: str = ""

    def refuse(self, owner: FederatedCallback, setup: Setup) -> None:
        if not setup.public.exists():
            raise ValueError(
                f"{owner.key} {self.why}, but the data module has no public data. Set public=0.1 (a share of every client's "
                f"training samples that all may see), or public: another data set{self.instead}."
            )
        setup.public.size()  # refuses samples without positions


@dataclass(frozen=True)
class FreshOptimizers(Requirement):
    """Optimizers begin anew in every visit."""

    why: str
    instead: str = ""

    def refuse(self, owner: FederatedCallback, setup: Setup) -> None:
        if setup.run.optimizer_state == "keep":
            raise ValueError(
                f"{owner.key} {self.why}, and with optimizer_state='keep' optimizers would go on with the moments of another "
                f"model. Use optimizer_state='reset'{self.instead}."
            )


@dataclass(frozen=True)
class LastingMemory(Requirement):
    """What optimizers remember lasts from visit to visit, or they remember nothing.

    Attributes:
        warns: Whether it is only warned of.
    """

    why: str
    warns: bool = False

    def refuse(self, owner: FederatedCallback, setup: Setup) -> None:
        for optimizer in setup.optimizers if setup.run.optimizer_state != "keep" else ():
            if type(optimizer).__name__ != "SGD" or any(group.get("momentum") for group in optimizer.param_groups):
                sentence = (
                    f"{owner.key} {self.why}, and with optimizer_state='reset' the memory of its {type(optimizer).__name__} "
                    "begins anew in each. Set optimizer_state='keep', or use SGD without momentum."
                )
                if not self.warns:
                    raise ValueError(sentence)
                setup.warn(sentence)
                return


@dataclass(frozen=True)
class EveryClient(Requirement):
    """All clients take part in every round."""

    why: str
    instead: str = "Let all take part (participation=1.0)."

    def refuse(self, owner: FederatedCallback, setup: Setup) -> None:
        if setup.run.absent:
            raise ValueError(
                f"{owner.key} {self.why}, and {setup.run.absent} leaves some of them out of a round. {self.instead}"
            )


@dataclass(frozen=True)
class ForEveryClient(Requirement):
    """Options that are given by client leave no client out."""

    options: tuple[str, ...]

    def refuse(self, owner: FederatedCallback, setup: Setup) -> None:
        for option in self.options:
            values = getattr(owner, option)
            missing = [client for client in setup.run.clients if isinstance(values, Mapping) and client not in values]
            if missing:
                raise ValueError(
                    f"{owner.key} got no {option} for client '{missing[0]}'. Give one value for all, or one for each client."
                )


@dataclass(frozen=True)
class Travels(Requirement):
    """Something travels; with `trainable`, something that trains."""

    why: str
    instead: str = "Remove one of the callbacks."
    trainable: bool = False

    def refuse(self, owner: FederatedCallback, setup: Setup) -> None:
        names = [name for name in setup.shared_names() if not self.trainable or setup.kinds[name] == "trainable"]
        if not names:
            what = "no trainable entry" if self.trainable else "nothing"
            raise ValueError(f"{owner.key} {self.why}, and {what} travels here. {self.instead}")


@dataclass(frozen=True)
class LocalSteps(Requirement):
    """Visits are counted in steps, and are one step where `count` says so."""

    why: str
    instead: str
    count: int | None = 1

    def refuse(self, owner: FederatedCallback, setup: Setup) -> None:
        steps = setup.run.local_steps
        if steps is None or self.count not in (None, steps):
            raise ValueError(
                f"{owner.key} {self.why}, but local_steps={steps} and local_epochs={setup.run.local_epochs}. {self.instead}"
            )


@dataclass(frozen=True)
class Advice(Requirement):
    """Nothing is required: users are told something that they may not expect."""

    text: str

    def refuse(self, owner: FederatedCallback, setup: Setup) -> None:
        setup.warn(f"{owner.key} {self.text}")


@dataclass(frozen=True)
class PlainSGD(Requirement):
    """Optimizers are SGD; else it is warned of.

    Attributes:
        what: What another optimizer does, after its name.
        momentum: Whether SGD may have momentum.
    """

    why: str
    what: str
    momentum: bool = False

    def refuse(self, owner: FederatedCallback, setup: Setup) -> None:
        for optimizer in setup.optimizers:
            name, momentum = type(optimizer).__name__, bool(optimizer.defaults.get("momentum"))
            if name != "SGD" or (momentum and not self.momentum):
                setup.warn(f"{owner.key} {self.why}; {name}{' with momentum' * momentum} {self.what}")


@dataclass(frozen=True)
class NoWeightDecay(Requirement):
    """Optimizers decay no weights."""

    why: str

    def refuse(self, owner: FederatedCallback, setup: Setup) -> None:
        for optimizer in setup.optimizers:
            if any(group.get("weight_decay") for group in optimizer.param_groups):
                name = f"{type(setup.template).__name__}'s {type(optimizer).__name__}"
                raise ValueError(f"{owner.key} {self.why}, and {name} decays weights. Set weight_decay=0.")


@dataclass(frozen=True)
class NoClipping(Requirement):
    """Gradients are not clipped; else it is warned of."""

    why: str
    instead: str = ""

    def refuse(self, owner: FederatedCallback, setup: Setup) -> None:
        if clip := setup.run.trainer_arguments.get("gradient_clip_val"):
            setup.warn(
                f"{owner.key} {self.why}, and where gradient_clip_val={clip} cuts a step, that is not the gradient of the "
                f"loss. Leave it out{self.instead}."
            )


@dataclass(frozen=True)
class NoOvershoot(Requirement):
    """A pull moves a client by less than twice its way in a step of SGD: beyond that it diverges.

    Attributes:
        option: The option of the callback by which it pulls.
        pull: Method of the callback that gives the pull at learning rate 1, from the samples of each client; empty: it is
            the option.
        limit: The part of the way from which it counts.
        warns: Whether it is warned of only, with momentum too.
    """

    option: str
    why: str
    pull: str = ""
    limit: float = 2.0
    warns: bool = False

    def refuse(self, owner: FederatedCallback, setup: Setup) -> None:
        pull = getattr(owner, self.pull or self.option)
        pull = pull(setup.data.num_samples) if callable(pull) else pull
        for optimizer in setup.optimizers:
            step = pull * max(float(group["lr"]) for group in optimizer.param_groups)
            is_sgd = type(optimizer).__name__ == "SGD" and (self.warns or not optimizer.defaults.get("momentum"))
            if is_sgd and step >= self.limit:
                sentence = (
                    f"{owner.key}({self.option}={getattr(owner, self.option)}) {self.why} = {step:.3g} of its way in every "
                    f"step, and 2 or more diverges. Use a learning rate below {2.0 / pull:.3g}, or a smaller {self.option}."
                )
                if not self.warns:
                    raise ValueError(sentence)
                setup.warn(sentence)


@dataclass(frozen=True)
class SomethingTrains(Requirement):
    """In a part of the module that is to train by itself, something does.

    Attributes:
        part: Method of the callback that gives the names of the part's entries in a module; `None`: no such part.
    """

    part: str
    instead: str

    def refuse(self, owner: FederatedCallback, setup: Setup) -> None:
        names: Any = getattr(owner, self.part)(setup.module)
        if names is not None and not any(setup.kinds[name] == "trainable" for name in names):
            raise ValueError(
                f"{owner.key} trains a part of {type(setup.template).__name__} by itself ({listed(map(repr, names))}), and "
                f"no parameter of it trains. {self.instead}"
            )


@dataclass(frozen=True)
class Clock(Requirement):
    """The loop counts virtual seconds."""

    why: str

    def refuse(self, owner: FederatedCallback, setup: Setup) -> None:
        if not setup.run.has_clock:
            raise ValueError(
                f"{owner.key} {self.why}, and this loop has no clock. Give it one (trainer.loop), or limit real time with "
                "the trainer's max_time."
            )
