"""5G LDPC decoding that spends its time on blocks in doubt: right ones stop early, lost ones are not tried."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

_SCALES = (0.5, 0.7, 1.0, 1.4, 2.0)


def iteration_stages(num_iterations: int) -> list[int]:
    """Iterations of each stage: looks after 2, 5 and 10, then at the end: 20 -> [2, 3, 5, 10]."""
    looks = [look for look in (2, 5, 10) if look < num_iterations] + [num_iterations]
    return [look - before for before, look in zip([0, *looks], looks, strict=False)]


def llr_information(llr: Tensor, code_bits: Tensor) -> Tensor:
    """Information that the logits of a block carry on the code bits that were sent [bit per code bit].

    1 - E log2(1 + exp(-s L)), the logit L signed by the bit, at the best of a few scales s: what bit-interleaved coded
    modulation can achieve with these logits, miscalibrated ones included (Martinez et al., 2009).

    Args:
        llr: Logits of the code bits, real `[..., n]`.
        code_bits: The code bits that were sent, 0 or 1, `[..., n]`.

    Returns:
        Real `[...]`, at most 1.
    """
    signed = llr * (2 * code_bits - 1)
    return torch.stack([1 - softplus(-s * signed).mean(-1) / math.log(2) for s in _SCALES]).amax(0)


def is_lost(llr: Tensor, code_bits: Tensor, code_rate: float) -> Tensor:
    """Blocks whose logits carry too little information for their code rate to be decoded.

    Below information i < R about 2^(n (R - i)) other codewords explain the logits better than the one sent: at 10 bits
    short even an ideal decoder succeeds once in a thousand, and belief propagation needs i ≈ R + 0.03 or more.

    Args:
        llr: Real `[..., n]`.
        code_bits: `[..., n]`.
        code_rate: R.

    Returns:
        Bool `[...]`.
    """
    return llr_information(llr, code_bits) < code_rate - 10 / llr.shape[-1]


def block_errors(
    decoder: Any, llr: Tensor, bits: Tensor, stages: Sequence[int], tried: Tensor, chunk: int = 64
) -> Tensor:
    """Which code blocks are still wrong after all stages of belief propagation.

    After each stage the blocks that equal what was sent stop, as an ideal CRC would let them, and the others go on from
    the decoder's state: a block fails if it isn't right at the end of any stage.

    Args:
        decoder: `sionna.phy.fec.ldpc.LDPC5GDecoder` with `return_state=True`.
        llr: Logits of the code bits, real `[block, n]`.
        bits: Information bits that were sent, real `[block, k]`.
        stages: Iterations of each stage.
        tried: Blocks to decode, bool `[block]`; the others count as wrong.
        chunk: Blocks decoded at once; 64 keep the messages in a CPU's cache.

    Returns:
        Bool `[block]`.
    """
    wrong = torch.ones(llr.shape[0], dtype=torch.bool, device=llr.device)
    for part in torch.split(tried.nonzero().squeeze(-1), chunk):
        index = part
        state: Tensor | None = None
        for iterations in stages:
            if not index.numel():
                break
            decoded, state = decoder(llr[index], num_iter=iterations, msg_v2c=state)
            failed = (decoded != bits[index]).any(-1)
            wrong[index] = failed
            index, state = index[failed], state[failed]
    return wrong
