// `rasterize_sphere` on the CPU: tiles in parallel, gradients gathered in a fixed order (the same bits on every run).
#include "sphere_bounds.h"

#include <algorithm>
#include <exception>
#include <memory>
#include <numeric>
#include <vector>

#include <omp.h>
#include <pthread.h>

namespace {

// A forked child has none of its parent's threads, and libgomp would wait for them: it computes with one.
const int forks = pthread_atfork(nullptr, nullptr, [] { omp_set_num_threads(1); });

using namespace sphere;

template <class T>
struct Scene {
    const T *means, *quaternions, *scales, *opacities, *signals, *receivers, *rotations;
};

// Gaussians of one receiver, and the list of them that each tile composites, nearest first.
template <class T>
struct Lists {
    std::vector<Footprint<T>> footprints;
    std::vector<Bounds> bounds;
    std::vector<T> distances, radii;
    std::vector<int32_t> order;       // visible Gaussians, nearest first
    std::vector<int64_t> first;       // of each tile in `members`; one past the last
    std::vector<int32_t> members;     // Gaussian of each pair of tile and Gaussian
    std::vector<int64_t> pairs;       // of each Gaussian in `places`; one past the last
    std::vector<int64_t> places;      // where in `members` each Gaussian's pairs are

    void build(const Problem& problem, const Scene<T>& scene, int64_t receiver, bool backward) {
        const int64_t n = problem.gaussians;
        footprints.resize(n);
        bounds.resize(n);
        distances.resize(n);
        radii.resize(n);
        const T* axes = scene.rotations + 9 * receiver;
#pragma omp parallel for schedule(static)
        for (int64_t i = 0; i < n; ++i) {
            const auto p = project(scene.means + 3 * i, scene.quaternions + 4 * i, scene.scales + 3 * i,
                                   scene.opacities[i], scene.receivers + 3 * receiver, axes, T(problem.nearest),
                                   T(problem.blur));
            footprints[i] = footprint(p, scene.opacities[i]);
            distances[i] = p.visible ? p.distance : T(-1);
            radii[i] = p.visible ? p.radius : T(0);
            bounds[i] = p.visible ? sphere::bounds(problem, p) : Bounds{0, 0, 0, 0};
        }
        order.clear();
        for (int64_t i = 0; i < n; ++i)
            if (distances[i] >= 0 && bounds[i].rows > 0 && bounds[i].columns > 0) order.push_back(int32_t(i));
        std::stable_sort(order.begin(), order.end(),
                         [this](int32_t x, int32_t y) { return distances[x] < distances[y]; });

        first.assign(int64_t(tiles_across(problem)) * tiles_up(problem) + 1, 0);
        for (int32_t i : order) {
            const Tiles t = tiles(problem, bounds[i]);
            for (int32_t k = 0; k < t.rows * t.columns; ++k) ++first[tile_of(problem, t, k) + 1];
        }
        std::partial_sum(first.begin(), first.end(), first.begin());
        members.resize(first.back());
        if (backward) {
            pairs.assign(n + 1, 0);
            for (int32_t i : order) {
                const Tiles t = tiles(problem, bounds[i]);
                pairs[i + 1] = int64_t(t.rows) * t.columns;
            }
            std::partial_sum(pairs.begin(), pairs.end(), pairs.begin());
            places.resize(first.back());
        }
        std::vector<int64_t> next(first.begin(), first.end() - 1);
        for (int32_t i : order) {
            const Tiles t = tiles(problem, bounds[i]);
            for (int32_t k = 0; k < t.rows * t.columns; ++k) {
                const int64_t place = next[tile_of(problem, t, k)]++;
                members[place] = i;
                if (backward) places[pairs[i] + k] = place;
            }
        }
    }
};

template <class T>
struct Tile {
    int64_t row, column, rows, columns;  // first pixel and how many are in the image
    alignas(64) T x[TILE_PIXELS], y[TILE_PIXELS], z[TILE_PIXELS];

