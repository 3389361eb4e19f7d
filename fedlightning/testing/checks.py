"""Rules that every algorithm must keep, as functions of an algorithm and a scratch folder that assert.

As in scikit-learn's estimator checks, the name of a check says the rule, and its message says what was broken.
"""

from __future__ import annotations

import copy
import math
import pickle
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedlightning.client.record import ClientRecord
from fedlightning.contract import Change, FederatedCallback
from fedlightning.engines.attempts import TooFewClientsError
from fedlightning.guards.composition import changes_of
from fedlightning.options import FailurePolicy
from fedlightning.privacy.outgoing import make_outgoing_filter
from fedlightning.scores.rows import UNSEEN
from fedlightning.server.server import Server
from fedlightning.tensors import State, entry_kinds, first_nonfinite, module_state
from fedlightning.testing.runs import (
    StopAfter,
    Stopped,
    Visits,
    as_lists,
    assert_same,
    deployed,
    same_tree,
    server_of,
    tensors_in,
    watching,
)
from fedlightning.testing.toys import SIZES, ToyData, federate
from fedlightning.trainer import FederatedTrainer

Check = Callable[..., None]
"""Function of an algorithm, a folder and arguments of the trainer that raises AssertionError."""

_PARTIAL: dict[str, Any] = {"max_rounds": 4, "evaluation": 2, "participation": 3}
_FOUR: dict[str, Any] = {"max_rounds": 4}
_FULL: dict[str, Any] = {"full": True}
_TWO: dict[str, Any] = {"max_rounds": 2}  # one that goes wrong, and one that begins with what it has left


class PlainRun(NamedTuple):
    """A finished run, the visits in it, and the copy of the algorithm that it used."""

    trainer: FederatedTrainer
    visits: Visits
    algorithm: FederatedCallback | None


class PlainRuns:
    """The latest runs on ordinary toy data, with nothing special: checks that look at the same one share it."""

    def __init__(self) -> None:
        self._runs: dict[tuple[Any, ...], PlainRun] = {}

    def __call__(
        self,
        algorithm: FederatedCallback | None,
        options: dict[str, Any],
        *,
        sizes: Sequence[int] = SIZES,
        written: bool = False,
    ) -> PlainRun:
        """Return a finished run of a copy of the algorithm, which nobody may change."""
        written_out = "" if algorithm is None else repr(as_lists(vars(algorithm)))
        key = type(algorithm), written_out, repr(sorted(options.items())), tuple(sizes), written
        if key not in self._runs:
            used = copy.deepcopy(algorithm)
            with tempfile.TemporaryDirectory() as folder, watching() as visits:
                trainer = federate(used, ToyData(sizes), Path(folder) if written else None, **options)
            run = PlainRun(trainer, visits, used)
            if " at 0x" in key[1] + key[2]:  # what is told by its address may be another thing another time
                return run
            for_all = {old_key: old_run for old_key, old_run in self._runs.items() if old_run.algorithm is None}
            self._runs = for_all | dict([*self._runs.items()][-1:]) | {key: run}
        return self._runs[key]


plain_run = PlainRuns()


def check_arguments(algorithm: FederatedCallback, root: Path, **options: Any) -> None:
    """Check that every `__init__` argument is an attribute of the same name, so that the callback can be made again."""
    again = type(algorithm)(**algorithm.hyperparameters())
    assert as_lists(again.hyperparameters()) == as_lists(algorithm.hyperparameters()), (
        f"{algorithm.key} made again from its hyperparameters() has others. Store each argument under its own name."
    )


def check_copies(algorithm: FederatedCallback, root: Path, **options: Any) -> None:
    """Check that deep copies and pickling give an equal callback."""
    for again in (copy.deepcopy(algorithm), pickle.loads(pickle.dumps(algorithm))):
        assert as_lists(vars(again)) == as_lists(vars(algorithm)), f"A copy of {algorithm.key} differs from it."


def check_unchanged_by_a_run(algorithm: FederatedCallback, root: Path, **options: Any) -> None:
    """Check that a run does not change the callback: what it keeps between rounds is in the state of server and client."""
    used = plain_run(algorithm, options | {"evaluation": 2}).algorithm
    before, after = as_lists(vars(algorithm)), as_lists(vars(used))
    assert after == before, (
        f"{algorithm.key} was changed by a run: {before} -> {after}. Keep state in server.state and client.state."
    )


