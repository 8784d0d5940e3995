"""Images through channels by name, what is measured of them, and the script that shows it."""

import importlib.util
import json
import re
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import yaml
from jscc_photographs import photograph
from PIL import Image

import chanlab.jscc
from chanlab.cli import image_senders
from chanlab.cli.image_curves import lines
from chanlab.cli.image_report import beside, transmission_styles, with_receivers
from chanlab.cli.image_systems import channel_name, image_batches, make_channel, make_codec, make_receivers, split_spec
from chanlab.cli.received_images import most_detailed
from chanlab.errors import ChanlabError, UsageError
from chanlab.jscc import (
    ADJSCC,
    MIMO,
    AdaptiveJSCC,
    JSCCModule,
    OFDMLink,
    Rayleigh,
    Rician,
    channel_uses,
    side_information_uses,
)
from chanlab.jscc.evaluation import Link, Loss, digest, loss, loss_records, most_scales, stated_ratio
from chanlab.metrics import psnr
from chanlab.weights import save_weights

ROOT = Path(__file__).resolve().parents[2]
SIXTH = Fraction(1, 6)
SMALL = "ours,widths=[8,12],depths=[1,1]"


def small_codec():
    """Untrained: it starts as analogue transmission of DCT coefficients, which works."""
    torch.manual_seed(0)
    return AdaptiveJSCC(widths=(8, 12), depths=(1, 1))


def crops(count=3, size=48):
    images = torch.stack([torch.from_numpy(photograph(size, size, s)).permute(2, 0, 1) for s in range(count)])
    return images.float() / 255, torch.arange(count) + 7


def script():
    spec = importlib.util.spec_from_file_location("image_transmission", ROOT / "sims" / "image_transmission.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# channels and codecs by name


def test_channels_by_name():
    assert make_channel("fast-rayleigh").coherence == 1
    rician = make_channel("rician,k_factor_db=3,coherence=16,csi=ls,pilots=2")
    assert isinstance(rician, Rician)
    assert (rician.k_factor_db, rician.coherence, rician.csi, rician.pilots) == (3, 16, "ls", 2)
    mimo = make_channel("mimo,num_tx=4,num_rx=4,detection=svd", "lmmse")
    assert isinstance(mimo, MIMO)
    assert (mimo.symbols_per_use, mimo.csi) == (4, "lmmse")
    link = make_channel("ofdm:cdl-d,speed=[1,2],delay_spread=1e-7,num_subcarriers=32,samples=16", seed=5)
    assert isinstance(link, OFDMLink)
    assert (link.num_subcarriers, link.realisations.samples, link.realisations.seed) == (32, 16, 5)
    assert (link.realisations.model.speed, link.realisations.model.delay_spread) == ((1.0, 2.0), 1e-7)
    assert make_channel("ofdm:two_ray,samples=64").realisations.samples == 64


def test_channels_of_files(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("class_path: chanlab.jscc.Rayleigh\ninit_args:\n  coherence: 8\n")
    channel = make_channel(f"{path},pilots=3", "lmmse")
    assert isinstance(channel, Rayleigh)
    assert (channel.coherence, channel.pilots, channel.csi) == (8, 3, "lmmse")
    assert channel_name(f"{path},pilots=3,csi=ls") == "mine.yaml,pilots=3"


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("fog", "unknown channel 'fog'"),
        ("awgn,csi=perfect", "no argument 'csi'"),
        ("slow-rayleigh,csi=odd", "csi: .*Got value: odd"),
        ("ofdm:cdl-x", "Got value: X"),
        ("ofdm:cdl-c,speed=fast", "speed: "),
        ("ofdm:nowhere", "no recipe named nowhere"),
        ("rician,3", "arguments are written"),
        ("nowhere.yaml", "there is no channel"),
    ],
)
def test_a_wrong_channel_is_one_line(spec, said):
    with pytest.raises(UsageError, match=said) as caught:
        make_channel(spec)
    assert "\n" not in str(caught.value)


