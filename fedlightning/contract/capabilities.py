"""Facts of a callback: what it changes in a run and what it needs of the others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from fedlightning.contract.jobs import Placing
    from fedlightning.contract.requirements import Requirement
    from fedlightning.contract.setup import Setup
    from fedlightning.server.server import Server


class Change(StrEnum):
    """What a callback declares to change in a run, as the end of a sentence after its name (:attr:`Facts.changes`).

    Most changes follow from what a callback has, and are named by it (:data:`FOLLOWS`): its methods, such as `"reduce"`.
    """

    START = "makes the model that training starts from out of what came and what the client kept"
    KEEPS = "keeps something of its own at each client, which every visit trains or replaces"
    BESIDE = "trains a model of each client's own beside the steps of the module"
    PARTS = "leaves entries out of what is sent"
    ONE_WAY = "does not send clients the entries of the model that it asks back"
    SMALLER = "cuts entries of what is sent"
    ALTERS = "puts something that it makes of the update in place of entries that are sent"
    PRIVATE = "sends entries that never leave a client, in place of its own"
    IN_STEP = "keeps at a client what has to agree with what the server has taken in"
    READS = "reads a client's samples beside the batches of its training"
    ELSEWHERE = "takes the gradient of a step elsewhere than at the parameters that step"
    CALIBRATES = "calibrates the logits of the loss by a client's classes"
    WORK = "decides how much a client trains in a visit"
    ABSENCE = "leaves clients out of rounds"
    GLOBAL_SELECTION = "selects one global model by its scores"
    LOCAL_SELECTION = "keeps the best model of each client"
    VALUES = "sends values shaped as the model's entries (wire)"


METHODS = {
    "plan_round": "plans rounds of its own",
    "participants": "says who takes part in a round",
    "on_job": "changes jobs or leaves them out",
    "shared_names": "chooses what travels",
    "on_broadcast": "changes or adds to what is sent to clients",
    "on_receive": "edits what came before training starts",
    "wrap_module": "adds or replaces parts of the module",
    "wire": "sends clients or the server something beside the model",
    "on_build": "gives a client's module a shape of its own",
    "correct_gradient": "corrects gradients",
    "training_loss": "adds a term to the loss",
    "feature_taps": "reads features inside the model",
    "local_phases": "fits several times in a visit",
    "training_batches": "draws the batches of local training",
    "on_send": "changes or adds to what a client sends",
    "reduce": "combines updates in a way of its own",
    "on_reduced": "changes the mean of the updates",
    "denominator": "names the number that a sum of updates is divided by",
    "server_step": "makes the step of the server's model",
    "model_of": "keeps several models at the server",
    "neighbours": "lets clients talk to their neighbours",
    "global_module": "has a model of its own for stage G",
    "personal_module": "deploys another model at each client",
    "final_jobs": "adapts models after the last round",
    "encode": "sends a code in place of what a client sends",
}
"""What follows from a method that a callback claims, as the end of a sentence after its name."""
FOLLOWS = METHODS | {
    "weighting": "weighs the clients in the mean",
    "place": "places newcomers by a visit",
    "keeps": "trains or keeps something of each client's own beside the model that travels",
    "not by_record": "adds a term to the loss that may couple the records of a batch",
    "ModelSelection": "selects models by their scores",
}
"""The same of its `weighting`, of the facts `newcomers.place`, `keeps` and `by_record`, and of its family, too."""


ALTERING = frozenset((Change.PARTS, Change.SMALLER, Change.ALTERS))
"""What a callback has to declare that edits `update.state` where noise covers what training has left."""


def describe_change(change: str) -> str:
    """Return a change as the end of a sentence: a member of :class:`Change`, or a name in :data:`FOLLOWS`."""
    return f"{FOLLOWS[change]} ({change})" if change in FOLLOWS else str(change)


def refuse_other_words(owner: str, changes: object, names: Collection[str] = ()) -> None:
    """Refuse what is not a collection of changes: nothing would ever be found in it.

    Raises:
        TypeError: With what to write.
    """
    other = isinstance(changes, str) or not isinstance(changes, Collection)
    listed: Iterable[object] = () if other else changes  # type: ignore[assignment]
    wrong = [changes] if other else [entry for entry in listed if not isinstance(entry, Change) and entry not in names]
    if wrong:
        raise TypeError(
            f"{owner} got {wrong[0]!r} for changes. Give a list of members of Change, such as [Change.PARTS]"
            f"{', or names of methods, such as [' + chr(34) + 'reduce' + chr(34) + ']' if names else ''}."
        )


def always(setup: Setup) -> bool:
    """Return True: a need that holds in every federation."""
    return True


@dataclass(frozen=True)
class Need:
    """What a callback cannot do without: that no other callback of the run makes some changes.

    Attributes:
        what: What it needs, as the end of a sentence after its name.
        without: Changes that break it: members of :class:`Change`, and names of methods (:data:`FOLLOWS`).
        instead: Another way out than to remove one of the two, as the end of a sentence.
        when: Whether it holds in a federation, such as one in which not everybody takes part.

    Example:
        >>> Need("compares whole models", [Change.PARTS]).broken_by([Change.PARTS, "shared_names"])
        <Change.PARTS: 'leaves entries out of what is sent'>
    """

    what: str
    without: Collection[str] = ()
    instead: str = ""
    when: Callable[[Setup], bool] = always

    def __post_init__(self) -> None:
        refuse_other_words("Need", self.without, FOLLOWS)

    def broken_by(self, changes: Collection[str]) -> str | None:
        """Return the first of another callback's changes that breaks it; `None` if it holds."""
        return next((change for change in self.without if change in changes), None)


