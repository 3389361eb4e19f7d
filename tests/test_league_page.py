"""The page of the league is what its rows say."""

from __future__ import annotations

from fedlightning.commands.configs import FOLDER
from fedlightning.commands.league import LEAGUE
from fedlightning.experiments.contest import read_league, write_row
from tests.experiments.tiny_league import league, row
from tools.league_page import PAGE, ROWS, page


def test_the_page_is_current():
    assert PAGE.read_text() == page(read_league(LEAGUE, FOLDER), ROWS), "Write it again: python -m tools.league_page"


def test_a_page_of_rows_made_by_hand(tmp_path):
    found = read_league(league(tmp_path, seeds=[0, 1, 2]), FOLDER)
    text = page(found, tmp_path)
    assert "| tiny | tiny digits | 0 of 2 | all |" in text and "## tiny" not in text

    def write(name, *given, **more):
        setting = found.setting(found.tasks["tiny"], found.methods[name])
        write_row(tmp_path / "tiny.json", {**row(name, *given, **more), "setting": setting})

    write("FedAvg", [0.7, 0.8, 0.75])
    assert "| tiny | tiny digits | 1 of 2 | FedProx |" in page(found, tmp_path)
    write("FedProx", [0.8, 0.9, 0.85], mb=2.0)
    text = page(found, tmp_path)
    assert (
        "| FedProx | a global model | 0.850 ± 0.050 | 0.850 | **+0.100** [+0.100, +0.100], p < 0.001 | 2.00 | - |"
        in text
    )
    assert "| FedProx | 2 | 0.850 | 0.100 | +0.100 | `lr` 0.1 |" in text and "Older rows" not in text
    assert "The longest trial took 2 s" in text
    write("FedProx", [0.8, None, 0.85])
    assert "| FedProx | a global model | diverged in 1 of 3 | - | - | 1.00 | - |" in page(found, tmp_path)
    write_row(tmp_path / "tiny.json", row("FedProx", [0.8, 0.9, 0.85]))
    text = page(found, tmp_path)
    assert "| FedProx | a global model |" not in text and "| tiny | tiny digits | 1 of 2 | FedProx |" in text
    assert "*Older rows, not converged.* They were made with another setting (2 rounds" in text
