import importlib.util
import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from jscc_photographs import photograph
from scipy.integrate import quad
from scipy.stats import norm

from chanlab.channels.sionna_phy import phy
from chanlab.errors import UsageError
from chanlab.jscc.channels import AWGN
from chanlab.jscc.contract import channel_uses, side_information_uses
from chanlab.jscc.fading import Rayleigh
from chanlab.jscc.separation import (
    Avif,
    CapacityCode,
    Jpeg,
    LdpcQam,
    Mcs,
    NormalCode,
    OutageCode,
    Separation,
    bounds,
    nr_mcs,
    separation,
    transport_format,
)
from chanlab.jscc.separation.bler import BlerTable, CodeBlock, Curve, fit, measure_curve, save_table, shipped_table
from chanlab.jscc.separation.channel_codes import effective_snr_db, symbol_snr_db
from chanlab.jscc.separation.mcs import base_graph, mcs_index_bits
from chanlab.jscc.separation.rate_search import psnr_db
from chanlab.jscc.separation.transport import QamDemapper, TransportChannel, bits_to_bytes, bytes_to_bits

ROOT = Path(__file__).resolve().parents[2]
SIXTH, TWELFTH = Fraction(1, 6), Fraction(1, 12)


def images(*seeds, size=96):
    return torch.stack([torch.from_numpy(photograph(size, size, s)).permute(2, 0, 1) for s in seeds]).float() / 255


def fast_avif():
    return Avif(speed=8)


# schemes and transport blocks


def test_schemes_are_those_of_the_standard():
    schemes = nr_mcs()
    assert len(schemes) == 38
    assert {Mcs(2, 449), Mcs(4, 658), Mcs(6, 948), Mcs(8, 682.5), Mcs(10, 948)} <= set(schemes)
    efficiency = [m.efficiency for m in schemes]
    assert efficiency == sorted(efficiency)
    assert 2 ** mcs_index_bits() >= len(schemes) > 2 ** (mcs_index_bits() - 1)


@pytest.mark.parametrize("uses", [512, 2304, 4594, 4608])
def test_transport_blocks_fill_the_channel_uses_exactly(uses):
    for mcs in nr_mcs():
        form = transport_format(mcs, uses)
        if form is None:  # long blocks below rate 1/3 would be repeated
            assert mcs.code_rate < 1 / 3
            assert mcs.efficiency * uses > 3800
            continue
        # payload, CRC of the block (16 or 24 bits), CRC of each code block (24 bits if there are several)
        assert form.crc_bits == (24 if form.size > 3824 else 16) + (24 * form.num_blocks if form.num_blocks > 1 else 0)
        assert form.num_blocks * form.block_bits == form.size + form.crc_bits
        assert form.block_bits <= 8448
        # TS 38.214 quantises sizes in steps of 8 and more: payload within 3 % and 32 bits of the target
        assert abs(form.size - mcs.efficiency * uses) <= 0.03 * mcs.efficiency * uses + 32


@pytest.mark.parametrize("mcs", [Mcs(2, 449), Mcs(6, 772), Mcs(10, 853)])
def test_symbols_of_a_transport_block(mcs):
    form = transport_format(mcs, 1500)
    symbols, code_bits = TransportChannel(form).encode(torch.randint(0, 2, (2, form.size)))
    assert symbols.shape == (2, 1500)
    assert code_bits.shape == (2, 1500 * mcs.bits_per_symbol)
    assert float(symbols.abs().square().mean()) == pytest.approx(1, abs=0.03)


def test_repetition_is_not_promised():
    # base graph 1 below rate 1/3: Sionna has no repetition, so long blocks of 16-QAM 340/1024 are not offered
    assert transport_format(Mcs(4, 340), 100_000) is None
    assert transport_format(Mcs(4, 340), 1000) is not None
    assert base_graph(3824, 0.5) == 2
    assert base_graph(3825, 0.5) == 1
    assert base_graph(8448, 0.25) == 2


@pytest.mark.parametrize("order", [2, 4, 6, 8, 10])
def test_demapper_is_sionnas(order):
    generator = torch.Generator().manual_seed(order)
    y = torch.randn(3, 20, dtype=torch.complex64, generator=generator)
    n0 = torch.rand(3, 20, generator=generator) + 0.05
    reference = phy("mapping").Demapper("app", "qam", order, precision="single", device="cpu")(y, n0)
    assert torch.allclose(QamDemapper(order)(y, n0), reference, atol=1e-4, rtol=1e-4)


