"""Scores are kept once, whatever is scored again."""

from __future__ import annotations

from fedlightning.callbacks import LocalAdaptation, LocalCheckpoint
from fedlightning.run.recorder import Recorder
from fedlightning.scoring.results import Row, RowTable
from tests.helpers import NormNet, federate, toy_data


def row(round, client="a", split="val", value=0.5):
    return Row(round, "L1", "personal", "latest", "local", split, client, "loss", value, 3)


def test_a_row_comes_once():
    recorder = Recorder()
    for rows in (
        [row(1)],
        [row(1), row(1, "b")],
        [row(2)],
        [row(1), row(2)],
        [row(2, split="test")],
        [row(2, split="test")],
    ):
        recorder.record(rows)
    assert list(recorder.rows) == [row(1), row(1, "b"), row(2), row(2, split="test")]


def test_tests_of_a_run_with_final_visits_are_there_once(tmp_path):
    trainer = federate(NormNet("sgd"), toy_data(), [LocalAdaptation(), LocalCheckpoint()], tmp_path, evaluate_every=1)
    for _ in range(2):
        trainer.test()
    addresses = [one.address for one in trainer.rows]
    assert len(set(addresses)) == len(addresses)
    assert list(trainer.run.metrics.rows()) == list(trainer.rows)


def test_a_table_is_a_sequence_of_its_rows():
    rows = [row(round, client, value=round / 7) for round in (1, 2) for client in "abc"]
    table = RowTable(rows)
    assert table == rows and list(table) == rows
    assert table[-1] == rows[-1] and table[1:3] == rows[1:3]
    assert RowTable() == []
