"""Networks for samples of several modalities, some of which may be missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from fedlightning.models.networks import Size
from fedlightning.models.recipes import module_recipe
from fedlightning.ranges import Length, checked

Fusion = Literal["concat", "attention", "gate"]


class MultimodalNet(nn.Module):
    """An encoder for each modality, a fusion of what they find, and a classifier.

    Input: `{modality: inputs}`. A modality that is missing from a sample is NaN there, or missing from the dict. An
    encoder sees only samples that have its modality: the others give it no gradient and no statistics, and where a whole
    batch lacks the modality, the encoder's parameters have no gradient at all. Output: logits `(batch, num_classes)`.

    * `"concat"`: zeros instead of what is missing, one hidden layer (FedMultimodal).
    * `"attention"`: additive attention over the encoders' outputs, with `num_heads` heads; what is missing has the weight
      0 (FedMultimodal's `a = softmax(W2 tanh(W1 h))`).
    * `"gate"`: `h' = W h`, `p = sigmoid(h') * h'` with `h` the concatenation (FedCovid).

    Args:
        encoders: By modality, a network with outputs `(batch, width)`, or `(batch, steps, width)` of a sequence. Networks of
            this package with `num_classes=width` will do.
        num_classes: Number of outputs.
        width: Number of features of each encoder. Default 64 (FedMultimodal).
        fusion: `"concat"`, `"attention"` or `"gate"`.
        num_heads: Heads of the attention. Default 4 (FedMultimodal: 4 to 6).
        unimodal_heads: Give each modality a classifier of its own, for samples that have this modality alone (Harmony).

    Raises:
        ValueError: If there are no encoders or `fusion` is unknown; in `forward`, if a sample has no modality, a modality
            has no encoder, or the output of an encoder has another width.

    Example:
        >>> import torch
        >>> from fedlightning.models import MLP, MultimodalNet
        >>> net = MultimodalNet({"image": MLP(4, [], 8), "audio": MLP(2, [], 8)}, num_classes=3, width=8)
        >>> net({"image": torch.zeros(5, 4), "audio": torch.full((5, 2), torch.nan)}).shape
        torch.Size([5, 3])
    """

    head_name = "classifier"

    @checked
    def __init__(
        self,
        encoders: Annotated[dict[str, nn.Module], Length(note="One for each modality.")],
        num_classes: Size,
        width: Size = 64,
        fusion: Fusion = "concat",
        num_heads: Size = 4,
        unimodal_heads: bool = False,
    ) -> None:
        super().__init__()
        recipes = {name: module_recipe(encoder) for name, encoder in encoders.items()}
        if None not in recipes.values():
            self.init_args: dict[str, Any] = {
                "encoders": recipes,
                "num_classes": num_classes,
                "width": width,
                "fusion": fusion,
                "num_heads": num_heads,
                "unimodal_heads": unimodal_heads,
            }
        self.modalities, self.width, self.fusion_kind = list(encoders), width, fusion
        self.encoders = nn.ModuleDict(encoders)
        self.heads = nn.ModuleDict({name: nn.Linear(width, num_classes) for name in encoders} if unimodal_heads else {})
        joined = width * len(encoders)
        if fusion == "attention":
            self.fusion: nn.Module = nn.Sequential(
                nn.Linear(width, width), nn.Tanh(), nn.Linear(width, num_heads, bias=False)
            )
            self.classifier = nn.Linear(width * num_heads, num_classes)
        else:
            self.fusion = nn.Linear(joined, width if fusion == "concat" else joined)
            self.classifier = nn.Linear(self.fusion.out_features, num_classes)

    def forward(self, x: Mapping[str, Tensor]) -> Tensor:
        tokens, is_present = self.encode(x)
        fused = (
            is_present.sum(1) > 1
            if len(self.heads)
            else torch.ones(len(is_present), dtype=torch.bool, device=is_present.device)
        )
        if bool(fused.all()):
            return self._fused(tokens, is_present)
        answers = [(fused, self._fused(_some(tokens, fused), is_present[fused]))] if bool(fused.any()) else []
        for place, name in enumerate(self.modalities):
            rows = ~fused & is_present[:, place]
            if bool(rows.any()):
                answers.append((rows, self.heads[name](tokens[name][rows].mean(1))))
        first = answers[0][1]
        logits = first.new_zeros(len(is_present), first.shape[1])
        for rows, answer in answers:
            logits = logits.index_put((rows,), answer.to(logits.dtype))
        return logits

    def encode(self, x: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """Return each modality's features `(batch, steps, width)`, 0 where it is missing, and who has what.

        Args:
            x: Inputs by modality.

        Returns:
            The features, and a bool tensor `(batch, modalities)`.

        Raises:
            ValueError: If a sample has no modality, a modality has no encoder, or an encoder's output another width.
        """
        if not isinstance(x, Mapping):
            raise ValueError(
                f"MultimodalNet needs a dict of inputs ({', '.join(self.modalities)}) and got a {type(x).__name__}."
            )
        unknown = [name for name in x if name not in self.modalities]
        if unknown or not x:
            raise ValueError(
                f"MultimodalNet has encoders for {', '.join(self.modalities)}, and a batch has {', '.join(x) or 'nothing'}. "
                "Give it an encoder for each modality of the data."
            )
        first = next(iter(x.values()))
        absent = torch.zeros(len(first), dtype=torch.bool, device=first.device)
        columns = [present_rows(x[name]) if name in x else absent for name in self.modalities]
        is_present = torch.stack(columns, dim=1)
        if not bool(is_present.any(1).all()):
            raise ValueError("A sample has no modality at all. Leave it out of the data.")
        tokens: dict[str, Tensor] = {}
        for name, rows in zip(self.modalities, columns, strict=True):
            if bool(rows.all()):
                tokens[name] = self._encoded(name, x[name])
            elif bool(rows.any()):
                encoded = self._encoded(name, x[name][rows])
                tokens[name] = encoded.new_zeros(len(rows), *encoded.shape[1:]).index_put((rows,), encoded)
        like = next(iter(tokens.values()))
        missing = [name for name in self.modalities if name not in tokens]
        return tokens | {name: like.new_zeros(len(is_present), 1, self.width) for name in missing}, is_present

    def _encoded(self, name: str, inputs: Tensor) -> Tensor:
        features: Tensor = self.encoders[name](inputs)
        if features.ndim not in (2, 3) or features.shape[-1] != self.width:
            raise ValueError(
                f"The encoder of {name!r} returns {tuple(features.shape)}, but MultimodalNet(width={self.width}) needs "
                f"(batch, {self.width}) or (batch, steps, {self.width}). Give both the same width."
            )
        return features.unsqueeze(1) if features.ndim == 2 else features

    def _fused(self, tokens: Mapping[str, Tensor], there: Tensor) -> Tensor:
        if self.fusion_kind == "attention":
            sequence, weights = self.attention(tokens, there)
            fused = torch.einsum("bsh,bsw->bhw", weights, sequence).flatten(1)
        else:
            joined = torch.cat([tokens[name].mean(1) for name in self.modalities], dim=1)
            fused = self.fusion(joined)
            fused = torch.sigmoid(fused) * fused if self.fusion_kind == "gate" else torch.relu(fused)
        logits: Tensor = self.classifier(fused)
        return logits

    def attention(self, tokens: Mapping[str, Tensor], there: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sequence of all features and the attention on it; what is missing has the weight 0.

        Args:
            tokens: Features by modality, `(batch, steps, width)`.
            there: Which modalities a sample has, `(batch, modalities)`.

        Returns:
            `(batch, all steps, width)`, and `(batch, all steps, heads)` with the sum 1 over the steps.
        """
        sequence = torch.cat([tokens[name] for name in self.modalities], dim=1)
        steps = [tokens[name].shape[1] for name in self.modalities]
        mask = torch.cat([there[:, [k]].expand(-1, count) for k, count in enumerate(steps)], dim=1)
        scores = self.fusion(sequence).masked_fill(~mask.unsqueeze(-1), -torch.inf)
        return sequence, scores.softmax(1)


def present_rows(values: Tensor) -> Tensor:
    """Return which samples have a modality, bool `(batch,)`: those whose values are not all NaN.

    Example:
        >>> import torch
        >>> from fedlightning.models.multimodal import present_rows
        >>> present_rows(torch.tensor([[0.0, torch.nan], [torch.nan, torch.nan]]))
        tensor([ True, False])
    """
    return ~values.isnan().flatten(1).all(1)


def _some(tokens: Mapping[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    return {name: features[rows] for name, features in tokens.items()}
