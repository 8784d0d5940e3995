import math
import subprocess
import sys

import pytest
import torch

from chanlab.errors import UsageError
from chanlab.link import effective_gain, mrt, precode, regularised_zero_forcing
from chanlab.metrics import mrt_precoder, multiuser_sinr


def rayleigh(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.complex64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ["mrt", "rzf", "zf"])
@pytest.mark.parametrize("granularity", [1, 4, 5])
@pytest.mark.parametrize("users", [1, 4])
def test_every_resource_element_is_sent_with_power_one(name, granularity, users):
    csi = 3.7 * rayleigh(5, users, 32, 2, 12)
    w = precode(name, csi, 0.1, granularity)
    assert w.shape == (5, 32, users, 2, 12)
    power = w.abs().square().sum((-4, -3))
    torch.testing.assert_close(power, torch.ones_like(power), rtol=0, atol=2e-6)
    per_stream = w.abs().square().sum(-4)
    torch.testing.assert_close(per_stream, torch.full_like(per_stream, 1 / users), rtol=0, atol=2e-6)


def test_zero_forcing_with_perfect_csi_nulls_interference():
    h = rayleigh(3, 4, 32, 1, 8)
    gain = effective_gain(h, precode("zf", h, 0.1))
    own = torch.diagonal(gain, dim1=1, dim2=2)
    others = gain - torch.diag_embed(own, dim1=1, dim2=2)
    assert others.abs().max() < 1e-5 * own.abs().min()


def test_matched_filter_of_one_user_collects_the_whole_channel():
    h = rayleigh(3, 1, 32, 2, 8)
    w = mrt(h)
    torch.testing.assert_close(effective_gain(h, w)[:, 0, 0].abs(), torch.linalg.vector_norm(h[:, 0], dim=1))
    torch.testing.assert_close(w, mrt_precoder(h))


def test_regularisation_goes_from_zero_forcing_to_maximum_ratio():
    h = rayleigh(2, 3, 8, 1, 4)
    torch.testing.assert_close(regularised_zero_forcing(h, 1e-9), regularised_zero_forcing(h, 0.0))
    torch.testing.assert_close(regularised_zero_forcing(h, 1e7), mrt(h), rtol=1e-4, atol=1e-5)


def test_regularisation_k_n0_is_the_best_for_perfect_csi():
    h, n0 = rayleigh(200, 4, 6, 1, 2), 0.3

    def rate(alpha: float) -> float:
        return float(torch.log2(1 + multiuser_sinr(h, regularised_zero_forcing(h, alpha), n0)).mean())

    assert rate(4 * n0) > rate(0.1 * n0)
    assert rate(4 * n0) > rate(80 * n0)


def test_a_precoder_is_shared_by_neighbouring_subcarriers():
    w = precode("rzf", rayleigh(1, 2, 8, 1, 10), 0.1, granularity=4)
    assert torch.equal(w[..., 0:1].expand(*w.shape[:-1], 4), w[..., :4])
    assert torch.equal(w[..., 8], w[..., 9])
    assert not torch.equal(w[..., 3], w[..., 4])


def test_sinr_equals_a_monte_carlo_of_symbols():
    h, n0 = rayleigh(1, 3, 8, 1, 1, seed=1), 0.2
    w = mrt(h)
    expected = multiuser_sinr(h, w, n0)[0, :, 0, 0]
    g = torch.Generator().manual_seed(2)
    count = 400_000
    x = torch.polar(torch.ones(()), math.pi / 2 * torch.randint(4, (3, count), generator=g) + math.pi / 4)
    sent = w[0, :, :, 0, 0] @ x
    assert sent.abs().square().sum(0).mean().item() == pytest.approx(1.0, rel=0.01)
    y = h[0, :, :, 0, 0] @ sent + math.sqrt(n0) * torch.randn(3, count, dtype=torch.complex64, generator=g)
    signal = (y * x.conj()).mean(-1)
    rest = (y - signal[:, None] * x).abs().square().mean(-1)
    torch.testing.assert_close(signal.abs().square() / rest, expected, rtol=0.02, atol=0)


def test_what_cannot_be_is_said():
    with pytest.raises(UsageError, match="linearly dependent"):
        precode("zf", torch.ones(1, 2, 4, 1, 3, dtype=torch.complex64), 0.1)
    with pytest.raises(UsageError, match="at least as many ports"):
        mrt(rayleigh(1, 5, 4, 1, 3))
    with pytest.raises(UsageError, match="NaN"):
        mrt(rayleigh(1, 2, 4, 1, 3) * math.nan)
    with pytest.raises(UsageError, match="unknown"):
        precode("mmse", rayleigh(1, 2, 4, 1, 3), 0.1)  # type: ignore[arg-type]


def test_first_import_of_sionna_leaves_random_state_alone():
    code = """
import sys, torch
from chanlab.link import CodedLink
from chanlab.link.precoding import regularised_zero_forcing
assert "sionna.phy" not in sys.modules
torch.manual_seed(3)
before = torch.get_rng_state()
regularised_zero_forcing(torch.eye(2, dtype=torch.complex64).view(2, 2, 1, 1), 0.1)
assert torch.equal(torch.get_rng_state(), before)
CodedLink(num_users=1, num_subcarriers=48)
assert torch.equal(torch.get_rng_state(), before)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
