"""The examples run as their first lines say, and the author's guide shows the code that runs."""

from __future__ import annotations

import ast
import csv
import importlib.util
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from fedlightning.callbacks import FedAvg, FedProx
from fedlightning.study.centres import score_centres
from fedlightning.testing import CHECKS, check_algorithm
from fedlightning.testing.pairs import check_pair
from fedlightning.testing.toys import ToyModule
from tests.helpers import (
    Quadratic,
    Toy,
    federate,
    global_state,
    make_trainer,
    mostly_slow,
    quadratic_data,
    same,
    spied,
    toy_data,
)
from tests.processes import script

ROOT = Path(__file__).resolve().parents[1]
OWN = ROOT / "examples/own_algorithm.py"
TUTORIAL = ROOT / "examples/tutorials/11_write_an_algorithm.py"
GUIDE = ROOT / "docs/how-to/write_an_algorithm.md"


def run(name: str, out: Path, *words: str) -> str:
    """Run an example as a person would; what it printed."""
    done = script(ROOT / "examples" / name, ["--out", str(out / "runs"), *words], out, {"COLUMNS": "120"})
    assert done.returncode == 0, done.stderr
    return done.stdout


def imported(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)  # so that the class can be pickled
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def fedcm():
    return imported(OWN).FedCM


@pytest.fixture(scope="module")
def fedrs():
    return imported(ROOT / "examples/fedrs.py").FedRS


@pytest.mark.parametrize("check", mostly_slow(CHECKS, ("arguments", "identical_clients")))
def test_the_exercise_of_the_guide_is_solved(fedrs, check):
    skipped = {"one_client"} & {check}  # a class that the only client lacks is held back, too
    if not skipped:
        check_algorithm(fedrs(head="head"), only=[check])


