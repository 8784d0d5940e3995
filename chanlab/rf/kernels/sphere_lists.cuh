// Which Gaussians each tile composites: projection, pairs of tile and Gaussian, where each tile's pairs lie, nearest first.
//
// Items are pairs of receiver and Gaussian, numbered receiver * gaussians + gaussian. A tile's pairs are counted, given
// room one tile after another, written there in any order, and sorted in shared memory, CHUNK at a time: that takes fewer
// launches and less traffic than sorting all pairs of all tiles together. Tiles near a pole have long lists; blocks
// therefore add up what they have for a tile before they tell the device.
#pragma once

#include "sphere.h"

namespace sphere {

#ifndef SPHERE_CHUNK  // tests make these small, so that small scenes have long lists and many blocks
#define SPHERE_CHUNK 4096
#define SPHERE_BLOCK 256
#define SPHERE_MOST_TILES 4096
#define SPHERE_MANY_TILES 2048
#endif

constexpr unsigned ALL = 0xffffffffu;
constexpr int CHUNK = SPHERE_CHUNK;         // pairs that a block sorts at once
constexpr int ITEM_THREADS = SPHERE_BLOCK;  // items of a block
constexpr int SORT_THREADS = 4 * SPHERE_BLOCK, SCAN_THREADS = 4 * SPHERE_BLOCK, MERGE_THREADS = 4 * SPHERE_BLOCK;
constexpr int MOST_TILES = SPHERE_MOST_TILES;  // of a receiver that a block counts in shared memory; beyond, it doesn't
constexpr int MANY_TILES = SPHERE_MANY_TILES;  // so many, and small blocks that sort fill the device

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
    uint64_t* pairs;      // [capacity] distance in the upper half, item in the lower
    ushort4* ranges;      // [items] tiles
    uint32_t* distances;  // [items] bits of positive floats, which sort like them
    int32_t* counts;      // [tiles] pairs; beyond MOST_TILES then where the next one goes
    int32_t* extras;      // [tiles + 1] chunks after the first of the tiles before
    int32_t* before;      // [blocks of items, tiles of a receiver] pairs of the tile from blocks that told theirs before

    Scratch(void* memory, int64_t items, int64_t capacity, int64_t tiles) {
        pairs = static_cast<uint64_t*>(memory);
        ranges = reinterpret_cast<ushort4*>(pairs + capacity);
        distances = reinterpret_cast<uint32_t*>(ranges + items);
        counts = reinterpret_cast<int32_t*>(distances + items);
        extras = counts + tiles;
        before = extras + tiles + 1;
    }
};

struct Scene {
    const float *means, *quaternions, *scales, *opacities, *signals, *receivers, *rotations;
};

// The item of a thread; blocks hold items of one receiver.
struct Item {
    int64_t receiver, gaussian, item;
    bool inside;

    __device__ explicit Item(const Problem& problem) {
        const int64_t blocks = (problem.gaussians + ITEM_THREADS - 1) / ITEM_THREADS;
        receiver = blockIdx.x / blocks;
        gaussian = (blockIdx.x - receiver * blocks) * ITEM_THREADS + threadIdx.x;
        inside = gaussian < problem.gaussians;
        item = receiver * problem.gaussians + gaussian;
    }
};

// Calls f(lane of the item, tile of its receiver) for all tiles of the warp's 32 items, shared out evenly among the lanes:
// ranges near a pole are long.
template <class F>
__device__ void for_each_pair(const Problem& problem, ushort4 range, F f) {
    const int lane = threadIdx.x % 32;
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
        f(owner, tile_of(problem, t, pair - (end - count)));
    }
}

