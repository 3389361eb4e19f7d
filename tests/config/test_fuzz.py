"""Any value anywhere in a configuration: a run, or a sentence."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedlightning.cli import main
from tests.config.test_mutations import BASE, PLACES
from tests.resume.test_fuzz import mutated, mutations

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


TEXT = yaml.safe_dump(BASE)
BROKEN = {
    "Latin-1": ("# Köln\n" + TEXT).encode("latin-1"),
    "UTF-16": TEXT.encode("utf-16"),
    "no text": bytes(range(256)),
    "nothing": b"",
    "a list": b"[1, 2]",
    "a word": b"hello",
    "a sequence 5000 deep": b"trainer: " + b"[" * 5000 + b"]" * 5000,
    "a mapping 5000 deep": b"trainer: " + b"{a: " * 5000 + b"1" + b"}" * 5000,
    "an open one": b"a: " + b"[" * 5000,
    "indented 2000 times": b"".join(b" " * level + b"a:\n" for level in range(2000)),
    "a key twice": TEXT.encode() + b"\ntrainer: {seed: 3}\n",
    "a key twice below": b"trainer: {seed: 1, seed: 2}\n",
    "an unknown key": TEXT.encode() + b"\nfoo: 1\n",
    "an unknown key below": b"trainer: {sed: 1}\n",
    "a number as key": b"1: 2\n",
    "a list as key": b"? [1]\n: 2\n",
    "a long number": b"trainer: {seed: " + b"9" * 5000 + b"}\n",
    "no number": b"trainer: {seed: !!int abc}\n",
    "two documents": TEXT.encode() + b"\n---\na: 1\n",
    "NUL": TEXT.encode() + b"\0",
    **{
        f"{section} {value}": yaml.safe_dump(BASE | {section: value}).encode()
        for section in ("trainer", "model", "data")
        for value in (0, [], True, 1.5, "", "a", [1])
    },
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_broken_configuration_is_said_in_a_sentence(content: bytes, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_bytes(content)
    code = main(["partition", "--config", "c.yaml"])
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert code == 2
    assert said.startswith("fedlightning partition: ")
    assert len(said) < 600
    assert "Traceback" not in said


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(changes=mutations)
def test_a_damaged_configuration_gives_a_run_or_a_sentence(changes: Any, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_bytes(mutated(TEXT.encode(), changes))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        code = main(["fit", "--config", "c.yaml", "--dry_run"])
    said = capsys.readouterr().err
    assert code in (0, 2), said
    assert "Traceback" not in said