def test_decoder_agrees_with_sionnas_transport_block_decoder():
    form = transport_format(Mcs(4, 616), 3000)  # two code blocks of different codeword lengths are joined
    link = TransportChannel(form, 20)
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(0, 2, (12, form.size), generator=generator).float()
    symbols, code_bits = link.encode(bits)
    n0 = torch.tensor(10 ** (-0.78))  # about half of the transport blocks fail
    received = symbols + n0.sqrt() * torch.randn(symbols.shape, dtype=torch.complex64, generator=generator)
    ours, right = link.decode(received, n0.expand(12, 1), code_bits)
    blind, blind_right = link.decode(received, n0.expand(12, 1))
    theirs, ok = phy("nr").TBDecoder(link._encoder, num_bp_iter=20, precision="single", device="cpu")(
        QamDemapper(4)(received, n0)
    )
    assert 0 < int(ok.sum()) < 12
    assert torch.equal(blind_right, right)
    assert bool((right | ~ok).all())  # what 20 iterations decode is right at an earlier look or at the end
    assert int((right != ok).sum()) <= 1  # and a look may catch a block that later iterations would lose again
    assert torch.equal(ours[right], bits[right])
    assert torch.equal(theirs[ok], bits[ok])
    assert torch.equal(blind[right], bits[right])


def test_payload_and_the_mark_of_its_end():
    for data in (b"", b"\0", b"\0\0", b"\xff" * 7, bytes(range(20))):
        size = 8 * len(data) + 1
        assert bits_to_bytes(bytes_to_bits(data, size)) == data
        assert bits_to_bytes(bytes_to_bits(data, size + 13)) == data
        with pytest.raises(UsageError, match="fit"):
            bytes_to_bits(data, size - 1)
    assert bits_to_bytes(torch.zeros(16)) is None


# block error rates


def test_block_error_rate_is_sionnas_own():
    """A point of the waterfall, ours and `PlotBER.simulate` of Sionna on the same code, within their statistics."""
    k, n, order, snr_db, blocks = 400, 800, 4, 6.2, 500
    utils, mapping, ldpc, channel = (phy(m) for m in ("utils", "mapping", "fec.ldpc", "channel"))
    ours = CodeBlock(k, n, order, 20).errors(snr_db, blocks, torch.Generator().manual_seed(1)) / blocks
    where = {"precision": "single", "device": "cpu"}
    encoder = ldpc.LDPC5GEncoder(k, n, num_bits_per_symbol=order, **where)
    decoder = ldpc.LDPC5GDecoder(encoder, num_iter=20, **where)
    mapper, demapper = mapping.Mapper("qam", order, **where), mapping.Demapper("app", "qam", order, **where)
    source, awgn = mapping.BinarySource(**where), channel.AWGN(**where)

    def model(batch_size, ebno_db):
        no = utils.ebnodb2no(ebno_db, num_bits_per_symbol=order, coderate=k / n)
        bits = source([int(batch_size), k])
        return bits, decoder(demapper(awgn(mapper(encoder(bits)), no), no))

    ebno_db = snr_db - 10 * math.log10(order * k / n)
    _, bler = utils.PlotBER().simulate(
        model, ebno_dbs=[ebno_db], batch_size=100, max_mc_iter=5, legend="", show_fig=False, verbose=False
    )
    theirs = float(bler[0])
    assert 0.05 < theirs < 0.95
    mean = (ours + theirs) / 2
    assert abs(ours - theirs) < 3.5 * math.sqrt(2 * mean * (1 - mean) / blocks)


def test_a_probit_line_is_found_again():
    rng = np.random.default_rng(1)
    snrs = np.repeat([4.6, 4.9, 5.1, 5.3], 4)
    points = [(float(s), 200, int(rng.binomial(200, norm.sf((s - 5) / 0.2)))) for s in snrs]
    mean, deviation = fit(points, 4.0, 0.3)
    assert mean == pytest.approx(5, abs=0.03)
    assert deviation == pytest.approx(0.2, abs=0.03)


def test_the_table_predicts_a_code_it_does_not_hold():
    # K = 700, rate 0.55: between measured lengths and rates
    table, k, n, order = shipped_table(), 700, 1272, 4
    mean, deviation = table.waterfall(order, k, n)
    code = CodeBlock(k, n, order, table.origin["num_iterations"])
    for z, low, high in ((-1.2, 0.6, 1.0), (0.0, 0.2, 0.8), (2.2, 0.0, 0.16)):
        errors = code.errors(mean + z * deviation, 80, torch.Generator().manual_seed(3)) / 80
        assert low <= errors <= high, (z, errors)


