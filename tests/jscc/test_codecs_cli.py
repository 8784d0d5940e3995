"""fit, test and predict of codecs, as users run them, and what their training module does."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import lightning
import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from chanlab.cli.lightning import main as learn
from chanlab.cli.main import main
from chanlab.errors import ChanlabError, UsageError
from chanlab.jscc import ADJSCC, AdaptiveJSCC, Convention, DeepJSCC, JSCCModule, load_codec
from chanlab.jscc.channels import AWGN
from chanlab.jscc.contract import CONVENTIONS
from chanlab.jscc.fading import Rayleigh
from chanlab.jscc.module import parameter_groups, reconstruction_loss
from chanlab.jscc.separation.payload import PayloadRate
from chanlab.metrics import ms_ssim
from chanlab.weights import save_weights

RECIPES = Path(__file__).parents[2] / "models" / "jscc"
SMALL = {
    "ours": ["--model.codec.init_args.widths", "[8,12]", "--model.codec.init_args.depths", "[1,1]"],
    "adjscc": ["--model.codec.init_args.filters", "16"],
    "deepjscc": ["--model.codec.init_args.filters", "16"],
}


def run(*arguments):
    assert main([str(a) for a in arguments]) == 0


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """Smooth pictures in a split folder, and everything a run writes in the test's own folder."""
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    for split, count in {"train": 3, "val": 1, "test": 2}.items():
        folder = tmp_path / "photos" / split
        folder.mkdir(parents=True)
        for i in range(count):
            coarse = Image.fromarray(generator.integers(0, 256, (9, 12, 3), dtype=np.uint8))
            coarse.resize((128, 112), Image.Resampling.BICUBIC).save(folder / f"{split}{i}.png")
    return tmp_path / "photos"


@pytest.mark.parametrize("recipe", ["ours", "adjscc", "deepjscc"])
def test_recipes_from_fit_to_received_pictures(recipe, photos, tmp_path):
    out = tmp_path / "out"
    shared = ["--config", RECIPES / f"{recipe}.yaml", "--data.images", photos, "--trainer.default_root_dir", out]
    shared += ["--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false", *SMALL[recipe]]
    shared += ["--model.eval_snr_db", "[0,10]"]
    run("fit", *shared, "--trainer.max_epochs", 2, "--data.crops_per_epoch", 16, "--data.batch_size", 8)
    run("test", *shared, "--ckpt_path", "best")
    with Image.open(photos / "test" / "test0.png") as photo:
        odd = photo.resize((50, 33))
    odd.save(tmp_path / "odd.png")
    run("predict", *shared, "--ckpt_path", "best", "--data.predict_images", tmp_path / "odd.png")
    rows = json.loads((out / "received" / "received.json").read_text())
    names = {row["file"] for row in rows}
    asked = {0: "_1_6", 1: "_1_12"} if recipe == "ours" else {0: ""}
    assert names == {f"odd_{snr}dB{ratio}.png" for snr in (0, 10) for ratio in asked.values()}
    for row in rows:
        with Image.open(out / "received" / row["file"]) as picture:
            assert picture.size == (50, 33)
            error = (np.asarray(picture, float) - np.asarray(odd)) / 255
        assert row["channel_uses"] == 3 * 33 * 50 // (12 if row["ratio"] == "1/12" else 6)
        assert row["psnr_db"] == pytest.approx(-10 * math.log10((error**2).mean()), abs=0.15)
    codec = load_codec(out / "best.ckpt")
    save_weights(codec, tmp_path / "weights.safetensors", 32)
    run("test", *shared, "--ckpt_path", tmp_path / "weights.safetensors")


