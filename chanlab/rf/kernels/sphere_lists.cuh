// Which Gaussians each tile composites: projection, order by distance, pairs of tile and Gaussian, where they lie.
//
// Items are pairs of receiver and Gaussian, numbered receiver * gaussians + gaussian. Those of a receiver are sorted by
// distance, and tiles take them in this order: far fewer keys than there are pairs, and tiles near a pole, whose lists are
// long, cost no more than others. Ranked items are counted block by block, a tile's pairs are given room, and each block
// writes its own behind those of the blocks before.
#pragma once

#include "sphere_bounds.h"

namespace sphere {

#ifndef SPHERE_CHUNK  // tests make these small, so that small scenes have many blocks
#define SPHERE_BLOCK 256
#define SPHERE_CHUNK 2048
#define SPHERE_FAN 16
#define SPHERE_WAYS 8
#define SPHERE_BAND 1024
#define SPHERE_MANY_TILES 1024
#endif

constexpr unsigned ALL = 0xffffffffu;
constexpr int ITEM_THREADS = SPHERE_BLOCK;         // items of a block
constexpr int CHUNK = SPHERE_CHUNK;                // items that a block sorts
constexpr int SORT_THREADS = CHUNK / 2;
constexpr int FAN = SPHERE_FAN;                    // sorted runs that become one; twice as many, if these are all
constexpr int MERGE_THREADS = SPHERE_BLOCK;
constexpr int MERGE_WAYS = SPHERE_WAYS;            // runs that a thread searches at once
constexpr int BAND = SPHERE_BAND;                  // tiles that a block has in shared memory
constexpr int SUM_THREADS = 4 * SPHERE_BLOCK, SEGMENTS = SUM_THREADS / 32;
constexpr int MANY_TILES = SPHERE_MANY_TILES;      // so many fill the device

// What a backward pass needs of its forward pass; `state_words` in sphere_cuda.py counts it.
struct State {
    int64_t* status;              // [2]: pairs needed; 1 if there was no room for them
    Footprint<float>* footprints; // [items]
    int32_t* members;             // [capacity] items by tile, nearest first
    int32_t* starts;              // [tiles] where each tile's pairs begin in `members`
    int32_t* lengths;             // [tiles] how many there are
    int32_t* last;                // [receivers, height, width] length of the tile's list at the last that counted

    State(void* memory, int64_t items, int64_t capacity, int64_t tiles) {
        status = static_cast<int64_t*>(memory);
        footprints = reinterpret_cast<Footprint<float>*>(status + 2);
        members = reinterpret_cast<int32_t*>(footprints + items);
        starts = members + capacity;
        lengths = starts + tiles;
        last = lengths + tiles;
    }
};

// Bits that hold the numbers below `count`.
inline int bits(int64_t count) {
    int needed = 0;
    while (int64_t(1) << needed < count) ++needed;
    return needed;
}

// Memory of the forward pass alone; `_scratch_words` in sphere_cuda.py counts it.
//
// A key has the Gaussian in its lowest bits, above it the distance (positive floats sort like their bits), then the
// receiver: 63 bits suffice for less than 2^31 items.
struct Scratch {
    uint64_t *keys, *merged;  // [items]
    ushort4* ranges;          // [items] tiles
    int32_t* before;          // [blocks of items, tiles of a receiver] pairs of the tile; then those of blocks before
    void* more;               // for the sort by radix
    int gaussian_bits, distance_end;

    Scratch(void* memory, const Problem& problem, int64_t blocks, int64_t tiles) {
        const int64_t items = problem.gaussians * problem.receivers;
        keys = static_cast<uint64_t*>(memory);
        merged = keys + items;
        ranges = reinterpret_cast<ushort4*>(merged + items);
        before = reinterpret_cast<int32_t*>(ranges + items);
        more = before + blocks * (tiles / problem.receivers);
        gaussian_bits = bits(problem.gaussians);
        distance_end = gaussian_bits + 31;
    }
};

struct Scene {
    const float *means, *quaternions, *scales, *opacities, *signals, *receivers, *rotations;
};

SPHERE_FN int64_t parts(int64_t whole, int64_t size) { return (whole + size - 1) / size; }

// The item of a thread; blocks hold items of one receiver.
struct Item {
    int64_t receiver, gaussian, item;
    bool inside;

