"""The runs of jscc_train.py: which codec, at which bandwidth ratio and SNR, and how each is built."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

import torch

from chanlab.errors import UsageError
from chanlab.jscc import ADJSCC, AdaptiveJSCC, Codec, DeepJSCC

WIDE_KERNELS = (9, 5, 5, 5, 5)
GROUPS = ("ours", "adjscc", "specialists", "deepjscc")
DEFAULT = ("ours", "adjscc", "specialists", "deepjscc_1_6_10dB")


@dataclass(frozen=True)
class Arm:
    """A run.

    Attributes:
        system: `adaptive`, `adjscc` or `deepjscc`.
        ratio: Its only bandwidth ratio; None: all of --train-ratios.
        snr_db: Its only SNR [dB]; None: drawn from --snr-range.
    """

    system: str
    ratio: Fraction | None = None
    snr_db: float | None = None

    @property
    def fixed_rate(self) -> bool:
        """Whether the network has one bandwidth ratio by construction."""
        return self.system != "adaptive"

    @property
    def architecture(self) -> tuple[str, Fraction | None]:
        """What runs must share to take turns on one compiled network."""
        return self.system, self.ratio if self.fixed_rate else None

    @property
    def name(self) -> str:
        """As files are called: `adaptive`, `adaptive_10dB`, `adaptive_1_6_10dB`, `adjscc_1_12`."""
        parts = [self.system]
        if self.ratio is not None:
            parts.append(f"{self.ratio.numerator}_{self.ratio.denominator}")
        if self.snr_db is not None:
            parts.append(f"{self.snr_db:g}dB")
        return "_".join(parts)

    @property
    def label(self) -> str:
        """As records call the system."""
        if self.system == "adaptive":
            one = [name for name, held in (("SNR", self.snr_db), ("ratio", self.ratio)) if held is not None]
            return ", ".join(["adaptive", *(["one " + " and ".join(one)] if one else [])])
        return self.system


def arms(args: argparse.Namespace) -> list[Arm]:
    """The runs that --arms names, in its order."""
    found: list[Arm] = []
    for group in args.arms:
        if group == "ours":
            found.append(Arm("adaptive"))
        elif group == "adjscc":
            found += [Arm("adjscc", ratio) for ratio in args.ratios]
        elif group == "specialists":
            found += [Arm("adaptive", None, snr) for snr in args.held_snrs]
        elif group == "deepjscc":
            found += [Arm("deepjscc", ratio, snr) for ratio in args.ratios for snr in args.held_snrs]
        else:
            found.append(named(group))
    return list(dict.fromkeys(found))


def named(name: str) -> Arm:
    """A single run by its name."""
    match = re.fullmatch(r"(adaptive|adjscc|deepjscc)(?:_(\d+)_(\d+))?(?:_(-?[\d.]+)dB)?", name)
    # ADJSCC has one ratio and all SNRs, DeepJSCC one of each, ours any.
    needs = {"adjscc": (True, False), "deepjscc": (True, True)}
    if match is None or (match[2] is not None, match[4] is not None) != needs.get(
        match[1], (match[2] is not None, match[4] is not None)
    ):
        raise UsageError(f"--arms are {', '.join(GROUPS)} or single runs such as deepjscc_1_6_10dB, not {name}.")
    ratio = None if match[2] is None else Fraction(int(match[2]), int(match[3]))
    return Arm(match[1], ratio, None if match[4] is None else float(match[4]))


def build(arm: Arm, args: argparse.Namespace) -> Codec:
    """The codec of a run; those of others have as many parameters as ours, to the nearest number of filters."""
    if arm.system == "adaptive":
        return AdaptiveJSCC(max(args.train_ratios), args.widths, args.depths, args.kernel)
    assert arm.ratio is not None
    target = parameters(AdaptiveJSCC, max(args.train_ratios), tuple(args.widths), tuple(args.depths), args.kernel)
    kind = ADJSCC if arm.system == "adjscc" else DeepJSCC
    return kind(arm.ratio, matching_filters(kind, arm.ratio, target), WIDE_KERNELS)


@cache
def matching_filters(kind: type[DeepJSCC], ratio: Fraction, target: int) -> int:
    """The multiple of 8 filters of each layer with which a codec comes closest to a number of parameters.

    Tensor cores multiply channels in groups of 8; other numbers would slow these codecs down.
    """
    return min(range(16, 1024, 8), key=lambda filters: abs(parameters(kind, ratio, filters, WIDE_KERNELS) - target))


@cache
def parameters(kind: type[Codec], *arguments: object) -> int:
    """Number of parameters of a codec."""
    with torch.device("meta"):
        return sum(p.numel() for p in kind(*arguments).parameters())  # type: ignore[arg-type]
