"""WiFo: a masked autoencoder over time, antennas and frequency; prediction is filling in what is hidden."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from chanlab.csi.predictor import check_history, normalise
from chanlab.errors import UsageError

Mask = Literal["random", "time", "frequency"]
RANDOM_HIDDEN = 0.85
"""Share of the patches that the random mask hides, as published."""


class WiFo(nn.Module):
    """A masked autoencoder of the channel, after the wireless foundation model of 2024.

    The channel over time, antennas and subcarriers is cut into patches, each a token of its real and imaginary parts.
    The encoder, a transformer, sees the patches that are not hidden; the decoder sees what it made of them and, for
    each hidden patch, one and the same learned token, and says what the hidden patches hold. Sinusoidal encodings of
    time, antenna and frequency tell both where a patch belongs, a third of the width each; so the network is bound to
    no size. Sizes that the patch doesn't divide are filled up with zeros, the history at its beginning.

    Predicting is hiding the future; with targets on another band (FDD), the future there: a matter of where the hidden
    patches are said to be. `training_loss` trains on what the paper pre-trains on: a random mask, one over time and one
    over frequency, in turns. Train with `masks: [time]` for prediction alone.

    Here, unlike there: loss and scale are each sample's own; time counts from the first step to be predicted; the mask
    over time hides what will have to be predicted, not the later half; hidden futures are noiseless as the data have
    them, while all that is seen is noisy.

    Source: B. Liu, S. Gao, X. Liu, X. Cheng, L. Yang, "WiFo: wireless foundation model for channel prediction", Science
    China Information Sciences 68(6), 2025, arXiv 2412.08908. Its sizes, all with 6 and 4 layers and 8 heads: tiny,
    little, small and base of width 64, 128, 256 and 512 (21.4 M parameters).

    Args:
        horizons: Number of steps predicted.
        width: Size of a token.
        layers: Layers of the encoder.
        decoder_layers: Layers of the decoder.
        heads: Attention heads.
        patch: Snapshots, antennas and subcarriers of a patch.
        frequency_offset: Subcarriers from the band of the history to that of the targets; 0 is the same band (TDD).
        masks: Masks of training, drawn from with equal probability for each batch.

    Raises:
        UsageError: A size doesn't fit, or a mask is unknown.
    """

    def __init__(
        self,
        horizons: int = 4,
        width: int = 256,
        layers: int = 6,
        decoder_layers: int = 4,
        heads: int = 8,
        patch: Sequence[int] = (4, 4, 4),
        frequency_offset: int = 0,
        masks: Sequence[Mask] = ("random", "time", "frequency"),
    ) -> None:
        super().__init__()
        if len(patch) != 3 or min(horizons, layers, decoder_layers, heads, *patch) < 1 or width < 6:
            raise UsageError(
                "WiFo: every size must be at least 1, width 6, and patch has three (time, antenna, subcarrier)"
            )
        if width % heads or width % 2:
            raise UsageError(f"WiFo: width={width} must be even and a multiple of heads={heads}")
        if not masks or set(masks) - {"random", "time", "frequency"}:
            raise UsageError(f"WiFo: masks are random, time and frequency, not {list(masks)}")
        self.horizons, self.frequency_offset = horizons, frequency_offset
        self.patch, self.masks = tuple(patch), tuple(masks)
        values = 2 * patch[0] * patch[1] * patch[2]
        self.embed = nn.Linear(values, width)
        self.encoder = _transformer(width, layers, heads)
        self.to_decoder = nn.Linear(width, width)
        self.hidden_token = nn.Parameter(0.02 * torch.randn(width))
        self.decoder = _transformer(width, decoder_layers, heads)
        self.head = nn.Linear(width, values)

    def forward(self, history: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """Predicts complex `[batch, rx_ant, tx_ant, horizon, subcarrier]`; see `Predictor`."""
        check_history(history)
        x, scale = normalise(history)
        shape = (*x.shape[:3], self.horizons, x.shape[4])
        past, future = self.places(x, x.shape[3], past=True), self.places(x, self.horizons, past=False)
        return scale * from_patches(self.fill_in(to_patches(x, self.patch, past=True), past, future), self.patch, shape)

    def fill_in(self, seen: Tensor, seen_at: Tensor, hidden_at: Tensor) -> Tensor:
        """What hidden patches hold, said from those that are seen.

        Args:
            seen: Patches, real `[batch, patch, value]`.
            seen_at: Their places (time, antenna, frequency) in patches, `[batch or 1, patch, 3]`.
            hidden_at: Places of the hidden ones, `[batch or 1, hidden, 3]`.

        Returns:
            Hidden patches, float32 `[batch, hidden, value]`.
        """
        width = self.hidden_token.numel()
        tokens = self.encoder(self.embed(seen) + encode_places(seen_at, width))
        tokens = self.to_decoder(tokens) + encode_places(seen_at, width)
        hidden = (self.hidden_token + encode_places(hidden_at, width)).expand(len(seen), -1, -1)
        said = self.decoder(torch.cat([tokens, hidden.to(tokens.dtype)], dim=1))[:, seen.shape[1] :]
        patches: Tensor = self.head(said).float()
        return patches

    def places(self, x: Tensor, steps: int, past: bool) -> Tensor:
        """Places of the patches of a channel's past or future, in patches, `[1, patch, 3]`.

        Args:
            x: A channel of the same antennas and subcarriers.
            steps: Number of snapshots.
            past: Whether they end where the future begins; the future is on the targets' band.
        """
        sizes = (steps, x.shape[1] * x.shape[2], x.shape[4])
        counts = [-(-size // part) for size, part in zip(sizes, self.patch, strict=True)]
        time, antenna, frequency = (torch.arange(count, device=x.device, dtype=torch.float32) for count in counts)
        if past:
            time = time - counts[0]
        else:
            frequency = frequency + self.frequency_offset / self.patch[2]
        return torch.cartesian_prod(time, antenna, frequency).view(1, -1, 3)

    def training_loss(self, history: Tensor, target: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """NMSE of what one of the masks hides, per sample, averaged.

        Args:
            history: Noisy channels, complex `[batch, rx_ant, tx_ant, time, subcarrier]`.
            target: Noiseless future, complex `[batch, rx_ant, tx_ant, horizon, subcarrier]`.
            noise_variance: Variance of the history's noise, `[batch]`; what is seen of the future gets such noise.
        """
        check_history(history)
        if target.shape != (*history.shape[:3], self.horizons, history.shape[4]):
            raise UsageError(f"WiFo predicts {self.horizons} steps of its history's size, not {list(target.shape)}")
        x, scale = normalise(history)
        y = target / scale
        seen_y = y
        if noise_variance is not None:
            seen_y = y + torch.randn_like(y) * (noise_variance.view(-1, 1, 1, 1, 1).sqrt() / scale)
        past = to_patches(x, self.patch, past=True)
        noisy = torch.cat([past, to_patches(seen_y, self.patch, past=False)], dim=1)
        clean = torch.cat([past, to_patches(y, self.patch, past=False)], dim=1)
        real = [to_patches(torch.ones_like(part[:1]), self.patch, past=part is x) for part in (x, y)]
        filled = torch.cat(real, dim=1)[..., ::2].repeat_interleave(2, -1)  # 0 where patches are filled up
        places = torch.cat([self.places(x, x.shape[3], past=True), self.places(x, self.horizons, past=False)], dim=1)
        order, num_seen = self.order(places, len(x))
        seen, hidden = order[:, :num_seen], order[:, num_seen:]
        said = self.fill_in(_take(noisy, seen), _take(places, seen), _take(places, hidden))
        truth, counts = _take(clean, hidden), _take(filled, hidden)
        error = ((said - truth).square() * counts).sum((1, 2))
        power = truth.square().sum((1, 2))
        return torch.where(power > 0, error / torch.where(power > 0, power, 1.0), 0.0).mean()

    def order(self, places: Tensor, batch: int, mask: Mask | None = None) -> tuple[Tensor, int]:
        """Indices of patches, those that a mask leaves first, `[batch or 1, patch]`, and how many it leaves.

        - `random` hides 85 % of all patches, each sample's own;
        - `time` hides the future;
        - `frequency` hides the upper half of the history's band, and all above it, at all times; of a band that is one
          patch wide, the future.

        Args:
            places: Places of all patches, `[1, patch, 3]`.
            batch: Number of samples.
            mask: Which; None draws one of `masks`.
        """
        if mask is None:
            mask = self.masks[int(torch.randint(len(self.masks), ()))]
        future = places[0, :, 0] >= 0
        bands = int(places[0, ~future, 2].amax()) + 1
        if mask == "random":
            order = torch.rand(batch, places.shape[1], device=places.device).argsort(1)
            return order, max(1, round((1 - RANDOM_HIDDEN) * order.shape[1]))
        hidden = future if mask == "time" or bands < 2 else places[0, :, 2] >= bands // 2
        return hidden.to(torch.uint8).argsort(stable=True)[None], int((~hidden).sum())


def to_patches(x: Tensor, patch: Sequence[int], past: bool) -> Tensor:
    """Cuts channels into patches, filled up with zeros where needed.

    Args:
        x: Complex `[batch, rx_ant, tx_ant, time, subcarrier]`.
        patch: Snapshots, antennas and subcarriers of a patch.
        past: Whether zeros are put before the first snapshot, not behind the last.

    Returns:
        Real `[batch, patch, value]`, patches in the order time, antenna, subcarrier, and so the values within, real and
        imaginary part side by side.
    """
    grid: Tensor = torch.view_as_real(
        x.flatten(1, 2).transpose(1, 2).resolve_conj()
    )  # [batch, time, antenna, subcarrier, 2]
    time, antenna, frequency = (-size % part for size, part in zip(grid.shape[1:4], patch, strict=True))
    before, after = (time, 0) if past else (0, time)
    grid = functional.pad(grid, (0, 0, 0, frequency, 0, antenna, before, after))
    counts = [size // part for size, part in zip(grid.shape[1:4], patch, strict=True)]
    pairs = [size for pair in zip(counts, patch, strict=True) for size in pair]
    return grid.reshape(len(grid), *pairs, 2).permute(0, 1, 3, 5, 2, 4, 6, 7).flatten(4).flatten(1, 3)


def from_patches(patches: Tensor, patch: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Puts the patches of a future together, without what fills them up.

    Args:
        patches: Real `[batch, patch, value]`.
        patch: Snapshots, antennas and subcarriers of a patch.
        shape: `[batch, rx_ant, tx_ant, time, subcarrier]`.
    """
    batch, num_rx, num_tx, steps, num_subcarriers = shape
    sizes = (steps, num_rx * num_tx, num_subcarriers)
    counts = [-(-size // part) for size, part in zip(sizes, patch, strict=True)]
    grid = patches.reshape(batch, *counts, *patch, 2).permute(0, 1, 4, 2, 5, 3, 6, 7)
    grid = grid.flatten(5, 6).flatten(3, 4).flatten(1, 2)[:, :steps, : sizes[1], :num_subcarriers]
    return torch.view_as_complex(grid.contiguous()).transpose(1, 2).reshape(*shape)


def encode_places(places: Tensor, width: int) -> Tensor:
    """Sinusoids of time, antenna and frequency side by side, a third of the width each, `[..., patch, width]`."""
    third = 2 * round(width / 6)
    parts = []
    for axis, size in enumerate((third, third, width - 2 * third)):
        rate = 10_000.0 ** (-torch.arange(size // 2, device=places.device) / (size / 2))
        angle = places[..., axis, None] * rate
        parts += [angle.sin(), angle.cos()]
    return torch.cat(parts, -1)


def _transformer(width: int, layers: int, heads: int) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(
        width, heads, 2 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)


def _take(rows: Tensor, index: Tensor) -> Tensor:
    """Rows `[batch, index, value]` of `[batch or 1, row, value]` by `[batch or 1, index]`."""
    batch = max(len(rows), len(index))
    index = index[:, :, None].expand(batch, -1, rows.shape[2])
    return rows.expand(batch, -1, -1).gather(1, index)