def test_values_of_specs():
    assert split_spec("ours,widths=[8, 12],ratio=1/12,x=3e-7") == (
        "ours",
        {"widths": [8, 12], "ratio": "1/12", "x": 3e-7},
    )


def test_receivers_have_the_same_pilots():
    """Whoever knows the channel gets no channel uses back."""
    for spec in ("block-rayleigh,coherence=16", "mimo", "ofdm:cdl-c"):
        uses = {csi: c.uses(4000) for csi, c in make_receivers(spec, ["perfect", "lmmse"]).items()}
        assert uses["perfect"] == uses["lmmse"] > make_channel("mimo").uses(4000)
    with pytest.raises(UsageError, match="no choice of csi"):
        make_receivers("awgn", ["perfect"])


def test_codecs_of_recipes_and_checkpoints(tmp_path):
    codec = small_codec().eval()
    save_weights(codec, tmp_path / "ours.safetensors", 32)
    found = make_codec(f"{SMALL}:{tmp_path}/ours.safetensors")
    assert digest(found) == digest(codec)
    assert not found.training
    for spec, said in (
        (f"{tmp_path}/none.ckpt", "no checkpoint"),
        (f"{tmp_path}/ours.safetensors", "name the recipe too"),
        (f"ours:{tmp_path}/none.safetensors", "no weights"),
        ("deepjscc", "comes without weights"),
        ("classifier:x.safetensors", "has no codec"),
        ("ours,depth=3:x.safetensors", "no argument 'depth'"),
    ):
        with pytest.raises(UsageError, match=said):
            make_codec(spec)
    (tmp_path / "broken.ckpt").write_text("no checkpoint")
    with pytest.raises(ChanlabError, match="is no checkpoint of a codec"):
        make_codec(str(tmp_path / "broken.ckpt"))


# what is measured


def test_a_link_is_what_chanlab_test_measures():
    images, ids = crops()
    codec = small_codec()
    link = Link(codec, Rayleigh(coherence=8, csi="lmmse"), seed=3)
    received, got = link.send(images, ids, 10.0, SIXTH)
    with torch.no_grad():
        same, uses = JSCCModule(codec, link.channel, seed=3).eval().transmit(images, ids, 10.0, SIXTH)
    torch.testing.assert_close(received, same)
    torch.testing.assert_close(got.psnr, psnr(same, images, "none"))
    assert got.uses.tolist() == uses.tolist()


def test_an_image_meets_its_own_noise_in_any_batch():
    images, ids = crops()
    link = Link(small_codec(), make_channel("ofdm:cdl-c,samples=8"))
    whole = link.measure([{"image": images, "id": ids}], 10.0, SIXTH)
    alone = [link.send(images[i : i + 1], ids[i : i + 1], 10.0, SIXTH)[1].psnr for i in (2, 0, 1)]
    torch.testing.assert_close(torch.cat(alone), whole.psnr[[2, 0, 1]], rtol=1e-4, atol=1e-3)
    other = Link(link.codec, link.channel, seed=2).measure([{"image": images, "id": ids}], 10.0, SIXTH)
    assert (other.psnr - whole.psnr).abs().min() > 1e-3


@pytest.mark.parametrize("spec", ["awgn", "block-rayleigh,coherence=16,csi=lmmse", "ofdm:cdl-c,samples=8"])
def test_pilots_are_within_the_ratio_or_told(spec):
    images, ids = crops(1)
    link = Link(small_codec(), make_channel(spec))
    limit = channel_uses((3, 48, 48), SIXTH)
    _, got = link.send(images, ids, 10.0, SIXTH)
    assert 0.93 * limit < int(got.uses) <= limit
    with torch.no_grad():
        bits = link.codec.encode(images, 10.0, SIXTH).side_bits
    assert bits > link.codec.side_bits  # the map of activity too
    assert int(got.side_uses) == int(side_information_uses(bits, torch.tensor([10.0])))
    _, own = link.send(images, ids, 10.0)
    assert int(own.uses) == limit + int(own.pilot_uses)
    assert (int(own.pilot_uses) > 0) == (spec != "awgn")
    assert Fraction(stated_ratio(own, (3, 48, 48))) >= SIXTH


