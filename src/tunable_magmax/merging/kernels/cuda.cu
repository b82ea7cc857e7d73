// The inner loops for NVIDIA GPUs, compiled at run time (cuda.py). The same bits as the CPU's: compiled without fused
// multiply-add, every rounding is part of the specification (docs/method.md). Only sums of squares may be reordered.
//
// A *table* lists segments: ranges of tensors with the addresses of the base's and all tasks' values, the slot of
// their first bit in the planes and the index of their first element. Its tiles cut them into equal pieces of work.
// A *plane* is a bit set, one bit a slot, in 32-bit words. A *group* is what shares one budget: the model or a tensor.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef unsigned char u8;

#define ALL 0xffffffffu
constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int TILE = 8192;        // elements of a tile
constexpr int ROW = 128;          // elements that a warp looks at together: four words of a plane
constexpr int BATCH = 4;          // tasks whose values are fetched together
constexpr int HELD_BYTES = 64;    // of one task's values that a thread of the survey fetches together
constexpr int SURVEY_BLOCKS = 2;  // of the survey that share a multiprocessor: up to 128 registers a thread
constexpr int PICK_BLOCKS = 5;    // of a draw, likewise: up to 48 registers
constexpr int BINS = 4096;        // of the histogram of undecided lottery numbers
constexpr int CLOSE = 4096;       // undecided numbers that may share one bin
constexpr int KEPT = 512;         // undecided numbers that a block collects before it appends them

enum Kind : u8 { F32, F64, F16, BF16 };

struct Table {
    const i64 *address;  // [(1 + tasks) * segments], the base's first
    const u8 *kind;      // of the same shape: how the values are stored
    const i64 *size, *slot, *element;
    const i64 *tensor, *group;
    const i64 *tile_segment, *tile_start;
    i64 segments, tasks, tiles;
};

struct Target {
    const i64 *address;  // [segments]
    const u8 *kind;
    i64 final;           // 1: base + scale * tau in the output's type; 0: tau in the working type
    double scale;
    double *square;      // of tau, over everything
    u64 *unfit;          // [tensors], set where a result is not finite
    const u64 *state;    // of the auction that decides what is written, if one does
};

// Why what was ordered is not wanted: a draw has missed its threshold, not every tensor is as it was expected to be, or
// elements without an owner must be shared out first.
constexpr u64 MISSED = 1, UNEXPECTED = 2, LEFT_OVER = 4;

template <class R> struct Largest;
template <> struct Largest<float> { static constexpr float value = 3.402823466e+38f; };
template <> struct Largest<double> { static constexpr double value = 1.7976931348623157e+308; };

__device__ inline float magnitude(float x) { return fabsf(x); }
__device__ inline double magnitude(double x) { return fabs(x); }
__device__ inline float larger(float x, float y) { return fmaxf(x, y); }
__device__ inline double larger(double x, double y) { return fmax(x, y); }