def test_shipped_table_is_plausible():
    table = shipped_table()
    assert {"command", "commit", "sionna", "decoder", "num_iterations"} <= set(table.origin)
    assert table.origin["command"].startswith("python sims/ldpc_bler.py")
    held = {(c.bits_per_symbol, c.rate_1024) for c in table.curves}
    assert held == {(m.bits_per_symbol, m.rate_1024) for m in nr_mcs()}
    for curve in table.curves:
        capacity_db = 10 * math.log10(2 ** (curve.bits_per_symbol * curve.block_bits / curve.codeword_bits) - 1)
        assert -0.5 < curve.mean_db - capacity_db < 3.5, curve
        assert sum(blocks for _, blocks, _ in curve.points) >= 100
    # longer blocks of one code have a steeper waterfall
    for mcs in nr_mcs():
        same = [c for c in table.curves if (c.bits_per_symbol, c.rate_1024) == (mcs.bits_per_symbol, mcs.rate_1024)]
        assert max(same, key=lambda c: c.block_bits).deviation_db < min(same, key=lambda c: c.block_bits).deviation_db


def test_transport_errors_grow_with_the_number_of_blocks():
    table = shipped_table()
    form = transport_format(Mcs(4, 616), 20_000)
    mean, deviation = table.waterfall(4, form.block_bits, form.codeword_bits)
    one = table.block_error(form, mean + 2 * deviation)
    assert one == pytest.approx(norm.sf(2))
    assert form.num_blocks > 3
    lost = 1 - (1 - one) ** form.num_blocks
    assert table.transport_error(form, mean + 2 * deviation) == pytest.approx(lost)
    offers = LdpcQam(table, gain_db=0.0).offers(20_000, np.array([[mean + 2 * deviation]]))
    assert next(o.error for o in offers if o.format == form) == pytest.approx(lost)


def test_measuring_writes_a_table_and_reads_it(tmp_path):
    curve = measure_curve(Mcs(2, 449), 128, rounds=4, blocks=10)
    assert isinstance(curve, Curve)
    assert curve == measure_curve(Mcs(2, 449), 128, rounds=4, blocks=10)
    save_table(tmp_path / "t.json", [curve], {"command": "x"})
    table = BlerTable.load(tmp_path / "t.json")
    assert table.curves == (curve,)
    with pytest.raises(UsageError, match="6 bits"):
        table.waterfall(6, 128, 256)
    (tmp_path / "t.json").write_text("[]")
    with pytest.raises(UsageError, match=r"ldpc_bler\.py"):
        BlerTable.load(tmp_path / "t.json")


# bounds


def test_dispersion_is_twice_that_of_a_real_channel():
    snr = 10**0.5
    real = snr / 2 * (snr + 2) / (snr + 1) ** 2 * math.log2(math.e) ** 2
    assert bounds.dispersion(5.0) == pytest.approx(2 * real)
    # variance of the information density, C + log2(e) / (1 + P) (P (1 - |z|²) + 2 sqrt(P) Re z), with SNR P
    z = torch.randn(400_000, dtype=torch.complex128, generator=torch.Generator().manual_seed(1))
    density = math.log2(math.e) / (1 + snr) * (snr * (1 - z.abs() ** 2) + 2 * math.sqrt(snr) * z.real)
    assert float(density.var()) == pytest.approx(bounds.dispersion(5.0), rel=0.01)


def test_normal_approximation_lies_below_capacity_and_inverts():
    for uses, snr in ((512, 0.0), (4608, 10.0)):
        bits = bounds.normal_approximation(uses, snr, 1e-3)
        assert bits < uses * bounds.capacity(snr)
        assert bounds.normal_error(uses, snr, bits) == pytest.approx(1e-3, rel=1e-6)
    # 1000 real uses of SNR 0 dB at 1e-3, by the formula of the real channel: C 1/2, V 3/8 log2(e)^2, Q^-1 3.0902
    real = 500 - math.sqrt(1000 * 3 / 8) * math.log2(math.e) * 3.0902 + math.log2(1000) / 2
    assert bounds.normal_approximation(500, 0.0, 1e-3) == pytest.approx(real, abs=0.01)
    with pytest.raises(UsageError):
        bounds.normal_approximation(10, 0.0, 0.0)


