"""One measurement of a client's module; the run of the whole recorder is in test_layer_diagnostics.py."""

from __future__ import annotations

import pytest
import torch

from fedlightning.callbacks import FedAvg, LayerDiagnostics
from fedlightning.callbacks.diagnostics.layer_diagnostics import SENT, LayerLook
from tests.helpers import Toy, federate, same, toy_data

SETTINGS = {"num_batches": 2, "hessian_probes": 2, "hessian_batches": 1, "cka_samples": 8}


def look(stage="L2", **options):
    """What a look at a client before it sends finds: its values, its Gram matrices, its layers."""
    found = []

    class Looks(FedAvg):
        def on_send(self, client, update):
            before = {name: value.clone() for name, value in client.module.state_dict().items()}
            gradients = [None if p.grad is None else p.grad.clone() for p in client.module.parameters()]
            here = LayerLook(LayerDiagnostics(**SETTINGS | options), client, stage, 0, None, None)
            found.append((here.values(), here.grams(), here.order))
            same(dict(client.module.state_dict()), before)
            for parameter, gradient in zip(client.module.parameters(), gradients, strict=True):
                assert gradient is parameter.grad is None or torch.equal(gradient, parameter.grad)

    torch.manual_seed(0)
    federate(Toy(), toy_data([24]), [Looks()], max_rounds=1)
    return found[0]


@pytest.mark.parametrize("asked", [["sensitivity"], ["grad_var_params"], ["hessian_trace"], ["cka"]])
def test_only_what_is_asked_for_is_there(asked):
    values, grams, order = look(quantities=asked)
    assert order == ["net.0", "net.3"] and values.shape == (len(SENT), 2, 2)
    assert values[SENT.index("num_parameters"), :, 0].tolist() == [6 * 8 + 8, 8 * 3 + 3]
    there = {name for name, rows in zip(SENT, values, strict=True) if not rows[:, 0].isnan().any()}
    assert there == {"num_parameters", *asked} - {"cka"}
    assert grams.shape == ((2, 8, 8) if asked == ["cka"] else (0,))
    errors = {name for name, rows in zip(SENT, values, strict=True) if not rows[:, 1].isnan().any()}
    assert errors == {"hessian_trace"} & set(asked)


def test_gram_matrices_are_of_unit_norm_and_symmetric():
    _, grams, _ = look(quantities=["cka"])
    assert torch.allclose(grams, grams.mT) and torch.allclose(grams.flatten(1).norm(dim=1), torch.ones(2).to(grams))


def test_weights_alone_are_counted_if_asked():
    values, _, _ = look(quantities=["sensitivity"], weights_only=True)
    assert values[0, :, 0].tolist() == [6 * 8, 8 * 3]
