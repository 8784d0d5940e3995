"""The tests of the rasterizer see mistakes: those published in this field's kernels; `mutations.py` has more."""

import pytest
from mutations import MUTATIONS, ROOT, survives

PUBLISHED = [m for m in MUTATIONS if m.published]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_every_mutation_still_has_its_line(mutation):
    text = (ROOT / "chanlab" / "rf" / mutation.file).read_text(encoding="utf-8")
    assert text.count(mutation.right) == 1
    assert mutation.right != mutation.wrong


@pytest.mark.slow
@pytest.mark.parametrize("mutation", PUBLISHED, ids=lambda m: m.name)
def test_published_mistakes_are_found(mutation):
    assert not survives(mutation)
