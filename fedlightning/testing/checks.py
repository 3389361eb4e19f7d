"""What every algorithm must keep. Each check is a function of an algorithm and a scratch folder; it asserts.

In the manner of scikit-learn's estimator checks: the names say the rule, the messages say what was broken.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from fedlightning.federation.server import Server
from fedlightning.hooks import FederatedCallback
from fedlightning.messages import Message, Update
from fedlightning.tensors import entry_kinds, first_nonfinite, module_state
from fedlightning.testing.toys import ToyData, federate
from fedlightning.trainer import FederatedTrainer
from fedlightning.visit import visit
from fedlightning.visit.runner import LocalRunner

Check = Callable[..., None]


def check_arguments(algorithm: FederatedCallback, root: Path, **given: Any) -> None:
    """Every `__init__` argument is an attribute of the same name, so that the callback can be made again."""
    again = type(algorithm)(**algorithm.hyperparameters())
    assert _plain(again.hyperparameters()) == _plain(algorithm.hyperparameters()), (
        f"{algorithm.key} made again from its hyperparameters() has others. Store each argument under its own name."
    )


def check_copies(algorithm: FederatedCallback, root: Path, **given: Any) -> None:
    """Deep copy and pickling give an equal callback."""
    for again in (copy.deepcopy(algorithm), pickle.loads(pickle.dumps(algorithm))):
        assert _plain(vars(again)) == _plain(vars(algorithm)), f"A copy of {algorithm.key} differs from it."


def check_unchanged_by_a_run(algorithm: FederatedCallback, root: Path, **given: Any) -> None:
    """A run leaves no trace on the callback object: what lives from round to round is in explicit state."""
    before = _plain(vars(copy.deepcopy(algorithm)))
    federate(algorithm, ToyData(), root, **given, evaluate_every=1)
    assert _plain(vars(algorithm)) == before, (
        f"{algorithm.key} was changed by a run: {before} -> {_plain(vars(algorithm))}. "
        "Keep state in server.state and client.state."
    )


def check_trains(algorithm: FederatedCallback, root: Path, **given: Any) -> None:
    """With its defaults something trains: some client's deployed model moves from where it began."""
    trainer = federate(algorithm, ToyData(), root, **given)
    server = _server(trainer)
    start = module_state(server.blueprint.build("server"))
    moved = any(
        not torch.equal(value, start[name])
        for client in server.clients
        for name, value in module_state(trainer.client(client).module).items()
        if name in start and start[name].shape == value.shape and server.kinds.get(name) == "trainable"
    )
    assert moved, f"{algorithm.key} with its defaults trains nothing."


def check_same_seed_same_result(algorithm: FederatedCallback, root: Path, **given: Any) -> None:
    """Two runs with one seed are the same, bit for bit."""
    first = federate(algorithm, ToyData(), root / "a", **given, evaluate_every=1)
    second = federate(algorithm, ToyData(), root / "b", **given, evaluate_every=1)
    _assert_same(first, second, f"Two runs of {algorithm.key} with the same seed differ")


def check_order_of_clients(algorithm: FederatedCallback, root: Path, **given: Any) -> None:
    """The order in which clients are listed changes nothing."""
    names = ToyData().names
    first = federate(algorithm, ToyData(), root / "a", **given)
    second = federate(algorithm, ToyData(listed=names[::-1]), root / "b", **given)
    _assert_same(first, second, f"{algorithm.key} depends on the order in which clients are listed")


def check_evaluation_changes_nothing(algorithm: FederatedCallback, root: Path, **given: Any) -> None:
    """A run that evaluates every round trains the same models as one that never does."""
    first = federate(algorithm, ToyData(), root / "a", **given, evaluate_every=1)
    second = federate(algorithm, ToyData(), root / "b", **given, evaluate_every=0)
    _assert_same(first, second, f"Evaluation changes what {algorithm.key} trains", rows=False)


def check_resume(algorithm: FederatedCallback, root: Path, **given: Any) -> None:
    """Interrupted at a round boundary and resumed equals uninterrupted, bit for bit."""
    settings = {"max_rounds": 4, "save_state": 1, "evaluate_every": 1, "participation": 3} | given
    whole = federate(algorithm, ToyData(), root / "whole", **settings)
    stop = _StopAfter(2)
    with suppress(_Stopped):
        federate(copy.deepcopy(algorithm), ToyData(), root / "parts", others=[stop], **settings)
    resumed = federate(copy.deepcopy(algorithm), ToyData(), root / "parts", resume=True, **settings)
    _assert_same(whole, resumed, f"{algorithm.key} resumed after two rounds differs from an uninterrupted run")


