"""Bases of kinds of callbacks, with the methods that only such callbacks have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from fedlightning.contract.callback import FederatedCallback
from fedlightning.contract.capabilities import Facts
from fedlightning.contract.jobs import Arrivals, Job, Stage
from fedlightning.contract.messages import Message, Update
from fedlightning.contract.outgoing_items import Cover, OutgoingItem, Promise
from fedlightning.tensors import State

if TYPE_CHECKING:
    from fedlightning.client.client import Client
    from fedlightning.server.server import Server


class ClientSelection(FederatedCallback):
    """Base of callbacks that say who takes part in rounds, and how much work each client does."""

    def participants(self, server: Server) -> Sequence[str]:
        """Return the clients that take part in this round, in any order. A role; default: a uniform draw.

        It answers `server.participants()`, which algorithms that plan their rounds ask, and may be asked several times in a
        round: draw from `server.rng`. Nobody is an answer, too. The trainer's `participation` is left alone then.
        """
        raise NotImplementedError

    def on_job(self, server: Server, job: Job) -> Job | None:
        """Change a job before its message is made (`replace(job, work=1)`), or leave it out (`None`). Chains.

        It runs for every job of a client that a plan asks for, probes without training (`job.work == 0`) too, in the order
        of the jobs. A plan gets an update with `left_out` and an `error` for what is left out, which is not a failure.
        """
        return job


class ServerModels(FederatedCallback):
    """Base of methods that say which model the server has for whom, such as one for each cluster."""

    def model_of(self, server: Server, client: str) -> str:
        """Return the key in `server.models` of the model that a client is sent, such as that of its architecture. A role.

        Default: the global model. It holds for ordinary visits and for evaluation; a plan's jobs name theirs
        (`server.job` makes one by this).
        """
        raise NotImplementedError

    def global_module(self, server: Server, client: str | None) -> LightningModule | None:
        """Return the model of stage G for `client` (`None`: for all); `None` if the method has none. A role."""
        raise NotImplementedError


class Decentralised(FederatedCallback):
    """Base of methods without a server, in which clients talk to their neighbours."""

    def neighbours(self, server: Server, client: str) -> Sequence[str]:
        """Return the clients that a client sends its model to. A role."""
        raise NotImplementedError


class AsynchronousMethod(FederatedCallback):
    """Base of methods that take updates in as they arrive; refused in synchronous rounds.

    Attributes:
        arrivals: How an asynchronous loop takes updates in.
    """

    arrivals: Arrivals = Arrivals()

    @property
    def facts(self) -> Facts:
        """It is right where updates arrive one by one."""
        return super().facts.extend(asynchronous=True)


class SubModels(FederatedCallback):
    """Base of methods whose clients hold smaller models than the server."""

    def on_build(self, client: Client, message: Message) -> None:
        """Give `client.module` the shape of what came, before anything is loaded. Also for evaluation."""


class ModelSelection(FederatedCallback):
    """Base of callbacks that select models by their scores; a resumed run must score the same rounds."""

    @property
    def facts(self) -> Facts:
        """Scores are there for any model."""
        return super().facts.extend(mixes_architectures=True)

    def on_client_evaluated(
        self, client: Client, stage: Stage, split: str, metrics: Mapping[str, float], module: LightningModule
    ) -> None:
        """See the scores of the client's model on its own `split` data at `stage`. May write `client.checkpoints`."""


