"""Harmony: sheet B 4.1."""

from __future__ import annotations

import pytest
import torch

from fedlightning.callbacks import FedAdam, FedAvg, FedProx, Harmony
from fedlightning.callbacks.shared.memberships import clusters_of
from fedlightning.callbacks.shared.modalities import bias
from fedlightning.contract import FederatedCallback
from fedlightning.tensors import module_state
from tests.conformance.case import Case, Kept
from tests.helpers import NormNet, Toy, close, differs, federate, global_state, mean_of, same, spied, toy_data
from tests.modalities import network, of_encoder, senses

ALONE = {"encoders": {"x": []}, "stage1": 1.0}
CASES = {"Harmony": Case(Harmony(**ALONE))}
KEPT = {"Harmony": Kept("Harmony", server=("bias", "classifiers", "clusters", "modalities", "stage1"), options=ALONE)}
SENSORS = {"A": 1, "A+D": 2, "A+D+R": 1}


def two_stages(module=None, data=None, **options):
    module = module or network(unimodal_heads=True)
    given = ("max_rounds", "participation", "local_loop")
    arguments = {"max_rounds": 4} | {k: options.pop(k) for k in given if k in options}
    data = data or senses(4, sensors=SENSORS)
    trainer, spy = spied(module, data, [Harmony(**{"stage1": 2, **options})], **arguments)
    return module, trainer, spy


@pytest.mark.parametrize("make", [lambda: Toy("adam", dropout=0.2), lambda: NormNet("momentum")])
def test_one_modality_everywhere_is_uniform_fedavg(make):
    module = make()
    plain = federate(module, toy_data(), [FedAvg("uniform")], max_rounds=3, participation=2)
    ours = federate(module, toy_data(), [Harmony(**ALONE)], max_rounds=3, participation=2)
    same(global_state(plain), global_state(ours))


@pytest.mark.parametrize("norm", [False, True])
def test_stage_1_averages_each_network_over_its_owners(norm):
    module, trainer, spy = two_stages(network(unimodal_heads=True, norm=norm), max_rounds=1, stage1=1)
    sent = {update.client: update for update in spy.updates if update.tag == "unimodal"}
    for name, owners in {"A": "0123", "D": "123", "R": "3"}.items():
        part = [key for key in module_state(module) if f".{name}." in key]
        assert all((key in update.state) == (client in owners) for client, update in sent.items() for key in part)
        expected = mean_of({c: sent[c] for c in owners}, dict.fromkeys(owners, 1.0))
        floats = [key for key in part if module_state(module)[key].is_floating_point()]
        close({k: expected[k] for k in floats}, {k: global_state(trainer)[k] for k in floats}, atol=1e-7)
    untouched = [k for k in module_state(module) if "fusion" in k or "classifier" in k]
    same({k: module_state(module)[k] for k in untouched}, {k: global_state(trainer)[k] for k in untouched})


def test_modalities_do_not_touch_each_other_in_stage_1():
    """Other inputs of A at one client change the networks of A and leave those of D and R as they are, bit for bit."""
    module, ends = network(unimodal_heads=True, norm=True), []
    for factor in (1.0, -3.0):
        data = senses(4, sensors=SENSORS)
        data.setup()
        held = torch.from_numpy(data.indices("2"))
        data._splits["train"].dataset.inputs["A"][held] *= factor
        _, trainer, _ = two_stages(module, data, max_rounds=2, stage1=2)
        ends.append(global_state(trainer))
    for key in module_state(module):
        assert torch.equal(ends[0][key], ends[1][key]) == (".A." not in key or "num_batches" in key), key


