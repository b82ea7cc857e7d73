// A GPU for tests: what cuda.cu asks of one, on the CPU. Blocks run one after the other. A block's threads are fibers of
// one OS thread: each runs until it meets others, at a barrier or a vote of its warp, and then the next one does.
//
// One warp goes on until all of it waits at a barrier, before the next is begun, from the first to the last or
// backwards: what holds only in one of these orders lacks a barrier. A meeting that not all come to is an error, as are
// loads that are not aligned, arguments that do not fit, and writes behind the shared memory that was asked for.
#pragma once

#include <math.h>
#include <setjmp.h>
#include <ucontext.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <tuple>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ thread_local  // one block at a time, in one OS thread: what that keeps is the block's
#define HALVES_SUPPLIED

struct Index {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
Index gridDim, blockIdx, threadIdx;

namespace gpu {

constexpr unsigned WARP = 32;
constexpr size_t STACK = 64 << 10, SHARED = 48 << 10;
constexpr unsigned char POISON = 0xa5;

enum State { READY, VOTING, AT_BARRIER, ENDED };

struct Fiber {
    ucontext_t start;
    jmp_buf here;
    bool begun = false;
    State state = READY;
    int line = 0;         // of the meeting where it waits
    uint64_t value = 0;   // what it brings to a vote
    std::vector<char> stack = std::vector<char>(STACK);
};

struct Warp {
    uint64_t values[WARP];  // of the last vote, by lane
    uint32_t ballot;
};

std::vector<Fiber> fibers;
std::vector<Warp> warps;
Fiber *self;
jmp_buf scheduler;
std::function<void()> body;
char error[400];

// Back to the scheduler, until the meeting is complete.
void pause(State state, int line) {
    self->state = state;
    self->line = line;
    if (!_setjmp(self->here)) _longjmp(scheduler, 1);
}

void fail(const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(error, sizeof error, format, values);
    va_end(values);
}

// Fibers are used again for the next block: making one costs more than a small kernel.
void live() {
    for (;;) {
        body();
        pause(ENDED, 0);
    }
}

void resume(unsigned thread) {
    self = &fibers[thread];
    threadIdx.x = thread;
    if (_setjmp(scheduler)) return;
    if (self->begun) _longjmp(self->here, 1);
    self->begun = true;
    getcontext(&self->start);
    self->start.uc_stack.ss_sp = self->stack.data();
    self->start.uc_stack.ss_size = STACK;
    makecontext(&self->start, live, 0);
    setcontext(&self->start);
}

// A warp, until all of its lanes are at a barrier or at their end.
void run_warp(unsigned warp, bool backwards) {
    Fiber *lanes = &fibers[warp * WARP];
    for (;;) {
        for (unsigned k = 0; k < WARP && !*error; ++k) {
            const unsigned lane = backwards ? WARP - 1 - k : k;
            if (lanes[lane].state == READY) resume(warp * WARP + lane);
        }
        if (*error) return;
        unsigned voting = 0, together = 0;
        int line = 0;
        for (unsigned k = 0; k < WARP; ++k)
            if (lanes[k].state == VOTING) {
                if (!voting++) line = lanes[k].line;
                together += lanes[k].line == line;
            }
        if (!voting) return;
        if (together < WARP)
            return fail("line %d: a vote that %u of a warp's 32 lanes do not come to (block %u, %u, warp %u)", line,
                        WARP - together, blockIdx.x, blockIdx.y, warp);
        warps[warp].ballot = 0;
        for (unsigned k = 0; k < WARP; ++k) {
            warps[warp].values[k] = lanes[k].value;
            warps[warp].ballot |= uint32_t(lanes[k].value != 0) << k;
            lanes[k].state = READY;
        }
    }
}

void run_block(bool backwards) {
    for (Fiber &fiber : fibers) fiber.state = READY;
    for (;;) {
        for (unsigned k = 0; k < warps.size() && !*error; ++k)
            run_warp(backwards ? unsigned(warps.size()) - 1 - k : k, backwards);
        if (*error) return;
        unsigned waiting = 0, together = 0;
        int line = 0;
        for (const Fiber &fiber : fibers)
            if (fiber.state == AT_BARRIER) {
                if (!waiting++) line = fiber.line;
                together += fiber.line == line;
            }
        if (!waiting) return;
        if (together < fibers.size())
            return fail("line %d: a barrier that %zu of %zu threads do not come to (block %u, %u)", line,
                        fibers.size() - together, fibers.size(), blockIdx.x, blockIdx.y);
        for (Fiber &fiber : fibers) fiber.state = READY;
    }
}

const Warp &vote(unsigned mask, uint64_t value, int line) {
    if (mask != ~0u) {
        fail("line %d: a vote of some lanes only (%08x), expected of all", line, mask);
        pause(ENDED, line);
    }
    self->value = value;
    pause(VOTING, line);
    return warps[threadIdx.x / WARP];
}

template <class To, class From> To same_bits(From value) {
    static_assert(sizeof(To) >= sizeof(From));
    To bits{};
    memcpy(&bits, &value, sizeof value);
    return bits;
}

template <class V> V of_lane(const Warp &warp, unsigned lane) {
    V value;
    memcpy(&value, &warp.values[lane], sizeof value);
    return value;
}

}  // namespace gpu

// The memory that a launch asks for, under the name that cuda.cu gives it.
thread_local __align__(16) unsigned noted[gpu::SHARED / sizeof(unsigned)];

namespace gpu {

struct Launch {
    unsigned grid_x, grid_y, threads;
    size_t shared, backwards, count;
    void **arguments;
    const size_t *sizes;
};

template <class... A, size_t... I>
void call(void (*kernel)(A...), void **arguments, std::index_sequence<I...>) {
    kernel(*static_cast<A *>(arguments[I])...);
}

// Runs a kernel; what was wrong, or null.
template <class... A> const char *run(void (*kernel)(A...), const Launch &launch) {
    *error = 0;
    const size_t sizes[] = {sizeof(A)...};
    if (launch.count != sizeof...(A)) fail("the kernel takes %zu arguments, not %zu", sizeof...(A), launch.count);
    for (size_t k = 0; k < sizeof...(A) && !*error; ++k)
        if (sizes[k] != launch.sizes[k])
            fail("argument %zu has %zu bytes in the kernel, not %zu", k, sizes[k], launch.sizes[k]);
    if (launch.shared > SHARED) fail("%zu bytes of shared memory, there are %zu", launch.shared, SHARED);
    if (launch.threads % WARP) fail("%u threads are not whole warps", launch.threads);
    if (!*error && fibers.size() != launch.threads) fibers = std::vector<Fiber>(launch.threads);
    warps.resize(launch.threads / WARP);
    body = [&] { call(kernel, launch.arguments, std::index_sequence_for<A...>()); };
    gridDim = {launch.grid_x, launch.grid_y};
    for (blockIdx.y = 0; blockIdx.y < gridDim.y && !*error; ++blockIdx.y)
        for (blockIdx.x = 0; blockIdx.x < gridDim.x && !*error; ++blockIdx.x) {
            memset(noted, POISON, SHARED);
            run_block(launch.backwards);
            const unsigned char *bytes = reinterpret_cast<unsigned char *>(noted);
            for (size_t k = launch.shared; k < SHARED && !*error; ++k)
                if (bytes[k] != POISON) fail("a write to byte %zu of %zu of shared memory", k, launch.shared);
        }
    if (*error) fibers.clear();  // they are in the middle of things
    return *error ? error : nullptr;
}

}  // namespace gpu

#define KERNEL(name) \
    extern "C" const char *launch_##name(const gpu::Launch *launch) { return gpu::run(name, *launch); }

inline void __syncthreads(int line = __builtin_LINE()) { gpu::pause(gpu::AT_BARRIER, line); }

inline unsigned __ballot_sync(unsigned mask, bool yes, int line = __builtin_LINE()) {
    return gpu::vote(mask, yes, line).ballot;
}

inline bool __any_sync(unsigned mask, bool yes, int line = __builtin_LINE()) {
    return gpu::vote(mask, yes, line).ballot != 0;
}

template <class V> V __shfl_sync(unsigned mask, V value, int lane, int line = __builtin_LINE()) {
    return gpu::of_lane<V>(gpu::vote(mask, gpu::same_bits<uint64_t>(value), line), unsigned(lane) % gpu::WARP);
}

template <class V> V __shfl_xor_sync(unsigned mask, V value, unsigned other, int line = __builtin_LINE()) {
    const gpu::Warp &warp = gpu::vote(mask, gpu::same_bits<uint64_t>(value), line);
    return gpu::of_lane<V>(warp, (threadIdx.x ^ other) % gpu::WARP);
}

// Lanes that would read beyond the warp keep their own value.
template <class V> V __shfl_down_sync(unsigned mask, V value, unsigned step, int line = __builtin_LINE()) {
    const gpu::Warp &warp = gpu::vote(mask, gpu::same_bits<uint64_t>(value), line);
    const unsigned lane = threadIdx.x % gpu::WARP;
    return gpu::of_lane<V>(warp, lane + step < gpu::WARP ? lane + step : lane);
}

template <class V> V __ldg(const V *place, int line = __builtin_LINE()) {
    if (reinterpret_cast<uintptr_t>(place) % alignof(V)) {
        gpu::fail("line %d: a load of %zu bytes at %p, which is not aligned", line, sizeof(V), (const void *)place);
        gpu::pause(gpu::ENDED, line);
    }
    return *place;
}

template <class V> V atomicAdd(V *place, V more) {
    const V before = *place;
    *place += more;
    return before;
}

template <class V> V atomicOr(V *place, V more) {
    const V before = *place;
    *place |= more;
    return before;
}

template <class V> V atomicAnd(V *place, V mask) {
    const V before = *place;
    *place &= mask;
    return before;
}

inline int __popc(unsigned word) { return __builtin_popcount(word); }
inline int __ffs(unsigned word) { return __builtin_ffs(int(word)); }
inline int __clz(unsigned word) { return word ? __builtin_clz(word) : 32; }
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
    return unsigned(((uint64_t(high) << 32 | low) << by % 32) >> 32);
}
inline int __clzll(long long word) { return word ? __builtin_clzll(static_cast<unsigned long long>(word)) : 64; }
inline unsigned __float_as_uint(float value) { return gpu::same_bits<unsigned>(value); }
inline float __uint_as_float(unsigned bits) { return gpu::same_bits<float>(bits); }
inline long long __double_as_longlong(double value) { return gpu::same_bits<long long>(value); }

inline float half_value(unsigned short bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float size = exponent ? ldexpf(float(1024 + fraction), exponent - 25) : ldexpf(float(fraction), -24);
    if (exponent == 31) size = fraction ? NAN : INFINITY;
    return bits & 0x8000 ? -size : size;
}

// To nearest even: in units of the last place the value is a whole number or has to become one.
inline unsigned short half_bits(float value) {
    const float size = fabsf(value);
    if (size != size) return 0x7fff;
    const unsigned short sign = __float_as_uint(value) >> 31 << 15;
    if (size >= 65520.0f) return sign | 0x7c00;
    const int exponent = size < 0x1p-14f ? -14 : ilogbf(size);
    const int units = int(nearbyintf(ldexpf(size, 10 - exponent)));
    return sign | static_cast<unsigned short>(((exponent + 14) << 10) + units);
}
