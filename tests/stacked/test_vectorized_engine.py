"""The engine ``vectorized`` takes the very steps of ``sequential``, for many clients at once."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fedlightning  # noqa: F401  before lightning

# isort: split
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping
from torchmetrics.classification import MulticlassAccuracy

from fedlightning import FederatedCallback
from fedlightning.callbacks import (
    APFL,
    FENDA,
    FLIU,
    MOON,
    SCAFFOLD,
    Ditto,
    FedAvg,
    FedBN,
    FedPer,
    FedProx,
    FedRep,
    Local,
)
from fedlightning.contract import GradientContext
from fedlightning.datamodules.loaders import LoaderDataModule
from fedlightning.errors import ConfigurationError
from fedlightning.fast.module_copier import Copier
from fedlightning.options import Evaluation, Vectorized
from fedlightning.stacked.stack import architecture_key
from fedlightning.testing import check_algorithm
from tests.helpers import (
    NormNet,
    PiecesStyle,
    Toy,
    federate,
    global_state,
    samples,
    spied,
    toy_data,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*has no training samples"),
    pytest.mark.filterwarnings("ignore:.*took no real step"),
    pytest.mark.filterwarnings("ignore:.*client '[12]' failed"),
]

SIZES = (24, 40, 16, 5, 0, 8)
"""In batches of 8: several whole ones, a ragged last one, a single ragged one, none at all, exactly one."""
SGD, ADAM = 1e-6, 2e-5
"""What may come of sums in another order: after SGD in fp32, and after Adam, which divides by what is nearly nothing."""


def furthest(a: Any, b: Any, where: str = "") -> float:
    """The largest difference between two trees of tensors and numbers; anything else must be equal."""
    if isinstance(a, Tensor):
        assert a.shape == b.shape and a.dtype == b.dtype, where
        return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0
    if isinstance(a, dict):
        assert a.keys() == b.keys(), f"{where}: {sorted(a)} and {sorted(b)}"
        return max((furthest(a[key], b[key], f"{where}.{key}") for key in a), default=0.0)
    if isinstance(a, float):
        return abs(a - b)
    assert a == b, f"{where}: {a!r} and {b!r}"
    return 0.0


def pair(
    module: Any,
    callbacks: Sequence[Callback] = (),
    data: Callable[[], Any] = lambda: toy_data(SIZES),
    clients_per_stack: int | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """The same federation under both engines."""
    options = {"max_rounds": 2, **({} if "local_steps" in options else {"local_epochs": 2})} | options
    stacked = {"engine": Vectorized(clients_per_stack)}
    return tuple(
        spied(copy.deepcopy(module), data(), copy.deepcopy(list(callbacks)), **options, **engine)
        for engine in ({}, stacked)
    )


def assert_equal(runs: tuple[Any, Any], tolerance: float = SGD) -> None:
    """States, records, metrics within ``tolerance``; steps, rates, samples, bytes and failures exactly."""
    (one, seen), (other, stacked) = runs
    assert furthest(global_state(one), global_state(other)) <= tolerance
    for client in one.server.clients:
        assert furthest(vars(one.store.get(client)), vars(other.store.get(client)), client) <= 10 * tolerance
    assert len(seen.updates) == len(stacked.updates) > 0
    for a, b in zip(seen.updates, stacked.updates, strict=True):
        for name in ("client", "round", "num_samples", "steps", "skipped", "lr_sum", "num_bytes", "error"):
            assert getattr(a, name) == getattr(b, name), f"{name} of client {a.client}"
        assert furthest(a.metrics, b.metrics, "metrics") <= 10 * tolerance
    assert (one.server.costs.bytes_up, one.server.costs.bytes_down) == (
        other.server.costs.bytes_up,
        other.server.costs.bytes_down,
    )
    assert one.server.costs.steps == other.server.costs.steps > 0


ALGORITHMS: dict[str, tuple[Any, list[FederatedCallback]]] = {
    "fedavg": (Toy(), [FedAvg()]),
    "fedprox": (Toy(), [FedProx(mu=0.5)]),
    "scaffold": (Toy(), [SCAFFOLD()]),
    "scaffold-1": (Toy(), [SCAFFOLD(option=1)]),
    "ditto": (NormNet(), [Ditto(lam=0.5)]),
    "fliu": (Toy(), [FLIU()]),
    "fedper": (Toy(), [FedPer(personal=["net.3"])]),
    "fedbn": (NormNet(), [FedBN()]),
    "fedrep": (NormNet(), [FedRep(personal=["net.3"])]),
    "apfl": (NormNet(dropout=0.2), [APFL()]),
    "apfl-fixed": (Toy("steplr"), [APFL(alpha=0.3, adaptive=False)]),
    "apfl-off": (NormNet(), [APFL(alpha=0.0, alpha_lr=0.0)]),
    "fenda": (NormNet(), [FENDA(head="net.3")]),
    "fedprox+scaffold": (PiecesStyle(), [FedProx(mu=0.1), SCAFFOLD()]),
}


FAST = ("fedavg", "scaffold", "ditto", "fedrep", "apfl", "fenda")  # one of each kind of change to a visit


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in ALGORITHMS]
)
def test_an_algorithm_trains_as_under_sequential(name: str) -> None:
    module, callbacks = ALGORITHMS[name]
    assert_equal(pair(module, callbacks))


@pytest.mark.parametrize(
    ("optimizer", "tolerance"),
    [("momentum", SGD), ("adam", ADAM), ("adamw", ADAM), ("steplr", SGD), ("onecycle", SGD)],
)
def test_optimizers_and_schedules(optimizer: str, tolerance: float) -> None:
    lr = 0.01 if optimizer.startswith("adam") else 0.1
    assert_equal(pair(Toy(optimizer, lr=lr), lr_decay=0.5), tolerance)


class Choosy(Toy):
    """Every option of SGD or Adam, in two parameter groups; one layer in none."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        groups = [{"params": [self.net[0].weight], "lr": 0.05}, {"params": [self.net[0].bias, self.net[3].weight]}]
        if self.kind == "sgd":
            options = {"momentum": 0.8, "dampening": 0.3, "weight_decay": 0.02, "maximize": True}
            return torch.optim.SGD(groups, lr=0.02, **options)
        if self.kind == "nesterov":
            return torch.optim.SGD(groups, lr=0.02, momentum=0.8, nesterov=True)
        return torch.optim.Adam(groups, lr=0.01, betas=(0.8, 0.9), weight_decay=0.02, amsgrad=True)


