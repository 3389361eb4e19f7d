"""Samples that are written in the configuration."""

from __future__ import annotations

import pytest
import torch

from fedlightning.datamodules import GivenDataModule

CLIENTS = {"b": {"x": [[1.0, 2.0]], "y": [3.0], "copies": 3}, "a": {"x": [[0.0, 1.0], [2.0, 0.0]], "y": [1.0, -1.0]}}


def test_every_split_holds_the_given_numbers():
    data = GivenDataModule(CLIENTS, batch_size=4)
    data.setup()
    for split in ("train", "val", "test"):
        x, y = next(iter(data.client_dataloader("b", split)))
        assert x.tolist() == [[1.0, 2.0]] * 3 and y.tolist() == [3.0] * 3 and x.dtype == torch.float32
        assert data.num_samples("a", split) == 2
    x, y = next(iter(data.client_dataloader("a", "test")))
    assert x.tolist() == CLIENTS["a"]["x"] and y.tolist() == CLIENTS["a"]["y"]


@pytest.mark.parametrize(
    ("clients", "sentence"),
    [
        ({}, "Use a table of at least one"),
        ({"a": {"x": [[1.0]]}}, "got ['x'] for client 'a'"),
        ({"a": {"x": [[1.0]], "y": [1.0], "n": 2}}, "for client 'a'; give x, y and perhaps copies"),
        ({"a": {"x": [[1.0]], "y": [1.0, 2.0]}}, "got 1 rows of x and 2 numbers of y"),
        ({"a": {"x": [], "y": []}}, "got 0 rows of x"),
        ({"a": {"x": [[1.0]], "y": [1.0], "copies": 0}}, "got copies=0 for client 'a'"),
        ({"a": {"x": [[1.0]], "y": [1.0]}, "b": {"x": [[1.0, 2.0]], "y": [1.0]}}, "rows of [1, 2] numbers"),
    ],
)
def test_what_does_not_fit_together_is_refused(clients, sentence):
    with pytest.raises(ValueError) as error:
        GivenDataModule(clients)
    assert sentence in str(error.value)
