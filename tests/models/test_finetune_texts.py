"""The example of fine-tuning on texts: a tiny encoder, or one that lies where the environment says."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.processes import script

pytest.importorskip("transformers")
pytest.importorskip("peft")
EXAMPLE = Path(__file__).resolve().parents[2] / "examples/finetune_texts.py"
MODEL, TEXTS = (os.environ.get(f"FEDLIGHTNING_TEST_{name}") for name in ("ENCODER", "TEXTS"))


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["--model", MODEL, "--texts", TEXTS]], ids=["tiny", "real"])
def test_adapters_learn_what_is_in_the_texts(words, tmp_path):
    if not all(words):
        pytest.skip(
            "set FEDLIGHTNING_TEST_ENCODER to a folder of transformers, FEDLIGHTNING_TEST_TEXTS to one of texts by class"
        )
    done = script(EXAMPLE, ["--out", str(tmp_path), *words], tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {name: float(score) for name, score in re.findall(r"^(\S.*?) +accuracy ([\d.]+)", done.stdout, re.MULTILINE)}
    assert rows.keys() == {"adapters", "adapters, own head", "FedSA-LoRA", "Local", "Central"}
    # a guess of the larger class: 0.69 of the mails, 0.87 of made-up texts
    assert min(rows["adapters"], rows["Central"]) > (0.69 if words else 0.9)
    assert (tmp_path / "report/report.html").exists()