def check_trains(algorithm: FederatedCallback, root: Path, **options: Any) -> None:
    """Check that some client's deployed model differs from its initial one, with the defaults of the algorithm."""
    server = server_of(trainer := plain_run(algorithm, options | {"evaluation": 0}).trainer)
    start = module_state(server.blueprint.build("server"))
    moved = any(  # a frozen weight moves where a method merges what was trained into it
        not torch.equal(value, start[name])
        for client in server.clients
        for name, value in module_state(trainer.client(client).module).items()
        if name in start and start[name].shape == value.shape and server.kinds.get(name) in ("trainable", "frozen")
    )
    assert moved, f"{algorithm.key} with its defaults trains nothing."


def check_same_seed_same_result(algorithm: FederatedCallback, root: Path, **options: Any) -> None:
    """Check that two runs with one seed are the same, bit for bit."""
    first = plain_run(algorithm, options | {"evaluation": 2}).trainer
    second = federate(algorithm, ToyData(), root, **options, evaluation=2)
    assert_same(first, second, f"Two runs of {algorithm.key} with the same seed differ")


def check_order_of_clients(algorithm: FederatedCallback, root: Path, **options: Any) -> None:
    """Check that the order in which clients are listed changes nothing."""
    names = ToyData().names
    first = plain_run(algorithm, options | {"evaluation": 0}).trainer
    second = federate(algorithm, ToyData(listed=names[::-1]), None, **options)
    assert_same(first, second, f"{algorithm.key} depends on the order in which clients are listed")


def check_evaluation_changes_nothing(algorithm: FederatedCallback, root: Path, **options: Any) -> None:
    """Check that a run that evaluates trains the same models as one that never does."""
    first, second = (plain_run(algorithm, options | {"evaluation": every}).trainer for every in (2, 0))
    assert_same(first, second, f"Evaluation changes what {algorithm.key} trains", rows=False)


def check_resume(algorithm: FederatedCallback, root: Path, **options: Any) -> None:
    """Check that a run that is interrupted after a round and resumed equals an uninterrupted one, bit for bit."""
    settings = _PARTIAL | options
    whole = plain_run(algorithm, settings).trainer
    settings |= {"save_state": 1}
    with suppress(Stopped):
        federate(copy.deepcopy(algorithm), ToyData(), root, others=[StopAfter(2)], **settings)
    resumed = federate(copy.deepcopy(algorithm), ToyData(), root, resume=True, **settings)
    assert_same(whole, resumed, f"{algorithm.key} resumed after two rounds differs from an uninterrupted run")


def check_absent_clients(algorithm: FederatedCallback, root: Path, **options: Any) -> None:
    """Check that the personal part and the state of a client do not change while it does not take part."""
    trainer, visits, _ = plain_run(algorithm, _PARTIAL | options)
    server = server_of(trainer)
    last_seen = {client: record for client, record in visits.records.items() if client in server.clients}
    for client, record in last_seen.items():
        now = trainer.store.get(client)
        for part in ("personal", "state"):
            assert same_tree(getattr(record, part), getattr(now, part)), (
                f"{algorithm.key} changed the {part} of client '{client}' after its last visit."
            )


