// Compositing of tiles. A warp walks the list of a tile on its own for a patch of its pixels, 32 footprints at a time: each
// lane looks whether one of them may reach the patch, and those that do queue up in shared memory. They are evaluated as
// soon as there are enough to keep every lane busy, for a walk is a chain of waits rather than of arithmetic; the next 32
// are fetched meanwhile.
//
// HALVES says how a warp holds its patch. 1: 8 x 4 pixels, a lane each. 2: 4 x 4 pixels, each twice; the halves of the warp
// evaluate two footprints at once and tell each other their alphas: more work, and shorter walks where tiles are few.
#pragma once

#include "sphere_lists.cuh"

namespace sphere {

constexpr int WARPS = 4, PATCH_THREADS = 32 * WARPS;  // patches of a block, a warp each
constexpr int TOGETHER = 4;                           // footprints that a lane evaluates at a time
constexpr int QUEUE = 64;                             // 32, and those of the last 32 that wait

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
    static constexpr int GROUP = TOGETHER * HALVES;

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
    int32_t done, queued; // of those that may reach the patch
    bool near;            // whether all that wait end NEAR

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
            const int k = (queued + __popc(all & earlier)) % QUEUE;
            room.footprints[k] = next;
            room.items[k] = item;
            room.places[k] = from + lane;
            if constexpr (SIGNALS) {
#pragma unroll
                for (int c = 0; c < CHANNELS; ++c)
                    if (c < channels) room.signals[k][c] = next_signals[c];
            }
        }
        queued += __popc(all);
        __syncwarp();
    }

    // Whether there are enough to evaluate; any at the end of the walk.
    __device__ bool ready(bool last) const { return queued - done >= (last ? 1 : GROUP); }

    // Evaluates the next footprints for this lane and says where they are in the queue. Beyond its end is nothing.
    __device__ void evaluate(const float* ray, int (&which)[TOGETHER], Opaque<float> (&seen)[TOGETHER]) {
        bool there[TOGETHER];
#pragma unroll
        for (int q = 0; q < TOGETHER; ++q) {
            const int32_t k = done + HALVES * q + (HALVES == 2 ? threadIdx.x / 16 % 2 : 0);
            there[q] = k < queued;
            which[q] = (there[q] ? k : done) % QUEUE;
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

template <int CHANNELS, int HALVES>
__global__ void __launch_bounds__(PATCH_THREADS)
    composite_tiles(Problem problem, const float* __restrict__ signals, State state, float* __restrict__ image,
                    float* __restrict__ transmittances, int32_t* __restrict__ last, float* weights, float* peaks) {
    using Walk = Window<CHANNELS, HALVES, false>;
    constexpr int COUNT = LANES<HALVES>;
    __shared__ typename Walk::Room rooms[WARPS];
    auto& room = rooms[threadIdx.x / 32];
    const Patch<HALVES> patch(problem, state, room.box);
    const int lane = threadIdx.x % 32, channels = int(problem.channels);
    const bool second = lane >= COUNT;
    const int64_t size = problem.height * problem.width;
    float colour[CHANNELS];
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) colour[c] = 0;
    float through = 1, open = patch.inside ? 1.0f : 0.0f;
    int32_t end = 0;
    Walk window(problem, state, patch, signals, room);
    window.expect(lane < patch.count, lane);
    window.fetch(32 + lane < patch.count, 32 + lane);
    for (int32_t from = 0; from < patch.count; from += 32) {
        if (!__any_sync(ALL, open > 0)) break;
        window.take(from);
        window.fetch(from + 64 + lane < patch.count, from + 64 + lane);
        while (window.ready(from + 32 >= patch.count)) {
            int which[TOGETHER];
            Opaque<float> seen[TOGETHER];
            window.evaluate(patch.ray, which, seen);
#pragma unroll
            for (int q = 0; q < TOGETHER; ++q) {
                const int k = which[q];
                float weight;
                if constexpr (HALVES == 1) {
                    weight = composite(seen[q].alpha, through, open);
                } else {
                    const float mine = seen[q].alpha, other = from_other_half(mine);
                    const float weight_a = composite(second ? other : mine, through, open);
                    const float weight_b = composite(second ? mine : other, through, open);
                    weight = second ? weight_b : weight_a;
                }
                end = weight > 0 ? room.places[k] + 1 : end;
                if ((!Walk::SIGNALS || weights) && !__any_sync(ALL, weight > 0)) continue;
                const float* signal = window.signal(k);
#pragma unroll
                for (int c = 0; c < CHANNELS; ++c)
                    if (c < channels) colour[c] += weight * signal[c];
                if (weights) {
                    const float sum = sum_of<COUNT>(weight), most = largest_of<COUNT>(weight);
                    if (lane % COUNT == 0 && most > 0) {
                        atomicAdd(weights + room.items[k], sum);
                        atomicMax(reinterpret_cast<int*>(peaks) + room.items[k], __float_as_int(most));
                    }
                }
            }
            window.drop();
        }
    }
    const float none = state.status[1] ? __int_as_float(0x7fc00000) : 0.0f;
    if constexpr (HALVES == 2) {
        end = max(end, from_other_half(end));
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) colour[c] += from_other_half(colour[c]);
    }
    if (!patch.inside || second) return;
    const int64_t place = patch.receiver * size + patch.pixel;
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c)
        if (c < channels) image[(patch.receiver * channels + c) * size + patch.pixel] = colour[c] + none;
    transmittances[place] = through + none;
    last[place] = end;
}