// Half floats go by instructions of the device; what emulates one supplies these two.
#ifndef HALVES_SUPPLIED
__device__ inline float half_value(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ inline unsigned short half_bits(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
#endif

template <class R, bool PLAIN> __device__ inline R fetch(i64 address, u8 kind, i64 p) {
    if (PLAIN) return __ldg(reinterpret_cast<const R *>(address) + p);
    switch (kind) {
        case F32: return static_cast<R>(__ldg(reinterpret_cast<const float *>(address) + p));
        case F64: return static_cast<R>(__ldg(reinterpret_cast<const double *>(address) + p));
        case F16: return static_cast<R>(half_value(__ldg(reinterpret_cast<const unsigned short *>(address) + p)));
        default:
            return static_cast<R>(
                __uint_as_float(static_cast<u32>(__ldg(reinterpret_cast<const unsigned short *>(address) + p)) << 16));
    }
}

// Writes a result in its type, to nearest even; float64 goes to 16 bits through float32. Returns whether it is finite.
template <class R> __device__ inline bool store(i64 address, u8 kind, i64 p, R value) {
    if (kind == F64) {
        reinterpret_cast<double *>(address)[p] = static_cast<double>(value);
        return magnitude(static_cast<double>(value)) <= Largest<double>::value;
    }
    const float narrow = static_cast<float>(value);
    if (kind == F32) {
        reinterpret_cast<float *>(address)[p] = narrow;
        return magnitude(narrow) <= Largest<float>::value;
    }
    unsigned short bits;
    if (kind == F16) {
        bits = half_bits(narrow);
        reinterpret_cast<unsigned short *>(address)[p] = bits;
        return (bits & 0x7c00) != 0x7c00;
    }
    const u32 word = __float_as_uint(narrow);
    const bool number = (word & 0x7f800000u) != 0x7f800000u;
    bits = static_cast<unsigned short>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
    if (!number) bits = static_cast<unsigned short>(word >> 16);
    reinterpret_cast<unsigned short *>(address)[p] = bits;
    return number && (bits & 0x7f80) != 0x7f80;
}

// x * c + more, by instructions that multiply 32 bits: left to itself, the compiler takes more of them.
__device__ inline u64 product(u64 x, u64 c, u64 more = 0) {
    const u32 high = u32(x) * u32(c >> 32) + u32(x >> 32) * u32(c);
    return u64(u32(x)) * u32(c) + more + (u64(high) << 32);
}

// A lottery number in two halves of work: stirring is most of it, and the upper bits of the number need little more.
__device__ inline u64 stirred(u64 x) {
    x = product(x ^ (x >> 30), MIX_A);
    return product(x ^ (x >> 27), MIX_B);
}
__device__ inline u64 settled(u64 x) { return x ^ (x >> 31); }
__device__ inline u32 upper(u64 x) { return u32(x >> 32) ^ u32(x >> 63); }  // settled(x) >> 32
__device__ inline u64 seat(u64 lottery_state, u64 element) { return lottery_state + GOLDEN * (element + 1); }
__device__ inline u64 ticket(u64 lottery_state, u64 element) { return settled(stirred(seat(lottery_state, element))); }

template <class V> __device__ inline V block_sum(V value) {
    __shared__ V parts[WARPS];
    for (int step = 16; step; step >>= 1) value += __shfl_down_sync(ALL, value, step);
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    V total = 0;
    for (int w = 0; w < WARPS; ++w) total += parts[w];
    return total;
}

// Whether what was ordered is not wanted any more: all threads of a block get the same answer. `pick` must not spoil marks
// then, and `gather` must not add to sums; the others save time.
__device__ inline bool called_off(const u64 *state) {
    __shared__ u64 seen;
    if (threadIdx.x == 0) seen = *state;
    __syncthreads();
    return seen;
}

struct Place {
    i64 segment, start, stop, slot;
    __device__ Place(const Table &table, i64 tile)
        : segment(table.tile_segment[tile]), start(table.tile_start[tile]) {
        const i64 size = table.size[segment];
        stop = start + TILE < size ? start + TILE : size;
        slot = table.slot[segment] + start;
    }
};

// -- survey: who is a candidate where, what changed, what is not finite ---------------------------------------------

// A warp's values of one kind, 32 elements apart in each lane: `rest` of them, and zeros.
template <class R, u8 KIND, int N> __device__ inline void fetch_as(R (&values)[N], i64 address, i64 first, int rest) {
    const int lane = threadIdx.x % 32;
    const i64 from = address + (first + lane) * (KIND == F64 ? 8 : KIND == F32 ? 4 : 2);
    if (rest >= N * 32) {
#pragma unroll
        for (int j = 0; j < N; ++j) values[j] = fetch<R, false>(from, KIND, j * 32);
    } else {
#pragma unroll
        for (int j = 0; j < N; ++j) values[j] = lane + j * 32 < rest ? fetch<R, false>(from, KIND, j * 32) : R(0);
    }
}

// Looks at the kind once, so that all loads are under way together.
template <class R, bool PLAIN, int N>
__device__ inline void fetch_all(R (&values)[N], i64 address, const u8 *kind, i64 first, int rest) {
    if (PLAIN) return fetch_as<R, sizeof(R) == 8 ? F64 : F32>(values, address, first, rest);
    switch (*kind) {
        case F32: return fetch_as<R, F32>(values, address, first, rest);
        case F64: return fetch_as<R, F64>(values, address, first, rest);
        case F16: return fetch_as<R, F16>(values, address, first, rest);
        default: return fetch_as<R, BF16>(values, address, first, rest);
    }
}

// The lowest bits of a word: all, some or none of them.
__device__ inline u32 lowest(int bits) { return bits >= 32 ? ALL : bits > 0 ? (1u << bits) - 1u : 0u; }

// marks[tensor, task]: twice the row of the plane that gets the task's candidates (negative: none), and 1 if later tasks
// are compared with it. flags[tensor, task]: 1 changed, 2 perhaps not finite. A warp holds what it knows of
// its elements in registers, as many as these allow, and goes through the tasks: what belongs to a task is fetched once,
// and the next task's values are on their way while one's are looked at.
template <class R, bool PLAIN>
__device__ void survey(const Table &table, const i64 *marks, u32 *planes, i64 stride, u64 *flags, double *squares) {
    extern __shared__ __align__(16) u32 noted[];
    constexpr int HELD = HELD_BYTES / sizeof(R);  // elements of a lane, and words of a plane
    static_assert(HELD % 4 == 0, "words are written by fours");
    const Place place(table, blockIdx.x);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int k = threadIdx.x; k < table.tasks; k += THREADS) noted[k] = 0;
    __syncthreads();
    const i64 *addresses = table.address + place.segment;
    const u8 *kinds = table.kind + place.segment;
    const i64 tensor = table.tensor[place.segment];
    marks += tensor * table.tasks;
    double square = 0;
    for (i64 first = place.start + warp * HELD * 32; first < place.stop; first += WARPS * HELD * 32) {
        const int rest = int(place.stop - first);
        R origin[HELD], most[HELD], ahead[HELD];
        fetch_all<R, PLAIN>(origin, addresses[0], kinds, first, rest);
        fetch_all<R, PLAIN>(ahead, addresses[table.segments], kinds + table.segments, first, rest);
#pragma unroll
        for (int j = 0; j < HELD; ++j) most[j] = 0;
        u32 *words = planes + (table.slot[place.segment] + first) / 32;
#pragma unroll 2
        for (int k = 0; k < table.tasks; ++k) {
            R values[HELD];
#pragma unroll
            for (int j = 0; j < HELD; ++j) values[j] = ahead[j];
            if (k + 1 < table.tasks) {
                const i64 next = (k + 2) * table.segments;
                fetch_all<R, PLAIN>(ahead, addresses[next], kinds + next, first, rest);
            }
            const i64 row = marks[k] >> 1;
            const bool takes_part = marks[k] & 1;
            R length = 0;  // of the vector, in a way: zero if nothing changed, not finite if something is not
            u32 found[HELD];
#pragma unroll
            for (int j = 0; j < HELD; ++j) {
                values[j] -= origin[j];
                const R size = magnitude(values[j]);
                length += size;
                found[j] = __ballot_sync(ALL, size >= most[j]);
                if (takes_part) most[j] = larger(most[j], size);
            }
            if (row >= 0 && lane == 0) {
#pragma unroll
                for (int j = 0; j < HELD; j += 4)
                    if (j * 32 < rest)  // elements beyond the end look like candidates: they are cut off
                        *reinterpret_cast<uint4 *>(words + row * stride + j) =
                            uint4{found[j] & lowest(rest - j * 32), found[j + 1] & lowest(rest - j * 32 - 32),
                                  found[j + 2] & lowest(rest - j * 32 - 64), found[j + 3] & lowest(rest - j * 32 - 96)};
            }
            if (k == table.tasks - 1)
#pragma unroll
                for (int j = 0; j < HELD; ++j) square += double(values[j]) * double(values[j]);
            const bool moved = !(length == R(0)), odd = !(length <= Largest<R>::value);
            const u32 seen = (__any_sync(ALL, moved) ? 1u : 0u) | (__any_sync(ALL, odd) ? 2u : 0u);
            if (lane == 0 && (noted[k] & seen) != seen) atomicOr(&noted[k], seen);
        }
    }
    square = block_sum(square);
    if (threadIdx.x == 0) atomicAdd(&squares[tensor], square);
    for (int k = threadIdx.x; k < table.tasks; k += THREADS) {
        u64 *flag = &flags[tensor * table.tasks + k];
        if ((*flag & noted[k]) != noted[k]) atomicOr(flag, u64(noted[k]));
    }
}

// An auction was ordered as if all tensors were merged: it is called off if one has not changed, or may not be finite.
extern "C" __global__ void unexpected(Table table, const u64 *flags, u64 *state) {
    for (i64 s = threadIdx.x; s < table.segments; s += THREADS) {
        u64 seen = 0;
        for (i64 k = 0; k < table.tasks; ++k) seen |= flags[table.tensor[s] * table.tasks + k];
        if (seen != 1) atomicOr(state, UNEXPECTED);
    }
}

// -- the auction, on planes alone -----------------------------------------------------------------------------------

__device__ inline i64 word_of(const Place &place) {
    const i64 word = place.slot / 32 + threadIdx.x;
    return place.start + i64(threadIdx.x) * 32 < place.stop ? word : -1;
}

// Blocks share the tiles in runs, so that sums are added up once a block and kind (a group or tensor). `work` gets
// its word of a tile, -1 for none, with what `load` has read for it: the next tile's words are on their way meanwhile.
// It hears whether the next tile is of another kind.
template <class Load, class Work>
__device__ inline void each_tile(const Table &table, const i64 *kind_of, Load load, Work work) {
    const i64 each = (table.tiles + gridDim.x - 1) / gridDim.x, begin = blockIdx.x * each;
    const i64 end = begin + each < table.tiles ? begin + each : table.tiles;
    if (begin >= end) return;
    Place place(table, begin);
    i64 kind = kind_of[place.segment], word = word_of(place);
    auto words = load(word);
    for (i64 tile = begin; tile < end; ++tile) {
        const bool more = tile + 1 < end;
        const Place next(table, more ? tile + 1 : tile);
        const i64 next_kind = kind_of[next.segment], next_word = more ? word_of(next) : -1;
        const auto next_words = load(next_word);
        work(place, kind, word, words, !more || next_kind != kind);
        place = next;
        kind = next_kind;
        word = next_word;
        words = next_words;
    }
}

// What is known of a word of elements: which are marked in a plane, which are free, which are marked in the next plane.
struct Words {
    u32 marked, open, later;
};

// Every element is free.
extern "C" __global__ void open_free(Table table, u32 *free) {
    const Place place(table, blockIdx.x);
    const i64 word = word_of(place);
    if (word < 0) return;
    const i64 left = place.stop - (place.start + i64(threadIdx.x) * 32);
    free[word] = lowest(left >= 32 ? 32 : int(left));
}

// The winners of the task before are no longer free; counts the candidates of the next.
extern "C" __global__ void count(Table table, const u32 *plane, u32 *free, const u32 *won, u64 *candidates) {
    u64 mine = 0;
    const auto load = [&](i64 word) {
        if (word < 0) return Words{0, 0, 0};
        const u32 open = won ? free[word] & ~won[word] : free[word];
        return Words{plane[word], open, 0};
    };
    each_tile(table, table.group, load, [&](const Place &, i64 group, i64 word, const Words &words, bool last) {
        if (won && word >= 0) free[word] = words.open;
        mine += __popc(words.marked & words.open);
        if (last) {
            const u64 total = block_sum(mine);
            if (threadIdx.x == 0 && total) atomicAdd(&candidates[group], total);
            mine = 0;
        }
    });
}

// Numbers below `low` win, those up to `high` need a closer look. Five deviations: a miss is told and drawn again.
struct Window {
    bool everyone, nobody;
    u64 low, high;
    int shift;
    __device__ Window(i64 wanted, i64 candidates, double deviations) {
        everyone = wanted >= candidates;
        nobody = wanted <= 0;
        low = high = 0;
        shift = 0;
        if (everyone || nobody) return;
        const double share = double(wanted) / double(candidates);
        const double half = (deviations * sqrt(double(candidates) * share * (1 - share)) + 16) / double(candidates);
        // Whole steps of the upper 32 bits, so that these decide.
        low = share > half ? u64((share - half) * 4294967296.0) << 32 : 0;
        high = share + half < 1 ? u64((share + half) * 4294967296.0) << 32 | ALL : ~0ull;
        const int bits = 64 - __clzll(static_cast<i64>(high - low));
        shift = bits > 12 ? bits - 12 : 0;
    }
};

struct Draw {
    const i64 *wanted, *candidates;  // [groups]
    u64 *winners, *undecided;        // [groups]
    u64 *keys, *places;              // of undecided numbers, by group
    const i64 *first, *room;         // [groups]: where a group's begin, and how many fit
    u32 *histogram;                  // [groups, BINS]
    u64 *close_keys, *close_places;  // [groups, CLOSE]
    u32 *close;                      // [groups]
    u64 *state;
    double deviations;
    i64 groups;
};

__device__ inline void append(const Draw &draw, i64 group, u64 at, u64 key, u64 place, const Window &window) {
    if (at < u64(draw.room[group])) {
        draw.keys[draw.first[group] + at] = key;
        draw.places[draw.first[group] + at] = place;
        atomicAdd(&draw.histogram[group * BINS + ((key - window.low) >> window.shift)], 1u);
    } else {
        atomicOr(draw.state, MISSED);
    }
}

// What becomes of winners: they join what their row holds, or take its place; they are no longer free where `free` is
// given, and so no candidates of the next task, whose plane and number of candidates [groups] are kept up to date where
// given. That plane may be the free elements.
struct Sequel {
    i64 join;
    u32 *free;
    const u32 *plane;
    u64 *candidates;
};

extern "C" __global__ void __launch_bounds__(THREADS, PICK_BLOCKS)
    pick(Table table, const u32 *plane, const u32 *free, u32 *won, i64 lottery_state, Draw draw, Sequel sequel) {
    __shared__ u64 keys[KEPT], places[KEPT];
    __shared__ u32 kept;
    __shared__ u64 offset;
    u64 winners = 0, others = 0;
    if (called_off(draw.state)) return;
    if (sequel.join && draw.groups == 1 && draw.wanted[0] <= 0) return;  // nobody joins; of many groups, some may
    if (threadIdx.x == 0) kept = 0;
    __syncthreads();
    i64 known = -1;
    Window window(0, 0, 0);
    const auto load = [&](i64 word) {
        return word < 0 ? Words{0, 0, 0} : Words{plane[word], free[word], sequel.plane ? sequel.plane[word] : 0};
    };
    each_tile(table, table.group, load, [&](const Place &place, i64 group, i64 word, const Words &words, bool last) {
        if (group != known) {
            window = Window(draw.wanted[group], draw.candidates[group], draw.deviations);
            known = group;
        }
        if (word >= 0) {
            const u32 open = words.open, later = words.later;
            u32 left = words.marked & open, taken = 0;
            if (window.everyone) {
                taken = left;
            } else if (!window.nobody) {
                const i64 inside = place.start + i64(threadIdx.x) * 32;
                const u64 start = seat(u64(lottery_state), u64(table.element[place.segment] + inside));
                const u32 low = u32(window.low >> 32), high = u32(window.high >> 32);
                while (left) {
                    const u32 j = 31 - __clz(left), bit = 1u << j;
                    left ^= bit;
                    const u64 stir = stirred(product(j, GOLDEN, start));
                    const u32 lead = upper(stir);
                    if (lead < low) taken |= bit;
                    if (lead - low <= high - low) {
                        const u64 key = settled(stir), spot = u64(word) * 32 + j;
                        const u32 at = atomicAdd(&kept, 1u);
                        if (at < KEPT) {
                            keys[at] = key;
                            places[at] = spot;
                        } else {
                            append(draw, group, atomicAdd(&draw.undecided[group], 1ull), key, spot, window);
                        }
                    }
                }
            }
            won[word] = sequel.join ? won[word] | taken : taken;
            if (sequel.free && taken) sequel.free[word] = open & ~taken;
            winners += __popc(taken);
            others += __popc(later & open & ~taken);
        }
        if (last) {
            const u64 total = block_sum(winners), further = block_sum(others);
            winners = others = 0;
            const u32 found = kept < KEPT ? kept : KEPT;
            if (threadIdx.x == 0) {
                if (total) atomicAdd(&draw.winners[group], total);
                if (further) atomicAdd(&sequel.candidates[group], further);
                if (found) offset = atomicAdd(&draw.undecided[group], u64(found));
            }
            __syncthreads();
            for (u32 i = threadIdx.x; i < found; i += THREADS)
                append(draw, group, offset + i, keys[i], places[i], window);
            __syncthreads();
            if (threadIdx.x == 0) kept = 0;
            __syncthreads();
        }
    });
}

// A late winner; returns whether the next task loses it as a candidate.
__device__ inline bool give(u32 *won, const Sequel &sequel, u64 place) {
    const u32 bit = 1u << (place % 32);
    const bool lost = sequel.plane && sequel.plane[place / 32] & bit;
    atomicOr(&won[place / 32], bit);
    if (sequel.free) atomicAnd(&sequel.free[place / 32], ~bit);
    return lost;
}

__device__ inline void forget(const Sequel &sequel, i64 group, u64 lost) {
    lost = block_sum(lost);
    if (threadIdx.x == 0 && lost) atomicAdd(&sequel.candidates[group], ~lost + 1);
}

// Undecided numbers in bins below the decisive one win; those in it are listed for `finish`. blockIdx.x is the group.
extern "C" __global__ void settle(u32 *won, Draw draw, u64 *rest, Sequel sequel) {
    __shared__ u32 sums[THREADS];
    __shared__ u32 decisive, before;
    if (called_off(draw.state)) return;
    const i64 group = blockIdx.x;
    const Window window(draw.wanted[group], draw.candidates[group], draw.deviations);
    if (window.everyone || window.nobody) return;
    const i64 wanted = draw.wanted[group] - i64(draw.winners[group]);
    const i64 undecided = i64(draw.undecided[group]);
    if (wanted < 0 || wanted > undecided || undecided > draw.room[group]) {
        if (threadIdx.x == 0) atomicOr(draw.state, MISSED);
        return;
    }
    if (wanted == 0) return;
    constexpr int EACH = BINS / THREADS;
    const u32 *histogram = draw.histogram + group * BINS;
    u32 mine = 0;
    for (int b = 0; b < EACH; ++b) mine += histogram[threadIdx.x * EACH + b];
    sums[threadIdx.x] = mine;
    __syncthreads();
    for (int step = 1; step < THREADS; step <<= 1) {
        const u32 more = threadIdx.x >= step ? sums[threadIdx.x - step] : 0;
        __syncthreads();
        sums[threadIdx.x] += more;
        __syncthreads();
    }
    u32 sum = sums[threadIdx.x] - mine;
    if (sum < u64(wanted) && u64(wanted) <= sum + mine) {
        int b = threadIdx.x * EACH;
        while (sum + histogram[b] < u64(wanted)) sum += histogram[b++];
        decisive = b;
        before = sum;
    }
    __syncthreads();
    if (blockIdx.y == 0 && threadIdx.x == 0) rest[group] = u64(wanted) - before;
    u64 lost = 0;
    for (i64 i = blockIdx.y * i64(THREADS) + threadIdx.x; i < undecided; i += i64(gridDim.y) * THREADS) {
        const u64 key = draw.keys[draw.first[group] + i], place = draw.places[draw.first[group] + i];
        const u32 bin = u32((key - window.low) >> window.shift);
        if (bin < decisive) {
            lost += give(won, sequel, place);
        } else if (bin == decisive) {
            const u32 at = atomicAdd(&draw.close[group], 1u);
            if (at < CLOSE) {
                draw.close_keys[group * CLOSE + at] = key;
                draw.close_places[group * CLOSE + at] = place;
            } else {
                atomicOr(draw.state, MISSED);
            }
        }
    }
    forget(sequel, group, lost);
}

// The smallest of the listed numbers win, of equal ones the earlier element; then everything is made ready for the next
// draw. A block a group.
extern "C" __global__ void finish(u32 *won, Draw draw, u64 *rest, Sequel sequel, u64 *candidates, i64 *counts) {
    const i64 group = blockIdx.x;
    const u32 found = draw.close[group] < CLOSE ? draw.close[group] : CLOSE;
    const u32 listed = called_off(draw.state) ? 0 : found;
    const u64 *keys = draw.close_keys + group * CLOSE, *places = draw.close_places + group * CLOSE;
    u64 lost = 0;
    for (u32 i = threadIdx.x; i < listed; i += THREADS) {
        u64 smaller = 0;
        for (u32 j = 0; j < listed; ++j)
            smaller += keys[j] < keys[i] || (keys[j] == keys[i] && places[j] < places[i]);
        if (smaller < rest[group]) lost += give(won, sequel, places[i]);
    }
    forget(sequel, group, lost);
    for (int b = threadIdx.x; b < BINS; b += THREADS) draw.histogram[group * BINS + b] = 0;
    if (threadIdx.x == 0) {
        if (counts) {
            const i64 wanted = draw.wanted[group], found = i64(candidates[group]);
            counts[group] = wanted < found ? wanted : found;
        }
        draw.winners[group] = draw.undecided[group] = rest[group] = candidates[group] = 0;
        draw.close[group] = 0;
    }
}

// Rule 6: what nobody owns goes to the tasks with budget left, in order: their portions, and how much there is before
// each [tasks, groups]. If portions are not drawn at once, whatever follows has to wait.
extern "C" __global__ void divide(i64 tasks, i64 groups, const i64 *wanted, const i64 *got, const i64 *unowned,
                                  i64 *portions, i64 *remaining, i64 at_once, u64 *state) {
    for (i64 g = threadIdx.x; g < groups; g += THREADS) {
        i64 left = unowned[g];
        if (left && !at_once) atomicOr(state, LEFT_OVER);
        for (i64 t = 0; t < tasks; ++t) {
            const i64 rest = wanted[t * groups + g] - got[t * groups + g], portion = rest < left ? rest : left;
            portions[t * groups + g] = portion;
            remaining[t * groups + g] = left;
            left -= portion;
        }
    }
}

// Elements of each row in each tensor: counts[tensor, k]. blockIdx.y is k.
extern "C" __global__ void tally(Table table, const i64 *rows, const u32 *planes, i64 stride, u64 *counts) {
    const i64 row = rows[blockIdx.y];
    if (row < 0) return;
    u64 mine = 0;
    const auto load = [&](i64 word) { return word < 0 ? 0u : planes[row * stride + word]; };
    each_tile(table, table.tensor, load, [&](const Place &, i64 tensor, i64, u32 owned, bool last) {
        mine += __popc(owned);
        if (last) {
            const u64 total = block_sum(mine);
            if (threadIdx.x == 0 && total) atomicAdd(&counts[tensor * gridDim.y + blockIdx.y], total);
            mine = 0;
        }
    });
}

// -- choosing by magnitude ------------------------------------------------------------------------------------------

// Bit patterns of non-negative floats order like the floats; wide codes are those of float64.
template <class R> __device__ inline u64 code_of(R size, bool wide) {
    if (wide) return u64(__double_as_longlong(double(size)));
    return u64(__float_as_uint(float(size)));
}

struct Cut {
    i64 task, wide;
    const u32 *plane, *free;
    const i64 *wanted, *candidates;  // [groups]
    const i64 *codes;                // [groups]: the digits above, or the threshold
};

template <class R>
__device__ inline bool candidate(const Table &table, const Place &place, const Cut &cut, i64 p, u64 *code) {
    if (p >= place.stop) return false;
    const i64 slot = table.slot[place.segment] + p;
    if (!((cut.plane[slot / 32] & cut.free[slot / 32]) >> (slot % 32) & 1u)) return false;
    const i64 at = (cut.task + 1) * table.segments + place.segment;
    const R value = fetch<R, false>(table.address[at], table.kind[at], p);
    const R origin = fetch<R, false>(table.address[place.segment], table.kind[place.segment], p);
    *code = code_of(magnitude(value - origin), cut.wide);
    return true;
}

template <class R>
__device__ void magnitudes(const Table &table, const Cut &cut, i64 shift, i64 bits, u64 *histogram) {
    const Place place(table, blockIdx.x);
    const i64 group = table.group[place.segment];
    if (cut.wanted[group] >= cut.candidates[group]) return;
    const u64 above = u64(cut.codes[group]);
    for (i64 p = place.start + threadIdx.x; p < place.stop; p += THREADS) {
        u64 code;
        if (candidate<R>(table, place, cut, p, &code) && (code >> (shift + bits)) == above)
            atomicAdd(&histogram[(group << bits) + i64((code >> shift) & ((1ull << bits) - 1))], 1ull);
    }
}

template <class R> __device__ void sever(const Table &table, const Cut &cut, u32 *won, u32 *level) {
    const Place place(table, blockIdx.x);
    const i64 group = table.group[place.segment];
    const bool everyone = cut.wanted[group] >= cut.candidates[group];
    const u64 threshold = u64(cut.codes[group]);
    const int lane = threadIdx.x % 32;
    for (i64 first = place.start + threadIdx.x - lane; first < place.stop; first += THREADS) {
        u64 code = 0;
        const bool found = candidate<R>(table, place, cut, first + lane, &code);
        const u32 above = __ballot_sync(ALL, found && (everyone || code > threshold));
        const u32 equal = __ballot_sync(ALL, found && !everyone && code == threshold);
        if (lane == 0) {
            won[(table.slot[place.segment] + first) / 32] = above;
            level[(table.slot[place.segment] + first) / 32] = equal;
        }
    }
}

// -- merged values --------------------------------------------------------------------------------------------------

template <class R> struct Emitter {
    const Target &target;
    i64 address;
    u8 kind;
    R scale;
    double square;
    bool fits;
    __device__ Emitter(const Target &target, i64 segment)
        : target(target), address(target.address[segment]), kind(target.kind[segment]), scale(R(target.scale)),
          square(0), fits(true) {}
    __device__ void operator()(i64 p, R origin, R tau) {
        square += double(tau) * double(tau);
        if (target.final) {
            const R moved = scale * tau;
            fits &= store<R>(address, kind, p, origin + moved);
        } else {
            reinterpret_cast<R *>(address)[p] = tau;
        }
    }
    __device__ void close(const Table &table, i64 segment) {
        if (!fits) target.unfit[table.tensor[segment]] = 1;
        square = block_sum(square);
        if (threadIdx.x == 0) atomicAdd(target.square, square);
    }
};

// Lane i brings row i of a square of bits, and gets column i: squares of half the size change places, again and again.
__device__ inline u32 turned(u32 row) {
    const int lane = threadIdx.x % 32;
    u32 low = 0x0000ffffu;
#pragma unroll
    for (int half = 16; half; half >>= 1) {
        const bool below = lane & half;
        const u32 kept = below ? ~low : low;
        const u32 other = __shfl_xor_sync(ALL, row, half);
        row = (row & kept) | (__funnelshift_l(other, other, below ? 32 - half : half) & ~kept);
        low ^= low << (half / 2);
    }
    return row;
}

// Each element from its owner; rows[k] is the plane of what task tasks[k] owns.
template <class R, bool PLAIN>
__device__ void gather(const Table &table, const Target &target, const i64 *tasks, const i64 *rows, i64 owners,
                       const u32 *planes, i64 stride) {
    extern __shared__ __align__(16) u32 noted[];
    if (*target.state) return;
    const Place place(table, blockIdx.x);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    i64 *addresses = reinterpret_cast<i64 *>(noted);  // of each owner's values
    for (int k = threadIdx.x; k < owners; k += THREADS)
        addresses[k] = table.address[(tasks[k] + 1) * table.segments + place.segment];
    __syncthreads();
    Emitter<R> emit(target, place.segment);
    const i64 base = table.address[place.segment];
    const u8 base_kind = table.kind[place.segment];
    for (i64 first = place.start + warp * ROW; first < place.stop; first += WARPS * ROW) {
        R origin[4], value[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const i64 p = first + j * 32 + lane;
            origin[j] = p < place.stop ? fetch<R, PLAIN>(base, base_kind, p) : R(0);
        }
        const i64 word = (table.slot[place.segment] + first) / 32;
        u32 owner[4] = {0, 0, 0, 0};
        for (int k0 = 0; k0 < owners; k0 += 32) {
            uint4 words = {0, 0, 0, 0};
            if (k0 + lane < owners)
                words = __ldg(reinterpret_cast<const uint4 *>(planes + __ldg(rows + k0 + lane) * stride + word));
            const u32 owning[4] = {turned(words.x), turned(words.y), turned(words.z), turned(words.w)};
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (owning[j]) owner[j] = k0 + __ffs(owning[j]) - 1;
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const i64 p = first + j * 32 + lane;
            const i64 at = (tasks[owner[j]] + 1) * table.segments + place.segment;
            value[j] = p < place.stop ? fetch<R, PLAIN>(addresses[owner[j]], PLAIN ? u8(0) : table.kind[at], p) : R(0);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const i64 p = first + j * 32 + lane;
            if (p < place.stop) emit(p, origin[j], value[j] - origin[j]);
        }
    }
    emit.close(table, place.segment);
}

__device__ inline void add_counts(const Table &table, i64 segment, u32 *found, u64 *counts) {
    __syncthreads();
    for (int k = threadIdx.x; k < table.tasks; k += THREADS)
        if (found[k]) atomicAdd(&counts[table.tensor[segment] * table.tasks + k], u64(found[k]));
}

// One count for each distinct owner in the warp, not one for each element.
__device__ inline void note_owner(u32 *found, int owner, bool inside) {
    u32 waiting = __ballot_sync(ALL, inside);
    while (waiting) {
        const int leader = __ffs(waiting) - 1;
        const int chosen = __shfl_sync(ALL, owner, leader);
        const u32 same = __ballot_sync(ALL, inside && owner == chosen);
        if (int(threadIdx.x % 32) == leader) atomicAdd(&found[chosen], u32(__popc(same)));
        waiting &= ~same;
    }
}

// MAGMAX: the difference of largest magnitude, the later task's on a tie.
template <class R, bool PLAIN> __device__ void largest(const Table &table, const Target &target, u64 *counts) {
    extern __shared__ __align__(16) u32 noted[];
    const Place place(table, blockIdx.x);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int k = threadIdx.x; k < table.tasks; k += THREADS) noted[k] = 0;
    __syncthreads();
    Emitter<R> emit(target, place.segment);
    const i64 base = table.address[place.segment];
    const u8 base_kind = table.kind[place.segment];
    for (i64 first = place.start + warp * ROW; first < place.stop; first += WARPS * ROW) {
        R origin[4], best[4] = {0, 0, 0, 0};
        int owner[4] = {0, 0, 0, 0};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const i64 p = first + j * 32 + lane;
            origin[j] = p < place.stop ? fetch<R, PLAIN>(base, base_kind, p) : R(0);
        }
        for (i64 k0 = 0; k0 < table.tasks; k0 += BATCH) {
            R values[BATCH][4];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                if (k0 + i < table.tasks) {
                    const i64 at = (k0 + i + 1) * table.segments + place.segment;
                    const i64 address = table.address[at];
                    const u8 kind = PLAIN ? u8(0) : table.kind[at];
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const i64 p = first + j * 32 + lane;
                        values[i][j] = p < place.stop ? fetch<R, PLAIN>(address, kind, p) : R(0);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < BATCH; ++i)
                if (k0 + i < table.tasks)
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const R difference = values[i][j] - origin[j];
                        if (magnitude(difference) >= magnitude(best[j])) {
                            best[j] = difference;
                            owner[j] = int(k0) + i;
                        }
                    }
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const i64 p = first + j * 32 + lane;
            if (p < place.stop) emit(p, origin[j], best[j]);
            note_owner(noted, owner[j], p < place.stop);
        }
    }
    emit.close(table, place.segment);
    add_counts(table, place.segment, noted, counts);
}

