"""The README's predictor of twenty lines, taken from the README and run by the commands that stand below it."""

import re
import shlex
from pathlib import Path

import pytest

from chanlab.cli.main import main

README = Path(__file__).parents[2] / "README.md"
MARK = "<!-- own-predictor -->"


@pytest.fixture
def blocks():
    text = README.read_text(encoding="utf-8")
    assert MARK in text, f"README.md has no {MARK}"
    return re.findall(r"```(\w+)\n(.*?)```", text.split(MARK)[1], re.DOTALL)[:2]


def test_it_trains_and_is_evaluated(blocks, tiny_store, tmp_path, monkeypatch, capsys):
    (language, code), (shell, commands) = blocks
    assert (language, shell) == ("python", "sh")
    assert len([line for line in code.splitlines() if line.strip() and not line.startswith("#")]) <= 20
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_predictor.py").write_text(code)
    small = ["--data.store", str(tiny_store), "--data.num_workers", "0", "--trainer.accelerator", "cpu"]
    for command in commands.splitlines():
        program, subcommand, *arguments = shlex.split(command)
        assert program == "chanlab"
        if subcommand == "fit":
            arguments += ["--trainer.max_epochs", "40", "--model.lr", "0.05", "--trainer.check_val_every_n_epoch", "10"]
        assert main([subcommand, *arguments, *small]) == 0
    shown = capsys.readouterr().out
    assert "test/nmse_db" in shown
    assert main(["test", "--config", "no_prediction", *small]) == 0
    nothing = _nmse_db(capsys.readouterr().out)
    assert _nmse_db(shown) < nothing


def _nmse_db(table: str) -> float:
    found = re.search(r"test/nmse_db\s+│\s+(-?[\d.]+)", table)
    assert found
    return float(found.group(1))
