// Which Gaussians each tile composites: projection, pairs of tile and Gaussian, where each tile's pairs lie, nearest first.
//
// Items are pairs of receiver and Gaussian, numbered receiver * gaussians + gaussian. A tile's pairs are counted, given
// room one tile after another, written there in any order, and sorted by one block a tile: mostly in shared memory, which
// costs fewer launches and less traffic than sorting all pairs of all tiles together.
#pragma once

#include "sphere.h"

namespace sphere {

#ifndef SPHERE_BLOCK  // tests make both small, so that small scenes have long lists
#define SPHERE_BLOCK 1024
#define SPHERE_CHUNK 4096
#endif

constexpr unsigned ALL = 0xffffffffu;
constexpr int SCAN_THREADS = SPHERE_BLOCK, SORT_THREADS = SPHERE_BLOCK;
constexpr int CHUNK = SPHERE_CHUNK;  // pairs that a block sorts at once
constexpr int MERGED = 8;            // outputs of a thread between looks at where they come from

// What a backward pass needs of its forward pass; `_state_words` in sphere.py counts it.
struct State {
    int64_t* status;              // [2]: pairs needed; 1 if there was no room for them
    Footprint<float>* footprints; // [items]
    int32_t* members;             // [capacity] items by tile, nearest first
    int32_t* starts;              // [tiles + 1] where each tile's pairs begin in `members`

    State(void* memory, int64_t items, int64_t capacity) {
        status = static_cast<int64_t*>(memory);
        footprints = reinterpret_cast<Footprint<float>*>(status + 2);
        members = reinterpret_cast<int32_t*>(footprints + items);
        starts = members + capacity;
    }
};

// Memory of the forward pass alone; `_scratch_words` in sphere.py counts it.
struct Scratch {
    uint64_t *pairs, *merged;     // [capacity] distance in the upper half, item in the lower
    ushort4* ranges;              // [items] tiles
    uint32_t* distances;          // [items] bits of positive floats, which sort like them
    int32_t* counts;              // [tiles] pairs, then where the next one goes

