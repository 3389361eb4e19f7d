"""Secure aggregation in a federation: sums, dropouts, what the server has in its hands, what is refused."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Mapping
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import Tensor

from fedlightning.algorithm import FederatedCallback
from fedlightning.callbacks import (
    IFCA,
    SCAFFOLD,
    ClientDP,
    FedAdam,
    FedAvg,
    FedBN,
    FedFomo,
    FedLP,
    FedPer,
    FedProto,
    Krum,
    PoissonSampling,
    QFedAvg,
    SecureAggregation,
    TopK,
)
from fedlightning.callbacks.shared import fixed_point
from fedlightning.contract import Job
from fedlightning.contract.messages import Update
from fedlightning.engines.attempts import FederationError
from fedlightning.options import FailurePolicy, Processes, Ray
from fedlightning.server.loop import Synchronous
from fedlightning.server.server import Server
from fedlightning.virtual_time import Asynchronous
from tests.conformance.case import Case
from tests.helpers import NormNet, Toy, close, federate, global_state, make_trainer, same, toy_data

THERE = find_spec("cryptography") is not None
pytestmark = pytest.mark.skipif(not THERE, reason="keys: pip install opacus cryptography")

SIZES = {str(number): 16 + 8 * number for number in range(6)}
CASE = Case(SecureAggregation(), skip={"one_client": "a sum is of three clients at least"})
CASES = {"SecureAggregation": CASE} if THERE else {}


def module(kind=Toy):
    torch.manual_seed(0)
    return kind()


class Fails(FederatedCallback):
    """Some clients fail at a step: `keys`, `shares`, `` (training) or `open`."""

    def __init__(self, **at: str) -> None:
        self.at = at

    def on_send(self, client, update):
        if self.at.get(f"c{client.id}") == (client.message.tag or "training"):
            raise RuntimeError("no power")


class Recorder:
    """What each client has put into fixed point, and what sums were decoded: both outside of the protocol."""

    def __init__(self, monkeypatch):
        self.plain, self.integers, self.sums = [], [], []
        encode, decode = fixed_point.FixedPoint.encode, fixed_point.FixedPoint.decode

        def encoding(point, parts, share):
            pieces = list(parts)
            self.plain.append(torch.cat([piece.flatten() for piece in pieces]))
            integers = encode(point, pieces, share)
            self.integers.append(integers.copy())  # masks are added in place
            return integers

        def decoding(point, total):
            self.sums.append(np.array(total))
            return decode(point, total)

        monkeypatch.setattr(fixed_point.FixedPoint, "encode", encoding)
        monkeypatch.setattr(fixed_point.FixedPoint, "decode", decoding)


# -- sums --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("others", [[FedAvg()], [FedAdam()], [FedPer()]], ids=lambda others: others[0].key)
def test_it_is_the_plain_run_within_rounding(others):
    plain, masked = (
        federate(module(), toy_data(SIZES), [*copy.deepcopy(others), *more], max_rounds=2)
        for more in ([], [SecureAggregation()])
    )
    close(global_state(masked), global_state(plain), atol=2e-5 if isinstance(others[0], FedAdam) else 3e-7)
    assert masked.server.costs.steps == plain.server.costs.steps and not masked.server.state.get("SecureAggregation")
    assert all("SecureAggregation" not in masked.store.get(client).state for client in masked.store)


@pytest.mark.parametrize("others", [[], [FedBN()]], ids=["all", "FedBN"])
def test_statistics_are_averaged_and_counters_stay(others):
    plain, masked = (
        global_state(federate(module(NormNet), toy_data(SIZES), [*others, *more], max_rounds=2))
        for more in ([], [SecureAggregation()])
    )
    floats = [name for name, value in plain.items() if value.is_floating_point()]
    close({name: masked[name] for name in floats}, {name: plain[name] for name in floats}, atol=3e-7)
    counters = set(plain) - set(floats)
    assert counters and all(int(masked[name]) == 0 for name in counters)  # of no single client


class Skips(Toy):
    """Takes no step with fewer than `most` samples."""

    most = 0

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if self.trainer.num_training_batches * 8 >= self.most else None


@pytest.mark.filterwarnings("ignore:.*took no real step")
@pytest.mark.parametrize(("most", "moved"), [(40, 3), (48, 2), (56, 1), (64, 0)])
def test_a_sum_of_fewer_than_three_changes_is_not_opened(most, moved, monkeypatch):
    """The masked update of a client without a step holds zeros: with it one could count to three."""
    recorder = Recorder(monkeypatch)
    monkeypatch.setattr(Skips, "most", most)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = federate(module(Skips), toy_data(SIZES), [SecureAggregation(), FedAdam()], max_rounds=2)
    said = [str(one.message) for one in caught if "opens no sum" in str(one.message)]
    if moved >= 3:
        plain = federate(module(Skips), toy_data(SIZES), [FedAdam()], max_rounds=2)
        close(global_state(trainer), global_state(plain), atol=2e-5)
        assert len(recorder.sums) == 2 and not said
    else:
        same(global_state(trainer), module(Skips).state_dict())
        assert recorder.sums == [] and len(said) == 2
        assert f"Round 1: {moved} of 6 clients that have sent masked updates took a real step" in said[0]
    assert all("SecureAggregation" not in trainer.store.get(client).state for client in trainer.store)


class Masked(Toy):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))


def test_a_mask_of_infinities_stays():
    plain, masked = (
        global_state(federate(module(Masked), toy_data(SIZES), more, max_rounds=1))
        for more in ([], [SecureAggregation()])
    )
    same({"mask": masked.pop("mask")}, {"mask": plain.pop("mask")})
    close(masked, plain, atol=3e-7)


@pytest.mark.parametrize(
    "gone",
    [{}, {"c1": "training", "c4": "training"}, {"c0": "keys"}, {"c2": "shares", "c5": "training"}, {"c3": "open"}],
    ids=["all stay", "a third drops out", "before keys", "before shares and in training", "before opening"],
)
def test_the_sum_is_that_of_the_survivors_bit_for_bit(gone, monkeypatch):
    record = Recorder(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = federate(module(), toy_data(SIZES), [Fails(**gone), SecureAggregation(threshold=0.6)], max_rounds=1)
        out = Fails(**{client: "training" for client, step in gone.items() if step != "open"})
        plain = federate(module(), toy_data(SIZES), [out], max_rounds=1)
    total = sum(record.integers, np.zeros_like(record.integers[0]))
    assert np.array_equal(record.sums[0], total) and len(record.integers) == 6 - len(out.at)
    close(global_state(trainer), global_state(plain), atol=3e-7)


def test_who_is_late_has_dropped_out():
    from fedlightning.virtual_time import SampleSpeed, VirtualClock

    loop = Synchronous(VirtualClock(SampleSpeed(1.0)), deadline=45.0)
    trainers = [
        federate(module(), toy_data(SIZES), more, max_rounds=2, loop=copy.deepcopy(loop))
        for more in ([], [SecureAggregation(threshold=0.6)])
    ]
    close(*(global_state(trainer) for trainer in trainers), atol=3e-7)
    assert trainers[1].server.costs.steps == trainers[0].server.costs.steps


def test_two_thirds_are_more_than_two_thirds():
    wanted = {3: 3, 4: 3, 5: 4, 6: 5, 8: 6, 9: 7, 10: 7, 12: 9, 15: 11, 18: 13, 20: 14, 99: 67}  # floor(2 n / 3) + 1
    assert {count: SecureAggregation().survivors(count) for count in wanted} == wanted
    others = [SecureAggregation(threshold=one).survivors(5) for one in (0.6, 0.8, 1.0)]
    assert others == [3, 4, 5] and SecureAggregation(threshold=0.6).survivors(6) == 4


@pytest.mark.parametrize(("step", "said"), [("keys", "sent keys"), ("training", "masked updates"), ("open", "to open")])
def test_too_few_survivors_are_a_sentence(step, said):
    callbacks = [Fails(c0=step, c1=step), SecureAggregation()]
    with (
        warnings.catch_warnings(),
        pytest.raises(
            ValueError,
            match=f"Round 1: 4 of 6 clients .*{said}.* no sum of fewer than 5; client '0' failed: .*no power",
        ),
    ):
        warnings.simplefilter("ignore")
        federate(module(), toy_data(SIZES), callbacks, max_rounds=1)


def test_a_round_that_draws_too_few_leaves_the_model_as_it_is():
    rounds = {1: [], 2: ["0"], 3: ["1", "5"], 4: list(SIZES)}  # the first of them is a round of nobody already

    class Drawn(PoissonSampling):
        def participants(self, server):
            return rounds[server.round + 1]

    start = module().state_dict()
    with pytest.warns(UserWarning, match=r"Round 3: 2 of 6 clients take part, .* no sum of fewer than 3") as said:
        few = federate(module(), toy_data(SIZES), [Drawn(), FedAdam(), SecureAggregation()], max_rounds=3)
    assert sum("no sum of fewer" in str(one.message) for one in said) == 2
    same(global_state(few), dict(start))
    assert few.server.costs.steps == 0 and not few.server.failures
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        later = federate(module(), toy_data(SIZES), [Drawn(), SecureAggregation()], max_rounds=4)
    assert any(not torch.equal(value, start[name]) for name, value in global_state(later).items())


@pytest.mark.parametrize("engine", ["sequential", pytest.param("processes", marks=pytest.mark.slow)])
def test_secrets_of_who_dropped_out_are_gone_when_the_round_is_over(engine, tmp_path):
    """Those that failed after each step, of the round that a saved state is of; what others keep there stays."""
    gone = Fails(c1="shares", c4="training")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        callbacks = [gone, SecureAggregation(threshold=0.6)]
        trainer = federate(module(), toy_data(SIZES), callbacks, tmp_path, max_rounds=1, engine=engine)
    kept = {client: dict(trainer.store.get(client).state) for client in trainer.store}
    assert not any("SecureAggregation" in state for state in kept.values())
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(b'"mask"' in text or b"told" in text for text in files)


def test_the_result_does_not_depend_on_the_secrets(tmp_path):
    """Every run draws other secrets from the operating system."""
    first, second = (
        federate(module(), toy_data(SIZES), [SecureAggregation()], max_rounds=2, participation=share)
        for share in (1.0, 1.0)
    )
    same(global_state(first), global_state(second))
    cut = make_trainer(tmp_path, [SecureAggregation()], max_rounds=1, name="cut")
    cut.fit(module(), datamodule=toy_data(SIZES))
    again = make_trainer(tmp_path, [SecureAggregation()], max_rounds=2, name="cut")
    again.fit(module(), datamodule=toy_data(SIZES), resume="last")
    same(global_state(again), global_state(first))
    assert again.server.costs.bytes_up == first.server.costs.bytes_up


@pytest.mark.slow
def test_the_other_loop_gives_the_same_bits_and_stacks_nearly_so():
    first, *others = (
        global_state(federate(module(), toy_data(SIZES), [SecureAggregation()], max_rounds=2, **options))
        for options in ({}, {"local_loop": "trainer"}, {"engine": "vectorized"})
    )
    same(first, others[0])
    close(first, others[1], atol=3e-7)  # as without masks: stacked kernels round in their own way


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["processes", "ray"])
def test_workers_give_the_same_bits(engine):
    if engine == "ray":
        pytest.importorskip("ray")
    alone, two = (
        federate(module(), toy_data(SIZES), [FedPer(), SecureAggregation()], max_rounds=2, **options)
        for options in ({}, {"engine": Processes(2) if engine == "processes" else Ray(2)})
    )
    same(global_state(alone), global_state(two))
    assert alone.server.costs.bytes_up == two.server.costs.bytes_up


# -- what the server has in its hands ----------------------------------------------------------------------------------
def tensors_of(thing, seen):
    """Yield every tensor that can be reached from an object through attributes and containers."""
    if id(thing) in seen:
        return
    seen[id(thing)] = thing
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, np.ndarray):
        yield torch.from_numpy(np.array(thing).astype(np.float64))
    elif isinstance(thing, Mapping):
        for value in list(thing.values()):
            yield from tensors_of(value, seen)
    elif isinstance(thing, (list, tuple, set, frozenset)):
        for value in thing:
            yield from tensors_of(value, seen)
    elif dataclasses.is_dataclass(thing) or isinstance(thing, Server):
        yield from tensors_of({name: value for name, value in vars(thing).items() if name != "blueprint"}, seen)


def pieces_of(vectors):
    """Return every four numbers in a row, none of them tiny, each four at length 1: whatever the scale."""
    rows = torch.cat([vector.double().unfold(0, 4, 1) for vector in vectors if len(vector) >= 4])
    rows = rows[rows.abs().amin(1) > 1e-4]
    return rows / rows.norm(dim=1, keepdim=True)


def told(tensors, plain):
    """Return True if a tensor holds a piece of a plain update."""
    pieces = pieces_of([tensor.detach().flatten() for tensor in tensors])
    return bool((torch.cdist(pieces, plain).amin() < 1e-5) if len(pieces) else False)


@pytest.mark.parametrize("gone", [{}, {"c1": "training", "c4": "training"}], ids=["all stay", "a third drops out"])
def test_the_server_sees_masked_integers_only(gone, monkeypatch, tmp_path):
    """Every message in, every object of the server, every saved file: no piece of a plain update, at whatever scale."""
    record, came, held = Recorder(monkeypatch), [], []
    accept = Server.accept

    def seeing(server, message, update):
        came.append(copy.deepcopy(dataclasses.replace(update, cause=None)))
        held.extend(tensor.clone() for tensor in tensors_of(server, {}))
        return accept(server, message, update)

    monkeypatch.setattr(Server, "accept", seeing)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        callbacks = [Fails(**gone), SecureAggregation(threshold=0.6)]
        trainer = federate(module(), toy_data(SIZES), callbacks, tmp_path, max_rounds=1)
    held.extend(tensors_of(trainer.server, {}))
    assert len(record.plain) == 6 - len(gone) and all(
        isinstance(update, Update) and not update.state for update in came
    )
    assert not any(t.is_floating_point() for update in came for t in tensors_of(update, {}))
    start = torch.cat([value.flatten() for _, value in sorted(module().state_dict().items())]).double()
    end = torch.cat([value.flatten() for _, value in sorted(global_state(trainer).items())]).double()
    plain = pieces_of([flat for change in record.plain for flat in (change.double(), change.double() + start)])
    known = pieces_of([start, end, end - start])  # what everybody sees
    plain = plain[torch.cdist(plain, known).amin(1) > 1e-3]
    assert len(plain) > 300
    assert told([record.plain[0]], plain) and told([record.plain[0] * 123 + 0], plain)  # it would be found
    found = [*held, *(tensor for update in came for tensor in tensors_of(update, {}))]
    assert not told(found, plain)
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    pieces = [
        change.to(kind).numpy().tobytes()[:24] for change in record.plain for kind in (torch.float32, torch.float64)
    ]
    pieces += [(change + start).float().numpy().tobytes()[:24] for change in record.plain]
    pieces += [integers.tobytes()[:24] for integers in record.integers]
    assert files and not any(piece in text for piece in pieces for text in files)


@pytest.mark.parametrize("work", [0, None])
def test_a_client_sends_no_entries_in_the_clear(work, monkeypatch):
    """Whatever a server asks for outside of the protocol."""

    def asking(self, server, tag, down):
        return [Job(client, work=work, returns=server.returned_names()) for client in down]

    monkeypatch.setattr(SecureAggregation, "_visits", asking)
    with pytest.raises(FederationError, match="stay"):
        federate(module(), toy_data(SIZES), [SecureAggregation()], max_rounds=1)


@pytest.mark.parametrize(
    ("step", "said"), [("shares", "shares are not"), ("open", "shares are not"), ("keys", "96 bytes")]
)
def test_what_is_no_answer_is_refused(step, said, monkeypatch):
    """A client that answers with less than was asked has failed; here all do."""
    on_send = SecureAggregation.on_send

    def sending(self, client, update):
        on_send(self, client, update)
        if client.message.tag == step:
            sent = update.extras[self.key][step]
            update.extras[self.key] = {step: sent[:5] if isinstance(sent, Tensor) else dict(list(sent.items())[1:])}

    monkeypatch.setattr(SecureAggregation, "on_send", sending)
    with pytest.raises(FederationError, match=said):
        federate(module(), toy_data(SIZES), [SecureAggregation()], max_rounds=1)


def test_an_update_in_the_clear_is_refused(monkeypatch):
    def encode(self, client, update):
        update.extras[self.key] = {"masked": torch.zeros(84, dtype=torch.int32)}

    monkeypatch.setattr(SecureAggregation, "encode", encode)
    with pytest.raises(FederationError, match="in the clear beside SecureAggregation"):
        federate(module(), toy_data(SIZES), [SecureAggregation()], max_rounds=1)


# -- bytes, bounds, refusals -------------------------------------------------------------------------------------------
def test_twenty_clients_send_at_most_twice_the_bytes():
    class Wide(Toy):
        def make(self, hidden, dropout):
            return super().make(1000, dropout)

    sizes = {f"{number:02}": 4 for number in range(20)}
    plain, masked = (
        federate(module(Wide), toy_data(sizes), more, max_rounds=1).server for more in ([], [SecureAggregation()])
    )
    size = sum(value.numel() for value in plain.model.values())
    assert masked.costs.bytes_up >= 20 * 4 * (size + 1) + 20 * 19 * 82 + 20 * 96
    assert masked.costs.bytes_up <= 2 * plain.costs.bytes_up and masked.costs.bytes_down <= 2 * plain.costs.bytes_down


def test_what_is_cut_is_told_once():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        federate(module(), toy_data(SIZES), [SecureAggregation(clip=1e-3)], max_rounds=3)
    found = [str(one.message) for one in said if "of all elements changed" in str(one.message)]
    assert len(found) == 1 and "Round 1" in found[0]


def test_a_client_without_samples_is_left_out_and_told_of():
    with pytest.warns(UserWarning, match="client '6' has no training samples"):
        trainer = federate(module(), toy_data({**SIZES, "6": 0}), [SecureAggregation()], max_rounds=1)
    close(global_state(trainer), global_state(federate(module(), toy_data(SIZES), max_rounds=1)), atol=3e-7)


class ByHand(FederatedCallback):
    def weighting(self, server, update):
        return 1.0


class ModelsOfTheirOwn(FederatedCallback):
    def on_broadcast(self, server, job, message):
        message.state = {name: value.clone() for name, value in message.state.items()}


@pytest.mark.parametrize(
    ("callbacks", "reason"),
    [
        ([Krum(bad=1)], "Krum"),
        ([FedFomo()], "FedFomo"),
        ([IFCA(num_clusters=2)], "IFCA"),
        ([QFedAvg()], "QFedAvg"),
        ([SCAFFOLD()], "SCAFFOLD takes delta_c from clients"),
        ([FedProto()], "FedProto"),
        ([FedLP()], "FedLP"),
        ([TopK()], "both claim 'encode'"),
        ([ClientDP(delta=1e-3, noise_multiplier=1.0)], "ClientDP"),
        ([ByHand()], "weighs updates by a function"),
        ([ModelsOfTheirOwn()], "is sent another"),
    ],
    ids=str,
)
def test_what_needs_single_updates_is_refused(callbacks, reason):
    with pytest.raises(ValueError, match=reason):
        federate(module(), toy_data(SIZES), [*callbacks, SecureAggregation()], max_rounds=1, gradient_clip_val=1.0)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"loop": Asynchronous()}, "SecureAggregation"),
        ({"failures": FailurePolicy(update_limit=10.0)}, "update_limit=10"),
    ],
    ids=str,
)
def test_runs_that_cannot_be_are_refused(options, reason):
    with pytest.raises(ValueError, match=reason):
        federate(module(), toy_data(SIZES), [SecureAggregation()], max_rounds=1, **options)


def test_other_refusals(monkeypatch):
    with pytest.raises(ValueError, match=r"0\.5"):
        SecureAggregation(threshold=0.5)

    def begin(callback, server):
        server.population.sites = {"0": "hospital"}

    monkeypatch.setattr(Fails, "on_federation_start", begin)
    with pytest.raises(ValueError, match="at sites"):
        federate(module(), toy_data(SIZES), [Fails(), SecureAggregation()], max_rounds=1)