def check_wire(algorithm: FederatedCallback, root: Path, **options: Any) -> None:
    """Check that clients send what may leave, was asked for and is not private, bytes are counted, and `keeps` is set."""
    trainer, visits, _ = plain_run(algorithm, _FOUR | options | _FULL, written=True)
    server, changes = server_of(trainer), changes_of(algorithm)
    both_ways = not changes & {Change.ONE_WAY, Change.PARTS, "neighbours"}
    assert server.costs.bytes_up == sum(update.num_bytes for _, update, _ in visits.all), (
        "Bytes up are not what was sent."
    )
    assert server.costs.bytes_down == sum(message.num_bytes for message, _, _ in visits.all), (
        "Bytes down are not what was sent."
    )
    for message, update, record in visits.all:
        unasked = set(update.state) - set(message.returns)
        assert not unasked, f"{algorithm.key} lets client '{message.client}' send {sorted(unasked)} unasked."
        unsent = {name for name in message.returns if server.kinds.get(name) == "trainable"} - message.state.keys()
        assert not (unsent and both_ways and message.work != 0), (
            f"{algorithm.key} asks client '{message.client}' for {sorted(unsent)}, which it did not send. Say so: facts = "
            "Facts(changes={Change.ONE_WAY})."
        )
        beyond = set(update.state) - make_outgoing_filter(server.blueprint, message.client).entries
        assert not beyond, (
            f"{algorithm.key} lets client '{message.client}' send {sorted(beyond)}, and wire().entries does not."
        )
        # The initial state is no secret: a bias before BatchNorm never moves away from it, but by rounding.
        start = module_state(server.blueprint.build(message.client))
        private = {
            name: value
            for name, value in record.personal.items()
            if value.is_floating_point() and value.numel() > 1 and not torch.allclose(value, start[name], atol=1e-6)
        }
        for sent in tensors_in(update.state) + tensors_in(update.extras):
            for name, value in private.items():
                leaked = sent.shape == value.shape and torch.equal(sent.to(value.dtype), value)
                assert (
                    not leaked
                    or name in (*message.state, *message.returns)
                    or bool((value == value.flatten()[0]).all())
                ), f"{algorithm.key}: the private '{name}' of client '{message.client}' left it."

    if not changes & {"plan_round", Change.KEEPS}:  # else nobody lets its clients train twice in a round
        trained = [(update.client, record) for _, update, record in visits.all if update.contributed]
        for client in server.clients:
            kept = [(record.state, _trained(server, record)) for name, record in trained if name == client][:2]
            assert same_tree(kept[0], kept[-1]), (
                f"{algorithm.key} keeps something at client '{client}' that changed in its second visit. Say "
                "so: facts = Facts(keeps=True)."
            )


def _trained(server: Server, record: ClientRecord) -> State:
    """Return the parameters that a client keeps to itself."""
    return {name: value for name, value in record.personal.items() if server.kinds.get(name) == "trainable"}


def check_every_kind_of_entry(algorithm: FederatedCallback, root: Path, **options: Any) -> None:
    """Check that variances stay positive, frozen and integer entries stay the same, and tied parameters stay tied."""
    trainer = plain_run(algorithm, _FOUR | options | _FULL, written=True).trainer
    server = server_of(trainer)
    for label, module in deployed(trainer):
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


def check_small_and_empty_clients(algorithm: FederatedCallback, root: Path, **options: Any) -> None:
    """Check that clients with one sample or none do not stop a round, whatever they are called, and models stay finite."""
    names = ("_a", "Süd², $\\x$", "10", "a/b")  # files and figures take some of these for something else
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        settings = _TWO | options | {"evaluation": 2}
        trainer = federate(algorithm, ToyData(sizes=(12, 1, 0, 9), names=names), root, **settings)
    for label, module in deployed(trainer):
        assert first_nonfinite(module_state(module)) is None, f"{algorithm.key}, {label}: not finite."


