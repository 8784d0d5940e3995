"""Views follow the device of the paths: the same values on a GPU, and no step that falls back to the CPU."""

import pytest
import torch
from path_samples import random_paths

from chanlab.channels import (
    PlanarArray,
    cfr,
    cfr_along,
    cir_taps,
    delay_angle_spectrum,
    k_factor,
    rms_delay_spread,
    rssi,
    rssi_from_cfr,
    subcarrier_frequencies,
    two_ray_paths,
)

TX = PlanarArray(2, 2, pattern="tr38901", polarization="cross")
RX = PlanarArray(1, 2, pattern="hw_dipole", polarization="VH")
F = subcarrier_frequencies(16, 1e6)
TURN = torch.tensor([0.3, 0.2, 0.1])


def _views(device):
    """Every view of the same paths on a device."""
    paths = random_paths(3, 4, dtype=torch.float32).to(device)
    times = torch.arange(5, dtype=torch.float64, device=device) * 1e-3
    anchors = (torch.arange(4, dtype=torch.float64, device=device) * 2e-3).expand(3, -1)
    held = {"tx_orientation": TURN.to(device), "rx_orientation": TURN.to(device)}
    f = F.to(device)
    h = cfr(paths, TX, RX, f, times, delay_drift=True, **held)
    return {
        "cfr": h,
        "cir_taps": cir_taps(paths, TX, RX, 20e6, 0, 8, times, **held),
        "spectrum": delay_angle_spectrum(h, RX, f, paths.carrier, delays=F / 16e12, orientation=TURN),
        "rssi": rssi(paths, TX, RX, **held),
        "rssi_from_cfr": rssi_from_cfr(h),
        "rms_delay_spread": rms_delay_spread(paths),
        "k_factor": k_factor(paths),
    } | (
        {}
        if torch.device(device).type == "meta"  # has no values to look anchors or interactions up by
        else {
            # Small things may come from the CPU: they follow the paths.
            "cfr_along": cfr_along(paths, anchors.cpu(), times.cpu(), TX, RX, F, TURN, TURN),
            "near_field": cfr(paths, TX, RX, f, near_field=True, **held),
            "two_ray": two_ray_paths(
                torch.tensor([0.0, 0.0, 9.0]), torch.ones(2, 3, device=device), torch.ones(3), 1e9
            ).transfer,
        }
    )


def test_no_tensor_stays_behind_on_the_cpu():
    for view in _views("meta").values():
        assert view.device.type == "meta"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_same_values():
    there, here = _views("cuda"), _views("cpu")
    for name, view in here.items():
        assert there[name].is_cuda
        scale = view[torch.isfinite(view.abs())].abs().max()
        assert torch.allclose(there[name].cpu() / scale, view / scale, atol=1e-5), name