    Scratch(void* memory, int64_t items, int64_t capacity) {
        pairs = static_cast<uint64_t*>(memory);
        merged = pairs + capacity;
        ranges = reinterpret_cast<ushort4*>(merged + capacity);
        distances = reinterpret_cast<uint32_t*>(ranges + items);
        counts = reinterpret_cast<int32_t*>(distances + items);
    }
};

struct Scene {
    const float *means, *quaternions, *scales, *opacities, *signals, *receivers, *rotations;
};

// Calls f(item, tile) for all tiles of the warp's 32 items, shared out evenly among the lanes: ranges near a
// pole are long. `first` is the warp's first item.
template <class F>
__device__ void for_each_pair(const Problem& problem, int64_t first, ushort4 range, F f) {
    const int lane = threadIdx.x % 32;
    const int32_t per_receiver = tiles_across(problem) * tiles_up(problem);
    const int32_t mine = int32_t(range.y) * range.w;
    int32_t upto = mine;  // pairs of this lane's item and those before
#pragma unroll
    for (int m = 1; m < 32; m *= 2) {
        const int32_t before = __shfl_sync(ALL, upto, lane >= m ? lane - m : lane);
        if (lane >= m) upto += before;
    }
    const int32_t total = __shfl_sync(ALL, upto, 31);
    const unsigned xy = range.x | unsigned(range.y) << 16, zw = range.z | unsigned(range.w) << 16;
    for (int32_t from = 0; from < total; from += 32) {
        const int32_t pair = from + lane;
        int owner = 0;  // how many items end at or before the pair
#pragma unroll
        for (int step = 16; step; step /= 2) {
            const int32_t end = __shfl_sync(ALL, upto, owner + step - 1);
            if (end <= pair) owner += step;
        }
        owner = owner < 31 ? owner : 31;
        const int32_t end = __shfl_sync(ALL, upto, owner), count = __shfl_sync(ALL, mine, owner);
        const unsigned a = __shfl_sync(ALL, xy, owner), b = __shfl_sync(ALL, zw, owner);
        if (pair >= total) continue;
        const Tiles t = {int32_t(a & 0xffff), int32_t(a >> 16), int32_t(b & 0xffff), int32_t(b >> 16)};
        const uint32_t item = uint32_t(first) + owner, receiver = item / uint32_t(problem.gaussians);
        f(int32_t(item), int32_t(receiver) * per_receiver + tile_of(problem, t, pair - (end - count)));
    }
}

// Footprints of all items, and how many pairs each tile has: `counts` must be zero before.
__global__ void project_items(Problem problem, Scene scene, State state, Scratch scratch, float* radii) {
    const int64_t item = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, items = problem.gaussians * problem.receivers;
    ushort4 range = make_ushort4(0, 0, 0, 0);
    if (item < items) {
        const int64_t receiver = item / problem.gaussians, i = item - receiver * problem.gaussians;
        const float opacity = scene.opacities[i];
        const auto p = project(scene.means + 3 * i, scene.quaternions + 4 * i, scene.scales + 3 * i, opacity,
                               scene.receivers + 3 * receiver, scene.rotations + 9 * receiver, float(problem.nearest),
                               float(problem.blur));
        if (p.visible) {
            const Tiles t = tiles(problem, bounds(problem, p.u, p.radius));
            range = make_ushort4(t.row, t.rows, t.column, t.columns);
        }
        state.footprints[item] = footprint(p, opacity);
        scratch.distances[item] = __float_as_uint(p.distance);
        scratch.ranges[item] = range;
        radii[item] = p.visible ? p.radius : 0.0f;
    }
    for_each_pair(problem, item - threadIdx.x % 32, range,
                  [&](int32_t, int32_t tile) { atomicAdd(scratch.counts + tile, 1); });
}

// Exclusive sum of the counts, by one block: where each tile's pairs begin. `counts` becomes a copy of it. `told` is
// memory of the host, or null.
__global__ void scan_tiles(State state, Scratch scratch, int64_t tiles, int64_t capacity, int64_t* told) {
    __shared__ int64_t sums[SCAN_THREADS / 32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t each = (tiles + SCAN_THREADS - 1) / SCAN_THREADS;
    const int64_t first = each * threadIdx.x, last = first + each < tiles ? first + each : tiles;
    int64_t mine = 0;
    for (int64_t t = first; t < last; ++t) mine += scratch.counts[t];
    int64_t upto = mine;
#pragma unroll
    for (int m = 1; m < 32; m *= 2) {
        const int64_t before = __shfl_sync(ALL, upto, lane >= m ? lane - m : lane);
        if (lane >= m) upto += before;
    }
    if (lane == 31) sums[warp] = upto;
    __syncthreads();
    for (int w = 0; w < warp; ++w) upto += sums[w];
    int64_t start = upto - mine;
    for (int64_t t = first; t < last; ++t) {
        const int32_t count = scratch.counts[t];
        state.starts[t] = scratch.counts[t] = int32_t(start < capacity ? start : capacity);
        start += count;
    }
    if (threadIdx.x == SCAN_THREADS - 1) {
        state.starts[tiles] = int32_t(upto < capacity ? upto : capacity);
        state.status[0] = upto;
        state.status[1] = upto > capacity;
        if (told) *told = upto;
    }
}

// Every pair to its tile's room, in any order.
__global__ void scatter_pairs(Problem problem, State state, Scratch scratch) {
    if (state.status[1]) return;
    const int64_t item = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    const bool inside = item < problem.gaussians * problem.receivers;
    const ushort4 range = inside ? scratch.ranges[item] : make_ushort4(0, 0, 0, 0);
    for_each_pair(problem, item - threadIdx.x % 32, range, [&](int32_t owner, int32_t tile) {
        const int32_t place = atomicAdd(scratch.counts + tile, 1);
        scratch.pairs[place] = uint64_t(scratch.distances[owner]) << 32 | uint32_t(owner);
    });
}

// Sorts keys[0 .. count) in shared memory, all threads of the block together. Every step compares upwards, so that what
// would lie beyond `count` needs not exist. Threads of a warp stay within 64 keys while the stride is 32 or less.
__device__ inline void sort_chunk(uint64_t* keys, int count) {
    int size = 1;
    while (size < count) size *= 2;
    for (int k = 2; k <= size; k *= 2)
        for (int j = k / 2; j; j /= 2) {
            for (int t = threadIdx.x; t < size / 2; t += SORT_THREADS) {
                const int offset = t & (j - 1), base = 2 * (t - offset), low = base + offset;
                const int high = 2 * j == k ? base + k - 1 - offset : low + j;
                if (high < count && keys[low] > keys[high]) {
                    const uint64_t key = keys[low];
                    keys[low] = keys[high];
                    keys[high] = key;
                }
            }
            if (j > 32 || (j == 1 && k >= 64))
                __syncthreads();
            else
                __syncwarp();
        }
}

// Merges neighbouring sorted runs of `run` keys.
__device__ inline void merge_runs(const uint64_t* from, uint64_t* to, int count, int run) {
    for (int out = threadIdx.x * MERGED; out < count; out += SORT_THREADS * MERGED) {
        const int start = out / (2 * run) * (2 * run), middle = min(start + run, count), end = min(start + 2 * run, count);
        const uint64_t *a = from + start, *b = from + middle;
        const int has_a = middle - start, has_b = end - middle;
        int skip = out - start, low = max(0, skip - has_b), high = min(skip, has_a);
        while (low < high) {  // how many of the first `skip` come from a; no two keys are equal
            const int at = (low + high) / 2;
            if (a[at] < b[skip - 1 - at])
                low = at + 1;
            else
                high = at;
        }
        int i = low, j = skip - low;
        for (int n = 0; n < MERGED && out + n < count; ++n) {
            const bool first = j >= has_b || (i < has_a && a[i] < b[j]);
            to[out + n] = first ? a[i++] : b[j++];
        }
    }
}

// A block sorts a tile's pairs and leaves their items in `members`.
__global__ void __launch_bounds__(SORT_THREADS) sort_tiles(State state, Scratch scratch) {
    __shared__ uint64_t keys[CHUNK];
    if (state.status[1]) return;
    const int32_t first = state.starts[blockIdx.x], count = state.starts[blockIdx.x + 1] - first;
    uint64_t *pairs = scratch.pairs + first, *merged = scratch.merged + first;
    for (int32_t from = 0; from < count; from += CHUNK) {
        const int part = min(count - from, CHUNK);
        for (int t = threadIdx.x; t < part; t += SORT_THREADS) keys[t] = pairs[from + t];
        __syncthreads();
        sort_chunk(keys, part);
        __syncthreads();
        for (int t = threadIdx.x; t < part; t += SORT_THREADS) {
            if (count > CHUNK)
                pairs[from + t] = keys[t];
            else
                state.members[first + t] = int32_t(uint32_t(keys[t]));
        }
        __syncthreads();
    }
    if (count <= CHUNK) return;
    for (int run = CHUNK; run < count; run *= 2) {
        merge_runs(pairs, merged, count, run);
        __syncthreads();
        uint64_t* const other = pairs;
        pairs = merged;
        merged = other;
    }
    for (int t = threadIdx.x; t < count; t += SORT_THREADS) state.members[first + t] = int32_t(uint32_t(pairs[t]));
}

}  // namespace sphere
