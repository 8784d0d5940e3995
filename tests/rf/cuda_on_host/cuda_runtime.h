// Runs CUDA kernels on the CPU, for tests of their results: blocks one after another, the threads of a block as fibres
// that take turns at every __syncthreads(). Threads run in either order, so that a missing barrier shows as a difference.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <vector>

#define __global__ static
#define __device__
#define __host__
#define __shared__ static
#define __launch_bounds__(...)

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};

using cudaError_t = int;
inline cudaError_t cudaGetLastError() { return 0; }
inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }

inline dim3 threadIdx, blockIdx;

namespace cuda_on_host {

inline ucontext_t scheduler;
inline std::vector<ucontext_t> fibres;
inline std::vector<char> alive;
inline const std::function<void()>* body;

inline void enter() {
    (*body)();
    alive[threadIdx.x] = 0;
}

inline void launch(int64_t blocks, int threads, const std::function<void()>& kernel) {
    constexpr size_t STACK = 1 << 16;
    const bool backwards = std::getenv("CUDA_ON_HOST_BACKWARDS") != nullptr;
    std::vector<char> stacks(STACK * threads);
    body = &kernel;
    for (int64_t block = 0; block < blocks; ++block) {
        fibres.assign(threads, {});
        alive.assign(threads, 1);
        for (int t = 0; t < threads; ++t) {
            getcontext(&fibres[t]);
            fibres[t].uc_stack.ss_sp = &stacks[STACK * t];
            fibres[t].uc_stack.ss_size = STACK;
            fibres[t].uc_link = &scheduler;
            makecontext(&fibres[t], enter, 0);
        }
        for (bool left = true; left;) {
            left = false;
            for (int i = 0; i < threads; ++i) {
                const int t = backwards ? threads - 1 - i : i;
                if (!alive[t]) continue;
                threadIdx.x = t;
                blockIdx.x = unsigned(block);
                swapcontext(&scheduler, &fibres[t]);
                left = left || alive[t];
            }
        }
    }
}

}  // namespace cuda_on_host

inline void __syncthreads() {
    const unsigned t = threadIdx.x;
    swapcontext(&cuda_on_host::fibres[t], &cuda_on_host::scheduler);
}

#define LAUNCH(kernel, blocks, threads, stream, ...) \
    cuda_on_host::launch(blocks, threads, [&] { kernel(__VA_ARGS__); })