    Tile(const Problem& problem, int64_t index) {
        row = index / tiles_across(problem) * TILE_HEIGHT;
        column = index % tiles_across(problem) * TILE_WIDTH;
        rows = std::min<int64_t>(TILE_HEIGHT, problem.height - row);
        columns = std::min<int64_t>(TILE_WIDTH, problem.width - column);
        for (int p = 0; p < TILE_PIXELS; ++p) {
            T w[3];
            ray(problem, row + p / TILE_WIDTH, column + p % TILE_WIDTH, w);
            x[p] = w[0];
            y[p] = w[1];
            z[p] = w[2];
        }
    }

    bool inside(int p) const { return p / TILE_WIDTH < rows && p % TILE_WIDTH < columns; }

    // Pixels of the rows that a footprint may touch.
    void range(const Bounds& b, int& from, int& to) const {
        from = int(std::max<int64_t>(0, b.row - row)) * TILE_WIDTH;
        to = int(std::min<int64_t>(rows, b.row + b.rows - row)) * TILE_WIDTH;
    }
};

template <class T>
struct Statistics {
    std::vector<T> weight, peak;  // of each pair
};

// Composites one footprint on pixels `from` to `to`: their weights, the sum and the largest of them.
template <Reach REACH, class T>
void weigh(const Footprint<T>& f, const Tile<T>& tile, int from, int to, int32_t end, T* through, T* open, T* weights,
           int32_t* ends, T& sum, T& largest) {
    T total = 0, most = 0;
#pragma omp simd reduction(+ : total) reduction(max : most)
    for (int p = from; p < to; ++p) {
        const T alpha = opaque<REACH>(f, tile.x[p], tile.y[p], tile.z[p]).alpha;
        const T weight = composite(alpha, through[p], open[p]);
        weights[p] = weight;
        ends[p] = weight > 0 ? end : ends[p];
        total += weight;
        most = weight > most ? weight : most;
    }
    sum = total;
    largest = most;
}

template <class T>
void composite_tile(const Problem& problem, const T* signals, const Lists<T>& lists, int64_t index, T* image,
                    T* transmittances, int32_t* last, Statistics<T>* statistics) {
    const Tile<T> tile(problem, index);
    const int64_t channels = problem.channels, size = problem.height * problem.width;
    alignas(64) T through[TILE_PIXELS], open[TILE_PIXELS], weights[TILE_PIXELS];
    alignas(64) int32_t ends[TILE_PIXELS];
    std::vector<T> colour(channels * TILE_PIXELS, T(0));
    for (int p = 0; p < TILE_PIXELS; ++p) {
        through[p] = 1;
        open[p] = tile.inside(p) ? T(1) : T(0);
        ends[p] = 0;
    }
    const int64_t first = lists.first[index], count = lists.first[index + 1] - first;
    for (int64_t k = 0; k < count; ++k) {
        const int32_t i = lists.members[first + k];
        const Footprint<T> f = lists.footprints[i];
        int from, to;
        tile.range(lists.bounds[i], from, to);
        T total, most;
        const Reach reach = reach_of(f.cosine);
        const auto weigh_it = reach == NEAR ? weigh<NEAR, T> : reach == HALF ? weigh<HALF, T> : weigh<WHOLE, T>;
        weigh_it(f, tile, from, to, int32_t(k + 1), through, open, weights, ends, total, most);
        if (most > 0) {
            for (int64_t c = 0; c < channels; ++c) {
                const T signal = signals[i * channels + c];
                T* to_colour = colour.data() + c * TILE_PIXELS;
#pragma omp simd
                for (int p = from; p < to; ++p) to_colour[p] += weights[p] * signal;
            }
        }
        if (statistics) {
            statistics->weight[first + k] = total;
            statistics->peak[first + k] = most;
        }
        if (k % 16 == 15 && std::all_of(open, open + TILE_PIXELS, [](T o) { return !(o > 0); })) break;
    }
    for (int p = 0; p < TILE_PIXELS; ++p) {
        if (!tile.inside(p)) continue;
        const int64_t pixel = (tile.row + p / TILE_WIDTH) * problem.width + tile.column + p % TILE_WIDTH;
        for (int64_t c = 0; c < channels; ++c) image[c * size + pixel] = colour[c * TILE_PIXELS + p];
        transmittances[pixel] = through[p];
        last[pixel] = ends[p];
    }
}

// One pixel of the below; apart, because compilers vectorise no loop that has structures of its own.
template <Reach REACH, class T>
SPHERE_FN T pull_pixel(const Footprint<T>& f, T x, T y, T z, T shown, T emitted, T& through, T& behind, T& by_u, T& by_a,
                       T& by_b, T& by_opacity) {
    Opaque<T> o = opaque<REACH>(f, x, y, z);
    o.alpha *= shown;
    T by_alpha;
    const T weight = composite_backward(o.alpha, emitted, through, behind, by_alpha);
    const Pulled<T> by = opaque_backward(f, o, by_alpha);
    by_u = by.u;
    by_a = by.a;
    by_b = by.b;
    by_opacity = by.opacity;
    return weight;
}

// The gradient's way back through one footprint, the k-th of the list.
template <Reach REACH, class T>
FootprintGradient<T> pull(const Footprint<T>& f, const Tile<T>& tile, int from, int to, int32_t k, const T* emitted,
                          const int32_t* ends, T* through, T* behind, T* weights) {
    alignas(64) T u[TILE_PIXELS], a[TILE_PIXELS], b[TILE_PIXELS], opacity[TILE_PIXELS];
#pragma omp simd
    for (int p = from; p < to; ++p) {
        const T shown = k < ends[p] ? T(1) : T(0);
        weights[p] = pull_pixel<REACH>(f, tile.x[p], tile.y[p], tile.z[p], shown, emitted[p], through[p], behind[p], u[p],
                                      a[p], b[p], opacity[p]);
    }
    FootprintGradient<T> sum;
    const auto over = [&](const T* x, const T* y) {
        T total = 0;
#pragma omp simd reduction(+ : total)
        for (int p = from; p < to; ++p) total += x[p] * y[p];
        return total;
    };
    const T* rays[3] = {tile.x, tile.y, tile.z};
    for (int d = 0; d < 3; ++d) {
        sum.u[d] = over(u, rays[d]);
        sum.a[d] = over(a, rays[d]);
        sum.b[d] = over(b, rays[d]);
    }
    sum.opacity = 0;
    for (int p = from; p < to; ++p) sum.opacity += opacity[p];
    return sum;
}

// Sums over the pixels of a tile for each of its pairs: the footprint's gradient, then the signal's.
template <class T>
void composite_tile_backward(const Problem& problem, const T* signals, const Lists<T>& lists, int64_t index,
                             const T* by_image, const T* by_transmittance, const T* transmittances,
                             const int32_t* last, FootprintGradient<T>* by_footprint, T* by_signal) {
    const Tile<T> tile(problem, index);
    const int64_t channels = problem.channels, size = problem.height * problem.width;
    alignas(64) T through[TILE_PIXELS], behind[TILE_PIXELS], weights[TILE_PIXELS], emitted[TILE_PIXELS];
    alignas(64) int32_t ends[TILE_PIXELS];
    std::vector<T> by_colour(channels * TILE_PIXELS, T(0));
    int32_t furthest = 0;
    for (int p = 0; p < TILE_PIXELS; ++p) {
        through[p] = 1;
        behind[p] = 0;
        ends[p] = 0;
        if (!tile.inside(p)) continue;
        const int64_t pixel = (tile.row + p / TILE_WIDTH) * problem.width + tile.column + p % TILE_WIDTH;
        through[p] = transmittances[pixel];
        behind[p] = by_transmittance[pixel] * through[p];
        ends[p] = last[pixel];
        furthest = std::max(furthest, ends[p]);
        for (int64_t c = 0; c < channels; ++c) by_colour[c * TILE_PIXELS + p] = by_image[c * size + pixel];
    }
    const int64_t first = lists.first[index], count = lists.first[index + 1] - first;
    for (int64_t k = 0; k < count; ++k) {
        by_footprint[first + k] = FootprintGradient<T>{};
        std::fill_n(by_signal + (first + k) * channels, channels, T(0));
    }
    for (int32_t k = furthest - 1; k >= 0; --k) {
        const int32_t i = lists.members[first + k];
        const Footprint<T> f = lists.footprints[i];
        int from, to;
        tile.range(lists.bounds[i], from, to);
        std::fill(emitted + from, emitted + std::max(from, to), T(0));
        for (int64_t c = 0; c < channels; ++c) {
            const T signal = signals[i * channels + c];
            const T* gradient = by_colour.data() + c * TILE_PIXELS;
#pragma omp simd
            for (int p = from; p < to; ++p) emitted[p] += gradient[p] * signal;
        }
        const Reach reach = reach_of(f.cosine);
        const auto pull_it = reach == NEAR ? pull<NEAR, T> : reach == HALF ? pull<HALF, T> : pull<WHOLE, T>;
        by_footprint[first + k] = pull_it(f, tile, from, to, k, emitted, ends, through, behind, weights);
        for (int64_t c = 0; c < channels; ++c) {
            const T* gradient = by_colour.data() + c * TILE_PIXELS;
            T sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int p = from; p < to; ++p) sum += weights[p] * gradient[p];
            by_signal[(first + k) * channels + c] = sum;
        }
    }
}

