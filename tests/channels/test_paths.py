from dataclasses import replace

import pytest
import torch
from path_samples import random_paths

from chanlab.channels import PATH_TENSORS, Paths, PlanarArray, cfr, sample_generator, subcarrier_frequencies
from chanlab.errors import UsageError

ARRAY, F = PlanarArray(1, 2, polarization="VH"), subcarrier_frequencies(4, 1e6)


def _equal(a: Paths, b: Paths) -> bool:
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in PATH_TENSORS)


def _shuffle(paths: Paths, seed: int = 1) -> Paths:
    order = torch.randperm(paths.num_paths, generator=torch.Generator().manual_seed(seed))
    return paths._map(lambda _, x: x[..., order])


def test_canonical_order_does_not_depend_on_the_order_found():
    paths = random_paths(3, 2, num_paths=8)
    assert _equal(_shuffle(paths).sort(), paths.sort())
    delay = torch.where(paths.mask, paths.delay, torch.inf)
    assert (delay.nan_to_num(posinf=1.0).diff(dim=-1) >= 0).all()
    assert not (paths.transfer != 0)[..., ~paths.mask.any(0).any(0)].any()


def test_ties_in_delay_are_broken_by_power_and_then_by_interactions():
    paths = random_paths(1, num_paths=3)
    paths = replace(
        paths,
        mask=torch.ones(1, 3, dtype=torch.bool),
        delay=torch.full((1, 3), 1e-7, dtype=torch.float64),
        transfer=torch.ones(1, 2, 2, 3, dtype=torch.complex128) * torch.tensor([1.0, 2.0, 1.0]),
        interactions=torch.tensor([[[1, 1, 0], [0, 0, 0]]], dtype=torch.int8),
    )
    ordered = paths.sort()
    assert ordered.transfer[0, 0, 0].real.tolist() == [2, 1, 1]
    assert ordered.interactions[0, 0].tolist() == [1, 0, 1]


def test_sorting_padding_and_trimming_keep_the_channel():
    paths = random_paths(3, num_paths=6)
    h = cfr(paths, ARRAY, ARRAY, F)
    for same in (_shuffle(paths), paths.pad(9, 5), paths.pad(9).trim(), _shuffle(paths.pad(8)).sort().trim()):
        assert torch.allclose(cfr(same, ARRAY, ARRAY, F), h)
    assert paths.pad(9).trim().num_paths == paths.trim().num_paths
    with pytest.raises(UsageError, match="pad"):
        paths.pad(2)


def test_concatenation_pads_to_the_largest():
    a, b = random_paths(2, num_paths=3), random_paths(4, num_paths=5, seed=1)
    both = Paths.cat([a, b])
    assert both.batch_shape == (6,)
    assert both.num_paths == 5
    assert torch.allclose(cfr(both[:2], ARRAY, ARRAY, F), cfr(a, ARRAY, ARRAY, F))
    assert torch.allclose(cfr(both[2:], ARRAY, ARRAY, F), cfr(b, ARRAY, ARRAY, F))
    with pytest.raises(UsageError, match="carriers"):
        Paths.cat([a, replace(b, carrier=1e9)])
    with pytest.raises(UsageError, match="at least one"):
        Paths.cat([])


def test_indexing_leaves_trailing_axes_alone():
    paths = random_paths(3, 4)
    assert paths[1].batch_shape == (4,)
    assert paths[:, -1].transfer.shape == (3, 2, 2, 5)
    rows, columns = torch.tensor([[0], [2]]), torch.tensor([[1, 3], [0, 2]])
    picked = paths[rows, columns]
    assert picked.batch_shape == (2, 2)
    assert torch.equal(picked.vertices[1, 0], paths.vertices[2, 0])


@pytest.mark.parametrize("name", PATH_TENSORS)
def test_a_tensor_of_the_wrong_shape_is_named(name):
    paths = random_paths(2)
    wrong = {"mask": paths.mask[0]}.get(name, getattr(paths, name)[..., :-1])
    with pytest.raises(UsageError, match="shape"):
        replace(paths, **{name: wrong})


def test_casting_takes_real_precisions_only():
    paths = random_paths(2).to(dtype=torch.float32)
    assert paths.transfer.dtype == torch.complex64
    assert paths.interactions.dtype == torch.int8
    assert paths.mask.dtype == torch.bool
    with pytest.raises(UsageError, match="float64"):
        paths.to(dtype=torch.float16)


def test_random_numbers_depend_on_seed_sample_and_stream():
    def draw(*key: int) -> float:
        return float(torch.rand((), generator=sample_generator(*key)))

    assert draw(1, 2) == draw(1, 2, 0)
    assert len({draw(seed, sample, stream) for seed in range(5) for sample in range(20) for stream in range(4)}) == 400


def test_links_without_any_path_can_be_trimmed_and_padded():
    """Users that no ray reaches are links too."""
    none = random_paths(3, num_paths=4)._map(lambda _, x: x[..., :0])
    assert none.trim().num_paths == 0
    assert none.sort().pad(2).mask.shape == (3, 2)
    assert (cfr(none, ARRAY, ARRAY, F) == 0).all()
    assert Paths.cat([none, random_paths(2, num_paths=4)]).mask.sum(-1)[:3].tolist() == [0, 0, 0]