def test_ours_is_trained_with_base_layers_and_sends_one(photos, tmp_path):
    out = tmp_path / "out"
    shared = ["--config", RECIPES / "ours.yaml", "--data.images", photos, "--trainer.default_root_dir", out]
    shared += ["--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false", *SMALL["ours"]]
    shared += ["--model.eval_snr_db", "[20]", "--model.eval_ratios", "[1/6]"]
    bases = ["--data.bases", 12, "--data.bases_speed", 10, "--data.bases_folder", tmp_path / "bases"]
    run("fit", *shared, *bases, "--trainer.max_steps", 2, "--data.crops_per_epoch", 8, "--data.batch_size", 4)
    assert len(list((tmp_path / "bases").iterdir())) == 1
    checkpoint = torch.load(out / "last.ckpt", weights_only=True)
    assert set(checkpoint["state_dict"]) == set(small_module(eval_snr_db=[20.0]).state_dict())
    with_one = ["--model.codec.init_args.base", "avif", "--data.predict_images", photos / "test" / "test0.png"]
    run("predict", *shared, "--ckpt_path", "last", *with_one)
    (row,) = json.loads((out / "received" / "received.json").read_text())
    assert row["channel_uses"] == 3 * 112 * 128 // 6
    assert row["lost"] is False
    losing = small_module(eval_snr_db=[10.0]).eval()
    encode = losing.codec.encode
    base = {"base_uses": torch.tensor([1, 1]), "base_loss": torch.tensor([1.0, 0.0])}
    losing.codec.encode = lambda *a, **k: replace(encode(*a, **k), **base)
    with torch.no_grad():
        found = losing.predict_step({"image": torch.rand(2, 3, 32, 32), "id": torch.arange(2)}, 0)
    assert found["lost"].tolist() == [[True], [False]]
    assert (found["image"][0] == 0.5).all()


def test_a_share_of_training_images_has_its_base_layer(monkeypatch):
    """Uses are those of the bytes at each image's SNR; codecs without base layers don't see them."""
    torch.manual_seed(0)
    seen = []
    batch = {"image": torch.rand(400, 3, 16, 16), "id": torch.arange(400)}
    batch |= {"base": torch.rand(400, 3, 16, 16), "base_bytes": torch.randint(100, 900, (400,))}
    module = small_module(snr_db=(0.0, 20.0), refining=0.25)
    monkeypatch.setattr(module, "log", lambda *a, **k: None)
    monkeypatch.setattr(module, "forward", lambda x, snr, ratio, base: (seen.append((snr, base)), (x, None))[1])
    state = set(module.state_dict())
    module.training_step(batch, 0)
    ((snr, base),) = seen
    assert torch.equal(base.image, batch["base"])
    expected = PayloadRate().uses(8 * batch["base_bytes"], snr).ceil()
    assert set((base.uses / expected).unique().tolist()) == {0.0, 1.0}
    assert int((base.uses > 0).sum()) == pytest.approx(100, abs=4 * 8.66)  # four standard deviations
    assert set(module.state_dict()) == state
    for refining, least in ((0.0, 0), (1.0, 400)):
        module.refining = refining
        assert int((module.base(batch, snr).uses > 0).sum()) == least
    other = JSCCModule(ADJSCC(filters=8))
    assert other.base(batch, snr) is None
    assert module.base({"image": batch["image"]}, snr) is None
    with pytest.raises(UsageError, match="over AWGN alone, not over Rayleigh"):
        small_module(channel=Rayleigh()).base(batch, snr)
    with pytest.raises(UsageError, match="refining is a share"):
        small_module(refining=1.5)


def test_base_layers_reach_the_codec_in_training(monkeypatch):
    """A perfect base that fits is all that an image needs; over a nominal channel its SNR is what symbols have."""
    images = torch.rand(4, 3, 96, 96)
    batch = {"image": images, "id": torch.arange(4), "base": images, "base_bytes": torch.full((4,), 40)}
    module = small_module(snr_db=10.0, refining=1.0).train()
    monkeypatch.setattr(module, "log", lambda *a, **k: None)
    refined = float(module.training_step(batch, 0).detach())
    alone = float(module.training_step({name: batch[name] for name in ("image", "id")}, 0).detach())
    assert refined < alone - 10
    snr = torch.full((4,), 10.0)
    nominal = small_module(channel=AWGN("nominal+3dB"), refining=1.0).base(batch, snr)
    uses = PayloadRate().uses(8 * batch["base_bytes"], snr + 10 * math.log10(2)).ceil().long()
    assert torch.equal(nominal.uses, uses)


