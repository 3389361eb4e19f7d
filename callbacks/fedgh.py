"""FedGH: one header for clients with extractors of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fedlightning.algorithm import (
    GLOBAL,
    Change,
    Client,
    Extra,
    Facts,
    FederatedCallback,
    Job,
    Message,
    Plan,
    Server,
    Setup,
    Update,
    Wire,
    detached_copy,
    isolated,
    requires,
)
from fedlightning.callbacks.shared.distillation import both_classes
from fedlightning.callbacks.shared.ensemble_fusion import NORMS
from fedlightning.callbacks.shared.prototypes import ClassMeans, pack
from fedlightning.callbacks.shared.representations import (
    features_at_start,
    head_path,
    head_widths,
    labels_of,
    of_one_width,
    refuse_logits,
    refuse_other_widths,
    refuse_width,
    rows,
)
from fedlightning.callbacks.shared.server_models import no_model
from fedlightning.ranges import NonNegativeFloat, PositiveInt, Range, RoundCount, make_init
from fedlightning.tensors import module_state
from fedlightning.wrappers import FeatureTap


@make_init
class FedGH(FederatedCallback):
    """A global header, trained at the server on the mean representation that each client sends of each class.

    Yi, Wang, Liu, Shi, Yu, "FedGH: heterogeneous federated learning with generalized global header", ACM MM 2023.

    * Client: its header is replaced by the server's; the whole model trains on the task's loss; then one pass in eval mode
      gives the mean representation of each of its classes.
    * Server: continues the header `theta` on what came this round, pairs `(z, class)`, by the cross entropy of
      `theta(z)`: SGD on mini-batches, or a step for each pair, clients in order and then classes (authors' protocol).
    * Down: the header. Up: one vector for each class of the client, and the classes. No weight goes up.
    * State: the extractor at each client, the header at the server.
    * Deployed: the client's extractor under the newest header (stage L1); stage L2 scores it after local training. There is
      no global model.

    Extractors may differ, but all give representations of one width, to headers of one name and shape. A client that was
    absent takes the newest header; a client that never trained has an untrained extractor below it. All clients begin with
    one header, the server's. The authors' published script steps an optimizer of another network and never zeroes
    gradients; their text, which is followed here, trains the header. A class that no client has moves its row of the
    header only through the softmax.

    The authors' protocol is `FedGH(server_lr=0.01, server_batch_size=1, server_epochs=1, shuffle=False)`. One such pass
    leaves the header hardly trained where rounds are few. Validation accuracy on digits (a CNN) and FashionMNIST (an MLP)
    over ten clients by Dirichlet(0.5), ten rounds, three seeds: 0.906 and 0.785 at the defaults, 0.855 and 0.783 by the
    authors' protocol (Local: 0.787 and 0.797).

    Args:
        head: Path of the submodule that turns representations into predictions (`"net.fc"`). `None`: the last layer.
        server_lr: Learning rate of the server's SGD. Default 0.1 (measured; paper: 0.01).
        server_momentum: Its momentum. Default 0.
        server_weight_decay: Its weight decay. Default 0.
        server_batch_size: Pairs of a step. Default 16 (measured; HtFLlib has mini-batches, too). 1: authors' protocol.
        server_epochs: Passes over the pairs of a round. Default 10 (measured; authors: 1).
        shuffle: Draw the order of the pairs anew for every pass (default). `False`: clients in order (authors).
        means: `"samples"`: the mean over the samples of a class. `"batches"`: the mean of the batches' means (authors'
            code), in which samples of a smaller last batch count more.
        warmup: Rounds at the beginning in which clients keep their own headers while the server trains its own. Default 0.

    Raises:
        ValueError: If an option is negative or unknown, or a batch size or number of passes below 1.

    Example:
        >>> from types import SimpleNamespace
        >>> from torch import nn
        >>> from fedlightning.callbacks import FedGH
        >>> module = nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 3))
        >>> FedGH().shared_names(SimpleNamespace(round=0), module), list(FedGH().wire(module).up)
        (['2.weight', '2.bias'], ['prototypes', 'classes'])
    """

    facts = Facts(
        changes={Change.ONE_WAY},
        needs=no_model("takes no model back from clients but a header"),
        requires=[requires.AutomaticOptimization("reads representations in a training_step that trains nothing")],
        mixes_architectures=True,
    )

    head: str | list[str] | None = None
    server_lr: NonNegativeFloat = 0.1
    server_momentum: NonNegativeFloat = 0.0
    server_weight_decay: NonNegativeFloat = 0.0
    server_batch_size: PositiveInt = 16
    server_epochs: Annotated[int, Range("[1, inf)", "server_lr=0 leaves the header as it began.")] = 10
    shuffle: bool = True
    means: Literal["samples", "batches"] = "samples"
    warmup: RoundCount = 0

    def check(self, setup: Setup) -> None:
        """Refuse headers that cannot be trained on representations, or that are not alike in all architectures.

        Raises:
            ValueError: If a batch has no labels, the header is the whole model, is tied to the rest, does not give logits
                for representations alone or has too few, or widths of representations differ. Also if another callback
                works on a model that comes back, or keeps something beside one: here none does.
        """
        name, module = type(setup.template).__name__, setup.module
        seen = features_at_start(setup, self.feature_taps, self.key)
        path = head_path(module, self.head)
        where = f"`{path}` of {name}"
        inside = set(self._header_names(module))
        of_header = {id(p) for n, p in module.named_parameters(remove_duplicate=False) if n in inside}
        rest = [(n, p) for n, p in module.named_parameters(remove_duplicate=False) if n not in inside]
        tied = next((n for n, p in rest if id(p) in of_header), None)
        if tied is not None or not rest:
            what = f"shares '{tied}' with the rest" if rest else "is the whole model, without an extractor"
            raise ValueError(
                f"FedGH sends the header {where} and nothing else, but it {what}. Set head=... to another one."
            )
        if seen:
            self._try_header(setup, where, seen)
        self._compare(setup)

    def _try_header(self, setup: Setup, where: str, seen: Mapping[str, Tensor]) -> None:
        """Refuse a header that does not give the logits of all classes for representations alone."""
        z, wanted = seen["z"], both_classes(seen["logits"])
        labels = labels_of(setup.data.first_batch(), self.key)
        header = detached_copy(setup.module).get_submodule(head_path(setup.module, self.head)).eval()
        try:
            with torch.no_grad(), isolated("header"):
                fits = torch.allclose(_logits(header, z), wanted, rtol=1e-3, atol=1e-4)
                _logits(header.train(), z[: self.server_batch_size])
        except (RuntimeError, ValueError, TypeError) as error:
            raise ValueError(
                f"FedGH trains {where} at the server on {self.server_batch_size} representations at a time, {z.shape[1]} "
                f"numbers each, and it fails there: {str(error).rstrip('.')}. Set head=... to layers that take rows of "
                "representations, or a larger server_batch_size where it has batch normalisation."
            ) from error
        if not fits:
            raise ValueError(
                f"FedGH trains {where} at the server on rows of representations, and there it gives other logits than in the "
                "model. Set head=... to layers that depend on the representation alone."
            )
        refuse_logits(self.key, where, wanted, labels)

    def _compare(self, setup: Setup) -> None:
        """Refuse headers and widths of representations that differ between architectures."""
        if not setup.modules:
            return
        refuse_other_widths(setup, self.feature_taps, self.key)
        first_name, first = next(iter(setup.modules.items()))
        mine = next(name for name, module in setup.modules.items() if module is setup.module)
        names = [(head_path(first, self.head), first_name), (head_path(setup.module, self.head), mine)]
        if names[0][0] != names[1][0]:
            raise ValueError(
                f"FedGH sends one header to all clients, but it is `{names[0][0]}` in '{first_name}' and `{names[1][0]}` in "
                f"'{mine}'. Give it one name in all models, and set head=... to it."
            )
        theirs, ours = ({n: v.shape for n, v in module_state(m).items()} for m in (first, setup.module))
        for name in sorted({*self._header_names(first), *self._header_names(setup.module)}):
            if theirs.get(name) != ours.get(name):
                shapes = [tuple(model[name]) if name in model else "missing" for model in (theirs, ours)]
                raise ValueError(
                    f"FedGH sends one header to all clients, but '{name}' is {shapes[0]} in '{first_name}' and {shapes[1]} "
                    f"in '{mine}'. Give all models the same header."
                )

    def _header_names(self, module: nn.Module) -> list[str]:
        """Return the names of the header's entries."""
        prefix = head_path(module, self.head) + "."  # type: ignore[arg-type]
        return [name for name in module_state(module) if name.startswith(prefix)]

    def shared_names(self, server: Server, module: nn.Module) -> Iterable[str]:
        """Return the header's names; nothing while clients keep their own."""
        return [] if server.round < self.warmup else self._header_names(module)

    def wire(self, module: nn.Module) -> Wire:
        """Declare one vector for each class, and which class it is of, up."""
        up = {"prototypes": Extra(("classes", -1)), "classes": Extra(("classes",), whole=True, low=0)}
        return Wire(up=up, entries=self._header_names(module))

    def feature_taps(self, module: LightningModule) -> Mapping[str, FeatureTap]:
        """Tap the header's input, the representation, and its output."""
        path = head_path(module, self.head)
        return {"z": FeatureTap(module, path), "logits": FeatureTap(module, path, at="output")}

    # -- client --------------------------------------------------------------------------------------------------------
    def on_send(self, client: Client, update: Update) -> None:
        """Send the mean representations.

        Raises:
            FloatingPointError: If one is not finite. The core then drops the update.
        """
        if not client.contributed:
            return
        means = ClassMeans()
        for batch, features in client.feature_pass(self.feature_taps):
            z, labels = rows(features["z"]), labels_of(batch, self.key)
            if self.means == "batches":  # each class of the batch counts as one sample, its mean
                of_batch = ClassMeans()
                of_batch.add(z, labels)
                labels = torch.tensor(sorted(of_batch.sums))
                z = torch.stack([mean for _, mean in sorted(of_batch.result().items())]) if len(labels) else z[:0]
            means.add(z, labels.to(z.device))
        mean_by_label = {label: mean for label, mean in means.result().items() if label >= 0}  # not an ignore_index
        payload = pack(mean_by_label)
        if not torch.isfinite(payload["prototypes"]).all():
            raise FloatingPointError("its representations hold NaN or infinite values; lower the learning rate")
        update.extras[self.key] = payload

    # -- server --------------------------------------------------------------------------------------------------------
    def plan_round(self, server: Server) -> Plan:
        """Let clients train; then train the header on the pairs that they have sent."""
        answers = yield [Job(client, returns=(), keep=True) for client in server.participants()]
        extras_by_client = {a.client: a.extras[self.key] for a in answers if a.error is None and a.extras.get(self.key)}
        extras_by_client = {client: payload for client, payload in extras_by_client.items() if len(payload["classes"])}
        sent = list(of_one_width(server, extras_by_client, "prototypes").values())
        if sent:
            z, labels = (torch.cat([payload[part] for payload in sent]) for part in ("prototypes", "classes"))
            self._train_header(server, z, labels.long())

    def check_update(self, server: Server, message: Message, update: Update) -> None:
        """Refuse prototypes that do not fit the header."""
        if extras := update.extras.get(self.key):
            refuse_width("prototypes", extras["prototypes"], head_widths(server.module, self.head)[0])

    def _train_header(self, server: Server, z: Tensor, labels: Tensor) -> None:
        """Continue the server's header on pairs of representation and class."""
        module = server.module_with(server.model)
        header = module.get_submodule(head_path(module, self.head))
        if not any(parameter.requires_grad for parameter in header.parameters()):
            return
        size = self.server_batch_size
        one_is_left = len(z) % size == 1 and any(isinstance(part, NORMS) for part in header.modules())
        if one_is_left and len(z) == 1:  # batch normalisation cannot train on one pair
            return
        pairs = DataLoader(
            TensorDataset(z, labels), size, shuffle=self.shuffle, generator=torch.Generator(), drop_last=one_is_left
        )
        server.training.fit(
            header,
            pairs,
            lambda header, pair: F.cross_entropy(_logits(header, pair[0]), pair[1]),
            epochs=self.server_epochs,
            optimizer=lambda parameters: torch.optim.SGD(
                parameters, self.server_lr, momentum=self.server_momentum, weight_decay=self.server_weight_decay
            ),
            purpose=f"{self.key} header",
        )
        trained = module_state(module)
        names = self._header_names(module)
        server.models.add(GLOBAL, state={**server.model, **{name: trained[name].detach().clone() for name in names}})


def _logits(header: nn.Module, z: Tensor) -> Tensor:
    """Return the logits of rows of representations, in the header's own precision, with a column for each class."""
    like = next((parameter for parameter in header.parameters()), z)
    logits: Tensor = header(z.to(like.dtype))
    if logits.ndim != 2:
        raise ValueError(f"it gives {tuple(logits.shape)} for {tuple(z.shape)}")
    return both_classes(logits)