template <class T>
void forward(const Problem& problem, const Scene<T>& scene, T* image, T* transmittance, T* radius, T* weight, T* peak,
             int32_t* last) {
    const int64_t n = problem.gaussians, size = problem.height * problem.width;
    Lists<T> lists;
    Statistics<T> statistics;
    for (int64_t r = 0; r < problem.receivers; ++r) {
        lists.build(problem, scene, r, weight != nullptr);
        std::copy(lists.radii.begin(), lists.radii.end(), radius + r * n);
        if (weight) {
            statistics.weight.assign(lists.members.size(), T(0));
            statistics.peak.assign(lists.members.size(), T(0));
        }
        const int64_t tiles = int64_t(lists.first.size()) - 1;
#pragma omp parallel for schedule(dynamic)
        for (int64_t t = 0; t < tiles; ++t)
            composite_tile(problem, scene.signals, lists, t, image + r * problem.channels * size,
                           transmittance + r * size, last + r * size, weight ? &statistics : nullptr);
        if (!weight) continue;
#pragma omp parallel for schedule(static)
        for (int64_t i = 0; i < n; ++i) {
            T sum = 0, most = 0;
            for (int64_t k = lists.pairs[i]; k < lists.pairs[i + 1]; ++k) {
                sum += statistics.weight[lists.places[k]];
                most = std::max(most, statistics.peak[lists.places[k]]);
            }
            weight[r * n + i] = sum;
            peak[r * n + i] = most;
        }
    }
}

