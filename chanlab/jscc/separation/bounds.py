"""What a channel code can carry at best: capacity, and the normal approximation at a finite blocklength."""

from __future__ import annotations

import math

from scipy.special import ndtr, ndtri
from scipy.stats import ncx2

from chanlab.errors import UsageError


def linear(snr_db: float) -> float:
    """SNR per complex symbol as a ratio."""
    return float(10 ** (snr_db / 10))


def capacity(snr_db: float) -> float:
    """log2(1 + SNR): capacity of the complex AWGN channel [bit per channel use]."""
    return math.log2(1 + linear(snr_db))


def dispersion(snr_db: float) -> float:
    """Dispersion of the complex AWGN channel [bit² per channel use].

    SNR (SNR + 2) / (SNR + 1)² log2² e: twice that of a real channel (Polyanskiy, Poor and Verdú, "Channel coding
    rate in the finite blocklength regime", 2010, eq. 293).
    """
    snr = linear(snr_db)
    return snr * (snr + 2) / (snr + 1) ** 2 * math.log2(math.e) ** 2


def normal_approximation(uses: int, snr_db: float, error: float) -> float:
    """Bits that k complex channel uses carry at a block error probability, at best (not below zero).

    k C - sqrt(k V) Q⁻¹(ε) + log2(2 k) / 2 (Polyanskiy, Poor and Verdú, 2010, eq. 296 with 2 k real uses).

    Args:
        uses: Complex channel uses k.
        snr_db: SNR per complex symbol [dB].
        error: Block error probability ε, strictly between 0 and 1.

    Raises:
        UsageError: If the arguments are out of range.
    """
    if uses < 1 or not 0 < error < 1:
        raise UsageError(f"k must be positive and ε between 0 and 1, not {uses} and {error}.")
    spread = math.sqrt(uses * dispersion(snr_db)) * -float(ndtri(error))
    return max(0.0, uses * capacity(snr_db) - spread + math.log2(2 * uses) / 2)


def normal_error(uses: int, snr_db: float, bits: float) -> float:
    """Block error probability of a number of bits: `normal_approximation` solved for ε."""
    margin = uses * capacity(snr_db) + math.log2(2 * uses) / 2 - bits
    return float(ndtr(-margin / math.sqrt(uses * dispersion(snr_db))))


def outage_gain(error: float, k_factor: float = 0.0) -> float:
    """Power gain that block fading falls short of with a probability: its quantile.

    Args:
        error: Outage probability, between 0 and 1.
        k_factor: Rician K, line of sight over the rest (a ratio); 0 is Rayleigh fading. The mean gain is 1.
    """
    if not 0 < error < 1 or k_factor < 0:
        raise UsageError(f"an outage probability lies between 0 and 1 and K is not negative: {error}, {k_factor}.")
    if k_factor == 0:
        return -math.log1p(-error)
    return float(ncx2.ppf(error, 2, 2 * k_factor)) / (2 * (1 + k_factor))


def outage_capacity(snr_db: float, error: float, k_factor: float = 0.0) -> float:
    """log2(1 + F⁻¹(ε) SNR) [bit per channel use]: rate of block fading that fails with probability ε.

    The transmitter knows the mean SNR (E|h|² SNR), the receiver the gain (Ozarow, Shamai and Wyner, 1994).
    """
    return math.log2(1 + outage_gain(error, k_factor) * linear(snr_db))
