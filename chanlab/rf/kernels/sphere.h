// Mathematics of `rasterize_sphere`, once: the CPU back end and the CUDA kernels both compile this header.
// `chanlab/rf/reference.py` defines what it must compute; README.md says how to change it safely.
#pragma once

#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define SPHERE_FN __host__ __device__ __forceinline__
#define SPHERE_UNROLL _Pragma("unroll")
#else
#define SPHERE_FN inline __attribute__((always_inline))
#define SPHERE_UNROLL _Pragma("GCC unroll 32")
#endif

namespace sphere {

constexpr int TILE_WIDTH = 16, TILE_HEIGHT = 8, TILE_PIXELS = TILE_WIDTH * TILE_HEIGHT;
constexpr double PI = 3.14159265358979323846;
constexpr double ALPHA_CUT = 1.0 / 255.0;    // less opaque than this: nothing
constexpr double ALPHA_MAX = 0.999;          // no footprint is quite opaque, so that 1 - alpha divides
constexpr double TRANSMITTANCE_CUT = 1e-4;   // compositing stops before the transmittance falls below
constexpr double NEAR_COSINE = 0.9;          // 26 degrees: most footprints end before
constexpr double COSINE_CUT = -0.995;        // around the antipode of a mean the log map has no direction

// What to draw: image rows go up from `lowest`, columns towards growing azimuth from `start`; angles in radians.
struct Problem {
    int64_t gaussians, receivers, channels, height, width;
    double lowest, row_step, start, column_step;
    double nearest;  // Gaussians at this distance [m] or nearer are not drawn
    double blur;     // variance [rad^2] added to every footprint
};

template <class T>
struct alignas(16) Footprint {
    T u[3], a[3], b[3];  // mean direction; q = g(w.u) ((a.w)^2 + (b.w)^2) in the receiver's axes
    T opacity;
    T cosine;            // of the angle beyond which alpha is below the cut
    T most;              // q beyond which it is
};

template <class T>
SPHERE_FN T dot(const T* x, const T* y) {
    return x[0] * y[0] + x[1] * y[1] + x[2] * y[2];
}

// acos(c)^2 / (1 - c^2) on [0, 1] as a polynomial in z = 2c - 1 and its derivative by c (Chebyshev fits: 3e-8, 2e-17).
SPHERE_FN void arc_polynomial(float c, float& value, float& slope) {
    constexpr float k[] = {1.46216361f, -0.637490591f, 0.238127989f, -0.0847329132f, 0.0294936163f, -0.0101696722f,
                           0.00347574801f, -0.00112089359f, 0.000374910073f, -0.000186458010f, 0.0000646717381f};
    const float z = 2 * c - 1;
    constexpr int n = sizeof(k) / sizeof(k[0]);
    value = k[n - 1];
    slope = 0;
    SPHERE_UNROLL
    for (int i = n - 2; i >= 0; --i) {
        slope = slope * z + value;
        value = value * z + k[i];
    }
    slope *= 2;
}

SPHERE_FN void arc_polynomial(double c, double& value, double& slope) {
    constexpr double k[] = {1.46216361497620127, -0.637490358224059797, 0.238127727030218123, -0.0847374978554225092,
                            0.0294966260805638412, -0.0101445162921519545, 0.00346318193569727802,
                            -0.00117648393880911825, 0.00039828966504497869, -0.000134497698038271961,
                            0.0000453313842247878982, -0.0000152555660795726934, 5.12797494210583422e-6,
                            -1.72272018299994833e-6, 5.78136803151510856e-7, -1.92737780101489203e-7,
                            6.45024298367169434e-8, -2.28677654135228111e-8, 7.72556761443435974e-9,
                            -1.70121903228056811e-9, 5.4041852677845446e-10, -5.34661040954091707e-10,
                            1.84058305921373218e-10};
    const double z = 2 * c - 1;
    constexpr int n = sizeof(k) / sizeof(k[0]);
    value = k[n - 1];
    slope = 0;
    SPHERE_UNROLL
    for (int i = n - 2; i >= 0; --i) {
        slope = slope * z + value;
        value = value * z + k[i];
    }
    slope *= 2;
}

// The same where c is 0.9 or more, in 1 - c (1e-9, its slope 6e-7): for single precision.
SPHERE_FN void short_arc_polynomial(float c, float& value, float& slope) {
    constexpr float k[] = {1.0f, 0.666666047f, 0.377826936f, 0.201817611f, 0.121740163f};
    const float t = 1 - c;
    value = k[4];
    slope = 0;
    SPHERE_UNROLL
    for (int i = 3; i >= 0; --i) {
        slope = slope * t + value;
        value = value * t + k[i];
    }
    slope = -slope;
}

// How far a footprint reaches: to NEAR_COSINE, to 90 degrees, or beyond. What reaches less is computed in less time.
enum Reach { NEAR, HALF, WHOLE };

template <class T>
SPHERE_FN Reach reach_of(T cosine) {
    return cosine > T(NEAR_COSINE) ? NEAR : cosine > 0 ? HALF : WHOLE;
}

// g(c) = (angle / sine)^2 at cosine c: turns squared sines of the tangent plane into the squared log map, where the
// footprint reaches.
template <Reach REACH, class T>
SPHERE_FN void arc(T c, T& g, T& slope) {
    if constexpr (REACH == NEAR && sizeof(T) == 4) {
        short_arc_polynomial(c > 1 ? T(1) : c, g, slope);
        return;
    }
    const T folded = c < 0 ? -c : c;
    arc_polynomial(folded > 1 ? T(1) : folded, g, slope);
    if (REACH == WHOLE && c < 0) {
        T t = (1 - folded) * (1 + folded);
        t = t < T(1e-3) ? T(1e-3) : t;  // only beyond COSINE_CUT
        const T angle = T(PI) - std::sqrt(g * t);
        g = angle * angle / t;
        slope = 2 * (c * g - angle / std::sqrt(t)) / t;
    }
}

// exp(x) for x <= 88, written out so that compilers vectorise it; in single precision exp(-50) below that, which keeps
// denormal numbers away.
SPHERE_FN double exponential(double x) { return std::exp(x); }
SPHERE_FN float exponential(float x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504f));
    return y;
