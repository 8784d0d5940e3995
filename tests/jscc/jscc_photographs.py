"""Pictures with the statistics of photographs, drawn: 1/f² spectra, edges, correlated colours."""

import numpy as np


def photograph(height: int, width: int, seed: int) -> np.ndarray:
    """uint8 `[height, width, 3]`."""
    rng = np.random.default_rng(seed)
    fy, fx = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None]
    weight = 1 / np.maximum(np.hypot(fy, fx), 1 / max(height, width)) ** 1.3
    layers = [
        np.fft.irfft2(weight * np.exp(2j * np.pi * rng.random(weight.shape)), s=(height, width)) for _ in range(4)
    ]
    layers = [layer / layer.std() for layer in layers]
    edge = np.where(layers[3] > 0.5, 60.0, 0.0)
    luma = 110 + 35 * layers[0] + edge
    red, blue = 12 * layers[1], 12 * layers[2]
    picture = np.stack([luma + red, luma - 0.4 * red - 0.2 * blue, luma + blue], -1)
    return np.clip(picture, 0, 255).round().astype(np.uint8)