def test_fedrs_scales_the_logits_of_absent_classes_alone(fedrs):
    logits, counts = torch.tensor([[1.0, -2.0, 4.0]]), torch.tensor([5, 0, 1])
    assert fedrs(alpha=0.5).restricted(logits, counts).tolist() == [[1.0, -1.0, 4.0]]
    assert torch.equal(fedrs(alpha=1.0).restricted(logits, counts), logits)
    x, y = torch.randn(12, 6, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 2  # no sample of class 2
    moved = []
    for algorithm in (FedAvg(), fedrs(alpha=0.0)):
        module, trainer = Toy(), make_trainer(None, [algorithm], max_rounds=1)
        trainer.fit(module, train_dataloaders={"a": DataLoader(TensorDataset(x, y), batch_size=4)})
        moved.append(not torch.equal(global_state(trainer)["net.3.bias"][2], module.net[3].bias[2]))
    assert moved == [True, False]


@pytest.mark.slow  # `make quickstart` is a step of its own
def test_quickstart(tmp_path):
    printed = run("quickstart.py", tmp_path, "--rounds", "1")
    methods = re.findall(r'^    "(\w+)": \[', (ROOT / "examples/quickstart.py").read_text(), re.MULTILINE)
    assert len(methods) >= 7
    for method in methods:
        assert f"│ {method} " in printed
    assert {path.name for path in (tmp_path / "runs/figures").iterdir()} == {"partition.png", "per_client.png"}
    assert (tmp_path / "runs/comparison.json").exists()
    assert (tmp_path / "runs/FedAvg/seed_1/checkpoints/global.ckpt").exists()


def test_three_lines(tmp_path):
    printed = run("three_lines.py", tmp_path, "--rounds", "2")
    assert re.search(r"latest +G +pooled +0\.\d+", printed)
    source = (ROOT / "examples/three_lines.py").read_text()
    before = source.partition('if __name__ == "__main__":')[0]
    assert "fedlightning" not in before.partition("# isort: split")[2], (
        "the project above the three lines is Lightning's own"
    )
    assert len(re.findall(r"^    (trainer = |trainer\.fit|trainer\.test)", source, re.MULTILINE)) == 3


@pytest.mark.slow
def test_many_clients(tmp_path):
    printed = run("many_clients.py", tmp_path, "--clients", "2000", "--rounds", "2")
    assert re.search(r"accuracy of the global model on 100 of 2000 clients: 0\.\d+", printed)


@pytest.mark.slow
def test_own_algorithm(tmp_path):
    printed = run("own_algorithm.py", tmp_path, "--rounds", "1", "--checks", "arguments", "copies")
    assert "FedCM passes 2 checks: arguments, copies" in printed
    assert "│ FedAvg " in printed and "│ FedCM " in printed


# -- the guide's algorithm -------------------------------------------------------------------------------------------


def test_fedcm_conforms(fedcm):
    assert check_algorithm(fedcm(), neutral=fedcm(alpha=1.0)) == list(CHECKS)


def test_fedcm_without_momentum_is_uniform_fedavg(fedcm):
    torch.manual_seed(0)
    module, data = ToyModule(full=True), toy_data()
    runs = [federate(module, data, [callback], max_rounds=3) for callback in (FedAvg("uniform"), fedcm(alpha=1.0))]
    same(*map(global_state, runs))


def test_fedcm_ends_nearer_to_the_pooled_minimiser_in_proportion_to_alpha(fedcm):
    a, b = [[1.0, 2.0, 0.5], [3.0, 0.4, 1.0]], [[1.0, -1.0, 2.0], [-2.0, 3.0, 0.5]]
    data, distances = quadratic_data(a, b), {}
    for alpha in (1.0, 0.5, 0.1):
        trained = federate(Quadratic(lr=0.05), data, [fedcm(alpha=alpha)], max_rounds=150, local_epochs=5)
        distances[alpha] = global_state(trained)["w"]
    a, b = (torch.tensor(rows, dtype=torch.float64) for rows in (a, b))
    minimiser = (a * b).sum(0) / a.sum(0)
    distances = {alpha: float((w - minimiser).norm()) for alpha, w in distances.items()}
    assert distances[1.0] > 0.02  # FedAvg's
    assert distances[0.5] == pytest.approx(0.5 * distances[1.0], rel=0.15)
    assert distances[0.1] == pytest.approx(0.1 * distances[1.0], rel=0.15)


def test_fedcm_by_hand(fedcm):
    """Three rounds of two of three clients; Delta is that of the round before."""
    a, b = [[1.0, 2.0], [3.0, 0.4], [0.5, 1.5]], [[1.0, -1.0], [-2.0, 3.0], [0.5, 2.0]]
    _, spy = spied(
        Quadratic(lr=0.1, size=2),
        quadratic_data(a, b),
        [fedcm(alpha=0.3)],
        max_rounds=3,
        local_steps=4,
        participation=2,
    )
    a, b = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    w, delta = torch.zeros(2).double(), torch.zeros(2).double()
    taking_part = [{int(update.client) for update in spy.updates if update.round == number} for number in range(3)]
    assert len(set(map(frozenset, taking_part))) > 1
    for number in range(3):
        models = []
        for k in sorted(taking_part[number]):
            y = w.clone()
            for _ in range(4):
                y = y - 0.1 * (0.3 * a[k] * (y - b[k]) + 0.7 * delta)
            models.append(y)
        delta = sum((w - y) / (4 * 0.1) for y in models) / 2
        w = sum(models) / 2
        torch.testing.assert_close(spy.rounds[number]["w"], w, atol=1e-10, rtol=0)
        torch.testing.assert_close(spy.states[number]["FedCM"]["delta"]["w"], delta, atol=1e-10, rtol=0)
    assert not any(record.state for record in spy.records[-1].values())


def test_fedcm_leaves_statistics_to_the_mean(fedcm):
    torch.manual_seed(0)
    trainer, spy = spied(ToyModule(full=True), toy_data(), [fedcm()], max_rounds=2)
    name = "body.1.running_var"
    sent = [update.state[name] for update in spy.of_round(1).values()]
    torch.testing.assert_close(global_state(trainer)[name], sum(sent) / len(sent), atol=1e-6, rtol=1e-6)
    assert name not in trainer.server.state["FedCM"]["delta"]


def test_the_order_of_fedcm_and_fedprox_says_nothing(fedcm):
    check_pair(fedcm(), FedProx(mu=0.3))


def test_fedcm_refuses_what_cannot_work(fedcm):
    with pytest.raises(ValueError, match=r"FedCM got alpha=0.*1 is FedAvg"):
        fedcm(alpha=0)
    with pytest.warns(UserWarning, match="this Adam has a momentum or scale of its own"):
        federate(Toy("adam"), toy_data(), [fedcm()], max_rounds=1)


# -- the guide -------------------------------------------------------------------------------------------------------


def test_the_tutorial_shows_the_code_that_runs(fedcm):
    shown = re.findall(
        r"literalinclude:: \.\./\.\./examples/own_algorithm\.py\n +:pyobject: FedCM\.?(\w*)", TUTORIAL.read_text()
    )
    own = {name for name, value in vars(fedcm).items() if callable(value) and not name.startswith("__")}
    assert {*shown} >= own - {"check"} | {""}


def test_the_algorithm_is_short():
    source = OWN.read_text()
    (cls,) = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    docstring = cls.body[0]
    lines = source.splitlines()[cls.lineno - 1 : cls.end_lineno]
    inside = range(docstring.lineno - cls.lineno, docstring.end_lineno - cls.lineno + 1)
    code = [line for number, line in enumerate(lines) if number not in inside and line.strip()]
    assert len(code) < 40
    assert f"{len(code)} lines of code" in TUTORIAL.read_text()


def test_the_guide_s_files_exist():
    text = GUIDE.read_text()
    table = text.partition("| your method | look at |")[2].partition("\n\n")[0]
    for file in re.findall(r"`(\w+\.py)`", table):
        assert (ROOT / "callbacks" / file).exists(), file


# -- the theory of clusters ------------------------------------------------------------------------------------------


def test_cluster_theory(tmp_path):
    printed = run("cluster_theory.py", tmp_path)
    found = {line[:28].strip(): line[28:].split() for line in printed.splitlines()[1:5]}
    assert found["in the cluster, as printed"] == ["0.132"] and found["alone"][0] == "0.200"
    assert found["in the cluster"][0] == "0.454" and "the cluster does not help" in printed
    for name in ("alone", "in the cluster", "one model for both clusters"):
        formula, simulated = map(float, found[name])
        assert abs(formula - simulated) < 0.02 * formula
    assert (tmp_path / "runs/theory.png").exists()


def test_the_error_of_a_cluster_is_its_simulation_for_unequal_clients():
    spec = importlib.util.spec_from_file_location("cluster_theory", ROOT / "examples/cluster_theory.py")
    theory = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theory)
    sizes, others, sigma, tau, apart = [3, 10, 1, 6], [4, 8], 1.3, 0.6, 0.9
    for i in range(len(sizes)):
        exact = theory.cluster_error(sizes, i, sigma, tau)
        assert abs(theory.simulated_error(sizes, [], i, sigma, tau, apart) - exact) < 0.02 * exact
        assert theory.printed_error(sizes, i, sigma, tau) < 0.97 * exact
        exact = theory.federated_error(sizes, others, i, sigma, tau, apart)
        assert abs(theory.simulated_error(sizes, others, i, sigma, tau, apart) - exact) < 0.02 * exact
    for tau in (0.3, 0.44, 0.46, 0.8):  # the border is sigma / sqrt(n_0) = 0.447, whatever the size
        for count in (2, 8, 50):
            assert (theory.cluster_error([5] * count, 0, 1.0, tau) < 1 / 5) == (tau**2 < 1 / 5)


