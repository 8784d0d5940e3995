"""Every channel keeps the contract; what is physically true of each; the defects of earlier codes, planted."""

import math

import pytest
import torch
from contract_checks import (
    check_asked_snr,
    check_channel,
    check_images_do_not_meet,
    check_noise_is_told,
    image_keys,
    random_symbols,
)

from chanlab.errors import UsageError
from chanlab.jscc import AWGN, MIMO, Rayleigh, Rician, Transmission, normalise_power
from chanlab.jscc.channels import Equalised
from chanlab.jscc.mimo import detect

# channel, mean effective SNR over the asked one (None: not in closed form), whether errors have the told variance
CHANNELS = {
    "awgn": (AWGN(), 1.0, True),
    "awgn, nominal+3dB": (AWGN("nominal+3dB"), 1.0, True),
    "awgn, real": (AWGN("real"), 1.0, True),
    "rayleigh, fast": (Rayleigh(1), 1.0, True),
    "rayleigh, blocks": (Rayleigh(20), 1.0, True),
    "rayleigh, blocks, pilots unused": (Rayleigh(20, "perfect", 2), 1.0, True),
    "rayleigh, blocks, ls": (Rayleigh(20, "ls"), None, True),
    "rayleigh, blocks, lmmse": (Rayleigh(20, "lmmse", 2), None, True),
    "rayleigh, phase": (Rayleigh(20, "phase"), None, False),
    "rayleigh, none": (Rayleigh(20, "none"), None, False),
    "rician, blocks": (Rician(6.0, 20), 1.0, True),
    "rician, lmmse": (Rician(6.0, 20, "lmmse"), None, True),
    "mimo 2x2 svd": (MIMO(2, 2, None, "svd", 10), 1.0, True),
    "mimo 1x2 mmse": (MIMO(1, 2, None, "mmse", 10), 2.0, True),
    "mimo 4x4 mmse": (MIMO(4, 4, None, "mmse", 12), None, True),
    "mimo 4x2 svd, lmmse": (MIMO(4, 2, None, "svd", 20, "lmmse"), None, True),
    "mimo 2x4 mmse, ls": (MIMO(2, 4, None, "mmse", 20, "ls", 4), None, False),
}


@pytest.mark.parametrize("name", CHANNELS)
def test_contract(name):
    channel, mean_gain, calibrated = CHANNELS[name]
    check_channel(channel, mean_gain=mean_gain, calibrated=calibrated)


