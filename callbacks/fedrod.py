"""Fed-RoD."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from fedlightning.algorithm import Change, Client, Facts, Need, Server, ServerModels, Setup, Stage, WeightingName
from fedlightning.callbacks.shared.logit_calibration import check_head, samples_by_class
from fedlightning.callbacks.shared.representations import head_path, labels_of, rows
from fedlightning.ranges import make_init
from fedlightning.wrappers import AddedParametersMixin, FeatureTap, mix, user_class
from fedlightning.wrappers.heads import find_submodule, registered_names

PERSONAL = "personal"
"""Name of the personal head, inside the generic one."""


@make_init
class FedRoD(ServerModels):
    r"""A generic model from class-balanced training, and a personal head on top of it: Fed-RoD, robust decoupling.

    Chen, Chao, "On bridging generic and personalized federated learning for image classification", ICLR 2022.

    The body `f` and the generic head `g` travel; a personal head `P_i` of the same shape stays with the client. On every
    batch, with `z = f(x)`, `n_i` the client's training samples by class, and `[.]` without a gradient:

    * body and generic head: the balanced softmax, `CE(g(z) + log n_i, y)`. Classes that are rare at a client are learnt as
      if they were not, so that all clients agree more; a class that it lacks is not pushed down.
    * personal head: `CE([g(z)] + P_i([z]), y)`. It learns what is special about the client, and nothing else moves by it.

    Both are one loss, `task + (CE(g(z) + log n_i, y) - CE(g(z), y)) + CE([g(z)] + P_i([z]), y)`, in which `task` is the
    user's cross entropy: their gradients are of different parameters. With equal numbers of all classes the difference is
    left out, and body and generic head train exactly as in FedAvg.

    * Down and up: `f, g`. State: `P_i`. The numbers of samples by class never leave a client.
    * Deployed: `g(z) + P_i(z)`, one linear layer whose weights are the sums (stages L1 and L2). Stage G is the generic
      model `g(f(x))`, which is also what a client has that never trained.

    The logged loss stays the task's, of the generic model. Momentum and weight decay act on `P_i` as on the generic head;
    optimizers begin anew in every visit, where public code keeps that of `P_i` (`optimizer_state="keep"` keeps all). The
    paper's variant that makes `P_i` from the class counts by a hypernetwork is not part of it.

    Args:
        head: Path of the linear layer that turns features into logits (`"net.fc"`). `None`: the last layer.
        init: Start of `P_i`: a `"copy"` of the generic head (PFLlib, fluke), or `"zeros"`: personal and generic
            predictions are the same at first.
        weighting: `"samples"` (default) or `"uniform"`.

    Raises:
        ValueError: If `init` is unknown.

    Example:
        Two classes of which a client has 100 samples and 1: for a sample of the rare one, logits that prefer neither are
        taken as if they preferred the other by `log 100`.

        >>> import torch
        >>> from torch.nn import functional as F
        >>> from fedlightning.callbacks.fedrod import log_counts
        >>> F.cross_entropy(torch.zeros(1, 2) + log_counts([100, 1], 2), torch.tensor([1]))
        tensor(4.6151)
    """

    facts = Facts(
        needs=[
            Need("adds a personal head to the user's own network", ("wrap_module",)),
            Need("shares everything but the personal head", ("shared_names",)),
            Need("trains both heads in one fit", ("local_phases",)),
            Need("calibrates the loss of its generic head by a client's classes itself", (Change.CALIBRATES,)),
        ]
    )

    head: str | list[str] | None = None
    init: Literal["copy", "zeros"] = "copy"
    weighting: WeightingName | None = None

    def check(self, setup: Setup) -> None:
        """Refuse other losses than the cross entropy; warn of weighted ones, and of clipping."""
        path, _ = personal_head(setup.module)
        _, is_plain = check_head(setup, path, self.key)
        if not is_plain:
            setup.warn(
                f"FedRoD corrects the cross entropy by the numbers of each client's classes, and that of "
                f"{type(setup.template).__name__} is weighted or smoothed already. Use the plain one."
            )
        trainer_arguments = setup.run.trainer_arguments
        if trainer_arguments.get("gradient_clip_val") and trainer_arguments.get("gradient_clip_algorithm") != "value":
            setup.warn(
                "FedRoD trains two heads by one optimizer: clipping by the norm (gradient_clip_val) sees the gradients of "
                "both, so that the shared part depends on the personal one. Leave it out, or set "
                "gradient_clip_algorithm='value'."
            )

    # -- the model -----------------------------------------------------------------------------------------------------
    def wrap_module(self, module: LightningModule, owner: str) -> LightningModule:
        """Put a personal head into the generic one, whose forward does not use it.

        Raises:
            ValueError: If there is no such head, or it is not a plain linear layer of its own.
        """
        path = head_path(module, self.head)
        head = find_submodule(module, path)
        head_parameters, names = list(head.parameters(recurse=False)), registered_names(module, head)
        tied = [
            name
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if any(parameter is head_parameter for head_parameter in head_parameters)
            and name.rpartition(".")[0] not in names
        ]
        if not isinstance(head, nn.Linear) or parametrize.is_parametrized(head) or tied or len(list(head.children())):
            what = f"shares its weight with `{tied[0]}`" if tied else f"is a {type(head).__name__}"
            raise ValueError(
                f"FedRoD adds a personal head to a plain nn.Linear, but the head `{path}` of {user_class(module).__name__} "
                f"{what}. Set head=... to the last linear layer, or use another method, such as FedPer."
            )
        personal = copy.deepcopy(head)
        if self.init == "zeros":
            for parameter in personal.parameters():
                nn.init.zeros_(parameter)
        head.add_module(PERSONAL, personal)
        mix(module, _AddsPersonalHeadMixin)
        vars(module)["fedrod_head"] = path
        return module

    def shared_names(self, server: Server, module: nn.Module) -> Iterable[str]:
        """Return the names of everything but the personal head."""
        inner = tuple(f"{path}.{PERSONAL}." for path in registered_names(module, personal_head(module)[1]))
        return [name for name in module.state_dict() if not name.startswith(inner)]

    def global_module(self, server: Server, client: str | None) -> LightningModule | None:
        """Return the generic model; `None` where something else stays with the clients too, such as running statistics."""
        whole = set(self.shared_names(server, server.module)) <= set(server.shared_names())
        return server.module_with(server.model) if whole else None

    def personal_module(self, client: Client, stage: Stage) -> LightningModule:
        """Return the model with the sum of both heads; the generic one where no personal head was ever trained."""
        module = client.copy_module()
        if client.contributed or client.record.visits:
            add_personal_head(module)
        return module

    # -- client --------------------------------------------------------------------------------------------------------
    def on_visit_start(self, client: Client) -> None:
        """Take the logarithms of the client's numbers of samples by class; nothing where all are equal.

        Raises:
            ValueError: If the data have more classes than the head has logits.
        """
        classes = personal_head(client.module)[1].out_features
        counts = samples_by_class(client, classes, self.key).tolist()
        equal = len(set(counts)) == 1 and len(counts) == classes
        client.scratch[self.key] = None if equal else log_counts(counts, classes).to(client.device)

    def feature_taps(self, module: LightningModule) -> Mapping[str, FeatureTap]:
        """Tap the features and the generic logits: input and output of the generic head."""
        path, _ = personal_head(module)
        return {"z": FeatureTap(module, path), "logits": FeatureTap(module, path, at="output")}

    def training_loss(
        self, client: Client, module: LightningModule, batch: Any, loss: Tensor, features: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the loss of body and generic head, balanced, plus that of the personal head."""
        generic, labels = rows(features["logits"]), labels_of(batch, self.key)
        log_n = client.scratch[self.key]
        personal = personal_head(module)[1].get_submodule(PERSONAL)(features["z"].detach())
        if log_n is not None:
            loss = loss + F.cross_entropy(generic + log_n, labels) - F.cross_entropy(generic, labels)
        return loss + F.cross_entropy(generic.detach() + rows(personal), labels)


