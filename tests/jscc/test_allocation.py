"""The order of symbols, which counts make: what sorting by score would give."""

import pytest
import torch

from chanlab.jscc.allocation import LEVELS, STEP_DB, at_places, level_order, symbol_order, symbol_places
from chanlab.jscc.latents import latent_deviation_db


def sorted_by_score(levels, ranks, always):
    score = (16 * ranks).round() + 64 * LEVELS * always
    scores = score[:, None, None] + torch.where(always[:, None, None], 0, 16 * levels[:, None])
    return scores.flatten(1).argsort(dim=1, descending=True, stable=True)


@pytest.mark.parametrize("channels", [3, 64, 100])
@pytest.mark.parametrize("shape", [(2, 5, 7), (1, 1, 1), (3, 12, 12)])
@pytest.mark.parametrize("ties", [False, True])
def test_places_without_sorting(channels, shape, ties):
    generator = torch.Generator().manual_seed(0)
    ranks, always = latent_deviation_db(channels) / STEP_DB, torch.arange(channels) < 2
    ranks = ranks.round() if ties else ranks
    levels = torch.randint(0, LEVELS, shape, generator=generator)
    places = symbol_places(levels, level_order(ranks, always), always)
    order = symbol_order(places)
    assert torch.equal(order, sorted_by_score(levels, ranks, always))
    values = torch.randn(shape[0], min(order.shape[1], 40), generator=generator)
    wanted = torch.zeros(order.shape).scatter(1, order[:, : values.shape[1]], values)
    assert torch.equal(at_places(values, places), wanted)
    values.requires_grad_()
    assert torch.equal(at_places(values, places), wanted)
    (at_places(values, places) * torch.arange(order.shape[1])).sum().backward()
    assert torch.equal(values.grad, order[:, : values.shape[1]].float())
