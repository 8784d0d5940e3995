"""Mistakes in the CUDA launchers, and those that show on hardware alone; `mutations.py` plants them."""

from mutation import BINDING, LAUNCH, LISTS, SORT, TILES, Mutation

IN_LAUNCHES = (
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
