"""The federated recorder of layers: what it writes, that it changes nothing, that it resumes."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
import torch

import fedlightning
from fedlightning.algorithm import Facts

# isort: split
from lightning.pytorch.plugins.precision import Precision
from torch import nn
from torch.nn import functional as F

from fedlightning.callbacks import SCAFFOLD, FedPer, FedRep, HeteroFL, LayerDiagnostics, PerFedAvg, PLayerFL
from fedlightning.callbacks.diagnostics.hessian_trace import hutchinson, mean_and_error
from fedlightning.callbacks.diagnostics.layer_diagnostics import QUANTITIES, StageTable, round_rows
from fedlightning.callbacks.diagnostics.layer_values import LayerRow, read_layers
from fedlightning.callbacks.diagnostics.similarity import linear_cka
from tests.helpers import (
    NormNet,
    Quadratic,
    Toy,
    federate,
    global_state,
    make_trainer,
    quadratic_data,
    same,
    spied,
    toy_data,
)

LAYERS = ["net.0", "net.3"]


@pytest.fixture(autouse=True)
def no_figures(monkeypatch):
    """They take longer than all the rest; the runs of :func:`run` and of one test draw them."""
    monkeypatch.setattr(LayerDiagnostics, "on_federation_end", lambda *_: None)


def toy(kind: Any = Toy, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(**options)


def diagnostics(**options: Any) -> LayerDiagnostics:
    return LayerDiagnostics(**{"num_batches": 2, "hessian_probes": 2, "cka_samples": 12} | options)


def table(rows: list[LayerRow], **chosen: Any) -> dict[tuple[Any, ...], float]:
    """Values by (round, stage, client, layer, quantity) of the rows that match."""
    return {
        (row.round, row.stage, row.client, row.layer, row.quantity): row.value
        for row in rows
        if all(getattr(row, name) == value for name, value in chosen.items())
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with everything recorded, its rows, and what its clients sent."""
    trainer, spy = spied(
        toy(),
        toy_data(),
        [diagnostics(stages=["L1", "L2"], num_batches=None)],
        tmp_path_factory.mktemp("runs"),
        local_epochs=2,
    )
    return trainer, read_layers(trainer.run.path), spy


# -- what it writes ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_quantity_of_every_round_client_stage_and_layer_is_there(run):
    _, rows, _ = run
    values = table(rows)
    assert len(values) == len(rows)  # nothing twice
    own = [name for name in QUANTITIES if name != "sensitivity_online"]
    for number, client, layer in itertools.product((1, 2), "012", LAYERS):
        assert math.isfinite(values[number, "L2", client, layer, "sensitivity_online"])
        for stage, quantity in itertools.product(("L1", "L2"), own):
            assert math.isfinite(values[number, stage, client, layer, quantity])
    assert {(row.layer_index, row.layer) for row in rows} == set(enumerate(LAYERS, 1))
    assert all((row.std_error > 0) == row.quantity.startswith("hessian_trace") for row in rows)
    assert {row.value for row in rows if row.quantity == "num_parameters"} == {56.0, 27.0}


def test_f_is_cumulative_and_of_all_clients_the_sum(run):
    _, rows, _ = run
    values = table(rows, round=1, stage="L2")
    for kind in ("sensitivity", "sensitivity_online"):
        for client in ("0", "all"):
            first, second = (values[1, "L2", client, layer, kind] for layer in LAYERS)
            assert values[1, "L2", client, LAYERS[1], f"{kind}_cumulative"] == pytest.approx(first + second)
            assert values[1, "L2", client, LAYERS[0], f"{kind}_ratio"] == pytest.approx((first + second) / first)
        for layer in LAYERS:
            total = sum(values[1, "L2", client, layer, kind] for client in "012")
            assert values[1, "L2", "all", layer, kind] == pytest.approx(total)


