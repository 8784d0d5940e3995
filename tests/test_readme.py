"""What the README shows works as it stands there."""

import argparse
import re
from pathlib import Path

import pytest

from chanlab.cli import main as cli

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_python_of_the_tour_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tour = README.split("## In Python")[1].split("<!-- own-predictor -->")[0]
    blocks = re.findall(r"```python\n(.*?)```", tour, re.DOTALL)
    assert len(blocks) == 2
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
    assert tuple(names["h"].shape) == (8, 1, 32, 1, 64)


def test_commands_exist():
    parser = cli.build_parser()
    (actions,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    shown = set(re.findall(r"`chanlab (\w+)", README))
    assert {"doctor", "generate", "info", "plot", "fit", "demo"} <= shown <= set(actions.choices)


def test_links_lead_somewhere():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert (ROOT / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("target", ["demo", "test", "install", "dev", "llvm", "cards", "lint"])
def test_make_knows_what_is_written_of_it(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