@pytest.mark.parametrize("kind", ["sgd", "nesterov", "adam"])
def test_every_option_of_an_optimizer(kind: str) -> None:
    assert_equal(pair(Choosy(kind), data=lambda: toy_data((24, 19, 9))), ADAM if kind == "adam" else SGD)


@pytest.mark.parametrize(
    "clip", [{"gradient_clip_val": 0.3}, {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}]
)
def test_gradients_are_clipped_client_by_client(clip: dict[str, Any]) -> None:
    assert_equal(pair(Toy(), [FedProx(mu=0.5)], **clip))
    assert_equal(pair(Toy("adam", lr=0.01), [APFL()], **clip), ADAM)


@pytest.mark.parametrize(
    "options", [{"local_steps": 5}, {"limit_train_batches": 2}, {"participation": 3, "max_rounds": 3}]
)
def test_the_work_of_a_visit(options: dict[str, Any]) -> None:
    assert_equal(pair(Toy(), **options))


@pytest.mark.parametrize("module", [Toy(dropout=0.3), NormNet(dropout=0.3)])
def test_dropout_draws_the_masks_that_each_client_draws_alone(module: Any) -> None:
    assert_equal(pair(module, [Ditto()], clients_per_stack=4))


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed"])
def test_precision(precision: str) -> None:
    """In bf16 a sum in another order may round to the next of 256 steps."""
    assert_equal(pair(Toy(dropout=0.2), precision=precision), 1e-12 if precision == "64-true" else 1e-3)


