"""Modulation and coding schemes of 5G NR, and the transport block that a given number of channel uses holds."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from chanlab.channels.sionna_phy import phy
from chanlab.errors import UsageError

TABLES = (1, 2, 4)
"""Tables 5.1.3.1-1, -2 and -4 of TS 38.214 (PDSCH: up to 64-, 256- and 1024-QAM)."""
LEAST_RATE = 0.2
GREATEST_RATE = 0.95
"""Code rates of sionna.phy's LDPC encoder: no repetition; TS 38.212, 5.4.2.1."""


@dataclass(frozen=True, order=True)
class Mcs:
    """One modulation and coding scheme.

    Attributes:
        bits_per_symbol: Modulation order: 2, 4, 6, 8 or 10 (QPSK to 1024-QAM).
        rate_1024: Target code rate times 1024, as the standard writes it.
    """

    bits_per_symbol: int
    rate_1024: float

    @property
    def code_rate(self) -> float:
        """Target code rate, CRC bits counted as information."""
        return self.rate_1024 / 1024

    @property
    def efficiency(self) -> float:
        """Bits per channel use before CRC bits are taken off."""
        return self.bits_per_symbol * self.code_rate

    def __str__(self) -> str:
        name = "QPSK" if self.bits_per_symbol == 2 else f"{2**self.bits_per_symbol}-QAM"
        return f"{name} {self.rate_1024:g}/1024"


@dataclass(frozen=True)
class TransportFormat:
    """How a transport block fills a number of channel uses (TS 38.214, 5.1.3.2; TS 38.212, 5.2.2 and 7.2).

    Attributes:
        mcs: Modulation and coding scheme.
        uses: Channel uses (complex symbols), all of them filled.
        size: Payload of the transport block [bit].
        num_blocks: Code blocks.
        block_bits: Information bits of a code block, CRC bits included.
        codeword_bits: Longest codeword of a block after rate matching [bit].
        crc_bits: CRC bits of transport block and code blocks together.
    """

    mcs: Mcs
    uses: int
    size: int
    num_blocks: int
    block_bits: int
    codeword_bits: int
    crc_bits: int

    @property
    def code_rate(self) -> float:
        """Information and CRC bits per code bit."""
        return self.num_blocks * self.block_bits / (self.uses * self.mcs.bits_per_symbol)


def base_graph(block_bits: int, code_rate: float) -> int:
    """Base graph of the LDPC code, 1 or 2 (TS 38.212, 7.2.2, the code block taken for the transport block)."""
    small = block_bits <= 292 or (block_bits <= 3824 and code_rate <= 0.67) or code_rate <= 0.25
    return 2 if small else 1


def can_encode(block_bits: int, codeword_bits: int) -> bool:
    """Whether sionna.phy's LDPC encoder has the code: it doesn't repeat bits, so base graph 1 ends at rate 1/3."""
    rate = block_bits / codeword_bits
    if not LEAST_RATE <= rate <= GREATEST_RATE:
        return False
    graph = base_graph(block_bits, rate)
    return block_bits <= 3840 if graph == 2 else rate >= 1 / 3 and block_bits <= 8448


@functools.cache
def nr_mcs() -> tuple[Mcs, ...]:
    """All schemes of the tables that sionna.phy's LDPC code can send, by spectral efficiency.

    A transmitter that may pick any of them tells which in ceil(log2(number)) bits; see `mcs_index_bits`.
    """
    decode = phy("nr.utils").decode_mcs_index
    found = set()
    for table in TABLES:
        for index in range(29):
            try:
                order, rate = decode(index, table_index=table, is_pusch=False, device="cpu")
            except ValueError:  # the table ends
                break
            found.add(Mcs(int(order), round(float(rate) * 2048) / 2))
    return tuple(sorted((m for m in found if m.code_rate >= LEAST_RATE), key=lambda m: (m.efficiency, m)))


def mcs_index_bits() -> int:
    """Bits that tell a receiver the scheme of an image."""
    return (len(nr_mcs()) - 1).bit_length()


@functools.lru_cache(4096)
def transport_format(mcs: Mcs, uses: int) -> TransportFormat | None:
    """The transport block of TS 38.214 for a number of channel uses; None where its code rate can't be sent.

    Args:
        mcs: Modulation and coding scheme.
        uses: Channel uses, one layer.

    Raises:
        UsageError: If there is no channel use.
    """
    if uses < 1:
        raise UsageError(f"a transport block needs channel uses, not {uses}.")
    order = mcs.bits_per_symbol
    coded = uses * order
    if mcs.code_rate * coded < 32:  # the least transport block is 24 bits and 16 of its CRC
        return None
    size, block, count, tb_crc, cb_crc, lengths = phy("nr.utils").calculate_tb_size(
        order, mcs.code_rate, num_coded_bits=coded, device="cpu"
    )
    made = TransportFormat(
        mcs,
        uses,
        int(size),
        int(count),
        int(block),
        int(lengths.max()),
        int(tb_crc) + int(count) * int(cb_crc),
    )
    return made if all(can_encode(made.block_bits, int(n)) for n in set(lengths.tolist()) - {0}) else None