class TrainingData(FederatedCallback):
    """Base of callbacks that draw the batches of local training in a way of their own."""

    def training_batches(self, client: Client, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return the loader of a fit on a client's own training data, in place of the client's. A role."""
        raise NotImplementedError


class UpdateCodec(FederatedCallback):
    """Base of callbacks that send a shorter code in place of entries: everybody else sees what it stands for.

    A client's update is encoded after everybody's `on_send`, and decoded on arrival, before it is checked and before anybody
    sees it. Bytes are those of the code.
    """

    def encode(self, client: Client, update: Update) -> None:
        """Put a code into `update.extras`, declared in `wire().up`, in place of entries of `update.state`. A role."""
        raise NotImplementedError

    def decode(self, server: Server, message: Message, update: Update) -> State:
        """Return the entries that the code of an update stands for; what came is not to be trusted.

        Raises:
            ValueError: If it is not code: its client has failed.
        """
        raise NotImplementedError

    def planned_bytes(self, server: Server, message: Message) -> int | None:
        """Return the bytes of the entries that a message asks for as they will travel; `None`: nobody knows before.

        By this a loop plans how much work leaves time for the way back (`late="partial"`).
        """
        return None


class SumCodec(UpdateCodec):
    """Base of codecs whose codes are decoded as a sum, by :meth:`reduce`, and never one by one.

    :meth:`decode` is not called. An update arrives without entries, so that what is checked of entries on arrival (finite
    numbers, norms) is not; `check_update` says which codes are none. What it keeps in `client.state` is for one round: the
    core deletes it when the round ends, of clients that dropped out too.

    Attributes:
        promise: What the server does not see, and against whom that holds, as a sentence: a run's `privacy.json` has it.
    """

    promise: str = ""

    @property
    def promises(self) -> Sequence[Promise]:
        """Who cannot learn what."""
        return ()


class Protection(FederatedCallback):
    """Base of callbacks that promise how little what leaves clients tells of their data, such as differential privacy.

    What a run releases is one list, known before round 1: the entries and extras that callbacks declare, and what the core
    sends. A dry run, the log and the run's summary show for each item what :meth:`covers` says of it.

    Attributes:
        hides_clients: Whether it hides clients. One that has trained counts in the round whatever its training did: where it
            took no step its change is zero, with the noise and the weight of any other. Nothing goes by the size of single
            updates, or writes it down.
        covers_training: Whether the noise is in the steps of training, so that it covers entries as training has left them.
            What another callback puts in their place (`on_send`) leaves where it declares so (:data:`ALTERING`), and is set
            to nothing else.
    """

    hides_clients: bool = False
    covers_training: bool = False

    @property
    def promises(self) -> Sequence[Promise]:
        """Who cannot learn what."""
        return ()

    def covers(self, item: OutgoingItem) -> Cover:
        """Return how an item of what leaves is covered. Default: it leaves in the clear.

        Scores on validation data and values that were logged in training do not leave, and are not asked for, where this says
        `"withheld"`: the core sees to that at the client. Anything else the callback itself adds noise to, or withholds.
        """
        return "in the clear"

    def check_fit(self, client: Client) -> None:
        """Look at what a fit has left, after the last hook of its Trainer; raise ValueError if it is not covered."""

    def protect(self, client: Client, update: Update) -> None:
        """Cover an update that is about to leave: after every `on_send`, when no callback gets it any more but a codec."""

    def check_changes(self, changes: Sequence[str]) -> None:
        """Refuse to go on with a run whose configuration has changed (`allow_config_change`).

        Args:
            changes: A sentence each.
        """

    def check_runs(self, runs: Sequence[tuple[Protection, int]]) -> None:
        """Refuse runs that together spend more than a budget that they share, before the first of them begins.

        Args:
            runs: What protects each run, and its number of rounds; 0: it has spent already what it will.
        """

    def rehearse(self) -> None:
        """Make this copy one for a dry run, which spends nothing: what lasts beyond a run is neither read nor written."""

    def class_means(
        self, client: Client, update: Update, vectors: Callable[[], Iterable[tuple[Tensor, Tensor]]], classes: int
    ) -> dict[int, Tensor]:
        """Return means by class of vectors of a client's training samples that may leave with an update. A role.

        Methods that send such means (extras with `Extra.by_class`) ask for them here, where a callback answers. It
        keeps them in `client.covered_means`; other ones do not leave.

        Args:
            client: The client, in `on_send`.
            update: What it is about to send.
            vectors: Gives batches of vectors `(batch, width)` and of their labels `(batch,)`, each sample once.
            classes: Number of classes.
        """
        raise NotImplementedError


class UpdateInterception(FederatedCallback):
    """Base of attackers who work together: they change updates on their way to the server, in simulation.

    A client alone knows nothing of the others. Here the updates of a list of jobs are held together before the server takes
    any of them in, and are checked again afterwards. Synchronous loops only.
    """

    @property
    def facts(self) -> Facts:
        """Whatever arrives alone cannot be held beside others."""
        return super().facts.extend(asynchronous=False)

    def intercept(self, server: Server, sent: Sequence[Message], updates: Sequence[Update]) -> None:
        """Replace entries of `update.state`; tensors are never edited in place. Chains.

        Args:
            server: The server, before the updates are taken in; not to be changed.
            sent: The messages that are answered.
            updates: Their updates in the same order; those with an error are left out of the round.
        """


class Stackable(FederatedCallback):
    """Base of callbacks that work in Lightning's hooks inside a fit, and bring the same work for a stack of clients.

    Without it `engine="vectorized"` refuses a callback with such hooks.
    """

    @property
    def is_stackable(self) -> bool:
        """Whether the callback, with its options, can work on a stack."""
        return True

    def stack_hooks(self, fit: Any) -> Any:
        """Return the callback's work in one phase of a stack, as `fedlightning.stacked.stacked_fit.StackHooks`."""
        raise NotImplementedError