def test_fixed_codecs_keep_to_their_ratio():
    codec = ADJSCC("1/12", filters=16)
    assert Link(codec, make_channel("awgn")).fits((3, 96, 96), Fraction(1, 12))
    assert not Link(codec, make_channel("awgn")).fits((3, 96, 96), SIXTH)
    pilots = Link(codec, make_channel("ofdm:cdl-c,samples=8"))
    assert not pilots.fits((3, 96, 96), Fraction(1, 12))  # room for fewer symbols than it sends
    assert pilots.fits((3, 96, 96), None)
    assert Link(small_codec(), pilots.channel).fits((3, 96, 96), SIXTH)


def test_losses_of_shifted_curves():
    """A receiver that needs 2 dB more SNR, on a curve of 0.5 dB of PSNR per dB."""
    reference = {float(s): 20 + 0.5 * s for s in (0, 5, 10, 20)}
    found = loss({s: 20 + 0.5 * (s - 2) for s in reference} | {7.0: 1.0}, reference)
    assert found == {
        0.0: Loss(1.0, None),
        5.0: Loss(1.0, pytest.approx(2.0)),
        10.0: Loss(1.0, pytest.approx(2.0)),
        20.0: Loss(1.0, pytest.approx(2.0)),
    }


def test_estimates_cost_less_at_high_snr_and_share_their_channels():
    images, ids = crops()
    curves = {}
    for csi, channel in make_receivers("slow-rayleigh", ["perfect", "ls"]).items():
        link = Link(small_codec(), channel)
        for snr in (0.0, 60.0):
            curves[csi, snr] = link.measure([{"image": images, "id": ids}], snr, SIXTH).psnr
    assert (curves["perfect", 0.0] - curves["ls", 0.0]).mean() > 0.3
    torch.testing.assert_close(curves["perfect", 60.0], curves["ls", 60.0], rtol=0, atol=0.05)


def test_scales_fit():
    assert [most_scales(torch.zeros(3, s, 768)) for s in (512, 176, 96, 44, 11)] == [5, 5, 4, 3, 1]
    with pytest.raises(UsageError, match="11x11"):
        most_scales(torch.zeros(3, 10, 99))


# what is shown


def test_the_most_detailed_part_is_found():
    image = torch.full((3, 60, 90), 0.5)
    image[:, 30:50, 62:82] = torch.rand(20, 20, generator=torch.Generator().manual_seed(0))
    assert most_detailed(image, 22) == (pytest.approx(29, abs=2), pytest.approx(61, abs=2), 22, 22)
    assert most_detailed(image, 96) == (0, 0, 60, 90)
    assert most_detailed(image, 60)[2:] == (60, 60)


def one(system, csi="", **changes):
    condition = {"snr_db": 5.0, "ratio": "1/6", "size": "96x96", "channel": "slow-rayleigh"} | (
        {"csi": csi} if csi else {}
    )
    made = {"system": system, "metric": "psnr", "value": 30.0, "data": "photos", "split": "test", "n": 4}
    return made | {"condition": condition} | changes


