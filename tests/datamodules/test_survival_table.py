import json

import numpy as np
import pytest
import torch

from fedlightning.cli import main
from fedlightning.datamodules import IIDPartitioner, SurvivalTableDataModule

HEADER = "inst,time,status,age,sex,wt.loss"


def write(folder, change=lambda rows: None):
    rng = np.random.default_rng(0)
    rows = [
        f"{1 + i % 3},{rng.integers(10, 900)},{1 + int(rng.random() < 0.7)},{rng.integers(40, 80)},{1 + i % 2},"
        f"{'NA' if i % 7 == 0 else rng.integers(0, 30)}"
        for i in range(60)
    ]
    rows.insert(0, HEADER)
    change(rows)
    path = folder / "lung.csv"
    path.write_text("\n".join(rows) + "\n")
    return path


def ready(path, **options):
    data = SurvivalTableDataModule(path, "time", "status", **{"client": "inst", "event_value": "2"} | options)
    data.setup()
    return data


def test_new_rows_need_neither_times_nor_events(tmp_path):
    path = write(tmp_path)
    data = ready(path)
    rows = [line.split(",") for line in path.read_text().splitlines()[1:]]
    (tmp_path / "new.csv").write_text("\n".join(["sex,age,wt.loss", *(f"{row[4]},{row[3]},{row[5]}" for row in rows)]))
    x = data.inputs_of(tmp_path / "new.csv", "2")
    mine = [place for place, row in enumerate(rows) if row[0] == "2"]
    assert torch.equal(x[mine], data._splits["train"].dataset.x[mine])


def test_institutions_are_clients_and_targets_are_events_and_times(tmp_path):
    path = write(tmp_path)
    data = ready(path, batch_size=1000)
    assert data.client_ids == ["1", "2", "3"] and data.feature_names == ["age", "sex", "wt.loss"]
    cells = [line.split(",") for line in path.read_text().splitlines()[1:]]
    for client in data.client_ids:
        expected = {(float(row[2] == "2"), float(row[1])) for row in cells if row[0] == client}
        found = [
            tuple(y.tolist())
            for split in ("train", "val", "test")
            for _, y in (
                data.client_dataloader(client, split).dataset[k] for k in range(data.num_samples(client, split))
            )
        ]
        assert set(found) == expected and len(found) == 20
    (batch,) = data.client_dataloader("1", "train")
    assert batch[1].shape == (data.num_samples("1"), 2) and batch[1].dtype == torch.float32
    counts = [sum(data.class_counts(client, split)[1] for client in data.client_ids) for split in ("train", "test")]
    assert counts[0] > 0 and counts[1] > 0 and data.num_classes == 2


def test_a_partitioner_may_divide_by_event(tmp_path):
    data = ready(write(tmp_path), client=None, partitioner=IIDPartitioner(2), event_value="2.0", drop=["inst"])
    events = [sum(data.class_counts(c, split)[1] for split in ("train", "val", "test")) for c in data.client_ids]
    assert abs(events[0] - events[1]) <= 1


def without_event(rows):
    rows[:] = [row.replace("status", "state") for row in rows]


def negative(rows):
    cells = rows[3].split(",")
    rows[3] = ",".join([cells[0], "-5", *cells[2:]])


def far_away(rows):
    cells = rows[3].split(",")
    rows[3] = ",".join([cells[0], "1e39", *cells[2:]])


def third_event(rows):
    cells = rows[2].split(",")
    rows[2] = ",".join([*cells[:2], "9", *cells[3:]])


def no_site(rows):
    rows[5] = "NA," + rows[5].partition(",")[2]


def gap(rows):
    cells = rows[2].split(",")
    rows[2] = ",".join([*cells[:2], "", *cells[3:]])


@pytest.mark.parametrize(
    ("change", "options", "match"),
    [
        (without_event, {}, "no column 'status'.*did you mean 'state'"),
        (negative, {}, "sample 3 has the time -5 in 'time'"),
        (far_away, {}, r"the time 'time' holds 1e\+39 in sample 3"),
        (no_site, {}, "sample 5 has no 'inst', so no client"),
        (lambda rows: None, {"event_value": "dead"}, "no row has 'status' = 'dead'; its values are 1, 2"),
    ],
)
def test_wrong_tables_are_named(change, options, match, tmp_path):
    with pytest.raises(ValueError, match=match):
        ready(write(tmp_path, change), **options)


def test_rows_without_an_event_column_are_left_out_with_a_warning(tmp_path):
    with pytest.warns(UserWarning, match="1 of 60 rows have no 'time' and 'status' and are left out"):
        ready(write(tmp_path, gap))


def test_another_event_that_counts_as_censored_is_said(tmp_path):
    with pytest.warns(UserWarning, match="'status' has 1, 9 beside '2', and all of them count as censored"):
        ready(write(tmp_path, third_event))


def test_a_target_is_refused(tmp_path):
    with pytest.raises(ValueError, match="got task or target_statistics; its targets are events and times"):
        SurvivalTableDataModule("a.csv", "time", "status", client="inst", task="regression")


def test_partition_says_nothing_of_calibration_where_targets_are_times(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = {"path": str(write(tmp_path)), "target": "time", "event": "status", "event_value": "2", "client": "inst"}
    (tmp_path / "c.yaml").write_text(
        json.dumps({"data": {"class_path": "SurvivalTableDataModule", "init_args": options}})
    )
    assert main(["partition", "--config", "c.yaml"]) == 0
    shown = capsys.readouterr().out
    assert "censored" in shown and "calibration" not in shown
