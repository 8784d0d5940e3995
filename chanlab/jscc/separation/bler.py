"""Block error rates of 5G LDPC code blocks with QAM over AWGN: measured once, kept in a table, looked up."""

from __future__ import annotations

import functools
import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from scipy.special import log_ndtr, ndtr

from chanlab.channels.sionna_phy import phy
from chanlab.errors import UsageError
from chanlab.jscc.separation.mcs import Mcs, TransportFormat, base_graph, can_encode, nr_mcs
from chanlab.jscc.separation.transport import NUM_ITERATIONS, QamDemapper, decoding_stages
from chanlab.link.decoding import block_errors, is_lost

TABLE = Path(__file__).with_name("bler.json")
"""The table that is shipped; `python sims/ldpc_bler.py` makes it."""
LENGTHS = {256: 1, 304: 1, 1024: 1, 3776: 2, 4608: 2, 8448: 1}
"""Information bits (CRC included) of the code blocks that are measured: for each scheme, or for every second one of
a modulation (and the last), where the longest block of base graph 2 and a shorter one of base graph 1 bend a line.
Of the shortest of base graph 1, 304, only rates that have it."""
_SHORTEST_GRAPH_1 = 304
_TARGETS = (1.6, 0.4, 1.0, 2.0)  # measured where the fit has Q(z) errors: 5, 34, 16 and 2 %


@dataclass(frozen=True)
class Curve:
    """Measured block error rates of one code over SNR, and the probit line through them.

    BLER = Q((SNR dB - mean_db) / deviation_db), fitted by maximum likelihood with weak priors.

    Attributes:
        bits_per_symbol: Modulation order.
        rate_1024: Target code rate times 1024.
        block_bits: Information bits of a block.
        codeword_bits: Code bits of a block.
        points: (SNR [dB], blocks, blocks in error).
        mean_db: SNR of BLER 0.5 [dB].
        deviation_db: Width of the waterfall [dB].
    """

    bits_per_symbol: int
    rate_1024: float
    block_bits: int
    codeword_bits: int
    points: tuple[tuple[float, int, int], ...]
    mean_db: float
    deviation_db: float

    @property
    def graph(self) -> int:
        """Base graph."""
        return base_graph(self.block_bits, self.block_bits / self.codeword_bits)


class CodeBlock:
    """One LDPC code with QAM over AWGN.

    Args:
        block_bits: Information bits.
        codeword_bits: Code bits, a multiple of `bits_per_symbol`.
        bits_per_symbol: Modulation order.
        num_iterations: Iterations of belief propagation.
        device: Device of the simulation.
    """

    def __init__(
        self,
        block_bits: int,
        codeword_bits: int,
        bits_per_symbol: int,
        num_iterations: int = NUM_ITERATIONS,
        device: str = "cpu",
    ) -> None:
        ldpc, mapping = phy("fec.ldpc"), phy("mapping")
        where = {"precision": "single", "device": device}
        self.block_bits, self.codeword_bits, self.device = block_bits, codeword_bits, device
        self.num_iterations = num_iterations
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "Effective coderate", UserWarning
            )  # from 948/1024 on; see TransportChannel
            self._encoder = ldpc.LDPC5GEncoder(block_bits, codeword_bits, num_bits_per_symbol=bits_per_symbol, **where)
        self._decoder = ldpc.LDPC5GDecoder(self._encoder, num_iter=num_iterations, return_state=True, **where)
        self._mapper = mapping.Mapper("qam", bits_per_symbol, **where)
        self._demapper = QamDemapper(bits_per_symbol, device)

    def errors(self, snr_db: float, blocks: int, generator: torch.Generator) -> int:
        """Blocks in error out of so many, drawn from a generator on the CPU."""
        chunk = 8 if self.device == "cpu" else 512  # 8: their messages stay in a CPU's cache
        with torch.inference_mode():
            bits = torch.randint(0, 2, (blocks, self.block_bits), generator=generator).to(self.device, torch.float32)
            code_bits = self._encoder(bits)
            symbols = self._mapper(code_bits)
            noise = torch.randn(symbols.shape, dtype=torch.complex64, generator=generator).to(self.device)
            n0 = torch.tensor(10 ** (-snr_db / 10), dtype=torch.float32, device=self.device)
            llr = self._demapper(symbols + n0.sqrt() * noise, n0)
            tried = ~is_lost(llr, code_bits, self.block_bits / self.codeword_bits)
            stages = decoding_stages(self.num_iterations)
            return int(block_errors(self._decoder, llr, bits, stages, tried, chunk).sum())


