"""Plants known mistakes in the rasterizer, one at a time, and lists those that the tests do not see.

    python tests/rf/mutations.py            # all of them; exit code 1 if one survives
    python tests/rf/mutations.py azimuth    # those whose name, or file, holds a word

Each mutant is a copy of the package with one line of the production code changed (the header that CPU and CUDA share,
the CPU back end, the CUDA sources, the reference, the operator); the tests that `TESTS` names for the file run against
it until one fails. The first seven are mistakes published in kernels of this field. Those at the end show on hardware
alone and are skipped where there is no GPU.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

os.environ["OMP_NUM_THREADS"] = "1"
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "torch.testing", "pytest"])

ROOT = Path(__file__).resolve().parents[2]


class Mutation(NamedTuple):
    """A mistake: in which file of `chanlab/rf`, what is replaced by what."""

    name: str
    file: str
    right: str
    wrong: str
    published: bool = False
    hardware: bool = False  # to be seen on a GPU alone


HEADER, CPU, REFERENCE, OPERATOR = "kernels/sphere.h", "kernels/sphere_cpu.cpp", "reference.py", "sphere.py"
LISTS, TILES, LAUNCH, PLAIN = "kernels/sphere_lists.cuh", "kernels/sphere_tiles.cuh", "kernels/sphere.cu", "plain.py"

QUICK, EMULATED, ROOM, CUDA = (f"tests/rf/test_rasterize{name}.py" for name in ("", "_emulated", "_room", "_cuda"))
TESTS = {
    HEADER: (QUICK,),
    CPU: (QUICK,),
    REFERENCE: (QUICK,),
    LISTS: (EMULATED,),
    TILES: (EMULATED,),
    LAUNCH: (EMULATED,),
    PLAIN: (QUICK,),
    OPERATOR: (ROOM, EMULATED, QUICK),
}
"""Which tests must see mistakes in a file: CUDA sources run on the CPU, emulated."""

MUTATIONS = (
    # Published mistakes.
    Mutation(
        "azimuth gradient halved",
        HEADER,
        "for (int i = 0; i < 3; ++i) by_v[i] = (by_u[i] - u[i] * radial) * inverse + by_distance * u[i];",
        "for (int i = 0; i < 3; ++i) by_v[i] = (by_u[i] - u[i] * radial) * inverse * (i < 2 ? T(0.5) : T(1)) "
        "+ by_distance * u[i];",
        True,
    ),
    Mutation(
        "gradient by the distance with the wrong sign",
        HEADER,
        "by_distance = -2 * inverse2 * inverse * spread",
        "by_distance = 2 * inverse2 * inverse * spread",
        True,
    ),
    Mutation(
        "second channel overwritten by the first",
        CPU,
        "const T signal = signals[i * channels + c];\n                T* to_colour",
        "const T signal = signals[i * channels];\n                T* to_colour",
        True,
    ),
    Mutation(
        "second channel's gradient taken from the first",
        CPU,
        "by_signal[(first + k) * channels + c] = sum;",
        "by_signal[(first + k) * channels + c] = c ? by_signal[(first + k) * channels] : sum;",
        True,
    ),
    Mutation(
        "no wrap at azimuth 0 / 2 pi",
        HEADER,
        "(column < across ? column : column - across)",
        "(column < across ? column : across - 1)",
        True,
    ),
    Mutation("two degrees per elevation row", HEADER, "* problem.row_step);", "* 2 * problem.row_step);", True),
    Mutation(
        "footprint independent of the distance",
        HEADER,
        "const T p11 = dot(s1, s1), p12 = dot(s1, s2), p22 = dot(s2, s2);",
        "for (int k = 0; k < 3; ++k) s1[k] *= p.distance, s2[k] *= p.distance;\n"
        "    const T p11 = dot(s1, s1), p12 = dot(s1, s2), p22 = dot(s2, s2);",
        True,
    ),
    # Others: geometry.
    Mutation("pixel corners for centres", HEADER, "(double(column) + 0.5)", "(double(column) + 0.0)"),
    Mutation(
        "start of the azimuth forgotten in the bounds",
        HEADER,
        "- problem.start) / problem.column_step",
        ") / problem.column_step",
    ),
    Mutation(
        "chord for angle",
        HEADER,
        "    arc_polynomial(folded > 1 ? T(1) : folded, g, slope);",
        "    g = 1;\n    slope = 0;",
    ),
    Mutation("no derivative of the log map", HEADER, "by.u = by_q * o.slope", "by.u = 0 * o.slope"),
    Mutation(
        "pole not noticed",
        HEADER,
        "if (ratio < 0.999) {  // else the cap holds a pole, or nearly\n        const double half = std::asin(ratio)",
        "if (true) {\n        const double half = std::asin(ratio < 1 ? ratio : 1.0)",
    ),
    Mutation(
        "bounds too narrow",
        HEADER,
        "p.radius = std::sqrt(cut * largest)",
        "p.radius = T(0.9) * std::sqrt(cut * largest)",
    ),
    Mutation("bounds from the smaller axis", HEADER, "(c11 + c22) / 2 + std::sqrt", "(c11 + c22) / 2 - std::sqrt"),
    Mutation(
        "last tile row forgotten",
        HEADER,
        "t.rows = (b.row + b.rows - 1) / TILE_HEIGHT - t.row + 1;",
        "t.rows = (b.row + b.rows - 1) / TILE_HEIGHT - t.row + (b.rows < 2);",
    ),
    Mutation(
        "rotation transposed",
        HEADER,
        "axes[i] * p.offset[0] + axes[3 + i] * p.offset[1] + axes[6 + i] *",
        "axes[3 * i] * p.offset[0] + axes[3 * i + 1] * p.offset[1] + axes[3 * i + 2] *",
    ),
    Mutation(
        "quaternion not normalised",
        HEADER,
        "const T inverse = 1 / std::sqrt(q[0]",
        "const T inverse = 1 + 0 / std::sqrt(q[0]",
    ),
    Mutation("no blur", HEADER, "const T c11 = p11 + blur, c22", "const T c11 = p11, c22"),
    Mutation("blur missing in the determinant", HEADER, "+ blur * (p11 + p22) + blur * blur;", "+ blur * blur;"),
    Mutation("near Gaussians drawn", HEADER, "p.visible = p.distance > nearest &&", "p.visible = p.distance >= 0 &&"),
    Mutation(
        "antipode drawn",
        HEADER,
        "o.alpha = c < T(REACH == NEAR ? NEAR_COSINE : REACH == HALF ? 0.0 : COSINE_CUT) ? T(0) : alpha;",
        "o.alpha = alpha;",
    ),
    # Gradients.
    Mutation("basis not carried along", HEADER, "sum.u[i] - p.a[i] * au - p.b[i] * bu", "sum.u[i]"),
    Mutation("covariance not carried along", HEADER, "by_u[i] -= 2 * inverse2 * turned * um;", ""),
    Mutation(
        "radial part of the direction's gradient kept",
        HEADER,
        "(by_u[i] - u[i] * radial) * inverse",
        "by_u[i] * inverse",
    ),
    Mutation(
        "quaternion's gradient along itself kept", HEADER, "(by_unit[1] - along * x) * inverse", "by_unit[1] * inverse"
    ),
    Mutation(
        "off-diagonal of the covariance's gradient doubled",
        HEADER,
        "(dot(sum.a, p.b) + dot(sum.b, p.a)) / 4",
        "(dot(sum.a, p.b) + dot(sum.b, p.a)) / 2",
    ),
    Mutation(
        "alpha's gradient above the clamp", HEADER, "f.opacity * o.shape > T(ALPHA_MAX) ? T(0) : by_alpha", "by_alpha"
    ),
    Mutation(
        "transmittance's gradient forgotten", CPU, "behind[p] = by_transmittance[pixel] * through[p];", "behind[p] = 0;"
    ),
    Mutation("receiver's gradient with the means' sign", CPU, "position[d] -= double", "position[d] += double"),
    Mutation(
        "only the last receiver's gradient", CPU, "by_means[3 * i + d] += g.mean[d]", "by_means[3 * i + d] = g.mean[d]"
    ),
    Mutation(
        "rotation's gradient without the covariance",
        HEADER,
        "p.offset[j] * by_v[i] + dot(p.world + 3 * j, by_local + 3 * i)",
        "p.offset[j] * by_v[i]",
    ),
    # Compositing.
    Mutation("farthest first", CPU, "return distances[x] < distances[y];", "return distances[x] > distances[y];"),
    Mutation(
        "ties by the later index",
        CPU,
        "return distances[x] < distances[y];",
        "return distances[x] < distances[y] || (distances[x] == distances[y] && x > y);",
    ),
    Mutation(
        "weights without transmittance", HEADER, "open > 0 ? alpha * transmittance : T(0)", "open > 0 ? alpha : T(0)"
    ),
    Mutation(
        "cut crossed before stopping",
        HEADER,
        "open = next < T(TRANSMITTANCE_CUT) ? T(0) : open;\n    const T weight",
        "const T weight",
    ),
    Mutation("no alpha cut", HEADER, "ALPHA_CUT = 1.0 / 255.0;", "ALPHA_CUT = 1.0 / 2550.0;"),
    Mutation(
        "gradient beyond the end of a pixel",
        CPU,
        "const T shown = k < ends[p] ? T(1) : T(0);",
        "const T shown = 1;",
    ),
    Mutation("peak is a sum", CPU, "most = std::max(most, statistics.peak", "most = (most + statistics.peak"),
    Mutation("near polynomial for all", HEADER, "cosine > T(NEAR_COSINE) ? NEAR", "cosine > T(0.3) ? NEAR"),
    Mutation("half the sphere for all", HEADER, "cosine > 0 ? HALF : WHOLE", "cosine > -2 ? HALF : WHOLE"),
    Mutation("near polynomial's slope by 1 - c", HEADER, "    slope = -slope;\n", ""),
    # Lists on CUDA.
    Mutation(
        "item numbered by its Gaussian",
        LISTS,
        "item = receiver * problem.gaussians + gaussian;",
        "item = gaussian * problem.receivers + receiver;",
    ),
    Mutation("chunks counted where counts are", LISTS, "extras = counts + tiles;", "extras = counts;"),
    Mutation(
        "pairs summed over half a warp",
        LISTS,
        "item and those before\n#pragma unroll\n    for (int m = 1; m < 32;",
        "item and those before\n#pragma unroll\n    for (int m = 1; m < 16;",
    ),
    Mutation("owner of a pair off by one", LISTS, "if (end <= pair) owner += step;", "if (end < pair) owner += step;"),
    Mutation("pairs beyond the last", LISTS, "        if (pair >= total) continue;\n", ""),
    Mutation(
        "stale counts of the block before", LISTS, "t += ITEM_THREADS) counts[t] = 0;", "t += ITEM_THREADS) (void)t;"
    ),
    Mutation(
        "no wait for zeroed counts",
        LISTS,
        "    __syncthreads();\n    for_each_pair(problem, range, [&](int, int32_t tile) { atomicAdd(counts",
        "    for_each_pair(problem, range, [&](int, int32_t tile) { atomicAdd(counts",
    ),
    Mutation(
        "no wait for counts",
        LISTS,
        "atomicAdd(counts + tile, 1); });\n    __syncthreads();",
        "atomicAdd(counts + tile, 1); });",
    ),
    Mutation(
        "counts of all receivers together",
        LISTS,
        "told = scratch.counts + x.receiver * per_receiver;",
        "told = scratch.counts;",
    ),
    Mutation(
        "`before` of another block",
        LISTS,
        "if (counts[t]) scratch.before[int64_t(blockIdx.x) * per_receiver + t] =",
        "if (counts[t]) scratch.before[t] =",
    ),
    Mutation(
        "`before` forgotten",
        LISTS,
        "state.starts[first_tile + t] + scratch.before[int64_t(blockIdx.x) * per_receiver + t];",
        "state.starts[first_tile + t];",
    ),
    Mutation(
        "many tiles are not counted",
        LISTS,
        "        for_each_pair(problem, range, [&](int, int32_t tile) { atomicAdd(told + tile, 1); });\n",
        "",
    ),
    Mutation(
        "many tiles: the first receiver's places",
        LISTS,
        "next = few ? places : scratch.counts + first_tile;",
        "next = few ? places : scratch.counts;",
    ),
    Mutation(
        "many tiles: counts for places",
        LISTS,
        "state.starts[t] = scratch.counts[t] = int32_t",
        "state.starts[t] = int32_t",
    ),
    Mutation(
        "radius of what is not visible",
        LISTS,
        "radii[x.item] = p.visible ? p.radius : 0.0f;",
        "radii[x.item] = p.radius;",
    ),
    Mutation("farthest first on CUDA", LISTS, "= __float_as_uint(p.distance);", "= ~__float_as_uint(p.distance);"),
    Mutation("inclusive sums", LISTS, "    return upto - mine;", "    return upto;"),
    Mutation(
        "a warp's sum with its own",
        LISTS,
        "        if (w == warp) upto += all;\n        all += sums[w];",
        "        all += sums[w];\n        if (w == warp) upto += all;",
    ),
    Mutation(
        "sums of the first scan overwritten",
        LISTS,
        "    __syncthreads();\n    if (lane == 31) sums[warp] = upto;",
        "    if (lane == 31) sums[warp] = upto;",
    ),
    Mutation("no wait for sums", LISTS, "sums[warp] = upto;\n    __syncthreads();", "sums[warp] = upto;"),
    Mutation(
        "last tiles not scanned",
        LISTS,
        "each = (tiles + SCAN_THREADS - 1) / SCAN_THREADS;",
        "each = tiles < SCAN_THREADS ? 1 : tiles / SCAN_THREADS;",
    ),
    Mutation(
        "tiles of a thread share the numbers of their chunks",
        LISTS,
        "int32_t(extras);\n        pairs += count;\n        extras += count > CHUNK ? (count - 1) / CHUNK : 0;",
        "int32_t(extras);\n        pairs += count;",
    ),
    Mutation(
        "last tile without an end",
        LISTS,
        "    state.starts[tiles] = int32_t(all_pairs < capacity ? all_pairs : capacity);\n",
        "",
    ),
    Mutation(
        "overflow at the last place",
        LISTS,
        "state.status[1] = all_pairs > capacity;",
        "state.status[1] = all_pairs >= capacity;",
    ),
    Mutation(
        "overflow one pair late",
        LISTS,
        "state.status[1] = all_pairs > capacity;",
        "state.status[1] = all_pairs > capacity + 1;",
    ),
    Mutation(
        "count told cut to the room", LISTS, "if (told) *told = all_pairs;", "if (told) *told = state.starts[tiles];"
    ),
    Mutation("all receivers' pairs to the first", LISTS, "first_tile = x.receiver * per_receiver,", "first_tile = 0,"),
    Mutation(
        "pairs of the warp's first item",
        LISTS,
        "const int64_t item = first_item + lane;",
        "const int64_t item = first_item;",
    ),
    Mutation(
        "no wait for places",
        LISTS,
        "        __syncthreads();\n    }\n    const ushort4 range",
        "    }\n    const ushort4 range",
    ),
    Mutation(
        "items beyond the last have pairs",
        LISTS,
        "range = x.inside ? scratch.ranges[x.item] : make_ushort4(0, 0, 0, 0);",
        "range = scratch.ranges[x.item];",
    ),
    Mutation(
        "chunk of the tile before", LISTS, "if (scratch.extras[middle] <= extra)", "if (scratch.extras[middle] < extra)"
    ),
    Mutation(
        "second chunk for all later ones", LISTS, "from = (extra - scratch.extras[tile] + 1) * CHUNK;", "from = CHUNK;"
    ),
    Mutation(
        "first chunk twice",
        LISTS,
        "from = (extra - scratch.extras[tile] + 1) * CHUNK;",
        "from = (extra - scratch.extras[tile]) * CHUNK;",
    ),
    Mutation("no wait for loaded keys", LISTS, "keys[t] = pairs[t];\n    __syncthreads();", "keys[t] = pairs[t];"),
    Mutation(
        "sort up to half of an odd count",
        LISTS,
        "while (size < count) size *= 2;",
        "while (2 * size <= count) size *= 2;",
    ),
    Mutation(
        "merge without turning the second half",
        LISTS,
        "high = 2 * j == k ? base + k - 1 - offset : low + j;",
        "high = low + j;",
    ),
    Mutation("keys beyond the count", LISTS, "                if (high >= count) continue;\n", ""),
    Mutation(
        "warps don't wait at stride 64",
        LISTS,
        "if (j > 32 || (j == 1 && k >= 64))",
        "if (j > 64 || (j == 1 && k >= 64))",
    ),
    Mutation(
        "warps don't wait before stride 64",
        LISTS,
        "if (j > 32 || (j == 1 && k >= 64))",
        "if (j > 32 || (j == 1 && k > 64))",
    ),
    Mutation("warps don't wait between sizes", LISTS, "if (j > 32 || (j == 1 && k >= 64))", "if (j > 32)"),
    Mutation("lanes don't wait", LISTS, "            else\n                __syncwarp();\n", ""),
    Mutation("ties in any order", LISTS, "if (a > b) {", "if ((a >> 32) > (b >> 32)) {"),
    Mutation("farthest first within a chunk", LISTS, "if (a > b) {", "if (a < b) {"),
    Mutation(
        "full chunk left to the merge",
        LISTS,
        "if (chunk.whole > CHUNK)\n            pairs[t]",
        "if (chunk.whole >= CHUNK)\n            pairs[t]",
    ),
    Mutation("own chunk counted again", LISTS, "            if (other == chunk.from) continue;\n", ""),
    Mutation(
        "only the next chunk merged", LISTS, "other < chunk.whole; other += CHUNK", "other < 2 * CHUNK; other += CHUNK"
    ),
    Mutation("last chunk searched beyond its end", LISTS, "high = min(chunk.whole - other, CHUNK);", "high = CHUNK;"),
    Mutation("merge in the other order", LISTS, "if (pairs[other + middle] < key)", "if (pairs[other + middle] > key)"),
    Mutation(
        "merge by distance alone",
        LISTS,
        "if (pairs[other + middle] < key)",
        "if (pairs[other + middle] >> 32 < key >> 32)",
    ),
    Mutation(
        "distance in the list",
        LISTS,
        "state.members[chunk.first + place] = int32_t(uint32_t(key));",
        "state.members[chunk.first + place] = int32_t(key >> 32);",
    ),
    # Compositing on CUDA.
    Mutation(
        "patches of a tile in one column",
        TILES,
        "tile % across * TILE_WIDTH + part % patches",
        "tile % across * TILE_WIDTH + part / patches",
    ),
    Mutation(
        "last columns not drawn",
        TILES,
        "inside = row < problem.height && column < problem.width;",
        "inside = row < problem.height && column < problem.width - 1;",
    ),
    Mutation(
        "no room and yet a list",
        TILES,
        "count = state.status[1] ? 0 : state.starts[whole + 1] - first;",
        "count = state.starts[whole + 1] - first;",
    ),
    Mutation(
        "cone of the patch too narrow",
        TILES,
        "together = f.cosine * cosine - f.sine * sine",
        "together = f.cosine * cosine + f.sine * sine",
    ),
    Mutation("cones around the far side forgotten", TILES, "return turned <= 0 || dot", "return dot"),
    Mutation("cone of the patch from one pixel", TILES, "cosine = fminf(cosine, 1.0f);", "cosine = 1.0f;"),
    Mutation(
        "all footprints near",
        TILES,
        "near = !__any_sync(ALL, reached && next.cosine <= float(NEAR_COSINE));",
        "near = true;",
    ),
    Mutation(
        "near if one is",
        TILES,
        "near = !__any_sync(ALL, reached && next.cosine <= float(NEAR_COSINE));",
        "near = __any_sync(ALL, reached && next.cosine > float(NEAR_COSINE));",
    ),
    Mutation(
        "reach beyond 90 degrees forgotten",
        TILES,
        "            evaluate_as<WHOLE>(which, ray, seen);",
        "            evaluate_as<HALF>(which, ray, seen);",
    ),
    Mutation("odd footprint twice", TILES, "seen[q].alpha = none[q] ? 0.0f : seen[q].alpha;", "(void)none;"),
    Mutation(
        "signals of another receiver's items",
        TILES,
        "signal = given + (item - before) * channels;",
        "signal = given + item * channels;",
    ),
    Mutation(
        "many channels: signals of other items",
        TILES,
        "return given + (room.items[k] - before) * channels;",
        "return given + room.items[k] * channels;",
    ),
    Mutation(
        "fetched without a look at the end",
        TILES,
        "window.expect(lane < patch.count, lane);",
        "window.expect(true, lane);",
    ),
    Mutation(
        "second window fetched without a look",
        TILES,
        "window.fetch(32 + lane < patch.count, 32 + lane);",
        "window.fetch(true, 32 + lane);",
    ),
    Mutation(
        "next windows fetched without a look",
        TILES,
        "window.fetch(from + 64 + lane < patch.count, from + 64 + lane);",
        "window.fetch(true, from + 64 + lane);",
    ),
    Mutation(
        "window skipped",
        TILES,
        "window.fetch(from + 64 + lane < patch.count, from + 64 + lane);",
        "window.fetch(from + 96 + lane < patch.count, from + 96 + lane);",
    ),
    Mutation(
        "window skipped on the way back",
        TILES,
        "window.fetch(from >= 64, from - 64 + lane);",
        "window.fetch(from >= 96, from - 96 + lane);",
    ),
    Mutation(
        "half of the warp swapped",
        TILES,
        "which[q] = second ? b : a;\n                others[q] = second ? a : b;",
        "which[q] = second ? a : b;\n                others[q] = second ? b : a;",
    ),
    Mutation(
        "half of the warp swapped on the way back",
        TILES,
        "which[q] = second ? b : a;\n            }\n            window.evaluate(which, there, patch.ray, seen);",
        "which[q] = second ? a : b;\n            }\n            window.evaluate(which, there, patch.ray, seen);",
    ),
    Mutation(
        "weights of the halves swapped",
        TILES,
        "const float weight = second ? weight_b : weight_a;\n                const int a",
        "const float weight = second ? weight_a : weight_b;\n                const int a",
    ),
    Mutation(
        "weights' gradients of the halves swapped",
        TILES,
        "const float weight = second ? weight_b : weight_a;\n                const auto by",
        "const float weight = second ? weight_a : weight_b;\n                const auto by",
    ),
    Mutation(
        "opacities' gradients of the halves swapped",
        TILES,
        "o, second ? by_alpha_b : by_alpha_a);",
        "o, second ? by_alpha_a : by_alpha_b);",
    ),
    Mutation("what the other half emits forgotten", TILES, "other = from_other_half(emitted);", "other = emitted;"),
    Mutation(
        "nearer of two first on the way back",
        TILES,
        "which[q] = second ? b : a;\n            }\n            window.evaluate(which",
        "which[q] = second ? a : b;\n            }\n            window.evaluate(which",
    ),
    Mutation("end before the last", TILES, "end = weight_b > 0 ? from + b + 1", "end = weight_b > 0 ? from + b"),
    Mutation("end of the first of two forgotten", TILES, ": weight_a > 0 ? from + a + 1 : end;", ": end;"),
    Mutation("end counts no window", TILES, ": weight_a > 0 ? from + a + 1 : end;", ": weight_a > 0 ? a + 1 : end;"),
    Mutation(
        "gradient of what closed a pixel",
        TILES,
        "o.alpha = from + k < end ? o.alpha : 0.0f;",
        "o.alpha = from + k <= end ? o.alpha : 0.0f;",
    ),
    Mutation("gradient beyond the end on CUDA", TILES, "o.alpha = from + k < end ? o.alpha : 0.0f;", "(void)end;"),
    Mutation(
        "last window without a gradient",
        TILES,
        "final = (furthest + 31) / 32 * 32 - 32;",
        "final = furthest / 32 * 32 - 32;",
    ),
    Mutation(
        "end of the warp's first pixel", TILES, "furthest = half_max(end),", "furthest = __shfl_sync(ALL, end, 0),"
    ),
    Mutation(
        "statistics of both halves", TILES, "for (int m = 8; m; m /= 2) x += ", "for (int m = 16; m; m /= 2) x += "
    ),
    Mutation("peak of both halves", TILES, "for (int m = 8; m; m /= 2) x = max", "for (int m = 16; m; m /= 2) x = max"),
    Mutation(
        "statistics of the first half alone", TILES, "if (lane % 16 == 0 && most > 0) {", "if (lane == 0 && most > 0) {"
    ),
    Mutation("second half's colour forgotten", TILES, "colour[c] += from_other_half(colour[c]);", "(void)c;"),
    Mutation(
        "sums of the wrong lanes",
        TILES,
        "sent = upper ? v[i] : v[i + HALF], kept = upper ? v[i + HALF] : v[i];",
        "sent = upper ? v[i + HALF] : v[i], kept = upper ? v[i] : v[i + HALF];",
    ),
    Mutation("overflow shows in no image", TILES, "= colour[c] + none;", "= colour[c];"),
    Mutation(
        "overflow shows in no transmittance",
        TILES,
        "transmittances[place] = through + none;",
        "transmittances[place] = through;",
    ),
    Mutation(
        "overflow shows in no gradient",
        TILES,
        "by_means[3 * i + d] = all.mean[d] + none;",
        "by_means[3 * i + d] = all.mean[d];",
    ),
    Mutation("overflow shows in no pose", TILES, "float whole = none;", "float whole = 0;"),
    Mutation(
        "overflow shows in no signal",
        TILES,
        "by_signals[i * channels + c] = none;",
        "by_signals[i * channels + c] = 0;",
    ),
    Mutation("no gradient by the transmittance read", TILES, "patch.inside && by_transmittance ?", "patch.inside ?"),
    Mutation(
        "transmittance's gradient without transmittance",
        TILES,
        "by_transmittance[place] * through : 0.0f",
        "by_transmittance[place] : 0.0f",
    ),
    Mutation(
        "gradient by another receiver's image",
        TILES,
        "? by_image[(patch.receiver * channels + c) * size",
        "? by_image[c * size",
    ),
    Mutation("gradients a and b swapped", TILES, "by.a * w[2], by.b * w[0],", "by.b * w[2], by.a * w[0],"),
    Mutation(
        "signal's gradient by the opacity",
        TILES,
        "c < CHANNELS ? weight * by_colour",
        "c < CHANNELS ? o.alpha * by_colour",
    ),
    Mutation(
        "only the last receiver's gradient on CUDA", TILES, "all.mean[d] += g.mean[d];", "all.mean[d] = g.mean[d];"
    ),
    Mutation(
        "only the last receiver's signal",
        TILES,
        "by_signals[i * channels + c] += sum[10 + c];",
        "by_signals[i * channels + c] = sum[10 + c];",
    ),
    Mutation(
        "receiver's gradient with the means' sign on CUDA",
        TILES,
        "{-g.mean[0], -g.mean[1], -g.mean[2]}",
        "{g.mean[0], g.mean[1], g.mean[2]}",
    ),
    Mutation("all poses' sums to the first receiver", TILES, "by_receivers + 3 * r + d :", "by_receivers + d :"),
    Mutation(
        "poses summed over half a block",
        TILES,
        "half < GATHER_THREADS / 16; ++half",
        "half < GATHER_THREADS / 32; ++half",
    ),
    Mutation(
        "no wait for poses",
        TILES,
        "        __syncthreads();\n        if (threadIdx.x < 12) {",
        "        if (threadIdx.x < 12) {",
    ),
    Mutation(
        "poses of the next receiver",
        TILES,
        "        }\n        __syncthreads();\n    }\n    if (!inside) return;",
        "        }\n    }\n    if (!inside) return;",
    ),
    Mutation("poses nobody asked for", TILES, "        if (!poses) continue;  // the same for every thread\n", ""),
    # Launchers.
    Mutation("counts of the call before", LAUNCH, "    cudaMemsetAsync(scratch.counts, 0, 4 * tiles, stream);\n", ""),
    Mutation(
        "a quarter of the counts zeroed",
        LAUNCH,
        "cudaMemsetAsync(scratch.counts, 0, 4 * tiles, stream);",
        "cudaMemsetAsync(scratch.counts, 0, tiles, stream);",
    ),
    Mutation(
        "weights on top of what was there", LAUNCH, "        cudaMemsetAsync(out[3], 0, 4 * items, stream);\n", ""
    ),
    Mutation("peaks on top of what was there", LAUNCH, "        cudaMemsetAsync(out[4], 0, 4 * items, stream);\n", ""),
    Mutation(
        "gradients on top of what was there",
        LAUNCH,
        "    cudaMemsetAsync(sums, 0, 4 * items * (10 + problem->channels), stream);\n",
        "",
    ),
    Mutation(
        "receivers' gradients on top of what was there",
        LAUNCH,
        "    cudaMemsetAsync(out[5], 0, 4 * 3 * problem->receivers, stream);\n",
        "",
    ),
    Mutation(
        "a third of the rotations' gradients zeroed",
        LAUNCH,
        "cudaMemsetAsync(out[6], 0, 4 * 9 * problem->receivers, stream);",
        "cudaMemsetAsync(out[6], 0, 4 * 3 * problem->receivers, stream);",
    ),
    Mutation(
        "blocks across receivers",
        LAUNCH,
        "unsigned(problem->receivers) * blocks(problem->gaussians, ITEM_THREADS);",
        "blocks(items, ITEM_THREADS);",
    ),
    Mutation(
        "no blocks for later chunks",
        LAUNCH,
        "chunks = unsigned(tiles + capacity / CHUNK);",
        "chunks = unsigned(tiles);",
    ),
    Mutation(
        "two chunks not merged", LAUNCH, "if (capacity > CHUNK) merge_chunks", "if (capacity > 2 * CHUNK) merge_chunks"
    ),
    Mutation("three channels in two", LAUNCH, "if (channels <= 2)", "if (channels <= 3)"),
    Mutation("seven channels in six", LAUNCH, "if (channels <= 6)", "if (channels <= 7)"),
    Mutation("many channels in 22", LAUNCH, "if (channels <= 22)", "if (channels <= 38)"),
    Mutation(
        "last Gaussians not gathered",
        LAUNCH,
        "gather<<<blocks(problem->gaussians, GATHER_THREADS),",
        "gather<<<unsigned(problem->gaussians / GATHER_THREADS),",
    ),
    # The definition itself.
    Mutation("reference: footprint independent of the distance", REFERENCE, "/ distance[:, None, None] ** 2", ""),
    Mutation(
        "reference: chord for angle",
        REFERENCE,
        "torch.exp(-_squared_angle_over_sine(cosine) * form / 2)",
        "torch.exp(-form / 2)",
    ),
    Mutation(
        "reference: farthest first",
        REFERENCE,
        "torch.sort(distance.detach(), stable=True)",
        "torch.sort(-distance.detach(), stable=True)",
    ),
    Mutation(
        "reference: transmittance with the Gaussian's own",
        REFERENCE,
        "weights = alpha * before",
        "weights = alpha * after",
    ),
    Mutation("reference: near Gaussians drawn", REFERENCE, "(distance.detach() > nearest)", "(distance.detach() >= 0)"),
    # The operator.
    Mutation(
        "a word less of state",
        OPERATOR,
        "_tiles(height, width) + 1\n\n\ndef _scratch",
        "_tiles(height, width)\n\n\ndef _scratch",
    ),
    Mutation(
        "a block less of scratch",
        OPERATOR,
        "blocks = receivers * -(-gaussians // ITEM_THREADS)",
        "blocks = receivers * (gaussians // ITEM_THREADS)",
    ),
    Mutation(
        "blocks of another size",
        OPERATOR,
        "ITEM_THREADS, MOST_TILES = 256, 4096",
        "ITEM_THREADS, MOST_TILES = 128, 4096",
    ),
    Mutation(
        "more tiles than the kernels count",
        OPERATOR,
        "ITEM_THREADS, MOST_TILES = 256, 4096",
        "ITEM_THREADS, MOST_TILES = 256, 8192",
    ),
    Mutation(
        "ranges of tiles beyond 16 bits", OPERATOR, "if max(across, up) >= 1 << 16:", "if max(across, up) >= 1 << 20:"
    ),
    Mutation("numbers beyond 31 bits", OPERATOR, "if max(items, capacity, max", "if max(0, 0, max"),
    Mutation("signs of negative views lost", OPERATOR, "x.resolve_neg().contiguous()", "x.contiguous()"),
    Mutation("strides ignored", OPERATOR, "x.resolve_neg().contiguous()", "x.resolve_neg()"),
    Mutation(
        "receivers alone get no gradient", OPERATOR, "any(ctx.needs_input_grad[5:7])", "any(ctx.needs_input_grad[6:7])"
    ),
    Mutation(
        "rotations alone get no gradient", OPERATOR, "any(ctx.needs_input_grad[5:7])", "any(ctx.needs_input_grad[5:6])"
    ),
    Mutation(
        "second derivatives are zero",
        OPERATOR,
        'torch.library.register_autograd("chanlab::rasterize_sphere_backward", _no_second_derivative)\n',
        "",
    ),
    Mutation(
        "room for yesterday's Gaussians",
        OPERATOR,
        "max(1 << 12, math.ceil(rate * items))",
        "max(1 << 12, math.ceil(rate * 5000))",
    ),
    Mutation("room shrinks at once", OPERATOR, "if calls + 1 >= self.PATIENCE:", "if True:"),
    Mutation("room never shrinks", OPERATOR, "if calls + 1 >= self.PATIENCE:", "if False:"),
    Mutation(
        "overflow is not told", OPERATOR, "            if need > room:\n                short = (need, room)\n", ""
    ),
    Mutation(
        "slots of calls that failed are lost",
        OPERATOR,
        "                if self._given.pop(slot, None):\n                    self._free.append(slot % self.SLOTS)\n",
        "                self._given.pop(slot, None)\n",
    ),
    Mutation(
        "slots read once",
        OPERATOR,
        "            self._slots[slot] = self.EMPTY\n            self._free.append(slot)\n",
        "            self._slots[slot] = self.EMPTY\n",
    ),
    Mutation("last call's count in a slot", OPERATOR, "            self._slots[slot] = self.EMPTY\n", ""),
    Mutation("slots numbered alike", OPERATOR, "self._free.pop() + self.SLOTS * self._calls", "self._free.pop()"),
    Mutation(
        "tracing sees no operator",
        PLAIN,
        "if torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None:",
        "if torch._C._get_tracing_state() is not None:",
    ),
    Mutation(
        "old tracing sees no operator",
        PLAIN,
        "if torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None:",
        "if torch._C._len_torch_dispatch_stack():",
    ),
    Mutation("forward mode is zero", PLAIN, "if forward_ad._current_level < 0:", "if forward_ad._current_level < 9:"),
    Mutation("no gradients", OPERATOR, "g if want else None for g, want", "None for g, want"),
    Mutation(
        "fake of another shape", OPERATOR, "means.new_empty(b, height, width),", "means.new_empty(b, width, height),"
    ),
    # Seen on hardware alone: the emulation runs one thread at a time, on one stream, and launches whatever it is asked.
    Mutation("counts without atomics", LISTS, "atomicAdd(counts + tile, 1); });", "++counts[tile]; });", hardware=True),
    Mutation(
        "places without atomics",
        LISTS,
        "scratch.pairs[atomicAdd(next + tile, 1)]",
        "scratch.pairs[next[tile]++]",
        hardware=True,
    ),
    Mutation(
        "bounds of a launch too low",
        LISTS,
        "__launch_bounds__(SORT_THREADS) sort_chunks",
        "__launch_bounds__(SORT_THREADS / 4) sort_chunks",
        hardware=True,
    ),
    Mutation("gradients without atomics", TILES, "atomicAdd(sum + slot, total);", "sum[slot] += total;", hardware=True),
    Mutation(
        "statistics without atomics",
        TILES,
        "atomicAdd(weights + window.room.items[k], sum);",
        "weights[window.room.items[k]] += sum;",
        hardware=True,
    ),
    Mutation(
        "zeroed on another stream",
        LAUNCH,
        "cudaMemsetAsync(scratch.counts, 0, 4 * tiles, stream);",
        "cudaMemset(scratch.counts, 0, 4 * tiles);",
        hardware=True,
    ),
    Mutation(
        "composited on another stream",
        LAUNCH,
        "composite_tiles<decltype(bound)::value><<<unsigned(tiles * PATCHES / WARPS), PATCH_THREADS, 0, stream>>>",
        "composite_tiles<decltype(bound)::value><<<unsigned(tiles * PATCHES / WARPS), PATCH_THREADS>>>",
        hardware=True,
    ),
    Mutation(
        "waits for the device",
        LAUNCH,
        "    sort_chunks<<<",
        "    cudaDeviceSynchronize();\n    sort_chunks<<<",
        hardware=True,
    ),
)
"""What is planted."""

LONGEST = 300
"""Seconds that tests may take; they take less than a minute."""


def plant(mutation: Mutation, folder: Path) -> None:
    """Copy package and tests to a folder, with the mistake."""
    shutil.copytree(ROOT / "chanlab", folder / "chanlab", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests" / "rf", folder / "tests" / "rf", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    path = folder / "chanlab" / "rf" / mutation.file
    text = path.read_text(encoding="utf-8")
    if mutation.right not in text:
        raise ValueError(
            f"{mutation.name}: {mutation.file} no longer holds `{mutation.right}`; write the mutation anew."
        )
    path.write_text(text.replace(mutation.right, mutation.wrong), encoding="utf-8")


def survives(mutation: Mutation, tests: Iterable[str] | None = None, cache: Path | None = None) -> bool:
    """Whether all tests pass in spite of the mistake; a crash and a test that doesn't end are no passing.

    Args:
        mutation: What to plant.
        tests: Files of tests; None is those of the mutated file.
        cache: Folder for compiled kernels, which mutants may share; None is one of its own.

    Raises:
        ValueError: If the line to change is gone, or the mutant does not even compile: it then shows nothing.
    """
    with tempfile.TemporaryDirectory(prefix="chanlab-mutant-") as name:
        folder = Path(name)
        plant(mutation, folder)
        environment = {"CHANLAB_CACHE": str(cache or folder / "cache"), "PYTHONPATH": str(folder)}
        which = "reference or tiles" if mutation.file == REFERENCE else "not reference or emulated or cuda"
        tests = tests or ((CUDA,) if mutation.hardware else TESTS[mutation.file])
        process = PROCESSES.Process(target=run_tests, args=(folder, environment, which, *tests))
        process.start()
        process.join(LONGEST)
        if process.is_alive():
            process.kill()
            return False
        said = (folder / "said").read_text(encoding="utf-8")
        if process.exitcode > 1 or re.search(r"Compiling sphere\S* .*failed", said):
            raise ValueError(f"{mutation.name}: the tests did not run.\n{said}")
        return process.exitcode == 0


def run_tests(folder: Path, environment: dict[str, str], which: str, *tests: str) -> None:
    """Run tests on the copy in a folder, in a process that has torch and pytest loaded, and end it with their code."""
    os.chdir(folder)
    os.environ.update(environment)
    os.environ.pop("CHANLAB_KERNELS", None)
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    with (folder / "said").open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(pytest.main(["-q", "-x", "--tb=line", "-k", which, "-p", "no:cacheprovider", *tests]))


def main() -> int:
    """Plant, test, list."""
    parser = argparse.ArgumentParser(description="Which mistakes in the rasterizer do its tests not see?")
    parser.add_argument("words", nargs="*", help="those whose name or file holds one of them; default: all")
    parser.add_argument("--jobs", type=int, default=1, help="mutants tried at once")
    asked = parser.parse_args()
    words = asked.words
    chosen = [m for m in MUTATIONS if not words or any(word in m.name or word in m.file for word in words)]
    tried = [m for m in chosen if not m.hardware or torch.cuda.is_available()]
    survivors = []
    with tempfile.TemporaryDirectory(prefix="chanlab-mutants-") as cache, ThreadPoolExecutor(asked.jobs) as pool:

        def attempt(mutation: Mutation) -> tuple[bool, float]:
            started = time.monotonic()
            return survives(mutation, cache=Path(cache)), time.monotonic() - started

        for mutation, (alive, seconds) in zip(tried, pool.map(attempt, tried), strict=True):
            survivors += [mutation.name] * alive
            print(
                f"{'SURVIVES' if alive else 'found':9} {seconds:5.1f} s  {mutation.file}: {mutation.name}", flush=True
            )
    print(f"{len(tried)} planted, {len(survivors)} survive" + "".join(f"\n  {name}" for name in survivors))
    if skipped := [m.name for m in chosen if m not in tried]:
        print(f"{len(skipped)} want a GPU" + "".join(f"\n  {name}" for name in skipped))
    return 1 if survivors or not chosen else 0


if __name__ == "__main__":
    raise SystemExit(main())