@pytest.fixture(scope="module")
def table1():
    spec = importlib.util.spec_from_file_location("pi_fl_table1", ROOT / "examples/pi_fl_table1.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_gap_is_down_a_column(table1):
    assert table1.Found(np.array([[0.9, 0.3], [0.5, 0.8]])).gaps == pytest.approx([0.4, 0.5])
    assert table1.Found(np.array([[0.9, 0, 0], [0.5, 1, 0], [0.3, 0, 1]])).gaps == pytest.approx([0.5, 1, 1])


@pytest.mark.slow
def test_table1_of_pi_fl(table1, tmp_path, monkeypatch, capsys):
    """On turned digits: the numbers in the file are those in print, and FedAvg's are of models that one group trained."""
    files = [f"--config={ROOT / 'configs' / name}" for name in ("clusters/digits.yaml", "algorithms/pifl.yaml")]
    few = [
        "--data.num_clients=4",
        "--data.source.max_train=300",
        "--trainer.max_rounds=2",
        "--trainer.evaluation.every=2",
    ]
    slots = ["--trainer.default_root_dir", str(tmp_path / "own"), "--trainer.enable_progress_bar=false"]
    monkeypatch.setattr("sys.argv", ["pi_fl_table1.py", *files, "--out", str(tmp_path), *few])
    table1.main()
    printed = capsys.readouterr().out
    with (tmp_path / "table1.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * 4
    gaps = {}
    for name in ("PI-FL", "FedSoft", table1.REFERENCE):
        table = np.array([float(row["accuracy"]) for row in rows if row["method"] == name]).reshape(2, 2)
        gaps[name] = table1.Found(table).gaps.mean()
    for name in ("PI-FL", "FedSoft"):
        assert f"gap {100 * gaps[name]:.1f}, {gaps[name] / gaps[table1.REFERENCE]:.2f} of that" in printed
    for method, settings in table1.CANDIDATES.items():
        scores = [float(found) for found in re.findall(rf"{method}, .*: validation ([\d.]+)", printed)]
        best = list(settings)[int(np.argmax(scores))]
        assert len(scores) == len(settings) and f"{method} ({best})" in printed
    words = [
        *files,
        f"--config={ROOT / 'configs/algorithms/fedavg.yaml'}",
        *few,
        *slots,
        "--trainer.held_out=['0', '1']",
    ]
    trainer, data = table1.fit(words)
    (value,) = (
        row["accuracy"] for row in rows if row["method"] == table1.REFERENCE and row["group"] + row["centre"] == "11"
    )
    assert float(value) == pytest.approx(score_centres(trainer, data)[1]["value"])
    assert gaps[table1.REFERENCE] > 0
