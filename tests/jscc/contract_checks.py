"""The contract as checks of any channel and any codec: each raises AssertionError where a definition drifts."""

import math

import torch

from chanlab.data import counter
from chanlab.jscc import Received, Transmission, channel_uses, normalise_power
from chanlab.jscc.contract import LEAST_BOOST

SNRS = (0.0, 7.0, 20.0)


def random_symbols(batch, k, seed=1234, convention="standard"):
    generator = torch.Generator().manual_seed(seed)
    return normalise_power(torch.randn(batch, k, dtype=torch.complex64, generator=generator), convention=convention)


def image_keys(batch, seed=0):
    return counter.keys(torch.arange(batch), seed)


def check_channel(channel, k=600, mean_gain=None, calibrated=True):
    """Everything that a channel owes.

    Args:
        channel: A `SymbolChannel`.
        k: Symbols of an image.
        mean_gain: Mean of the effective SNR over the asked one, where it is known; the receiver must know the channel.
        calibrated: Whether the receiver tells the variance of its errors (not where it ignores or trusts too much).
    """
    channel.eval()
    check_shapes(channel, k)
    check_every_image_has_its_snr(channel, k)
    check_randomness(channel, k)
    check_gradient(channel, k)
    check_unsent_symbols(channel, k)
    check_budget(channel)
    check_images_do_not_meet(channel, k)
    if calibrated:
        check_noise_is_told(channel, k)
    if mean_gain is not None:
        check_asked_snr(channel, k, mean_gain)


def check_shapes(channel, k):
    x = random_symbols(3, k, convention=channel.convention)
    received = channel(x, 10.0, image_keys(3))
    assert isinstance(received, Received)
    assert received.symbols.shape == x.shape
    assert received.symbols.dtype == torch.complex64
    for name in ("noise_variance", "gain", "symbol_snr_db"):
        value = getattr(received, name)
        assert value.shape == x.shape, name
        assert value.isfinite().all(), name
    assert (received.noise_variance > 0).all()
    assert ((received.gain > 0) & (received.gain <= 1)).all()
    assert received.data_uses.shape == received.pilot_uses.shape == (3,)


def check_asked_snr(channel, k, mean_gain, batch=256):
    """The effective SNR, averaged over fading and images, is the asked one: not half, not twice."""
    for snr_db in SNRS:
        x = random_symbols(batch, k, convention=channel.convention)
        received = channel(x, snr_db, image_keys(batch))
        effective = (received.power / received.noise_variance).mean()
        asked = 10 ** ((snr_db + channel.convention.offset_db) / 10)
        assert math.isclose(effective, asked * mean_gain, rel_tol=0.12), (snr_db, float(effective), asked * mean_gain)


def check_noise_is_told(channel, k, batch=128):
    """Errors have the variance that the receiver tells: measured SNR equals told SNR, on average over the batch."""
    for snr_db in SNRS:
        x = random_symbols(batch, k, convention=channel.convention)
        received = channel(x, snr_db, image_keys(batch))
        error = (received.unbiased - x).abs().square() / received.noise_variance
        assert math.isclose(error.mean(), 1.0, abs_tol=0.06), (snr_db, float(error.mean()))


