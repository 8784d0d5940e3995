// What `sphere_sort.cu` uses of CUB, on the CPU. Passes of 8 bits go to and fro between the buffers, as CUB's do.
#pragma once

#include <algorithm>
#include <cstddef>

using cudaStream_t = void*;

namespace cub {

template <class T>
struct DoubleBuffer {
    T* buffers[2];
    int selector = 0;
    DoubleBuffer(T* a, T* b) : buffers{a, b} {}
    T* Current() const { return buffers[selector]; }
};

struct DeviceRadixSort {
    template <class T>
    static cudaError_t SortKeys(void* memory, size_t& bytes, DoubleBuffer<T>& keys, int count, int first, int last,
                                cudaStream_t) {
        if (!memory) {
            bytes = 1001;
            return 0;
        }
        if (bytes < 1001) return 1;
        std::fill_n(static_cast<char*>(memory), bytes, char(0x5a));
        for (int bit = first; bit < last; bit += 8) {
            T* const given = keys.Current();
            keys.selector ^= 1;
            std::copy_n(given, count, keys.Current());
            std::stable_sort(keys.Current(), keys.Current() + count, [=](T a, T b) {
                const T mask = (T(1) << std::min(8, last - bit)) - 1;
                return (a >> bit & mask) < (b >> bit & mask);
            });
            std::fill_n(given, count, ~T(0));
        }
        return 0;
    }
};

}  // namespace cub
