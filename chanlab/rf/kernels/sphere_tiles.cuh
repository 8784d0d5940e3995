// Compositing of tiles. A warp holds 4 x 4 of a tile's pixels, each twice, and walks the tile's list on its own, 32
// footprints at a time; it evaluates only those that may reach its pixels, two at once, one in each half of the warp. A walk
// is a chain of waits rather than of arithmetic: the next 32 footprints are fetched while these are composited, and each
// half evaluates four at a time.
#pragma once

#include "sphere_lists.cuh"

namespace sphere {

constexpr int PATCH = 4, PATCHES = TILE_PIXELS / (PATCH * PATCH);  // of a tile
constexpr int WARPS = 4, PATCH_THREADS = 32 * WARPS;              // patches of a block, a warp each
constexpr int TOGETHER = 4;                                       // footprints that a half evaluates at a time

__device__ __forceinline__ int half_of_warp() { return threadIdx.x / 16 % 2; }

template <class T>
__device__ __forceinline__ T from_other_half(T x) {
    return __shfl_xor_sync(ALL, x, 16);
}

// Over the half of the warp.
__device__ __forceinline__ float half_sum(float x) {
#pragma unroll
    for (int m = 8; m; m /= 2) x += __shfl_xor_sync(ALL, x, m);
    return x;
}

template <class T>
__device__ __forceinline__ T half_max(T x) {
#pragma unroll
    for (int m = 8; m; m /= 2) x = max(x, __shfl_xor_sync(ALL, x, m));
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

// Sixteen sums over the half of the warp in 15 shuffles: its lane k returns that of value k.
__device__ __forceinline__ float sixteen_sums(float (&v)[16]) {
    fold<8>(v);
    fold<4>(v);
    fold<2>(v);
    fold<1>(v);
    return v[0];
}

// The pixel of a thread, and the cone around the pixels of its warp.
struct Patch {
    int64_t receiver, pixel;  // pixel of the receiver's image
    bool inside;
    float ray[3], middle[3], cosine, sine;
    int32_t first, count;  // the tile's list; empty if there was no room for it

    __device__ Patch(const Problem& problem, const State& state) {
        const int32_t across = tiles_across(problem), per_receiver = across * tiles_up(problem);
        const int32_t patch = blockIdx.x * WARPS + threadIdx.x / 32, whole = patch / PATCHES, part = patch % PATCHES;
        const int lane = threadIdx.x % 16;
        receiver = whole / per_receiver;
        const int32_t tile = whole - int32_t(receiver) * per_receiver;
        constexpr int patches = TILE_WIDTH / PATCH;
        const int32_t row = tile / across * TILE_HEIGHT + part / patches * PATCH + lane / PATCH;
        const int32_t column = tile % across * TILE_WIDTH + part % patches * PATCH + lane % PATCH;
        inside = row < problem.height && column < problem.width;
        pixel = int64_t(row) * problem.width + column;
        sphere::ray(problem, row, column, ray);
        // A pixel in the middle of the patch is as good as its centre.
        const int from = (PATCH / 2) * PATCH + PATCH / 2;
        for (int d = 0; d < 3; ++d) middle[d] = __shfl_sync(ALL, ray[d], from);
        cosine = -half_max(inside ? -dot(ray, middle) : -1.0f);
        cosine = fminf(cosine, 1.0f);
        sine = sqrtf(fmaxf(0.0f, 1.0f - cosine * cosine));
        first = state.starts[whole];
        count = state.status[1] ? 0 : state.starts[whole + 1] - first;
    }

    // False only if no pixel is within the footprint's radius.
    __device__ bool reached_by(const Footprint<float>& f) const {
        const float together = f.cosine * cosine - f.sine * sine, turned = f.sine * cosine + f.cosine * sine;
        return turned <= 0 || dot(f.u, middle) + 2e-6f >= together;
    }
};

// A warp's 32 footprints at hand, in shared memory, and the 32 after them, on their way into registers.
template <int CHANNELS>
struct Window {
    static constexpr bool SIGNALS = CHANNELS <= 6;  // else they are read where they lie

    struct Room {
        Footprint<float> footprints[32];
        float signals[SIGNALS ? 32 : 1][SIGNALS ? CHANNELS : 1];
        int32_t items[32];
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
    bool near;            // whether all of those at hand that may reach the patch end NEAR

    __device__ Window(const Problem& problem, const State& state, const Patch& patch, const float* signals, Room& room)
        : given(signals), footprints(state.footprints), members(state.members + patch.first),
          before(patch.receiver * problem.gaussians), channels(int(problem.channels)), room(room), next(),
          next_signals(), item(0), after(0), near(true) {}

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

    // Puts what was fetched at hand; which of it may reach the patch.
    __device__ unsigned take(const Patch& patch) {
        const int lane = threadIdx.x % 32;
        __syncwarp();
        bool reached = false;
        if (item >= 0) {
            room.footprints[lane] = next;
            room.items[lane] = item;
            if constexpr (SIGNALS) {
#pragma unroll
                for (int c = 0; c < CHANNELS; ++c)
                    if (c < channels) room.signals[lane][c] = next_signals[c];
            }
            reached = patch.reached_by(next);
        }
        const unsigned todo = __ballot_sync(ALL, reached);
        near = !__any_sync(ALL, reached && next.cosine <= float(NEAR_COSINE));
        __syncwarp();
        return todo;
    }

    // Evaluates footprints of those at hand for this half of the warp. A number below zero gives nothing and becomes that
    // of a footprint that is there.
    __device__ void evaluate(int (&which)[TOGETHER], int there, const float* ray, Opaque<float> (&seen)[TOGETHER]) const {
        bool none[TOGETHER];
#pragma unroll
        for (int q = 0; q < TOGETHER; ++q) {
            none[q] = which[q] < 0;
            which[q] = none[q] ? there : which[q];
        }
        if (near)
            evaluate_as<NEAR>(which, ray, seen);
        else
            evaluate_as<WHOLE>(which, ray, seen);
#pragma unroll
        for (int q = 0; q < TOGETHER; ++q) seen[q].alpha = none[q] ? 0.0f : seen[q].alpha;
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

template <int CHANNELS>
__global__ void __launch_bounds__(PATCH_THREADS)
    composite_tiles(Problem problem, const float* __restrict__ signals, State state, float* __restrict__ image,
                    float* __restrict__ transmittances, int32_t* __restrict__ last, float* weights, float* peaks) {
    __shared__ typename Window<CHANNELS>::Room rooms[WARPS];
    const Patch patch(problem, state);
    const int lane = threadIdx.x % 32, channels = int(problem.channels);
    const bool second = half_of_warp();
    const int64_t size = problem.height * problem.width;
    float colour[CHANNELS];
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) colour[c] = 0;
    float through = 1, open = patch.inside ? 1.0f : 0.0f;
    int32_t end = 0;
    Window<CHANNELS> window(problem, state, patch, signals, rooms[threadIdx.x / 32]);
    window.expect(lane < patch.count, lane);
    window.fetch(32 + lane < patch.count, 32 + lane);
    for (int32_t from = 0; from < patch.count; from += 32) {
        if (!__any_sync(ALL, open > 0)) break;
        unsigned todo = window.take(patch);
        window.fetch(from + 64 + lane < patch.count, from + 64 + lane);
        while (todo) {
            const int there = __ffs(todo) - 1;
            int which[TOGETHER], others[TOGETHER];
            Opaque<float> seen[TOGETHER];
#pragma unroll
            for (int q = 0; q < TOGETHER; ++q) {
                const int a = __ffs(todo) - 1;
                todo &= todo - 1;
                const int b = __ffs(todo) - 1;
                todo &= todo - 1;
                which[q] = second ? b : a;
                others[q] = second ? a : b;
            }
            window.evaluate(which, there, patch.ray, seen);
#pragma unroll
            for (int q = 0; q < TOGETHER; ++q) {
                const float mine = seen[q].alpha, other = from_other_half(mine);
                const float weight_a = composite(second ? other : mine, through, open);
                const float weight_b = composite(second ? mine : other, through, open);
                const float weight = second ? weight_b : weight_a;
                const int a = second ? others[q] : which[q], b = second ? which[q] : others[q];
                end = weight_b > 0 ? from + b + 1 : weight_a > 0 ? from + a + 1 : end;
                if ((!Window<CHANNELS>::SIGNALS || weights) && !__any_sync(ALL, weight > 0)) continue;
                const int k = which[q];
                const float* signal = window.signal(k);
#pragma unroll
                for (int c = 0; c < CHANNELS; ++c)
                    if (c < channels) colour[c] += weight * signal[c];
                if (weights) {
                    const float sum = half_sum(weight), most = half_max(weight);
                    if (lane % 16 == 0 && most > 0) {
                        atomicAdd(weights + window.room.items[k], sum);
                        atomicMax(reinterpret_cast<int*>(peaks) + window.room.items[k], __float_as_int(most));
                    }
                }
            }
        }
    }
    const float none = state.status[1] ? __int_as_float(0x7fc00000) : 0.0f;
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) colour[c] += from_other_half(colour[c]);
    if (!patch.inside || second) return;
    const int64_t place = patch.receiver * size + patch.pixel;
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c)
        if (c < channels) image[(patch.receiver * channels + c) * size + patch.pixel] = colour[c] + none;
    transmittances[place] = through + none;
    last[place] = end;
}

// Adds to sums[item]: u, a, b (3 each), opacity, then the signals' gradient.
template <int CHANNELS>
__global__ void __launch_bounds__(PATCH_THREADS)
    composite_tiles_backward(Problem problem, const float* __restrict__ signals, State state,
                             const float* __restrict__ by_image, const float* __restrict__ by_transmittance,
                             const float* __restrict__ transmittances, const int32_t* __restrict__ last,
                             float* __restrict__ sums) {
    __shared__ typename Window<CHANNELS>::Room rooms[WARPS];
    const Patch patch(problem, state);
    if (!patch.count) return;
    const int lane = threadIdx.x % 32, channels = int(problem.channels);
    const bool second = half_of_warp();
    const int64_t size = problem.height * problem.width, place = patch.receiver * size + patch.pixel;
    float by_colour[CHANNELS];
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c)
        by_colour[c] = patch.inside && c < channels
                           ? by_image[(patch.receiver * channels + c) * size + patch.pixel] : 0.0f;
    float through = patch.inside ? transmittances[place] : 1.0f;
    float behind = patch.inside && by_transmittance ? by_transmittance[place] * through : 0.0f;
    const int32_t end = patch.inside ? last[place] : 0;
    const int32_t furthest = half_max(end), final = (furthest + 31) / 32 * 32 - 32;
    Window<CHANNELS> window(problem, state, patch, signals, rooms[threadIdx.x / 32]);
    window.expect(final >= 0 && final + lane < furthest, final + lane);
    window.fetch(final >= 32, final - 32 + lane);
    for (int32_t from = final; from >= 0; from -= 32) {
        unsigned todo = window.take(patch);
        window.fetch(from >= 64, from - 64 + lane);
        while (todo) {
            const int there = 31 - __clz(todo);
            int which[TOGETHER];
            Opaque<float> seen[TOGETHER];
#pragma unroll
            for (int q = 0; q < TOGETHER; ++q) {  // the first half takes the one further away
                const int a = 31 - __clz(todo);
                todo &= ~(a < 0 ? 0u : 1u << a);
                const int b = 31 - __clz(todo);
                todo &= ~(b < 0 ? 0u : 1u << b);
                which[q] = second ? b : a;
            }
            window.evaluate(which, there, patch.ray, seen);
#pragma unroll
            for (int q = 0; q < TOGETHER; ++q) {
                const int k = which[q];
                auto& o = seen[q];
                o.alpha = from + k < end ? o.alpha : 0.0f;
                if (!__any_sync(ALL, o.alpha > 0)) continue;
                const float* signal = window.signal(k);
                float emitted = 0;
#pragma unroll
                for (int c = 0; c < CHANNELS; ++c)
                    if (c < channels) emitted += by_colour[c] * signal[c];
                const float alpha = from_other_half(o.alpha), other = from_other_half(emitted);
                float by_alpha_a, by_alpha_b;
                const float weight_a = composite_backward(second ? alpha : o.alpha, second ? other : emitted, through,
                                                          behind, by_alpha_a);
                const float weight_b = composite_backward(second ? o.alpha : alpha, second ? emitted : other, through,
                                                          behind, by_alpha_b);
                const float weight = second ? weight_b : weight_a;
                const auto by = opaque_backward(window.room.footprints[k], o, second ? by_alpha_b : by_alpha_a);
                const float* w = patch.ray;
                float* sum = sums + int64_t(window.room.items[k]) * (10 + channels);
                float values[16] = {by.u * w[0], by.u * w[1], by.u * w[2], by.a * w[0], by.a * w[1],
                                    by.a * w[2], by.b * w[0], by.b * w[1], by.b * w[2], by.opacity};
#pragma unroll
                for (int done = 0; done < 10 + CHANNELS; done += 16) {
                    if (done >= 10 + channels) break;
#pragma unroll
                    for (int i = 0; i < 16; ++i) {
                        const int c = done + i - 10;
                        if (c >= 0) values[i] = c < CHANNELS ? weight * by_colour[c < CHANNELS ? c : 0] : 0.0f;
                    }
                    const float total = sixteen_sums(values);
                    const int slot = done + lane % 16;
                    if (total != 0 && slot < 10 + channels) atomicAdd(sum + slot, total);
                }
            }
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
        const float total = sixteen_sums(values);
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
