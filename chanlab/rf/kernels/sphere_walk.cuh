// How a warp walks the list of a tile, for a patch of the tile's pixels: 32 footprints at a time. Each lane looks whether one
// of them may reach the patch; those that do queue up in shared memory and are evaluated once there are enough for every
// lane. A walk is a chain of waits rather than of arithmetic: the next 32 are fetched meanwhile, and a lane evaluates four.
//
// HALVES says how a warp holds its patch. 1: 8 x 4 pixels, a lane each. 2: 4 x 4 pixels, each twice; the halves of the warp
// evaluate two footprints at once and tell each other their alphas: more work, and shorter walks where tiles are few.
#pragma once

#include "sphere_lists.cuh"

namespace sphere {

constexpr int WARPS = 4, PATCH_THREADS = 32 * WARPS;  // patches of a block, a warp each
constexpr int TOGETHER = 4;                           // footprints that a lane evaluates at a time
constexpr uint32_t QUEUE = 64;                        // 32, and those of earlier ones that wait

template <int HALVES>
constexpr int LANES = 32 / HALVES;  // and pixels of a patch

template <class T>
__device__ __forceinline__ T from_other_half(T x) {
    return __shfl_xor_sync(ALL, x, 16);
}

// Over as many lanes of the warp.
template <int COUNT>
__device__ __forceinline__ float sum_of(float x) {
#pragma unroll
    for (int m = COUNT / 2; m; m /= 2) x += __shfl_xor_sync(ALL, x, m);
    return x;
}

template <int COUNT, class T>
__device__ __forceinline__ T largest_of(T x) {
#pragma unroll
    for (int m = COUNT / 2; m; m /= 2) x = max(x, __shfl_xor_sync(ALL, x, m));
    return x;
}

template <int HALF>
__device__ __forceinline__ void fold(float (&v)[16]) {
    const bool upper = threadIdx.x & HALF;
#pragma unroll
    for (int i = 0; i < HALF; ++i) {
        const float sent = upper ? v[i] : v[i + HALF], kept = upper ? v[i + HALF] : v[i];
        v[i] = kept + __shfl_xor_sync(ALL, sent, HALF);
    }
}

// Sixteen sums over 16 or 32 lanes in 15 or 16 shuffles: lane k of each sixteen returns that of value k.
template <int COUNT>
__device__ __forceinline__ float sixteen_sums(float (&v)[16]) {
    fold<8>(v);
    fold<4>(v);
    fold<2>(v);
    fold<1>(v);
    return COUNT == 32 ? v[0] + from_other_half(v[0]) : v[0];
}

// The pixel of a thread; a box around the pixels of its warp is left in shared memory.
template <int HALVES>
struct Patch {
    static constexpr int COUNT = LANES<HALVES>, WIDTH = 8 / HALVES, HEIGHT = 4;
    int64_t receiver, pixel;  // pixel of the receiver's image
    bool inside;
    float ray[3];
    int32_t first, count;  // the tile's list; empty if there was no room for it

    __device__ Patch(const Problem& problem, const State& state, Box<float>& shared) {
        constexpr int patches = TILE_PIXELS / COUNT, across_tile = TILE_WIDTH / WIDTH;
        const int32_t across = tiles_across(problem), per_receiver = across * tiles_up(problem);
        const int32_t patch = blockIdx.x * WARPS + threadIdx.x / 32, whole = patch / patches, part = patch % patches;
        const int lane = threadIdx.x % COUNT;
        receiver = whole / per_receiver;
        const int32_t tile = whole - int32_t(receiver) * per_receiver;
        const int32_t lowest = tile / across * TILE_HEIGHT + part / across_tile * HEIGHT;
        const int32_t leftmost = tile % across * TILE_WIDTH + part % across_tile * WIDTH;
        const int32_t row = lowest + lane / WIDTH, column = leftmost + lane % WIDTH;
        inside = row < problem.height && column < problem.width;
        pixel = int64_t(row) * problem.width + column;
        sphere::ray(problem, row, column, ray);
        Box<float> box;
        float* const c = box.centre;
        sphere::ray(problem, lowest + (HEIGHT - 1) / 2.0, leftmost + (WIDTH - 1) / 2.0, c);
        const float level = sqrtf(c[0] * c[0] + c[1] * c[1]);
        const bool pole = level < 1e-6f;
        const float along[3] = {pole ? 1.0f : -c[1] / level, pole ? 0.0f : c[0] / level, 0};
        const float up[3] = {-c[2] * along[1], c[2] * along[0], c[0] * along[1] - c[1] * along[0]};
        const float off[3] = {ray[0] - c[0], ray[1] - c[1], ray[2] - c[2]};
        for (int d = 0; d < 3; ++d) {
            box.first[d] = along[d];
            box.second[d] = up[d];
        }
        const float* axes[3] = {box.first, box.second, box.centre};
        for (int d = 0; d < 3; ++d) box.size[d] = largest_of<COUNT>(inside ? fabsf(dot(off, axes[d])) : 0.0f) + 2e-6f;
        if (threadIdx.x % 32 == 0) shared = box;
        __syncwarp();
        first = state.starts[whole];
        count = state.status[1] ? 0 : state.lengths[whole];
    }
};

// The queue of a warp in shared memory, and its next 32 footprints on their way into registers.
template <int CHANNELS, int HALVES, bool BACKWARD>
struct Window {
    static constexpr bool SIGNALS = CHANNELS <= 6;  // else they are read where they lie
    static constexpr uint32_t GROUP = TOGETHER * HALVES;

