"""What names of entries and module paths mean."""

from __future__ import annotations

import pytest

from fedlightning.layers import expand


def test_prefixes_are_module_paths():
    available = ["layer1.weight", "layer1.bias", "layer10.weight", "layer.weight", "scale"]
    assert expand(["layer1"], available) == ["layer1.weight", "layer1.bias"]
    assert expand(["layer1."], available) == ["layer1.weight", "layer1.bias"]
    assert expand("layer", available) == ["layer.weight"]
    assert expand(["scale", "layer10", "layer10.weight"], available) == ["layer10.weight", "scale"]
    assert expand([], available) == []


@pytest.mark.parametrize(("name", "sentence"), [("layer2", "Close matches"), ("", "There are"), ("weight", "layer1")])
def test_a_name_that_matches_nothing(name, sentence):
    with pytest.raises(ValueError, match=sentence):
        expand([name], ["layer1.weight", "layer10.weight"])
