"""The contract between the core and every algorithm."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn

from fedlightning.contract.capabilities import Facts
from fedlightning.contract.jobs import GradientContext, Job, Owner, Phase, Plan, Stage, Weighting
from fedlightning.contract.messages import Message, Update, Wire
from fedlightning.contract.setup import Setup
from fedlightning.ranges import check_on_creation
from fedlightning.tensors import State
from fedlightning.wrappers.features import FeatureTap

if TYPE_CHECKING:
    from fedlightning.client.client import Client
    from fedlightning.server.server import Server

REMOVED = {
    "chooses_by_scores": "Say it in facts, as in Facts(needs=[fedlightning.contract.capabilities.EVERY_SCORE]).",
    "client_weight": "Say it in weighting: a word, or a method weighting(self, server, update).",
    "infinite_arguments": 'Say it in the annotation of the argument, as in Range("(0, inf]").',
    "may_leave": "Say it in wire(module), as in Wire(entries=[...]).",
    "on_clients_join": "Say it in facts, as in Facts(newcomers=Newcomers(join=...)).",
    "place_newcomers": "Say it in facts, as in Facts(newcomers=Newcomers(place=...)).",
    "in_step": "Say it in facts, as in Facts(changes=[Change.IN_STEP]).",
    "leaves_out": "Say it in facts, as in Facts(changes=[Change.ABSENCE]).",
    "merges": "Say it in facts, as in Facts(changes=[Change.START]).",
    "needs_all": "Define reduce(self, server, updates), which is given all of them.",
    "needs_every_score": "Say it in facts, as in Facts(needs=[fedlightning.contract.capabilities.EVERY_SCORE]).",
    "no_newcomers": "Say it in facts, as in Facts(newcomers=Newcomers(no_model=...)).",
    "sends_less": "Say it in facts, as in Facts(changes=[Change.PARTS]).",
    "sends_private": "Say it in facts, as in Facts(changes=[Change.PRIVATE]).",
    "sends_smaller": "Say it in facts, as in Facts(changes=[Change.SMALLER]).",
}
"""Hooks and flags of earlier releases, and what to write."""
ALIKE, ALIKE_EVENT = 0.88, 0.8
"""Likeness (of difflib) from which a name is taken for a misspelt one: a letter or two; more where it begins as a hook."""
METHODS = (staticmethod, classmethod, property, cached_property)


def refuse_misspelt(kind: type, allowed: Collection[str], classes: Collection[type]) -> None:
    """Refuse public methods that are not hooks but nearly have the name of one, and hooks that are gone.

    Args:
        kind: The class that is being defined.
        allowed: Names of all hooks, Lightning's and those of families too.
        classes: The class and its bases outside the contract, whose methods are looked at.

    Raises:
        TypeError: With the name that was meant, or what to write.
    """
    hooks = [name for name in allowed if not name.startswith("_")]
    for name, value in ((name, value) for base in classes for name, value in vars(base).items()):
        if name in allowed or name.startswith("_"):
            continue
        if name in REMOVED:
            raise TypeError(f"{kind.__name__} defines {name}, which nothing reads any more. {REMOVED[name]}")
        if not callable(value) and not isinstance(value, METHODS):
            continue
        alike = get_close_matches(name, hooks, n=1, cutoff=ALIKE_EVENT if name.startswith("on_") else ALIKE)
        if alike:
            raise TypeError(
                f"{kind.__name__} defines {name}, which nothing calls. Did you mean {alike[0]}? If it is a method of your "
                "own, give it another name, or begin it with an underscore."
            )


CONTRACT = ("fedlightning.contract.callback", "fedlightning.contract.families", "lightning.pytorch.callbacks.callback")
"""Modules whose methods are there to be overridden, and do nothing themselves."""
FAMILIES = {
    "participants": "ClientSelection",
    "on_job": "ClientSelection",
    "model_of": "ServerModels",
    "global_module": "ServerModels",
    "neighbours": "Decentralised",
    "arrivals": "AsynchronousMethod",
    "on_build": "SubModels",
    "on_client_evaluated": "ModelSelection",
    "training_batches": "TrainingData",
    "encode": "UpdateCodec",
    "decode": "UpdateCodec",
    "planned_bytes": "UpdateCodec",
    "covers": "Protection",
    "protect": "Protection",
    "check_runs": "Protection",
    "rehearse": "Protection",
    "class_means": "Protection",
    "intercept": "UpdateInterception",
    "is_stackable": "Stackable",
    "stack_hooks": "Stackable",
}
"""Methods that only one kind of callbacks has, and the base class of that kind (:mod:`fedlightning.contract.families`)."""

OF_FACTS = {
    "keeps",
    "mixes_architectures",
    "asynchronous",
    "takes_part",
    "most_work",
    "newcomers",
    "by_record",
    "optimizer_state",
    "real_only",
    "no_statistics",
}
"""Words that a callback says in :attr:`FederatedCallback.facts`, and nowhere else."""
BASES = {"Callback", "FederatedCallback", *FAMILIES.values()}
"""Classes of the modules of :data:`CONTRACT` that have such methods."""


@cache  # asked twenty times a visit
def defines(kind: type, name: str) -> bool:
    """Return whether a class of callbacks has a method by itself, not as one that is there to be overridden."""
    owner = next((base for base in kind.__mro__ if name in vars(base)), None)
    return owner is not None and not (owner.__module__ in CONTRACT and owner.__name__ in BASES)


class FederatedCallback(Callback):
    """Base of every algorithm, checkpoint and diagnostic that takes part in a federation.

    There are two kinds of methods. **Events** run for every callback, those of lower :attr:`rank` first and equal ones in
    list order; where they return a value, they chain. **Roles** are answered by at most one callback; two that claim one
    role are refused at start, by name. An ordinary Lightning hook on a federated callback runs inside each client's local
    training, with `self.client` there.

    Nine methods are *the contract*: most algorithms need no others. In the order of a round they are
    :meth:`plan_round`, :meth:`shared_names`, :meth:`on_broadcast`, :meth:`on_receive`, :meth:`correct_gradient`,
    :meth:`training_loss`, :meth:`on_send`, :meth:`on_update` and :meth:`server_step`. The others are there when you need
    them.

    A callback object holds hyper-parameters only, each under the name of its `__init__` argument. What lives from round
    to round lives in `server.state[key]` and `client.state[key]` as tensors and plain values: the core checkpoints it,
    moves it between processes and restores it. State tensors are replaced, never edited in place.

    Attributes:
        weighting: How clients are weighted in the mean: by `"samples"`, `"uniform"`, by the `"log"` of their samples, or
            by a function of the server and the update. `None` leaves it to the other callbacks (default: samples).
        rank: Place among the callbacks of a run, whatever the user's order: lower ones come first. Set it where a method
            must see something before others change it, such as the model that came or the raw gradient.

    Example:
        >>> class Shrink(FederatedCallback):
        ...     def __init__(self, factor: float = 0.5) -> None:
        ...         self.factor = factor
        ...
        ...     def server_step(self, server, old, reduced):
        ...         return {name: self.factor * value for name, value in reduced.items()}
        >>> Shrink().key, Shrink().claims("server_step"), Shrink(0.1).hyperparameters()
        ('Shrink', True, {'factor': 0.1})
    """

    weighting: Weighting | None = None
    rank: int = 0
    _client: Client | None = None

    @property
    def key(self) -> str:
        """Name of this callback in states, extras, messages and the addresses of its random numbers: the class's name."""
        return type(self).__name__

    @property
    def client(self) -> Client:
        """The client being visited; bound by the core for the time of a visit."""
        if self._client is None:
            raise RuntimeError(f"{self.key}.client is only there while a client is being visited.")
        return self._client

    @property
    def facts(self) -> Facts:
        """What this callback changes in a run and needs of the others, as far as its methods do not tell.

        A subclass sets it: `facts = Facts(...)`, or a property where its options decide.
        """
        return Facts()

    def __init_subclass__(cls, **options: Any) -> None:
        """Let arguments be checked by their annotations; refuse words and methods that nothing would read there."""
        super().__init_subclass__(**options)
        maker = next(kind for kind in cls.__mro__ if "__init__" in vars(kind))
        if maker is not object and not issubclass(maker, FederatedCallback):  # of a mixin, which nobody has checked
            cls.__init__ = maker.__init__  # type: ignore[method-assign]
        check_on_creation(cls)
        classes = [kind for kind in cls.__mro__ if kind.__module__ not in CONTRACT]
        for name in (name for name in sorted(OF_FACTS) if any(name in vars(kind) for kind in classes)):
            raise TypeError(
                f"{cls.__name__} sets {name}, which nothing reads there: it is said in facts, as in "
                f"{cls.__name__}.facts = Facts({name}=...)."
            )
        for name, family in FAMILIES.items():
            if any(name in vars(kind) for kind in classes) and not cls.is_of(family):
                raise TypeError(
                    f"{cls.__name__} defines {name}, which is a method of fedlightning.algorithm.{family}. Derive "
                    f"{cls.__name__} from {family}."
                )
        refuse_misspelt(cls, {*dir(FederatedCallback), *FAMILIES}, classes)
        refuse_lost_facts(cls)

    @classmethod
    def is_of(cls, family: str) -> bool:
        """Return True if the class derives from the base class of a family, by its name."""
        return any(kind.__name__ == family and kind.__module__ in CONTRACT for kind in cls.__mro__)

    def hyperparameters(self) -> dict[str, Any]:
        """Return the arguments this callback was made with, read from the attributes of the same names."""
        names = [name for name in inspect.signature(type(self).__init__).parameters if name not in ("self", "kwargs")]
        return {name: getattr(self, name) for name in names if hasattr(self, name)}

    def __repr__(self) -> str:
        """Return the class with its hyper-parameters."""
        return (
            f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.hyperparameters().items())})"
        )

    def claims(self, name: str) -> bool:
        """Return True if this callback has a method of its own called `name`. Override to decline a role by option."""
        return defines(type(self), name)  # type: ignore[arg-type]  # classes are hashable, mypy 1 looks at objects

    # -- the contract: nine methods, in the order of a round -----------------------------------------------------------
    def plan_round(self, server: Server) -> Plan:
        """Plan the round as a generator of job lists: `updates = yield jobs`, as often as needed. A role.

        By default every participant is visited once. The updates that come back are light: their model entries have been
        folded in already. An empty list makes the new models out of what has come so far, for jobs that are to see them.
        """
        raise NotImplementedError

    def shared_names(self, server: Server, module: nn.Module) -> Iterable[str] | None:
        """Return exact names or module prefixes that travel, decided anew each round; answers are intersected.

        `None`: no opinion. An empty list: nothing travels.
        """
        return None

    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """Add extras to a message that is about to leave, or swap its state. Must not change `server`."""

    def on_receive(self, client: Client, message: Message) -> None:
        """Edit what came (`message.state`) before the core loads it over what stayed.

        Also runs for evaluation, on a copy of the client's state.
        """

    def correct_gradient(self, ctx: GradientContext, name: str, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Return the gradient with a gradient-form term. Chains.

        Runs once per optimizer step for every parameter: after unscaling, before clipping.
        """
        return gradient

    def training_loss(
        self, client: Client, module: LightningModule, batch: Any, loss: Tensor, features: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the loss to train on, with a loss-form term. Chains.

        Args:
            client: The client.
            module: Its module.
            batch: The batch of this step.
            loss: The loss that `training_step` returned. What the module logged stays the task's.
            features: What the taps of :meth:`feature_taps` caught in this step, with its graph.
        """
        return loss

    def on_send(self, client: Client, update: Update) -> None:
        """Add extras to an update that is about to leave, drop or encode entries, store client state."""

    def check_update(
        self, server: Server, message: Message, update: Update
    ) -> Mapping[str, tuple[float, float]] | None:
        """Refuse an update that what is declared in :meth:`wire` cannot tell from a good one, before it is taken in.

        Returns:
            Norms that say how large the update is in the method's own terms, each with that of what was sent: an update
            is refused where one is far larger than is usual (`failures.update_limit`).

        Raises:
            ValueError: With a sentence: its client has failed. Any other exception says the same.
        """

    def on_update(self, server: Server, update: Update) -> None:
        """See an update without error while it is folded in, in client order."""

    def server_step(self, server: Server, old: State, reduced: State) -> State:
        """Return the new global entries, from the old ones and the reduced ones (same names). A role."""
        raise NotImplementedError

    # -- when you need it: before and after ----------------------------------------------------------------------------
    def check(self, setup: Setup) -> None:
        """Refuse before round 1 what cannot work, with `ValueError` and a sentence; after `facts.requires`."""

    def on_federation_start(self, server: Server) -> None:
        """Run before the first round of a new federation (not when one is resumed)."""

    def on_federation_end(self, server: Server) -> None:
        """Run after the last round."""

    def on_round_start(self, server: Server) -> None:
        """Run before the round is planned."""

    def on_round_end(self, server: Server) -> None:
        """Run after aggregation and evaluation, before the state is saved."""

    def final_jobs(self, server: Server) -> list[Job]:
        """Return visits after the last round whose results stay with the clients. A role."""
        raise NotImplementedError

    # -- when you need it: the model -----------------------------------------------------------------------------------
    def wrap_module(self, module: LightningModule, owner: Owner) -> LightningModule:
        """Turn a fresh copy of the module into the one that `owner` trains. Chains; must be deterministic."""
        return module

    def personal_module(self, client: Client, stage: Stage) -> LightningModule:
        """Return the model that this client deploys and is evaluated on. A role; default: `client.module`."""
        raise NotImplementedError

    # -- when you need it: a visit -------------------------------------------------------------------------------------
    def wire(self, module: nn.Module) -> Wire:
        """Declare the extras that this callback may send down and up, under its key."""
        return Wire()

    def on_visit_start(self, client: Client) -> None:
        """Run when the merged model (stage L1) is loaded and training is about to start."""

    def local_phases(self, client: Client) -> Iterable[Phase]:
        """Split a visit into several fits, in order. A role.

        A generator may look at what the last phase left before it yields the next.
        """
        raise NotImplementedError

    def feature_taps(self, module: LightningModule) -> Mapping[str, FeatureTap]:
        """Return the features that :meth:`training_loss` needs, by label: taps on submodules, not attached."""
        return {}

    # -- when you need it: aggregation ---------------------------------------------------------------------------------
    def reduce(self, server: Server, updates: list[Update]) -> State:
        """Combine all updates of one model. A role; default: the weighted mean, folded in one by one."""
        raise NotImplementedError

    def on_reduced(self, server: Server, state: State) -> State:
        """Change the reduced state before the server step. Chains.

        Also runs in a round in which nobody was visited: with the global model's entries that travel, as they are.
        """
        return state

    def denominator(self, server: Server) -> float | None:
        """Return what the weighted sum of the clients' changes is divided by. A role; default: the sum of their weights.

        The new model is `old + sum_i weight_i * (w_i - w_sent) / denominator`: a fixed number (such as the expected number of
        participants under Poisson sampling) makes one client's influence independent of who else came. `None`: the
        default. Not beside `reduce`.
        """
        raise NotImplementedError


def refuse_lost_facts(kind: type[FederatedCallback], instance: FederatedCallback | None = None) -> None:
    """Refuse a class whose facts are in place of those of a base, and do not say what these do.

    Args:
        kind: The class.
        instance: An object of it, which answers properties; without it only what is written down is compared.

    Raises:
        TypeError: Naming both classes and what is lost.
    """
    declared = [
        (base, vars(base)["facts"]) for base in kind.__mro__ if "facts" in vars(base) and base is not FederatedCallback
    ]
    if not declared:
        return
    owner, facts = declared[0]
    if not isinstance(facts, Facts | property | cached_property):
        raise TypeError(
            f"{owner.__name__}.facts is {facts!r}. Write facts = Facts(...), or a property that returns one."
        )
    actual: Any = facts if instance is None else instance.facts
    compared = isinstance(actual, Facts) and actual.takes_part  # one that only watches changes and needs nothing
    for base, before in declared[1:] if compared else ():
        if isinstance(before, property) and (instance is not None or base.__module__ in CONTRACT):
            assert before.fget is not None
            before = before.fget(instance or object.__new__(base))  # a family's asks nothing of the object
        if not isinstance(before, Facts):
            continue
        lost = [change.name for change in before.changes if change not in actual.changes]
        lost += [f"'{need.what}'" for need in before.needs if need not in actual.needs]
        lost += [repr(requirement) for requirement in before.requires if requirement not in actual.requires]
        lost += ["asynchronous"] if before.asynchronous is not None and actual.asynchronous is None else []
        if lost:
            raise TypeError(
                f"{owner.__name__}.facts takes the place of {base.__name__}.facts in {kind.__name__} and leaves out "
                f"{', '.join(lost)}. Write facts = {base.__name__}.facts.extend(...), or a property that returns "
                "super().facts.extend(...)."
            )