def test_records_beside_tell_what_differs(tmp_path):
    mine = with_receivers([one("ours", "perfect", parameters=9), one("ours", "none", parameters=9)])
    assert [r["system"] for r in mine] == ["ours, perfect CSI", "ours, no CSI"]
    others = [one("AVIF + LDPC"), one("JPEG + LDPC", n=9), one("WebP + LDPC")]
    del others[2]["condition"]["channel"]
    path = tmp_path / "others.json"
    path.write_text(
        json.dumps([*others, one("BPG + LDPC") | {"condition": {**others[0]["condition"], "ratio": "1/12"}}])
    )
    found = beside([path], mine, "slow-rayleigh")
    assert [r["system"] for r in found] == [
        "AVIF + LDPC",
        "JPEG + LDPC (9 images of photos, test)",
        "WebP + LDPC (awgn)",
    ]
    styles = transmission_styles(mine + found)
    assert list(styles) == [r["system"] for r in mine + found]
    assert styles["ours, perfect CSI"]["color"] == styles["ours, no CSI"]["color"]
    assert styles["ours, perfect CSI"]["linestyle"] != styles["ours, no CSI"]["linestyle"]
    assert styles["AVIF + LDPC"]["color"] != styles["JPEG + LDPC (9 images of photos, test)"]["color"]
    with pytest.raises(UsageError, match="has a size and ratio"):
        beside([path], [one("ours") | {"condition": {**others[0]["condition"], "size": "32x32"}}], "awgn")
    with pytest.raises(UsageError, match="no file"):
        beside([tmp_path / "none.json"], mine, "awgn")


