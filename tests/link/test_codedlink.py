import math

import pytest
import torch

from chanlab.errors import UsageError
from chanlab.link import CodedLink, effective_gain, precode
from chanlab.link.decoding import block_errors, is_lost, iteration_stages, llr_information


def generators(count: int, seed: int = 0) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(1000 * seed + i) for i in range(count)]


def rayleigh(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.complex64, generator=torch.Generator().manual_seed(seed))


def test_block_errors_in_awgn_are_those_of_sionna():
    """One user, one port, no fading: the same code, Eb/N0 and number of iterations in a chain made of Sionna alone."""
    from sionna.phy.channel import AWGN
    from sionna.phy.fec.ldpc import LDPC5GDecoder, LDPC5GEncoder
    from sionna.phy.mapping import Demapper, Mapper
    from sionna.phy.utils import ebnodb2no

    count, ebno_db = 400, 2.2
    no = float(ebnodb2no(ebno_db, 2, 0.5))
    assert no == pytest.approx(10 ** (-ebno_db / 10))  # QPSK at rate 1/2: one bit per symbol, Eb/N0 is the SNR
    link = CodedLink(12, num_users=1, pilot_symbols=(), receiver="perfect", bits_per_symbol=2, num_iterations=10)
    ours = link.run(torch.ones(count, 1, 1, 1, 12), link.transmit(generators(count)), no)
    assert (link.k, link.n, ours.rate) == (168, 336, 1.0)

    torch.manual_seed(5)
    encoder = LDPC5GEncoder(168, 336, num_bits_per_symbol=2, device="cpu")
    decoder = LDPC5GDecoder(encoder, num_iter=10, device="cpu")
    bits = torch.randint(0, 2, (count, 168)).float()
    with torch.inference_mode():
        y = AWGN(device="cpu")(Mapper("qam", 2, device="cpu")(encoder(bits)), torch.tensor(no))
        decoded = decoder(Demapper("app", "qam", 2, device="cpu")(y, torch.tensor(no)))
    theirs = (decoded != bits).any(-1).double().mean().item()
    assert 0.03 < theirs < 0.7
    spread = math.sqrt(2 * theirs * (1 - theirs) / count)
    assert abs(ours.bler - theirs) < 3.5 * spread


def test_every_resource_element_carries_power_one():
    link = CodedLink(24, num_users=2)
    sent = link.transmit(generators(40))
    w = precode("rzf", rayleigh(40, 2, 8, 1, 24), 0.1)
    x = torch.einsum("smjtf,sjtf->smtf", w.expand(-1, -1, -1, 14, -1), sent.grid)
    power = x.abs().square().sum(1).mean(0)  # [symbol, subcarrier]
    assert power.mean().item() == pytest.approx(1.0, abs=0.02)
    torch.testing.assert_close(power[[2, 11]], torch.ones(2, 24), rtol=0, atol=1e-5)  # pilots


@pytest.mark.parametrize("snr_db", [-5.0, 12.0])
def test_measured_snr_is_the_one_asked_for(snr_db):
    """Per port, before array gain: what one port with all the power is received with, over the noise."""
    link = CodedLink(24, num_users=1)
    sent = link.transmit(generators(60))
    h = rayleigh(60, 1, 8, 1, 24)
    h = h / h.abs().square().mean((1, 2, 3, 4), keepdim=True).sqrt()
    port = torch.zeros(60, 8, 1, 1, 24, dtype=torch.complex64)
    port[torch.arange(60), torch.arange(60) % 8] = 1.0
    n0 = 10 ** (-snr_db / 10)
    clean, noisy = (link.receive(effective_gain(h, port), sent, n) for n in (0.0, n0))
    snr = clean.abs().square().mean() / (noisy - clean).abs().square().mean()
    assert 10 * math.log10(snr.item()) == pytest.approx(snr_db, abs=0.2)


def test_effective_gains_stand_for_the_full_array():
    """What a user receives is the same when the 32 port signals go through Sionna's OFDM channel."""
    from sionna.phy.channel import ApplyOFDMChannel

    link = CodedLink(24, num_users=4)
    sent = link.transmit(generators(3))
    h = rayleigh(3, 4, 32, 1, 24)
    w = precode("rzf", h + 0.3 * rayleigh(3, 4, 32, 1, 24, seed=9), 0.1)
    x = torch.einsum("smjtf,sjtf->smtf", w.expand(-1, -1, -1, 14, -1), sent.grid)[:, None]
    full = h.movedim(3, 4).expand(3, 4, 32, 24, 1).movedim(-1, 3).expand(-1, -1, -1, 14, -1)
    y = ApplyOFDMChannel(device="cpu")(x, full[:, :, None, None])[:, :, 0]
    torch.testing.assert_close(link.receive(effective_gain(h, w), sent, 0.0), y, rtol=1e-4, atol=1e-5)


