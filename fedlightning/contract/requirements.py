"""What a callback requires of the module, the data and the run, in words: each is a phrase after the callback's name.

A callback lists them in its facts, `Facts(requires=[AutomaticOptimization("replaces the gradient of the step")])`, and they
are asked before its own `check`. Words about features and predictions are beside what they look with, in
`fedlightning/callbacks/shared/`; a word of your own is a :class:`Requirement` with a method `fault`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fedlightning.datamodules.public import has_positions
from fedlightning.errors import listed

if TYPE_CHECKING:
    from fedlightning.contract.setup import Setup


@dataclass(frozen=True)
class Requirement:
    """Something that a callback requires of a federation. Its sentence is the callback's name, `why`, the fault, `instead`.

    Attributes:
        why: What the callback does that requires it, as the middle of a sentence after its name.
        instead: The way out, as a sentence; empty: the word's :attr:`usual` one.
        of: What it is required of, where the word says what that is.
        when: The option or property of the callback that has to be set (to what counts as true) for it to be required, or a
            method that says so of the setup; empty: always.
        warns: Whether users are only warned.
    """

    why: str = ""
    instead: str = ""
    of: Any = None
    when: str = ""
    warns: bool = False
    usual: ClassVar[str] = ""
    advises: ClassVar[bool] = False  # users are only warned, whatever `warns` says

    def check(self, owner: Any, setup: Setup) -> None:
        """Refuse a federation that is not so, or warn of it, where the callback's options require it.

        Raises:
            ValueError: With a sentence.
        """
        applies = getattr(owner, self.when) if self.when else True
        if (applies(setup) if callable(applies) else applies) and (fault := self.fault(owner, setup)):
            sentence = f"{_with_name(owner, self.why + fault)}. {self.instead or self.usual}".strip()
            if not (self.warns or self.advises):
                raise ValueError(sentence)
            setup.warn(sentence)

    def fault(self, owner: Any, setup: Setup) -> str:
        """Return what is not as required, as the end of a sentence; empty: nothing. It may warn, or refuse, by itself."""
        raise NotImplementedError


def _with_name(owner: Any, text: str) -> str:
    """Return a text after a callback's name; one that begins with an option is right behind it."""
    return f"{owner.key}{'' if text.startswith('(') else ' '}{text}"


class AutomaticOptimization(Requirement):
    """The module does not optimize manually."""

    usual = "Use automatic optimization."

    def fault(self, owner: Any, setup: Setup) -> str:
        manual = not setup.module.automatic_optimization
        return f", but {type(setup.template).__name__} optimizes manually" if manual else ""


class SteadyData(Requirement):
    """The clients' training data do not change from round to round."""

    usual = "Remove one of the two, or give data that stay."

    def fault(self, owner: Any, setup: Setup) -> str:
        return ", and here the clients' training data change from round to round" if setup.data.drifts else ""


class NumberedSamples(Requirement):
    """Training samples can be had one by one, unlike those of streams and of ready batches."""

    usual = "Use a map-style dataset of samples, and a batch_size."

    def fault(self, owner: Any, setup: Setup) -> str:
        other = next((loader for loader in setup.data.train_loaders() if not has_positions(loader)), None)
        name = type(getattr(other, "dataset", other)).__name__
        return f", and those of {name} have no position: it gives a stream or ready batches" if other else ""


class Split(Requirement):
    """Some client has samples of a split (`of`)."""

    def fault(self, owner: Any, setup: Setup) -> str:
        return "" if setup.data.has_split(self.of) else ", but no client has any"


class PooledSplit(Requirement):
    """The union of the clients' data of a split (`of`) can be had in one place; `why` ends with it."""

    def fault(self, owner: Any, setup: Setup) -> str:
        return "" if setup.data.has_pooled(self.of) else ", which cannot be had in one place here"


class PublicData(Requirement):
    """There are public data, whose samples have positions."""

    usual = "Set public=0.1 (a share of every client's training samples that all may see), or public: another data set."

    def fault(self, owner: Any, setup: Setup) -> str:
        if setup.public.exists():
            setup.public.size()  # refuses samples without positions
            return ""
        return f", but the data module has {'none' if 'public data' in self.why else 'no public data'}"


class FreshOptimizers(Requirement):
    """Optimizers begin anew in every visit."""

    usual = "Use optimizer_state='reset'."

    def fault(self, owner: Any, setup: Setup) -> str:
        keeps = setup.run.optimizer_state == "keep"
        return ", and with optimizer_state='keep' the moments and clocks of one model would go on in another" * keeps


class LastingMemory(Requirement):
    """What optimizers remember lasts from visit to visit, or they remember nothing."""

    usual = "Set optimizer_state='keep', or use SGD without momentum."

    def fault(self, owner: Any, setup: Setup) -> str:
        names = [type(optimizer).__name__ for optimizer in setup.optimizers if not _is_sgd(optimizer, momentum=False)]
        forgets = setup.run.optimizer_state != "keep" and names
        return f", and the memory of its {names[0]} begins anew in each" if forgets else ""


