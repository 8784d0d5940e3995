"""Scripts of sims/ about images over noisy channels, on few channels."""

import importlib.util
import json
from pathlib import Path


def script(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / "sims" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_estimation_is_measured(tmp_path, capsys):
    line = ["--samples", "8", "--symbols", "768", "--snr-db", "5", "20", "--out", str(tmp_path)]
    assert script("ofdm_estimation").main(line) == 0
    records = json.loads((tmp_path / "results.json").read_text())
    loss = {(r["system"][:2], r["data"], r["condition"]["snr_db"]): r["value"] for r in records}
    assert len(loss) == 2 * 4 * 2
    for (system, data, snr_db), value in loss.items():
        if system == "LM":
            assert value < 1.0 < loss["LS", data, snr_db]
    assert "1024 for 768 symbols, 256 of them pilots" in capsys.readouterr().out
    assert (tmp_path / "ofdm_estimation.png").stat().st_size > 10_000


def test_a_wrong_number_is_one_line(tmp_path, capsys):
    assert script("ofdm_estimation").main(["--samples", "0", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("ofdm_estimation: --samples")