@pytest.mark.parametrize("channel", [Rayleigh(None, "lmmse"), Rician(3.0), MIMO(2, 2)], ids=lambda c: type(c).__name__)
def test_slow_fading_is_one_gain_per_image(channel):
    x = random_symbols(64, 400)
    snr = channel.eval()(x, 10.0, image_keys(64)).symbol_snr_db
    streams = channel.symbols_per_use
    for stream in range(streams):
        torch.testing.assert_close(snr[:, stream::streams], snr[:, stream : stream + 1].expand(-1, 400 // streams))
    assert snr[:, 0].std() > 1.0


def test_awgn_adds_half_of_the_noise_to_each_part():
    """Noise variance off by 2 is the defect: N0/2 in each real dimension."""
    x = random_symbols(64, 1000)
    noise = AWGN()(x, 7.0, torch.Generator().manual_seed(0)).symbols - x
    half = 10**-0.7 / 2
    assert math.isclose(noise.real.var(), half, rel_tol=0.02)
    assert math.isclose(noise.imag.var(), half, rel_tol=0.02)
    assert abs((noise.real * noise.imag).mean()) < 0.02 * half


@pytest.mark.parametrize(("convention", "offset"), [("standard", 0.0), ("nominal+3dB", 3.0103), ("real", 0.0)])
def test_conventions_are_measured_on_air(convention, offset):
    x = random_symbols(64, 1000, convention=convention)
    y = AWGN(convention)(x, 10.0, torch.Generator().manual_seed(0)).symbols
    measured = 10 * torch.log10(x.abs().square().mean() / (y - x).abs().square().mean())
    assert math.isclose(measured, 10.0 + offset, abs_tol=0.05)


def test_fading_is_complex_and_of_unit_power():
    """Real fading is the defect: |h|² of complex Rayleigh fading is exponential with mean 1 and phase uniform."""
    x = torch.ones(200, 500, dtype=torch.complex64)
    h = Rayleigh(1, "none")(x, 80.0, torch.Generator().manual_seed(0)).symbols
    power = h.abs().square()
    assert math.isclose(power.mean(), 1.0, rel_tol=0.02)
    assert math.isclose(power.var(), 1.0, rel_tol=0.05)  # real fading: 2; two real gains for I and Q: no such phase
    assert math.isclose((power < 0.1).float().mean(), 1 - math.exp(-0.1), rel_tol=0.03)
    circle = torch.histc(h.angle(), 8, -math.pi, math.pi) / h.numel()
    torch.testing.assert_close(circle, torch.full((8,), 1 / 8), rtol=0.03, atol=0.0)


def test_rician_k_factor():
    x = torch.ones(2000, 50, dtype=torch.complex64)
    h = Rician(7.0, 1, "none")(x, 80.0, torch.Generator().manual_seed(0)).symbols
    k = 10**0.7
    assert math.isclose(h.abs().square().mean(), 1.0, rel_tol=0.02)
    sight = h.mean(1).abs()
    assert math.isclose(sight.square().mean(), k / (k + 1), rel_tol=0.03)
    assert h.mean().abs() < 0.05  # its phase is an image's own


def test_blocks_share_a_gain_and_neighbours_do_not():
    x = torch.ones(500, 60, dtype=torch.complex64)
    h = Rayleigh(20, "none")(x, 80.0, torch.Generator().manual_seed(0)).symbols
    torch.testing.assert_close(h[:, :20], h[:, :1].expand(-1, 20), atol=1e-3, rtol=0.0)
    assert ((h[:, 0] * h[:, 20].conj()).mean()).abs() < 0.15


def test_a_block_counts_its_pilots():
    channel = Rayleigh(20, "lmmse", 2)
    assert [channel.uses(s) for s in (1, 18, 19, 36, 37)] == [3, 20, 23, 40, 43]
    mimo = MIMO(2, 2, None, "mmse", 10, "lmmse")
    assert [mimo.uses(s) for s in (1, 2, 16, 17)] == [3, 3, 10, 13]


def test_data_of_a_block_share_its_gain():
    snr = Rayleigh(20, "lmmse", 2)(random_symbols(8, 54), 10.0, image_keys(8)).symbol_snr_db
    blocks = snr.view(8, 3, 18)
    torch.testing.assert_close(blocks, blocks[..., :1].expand_as(blocks))
    assert (blocks[:, 1, 0] != blocks[:, 0, 0]).all()


def test_more_pilots_estimate_better():
    x = random_symbols(200, 300)
    errors = []
    for pilots in (1, 2, 4, 8):
        y = Rayleigh(60, "lmmse", pilots)(x, 5.0, image_keys(200)).symbols
        errors.append(float((y - x).abs().square().mean()))
    perfect = float((Rayleigh(60)(x, 5.0, image_keys(200)).symbols - x).abs().square().mean())
    assert errors == sorted(errors, reverse=True)
    assert perfect < errors[-1] < 1.1 * perfect + 0.01


@pytest.mark.parametrize("snr_db", [0.0, 10.0])
@pytest.mark.parametrize("pilots", [1, 4])
def test_the_error_of_an_estimate_in_closed_form(snr_db, pilots):
    """Pilots of N0 / pilots per unit power leave e = N0 / pilots: mean SNR 1 / (1 + e) / (N0 + e / (1 + e))."""
    out = Rayleigh(20, "lmmse", pilots)(random_symbols(500, 600), snr_db, image_keys(500))
    n0 = 10 ** (-snr_db / 10)
    e = n0 / pilots
    assert math.isclose((1 / out.noise_variance).mean(), 1 / (1 + e) / (n0 + e / (1 + e)), rel_tol=0.03)
    mimo = MIMO(1, 1, None, "mmse", 20, "lmmse", pilots)(random_symbols(500, 600), snr_db, image_keys(500))
    assert math.isclose((1 / mimo.noise_variance).mean(), (1 / out.noise_variance).mean(), rel_tol=0.05)
    # Two antennas share the power of each pilot; the stream leaves along the estimate, of mean energy 2 / (1 + e).
    miso = MIMO(2, 1, 1, "svd", 20, "lmmse", 2 * pilots)(random_symbols(500, 600), snr_db, image_keys(500))
    assert math.isclose((1 / miso.noise_variance).mean(), 2 * (1 / out.noise_variance).mean(), rel_tol=0.05)


def test_mmse_is_the_best_scaling():
    """Of all real scalings of what arrives, the equaliser's has the least error, and its bias is what it tells."""
    x = random_symbols(400, 50)
    out = Rayleigh(1)(x, 3.0, torch.Generator().manual_seed(0))
    for factor in (0.9, 1.1):
        assert (factor * out.symbols - x).abs().square().mean() > (out.symbols - x).abs().square().mean()
    torch.testing.assert_close(out.gain, 1 / (1 + out.noise_variance))


def test_fast_rayleigh_mse_in_closed_form():
    """E[1 / (1 + SNR |h|²)] = e^{1/SNR} E1(1/SNR) / SNR."""
    from scipy.special import exp1

    x = random_symbols(500, 400)
    for snr_db in (0.0, 10.0, 20.0):
        snr = 10 ** (snr_db / 10)
        error = (Rayleigh(1)(x, snr_db, torch.Generator().manual_seed(0)).symbols - x).abs().square().mean()
        assert math.isclose(error, math.exp(1 / snr) * exp1(1 / snr) / snr, rel_tol=0.03)


def test_detection_is_sionnas_lmmse():
    from chanlab.channels.sionna_phy import phy

    generator = torch.Generator().manual_seed(0)
    a = torch.randn(5, 4, 3, dtype=torch.complex64, generator=generator)
    y = torch.randn(5, 7, 4, dtype=torch.complex64, generator=generator)
    variance = torch.full((5, 1, 1), 0.3)
    ours = detect(y, a, variance, 1.0)
    covariance = 0.3 * torch.eye(4, dtype=torch.complex64).expand(5, 7, 4, 4)
    x, noise = phy("mimo").lmmse_equalizer(y, a[:, None].expand(5, 7, 4, 3), covariance)
    torch.testing.assert_close(ours.symbols / ours.gain, x, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(ours.noise_variance.expand(5, 7, 3), noise, rtol=1e-3, atol=1e-4)


def test_singular_vectors_have_the_same_phase_in_every_library(monkeypatch):
    x, keys = random_symbols(4, 600), image_keys(4)
    want = MIMO(2, 2, None, "svd", 10)(x, 10.0, keys).symbols
    svd = torch.linalg.svd

    def turned(a, **options):
        u, s, vh = svd(a, **options)
        phase = torch.exp(1j * torch.arange(s.shape[-1]) * 0.7 + 0.4j)
        return torch.return_types.linalg_svd((u * phase, s, phase.conj()[:, None] * vh))

    monkeypatch.setattr(torch.linalg, "svd", turned)
    torch.testing.assert_close(MIMO(2, 2, None, "svd", 10)(x, 10.0, keys).symbols, want, rtol=1e-4, atol=1e-4)


def test_svd_separates_streams():
    """With perfect CSI the SVD scheme has the singular values as gains: no stream disturbs another."""
    x = random_symbols(300, 100)
    snr_db = 20.0
    out = MIMO(2, 2, None, "svd")(x, snr_db, image_keys(300))
    snr = 10 ** (out.symbol_snr_db / 10)
    strong, weak = snr[:, 0], snr[:, 1]
    assert (strong >= weak).all()
    # Sum of squares of singular values is the channel's energy, of mean 4; two streams share the power.
    assert math.isclose((strong + weak).mean(), 10**2 * 4 / 2, rel_tol=0.1)


def test_power_is_checked_on_air_in_evaluation():
    x = 1.1 * random_symbols(2, 100)
    with pytest.raises(UsageError, match="normalise_power"):
        AWGN().eval()(x, 10.0)
    AWGN().train()(x, 10.0)
    batch = normalise_power(torch.stack([x[0], 3 * x[1]]), convention="batch-power")
    AWGN("batch-power").eval()(batch, 10.0)
    used = (
        torch.arange(batch.shape[1]) < torch.tensor([batch.shape[1], 10])[:, None]
    )  # the power is that of all symbols
    few = normalise_power(torch.stack([x[0], 3 * x[1]]), used, "batch-power")
    assert float(few.abs().square().sum() / used.sum()) == pytest.approx(1, rel=1e-4)
    AWGN("batch-power").eval()(Transmission.of(few, used), 10.0)
    with pytest.raises(UsageError, match="mean power"):
        AWGN("batch-power").eval()(Transmission.of(1.05 * few, used), 10.0)
    with pytest.raises(UsageError, match="normalise_power"):
        AWGN().eval()(batch, 10.0)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Rayleigh(1, "lmmse"), "no room"),
        (lambda: Rayleigh(20, "lmmse", 0), "pilots >= 1"),
        (lambda: Rayleigh(csi="genie"), "csi must be"),
        (lambda: MIMO(2, 2, 3), "streams"),
        (lambda: MIMO(4, 2, None, "svd", None, "ls", 2), "orthogonal pilots"),
        (lambda: MIMO(2, 2, None, "mmse", 2, "lmmse"), "no room"),
        (lambda: AWGN("shannon"), "conventions are"),
        (lambda: AWGN()(random_symbols(2, 10), torch.zeros(3)), "one per image"),
        (lambda: AWGN()(torch.randn(2, 10), 3.0), "pair_iq"),
        (lambda: AWGN()(random_symbols(2, 10), 3.0, torch.zeros(3, dtype=torch.int64)), "one per image"),
        (lambda: Rayleigh(20, "lmmse").symbols_within(1), "no symbol"),
    ],
)
def test_errors_name_the_remedy(make, match):
    with pytest.raises(UsageError, match=match):
        make()


