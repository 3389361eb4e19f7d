"""Scores are kept once, whatever is scored again."""

from __future__ import annotations

import gc
import json
import tracemalloc

import pytest

from fedlightning.callbacks import LocalAdaptation, LocalCheckpoint
from fedlightning.fast.fast_evaluation import RowTable
from fedlightning.run.folder import RunFolder
from fedlightning.run.recorder import Recorder
from fedlightning.scores.rows import Row, RowList
from fedlightning.storage.files import readable_json
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
    trainer = federate(NormNet("sgd"), toy_data(), [LocalAdaptation(), LocalCheckpoint()], tmp_path, evaluation=1)
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


def test_a_list_and_a_table_of_rows_give_the_same(tmp_path):
    recorders = [Recorder(RunFolder(tmp_path, name), rows=rows) for name, rows in (("a", RowList()), ("b", RowTable()))]
    for recorder in recorders:
        for round in (1, 2, 3):
            recorder.record([row(round, client, split) for client in "ab" for split in ("val", "test")])
        recorder.choose_results(3)
    plain, table = recorders
    assert list(plain.rows) == list(table.rows) and plain.results == table.results and plain.results
    for since in (0, 2):
        assert plain.rows.where(lambda *kind: "val" in kind, since) == table.rows.where(
            lambda *kind: "val" in kind, since
        )


def scores_of(round, clients=200):
    return [row(round, str(client), value=client / 7 + round) for client in range(clients)]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_rounds(tmp_path, monkeypatch):
    monkeypatch.setattr("fedlightning.fast.fast_evaluation.MAX_ROWS", 500)
    recorder = Recorder(RunFolder(tmp_path, "run"), rows=RowTable())
    held = []
    tracemalloc.start()
    for round in range(1, 40):
        recorder.record(scores_of(round))
        if round > 10:
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert recorder.rows.held <= 700
    assert held[-1] - held[-10] < 9 * 200 * 8  # less than a number for each score

    expected = [one for round in range(1, 40) for one in scores_of(round)]
    assert recorder.rows == expected and len(recorder.rows) == len(expected)
    assert (
        recorder.rows[3] == expected[3]
        and recorder.rows[-1] == expected[-1]
        and recorder.rows[350:420] == expected[350:420]
    )
    assert recorder.rows.where(lambda *kind: True, since=38) == expected[-400:]
    assert recorder.rows.where(lambda *kind: False) == []


def test_a_resumed_recorder_leaves_its_scores_in_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr("fedlightning.fast.fast_evaluation.MAX_ROWS", 300)
    first, again = (Recorder(RunFolder(tmp_path, "run", "version_0"), rows=RowTable()) for _ in range(2))
    first.record(scores_of(1) + scores_of(2))
    again.start_with(again.run.metrics.rows(), again.run.metrics.place())
    for round in (3, 4, 5):
        again.record(scores_of(round))
    assert again.rows.held == 400
    assert again.rows == [one for round in range(1, 6) for one in scores_of(round)]


def test_scores_that_are_gone_are_not_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr("fedlightning.fast.fast_evaluation.MAX_ROWS", 0)
    recorder = Recorder(RunFolder(tmp_path, "run"), rows=RowTable())
    for round in range(1, 5):
        recorder.record(scores_of(round))
    recorder.run.metrics.path.unlink()
    with pytest.raises(RuntimeError, match="not where they were written"):
        list(recorder.rows)
    assert recorder.choose_results(4)


def test_a_summary_is_the_same_json_on_fewer_lines():
    value = {"a": [1, {"b": {"c": [1, 2]}}], None: {}, 3: float("nan"), "e": {"y": True, "z": []}}
    for levels in range(5):
        assert repr(json.loads(readable_json(value, levels))) == repr(json.loads(json.dumps(value)))
