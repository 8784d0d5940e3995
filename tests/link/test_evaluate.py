import subprocess
import sys

import pytest
import torch
from link_windows import SyntheticBatch, plane_wave_windows

from chanlab.errors import UsageError
from chanlab.link import NO_PREDICTION, PERFECT, CodedLink, collect, evaluate_csi, evaluate_ensemble, group_users
from chanlab.records import FIELDS, select


def continued(history: torch.Tensor, noise_variance: torch.Tensor | None = None) -> torch.Tensor:
    """Each port and subcarrier turns on as it did between the last two snapshots."""
    step = history[..., -1:, :] - history[..., -2:-1, :]
    return torch.cat([history[..., -1:, :] + step, history[..., -1:, :] + 2 * step], dim=3)


@pytest.fixture(scope="module")
def windows() -> SyntheticBatch:
    return plane_wave_windows(24, windows=2, num_subcarriers=16, max_doppler=0.06, csi_snr_db=30.0)


@pytest.fixture(scope="module")
def records(windows):
    link = CodedLink(16, users := 4, num_symbols=7, pilot_symbols=(2,))
    return evaluate_csi(
        {"continued": continued}, [windows], [-3.0, 8.0], users=users, link=link, coded_steps=[2], data="plane waves"
    )


def value(records, **want):
    (found,) = select(records, **want)
    return found["value"]


def test_better_csi_is_worth_more(records):
    for horizon in (1, 2):
        rates = [
            value(records, system=name, metric="spectral_efficiency", link_snr_db=8.0, horizon=horizon)
            for name in (NO_PREDICTION, "continued", PERFECT)
        ]
        assert rates[0] + 0.1 < rates[1] < rates[2]
    goodput = [
        value(records, system=name, metric="goodput", link_snr_db=8.0) for name in (NO_PREDICTION, "continued", PERFECT)
    ]
    assert goodput[0] < goodput[1] <= goodput[2]
    bler = [value(records, system=PERFECT, metric="bler", link_snr_db=snr) for snr in (-3.0, 8.0)]
    assert bler[1] == 0.0 < bler[0]


def test_outdated_csi_loses_with_the_horizon(records):
    rate = [
        value(records, system=NO_PREDICTION, metric="spectral_efficiency", link_snr_db=8.0, horizon=h) for h in (1, 2)
    ]
    assert rate[1] < rate[0]


def test_the_ratio_is_of_the_same_users(records):
    where = {"link_snr_db": 8.0, "horizon": 2}
    rate = {s: value(records, system=s, metric="spectral_efficiency", **where) for s in (PERFECT, NO_PREDICTION)}
    (ratio,) = select(records, system=NO_PREDICTION, metric="spectral_efficiency_ratio", **where)
    assert ratio["value"] == pytest.approx(rate[NO_PREDICTION] / rate[PERFECT], rel=1e-5)
    assert ratio["low"] < ratio["value"] < ratio["high"]
    assert not select(records, system=PERFECT, metric="spectral_efficiency_ratio")


def test_records_say_what_was_measured(records):
    item = select(records, system="continued", metric="bler", link_snr_db=8.0)[0]
    assert set(FIELDS) <= set(item)
    assert item["condition"] == {
        "users": 4,
        "precoder": "rzf",
        "link_snr_db": 8.0,
        "horizon": 2,
        "bits_per_symbol": 4,
        "code_rate": 0.5,
        "receiver": "ls",
        "block_bits": 192,
    }
    assert (item["n"], item["data"], item["seeds"]) == (48, "plane waves", [0])
    rate = select(records, system="continued", metric="spectral_efficiency", link_snr_db=8.0, horizon=1)[0]
    assert rate["low"] < rate["value"] < rate["high"]
    assert 0 < rate["deviation"] < 0.2 * rate["value"]


