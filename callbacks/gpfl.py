"""GPFL."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from fedlightning.algorithm import (
    Client,
    Facts,
    FederatedCallback,
    GradientContext,
    Message,
    Need,
    Server,
    WeightingName,
)
from fedlightning.callbacks.shared.logit_calibration import samples_by_class
from fedlightning.callbacks.shared.representations import Features, Labels, head_path, labels_of, rows
from fedlightning.ranges import Range, make_init
from fedlightning.wrappers import AddedParametersMixin, FeatureTap, Mixin, mix, mixins_of, user_class
from fedlightning.wrappers.heads import find_submodule, output_width

CONDITIONS = "conditions"
"""Name of what is added to the head."""


@make_init
class GPFL(FederatedCallback):
    r"""Global and personal information about features at once: class embeddings guide a shared extractor.

    Zhang, Hua, Wang, Song, Xue, Ma, Cao, Guan, "GPFL: simultaneously learning global and personalized feature information
    for personalized federated learning", ICCV 2023.

    Added to the extractor `f` and the head `h` are a table of class embeddings `E` (paper: GCE) and a conditional valve

    .. math:: \text{CoV}(z, c) = \text{relu}(z (1 + \gamma(c)) + \beta(c))

    with `gamma` and `beta` each a linear layer, ReLU and LayerNorm. When a client has received `E`, it fixes two contexts for
    the visit: `g`, the mean of all embeddings, and `p_i`, their mean by the frequencies of the classes in its training data.
    Its loss is

    .. math:: \text{task}(h(\text{CoV}(f(x), p_i)))
        + \text{angle} \cdot \text{CE}(\cos(\text{CoV}(f(x), g), E), y)
        + \lambda \, \| \text{CoV}(f(x), g) - E^t_y \|

    with `E^t` the embeddings as they were received. The logged loss stays the task's.

    * Down and up: `f`, `E` and the valve, which are averaged. State: the head, and the contexts.
    * Deployed: `h(CoV(f(x), p_i))`. There is no global model. The head and the frequencies never leave a client.

    The authors' code computes the contexts from the embeddings of before, just before it loads the new ones; here they are
    those of the embeddings received. A client without training samples takes `g` for `p_i`.

    Args:
        lam: Weight of the distance to a sample's embedding (authors tune it; 0 in their command line).
        angle: Weight of the cross entropy over cosines (paper: 1).
        mu: Weight decay of the embeddings and of the valve (authors tune it; 0 in their command line).
        distance: `"samples"` (paper): the mean of the samples' distances. `"batch"` (authors' code): one norm of a whole
            batch, which grows with the root of its size.
        head: Path of the submodule that turns features into predictions (`"net.fc"`). `None`: the last layer.
        num_classes: Number of classes. `None`: the outputs of the head, two for a single logit.
        valve: Start of the valve. `"open"`: `gamma` and `beta` are 0 and grow, so that the head sees the features at first.
            `"random"` (authors' code): torch's, with `beta` of size 1, beside which features of small networks are lost.
        weighting: `"samples"` (authors) or `"uniform"`.

    Raises:
        ValueError: If a weight is negative or infinite, or `distance` is unknown.

    Example:
        >>> from fedlightning.callbacks import GPFL
        >>> from fedlightning.models import MLP, Classifier
        >>> gpfl = GPFL()
        >>> module = gpfl.wrap_module(Classifier(MLP(4, [3], 2), num_classes=2), "server")
        >>> gpfl.shared_names(None, module)[:3]
        ['net.fc1.weight', 'net.fc1.bias', 'net.fc2.conditions.embeddings.weight']
    """

    facts = Facts(
        needs=[Need("shares everything but the head, to which it has added layers", ("shared_names",))],
        requires=[Features(), Labels()],
    )
    rank = 1  # the contexts are those of the embeddings that a client trains from, after others have merged them

    lam: Annotated[float, Range("[0, inf)", "0 turns it off.")] = 0.01
    angle: Annotated[float, Range("[0, inf)", "0 turns it off.")] = 1.0
    mu: Annotated[float, Range("[0, inf)", "0 turns it off.")] = 0.0
    distance: Literal["samples", "batch"] = "samples"
    head: str | list[str] | None = None
    num_classes: Annotated[int, Range("[2, inf)")] | None = None
    valve: Literal["open", "random"] = "open"
    weighting: WeightingName | None = None

    def claims(self, role: str) -> bool:
        """Decline the terms whose weights are 0."""
        unused = {"training_loss": self.lam == self.angle == 0.0, "correct_gradient": self.mu == 0.0}
        return super().claims(role) and not unused.get(role, False)

    # -- the model -----------------------------------------------------------------------------------------------------
    def wrap_module(self, module: LightningModule, owner: str) -> LightningModule:
        """Add embeddings and valve to the head, which then conditions its features on `p_i`.

        Raises:
            ValueError: If there is no such head, or it does not begin with an `nn.Linear`.
        """
        path = head_path(module, self.head)
        head = find_submodule(module, path)
        layer = next((part for part in head.modules() if any(True for _ in part.parameters(recurse=False))), head)
        if not isinstance(layer, nn.Linear):
            raise ValueError(
                f"GPFL conditions features (batch, width), but the head `{path}` of {user_class(module).__name__} begins "
                f"with a {type(layer).__name__}. Name a head that begins with an nn.Linear."
            )
        classes = self.num_classes or max(2, output_width(head) or 2)
        original = next((name for name, p in module.named_parameters() if p.requires_grad), "")
        head.add_module(CONDITIONS, Conditions(classes, layer.in_features, self.valve == "open"))
        mix(head, ConditionedHeadMixin)
        mix(module, _AddsConditionsMixin)
        names = [name for name, _ in module.named_parameters() if name.startswith(f"{path}.{CONDITIONS}.")]
        vars(module)["gpfl_originals"] = dict.fromkeys(names, original)
        return module

    def shared_names(self, server: Server, module: nn.Module) -> Iterable[str]:
        """Return the names of extractor, embeddings and valve: everything but the head and the contexts."""
        path, conditions = conditioned_head(module)
        prefix = f"{path}.{CONDITIONS}."
        added = {f"{prefix}{name}" for name, _ in conditions.named_parameters()}
        state = module.state_dict(keep_vars=True)
        private = {id(value) for name, value in state.items() if name.startswith(f"{path}.") and name not in added}
        return [name for name, value in state.items() if id(value) not in private]  # nor what is tied to the head

    # -- client --------------------------------------------------------------------------------------------------------
    def on_receive(self, client: Client, message: Message) -> None:
        """Fix the contexts by the embeddings that came.

        Raises:
            ValueError: If the data have more classes than there are embeddings.
        """
        path, _ = conditioned_head(client.module)
        prefix, state = f"{path}.{CONDITIONS}", message.state
        embeddings = state.get(f"{prefix}.embeddings.weight")
        if embeddings is None:
            return
        class_counts = client.class_counts or ()
        if len(class_counts) > len(embeddings):
            raise ValueError(
                f"GPFL weights {len(embeddings)} class embeddings by a client's classes, but its data have "
                f"{len(class_counts)} classes. Set num_classes"
            )
        counts = samples_by_class(client, len(embeddings), self.key).tolist()
        state[f"{prefix}.generic"], state[f"{prefix}.personal"] = contexts(embeddings, counts)

    def feature_taps(self, module: LightningModule) -> Mapping[str, FeatureTap]:
        """Tap the features before the valve: the input of the head."""
        return {"z": FeatureTap(module, conditioned_head(module)[0])}

    def training_loss(
        self, client: Client, module: LightningModule, batch: Any, loss: Tensor, features: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the task's loss with the two terms on generally conditioned features."""
        path, conditions = conditioned_head(module)
        labels = labels_of(batch, self.key)
        z = rows(conditions(features["z"].flatten(1), conditions.generic))
        if self.angle:
            table = conditions.embeddings.weight
            cosines = F.normalize(z) @ F.normalize(table.to(z.dtype)).T
            loss = loss + self.angle * F.cross_entropy(cosines, labels)
        if self.lam:
            received = client.anchor(f"{path}.{CONDITIONS}.embeddings.weight", z.device)
            if received is not None:
                apart = z - received.to(z.dtype)[labels]
                size = apart.norm() if self.distance == "batch" else apart.norm(dim=1).mean()
                loss = loss + self.lam * size
        return loss

    def correct_gradient(self, ctx: GradientContext, name: str, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Return `g + mu theta` for embeddings and valve."""
        return gradient + self.mu * parameter if f".{CONDITIONS}." in name else gradient


class Conditions(nn.Module):
    """Class embeddings, the conditional valve, and the two contexts that it is opened by.

    Args:
        num_classes: Number of classes C.
        width: Width d of the features.
        is_open: Start with `gamma` and `beta` 0.

    Shapes:
        z: `(batch, d)`.
        context: `(d,)`.

    Attributes:
        embeddings: The table E, `(C, d)`.
        generic: The context g, `(d,)`.
        personal: The context p_i, `(d,)`.

    Example:
        >>> conditions = Conditions(num_classes=3, width=4)
        >>> conditions(torch.zeros(5, 4), conditions.generic).shape
        torch.Size([5, 4])
    """

    generic: Tensor
    personal: Tensor

    def __init__(self, num_classes: int, width: int, is_open: bool = True) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(num_classes, width)
        self.gamma = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.LayerNorm(width))
        self.beta = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.LayerNorm(width))
        for norm in (self.gamma[-1], self.beta[-1]) if is_open else ():
            nn.init.zeros_(norm.weight)  # type: ignore[arg-type]
        self.register_buffer("generic", torch.zeros(width))
        self.register_buffer("personal", torch.zeros(width))

    def forward(self, z: Tensor, context: Tensor) -> Tensor:
        """Return `relu(z (1 + gamma(c)) + beta(c))`."""
        return torch.relu(z * (1.0 + self.gamma(context)) + self.beta(context))


class ConditionedHeadMixin(Mixin):
    """On the head: its features pass the valve, opened by the client's context, before they are turned into predictions."""

    wraps = ("forward",)

    def around(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not args:
            args, kwargs = tuple(kwargs.values())[:1], dict(list(kwargs.items())[1:])
        conditions = self.get_submodule(CONDITIONS)
        return call(conditions(args[0], conditions.personal), *args[1:], **kwargs)

    def on_unmix(self) -> None:
        raise TypeError(
            f"GPFL's conditions cannot be taken off {user_class(self).__name__} again: the head was trained on conditioned "
            "features. Keep the module as it is."
        )


class _AddsConditionsMixin(AddedParametersMixin):
    """On the module: embeddings and valve join the optimizer."""

    gpfl_originals: dict[str, str]

    def added_parameters(self) -> dict[str, str]:
        return {**super().added_parameters(), **self.gpfl_originals}

    def on_unmix(self) -> None:
        del vars(self)["gpfl_originals"]


def conditioned_head(module: nn.Module) -> tuple[str, Conditions]:
    """Return the path of the head that :class:`GPFL` has conditioned, and what it has added there."""
    for path, child in module.named_modules():
        if ConditionedHeadMixin in mixins_of(child):
            conditions: Any = child.get_submodule(CONDITIONS)
            return path, conditions
    raise ValueError(f"{user_class(module).__name__} has no conditioned head; GPFL adds one when it wraps the module.")


def contexts(embeddings: Tensor, counts: Iterable[int]) -> tuple[Tensor, Tensor]:
    """Return `g`, the mean embedding, and `p_i`, the mean by the frequencies of the classes; each `(d,)`.

    Example:
        >>> table = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> contexts(table, [3, 1])
        (tensor([0.5000, 0.5000]), tensor([0.7500, 0.2500]))
    """
    frequencies = torch.zeros(len(embeddings), dtype=torch.float64)
    for label, count in enumerate(counts):
        frequencies[label] = count
    wide = embeddings.detach().double().cpu()
    generic = wide.mean(0)
    personal = frequencies / frequencies.sum() @ wide if frequencies.sum() > 0 else generic
    return generic.to(embeddings), personal.to(embeddings)