def test_outage_capacity():
    assert bounds.outage_capacity(10.0, 0.1) == pytest.approx(math.log2(1 - 10 * math.log(0.9)))
    assert bounds.outage_gain(0.1, 0.0) == pytest.approx(bounds.outage_gain(0.1, 1e-9), rel=1e-6)
    assert bounds.outage_gain(0.1, 10.0) > bounds.outage_gain(0.1, 1.0) > bounds.outage_gain(0.1)
    assert quad(lambda e: bounds.outage_gain(e, 2.0), 1e-9, 1 - 1e-9)[0] == pytest.approx(1, abs=1e-4)


def test_no_code_beats_the_bounds():
    snr = np.array([[6.0]])
    ideal, finite = CapacityCode().offers(4608, snr)[0], NormalCode().offers(4608, snr)
    best_sure = max(o.bits for o in LdpcQam().offers(4608, snr) if o.error < 1e-2)
    at_one_percent = next(o.bits for o in finite if o.error == 1e-2)
    assert best_sure < at_one_percent < ideal.bits
    assert best_sure > 0.7 * ideal.bits


def test_fading_offers():
    snr = symbol_snr_db(Rayleigh().eval(), 10.0, 64, realisations=600)
    assert snr.shape == (600, 1)
    gain = 10 ** ((snr - 10) / 10)
    assert gain.mean() == pytest.approx(1, abs=0.12)
    assert (gain < 0.1054).mean() == pytest.approx(0.1, abs=0.04)  # Rayleigh: P(g < -ln 0.9) = 0.1
    rates = {o.error: o.bits for o in OutageCode((0.1, 0.3)).offers(64, snr)}
    assert rates[0.1] / 64 == pytest.approx(bounds.outage_capacity(10.0, 0.1), rel=0.25)
    assert rates[0.3] > rates[0.1]


def test_effective_snr():
    flat = np.full((2, 50), 7.0)
    assert effective_snr_db(4, flat) == pytest.approx([7.0, 7.0], abs=1e-3)
    mixed = np.tile([0.0, 14.0], (1, 25))
    for order in (2, 6):
        assert 0 < effective_snr_db(order, mixed)[0] < 11.2  # below the mean power: information saturates
    assert effective_snr_db(2, mixed)[0] < effective_snr_db(6, mixed)[0]


# the baseline


def test_the_operating_point_fits_the_budget():
    sent = images(1, 2)
    for ratio, snr in ((SIXTH, 2.0), (TWELFTH, 11.0)):
        out = separation(sent, ratio, snr, fast_avif())
        limit = channel_uses((3, 96, 96), ratio)
        side = int(side_information_uses(torch.tensor([float(mcs_index_bits())]), torch.tensor([snr])))
        assert out.limit == limit
        assert out.uses.tolist() == [limit, limit]
        for point in out.points:
            assert point.offer.format.uses == limit - side
            assert point.side_symbols == side > 0
            assert 8 * len(point.source.data) + 1 <= point.offer.format.size
            # CRC bits and the index are taken off, not given away
            assert point.offer.format.size < point.offer.format.mcs.efficiency * limit * 1.03
        assert not out.outage.any()
        assert torch.allclose(out.psnr_db, torch.tensor([p.psnr_db for p in out.points], dtype=torch.float64))


def test_what_arrives_is_what_was_decoded_from_received_bits():
    sent = images(1)
    out = separation(sent, SIXTH, 6.0, fast_avif())
    received = (out.images[0].permute(1, 2, 0) * 255).round().byte().numpy()
    assert np.array_equal(received, out.points[0].source.image)
    assert float(out.psnr_db[0]) == pytest.approx(psnr_db(photograph(96, 96, 1), received))


def test_an_image_does_not_depend_on_its_batch():
    system = Separation(fast_avif())
    both = system(images(1, 2), SIXTH, 4.9, ids=[7, 8], seed=3)
    alone = Separation(fast_avif())(images(2), SIXTH, 4.9, ids=[8], seed=3)
    assert torch.equal(both.images[1], alone.images[0])
    assert both.points[1].source.data == alone.points[0].source.data
    # Headers amortised over a batch would leave more bytes for each image of a larger one.
    many = system(images(1, 2, 3, 4), SIXTH, 4.9)
    assert len(many.points[1].source.data) == len(both.points[1].source.data)


