"""The contract between the core and every algorithm: :class:`FederatedCallback`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn

from fedlightning.hooks.words import (
    Arrivals,
    GradientContext,
    Job,
    Owner,
    Phase,
    Placing,
    Plan,
    Setup,
    Stage,
    Weighting,
)
from fedlightning.messages import Message, Update, Wire
from fedlightning.tensors import State, entry_kinds
from fedlightning.wrappers.features import FeatureTap

if TYPE_CHECKING:
    from fedlightning.federation.server import Server
    from fedlightning.visit.client import Client


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
        merges: True where `on_receive` makes the model that training starts from out of what came and what the client
            kept. Two such callbacks are refused: each would merge what the other has merged.
        keeps: True where a client keeps something of its own that every visit trains or replaces, such as a personal model:
            what lets a client train twice in a round refuses it. `None` (default): True for a callback that merges, or
            chooses what travels (:meth:`shared_names`), so that the rest trains at the client.
        in_step: True where what a client keeps and what the server has taken in of it have to agree, such as control variates
            and their mean: a client whose update is left out (it is late, or too old) keeps the state of before.
        sends_less: True where `on_send` leaves out entries that travel: what compares whole models refuses it. In other runs
            an update that lacks an entry is refused.
        sends_smaller: True where `on_send` cuts entries that travel, for a `reduce` that knows such parts. In other runs an
            entry comes in the shape in which it was sent.
        sends_private: True where `on_broadcast` sends entries that never leave a client, in the place of its own.
        mixes_architectures: True where clients' models may have different architectures
            (:class:`~fedlightning.models.ClientModels`), and the server several models (:meth:`model_of`); else such a
            federation is refused.
        asynchronous: True where the method is right when updates arrive one by one, and late (an asynchronous loop); False:
            it is refused there. `None` (default): True for a callback that does nothing at the server.
        arrivals: How an asynchronous loop takes updates in; such a method is refused in synchronous rounds. Default: the
            loop's own way.
        leaves_out: True where :meth:`on_job` leaves clients out of rounds: what compares the scores or updates of all clients
            refuses it. A callback that names the participants does so anyway.
        takes_part: False in a callback that only watches: a resumed run may go on with or without it.
        chooses_by_scores: True in a callback that selects models by their scores: a resumed run must score the same rounds.
        needs_every_score: True in a callback that goes by the scores of every client: `evaluate_clients`, which scores some
            of them, is refused beside it.
        infinite_arguments: Arguments that may be infinite. No other number may, and none may be NaN.
        no_newcomers: Why this method has no model for a client that has not taken part in training, as the end of a
            sentence after the class's name: held-out clients are not scored then. Empty (default): such a client deploys what
            it holds after a message whose tag is `NEWCOMER`, with an empty state, in a module as the federation began.
            :meth:`on_broadcast`, :meth:`on_receive` and :meth:`personal_module` may look at `job.tag` and
            `client.message.tag`. With :meth:`place_newcomers`, clients can be onboarded all the same.

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
    merges: bool = False
    keeps: bool | None = None
    in_step: bool = False
    sends_less: bool = False
    sends_private: bool = False
    sends_smaller: bool = False
    mixes_architectures: bool = False
    asynchronous: bool | None = None
    arrivals: Arrivals | None = None
    leaves_out: bool = False
    takes_part: bool = True
    chooses_by_scores: bool = False
    needs_every_score: bool = False
    infinite_arguments: tuple[str, ...] = ()
    no_newcomers: str = ""
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
        return getattr(type(self), name) is not getattr(FederatedCallback, name)

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

    def may_leave(self, module: nn.Module) -> Iterable[str] | None:
        """Return exact names or module prefixes of all entries that can ever leave a client; answers are intersected.

        The client's side asks, without a server, and refuses whatever else is asked for. `None`: no opinion. Default: what
        :meth:`shared_names` answers a server that has `module`, `kinds` and nothing else. A method whose choice depends on
        the round or on the server's state answers here what no round exceeds.
        """
        nobody: Any = SimpleNamespace(module=module, kinds=entry_kinds(module), is_mixed=False)
        return self.shared_names(nobody, module)

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

    def check_update(self, server: Server, message: Message, update: Update) -> None:
        """Refuse an update that what is declared in :meth:`wire` cannot tell from a good one, before it is taken in.

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
        """Refuse before round 1 what cannot work, with `ValueError` and a sentence."""

    def on_federation_start(self, server: Server) -> None:
        """Run before the first round of a new federation (not when one is resumed)."""

    def on_clients_join(self, server: Server, clients: Sequence[str]) -> None:
        """Make room for clients that take part from now on, when a run is resumed with them.

        By default a callback without state at the server needs nothing: they are as clients that were never drawn.

        Args:
            server: The server, which knows them already. Nothing has trained since it was restored.
            clients: Their ids.

        Raises:
            ValueError: If the callback has state at the server and no method of its own that says what joining does to it.
        """
        if server.state.get(self.key):
            names = ", ".join(clients[:5]) + (", ..." if len(clients) > 5 else "")
            raise ValueError(
                f"{self.key} keeps state at the server and does not say what becomes of it when clients join ({names}): "
                "it has no on_clients_join. Start a new run with them, or serve them by trainer.onboard or "
                "`fedlightning onboard`."
            )

    def participants(self, server: Server) -> Sequence[str]:
        """Return the clients that take part in this round, in any order. A role; default: a uniform draw.

        It answers `server.participants()`, which algorithms that plan their rounds ask, and may be asked several times in a
        round: draw from `server.rng`. Nobody is an answer, too. The trainer's `participation` is left alone then.
        """
        raise NotImplementedError

    def on_job(self, server: Server, job: Job) -> Job | None:
        """Change a job before its message is made (`replace(job, work=1)`), or leave it out (`None`). Chains.

        It runs for every job of a client that a plan asks for, probes without training (`job.work == 0`) too, in the order
        of the jobs. A plan gets an update with `left_out` and an `error` for what is left out, which is no failure.
        """
        return job

    def place_newcomers(self, server: Server, clients: Sequence[str]) -> Placing:
        """Plan the visits by which clients that are onboarded find their place, such as their cluster. A role.

        A generator of job lists, as :meth:`plan_round`; it runs before they are scored. It is sent the updates of those that
        trained, with all that they sent; nothing is folded in. Others are noted as failures and are not onboarded.

        Args:
            server: A copy of the server, which may be changed: it serves them from then on, and no one else. They are not
                among its `clients`.
            clients: Their ids.

        Returns:
            Where each client belongs, in a word or two: for `onboarding.json`.

        Raises:
            ValueError: If the federation has no places yet. The sentence says why.
        """
        raise NotImplementedError

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

    def on_build(self, client: Client, message: Message) -> None:
        """Give `client.module` the shape of what came (a sub-model), before anything is loaded. Also for evaluation."""

    def global_module(self, server: Server, client: str | None) -> LightningModule | None:
        """Return the model of stage G for `client` (`None`: for all); `None` if the method has none. A role."""
        raise NotImplementedError

    def personal_module(self, client: Client, stage: Stage) -> LightningModule:
        """Return the model that this client deploys and is evaluated on. A role; default: `client.module`."""
        raise NotImplementedError

    def model_of(self, server: Server, client: str) -> str:
        """Return the key in `server.models` of the model that a client is sent, such as that of its architecture. A role.

        Default: the global model. It holds for ordinary visits and for evaluation; a plan's jobs name theirs
        (`server.job` makes one by this).
        """
        raise NotImplementedError

    def neighbours(self, server: Server, client: str) -> Sequence[str]:
        """Return the clients that a client sends its model to, where there is no server. A role."""
        raise NotImplementedError

    def most_work(self, usual: int) -> int:
        """Return the most local epochs or steps, whichever the trainer counts, that a job of this method may ask for.

        A site refuses more. Work of phases is the client's own and does not count.

        Args:
            usual: The trainer's.
        """
        return usual

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

    def on_client_evaluated(
        self, client: Client, stage: Stage, split: str, metrics: Mapping[str, float], module: LightningModule
    ) -> None:
        """See the scores of the client's model on its own `split` data at `stage`. May write `client.checkpoints`."""

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