class EveryClient(Requirement):
    """All clients take part in every round."""

    usual = "Let all take part (participation=1.0)."

    def fault(self, owner: Any, setup: Setup) -> str:
        return f", and {setup.run.absent} leaves some of them out of a round" if setup.run.absent else ""


class ForEveryClient(Requirement):
    """Options (`of`) that are given by client leave no client out."""

    usual = "Give one value for all, or one for each client."

    def fault(self, owner: Any, setup: Setup) -> str:
        tables = [(name, getattr(owner, name)) for name in self.of if isinstance(getattr(owner, name), Mapping)]
        missing = [(name, client) for name, table in tables for client in setup.run.clients if client not in table]
        return f"got no {missing[0][0]} for client '{missing[0][1]}'" if missing else ""


class Travels(Requirement):
    """Something travels; something that trains, where `of` is `"trainable"`."""

    usual = "Remove one of the callbacks."

    def fault(self, owner: Any, setup: Setup) -> str:
        if any(self.of is None or setup.kinds[name] == self.of for name in setup.shared_names()):
            return ""
        return f", and {'nothing' if self.of is None else f'no {self.of} entry'} travels here"


class LocalSteps(Requirement):
    """Visits are counted in steps; of that number, if `of` is one."""

    def fault(self, owner: Any, setup: Setup) -> str:
        steps = setup.run.local_steps
        fits = steps is not None and self.of in (None, steps)
        return "" if fits else f", but local_steps={steps} and local_epochs={setup.run.local_epochs}"


class PlainSGD(Requirement):
    """Optimizers are SGD without momentum, or with it where `of` is `"momentum"`; else users are warned."""

    advises = True

    def fault(self, owner: Any, setup: Setup) -> str:
        other = next(
            (optimizer for optimizer in setup.optimizers if not _is_sgd(optimizer, self.of == "momentum")), None
        )
        name = type(other).__name__.replace("SGD", "SGD with momentum")
        return f", and the module's optimizer is {name}" if other else ""


def _is_sgd(optimizer: Any, momentum: bool) -> bool:
    """Return whether an optimizer is SGD, with momentum or without."""
    without = not any(group.get("momentum") for group in optimizer.param_groups)
    return type(optimizer).__name__ == "SGD" and (momentum or without)


class NoWeightDecay(Requirement):
    """Optimizers decay no weights."""

    usual = "Set weight_decay=0."

    def fault(self, owner: Any, setup: Setup) -> str:
        decays = any(group.get("weight_decay") for optimizer in setup.optimizers for group in optimizer.param_groups)
        return f", and {type(setup.template).__name__}'s optimizer decays weights" if decays else ""


class NoClipping(Requirement):
    """Gradients are not clipped; else users are warned."""

    advises = True
    usual = "Leave it out."

    def fault(self, owner: Any, setup: Setup) -> str:
        clip = setup.run.trainer_arguments.get("gradient_clip_val")
        return f", and where gradient_clip_val={clip} cuts a step, that is not the gradient of the loss" if clip else ""


@dataclass(frozen=True)
class NoOvershoot(Requirement):
    """A pull by an option (`of`) moves a client by less than twice its way in a step of SGD: beyond that it diverges.

    Attributes:
        pull: Method of the callback that gives the pull at learning rate 1, from the samples of each client; empty: it is
            the option.
        limit: The part of the way from which it counts.
    """

    pull: str = ""
    limit: float = 2.0

    def fault(self, owner: Any, setup: Setup) -> str:
        pull = getattr(owner, self.pull or self.of)
        pull = pull(setup.data.num_samples) if callable(pull) else pull
        rates = [
            group["lr"]
            for optimizer in setup.optimizers
            if _is_sgd(optimizer, self.warns)
            for group in optimizer.param_groups
        ]
        step = pull * max(rates, default=0.0)
        way = f"in every step, and 2 or more diverges: use a learning rate below {2.0 / (pull or 1.0):.3g}"
        return f" = {step:.3g} of its way {way}, or a smaller {self.of}" if step >= self.limit else ""


class SomethingTrains(Requirement):
    """In a part of the module that is to train by itself (its names: the callback's method `of`), something does."""

    def fault(self, owner: Any, setup: Setup) -> str:
        names = getattr(owner, self.of)(setup.module)
        if names is None or any(setup.kinds[name] == "trainable" for name in names):
            return ""
        part = f"a part of {type(setup.template).__name__} by itself ({listed(map(repr, names))})"
        return f"trains {part}, and no parameter of it trains"


class Clock(Requirement):
    """The loop counts virtual seconds."""

    usual = "Give it one (trainer.loop), or limit real time with the trainer's max_time."

    def fault(self, owner: Any, setup: Setup) -> str:
        return "" if setup.run.has_clock else ", and this loop has no clock"


class Advice(Requirement):
    """Nothing is required: users are told something that they may not expect (`why`)."""

    def fault(self, owner: Any, setup: Setup) -> str:
        setup.warn(_with_name(owner, self.why))
        return ""
