"""Every method over a real SuperLink, with TLS and keys, and two SuperNodes: `make test-flower-catalogue`.

It takes about an hour, so it runs only if `FEDLIGHTNING_CATALOGUE` names a folder. What is found there is not done again.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is in an environment of its own: make test-flower-catalogue")

from tests.conformance.case import collect
from tests.sites.flower.catalogue import EQUAL, LONGEST
from tests.sites.helpers import REFUSED

FOLDER = os.environ.get("FEDLIGHTNING_CATALOGUE")
SERVERS = int(os.environ.get("FEDLIGHTNING_CATALOGUE_SERVERS", "4"))
CASES = collect("CASES")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(FOLDER is None, reason="an hour: make test-flower-catalogue"),
]


@pytest.fixture(scope="module")
def results(request):
    """Return what waits for the result of a method. Servers work in the background, on all methods that are asked for."""
    folder = Path(FOLDER or "").resolve()
    for name in ("results", "begun", "servers"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    names = [item.callspec.params["name"] for item in request.session.items if "results" in item.fixturenames]
    (folder / "names.json").write_text(json.dumps(names))
    for path in (folder / "begun").iterdir():
        if not (folder / "results" / f"{path.name}.json").exists():
            path.unlink()
    shutil.rmtree(folder / "servers", ignore_errors=True)
    missing = [name for name in names if not (folder / "results" / f"{name}.json").exists()]
    words = [sys.executable, "-m", "tests.sites.flower.catalogue", str(folder), str(min(SERVERS, len(missing)))]
    with (folder / "out").open("ab") as out:
        started = subprocess.Popen(words, cwd=Path(__file__).parents[3], stdout=out, stderr=out)

    def wait(name: str) -> dict[str, str]:
        path, ends = folder / "results" / f"{name}.json", time.monotonic() + 2 * LONGEST
        while not path.exists():
            if started.poll() is not None and not path.exists():
                pytest.fail((folder / "out").read_text()[-3000:])
            assert time.monotonic() < ends
            time.sleep(0.5)
        return json.loads(path.read_text())

    yield wait
    started.kill()  # all that it has started ends with it
    started.wait()


@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_or_a_sentence(results, name):
    """Models, the server's state, rows, files and traffic are those of one process; nothing is unpickled on the way."""
    found = results(name)
    if "pip install 'peft" in found.get("why", ""):
        pytest.skip("peft is not in this environment")
    if name in REFUSED:
        assert found["what"] == "refused" and REFUSED[name] in found["why"]
    else:
        assert found["what"] == EQUAL, found["why"]