def check_nan_client(algorithm: FederatedCallback, root: Path, **options: Any) -> None:
    """Check that a client whose loss is NaN is left out with a warning, and that all other models stay finite."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = federate(algorithm, ToyData(nan="site1"), None, **_TWO | options)
    assert any("site1" in str(warning.message) for warning in caught), f"{algorithm.key}: no word about the NaN client."
    for label, module in deployed(trainer):
        if "site1" not in label:
            bad = first_nonfinite(module_state(module))
            assert bad is None, f"{algorithm.key}, {label}: poisoned by another client's NaN at '{bad}'."
    if any(failure["client"] == "site1" and failure["round"] == 1 for failure in server_of(trainer).failures):
        with suppress(TooFewClientsError):
            settings = options | {"max_rounds": 1, "failures": FailurePolicy(min_clients=4)}
            federate(copy.deepcopy(algorithm), ToyData(nan="site1"), None, **settings)
            raise AssertionError(f"{algorithm.key}: 'site1' failed, and min_clients=4 counts 4 of 4 clients.")


def check_mixed_precision(algorithm: FederatedCallback, root: Path, **options: Any) -> None:
    """Check that parameters stay fp32 and finite in bf16-mixed with clipping and accumulation."""
    mixed = {"precision": "bf16-mixed", "gradient_clip_val": 1.0, "accumulate_grad_batches": 2}
    trainer = federate(algorithm, ToyData(), None, **_TWO | options | mixed)
    for label, module in deployed(trainer):
        state = module_state(module)
        assert first_nonfinite(state) is None, f"{algorithm.key}, {label}: not finite."
        kinds = entry_kinds(module)
        wrong = [name for name, kind in kinds.items() if kind == "trainable" and state[name].dtype != torch.float32]
        assert not wrong, f"{algorithm.key}, {label}: '{wrong[0]}' is no longer fp32."


def check_identical_clients(algorithm: FederatedCallback, root: Path, **options: Any) -> None:
    """Check that clients with the same data in the same order stay equal, up to rounding."""
    trainer = federate(algorithm, ToyData(sizes=(10, 10, 10), identical=True), None, **_TWO | options)
    server = server_of(trainer)
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


def check_unseen_clients(algorithm: FederatedCallback, root: Path, **options: Any) -> None:
    """Check that a client which is held out is never visited, changes nothing for the others, and is scored.

    A method that has no model for it says so in `facts.newcomers.no_model`, and gives it no scores.
    """
    again, settings = copy.deepcopy(algorithm), {"max_rounds": 2} | options | {"evaluation": 2}
    with watching() as visits, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = federate(algorithm, ToyData(), None, **settings, held_out=["site3"])
        others = federate(again, ToyData(sizes=SIZES[:3]), None, **settings)
    assert "site3" not in visits.records, f"{algorithm.key}: the held-out client was visited."
    assert "site3" not in trainer.store, f"{algorithm.key}: the held-out client has left a record."
    assert_same(trainer, others, f"{algorithm.key} depends on a client that is held out", rows=False)
    unseen = [row for row in trainer.rows if row.model == UNSEEN]
    rest = sorted(str(row) for row in trainer.rows if row.model != UNSEEN)
    assert rest == sorted(map(str, others.rows)), f"{algorithm.key}: a held-out client changes the others' scores."
    assert not server_of(trainer).failures, f"{algorithm.key}: {server_of(trainer).failures[0]['reason']}"
    refused = any(callback.facts.newcomers.no_model for callback in trainer.callbacks)
    assert {row.client for row in unseen} == (set() if refused else {"site3"}), (
        f"{algorithm.key}: the held-out client has {len(unseen)} scores, and facts.newcomers.no_model is "
        f"{algorithm.facts.newcomers.no_model!r}."
    )
    assert all(math.isfinite(row.value) for row in unseen), f"{algorithm.key}: an unseen client's score is not finite."


def check_joining_clients(algorithm: FederatedCallback, root: Path, **options: Any) -> None:
    """Check that a resumed run trains a client that joins, or that the algorithm says in a sentence why it does not."""
    again, settings = copy.deepcopy(algorithm), options | {"save_state": 1}
    longer = 8 if "loop" in options else 3  # a loop with visits on the way finishes those first
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        federate(algorithm, ToyData(sizes=SIZES[:3]), root, **settings | {"max_rounds": 2})
        try:
            with watching() as visits:
                trainer = federate(again, ToyData(), root, resume="join", **settings | {"max_rounds": longer})
        except ValueError as error:
            assert f"{again.key} keeps state at the server" in str(error), (
                f"{again.key} breaks when clients join: {error}"
            )
            return
    old_clients = {"site0", "site1", "site2"}  # an algorithm that trains on pooled data visits none of them
    assert "site3" in visits.records or not old_clients & set(visits.records), (
        f"{again.key}: a client that has joined was not visited."
    )
    assert not server_of(trainer).failures, f"{again.key}: {server_of(trainer).failures[0]['reason']}"
    for label, module in deployed(trainer):
        assert first_nonfinite(module_state(module)) is None, (
            f"{again.key}, {label}: not finite after a client has joined."
        )


def check_one_client(algorithm: FederatedCallback, root: Path, **options: Any) -> None:
    """Check that with one client the deployed model is that of plain training (for the neutral form of the algorithm)."""
    alone = plain_run(None, options, sizes=SIZES[:1]).trainer
    trainer = federate(algorithm, ToyData(sizes=SIZES[:1]), None, **options)
    plain, trained = (module_state(t.client("site0").module) for t in (alone, trainer))
    shared = [name for name in plain if name in trained and trained[name].shape == plain[name].shape]
    assert shared, f"{algorithm.key}: no entry of the module is left to compare."
    for name in shared:
        torch.testing.assert_close(
            trained[name], plain[name], atol=1e-6, rtol=1e-5,
            msg=f"{algorithm.key}: with one client '{name}' is not what plain training gives.",
        )  # fmt: skip


CHECKS: dict[str, Check] = {
    name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")
}