    struct Room {
        Footprint<float> footprints[QUEUE];
        float signals[SIGNALS ? QUEUE : 1][SIGNALS ? CHANNELS : 1];
        int32_t items[QUEUE], places[QUEUE];  // place: in the tile's list
        Box<float> box;
    };

    const float* __restrict__ given;
    const Footprint<float>* __restrict__ footprints;
    const int32_t* __restrict__ members;
    int64_t before;  // items of receivers before this one
    int channels;
    Room& room;
    Footprint<float> next;
    float next_signals[SIGNALS ? CHANNELS : 1];
    int32_t item, after;  // of `next`, and of the one after it
    uint32_t done, queued; // of those that may reach the patch
    bool near;             // whether all that wait end NEAR

    __device__ Window(const Problem& problem, const State& state, const Patch<HALVES>& patch, const float* signals,
                      Room& room)
        : given(signals), footprints(state.footprints), members(state.members + patch.first),
          before(patch.receiver * problem.gaussians), channels(int(problem.channels)), room(room), next(),
          next_signals(), item(-1), after(-1), done(0), queued(0), near(true) {}

    __device__ void expect(bool there, int32_t place) { after = there ? members[place] : -1; }

    // Sends for the footprint of `after`, and for the number of the one at `place`.
    __device__ void fetch(bool there, int32_t place) {
        item = after;
        expect(there, place);
        if (item < 0) return;
        next = footprints[item];
        if constexpr (SIGNALS) {
            const float* signal = given + (item - before) * channels;
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c)
                if (c < channels) next_signals[c] = __ldg(signal + c);
        }
    }

    // What was fetched queues up if it may reach the patch, in the order of the walk; `from` is the place of the first lane's.
    __device__ void take(int32_t from) {
        const int lane = threadIdx.x % 32;
        const bool reached = item >= 0 && reaches(next, room.box);
        const unsigned all = __ballot_sync(ALL, reached), earlier = BACKWARD ? 0u - (2u << lane) : (1u << lane) - 1;
        const bool wide = __any_sync(ALL, reached && next.cosine <= float(NEAR_COSINE));
        near = (near || done == queued) && !wide;
        if (reached) {
            const uint32_t k = (queued + __popc(all & earlier)) % QUEUE;
            room.footprints[k] = next;
            room.items[k] = item;
            room.places[k] = from + lane;
            if constexpr (SIGNALS) {
#pragma unroll
                for (int c = 0; c < CHANNELS; ++c) room.signals[k][c] = next_signals[c];  // 0 beyond the last channel
            }
        }
        queued += __popc(all);
        __syncwarp();
    }

    // Whether there are enough to evaluate; any at the end of the walk.
    __device__ bool ready(bool last) const { return queued - done >= (last ? 1u : GROUP); }

    // Evaluates the next footprints for this lane and says where they are in the queue. Beyond its end is nothing.
    __device__ void evaluate(const float* ray, int (&which)[TOGETHER], Opaque<float> (&seen)[TOGETHER]) {
        bool there[TOGETHER];
#pragma unroll
        for (int q = 0; q < TOGETHER; ++q) {
            const uint32_t k = done + HALVES * q + (HALVES == 2 ? threadIdx.x / 16 % 2 : 0);
            there[q] = k < queued;
            which[q] = int((there[q] ? k : done) % QUEUE);
        }
        if (near)
            evaluate_as<NEAR>(which, ray, seen);
        else
            evaluate_as<WHOLE>(which, ray, seen);
#pragma unroll
        for (int q = 0; q < TOGETHER; ++q) seen[q].alpha = there[q] ? seen[q].alpha : 0.0f;
    }

    // Those evaluated last make room.
    __device__ void drop() {
        done = min(done + GROUP, queued);
        __syncwarp();
    }

    template <Reach REACH>
    __device__ __forceinline__ void evaluate_as(const int (&which)[TOGETHER], const float* ray,
                                                Opaque<float> (&seen)[TOGETHER]) const {
#pragma unroll
        for (int q = 0; q < TOGETHER; ++q)
            seen[q] = opaque<REACH>(room.footprints[which[q]], ray[0], ray[1], ray[2]);
    }

    __device__ const float* signal(int k) const {
        if constexpr (SIGNALS)
            return room.signals[k];
        else
            return given + (room.items[k] - before) * channels;
    }
};

}  // namespace sphere