def test_the_size_of_a_stack_changes_nothing_but_rounding() -> None:
    module = NormNet(dropout=0.3)
    runs = [federate(module, toy_data(SIZES), engine=Vectorized(k)) for k in (1, 2, 6)]
    for trainer in runs[1:]:
        assert furthest(global_state(runs[0]), global_state(trainer)) <= SGD


def test_two_runs_are_the_same_bit_for_bit() -> None:
    module = Toy(dropout=0.3)
    a, b = (federate(module, toy_data(SIZES), engine="vectorized") for _ in range(2))
    assert furthest(global_state(a), global_state(b)) == 0.0


RULES = (
    "order_of_clients",
    "resume",
    "absent_clients",
    "wire",
    "every_kind_of_entry",
    "small_and_empty_clients",
    "nan_client",
)


@pytest.mark.parametrize("rule", RULES)
def test_the_rules_of_every_algorithm_hold(rule: str) -> None:
    check_algorithm(SCAFFOLD(), only=[rule], engine="vectorized")


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm", [FedAvg(), Ditto(), APFL(), FLIU(), FedPer(personal=["head"])], ids=lambda a: a.key
)
def test_the_rules_of_every_algorithm_hold_for(algorithm: FederatedCallback) -> None:
    check_algorithm(algorithm, only=RULES, engine="vectorized")


def loaders(**options: Any) -> LoaderDataModule:
    sizes = {"a": 24, "b": 17, "c": 9}
    sets = {client: TensorDataset(*samples(client, "train", size)) for client, size in sizes.items()}
    return LoaderDataModule({client: DataLoader(data, batch_size=8, **options) for client, data in sets.items()})


@pytest.mark.parametrize("shuffle", [False, True])
def test_loaders_of_the_users_own(shuffle: bool) -> None:
    assert_equal(pair(Toy(dropout=0.3), data=lambda: loaders(shuffle=shuffle)))


class Nested(Toy):
    """Batches are trees; a transfer hook of the module's own."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return {"x": {"inner": 2.0 * x}, "y": y, "name": "same for all"}

    def score(self, batch: Any, split: str) -> None:
        super().score([batch["x"]["inner"], batch["y"]], split)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step([batch["x"]["inner"], batch["y"]], batch_idx)}


class Loud(Toy):
    """Logs in every way that Lightning knows; its step uses the epoch and the batch's number."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx) * (1 + self.current_epoch) * (1 + batch_idx % 2)
        self.log("step", loss)
        self.log("both", loss, on_step=True, on_epoch=True)
        self.log("most", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.log_dict({"sum": loss, "three": 3.0}, on_step=False, on_epoch=True, reduce_fx=torch.sum, batch_size=2)
        return loss


class Editing(Toy):
    """Edits a loss in place after it was logged."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx) * 1.0
        self.log("before", loss, on_epoch=True)
        loss += 1.0
        return loss


class Skipping(Toy):
    """Skips batches of less than eight samples, and leaves a layer out of its loss."""

    def __init__(self) -> None:
        super().__init__("momentum")
        self.unused = torch.nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if len(batch[1]) == 8 else None


@pytest.mark.parametrize("module", [Nested(), Loud(), Editing(), Skipping()])
def test_what_a_step_may_do(module: Any) -> None:
    assert_equal(pair(module))


class Frozen(Toy):
    """A frozen first layer, and values that the step reads."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout=dropout)
        self.net[0].requires_grad_(False)
        self.weight: Tensor | None = None
        self.factors: dict[str, Any] = {"loss": 1.0}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1], self.weight) * self.factors["loss"]


class ByClient(FederatedCallback):
    """Changes a client's module before it trains, not in the first round, by the client's number."""

    def __init__(self, change: str) -> None:
        self.change = change

    def on_receive(self, client: Any, message: Any) -> None:
        if client.round > 0:
            CHANGES[self.change](client.module, 1 + int(client.id) % 2)


