import numpy as np
import pytest

from fedlightning.datamodules import DigitsDataModule, IIDPartitioner, describe, plot_partition
from tests.helpers import mostly_slow


def test_histogram_and_distance():
    report = describe([[0, 1], [2, 3], []], labels=["x", "x", "y", "y"], client_ids=["a", "b", "c"])
    assert report.classes == ["x", "y"] and report.counts.tolist() == [[2, 0], [0, 2], [0, 0]]
    assert report.min_size == 0
    assert report.total_variation[:2].tolist() == [0.5, 0.5] and np.isnan(report.total_variation[2])
    assert report.mean_total_variation == 0.5
    assert report.rows()[1] == {"client": "b", "samples": 2, "total_variation": 0.5, "x": 0, "y": 2}
    lines = str(report).splitlines()
    assert lines[0].split() == ["client", "samples", "TV", "x", "y"] and lines[2].split() == [
        "b",
        "2",
        "0.500",
        "0",
        "2",
    ]
    assert "3 clients, 4 samples, smallest 0" in lines[-1]
    with pytest.raises(ValueError, match="1 client_ids for 2"):
        describe([[0], [1]], client_ids=["a"])


def test_a_class_that_is_called_as_a_column_takes_no_columns_place():
    report = describe([[0, 1], [2]], labels=["client", "samples", "dog"], client_ids=["a", "b"])
    assert report.rows()[0] == {"client": "a", "samples": 2, "total_variation": pytest.approx(1 / 3)} | {
        "class client": 1,
        "class samples": 1,
        "dog": 0,
    }


def test_without_labels_all_samples_are_one_class():
    report = describe([[0, 1], [2]])
    assert report.classes == ["all"] and report.sizes.tolist() == [2, 1]
    assert plot_partition(report).axes[0].get_title() == "2 clients, the smallest has 1 sample"  # no distance of labels


def test_of_a_data_module():
    data = DigitsDataModule(IIDPartitioner(4))
    data.setup()
    report = describe(data, split="test")
    assert report.counts.sum() == 359 and report.client_ids == ["0", "1", "2", "3"]
    assert report.counts[1].tolist() == data.class_counts("1", "test")


@pytest.mark.parametrize(("clients", "classes"), mostly_slow([(4, 2), (100, 10), (6, 15), (5, 40)], [(4, 2), (6, 15)]))
def test_picture_has_a_bar_for_each_client_and_class(clients, classes, tmp_path):
    labels = np.arange(clients * classes * 2) % classes
    parts = np.array_split(np.arange(len(labels)), clients)
    figure = plot_partition(parts, labels, title="who holds what")
    axes = figure.axes[0]
    assert len(axes.patches) == clients * classes
    assert sum(bar.get_height() for bar in axes.patches) == len(labels)
    assert axes.get_title() == "who holds what" and len(axes.get_xticks()) <= 40
    path = tmp_path / "picture.png"
    figure.savefig(path, dpi=40)
    assert path.stat().st_size > 1000
