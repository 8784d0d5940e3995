"""Errors whose size is itself uncertain: a complex Student's t distribution, its bounds and likelihood."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from chanlab.errors import UsageError


class ComplexStudentT(NamedTuple):
    """A prediction whose errors follow a complex Student's t distribution with 2 x `shape` degrees of freedom.

    A Gaussian whose variance is itself uncertain, so that |error|² follows a Lomax distribution: the smaller `shape`,
    the heavier the tail. Source: S. Kotz, S. Nadarajah, "Multivariate t Distributions", 2004 (two dimensions).

    Attributes:
        mean: Complex `[batch, rx_ant, tx_ant, horizon, subcarrier]`.
        variance: Variance of the complex error of each entry, real, same shape.
        shape: a > 1 of each entry, real, same shape (broadcast).
    """

    mean: Tensor
    variance: Tensor
    shape: Tensor

    def bound(self, probability: float) -> Tensor:
        """Magnitude that the error stays below with a probability, real, the mean's shape.

        Raises:
            UsageError: The probability isn't between 0 and 1.
        """
        if not 0.0 < probability < 1.0:
            raise UsageError(f"the probability is between 0 and 1, not {probability}")
        spread = torch.expm1(-math.log1p(-probability) / self.shape)
        return (self.variance * (self.shape - 1.0) * spread).sqrt()

    def log_likelihood(self, truth: Tensor) -> Tensor:
        """Logarithm of the density at the true channel, real, the mean's shape."""
        error = torch.view_as_real(truth - self.mean).square().sum(-1)
        scale = self.variance * (self.shape - 1.0) / self.shape
        density = torch.log(torch.pi * scale) + (self.shape + 1.0) * torch.log1p(error / (self.shape * scale))
        return -density