class Factor:
    """A number in an object, which a step reads as in a dict."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __getitem__(self, name: str) -> float:
        return self.value


def scaled(net: Any, number: int, x: Tensor) -> Tensor:
    return net(x) * number


CHANGES: dict[str, Callable[[Any, int], Any]] = {
    "all thaw": lambda module, number: module.net[0].requires_grad_(True),
    "one thaws": lambda module, number: module.net[0].requires_grad_(number == 2),
    "one freezes": lambda module, number: module.net[3].bias.requires_grad_(number == 2),
    "dropout": lambda module, number: setattr(module.net[2], "p", 0.3 * number),
    "mode": lambda module, number: module.net[2].train(number == 2),
    "a tensor": lambda module, number: setattr(module, "weight", torch.tensor([1.0, 1.0, number])),
    "in a dict": lambda module, number: module.factors.update(loss=1.0 * number),
    "in an object": lambda module, number: setattr(module, "factors", Factor(number)),
    "a partial": lambda module, number: setattr(module, "forward", partial(scaled, module.net, number)),
    "a hook": lambda module, number: module.net[3].register_forward_hook(lambda part, inputs, output: output * number),
}


@pytest.mark.parametrize("change", CHANGES)
def test_clients_whose_modules_differ_are_in_stacks_of_their_own(change: str) -> None:
    """The code of one module runs for a stack: it must train, draw and read what each client's would."""
    module = Frozen(dropout=0.2 if change in ("dropout", "mode") else 0.0)
    runs = pair(module, [ByClient(change)])
    assert_equal(runs)
    assert furthest(global_state(runs[0][0]), global_state(pair(module)[0][0])) > 100 * SGD  # the change does something


class Listed(Toy):
    """Its step reads a parameter by a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.decayed = [self.net[0].weight]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1]) + sum(weight.pow(2).sum() for weight in self.decayed)


def test_a_parameter_that_a_list_holds_once_more_is_refused() -> None:
    """A stack has a tensor in the place of the parameter, and none in the list's."""
    with pytest.raises(ConfigurationError, match=r"Listed holds .* once more in self\.decayed, where a stack"):
        pair(Listed())


def test_modules_that_are_alike_have_one_key() -> None:
    """Whatever way they were copied, and whatever values they train."""
    module: Any = Toy()
    module.blocks, module.fn, module.factors, module.nothing = [module.net[0]], module.score, Factor(2.0), math.nan
    module.net[0].register_forward_hook(module.on_fit_start)
    others = [copy.deepcopy(module), Copier(module).copy()]
    for other in others:
        torch.nn.init.ones_(other.net[0].weight)
    assert len({architecture_key(some) for some in (module, *others)}) == 1
    others[0].factors.value = 3.0
    assert architecture_key(others[0]) != architecture_key(module)


class Weighted(Toy):
    """Scores with a factor that lies in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = {"loss": 1.0}

    def score(self, batch: Any, split: str) -> None:
        self.log(f"{split}_loss", F.cross_entropy(self(batch[0]), batch[1]) * self.factors["loss"])


class Doubled(FederatedCallback):
    """The third client's factor is 2."""

    def on_receive(self, client: Any, message: Any) -> None:
        client.module.factors["loss"] = 1.0 + (client.id == "2")


def test_a_score_that_reads_what_differs_is_that_of_a_client_alone() -> None:
    """The first two, which are scored both ways to begin with, are alike."""
    module, rows = Weighted(), []
    for engine in ("sequential", "vectorized"):
        options = {"max_rounds": 1, "local_epochs": 1, "evaluation": Evaluation(every=1, stages=("L1", "L2"))}
        callbacks = [FedPer(personal=["net.3"]), Doubled()]
        trainer = federate(copy.deepcopy(module), toy_data((24, 24, 24, 24)), callbacks, engine=engine, **options)
        rows.append({(row.client, row.stage, row.split, row.metric): row.value for row in trainer.rows})
    assert rows[0].keys() == rows[1].keys() and any(key[3] == "val_loss" for key in rows[0])
    assert max(abs(value - rows[1][key]) for key, value in rows[0].items() if "loss" in key[3]) < 1e-5


