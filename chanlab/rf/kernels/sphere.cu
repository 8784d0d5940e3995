// `rasterize_sphere` on CUDA: launchers, plain C. Nothing here waits for the device, so that calls can be captured into
// a graph. Each returns a cudaError_t.
#include "sphere_tiles.cuh"

#include <type_traits>
#include <utility>

namespace {

using namespace sphere;

unsigned blocks(int64_t threads, int size) { return unsigned(parts(threads, size)); }

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

// Calls f with how a warp holds its patch, and with a bound on the channels, both known to the compiler: 10 + bound fills
// sixteens in the backward pass, or nearly.
template <class F>
void with_patches(int64_t tiles, int64_t channels, F f) {
    const auto with = [&](auto bound) {
        if (tiles < MANY_TILES)
            f(bound, std::integral_constant<int, 2>());
        else
            f(bound, std::integral_constant<int, 1>());
    };
    if (channels <= 2)
        with(std::integral_constant<int, 2>());
    else if (channels <= 6)
        with(std::integral_constant<int, 6>());
    else if (channels <= 22)
        with(std::integral_constant<int, 22>());
    else
        with(std::integral_constant<int, 38>());
}

// Blocks of patches: tiles have a multiple of WARPS.
template <int HALVES>
unsigned patch_blocks(int64_t tiles) {
    return unsigned(tiles * (TILE_PIXELS / LANES<HALVES> / WARPS));
}

}  // namespace

// `sphere_sort_keys` of sphere_sort.cu.
using SortKeys = int(void* memory, size_t* bytes, uint64_t* keys, uint64_t* other, int32_t count, int first, int last,
                     cudaStream_t stream, uint64_t** sorted);

// What the first part of a forward pass is given. One Gaussian, receiver and pair at least; counts of items and pairs below
// 2^31.
struct ListsCall {
    sphere::Problem problem;
    int64_t capacity, device;
    const void* in[7];  // means, quaternions, scales, opacities, signals, receivers, rotations
    void *state, *scratch;
    float *radii, *weights, *peaks;  // the last two null: not asked for
    int64_t* told;  // null, or memory of the host that the device may write: the count of pairs is left there
    SortKeys* sort;  // null: by `sort_chunks` and `merge_runs`
    size_t sort_bytes;
    cudaStream_t stream;
};

// What the second part is given.
struct CompositeCall {
    sphere::Problem problem;
    int64_t capacity, device;
    const float* signals;
    void* state;
    float *weights, *peaks, *image, *transmittances;
    cudaStream_t stream;
};

// What a backward pass is given. Without `poses` the last two gradients are zero.
struct BackwardCall {
    sphere::Problem problem;
    int64_t capacity, device, poses;
    const void* in[7];
    const float *by_image, *by_transmittances, *transmittances;  // the second null: zero
    void* state;
    float* out[7];  // gradients by the inputs
    float* sums;    // items * (10 + channels)
    cudaStream_t stream;
};

extern "C" int sphere_cuda_lists(const ListsCall* call) {
    const OnDevice on(int(call->device));
    const Problem& problem = call->problem;
    const cudaStream_t stream = call->stream;
    const int64_t receivers = problem.receivers, items = problem.gaussians * receivers, tiles = all_tiles(problem);
    const State state(call->state, items, call->capacity, tiles);
    const Scene scene = scene_of(call->in);
    const int32_t gaussians = int32_t(problem.gaussians);
    const unsigned item_blocks = unsigned(receivers) * blocks(gaussians, ITEM_THREADS);
    const unsigned chunks = unsigned(receivers) * blocks(gaussians, CHUNK);
    const unsigned merge_blocks = unsigned(receivers) * blocks(gaussians, MERGE_THREADS);
    const unsigned sum_blocks = unsigned(receivers) * blocks(tiles / receivers, 32);
    const Scratch scratch(call->scratch, problem, item_blocks, tiles);

    project_items<<<item_blocks, ITEM_THREADS, 0, stream>>>(problem, scene, state, scratch, call->radii, call->weights,
                                                            call->peaks);
    uint64_t *order = scratch.keys, *other = scratch.merged;
    if (call->sort) {
        size_t bytes = call->sort_bytes;
        const int last = scratch.distance_end + bits(receivers);
        if (const int code = call->sort(scratch.more, &bytes, order, other, int32_t(items), scratch.gaussian_bits, last,
                                        stream, &order))
            return code;
    } else {
        sort_chunks<<<chunks, SORT_THREADS, 0, stream>>>(gaussians, scratch.keys);
        const int32_t fan = gaussians <= 2 * FAN * CHUNK ? 2 * FAN : FAN;
        for (int64_t run = CHUNK; run < gaussians; run *= fan) {
            merge_runs<<<merge_blocks, MERGE_THREADS, 0, stream>>>(gaussians, int32_t(run), fan, order, other);
            std::swap(order, other);
        }
    }
    count_pairs<<<item_blocks, ITEM_THREADS, 0, stream>>>(problem, scratch, order);
    find_rooms<<<sum_blocks, SUM_THREADS, 0, stream>>>(problem, state, scratch);
    write_lists<<<item_blocks, ITEM_THREADS, 0, stream>>>(problem, state, scratch, order, call->capacity, call->told);
    return cudaGetLastError();
}

extern "C" int sphere_cuda_composite(const CompositeCall* call) {
    const OnDevice on(int(call->device));
    const Problem& problem = call->problem;
    const cudaStream_t stream = call->stream;
    const int64_t tiles = all_tiles(problem);
    const State state(call->state, problem.gaussians * problem.receivers, call->capacity, tiles);
    with_patches(tiles, problem.channels, [&](auto bound, auto halves) {
        constexpr int CHANNELS = decltype(bound)::value, HALVES = decltype(halves)::value;
        composite_tiles<CHANNELS, HALVES><<<patch_blocks<HALVES>(tiles), PATCH_THREADS, 0, stream>>>(
            problem, call->signals, state, call->image, call->transmittances, call->weights, call->peaks);
    });
    return cudaGetLastError();
}

extern "C" int sphere_cuda_backward(const BackwardCall* call) {
    const OnDevice on(int(call->device));
    const Problem& problem = call->problem;
    const cudaStream_t stream = call->stream;
    const int64_t items = problem.gaussians * problem.receivers, tiles = all_tiles(problem);
    const State state(call->state, items, call->capacity, tiles);
    const Scene scene = scene_of(call->in);
    float* const* to = call->out;
    cudaMemsetAsync(call->sums, 0, 4 * items * (10 + problem.channels), stream);
    with_patches(tiles, problem.channels, [&](auto bound, auto halves) {
        constexpr int CHANNELS = decltype(bound)::value, HALVES = decltype(halves)::value;
        composite_tiles_backward<CHANNELS, HALVES><<<patch_blocks<HALVES>(tiles), PATCH_THREADS, 0, stream>>>(
            problem, scene.signals, state, call->by_image, call->by_transmittances, call->transmittances, call->sums,
            to[5], to[6]);
    });
    gather<<<blocks(problem.gaussians, GATHER_THREADS), GATHER_THREADS, 0, stream>>>(
        problem, scene, state, call->sums, to[0], to[1], to[2], to[3], to[4], to[5], to[6], call->poses != 0);
    return cudaGetLastError();
}

extern "C" const char* sphere_cuda_error(int code) { return cudaGetErrorString(cudaError_t(code)); }
