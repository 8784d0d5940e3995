import math
import time
from dataclasses import replace

import pytest
import torch
from path_samples import random_paths

from chanlab.channels import (
    PlanarArray,
    cfr,
    cfr_along,
    cir_taps_along,
    path_sum,
    subcarrier_frequencies,
    two_ray_paths,
)
from chanlab.errors import UsageError

TX = PlanarArray(2, 2, pattern="tr38901", polarization="cross")
RX = PlanarArray(1, 2, pattern="dipole", polarization="VH")
ISO = PlanarArray()
F = subcarrier_frequencies(8, 1e6)
ANCHORS = torch.tensor([[0.0, 0.01, 0.03, 0.04], [0.0, 0.02, 0.04, 0.06]], dtype=torch.float64)


def _held():
    generator = torch.Generator().manual_seed(1)
    return {
        "rx_orientations": torch.rand(2, 4, 3, generator=generator, dtype=torch.float64),
        "tx_orientation": torch.rand(2, 3, generator=generator, dtype=torch.float64),
    }


def _at_anchors(paths, held):
    """CFR at each anchor, `[user, rx_ant, tx_ant, anchor, subcarrier]`."""
    h = cfr(paths, TX, RX, F, tx_orientation=held["tx_orientation"][:, None], rx_orientation=held["rx_orientations"])
    return h[..., 0, :].movedim(1, -2)


def test_exact_at_anchors():
    paths, held = random_paths(2, 4), _held()
    h = cfr_along(paths, ANCHORS, ANCHORS, TX, RX, F, **held)
    assert torch.allclose(h, _at_anchors(paths, held))


def test_continuous_across_anchors():
    paths, held = random_paths(2, 4), _held()
    step = 1e-8
    times = torch.cat([ANCHORS[:, 1:3] - step, ANCHORS[:, 1:3] + step], 1)
    before, after = cfr_along(paths, ANCHORS, times, TX, RX, F, **held).split(2, dim=-2)
    assert float((before - after).abs().max()) < 1e-3
    assert torch.allclose((before + after) / 2, _at_anchors(paths, held)[..., 1:3, :], atol=1e-3)


def test_between_anchors_the_extrapolations_cross_fade():
    paths, held = random_paths(2, 4), _held()
    at = torch.tensor([0.5, 0.5], dtype=torch.float64)
    middle = ANCHORS[:, 1] * (1 - at) + ANCHORS[:, 2] * at
    h = cfr_along(paths, ANCHORS, middle[:, None], TX, RX, F, **held)
    expected = 0
    for anchor in (1, 2):
        offset = (middle - ANCHORS[:, anchor])[:, None]
        expected = expected + 0.5 * cfr(
            paths[:, anchor],
            TX,
            RX,
            F,
            offset,
            delay_drift=True,
            tx_orientation=held["tx_orientation"],
            rx_orientation=held["rx_orientations"][:, anchor],
        )
    assert torch.allclose(h, expected)


def test_a_new_path_fades_in_and_an_old_one_out():
    one = random_paths(1, 2, num_paths=1)
    gone = one._map(lambda _, x: torch.zeros_like(x))
    born = replace(one, **{k: torch.cat([getattr(gone, k)[:, :1], getattr(one, k)[:, 1:]], 1) for k in _tensors()})
    ends = torch.tensor([[0.0, 0.1]], dtype=torch.float64)
    times = torch.linspace(0, 0.1, 11, dtype=torch.float64)
    power = cfr_along(born, ends, times, ISO, ISO, F)[0, 0, 0, :, 0].abs()
    assert torch.allclose(power / power[-1], torch.linspace(0, 1, 11, dtype=torch.float64))
    dying = replace(one, **{k: getattr(born, k).flip(1) for k in _tensors()})
    power = cfr_along(dying, ends, times, ISO, ISO, F)[0, 0, 0, :, 0].abs()
    assert torch.allclose(power / power[0], torch.linspace(1, 0, 11, dtype=torch.float64))


def _tensors():
    from chanlab.channels import PATH_TENSORS

    return PATH_TENSORS


def test_two_rays_along_anchors_are_two_rays_everywhere():
    # A car at 15 m/s, traced every 10 cm, against the closed form at every 2.5 ms.
    mast, velocity = torch.tensor([0.0, 0.0, 10.0]), torch.tensor([9.0, 12.0, 0.0], dtype=torch.float64)
    start = torch.tensor([25.0, -10.0, 1.5], dtype=torch.float64)
    array = PlanarArray(4, 4, pattern="tr38901", polarization="cross")

    def traced(times):
        return two_ray_paths(mast, start + times[..., None] * velocity, velocity, 3.5e9)

    anchors = (torch.arange(11, dtype=torch.float64) * 0.1 / 15)[None]
    times = torch.arange(20, dtype=torch.float64)[None] * 2.5e-3 + 1e-3
    f = subcarrier_frequencies(48, 180e3)
    h = cfr_along(traced(anchors), anchors, times, array, ISO, f)
    exact = cfr(traced(times), array, ISO, f)[..., 0, :].movedim(1, -2)
    error = (h - exact).abs().square().sum() / exact.abs().square().sum()
    assert 10 * math.log10(error) < -50


