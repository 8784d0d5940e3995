import numpy as np
import pytest
import torch

from chanlab.errors import UsageError
from chanlab.metrics import bootstrap_interval, nmse, nmse_terms


def test_interval_of_a_mean_matches_the_normal_one():
    rng = np.random.default_rng(3)
    x = rng.normal(5.0, 2.0, 400)
    interval = bootstrap_interval(x, resamples=2000)
    standard_error = x.std() / np.sqrt(x.size)
    assert interval.value == pytest.approx(x.mean())
    assert interval.deviation == pytest.approx(standard_error, rel=0.1)
    assert interval.low == pytest.approx(x.mean() - 1.96 * standard_error, abs=0.25 * standard_error)
    assert interval.high == pytest.approx(x.mean() + 1.96 * standard_error, abs=0.25 * standard_error)


def test_coverage_of_a_ratio_of_sums():
    """About 95 % of the intervals hold the true ratio (0.5)."""
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(100):
        power = rng.exponential(1.0, 60)
        error = 0.5 * power * rng.exponential(1.0, 60)
        low, high = bootstrap_interval(error, power, resamples=200, seed=trial)[1:3]
        hits += low <= 0.5 <= high
    assert hits >= 84


def test_windows_of_one_trajectory_are_resampled_together():
    rng = np.random.default_rng(1)
    own = rng.normal(0, 1, 50)
    values = np.repeat(own, 20)
    groups = np.repeat(np.arange(50), 20)
    grouped = bootstrap_interval(values, groups=groups)
    assert grouped.deviation == pytest.approx(own.std() / np.sqrt(50), rel=0.15)
    assert bootstrap_interval(values).deviation < grouped.deviation / 3


def test_pooled_nmse_of_tensors_and_seed():
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(8, 1, 2, 4, 3, dtype=torch.complex64, generator=generator)
    p = h + 0.1 * torch.randn(h.shape, dtype=torch.complex64, generator=generator)
    interval = bootstrap_interval(*nmse_terms(p, h))
    assert interval.value == pytest.approx(nmse(p, h).item(), rel=1e-5)
    assert interval.low < interval.value < interval.high
    assert interval == bootstrap_interval(*nmse_terms(p, h))
    assert interval != bootstrap_interval(*nmse_terms(p, h), seed=1)


def test_median():
    interval = bootstrap_interval([1.0, 2.0, 3.0, 4.0, 100.0], statistic="median")
    assert interval.value == 3.0
    assert 1.0 <= interval.low <= interval.high <= 100.0


def test_medians_of_resampled_groups_are_numpys():
    """Groups of unequal sizes, values that repeat, odd and even numbers of values."""
    rng = np.random.default_rng(7)
    for size in (7, 40):
        groups = rng.integers(0, 5, size)
        groups[:5] = range(5)
        values = rng.integers(0, 12, size).astype(float)
        found = bootstrap_interval(values, groups=groups, statistic="median", resamples=50, seed=3)
        draw = np.random.default_rng(3)
        members = [values[groups == g] for g in range(5)]
        drawn = [np.median(np.concatenate([members[g] for g in draw.integers(0, 5, 5)])) for _ in range(50)]
        assert found[:3] == (np.median(values), *np.quantile(drawn, [0.025, 0.975]))
        assert found.deviation == pytest.approx(np.std(drawn))


def test_errors_name_what_is_wrong():
    with pytest.raises(UsageError, match="two independent realisations"):
        bootstrap_interval([1.0, 2.0], groups=[7, 7])
    with pytest.raises(UsageError, match="lengths 2, 3"):
        bootstrap_interval([1.0, 2.0], [1.0, 2.0, 3.0])
    with pytest.raises(UsageError, match="NaN"):
        bootstrap_interval([1.0, float("nan")])
    with pytest.raises(UsageError, match="no denominators"):
        bootstrap_interval([1.0, 2.0], [1.0, 2.0], statistic="median")


def test_strata_are_resampled_within_themselves():
    """Of a set number of realisations per kind, the difference between kinds is no sampling error."""
    rng = np.random.default_rng(3)
    kind = np.repeat([0, 1, 2], 100)
    values = 100.0 * kind + rng.normal(size=300)
    mixed, stratified = bootstrap_interval(values), bootstrap_interval(values, strata=kind)
    assert stratified.value == mixed.value
    assert stratified.deviation == pytest.approx(1 / np.sqrt(300), rel=0.15)
    assert mixed.deviation > 30 * stratified.deviation
    assert bootstrap_interval(values, strata=kind, statistic="median").high < 103
    with pytest.raises(UsageError, match="more than one stratum"):
        bootstrap_interval(values, groups=np.arange(300) % 150, strata=kind)
