// Mathematics of `coherent_sum`, once: the CUDA kernels use it, and the tests run it on the CPU.
// `chanlab/rf/coherent_reference.py` defines what it must compute.
#pragma once

#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define COHERENT_FN __host__ __device__ __forceinline__
#else
#define COHERENT_FN inline
#endif

namespace coherent {

struct Problem {
    int64_t batch, paths, rx, tx, tones;
    int64_t splits;     // blocks that share the paths of one batch entry
    double wavelength;  // [m]
};

struct alignas(8) Complex {
    float re, im;
};

COHERENT_FN Complex operator*(Complex a, Complex b) { return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re}; }

// acc += a b
COHERENT_FN void add_product(Complex& acc, Complex a, Complex b) {
    acc.re = fmaf(a.re, b.re, fmaf(-a.im, b.im, acc.re));
    acc.im = fmaf(a.re, b.im, fmaf(a.im, b.re, acc.im));
}

// acc += conj(a) b
COHERENT_FN void add_conjugate_product(Complex& acc, Complex a, Complex b) {
    acc.re = fmaf(a.re, b.re, fmaf(a.im, b.im, acc.re));
    acc.im = fmaf(a.re, b.im, fmaf(-a.im, b.re, acc.im));
}

// exp(j 2 pi cycles). Whole cycles go in double precision, before single precision would lose what is left of them.
COHERENT_FN Complex phasor(double cycles) {
    const float half_turns = 2 * float(cycles - rint(cycles));
    Complex z;
#ifdef __CUDA_ARCH__
    sincospif(half_turns, &z.im, &z.re);
#else
    z = {std::cos(3.14159265f * half_turns), std::sin(3.14159265f * half_turns)};
#endif
    return z;
}

// Phase [cycles] of the plane wave of path n at a receive and a transmit antenna, `place` their positions one after the
// other [m]; directions are [3, path].
COHERENT_FN double array_cycles(const double* arrival, const double* departure, int64_t paths, int64_t n,
                                const double* place, double per_wavelength) {
    double way = 0;
    for (int axis = 0; axis < 3; ++axis)
        way += arrival[axis * paths + n] * place[axis] + departure[axis * paths + n] * place[3 + axis];
    return way * per_wavelength;
}

}  // namespace coherent
