import json
import shutil

import numpy as np
import pytest

from chanlab.cli import quicklook
from chanlab.cli.main import main
from chanlab.data.store import Store


def test_info_json_has_what_others_read(two_ray, capsys):
    assert main(["info", str(two_ray), "--json"]) == 0
    card = json.loads(capsys.readouterr().out)
    assert {"schema_version", "samples", "splits", "content_hash", "recipe", "versions"} <= set(card)
    assert card["samples"] == 40
    assert sum(card["splits"].values()) == 40


def test_info_for_people(two_ray, capsys):
    assert main(["info", str(two_ray)]) == 0
    said = capsys.readouterr().out
    assert "40 users" in said
    assert Store(two_ray).content_hash in said


def test_generate_again_keeps_the_store(two_ray, capsys):
    before = {p.name: p.stat().st_mtime_ns for p in two_ray.glob("*.h5")}
    assert main(["generate", "two_ray", "--out", str(two_ray), "--samples", "40", "--quiet"]) == 0
    assert before == {p.name: p.stat().st_mtime_ns for p in two_ray.glob("*.h5")}


def test_generate_refuses_another_recipes_folder(two_ray, capsys):
    assert main(["generate", "two_ray", "--out", str(two_ray), "--samples", "40", "--seed", "99", "--quiet"]) in (1, 2)
    assert "seed" in capsys.readouterr().err


def test_dry_run_makes_nothing(tmp_path, capsys):
    assert main(["generate", "two_ray", "--out", str(tmp_path / "x"), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert all(word in said for word in ("samples", "size", "time", "1000 users"))
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "option", [["--workers", "0"], ["--samples", "0"], ["--seed", "-1"], ["--engine", "ray"], ["--engine", "mpi"]]
)
def test_generate_options_out_of_range(option, tmp_path, capsys):
    assert main(["generate", "two_ray", "--out", str(tmp_path / "x"), *option]) == 2
    assert option[0] in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_verify_is_content_with_a_sound_store(two_ray, capsys):
    assert main(["verify", str(two_ray), "--quiet"]) == 0
    assert "sound" in capsys.readouterr().out


def test_verify_finds_a_flipped_byte(two_ray, tmp_path, capsys):
    copy = shutil.copytree(two_ray, tmp_path / "copy")
    shard = next(copy.glob("*.h5"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    assert main(["verify", str(copy), "--quiet"]) == 1
    assert shard.name in capsys.readouterr().err


@pytest.mark.parametrize("command", ["info", "verify", "plot"])
def test_no_store_there(command, tmp_path, capsys):
    assert main([command, str(tmp_path / "nothing")]) in (1, 2)
    assert "Traceback" not in capsys.readouterr().err


def test_plot_draws_a_picture(two_ray, tmp_path, capsys):
    picture = tmp_path / "deep" / "look.png"
    assert main(["plot", str(two_ray), "--out", str(picture)]) == 0
    assert capsys.readouterr().out.strip() == str(picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000


@pytest.mark.parametrize("option", [["--out", "x.gif"], ["--sample", "4000"]])
def test_plot_options_out_of_range(option, two_ray, capsys):
    assert main(["plot", str(two_ray), *option]) == 2


def test_survey_covers_every_user_once(two_ray):
    seen = quicklook.survey(Store(two_ray))
    assert sum(len(users) for users in seen.tracks.values()) == len(seen.sample_ids) == 40
    assert np.isfinite(seen.gain).all()
    assert (seen.distance > 0).all()
    assert len(quicklook.survey(Store(two_ray), max_users=7).sample_ids) == 7


def test_user_channel_is_the_stores_response(two_ray):
    response, times, frequencies = quicklook.user_channel(Store(two_ray), 3)
    assert response.shape == (len(times), len(frequencies))
    assert np.abs(response).max() > 0
    assert (np.diff(frequencies) > 0).all()
