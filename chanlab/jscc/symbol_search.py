"""Symbols found by gradient descent on one image: what an encoder's network leaves, for any decoder as it is."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from chanlab.data import counter
from chanlab.errors import UsageError
from chanlab.jscc.channels import AWGN
from chanlab.jscc.contract import Transmission, power_scale, scaled

if TYPE_CHECKING:
    from chanlab.jscc.codec import Codec

RATE = 0.03
"""First step of symbols of unit power; it falls linearly to zero."""
_AT_ONCE = 400_000  # pixels whose decoding is differentiated at once
_LEAST_MSE = 1e-9


def search_symbols(
    codec: Codec, images: Tensor, sent: Transmission, snr_db: Tensor, steps: int, rate: float = RATE
) -> Transmission:
    """The same transmission with symbols by which its images come out better over AWGN of an SNR.

    An encoder's network finds symbols for all images in one pass; for a given image there are better ones (Campos et
    al., 2019, for learned compression). The transmitter has the decoder, too: it sends the image to itself over noise
    that it draws, and follows the gradient of the PSNR with regard to the symbols (Adam). The image's power, which
    symbols are sent, side information and receiver stay. Where the outcome is no better over other noise, symbols stay
    as well. What is found for an image depends on nothing else in its batch.

    Args:
        codec: In evaluation.
        images: `[batch, 3, height, width]` in [0, 1].
        sent: What its encoder sends.
        snr_db: Nominal SNR per complex symbol [dB], `[batch]`.
        steps: Of the descent; each takes a forward and a backward pass of the decoder.
        rate: Of learning, at the first step.

    Raises:
        UsageError: If the codec was built in inference mode, whose tensors have no gradients.
    """
    if any(value.is_inference() for value in (*codec.parameters(), *codec.buffers())):
        raise UsageError("a search takes gradients: build the codec outside of torch.inference_mode().")
    count = max(1, _AT_ONCE // images[0, 0].numel())
    found = []
    with torch.inference_mode(False):  # gradients need tensors that were made outside of it
        for rows in torch.split(torch.arange(len(images), device=images.device), count):
            part = replace(_some(sent, rows), base_loss=None)
            found.append(_search(codec, images[rows].clone(), part, snr_db[rows].clone(), steps, rate))
    return replace(sent, symbols=torch.cat(found))


def _search(codec: Codec, images: Tensor, sent: Transmission, snr_db: Tensor, steps: int, rate: float) -> Tensor:
    # In training channels don't check the power, which waits for the device, and is that of other images, too.
    channel, shape = AWGN(codec.convention).train(), (images.shape[1], images.shape[2], images.shape[3])
    start, power = sent.symbols, sent.power
    parts = torch.view_as_real(start).clone().requires_grad_()
    optimizer = torch.optim.Adam([parts], lr=rate)

    def symbols() -> Tensor:
        free = torch.view_as_complex(parts)
        return scaled(free, sent.used, power_scale(free, sent.used) * power.sqrt())

    def error(given: Tensor, step: int) -> Tensor:
        # The noise of a step is the same for each image.
        keys = counter.keys(torch.zeros(len(images), dtype=torch.int64, device=images.device), 0, "search", step)
        received = channel(replace(sent, symbols=given), snr_db, keys)
        return (codec.decode(received, shape) - images).square().mean((1, 2, 3)) + _LEAST_MSE

    with torch.enable_grad():
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = rate * (1 - step / steps)
            (parts.grad,) = torch.autograd.grad(error(symbols(), step).log().sum(), parts)
            optimizer.step()
    with torch.no_grad():
        ended = symbols()
        better = error(ended, steps) < error(start, steps)
        return torch.where(better[:, None], ended, start)


def _some(sent: Transmission, rows: Tensor) -> Transmission:
    """The transmission of some images."""
    values: dict[str, Any] = {f.name: getattr(sent, f.name) for f in fields(sent)}
    some: dict[str, Any] = {name: v if v is None else v[rows].detach().clone() for name, v in values.items()}
    return Transmission(**some)