def fit(points: Sequence[tuple[float, int, int]], guess_db: float, guess_deviation: float) -> tuple[float, float]:
    """Mean and deviation [dB] of the probit line, by maximum likelihood.

    Args:
        points: (SNR [dB], blocks, errors).
        guess_db: Prior mean, known to 1.5 dB.
        guess_deviation: Prior deviation [dB], known to a factor of e^0.5.
    """
    snr, blocks, errors = (np.array(x, float) for x in zip(*points, strict=True))

    def loss(x: Any) -> float:
        z = (snr - x[0]) / math.exp(x[1])
        likelihood = errors * log_ndtr(-z) + (blocks - errors) * log_ndtr(z)
        prior = ((x[0] - guess_db) / 1.5) ** 2 + ((x[1] - math.log(guess_deviation)) / 0.5) ** 2
        return float(prior / 2 - likelihood.sum())

    best = minimize(loss, [guess_db, math.log(guess_deviation)], method="Nelder-Mead", options={"xatol": 1e-4})
    return float(best.x[0]), float(math.exp(best.x[1]))


def measure_curve(
    mcs: Mcs,
    block_bits: int,
    rounds: int = 8,
    blocks: int = 16,
    seed: int = 1,
    num_iterations: int = NUM_ITERATIONS,
    device: str = "cpu",
) -> Curve:
    """Measure one curve: each round simulates where the fit so far expects 34 to 2 % of the blocks in error.

    Args:
        mcs: Modulation and target code rate.
        block_bits: Information bits of a block.
        rounds: Rounds; the first ones find the waterfall.
        blocks: Blocks of each round.
        seed: The blocks of a round depend on it, the code and the round alone.
        num_iterations: Iterations of belief propagation.
        device: Device of the simulation.
    """
    order = mcs.bits_per_symbol
    codeword = round(block_bits / mcs.code_rate / order) * order
    code = CodeBlock(block_bits, codeword, order, num_iterations, device)
    guess = 10 * math.log10(2**mcs.efficiency - 1) + 0.8 + 0.1 * order
    guess_deviation = 0.4 * math.sqrt(1024 / block_bits)
    mean, deviation = guess, guess_deviation
    points: list[tuple[float, int, int]] = []
    for turn in range(rounds):
        snr = round(mean + _TARGETS[turn % len(_TARGETS)] * deviation, 2)
        key = np.random.SeedSequence([seed, order, int(2 * mcs.rate_1024), block_bits, turn]).generate_state(1)
        points.append((snr, blocks, code.errors(snr, blocks, torch.Generator().manual_seed(int(key[0])))))
        mean, deviation = fit(points, guess, guess_deviation)
    merged = {s: (sum(b for t, b, _ in points if t == s), sum(e for t, _, e in points if t == s)) for s, _, _ in points}
    kept = tuple((s, *merged[s]) for s in sorted(merged))
    return Curve(order, mcs.rate_1024, block_bits, codeword, kept, round(mean, 4), round(deviation, 4))


def plan(every: int = 1, lengths: Sequence[int] | None = None) -> list[tuple[Mcs, int]]:
    """Schemes and lengths to measure, of those that the LDPC code has.

    Args:
        every: Take one scheme of a modulation of so many, and its last.
        lengths: Of `LENGTHS`; all by default.
    """
    held = []
    for order in sorted({m.bits_per_symbol for m in nr_mcs()}):
        schemes = [m for m in nr_mcs() if m.bits_per_symbol == order]
        for length in LENGTHS if lengths is None else lengths:
            step = every * LENGTHS.get(length, 1)
            for i, mcs in enumerate(schemes):
                codeword = round(length / mcs.code_rate / order) * order
                if length == _SHORTEST_GRAPH_1 and base_graph(length, length / codeword) == 2:
                    continue  # 256 has it
                if (i % step == 0 or i == len(schemes) - 1) and can_encode(length, codeword):
                    held.append((mcs, length))
    return held