    __device__ explicit Item(const Problem& problem) {
        const uint32_t blocks = uint32_t(parts(problem.gaussians, ITEM_THREADS)), of = blockIdx.x / blocks;
        receiver = of;
        gaussian = int64_t(blockIdx.x - of * blocks) * ITEM_THREADS + threadIdx.x;
        inside = gaussian < problem.gaussians;
        item = receiver * problem.gaussians + gaussian;
    }
};

// Footprints of all items, their ranges of tiles, and what they are sorted by; their statistics, if any, begin at zero.
__global__ void __launch_bounds__(ITEM_THREADS)
    project_items(Problem problem, Scene scene, State state, Scratch scratch, float* radii, float* weights,
                  float* peaks) {
    if (blockIdx.x == 0 && threadIdx.x == 0) state.status[0] = 0;
    const Item x(problem);
    if (!x.inside) return;
    const int64_t i = x.gaussian;
    const float opacity = scene.opacities[i];
    const auto p = project(scene.means + 3 * i, scene.quaternions + 4 * i, scene.scales + 3 * i, opacity,
                           scene.receivers + 3 * x.receiver, scene.rotations + 9 * x.receiver, float(problem.nearest),
                           float(problem.blur));
    const Tiles t = p.visible ? tiles(problem, bounds(problem, p)) : Tiles{0, 0, 0, 0};
    state.footprints[x.item] = footprint(p, opacity);
    scratch.ranges[x.item] = make_ushort4(t.row, t.rows, t.column, t.columns);
    const uint32_t distance = __float_as_uint(p.distance) & 0x7fffffffu;  // NaN may have a sign
    scratch.keys[x.item] = uint64_t(x.receiver) << scratch.distance_end | uint64_t(distance) << scratch.gaussian_bits |
                           uint64_t(i);
    radii[x.item] = p.visible ? p.radius : 0.0f;
    if (weights) weights[x.item] = peaks[x.item] = 0;
}

// A block sorts CHUNK keys of a receiver, or those that are left. Every step compares upwards, so that what would lie beyond
// `count` needs not exist. Threads of a warp stay within 64 keys while the stride is 32 or less.
__global__ void __launch_bounds__(SORT_THREADS) sort_chunks(int32_t gaussians, uint64_t* all) {
    __shared__ uint64_t keys[CHUNK];
    const int32_t chunks = int32_t(parts(gaussians, CHUNK)), receiver = int32_t(blockIdx.x) / chunks;
    const int32_t from = (int32_t(blockIdx.x) - receiver * chunks) * CHUNK, count = min(gaussians - from, CHUNK);
    const int t = int(threadIdx.x);
    uint64_t* const given = all + int64_t(receiver) * gaussians + from;
    for (int k = t; k < count; k += SORT_THREADS) keys[k] = given[k];
    __syncthreads();
    int size = 1;
    while (size < count) size *= 2;
    for (int k = 2; k <= size; k *= 2)
        for (int j = k / 2; j; j /= 2) {
            const int offset = t & (j - 1), base = 2 * (t - offset), low = base + offset;
            const int high = 2 * j == k ? base + k - 1 - offset : low + j;
            if (high < count) {
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
    for (int k = t; k < count; k += SORT_THREADS) given[k] = keys[k];
}

// Merges `fan` sorted runs of a receiver's keys: a key's place is how many of each run come before it (no two keys are equal).
// `run` and `fan` are powers of two. A search is a chain of waits for memory, so MERGE_WAYS go on at once.
__global__ void __launch_bounds__(MERGE_THREADS)
    merge_runs(int32_t gaussians, int32_t run, int32_t fan, const uint64_t* __restrict__ keys,
               uint64_t* __restrict__ merged) {
    const int32_t blocks = int32_t(parts(gaussians, MERGE_THREADS)), receiver = int32_t(blockIdx.x) / blocks;
    const int32_t k = (int32_t(blockIdx.x) - receiver * blocks) * MERGE_THREADS + int32_t(threadIdx.x);
    if (k >= gaussians) return;
    keys += int64_t(receiver) * gaussians;
    merged += int64_t(receiver) * gaussians;
    const uint64_t key = keys[k];
    const int64_t all = int64_t(fan) * run, first = k & -all, end = min(first + all, int64_t(gaussians));
    int64_t place = first;
    for (int64_t some = first; some < end; some += MERGE_WAYS * int64_t(run)) {
        int32_t size[MERGE_WAYS], before[MERGE_WAYS];
#pragma unroll
        for (int i = 0; i < MERGE_WAYS; ++i) {
            size[i] = int32_t(min(int64_t(run), end - some - i * int64_t(run)));
            before[i] = 0;
        }
        for (int32_t step = run; step; step /= 2) {
#pragma unroll
            for (int i = 0; i < MERGE_WAYS; ++i) {
                const int32_t next = before[i] + step;
                if (next <= size[i] && keys[some + i * int64_t(run) + next - 1] < key) before[i] = next;
            }
        }
#pragma unroll
        for (int i = 0; i < MERGE_WAYS; ++i) place += before[i];
    }
    merged[place] = key;
}

// Calls f(lane of the item, tile of its receiver) for those tiles of the warp's 32 items that lie in the `count` tiles
// from `first` on, shared out evenly among the lanes: ranges near a pole are long.
template <class F>
__device__ void for_each_pair(const Problem& problem, ushort4 range, int32_t first, int32_t count, F f) {
    const int lane = threadIdx.x % 32;
    const int32_t across = tiles_across(problem), lowest = max(int32_t(range.x), first / across);
    const int32_t highest = min(range.x + range.y - 1, (first + count - 1) / across);
    const int32_t mine = max(0, highest - lowest + 1) * range.w;
    int32_t upto = mine;  // pairs of this lane's item and those before
#pragma unroll
    for (int m = 1; m < 32; m *= 2) {
        const int32_t before = __shfl_sync(ALL, upto, lane >= m ? lane - m : lane);
        if (lane >= m) upto += before;
    }
    const int32_t total = __shfl_sync(ALL, upto, 31);
    const unsigned columns = range.z | unsigned(range.w) << 16;
    for (int32_t from = 0; from < total; from += 32) {
        const int32_t pair = from + lane;
        int owner = 0;  // how many items end at or before the pair
#pragma unroll
        for (int step = 16; step; step /= 2) {
            const int32_t end = __shfl_sync(ALL, upto, owner + step - 1);
            if (end <= pair) owner += step;
        }
        owner = owner < 31 ? owner : 31;
        const int32_t end = __shfl_sync(ALL, upto, owner), of_owner = __shfl_sync(ALL, mine, owner);
        const int32_t row = __shfl_sync(ALL, lowest, owner);
        const unsigned c = __shfl_sync(ALL, columns, owner);
        if (pair >= total) continue;
        const int32_t tile = tile_of(problem, {row, 0, int32_t(c & 0xffff), int32_t(c >> 16)}, pair - (end - of_owner));
        if (tile >= first && tile < first + count) f(owner, tile);
    }
}

// The item of a thread by rank, and its range of tiles; none beyond the last.
__device__ __forceinline__ ushort4 ranked(const Item& x, const Scratch& scratch, const uint64_t* order, uint32_t& item) {
    const uint64_t mask = (uint64_t(1) << scratch.gaussian_bits) - 1;
    item = x.inside ? uint32_t(x.item - x.gaussian) + uint32_t(order[x.item] & mask) : 0;
    return x.inside ? scratch.ranges[item] : make_ushort4(0, 0, 0, 0);
}

// How many pairs of each tile the block's ranks have. Thread t alone looks after the t-th of a band's tiles.
__global__ void __launch_bounds__(ITEM_THREADS) count_pairs(Problem problem, Scratch scratch, const uint64_t* order) {
    __shared__ int32_t counts[BAND];
    uint32_t item;
    const ushort4 range = ranked(Item(problem), scratch, order, item);
    const int32_t tiles = tiles_across(problem) * tiles_up(problem);
    for (int32_t first = 0; first < tiles; first += BAND) {
        const int32_t some = min(tiles - first, BAND);
        for (int t = threadIdx.x; t < some; t += ITEM_THREADS) counts[t] = 0;
        __syncthreads();
        for_each_pair(problem, range, first, some, [&](int, int32_t tile) { atomicAdd(counts + (tile - first), 1); });
        __syncthreads();
        for (int t = threadIdx.x; t < some; t += ITEM_THREADS)
            scratch.before[int64_t(blockIdx.x) * tiles + first + t] = counts[t];
    }
}

// From the pairs of every block to those of the blocks before; room for each tile's. A block has 32 tiles of a receiver;
// each of its warps has a segment of the receiver's blocks of items.
__global__ void __launch_bounds__(SUM_THREADS)
    find_rooms(Problem problem, State state, Scratch scratch) {
    __shared__ int32_t sums[SEGMENTS][32];
    const int lane = threadIdx.x % 32, segment = threadIdx.x / 32;
    const int64_t tiles = int64_t(tiles_across(problem)) * tiles_up(problem), groups = parts(tiles, 32);
    const int64_t receiver = blockIdx.x / groups, tile = (blockIdx.x - receiver * groups) * 32 + lane;
    const int64_t blocks = parts(problem.gaussians, ITEM_THREADS), each = parts(blocks, SEGMENTS);
    const int64_t from = each * segment, to = from + each < blocks ? from + each : blocks;
    int32_t* const mine = scratch.before + receiver * blocks * tiles + tile;
    int32_t sum = 0;
    if (tile < tiles) {
#pragma unroll 8
        for (int64_t b = from; b < to; ++b) sum += mine[b * tiles];
    }
    sums[segment][lane] = sum;
    __syncthreads();
    int32_t upto = 0, all = 0;
    for (int s = 0; s < SEGMENTS; ++s) {
        if (s == segment) upto = all;
        all += sums[s][lane];
    }
    if (tile < tiles)
        for (int64_t b = from; b < to; ++b) {
            const int32_t count = mine[b * tiles];
            mine[b * tiles] = upto;
            upto += count;
        }
    if (segment) return;
    int64_t end = all;
#pragma unroll
    for (int m = 1; m < 32; m *= 2) {
        const int64_t before = __shfl_sync(ALL, end, lane >= m ? lane - m : lane);
        if (lane >= m) end += before;
    }
    unsigned long long start = 0;
    if (lane == 31) start = atomicAdd(reinterpret_cast<unsigned long long*>(state.status), (unsigned long long)(end));
    start = __shfl_sync(ALL, start, 31) + (unsigned long long)(end - all);
    if (tile >= tiles) return;
    state.starts[receiver * tiles + tile] = int32_t(start);  // of no use if they don't fit
    state.lengths[receiver * tiles + tile] = all;
}

// Every pair to its place: ranks that reach a tile are marked, a warp's in a word, and written in their order by the thread
// that looks after the tile. `told` is memory of the host, or null.
__global__ void __launch_bounds__(ITEM_THREADS)
    write_lists(Problem problem, State state, Scratch scratch, const uint64_t* order, int64_t capacity, int64_t* told) {
    __shared__ uint32_t marks[ITEM_THREADS / 32][BAND], items[ITEM_THREADS];
    const bool full = state.status[0] > capacity;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        state.status[1] = full;
        if (told) *told = state.status[0];
    }
    if (full) return;
    const Item x(problem);
    const ushort4 range = ranked(x, scratch, order, items[threadIdx.x]);
    const int32_t tiles = tiles_across(problem) * tiles_up(problem), warp = threadIdx.x / 32;
    for (int32_t first = 0; first < tiles; first += BAND) {
        const int32_t some = min(tiles - first, BAND);
        for (int t = threadIdx.x; t < some; t += ITEM_THREADS)
            for (int w = 0; w < ITEM_THREADS / 32; ++w) marks[w][t] = 0;
        __syncthreads();
        for_each_pair(problem, range, first, some,
                      [&](int lane, int32_t tile) { atomicOr(&marks[warp][tile - first], 1u << lane); });
        __syncthreads();
        for (int t = threadIdx.x; t < some; t += ITEM_THREADS) {
            int32_t* place = state.members + state.starts[x.receiver * tiles + first + t] +
                             scratch.before[int64_t(blockIdx.x) * tiles + first + t];
            for (int w = 0; w < ITEM_THREADS / 32; ++w)
                for (uint32_t left = marks[w][t]; left; left &= left - 1)
                    *place++ = int32_t(items[32 * w + __ffs(left) - 1]);
        }
    }
}

}  // namespace sphere