class _AddsPersonalHeadMixin(AddedParametersMixin):
    """On the module: the personal head joins the optimizer group of the generic one."""

    fedrod_head: str

    def added_parameters(self) -> dict[str, str]:
        path, head = personal_head(self)
        names = [name for name, _ in head.named_parameters(recurse=False)]
        return {**super().added_parameters(), **{f"{path}.{PERSONAL}.{name}": f"{path}.{name}" for name in names}}

    def on_unmix(self) -> None:
        """Leave the user's network: the generic head, or the sum of both where it has been made."""
        delattr(personal_head(self)[1], PERSONAL)
        del vars(self)["fedrod_head"]


def personal_head(module: nn.Module) -> tuple[str, nn.Linear]:
    """Return the path of the generic head, and the head, which holds the personal one."""
    path = vars(module)["fedrod_head"]
    head: Any = module.get_submodule(path)
    return path, head


@torch.no_grad()
def add_personal_head(module: nn.Module) -> None:
    """Add the weights of the personal head to the generic one, and leave it with zeros: outputs are the sum of both."""
    _, head = personal_head(module)
    personal: Any = head.get_submodule(PERSONAL)
    for name, parameter in head.named_parameters(recurse=False):
        parameter.add_(personal.get_parameter(name))
        personal.get_parameter(name).zero_()


def log_counts(counts: Iterable[int], classes: int) -> Tensor:
    """Return the logarithms of numbers of samples by class, `(classes,)`; the least float for a class without any."""
    numbers = torch.zeros(classes)
    for label, count in enumerate(counts):
        numbers[label] = count
    return torch.where(numbers > 0, numbers.log(), torch.finfo(numbers.dtype).min)
