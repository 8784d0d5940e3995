"""Channel codes of the separation baseline: what each offers for a number of channel uses.

An offer is a number of bits and the probability that they are lost. 5G LDPC with QAM offers one for each modulation and
coding scheme and is really sent; ideal codes (capacity, normal approximation, outage capacity) are bounds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import ndtr, ndtri
from torch import Tensor

from chanlab.jscc.channels import AWGN, SymbolChannel
from chanlab.jscc.separation import bounds
from chanlab.jscc.separation.bler import BlerTable, shipped_table
from chanlab.jscc.separation.mcs import TransportFormat, mcs_index_bits, nr_mcs, transport_format
from chanlab.jscc.separation.transport import NUM_ITERATIONS

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Offer:
    """What a channel code carries.

    Attributes:
        bits: Payload [bit].
        error: Probability that it is lost.
        format: How it is sent; None for an ideal code.
    """

    bits: int
    error: float
    format: TransportFormat | None = None

    @property
    def num_bytes(self) -> int:
        """Whole bytes besides the bit that marks their end."""
        return max(0, (self.bits - 1) // 8)


def useful_offers(offers: Iterable[Offer], most_error: float) -> list[Offer]:
    """Offers that are lost with at most this probability: most bits first, each safer than those with more bits."""
    kept: list[Offer] = []
    for offer in sorted(offers, key=lambda o: (-o.bits, o.error)):
        if offer.error <= most_error and (not kept or offer.error < kept[-1].error):
            kept.append(offer)
    return kept


class ChannelCode(Protocol):
    """What the separation baseline asks of a channel code.

    Attributes:
        name: Name in tables.
        side_bits: What the receiver is told of the choice, beside the payload [bit].
    """

    name: str
    side_bits: int

    def offers(self, symbols: int, snr_db: Array) -> list[Offer]:
        """Offers for so many complex symbols.

        Args:
            symbols: Data symbols.
            snr_db: SNRs of each symbol that may come, equally likely, `[realisation, symbol]` (or `[realisation, 1]`
                where all symbols meet the same).
        """
        ...


class LdpcQam:
    """5G LDPC with QAM, link adaptation over the schemes of TS 38.214.

    Args:
        table: Block error rates; the shipped table by default.
        gain_db: SNR that the link's decoder needs less than the table's. The shipped table was measured with 20
            iterations; the 50 of the link gained 0.07 to 0.52 dB on 19 curves (median 0.3), of which 0.2 are reckoned
            with. By default 0.2 for a table of fewer iterations than the link's, else 0.
    """

    name = "LDPC"

    def __init__(self, table: BlerTable | None = None, gain_db: float | None = None) -> None:
        self.table = shipped_table() if table is None else table
        fewer = self.table.origin.get("num_iterations", NUM_ITERATIONS) < NUM_ITERATIONS
        self.gain_db = (0.2 if fewer else 0.0) if gain_db is None else gain_db
        self.side_bits = mcs_index_bits()

    def offers(self, symbols: int, snr_db: Array) -> list[Offer]:
        """See `ChannelCode`; block errors at the effective SNR of each realisation, averaged."""
        offers = []
        effective = {order: effective_snr_db(order, snr_db) for order in {m.bits_per_symbol for m in nr_mcs()}}
        for mcs in nr_mcs():
            format = transport_format(mcs, symbols)
            if format is not None:
                mean, deviation = self.table.waterfall(mcs.bits_per_symbol, format.block_bits, format.codeword_bits)
                right = ndtr((effective[mcs.bits_per_symbol] + self.gain_db - mean) / deviation) ** format.num_blocks
                offers.append(Offer(format.size, float(1 - right.mean()), format))
        return offers

    def needed_snr_db(self, format: TransportFormat, error: float) -> float:
        """SNR per complex symbol at which a transport block is lost with a probability, over AWGN [dB]."""
        mean, deviation = self.table.waterfall(format.mcs.bits_per_symbol, format.block_bits, format.codeword_bits)
        return float(mean - self.gain_db + deviation * ndtri((1 - error) ** (1 / format.num_blocks)))


class CapacityCode:
    """An ideal code at capacity: floor(k E log2(1 + SNR)) bits, never lost (over AWGN: no code does better)."""

    name, side_bits = "capacity", 0

    def offers(self, symbols: int, snr_db: Array) -> list[Offer]:
        """See `ChannelCode`; the ergodic capacity where the SNR varies."""
        return [Offer(int(symbols * float(np.log2(1 + 10 ** (snr_db / 10)).mean())), 0.0)]


class NormalCode:
    """The best code of k symbols at a finite length, by the normal approximation, over AWGN or block fading.

    Args:
        errors: Block error probabilities that are offered.
    """

    name, side_bits = "finite length", 0

    def __init__(self, errors: Sequence[float] = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.03, 0.1, 0.2, 0.3, 0.5)) -> None:
        self.errors = tuple(errors)

    def offers(self, symbols: int, snr_db: Array) -> list[Offer]:
        """See `ChannelCode`; a realisation's mean SNR stands for its symbols (they are equal in block fading)."""
        block = 10 * np.log10((10 ** (snr_db / 10)).mean(-1))
        offers = []
        for error in self.errors:
            low, high = 0.0, symbols * bounds.capacity(float(block.max())) + 1
            for _ in range(60):
                bits = (low + high) / 2
                mean = float(np.mean([bounds.normal_error(symbols, float(s), bits) for s in block]))
                low, high = (bits, high) if mean <= error else (low, bits)
            offers.append(Offer(int(low), error))
        return offers


