/* cuda_emulation.h: enough of CUDA to run the .cu files of csrc/codec on the host.
 *
 *     g++ -x c++ -std=c++17 -DGCK_EMULATE_CUDA -include cuda_emulation.h ... fp8.cu
 *
 * A warp is 32 fibers on one thread.  A lane runs until it meets the others: a shuffle,
 * a vote, __syncwarp().  The meeting takes place when every lane named in the mask has
 * come to it; if one cannot come, because it has returned or waits at another, the
 * program says so and aborts: hardware would hang or answer with rubbish.
 *
 * Warps run one after the other: there is no shared memory and no __syncthreads() here,
 * because the kernels use none.  Memory is the host's, so sanitizers see every access.
 * __CUDA_ARCH__ is 750: the branches without newer instructions are those that run. */
#ifndef CUDA_EMULATION_H
#define CUDA_EMULATION_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#define __CUDA_ARCH__ 750

#define __global__
#define __device__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__

/* ---- types ---- */

struct __attribute__((aligned(16), may_alias)) uint4 { unsigned x, y, z, w; };
struct dim3 { unsigned x, y, z; };

static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

/* ---- arithmetic and memory ---- */

static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }

static inline int __float_as_int(float f)
{
    int i;
    memcpy(&i, &f, sizeof i);
    return i;
}

template <typename T> static inline T __ldg(const T *p) { return *p; }
template <typename T> static inline T __ldcs(const T *p) { return *p; }
template <typename T> static inline void __stcs(T *p, T v) { *p = v; }

/* ---- lanes ---- */

namespace emulation {

enum { LANES_OF_WARP = 32, STACK = 256 * 1024 };
enum meeting { NONE, SHUFFLE_XOR, BALLOT, SYNCWARP, RETURNED };

static const char *const meeting_names[] = {"nothing", "__shfl_xor_sync", "__ballot_sync", "__syncwarp", "return"};

struct lane {
    ucontext_t context;
    char      *stack;
    dim3       thread;
    meeting    at;                        /* NONE: it can run */
    unsigned   mask;
    int        argument;                  /* the lane mask of a shuffle: the same for all */
    uint32_t   value, result;
};

static lane       lanes[LANES_OF_WARP];
static lane      *current;
static ucontext_t scheduler;
static void     (*body)(void *);
static void      *body_argument;
static dim3       block, nblocks, nthreads;
static int        launch_error, launches;

#if defined(__SANITIZE_ADDRESS__)
static const void *home;                  /* the scheduler's stack */
static size_t      home_size;
#endif

/* AddressSanitizer must know which stack is in use. */
static void switch_to(ucontext_t *from, ucontext_t *to, bool to_lane, bool last)
{
#if defined(__SANITIZE_ADDRESS__)
    void *fake = NULL;
    const void *bottom;
    size_t size;

    __sanitizer_start_switch_fiber(last ? NULL : &fake, to_lane ? current->stack : home,
                                   to_lane ? (size_t)STACK : home_size);
    swapcontext(from, to);
    __sanitizer_finish_switch_fiber(fake, &bottom, &size);
    if (!to_lane) {                       /* back in a lane: we came from the scheduler */
        home = bottom, home_size = size;
    }
#else
    (void)to_lane, (void)last;
    swapcontext(from, to);
#endif
}

static void lane_main(void)
{
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(NULL, &home, &home_size);
#endif
    body(body_argument);
    current->at = RETURNED;
    switch_to(&current->context, &scheduler, false, true);
    abort();
}

static void die(const char *what)
{
    fprintf(stderr, "cuda_emulation: %s; block %u, warp of thread %u\n", what, block.x, lanes[0].thread.x);
    for (int i = 0; i < LANES_OF_WARP; i++) {
        fprintf(stderr, "    lane %2d: %s, mask %08x, argument %d\n", i, meeting_names[lanes[i].at],
                lanes[i].mask, lanes[i].argument);
    }
    abort();
}

/* Called by a lane. */
static uint32_t meet(meeting at, unsigned mask, int argument, uint32_t value)
{
    lane *me = current;

    me->at = at, me->mask = mask, me->argument = argument, me->value = value;
    if (!(mask >> (me - lanes) & 1u)) {
        die("a lane is not in its own mask");
    }
    switch_to(&me->context, &scheduler, false, false);
    return me->result;
}

/* Are all lanes that `first` waits for here, for the same purpose? */
static bool complete(const lane *first)
{
    for (int i = 0; i < LANES_OF_WARP; i++) {
        if (first->mask >> i & 1u && (lanes[i].at != first->at || lanes[i].mask != first->mask
                                      || lanes[i].argument != first->argument)) {
            return false;
        }
    }
    return true;
}

static void finish(meeting at, unsigned mask, int argument)
{
    unsigned votes = 0;

    for (int i = 0; i < LANES_OF_WARP; i++) {
        votes |= (unsigned)(mask >> i & 1u && lanes[i].value != 0) << i;
    }
    for (int i = 0; i < LANES_OF_WARP; i++) {
        if (mask >> i & 1u) {
            const int other = i ^ argument;
            if (at == SHUFFLE_XOR && (other >= LANES_OF_WARP || !(mask >> other & 1u))) {
                die("a shuffle reads a lane that is not in the mask");
            }
            lanes[i].result = at == SHUFFLE_XOR ? lanes[other].value : votes;
            lanes[i].at = NONE;
        }
    }
}

/* Run every lane that can; then hold one meeting.  False when all have returned. */
static bool step(void)
{
    bool waiting = false;

    for (int i = 0; i < LANES_OF_WARP; i++) {
        if (lanes[i].at == NONE) {
            current = &lanes[i];
            switch_to(&scheduler, &lanes[i].context, true, false);
        }
    }
    for (int i = 0; i < LANES_OF_WARP; i++) {
        if (lanes[i].at != RETURNED) {
            waiting = true;
            if (complete(&lanes[i])) {
                finish(lanes[i].at, lanes[i].mask, lanes[i].argument);
                return true;
            }
        }
    }
    if (waiting) {
        die("lanes wait for one that does not come");
    }
    return false;
}

/* Stacks are kept from warp to warp.  A function of its own: getcontext() returns
 * twice as far as compilers know. */
static __attribute__((noinline)) void prepare(lane *l, unsigned thread)
{
    if (l->stack == NULL && (l->stack = (char *)malloc(STACK)) == NULL) {
        abort();
    }
    l->thread = {thread, 0, 0};
    l->at = NONE;
    getcontext(&l->context);
    l->context.uc_stack.ss_sp = l->stack;
    l->context.uc_stack.ss_size = STACK;
    l->context.uc_link = NULL;
    makecontext(&l->context, lane_main, 0);
}

static void run_warp(unsigned first_thread)
{
    for (int i = 0; i < LANES_OF_WARP; i++) {
        prepare(&lanes[i], first_thread + (unsigned)i);
    }
    while (step()) {
    }
}

template <typename F>
static void launch(unsigned grid, unsigned threads, F f)
{
    if (grid == 0 || threads == 0 || threads > 1024 || threads % LANES_OF_WARP != 0) {
        launch_error = 9;                 /* cudaErrorInvalidConfiguration */
        return;
    }
    launches++;
    body = [](void *p) { (*(F *)p)(); };
    body_argument = &f;
    nblocks = {grid, 1, 1}, nthreads = {threads, 1, 1};
    for (unsigned b = 0; b < grid; b++) {
        block = {b, 0, 0};
        for (unsigned t = 0; t < threads; t += LANES_OF_WARP) {
            run_warp(t);
        }
    }
    body_argument = NULL;
}

}  /* namespace emulation */