// Footprints of all items, and how many pairs each tile has: `counts` must be zero before.
__global__ void __launch_bounds__(ITEM_THREADS)
    project_items(Problem problem, Scene scene, State state, Scratch scratch, float* radii) {
    __shared__ int32_t counts[MOST_TILES];
    const Item x(problem);
    const int32_t per_receiver = tiles_across(problem) * tiles_up(problem);
    const bool few = per_receiver <= MOST_TILES;
    if (few)
        for (int t = threadIdx.x; t < per_receiver; t += ITEM_THREADS) counts[t] = 0;
    ushort4 range = make_ushort4(0, 0, 0, 0);
    if (x.inside) {
        const int64_t i = x.gaussian;
        const float opacity = scene.opacities[i];
        const auto p = project(scene.means + 3 * i, scene.quaternions + 4 * i, scene.scales + 3 * i, opacity,
                               scene.receivers + 3 * x.receiver, scene.rotations + 9 * x.receiver,
                               float(problem.nearest), float(problem.blur));
        if (p.visible) {
            const Tiles t = tiles(problem, bounds(problem, p.u, p.radius));
            range = make_ushort4(t.row, t.rows, t.column, t.columns);
        }
        state.footprints[x.item] = footprint(p, opacity);
        scratch.distances[x.item] = __float_as_uint(p.distance);
        scratch.ranges[x.item] = range;
        radii[x.item] = p.visible ? p.radius : 0.0f;
    }
    int32_t* const told = scratch.counts + x.receiver * per_receiver;
    if (!few) {
        for_each_pair(problem, range, [&](int, int32_t tile) { atomicAdd(told + tile, 1); });
        return;
    }
    __syncthreads();
    for_each_pair(problem, range, [&](int, int32_t tile) { atomicAdd(counts + tile, 1); });
    __syncthreads();
    for (int t = threadIdx.x; t < per_receiver; t += ITEM_THREADS)
        if (counts[t]) scratch.before[int64_t(blockIdx.x) * per_receiver + t] = atomicAdd(told + t, counts[t]);
}

// Sum over the threads of the block before this one, and over all of them.
__device__ inline int64_t sum_before(int64_t mine, int64_t* sums, int64_t& all) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int64_t upto = mine;
#pragma unroll
    for (int m = 1; m < 32; m *= 2) {
        const int64_t before = __shfl_sync(ALL, upto, lane >= m ? lane - m : lane);
        if (lane >= m) upto += before;
    }
    __syncthreads();
    if (lane == 31) sums[warp] = upto;
    __syncthreads();
    all = 0;
    for (int w = 0; w < SCAN_THREADS / 32; ++w) {
        if (w == warp) upto += all;
        all += sums[w];
    }
    return upto - mine;
}

// Exclusive sums over the tiles, by one block: where each one's pairs begin, and its chunks after the first. `told` is
// memory of the host, or null.
__global__ void __launch_bounds__(SCAN_THREADS)
    scan_tiles(State state, Scratch scratch, int64_t tiles, int64_t capacity, int64_t* told) {
    __shared__ int64_t sums[SCAN_THREADS / 32];
    const int64_t each = (tiles + SCAN_THREADS - 1) / SCAN_THREADS;
    const int64_t first = each * threadIdx.x, last = first + each < tiles ? first + each : tiles;
    int64_t pairs = 0, extras = 0, all_pairs, all_extras;
    for (int64_t t = first; t < last; ++t) {
        const int32_t count = scratch.counts[t];
        pairs += count;
        extras += count > CHUNK ? (count - 1) / CHUNK : 0;
    }
    pairs = sum_before(pairs, sums, all_pairs);
    extras = sum_before(extras, sums, all_extras);
    for (int64_t t = first; t < last; ++t) {
        const int32_t count = scratch.counts[t];
        state.starts[t] = scratch.counts[t] = int32_t(pairs < capacity ? pairs : capacity);
        scratch.extras[t] = int32_t(extras);
        pairs += count;
        extras += count > CHUNK ? (count - 1) / CHUNK : 0;
    }
    if (threadIdx.x) return;
    state.starts[tiles] = int32_t(all_pairs < capacity ? all_pairs : capacity);
    scratch.extras[tiles] = int32_t(all_extras);
    state.status[0] = all_pairs;
    state.status[1] = all_pairs > capacity;
    if (told) *told = all_pairs;
}

// Every pair to its tile's room, in any order.
__global__ void __launch_bounds__(ITEM_THREADS) scatter_pairs(Problem problem, State state, Scratch scratch) {
    __shared__ int32_t places[MOST_TILES];
    if (state.status[1]) return;
    const Item x(problem);
    const int32_t per_receiver = tiles_across(problem) * tiles_up(problem);
    const bool few = per_receiver <= MOST_TILES;
    const int64_t first_tile = x.receiver * per_receiver, first_item = x.item - threadIdx.x % 32;
    if (few) {
        for (int t = threadIdx.x; t < per_receiver; t += ITEM_THREADS)
            places[t] = state.starts[first_tile + t] + scratch.before[int64_t(blockIdx.x) * per_receiver + t];
        __syncthreads();
    }
    const ushort4 range = x.inside ? scratch.ranges[x.item] : make_ushort4(0, 0, 0, 0);
    int32_t* const next = few ? places : scratch.counts + first_tile;
    for_each_pair(problem, range, [&](int lane, int32_t tile) {
        const int64_t item = first_item + lane;
        scratch.pairs[atomicAdd(next + tile, 1)] = uint64_t(scratch.distances[item]) << 32 | uint32_t(item);
    });
}

