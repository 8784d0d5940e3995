"""Our views of traced paths against Sionna RT's own `Paths.cfr`, and the physics of tracing."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from chanlab.channels import PlanarArray, cfr, subcarrier_frequencies
from chanlab.channels.paths import SPEED_OF_LIGHT
from chanlab.channels.tracer import Physics, Tracer

pytestmark = pytest.mark.rt

CARRIER = 3.5e9
TX = (-30.0, 0.0, 20.0)
# Nine receivers, as in test_scenes.py: Dr.Jit compiles once for both. Two in the street, the third around a corner.
POSITIONS = np.array([[25.0, 2.0, 1.5], [10.0, -3.0, 1.5], [24.0, 25.0, 1.5]] + [[x, 1.0, 1.5] for x in range(6)])
VELOCITIES = np.array([[10.0, 3.0, 0.0], [-4.0, 3.0, 0.0], [0.0, 7.0, 0.0]] + [[5.0, 0.0, 0.0]] * 6)
PHYSICS = Physics(
    max_depth=3,
    samples_per_src=10_000,
    max_num_paths_per_src=1_000_000,
    los=True,
    specular_reflection=True,
    diffuse_reflection=False,
    refraction=True,
    diffraction=True,
    edge_diffraction=False,
    diffraction_lit_region=True,
)
TX_ORIENTATION, RX_ORIENTATION = (0.3, 0.2, 0.1), (2.0, -0.4, 0.3)
SPACING = 240e3
SUBCARRIERS = 64


@pytest.fixture(scope="module")
def tracer():
    return Tracer("simple_street_canyon", CARRIER, TX, len(POSITIONS))


@pytest.fixture(scope="module")
def paths(tracer):
    return tracer.trace(POSITIONS, VELOCITIES, PHYSICS, seed=1)


@pytest.fixture(scope="module")
def peer():
    """Sionna RT as its own users call it: positions as numbers, arrays and orientations of the devices."""
    from chanlab.channels.llvm import import_sionna_rt

    rt = import_sionna_rt()
    import mitsuba as mi

    scene = rt.load_scene(rt.scene.simple_street_canyon)
    scene.frequency = CARRIER
    scene.add(rt.Transmitter("tx", list(TX), orientation=list(TX_ORIENTATION)))
    for i, (position, velocity) in enumerate(zip(POSITIONS.tolist(), VELOCITIES.tolist(), strict=True)):
        scene.add(rt.Receiver(f"rx{i}", position, orientation=list(RX_ORIENTATION), velocity=velocity))

    def response(tx_array, rx_array, num_times, interval):
        for name, array in (("tx_array", tx_array), ("rx_array", rx_array)):
            setattr(scene, name, rt.PlanarArray(**vars(array)))
        traced = rt.PathSolver(deterministic=True)(scene, synthetic_array=True, seed=1, **vars(PHYSICS))
        frequencies = mi.Float(subcarrier_frequencies(SUBCARRIERS, SPACING).float().numpy())
        return traced.cfr(
            frequencies=frequencies,
            sampling_frequency=1 / interval,
            num_time_steps=num_times,
            normalize_delays=False,
            out_type="numpy",
        )[:, :, 0]

    return response


@pytest.mark.parametrize("times", [1, 4], ids=["still", "doppler"])
@pytest.mark.parametrize(
    ("tx_array", "rx_array"),
    [
        (PlanarArray(1, 1, pattern="iso", polarization="V"), PlanarArray(2, 1, pattern="dipole", polarization="V")),
        (
            PlanarArray(4, 4, pattern="tr38901", polarization="cross"),
            PlanarArray(1, 2, pattern="hw_dipole", polarization="VH"),
        ),
    ],
    ids=["single", "dual"],
)
def test_cfr_equals_that_of_sionna(paths, peer, tx_array, rx_array, times):
    want = torch.from_numpy(peer(tx_array, rx_array, times, 1e-3))
    have = cfr(
        paths.to(dtype=torch.float64),
        tx_array,
        rx_array,
        subcarrier_frequencies(SUBCARRIERS, SPACING),
        times=torch.arange(times) * 1e-3,
        tx_orientation=torch.tensor(TX_ORIENTATION),
        rx_orientation=torch.tensor(RX_ORIENTATION),
    )
    assert have.shape == want.shape
    for user in range(len(POSITIONS)):
        error = torch.linalg.vector_norm(have[user] - want[user]) / torch.linalg.vector_norm(want[user])
        assert error < 1e-4, f"user {user}: {error:.1e}"


def test_line_of_sight_is_friis(tracer):
    paths = tracer.trace(POSITIONS, VELOCITIES, Physics(**vars(PHYSICS) | {"max_depth": 0}), seed=1)
    assert paths.mask.sum(-1).tolist() == [1, 1, 0] + [1] * 6  # the third user stands in the cross street
    distance = torch.from_numpy(np.linalg.norm(POSITIONS[:2] - TX, axis=1))
    torch.testing.assert_close(paths.delay[:2, 0].double(), distance / SPEED_OF_LIGHT, rtol=1e-6, atol=0.0)
    wavelength = SPEED_OF_LIGHT / CARRIER
    transfer = paths.transfer[:2, ..., 0].to(torch.complex128)
    amplitude = (wavelength / (4 * math.pi * distance)).to(torch.complex128)
    phase = torch.exp(-2j * math.pi * (distance / wavelength))
    # Seen from both ends of a straight line, θ̂ is the same vector and φ̂ changes sign.
    want = (amplitude * phase)[:, None, None] * torch.tensor([[1, 0], [0, -1]], dtype=torch.complex128)
    torch.testing.assert_close(transfer, want, rtol=0.0, atol=float(amplitude.abs().max()) * 2e-3)
    direction = torch.from_numpy(POSITIONS[:2] - TX) / distance[:, None]
    torch.testing.assert_close(paths.departure[:2, :, 0].double(), direction, atol=1e-6, rtol=0.0)
    torch.testing.assert_close(paths.arrival[:2, :, 0].double(), -direction, atol=1e-6, rtol=0.0)
    doppler = (torch.from_numpy(VELOCITIES[:2]) * -direction).sum(-1) / wavelength
    torch.testing.assert_close(paths.doppler[:2, 0].double(), doppler, rtol=1e-5, atol=1e-3)
    assert paths.vertices[0, 0, :, 0].tolist() == POSITIONS[0].tolist()
    assert paths.vertices[0, 1, :, 0].tolist() == list(TX)


def test_vertices_and_delays_agree_with_the_directions(paths):
    mask = paths.mask
    toward_first = paths.vertices[:, 0] - torch.tensor(TX)[:, None]
    toward_last = paths.vertices[:, 1] - torch.from_numpy(POSITIONS).float()[..., None]
    for way, direction in ((toward_first, paths.departure), (toward_last, paths.arrival)):
        cosine = (way * direction).sum(-2) / torch.linalg.vector_norm(way, dim=-2)
        assert cosine[mask].min() > 1 - 1e-5
    single = mask & ((paths.interactions != 0).sum(-2) == 1)
    assert single.any()
    length = torch.linalg.vector_norm(toward_first, dim=-2) + torch.linalg.vector_norm(toward_last, dim=-2)
    torch.testing.assert_close(paths.delay[single] * SPEED_OF_LIGHT, length[single], rtol=1e-5, atol=0.0)


def test_paths_come_in_canonical_order_and_masked_entries_hold_zeros(paths):
    mask = paths.mask
    assert (mask.int().diff(dim=-1) <= 0).all()
    assert (paths.delay.diff(dim=-1)[mask[:, 1:]] >= 0).all()
    assert (paths.transfer.abs().sum((1, 2))[~mask] == 0).all()
    assert set(paths.interactions.unique().tolist()) <= {0, 1, 4, 8}
    assert {1, 4, 8} <= set(paths.interactions.unique().tolist())
    assert (paths.interactions == 0).all(1)[mask].any()


def test_doppler_agrees_with_tracing_at_displaced_places(tracer, paths):
    array = PlanarArray(1, 1)
    frequencies = subcarrier_frequencies(SUBCARRIERS, SPACING)
    step = 2e-4  # s: at most 2 mm
    moved = tracer.trace(POSITIONS + VELOCITIES * step, VELOCITIES, PHYSICS, seed=1)
    truth = cfr(moved, array, array, frequencies)
    drifted = cfr(paths, array, array, frequencies, times=torch.tensor([step]), delay_drift=True)
    stale = cfr(paths, array, array, frequencies)

    def nmse(estimate):
        return ((estimate - truth).abs().square().sum() / truth.abs().square().sum()).item()

    assert nmse(drifted) < 1e-4
    assert nmse(stale) > 50 * nmse(drifted)


def test_channel_is_reciprocal(paths):
    """Ends exchanged: each path comes back with its transfer matrix transposed and its directions exchanged."""
    exchanged = Tracer("simple_street_canyon", CARRIER, tuple(POSITIONS[0]), len(POSITIONS))
    back = exchanged.trace(np.array([TX] * len(POSITIONS)), VELOCITIES * 0, PHYSICS, seed=1)[0]
    array = PlanarArray(1, 1, polarization="VH")
    frequencies = subcarrier_frequencies(SUBCARRIERS, SPACING)
    # Rays from the other end find other weak diffracted chains, but the same reflected ones.
    forward = cfr(_reflected(paths[0]), array, array, frequencies)
    reverse = cfr(_reflected(back), array, array, frequencies)
    error = (forward - reverse.transpose(0, 1)).abs().square().sum() / forward.abs().square().sum()
    assert error < 1e-4


def _reflected(paths):
    """The paths without diffraction and refraction."""
    mask = paths.mask & ((paths.interactions == 0) | (paths.interactions == 1)).all(-2)
    return replace(paths, mask=mask, transfer=paths.transfer * mask)


def test_receivers_of_one_solve_lose_no_paths_to_each_other(tracer, paths):
    """Sionna's own table of candidates is too small for many receivers: some would lose paths."""
    crowd = 150
    others = np.stack([np.linspace(-40, 60, crowd), np.linspace(-6, 6, crowd), np.full(crowd, 1.5)], -1)
    others[-len(POSITIONS) :] = POSITIONS
    together = Tracer("simple_street_canyon", CARRIER, TX, crowd).trace(others, others * 0, PHYSICS, seed=1)
    together = together[-len(POSITIONS) :]
    assert torch.equal(together.mask.sum(-1), paths.mask.sum(-1))
    array = PlanarArray(1, 1)
    frequencies = subcarrier_frequencies(SUBCARRIERS, SPACING)
    alone = cfr(paths, array, array, frequencies)
    error = (cfr(together, array, array, frequencies) - alone).abs().square().sum((1, 2, 3, 4))
    assert (error < 1e-6 * alone.abs().square().sum((1, 2, 3, 4))).all()
