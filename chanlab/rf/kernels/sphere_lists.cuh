// Which Gaussians each tile composites: projection, pairs of tile and Gaussian, where each tile's pairs begin.
//
// Items are pairs of receiver and Gaussian, numbered receiver * gaussians + gaussian. They are sorted by distance once,
// all receivers together; pairs are then made in that order and sorted, stably, by tile: each list comes out by distance.
#pragma once

#include "sphere.h"

namespace sphere {

constexpr uint32_t UNSEEN = 0xffffffffu;

// What a backward pass needs of its forward pass; `_state_words` in sphere.py counts it.
struct State {
    int64_t* status;              // [2]: pairs needed; 1 if there was no room for them
    Footprint<float>* footprints; // [items]
    int32_t* order;               // [items] items by distance
    int64_t* ends;                // [items] pairs up to and including those of the n-th of `order`
    int32_t* members;             // [capacity] items by tile, nearest first
    int32_t* starts;              // [tiles + 1] where each tile's pairs begin in `members`

    State(void* memory, int64_t items, int64_t capacity) {
        status = static_cast<int64_t*>(memory);
        footprints = reinterpret_cast<Footprint<float>*>(status + 2);
        ends = reinterpret_cast<int64_t*>(footprints + items);
        order = reinterpret_cast<int32_t*>(ends + items);
        members = order + items;
        starts = members + capacity;
    }
};

struct Scene {
    const float *means, *quaternions, *scales, *opacities, *signals, *receivers, *rotations;
};

__global__ void project_items(Problem problem, Scene scene, State state, uint32_t* keys, int32_t* numbers,
                              ushort4* ranges, int32_t* counts, float* radii) {
    const int64_t item = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (item >= problem.gaussians * problem.receivers) return;
    const int64_t receiver = item / problem.gaussians, i = item - receiver * problem.gaussians;
    const float opacity = scene.opacities[i];
    const auto p = project(scene.means + 3 * i, scene.quaternions + 4 * i, scene.scales + 3 * i, opacity,
                           scene.receivers + 3 * receiver, scene.rotations + 9 * receiver, float(problem.nearest),
                           float(problem.blur));
    Tiles t = {0, 0, 0, 0};
    if (p.visible) t = tiles(problem, bounds(problem, p.u, p.radius));
    const int32_t count = t.rows * t.columns;
    state.footprints[item] = footprint(p, opacity);
    keys[item] = count ? __float_as_uint(p.distance) : UNSEEN;  // positive floats sort as their bits
    numbers[item] = int32_t(item);
    ranges[item] = make_ushort4(t.row, t.rows, t.column, t.columns);
    counts[item] = count;
    radii[item] = p.visible ? p.radius : 0.0f;
}

// Pair counts in the order of distance, for the scan.
struct CountOf {
    const int32_t *counts, *order;
    __host__ __device__ int64_t operator()(int64_t rank) const { return counts[order[rank]]; }
};

// One thread a pair: the item whose pairs it is among, by binary search, then the tile. Room left over is given the tile
// after the last.
__global__ void make_pairs(Problem problem, State state, const ushort4* ranges, int64_t capacity, uint32_t* keys,
                           int32_t* owners) {
    const int64_t pair = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (pair >= capacity) return;
    const int64_t items = problem.gaussians * problem.receivers, total = state.ends[items - 1];
    const int32_t per_receiver = tiles_across(problem) * tiles_up(problem);
    if (pair == 0) {
        state.status[0] = total;
        state.status[1] = total > capacity;
    }
    uint32_t key = uint32_t(per_receiver * problem.receivers);
    int32_t item = 0;
    if (pair < total) {
        int64_t low = 0, high = items - 1;
        while (low < high) {
            const int64_t middle = (low + high) / 2;
            if (state.ends[middle] > pair)
                high = middle;
            else
                low = middle + 1;
        }
        item = state.order[low];
        const ushort4 r = ranges[item];
        const Tiles t = {r.x, r.y, r.z, r.w};
        const int32_t k = int32_t(pair - (low ? state.ends[low - 1] : 0));
        key = uint32_t(item / problem.gaussians * per_receiver + tile_of(problem, t, k));
    }
    keys[pair] = key;
    owners[pair] = item;
}

// Where each tile's pairs begin: every pair writes the starts of the tiles after its predecessor's, up to its own.
__global__ void find_starts(State state, const uint32_t* keys, int64_t capacity, int64_t tiles) {
    const int64_t pair = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (pair >= capacity) return;
    const int64_t tile = keys[pair], before = pair ? int64_t(keys[pair - 1]) : -1;
    for (int64_t t = before + 1; t <= tile; ++t) state.starts[t] = int32_t(pair);
    if (pair == capacity - 1)
        for (int64_t t = tile + 1; t <= tiles; ++t) state.starts[t] = int32_t(capacity);
}

}  // namespace sphere