// Random mix: the first of the drawn tasks whose top is not below the element's lottery number.
template <class R>
__device__ void mixed(const Table &table, const Target &target, const i64 *tasks, const i64 *tops, i64 lottery_state,
                      u64 *counts) {
    extern __shared__ __align__(16) u32 noted[];
    const Place place(table, blockIdx.x);
    for (int k = threadIdx.x; k < table.tasks; k += THREADS) noted[k] = 0;
    __syncthreads();
    Emitter<R> emit(target, place.segment);
    for (i64 first = place.start + threadIdx.x / 32 * 32; first < place.stop; first += THREADS) {
        const i64 p = first + threadIdx.x % 32;
        const bool inside = p < place.stop;
        int owner = 0;
        if (inside) {
            const u64 number = ticket(u64(lottery_state), u64(table.element[place.segment] + p));
            int k = 0;
            while (number > u64(tops[k])) ++k;
            owner = int(tasks[k]);
            const i64 at = (owner + 1) * table.segments + place.segment;
            const R origin = fetch<R, false>(table.address[place.segment], table.kind[place.segment], p);
            emit(p, origin, fetch<R, false>(table.address[at], table.kind[at], p) - origin);
        }
        note_owner(noted, owner, inside);
    }
    emit.close(table, place.segment);
    add_counts(table, place.segment, noted, counts);
}

