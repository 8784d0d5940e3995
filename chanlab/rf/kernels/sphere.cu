// `rasterize_sphere` on CUDA: launchers, plain C. Nothing here waits for the device, so that calls can be captured into
// a graph. Each returns a cudaError_t.
#include "sphere_tiles.cuh"

#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>
#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>

#include <type_traits>

namespace {

using namespace sphere;

constexpr int THREADS = 128;

unsigned blocks(int64_t threads) { return unsigned((threads + THREADS - 1) / THREADS); }

// Makes the tensors' device the current one while a launcher runs.
struct OnDevice {
    int before = 0;
    explicit OnDevice(int device) {
        cudaGetDevice(&before);
        cudaSetDevice(device);
    }
    ~OnDevice() { cudaSetDevice(before); }
};

int bits_for(uint64_t largest) {
    int bits = 1;
    while (largest >> bits) ++bits;
    return bits;
}

// Memory of the forward pass alone, cut from one piece; with no piece it counts bytes.
struct Scratch {
    uint32_t *distances, *sorted_distances, *tiles, *sorted_tiles;
    int32_t *numbers, *counts, *owners;
    ushort4* ranges;
    void* cub;
    size_t cub_bytes, bytes;

    Scratch(void* memory, int64_t items, int64_t capacity, size_t for_cub) {
        char* at = static_cast<char*>(memory);
        size_t used = 0;
        const auto take = [&](size_t size) {
            void* piece = at + used;
            used += (size + 255) / 256 * 256;
            return piece;
        };
        distances = static_cast<uint32_t*>(take(4 * items));
        sorted_distances = static_cast<uint32_t*>(take(4 * items));
        numbers = static_cast<int32_t*>(take(4 * items));
        counts = static_cast<int32_t*>(take(4 * items));
        ranges = static_cast<ushort4*>(take(8 * items));
        tiles = static_cast<uint32_t*>(take(4 * capacity));
        sorted_tiles = static_cast<uint32_t*>(take(4 * capacity));
        owners = static_cast<int32_t*>(take(4 * capacity));
        cub_bytes = for_cub;
        cub = take(for_cub);
        bytes = used;
    }
};

cudaError_t sort_items(void* memory, size_t& bytes, const Scratch& s, const State& state, int64_t items,
                       cudaStream_t stream) {
    return cub::DeviceRadixSort::SortPairs(memory, bytes, s.distances, s.sorted_distances, s.numbers, state.order,
                                           int(items), 0, 32, stream);
}

cudaError_t count_pairs(void* memory, size_t& bytes, const Scratch& s, const State& state, int64_t items,
                        cudaStream_t stream) {
    const auto counts = thrust::make_transform_iterator(thrust::counting_iterator<int64_t>(0),
                                                        CountOf{s.counts, state.order});
    return cub::DeviceScan::InclusiveSum(memory, bytes, counts, state.ends, int(items), stream);
}

cudaError_t sort_pairs(void* memory, size_t& bytes, const Scratch& s, const State& state, int64_t capacity,
                       int64_t tiles, cudaStream_t stream) {
    return cub::DeviceRadixSort::SortPairs(memory, bytes, s.tiles, s.sorted_tiles, s.owners, state.members,
                                           int(capacity), 0, bits_for(uint64_t(tiles)), stream);
}

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

// Bytes of scratch memory that a forward pass needs, in `bytes`; launches nothing.
extern "C" int sphere_cuda_scratch(const sphere::Problem* problem, int64_t capacity, int device, int64_t* bytes) {
    const OnDevice on(device);
    const int64_t items = problem->gaussians * problem->receivers;
    const Scratch scratch(nullptr, items, capacity, 0);
    const State state(nullptr, items, capacity);
    size_t most = 0, need = 0;
    cudaError_t code = sort_items(nullptr, need, scratch, state, items, nullptr);
    most = need;
    if (code == cudaSuccess) code = count_pairs(nullptr, need, scratch, state, items, nullptr);
    most = need > most ? need : most;
    if (code == cudaSuccess) code = sort_pairs(nullptr, need, scratch, state, capacity, all_tiles(*problem), nullptr);
    most = need > most ? need : most;
    *bytes = int64_t(Scratch(nullptr, items, capacity, most).bytes);
    return code;
}

// in: means, quaternions, scales, opacities, signals, receivers, rotations; out: image, transmittance, radius, weight and
// peak (both null: not asked for), last, state. One Gaussian, receiver and pair at least; counts of items and pairs below
// 2^31.
extern "C" int sphere_cuda_forward(const sphere::Problem* problem, int64_t capacity, int device, const void* const* in,
                                   void* const* out, void* memory, int64_t bytes, cudaStream_t stream) {
    const OnDevice on(device);
    const int64_t items = problem->gaussians * problem->receivers, tiles = all_tiles(*problem);
    const State state(out[6], items, capacity);
    Scratch scratch(memory, items, capacity, 0);
    scratch.cub_bytes = size_t(bytes) - scratch.bytes;
    const Scene scene = scene_of(in);
    const auto to = [out](int k) { return static_cast<float*>(out[k]); };

    project_items<<<blocks(items), THREADS, 0, stream>>>(*problem, scene, state, scratch.distances, scratch.numbers,
                                                         scratch.ranges, scratch.counts, to(2));
    cudaError_t code = sort_items(scratch.cub, scratch.cub_bytes, scratch, state, items, stream);
    if (code != cudaSuccess) return code;
    code = count_pairs(scratch.cub, scratch.cub_bytes, scratch, state, items, stream);
    if (code != cudaSuccess) return code;
    make_pairs<<<blocks(capacity), THREADS, 0, stream>>>(*problem, state, scratch.ranges, capacity, scratch.tiles,
                                                         scratch.owners);
    code = sort_pairs(scratch.cub, scratch.cub_bytes, scratch, state, capacity, tiles, stream);
    if (code != cudaSuccess) return code;
    find_starts<<<blocks(capacity), THREADS, 0, stream>>>(state, scratch.sorted_tiles, capacity, tiles);
    if (out[3]) {
        cudaMemsetAsync(out[3], 0, 4 * items, stream);
        cudaMemsetAsync(out[4], 0, 4 * items, stream);
    }
    with_channels(problem->channels, [&](auto bound) {
        composite_tiles<decltype(bound)::value><<<unsigned(tiles), TILE_PIXELS, 0, stream>>>(
            *problem, scene.signals, state, to(0), to(1), static_cast<int32_t*>(out[5]), to(3), to(4));
    });
    return cudaGetLastError();
}

// in: as above, then gradients by image and transmittance, transmittance, last, state; out: gradients by the seven
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
    with_channels(problem->channels, [&](auto bound) {
        composite_tiles_backward<decltype(bound)::value><<<unsigned(all_tiles(*problem)), TILE_PIXELS, 0, stream>>>(
            *problem, scene.signals, state, at(7), at(8), at(9), static_cast<const int32_t*>(in[10]),
            static_cast<float*>(sums));
    });
    gather<<<blocks(problem->gaussians), THREADS, 0, stream>>>(*problem, scene, state, static_cast<float*>(sums), to(0),
                                                               to(1), to(2), to(3), to(4), to(5), to(6), poses != 0);
    return cudaGetLastError();
}

extern "C" const char* sphere_cuda_error(int code) { return cudaGetErrorString(cudaError_t(code)); }