#else
    x = x < -50.0f ? -50.0f : x;
    const float n = std::floor(x * 1.44269504f + 0.5f);
    const float f = (x - n * 0.693145752f) - n * 1.42860677e-6f;
    const float p = 1.0f + f * (1.0f + f * (0.5f + f * (0.166666667f + f * (0.0416666567f + f * (0.00833345205f + f * 0.00138883f)))));
    return p * __builtin_bit_cast(float, (static_cast<int32_t>(n) + 127) << 23);
#endif
}

// 1 / x, in single precision on a GPU to 2 ulp and without branches.
SPHERE_FN double reciprocal(double x) { return 1 / x; }
SPHERE_FN float reciprocal(float x) {
#ifdef __CUDA_ARCH__
    return __fdividef(1.0f, x);
#else
    return 1 / x;
#endif
}

// How opaque a footprint is along a ray (0 below the cut), with what its gradient needs.
template <class T>
struct Opaque {
    T alpha, x, y, g, slope, shape;  // alpha = min(ALPHA_MAX, opacity * shape)
};

// REACH is that of the footprint's `cosine`, or more.
template <Reach REACH = WHOLE, class T>
SPHERE_FN Opaque<T> opaque(const Footprint<T>& f, T wx, T wy, T wz) {
    Opaque<T> o;
    const T c = f.u[0] * wx + f.u[1] * wy + f.u[2] * wz;
    o.x = f.a[0] * wx + f.a[1] * wy + f.a[2] * wz;
    o.y = f.b[0] * wx + f.b[1] * wy + f.b[2] * wz;
    arc<REACH>(c, o.g, o.slope);
    o.shape = exponential(T(-0.5) * o.g * (o.x * o.x + o.y * o.y));
    T alpha = f.opacity * o.shape;
    alpha = alpha > T(ALPHA_MAX) ? T(ALPHA_MAX) : alpha;
    alpha = alpha < T(ALPHA_CUT) ? T(0) : alpha;
    o.alpha = c < T(REACH == NEAR ? NEAR_COSINE : REACH == HALF ? 0.0 : COSINE_CUT) ? T(0) : alpha;
    return o;
}

