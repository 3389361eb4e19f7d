"""Any model of Hugging Face's transformers as a LightningModule: the loss is the model's own."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torchmetrics import Metric

from fedlightning.models.metrics import ClassificationMetrics
from fedlightning.ranges import NonNegativeFloat, PositiveFloat, Range, ShareBelowOne, check_arguments

Pair = tuple[float, float]
IGNORED = -100
"""Label of a token that is not a target, as in transformers."""
ARGUMENT_BY_FIELD = {
    "learning_rate": "lr",
    "weight_decay": "weight_decay",
    "adam_epsilon": "eps",
    "warmup_steps": "warmup",
    "label_smoothing_factor": "label_smoothing",
}
"""Fields of `transformers.TrainingArguments` and the arguments of `HFModule` that mean the same."""
ELSEWHERE = {
    "num_train_epochs": "FederatedTrainer(local_epochs=...) and max_rounds",
    "max_steps": "FederatedTrainer(local_steps=...) and max_rounds",
    "gradient_accumulation_steps": "FederatedTrainer(accumulate_grad_batches=...), which means batches, not tokens",
    "max_grad_norm": "FederatedTrainer(gradient_clip_val=...)",
    "bf16": 'FederatedTrainer(precision="bf16-mixed")',
    "fp16": 'FederatedTrainer(precision="16-mixed")',
    "seed": "FederatedTrainer(seed=...)",
    "eval_strategy": "FederatedTrainer(evaluation=...)",
    "save_strategy": "FederatedTrainer(save_state=...)",
    "load_best_model_at_end": "the callbacks LocalCheckpoint and GlobalCheckpoint",
    "use_cpu": 'FederatedTrainer(accelerator="cpu")',
    "per_device_train_batch_size": "the data module's batch_size",
    "per_device_eval_batch_size": "the data module's batch_size",
}
"""Fields whose counterpart is not the module's."""
UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""In the name of a parameter: it has no weight decay, as in `transformers.Trainer`."""


class TokenMetrics(Metric):
    """Loss, perplexity and accuracy over all target tokens of a split: sums over tokens, divided once.

    Example:
        >>> import torch
        >>> metrics = TokenMetrics()
        >>> metrics.update(torch.zeros(1, 3, 4), torch.tensor([[0, 1, -100]]), torch.tensor(math.log(4.0)))
        >>> {name: round(value.item(), 3) for name, value in metrics.compute().items()}
        {'loss': 1.386, 'perplexity': 4.0, 'accuracy': 0.5}
    """

    full_state_update = False
    sums: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("sums", torch.zeros(3, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, target: Tensor, loss: Tensor) -> None:
        """Add a batch: logits `(..., classes)`, targets `(...)`, and the mean loss over its target tokens."""
        counted = target != IGNORED
        tokens, hits = counted.sum(), ((logits.argmax(-1) == target) & counted).sum()
        if tokens:  # the mean over no tokens is NaN
            self.sums += torch.stack([loss.detach().double() * tokens, hits.double(), tokens.double()])

    def compute(self) -> dict[str, Tensor]:
        """Return the scores; NaN without any target."""
        loss, accuracy = (self.sums[:2] / self.sums[2]).float()
        return {"loss": loss, "perplexity": loss.exp(), "accuracy": accuracy}


class PredictionMetrics(Metric):
    """What a `compute_metrics` of transformers says of a whole split: of all logits and labels, padded with -100.

    Args:
        compute_metrics: The function.
    """

    full_state_update = False
    logits: list[Tensor]
    labels: list[Tensor]

    def __init__(self, compute_metrics: Callable[[Any], Mapping[str, float]]) -> None:
        super().__init__()
        self.compute_metrics = compute_metrics
        for name in ("logits", "labels"):
            self.add_state(name, [], dist_reduce_fx=None)

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch."""
        self.logits.append(logits.detach().float())
        self.labels.append(labels)

    def compute(self) -> dict[str, Tensor]:
        """Return the scores."""
        from transformers import EvalPrediction

        logits, labels = (_join_padded(batches).cpu().numpy() for batches in (self.logits, self.labels))
        scores = self.compute_metrics(EvalPrediction(predictions=logits, label_ids=labels))
        return {name: torch.tensor(float(value)) for name, value in scores.items()}