def check_absent_clients(algorithm: FederatedCallback, root: Path, **given: Any) -> None:
    """What a client keeps does not change in a round it does not take part in."""
    with _watching() as visits:
        trainer = federate(algorithm, ToyData(), root, **given, participation=2, max_rounds=4, evaluate_every=1)
    server = _server(trainer)
    last_seen = {client: record for client, record in visits.records.items() if client in server.clients}
    for client, record in last_seen.items():
        now = trainer.store.get(client)
        for part in ("personal", "state"):
            assert _tree_equal(getattr(record, part), getattr(now, part)), (
                f"{algorithm.key} changed the {part} of client '{client}' after its last visit."
            )


def check_wire(algorithm: FederatedCallback, root: Path, **given: Any) -> None:
    """Only what was asked for and declared goes up, all of it is counted, and nothing private is among it."""
    with _watching() as visits:
        trainer = federate(algorithm, ToyData(), root, **given | {"full": True})
    server = _server(trainer)
    assert server.bytes_up == sum(update.num_bytes for _, update, _ in visits.all), "Bytes up are not what was sent."
    assert server.bytes_down == sum(message.num_bytes for message, _, _ in visits.all), (
        "Bytes down are not what was sent."
    )
    for message, update, record in visits.all:
        unasked = set(update.state) - set(message.returns)
        assert not unasked, f"{algorithm.key} lets client '{message.client}' send {sorted(unasked)} unasked."
        start = module_state(
            server.blueprint.build(message.client)
        )  # known to all: a bias before BatchNorm never moves
        private = {
            name: value
            for name, value in record.personal.items()
            if value.is_floating_point() and value.numel() > 1 and not torch.equal(value, start[name])
        }
        for sent in _tensors(update.state) + _tensors(update.extras):
            for name, value in private.items():
                leaked = sent.shape == value.shape and torch.equal(sent.to(value.dtype), value)
                assert not leaked or name in message.state or bool((value == value.flatten()[0]).all()), (
                    f"{algorithm.key}: the private '{name}' of client '{message.client}' left it."
                )


def check_every_kind_of_entry(algorithm: FederatedCallback, root: Path, **given: Any) -> None:
    """BatchNorm statistics stay sane, frozen parameters and integer buffers stay, tied parameters stay tied."""
    trainer = federate(algorithm, ToyData(), root, **given | {"full": True}, max_rounds=4)
    server = _server(trainer)
    for label, module in _deployed(trainer):
        state = module_state(module)
        where = f"{algorithm.key}, {label}"
        bad = first_nonfinite(state)
        assert bad is None, f"{where}: '{bad}' is not finite."
        for name, value in state.items():
            if name.endswith("running_var"):
                assert bool((value > 0).all()), f"{where}: '{name}' has a variance that is not positive."
            if name.endswith("scale") and name in server.kinds:
                assert torch.equal(value, torch.full_like(value, 0.7)), f"{where}: the frozen '{name}' moved."
            if name.endswith("code"):
                assert value.tolist() == [0, 1, 2], f"{where}: the integer buffer '{name}' changed."
        if "again.weight" in state:
            assert torch.equal(state["again.weight"], state["middle.weight"]), f"{where}: tied weights came apart."


def check_small_and_empty_clients(algorithm: FederatedCallback, root: Path, **given: Any) -> None:
    """A client with one sample takes part, one with none does not; neither stops the round."""
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        trainer = federate(algorithm, ToyData(sizes=(12, 1, 0, 9)), root, **given, evaluate_every=1)
    for label, module in _deployed(trainer):
        assert first_nonfinite(module_state(module)) is None, f"{algorithm.key}, {label}: not finite."