// Gradient sums of one footprint over its pixels.
template <class T>
struct FootprintGradient {
    T u[3], a[3], b[3], opacity;
};

// The loss's derivatives by w.u, a.w, b.w and the opacity, at one pixel, from that by alpha. Times the ray w, the first
// three are what the pixel adds to the gradients by u, a and b.
template <class T>
struct Pulled {
    T u, a, b, opacity;
};

template <class T>
SPHERE_FN Pulled<T> opaque_backward(const Footprint<T>& f, const Opaque<T>& o, T by_alpha) {
    const T free = f.opacity * o.shape > T(ALPHA_MAX) ? T(0) : by_alpha;
    const T by_q = T(-0.5) * o.alpha * free;
    Pulled<T> by;
    by.u = by_q * o.slope * (o.x * o.x + o.y * o.y);
    by.a = 2 * by_q * o.g * o.x;
    by.b = 2 * by_q * o.g * o.y;
    by.opacity = -2 * by_q * reciprocal(f.opacity);
    return by;
}

// Rotation matrix [3][3] of a quaternion (w, x, y, z) of any length but zero; returns 1 / length.
template <class T>
SPHERE_FN T quaternion_matrix(const T* q, T* matrix) {
    const T inverse = 1 / std::sqrt(q[0] * q[0] + q[1] * q[1] + q[2] * q[2] + q[3] * q[3] + T(1e-24));
    const T w = q[0] * inverse, x = q[1] * inverse, y = q[2] * inverse, z = q[3] * inverse;
    matrix[0] = 1 - 2 * (y * y + z * z);
    matrix[1] = 2 * (x * y - w * z);
    matrix[2] = 2 * (x * z + w * y);
    matrix[3] = 2 * (x * y + w * z);
    matrix[4] = 1 - 2 * (x * x + z * z);
    matrix[5] = 2 * (y * z - w * x);
    matrix[6] = 2 * (x * z - w * y);
    matrix[7] = 2 * (y * z + w * x);
    matrix[8] = 1 - 2 * (x * x + y * y);
    return inverse;
}

template <class T>
SPHERE_FN void quaternion_matrix_backward(const T* q, T inverse, const T* by_matrix, T* by_q) {
    const T w = q[0] * inverse, x = q[1] * inverse, y = q[2] * inverse, z = q[3] * inverse;
    const T* m = by_matrix;
    const T by_unit[4] = {
        2 * (x * (m[7] - m[5]) + y * (m[2] - m[6]) + z * (m[3] - m[1])),
        2 * (y * (m[1] + m[3]) + z * (m[2] + m[6]) + w * (m[7] - m[5]) - 2 * x * (m[4] + m[8])),
        2 * (x * (m[1] + m[3]) + z * (m[5] + m[7]) + w * (m[2] - m[6]) - 2 * y * (m[0] + m[8])),
        2 * (x * (m[2] + m[6]) + y * (m[5] + m[7]) + w * (m[3] - m[1]) - 2 * z * (m[0] + m[4])),
    };
    const T along = by_unit[0] * w + by_unit[1] * x + by_unit[2] * y + by_unit[3] * z;
    by_q[0] = (by_unit[0] - along * w) * inverse;
    by_q[1] = (by_unit[1] - along * x) * inverse;
    by_q[2] = (by_unit[2] - along * y) * inverse;
    by_q[3] = (by_unit[3] - along * z) * inverse;
}

// What projection computes on its way, for the backward pass to compute again.
template <class T>
struct Projection {
    T offset[3];           // mean - receiver, world axes
    T distance, u[3];      // receiver's axes
    T rotation[9], inverse_length;
    T world[9], local[9];  // square root of the covariance, world and receiver's axes; columns are its principal axes
    T a[3], b[3];
    T most, radius;        // q and angle beyond which alpha is below the cut
    bool visible;
};

