"""Mistakes in the CUDA sources of the rasterizer; `mutations.py` plants them."""

from mutation import BINDING, LAUNCH, LISTS, SORT, TILES, WALK, Mutation

ON_CUDA = (
    # Lists.
    Mutation(
        "item numbered by its Gaussian",
        LISTS,
        "item = receiver * problem.gaussians + gaussian;",
        "item = gaussian * problem.receivers + receiver;",
    ),
    Mutation(
        "pairs summed over half a warp",
        LISTS,
        "item and those before\n#pragma unroll\n    for (int m = 1; m < 32;",
        "item and those before\n#pragma unroll\n    for (int m = 1; m < 16;",
    ),
    Mutation("owner of a pair off by one", LISTS, "if (end <= pair) owner += step;", "if (end < pair) owner += step;"),
    Mutation("pairs beyond the last", LISTS, "        if (pair >= total) continue;\n", ""),
    Mutation(
        "stale counts of the block before", LISTS, "t += ITEM_THREADS) counts[t] = 0;", "t += ITEM_THREADS) (void)t;"
    ),
    Mutation(
        "radius of what is not visible",
        LISTS,
        "radii[x.item] = p.visible ? p.radius : 0.0f;",
        "radii[x.item] = p.radius;",
    ),
    Mutation(
        "sort up to half of an odd count",
        LISTS,
        "while (size < count) size *= 2;",
        "while (2 * size <= count) size *= 2;",
    ),
    Mutation(
        "merge without turning the second half",
        LISTS,
        "high = 2 * j == k ? base + k - 1 - offset : low + j;",
        "high = low + j;",
    ),
    Mutation(
        "warps don't wait at stride 64",
        LISTS,
        "if (j > 32 || (j == 1 && k >= 64))",
        "if (j > 64 || (j == 1 && k >= 64))",
    ),
    Mutation(
        "warps don't wait before stride 64",
        LISTS,
        "if (j > 32 || (j == 1 && k >= 64))",
        "if (j > 32 || (j == 1 && k > 64))",
    ),
    Mutation("warps don't wait between sizes", LISTS, "if (j > 32 || (j == 1 && k >= 64))", "if (j > 32)"),
    Mutation("lanes don't wait", LISTS, "            else\n                __syncwarp();\n", ""),
    Mutation("ties in any order", LISTS, "if (a > b) {", "if ((a >> 9) > (b >> 9)) {"),
    Mutation("farthest first within a chunk", LISTS, "if (a > b) {", "if (a < b) {"),
    Mutation(
        "count of the call before", LISTS, "    if (blockIdx.x == 0 && threadIdx.x == 0) state.status[0] = 0;\n", ""
    ),
    Mutation(
        "farthest first on CUDA",
        LISTS,
        "distance = __float_as_uint(p.distance) & 0x7fffffffu;",
        "distance = ~__float_as_uint(p.distance) & 0x7fffffffu;",
    ),
    Mutation(
        "what is not visible in the lists",
        LISTS,
        "p.visible ? tiles(problem, bounds(problem, p)) : Tiles{0, 0, 0, 0};",
        "tiles(problem, bounds(problem, p));",
    ),
    Mutation(
        "chunks of the first receiver",
        LISTS,
        "given = all + int64_t(receiver) * gaussians + from;",
        "given = all + from;",
    ),
    Mutation("chunk beyond the receiver's last", LISTS, "count = min(gaussians - from, CHUNK);", "count = CHUNK;"),
    Mutation("no wait for loaded keys", LISTS, "keys[k] = given[k];\n    __syncthreads();", "keys[k] = given[k];"),
    Mutation("keys beyond the count", LISTS, "if (high < count) {", "if (high < CHUNK) {"),
    Mutation("first receiver's keys merged", LISTS, "    keys += int64_t(receiver) * gaussians;\n", ""),
    Mutation("all receivers' keys to the first", LISTS, "    merged += int64_t(receiver) * gaussians;\n", ""),
    Mutation("runs merged to the front", LISTS, "int64_t place = first;", "int64_t place = 0;"),
    Mutation("runs merged with none", LISTS, "first = k & -all,", "first = k & -int64_t(run),"),
    Mutation("runs of another group", LISTS, "end = min(first + all, int64_t(gaussians));", "end = gaussians;"),
    Mutation(
        "last run searched beyond its end",
        LISTS,
        "size[i] = int32_t(min(int64_t(run), end - some - i * int64_t(run)));",
        "size[i] = run;",
    ),
    Mutation("four runs and no more", LISTS, "some < end; some += 4 * int64_t(run))", "some < end; some += end)"),
    Mutation("fourth run forgotten", LISTS, "before[1] + before[2] + before[3];", "before[1] + before[2];"),
    Mutation(
        "no run comes before as a whole", LISTS, "for (int32_t step = run; step;", "for (int32_t step = run / 2; step;"
    ),
    Mutation(
        "merge in the other order", LISTS, "next - 1] < key) before[i] = next;", "next - 1] > key) before[i] = next;"
    ),
    Mutation("key before itself", LISTS, "next - 1] < key) before[i] = next;", "next - 1] <= key) before[i] = next;"),
    Mutation("merge by distance alone", LISTS, "+ next - 1] < key) before", "+ next - 1] >> 9 < key >> 9) before"),
    Mutation(
        "first row of the item for that of the band",
        LISTS,
        "row = __shfl_sync(ALL, lowest, owner);",
        "row = __shfl_sync(ALL, int32_t(range.x), owner);",
    ),
    Mutation(
        "first row of a band alone",
        LISTS,
        "range.x + range.y - 1, (first + count - 1) / across);",
        "range.x + range.y - 1, first / across);",
    ),
    Mutation(
        "tiles of other bands", LISTS, "if (tile >= first && tile < first + count) f(owner, tile);", "f(owner, tile);"
    ),
    Mutation("ranks taken for items", LISTS, "+ uint32_t(order[x.item] & mask) : 0;", "+ uint32_t(x.gaussian) : 0;"),
    Mutation("items of the first receiver", LISTS, "uint32_t(x.item - x.gaussian) + uint32_t(order", "uint32_t(order"),
    Mutation("receivers mixed", LISTS, "uint64_t(x.receiver) << scratch.distance_end | ", ""),
    Mutation(
        "sign of what is no number", LISTS, "__float_as_uint(p.distance) & 0x7fffffffu;", "__float_as_uint(p.distance);"
    ),
    Mutation(
        "a bit less of a key", LISTS, "while (int64_t(1) << needed < count)", "while (int64_t(2) << needed < count)"
    ),
    Mutation(
        "receivers among the distances",
        LISTS,
        "distance_end = gaussian_bits + 31;",
        "distance_end = gaussian_bits + 30;",
    ),
    Mutation(
        "memory of the sort used twice", LISTS, "more = before + blocks * (tiles / problem.receivers);", "more = keys;"
    ),
    Mutation("lengths overwritten", LISTS, "last = lengths + tiles;", "last = lengths;"),
    Mutation("weights on top of what was there", LISTS, "weights[x.item] = peaks[x.item] = 0;", "peaks[x.item] = 0;"),
    Mutation("peaks on top of what was there", LISTS, "weights[x.item] = peaks[x.item] = 0;", "weights[x.item] = 0;"),
    Mutation(
        "ranks beyond the last have pairs",
        LISTS,
        "return x.inside ? scratch.ranges[item] : make_ushort4(0, 0, 0, 0);",
        "return scratch.ranges[item];",
    ),
    Mutation("no wait for zeroed counts", LISTS, "counts[t] = 0;\n        __syncthreads();", "counts[t] = 0;"),
    Mutation(
        "no wait for counts",
        LISTS,
        "atomicAdd(counts + (tile - first), 1); });\n        __syncthreads();",
        "atomicAdd(counts + (tile - first), 1); });",
    ),
    Mutation(
        "counts of another block",
        LISTS,
        "scratch.before[int64_t(blockIdx.x) * tiles + first + t] = counts[t];",
        "scratch.before[first + t] = counts[t];",
    ),
    Mutation(
        "counts of the first band",
        LISTS,
        "scratch.before[int64_t(blockIdx.x) * tiles + first + t] = counts[t];",
        "scratch.before[int64_t(blockIdx.x) * tiles + t] = counts[t];",
    ),
    Mutation(
        "blocks of the first receiver",
        LISTS,
        "mine = scratch.before + receiver * blocks * tiles + tile;",
        "mine = scratch.before + tile;",
    ),
    Mutation(
        "last blocks not summed",
        LISTS,
        "each = parts(blocks, SEGMENTS);",
        "each = blocks < SEGMENTS ? 1 : blocks / SEGMENTS;",
    ),
    Mutation(
        "no wait for sums", LISTS, "sums[segment][lane] = sum;\n    __syncthreads();", "sums[segment][lane] = sum;"
    ),
    Mutation(
        "a segment's sum with its own",
        LISTS,
        "        if (s == segment) upto = all;\n        all += sums[s][lane];",
        "        all += sums[s][lane];\n        if (s == segment) upto = all;",
    ),
    Mutation("pairs of the block for those before", LISTS, "            mine[b * tiles] = upto;\n", ""),
    Mutation(
        "inclusive sums",
        LISTS,
        "            mine[b * tiles] = upto;\n            upto += count;",
        "            upto += count;\n            mine[b * tiles] = upto;",
    ),
    Mutation(
        "rooms summed over half a warp",
        LISTS,
        "int64_t end = all;\n#pragma unroll\n    for (int m = 1; m < 32;",
        "int64_t end = all;\n#pragma unroll\n    for (int m = 1; m < 16;",
    ),
    Mutation(
        "tiles of a warp share a room",
        LISTS,
        "start = __shfl_sync(ALL, start, 31) + (unsigned long long)(end - all);",
        "start = __shfl_sync(ALL, start, 31);",
    ),
    Mutation(
        "all receivers' rooms to the first",
        LISTS,
        "state.starts[receiver * tiles + tile] = int32_t(start);",
        "state.starts[tile] = int32_t(start);",
    ),
    Mutation(
        "first receiver's lengths", LISTS, "state.lengths[receiver * tiles + tile] = all;", "state.lengths[tile] = all;"
    ),
    Mutation(
        "overflow at the last place", LISTS, "full = state.status[0] > capacity;", "full = state.status[0] >= capacity;"
    ),
    Mutation(
        "overflow one pair late", LISTS, "full = state.status[0] > capacity;", "full = state.status[0] > capacity + 1;"
    ),
    Mutation("overflow left untold", LISTS, "        state.status[1] = full;\n", "        state.status[1] = 0;\n"),
    Mutation(
        "count told cut to the room",
        LISTS,
        "if (told) *told = state.status[0];",
        "if (told) *told = full ? capacity : state.status[0];",
    ),
    Mutation(
        "marks of the block before",
        LISTS,
        "marks[w][t] = 0;\n        __syncthreads();",
        "(void)w;\n        __syncthreads();",
    ),
    Mutation("no wait for zeroed marks", LISTS, "marks[w][t] = 0;\n        __syncthreads();", "marks[w][t] = 0;"),
    Mutation("no wait for marks", LISTS, "1u << lane); });\n        __syncthreads();", "1u << lane); });"),
    Mutation(
        "marks of all warps in one",
        LISTS,
        "atomicOr(&marks[warp][tile - first], 1u << lane)",
        "atomicOr(&marks[0][tile - first], 1u << lane)",
    ),
    Mutation("items of the first warp", LISTS, "items[32 * w + __ffs(left) - 1]", "items[__ffs(left) - 1]"),
    Mutation(
        "lists of the first receiver",
        LISTS,
        "state.starts[x.receiver * tiles + first + t] +",
        "state.starts[first + t] +",
    ),
    Mutation(
        "pairs of blocks before overwritten",
        LISTS,
        "                             scratch.before[int64_t(blockIdx.x) * tiles + first + t];",
        "                             0 * scratch.before[0];",
    ),
    # A warp's walk.
    Mutation(
        "last columns not drawn",
        WALK,
        "inside = row < problem.height && column < problem.width;",
        "inside = row < problem.height && column < problem.width - 1;",
    ),
    Mutation(
        "reach beyond 90 degrees forgotten",
        WALK,
        "            evaluate_as<WHOLE>(which, ray, seen);",
        "            evaluate_as<HALF>(which, ray, seen);",
    ),
    Mutation(
        "signals of another receiver's items",
        WALK,
        "signal = given + (item - before) * channels;",
        "signal = given + item * channels;",
    ),
    Mutation(
        "many channels: signals of other items",
        WALK,
        "return given + (room.items[k] - before) * channels;",
        "return given + room.items[k] * channels;",
    ),
    Mutation(
        "sums of the wrong lanes",
        WALK,
        "sent = upper ? v[i] : v[i + HALF], kept = upper ? v[i + HALF] : v[i];",
        "sent = upper ? v[i + HALF] : v[i], kept = upper ? v[i] : v[i + HALF];",
    ),
    Mutation(
        "patches of a tile in one column",
        WALK,
        "TILE_WIDTH + part % across_tile * WIDTH;",
        "TILE_WIDTH + part / across_tile * WIDTH;",
    ),
    Mutation("patches as high as wide", WALK, "part / across_tile * HEIGHT;", "part / across_tile * WIDTH;"),
    Mutation(
        "no room and yet a list",
        WALK,
        "count = state.status[1] ? 0 : state.lengths[whole];",
        "count = state.lengths[whole];",
    ),
    Mutation(
        "box around one pixel",
        WALK,
        "largest_of<COUNT>(inside ? fabsf(dot(off, axes[d])) : 0.0f) + 2e-6f;",
        "(inside ? fabsf(dot(off, axes[d])) : 0.0f) + 2e-6f;",
    ),
    Mutation("all footprints near", WALK, "near = (near || done == queued) && !wide;", "near = true;"),
    Mutation("near if the last are", WALK, "near = (near || done == queued) && !wide;", "near = !wide;"),
    Mutation(
        "wide if none is near",
        WALK,
        "wide = __any_sync(ALL, reached && next.cosine <= float(NEAR_COSINE));",
        "wide = !__any_sync(ALL, reached && next.cosine > float(NEAR_COSINE));",
    ),
    Mutation(
        "nearer of two first on the way back",
        WALK,
        "BACKWARD ? 0u - (2u << lane) : (1u << lane) - 1;",
        "(1u << lane) - 1;",
    ),
    Mutation(
        "queue in any order",
        WALK,
        "(queued + __popc(all & earlier)) % QUEUE;",
        "(queued + __popc(all & ~earlier) - 1) % QUEUE;",
    ),
    Mutation("places of the first window", WALK, "room.places[k] = from + lane;", "room.places[k] = lane;"),
    Mutation("no wait for the queue", WALK, "queued += __popc(all);\n        __syncwarp();", "queued += __popc(all);"),
    Mutation("queue overrun", WALK, "constexpr uint32_t QUEUE = 64;", "constexpr uint32_t QUEUE = 32;"),
    Mutation(
        "those that came last left over",
        WALK,
        "return queued - done >= (last ? 1u : GROUP);",
        "return queued - done >= GROUP;",
    ),
    Mutation("beyond the queue's end", WALK, "seen[q].alpha = there[q] ? seen[q].alpha : 0.0f;", "(void)there;"),
    Mutation("halves evaluate the same", WALK, "HALVES * q + (HALVES == 2 ? threadIdx.x / 16 % 2 : 0);", "HALVES * q;"),
    Mutation(
        "half of the warp swapped",
        WALK,
        "(HALVES == 2 ? threadIdx.x / 16 % 2 : 0);",
        "(HALVES == 2 ? 1 - threadIdx.x / 16 % 2 : 0);",
    ),
    Mutation("evaluated twice", WALK, "done = min(done + GROUP, queued);", "done = min(done + TOGETHER, queued);"),
    Mutation("some dropped", WALK, "done = min(done + GROUP, queued);", "done = queued;"),
    Mutation(
        "statistics of half a patch",
        WALK,
        "for (int m = COUNT / 2; m; m /= 2) x += ",
        "for (int m = COUNT / 4; m; m /= 2) x += ",
    ),
    Mutation(
        "peak of half a patch",
        WALK,
        "for (int m = COUNT / 2; m; m /= 2) x = max",
        "for (int m = COUNT / 4; m; m /= 2) x = max",
    ),
    Mutation("sums of half a patch", WALK, "return COUNT == 32 ? v[0] + from_other_half(v[0]) : v[0];", "return v[0];"),
    # Compositing.
    Mutation(
        "fetched without a look at the end",
        TILES,
        "window.expect(lane < patch.count, lane);",
        "window.expect(true, lane);",
    ),
    Mutation(
        "second window fetched without a look",
        TILES,
        "window.fetch(32 + lane < patch.count, 32 + lane);",
        "window.fetch(true, 32 + lane);",
    ),
    Mutation(
        "next windows fetched without a look",
        TILES,
        "window.fetch(from + 64 + lane < patch.count, from + 64 + lane);",
        "window.fetch(true, from + 64 + lane);",
    ),
    Mutation(
        "window skipped",
        TILES,
        "window.fetch(from + 64 + lane < patch.count, from + 64 + lane);",
        "window.fetch(from + 96 + lane < patch.count, from + 96 + lane);",
    ),
    Mutation(
        "window skipped on the way back",
        TILES,
        "window.fetch(from >= 64, from - 64 + lane);",
        "window.fetch(from >= 96, from - 96 + lane);",
    ),
    Mutation("what the other half emits forgotten", TILES, "other = from_other_half(emitted);", "other = emitted;"),
    Mutation(
        "last window without a gradient",
        TILES,
        "final = (furthest + 31) / 32 * 32 - 32;",
        "final = furthest / 32 * 32 - 32;",
    ),
    Mutation("second half's colour forgotten", TILES, "colour[c] += from_other_half(colour[c]);", "(void)c;"),
    Mutation("overflow shows in no image", TILES, "= colour[c] + none;", "= colour[c];"),
    Mutation(
        "overflow shows in no transmittance",
        TILES,
        "transmittances[place] = through + none;",
        "transmittances[place] = through;",
    ),
    Mutation(
        "overflow shows in no gradient",
        TILES,
        "by_means[3 * i + d] = all.mean[d] + none;",
        "by_means[3 * i + d] = all.mean[d];",
    ),
    Mutation("overflow shows in no pose", TILES, "float whole = none;", "float whole = 0;"),
    Mutation(
        "overflow shows in no signal",
        TILES,
        "by_signals[i * channels + c] = none;",
        "by_signals[i * channels + c] = 0;",
    ),
    Mutation("no gradient by the transmittance read", TILES, "patch.inside && by_transmittance ?", "patch.inside ?"),
    Mutation(
        "transmittance's gradient without transmittance",
        TILES,
        "by_transmittance[place] * through : 0.0f",
        "by_transmittance[place] : 0.0f",
    ),
    Mutation(
        "gradient by another receiver's image",
        TILES,
        "? by_image[(patch.receiver * channels + c) * size",
        "? by_image[c * size",
    ),
    Mutation("gradients a and b swapped", TILES, "by.a * w[2], by.b * w[0],", "by.b * w[2], by.a * w[0],"),
    Mutation(
        "signal's gradient by the opacity",
        TILES,
        "c < CHANNELS ? weight * by_colour",
        "c < CHANNELS ? o.alpha * by_colour",
    ),
    Mutation(
        "only the last receiver's gradient on CUDA", TILES, "all.mean[d] += g.mean[d];", "all.mean[d] = g.mean[d];"
    ),
    Mutation(
        "only the last receiver's signal",
        TILES,
        "by_signals[i * channels + c] += sum[10 + c];",
        "by_signals[i * channels + c] = sum[10 + c];",
    ),
    Mutation(
        "receiver's gradient with the means' sign on CUDA",
        TILES,
        "{-g.mean[0], -g.mean[1], -g.mean[2]}",
        "{g.mean[0], g.mean[1], g.mean[2]}",
    ),
    Mutation("all poses' sums to the first receiver", TILES, "by_receivers + 3 * r + d :", "by_receivers + d :"),
    Mutation(
        "poses summed over half a block",
        TILES,
        "half < GATHER_THREADS / 16; ++half",
        "half < GATHER_THREADS / 32; ++half",
    ),
    Mutation(
        "no wait for poses",
        TILES,
        "        __syncthreads();\n        if (threadIdx.x < 12) {",
        "        if (threadIdx.x < 12) {",
    ),
    Mutation(
        "poses of the next receiver",
        TILES,
        "        }\n        __syncthreads();\n    }\n    if (!inside) return;",
        "        }\n    }\n    if (!inside) return;",
    ),
    Mutation("poses nobody asked for", TILES, "        if (!poses) continue;  // the same for every thread\n", ""),
    Mutation(
        "weights of the halves swapped",
        TILES,
        "weight = second ? weight_b : weight_a;\n                }\n",
        "weight = second ? weight_a : weight_b;\n                }\n",
    ),
    Mutation(
        "alphas of the halves swapped",
        TILES,
        "composite(second ? other : mine, through, open);",
        "composite(second ? mine : other, through, open);",
    ),
    Mutation(
        "weights' gradients of the halves swapped",
        TILES,
        "weight = second ? weight_b : weight_a;\n                    by_alpha",
        "weight = second ? weight_a : weight_b;\n                    by_alpha",
    ),
    Mutation(
        "opacities' gradients of the halves swapped",
        TILES,
        "by_alpha = second ? by_alpha_b : by_alpha_a;",
        "by_alpha = second ? by_alpha_a : by_alpha_b;",
    ),
    Mutation(
        "end before the last",
        TILES,
        "end = weight > 0 ? room.places[k] + 1 : end;",
        "end = weight > 0 ? room.places[k] : end;",
    ),
    Mutation("end of one half", TILES, "        end = max(end, from_other_half(end));\n", ""),
    Mutation(
        "gradient of what closed a pixel",
        TILES,
        "o.alpha = room.places[k] < end ? o.alpha : 0.0f;",
        "o.alpha = room.places[k] <= end ? o.alpha : 0.0f;",
    ),
    Mutation(
        "gradient beyond the end on CUDA", TILES, "o.alpha = room.places[k] < end ? o.alpha : 0.0f;", "(void)end;"
    ),
    Mutation(
        "end of the warp's first pixel",
        TILES,
        "furthest = largest_of<COUNT>(end),",
        "furthest = __shfl_sync(ALL, end, 0),",
    ),
    Mutation(
        "statistics of the first half alone",
        TILES,
        "if (lane % COUNT == 0 && most > 0) {",
        "if (lane == 0 && most > 0) {",
    ),
    Mutation("gradients of a whole patch twice", TILES, " && lane % COUNT < 16) atomicAdd", ") atomicAdd"),
    Mutation("last ones not composited", TILES, "window.ready(from + 32 >= patch.count)", "window.ready(false)"),
    Mutation("last ones not composited on the way back", TILES, "window.ready(from == 0)", "window.ready(false)"),
    # Launchers.
    Mutation(
        "gradients on top of what was there",
        LAUNCH,
        "    cudaMemsetAsync(call->sums, 0, 4 * items * (10 + problem.channels), stream);\n",
        "",
    ),
    Mutation(
        "receivers' gradients on top of what was there",
        TILES,
        "    if (thread < 3 * problem.receivers) by_receivers[thread] = 0;",
        "    ",
    ),
    Mutation(
        "a third of the rotations' gradients zeroed",
        TILES,
        "if (thread < 9 * problem.receivers) by_rotations",
        "if (thread < 3 * problem.receivers) by_rotations",
    ),
    Mutation("three channels in two", LAUNCH, "if (channels <= 2)", "if (channels <= 3)"),
    Mutation("seven channels in six", LAUNCH, "if (channels <= 6)", "if (channels <= 7)"),
    Mutation("many channels in 22", LAUNCH, "if (channels <= 22)", "if (channels <= 38)"),
    Mutation(
        "last Gaussians not gathered",
        LAUNCH,
        "gather<<<blocks(problem.gaussians, GATHER_THREADS),",
        "gather<<<unsigned(problem.gaussians / GATHER_THREADS),",
    ),
    Mutation(
        "blocks across receivers",
        LAUNCH,
        "item_blocks = unsigned(receivers) * blocks(gaussians, ITEM_THREADS);",
        "item_blocks = blocks(items, ITEM_THREADS);",
    ),
    Mutation(
        "chunks across receivers",
        LAUNCH,
        "chunks = unsigned(receivers) * blocks(gaussians, CHUNK);",
        "chunks = blocks(items, CHUNK);",
    ),
    Mutation(
        "merged across receivers",
        LAUNCH,
        "merge_blocks = unsigned(receivers) * blocks(gaussians, MERGE_THREADS);",
        "merge_blocks = blocks(items, MERGE_THREADS);",
    ),
    Mutation(
        "rooms across receivers",
        LAUNCH,
        "sum_blocks = unsigned(receivers) * blocks(tiles / receivers, 32);",
        "sum_blocks = blocks(tiles, 32);",
    ),
    Mutation(
        "receivers not sorted", LAUNCH, "last = scratch.distance_end + bits(receivers);", "last = scratch.distance_end;"
    ),
    Mutation("nearest bits not sorted", LAUNCH, "scratch.gaussian_bits, last,", "scratch.gaussian_bits + 8, last,"),
    Mutation("two runs not merged", LAUNCH, "run < gaussians; run *= fan)", "2 * run < gaussians; run *= fan)"),
    Mutation("merged once", LAUNCH, "run < gaussians; run *= fan)", "run < gaussians; run = gaussians)"),
    Mutation("order before the merge", LAUNCH, "        std::swap(order, other);\n", ""),
    # Seen on hardware alone: the emulation runs one thread at a time, on one stream, and launches whatever it is asked.
    Mutation(
        "bounds of a launch too low",
        LISTS,
        "__launch_bounds__(SORT_THREADS) sort_chunks",
        "__launch_bounds__(SORT_THREADS / 4) sort_chunks",
        hardware=True,
    ),
    Mutation("gradients without atomics", TILES, "atomicAdd(sum + slot, total);", "sum[slot] += total;", hardware=True),
    Mutation(
        "waits for the device",
        LAUNCH,
        "        sort_chunks<<<",
        "        cudaDeviceSynchronize();\n        sort_chunks<<<",
        hardware=True,
    ),
    Mutation(
        "counts without atomics",
        LISTS,
        "atomicAdd(counts + (tile - first), 1); });",
        "++counts[tile - first]; });",
        hardware=True,
    ),
    Mutation(
        "marks without atomics",
        LISTS,
        "atomicOr(&marks[warp][tile - first], 1u << lane);",
        "marks[warp][tile - first] |= 1u << lane;",
        hardware=True,
    ),
    Mutation(
        "rooms without atomics",
        LISTS,
        "start = atomicAdd(reinterpret_cast<unsigned long long*>(state.status), (unsigned long long)(end));",
        "start = state.status[0], state.status[0] += end;",
        hardware=True,
    ),
    Mutation(
        "statistics without atomics",
        TILES,
        "atomicAdd(weights + room.items[k], sum);",
        "weights[room.items[k]] += sum;",
        hardware=True,
    ),
    Mutation(
        "zeroed on another stream",
        LAUNCH,
        "cudaMemsetAsync(call->sums, 0, 4 * items * (10 + problem.channels), stream);",
        "cudaMemset(call->sums, 0, 4 * items * (10 + problem.channels));",
        hardware=True,
    ),
    Mutation("keys at odd words", BINDING, "apart = words + words % 2", "apart = words", hardware=True),
    Mutation("sorted on another stream", SORT, "first, last, stream);", "first, last, nullptr);", hardware=True),
    Mutation(
        "composited on another stream",
        LAUNCH,
        "composite_tiles<CHANNELS, HALVES><<<patch_blocks<HALVES>(tiles), PATCH_THREADS, 0, stream>>>",
        "composite_tiles<CHANNELS, HALVES><<<patch_blocks<HALVES>(tiles), PATCH_THREADS>>>",
        hardware=True,
    ),
)
"""What is planted there."""