def test_batches_order_and_units_of_the_channel_do_not_matter(windows):
    flipped = [SyntheticBatch(*(x[i].flip(0) for x in windows)) for i in (slice(30, 48), slice(0, 30))]
    scaled = [b._replace(history=1e-5 * b.history, target=1e-5 * b.target) for b in flipped]
    expected = evaluate_csi({"continued": continued}, [windows], [8.0])
    for item, again in zip(expected, evaluate_csi({"continued": continued}, scaled, [8.0]), strict=True):
        assert again["condition"] == item["condition"]
        assert again["value"] == pytest.approx(item["value"], rel=1e-4)


def test_the_uplink_is_the_downlink_transposed(windows):
    up = windows._replace(history=windows.history.transpose(1, 2), target=windows.target.transpose(1, 2))

    def swapped(history, noise_variance=None):
        return continued(history)

    down, reverse = collect({"x": continued}, [windows]), collect({"x": swapped}, [up], base_station="rx")
    assert torch.equal(down.channel, reverse.channel)
    assert torch.equal(down.csi["x"], reverse.csi["x"])


def test_normalised_channels_have_unit_power(windows):
    blocked = windows._replace(target=windows.target * (torch.arange(48) > 0)[:, None, None, None, None])
    ensemble = collect({}, [blocked]).normalise()
    assert ensemble.channel.shape[0] == 47
    power = ensemble.channel.abs().square().mean((1, 2, 3))
    torch.testing.assert_close(power, torch.ones(47), rtol=1e-5, atol=0)


def test_one_user_gets_the_whole_array_gain(windows):
    (item,) = select(evaluate_csi({}, [windows], [0.0], users=1, precoder="mrt"), system=PERFECT, horizon=1)
    h = collect({}, [windows]).normalise().channel[:, :, 0]
    assert item["value"] == pytest.approx(torch.log2(1 + h.abs().square().sum(1)).mean().item(), rel=1e-5)


def test_users_of_a_set_are_from_different_trajectories():
    sample_id = torch.tensor([7] * 5 + [3] * 5 + [11] * 2 + [12] * 4 + [20] * 3)
    sets = group_users(sample_id, 3, seed=1)
    assert sets.shape[1] == 3
    assert len(set(sets.flatten().tolist())) == sets.numel() >= 12
    assert all(len(set(row)) == 3 for row in sample_id[sets].tolist())
    assert torch.equal(sets, group_users(sample_id, 3, seed=1))
    assert not torch.equal(sets, group_users(sample_id, 3, seed=2))
    with pytest.raises(UsageError, match="as many trajectories"):
        group_users(sample_id, 6, seed=1)


def test_enough_block_errors_end_a_point(windows):
    ensemble = collect({}, [plane_wave_windows(140, num_subcarriers=8, horizons=1)])
    link = CodedLink(8, num_symbols=7, pilot_symbols=(2,))
    made = evaluate_ensemble(ensemble, [-20.0], link=link, target_block_errors=10)
    assert select(made, system=PERFECT, metric="bler")[0]["n"] == 128  # one chunk of 32 sets of 140 / 4
    assert select(made, system=PERFECT, metric="spectral_efficiency")[0]["n"] == 140


def test_wrong_predictions_are_named(windows):
    with pytest.raises(UsageError, match="'short' predicts"):
        evaluate_csi({"short": lambda h, n=None: h[..., -1:, :]}, [windows], [0.0])
    with pytest.raises(UsageError, match="'wild' predicts NaN"):
        evaluate_csi({"wild": lambda h, n=None: continued(h) * torch.nan}, [windows], [0.0])
    with pytest.raises(UsageError, match="32 antennas"):
        evaluate_csi({}, [windows], [0.0], base_station="rx")
    with pytest.raises(UsageError, match="no batch"):
        evaluate_csi({}, [], [0.0])


def test_the_link_needs_no_learner():
    code = "import sys, chanlab.link; print([m for m in sys.modules if m.startswith(('chanlab.csi', 'sionna.rt'))])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.strip() == "[]"
