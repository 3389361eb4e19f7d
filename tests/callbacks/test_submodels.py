"""The scaler and the masked loss of methods that train parts of a model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedlightning.callbacks.shared.partial_training import limit_labels, narrow_to_labels, scale_in_training
from fedlightning.tensors import module_state
from fedlightning.wrappers.slices import ElementMean
from tests.helpers import CLASSES, FEATURES, Toy

X = torch.linspace(-2.0, 3.0, 4 * FEATURES).view(4, FEATURES)


class Maps(Toy):
    """A convolution, a linear layer and a head."""

    def make(self, hidden, dropout):
        wide = nn.Linear(4 * (FEATURES - 2), hidden)
        return nn.Sequential(
            nn.Unflatten(1, (1, -1)), nn.Conv1d(1, 4, 3), nn.Flatten(), wide, nn.Linear(hidden, CLASSES)
        )


def test_layers_are_divided_by_the_rate_in_training_and_the_head_is_not():
    plain = Maps()
    module = copy.deepcopy(plain)
    scale_in_training(module, "net.4", 0.25)
    hidden = plain.net[2](plain.net[1](plain.net[0](X)) / 0.25)
    expected = plain.net[4](plain.net[3](hidden) / 0.25)
    torch.testing.assert_close(module.train()(X), expected)
    torch.testing.assert_close(module.eval()(X), plain(X))
    assert module_state(module).keys() == module_state(plain).keys()


def test_classes_without_samples_have_a_logit_of_zero_and_no_gradient_in_training():
    plain = Toy()
    module = copy.deepcopy(plain)
    labels = limit_labels(module, "net.3", [3, 0, 5])
    assert labels is not None and labels.tolist() == [0, 2]
    logits, whole = module.train()(X), plain(X)
    assert torch.equal(logits[:, 1], torch.zeros(4))
    assert torch.equal(logits[:, [0, 2]], whole[:, [0, 2]])
    F.cross_entropy(logits, torch.tensor([0, 2, 2, 0])).backward()
    head = module.net[3]
    assert not head.weight.grad[1].any() and not head.bias.grad[1].any()
    assert head.weight.grad[0].any() and head.weight.grad[2].any()
    assert torch.equal(module.eval()(X), whole)


def test_a_client_with_all_classes_is_not_masked():
    module = Toy()
    assert limit_labels(module, "net.3", [1, 2, 3]).tolist() == [0, 1, 2]
    assert type(module.net[3]) is nn.Linear


def test_classes_that_nobody_counted_are_absent():
    module = Toy()
    assert limit_labels(module, "net.3", [1, 2]).tolist() == [0, 1]  # fewer counts than outputs
    assert torch.equal(module.train()(X)[:, 2], torch.zeros(4))


@pytest.mark.parametrize(("head", "counts"), [(nn.Linear(8, 1), [3, 0]), (nn.Identity(), [3, 0, 1])])
def test_a_head_without_an_output_for_each_class_stays_as_it_is(head, counts):
    module = Toy()
    module.net[3] = head
    assert limit_labels(module, "net.3", counts) is None
    assert type(module.net[3]) is type(head)


def test_only_the_heads_rows_of_a_clients_classes_enter_the_mean():
    """Two clients of other classes, on other slices of the hidden layer: each element is the mean of who holds it."""
    state = module_state(Toy())
    hidden = {"0": torch.arange(8), "1": torch.arange(4)}
    labels = {"0": torch.tensor([0, 1]), "1": torch.tensor([1])}
    mean, sums, counts = ElementMean(), torch.zeros(CLASSES, 8), torch.zeros(CLASSES, 8)
    for number, client in enumerate(hidden):
        own = {name: value + 10.0 * (number + 1) for name, value in state.items()}
        own["net.3.weight"] = own["net.3.weight"][:, hidden[client]]
        narrow, held = narrow_to_labels(own, {"net.3.weight": (None, hidden[client])}, "net.3", labels[client])
        assert narrow["net.3.weight"].shape == (len(labels[client]), len(hidden[client]))
        assert narrow["net.0.weight"] is own["net.0.weight"] and "net.0.weight" not in held
        mean.add(narrow, state, held, weight=1.0)
        for row in labels[client]:
            sums[row, hidden[client]] += own["net.3.weight"][row]
            counts[row, hidden[client]] += 1
    expected = torch.where(counts > 0, sums / counts.clamp_min(1), state["net.3.weight"])
    assert {float(c) for c in counts.flatten()} == {0.0, 1.0, 2.0}
    torch.testing.assert_close(mean.result(state)["net.3.weight"], expected)
