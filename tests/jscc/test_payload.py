import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from chanlab.errors import UsageError
from chanlab.jscc.contract import side_information_uses
from chanlab.jscc.separation import LdpcQam, payload
from chanlab.jscc.separation.bler import BlerTable, shipped_table
from chanlab.jscc.separation.mcs import mcs_index_bits
from chanlab.jscc.separation.payload import PayloadRate, payload_uses
from chanlab.jscc.separation.transport import TransportChannel, bits_to_bytes, bytes_to_bits


def lost(form, num_bytes, snr_db, blocks, seed):
    """Payloads that don't come back, of so many that are sent over AWGN."""
    link, generator = TransportChannel(form), torch.Generator().manual_seed(seed)
    noise_variance, count = torch.tensor(10 ** (-snr_db / 10)), 0
    for _ in range(blocks // 50):
        data = [bytes(torch.randint(256, (num_bytes,), generator=generator).tolist()) for _ in range(50)]
        symbols, code_bits = link.encode(torch.stack([bytes_to_bits(d, form.size) for d in data]))
        noise = torch.randn(symbols.shape, dtype=torch.complex64, generator=generator)
        decoded, right = link.decode(symbols + noise_variance.sqrt() * noise, noise_variance.expand(50, 1), code_bits)
        count += sum(not ok or bits_to_bytes(d) != sent for d, ok, sent in zip(decoded, right, data, strict=True))
    return count


@pytest.mark.parametrize(("num_bytes", "snr_db"), [(50, 5.0), (40, 15.0), (170, 3.4)])
def test_payloads_arrive_at_the_snr_that_is_claimed(num_bytes, snr_db):
    _, form = payload_uses(num_bytes, snr_db)
    # at a block error rate of 1e-3, more than 3 of 400 are lost once in a thousand times
    assert lost(form, num_bytes, snr_db, 400, seed=1) <= 3
    # and the link has no more than some dB to spare
    assert lost(form, num_bytes, snr_db - 3, 50, seed=2) >= 25


@pytest.mark.parametrize(("num_bytes", "snr_db", "share"), [(10, 8.0, 0.0), (8, -1.0, 0.9), (200, 11.0, 0.85)])
def test_no_scheme_does_with_fewer_uses(num_bytes, snr_db, share):
    uses, form = payload_uses(num_bytes, snr_db)
    code = LdpcQam()

    def holds(symbols):
        offers = code.offers(symbols, np.array([[snr_db]]))
        return [o.format for o in offers if o.num_bytes >= num_bytes and o.error <= 1e-3]

    assert form in holds(form.uses)
    assert not any(holds(symbols) for symbols in range(max(1, int(share * form.uses)), form.uses))
    index = side_information_uses(torch.tensor([float(mcs_index_bits())]), torch.tensor([snr_db]))
    assert uses == form.uses + int(index)


def test_uses_grow_with_the_payload_and_fall_with_the_snr():
    sizes, snrs = (1, 3, 9, 30, 90, 91, 300, 1500), (-2.0, 0.0, 0.3, 4.0, 11.0, 24.0)
    uses = np.array([[payload_uses(n, s)[0] for n in sizes] for s in snrs])
    assert (np.diff(uses, axis=1) >= 0).all()
    assert (np.diff(uses, axis=0) <= 0).all()
    by_error = [payload_uses(90, 4.0, error)[0] for error in (0.3, 1e-2, 1e-4)]
    assert by_error == sorted(set(by_error))
    # capacity is a bound, and long payloads come within 4 dB of it
    for snr_db in (3.0, 11.0, 20.0):
        low, high = (math.log2(1 + 10 ** ((snr_db - gap) / 10)) for gap in (4, 0))
        assert low < 160_000 / payload_uses(20_000, snr_db)[0] < high


def test_another_table_counts():
    table = shipped_table()
    later = BlerTable([replace(c, mean_db=c.mean_db + 1) for c in table.curves], table.origin)
    for num_bytes, snr_db in ((10, 3.0), (300, 9.0)):
        assert payload_uses(num_bytes, snr_db + 1, table=later)[1] == payload_uses(num_bytes, snr_db)[1]


def test_what_cannot_be_sent():
    with pytest.raises(UsageError, match=r"carries 10 bytes over AWGN at -4 dB.*raise the SNR"):
        payload_uses(10, -4.0)
    with pytest.raises(UsageError, match="at least one byte"):
        payload_uses(0, 5.0)
    with pytest.raises(UsageError, match="error must lie"):
        payload_uses(10, 5.0, error=0.0)


# for batches


def test_points_that_are_shipped_are_those_of_the_search():
    rate = PayloadRate()
    assert rate.origin == {"error": 1e-3, "gain_db": LdpcQam().gain_db, "table": shipped_table().origin}
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(10, 121, (24,), generator=generator).tolist()
    columns = torch.randint(0, 29, (24,), generator=generator).tolist()
    for i, j in [(120, 0), (120, 28), *zip(rows, columns, strict=True)]:
        uses, _ = payload_uses(math.ceil(2 ** (6 + j / 2) / 8), -5 + i / 4)
        assert rate.points[i, j] == uses
        at = rate.uses(torch.tensor([2 ** (6 + j / 2)]), torch.tensor([-5 + i / 4]))
        assert float(at) == pytest.approx(uses, rel=1e-4)


def test_between_points_the_uses_are_close():
    generator = torch.Generator().manual_seed(2)
    num_bytes = (2 ** (3 + 13 * torch.rand(80, generator=generator))).long()
    snr_db = -2.4 + 27.4 * torch.rand(80, generator=generator)
    exact = [payload_uses(n, s)[0] for n, s in zip(num_bytes.tolist(), snr_db.tolist(), strict=True)]
    error = PayloadRate().uses(8 * num_bytes, snr_db) / torch.tensor(exact) - 1
    assert error.abs().median() < 0.03
    assert error.abs().quantile(0.9) < 0.08
    assert abs(float(error.mean())) < 0.02


def test_uses_of_a_batch_at_the_edges():
    rate = PayloadRate()
    assert not rate.state_dict()  # checkpoints needn't hold what the library has
    bits = torch.tensor([0, 0, 4000, 4000, 4000, 8, 2**22])
    snr_db = torch.tensor([5.0, -10.0, -5.0, 25.0, 40.0, 5.0, 5.0])
    uses = rate.uses(bits, snr_db)
    assert uses.dtype == torch.float32
    assert uses[:3].tolist() == [0, 0, math.inf]
    assert uses[3] == uses[4]  # no better than at the highest SNR
    same = rate.uses(torch.tensor([64, 2**20]), torch.tensor([5.0, 5.0]))
    assert uses[5] == same[0]
    assert float(uses[6] / same[1]) == pytest.approx(4, rel=1e-4)
    everywhere = rate.uses(torch.full((500,), 3000), torch.linspace(-5, 30, 500))
    finite = everywhere.isfinite()
    assert not finite[0]
    assert finite[50:].all()
    assert (everywhere[finite].diff() <= 0).all()


def test_points_for_another_loss(tmp_path, monkeypatch):
    monkeypatch.setattr(payload, "SNR_DB", (-4.0, 6.0, 5.0))
    monkeypatch.setattr(payload, "LOG2_BITS", (8.0, 10.0, 1.0))
    rate = PayloadRate.make(error=1e-2)
    assert rate.points.shape == (3, 3)
    assert rate.points[0].isinf().all()
    assert rate.points[2, 1] == payload_uses(64, 6.0, 1e-2)[0] < payload_uses(64, 6.0, 1e-3)[0]
    rate.save(tmp_path / "points.json")
    again = PayloadRate.load(tmp_path / "points.json")
    assert torch.equal(again.points, rate.points)
    assert again.origin["error"] == 1e-2
    assert torch.equal(
        again.uses(torch.tensor([300.0]), torch.tensor([2.0])), rate.uses(torch.tensor([300.0]), torch.tensor([2.0]))
    )


def test_points_that_cannot_be_read(tmp_path):
    with pytest.raises(UsageError, match=r"has no points.*PayloadRate.make"):
        PayloadRate.load(tmp_path / "none.json")
    (tmp_path / "few.json").write_text(json.dumps({"origin": {}, "uses": [[1, 2], [1, 2]]}))
    with pytest.raises(UsageError, match=r"points must be \[121, 29\]"):
        PayloadRate.load(tmp_path / "few.json")
