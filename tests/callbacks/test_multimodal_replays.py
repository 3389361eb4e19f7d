"""Whole federations of sheet B 4.1 to 4.4 in plain torch, written from the sheet and compared entry by entry in float64."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlightning.callbacks import FedCovid, FedMultimodal, Harmony, pFedKnow
from fedlightning.datamodules import ModalityDataset
from fedlightning.datamodules.indexed import IndexedFederatedDataModule, Split
from fedlightning.models import MLP, Classifier, MultimodalNet
from tests.helpers import Toy, ToyData, close, spied

SIZES, CLASSES, LR = {"A": 4, "D": 3, "R": 2}, 3, 0.2
OWNED = {"0": "A", "1": "AD", "2": "AD", "3": "ADR", "4": "AD"}
COUNTS = {"0": 11, "1": 7, "2": 16, "3": 5, "4": 9}
Samples = tuple[dict[str, Tensor], Tensor]


class Senses(IndexedFederatedDataModule):
    """Clients of unequal sizes with some of the modalities, in float64; one batch holds all samples of a client."""

    def __init__(self, samples: dict[str, Samples]) -> None:
        super().__init__(batch_size=64)
        self.samples = samples

    def build(self):
        y = torch.cat([found[1] for found in self.samples.values()])
        ends = torch.tensor([len(found[1]) for found in self.samples.values()]).cumsum(0).tolist()
        held = [
            torch.arange(end - len(found[1]), end).numpy()
            for end, found in zip(ends, self.samples.values(), strict=True)
        ]
        inputs, present = {}, {}
        for name, size in SIZES.items():
            parts = [x.get(name, torch.zeros(len(y), size, dtype=torch.float64)) for x, y in self.samples.values()]
            inputs[name] = torch.cat(parts)
            present[name] = torch.cat([torch.full((len(y),), name in x) for x, y in self.samples.values()])
        data = ModalityDataset(inputs, y, present)
        return list(self.samples), {split: Split(data, held, y.numpy()) for split in ("train", "val", "test")}


def senses(owned=OWNED, seed: int = 0) -> dict[str, Samples]:
    """Return samples of clients that differ in their inputs."""
    draw, found = torch.Generator().manual_seed(seed), {}
    for client, names in owned.items():
        y = torch.randint(CLASSES, (COUNTS[client],), generator=draw)
        x = {}
        for name in names:
            centres = torch.randn(CLASSES, SIZES[name], generator=draw, dtype=torch.float64)
            x[name] = centres[y] + torch.randn(len(y), SIZES[name], generator=draw, dtype=torch.float64)
        found[client] = x, y
    return found


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(size, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.linear(x)))


def network(norm: bool = False, **options) -> Classifier:
    torch.manual_seed(3)
    encoders = {name: Norm(size) if norm else MLP(size, [], 8) for name, size in SIZES.items()}
    net = MultimodalNet(encoders, CLASSES, width=8, **options)
    return Classifier(net, CLASSES, lr=LR).double()


# -- plain torch -----------------------------------------------------------------------------------------------------


def descend(parameters: Iterable[nn.Parameter], loss: Callable[[], Tensor], steps: int, lr: float = LR) -> None:
    optimizer = torch.optim.SGD(list(parameters), lr)
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


def fused(net: MultimodalNet, x: dict[str, Tensor]) -> Tensor:
    """Fusion by concatenation, with zeros in place of what is missing."""
    rows = len(next(iter(x.values())))
    parts = [net.encoders[n](x[n]) if n in x else torch.zeros(rows, 8, dtype=torch.float64) for n in SIZES]
    return net.classifier(torch.relu(net.fusion(torch.cat(parts, 1))))


def mean(states: list[dict[str, Tensor]], weights: list[float]) -> dict[str, Tensor]:
    total = sum(weights)
    return {
        key: sum(w / total * state[key] for w, state in zip(weights, states, strict=True))
        if like.is_floating_point()
        else like
        for key, like in states[0].items()
    }


def entries(module: nn.Module, keep: Callable[[str], bool] = lambda key: True) -> dict[str, Tensor]:
    return {key: value.detach().clone() for key, value in module.state_dict().items() if keep(key)}


def floats(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if value.is_floating_point()}


# -- FedMultimodal ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("holders_only", "norm"), [(True, False), (True, True), (False, True)])
def test_fedmultimodal(holders_only, norm):
    samples, start = senses(), network(norm)
    trainer, _ = spied(start, Senses(samples), [FedMultimodal(holders_only=holders_only)], max_rounds=3, local_epochs=2)
    w = entries(start)
    for _ in range(3):
        sent = {}
        for client, (x, y) in samples.items():
            local = copy.deepcopy(start)
            local.load_state_dict(w)
            local.train()
            descend(local.parameters(), lambda m=local, x=x, y=y: F.cross_entropy(fused(m.net, x), y), 2)
            sent[client] = entries(local)
        new = {}
        for key in w:
            name = key.split(".")[2] if key.startswith("net.encoders.") else None
            who = [c for c in samples if name is None or not holders_only or name in OWNED[c]]
            new |= mean([{key: sent[c][key]} for c in who], [COUNTS[c] for c in who])
        w = new
    close(floats(w), floats(trainer.server.model), atol=1e-10, rtol=1e-10)


# -- Harmony ---------------------------------------------------------------------------------------------------------


def best_clusters(rows: list[list[float]], count: int) -> set[frozenset[int]]:
    """Return the partition with the least sum of squared distances, by trying all."""
    points, best = torch.tensor(rows, dtype=torch.float64), None
    for labels in itertools.product(range(count), repeat=len(rows)):
        if len(set(labels)) < min(count, len(rows)):
            continue
        held = [[i for i, label in enumerate(labels) if label == g] for g in set(labels)]
        cost = sum(float((points[g] - points[g].mean(0)).square().sum()) for g in held)
        if best is None or cost < best[0] - 1e-15:
            best = cost, {frozenset(g) for g in held}
    return best[1]


@pytest.mark.parametrize(
    ("groups", "weighting", "norm"), [(2, "uniform", False), (1, "uniform", True), (2, "samples", True)]
)
def test_harmony(groups, weighting, norm):
    samples, start = senses(), network(norm, unimodal_heads=True)
    trainer, spy = spied(
        start,
        Senses(samples),
        [Harmony(stage1=2, num_clusters=groups, weighting=weighting)],
        max_rounds=5,
        local_epochs=2,
    )
    weight = {c: 1.0 if weighting == "uniform" else COUNTS[c] for c in samples}

    # stage 1: a federation for each modality, of encoder and classifier
    nets = {n: nn.ModuleList([start.net.encoders[n], start.net.heads[n]]) for n in SIZES}
    nets = copy.deepcopy(nets)
    for _ in range(2):
        for name, net in nets.items():
            who, sent = [c for c in samples if name in OWNED[c]], []
            for client in who:
                local, (x, y) = copy.deepcopy(net), samples[client]
                local.train()
                descend(local.parameters(), lambda m=local, x=x[name], y=y: F.cross_entropy(m[1](m[0](x)), y), 2)
                sent.append(entries(local))
            net.load_state_dict(mean(sent, [weight[c] for c in who]))

    # stage 2: own encoders, a fusion for each cluster
    several = [c for c in samples if len(OWNED[c]) > 1]
    own = {}
    for client in several:
        own[client] = copy.deepcopy(start)
        for name in OWNED[client]:
            own[client].net.encoders[name].load_state_dict(nets[name][0].state_dict())
    first = {c: copy.deepcopy(m) for c, m in own.items()}
    shared = lambda key: "fusion" in key or "classifier" in key  # noqa: E731
    together = {c: [c] for c in several}
    for round in range(2, 5):
        d = {}
        for client in several:
            local, (x, y) = own[client], samples[client]
            local.train()
            descend(local.parameters(), lambda m=local, x=x, y=y: F.cross_entropy(fused(m.net, x), y), 2)
            d[client] = []
            for name in OWNED[client]:
                now, then = (
                    torch.cat([p.detach().flatten() for p in m.net.encoders[name].parameters()])
                    for m in (local, first[client])
                )
                d[client].append(float(1 - now @ then / (now.norm() * then.norm())))
        fusions = {c: entries(own[c], shared) for c in several}
        for names in {OWNED[c] for c in several}:
            who = [c for c in several if OWNED[c] == names]
            columns = [max(d[c][j] for c in who) for j in range(len(names))]
            rows = [[value / top for value, top in zip(d[c], columns, strict=True)] for c in who]
            for cluster in best_clusters(rows, groups):
                members = [who[i] for i in sorted(cluster)]
                new = mean([fusions[c] for c in members], [weight[c] for c in members])
                for client in members:
                    own[client].load_state_dict(new, strict=False)
                    together[client] = members
        sent = spy.of_round(round)
        assert set(sent) == set(several)
    for name, net in nets.items():
        close(
            {
                f"net.{part}.{name}.{k}": v
                for part, m in zip(("encoders", "heads"), net, strict=True)
                for k, v in floats(entries(m)).items()
            },
            {k: v for k, v in floats(trainer.server.model).items() if f".{name}." in k},
            atol=1e-10,
            rtol=1e-10,
        )
    for client in several:
        module = trainer.module(client)
        keep = lambda key, c=client: shared(key) or any(f"encoders.{n}." in key for n in OWNED[c])  # noqa: E731
        close(floats(entries(own[client], keep)), floats(entries(module, keep)), atol=1e-9, rtol=1e-9)
    assert (max(map(len, together.values())) > 1) and (groups == 1 or len({tuple(v) for v in together.values()}) > 2)


# -- FedCovid --------------------------------------------------------------------------------------------------------


def hospitals(sizes: dict[str, tuple[int, int]], inputs: int = 6) -> dict[str, tuple[Tensor, Tensor]]:
    """Return binary samples: by client, how many negatives and positives."""
    draw, found = torch.Generator().manual_seed(1), {}
    for client, (negatives, positives) in sizes.items():
        y = torch.tensor([0] * negatives + [1] * positives)
        x = torch.randn(len(y), inputs, generator=draw, dtype=torch.float64) + 0.5 * y[:, None]
        found[client] = x, y
    return found


def plain_data(samples: dict[str, tuple[Tensor, Tensor]]) -> ToyData:
    return ToyData({c: dict.fromkeys(("train", "val", "test"), pair) for c, pair in samples.items()}, batch_size=64)


def pairs_loss(z: Tensor, y: Tensor, margin: float, mining: str) -> Tensor:
    """Triplets of a batch in which every anchor has exactly one sample of its class, at most."""
    unit = z / z.norm(dim=1, keepdim=True)
    d, terms = 1 - unit @ unit.T, []
    for a in range(len(y)):
        alike = [i for i in range(len(y)) if i != a and y[i] == y[a]]
        others = [i for i in range(len(y)) if y[i] != y[a]]
        if not alike or not others:
            continue
        assert len(alike) == 1
        p = alike[0]
        if mining == "random":
            assert len(others) == 1
            n = others[0]
        else:
            fit = [i for i in others if d[a, p] < d[a, i] < d[a, p] + margin]
            if not fit:
                continue
            n = min(fit, key=lambda i: float(d[a, i].detach()))
        terms.append((d[a, p] - d[a, n] + margin).clamp(min=0))
    return torch.stack(terms).mean() if terms else z.sum() * 0


@pytest.mark.parametrize("mining", ["random", "semi-hard"])
def test_fedcovid(mining):
    """Sizes at which one positive and one negative can be drawn in one way; noise 0, so that nothing is random."""
    sizes = (
        {"0": (1, 2), "1": (2, 0), "2": (1, 0), "3": (1, 2)}
        if mining == "random"
        else {"0": (2, 2), "1": (2, 1), "2": (2, 2)}
    )
    samples = hospitals(sizes)
    torch.manual_seed(0)
    start = Toy(lr=LR).double()
    method = FedCovid(
        lam_c=0.7, lam_m=0.6, lam_w=3.0, noise=0.0, copies=3, margin=0.9, mining=mining, warmup=1, large=2, small_work=0.5,
        small_lr=0.25,
    )  # fmt: skip
    trainer, spy = spied(start, plain_data(samples), [method], max_rounds=3, local_epochs=4)
    large = sorted(samples, key=lambda c: (-len(samples[c][1]), int(c)))[:2]
    w, count = entries(start), sum(p.numel() for p in start.parameters())
    for round in range(3):
        who = [c for c in samples if c in large or round >= 1]
        assert set(spy.of_round(round)) == set(who)
        sent = []
        for client in who:
            local, (x, y) = copy.deepcopy(start), samples[client]
            local.load_state_dict(w)
            body, head = local.net[:-1], local.net[-1]

            def loss(local=local, w=w, x=x, y=y, body=body, head=head):
                z = body(x)
                total = F.cross_entropy(head(z), y, reduction="sum") / len(y)
                if bool((y == 1).any()):
                    copies = z[y == 1].repeat(3, 1)
                    total = total + 0.7 * F.cross_entropy(head(copies), torch.ones(len(copies), dtype=torch.int64))
                total = total + 0.6 * pairs_loss(z, y, 0.9, mining)
                moved = sum((p - w[k]).square().sum() for k, p in local.named_parameters())
                return total + 3.0 / count * moved

            small = client not in large
            descend(local.parameters(), loss, 2 if small else 4, LR * 0.25 if small else LR)
            sent.append(entries(local))
        w = mean(sent, [math.log(1 + len(samples[c][1])) for c in who])
    close(w, trainer.server.model, atol=1e-9, rtol=1e-9)


# -- pFedKnow --------------------------------------------------------------------------------------------------------


class Guided(Toy):
    """A toy with a frozen teacher beside it."""

    def __init__(self) -> None:
        super().__init__(lr=LR)
        self.teacher = nn.Linear(6, CLASSES).requires_grad_(False)


def smallest_gone(state: dict[str, Tensor], share: float) -> dict[str, Tensor]:
    """Return 0/1 for every entry: the smallest weights of each weight tensor are gone."""
    masks = {}
    for key, value in state.items():
        mask = torch.ones(value.numel(), dtype=value.dtype)
        if value.ndim > 1:
            mask[value.flatten().abs().argsort()[: round(share * value.numel())]] = 0
        masks[key] = mask.view_as(value)
    return masks


@pytest.mark.parametrize("guided", [False, True])
def test_pfedknow(guided):
    draw = torch.Generator().manual_seed(5)
    samples = {}
    for client, count in {"0": 12, "1": 9, "2": 14, "3": 6}.items():
        x = torch.randn(count, 6, generator=draw, dtype=torch.float64)
        samples[client] = x, torch.randint(CLASSES, (count,), generator=draw)
    torch.manual_seed(2)
    start = Guided().double()
    prune, threshold = [0.9, 0.25, 0.5, 0.0], 0.5  # the share of "0", the server, is not used
    method = pFedKnow(
        server="0", prune=prune, threshold=threshold, head="net.3",
        **({"guide": "teacher", "lam": 0.8} if guided else {}),
    )  # fmt: skip
    trainer, _ = spied(start, plain_data(samples), [method], max_rounds=3, local_epochs=2)

    def serve(w: dict[str, Tensor]) -> dict[str, Tensor]:
        local, (x, y) = copy.deepcopy(start), samples["0"]
        local.load_state_dict(w)

        def loss() -> Tensor:
            logits = local.net(x)
            found = F.cross_entropy(logits, y)
            if guided:
                p = start.teacher(x).softmax(1)
                found = found + 0.8 * (p * (p.log() - logits.log_softmax(1))).sum(1).mean()
            return found

        descend(local.net.parameters(), loss, 2)
        return entries(local)

    w, used = serve(entries(start)), []
    for _ in range(3):
        sums = {k: torch.zeros_like(v) for k, v in w.items()}
        weights = {k: torch.zeros_like(v) for k, v in w.items()}
        for client, share in zip("123", prune[1:], strict=True):
            x, _ = samples[client]
            masks = smallest_gone({k: v for k, v in w.items() if k.startswith("net.")}, share)
            local = copy.deepcopy(start)
            local.load_state_dict(w | {k: w[k] * m for k, m in masks.items()})
            teacher = copy.deepcopy(local)
            sure, label = teacher.net(x).softmax(1).detach().max(1)
            used.append(float((sure >= threshold).double().mean()))
            for _ in range(2):
                local.zero_grad()
                terms = F.cross_entropy(local.net(x), label, reduction="none") * (sure >= threshold)
                (terms.sum() / len(x)).backward()
                with torch.no_grad():
                    for key, p in local.net.named_parameters(prefix="net"):
                        p -= LR * p.grad * masks[key]
            for key, mask in masks.items():
                sums[key] += len(x) * mask * local.state_dict()[key]
                weights[key] += len(x) * mask
        w = serve({k: torch.where(weights[k] > 0, sums[k] / weights[k].clamp(min=1), w[k]) for k in w})
    assert 0.05 < sum(used) / len(used) < 0.95
    close(
        {k: v for k, v in w.items() if k.startswith("net.")},
        {k: v for k, v in trainer.server.model.items() if k.startswith("net.")},
        atol=1e-9,
        rtol=1e-9,
    )