def check_every_image_has_its_snr(channel, k):
    """An image in a batch of mixed SNRs meets what it meets in a batch of its own SNR."""
    x, keys = random_symbols(3, k, convention=channel.convention), image_keys(3)
    mixed = channel(x, torch.tensor(SNRS), keys)
    assert torch.equal(mixed.snr_db, torch.tensor(SNRS))
    for i, snr_db in enumerate(SNRS):
        alone = channel(x, snr_db, keys)
        torch.testing.assert_close(mixed.symbols[i], alone.symbols[i], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(mixed.noise_variance[i], alone.noise_variance[i], rtol=1e-3, atol=1e-6)


def check_randomness(channel, k):
    """By generator: the same again. By key: an image's own, whatever the batch and its order."""
    x = random_symbols(4, k, convention=channel.convention)
    first = channel(x, 10.0, torch.Generator().manual_seed(3)).symbols
    again = channel(x, 10.0, torch.Generator().manual_seed(3)).symbols
    other = channel(x, 10.0, torch.Generator().manual_seed(4)).symbols
    assert torch.equal(first, again)
    assert not torch.allclose(first, other, atol=1e-3)
    keys = image_keys(4)
    whole = channel(x, 10.0, keys).symbols
    backwards = channel(x.flip(0), 10.0, keys.flip(0)).symbols.flip(0)
    torch.testing.assert_close(whole, backwards, rtol=1e-3, atol=1e-4)
    alone = channel(x[2:3], 10.0, keys[2:3]).symbols
    torch.testing.assert_close(whole[2:3], alone, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(channel(x[:1].repeat(2, 1), 10.0, keys[:2]).symbols.diff(dim=0), torch.zeros(1, k) + 0j)


def check_gradient(channel, k):
    """The loss of a received symbol reaches the sent one: channels are linear, so the derivative is a difference."""
    x = random_symbols(2, k, convention=channel.convention) * 0.7
    x.requires_grad_()
    keys = image_keys(2)
    generator = torch.Generator().manual_seed(5)
    probe = torch.randn(2, k, dtype=torch.complex64, generator=generator)
    loss = (channel(x, 10.0, keys).symbols * probe.conj()).real.sum()
    (gradient,) = torch.autograd.grad(loss, x)
    assert gradient.isfinite().all()
    assert (gradient != 0).all()
    step = 0.3 * random_symbols(2, k, seed=6)
    with torch.no_grad():
        moved = (channel(x + step, 10.0, keys).symbols * probe.conj()).real.sum()
        torch.testing.assert_close(moved - loss, (gradient.conj() * step).real.sum(), rtol=1e-3, atol=2e-2)


def check_unsent_symbols(channel, k):
    """Masked symbols cost nothing, arrive as zero, and don't disturb the others' places."""
    used = torch.zeros(3, k, dtype=torch.bool)
    used[0] = True
    used[1, : k // 2] = True
    used[2, 1::3] = True
    x = normalise_power(random_symbols(3, k), used, channel.convention)
    sent = Transmission.of(x, used)
    received = channel(sent, 15.0, image_keys(3))
    assert (received.symbols[~used] == 0).all()
    assert torch.equal(received.used, used)
    count = used.sum(1)
    assert torch.equal(received.data_uses, -(-count // channel.symbols_per_use))
    assert received.pilot_uses.tolist() == [int(channel.pilot_uses(c)) for c in count]
    assert received.noise_variance.isfinite().all()
    # Sent symbols arrive where they belong: correlated with what was sent, at their own places.
    for i in range(3):
        a, b = received.symbols[i, used[i]], x[i, used[i]]
        own = (a.abs() * b.abs()).sum()
        assert received.symbols[i, used[i]].abs().sum() > 0
        if channel_is_coherent(channel):
            assert (a * b.conj()).real.sum() > 0.5 * own, i


def channel_is_coherent(channel):
    return getattr(channel, "csi", "perfect") != "none"


def check_budget(channel):
    """Uses count pilots, exactly, and `symbols_within` spends a budget to the last symbol."""
    for uses in (200, 777, 4608):
        symbols = channel.symbols_within(uses)
        assert channel.uses(symbols) <= uses < channel.uses(symbols + 1)
    k = channel.symbols_within(500)
    side_bits = torch.tensor([0.0, 32.0])
    sent = Transmission.of(random_symbols(2, k, convention=channel.convention), side_bits=side_bits)
    received = channel(sent, torch.tensor([3.0, 10.0]), image_keys(2))
    side = [0, math.ceil(32 / math.log2(1 + 10 ** ((7.0 + channel.convention.offset_db) / 10)))]
    assert received.uses.tolist() == [channel.uses(k + s) for s in side]
    for ratio in (1 / 12, 1 / 6):
        left = channel.encoder_ratio((3, 32, 32), ratio)
        symbols = channel_uses((3, 32, 32), left)
        assert channel.uses(symbols) <= channel_uses((3, 32, 32), ratio, channel.convention) < channel.uses(symbols + 1)


def check_images_do_not_meet(channel, k):
    """What one image sends changes nothing for another: no batch power, no I and Q of two images, no shared noise."""
    x, keys = random_symbols(3, k, convention=channel.convention), image_keys(3)
    before = channel(x, 10.0, keys).symbols
    changed = x.clone()
    changed[1] = 0.0
    after = channel(changed, 10.0, keys).symbols
    assert torch.equal(before[[0, 2]], after[[0, 2]])
    noise = before - channel(torch.zeros_like(x), 10.0, keys).symbols
    assert noise.abs().sum(1).min() > 0
    residue = channel(torch.zeros_like(x), 10.0, keys).symbols
    coherence = (residue[0] * residue[1].conj()).sum().abs() / (residue[0].norm() * residue[1].norm())
    assert coherence < 6 / math.sqrt(k)


def check_transmission(sent, image_shape, ratio, snr_db, convention="standard"):
    """What an encoder puts on air keeps to power and bandwidth, side information counted."""
    assert sent.symbols.dtype == torch.complex64
    assert (sent.symbols[~sent.used] == 0).all(), "symbols that are not used must be exactly zero"
    assert sent.symbols.isfinite().all()
    by_symbols = sent.used.any(1)
    assert by_symbols.any() if sent.base_uses is None else (by_symbols | (sent.base_uses > 0)).all()
    torch.testing.assert_close(sent.power, by_symbols.float(), rtol=1e-3, atol=1e-3)
    if sent.boost is not None:  # symbols and those of a base share the image's power
        count, of_base = sent.used.sum(1), sent.base_uses * sent.base_power
        torch.testing.assert_close(count * sent.boost * sent.power + of_base, (count + sent.base_uses).float())
        assert (sent.boost > LEAST_BOOST).all()
    allowed = channel_uses(image_shape, ratio, convention)
    uses = sent.uses(snr_db)
    assert (uses <= allowed).all(), f"{uses.tolist()} channel uses, {allowed} are allowed"
    rates = sent.used.sum(1)
    # A mask that the receiver can't foresee must be told: patterns that differ between images of one SNR are not free.
    same_snr = snr_db[:, None] == snr_db
    differ = (sent.used[:, None] != sent.used).any(-1) & same_snr
    assert (sent.side_bits[differ.any(1)] > 0).all(), f"masks differ ({rates.tolist()} symbols) but no bits tell them"


def check_codec(codec, channel, image_shape=(3, 32, 48), ratio=1 / 6, batch=4, seed=0):
    """Everything that a codec owes, over a channel.

    Args:
        codec: A codec (`encode`, `decode`), in any state of training.
        channel: A `SymbolChannel`; the budget of its pilots is not the codec's concern here.
        image_shape: (channels, height, width) that the codec takes.
        ratio: Bandwidth ratio asked for.
        batch: Images, at least 3.
        seed: Of images.
    """
    codec.eval(), channel.eval()
    images = smooth_images(batch, image_shape, seed)
    snr_db = torch.tensor([0.0, 10.0, 10.0, 20.0]).repeat(-(-batch // 4))[:batch]
    keys = image_keys(batch)
    with torch.no_grad():
        sent = codec.encode(images, snr_db, ratio)
        check_transmission(sent, image_shape, ratio, snr_db)
        received = channel(sent, snr_db, keys)
        decoded = codec.decode(received, image_shape)
        assert decoded.shape == images.shape
        assert decoded.isfinite().all()
        assert ((decoded >= 0) & (decoded <= 1)).all()
        # An image is sent and decoded the same way in any company: its power, its rate, its symbols.
        for i in range(batch):
            alone = codec.encode(images[i : i + 1], snr_db[i : i + 1], ratio)
            torch.testing.assert_close(alone.symbols, sent.symbols[i : i + 1], rtol=1e-3, atol=1e-3)
            assert torch.equal(alone.used, sent.used[i : i + 1])
        # The decoder has the received symbols and nothing else: no state that the encoder left behind.
        codec.encode(0.5 + 0 * images, snr_db, ratio)
        torch.testing.assert_close(codec.decode(received, image_shape), decoded, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            codec.decode(rows(received, slice(1, 2)), image_shape), decoded[1:2], rtol=1e-3, atol=1e-3
        )
    parameters = [p for p in codec.parameters() if p.requires_grad]
    if parameters:
        codec.train()
        sent = codec.encode(images, snr_db, ratio)
        decoded = codec.decode(channel(sent, snr_db, keys), image_shape)
        gradients = torch.autograd.grad((decoded - images).square().mean(), parameters, allow_unused=True)
        reached = [g for g in gradients if g is not None]
        assert all(g.isfinite().all() for g in reached)
        assert any((g != 0).any() for g in reached)
        codec.eval()


def rows(received, index):
    return Received(
        received.symbols[index],
        received.used[index],
        received.snr_db[index],
        received.noise_variance[index],
        received.gain[index],
        received.data_uses[index],
        received.pilot_uses[index],
        received.power,
        None if received.side is None else received.side[index],
        None if received.base_lost is None else received.base_lost[index],
    )


def smooth_images(batch, shape, seed=0):
    """Images with the spectrum of natural ones, float32 in [0, 1]."""
    channels, height, width = shape
    generator = torch.Generator().manual_seed(seed)
    white = torch.randn(batch, channels, height, width, generator=generator)
    fy, fx = torch.fft.fftfreq(height)[:, None], torch.fft.fftfreq(width)
    pink = torch.fft.ifft2(torch.fft.fft2(white) / (fy.square() + fx.square() + 1e-3).sqrt()).real
    low, high = pink.amin((1, 2, 3), keepdim=True), pink.amax((1, 2, 3), keepdim=True)
    return (pink - low) / (high - low)