// The sum of factor * difference over some tasks, in float64 and task order, rounded once.
template <class R>
__device__ void weighted(const Table &table, const Target &target, const i64 *tasks, const double *factors,
                         i64 terms) {
    const Place place(table, blockIdx.x);
    Emitter<R> emit(target, place.segment);
    for (i64 p = place.start + threadIdx.x; p < place.stop; p += THREADS) {
        const R origin = fetch<R, false>(table.address[place.segment], table.kind[place.segment], p);
        double sum = 0;
        for (i64 k = 0; k < terms; ++k) {
            const i64 at = (tasks[k] + 1) * table.segments + place.segment;
            const R difference = fetch<R, false>(table.address[at], table.kind[at], p) - origin;
            sum += factors[k] * double(difference);
        }
        emit(p, origin, R(sum));
    }
    emit.close(table, place.segment);
}

// One task's vector.
template <class R> __device__ void single(const Table &table, const Target &target, i64 task) {
    const Place place(table, blockIdx.x);
    Emitter<R> emit(target, place.segment);
    const i64 at = (task + 1) * table.segments + place.segment;
    for (i64 p = place.start + threadIdx.x; p < place.stop; p += THREADS) {
        const R origin = fetch<R, false>(table.address[place.segment], table.kind[place.segment], p);
        emit(p, origin, fetch<R, false>(table.address[at], table.kind[at], p) - origin);
    }
    emit.close(table, place.segment);
}

