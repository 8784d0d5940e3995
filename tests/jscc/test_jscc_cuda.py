"""Channels on a CUDA device: the same ones as on the CPU where an image has its own key, and the same contract."""

import pytest
import torch
from contract_checks import image_keys, random_symbols

from chanlab.channels import CDL, Clarke, PlanarArray
from chanlab.jscc import AWGN, MIMO, ModelRealisations, OFDMLink, Rayleigh, Rician, SourceRealisations

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def channels():
    clarke = SourceRealisations(Clarke(rms_delay_spread=2e-7, speed=[5.0, 30.0]), 32)
    return {
        "awgn": AWGN(),
        "rayleigh, lmmse": Rayleigh(20, "lmmse", 2),
        "rician": Rician(6.0, 20),
        "mimo mmse": MIMO(4, 4, None, "mmse", 20, "lmmse"),
        "mimo svd": MIMO(2, 2, None, "svd", 20),
        "ofdm lmmse": OFDMLink(clarke, 24),
        "ofdm ls": OFDMLink(clarke, 24, csi="ls"),
    }


@pytest.mark.parametrize("name", channels())
def test_cuda_is_the_cpu(name):
    channel = channels()[name].eval()
    x, snr_db, keys = random_symbols(4, 600), torch.tensor([0.0, 5.0, 10.0, 20.0]), image_keys(4)
    cpu = channel(x, snr_db, keys)
    cuda = channel.cuda()(x.cuda(), snr_db.cuda(), keys.cuda())
    torch.testing.assert_close(cuda.symbols.cpu(), cpu.symbols, rtol=5e-3, atol=5e-3)
    torch.testing.assert_close(cuda.symbol_snr_db.cpu(), cpu.symbol_snr_db, rtol=0.0, atol=0.1)
    assert torch.equal(cuda.uses.cpu(), cpu.uses)


@pytest.mark.parametrize("csi", ["perfect", "lmmse", "ls"])
def test_drawn_channels_on_the_device(csi):
    model = CDL("C", 300e-9, (0.0, 30.0), 3.5e9, PlanarArray(), PlanarArray(), block=64)
    link = OFDMLink(ModelRealisations(model, 64), 64, csi=csi).cuda()
    x = random_symbols(64, 2304).cuda().requires_grad_()
    received = link(x, 10.0, torch.Generator("cuda").manual_seed(0))
    error = (received.unbiased - x).abs().square() / received.noise_variance
    assert 0.9 < error.mean() < 1.1
    received.symbols.real.sum().backward()
    assert x.grad.isfinite().all()


def test_a_generator_of_the_cpu_serves_any_device():
    x = random_symbols(4, 600)
    cpu = Rayleigh(20)(x, 10.0, torch.Generator().manual_seed(0)).symbols
    cuda = Rayleigh(20)(x.cuda(), 10.0, torch.Generator().manual_seed(0)).symbols
    torch.testing.assert_close(cuda.cpu(), cpu, rtol=1e-3, atol=1e-3)