def test_sensitivity_and_gradient_variance_are_those_of_the_model_after_training(run):
    """The last round's L2 models are what the clients sent up: recompute by autograd on their whole data."""
    _, rows, spy = run
    data = toy_data()
    data.setup("fit")
    values = table(rows, round=2, stage="L2")
    for client, update in spy.of_round(1).items():
        module = toy()
        module.load_state_dict(update.state)
        x, y = data.tensors[client]["train"]
        F.cross_entropy(module(x), y).backward()
        for layer in LAYERS:
            parameters = list(module.get_submodule(layer).parameters())
            n = sum(p.numel() for p in parameters)
            terms = sum(float((p.detach() * p.grad).square().sum()) for p in parameters)
            entries = torch.cat([p.grad.flatten() for p in parameters])
            assert values[2, "L2", client, layer, "sensitivity"] == pytest.approx(terms / n, rel=1e-3)
            expected = float(entries.var(correction=0))
            assert values[2, "L2", client, layer, "grad_var_params"] == pytest.approx(expected, rel=1e-3)
            trace, per = (values[2, "L2", client, layer, f"hessian_trace{s}"] for s in ("", "_per_parameter"))
            assert trace == pytest.approx(per * n)


def test_the_hessian_trace_is_near_the_exact_one(tmp_path):
    recorder = diagnostics(quantities=["hessian_trace"], hessian_probes=60, hessian_batches=3)
    trainer, spy = spied(toy(), toy_data((24,), batch_size=8), [recorder], tmp_path, max_rounds=1)
    module = toy()
    module.load_state_dict(spy.of_round(0)["0"].state)
    x, y = toy_data((24,)).tensors["0"]["train"]
    _, draws = hutchinson(module, [(x, y)], Precision(), "another seed", num_probes=400)
    truth, _ = mean_and_error(draws)
    for row in read_layers(trainer.run.path):
        if row.quantity == "hessian_trace":
            assert abs(row.value - truth[row.layer_index - 1]) < 4 * row.std_error


