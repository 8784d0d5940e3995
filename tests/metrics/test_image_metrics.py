"""Image metrics against their definitions, written anew with SciPy, and against scikit-image where it is installed."""

import math

import numpy as np
import pytest
import torch
from scipy.signal import convolve2d
from torch import nn

from chanlab.errors import MissingDependencyError, UsageError
from chanlab.metrics import LPIPS, MSSSIM, PSNR, SSIM, DownstreamAccuracy, lpips, ms_ssim, psnr, ssim
from chanlab.metrics.images import SCALE_WEIGHTS


@pytest.fixture(scope="module")
def images():
    """Smooth random pictures of 180 x 200 pixels, and the same with noise of several strengths."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(3, 3, 12, 14, generator=generator)
    sent = nn.functional.interpolate(coarse, (180, 200), mode="bicubic", antialias=False).clamp(0, 1)
    strength = torch.tensor([0.02, 0.1, 0.3])[:, None, None, None]
    return (sent + strength * torch.randn(sent.shape, generator=generator)).clamp(0, 1), sent


def window():
    x = np.arange(-5, 6)
    g = np.exp(-(x**2) / (2 * 1.5**2))
    return np.outer(g, g) / g.sum() ** 2


def similarity_maps(x, y):
    """SSIM and its contrast-structure term for one channel, equation 13 of Wang et al. 2004."""

    def mean(z):
        return convolve2d(z, window(), mode="valid")

    mx, my = mean(x), mean(y)
    vx, vy, cov = mean(x * x) - mx**2, mean(y * y) - my**2, mean(x * y) - mx * my
    contrast = (2 * cov + 0.03**2) / (vx + vy + 0.03**2)
    return (2 * mx * my + 0.01**2) / (mx**2 + my**2 + 0.01**2) * contrast, contrast


def test_psnr_is_the_mean_of_decibels():
    """Errors of 0.1 and 0.001: 20 and 60 dB, so 40; the PSNR of the mean error would be 23 dB."""
    sent = torch.full((2, 3, 8, 8), 0.5)
    received = sent + torch.tensor([0.1, 0.001])[:, None, None, None]
    assert psnr(received, sent, "none").tolist() == pytest.approx([20, 60], abs=1e-3)
    assert float(psnr(received, sent)) == pytest.approx(40, abs=1e-3)
    metric = PSNR()
    metric.update(received[:1], sent[:1])
    metric.update(received[1:].expand(3, -1, -1, -1), sent[1:].expand(3, -1, -1, -1))
    assert float(metric.compute()) == pytest.approx((20 + 3 * 60) / 4, abs=1e-3)
    assert math.isinf(psnr(sent, sent))


def test_ssim_is_its_definition(images):
    received, sent = images
    x, y = (t.double().numpy() for t in images)
    want = [np.mean([similarity_maps(x[b, c], y[b, c])[0].mean() for c in range(3)]) for b in range(3)]
    assert ssim(received, sent, "none").tolist() == pytest.approx(want, abs=2e-5)
    assert float(ssim(received, sent)) == pytest.approx(np.mean(want), abs=2e-5)
    assert float(ssim(sent, sent)) == pytest.approx(1, abs=1e-6)
    assert want[0] > want[1] > want[2]


def test_ssim_is_that_of_scikit_image(images):
    metrics = pytest.importorskip("skimage.metrics")
    received, sent = (t.double().permute(0, 2, 3, 1).numpy() for t in images)
    settings = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False}
    for i, value in enumerate(ssim(*images, "none").tolist()):
        want = metrics.structural_similarity(received[i], sent[i], channel_axis=2, data_range=1.0, **settings)
        assert value == pytest.approx(want, abs=2e-5)
    for i, value in enumerate(psnr(*images, "none").tolist()):
        assert value == pytest.approx(metrics.peak_signal_noise_ratio(sent[i], received[i], data_range=1.0), abs=1e-3)


@pytest.mark.parametrize("scales", [1, 3, 5])
def test_ms_ssim_is_its_definition(images, scales):
    weights = np.array(SCALE_WEIGHTS[:scales])
    if scales < 5:
        weights /= weights.sum()
    want = np.ones((3, 3))
    x, y = (t.double().numpy() for t in images)
    for scale, weight in enumerate(weights):
        for b, c in np.ndindex(3, 3):
            similarity, contrast = (m.mean() for m in similarity_maps(x[b, c], y[b, c]))
            want[b, c] *= max(similarity if scale == scales - 1 else contrast, 0) ** weight
        x, y = halved(x), halved(y)
    assert ms_ssim(*images, scales=scales, reduction="none").tolist() == pytest.approx(want.mean(1).tolist(), abs=5e-5)


def halved(z):
    """Means of 2 x 2 pixels, a last odd row or column dropped."""
    height, width = (n // 2 * 2 for n in z.shape[2:])
    return sum(z[:, :, i:height:2, j:width:2] for i in range(2) for j in range(2)) / 4


def test_one_scale_is_ssim(images):
    torch.testing.assert_close(ms_ssim(*images, scales=1, reduction="none"), ssim(*images, "none"))


def test_anticorrelated_images_give_no_nan():
    """A negative contrast term to a fractional power would be NaN; gradients stay finite too."""
    generator = torch.Generator().manual_seed(0)
    sent = torch.rand(1, 1, 176, 176, generator=generator)
    received = (1 - sent).requires_grad_()
    value = ms_ssim(received, sent)
    value.backward()
    assert float(value.detach()) == 0
    assert torch.isfinite(received.grad).all()


@pytest.mark.parametrize(
    ("side", "remedy"), [(96, "scales=4"), (60, "scales=3"), (11, "scales=1"), (8, "larger images")]
)
def test_small_images_are_told_of(side, remedy):
    x = torch.rand(1, 3, side, 200)
    with pytest.raises(UsageError, match=rf"5 scales needs images from 176x176.*not {side}x200: take {remedy}"):
        ms_ssim(x, x)
    if remedy.startswith("scales"):
        assert float(ms_ssim(x, x, scales=int(remedy[-1]))) == pytest.approx(1, abs=1e-5)
    else:
        with pytest.raises(UsageError, match="at least 11x11"):
            ssim(x, x)


@pytest.mark.parametrize("metric", [psnr, ssim, ms_ssim])
def test_what_cannot_be_compared_is_refused(metric):
    x = torch.rand(2, 3, 180, 180)
    with pytest.raises(UsageError, match=r"shape \[2, 3, 180, 180\], target \[1, 3"):
        metric(x, x[:1])
    with pytest.raises(UsageError, match="NaN"):
        metric(x / 0, x)
    with pytest.raises(UsageError, match="divide 8-bit values by 255"):
        metric(255 * x, 255 * x)
    with pytest.raises(UsageError, match="divide by 255"):
        metric(x.byte(), x.byte())
    with pytest.raises(UsageError, match="mean or none"):
        metric(x, x, reduction="sum")


def test_classes_are_means_over_images(images):
    received, sent = images
    for metric, function in ((SSIM(), ssim), (MSSSIM(), ms_ssim), (MSSSIM(scales=3), lambda *x: ms_ssim(*x, scales=3))):
        metric.update(received[:1], sent[:1])
        metric.update(received[1:], sent[1:])
        assert float(metric.compute()) == pytest.approx(float(function(received, sent)), abs=1e-6)
    with pytest.raises(UsageError, match="before any update"):
        PSNR().compute()


def test_downstream_accuracy():
    def brightest(images):
        return images.mean((2, 3))

    metric = DownstreamAccuracy(brightest)
    received = torch.eye(3)[:, :, None, None].expand(3, 3, 8, 8)
    metric.update(received, torch.tensor([0, 1, 0]))
    metric.update(received[:1], torch.tensor([0]))
    assert float(metric.compute()) == pytest.approx(3 / 4)
    with pytest.raises(UsageError, match=r"scores \[batch, class\]"):
        DownstreamAccuracy(lambda x: x).update(received, torch.tensor([0, 1, 0]))


@pytest.fixture
def alexnet(tmp_path):
    """A state dict of AlexNet's convolutions with random weights."""
    generator = torch.Generator().manual_seed(0)
    shapes = {0: (64, 3, 11), 3: (192, 64, 5), 6: (384, 192, 3), 8: (256, 384, 3), 10: (256, 256, 3)}
    state = {}
    for place, (out, into, size) in shapes.items():
        scale = (2 / (into * size**2)) ** 0.5
        state[f"features.{place}.weight"] = scale * torch.randn(out, into, size, size, generator=generator)
        state[f"features.{place}.bias"] = 0.1 * torch.randn(out, generator=generator)
    path = tmp_path / "alexnet.pth"
    torch.save(state, path)
    return path, state


