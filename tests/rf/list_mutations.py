"""Mistakes in the CUDA kernels that make the lists of tiles; `mutations.py` plants them."""

from mutation import LISTS, Mutation

IN_LISTS = (
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
    Mutation("one search for runs and no more", LISTS, "some += MERGE_WAYS * int64_t(run))", "some += end)"),
    Mutation(
        "a run between searches skipped",
        LISTS,
        "some += MERGE_WAYS * int64_t(run))",
        "some += (MERGE_WAYS + 1) * int64_t(run))",
    ),
    Mutation(
        "last run of a search forgotten",
        LISTS,
        "i < MERGE_WAYS; ++i) place += before[i];",
        "i < MERGE_WAYS - 1; ++i) place += before[i];",
    ),
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
)
"""What is planted there."""