WHOLE_UPDATES = Need("compares or mixes whole models of clients", (Change.PARTS,))
"""What clients send is compared, or mixed, as a whole."""
WHOLE_MODELS_OF_CLIENTS = Need(
    "gives clients parts of the model, and has a mean of its own for every element",
    (Change.VALUES, "plan_round", "on_reduced"),
)
"""Clients hold parts of the server's model, which nothing may take for the whole."""
EVERY_SCORE = Need("goes by the scores of every client")
"""Scores of some clients (`evaluation.clients`) are not enough."""
WORKS_ON_THE_MODEL = (
    *("plan_round", "on_receive", "correct_gradient", "on_reduced", "reduce", "server_step", "global_module"),
    *("final_jobs", Change.START, Change.PARTS, "weighting"),
)
"""Changes that work on a model that travels: they make it, weigh clients in it, or put it together at a client."""


@dataclass(frozen=True)
class Newcomers:
    """What a method does for clients that have not taken part in training from its beginning.

    Attributes:
        no_model: Why it has no model for a client that never trained, as the end of a sentence after its name: held-out
            clients are not scored then. Empty: such a client deploys what it holds after a message whose tag is
            `NEWCOMER`, with an empty state, in a module as the federation began.
        join: What becomes of the method's state at the server when clients join a run that is resumed: called with the
            server and their ids, it may raise ValueError. True: it may stay as it is. False: a method that has state there
            refuses them.
        place: Plan of the visits by which clients that are onboarded find their place, such as their cluster: called with
            the server (a copy that serves nobody else, of whose `clients` they are not) and their ids, before they are
            scored. A generator of job lists as `plan_round`; it is sent the updates of those that trained, with all that
            they sent, and returns where each belongs, in a word or two. It raises ValueError if there are no places yet.
    """

    no_model: str = ""
    join: bool | Callable[[Server, Sequence[str]], None] = False
    place: Callable[[Server, Sequence[str]], Placing] | None = None