def test_cka_is_of_the_layers_outputs_on_the_same_pooled_samples(run):
    _, rows, spy = run
    values = table(rows, round=2, stage="L2", quantity="cka")
    data = toy_data()
    pooled = torch.cat([data.tensors[client]["val"][0] for client in "012"])
    x = pooled[[i * len(pooled) // 12 for i in range(12)]]
    outputs = {}
    for client, update in spy.of_round(1).items():
        module = toy()
        module.load_state_dict(update.state)
        with torch.no_grad():
            outputs[client] = {"net.0": module.net[0](x), "net.3": module.net(x)}
    for layer in LAYERS:
        pairs = {pair: linear_cka(*(outputs[c][layer] for c in pair)) for pair in itertools.combinations("012", 2)}
        assert values[2, "L2", "all", layer, "cka"] == pytest.approx(sum(pairs.values()) / 3, abs=1e-5)
        first = (pairs["0", "1"] + pairs["0", "2"]) / 2
        assert values[2, "L2", "0", layer, "cka"] == pytest.approx(first, abs=1e-5)


def test_models_that_are_equal_before_training_have_cka_one(run):
    _, rows, _ = run
    found = [row.value for row in rows if (row.quantity, row.stage) == ("cka", "L1")]
    assert found == pytest.approx([1.0] * len(found), abs=1e-6)


def test_the_online_sensitivity_is_what_player_fl_decides_by(tmp_path):
    trainer = federate(toy(), toy_data(), [PLayerFL(), diagnostics(quantities=["sensitivity_online"])], tmp_path)
    written = json.loads((trainer.run.path / "sensitivity.json").read_text())
    values = table(read_layers(trainer.run.path), round=1, client="all", quantity="sensitivity_online")
    assert list(values.values()) == pytest.approx(written["sensitivity"], rel=1e-12)


def test_figures_are_drawn(run):
    trainer, _, _ = run
    for name in ("layers.png", "transition.png"):
        assert (trainer.run.path / "figures" / name).stat().st_size > 10_000


# -- it changes nothing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "algorithms", "options"),
    [
        (Toy, [], {"optimizer_state": "keep", "local_epochs": 2}),
        (NormNet, [SCAFFOLD()], {}),
        pytest.param(Toy, [PerFedAvg(alpha=0.1)], {}, marks=pytest.mark.slow),
        pytest.param(Toy, [FedRep(personal=["net.3"], head_epochs=1)], {}, marks=pytest.mark.slow),
        (Toy, [FedPer(personal=["net.3"])], {"participation": 2}),
    ],
    ids=["keep", "scaffold", "per-fedavg", "fedrep", "fedper"],
)
def test_the_run_is_bit_for_bit_the_same(kind, algorithms, options, tmp_path):
    plain = federate(toy(kind, dropout=0.3), toy_data(), algorithms, tmp_path, **options)
    callbacks = [diagnostics(stages=["L1", "L2"]), *algorithms]
    other = federate(toy(kind, dropout=0.3), toy_data(), callbacks, tmp_path, **options)
    same(global_state(plain), global_state(other))
    assert [(row.address, row.value) for row in plain.rows] == [(row.address, row.value) for row in other.rows]
    for client in "012":
        same(plain.store.get(client).personal, other.store.get(client).personal)
    assert plain.server.state.keys() == other.server.state.keys()  # nothing is kept from round to round
    assert read_layers(other.run.path)


def test_layers_stay_in_forward_order_whatever_the_registration():
    class Reversed(Toy):
        def make(self, hidden: int, dropout: float) -> nn.Module:
            return nn.ModuleDict({"head": nn.Linear(hidden, 3), "body": nn.Linear(6, hidden)})

        def logits(self, x: torch.Tensor) -> torch.Tensor:
            return self.net["head"](torch.relu(self.net["body"](x)))

    _, spy = spied(toy(Reversed), toy_data(), [diagnostics()], max_rounds=1)
    assert spy.updates[0].extras["LayerDiagnostics"]["order"].tolist() == [1, 0]


# -- rounds, resuming --------------------------------------------------------------------------------------------------


def test_every_n_rounds_starts_with_the_first(tmp_path):
    options = {"every_n_rounds": 2, "quantities": ["sensitivity"]}
    trainer = federate(toy(), toy_data(), [diagnostics(**options)], tmp_path, max_rounds=4)
    assert {row.round for row in read_layers(trainer.run.path)} == {1, 3}


@pytest.mark.slow
def test_a_resumed_run_writes_the_same_table(tmp_path):
    options: dict[str, Any] = {"quantities": ["sensitivity", "sensitivity_online", "hessian_trace", "cka"]}
    whole = federate(toy(), toy_data(), [diagnostics(**options)], tmp_path, name="whole", max_rounds=4)
    trainer = make_trainer(tmp_path, [diagnostics(**options)], name="cut", max_rounds=4, save_state=3)
    stop = Interrupt()
    trainer.callbacks.callbacks.append(stop)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(toy(), datamodule=toy_data())
    path = trainer.run.path / "layers.csv"
    assert {row.round for row in read_layers(path)} == {1, 2, 3, 4}  # round 4 is not in the saved state
    path.write_text(path.read_text() + "5,L2,0,1,net.0,cka,0.")  # killed while writing
    resumed = make_trainer(tmp_path, [diagnostics(**options)], name="cut", max_rounds=4, save_state=3)
    resumed.fit(toy(), datamodule=toy_data(), resume="last")
    assert path.read_text() == (whole.run.path / "layers.csv").read_text()


class Interrupt(fedlightning.FederatedCallback):
    """Kills the run after round 4 was written and before its state is saved."""

    facts = Facts(takes_part=False)

    def on_round_end(self, server: Any) -> None:
        if server.round == 3:
            raise KeyboardInterrupt


# -- clients that differ -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*same for every sample")
def test_models_of_different_widths_are_compared(tmp_path):
    algorithm = HeteroFL(rates=[1.0, 0.5], head="net.3")
    trainer = federate(toy(), toy_data(), [algorithm, diagnostics()], tmp_path, max_rounds=1)
    rows = read_layers(trainer.run.path)
    found = [row for row in rows if row.quantity == "cka"]
    assert len(found) == 8 and all(0 < row.value <= 1 for row in found)


def test_clients_that_meet_the_layers_in_another_order_are_not_summed():
    values = {"sensitivity": torch.tensor([[1.0, math.nan], [2.0, math.nan]])}
    tables = [StageTable(c, "L2", names, [4, 4], values) for c, names in (("0", ["a", "b"]), ("1", ["b", "a"]))]
    assert not table(round_rows(1, tables), client="all", quantity="sensitivity")
    assert table(round_rows(1, tables[:1]), client="all", quantity="sensitivity")


def test_a_layer_that_gives_nothing_to_compare_has_no_cka():
    grams = torch.full((2, 4, 4), 0.25)
    grams[1] = math.nan
    tables = [StageTable(c, "L2", ["a", "b"], [4, 4], {}, grams) for c in "01"]
    found = table(round_rows(1, tables), quantity="cka")
    assert {key[3] for key in found} == {"a"}


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_bad_options_are_refused():
    for options, text in [
        ({"quantities": ["hessian"]}, r"quantities=\['hessian'\]"),
        ({"quantities": []}, "quantities"),
        ({"stages": ["G"]}, r"stages=\['G'\]"),
        ({"hessian_probes": 1}, r"hessian_probes=1. Use a whole number in \[2, inf\)"),
        ({"num_batches": 0}, "num_batches=0"),
        ({"threshold": 1.0}, "threshold=1.0"),
        ({"quantities": ["sensitivity_online"], "stages": ["L1", "L2"]}, "'sensitivity_online' is of stage L2 alone"),
    ]:
        with pytest.raises(ValueError, match=text):
            LayerDiagnostics(**options)  # type: ignore[arg-type]


def test_what_cannot_be_measured_is_refused_before_training():
    class Manual(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    with pytest.raises(ValueError, match="manual optimization"):
        federate(Manual(), toy_data(), [diagnostics()])
    with pytest.raises(ValueError, match="no client has any"):
        federate(toy(), toy_data(val=0), [diagnostics()])
    with pytest.raises(ValueError, match=r"bfloat16.*precision='bf16-mixed'"):
        federate(toy(), toy_data(), [diagnostics()], precision="bf16-true")


def test_without_validation_data_the_rest_is_recorded(tmp_path):
    recorder = diagnostics(quantities=["hessian_trace"])
    trainer = federate(toy(), toy_data(val=0), [recorder], tmp_path, max_rounds=1)
    assert {row.quantity for row in read_layers(trainer.run.path)} >= {"hessian_trace"}


def test_one_client_has_nobody_to_be_compared_with(tmp_path, monkeypatch):
    monkeypatch.undo()
    trainer = federate(toy(), toy_data((24,)), [diagnostics(quantities=["cka"])], tmp_path, max_rounds=1)
    assert {row.quantity for row in read_layers(trainer.run.path)} == {"num_parameters"}
    assert not (trainer.run.path / "figures").exists()


def test_one_layer_in_double_precision_at_stage_l1(tmp_path, monkeypatch):
    monkeypatch.undo()
    recorder = diagnostics(quantities=["hessian_trace", "sensitivity"], stages=["L1"])
    data = quadratic_data([[1.0, 2.0, 3.0], [1.0, 1.0, 1.0]], [[1.0] * 3, [2.0] * 3])
    trainer = federate(Quadratic(), data, [recorder], tmp_path, max_rounds=1)
    values = table(read_layers(trainer.run.path), quantity="hessian_trace")
    assert list(values.values()) == pytest.approx([6.0, 3.0])
    assert [path.name for path in (trainer.run.path / "figures").iterdir()] == ["layers.png"]  # no gap, no transition
