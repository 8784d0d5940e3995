import subprocess
import sys

import pytest

from chanlab.cli import main as cli
from chanlab.cli.common import bytes_text, table, time_text
from chanlab.errors import StoreError, UsageError

HEAVY = ["torch", "sionna", "mitsuba", "transformers", "lightning", "matplotlib", "scipy", "numpy", "h5py"]


def run(*arguments, **options):
    return subprocess.run([sys.executable, "-m", "chanlab", *arguments], capture_output=True, text=True, **options)


def test_help_imports_nothing_heavy():
    code = f"""
import sys
from chanlab.cli.main import main
assert main(["--help"]) == 0
heavy = set({HEAVY!r}) & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in (*cli.COMMANDS, *cli.LEARN))


def test_it_is_a_module_that_runs():
    done = run("--help")
    assert done.returncode == 0
    assert "generate" in done.stdout


@pytest.mark.parametrize("command", [*cli.COMMANDS, "backbone fetch"])
def test_every_command_has_help_with_an_example(command, capsys):
    assert cli.main([*command.split(), "--help"]) == 0
    said = capsys.readouterr().out
    assert "examples:" in said
    assert f"chanlab {command}" in said


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("chanlab ")


def test_no_command_shows_the_help_and_is_a_mistake(capsys):
    assert cli.main([]) == 2
    assert "generate" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [["nonsense"], ["generate"], ["generate", "two_ray"], ["generate", "no_such_recipe", "--out", "x"], ["info"]],
)
def test_a_users_mistake_is_2(arguments, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UsageError("give another"), 2, "chanlab: give another"),
        (StoreError("it is damaged"), 1, "chanlab: it is damaged"),
        (OSError(28, "No space left on device"), 1, "No space left"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (RuntimeError("boom"), 1, "unexpected RuntimeError: boom"),
    ],
)
def test_errors_become_exit_codes_without_traceback(error, code, said, monkeypatch, capsys):
    def fail(arguments):
        raise error

    monkeypatch.setattr(cli, "_dispatch", fail)
    monkeypatch.delenv("CHANLAB_DEBUG", raising=False)
    assert cli.main(["doctor"]) == code
    shown = capsys.readouterr().err
    assert said in shown
    assert "Traceback" not in shown
    if not isinstance(error, KeyboardInterrupt):
        assert cli.main(["--debug", "doctor"]) == code
        assert "Traceback" in capsys.readouterr().err


def test_a_bug_leaves_its_traceback_in_a_file(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(cli, "_dispatch", lambda arguments: 1 / 0)
    assert cli.main([]) == 1
    (log,) = tmp_path.iterdir()
    assert str(log) in capsys.readouterr().err
    assert "ZeroDivisionError" in log.read_text()


def test_a_closed_pipe_is_no_error_message(two_ray):
    command = f"{sys.executable} -m chanlab info {two_ray} | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stdout.count("\n") == 1
    assert "Traceback" not in done.stderr


def test_small_prints():
    assert [time_text(s) for s in (1.24, 45, 200, 7500)] == ["1.2 s", "45 s", "3 min 20 s", "2 h 5 min"]
    assert [bytes_text(n) for n in (999, 1500, 2.5e9)] == ["999 B", "1.5 kB", "2.5 GB"]
    assert table(["a", "b"], [["x", "1"], ["long", "22"]]).splitlines()[-1] == "long  22"


def test_fit_has_help_with_an_example(capsys):
    assert cli.main(["fit", "--help"]) == 0
    assert "chanlab fit --config gru" in capsys.readouterr().out


def test_fit_without_a_model_is_a_users_mistake(capsys):
    assert cli.main(["fit", "--config", "no_such_model"]) == 2
    assert "Traceback" not in capsys.readouterr().err