// Adds to sums[item]: u, a, b (3 each), opacity, then the signals' gradient.
template <int CHANNELS, int HALVES>
__global__ void __launch_bounds__(PATCH_THREADS)
    composite_tiles_backward(Problem problem, const float* __restrict__ signals, State state,
                             const float* __restrict__ by_image, const float* __restrict__ by_transmittance,
                             const float* __restrict__ transmittances, const int32_t* __restrict__ last,
                             float* __restrict__ sums) {
    using Walk = Window<CHANNELS, HALVES, true>;
    constexpr int COUNT = LANES<HALVES>;
    __shared__ typename Walk::Room rooms[WARPS];
    auto& room = rooms[threadIdx.x / 32];
    const Patch<HALVES> patch(problem, state, room.box);
    if (!patch.count) return;
    const int lane = threadIdx.x % 32, channels = int(problem.channels);
    const bool second = lane >= COUNT;
    const int64_t size = problem.height * problem.width, place = patch.receiver * size + patch.pixel;
    float by_colour[CHANNELS];
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c)
        by_colour[c] = patch.inside && c < channels
                           ? by_image[(patch.receiver * channels + c) * size + patch.pixel] : 0.0f;
    float through = patch.inside ? transmittances[place] : 1.0f;
    float behind = patch.inside && by_transmittance ? by_transmittance[place] * through : 0.0f;
    const int32_t end = patch.inside ? last[place] : 0;
    const int32_t furthest = largest_of<COUNT>(end), final = (furthest + 31) / 32 * 32 - 32;
    Walk window(problem, state, patch, signals, room);
    window.expect(final >= 0 && final + lane < furthest, final + lane);
    window.fetch(final >= 32, final - 32 + lane);
    for (int32_t from = final; from >= 0; from -= 32) {
        window.take(from);
        window.fetch(from >= 64, from - 64 + lane);
        while (window.ready(from == 0)) {
            int which[TOGETHER];
            Opaque<float> seen[TOGETHER];
            window.evaluate(patch.ray, which, seen);  // the first half takes the one further away
#pragma unroll
            for (int q = 0; q < TOGETHER; ++q) {
                const int k = which[q];
                auto& o = seen[q];
                o.alpha = room.places[k] < end ? o.alpha : 0.0f;
                if (!__any_sync(ALL, o.alpha > 0)) continue;
                const float* signal = window.signal(k);
                float emitted = 0;
#pragma unroll
                for (int c = 0; c < CHANNELS; ++c)
                    if (c < channels) emitted += by_colour[c] * signal[c];
                float weight, by_alpha;
                if constexpr (HALVES == 1) {
                    weight = composite_backward(o.alpha, emitted, through, behind, by_alpha);
                } else {
                    const float alpha = from_other_half(o.alpha), other = from_other_half(emitted);
                    float by_alpha_a, by_alpha_b;
                    const float weight_a = composite_backward(second ? alpha : o.alpha, second ? other : emitted,
                                                              through, behind, by_alpha_a);
                    const float weight_b = composite_backward(second ? o.alpha : alpha, second ? emitted : other,
                                                              through, behind, by_alpha_b);
                    weight = second ? weight_b : weight_a;
                    by_alpha = second ? by_alpha_b : by_alpha_a;
                }
                const auto by = opaque_backward(room.footprints[k], o, by_alpha);
                const float* w = patch.ray;
                float* sum = sums + int64_t(room.items[k]) * (10 + channels);
                float values[16] = {by.u * w[0], by.u * w[1], by.u * w[2], by.a * w[0], by.a * w[1],
                                    by.a * w[2], by.b * w[0], by.b * w[1], by.b * w[2], by.opacity};
#pragma unroll
                for (int begun = 0; begun < 10 + CHANNELS; begun += 16) {
                    if (begun >= 10 + channels) break;
#pragma unroll
                    for (int i = 0; i < 16; ++i) {
                        const int c = begun + i - 10;
                        if (c >= 0) values[i] = c < CHANNELS ? weight * by_colour[c < CHANNELS ? c : 0] : 0.0f;
                    }
                    const float total = sixteen_sums<COUNT>(values);
                    const int slot = begun + lane % 16;
                    if (total != 0 && slot < 10 + channels && lane % COUNT < 16) atomicAdd(sum + slot, total);
                }
            }
            window.drop();
        }
    }
}

