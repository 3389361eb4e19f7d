"""Two modules that train on the same batches."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from fedlightning.callbacks.fml import MutualLoss
from fedlightning.wrappers import unmix
from fedlightning.wrappers.pair import minimise, pair, shared_entries, shared_of, sides_of
from tests.helpers import CLASSES, FEATURES, NormNet, Toy, differs, same


class Named(Toy):
    """Its optimizer knows the names of its parameters."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.named_parameters(), self.lr, momentum=0.9)


class Manual(Toy):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Taken(Toy):
    shared_model = None


def both(own=None, shared=None, **options):
    return pair(own or Toy("momentum"), shared, MutualLoss(0.5, 0.5, True), **options)


def batch():
    draw = torch.Generator().manual_seed(0)
    return torch.randn(8, FEATURES, generator=draw), torch.randint(CLASSES, (8,), generator=draw)


def test_unmixing_gives_the_users_module_back():
    own = NormNet()
    before = {name: value.clone() for name, value in own.state_dict().items()}
    module = both(own, Toy(hidden=3), project=True)
    assert [*before] == [name for name in module.state_dict() if not name.startswith("shared_")]
    assert shared_entries(module) == [f"shared_model.{name}" for name in Toy().state_dict()]
    assert unmix(module) is own and type(own) is NormNet
    same(dict(own.state_dict()), before)


def test_copies_and_pickles_take_the_same_step():
    module = both(NormNet("momentum"), Toy("momentum", hidden=3))
    losses = []
    for one in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        optimizer = one.configure_optimizers()
        loss = one.training_step(batch(), 0)
        loss.backward()
        optimizer.step()
        losses.append((loss.item(), dict(one.state_dict())))
    assert len({loss for loss, _ in losses}) == 1
    for _, state in losses[1:]:
        same(losses[0][1], state)


@pytest.mark.parametrize(("kind", "other"), [(Toy, Toy), (Named, Toy), (Toy, Named), (Named, Named)])
def test_every_parameter_is_in_one_group_with_its_own_options(kind, other):
    module = both(kind("momentum", lr=0.5), other("momentum", lr=0.25, hidden=3), project=True)
    groups = module.configure_optimizers().param_groups
    held = {id(parameter): group["lr"] for group in groups for parameter in group["params"]}
    assert len(held) == sum(len(group["params"]) for group in groups) == len(list(module.parameters()))
    for name, parameter in module.named_parameters():
        assert held[id(parameter)] == (0.25 if name.startswith("shared_model.") else 0.5)


def test_a_skipped_batch_trains_neither_model():
    class Skips(Toy):
        def training_step(self, batch, batch_idx):
            return None

    assert both(Skips(), Toy()).training_step(batch(), 0) is None
    with pytest.raises(ValueError, match="shared Skips returned NoneType and no loss"):
        both(Toy(), Skips()).training_step(batch(), 0)


def test_a_step_that_returns_a_dictionary_keeps_its_other_entries():
    class Dict(Toy):
        def training_step(self, batch, batch_idx):
            return {"loss": super().training_step(batch, batch_idx), "extra": 3}

    found = both(Dict("sgd"), Dict("sgd", hidden=3)).training_step(batch(), 0)
    assert found["extra"] == 3 and found["loss"].requires_grad


def test_both_models_move_and_statistics_too():
    module = both(NormNet(), NormNet(hidden=3))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    optimizer = module.configure_optimizers()
    module.training_step(batch(), 0).backward()
    optimizer.step()
    now = dict(module.state_dict())
    for prefix in (
        "net.1.running_mean",
        "net.3.weight",
        "shared_model.net.1.running_mean",
        "shared_model.net.3.weight",
    ):
        assert differs({prefix: before[prefix]}, now)
    assert shared_of(module).net[1].num_batches_tracked == 1


def test_wrong_use_is_refused():
    for own, shared in ((Manual(), Toy()), (Toy(), Manual())):
        with pytest.raises(ValueError, match="Manual optimizes manually"):
            both(own, shared)
    with pytest.raises(ValueError, match=r"Taken has an attribute `shared_model`"):
        both(Taken(), Toy())
    with pytest.raises(ValueError, match=r"Toy has no submodule `net.9`"):
        both(Toy(), Toy(), shared_head="net.9")


@pytest.mark.parametrize("frozen", ["own", "shared"])
def test_the_model_that_only_teaches_is_in_eval_mode_and_logs_nothing(frozen):
    class Logs(Toy):
        def log(self, *args, **kwargs):
            logged.append(self)

    modules, logged, seen = {"own": Logs(dropout=0.5), "shared": Logs(dropout=0.5)}, [], []
    module = both(modules["own"], modules["shared"])
    minimise(module, lambda *sides: seen.append(sides[:2]) or sides[0].loss + sides[1].loss, frozen)
    before = [part.training for part in module.modules()]
    total = module.training_step(batch(), 0)
    own, shared = seen[0]
    teacher, learner = (own, shared) if frozen == "own" else (shared, own)
    assert not teacher.logits.requires_grad and learner.logits.requires_grad and total.requires_grad
    assert before == [part.training for part in module.modules()] and all(before)
    net = (module if frozen == "own" else shared_of(module)).net.eval()
    torch.testing.assert_close(teacher.logits, net(batch()[0]))
    assert all(one is not (module if frozen == "own" else shared_of(module)) for one in logged)


def test_both_sides_of_a_pair_without_its_loss():
    module = both(Toy(), Toy("sgd", hidden=3)).eval()
    loss = vars(module)["pair_parts"].loss
    own, shared = sides_of(module, batch())
    torch.testing.assert_close(own.logits, module.net(batch()[0]))
    torch.testing.assert_close(shared.logits, shared_of(module).net(batch()[0]))
    assert vars(module)["pair_parts"].loss is loss
