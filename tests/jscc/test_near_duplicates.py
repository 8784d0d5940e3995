"""Pictures of one scene are found, whichever is given first."""

import numpy as np
import pytest
from PIL import Image

from chanlab.jscc.near_duplicates import THRESHOLD, near_duplicates, thumbnail


def scene(seed):
    coarse = np.random.default_rng(seed).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((320, 240), Image.Resampling.BICUBIC)


@pytest.mark.parametrize(
    "alter",
    [
        lambda picture: picture.resize((200, 150), Image.Resampling.LANCZOS),
        lambda picture: picture.transform(picture.size, Image.Transform.AFFINE, (1, 0, 30, 0, 1, -20)),
    ],
    ids=["smaller", "shifted"],
)
def test_copies_are_found_and_other_scenes_are_not(alter):
    pictures = [thumbnail(np.asarray(scene(i))) for i in range(4)]
    altered = [thumbnail(np.asarray(alter(scene(i)))) for i in (2, 9)]
    found = near_duplicates(pictures, altered)
    assert [(i, j) for i, j, _ in found] == [(2, 0)]
    assert found[0][2] > THRESHOLD


def test_order_does_not_matter():
    first, second = ([thumbnail(np.asarray(scene(i))) for i in seeds] for seeds in (range(3), range(3, 7)))
    forwards = {(i, j): alike for i, j, alike in near_duplicates(first, second, threshold=-1.0)}
    backwards = {(i, j): alike for j, i, alike in near_duplicates(second, first, threshold=-1.0)}
    assert len(forwards) == 12
    assert forwards == pytest.approx(backwards, abs=1e-5)
    assert near_duplicates([], second) == []