def test_untrained_codecs_are_not_evaluated(photos):
    with pytest.raises(UsageError, match="untrained"):
        learn(["test", "--config", str(RECIPES / "ours.yaml"), "--data.images", str(photos)])


def test_recipes_have_equal_parameters():
    """ADJSCC and DeepJSCC of the recipes are as large as ours, to 2 %."""
    count = {}
    for name, kind in {"ours": AdaptiveJSCC, "adjscc": ADJSCC, "deepjscc": DeepJSCC}.items():
        recipe = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
        codec = recipe["model"]["init_args"]["codec"]
        assert codec["class_path"] == f"chanlab.jscc.{kind.__name__}"
        with torch.device("meta"):
            count[name] = sum(p.numel() for p in kind(**codec["init_args"]).parameters())
    assert count["adjscc"] == pytest.approx(count["ours"], rel=0.08)
    assert count["deepjscc"] == pytest.approx(count["ours"], rel=0.08)


def test_two_processes_train_together(photos, tmp_path):
    """A strategy that starts the program again finds it, however it was started."""
    command = ["fit", "--config", RECIPES / "deepjscc.yaml", "--data.images", photos, *SMALL["deepjscc"]]
    command += ["--trainer.accelerator", "cpu", "--trainer.devices", 2, "--trainer.strategy", "ddp"]
    command += ["--trainer.max_steps", 2, "--trainer.default_root_dir", tmp_path, "--trainer.limit_val_batches", 0]
    started = [sys.executable, "-m", "chanlab", *map(str, command)]
    done = subprocess.run(started, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "Starting with 2 processes" in done.stdout + done.stderr
    assert "sync_dist" not in done.stderr
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert state["global_step"] == 2


def small_module(**options):
    torch.manual_seed(0)
    return JSCCModule(AdaptiveJSCC(widths=(8, 12), depths=(1, 1), conditioning=8), **options)


def test_an_image_meets_its_own_channel_in_any_batch():
    module = small_module(channel=Rayleigh()).eval()
    images, ids = torch.rand(3, 3, 16, 16), torch.tensor([4, 9, 2])
    with torch.no_grad():
        together, uses = module.transmit(images, ids, 10.0)
        alone, _ = module.transmit(images[1:2], ids[1:2], 10.0)
    torch.testing.assert_close(together[1:2], alone, rtol=1e-4, atol=1e-5)
    assert uses.tolist() == [128, 128, 128]


def test_channels_of_evaluation_depend_on_seed_and_id():
    """Images of two ids meet two channels, one id the same one again; another seed makes others."""
    image, ids = torch.rand(1, 3, 16, 16).expand(3, -1, -1, -1), torch.tensor([4, 9, 4])
    with torch.no_grad():
        first, _ = small_module().eval().transmit(image, ids, 10.0)
        other, _ = small_module(seed=2).eval().transmit(image, ids, 10.0)
    torch.testing.assert_close(first[0], first[2])
    assert (first[0] - first[1]).abs().max() > 0.01
    assert (first - other).abs().amax((1, 2, 3)).min() > 0.01


def test_training_draws_snr_and_ratio_per_image():
    module = small_module(snr_db=(5.0, 15.0), ratios=["1/24", "1/6"])
    snr, ratio = module.draw(200, torch.device("cpu"))
    assert snr.min() >= 5
    assert snr.max() <= 15
    assert snr.unique().numel() > 100
    assert sorted(ratio.unique().tolist()) == pytest.approx([1 / 24, 1 / 6])
    images = torch.rand(2, 3, 32, 32)
    sent = module.codec.encode(images, snr[:2], torch.tensor([1 / 24, 1 / 6], dtype=torch.float64))
    assert torch.equal(sent.side_bits, module.codec.encode(images, snr[:2]).side_bits)  # no ratio is told
    assert sent.uses(snr[:2]).tolist() == [128, 512]
    alone = small_module(snr_db=7.0)
    snr, ratio = alone.draw(5, torch.device("cpu"))
    assert snr.tolist() == [7.0] * 5
    assert ratio is None
    with pytest.raises(UsageError, match="low, high"):
        small_module(snr_db=(5.0, 1.0))
    with pytest.raises(UsageError, match="up to 1/6, not 1/2"):
        small_module(ratios=["1/6", "1/2"])


def test_more_training_images_at_high_snr_where_asked():
    counts = {}
    for share in (0.0, 0.4, 1.0):
        torch.manual_seed(0)
        snr, _ = small_module(snr_db=(-2.0, 22.0), high_snr_share=share).draw(4000, torch.device("cpu"))
        assert snr.min() >= -2
        assert snr.max() <= 22
        counts[share] = (snr > 16).float().mean().item()
    assert counts == pytest.approx({0.0: 0.25, 0.4: 0.55, 1.0: 1.0}, abs=0.03)
    with pytest.raises(UsageError, match="high_snr_share is a share"):
        small_module(high_snr_share=-0.1)


def test_losses():
    images = torch.rand(2, 3, 32, 32)
    received = images + torch.tensor([0.1, 0.01])[:, None, None, None]
    assert float(reconstruction_loss(received, images, "mse")) == pytest.approx((1e-2 + 1e-4) / 2, rel=1e-3)
    # The mean of per-image dB, each with the floor of 4e-6.
    expected = 5 * (math.log10(1e-2 + 4e-6) + math.log10(1e-4 + 4e-6))
    assert float(reconstruction_loss(received, images, "psnr")) == pytest.approx(expected, rel=1e-3)
    large = torch.rand(1, 3, 192, 192)
    assert float(reconstruction_loss(large, large, "ms_ssim")) == pytest.approx(0, abs=1e-5)
    # As many scales as fit: those of a training crop of 96 pixels are four, of which 1 - MS-SSIM is the definition.
    crops = torch.rand(2, 3, 96, 96)
    expected = 1 - float(ms_ssim(0.5 * crops, crops, scales=4))
    assert float(reconstruction_loss(0.5 * crops, crops, "ms_ssim")) == pytest.approx(expected, rel=1e-5)
    with pytest.raises(UsageError, match="psnr"):
        reconstruction_loss(images, images, "l1")


def test_normalisations_do_not_decay():
    codec = ADJSCC(filters=16)
    decayed, others = parameter_groups(codec, 0.1)
    names = {p: n for n, p in codec.named_parameters()}
    assert not [names[p] for p in decayed["params"] if "normalisation" in names[p] or p.ndim < 2]
    assert len(decayed["params"]) + len(others["params"]) == len(names)
    assert others["weight_decay"] == 0


def test_the_codec_sends_under_the_channels_convention():
    module = small_module(channel=AWGN("nominal+3dB")).eval()
    sent = module.codec.encode(torch.rand(2, 3, 16, 16), torch.zeros(2))
    torch.testing.assert_close(sent.power, torch.full((2,), 2.0))


def test_channels_of_evaluation_are_held_out():
    """Training goes through one channel, evaluation through another, whose pilots count."""
    held_out = Rayleigh(coherence=16, csi="lmmse", pilots=4)
    module = small_module(eval_channel=held_out)
    images, ids = torch.rand(2, 3, 24, 24), torch.arange(2)
    used = []
    for name in ("channel", "eval_channel"):
        getattr(module, name).register_forward_hook(lambda *_, name=name: used.append(name))
    module.train()(images, torch.full((2,), 10.0))
    assert used == ["channel"]
    with torch.no_grad():
        _, uses = module.eval().transmit(images, ids, 10.0, Fraction(1, 6))
    assert used == ["channel", "eval_channel"]
    k = 24 * 24 * 3 // 6
    assert uses.tolist() == [held_out.uses(held_out.symbols_within(k))] * 2
    with pytest.raises(UsageError, match="convention"):
        small_module(channel=AWGN("real"), eval_channel=held_out)


def test_bandwidth_is_logged_as_the_convention_counts_it(monkeypatch):
    reals = Convention("counts reals", power=2.0, noise_per="real", uses_per_symbol=2)
    module = small_module(channel=AWGN(reals), eval_ratios=["1/6"], eval_snr_db=[10.0]).eval()
    logged = {}
    monkeypatch.setattr(module, "log", lambda name, value, **_: logged.update({name: float(value)}))
    with torch.no_grad():
        module.test_step({"image": torch.rand(2, 3, 24, 24), "id": torch.arange(2)}, 0)
    module.on_test_epoch_end()
    assert logged["test/uses"] == pytest.approx(1 / 6)


def test_checkpoints_that_hold_no_codec_say_so(tmp_path):
    torch.save({"state_dict": {}, "hyper_parameters": {"lr": 1e-3}}, tmp_path / "python.ckpt")
    with pytest.raises(ChanlabError, match="codec=codec"):
        load_codec(tmp_path / "python.ckpt")
    (tmp_path / "picture.png").write_bytes(b"PNG")
    with pytest.raises(ChanlabError, match="can't be read as a checkpoint"):
        load_codec(tmp_path / "picture.png")
    with pytest.raises(UsageError, match="no checkpoint"):
        load_codec(tmp_path / "absent.ckpt")


@pytest.mark.parametrize("convention", ["nominal+3dB", dict(vars(CONVENTIONS["nominal+3dB"])), None])
def test_codecs_load_where_their_channels_are_not(tmp_path, convention):
    """The store that a codec was trained on lies elsewhere; the channel's convention stays the codec's."""
    codec = {"class_path": "chanlab.jscc.AdaptiveJSCC", "init_args": {"widths": [8, 12], "depths": [1, 1]}}
    realisations = {"class_path": "chanlab.jscc.StoreRealisations", "init_args": {"store": str(tmp_path / "absent")}}
    link = {"class_path": "chanlab.jscc.OFDMLink", "init_args": {"realisations": realisations}}
    if convention is not None:
        link["init_args"]["convention"] = convention
    module = JSCCModule(AdaptiveJSCC(widths=(8, 12), depths=(1, 1)))
    hyperparameters = {
        "_class_path": "chanlab.jscc.JSCCModule",
        "_instantiator": "lightning.pytorch.cli.instantiate_module",
        "codec": codec,
        "channel": link,
    }
    checkpoint = {"state_dict": module.state_dict(), "hyper_parameters": hyperparameters}
    torch.save({**checkpoint, "pytorch-lightning_version": lightning.__version__}, tmp_path / "best.ckpt")
    loaded = load_codec(tmp_path / "best.ckpt")
    assert loaded.convention.power == (1.0 if convention is None else 2.0)
    for name, value in module.codec.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], value)


def test_pilots_come_out_of_the_images_channel_uses():
    module = small_module(channel=Rayleigh(coherence=16, csi="lmmse", pilots=4)).eval()
    images, ids = torch.rand(2, 3, 24, 24), torch.arange(2)
    with torch.no_grad():
        for ratio in (Fraction(1, 6), Fraction(1, 12)):
            k = math.floor(ratio * images[0].numel())
            _, uses = module.transmit(images, ids, 10.0, ratio)
            assert (uses <= k).all()
            assert (uses > k - 5).all()  # 12 symbols of a block need 4 pilots