constexpr int GATHER_THREADS = 128;

// From the sums of every item to the parameters: one thread a Gaussian, its receivers in turn.
__global__ void __launch_bounds__(GATHER_THREADS)
    gather(Problem problem, Scene scene, State state, const float* sums, float* by_means, float* by_quaternions,
           float* by_scales, float* by_opacities, float* by_signals, float* by_receivers, float* by_rotations,
           bool poses) {
    __shared__ float poses_of[GATHER_THREADS / 16][12];
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    const int channels = int(problem.channels), lane = threadIdx.x % 16;
    const bool inside = i < problem.gaussians;
    const float none = state.status[1] ? __int_as_float(0x7fc00000) : 0.0f;
    GaussianGradient<float> all = {};
    float by_opacity = 0;
    if (inside)
        for (int c = 0; c < channels; ++c) by_signals[i * channels + c] = none;
    for (int64_t r = 0; r < problem.receivers; ++r) {
        GaussianGradient<float> g = {};
        if (inside) {
            const float* sum = sums + (r * problem.gaussians + i) * (10 + channels);
            const float* axes = scene.rotations + 9 * r;
            const auto p = project(scene.means + 3 * i, scene.quaternions + 4 * i, scene.scales + 3 * i,
                                   scene.opacities[i], scene.receivers + 3 * r, axes, float(problem.nearest),
                                   float(problem.blur));
            if (p.visible) {
                const FootprintGradient<float> by_footprint = {
                    {sum[0], sum[1], sum[2]}, {sum[3], sum[4], sum[5]}, {sum[6], sum[7], sum[8]}, sum[9]};
                g = project_backward(scene.quaternions + 4 * i, scene.scales + 3 * i, axes, p, by_footprint);
                by_opacity += sum[9];
                for (int c = 0; c < channels; ++c) by_signals[i * channels + c] += sum[10 + c];
            }
            for (int d = 0; d < 3; ++d) all.mean[d] += g.mean[d];
            for (int d = 0; d < 4; ++d) all.quaternion[d] += g.quaternion[d];
            for (int d = 0; d < 3; ++d) all.scale[d] += g.scale[d];
        }
        if (!poses) continue;  // the same for every thread
        float values[16] = {-g.mean[0], -g.mean[1], -g.mean[2]};
        for (int d = 0; d < 9; ++d) values[3 + d] = g.axes[d];
        const float total = sixteen_sums<16>(values);
        if (lane < 12) poses_of[threadIdx.x / 16][lane] = total;
        __syncthreads();
        if (threadIdx.x < 12) {
            float whole = none;
            for (int half = 0; half < GATHER_THREADS / 16; ++half) whole += poses_of[half][threadIdx.x];
            const int d = threadIdx.x;
            atomicAdd(d < 3 ? by_receivers + 3 * r + d : by_rotations + 9 * r + d - 3, whole);
        }
        __syncthreads();
    }
    if (!inside) return;
    for (int d = 0; d < 3; ++d) by_means[3 * i + d] = all.mean[d] + none;
    for (int d = 0; d < 4; ++d) by_quaternions[4 * i + d] = all.quaternion[d] + none;
    for (int d = 0; d < 3; ++d) by_scales[3 * i + d] = all.scale[d] + none;
    by_opacities[i] = by_opacity + none;
}

}  // namespace sphere
