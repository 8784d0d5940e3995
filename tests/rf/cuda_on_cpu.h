// Enough of CUDA to run kernels on a CPU, one block after another: a thread is a fiber, a warp operation a barrier at
// which 32 of them meet. A warp runs until all its lanes wait for other warps, and every other block runs backwards, its
// last lane first: a missing barrier shows as a difference. For tests alone; slow, and blind to what only hardware shows
// (atomics that are none, too little of a resource, a missing barrier between two kernels' streams).
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(n)

struct ushort4 {
    uint16_t x, y, z, w;
};
inline ushort4 make_ushort4(int x, int y, int z, int w) {
    return {uint16_t(x), uint16_t(y), uint16_t(z), uint16_t(w)};
}

using cudaStream_t = void*;
using cudaError_t = int;
inline cudaError_t cudaGetDevice(int* device) { return *device = 0; }
inline cudaError_t cudaSetDevice(int) { return 0; }
inline cudaError_t cudaGetLastError() { return 0; }
inline const char* cudaGetErrorString(cudaError_t) { return "emulated"; }
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
    std::memset(to, value, bytes);
    return 0;
}

namespace emulation {

struct Index {
    unsigned x;
};

struct Warp {
    uint32_t slots[32];
    int waiting = 0, turn = 0;
};

struct Fiber {
    ucontext_t context;  // where it starts
    jmp_buf place;       // and goes on
    std::vector<char> stack;
    Index thread;
    bool started, done;
};

inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline jmp_buf scheduler;
inline Fiber* current;
inline Index block, block_size;
inline std::function<void()> kernel;

// Jumps, for switching contexts asks the kernel for its signals.
__attribute__((noinline)) inline void pass_on() {
    if (!_setjmp(current->place)) _longjmp(scheduler, 1);
}

__attribute__((noinline)) inline void resume() {
    if (_setjmp(scheduler)) return;
    if (current->started) _longjmp(current->place, 1);
    current->started = true;
    setcontext(&current->context);
}

inline void meet() {
    Warp& warp = warps[current->thread.x / 32];
    const int turn = warp.turn;
    if (++warp.waiting == 32) {
        warp.waiting = 0;
        ++warp.turn;
    }
    while (warp.turn == turn) pass_on();
}

// At which all threads of the block meet that have not returned.
inline int block_waiting, block_turn;
inline void meet_all() {
    const int turn = block_turn, living = int(std::count_if(fibers.begin(), fibers.end(), [](const Fiber& f) { return !f.done; }));
    if (++block_waiting == living) {
        block_waiting = 0;
        ++block_turn;
    }
    while (block_turn == turn) pass_on();
}

// Every lane gives a word and sees all 32.
template <class F>
auto together(uint32_t given, F use) {
    Warp& warp = warps[current->thread.x / 32];
    warp.slots[current->thread.x % 32] = given;
    meet();
    const auto result = use(warp.slots);
    meet();
    return result;
}

inline void enter() {
    kernel();
    current->done = true;
    pass_on();
}

// Runs a warp as far as it gets; how many of its threads ended.
inline int run(int w, int threads, bool backwards) {
    const int first = 32 * w, lanes = std::min(32, threads - first);
    int ended = 0;
    for (bool going = true; going;) {
        const int turn = warps[w].turn, together = block_turn;
        going = false;
        for (int i = 0; i < lanes; ++i) {
            Fiber& fiber = fibers[first + (backwards ? lanes - 1 - i : i)];
            if (fiber.done) continue;
            current = &fiber;
            resume();
            ended += fiber.done;
            going = going || fiber.done;
        }
        going = going || warps[w].turn != turn || block_turn != together;
    }
    return ended;
}

template <class F, class... Arguments>
void launch(unsigned blocks, int threads, F call, Arguments... arguments) {
    kernel = [=] { call(arguments...); };
    block_size = {unsigned(threads)};
    fibers.resize(threads);
    for (block.x = 0; block.x < blocks; ++block.x) {
        warps.assign((threads + 31) / 32, Warp());
        block_waiting = 0;
        for (int t = 0; t < threads; ++t) {
            Fiber& fiber = fibers[t];
            fiber.stack.resize(1 << 16);
            fiber.thread = {unsigned(t)};
            fiber.started = fiber.done = false;
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.data();
            fiber.context.uc_stack.ss_size = fiber.stack.size();
            fiber.context.uc_link = nullptr;
            makecontext(&fiber.context, enter, 0);
        }
        static bool backwards = false;
        backwards = !backwards;
        const int count = (threads + 31) / 32;
        for (int left = threads; left;) {
            const int before = left, turn = block_turn;
            for (int i = 0; i < count; ++i) left -= run(backwards ? count - 1 - i : i, threads, backwards);
            if (left == before && block_turn == turn) {
                std::fprintf(stderr, "emulation: a thread waits for others that never come\n");
                std::abort();
            }
        }
    }
}

template <class To, class From>
To bits(From from) {
    To to;
    static_assert(sizeof(to) == sizeof(from));
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

}  // namespace emulation

#define threadIdx (emulation::current->thread)
#define blockIdx (emulation::block)
#define blockDim (emulation::block_size)

using std::max;
using std::min;

inline void all_of(unsigned mask) {
    if (mask == 0xffffffffu) return;
    std::fprintf(stderr, "emulation: a warp operation of some lanes\n");
    std::abort();
}

template <class T>
T __shfl_sync(unsigned mask, T x, int from) {
    all_of(mask);
    if constexpr (sizeof(T) == 8) {
        const uint64_t word = emulation::bits<uint64_t>(x);
        const uint64_t low = __shfl_sync(mask, uint32_t(word), from), high = __shfl_sync(mask, uint32_t(word >> 32), from);
        return emulation::bits<T>(high << 32 | low);
    } else {
        return emulation::together(emulation::bits<uint32_t>(x), [=](const uint32_t* s) { return emulation::bits<T>(s[from]); });
    }
}
template <class T>
T __shfl_xor_sync(unsigned mask, T x, int m) {
    return __shfl_sync(mask, x, int(threadIdx.x % 32) ^ m);
}
inline unsigned __ballot_sync(unsigned mask, bool p) {
    all_of(mask);
    return emulation::together(p, [](const uint32_t* s) {
        unsigned all = 0;
        for (int i = 0; i < 32; ++i) all |= s[i] << i;
        return all;
    });
}
inline bool __any_sync(unsigned mask, bool p) { return __ballot_sync(mask, p); }
inline void __syncwarp() { emulation::meet(); }
inline void __syncthreads() { emulation::meet_all(); }
inline int __ffs(unsigned x) { return __builtin_ffs(int(x)); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline uint32_t __float_as_uint(float x) { return emulation::bits<uint32_t>(x); }
inline int __float_as_int(float x) { return emulation::bits<int>(x); }
inline float __int_as_float(int x) { return emulation::bits<float>(x); }
template <class T>
T __ldg(const T* p) {
    return *p;
}
inline float atomicAdd(float* to, float x) {
    const float before = *to;
    *to += x;
    return before;
}
inline int atomicAdd(int* to, int x) { return (*to += x) - x; }
inline unsigned long long atomicAdd(unsigned long long* to, unsigned long long x) { return (*to += x) - x; }
inline unsigned atomicOr(unsigned* to, unsigned x) {
    const unsigned before = *to;
    *to |= x;
    return before;
}
inline int atomicMax(int* to, int x) {
    const int before = *to;
    *to = std::max(before, x);
    return before;
}