template <class T>
void backward(const Problem& problem, const Scene<T>& scene, const T* by_image, const T* by_transmittance,
              const T* transmittance, const int32_t* last, T* by_means, T* by_quaternions, T* by_scales,
              T* by_opacities, T* by_signals, T* by_receivers, T* by_rotations) {
    const int64_t n = problem.gaussians, channels = problem.channels, size = problem.height * problem.width;
    std::fill_n(by_means, 3 * n, T(0));
    std::fill_n(by_quaternions, 4 * n, T(0));
    std::fill_n(by_scales, 3 * n, T(0));
    std::fill_n(by_opacities, n, T(0));
    std::fill_n(by_signals, channels * n, T(0));
    Lists<T> lists;
    std::vector<FootprintGradient<T>> by_footprint;
    std::vector<T> by_signal, by_axes(9 * n), by_mean(3 * n);
    for (int64_t r = 0; r < problem.receivers; ++r) {
        lists.build(problem, scene, r, true);
        by_footprint.resize(lists.members.size());
        by_signal.resize(lists.members.size() * channels);
        const int64_t tiles = int64_t(lists.first.size()) - 1;
#pragma omp parallel for schedule(dynamic)
        for (int64_t t = 0; t < tiles; ++t)
            composite_tile_backward(problem, scene.signals, lists, t, by_image + r * channels * size,
                                    by_transmittance + r * size, transmittance + r * size, last + r * size,
                                    by_footprint.data(), by_signal.data());
        const T* axes = scene.rotations + 9 * r;
#pragma omp parallel for schedule(static)
        for (int64_t i = 0; i < n; ++i) {
            std::fill_n(by_axes.data() + 9 * i, 9, T(0));
            std::fill_n(by_mean.data() + 3 * i, 3, T(0));
            if (lists.pairs[i] == lists.pairs[i + 1]) continue;
            FootprintGradient<T> sum{};
            for (int64_t k = lists.pairs[i]; k < lists.pairs[i + 1]; ++k) {
                const int64_t place = lists.places[k];
                const auto& one = by_footprint[place];
                for (int d = 0; d < 3; ++d) {
                    sum.u[d] += one.u[d];
                    sum.a[d] += one.a[d];
                    sum.b[d] += one.b[d];
                }
                sum.opacity += one.opacity;
                for (int64_t c = 0; c < channels; ++c) by_signals[i * channels + c] += by_signal[place * channels + c];
            }
            const T* quaternion = scene.quaternions + 4 * i;
            const T* scale = scene.scales + 3 * i;
            const auto p = project(scene.means + 3 * i, quaternion, scale, scene.opacities[i],
                                   scene.receivers + 3 * r, axes, T(problem.nearest), T(problem.blur));
            const auto g = project_backward(quaternion, scale, axes, p, sum);
            for (int d = 0; d < 3; ++d) by_means[3 * i + d] += g.mean[d];
            for (int d = 0; d < 4; ++d) by_quaternions[4 * i + d] += g.quaternion[d];
            for (int d = 0; d < 3; ++d) by_scales[3 * i + d] += g.scale[d];
            by_opacities[i] += sum.opacity;
            std::copy_n(g.mean, 3, by_mean.data() + 3 * i);
            std::copy_n(g.axes, 9, by_axes.data() + 9 * i);
        }
        double position[3] = {}, rotation[9] = {};
        for (int64_t i = 0; i < n; ++i) {
            for (int d = 0; d < 3; ++d) position[d] -= double(by_mean[3 * i + d]);
            for (int d = 0; d < 9; ++d) rotation[d] += double(by_axes[9 * i + d]);
        }
        std::copy_n(position, 3, by_receivers + 3 * r);
        std::copy_n(rotation, 9, by_rotations + 9 * r);
    }
}