class OutageCode:
    """An ideal code over block fading whose gain the transmitter doesn't know: outage capacity.

    Args:
        errors: Outage probabilities that are offered.
    """

    name, side_bits = "outage capacity", 0

    def __init__(self, errors: Sequence[float] = tuple(np.geomspace(0.002, 0.7, 24))) -> None:
        self.errors = tuple(float(e) for e in errors)

    def offers(self, symbols: int, snr_db: Array) -> list[Offer]:
        """See `ChannelCode`: a realisation carries E log2(1 + SNR) over its symbols."""
        rates = np.log2(1 + 10 ** (snr_db / 10)).mean(-1)
        return [Offer(int(symbols * float(np.quantile(rates, e, method="lower"))), e) for e in self.errors]


def symbol_snr_db(channel: SymbolChannel, snr_db: float, symbols: int, realisations: int = 128, seed: int = 0) -> Array:
    """SNRs that a transmitter has to reckon with, which knows a channel's statistics and its mean SNR.

    QPSK is sent through so many realisations and the receiver's effective SNR taken down.

    Args:
        channel: The channel with its receiver.
        snr_db: Nominal SNR [dB].
        symbols: Data symbols.
        realisations: Of a channel that fades.
        seed: Of the realisations.

    Returns:
        `[realisation, symbol]`, or `[realisation, 1]` if no realisation varies within.
    """
    count = 1 if isinstance(channel, AWGN) else realisations
    generator = torch.Generator().manual_seed(seed)
    found = []
    with torch.inference_mode():
        for _ in range(count):
            phases = torch.randint(4, (1, symbols), generator=generator) * (math.pi / 2)
            sent = math.sqrt(channel.convention.power) * torch.polar(
                torch.ones_like(phases, dtype=torch.float32), phases
            )
            found.append(channel(sent, float(snr_db), generator).symbol_snr_db[0].double())
    values: Tensor = torch.stack(found)
    if bool((values.amax(1) - values.amin(1) < 1e-3).all()):
        values = values[:, :1]
    return values.cpu().numpy()


def effective_snr_db(bits_per_symbol: int, snr_db: Array) -> Array:
    """SNR of the AWGN channel on which QAM carries the mean mutual information of the symbols [dB].

    Args:
        bits_per_symbol: Modulation order.
        snr_db: `[realisation, symbol]`.

    Returns:
        `[realisation]`.
    """
    if snr_db.shape[-1] == 1:
        return snr_db[..., 0]
    grid, information = _qam_information(bits_per_symbol)
    mean = np.interp(snr_db, grid, information).mean(-1)
    return np.asarray(np.interp(mean, information, grid), np.float64)


@functools.cache
def _qam_information(bits_per_symbol: int) -> tuple[Array, Array]:
    """SNRs [dB] and the mutual information of QAM over AWGN there [bit per symbol], strictly growing."""
    points = 2 ** (bits_per_symbol // 2)
    levels = np.arange(1 - points, points, 2) / math.sqrt((points**2 - 1) / 3)  # PAM of unit power
    nodes, weights = np.polynomial.hermite_e.hermegauss(48)
    weights = weights / weights.sum()
    grid = np.arange(-20, 45.1, 0.25)
    information = []
    for snr in 10 ** (grid / 10):
        received = levels[:, None] + nodes / math.sqrt(snr)
        exponent = -((received[:, :, None] - levels) ** 2) * snr / 2 + (nodes**2 / 2)[None, :, None]
        lost = (np.log2(np.exp(exponent).sum(-1)) * weights).sum(-1).mean()
        information.append(2 * (math.log2(points) - lost))
    growing = np.maximum.accumulate(information) + 1e-9 * np.arange(len(grid))
    return grid, growing
