import pytest
import torch
from torch.utils.data import TensorDataset

from fedlightning.cli import main
from fedlightning.datamodules import DigitsDataModule, IndexedFederatedDataModule, Split, SyntheticDataModule
from fedlightning.datamodules.partition_report import find_duplicates


class Planted(IndexedFederatedDataModule):
    """Ten different inputs; `same` are pairs of rows that are made equal."""

    def __init__(self, *same, train=((0, 1, 2), (3, 4, 5)), test=((6, 7), (8, 9)), inputs=None):
        super().__init__()
        x = torch.arange(10.0)[:, None].repeat(1, 3)
        for row, other in same:
            x[row] = x[other]
        self.x, self.parts = x if inputs is None else inputs, {"train": list(train), "test": list(test)}

    def build(self):
        data = TensorDataset(self.x, torch.zeros(10, dtype=torch.int64))
        return ["a", "b"], {split: Split(data, held) for split, held in self.parts.items()}


def found(data):
    data.setup()
    return find_duplicates(data)


@pytest.mark.parametrize(
    ("same", "leaked", "shared", "words"),
    [
        ([], 0, 0, "none between training and other data"),
        ([(6, 1)], 1, 0, "test sample 0 of client 'a' is training sample 1 of 'a'"),
        ([(9, 0)], 1, 0, "test sample 1 of client 'b' is training sample 0 of 'a'"),
        ([(4, 2)], 0, 1, "training sample 1 of client 'b' is sample 2 of 'a'"),
        ([(1, 0)], 0, 0, "none"),  # twice at one client, both in training: a weight of two
        ([(7, 6)], 0, 0, "none"),  # both in test data
        ([(4, 2), (8, 2)], 1, 1, "1 of 10 samples"),
    ],
)
def test_planted_pairs_are_counted(same, leaked, shared, words):
    report = found(Planted(*same))
    assert (report.leaked, report.shared, report.read) == (leaked, shared, 10)
    assert words in str(report)


def test_a_row_that_two_clients_hold_is_one():
    assert found(Planted(train=((0, 1, 2), (2, 3)))).shared == 1
    assert found(Planted(train=((0, 1), (2, 3)), test=((1,), ()))).leaked == 1


def test_bits_decide():
    x = torch.arange(10.0)[:, None].double()
    x[6] = x[1] + 1e-15
    assert found(Planted(inputs=x)).leaked == 0


def test_equal_bytes_of_another_shape_are_other_inputs():
    row = torch.zeros(6)
    shapes = [row.reshape(2, 3) if k < 6 else row.reshape(3, 2) for k in range(10)]
    data = Planted()
    data.setup()
    for split in data._splits.values():
        split.dataset = [(x, 0) for x in shapes]
    assert find_duplicates(data).leaked == 0 and find_duplicates(data).shared == 3


def test_what_cannot_be_compared_is_none():
    data = DigitsDataModule()
    data.setup()
    assert find_duplicates(data, most=1796) is None and find_duplicates(data, most=1797) is not None
    assert find_duplicates(SyntheticDataModule(num_clients=3)) is None


def test_the_command_says_them(tmp_path, capsys):
    config = tmp_path / "run.yaml"
    config.write_text("data: {class_path: tests.datamodules.test_duplicates.Leaking}\n")
    assert main(["partition", "--config", str(config), f"--out={tmp_path / 'out'}"]) == 0
    assert "Equal inputs: 1 of 10 samples are validation or test samples" in capsys.readouterr().out


class Leaking(Planted):
    def __init__(self):
        super().__init__((6, 1))