def test_stage_2_keeps_encoders_and_averages_the_fusion_within_clusters():
    module, trainer, spy = two_stages(num_clusters=1)
    answers = {number: spy.of_round(number) for number in (2, 3)}
    assert [sorted(found) for found in answers.values()] == [["1", "2", "3"]] * 2  # client 0 has one modality
    fusion = {k for k in module_state(module) if "fusion" in k or "net.classifier" in k}
    for found in answers.values():
        assert all(set(update.state) == fusion for update in found.values())
    last = answers[3]
    pair = mean_of({c: last[c] for c in "12"}, {"1": 1.0, "2": 1.0})  # the clients with A and D
    deployed = {client: module_state(trainer.module(client)) for client in "0123"}
    for client in "12":
        close({k: deployed[client][k] for k in fusion}, pair, atol=1e-7)
    same({k: deployed["3"][k] for k in fusion}, last["3"].state)
    assert differs(of_encoder("A", deployed["1"]), of_encoder("A", deployed["2"]))
    same(of_encoder("A", deployed["0"]), of_encoder("A", global_state(trainer)))
    assert differs(of_encoder("A", deployed["1"]), of_encoder("A", global_state(trainer)))


def test_the_second_round_of_stage_2_sends_the_clusters_fusion_and_no_encoder():
    _, _, spy = two_stages(num_clusters=1)
    first, second = ({m.client: m for m in spy.messages if m.round == t and m.tag == "fusion"} for t in (2, 3))
    assert of_encoder("A", first["1"].state) and not of_encoder("R", first["1"].state)
    assert not of_encoder("A", second["1"].state)
    answers = spy.of_round(2)
    close(second["1"].state, mean_of({c: answers[c] for c in "12"}, {"1": 1.0, "2": 1.0}), atol=1e-7)


def test_the_bias_is_one_minus_the_cosine_to_the_start_of_the_stage():
    _, trainer, spy = two_stages()
    for client, modalities in {"1": "AD", "2": "AD", "3": "ADR"}.items():
        start = next(m for m in spy.messages if m.round == 2 and m.client == client and m.tag == "fusion").state
        record = trainer.store.get(client).personal
        expected = []
        for name in modalities:
            a, b = (torch.cat([s[k].double().flatten() for k in of_encoder(name, start)]) for s in (start, record))
            expected.append(1 - torch.nn.functional.cosine_similarity(a, b, dim=0))
        found = spy.of_round(3)[client].extras["Harmony"]["bias"]
        torch.testing.assert_close(found, torch.stack(expected), atol=1e-12, rtol=1e-9)
        assert bool((found > 0).all()) and bool((found <= 2).all())


def test_the_bias_is_zero_at_the_start_and_knows_no_scale():
    w = {"w": torch.randn(5), "b": torch.randn(2)}
    assert float(bias(w, w, ["w", "b", "running_mean"])) == pytest.approx(0.0, abs=1e-12)
    assert float(bias(w, {k: 7 * v for k, v in w.items()}, w)) == pytest.approx(0.0, abs=1e-12)
    assert float(bias(w, {k: -v for k, v in w.items()}, w)) == pytest.approx(2.0)
    zero = {k: torch.zeros_like(v) for k, v in w.items()}
    assert float(bias(zero, zero, w)) == 0.0


def test_clusters_are_found_on_columns_of_one_scale():
    """The first column is a thousand times smaller, and only it tells the clients apart."""
    biases = torch.tensor([[1e-3, 0.9], [1e-3, 1.0], [0.0, 1.0], [0.0, 0.9]], dtype=torch.float64)
    assert clusters_of(biases, 2, seed=0) == [0, 0, 1, 1]
    assert clusters_of(torch.zeros(3, 2, dtype=torch.float64), 3, seed=0) == [0, 0, 0]


class TookNoStep(FederatedCallback):
    def on_send(self, client, update):
        if client.id == "1" and client.message.tag == "fusion":
            update.contributed = False


def test_a_client_without_a_step_has_no_part_in_its_cluster():
    options = {"max_rounds": 3, "participation": 1.0}
    trainer, _ = spied(network(unimodal_heads=True), senses(4, sensors=SENSORS), [Harmony(2), TookNoStep()], **options)
    own = trainer.server.state["Harmony"]
    assert set(own["classifiers"]) == set(own["bias"]) == {"2", "3"}


def test_only_one_modality_has_a_model_for_all():
    _, several, _ = two_stages()
    one = federate(Toy("sgd"), toy_data(), [Harmony(**ALONE)], max_rounds=1)
    assert Harmony().global_module(several.server, None) is None
    same(module_state(Harmony(**ALONE).global_module(one.server, None)), global_state(one))


