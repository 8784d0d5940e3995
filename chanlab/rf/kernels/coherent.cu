// `coherent_sum` fused: phasors of a tile of paths are formed in shared memory and multiplied there, so that neither they
// nor the tensor over antennas, paths and tones ever reach the memory of the device. The same bits on every run: blocks
// write partial sums to places of their own, which a second kernel (or the caller) adds up in a fixed order.
#include <cuda_runtime.h>

#include "coherent.h"

namespace {

using namespace coherent;

constexpr double TWO_PI = 6.283185307179586476925;
constexpr int TILE = 32;   // paths
constexpr int PAIRS = 16;  // antenna pairs
constexpr int TONES = 64;  // subcarriers

struct Inputs {
    const Complex* gain;                // [batch, path]
    const double* delay;                // [batch, path]
    const double *departure, *arrival;  // [batch, 3, path]
    const double *tx, *rx;              // [batch, antenna, 3]
    const double* frequencies;          // [tone]
};

__host__ __device__ int64_t tiles(int64_t count, int64_t size) { return (count + size - 1) / size; }

// Tiles of paths [first, last) of one of `splits` blocks.
__device__ void share(const Problem& p, int64_t split, int64_t& first, int64_t& last) {
    const int64_t count = tiles(p.paths, TILE);
    first = split * count / p.splits;
    last = (split + 1) * count / p.splits;
}

// Inputs of one batch entry.
__device__ Inputs entry(const Problem& p, Inputs x, int64_t b) {
    x.gain += b * p.paths;
    x.delay += b * p.paths;
    x.departure += b * 3 * p.paths;
    x.arrival += b * 3 * p.paths;
    x.tx += b * 3 * p.tx;
    x.rx += b * 3 * p.rx;
    return x;
}

// Positions of both antennas of a pair, the receive antenna first; zeros beyond the last pair.
__device__ double place_of(const Problem& p, const Inputs& x, int64_t pair, int axis) {
    if (pair >= p.rx * p.tx) return 0;
    return axis < 3 ? x.rx[3 * (pair / p.tx) + axis] : x.tx[3 * (pair % p.tx) + axis - 3];
}

// Forward: a block sums its share of paths over 16 pairs x 64 tones. A thread holds 4 x 4 of them, and four slices of 64
// threads take every fourth path of a tile.
constexpr int SLICES = 4, ACROSS = 4, FORWARD_THREADS = SLICES * PAIRS * TONES / (ACROSS * ACROSS);

__global__ void __launch_bounds__(FORWARD_THREADS)
    forward_kernel(Problem p, Inputs inputs, Complex* partial /* [batch, split, pair, tone] */) {
    __shared__ Complex weights[TILE][PAIRS];
    __shared__ Complex waves[TILE][TONES];
    const int64_t pairs = p.rx * p.tx, pair_tiles = tiles(pairs, PAIRS), tone_tiles = tiles(p.tones, TONES);
    const int64_t split = blockIdx.x % p.splits, rest = blockIdx.x / p.splits;
    const int64_t tone0 = rest % tone_tiles * TONES, pair0 = rest / tone_tiles % pair_tiles * PAIRS;
    const int64_t b = rest / tone_tiles / pair_tiles;
    const Inputs x = entry(p, inputs, b);
    const int thread = threadIdx.x, slice = thread / (FORWARD_THREADS / SLICES);
    const int column = thread % (TONES / ACROSS), row = thread / (TONES / ACROSS) % (PAIRS / ACROSS) * ACROSS;

    // A thread forms weights of one pair only, and waves of one tone.
    static_assert(FORWARD_THREADS % PAIRS == 0 && FORWARD_THREADS % TONES == 0, "");
    const int own_pair = thread % PAIRS, own_tone = thread % TONES;
    const double per_wavelength = 1 / p.wavelength;
    const double frequency = tone0 + own_tone < p.tones ? x.frequencies[tone0 + own_tone] : 0;
    double place[6];
    for (int axis = 0; axis < 6; ++axis) place[axis] = place_of(p, x, pair0 + own_pair, axis);

    Complex sum[ACROSS][ACROSS] = {};
    int64_t first, last;
    share(p, split, first, last);
    for (int64_t tile = first; tile < last; ++tile) {
        const int64_t start = tile * TILE;
        for (int k = thread / PAIRS; k < TILE; k += FORWARD_THREADS / PAIRS) {
            const int64_t n = start + k;
            Complex weight{0, 0};
            if (n < p.paths)
                weight = x.gain[n] *
                         phasor(array_cycles(x.arrival, x.departure, p.paths, n, place, per_wavelength));
            weights[k][own_pair] = weight;
        }
        for (int k = thread / TONES; k < TILE; k += FORWARD_THREADS / TONES) {
            const double delay = start + k < p.paths ? x.delay[start + k] : 0;  // beyond the last, weights are zero
            waves[k][own_tone] = phasor(-delay * frequency);
        }
        __syncthreads();
        for (int n = slice; n < TILE; n += SLICES) {
            Complex left[ACROSS], right[ACROSS];
#pragma unroll
            for (int k = 0; k < ACROSS; ++k) {
                left[k] = weights[n][row + k];
                right[k] = waves[n][column + k * (TONES / ACROSS)];
            }
#pragma unroll
            for (int k = 0; k < ACROSS; ++k)
#pragma unroll
                for (int l = 0; l < ACROSS; ++l) add_product(sum[k][l], left[k], right[l]);
        }
        __syncthreads();
    }
    // The slices add up one after another in the memory of the waves: 16 x 64 of 32 x 64 entries.
    for (int turn = 0; turn < SLICES; ++turn) {
        if (slice == turn)
            for (int k = 0; k < ACROSS; ++k)
                for (int l = 0; l < ACROSS; ++l) {
                    Complex& place = waves[row + k][column + l * (TONES / ACROSS)];
                    const Complex before = turn ? place : Complex{0, 0};
                    place = {before.re + sum[k][l].re, before.im + sum[k][l].im};
                }
        __syncthreads();
    }
    for (int i = thread; i < PAIRS * TONES; i += FORWARD_THREADS) {
        const int64_t pair = pair0 + i / TONES, tone = tone0 + i % TONES;
        if (pair < pairs && tone < p.tones)
            partial[((b * p.splits + split) * pairs + pair) * p.tones + tone] = waves[i / TONES][i % TONES];
    }
}

// Sums the splits: 32 outputs a block, eight rows of threads over every eighth split.
constexpr int REDUCE_ROWS = 8;

__global__ void __launch_bounds__(32 * REDUCE_ROWS)
    reduce_kernel(Problem p, const Complex* partial, Complex* out /* [batch, pair, tone] */) {
    __shared__ double sums[REDUCE_ROWS][2][32];
    const int64_t outputs = p.rx * p.tx * p.tones, groups = tiles(outputs, 32);
    const int64_t b = blockIdx.x / groups, i = blockIdx.x % groups * 32 + threadIdx.x % 32;
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32;
    double re = 0, im = 0;
    if (i < outputs)
        for (int64_t split = row; split < p.splits; split += REDUCE_ROWS) {
            const Complex z = partial[(b * p.splits + split) * outputs + i];
            re += z.re;
            im += z.im;
        }
    sums[row][0][lane] = re;
    sums[row][1][lane] = im;
    __syncthreads();
    if (row || i >= outputs) return;
    for (int other = 1; other < REDUCE_ROWS; ++other) {
        re += sums[other][0][lane];
        im += sums[other][1][lane];
    }
    out[b * outputs + i] = {float(re), float(im)};
}

// Backward: a warp holds 32 paths (one a lane) and 4 of 16 pairs, for which it sums V = sum_f conj(G) exp(-j 2 pi f tau)
// and the same with f inside; array phases follow once the tones are summed.
constexpr int WARPS = 4, HELD = PAIRS / WARPS, BACKWARD_THREADS = 32 * WARPS;
constexpr int SUMS = 9;  // of a path: gain (2), delay, arrival (3), departure (3)

struct Gradients {
    Complex* gain;
    double *delay, *departure, *arrival;
    double* positions;  // [batch, split, pair, 6], zeros at first: receive antenna, then transmit antenna
};

__global__ void __launch_bounds__(BACKWARD_THREADS, 4)
    backward_kernel(Problem p, Inputs inputs, const Complex* grad /* [batch, pair, tone] */, Gradients out) {
    __shared__ Complex waves[TONES][TILE];
    __shared__ Complex down[PAIRS][TONES];
    __shared__ float hertz[TONES];
    __shared__ double sums[WARPS][SUMS][TILE];
    __shared__ double rays[6][TILE];
    __shared__ double places[PAIRS][6];
    __shared__ float turns[PAIRS][TILE + 1];
    const int64_t pairs = p.rx * p.tx, split = blockIdx.x % p.splits, b = blockIdx.x / p.splits;
    const Inputs x = entry(p, inputs, b);
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const double per_wavelength = 1 / p.wavelength, wavenumber = TWO_PI / p.wavelength;

    int64_t first, last;
    share(p, split, first, last);
    for (int64_t tile = first; tile < last; ++tile) {
        const int64_t start = tile * TILE, n = start + lane;
        const bool inside = n < p.paths;
        const Complex held = inside ? x.gain[n] : Complex{0, 0};
        for (int i = thread; i < 6 * TILE; i += BACKWARD_THREADS) {
            const int axis = i / TILE;
            const double* from = axis < 3 ? x.arrival + axis * p.paths : x.departure + (axis - 3) * p.paths;
            rays[axis][i % TILE] = start + i % TILE < p.paths ? from[start + i % TILE] : 0;
        }
        double sum[SUMS] = {};
        for (int64_t pair0 = 0; pair0 < pairs; pair0 += PAIRS) {
            for (int i = thread; i < 6 * PAIRS; i += BACKWARD_THREADS)
                places[i / 6][i % 6] = place_of(p, x, pair0 + i / 6, i % 6);
            Complex once[HELD] = {}, scaled[HELD] = {};
            for (int64_t tone0 = 0; tone0 < p.tones; tone0 += TONES) {
                __syncthreads();
                for (int i = thread; i < TONES * TILE; i += BACKWARD_THREADS) {
                    const int64_t tone = tone0 + i / TILE;
                    waves[i / TILE][i % TILE] = tone < p.tones && start + i % TILE < p.paths
                                                    ? phasor(-x.delay[start + i % TILE] * x.frequencies[tone])
                                                    : Complex{0, 0};
                }
                for (int i = thread; i < PAIRS * TONES; i += BACKWARD_THREADS) {
                    const int64_t pair = pair0 + i / TONES, tone = tone0 + i % TONES;
                    const bool held_here = pair < pairs && tone < p.tones;
                    down[i / TONES][i % TONES] =
                        held_here ? grad[(b * pairs + pair) * p.tones + tone] : Complex{0, 0};
                }
                for (int i = thread; i < TONES; i += BACKWARD_THREADS)
                    hertz[i] = tone0 + i < p.tones ? float(x.frequencies[tone0 + i]) : 0;
                __syncthreads();
#pragma unroll 4
                for (int tone = 0; tone < TONES; ++tone) {
                    const Complex wave = waves[tone][lane];
                    const Complex fast = {wave.re * hertz[tone], wave.im * hertz[tone]};
#pragma unroll
                    for (int k = 0; k < HELD; ++k) {
                        const Complex g = down[warp * HELD + k][tone];
                        add_conjugate_product(once[k], g, wave);
                        add_conjugate_product(scaled[k], g, fast);
                    }
                }
            }
#pragma unroll
            for (int k = 0; k < HELD; ++k) {
                const int64_t pair = pair0 + warp * HELD + k;
                float turn = 0;
                if (inside && pair < pairs) {
                    const double* place = places[warp * HELD + k];
                    const Complex wave = phasor(array_cycles(rays[0], rays[3], TILE, lane, place, per_wavelength));
                    const Complex back = once[k] * wave;
                    turn = -(back * held).im;
                    sum[0] += back.re;
                    sum[1] -= back.im;
                    sum[2] += (scaled[k] * wave * held).im;
                    for (int axis = 0; axis < 6; ++axis) sum[3 + axis] += turn * place[axis];
                }
                turns[warp * HELD + k][lane] = turn;
            }
            __syncthreads();
            for (int i = thread; i < 6 * PAIRS; i += BACKWARD_THREADS) {
                const int axis = i / PAIRS, k = i % PAIRS;
                if (pair0 + k < pairs) {
                    double total = 0;
                    for (int l = 0; l < TILE; ++l) total += turns[k][l] * rays[axis][l];
                    out.positions[((b * p.splits + split) * pairs + pair0 + k) * 6 + axis] += wavenumber * total;
                }
            }
        }
        for (int k = 0; k < SUMS; ++k) sums[warp][k][lane] = sum[k];
        __syncthreads();
        for (int i = thread; i < SUMS * TILE; i += BACKWARD_THREADS) {
            const int k = i / TILE;
            const int64_t m = start + i % TILE;
            if (m >= p.paths) continue;
            double total = 0;
            for (int w = 0; w < WARPS; ++w) total += sums[w][k][i % TILE];
            if (k < 2)
                (k ? out.gain[b * p.paths + m].im : out.gain[b * p.paths + m].re) = float(total);
            else if (k == 2)
                out.delay[b * p.paths + m] = TWO_PI * total;
            else if (k < 6)
                out.arrival[(b * 3 + k - 3) * p.paths + m] = wavenumber * total;
            else
                out.departure[(b * 3 + k - 6) * p.paths + m] = wavenumber * total;
        }
    }
}

#ifdef __CUDACC__
#define LAUNCH(kernel, blocks, threads, stream, ...) \
    kernel<<<dim3(unsigned(blocks)), dim3(threads), 0, static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__)