def _join_padded(batches: list[Tensor]) -> Tensor:
    """Return batches of samples, or of tokens padded to the longest, as one."""
    if batches[0].ndim == 1:
        return torch.cat(batches)
    longest = max(batch.shape[1] for batch in batches)
    short = (0, 0) * (batches[0].ndim - 2)
    return torch.cat([pad(batch, (*short, 0, longest - batch.shape[1]), value=IGNORED) for batch in batches])


class HFModule(LightningModule):
    """A LightningModule around a transformers model with a loss: `AutoModelFor...` of any kind, or a `PeftModel` as it is.

    Batches are dicts with `labels`, as `TextDataModule` and the collators of transformers make them. With one label a
    sample the scores are those of `ClassificationMetrics`; with a label a token, `loss`, `perplexity` and `accuracy` are over
    all target tokens of a split, never means of batches' means. The optimizer holds what trains (`requires_grad`).

    A project with `transformers.Trainer` keeps its model, data sets, collator, `compute_metrics` and `TrainingArguments`::

        module = HFModule.from_trainer(model, args, compute_metrics)  # warns of what is to be said elsewhere, and where
        data = TextDataModule({"rome": (train_a, val_a), "oslo": (train_b, val_b)}, collator=collator, batch_size=16)
        adapters = FedIT(r=8, target_modules=["query", "value"], head="model.classifier")
        trainer = FederatedTrainer(max_rounds=10, local_epochs=1, callbacks=[adapters])
        trainer.fit(module, data)
        unmix(trainer.module()).model.save_pretrained("merged")  # as any model; save_peft writes the adapters alone

    One data set is divided among clients as in `examples/finetune_texts.py`. A frozen network is in memory once, also in
    bfloat16 or float16 (adapters are float32 then); layers of whole numbers (`torch.ao`) are refused.

    A schedule has one horizon, the Trainer's steps. In a federation that is the whole run with `optimizer_state="keep"`; with
    `"reset"` it is one visit, and begins anew in the next.

    Args:
        model: The model. Called with a batch, it returns `loss` and `logits`.
        lr: Learning rate. Default 5e-5, as `transformers.Trainer`.
        optimizer: `"adamw"` (default) or `"sgd"` without momentum.
        weight_decay: Weight decay; biases and norms have none, as in transformers.
        betas: Of AdamW.
        eps: Of AdamW.
        schedule: `"constant"` (default), `"linear"` or `"cosine"` to zero.
        warmup: Steps in which the learning rate grows from zero; below 1, their share of all.
        label_smoothing: Share of each target that is spread over all classes, in training; the model's own loss is not asked.
        compute_metrics: Function of a `transformers.EvalPrediction` of a whole split that returns more scores.
            Its names go before ours.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM  # doctest: +SKIP
        >>> config = LlamaConfig(vocab_size=258, hidden_size=64, num_hidden_layers=2)  # doctest: +SKIP
        >>> module = HFModule(LlamaForCausalLM(config), lr=1e-3)  # doctest: +SKIP
    """

    def __init__(
        self,
        model: nn.Module,
        lr: PositiveFloat = 5e-5,
        optimizer: Literal["adamw", "sgd"] = "adamw",
        weight_decay: NonNegativeFloat = 0.0,
        betas: Annotated[Pair, "of AdamW"] = (0.9, 0.999),
        eps: PositiveFloat = 1e-8,
        schedule: Literal["constant", "linear", "cosine"] = "constant",
        warmup: Annotated[float, Range("[0, inf)", "Below 1 it is a share of all steps.")] = 0.0,
        label_smoothing: ShareBelowOne = 0.0,
        compute_metrics: Callable[[Any], Mapping[str, float]] | None = None,
    ) -> None:
        super().__init__()
        check_arguments(self, HFModule.__init__, locals())
        self.save_hyperparameters(ignore=["model", "compute_metrics"])
        self.model = model.train()  # from_pretrained leaves it in eval mode, without dropout, and Lightning keeps modes
        config: Any = model.config
        network = getattr(model, "get_base_model", lambda: model)()
        generates = getattr(network, "can_generate", bool)()
        self.columns = {"labels", *inspect.signature(network.forward).parameters}
        self.shifts = bool(generates and not config.is_encoder_decoder)  # a causal model's logits are of the next token
        self.val_metrics, self.test_metrics = (
            nn.ModuleDict(
                {"classes": ClassificationMetrics(max(2, config.num_labels)), "tokens": TokenMetrics()}
                | ({} if compute_metrics is None else {"computed": PredictionMetrics(compute_metrics)})
            )
            for _ in range(2)
        )

    @classmethod
    def from_trainer(
        cls, model: nn.Module, args: Any, compute_metrics: Callable[[Any], Mapping[str, float]] | None = None
    ) -> HFModule:
        """Return a module with what `transformers.TrainingArguments` say; a warning names what is to be said elsewhere.

        Raises:
            ValueError: If the optimizer or the schedule has no counterpart.
        """
        arguments = {to: getattr(args, name) for name, to in ARGUMENT_BY_FIELD.items()}
        words = {
            name: str(getattr(getattr(args, name), "value", getattr(args, name)))
            for name in ("optim", "lr_scheduler_type")
        }
        other = []
        kind, schedule = words["optim"].partition("_")[0], words["lr_scheduler_type"].removesuffix("_with_warmup")
        if kind not in ("adamw", "sgd") or "bit" in words["optim"] or schedule not in ("constant", "linear", "cosine"):
            raise ValueError(
                f"HFModule has no counterpart of {words}. Use adamw or sgd, and constant, linear or cosine."
            )
        if words["lr_scheduler_type"] == "constant":
            arguments["warmup"] = 0.0  # which transformers ignores there
        if getattr(args, "activation_checkpointing", None) or args.gradient_checkpointing:  # two names of one option
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
        if schedule != "constant" or arguments["warmup"]:
            way = 'of a visit, and of the whole run with FederatedTrainer(optimizer_state="keep")'
            other.append(f"the horizon of lr_scheduler_type={words['lr_scheduler_type']!r} ({way})")
        read = {
            *ARGUMENT_BY_FIELD,
            *words,
            "adam_beta1",
            "adam_beta2",
            "gradient_checkpointing",
            "activation_checkpointing",
            "output_dir",
        }
        plain = type(args)(output_dir=args.output_dir)  # what nobody has said
        for field in dataclasses.fields(args):
            value = getattr(args, field.name)
            important = field.name in ("num_train_epochs", "max_grad_norm", "per_device_train_batch_size")
            changed = important or value != getattr(plain, field.name)
            if field.init and field.name not in read and changed and value is not None:
                other.append(
                    f"{field.name}={getattr(value, 'value', value)!r} ({ELSEWHERE.get(field.name, 'no counterpart')})"
                )
        if other:
            warnings.warn(f"Not read by HFModule: {'; '.join(other)}.", UserWarning, stacklevel=2)
        betas = (args.adam_beta1, args.adam_beta2)
        chosen: Any = {"optimizer": kind, "schedule": schedule}
        return cls(model, betas=betas, compute_metrics=compute_metrics, **chosen, **arguments)

    def forward(self, **batch: Any) -> Any:
        """Return the model's outputs; columns that it does not take are left out, as in transformers."""
        return self.model(**{name: value for name, value in batch.items() if name in self.columns})

    def targets(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the labels that the loss is of: `(batch,)` classes, or `(batch, length)` tokens."""
        labels: Tensor = batch["labels"]
        return labels[:, 1:] if self.shifts and labels.ndim > 1 else labels

    def count_tokens(self, batch: Mapping[str, Any]) -> int:
        """Return the number of targets in a batch."""
        return int((self.targets(batch) != IGNORED).sum())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the model's loss."""
        output = self(**batch)
        loss: Tensor = output.loss
        if self.hparams.label_smoothing:  # type: ignore[attr-defined]
            loss = cross_entropy(
                self._logits(batch, output).flatten(0, -2),
                self.targets(batch).flatten(),
                ignore_index=IGNORED,
                label_smoothing=self.hparams.label_smoothing,  # type: ignore[attr-defined]
            )
        self.log(
            "train_loss", loss, on_step=False, on_epoch=True, prog_bar=True, batch_size=self.count_tokens(batch) or 1
        )
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Add a batch to the `val_` scores."""
        self._score(self.val_metrics, batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Add a batch to the `test_` scores."""
        self._score(self.test_metrics, batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the logits."""
        logits: Tensor = self(**batch).logits
        return logits

    def _score(self, metrics: Any, batch: Any) -> None:
        output, target = self(**batch), self.targets(batch)
        if target.is_floating_point():
            raise ValueError(
                "HFModule scores classes and tokens, and the labels are fractions. Override validation_step."
            )
        metrics["classes" if target.ndim == 1 else "tokens"].update(self._logits(batch, output), target, output.loss)
        if "computed" in metrics:
            metrics["computed"].update(output.logits, batch["labels"])

    def _logits(self, batch: Any, output: Any) -> Tensor:
        """Return the logits of :meth:`targets`."""
        logits: Tensor = output.logits
        if batch["labels"].ndim > 1:
            logits = logits[:, logits.shape[1] - batch["labels"].shape[1] :]  # soft prompts stand before the tokens
            logits = logits[:, :-1] if self.shifts else logits
        return logits

    def on_validation_epoch_end(self) -> None:
        self._log_scores("val", self.val_metrics)

    def on_test_epoch_end(self) -> None:
        self._log_scores("test", self.test_metrics)

    def _log_scores(self, stage: str, metrics: Any) -> None:
        scores: dict[str, Tensor] = {}  # each name once: Lightning would log the mean of two
        for metric in metrics.values():
            if metric.update_called:
                scores |= metric.compute()
                metric.reset()
        self.log_dict({f"{stage}_{name}": value for name, value in scores.items()})

    def configure_optimizers(self) -> Any:
        """Return the optimizer of what trains, with its schedule."""
        options: Any = self.hparams
        norms = {id(entry) for part in self.modules() if isinstance(part, nn.LayerNorm) for entry in part.parameters()}
        trained = {
            entry: id(entry) not in norms and not UNDECAYED.search(name.lower())
            for name, entry in self.named_parameters()
            if entry.requires_grad
        }
        parts = ([entry for entry, decays in trained.items() if decays is part] for part in (True, False))
        groups = [
            {"params": part, "weight_decay": decay}
            for part, decay in zip(parts, (options.weight_decay, 0.0), strict=True)
            if part
        ]
        adamw = options.optimizer == "adamw"
        more = {"betas": tuple(options.betas), "eps": options.eps} if adamw else {}
        optimizer = (torch.optim.AdamW if adamw else torch.optim.SGD)(groups, lr=options.lr, **more)
        if options.schedule == "constant" and not options.warmup:
            return optimizer
        total = float(self.trainer.estimated_stepping_batches)
        warm = int(options.warmup) if options.warmup >= 1 else math.ceil(options.warmup * total)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(_factor, options.schedule, warm, total))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _factor(schedule: str, warmup: float, total: float, step: int) -> float:
    """Return the factor on the learning rate of a step, as the schedules of transformers have it.

    Example:
        >>> [_factor("linear", 2, 6, step) for step in range(7)]
        [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    if step < warmup:
        return step / max(1.0, warmup)
    done = min(1.0, (step - warmup) / max(1.0, total - warmup))
    return {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[schedule]