// Tangent-plane footprint of a Gaussian; `axes` holds the receiver's axes as columns.
template <class T>
SPHERE_FN Projection<T> project(const T* mean, const T* quaternion, const T* scale, T opacity, const T* receiver,
                                const T* axes, T nearest, T blur) {
    Projection<T> p;
    T v[3];
    for (int i = 0; i < 3; ++i) p.offset[i] = mean[i] - receiver[i];
    for (int i = 0; i < 3; ++i) v[i] = axes[i] * p.offset[0] + axes[3 + i] * p.offset[1] + axes[6 + i] * p.offset[2];
    p.distance = std::sqrt(dot(v, v));
    p.visible = p.distance > nearest && p.distance < T(1e18) && opacity >= T(ALPHA_CUT);
    const T inverse = 1 / (p.visible ? p.distance : T(1));
    for (int i = 0; i < 3; ++i) p.u[i] = p.visible ? v[i] * inverse : T(i == 2);

    p.inverse_length = quaternion_matrix(quaternion, p.rotation);
    for (int i = 0; i < 3; ++i)
        for (int k = 0; k < 3; ++k) p.world[3 * i + k] = p.rotation[3 * i + k] * scale[k];
    for (int i = 0; i < 3; ++i)
        for (int k = 0; k < 3; ++k)
            p.local[3 * i + k] = axes[i] * p.world[k] + axes[3 + i] * p.world[3 + k] + axes[6 + i] * p.world[6 + k];

    // Any orthonormal basis of the tangent plane will do: Duff et al., JCGT 6(1), 2017.
    const T sign = p.u[2] < 0 ? T(-1) : T(1);
    const T m = -1 / (sign + p.u[2]), n = p.u[0] * p.u[1] * m;
    const T e1[3] = {1 + sign * p.u[0] * p.u[0] * m, sign * n, -sign * p.u[0]};
    const T e2[3] = {n, sign + p.u[1] * p.u[1] * m, -p.u[1]};

    T s1[3], s2[3];
    for (int k = 0; k < 3; ++k) {
        s1[k] = (e1[0] * p.local[k] + e1[1] * p.local[3 + k] + e1[2] * p.local[6 + k]) * inverse;
        s2[k] = (e2[0] * p.local[k] + e2[1] * p.local[3 + k] + e2[2] * p.local[6 + k]) * inverse;
    }
    const T p11 = dot(s1, s1), p12 = dot(s1, s2), p22 = dot(s2, s2);
    // Cauchy-Binet: no cancellation where a footprint is a needle.
    const T d1 = s1[1] * s2[2] - s1[2] * s2[1], d2 = s1[2] * s2[0] - s1[0] * s2[2], d3 = s1[0] * s2[1] - s1[1] * s2[0];
    const T determinant = d1 * d1 + d2 * d2 + d3 * d3 + blur * (p11 + p22) + blur * blur;
    const T c11 = p11 + blur, c22 = p22 + blur;
    const T a1 = std::sqrt(c22 / determinant), a2 = -a1 * p12 / c22, b2 = 1 / std::sqrt(c22);
    for (int i = 0; i < 3; ++i) {
        p.a[i] = a1 * e1[i] + a2 * e2[i];
        p.b[i] = b2 * e2[i];
    }
    const T half = (c11 - c22) / 2;
    const T largest = (c11 + c22) / 2 + std::sqrt(half * half + p12 * p12);
    p.most = 2 * std::log((opacity < T(ALPHA_CUT) ? T(ALPHA_CUT) : opacity) * T(255));
    p.radius = std::sqrt(p.most * largest) * T(1.0001) + T(1e-4);
    p.visible = p.visible && largest < T(1e18);
    return p;
}

template <class T>
SPHERE_FN Footprint<T> footprint(const Projection<T>& p, T opacity) {
    Footprint<T> f;
    for (int i = 0; i < 3; ++i) {
        f.u[i] = p.u[i];
        f.a[i] = p.a[i];
        f.b[i] = p.b[i];
    }
    f.opacity = opacity;
    const T radius = p.radius > T(PI) ? T(PI) : p.radius;
    f.cosine = std::cos(radius);
    f.most = p.most;
    return f;
}

