import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import nn

from fedlightning.client.probes import mean_loss, sample_losses
from tests.helpers import Toy


class Frozen(Toy):
    """Has a part that its user keeps in eval mode, as a frozen backbone's dropout."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Dropout().eval()


@pytest.mark.parametrize("probe", [mean_loss, sample_losses])
def test_a_probe_leaves_every_part_in_its_mode(probe):
    module = Frozen().train()
    module.frozen.eval()
    batch = [torch.ones(3, 6), torch.tensor([0, 1, 2])]
    value = probe(module, [batch], Precision(), 0, "probe")
    assert torch.as_tensor(value).isfinite().all()
    assert module.training and module.net.training and not module.frozen.training
