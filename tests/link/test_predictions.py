import importlib.util
import json
from pathlib import Path

import h5py
import pytest
import torch
from link_windows import plane_wave_windows

from chanlab.errors import UsageError
from chanlab.link import PERFECT, collect, read_predictions

SCRIPT = Path(__file__).parents[2] / "sims" / "csi_link.py"


def held(history: torch.Tensor, noise_variance: torch.Tensor | None = None) -> torch.Tensor:
    return history[..., -1:, :].expand(*history.shape[:3], 2, -1)


def write(path: Path, order: torch.Tensor, snr_db: float = 20.0, only: int | None = None) -> Path:
    batch = plane_wave_windows(12, windows=2, num_subcarriers=16, csi_snr_db=snr_db)
    batch = type(batch)(*(x[order] for x in batch))
    with h5py.File(path, "w") as file:
        values = {"prediction": held(batch.history), **batch._asdict(), "snr_db": torch.full((len(order),), snr_db)}
        for name in ("prediction", "target", "sample_id", "window", "snr_db"):
            file[name] = values[name][:only].numpy()
    return path


def test_files_of_the_same_windows_stand_side_by_side(tmp_path):
    a, b = write(tmp_path / "a.h5", torch.arange(24)), write(tmp_path / "b.h5", torch.arange(24).flip(0))
    found = read_predictions({"a": a, "b": b})
    expected = collect({"a": held}, [plane_wave_windows(12, windows=2, num_subcarriers=16)])
    assert list(found.csi) == [PERFECT, "a", "b"]
    assert torch.equal(found.csi["a"], found.csi["b"])
    assert torch.equal(found.csi["a"], expected.csi["a"])
    assert torch.equal(found.channel, expected.channel)


def test_files_that_do_not_fit_are_refused(tmp_path):
    a, b = write(tmp_path / "a.h5", torch.arange(24)), write(tmp_path / "b.h5", torch.arange(24), only=20)
    with pytest.raises(UsageError, match="other windows"):
        read_predictions({"a": a, "b": b})
    with pytest.raises(UsageError, match="chanlab predict"):
        read_predictions({"a": tmp_path / "none.h5"})
    with h5py.File(tmp_path / "c.h5", "w") as file:
        file["prediction"] = [0.0]
    with pytest.raises(UsageError, match="has no target"):
        read_predictions({"c": tmp_path / "c.h5"})
    with h5py.File(a, "a") as file:
        file["snr_db"][:12] = 5.0
    with pytest.raises(UsageError, match="from 5 to 20 dB"):
        read_predictions({"a": a})
    assert len(read_predictions({"a": a}, snr_db=5.0).sample_id) == 12
    with pytest.raises(UsageError, match="no history at 7 dB"):
        read_predictions({"a": a}, snr_db=7.0)


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("csi_link", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_prints_a_table_and_writes_records_and_a_picture(script, tmp_path, capsys):
    file = write(tmp_path / "a.h5", torch.arange(24))
    out = tmp_path / "out"
    assert script.main(["--predictions", f"held={file}", "--snr", "0", "10", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "BLER" in shown
    assert "held" in shown
    records = json.loads((out / "results.json").read_text())
    assert {r["metric"] for r in records} == {"spectral_efficiency", "spectral_efficiency_ratio", "bler", "goodput"}
    assert (out / "csi_link.png").read_bytes().startswith(b"\x89PNG")


def test_the_script_says_what_it_needs(script, tmp_path, capsys):
    assert script.main(["--predictions", "a.h5", "--out", str(tmp_path)]) == 2
    assert "NAME=FILE" in capsys.readouterr().err
    assert script.main(["--store", str(tmp_path / "none"), "--out", str(tmp_path)]) in (1, 2)
    assert "chanlab generate" in capsys.readouterr().err