def save_table(path: Path, curves: Sequence[Curve], origin: dict[str, Any]) -> None:
    """Write a table: where it comes from, then a line per curve. The file is replaced at once."""
    lines = ",\n".join(json.dumps(asdict(c)) for c in curves)
    new = path.with_suffix(".new")
    new.write_text(f'{{"origin": {json.dumps(origin)},\n"curves": [\n{lines}\n]}}\n', encoding="utf-8")
    new.replace(path)


class BlerTable:
    """Block error rates looked up: interpolated in code rate and length, within a modulation and a base graph.

    Where a base graph was measured with longer blocks alone (QPSK and 16-QAM just above rate 0.67), both count.

    Mean and deviation of the probit line are linear in the code rate between measured ones and linear in K^(-1/2), as
    the normal approximation is. Below the errors that were measured (about 1 %) the line is extrapolated.

    Args:
        curves: Measured curves.
        origin: Command, versions, commit, date.
    """

    def __init__(self, curves: Sequence[Curve], origin: dict[str, Any] | None = None) -> None:
        self.curves, self.origin = tuple(curves), origin or {}

    @classmethod
    def load(cls, path: str | Path = TABLE) -> BlerTable:
        """Read a table that `save_table` wrote.

        Raises:
            UsageError: If the file is missing or isn't such a table.
        """
        try:
            held = json.loads(Path(path).read_text(encoding="utf-8"))
            curves = [Curve(**c | {"points": tuple(map(tuple, c["points"]))}) for c in held["curves"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} is no table of block error rates ({error}): python sims/ldpc_bler.py") from error
        return cls(curves, held["origin"])

    def waterfall(self, bits_per_symbol: int, block_bits: int, codeword_bits: int) -> tuple[float, float]:
        """Mean and deviation [dB] of a code's probit line.

        Raises:
            UsageError: If no code with this modulation was measured.
        """
        rate = block_bits / codeword_bits
        same = [c for c in self.curves if c.bits_per_symbol == bits_per_symbol]
        graph = base_graph(block_bits, rate)
        if not same:
            raise UsageError(f"the table of block error rates has no modulation of {bits_per_symbol} bits.")
        held = [c for c in same if c.graph == graph]
        shortest = min(c.block_bits for c in same)
        if not held or min(c.block_bits for c in held) > max(block_bits, shortest):
            held = same
        by_length: dict[int, list[Curve]] = {}
        for curve in held:
            by_length.setdefault(curve.block_bits, []).append(curve)
        lines = []
        for length, curves in sorted(by_length.items()):
            rates = np.array([c.block_bits / c.codeword_bits for c in curves])
            values = np.array([[c.mean_db, math.log(c.deviation_db)] for c in curves])
            lines.append((length**-0.5, *_interpolate(rate, rates, values)))
        x = np.array([line[0] for line in lines])
        mean, log_deviation = _interpolate(block_bits**-0.5, x, np.array([line[1:] for line in lines]))
        return float(mean), math.exp(float(log_deviation))

    def block_error(self, format: TransportFormat, snr_db: float) -> float:
        """Probability that a code block of a format is wrong at an SNR [dB]."""
        mean, deviation = self.waterfall(format.mcs.bits_per_symbol, format.block_bits, format.codeword_bits)
        return float(ndtr((mean - snr_db) / deviation))

    def transport_error(self, format: TransportFormat, snr_db: float) -> float:
        """Probability that any of a format's code blocks is wrong at an SNR [dB]: 1 - (1 - BLER)^blocks."""
        return -math.expm1(format.num_blocks * math.log1p(-min(self.block_error(format, snr_db), 1 - 1e-12)))


def _interpolate(at: float, x: Any, values: Any) -> Any:
    """Linear in x, extrapolated from the two outermost points; constant if there is one."""
    order = np.argsort(x)
    x, values = x[order], values[order]
    if len(x) == 1:
        return values[0]
    i = int(np.clip(np.searchsorted(x, at) - 1, 0, len(x) - 2))
    weight = (at - x[i]) / (x[i + 1] - x[i])
    return (1 - weight) * values[i] + weight * values[i + 1]


@functools.cache
def shipped_table() -> BlerTable:
    """The table that comes with the library."""
    return BlerTable.load()