// TIES: the mean of the kept values whose sign is that of their sum.
template <class R>
__device__ void elected(const Table &table, const Target &target, const i64 *tasks, const double *factors,
                        const double *shares, const i64 *rows, i64 terms, const u32 *planes, i64 stride) {
    const Place place(table, blockIdx.x);
    Emitter<R> emit(target, place.segment);
    for (i64 p = place.start + threadIdx.x; p < place.stop; p += THREADS) {
        const R origin = fetch<R, false>(table.address[place.segment], table.kind[place.segment], p);
        const i64 slot = table.slot[place.segment] + p;
        double total = 0, agreed = 0, votes = 0;
        for (int round = 0; round < 2; ++round)
            for (i64 k = 0; k < terms; ++k) {
                if (!(planes[rows[k] * stride + slot / 32] >> (slot % 32) & 1u)) continue;
                const i64 at = (tasks[k] + 1) * table.segments + place.segment;
                const R difference = fetch<R, false>(table.address[at], table.kind[at], p) - origin;
                const double value = factors[k] * double(difference);
                if (round == 0) {
                    total += value;
                } else if (value * double((total > 0) - (total < 0)) > 0) {
                    agreed += value;
                    votes += shares[k];
                }
            }
        emit(p, origin, R(agreed / (votes != 0 ? votes : 1.0)));
    }
    emit.close(table, place.segment);
}