def test_absent_clients_keep_their_fusion_and_encoders():
    _, _, spy = two_stages(max_rounds=6, participation=2, num_clusters=1)
    stage = [{u.client for u in spy.updates if u.round == t and u.tag == "fusion"} for t in range(2, 6)]
    assert all(len(found) == 2 and found <= {"1", "2", "3"} for found in stage)
    for t in range(3, 6):
        for client in {"1", "2", "3"} - stage[t - 2]:
            before, after = (spy.states[k]["Harmony"]["classifiers"].get(client, {}) for k in (t - 1, t))
            same(before, after)


def test_what_cannot_work_is_refused():
    with pytest.raises(ValueError, match="Classifier has none for A, D, R"):
        federate(network(), senses(), [Harmony()])
    with pytest.raises(ValueError, match="no client has more than one"):
        federate(network(unimodal_heads=True), senses(3, sensors={"A": 2, "D": 1}), [Harmony(stage1=1)], max_rounds=2)
    with pytest.raises(ValueError, match=r"Harmony keeps several models at the server.*, and FedAdam "):
        federate(network(unimodal_heads=True), senses(), [FedAdam(), Harmony()])
    for name, value in {"stage1": 1.5, "num_clusters": 0}.items():
        with pytest.raises(ValueError, match=f"Harmony got {name}="):
            Harmony(**{name: value})


def test_a_proximal_term_joins_in_both_stages():
    module, data = network(unimodal_heads=True), senses(4, sensors=SENSORS)
    free = federate(module, data, [Harmony(stage1=1)], max_rounds=2)
    held = federate(module, data, [Harmony(stage1=1), FedProx(mu=5.0)], max_rounds=2)
    assert differs(module_state(free.module("1")), module_state(held.module("1")))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_the_bias_of_small_weights_and_of_none(scale):
    w, turned, gone = (torch.tensor(values) * scale for values in ([1.0, 0.0], [0.0, 1.0], [0.0, 0.0]))
    assert float(bias({"w": w}, {"w": turned}, ["w"])) == pytest.approx(1.0, abs=1e-12)
    assert float(bias({"w": w}, {"w": -w}, ["w"])) == pytest.approx(2.0, abs=1e-12)
    assert float(bias({"w": gone}, {"w": w}, ["w"])) == float(bias({"w": w}, {"w": gone}, ["w"])) == 0.0


def rare(of: str = "D", kept: int = 1, client: str = "1"):
    """Data in which only `kept` samples of a client have a modality."""
    data = senses(4, sensors=SENSORS, batch_size=4)
    data.setup()
    held = torch.from_numpy(data.indices(client))
    data._splits["train"].dataset.inputs[of][held[kept:]] = float("nan")
    return data


@pytest.mark.parametrize("loop", ["fast", "trainer"])
@pytest.mark.fast_cases(1)
def test_a_batch_without_a_sample_of_the_modality_is_passed_over_and_counted(loop):
    module = network(unimodal_heads=True, norm=False)
    with pytest.warns(
        UserWarning, match="Harmony passes over batches of client '1' in which no sample has the modality"
    ):
        _, trainer, spy = two_stages(module, rare(), max_rounds=3, stage1=2, local_loop=loop)
    assert not trainer.summary.get("failures")
    sent = spy.of_round(0)["1"]
    assert differs(of_encoder("D", sent.state), of_encoder("D", module_state(module)))
    batches = -(-len(rare().indices("1")) // 4)
    assert trainer.store.get("1").state["Harmony"]["passed_over"] >= 2 * (batches - 3)
    assert sent.steps < 2 * batches  # of A and D


@pytest.mark.slow
def test_both_loops_pass_over_the_same_batches():
    module = network(unimodal_heads=True)
    ends = [two_stages(module, rare(), max_rounds=2, stage1=2, local_loop=loop)[1] for loop in ("fast", "trainer")]
    same(*map(global_state, ends))
