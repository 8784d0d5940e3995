"""benchmarks/jscc_train.py and jscc.py: equal runs, resumed as said; what is kept is what is evaluated."""

import contextlib
import gc
import json
import sys
import weakref
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from chanlab.errors import UsageError
from chanlab.jscc import ADJSCC, AdaptiveJSCC, DeepJSCC, JSCCModule
from chanlab.jscc.bases import BaseCodec, BasePool
from chanlab.jscc.images import ImageDataModule
from chanlab.records import load_records, select
from chanlab.weights import load_weights

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import cuda_clock
import jscc
import jscc_engine
import jscc_train
from jscc_arms import Arm, arms, matching_filters, named, parameters
from jscc_engine import Engine

TINY = ["--batch", "4", "--widths", "8", "16", "--depths", "1", "1", "--crops", "2", "--snrs", "0", "10"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Smooth pictures, those of validation and test large enough for both sizes."""
    folder = tmp_path_factory.mktemp("photos")
    generator = np.random.default_rng(0)
    for split, count, size in (("train", 3, (200, 160)), ("val", 1, (800, 520)), ("test", 2, (800, 520))):
        (folder / split).mkdir()
        for i in range(count):
            coarse = Image.fromarray(generator.integers(0, 256, (9, 12, 3), dtype=np.uint8))
            coarse.resize(size, Image.Resampling.BICUBIC).save(folder / split / f"{split}{i}.png")
    return folder


def test_runs_of_equal_steps_and_their_differences(photos, tmp_path, capsys):
    command = ["--images", str(photos), *TINY, "--out", str(tmp_path), "--ratios", "1/6"]
    jscc_train.main([*command, "--steps", "3", "--arms", "ours", "adjscc"])
    assert "2 runs of 3 steps" in capsys.readouterr().out
    # Given again with more runs: those that are there stay, the others get as many steps.
    kept = (tmp_path / "weights" / "adaptive.safetensors").read_bytes()
    jscc_train.main([*command, "--minutes", "5", "--arms", "ours", "adjscc", "adaptive_1_6_10dB"])
    said = capsys.readouterr().out
    assert "1 runs of 3 steps" in said
    assert "ours over adjscc" in said
    assert (tmp_path / "weights" / "adaptive.safetensors").read_bytes() == kept
    with pytest.raises(UsageError, match="3 steps, not 4"):
        jscc_train.main([*command, "--steps", "4", "--arms", "ours"])
    records = load_records(tmp_path / "results.json")
    for size, count in (("96x96", 2), ("96x96 crops", 4), ("512x768", 2)):
        ours, theirs = (
            select(records, system=s, metric="psnr", size=size, snr_db=10.0)[0] for s in ("adaptive", "adjscc")
        )
        gain = select(records, metric="psnr_over_adjscc", size=size, snr_db=10.0)[0]
        assert gain["value"] == pytest.approx(ours["value"] - theirs["value"], abs=1e-4)
        assert gain["low"] <= gain["value"] <= gain["high"]
        assert ours["n"] == count
        assert ours["steps"] == theirs["steps"] == 3
    # A specialist is measured at its own SNR alone.
    assert [r["condition"]["snr_db"] for r in select(records, system="adaptive, one SNR and ratio", size="96x96")] == [
        10.0
    ]
    assert (tmp_path / "psnr.png").stat().st_size > 10_000
    # What was evaluated is what was kept.
    codec = AdaptiveJSCC(Fraction(1, 6), (8, 16), (1, 1))
    load_weights(codec, tmp_path / "weights" / "adaptive.safetensors")
    module = JSCCModule(codec).eval()
    batch = next(ImageDataModule(photos, eval_crop=96, eval_crops=2, batch_size=4).batches("test"))
    with torch.no_grad():
        received, uses = module.transmit(batch["image"], batch["id"], 10.0, Fraction(1, 6))
    psnr = -10 * (received - batch["image"]).square().mean((1, 2, 3)).log10()
    known = json.loads((tmp_path / "runs" / "adaptive.json").read_text())["psnr"]["crop"]["1/6 10"]
    assert psnr.tolist() == pytest.approx(known, abs=1e-3)
    assert uses.tolist() == [96 * 96 * 3 // 6] * 4


def test_runs_of_other_settings_are_not_compared(photos, tmp_path):
    out = tmp_path / "out"
    command = ["--images", str(photos), *TINY, "--out", str(out), "--ratios", "1/6", "--steps", "1", "--arms"]
    jscc_train.main([*command, "adaptive_1_6_0dB"])
    for more in (["--loss", "mse"], ["--crop", "64"], ["--seed", "2"], ["--lr", "adaptive=3e-3"]):
        with pytest.raises(UsageError, match=f"has {more[0][2:]} .*give another --out"):
            jscc_train.main([*command, "adaptive_1_6_0dB", "adjscc", *more])
    # A run that starts where another ended has had more steps than its peers.
    jscc_train.main([*command, "adaptive_1_6_10dB", "--init", str(started_from(out, tmp_path / "init"))])
    with pytest.raises(UsageError, match="started from --init"):
        jscc_train.main([*command, "adaptive_1_6_0dB", "adaptive_1_6_10dB"])
    assert not (out / "runs" / "adjscc_1_6.json").exists()
    # Other test crops: evaluated again, not trained again.
    weights = (out / "weights" / "adaptive_1_6_0dB.safetensors").read_bytes()
    jscc_train.main([*command, "adaptive_1_6_0dB", "--crops", "3"])
    assert len(json.loads((out / "runs" / "adaptive_1_6_0dB.json").read_text())["psnr"]["crop"]["1/6 0"]) == 6
    assert (out / "weights" / "adaptive_1_6_0dB.safetensors").read_bytes() == weights


def started_from(out, folder):
    folder.mkdir()
    (folder / "adaptive_1_6_10dB.safetensors").write_bytes(
        (out / "weights" / "adaptive_1_6_0dB.safetensors").read_bytes()
    )
    return folder


def test_weights_alone_can_be_evaluated(photos, tmp_path):
    command = ["--images", str(photos), *TINY, "--out", str(tmp_path), "--ratios", "1/6", "--arms", "adaptive_1_6_0dB"]
    jscc_train.main([*command, "--steps", "1"])
    value = select(load_records(tmp_path / "results.json"), metric="psnr", size="96x96")[0]["value"]
    (tmp_path / "runs" / "adaptive_1_6_0dB.json").unlink()
    for _ in range(2):
        jscc_train.main([*command, "--evaluate"])
        again = select(load_records(tmp_path / "results.json"), metric="psnr", size="96x96")[0]
        assert again["value"] == pytest.approx(value, abs=1e-4)
        assert "steps" not in again
    # Choices are made on validation photographs: the only one is evaluated, and the record says so.
    jscc_train.main([*command, "--evaluate", "--split", "val"])
    found = select(load_records(tmp_path / "results.json"), metric="psnr", size="96x96")[0]
    assert (found["split"], found["n"]) == ("val", 1)
    assert found["value"] != pytest.approx(value, abs=1e-2)


def test_the_grid():
    line = ["--images", "photos", "--ratios", "1/6", "1/12", "--held-snrs", "0", "20"]
    runs = arms(
        jscc_train.arguments([*line, "--arms", "ours", "specialists", "adaptive_1_6_0dB", "adjscc", "deepjscc"])
    )
    assert [arm.name for arm in runs][:4] == ["adaptive", "adaptive_0dB", "adaptive_20dB", "adaptive_1_6_0dB"]
    assert [arm.label for arm in runs][1:4] == ["adaptive, one SNR"] * 2 + ["adaptive, one SNR and ratio"]
    assert len(runs) == 4 + 2 + 4
    assert all(named(arm.name) == arm for arm in runs)
    # Ours and its specialists take turns on one network.
    assert len({arm.architecture for arm in runs}) == 5
    assert [arm.name for arm in arms(jscc_train.arguments(line))][:3] == ["adaptive", "adjscc_1_6", "adjscc_1_12"]
    for name in ("adjscc_1_6_10dB", "adjscc", "deepjscc_1_6", "codec_1_6"):
        with pytest.raises(UsageError, match="single runs"):
            named(name)


def test_peers_have_as_many_parameters_as_ours():
    ours = parameters(AdaptiveJSCC, Fraction(1, 6))
    for ratio in (Fraction(1, 6), Fraction(1, 12)):
        for peer in (ADJSCC, DeepJSCC):
            filters = matching_filters(peer, ratio, ours)
            assert filters % 8 == 0
            assert parameters(peer, ratio, filters, jscc.WIDE_KERNELS) == pytest.approx(
                ours, rel=0.11
            )  # filters come in steps of 8
    small = jscc.SMALL
    narrow = parameters(AdaptiveJSCC, Fraction(1, 6), small["widths"], small["depths"], 5, small["conditioning"])
    kaira = 78128 + 78115 + 9  # convolutions of the paper of 2019, and a slope for each PReLU
    assert narrow == pytest.approx(kaira, rel=0.03)


def test_a_run_starts_from_its_seed_whatever_came_before(photos):
    command = ["--images", str(photos), *TINY, "--out", "unused", "--steps", "2"]
    args = jscc_train.arguments(command)
    engine = Engine(Arm("adaptive"), jscc_train.photographs(args)["train"], args)
    arm = Arm("adaptive", Fraction(1, 6), 10.0)
    states = []
    for before in (None, Arm("adaptive")):
        if before is not None:
            engine.train(before, 2)
        engine.train(arm, 2)
        states.append({name: value.clone() for name, value in engine.codec.state_dict().items()})
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value)


def test_an_interrupted_run_goes_on(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(jscc_engine, "SAVED_EVERY", 0.0)
    args = jscc_train.arguments(["--images", str(photos), *TINY, "--points", "10"])
    arm, partial = Arm("adaptive", Fraction(1, 6), 10.0), tmp_path / "partial" / "run.pt"
    engine = Engine(arm, jscc_train.photographs(args)["train"], args)
    steps = []
    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda self, arm: (steps.append(step(self, arm)), interrupt(len(steps)))[0])
    with pytest.raises(KeyboardInterrupt):
        engine.train(arm, 10, partial)
    moments = [engine.optimizer.state[p]["exp_avg"].clone() for p in engine.weights]
    assert torch.load(partial, weights_only=True)["done"]["curve"][-1]["steps"] == 6
    other = Engine(arm, engine.data, args)
    steps.clear()
    done = other.train(arm, 10, partial)
    assert len(steps) == 4
    assert [point["steps"] for point in done.curve] == list(range(1, 11))
    assert all(float(other.optimizer.state[p]["step"]) == 10 for p in other.weights)
    assert any(m.abs().max() > 0 for m in moments)
    # A run of other steps begins anew.
    steps.clear()
    other.train(arm, 5, partial)
    assert len(steps) == 5


def interrupt(count):
    if count == 7:
        raise KeyboardInterrupt


def test_weights_are_averaged(photos, monkeypatch):
    args = jscc_train.arguments(["--images", str(photos), *TINY])
    engine = Engine(Arm("adaptive"), jscc_train.photographs(args)["train"], args)
    seen = []
    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda self, arm: (step(self, arm), seen.append(self.weights[0].clone()))[0])
    monkeypatch.setattr(jscc_engine, "AVERAGED", 1.0)
    engine.train(Arm("adaptive"), 3)
    torch.testing.assert_close(engine.weights[0], torch.stack(seen).mean(0))


@pytest.mark.parametrize(
    ("more", "named"),
    [(["--make-bases"], "bases"), (["--refining", "1.5"], "refining"), (["--high-snr-share", "2"], "high-snr")],
)
def test_mistakes_about_bases_are_told(photos, more, named):
    with pytest.raises(UsageError, match=f"--{named}"):
        jscc_train.main(["--images", str(photos), *TINY, *more])


def test_ours_learns_to_refine_base_layers(photos, tmp_path, capsys, monkeypatch):
    """Base layers are made once; a share of ours's crops is sent with its own, ADJSCC's go without."""
    command = ["--images", str(photos), *TINY, "--out", str(tmp_path), "--ratios", "1/6", "--bases", "16"]
    jscc_train.main([*command, "--make-bases"])
    assert f"16 crops with bases in {tmp_path / 'bases'}" in capsys.readouterr().out
    (kept,) = (tmp_path / "bases").iterdir()
    assert not (tmp_path / "weights").exists()
    monkeypatch.setattr(BaseCodec, "at_level", lambda *a, **k: pytest.fail("encoded again"))
    jscc_train.main([*command, "--steps", "2", "--arms", "ours", "adjscc"])
    known = json.loads((tmp_path / "runs" / "adaptive.json").read_text())
    assert known["settings"]["bases"] == 16
    assert known["trained"]["steps"] == 2
    with pytest.raises(UsageError, match=r"has bases 16 \(asked: 0\)"):
        jscc_train.main([*command[:-2], "--steps", "2", "--arms", "ours"])
    pool = BasePool.load(kept)
    for refining, share in ((0.7, 0.7), (0.0, 0.0), (1.0, 1.0)):
        args = jscc_train.arguments([*command, "--refining", str(refining), "--batch", "40"])
        engine = Engine(Arm("adaptive"), jscc_train.photographs(args)["train"], args, train=False, pool=pool)
        drawn = engine.block(Arm("adaptive"))
        sent = torch.cat([part.base_uses for part in drawn]) > 0
        assert float(sent.float().mean()) == pytest.approx(share, abs=4 * (share * (1 - share) / 320) ** 0.5)
    image, base = ((255 * x).round().byte() for x in (drawn[0].images[0], drawn[0].base[0]))
    either = [(pool.image[i], pool.base[i]) for i in range(16)]
    either += [(x.flip(-1), y.flip(-1)) for x, y in either]
    assert any(torch.equal(x, image) and torch.equal(y, base) for x, y in either)
    adjscc = Arm("adjscc", Fraction(1, 6))
    assert Engine(adjscc, engine.data, engine.args, train=False, pool=pool).pool is None


def test_training_at_high_snr(photos):
    args = jscc_train.arguments(["--images", str(photos), *TINY, "--high-snr-share", "1", "--snr-range", "0", "20"])
    engine = Engine(Arm("adaptive"), jscc_train.photographs(args)["train"], args, train=False)
    snr = torch.cat([part.snr for part in engine.block(Arm("adaptive"))])
    assert 15 <= snr.min() < snr.max() <= 20
    assert {s for part in engine.block(Arm("adaptive", None, 7.0)) for s in part.snr.tolist()} == {7.0}


def test_a_captured_call_keeps_what_it_reads(monkeypatch):
    """A graph reads memory that it doesn't own: freed with the call, it would be anyone's."""

    class Graph:
        def replay(self):
            pass

    monkeypatch.setattr(cuda_clock, "warm_up", lambda call: call())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    made = []

    def contender():
        held = torch.ones(3)
        made.append(weakref.ref(held))

        def call():
            out = held + 1
            made.append(weakref.ref(out))
            return out

        return cuda_clock.captured(call)

    replay = contender()
    gc.collect()
    assert made[0]() is not None
    assert made[-1]() is not None
    del replay
    gc.collect()
    assert made[0]() is None


def test_throughput_runs_on_a_cpu(tmp_path, capsys):
    results = tmp_path / "results.json"
    jscc.main(["--rounds", "1", "--repeats", "1", "--size", "32", "32", "--batch", "1", "--results", str(results)])
    found = load_records(results)
    assert any(r["condition"]["peer"] == "plain DeepJSCC" for r in found)
    for item in found:
        assert item["ratio"] == pytest.approx(item["value"] / item["peer_value"])
        assert item["parameters"] == pytest.approx(item["peer_parameters"], rel=0.09)
    assert "ratio" in capsys.readouterr().out
