"""What a mistake in the rasterizer is, and the files that have them."""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """A mistake: in which file of `chanlab/rf`, what is replaced by what."""

    name: str
    file: str
    right: str
    wrong: str
    published: bool = False
    hardware: bool = False  # to be seen on a GPU alone


HEADER, CPU, REFERENCE, OPERATOR = "kernels/sphere.h", "kernels/sphere_cpu.cpp", "reference.py", "sphere.py"
BOUNDS, LISTS, WALK = "kernels/sphere_bounds.h", "kernels/sphere_lists.cuh", "kernels/sphere_walk.cuh"
TILES, LAUNCH, SORT = "kernels/sphere_tiles.cuh", "kernels/sphere.cu", "kernels/sphere_sort.cu"
PLAIN, PROBLEM, BINDING, ROOM = "plain.py", "problem.py", "sphere_cuda.py", "room.py"
