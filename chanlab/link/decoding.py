"""5G LDPC decoding in stages: blocks that a CRC would accept stop early, as in a real receiver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def iteration_stages(num_iterations: int, first: int = 5) -> list[int]:
    """Iterations of each stage: `first`, as many again, then the rest: 20 -> [5, 5, 10]."""
    stages: list[int] = []
    for size in (first, first):
        if num_iterations - sum(stages) > size:
            stages.append(size)
    return [*stages, num_iterations - sum(stages)]


def block_errors(decoder: Any, llr: Tensor, bits: Tensor, stages: Sequence[int], chunk: int = 64) -> Tensor:
    """Which code blocks are still wrong after all stages of belief propagation.

    After each stage the blocks that equal what was sent stop (an ideal CRC) and the others go on from the decoder's
    state, so that a block fails exactly if it would never be right at the end of a stage.

    Args:
        decoder: `sionna.phy.fec.ldpc.LDPC5GDecoder` with `return_state=True`.
        llr: Logits of the code bits, real `[block, n]`.
        bits: Information bits that were sent, real `[block, k]`.
        stages: Iterations of each stage.
        chunk: Blocks decoded at once; 64 keep the messages in a CPU's cache.

    Returns:
        Bool `[block]`.
    """
    wrong = torch.ones(llr.shape[0], dtype=torch.bool, device=llr.device)
    for start in range(0, llr.shape[0], chunk):
        index = torch.arange(start, min(start + chunk, llr.shape[0]), device=llr.device)
        state: Tensor | None = None
        for iterations in stages:
            decoded, state = decoder(llr[index], num_iter=iterations, msg_v2c=state)
            failed = (decoded != bits[index]).any(-1)
            wrong[index] = failed
            index, state = index[failed], state[failed]
            if not index.numel():
                break
    return wrong