#endif

}  // namespace

extern "C" {

// Blocks of a forward pass without the splits, for the caller to choose these by.
int64_t coherent_tiles(int64_t batch, int64_t pairs, int64_t tones) {
    return batch * tiles(pairs, PAIRS) * tiles(tones, TONES);
}

int64_t coherent_path_tiles(int64_t paths) { return tiles(paths, TILE); }

const char* coherent_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

// Return a cudaError_t. `sizes` is {batch, paths, rx, tx, tones, splits}, all at least 1; blocks must stay below 2^31.
int coherent_forward(const int64_t* sizes, double wavelength, const void* gain, const double* delay,
                     const double* departure, const double* arrival, const double* tx, const double* rx,
                     const double* frequencies, void* partial, void* out, void* stream) {
    const Problem p{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], wavelength};
    const Inputs x{static_cast<const Complex*>(gain), delay, departure, arrival, tx, rx, frequencies};
    const int64_t pairs = p.rx * p.tx;
    Complex* sums = static_cast<Complex*>(p.splits > 1 ? partial : out);
    LAUNCH(forward_kernel, coherent_tiles(p.batch, pairs, p.tones) * p.splits, FORWARD_THREADS, stream, p, x, sums);
    if (p.splits > 1)
        LAUNCH(reduce_kernel, p.batch * tiles(pairs * p.tones, 32), 32 * REDUCE_ROWS, stream, p, sums,
               static_cast<Complex*>(out));
    return static_cast<int>(cudaGetLastError());
}

int coherent_backward(const int64_t* sizes, double wavelength, const void* grad, const void* gain, const double* delay,
                      const double* departure, const double* arrival, const double* tx, const double* rx,
                      const double* frequencies, void* gain_grad, double* delay_grad, double* departure_grad,
                      double* arrival_grad, double* position_grads, void* stream) {
    const Problem p{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], wavelength};
    const Inputs x{static_cast<const Complex*>(gain), delay, departure, arrival, tx, rx, frequencies};
    const Gradients out{static_cast<Complex*>(gain_grad), delay_grad, departure_grad, arrival_grad, position_grads};
    LAUNCH(backward_kernel, p.batch * p.splits, BACKWARD_THREADS, stream, p, x, static_cast<const Complex*>(grad), out);
    return static_cast<int>(cudaGetLastError());
}
}