def test_lpips_is_its_definition(alexnet, images):
    """Features of AlexNet written as its table says: kernel, stride, padding; pooling 3/2 before stages 2 and 3."""
    path, state = alexnet
    received, sent = (x[:, :, :64, :80] for x in images)
    import torchmetrics

    folder = torchmetrics.__path__[0]
    heads = torch.load(f"{folder}/functional/image/lpips_models/alex.pth", map_location="cpu", weights_only=True)
    shift, scale = (torch.tensor(v)[:, None, None] for v in ((-0.03, -0.088, -0.188), (0.458, 0.448, 0.45)))
    x, y = ((2 * z - 1 - shift) / scale for z in (received, sent))
    want = torch.zeros(3)
    for i, (place, stride, padding) in enumerate(((0, 4, 2), (3, 1, 2), (6, 1, 1), (8, 1, 1), (10, 1, 1))):
        if i in (1, 2):
            x, y = (nn.functional.max_pool2d(z, 3, 2) for z in (x, y))
        kernel, bias = state[f"features.{place}.weight"], state[f"features.{place}.bias"]
        x, y = (nn.functional.conv2d(z, kernel, bias, stride, padding).relu() for z in (x, y))
        a, b = (z / z.norm(dim=1, keepdim=True).clamp(min=1e-10) for z in (x, y))
        want += ((a - b).square() * heads[f"lin{i}.model.1.weight"]).sum(1).mean((1, 2))
    got = lpips(received, sent, "none", weights=path)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    assert got[0] < got[1] < got[2]
    assert float(lpips(sent, sent, weights=path)) == 0
    metric = LPIPS(weights=path)
    metric.update(received, sent)
    assert float(metric.compute()) == pytest.approx(float(want.mean()), rel=1e-4)


def test_lpips_without_weights_names_the_remedy(tmp_path, monkeypatch, alexnet):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    x = torch.rand(1, 3, 64, 64)
    for attempt in (lambda: lpips(x, x), LPIPS):
        with pytest.raises(
            MissingDependencyError, match=r"hub/checkpoints/alexnet-owt-7be5be79\.pth: copy torchvision's"
        ):
            attempt()
    path, state = alexnet
    torch.save({k: v for k, v in state.items() if "features.8" not in k}, tmp_path / "other.pth")
    with pytest.raises(UsageError, match=r"doesn't hold AlexNet's features\.8"):
        lpips(x, x, weights=tmp_path / "other.pth")
    (tmp_path / "cut.pth").write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UsageError, match="can't be read as a state dict"):
        lpips(x, x, weights=tmp_path / "cut.pth")
    with pytest.raises(UsageError, match="at least 31x31"):
        lpips(x[..., :30], x[..., :30], weights=path)
