// Where footprints lie on a panorama: rays of pixels, ranges of pixels and tiles, boxes around rays. Both back ends compile
// this header; what it says of a footprint's extent may be too much, never too little.
#pragma once

#include "sphere.h"

namespace sphere {

constexpr double MARGIN = 1e-4;  // [rad] against rounding in single precision

SPHERE_FN void sine_and_cosine(double x, double& sine, double& cosine) {
    sine = std::sin(x);
    cosine = std::cos(x);
}
SPHERE_FN void sine_and_cosine(float x, float& sine, float& cosine) {
#ifdef __CUDA_ARCH__
    sincosf(x, &sine, &cosine);
#else
    sine = std::sin(x);
    cosine = std::cos(x);
#endif
}

// Ray of a pixel, or of a place between pixels, in the receiver's axes.
template <class T>
SPHERE_FN void ray(const Problem& problem, double row, double column, T* w) {
    T level, sine, cosine;
    sine_and_cosine(T(problem.lowest + (row + 0.5) * problem.row_step), w[2], level);
    sine_and_cosine(T(problem.start + (column + 0.5) * problem.column_step), sine, cosine);
    w[0] = level * cosine;
    w[1] = level * sine;
}

// Pixels that a footprint may touch; `column` may be any of the width, and the range wraps around it.
struct Bounds {
    int32_t row, rows, column, columns;
};

// How far a footprint reaches from its mean direction [rad]: in elevation, and in azimuth to both sides.
template <class T>
struct Extent {
    T down, up, left, right;
};

// The extent of the circle of its radius, or that of the ellipse at the cut where this is less. With the covariance's
// parts ee, en, nn to the east and north, times q at the cut:
// - The log map's point (e, n) has sin(elevation) = s cos(r) + c n sin(r) / r, s and c those of the mean's elevation. Towards
//   the pole n adds n at most; away from it, great circles fall off besides: s cos(radius) - c n.
// - On the plane that touches the sphere in the mean direction, meridians are lines through a pole, x + t s y = t c at the
//   azimuth's tangent t, and the footprint is within the ellipse stretched by tan(radius) / radius: two of them touch it.
template <class T>
SPHERE_FN Extent<T> extent(const Problem& problem, const Projection<T>& p, T elevation, T level) {
    const T radius = p.radius, all = T(2 * PI);
    T sine, cosine;
    sine_and_cosine(radius, sine, cosine);
    const T ratio = radius < T(PI / 2) ? sine / (level > T(1e-30) ? level : T(1e-30)) : T(2);
    if (!(ratio < T(0.999))) return {radius, radius, all, all};  // the cap holds a pole, or nearly
    const T side = std::asin(ratio) + T(MARGIN);
    if (radius > 1 || level < T(0.01)) return {radius, radius, side, side};
    const auto least = [](T x, T y) { return x < y ? x : y; };

    const T x = p.u[0] / level, y = p.u[1] / level, s = p.u[2], c = level;
    T ee = T(problem.blur), en = 0, nn = ee;
    for (int k = 0; k < 3; ++k) {
        const T east = (x * p.local[3 + k] - y * p.local[k]) / p.distance;
        const T north = (c * p.local[6 + k] - s * (x * p.local[k] + y * p.local[3 + k])) / p.distance;
        ee += east * east;
        en += east * north;
        nn += north * north;
    }
    const T most = p.most * T(1.0002), rise = std::sqrt(most * nn) + T(MARGIN);
    const T steep = s < 0 ? -s : s, towards = least(radius, rise);
    const T away = least(radius, std::abs(elevation) - std::asin(steep * cosine - c * least(sine, rise)) + T(MARGIN));
    Extent<T> out = {s < 0 ? towards : away, s < 0 ? away : towards, side, side};

    const T stretched = most * (sine / (cosine * radius)) * (sine / (cosine * radius));
    const T open = c * c - stretched * s * s * nn;
    if (open < T(0.001) * c * c) return out;  // reaches as high as a pole
    const T turn = stretched * s * en, root = std::sqrt(turn * turn + open * stretched * ee);
    out.left = least(side, std::atan((root - turn) / open) + T(MARGIN));
    out.right = least(side, std::atan((root + turn) / open) + T(MARGIN));
    return out;
}

template <class T>
SPHERE_FN Bounds bounds(const Problem& problem, const Projection<T>& p) {
    const T level = std::sqrt(p.u[0] * p.u[0] + p.u[1] * p.u[1]), elevation = std::atan2(p.u[2], level);
    const Extent<T> e = extent(problem, p, elevation, level);
    const auto clamp = [](T x, T low, T high) { return x < low ? low : x > high ? high : x; };
    const T height = T(problem.height), width = T(problem.width);
    const T row = (elevation - T(problem.lowest)), row_step = T(problem.row_step), column_step = T(problem.column_step);
    Bounds out;
    out.row = int32_t(clamp(std::ceil((row - e.down) / row_step - T(0.5)), 0, height));
    out.rows = int32_t(clamp(std::floor((row + e.up) / row_step - T(0.5)), -1, height - 1)) - out.row + 1;
    out.rows = out.rows < 0 ? 0 : out.rows;
    out.column = 0;
    out.columns = int32_t(problem.width);
    const T azimuth = std::atan2(p.u[1], p.u[0]) - T(problem.start);
    const T left = std::ceil((azimuth - e.left) / column_step - T(0.5));
    const T count = std::floor((azimuth + e.right) / column_step - T(0.5)) - left + 1;
    if (count < width) {
        out.column = int32_t(left - width * std::floor(left / width));
        out.columns = int32_t(count < 0 ? T(0) : count);
    }
    return out;
}

// A box around rays: centre + x first + y second + z centre, the three at right angles, |x|, |y| and |z| up to `size`.
template <class T>
struct Box {
    T centre[3], first[3], second[3], size[3];
};

// False only if no ray of the box sees the footprint. A linear form of the ray is least and greatest in corners of the box:
// u.w must come up to the cosine, and (x a + y b).w, where (x, y) = (a.centre, b.centre), down to |(x, y)| times the root of
// q at the cut; q is ((a.w)^2 + (b.w)^2) or more.
template <class T>
SPHERE_FN bool reaches(const Footprint<T>& f, const Box<T>& box) {
    const auto spread = [&box](const T* form) {
        return std::abs(dot(form, box.first)) * box.size[0] + std::abs(dot(form, box.second)) * box.size[1] +
               std::abs(dot(form, box.centre)) * box.size[2];
    };
    if (dot(f.u, box.centre) + spread(f.u) < f.cosine) return false;
    const T x = dot(f.a, box.centre), y = dot(f.b, box.centre), square = x * x + y * y;
    const T form[3] = {x * f.a[0] + y * f.b[0], x * f.a[1] + y * f.b[1], x * f.a[2] + y * f.b[2]};
    const T least = square - spread(form);
    return !(least > 0 && least * least > square * f.most * T(1.0002));
}

// Tiles of a range of pixels: tile rows and columns, the latter modulo `across`.
struct Tiles {
    int32_t row, rows, column, columns;
};

SPHERE_FN int32_t tiles_across(const Problem& p) { return int32_t((p.width + TILE_WIDTH - 1) / TILE_WIDTH); }
SPHERE_FN int32_t tiles_up(const Problem& p) { return int32_t((p.height + TILE_HEIGHT - 1) / TILE_HEIGHT); }

SPHERE_FN Tiles tiles(const Problem& problem, const Bounds& b) {
    Tiles t = {0, 0, 0, 0};
    if (b.rows < 1 || b.columns < 1) return t;
    t.row = b.row / TILE_HEIGHT;
    t.rows = (b.row + b.rows - 1) / TILE_HEIGHT - t.row + 1;
    t.column = b.column / TILE_WIDTH;
    const int32_t last = b.column + b.columns - 1, width = int32_t(problem.width), across = tiles_across(problem);
    t.columns = last < width ? last / TILE_WIDTH - t.column + 1 : across - t.column + (last - width) / TILE_WIDTH + 1;
    t.columns = t.columns > across ? across : t.columns;
    return t;
}

// The k-th tile of a range.
SPHERE_FN int32_t tile_of(const Problem& problem, const Tiles& t, int32_t k) {
    const int32_t across = tiles_across(problem), column = t.column + k % t.columns;
    return (t.row + k / t.columns) * across + (column < across ? column : column - across);
}

}  // namespace sphere
