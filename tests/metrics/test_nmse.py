import math

import pytest
import torch

from chanlab.errors import UsageError
from chanlab.metrics import NMSE, SGCS, NMSEByStep, nmse, nmse_by_step, nmse_terms, sgcs, to_db


def by_hand():
    """Two samples, one antenna pair, two steps, two subcarriers: every ratio is a small fraction."""
    target = torch.tensor([[[1, 1j], [2, 0]], [[0, 4], [0, 3j]]], dtype=torch.complex64).reshape(2, 1, 1, 2, 2)
    error = torch.tensor([[[1, 0], [0, 1]], [[2j, 0], [0, 0]]], dtype=torch.complex64).reshape(2, 1, 1, 2, 2)
    # |e|²: sample 0: steps (1, 1); sample 1: steps (4, 0). |h|²: sample 0: (2, 4); sample 1: (16, 9)
    return target + error, target


EXPECTED = {
    "pooled": 6 / 31,
    "per_sample": (2 / 6 + 4 / 25) / 2,
    "per_antenna_step": (1 / 2 + 1 / 4 + 4 / 16 + 0) / 4,
    "median": (2 / 6 + 4 / 25) / 2,
}
BY_STEP = {
    "pooled": [5 / 18, 1 / 13],
    "per_sample": [(1 / 2 + 4 / 16) / 2, (1 / 4 + 0) / 2],
    "per_antenna_step": [(1 / 2 + 4 / 16) / 2, (1 / 4 + 0) / 2],
    "median": [(1 / 2 + 4 / 16) / 2, (1 / 4 + 0) / 2],
}


@pytest.mark.parametrize("reduction", EXPECTED)
def test_nmse_by_hand(reduction):
    prediction, target = by_hand()
    assert nmse(prediction, target, reduction).item() == pytest.approx(EXPECTED[reduction])
    torch.testing.assert_close(nmse_by_step(prediction, target, reduction), torch.tensor(BY_STEP[reduction]))


@pytest.mark.parametrize("reduction", EXPECTED)
def test_classes_do_not_depend_on_how_data_are_cut(reduction):
    prediction, target = by_hand()
    whole, steps, db = NMSE(reduction), NMSEByStep(2, reduction), NMSE(reduction, db=True)
    for i in range(2):
        for metric in (whole, steps, db):
            metric.update(prediction[i : i + 1], target[i : i + 1])
    assert whole.compute().item() == pytest.approx(EXPECTED[reduction])
    assert db.compute().item() == pytest.approx(10 * math.log10(EXPECTED[reduction]))
    torch.testing.assert_close(steps.compute(), torch.tensor(BY_STEP[reduction], dtype=torch.float64))


def test_decibels_are_taken_of_the_mean():
    ratios = torch.tensor([0.1, 1e-6])
    assert to_db(ratios.mean()).item() == pytest.approx(10 * math.log10(0.0500005), abs=1e-4)
    assert to_db(0.0).item() == -math.inf


def test_dim_chooses_what_a_ratio_sums():
    prediction, target = by_hand()
    per_subcarrier = (
        1 / 5 + 1 / 1 + 0 + 4 / 25
    ) / 4  # summed over time: sample 0: 1/5, 1/1; sample 1: |h|² is 0 and 25
    with pytest.raises(UsageError, match="no power"):
        nmse(prediction, target, "per_sample", dim=-2)
    target[1, ..., 0] = 1
    prediction[1, ..., 0] = 1
    prediction[1, 0, 0, 0, 1] = target[1, 0, 0, 0, 1] + 2
    assert nmse(prediction, target, "per_sample", dim=-2).item() == pytest.approx(per_subcarrier)


def test_terms_give_the_pooled_value():
    prediction, target = by_hand()
    error, power = nmse_terms(prediction, target)
    assert error.tolist() == [2, 4]
    assert power.tolist() == [6, 25]


def test_median_of_an_even_and_an_odd_count():
    target = torch.ones(4, 1, 1, 1, 1, dtype=torch.complex64)
    prediction = target + torch.tensor([1.0, 2.0, 3.0, 10.0]).reshape(-1, 1, 1, 1, 1)
    assert nmse(prediction, target, "median").item() == pytest.approx((4 + 9) / 2)
    assert nmse(prediction[:3], target[:3], "median").item() == pytest.approx(4)


def test_real_tensors_and_gradients():
    target = torch.tensor([[3.0, 4.0]])
    prediction = torch.tensor([[3.0, 5.0]], requires_grad=True)
    value = nmse(prediction, target, "per_sample")
    value.backward()
    assert value.item() == pytest.approx(1 / 25)
    torch.testing.assert_close(prediction.grad, torch.tensor([[0.0, 2 / 25]]))


def test_errors_name_what_is_wrong():
    prediction, target = by_hand()
    with pytest.raises(UsageError, match=r"shape \[2, 1, 1, 2, 1\]"):
        nmse(prediction[..., :1], target)
    with pytest.raises(UsageError, match="prediction holds 1 of 8"):
        nmse(torch.where(target == 3j, torch.nan, prediction), target)
    with pytest.raises(UsageError, match="target holds 1 of 8"):
        NMSE().update(prediction, torch.where(target == 3j, torch.inf, target))
    with pytest.raises(UsageError, match="empty"):
        nmse(prediction[:0], target[:0])
    with pytest.raises(UsageError, match="no power"):
        nmse(prediction, torch.zeros_like(target))
    with pytest.raises(UsageError, match="unknown"):
        nmse(prediction, target, "mean")
    with pytest.raises(UsageError, match="leave out dim"):
        nmse(prediction, target, "pooled", dim=-1)
    with pytest.raises(UsageError, match="names no distinct axes"):
        nmse(prediction, target, "per_sample", dim=(1, -4))
    with pytest.raises(UsageError, match="2 steps"):
        NMSEByStep(4).update(prediction, target)


def test_sgcs_by_hand():
    # vectors over two transmit antennas: (1, 0) against (1, 1): 1/2; (1, j) against itself turned and scaled: 1
    target = torch.tensor([[1, 1], [0, 1j]], dtype=torch.complex64).reshape(1, 1, 2, 1, 2)
    prediction = torch.tensor([[1, 3j], [1, -3]], dtype=torch.complex64).reshape(1, 1, 2, 1, 2)
    assert sgcs(prediction, target).item() == pytest.approx((0.5 + 1) / 2)
    metric = SGCS(steps=2)
    metric.update(torch.cat([prediction, target], -2), torch.cat([target, target], -2))
    assert metric.compute().tolist() == pytest.approx([0.75, 1])


def test_sgcs_is_blind_to_phase_and_scale_only():
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(3, 2, 4, 2, 5, dtype=torch.complex64, generator=generator)
    turn = torch.randn(3, 1, 1, 2, 5, dtype=torch.complex64, generator=generator)
    assert sgcs(h * turn, h).item() == pytest.approx(1, abs=1e-6)
    torch.testing.assert_close(sgcs(h * turn, h, by_step=True), torch.ones(2))
    per_antenna = torch.randn(3, 1, 4, 2, 5, dtype=torch.complex64, generator=generator)
    assert sgcs(h * per_antenna, h).item() < 0.9
    assert sgcs(torch.zeros_like(h), h).item() == 0
    # one vector per receive antenna: a phase of its own for each row goes unseen
    rows = torch.randn(3, 2, 1, 2, 5, dtype=torch.complex64, generator=generator)
    assert sgcs(h * rows, h, dim=-3).item() == pytest.approx(1, abs=1e-6)
    assert sgcs(h * rows, h).item() < 0.99