// base + scale * tau, for a tau that lies ready in the working type; taus[segment] is its address.
template <class R, bool PLAIN> __device__ void step(const Table &table, const Target &target, const i64 *taus) {
    const Place place(table, blockIdx.x);
    const i64 address = target.address[place.segment], base = table.address[place.segment];
    const u8 kind = target.kind[place.segment], base_kind = table.kind[place.segment];
    const R *tau = reinterpret_cast<const R *>(taus[place.segment]);
    const R scale = R(target.scale);
    bool fits = true;
    for (i64 first = place.start + threadIdx.x; first < place.stop; first += 4 * THREADS) {
        R origin[4], value[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const i64 p = first + j * THREADS;
            if (p < place.stop) {
                origin[j] = fetch<R, PLAIN>(base, base_kind, p);
                value[j] = tau[p];
            }
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const i64 p = first + j * THREADS;
            if (p < place.stop) {
                const R moved = scale * value[j];
                fits &= store<R>(address, kind, p, origin[j] + moved);
            }
        }
    }
    if (!fits) target.unfit[table.tensor[place.segment]] = 1;
}

#define ENTRIES(R, REAL)                                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS, SURVEY_BLOCKS)                                               \
        survey_plain_##R(Table t, const i64 *marks, u32 *planes, i64 stride, u64 *flags, double *squares) {            \
        survey<REAL, true>(t, marks, planes, stride, flags, squares);                                                  \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, SURVEY_BLOCKS)                                               \
        survey_##R(Table t, const i64 *marks, u32 *planes, i64 stride, u64 *flags, double *squares) {                  \
        survey<REAL, false>(t, marks, planes, stride, flags, squares);                                                 \
    }                                                                                                                  \
    extern "C" __global__ void magnitudes_##R(Table t, Cut cut, i64 shift, i64 bits, u64 *histogram) {                 \
        magnitudes<REAL>(t, cut, shift, bits, histogram);                                                              \
    }                                                                                                                  \
    extern "C" __global__ void sever_##R(Table t, Cut cut, u32 *won, u32 *level) { sever<REAL>(t, cut, won, level); }  \
    extern "C" __global__ void gather_plain_##R(Table t, Target out, const i64 *tasks, const i64 *rows, i64 owners,    \
                                                const u32 *planes, i64 stride) {                                       \
        gather<REAL, true>(t, out, tasks, rows, owners, planes, stride);                                               \
    }                                                                                                                  \
    extern "C" __global__ void gather_##R(Table t, Target out, const i64 *tasks, const i64 *rows, i64 owners,          \
                                          const u32 *planes, i64 stride) {                                             \
        gather<REAL, false>(t, out, tasks, rows, owners, planes, stride);                                              \
    }                                                                                                                  \
    extern "C" __global__ void largest_plain_##R(Table t, Target out, u64 *counts) {                                   \
        largest<REAL, true>(t, out, counts);                                                                           \
    }                                                                                                                  \
    extern "C" __global__ void largest_##R(Table t, Target out, u64 *counts) { largest<REAL, false>(t, out, counts); } \
    extern "C" __global__ void mixed_##R(Table t, Target out, const i64 *tasks, const i64 *tops, i64 lottery_state,             \
                                         u64 *counts) {                                                                \
        mixed<REAL>(t, out, tasks, tops, lottery_state, counts);                                                                \
    }                                                                                                                  \
    extern "C" __global__ void weighted_##R(Table t, Target out, const i64 *tasks, const double *factors, i64 terms) { \
        weighted<REAL>(t, out, tasks, factors, terms);                                                                 \
    }                                                                                                                  \
    extern "C" __global__ void single_##R(Table t, Target out, i64 task) { single<REAL>(t, out, task); }               \
    extern "C" __global__ void elected_##R(Table t, Target out, const i64 *tasks, const double *factors,               \
                                           const double *shares, const i64 *rows, i64 terms, const u32 *planes,        \
                                           i64 stride) {                                                               \
        elected<REAL>(t, out, tasks, factors, shares, rows, terms, planes, stride);                                    \
    }                                                                                                                  \
    extern "C" __global__ void step_plain_##R(Table t, Target out, const i64 *taus) { step<REAL, true>(t, out, taus); }\
    extern "C" __global__ void step_##R(Table t, Target out, const i64 *taus) { step<REAL, false>(t, out, taus); }

ENTRIES(f32, float)
ENTRIES(f64, double)
