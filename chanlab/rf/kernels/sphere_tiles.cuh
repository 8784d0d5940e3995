// Compositing of tiles, forward and backward; from sums to parameters.
#pragma once

#include "sphere_walk.cuh"

namespace sphere {

template <int CHANNELS, int HALVES>
__global__ void __launch_bounds__(PATCH_THREADS)
    composite_tiles(Problem problem, const float* __restrict__ signals, State state, float* __restrict__ image,
                    float* __restrict__ transmittances, float* weights, float* peaks) {
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
                    if (Walk::SIGNALS || c < channels) colour[c] += weight * signal[c];
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
    state.last[place] = end;
}

// Adds to sums[item]: u, a, b (3 each), opacity, then the signals' gradient. What `gather` adds to begins at zero.
template <int CHANNELS, int HALVES>
__global__ void __launch_bounds__(PATCH_THREADS)
    composite_tiles_backward(Problem problem, const float* __restrict__ signals, State state,
                             const float* __restrict__ by_image, const float* __restrict__ by_transmittance,
                             const float* __restrict__ transmittances, float* __restrict__ sums, float* by_receivers,
                             float* by_rotations) {
    using Walk = Window<CHANNELS, HALVES, true>;
    constexpr int COUNT = LANES<HALVES>;
    __shared__ typename Walk::Room rooms[WARPS];
    auto& room = rooms[threadIdx.x / 32];
    const int64_t thread = int64_t(blockIdx.x) * PATCH_THREADS + threadIdx.x;
    if (thread < 3 * problem.receivers) by_receivers[thread] = 0;  // tiles have more pixels than that
    if (thread < 9 * problem.receivers) by_rotations[thread] = 0;
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
    const int32_t end = patch.inside ? state.last[place] : 0;
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
                    if (Walk::SIGNALS || c < channels) emitted += by_colour[c] * signal[c];
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
