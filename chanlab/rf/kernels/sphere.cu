// `rasterize_sphere` on CUDA: launchers, plain C. Nothing here waits for the device, so that calls can be captured into
// a graph. Each returns a cudaError_t.
#include "sphere_tiles.cuh"

#include <type_traits>

namespace {

using namespace sphere;

unsigned blocks(int64_t threads, int size) { return unsigned((threads + size - 1) / size); }

// Threads that sort a chunk: all there may be for few tiles, fewer where blocks fill the device.
int sort_threads(int64_t tiles) { return tiles < MANY_TILES ? SORT_THREADS : SORT_THREADS / 4; }

// Makes the tensors' device the current one while a launcher runs.
struct OnDevice {
    int before = 0;
    explicit OnDevice(int device) {
        cudaGetDevice(&before);
        cudaSetDevice(device);
    }
    ~OnDevice() { cudaSetDevice(before); }
};

Scene scene_of(const void* const* in) {
    const auto at = [in](int k) { return static_cast<const float*>(in[k]); };
    return {at(0), at(1), at(2), at(3), at(4), at(5), at(6)};
}

int64_t all_tiles(const Problem& p) { return p.receivers * tiles_across(p) * tiles_up(p); }

// Calls f with a compile-time bound on the channels: 10 + bound fills sixteens in the backward pass, or nearly.
template <class F>
void with_channels(int64_t channels, F f) {
    if (channels <= 2)
        f(std::integral_constant<int, 2>());
    else if (channels <= 6)
        f(std::integral_constant<int, 6>());
    else if (channels <= 22)
        f(std::integral_constant<int, 22>());
    else
        f(std::integral_constant<int, 38>());
}

}  // namespace

// in: means, quaternions, scales, opacities, signals, receivers, rotations; out: image, transmittance, radius, weight and
// peak (both null: not asked for), last, state. `told` is null or memory of the host that the device may write: the count
// of pairs is left there. One Gaussian, receiver and pair at least; counts of items and pairs below 2^31.
extern "C" int sphere_cuda_forward(const sphere::Problem* problem, int64_t capacity, int device, const void* const* in,
                                   void* const* out, void* memory, int64_t* told, cudaStream_t stream) {
    const OnDevice on(device);
    const int64_t items = problem->gaussians * problem->receivers, tiles = all_tiles(*problem);
    const State state(out[6], items, capacity);
    const Scratch scratch(memory, items, capacity, tiles);
    const Scene scene = scene_of(in);
    const auto to = [out](int k) { return static_cast<float*>(out[k]); };
    const unsigned parts = unsigned(problem->receivers) * blocks(problem->gaussians, ITEM_THREADS);
    const unsigned chunks = unsigned(tiles + capacity / CHUNK);
    const int threads = sort_threads(tiles);

    cudaMemsetAsync(scratch.counts, 0, 4 * tiles, stream);
    project_items<<<parts, ITEM_THREADS, 0, stream>>>(*problem, scene, state, scratch, to(2));
    scan_tiles<<<1, SCAN_THREADS, 0, stream>>>(state, scratch, tiles, capacity, told);
    scatter_pairs<<<parts, ITEM_THREADS, 0, stream>>>(*problem, state, scratch);
    sort_chunks<<<chunks, threads, 0, stream>>>(state, scratch, int32_t(tiles));
    if (capacity > CHUNK) merge_chunks<<<chunks, MERGE_THREADS, 0, stream>>>(state, scratch, int32_t(tiles));
    if (out[3]) {
        cudaMemsetAsync(out[3], 0, 4 * items, stream);
        cudaMemsetAsync(out[4], 0, 4 * items, stream);
    }
    with_channels(problem->channels, [&](auto bound) {
        composite_tiles<decltype(bound)::value><<<unsigned(tiles * PATCHES / WARPS), PATCH_THREADS, 0, stream>>>(
            *problem, scene.signals, state, to(0), to(1), static_cast<int32_t*>(out[5]), to(3), to(4));
    });
    return cudaGetLastError();
}

// in: as above, then gradients by image and transmittance (null: zero), transmittance, last, state; out: gradients by the seven
// inputs; sums: memory for items * (10 + channels) floats. Without `poses` the last two gradients are zero.
extern "C" int sphere_cuda_backward(const sphere::Problem* problem, int64_t capacity, int device,
                                    const void* const* in, void* const* out, void* sums, int poses,
                                    cudaStream_t stream) {
    const OnDevice on(device);
    const int64_t items = problem->gaussians * problem->receivers;
    const State state(const_cast<void*>(in[11]), items, capacity);
    const Scene scene = scene_of(in);
    const auto at = [in](int k) { return static_cast<const float*>(in[k]); };
    const auto to = [out](int k) { return static_cast<float*>(out[k]); };
    cudaMemsetAsync(sums, 0, 4 * items * (10 + problem->channels), stream);
    cudaMemsetAsync(out[5], 0, 4 * 3 * problem->receivers, stream);
    cudaMemsetAsync(out[6], 0, 4 * 9 * problem->receivers, stream);
    const int64_t tiles = all_tiles(*problem);
    with_channels(problem->channels, [&](auto bound) {
        composite_tiles_backward<decltype(bound)::value><<<unsigned(tiles * PATCHES / WARPS), PATCH_THREADS, 0, stream>>>(
            *problem, scene.signals, state, at(7), at(8), at(9), static_cast<const int32_t*>(in[10]),
            static_cast<float*>(sums));
    });
    gather<<<blocks(problem->gaussians, GATHER_THREADS), GATHER_THREADS, 0, stream>>>(*problem, scene, state, static_cast<float*>(sums), to(0),
                                                               to(1), to(2), to(3), to(4), to(5), to(6), poses != 0);
    return cudaGetLastError();
}

extern "C" const char* sphere_cuda_error(int code) { return cudaGetErrorString(cudaError_t(code)); }