template <class T>
struct GaussianGradient {
    T mean[3], quaternion[4], scale[3], axes[9];  // the receiver's gradient is -mean
};

// From sums over pixels to the parameters of one Gaussian seen from one receiver.
//
// With z = (x, y) and C^-1 = L L', q's gradient by C is -L (sum of z z') L', and that by the basis vanishes because q
// does not depend on it: the basis is carried along u in parallel.
template <class T>
SPHERE_FN GaussianGradient<T> project_backward(const T* quaternion, const T* scale, const T* axes,
                                               const Projection<T>& p, const FootprintGradient<T>& sum) {
    GaussianGradient<T> out;
    const T* u = p.u;
    const T inverse = 1 / p.distance, inverse2 = inverse * inverse;
    const T z11 = dot(sum.a, p.a) / 2, z12 = (dot(sum.a, p.b) + dot(sum.b, p.a)) / 4, z22 = dot(sum.b, p.b) / 2;
    const T au = dot(sum.a, u), bu = dot(sum.b, u);

    T by_local[9], by_u[3], spread = 0;
    for (int i = 0; i < 3; ++i) by_u[i] = sum.u[i] - p.a[i] * au - p.b[i] * bu;
    for (int k = 0; k < 3; ++k) {
        const T column[3] = {p.local[k], p.local[3 + k], p.local[6 + k]};
        const T am = dot(p.a, column), bm = dot(p.b, column), um = dot(u, column);
        const T along_a = -(z11 * am + z12 * bm), along_b = -(z12 * am + z22 * bm);
        for (int i = 0; i < 3; ++i) {
            const T turned = p.a[i] * along_a + p.b[i] * along_b;
            by_local[3 * i + k] = 2 * inverse2 * turned;
            by_u[i] -= 2 * inverse2 * turned * um;
            spread += turned * column[i];
        }
    }
    const T by_distance = -2 * inverse2 * inverse * spread;
    const T radial = dot(by_u, u);
    T by_v[3];
    for (int i = 0; i < 3; ++i) by_v[i] = (by_u[i] - u[i] * radial) * inverse + by_distance * u[i];

    T by_rotation[9];
    for (int k = 0; k < 3; ++k) out.scale[k] = 0;
    for (int j = 0; j < 3; ++j) {
        out.mean[j] = dot(axes + 3 * j, by_v);
        for (int k = 0; k < 3; ++k) {
            const T by_world = axes[3 * j] * by_local[k] + axes[3 * j + 1] * by_local[3 + k] + axes[3 * j + 2] * by_local[6 + k];
            out.scale[k] += by_world * p.rotation[3 * j + k];
            by_rotation[3 * j + k] = by_world * scale[k];
        }
        for (int i = 0; i < 3; ++i) out.axes[3 * j + i] = p.offset[j] * by_v[i] + dot(p.world + 3 * j, by_local + 3 * i);
    }
    quaternion_matrix_backward(quaternion, p.inverse_length, by_rotation, out.quaternion);
    return out;
}

// Compositing, front to back: weight of the next footprint; closes the pixel (`open` becomes 0) before its transmittance falls below the cut.
template <class T>
SPHERE_FN T composite(T alpha, T& transmittance, T& open) {
    const T next = transmittance * (1 - alpha);
    open = next < T(TRANSMITTANCE_CUT) ? T(0) : open;
    const T weight = open > 0 ? alpha * transmittance : T(0);
    transmittance = open > 0 ? next : transmittance;
    return weight;
}

// One step from the back: `transmittance` and `behind` (what later footprints and the open sky give to the loss) go from
// after this footprint to before it. Returns its weight; `by_alpha` is the derivative by its alpha.
template <class T>
SPHERE_FN T composite_backward(T alpha, T emitted, T& transmittance, T& behind, T& by_alpha) {
    const T inverse = reciprocal(1 - alpha);
    transmittance *= inverse;
    by_alpha = transmittance * emitted - behind * inverse;
    const T weight = alpha * transmittance;
    behind += weight * emitted;
    return weight;
}

}  // namespace sphere
