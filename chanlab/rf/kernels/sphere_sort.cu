// Sorting of many keys by radix, with CUB, in place of `sort_chunks` and `merge_runs`. A library of its own: CUB takes as
// long to compile as all kernels of `sphere.cu`.
#include <cub/device/device_radix_sort.cuh>

#include <cstdint>

// Sorts `count` keys by their bits from `first` up to, not including, `last`; others keep their order. The sorted keys lie
// in `keys` or in `other`, as `sorted` tells. Without memory it only tells how many bytes of it are wanted. Returns a
// cudaError_t.
extern "C" int sphere_sort_keys(void* memory, size_t* bytes, uint64_t* keys, uint64_t* other, int32_t count, int first,
                                int last, cudaStream_t stream, uint64_t** sorted) {
    cub::DoubleBuffer<uint64_t> both(keys, other);
    const cudaError_t code = cub::DeviceRadixSort::SortKeys(memory, *bytes, both, count, first, last, stream);
    *sorted = both.Current();
    return code;
}