class PerClient(FederatedCallback):
    """A correction that looks at what only a single client has."""

    def correct_gradient(self, ctx: GradientContext, name: str, parameter: Tensor, gradient: Tensor) -> Tensor:
        assert self.client.id == ctx.client
        return gradient * (1.0 + 0.01 * ctx.num_samples + ctx.lr) if ctx.client != "1" else gradient


def test_a_correction_that_cannot_be_mapped_is_called_client_by_client() -> None:
    assert_equal(pair(Toy("steplr"), [PerClient()]))


def test_a_client_with_bad_data_fails_alone() -> None:
    def data() -> Any:
        made = toy_data((24, 16, 24))
        made.tensors["1"]["train"][0][3] = float("nan")
        made.tensors["2"]["train"][1][5] = 77  # no such class
        return made

    (_, seen), (_, stacked) = runs = pair(Toy(), data=data, max_rounds=1)
    assert furthest(global_state(runs[0][0]), global_state(runs[1][0])) <= SGD
    assert [update.client for update in stacked.updates] == [update.client for update in seen.updates] == ["0"]


def test_refused_before_the_first_round_with_the_reason() -> None:
    for module, callbacks, options, reason in REFUSED:
        with pytest.raises(ValueError, match=reason):
            federate(module, toy_data(), callbacks, engine="vectorized", **options)


class Item(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1.0 if batch[0].sum().item() else 2.0)


class Branch(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if loss < 3 else 2 * loss


class Hooked(Toy):
    def on_train_epoch_start(self) -> None:
        """Nothing."""


class Manual(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Exotic(Toy):
    def configure_optimizers(self) -> Any:
        return torch.optim.RMSprop(self.parameters())


class Plateau(Toy):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        schedule = {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), "monitor": "train_loss"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class Metric(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("acc", self.accuracy, on_epoch=True)
        return super().training_step(batch, batch_idx)


class Noisy(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([batch[0] + torch.randn_like(batch[0]), batch[1]], batch_idx)


class Asking(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) / self.trainer.max_epochs


REFUSED: list[tuple[Any, list[Callback], dict[str, Any], str]] = [
    (Item(), [], {}, r"Item\.training_step does not run under torch\.func\.vmap .*\.item\(\)"),
    (Branch(), [], {}, "data-dependent control flow"),
    (Noisy(), [], {}, "random operation"),
    (Asking(), [], {}, r"self\.trainer\.max_epochs is not there"),
    (Metric(), [], {}, "a metric object keeps one state"),
    (Hooked(), [], {}, r"Hooked\.on_train_epoch_start is a hook"),
    (Manual(), [], {}, "Manual optimizes manually"),
    (Exotic(), [], {}, "RMSprop; the optimizers of a stack are SGD, Adam, AdamW"),
    (Plateau(), [], {}, "ReduceLROnPlateau follows a metric"),
    (Toy(), [APFL(mix="logits")], {}, r"APFL\.on_train_start works inside each client's own fit"),
    (Toy(), [MOON()], {}, "MOON adds a term to the loss"),
    (Toy(), [EarlyStopping("train_loss")], {}, r"EarlyStopping\.\w+ is a Lightning hook"),
    (Toy(), [Local()], {}, "optimizer_state='keep'"),
    (Toy(), [], {"accumulate_grad_batches": 2}, "accumulate_grad_batches=2"),
    (Toy(), [], {"precision": "bf16-true"}, "precision='bf16-true'"),
    (Toy(dropout=0.2), [FENDA(head="net.3")], {}, "dropout, which its twin extractor"),
]