def test_noise_of_an_image_depends_on_its_id_alone():
    codec, one = fast_avif(), images(1)
    form = separation(one, TWELFTH, 5.0, codec).points[0].offer.format
    half, _ = shipped_table().waterfall(form.mcs.bits_per_symbol, form.block_bits, form.codeword_bits)
    half -= 0.33  # what the link gains on the table by more iterations
    system = Separation(codec)
    every = system(one.expand(10, 3, 96, 96), TWELFTH, half, assumed_snr_db=5.0, ids=range(10), seed=5).outage
    assert 0 < int(every.sum()) < 10  # about half of them
    turned = system(one.expand(5, 3, 96, 96), TWELFTH, half, assumed_snr_db=5.0, ids=[9, 7, 5, 3, 1], seed=5).outage
    assert torch.equal(turned, every[[9, 7, 5, 3, 1]])
    other = system(one.expand(10, 3, 96, 96), TWELFTH, half, assumed_snr_db=5.0, ids=range(10), seed=6).outage
    assert not torch.equal(other, every)


def test_more_snr_and_more_bandwidth_are_better():
    system = Separation(fast_avif())
    by_snr = [float(system(images(1), SIXTH, s, simulate=False).expected_db[0]) for s in (0.0, 4.0, 9.0, 15.0, 20.0)]
    assert by_snr == sorted(by_snr)
    assert by_snr[-1] > by_snr[0] + 5
    assert float(system(images(1), TWELFTH, 9.0, simulate=False).expected_db[0]) < by_snr[2]


@pytest.mark.parametrize("outage", ["grey", "mean"])
def test_an_overestimated_snr_is_an_outage(outage):
    sent = images(1, 2)
    system = Separation(fast_avif(), outage=outage)
    out = system(sent, SIXTH, 5.0, assumed_snr_db=9.0)
    assert out.outage.all()
    pictures = (sent.permute(0, 2, 3, 1) * 255).round()
    shown = torch.full_like(pictures, 128.0) if outage == "grey" else pictures.mean((1, 2), keepdim=True).round()
    assert torch.allclose(out.images * 255, shown.expand_as(pictures).permute(0, 3, 1, 2), atol=0.51)
    lost = [psnr_db(p.byte().numpy(), s.expand(96, 96, 3).byte().numpy()) for p, s in zip(pictures, shown, strict=True)]
    assert out.psnr_db.tolist() == pytest.approx(lost, abs=0.05)
    assert out.expected_db.tolist() == pytest.approx(lost, abs=0.3)  # the table knows it too
    assert out.uses.tolist() == [4608, 4608]  # what is lost was sent
    # an underestimated one costs quality, not images
    shy = system(sent, SIXTH, 9.0, assumed_snr_db=5.0)
    assert not shy.outage.any()
    assert (shy.psnr_db < system(sent, SIXTH, 9.0).psnr_db).all()


def test_an_image_that_does_not_fit_is_not_sent():
    out = separation(images(1), Fraction(1, 200), 0.0, Jpeg())
    assert out.outage.all()
    assert out.points[0].offer is None
    assert out.uses.tolist() == [0]
    assert (
        float(out.expected_db[0])
        == float(out.psnr_db[0])
        == pytest.approx(psnr_db(photograph(96, 96, 1), np.full((96, 96, 3), 128, np.uint8)))
    )


def test_stripped_containers_decide_on_crops():
    sent = images(1)
    whole = Separation(Avif(strip=False, speed=8))(sent, SIXTH, 0.0, simulate=False)
    bare = Separation(fast_avif())(sent, SIXTH, 0.0, simulate=False)
    assert float(bare.expected_db[0]) > float(whole.expected_db[0]) + 1


def test_bounds_lie_above_ldpc():
    system, sent = Separation(fast_avif()), images(1)
    ldpc, finite, ideal = (
        float(system.with_code(code)(sent, SIXTH, 7.0, simulate=False).expected_db[0])
        for code in (LdpcQam(), NormalCode(), CapacityCode())
    )
    assert ldpc < finite <= ideal
    assert not system.with_code(CapacityCode())(sent, SIXTH, 7.0).simulated
    with pytest.raises(UsageError, match="ideal"):
        system.with_code(CapacityCode())(sent, SIXTH, 7.0, assumed_snr_db=9.0)


def test_a_fading_channel_is_met_with_an_outage_in_mind():
    sent = images(1)
    awgn = Separation(fast_avif())(sent, SIXTH, 15.0, simulate=False)
    faded = Separation(fast_avif(), channel=Rayleigh())(sent, SIXTH, 15.0, simulate=False)
    assert 0.005 < faded.points[0].offer.error < 0.5
    assert faded.points[0].offer.bits < awgn.points[0].offer.bits
    assert float(faded.expected_db[0]) < float(awgn.expected_db[0]) - 2


