"""Any value anywhere in a configuration: a run, or a sentence."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedlightning.cli import main
from tests.config.test_mutations import BASE, PLACES

KEYS = {
    "trainer": (
        "max_rounds",
        "local_epochs",
        "participation",
        "seed",
        "stages",
        "name",
        "lr_decay",
        "limit_train_batches",
    ),
    "mu": ("mu", "weighting"),
    "model": ("lr", "num_classes", "label_smoothing", "optimizer", "net"),
    "net": ("in_features", "hidden", "num_classes"),
    "data": ("batch_size", "seed", "num_workers", "val_fraction", "test_fraction", "drop_last"),
    "partitioner": ("num_clients",),
}
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([0.5, -0.1, 1e30, math.nan, math.inf, -math.inf]),
    st.text("abc", max_size=3),
    st.lists(st.integers(-3, 3), max_size=2),
    st.dictionaries(st.text("abc", min_size=1, max_size=2), st.integers(-1, 1), max_size=1),
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(place=st.sampled_from([(place, key) for place, keys in KEYS.items() for key in keys]), value=VALUES)
def test_any_value_gives_a_run_or_a_sentence(place: tuple[str, str], value: Any, tmp_path, monkeypatch, capsys) -> None:
    import yaml

    monkeypatch.chdir(tmp_path)
    config = copy.deepcopy(BASE)
    section: Any = config
    for step in PLACES[place[0]]:
        section = section[step]
    section[place[1]] = value
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        code = main(["fit", "--config", "c.yaml", "--trainer.fast_dev_run=true", "--test_after_fit=false"])
    said = capsys.readouterr().err
    assert code in (0, 2), said
    assert "Traceback" not in said