def check_nan_client(algorithm: FederatedCallback, root: Path, **given: Any) -> None:
    """A client whose loss is NaN is left out with a warning; nobody else is poisoned."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = federate(algorithm, ToyData(nan="site1"), root, **given)
    assert any("site1" in str(warning.message) for warning in caught), f"{algorithm.key}: no word about the NaN client."
    for label, module in _deployed(trainer):
        if "site1" not in label:
            bad = first_nonfinite(module_state(module))
            assert bad is None, f"{algorithm.key}, {label}: poisoned by another client's NaN at '{bad}'."


def check_mixed_precision(algorithm: FederatedCallback, root: Path, **given: Any) -> None:
    """Runs in bf16-mixed with clipping and accumulation; parameters stay fp32 and finite."""
    trainer = federate(
        algorithm, ToyData(), root, **given, precision="bf16-mixed", gradient_clip_val=1.0, accumulate_grad_batches=2
    )
    for label, module in _deployed(trainer):
        state = module_state(module)
        assert first_nonfinite(state) is None, f"{algorithm.key}, {label}: not finite."
        kinds = entry_kinds(module)
        wrong = [name for name, kind in kinds.items() if kind == "trainable" and state[name].dtype != torch.float32]
        assert not wrong, f"{algorithm.key}, {label}: '{wrong[0]}' is no longer fp32."


def check_identical_clients(algorithm: FederatedCallback, root: Path, **given: Any) -> None:
    """Clients with the same data in the same order stay equal (up to rounding)."""
    trainer = federate(algorithm, ToyData(sizes=(10, 10, 10), identical=True), root, **given)
    server = _server(trainer)
    first, *others = [module_state(trainer.client(client).module) for client in server.clients]
    for other in others:
        for name, value in first.items():
            if value.is_floating_point():
                torch.testing.assert_close(
                    value,
                    other[name],
                    atol=1e-6,
                    rtol=1e-5,
                    msg=f"{algorithm.key}: identical clients differ at '{name}'.",
                )


def check_one_client(algorithm: FederatedCallback, root: Path, **given: Any) -> None:
    """With one client, the deployed model is that of plain training (for the neutral form of the algorithm)."""
    alone = federate(None, ToyData(sizes=(12,)), root / "plain", **given)
    trainer = federate(algorithm, ToyData(sizes=(12,)), root / "own", **given)
    plain, own = (module_state(t.client("site0").module) for t in (alone, trainer))
    shared = [name for name in plain if name in own and own[name].shape == plain[name].shape]
    assert shared, f"{algorithm.key}: no entry of the module is left to compare."
    for name in shared:
        torch.testing.assert_close(
            own[name], plain[name], atol=1e-6, rtol=1e-5,
            msg=f"{algorithm.key}: with one client '{name}' is not what plain training gives.",
        )  # fmt: skip


CHECKS: dict[str, Check] = {
    name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")
}


# -- helpers -----------------------------------------------------------------------------------------------------------
class _Stopped(BaseException):
    """Ends a run as a killed process would: nothing gets to tidy up."""


class _StopAfter(FederatedCallback):
    """Interrupts a run in the round after `rounds`."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def on_round_start(self, server: Server) -> None:
        """Stop."""
        if server.round == self.rounds:
            raise _Stopped


class _Visits:
    def __init__(self) -> None:
        self.all: list[tuple[Message, Update, Any]] = []
        self.records: dict[str, Any] = {}


@contextmanager
def _watching() -> Iterator[_Visits]:
    """Intercept every visit of a run in this process: what went down, what came up, what stayed."""
    visits, visit_steps = _Visits(), visit.visit_steps

    def watched(runner: LocalRunner, message: Message, record: Any, evaluate: Any) -> Any:
        update, kept = yield from visit_steps(runner, message, record, evaluate)
        visits.all.append((message, update, kept))
        visits.records[message.client] = kept
        return update, kept

    visit.visit_steps = watched
    try:
        yield visits
    finally:
        visit.visit_steps = visit_steps


def _server(trainer: FederatedTrainer) -> Server:
    assert trainer.server is not None
    return trainer.server


def _deployed(trainer: FederatedTrainer) -> Iterator[tuple[str, LightningModule]]:
    server = _server(trainer)
    module = server.global_module(None)
    if module is not None:
        yield "the global model", module
    for client in server.clients:
        yield f"client '{client}'", trainer.client(client).module


def _assert_same(a: FederatedTrainer, b: FederatedTrainer, text: str, rows: bool = True) -> None:
    first, second = _server(a), _server(b)
    for what in ("models", "state"):
        assert _tree_equal(getattr(first, what), getattr(second, what)), f"{text}: in server.{what}."
    for client in {*a.store, *b.store}:
        mine, theirs = a.store.get(client), b.store.get(client)
        for what in ("personal", "state", "lightning"):
            assert _tree_equal(getattr(mine, what), getattr(theirs, what)), f"{text}: client '{client}', {what}."
    if rows:
        assert sorted(map(str, a.rows)) == sorted(map(str, b.rows)), f"{text}: in the scores."


def _tree_equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_tree_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_tree_equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b) or (a != a and b != b)


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        return [tensor for value in tree.values() for tensor in _tensors(value)]
    if isinstance(tree, list | tuple):
        return [tensor for value in tree for tensor in _tensors(value)]
    return []


def _plain(value: Any) -> Any:
    """A value in which modules and tensors are compared by content."""
    if isinstance(value, torch.nn.Module):
        return {"module": type(value).__name__, **{name: v.tolist() for name, v in module_state(value).items()}}
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
