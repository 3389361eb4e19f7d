"""Runs as Ray tasks: what is refused, and that they are what processes make, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fedlightning  # noqa: F401  before lightning

# isort: split
from fedlightning.cli import main
from fedlightning.config.input_errors import InputError
from fedlightning.experiments.methods import Method
from fedlightning.experiments.ray_runner import ray_options, refuse_ray_within
from fedlightning.parallel import ray as ray_cluster
from tests.experiments.tiny import HERE, small

RAY = ["--runner=ray"]
ROOT = Path(__file__).parents[2]
VARYING = {"seconds", "evaluation_seconds", "peak_memory_mb", "check"}  # `check` is a digest of the others


def test_what_is_refused(monkeypatch, capsys):
    assert ray_options("processes", None, None) is None
    with pytest.raises(InputError, match=r"--ray-cpus is about Ray.*add --runner ray"):
        ray_options("processes", None, 2)
    methods = [Method("a", [], {"trainer": {"engine": engine}}) for engine in ("processes", "ray")]
    refuse_ray_within(methods[0])
    with pytest.raises(InputError, match=r"a has `engine: ray`.*Leave --runner out"):
        refuse_ray_within(methods[1])
    monkeypatch.setattr(ray_cluster, "installed", lambda: False)
    for words in (["compare", "no.yaml"], ["sweep", "--config=no.yaml", "--grid=model.lr=1"]):
        assert main([*words, *RAY]) == 2
        assert "--runner ray needs Ray, which is not installed: pip install" in capsys.readouterr().err


@pytest.fixture
def own_ray() -> Iterator[None]:
    pytest.importorskip("ray")
    yield
    import ray

    ray.shutdown()


def content(out: Path) -> dict[str, Any]:
    """All files of the runs; of JSON files what does not tell of time."""
    found: dict[str, Any] = {}
    for path in sorted((out / "runs").rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            found[path.relative_to(out).as_posix()] = timeless(json.loads(data)) if path.suffix == ".json" else data
    return found


def timeless(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: timeless(value) for key, value in data.items() if key not in VARYING}
    return [timeless(value) for value in data] if isinstance(data, list) else data


@pytest.mark.slow
def test_the_files_are_those_of_processes(tmp_path, monkeypatch, own_ray):
    made = []
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # Ray's workers are programs of their own
    for runner in ([], RAY):
        folder = tmp_path / str(len(made))
        small(folder / "good.yaml", "GlobalCheckpoint")
        small(folder / "crash.yaml", model=f"{HERE}.Crash")
        monkeypatch.chdir(folder)  # relative paths mean the same in every run
        words = ["good.yaml", "crash.yaml", "--seeds=3,5", "--jobs=2", "--out=out", "--baselines=none", "--no-report"]
        assert main(["compare", *words, *runner]) == 1
        study = json.loads(Path("out/study.json").read_text())
        made.append((content(folder / "out"), {(r["run"], r["seed"]): (r["state"], r["error"]) for r in study["runs"]}))
    (files, states), (other_files, other_states) = made
    assert [name for name in files if not name.endswith("log.txt") and files[name] != other_files.get(name)] == []
    assert list(files) == list(other_files) and len(files) > 10
    assert states == other_states and states["good", 3] == ("done", None) and "boom" in states["crash", 5][1]
    assert main(["compare", *words, *RAY]) == 1  # all runs are there already: nothing is started