@dataclass(frozen=True)
class Facts:
    """What a callback changes in a run, and what it needs of the others; its options may decide.

    Attributes:
        changes: Changes that do not follow from the methods that it overrides.
        needs: What no other callback may break.
        requires: What the module, the data and the run must be like, asked before `check`
            (:mod:`fedlightning.contract.requirements`).
        keeps: Whether a client keeps something of its own that every visit trains or replaces (`Change.KEEPS`). `None`: it
            does if the callback makes the start of training out of what a client kept, or chooses what travels, so that the
            rest trains at the client.
        mixes_architectures: Right where clients' models have different architectures
            (:class:`~fedlightning.models.ClientModels`) and the server several models; else refused there.
        asynchronous: Right where updates arrive one by one, and late; False: refused there. `None`: right if the callback
            does nothing at the server.
        takes_part: False for a callback that only watches: a resumed run may go on with or without it.
        most_work: Gives, of the trainer's local epochs or steps, the most that a job of this method may ask for; a site
            refuses more. `None`: the trainer's. Work of phases does not count.
        newcomers: What it does for clients that come later.
        by_record: Whether its term of the loss is the mean over a batch's records of what each gives by itself, as with
            clipped gradients of single records it has to be.
        optimizer_state: Whether optimizers begin anew in every visit (`"reset"`) or go on (`"keep"`) where the user does not
            say; `None`: no opinion.
        counts_steps: Whether it goes by the steps that optimizers took or by their learning rates (`client.steps`, `lr_sums`,
            `gradient_weights`): refused where a module moves its entries past them.
        beside_sums: Whether what it takes from single updates (its extras, `on_update`) holds nothing of the model, so that
            it is right where the server sees only a sum of updates (:class:`~fedlightning.contract.SumCodec`).
        real_only: Whether what it does to entries is right for real numbers only: complex parameters are refused.
        no_statistics: Why statistics of the data before round 1 are refused, as the end of a sentence that begins with the
            callback's name; empty: they are not.
        last_round: Gives, of the number of all rounds, what the last one does that it would not do in a longer run, as the
            end of a sentence about it (averaged all layers); empty: nothing. A run that is made longer does that round
            again. `None`: nothing, however many there are.

    Example:
        >>> facts = Facts(changes={Change.START}).extend(changes={Change.PARTS}, takes_part=False)
        >>> sorted(change.name for change in facts.changes), facts.takes_part
        (['PARTS', 'START'], False)
    """

    changes: Collection[Change] = field(default=frozenset())
    needs: Sequence[Need] = ()
    requires: Sequence[Requirement] = ()
    keeps: bool | None = None
    mixes_architectures: bool = False
    asynchronous: bool | None = None
    takes_part: bool = True
    most_work: Callable[[int], int] | None = None
    newcomers: Newcomers = Newcomers()
    by_record: bool = False
    optimizer_state: Literal["reset", "keep"] | None = None
    counts_steps: bool = False
    beside_sums: bool = False
    real_only: bool = False
    no_statistics: str = ""
    last_round: Callable[[int], str] | None = None

    def __post_init__(self) -> None:
        refuse_other_words("Facts", self.changes)
        if isinstance(self.needs, Need) or any(not isinstance(need, Need) for need in self.needs):
            raise TypeError(f"Facts got needs={self.needs!r}. Give a list of Need(...).")
        if any(not callable(getattr(requirement, "check", None)) for requirement in self.requires):
            raise TypeError(
                f"Facts got requires={self.requires!r}. Give a list of requirements, such as LocalSteps(...)."
            )
        if not isinstance(self.newcomers, Newcomers):
            raise TypeError(f"Facts got newcomers={self.newcomers!r}. Give Newcomers(...).")
        if self.optimizer_state not in (None, "reset", "keep"):
            raise ValueError(f"Facts got optimizer_state={self.optimizer_state!r}. Use 'reset' or 'keep', or None.")

    def extend(
        self,
        changes: Iterable[Change] = (),
        needs: Iterable[Need] = (),
        requires: Iterable[Requirement] = (),
        **others: Any,
    ) -> Facts:
        """Return these facts with more changes, needs and requirements, and other answers to the rest.

        Args:
            changes: Further changes.
            needs: Further needs.
            requires: Further requirements.
            others: What replaces the other attributes.
        """
        changed, needed = frozenset(self.changes) | set(changes), (*self.needs, *needs)
        return replace(self, changes=changed, needs=needed, requires=(*self.requires, *requires), **others)