def test_legacy_conventions_move_the_snr(monkeypatch):
    sent, seen = images(1), []
    decode = TransportChannel.decode

    def watched(link, symbols, noise_variance, code_bits):
        error = symbols - link._mapper(code_bits)
        seen.append((float(noise_variance.mean()), float(error.abs().square().mean())))
        return decode(link, symbols, noise_variance, code_bits)

    monkeypatch.setattr(TransportChannel, "decode", watched)
    nominal = Separation(fast_avif(), channel=AWGN("nominal+3dB"))(sent, SIXTH, 5.0)
    ours = Separation(fast_avif())(sent, SIXTH, 5.0 + 10 * math.log10(2))
    assert not nominal.outage.any()
    for told, measured in seen:  # noise of a constellation of unit power, for both
        assert told == pytest.approx(10**-0.5 / 2, rel=1e-4)
        assert measured == pytest.approx(told, rel=0.08)
    # the index of the scheme is sent at the nominal SNR: a few channel uses apart
    assert float(nominal.psnr_db[0]) == pytest.approx(float(ours.psnr_db[0]), abs=0.3)


def test_wrong_arguments():
    with pytest.raises(UsageError, match="batch"):
        separation(torch.zeros(3, 96, 96), SIXTH, 0.0)
    with pytest.raises(UsageError, match="grey"):
        Separation(fast_avif(), outage="black")
    with pytest.raises(UsageError, match="channel uses"):
        transport_format(Mcs(2, 449), 0)


# scripts


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "sims" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_bler_script(tmp_path, capsys):
    script = load("ldpc_bler")
    arguments = ["--every", "30", "--lengths", "256", "--rounds", "2", "--blocks", "4", "--out", str(tmp_path)]
    assert script.main(arguments) == 0
    assert (tmp_path / "ldpc_bler.png").stat().st_size > 10_000
    table = BlerTable.load(tmp_path / "bler.json")
    assert {c.bits_per_symbol for c in table.curves} == {2, 4, 6, 8, 10}
    before = (tmp_path / "bler.json").read_text()
    capsys.readouterr()
    assert script.main(arguments) == 0  # nothing is measured twice
    assert "K " not in capsys.readouterr().out
    assert (tmp_path / "bler.json").read_text() == before
    assert script.main([*arguments[:6], "--rounds", "3", *arguments[8:]]) == 2
    assert "other settings" in capsys.readouterr().err


def test_separation_script(tmp_path, capsys):
    from PIL import Image

    script = load("image_separation")
    script.PHOTO = (128, 192)
    for split, seeds in (("train", (1,)), ("val", (2,)), ("test", (3, 4))):
        (tmp_path / "photos" / split).mkdir(parents=True)
        for seed in seeds:
            Image.fromarray(photograph(130, 200, seed)).save(tmp_path / "photos" / split / f"{split}{seed}.png")
    arguments = ["--images", str(tmp_path / "photos"), "--codecs", "jpeg", "avif", "--ratios", "1/6", "--snr", "0", "8"]
    arguments += ["--cliff", "8", "--photos", "1", "--speed", "9", "9"]
    assert script.main([*arguments, "--out", str(tmp_path / "out")]) == 0
    assert "96x96, k/n = 1/6" in capsys.readouterr().out
    records = json.loads((tmp_path / "out" / "results.json").read_text())
    by = {(r["system"], r["condition"]["size"], r["condition"]["snr_db"], r["metric"]): r for r in records}
    assert by["AVIF + LDPC", "96x96", 8.0, "psnr"]["n"] == 2
    for size in ("96x96", "128x192"):
        for low, high in (
            ("JPEG + LDPC", "AVIF + LDPC"),
            ("AVIF files + LDPC", "AVIF + LDPC"),
            ("AVIF + LDPC", "AVIF + capacity"),
        ):
            assert by[low, size, 0.0, "psnr"]["value"] < by[high, size, 0.0, "psnr"]["value"] + 0.01
        assert by["AVIF + LDPC, sent for 8 dB", size, 0.0, "outage"]["value"] > 0.99
        assert by["AVIF + LDPC, sent for 8 dB", size, 0.0, "psnr"]["value"] < 20
    assert (tmp_path / "out" / "image_separation.png").stat().st_size > 30_000
    drawn = [*arguments, "--draw", str(tmp_path / "out" / "results.json"), "--out", str(tmp_path / "again")]
    assert script.main(drawn) == 0
    assert script.main([*arguments, "--ratios", "a third", "--out", str(tmp_path / "x")]) == 2