def test_autocast_leaves_channels_alone():
    x = random_symbols(2, 200)
    with torch.autocast("cpu", torch.bfloat16):
        cast = MIMO(2, 2, None, "svd", 10, "lmmse")(x, 10.0, image_keys(2)).symbols
    torch.testing.assert_close(cast, MIMO(2, 2, None, "svd", 10, "lmmse")(x, 10.0, image_keys(2)).symbols)


class Planted(AWGN):
    """AWGN with one of the defects that earlier codes have."""

    def __init__(self, defect):
        super().__init__()
        self.defect = defect

    def receive(self, symbols, count, noise_variance, draws):
        k = symbols.shape[1]
        variance = noise_variance[:, None]
        if self.defect == "iq of two images":  # WITT: the flat batch is cut into real and imaginary halves
            flat = torch.view_as_real(symbols).movedim(-1, 1).flatten()
            halves = torch.complex(*flat.chunk(2)).view_as(symbols)
            noisy = halves * 1j**0.5 + variance.sqrt() * draws.complex_normal("noise", k)
            flat = torch.cat([noisy.real.flatten(), noisy.imag.flatten()]).view(len(symbols), 2, k)
            return Equalised(torch.complex(flat[:, 0], flat[:, 1]), variance, torch.ones_like(variance))
        if self.defect == "noise off by 2":
            noise = (variance / 2).sqrt() * draws.complex_normal("noise", k)
        elif self.defect == "noise told and made off by 2":
            variance = variance / 2
            noise = variance.sqrt() * draws.complex_normal("noise", k)
        elif self.defect == "signal power of the batch":
            noise = (variance * symbols.abs().square().mean()).sqrt() * draws.complex_normal("noise", k)
        elif self.defect == "one noise for all":
            noise = variance.sqrt() * draws.complex_normal("noise", k)[:1]
        return Equalised(symbols + noise, variance, torch.ones_like(variance))


@pytest.mark.parametrize(
    ("defect", "check"),
    [
        ("iq of two images", lambda c: check_images_do_not_meet(c, 600)),
        ("noise off by 2", lambda c: check_noise_is_told(c, 600)),
        ("noise told and made off by 2", lambda c: check_asked_snr(c, 600, 1.0)),
        ("signal power of the batch", lambda c: check_images_do_not_meet(c, 600)),
        ("one noise for all", lambda c: check_images_do_not_meet(c, 600)),
    ],
)
def test_planted_defects_are_found(defect, check):
    with pytest.raises(AssertionError):
        check(Planted(defect).eval())


def test_a_transmission_of_tensors_is_all_sent():
    x = random_symbols(2, 50)
    assert Transmission.of(x).used.all()
    assert AWGN()(x, 5.0).data_uses.tolist() == [50, 50]