# the script


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Photographs, a codec's weights, and that codec's spec."""
    where = tmp_path_factory.mktemp("transmission")
    for split, seeds in (("train", (1,)), ("val", (2,)), ("test", (3, 4))):
        (where / "photos" / split).mkdir(parents=True)
        for seed in seeds:
            Image.fromarray(photograph(130, 200, seed)).save(where / "photos" / split / f"{split}{seed}.png")
    save_weights(small_codec(), where / "ours.safetensors", 32)
    return where


def arguments(folder, out, *more):
    codec = f"ours={SMALL}:{folder}/ours.safetensors"
    line = ["--images", folder / "photos", "--codec", codec, "--out", out, *more]
    return [str(word) for word in line]


def test_images_of_both_sizes(folder):
    (batch,) = image_batches(folder / "photos", "test", 96, 2, 16)
    assert batch["image"].shape == (4, 3, 96, 96)
    assert batch["name"] == ["test3.png", "test3.png", "test4.png", "test4.png"]
    (photo,) = image_batches(folder / "photos", "test", (128, 192), 1, 1)
    assert photo["image"].shape == (1, 3, 128, 192)


def test_script_measures_and_shows(folder, tmp_path, capsys, monkeypatch):
    module = script()
    monkeypatch.setattr(module, "PHOTO", (128, 192))
    line = arguments(folder, tmp_path, "--snr", 0, 10, "--photos", 1, "--ratios", "1/6", "1/12")
    assert module.main(line) == 0
    shown = capsys.readouterr().out
    assert "2 images of 96x96, k/n = 1/12: PSNR [dB], MS-SSIM" in shown
    records = json.loads((tmp_path / "results.json").read_text())
    assert {r["metric"] for r in records} == {"psnr", "ms_ssim", "uses", "pilot_uses", "side_uses", "outage"}
    for size in ("96x96", "128x192"):
        wide, narrow = (
            dict(lines(records, "psnr", {"size": size, "ratio": r, "channel": "awgn"})["ours"]) for r in ("1/6", "1/12")
        )
        assert 15 < wide[0.0] < wide[10.0] < 45
        assert abs(narrow[10.0] - wide[10.0]) > 0.1
    uses = {r["condition"]["ratio"]: r["value"] for r in records if r["metric"] == "uses" and r["n"] == 2}
    assert uses == {"1/6": 4608, "1/12": 2304}
    for name in ("image_transmission", "received_96x96_0", "received_128x192_0"):
        assert (tmp_path / f"{name}.png").stat().st_size > 20_000

    # The same again measures nothing; another SNR is measured alone.
    measured = []
    one_point = image_senders.CodecSender.measure
    monkeypatch.setattr(
        image_senders.CodecSender, "measure", lambda s, r, snr: (measured.append(snr), one_point(s, r, snr))[1]
    )
    assert module.main([*line, "--show"]) == 0
    assert measured == []
    assert json.loads((tmp_path / "results.json").read_text()) == records
    assert module.main([*line, "--snr", "10", "20", "--photos", "0", "--show"]) == 0
    assert measured == [20.0, 20.0]
    # Another seed, other noise: everything anew.
    assert module.main([*line, "--snr", "10", "--photos", "0", "--show", "--seed", "2"]) == 0
    assert measured == [20.0, 20.0, 10.0, 10.0]
    assert module.main([*line, "--snr", "10", "--ratios", "1/6", "--small", "none", "--show", "--seed", "3"]) == 0
    assert measured[4:] == [10.0]


def test_script_compares_receivers_and_separation(folder, tmp_path, capsys):
    more = ["--channel", "slow-rayleigh", "--csi", "perfect", "ls", "none", "--photos", 0, "--snr", 0, 8]
    more += ["--small", "crops", "--crops", 1]
    assert script().main(arguments(folder, tmp_path, *more, "--separation", "jpeg")) == 0
    shown = capsys.readouterr().out
    assert "JPEG + LDPC, perfect CSI" in shown
    assert "JPEG + LDPC, no CSI" not in shown
    assert "loss of PSNR [of SNR], dB" in shown
    records = json.loads((tmp_path / "results.json").read_text())
    by = {(r["system"], r["condition"]["csi"], r["condition"]["snr_db"], r["metric"]): r["value"] for r in records}
    for system in ("ours", "JPEG + LDPC"):
        lost = by[system, "perfect", 0.0, "psnr"] - by[system, "ls", 0.0, "psnr"]
        assert by[system, "ls", 0.0, "psnr_loss"] == pytest.approx(lost)
    assert by["ours", "none", 8.0, "psnr_loss"] > 1
    assert by["ours", "perfect", 0.0, "pilot_uses"] == by["ours", "ls", 0.0, "pilot_uses"] == 1
    assert 0 <= by["JPEG + LDPC", "ls", 0.0, "outage"] <= 1
    assert {r["data"] for r in records} == {"photos, crops"}
    for name in ("image_transmission", "csi_loss", "received_96x96_0"):
        assert (tmp_path / f"{name}.png").stat().st_size > 20_000


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--ratios", "1/3"], "ours was built to send at k/n 1/6, not 1/3, which over awgn asks it for 0.3333 symbols"),
        (["--channel", "mimo"], "not 1/6, which over mimo asks it for 0.3333 symbols"),
        (["--ratios", "a third"], "a bandwidth ratio is"),
        (["--csi", "lmmse"], "awgn has no choice of csi"),
        (["--small", "none", "--photos", "0"], "1 with --small none"),
        (["--ratios", "own", "--separation", "jpeg"], "no bandwidth ratio of its own"),
        (["--show", "9", "--snr", "5"], "there are images 0 to 1"),
        (["--beside", "none.json", "--snr", "5"], "no file none.json"),
    ],
)
def test_a_mistake_is_one_line(folder, tmp_path, capsys, more, said):
    assert script().main(arguments(folder, tmp_path, "--photos", 0, *more)) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("image_transmission: ")
    assert said in error


def test_card_counts_parameters_of_the_recipes():
    card = (ROOT / "models" / "jscc" / "README.md").read_text(encoding="utf-8")
    stated = {name: int(count) for name, count in re.findall(r"^\| \[(\w+)\].*\| (\d+) \|$", card, re.MULTILINE)}
    assert set(stated) == {"deepjscc", "adjscc", "ours"}
    for name, count in stated.items():
        node = yaml.safe_load((ROOT / "models" / "jscc" / f"{name}.yaml").read_text())["model"]["init_args"]["codec"]
        with torch.device("meta"):
            codec = getattr(chanlab.jscc, node["class_path"].rpartition(".")[2])(**node["init_args"])
        assert sum(p.numel() for p in codec.parameters()) == count


def test_losses_need_both_receivers():
    assert loss_records([one("ours", "ls"), one("ours", "perfect") | {"system": "other"}]) == []
    (found,) = loss_records([one("ours", "ls", seeds=[1], value=28.0), one("ours", "perfect", seeds=[1])])
    assert (found["metric"], found["value"]) == ("psnr_loss", 2.0)