def test_outside_the_anchors_the_nearest_is_extrapolated():
    paths, held = random_paths(2, 4), _held()
    late = ANCHORS[:, -1:] + 2e-3
    h = cfr_along(paths, ANCHORS, late, TX, RX, F, **held)
    expected = cfr(
        paths[:, -1],
        TX,
        RX,
        F,
        torch.tensor([2e-3], dtype=torch.float64),
        delay_drift=True,
        tx_orientation=held["tx_orientation"],
        rx_orientation=held["rx_orientations"][:, -1],
    )
    assert torch.allclose(h, expected)


def test_one_anchor_is_a_static_link_with_doppler():
    paths = random_paths(3, 1)
    times = torch.arange(4, dtype=torch.float64) * 1e-3
    h = cfr_along(paths, torch.zeros(3, 1), times, TX, RX, F)
    assert torch.allclose(h, cfr(paths[:, 0], TX, RX, F, times, delay_drift=True))


@pytest.mark.parametrize("chunk", [1, 2000])
def test_neither_chunks_nor_batch_companions_change_results(chunk, monkeypatch):
    paths, held = random_paths(2, 4), _held()
    times = torch.rand(2, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 0.04
    whole = cfr_along(paths, ANCHORS, times, TX, RX, F, **held)
    alone = cfr_along(paths[1], ANCHORS[1], times[1], TX, RX, F, held["tx_orientation"][1], held["rx_orientations"][1])
    assert torch.allclose(whole[1], alone, rtol=1e-12, atol=1e-12)
    monkeypatch.setattr(path_sum, "CHUNK_ELEMENTS", chunk)
    assert torch.allclose(cfr_along(paths, ANCHORS, times, TX, RX, F, **held), whole, rtol=1e-12, atol=1e-12)


def test_taps_along_hold_the_same_power():
    paths = random_paths(2, 4)
    times = torch.tensor([0.005, 0.02], dtype=torch.float64)
    taps = cir_taps_along(paths, ANCHORS, times, TX, RX, 20e6, -2000, 2000)
    f = ((torch.arange(2048, dtype=torch.float64) + 0.5) / 2048 - 0.5) * 20e6
    h = cfr_along(paths, ANCHORS, times, TX, RX, f)
    assert taps.shape == (2, RX.num_ports, TX.num_ports, 2, 4001)
    assert torch.allclose(taps.abs().square().sum(-1), h.abs().square().mean(-1), rtol=2e-3)


def test_gradients():
    paths = random_paths(2, 3, num_paths=2)
    anchors, times = ANCHORS[:, :3], torch.tensor([0.004, 0.015], dtype=torch.float64)
    tx, f = PlanarArray(1, 2), subcarrier_frequencies(2, 1e6)

    def response(transfer, scaled_delay, scaled):
        moved = replace(paths, transfer=transfer, delay=scaled_delay * 1e-6)
        return cfr_along(moved, anchors, times, tx, ISO, f, tx_elements=scaled * paths.wavelength)

    inputs = [paths.transfer.clone(), paths.delay * 1e6, tx.positions(1.0)]
    assert torch.autograd.gradcheck(response, [x.requires_grad_() for x in inputs])


def test_wrong_shapes_name_the_right_ones():
    paths = random_paths(2, 4)
    with pytest.raises(UsageError, match="anchor_times"):
        cfr_along(paths, ANCHORS[:, :3], ANCHORS, TX, RX, F)
    with pytest.raises(UsageError, match="anchor_times"):
        cfr_along(paths[0, 0], torch.zeros(()), torch.zeros(1), TX, RX, F)
    with pytest.raises(UsageError, match="times"):
        cfr_along(paths, ANCHORS, torch.zeros(3, 5), TX, RX, F)
    with pytest.raises(UsageError, match="unknown argument rx_orientation"):
        cfr_along(paths, ANCHORS, ANCHORS, TX, RX, F, rx_orientation=torch.zeros(3))  # it is rx_orientations here
    with pytest.raises(UsageError, match="rx_orientation"):
        cfr_along(paths, ANCHORS, ANCHORS, TX, RX, F, rx_orientations=torch.zeros(2, 3, 3))


def test_a_training_batch_takes_a_fraction_of_a_second():
    # 64 windows of 20 snapshots, 32 x 1 ports, 48 subcarriers, 40 paths: below 0.1 s on two idle cores.
    paths = random_paths(64, 9, num_paths=40, dtype=torch.float32)
    anchors = torch.arange(9, dtype=torch.float64).expand(64, -1) * 7e-3
    times = torch.arange(20, dtype=torch.float64) * 2.5e-3
    array = PlanarArray(4, 4, pattern="tr38901", polarization="cross")
    f = subcarrier_frequencies(48, 180e3)
    spent = []
    for _ in range(4):
        start = time.process_time()
        cfr_along(paths, anchors, times, array, ISO, f)
        spent.append(time.process_time() - start)
    assert min(spent) < 1.0
