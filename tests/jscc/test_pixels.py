"""Crops are what slicing says, by either way of cutting."""

import numpy as np
import pytest
import torch

from chanlab.errors import UsageError
from chanlab.jscc.pixels import Pixels


@pytest.fixture(scope="module")
def pictures():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (h, w, 3), np.uint8) for h, w in ((7, 9), (12, 5), (6, 6))]


def test_packing_keeps_pictures(pictures):
    pixels = Pixels.pack(pictures)
    assert len(pixels) == 3
    assert pixels.data.numel() == sum(p.size for p in pictures)
    for i, picture in enumerate(pictures):
        assert np.array_equal(pixels.picture(i).permute(1, 2, 0).numpy(), picture)
    with pytest.raises(UsageError, match="no pictures"):
        Pixels.pack([])


@pytest.mark.parametrize("way", ["_sliced", "_gathered"])
def test_crops_are_slices(pictures, way):
    """Corners included: the last crop ends with its picture's last row and column."""
    pixels = Pixels.pack(pictures)
    index, top, left = (torch.tensor(x) for x in ([0, 1, 2, 1], [2, 8, 0, 3], [6, 2, 3, 0]))
    flip = torch.tensor([False, True, True, False])
    cut = getattr(pixels, way)(index, top, left, (4, 3), flip)
    assert cut.dtype == torch.uint8
    for n in range(4):
        want = pictures[index[n]][top[n] : top[n] + 4, left[n] : left[n] + 3]
        want = want[:, ::-1] if flip[n] else want
        assert np.array_equal(cut[n].permute(1, 2, 0).numpy(), want)


@pytest.mark.gpu
def test_a_graphics_processor_cuts_the_same(pictures):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    pixels = Pixels.pack(pictures)
    where = (torch.tensor([0, 1, 2]), torch.tensor([1, 5, 2]), torch.tensor([4, 1, 0]))
    flip = torch.tensor([True, False, True])
    there = pixels.to("cuda").crops(*(x.cuda() for x in where), (3, 4), flip.cuda())
    assert torch.equal(there.cpu(), pixels.crops(*where, (3, 4), flip))