// The chunk of a block: the first ones of all tiles, then the others. `count` is 0 if there is none for it.
struct Chunk {
    int32_t first, whole;  // the tile's pairs
    int32_t from, count;   // those of the chunk among them

    __device__ Chunk(const State& state, const Scratch& scratch, int32_t tiles) : first(0), whole(0), from(0), count(0) {
        int32_t tile = blockIdx.x;
        if (state.status[1]) return;
        if (tile >= tiles) {
            const int32_t extra = tile - tiles;
            if (extra >= scratch.extras[tiles]) return;
            int32_t low = 0, high = tiles - 1;  // the last tile with so many extra chunks, or fewer, before it
            while (low < high) {
                const int32_t middle = (low + high + 1) / 2;
                if (scratch.extras[middle] <= extra)
                    low = middle;
                else
                    high = middle - 1;
            }
            tile = low;
            from = (extra - scratch.extras[tile] + 1) * CHUNK;
        }
        first = state.starts[tile];
        whole = state.starts[tile + 1] - first;
        count = min(whole - from, CHUNK);
    }
};

// A block sorts a chunk. Every step compares upwards, so that what would lie beyond `count` needs not exist. Threads of a
// warp stay within 64 keys while the stride is 32 or less.
__global__ void __launch_bounds__(SORT_THREADS) sort_chunks(State state, Scratch scratch, int32_t tiles) {
    __shared__ uint64_t keys[CHUNK];
    const Chunk chunk(state, scratch, tiles);
    const int count = chunk.count;
    if (count <= 0) return;
    uint64_t* const pairs = scratch.pairs + chunk.first + chunk.from;
    for (unsigned t = threadIdx.x; t < unsigned(count); t += blockDim.x) keys[t] = pairs[t];
    __syncthreads();
    int size = 1;
    while (size < count) size *= 2;
    for (int k = 2; k <= size; k *= 2)
        for (int j = k / 2; j; j /= 2) {
            for (unsigned t = threadIdx.x; t < unsigned(size / 2); t += blockDim.x) {
                const int offset = int(t) & (j - 1), base = 2 * (int(t) - offset), low = base + offset;
                const int high = 2 * j == k ? base + k - 1 - offset : low + j;
                if (high >= count) continue;
                const uint64_t a = keys[low], b = keys[high];
                if (a > b) {
                    keys[low] = b;
                    keys[high] = a;
                }
            }
            if (j > 32 || (j == 1 && k >= 64))
                __syncthreads();
            else
                __syncwarp();
        }
    __syncthreads();
    for (unsigned t = threadIdx.x; t < unsigned(count); t += blockDim.x) {
        if (chunk.whole > CHUNK)
            pairs[t] = keys[t];
        else
            state.members[chunk.first + t] = int32_t(uint32_t(keys[t]));
    }
}

// Places the pairs of tiles that have several chunks: a pair's place is its own in its chunk, and how many of each other
// chunk come before it. No two keys are equal.
__global__ void __launch_bounds__(MERGE_THREADS) merge_chunks(State state, Scratch scratch, int32_t tiles) {
    const Chunk chunk(state, scratch, tiles);
    if (chunk.whole <= CHUNK) return;
    const uint64_t* const pairs = scratch.pairs + chunk.first;
    for (int t = threadIdx.x; t < chunk.count; t += MERGE_THREADS) {
        const uint64_t key = pairs[chunk.from + t];
        int32_t place = t;
        for (int32_t other = 0; other < chunk.whole; other += CHUNK) {
            if (other == chunk.from) continue;
            int32_t low = 0, high = min(chunk.whole - other, CHUNK);
            while (low < high) {
                const int32_t middle = (low + high) / 2;
                if (pairs[other + middle] < key)
                    low = middle + 1;
                else
                    high = middle;
            }
            place += low;
        }
        state.members[chunk.first + place] = int32_t(uint32_t(key));
    }
}

}  // namespace sphere