template <class T>
Scene<T> scene_of(const void* const* in) {
    const auto at = [in](int k) { return static_cast<const T*>(in[k]); };
    return {at(0), at(1), at(2), at(3), at(4), at(5), at(6)};
}

template <class T>
void forward_of(const Problem& problem, const void* const* in, void* const* out) {
    const auto at = [out](int k) { return static_cast<T*>(out[k]); };
    forward(problem, scene_of<T>(in), at(0), at(1), at(2), at(3), at(4), static_cast<int32_t*>(out[5]));
}

template <class T>
void backward_of(const Problem& problem, const void* const* in, void* const* out) {
    const auto at = [in](int k) { return static_cast<const T*>(in[k]); };
    const auto to = [out](int k) { return static_cast<T*>(out[k]); };
    backward(problem, scene_of<T>(in), at(7), at(8), at(9), static_cast<const int32_t*>(in[10]), to(0), to(1), to(2),
             to(3), to(4), to(5), to(6));
}

}  // namespace

// Both return 0, or 1 where memory ran out. `wide` chooses double over float.
// in: means, quaternions, scales, opacities, signals, receivers, rotations; out: image, transmittance, radius,
// weight and peak (both null: not asked for), last.
extern "C" int sphere_cpu_forward(const sphere::Problem* problem, int wide, const void* const* in, void* const* out) {
    try {
        wide ? forward_of<double>(*problem, in, out) : forward_of<float>(*problem, in, out);
    } catch (const std::exception&) {
        return 1;
    }
    return 0;
}

// in: as above, then gradients by image and transmittance, transmittance, last; out: gradients by the seven inputs.
extern "C" int sphere_cpu_backward(const sphere::Problem* problem, int wide, const void* const* in, void* const* out) {
    try {
        wide ? backward_of<double>(*problem, in, out) : backward_of<float>(*problem, in, out);
    } catch (const std::exception&) {
        return 1;
    }
    return 0;
}