def test_shortcuts_of_the_decoder_change_no_error():
    settings = {"num_users": 1, "pilot_symbols": (), "receiver": "perfect", "bits_per_symbol": 2}
    fast, full = CodedLink(24, **settings), CodedLink(24, shortcuts=False, **settings)
    sent = fast.transmit(generators(96))
    gain = torch.linspace(0.55, 1.15, 96)[:, None, None, None, None] * torch.ones(1, 1, 1, 1, 24)
    a, b = fast.run(gain, sent, 0.75), full.run(gain, sent, 0.75)
    assert 0.2 < b.bler < 0.9
    assert torch.equal(a.errors, b.errors)


def test_information_of_logits_tells_lost_blocks():
    g = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 2, (400, 2000), generator=g).float()
    # a binary-input Gaussian channel at Es/N0 = 0 dB per real dimension carries 0.486 bit
    y = (2 * bits - 1) + torch.randn(bits.shape, generator=g)
    information = llr_information(2 * y, bits)
    assert information.mean().item() == pytest.approx(0.486, abs=0.005)
    torch.testing.assert_close(llr_information(1.4 * y, bits).mean(), information.mean(), atol=0.004, rtol=0)
    assert is_lost(2 * y, bits, 0.56).float().mean() > 0.99
    assert not is_lost(2 * y, bits, 0.42).any()


def test_stages_resume_where_the_decoder_was():
    from sionna.phy.fec.ldpc import LDPC5GDecoder, LDPC5GEncoder

    encoder = LDPC5GEncoder(100, 200, device="cpu")
    decoder = LDPC5GDecoder(encoder, return_state=True, device="cpu")
    g = torch.Generator().manual_seed(1)
    bits = torch.randint(0, 2, (40, 100), generator=g).float()
    y = 2 * encoder(bits) - 1
    llr = 2 / 0.85**2 * (y + 0.85 * torch.randn(y.shape, generator=g))
    assert iteration_stages(20) == [2, 3, 5, 10]
    assert iteration_stages(8) == [2, 3, 3]
    assert iteration_stages(2) == [2]
    every = torch.ones(40, dtype=torch.bool)
    once = block_errors(decoder, llr, bits, [20], every)
    assert torch.equal(block_errors(decoder, llr, bits, [2, 3, 5, 10], every, chunk=16), once)
    assert bool(block_errors(decoder, llr, bits, [20], ~every).all())


def test_bits_and_noise_of_a_set_do_not_depend_on_its_companions():
    link = CodedLink(24, num_users=2)
    several, one = link.transmit(generators(3)), link.transmit(generators(3)[2:])
    for name in ("bits", "grid", "noise"):
        assert torch.equal(getattr(several, name)[2:], getattr(one, name))


def test_least_squares_costs_something_and_not_everything():
    link, genie = CodedLink(24, num_users=2), CodedLink(24, num_users=2, receiver="perfect")
    assert link.rate == genie.rate == pytest.approx(2 * 12 / 14)
    h = rayleigh(24, 2, 8, 1, 1).expand(-1, -1, -1, 1, 24)
    gain = effective_gain(h, precode("rzf", h, 0.9))
    sent = link.transmit(generators(24))
    known, estimated = genie.run(gain, sent, 0.9), link.run(gain, sent, 0.9)
    assert known.block_errors <= estimated.block_errors < 48
    assert estimated.goodput == pytest.approx((1 - estimated.bler) * link.rate)
    at_high_snr = link.run(gain, sent, 0.01)
    assert at_high_snr.block_errors == 0
    varying = gain.expand(-1, -1, -1, 14, -1) * torch.polar(torch.ones(()), 0.02 * torch.arange(14.0))[:, None]
    assert link.run(varying, sent, 0.01).block_errors == 0


def test_a_large_slot_is_cut_into_code_blocks():
    link = CodedLink(300, num_users=1, pilot_symbols=(2,), bits_per_symbol=6, code_rate=0.8)
    assert link.num_blocks == 3
    assert link.k <= 8448
    assert link.num_blocks * link.n == 300 * 13 * 6
    sent = link.transmit(generators(1))
    assert link.run(torch.ones(1, 1, 1, 1, 300), sent, 1e-3).errors.tolist() == [[[False, False, False]]]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_subcarriers": 25}, "pilot combs"),
        ({"receiver": "ls", "pilot_symbols": ()}, "give pilot_symbols"),
        ({"pilot_symbols": (14,)}, "within 0..13"),
        ({"bits_per_symbol": 3}, "bits_per_symbol"),
        ({"code_rate": 0.1}, "code_rate"),
        ({"receiver": "mmse"}, "receiver"),
    ],
)
def test_what_cannot_be_is_said(settings, said):
    with pytest.raises(UsageError, match=said):
        CodedLink(**({"num_subcarriers": 24} | settings))


def test_a_gain_of_another_shape_is_refused():
    link = CodedLink(24, num_users=2)
    with pytest.raises(UsageError, match="gain"):
        link.run(torch.ones(1, 3, 2, 1, 24), link.transmit(generators(1)), 0.1)
