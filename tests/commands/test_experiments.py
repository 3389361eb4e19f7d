"""``compare``, ``sweep`` and ``report`` as their users meet them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedlightning.cli import main
from fedlightning.commands.compare import default_out
from fedlightning.study.finished_runs import load_study
from tests.experiments.tiny import small
from tests.study.folders import write_study

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", ["compare", "sweep", "report"])
def test_help(command, capsys):
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: fedlightning {command}")
    assert f"\n  fedlightning {command} " in shown  # an example
    assert max(map(len, shown.splitlines())) <= 120


def test_examples_in_the_help_name_files_that_are_there(capsys):
    for command in ("compare", "sweep"):
        main([command, "--help"])
        words = capsys.readouterr().out.split()
        files = [word for word in words if word.startswith("configs/") and word.endswith(".yaml")]
        assert files
        for file in files:
            assert list(ROOT.glob(file)), file


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["compare"], "required: CONFIG. See fedlightning compare --help."),
        (["compare", "a.yaml", "--sed=3"], "there is no option '--sed=3'. Did you mean --seeds"),
        (
            ["compare", "a.yaml", "--seeds", "2", "b.yaml", "--jobs=0"],
            "--jobs is 0: give the number of runs to make at a",
        ),
        (["compare", "a.yaml", "--seeds=x"], "--seeds is 'x': give a number of seeds"),
        (["compare", "a.yaml", "--jobs=0"], "--jobs is 0: give the number of runs to make at a time"),
        (["compare", "a.yaml", "--jobs=two"], "invalid int value: 'two'"),
        (["compare", "a.yaml", "--redo=some"], "invalid choice: 'some'"),
        (["sweep", "--config=a.yaml", "--gird=x"], "there is no option '--gird=x'. Did you mean --grid"),
        (["report"], "required: RUN"),
        (["report", "nowhere"], "nowhere has no summary.json, so it is not a finished run"),
    ],
)
def test_what_cannot_work_is_said_in_a_sentence(words, sentence, capsys):
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"fedlightning {words[0]}: ")
    assert sentence in said
    assert said.count("\n") == 1
    assert not list(Path().iterdir())


def test_a_report_of_single_runs_needs_a_place(capsys):
    run = Path("runs/x/version_0")
    run.mkdir(parents=True)
    (run / "summary.json").write_text(json.dumps({"results": [], "seed": 0, "num_samples": {}}))
    assert main(["report", str(run)]) == 2
    assert "--out is missing" in capsys.readouterr().err


@pytest.mark.slow
def test_a_folder_of_runs_is_a_study_and_the_place_of_its_report(tmp_path, capsys):
    """As `examples/quickstart.py` leaves it: a folder for each method."""
    home = Path("runs/quickstart")
    write_study(home, {"fedavg": ["FedAvg"], "local": ["Local"]}, seeds=[0])
    assert main(["report", str(home)]) == 0
    assert (home / "report.html").exists()
    assert [run.name for run in load_study([home])] == ["fedavg", "local"]
    assert [run.name for run in load_study([home / "local"])] == ["local"]


def test_the_folder_of_a_compare_follows_from_its_methods():
    assert default_out(["fedavg", "a b"]) == Path("runs/compare_fedavg_a-b")
    assert len(default_out(["name" * 9] * 9).name) <= 80


def test_completion(capsys):
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    for line, expected in (
        ("compare --bas", "--baselines"),
        ("compare --trainer.max_r", "--trainer.max_rounds"),
        ("sweep --search-", "--search-seed"),
        ("report --met", "--metric"),
    ):
        words = f"fedlightning {line}".split()
        probe = f'COMP_WORDS=({" ".join(words)}); COMP_CWORD={len(words) - 1}; _fedlightning; echo "${{COMPREPLY[@]}}"'
        done = subprocess.run(["bash", "-c", f"{script}\n{probe}"], capture_output=True, text=True)
        assert done.stdout.strip() == expected, done.stderr


def test_the_process_that_watches_is_small():
    code = "import sys, fedlightning.cli, fedlightning.commands.compare, fedlightning.commands.sweep\n"
    code += "print(sorted({'torch', 'lightning', 'numpy', 'scipy', 'sklearn'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def held_out_once(folder, capsys, *words):
    assert main(["compare", *words, f"--out={folder}", "--leave-one-site-out", "--no-report"]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_each_site_is_held_out_once_and_finished_runs_are_kept(tmp_path, capsys):
    words = [small(tmp_path / "a.yaml", "FedAvg"), "--seeds=1", "--baselines=Local"]
    assert main(["compare", *words, "--out=out", "--no-report"]) == 0
    shown = held_out_once("out", capsys, *words)
    assert "2 runs, and 3 without one of 3 sites, 2 of them there already" in shown
    assert "local is not trained without a site: it trains each client alone" in shown
    runs = load_study(["out"])
    assert [(run.name, run.site) for run in runs if run.site] == [("a", "0"), ("a", "1"), ("a", "2")]
    assert all((run.path / "test_samples.npz").exists() for run in runs)
    assert "5 of them there already" in held_out_once("out", capsys, *words)
    assert main(["report", "out"]) == 0
    assert "external" in json.loads(Path("out/comparison.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--trainer.held_out=1", "--leave-one-site-out"], "holds each site out once, but a sets trainer.held_out"),
        (
            ["--data.partitioner.num_clients=2", "--leave-one-site-out"],
            "a has 2 sites; it takes 3 or more",
        ),
        (["--subgroup=sex"], "--subgroup is of the report of --leave-one-site-out"),
        (["--subgroup=sex", "--leave-one-site-out"], "The samples of DigitsDataModule have no columns such as 'sex'"),
    ],
)
def test_what_cannot_be_left_out_is_said(tmp_path, words, sentence, capsys):
    assert main(["compare", small(tmp_path / "a.yaml"), "--seeds=1", "--baselines=none", *words]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_runs_and_the_report_come_from_a_warm_server_and_the_watcher_stays_small(tmp_path):
    script = tmp_path / "watch.py"
    script.write_text(
        "import sys\n"
        "from fedlightning.cli import main\n"
        "from fedlightning.experiments.children import call\n"
        "if __name__ == '__main__':\n"
        f"    code = main(['compare', {small(tmp_path / 'a.yaml')!r}, '--seeds=2', '--out=out', '--baselines=none'])\n"
        "    heavy = {'torch', 'lightning', 'scipy', 'sklearn', 'matplotlib'} & set(sys.modules)\n"
        "    from tests.experiments import tiny\n"  # imports all of them
        "    print('found', code, sorted(heavy), call(tiny.surroundings))\n"
    )
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env={**os.environ, **path})
    shown, _, found = done.stdout.partition("found ")
    server = {"imported": True, "frozen": True, "threads of the server": 1, "cuda": False}
    assert found == f"0 [] {server}\n", done.stderr
    assert "accuracy on test data, deployed models" in shown
    assert "Report: out/report.html" in shown
    assert (tmp_path / "out/report.html").exists()


def processes_in(folder: Path) -> list[int]:
    """Processes that have a file under ``folder`` open (Linux)."""
    found = []
    for path in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if str(folder) in os.readlink(path):
                found.append(int(path.parts[2]))
        except OSError:
            continue
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_runs_end_with_the_process_that_watches_them(tmp_path, number, usual_signals):
    file = small(tmp_path / "a.yaml", max_rounds=5000)
    words = [sys.executable, "-m", "fedlightning.cli", "compare", file, "--seeds=2", "--jobs=2", "--out=out"]
    process = subprocess.Popen([*words, "--baselines=none"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    logs = [tmp_path / f"out/runs/a/seed_{seed}/metrics.csv" for seed in (0, 1)]
    until = time.monotonic() + 600
    while not all(log.exists() for log in logs) and time.monotonic() < until:
        time.sleep(0.1)
    assert len(set(processes_in(tmp_path / "out/runs"))) >= 2
    process.send_signal(number)
    shown, _ = process.communicate(timeout=600)
    while processes_in(tmp_path / "out/runs") and time.monotonic() < until:
        time.sleep(0.1)
    assert processes_in(tmp_path / "out/runs") == []
    states = [run["state"] for run in json.loads((tmp_path / "out/study.json").read_text())["runs"]]
    assert states == ["pending", "pending"]
    if number != signal.SIGKILL:
        assert process.returncode == 130
        assert "The same command goes on from here" in shown