#define threadIdx (emulation::current->thread)
#define blockIdx (emulation::block)
#define blockDim (emulation::nthreads)
#define gridDim (emulation::nblocks)

#define GCK_LAUNCH(kernel, grid, threads, stream, ...) \
    ((void)(stream), emulation::launch(grid, threads, [=]() { kernel(__VA_ARGS__); }))

template <typename T>
static inline T __shfl_xor_sync(unsigned mask, T v, int lanes)
{
    uint32_t word;
    static_assert(sizeof v == sizeof word, "one word at a time");
    memcpy(&word, &v, sizeof word);
    word = emulation::meet(emulation::SHUFFLE_XOR, mask, lanes, word);
    memcpy(&v, &word, sizeof word);
    return v;
}

static inline unsigned __ballot_sync(unsigned mask, int predicate)
{
    return emulation::meet(emulation::BALLOT, mask, 0, predicate != 0);
}

static inline void __syncwarp(unsigned mask = 0xFFFFFFFFu) { (void)emulation::meet(emulation::SYNCWARP, mask, 0, 0); }

/* ---- runtime: two devices, and whatever driver the test says ---- */

typedef int cudaError_t;
typedef void *cudaStream_t;
enum { cudaSuccess = 0, EMULATED_DEVICES = 2 };

/* Shared by the .cu files of one library; the test reads and writes them. */
extern "C" {
__attribute__((weak, visibility("default"))) int emulated_device = 0;
__attribute__((weak, visibility("default"))) int emulated_driver = 13000;
__attribute__((weak, visibility("default"))) int emulated_launches = 0;
__attribute__((weak, visibility("default"))) int emulated_launch_device = -1;
}

static inline cudaError_t cudaGetDevice(int *device)
{
    *device = emulated_device;
    return cudaSuccess;
}

static inline cudaError_t cudaSetDevice(int device)
{
    if (device < 0 || device >= EMULATED_DEVICES) {
        return 101;                       /* cudaErrorInvalidDevice */
    }
    emulated_device = device;
    return cudaSuccess;
}

static inline cudaError_t cudaGetLastError(void)
{
    const int error = emulation::launch_error;

    emulated_launches += emulation::launches;
    emulated_launch_device = emulated_device;
    emulation::launches = emulation::launch_error = 0;
    return error;
}

static inline cudaError_t cudaDriverGetVersion(int *version)
{
    *version = emulated_driver;
    return cudaSuccess;
}

static inline cudaError_t cudaRuntimeGetVersion(int *version)
{
    *version = 13000;
    return cudaSuccess;
}

#endif
