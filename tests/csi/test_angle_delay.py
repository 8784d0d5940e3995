"""What the delay taps say of the noise."""

import pytest
import torch

from chanlab.csi.angle_delay import tap_noise
from chanlab.data import SampleRequest, StreamedCSI
from chanlab.data.protocol import Condition


def test_noise_alone_is_its_variance():
    noise = torch.randn(3, 1, 8, 16, 300, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    scale = torch.tensor([0.5, 1.0, 2.0])
    found = tap_noise(noise * scale.view(-1, 1, 1, 1, 1))
    torch.testing.assert_close(found, scale**2, rtol=0.02, atol=0)


@pytest.mark.parametrize("snr_db", [0.0, 20.0])
def test_noise_beside_a_channel(snr_db):
    stream = StreamedCSI(split="test", conditions=[Condition("gaussian", snr_db, snr_db)], block_size=1)
    batch = stream.batch(SampleRequest(stream.ids(1)[[4, 26]], 0, "test"))
    torch.testing.assert_close(tap_noise(batch.history), batch.noise_variance, rtol=0.1, atol=0)


def test_a_channel_without_noise_has_little():
    stream = StreamedCSI(split="test", block_size=1)
    history, _ = stream.channels(stream.ids(1)[[4, 26]])
    assert (tap_noise(history) < 1e-4 * history.abs().square().mean((1, 2, 3, 4))).all()
