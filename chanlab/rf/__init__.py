"""RF reconstruction with Gaussian splatting: a radiance field of 3-D Gaussians, rendered where a receiver stands."""

from chanlab.rf.panorama import Panorama
from chanlab.rf.rasterize import Rendering, Visibility, rasterize_sphere

__all__ = ["Panorama", "Rendering", "Visibility", "rasterize_sphere"]
