/* cuda_emulation.h: enough of CUDA to run the .cu files of csrc/codec on the host.
 *
 *     g++ -x c++ -std=c++17 -DGCK_EMULATE_CUDA -include cuda_emulation.h ... fp8.cu
 *
 * A warp is 32 fibers on one thread.  A lane runs until it meets the others: a shuffle,
 * a vote, __syncwarp().  The meeting takes place when every lane named in the mask has
 * come to it; if one cannot come, because it has returned or waits at another, the
 * program says so and aborts: hardware would hang or return undefined values.
 *
 * The warps of a block run one after the other, each until its lanes have returned or wait
 * in __syncthreads(), which is a meeting of all lanes of the block; blocks run one after
 * the other, so shared memory is static memory.  Memory is the host's, so sanitizers see
 * every access.
 * __CUDA_ARCH__ is 750, where the branches without newer instructions run, or what
 * EMULATED_ARCH says: of the instructions of csrc/codec/cuda/ptx.cuh there are models below,
 * written from the PTX manual by other means than the codecs. */
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

#ifndef EMULATED_ARCH
#define EMULATED_ARCH 750
#endif
#define __CUDA_ARCH__ EMULATED_ARCH

#define __global__
#define __host__
#define __device__
#define __shared__ static
#define __constant__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__

/* ---- types ---- */

struct __attribute__((aligned(16), may_alias)) uint4 { unsigned x, y, z, w; };
struct __attribute__((aligned(8), may_alias)) uint2 { unsigned x, y; };
struct dim3 { unsigned x, y, z; };

static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }

/* ---- arithmetic and memory ---- */

static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }

static inline int __float_as_int(float f)
{
    int i;
    memcpy(&i, &f, sizeof i);
    return i;
}

static inline int __popc(unsigned x) { return __builtin_popcount(x); }

static inline int __ffsll(long long x) { return __builtin_ffsll(x); }

/* Only the lower three bits of a selector are promised. */
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selectors)
{
    const uint64_t bytes = (uint64_t)y << 32 | x;
    unsigned r = 0;

    for (int b = 0; b < 4; b++) {
        r |= (unsigned)(bytes >> (8 * (selectors >> (4 * b) & 7)) & 0xFF) << (8 * b);
    }
    return r;
}

template <typename T> static inline T __ldg(const T *p) { return *p; }
template <typename T> static inline T __ldcs(const T *p) { return *p; }
template <typename T> static inline void __stcs(T *p, T v) { *p = v; }

/* Blocks run one after the other: nothing comes in between. */
static inline uint32_t emulated_exchange(uint32_t *p, uint32_t v)
{
    const uint32_t old = *p;
    *p = v;
    return old;
}

static inline uint32_t atomicOr(uint32_t *p, uint32_t v) { return emulated_exchange(p, *p | v); }
static inline uint32_t atomicExch(uint32_t *p, uint32_t v) { return emulated_exchange(p, v); }
static inline uint32_t atomicInc(uint32_t *p, uint32_t limit) { return emulated_exchange(p, *p >= limit ? 0 : *p + 1); }

static inline void __threadfence(void) {}
static inline void __threadfence_system(void) {}

/* ---- models of ptx.cuh ---- */

static inline uint32_t ptx_byte_signs(uint32_t w)
{
    uint32_t r = 0;

    for (int b = 0; b < 4; b++) {
        r |= w >> (8 * b + 7) & 1 ? 0xFFu << (8 * b) : 0;
    }
    return r;
}

static inline float ptx_max_abs(float a, float b)
{
    return isnan(a) || isnan(b) ? __builtin_nanf("0x3FFFFF") : fmaxf(fabsf(a), fabsf(b));
}

/* What a format of `exponent` and `mantissa` bits calls the magnitude `code`, infinities
 * and NaN as if they were finite. */
static inline double emulated_value(unsigned code, int exponent, int mantissa)
{
    const int bias = (1 << (exponent - 1)) - 1, e = (int)(code >> mantissa);
    const unsigned m = code & ((1u << mantissa) - 1u);

    return e == 0 ? ldexp(m, 1 - bias - mantissa) : ldexp(m + (1u << mantissa), e - bias - mantissa);
}

/* To nearest even by bisection over the codes 0 .. last + 1. */
static inline unsigned emulated_round(float v, int exponent, int mantissa, unsigned last)
{
    const double magnitude = fabs((double)v);
    unsigned low = 0, high = last + 1;

    while (high - low > 1) {
        const unsigned middle = (low + high) / 2;
        *(emulated_value(middle, exponent, mantissa) <= magnitude ? &low : &high) = middle;
    }
    const double below = magnitude - emulated_value(low, exponent, mantissa);
    const double above = emulated_value(low + 1, exponent, mantissa) - magnitude;
    return above < below || (above == below && low % 2 != 0) ? low + 1 : low;
}

static inline unsigned emulated_16(float v, int exponent, int mantissa, unsigned last)
{
    return isnan(v) ? 0x7FFFu : emulated_round(v, exponent, mantissa, last) | (signbit(v) ? 0x8000u : 0u);
}

static inline unsigned emulated_float16(float v) { return emulated_16(v, 5, 10, 0x7BFF); }
static inline unsigned emulated_bfloat16(float v) { return emulated_16(v, 8, 7, 0x7F7F); }

static inline uint32_t ptx_f16x2(float lower, float upper)
{
    return emulated_float16(lower) | (uint32_t)emulated_float16(upper) << 16;
}

static inline uint32_t ptx_bf16x2(float lower, float upper)
{
    return emulated_bfloat16(lower) | (uint32_t)emulated_bfloat16(upper) << 16;
}

static inline float ptx_f32_f16(uint16_t h)
{
    const unsigned magnitude = h & 0x7FFFu;
    const double v = magnitude > 0x7C00 ? NAN : magnitude == 0x7C00 ? INFINITY : emulated_value(magnitude, 5, 10);

    return (float)(h & 0x8000u ? -v : v);
}

/* As integers: what is below zero counts down. */
static inline uint32_t emulated_of_pairs(uint32_t a, uint32_t b, unsigned infinity, bool larger)
{
    uint32_t r = 0;

    for (int half = 0; half < 2; half++) {
        const unsigned p = a >> (16 * half) & 0xFFFFu, q = b >> (16 * half) & 0xFFFFu;
        const int m = p & 0x8000u ? -(int)(p & 0x7FFFu) : (int)p, n = q & 0x8000u ? -(int)(q & 0x7FFFu) : (int)q;
        const unsigned chosen = (p & 0x7FFFu) > infinity ? q : (q & 0x7FFFu) > infinity ? p : (m > n) == larger ? p : q;
        r |= chosen << (16 * half);
    }
    return r;
}

static inline uint32_t ptx_max_f16x2(uint32_t a, uint32_t b) { return emulated_of_pairs(a, b, 0x7C00, true); }
static inline uint32_t ptx_min_f16x2(uint32_t a, uint32_t b) { return emulated_of_pairs(a, b, 0x7C00, false); }
static inline uint32_t ptx_max_bf16x2(uint32_t a, uint32_t b) { return emulated_of_pairs(a, b, 0x7F80, true); }
static inline uint32_t ptx_min_bf16x2(uint32_t a, uint32_t b) { return emulated_of_pairs(a, b, 0x7F80, false); }

static inline unsigned emulated_fp8(float v, int exponent, int mantissa, unsigned last)
{
    if (isnan(v)) {
        return 0x7F;
    }
    const unsigned code = emulated_round(v, exponent, mantissa, last);
    return (code > last ? last : code) | (signbit(v) ? 0x80u : 0u);
}

static inline uint32_t ptx_e4m3x2(float lower, float upper)
{
    return emulated_fp8(lower, 4, 3, 0x7E) | emulated_fp8(upper, 4, 3, 0x7E) << 8;
}

static inline uint32_t ptx_e5m2x2(float lower, float upper)
{
    return emulated_fp8(lower, 5, 2, 0x7B) | emulated_fp8(upper, 5, 2, 0x7B) << 8;
}

static inline unsigned emulated_half_of_fp8(unsigned code, int exponent, int mantissa, unsigned last)
{
    const unsigned magnitude = code & 0x7Fu;
    const float v = magnitude > last + (exponent == 5) ? NAN
                  : magnitude > last ? INFINITY : (float)emulated_value(magnitude, exponent, mantissa);

    return emulated_float16(code & 0x80u ? -v : v);
}

static inline uint32_t ptx_f16x2_e4m3x2(uint32_t two)
{
    return emulated_half_of_fp8(two, 4, 3, 0x7E) | emulated_half_of_fp8(two >> 8, 4, 3, 0x7E) << 16;
}

static inline uint32_t ptx_f16x2_e5m2x2(uint32_t two)
{
    return emulated_half_of_fp8(two, 5, 2, 0x7B) | emulated_half_of_fp8(two >> 8, 5, 2, 0x7B) << 16;
}

/* ---- lanes ---- */

namespace emulation {

enum { LANES_OF_WARP = 32, MOST_THREADS = 1024, STACK = 256 * 1024 };
enum meeting { NONE, SHUFFLE, SHUFFLE_XOR, BALLOT, SYNCWARP, SYNCTHREADS, RETURNED };

static const char *const meeting_names[] = {"nothing", "__shfl_sync", "__shfl_xor_sync", "__ballot_sync",
                                            "__syncwarp", "__syncthreads", "return"};

struct lane {
    ucontext_t context;
    char      *stack;
    dim3       thread;
    meeting    at;                        /* NONE: it can run */
    unsigned   mask;
    int        argument;                  /* of __shfl_xor_sync(): the same for all */
    int        source;                    /* of __shfl_sync(): each its own         */
    uint32_t   value, result;
};

static lane       lanes[MOST_THREADS];
static lane      *warp;                   /* the first of its 32 lanes */
static lane      *current;
static ucontext_t scheduler;
static void     (*body)(void *);
static void      *body_argument;
static dim3       block, nblocks, nthreads;

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
    fprintf(stderr, "cuda_emulation: %s; block %u, warp of thread %u\n", what, block.x, warp[0].thread.x);
    for (int i = 0; i < LANES_OF_WARP; i++) {
        fprintf(stderr, "    lane %2d: %s, mask %08x, argument %d\n", i, meeting_names[warp[i].at],
                warp[i].mask, warp[i].argument);
    }
    abort();
}

/* Called by a lane. */
static uint32_t meet(meeting at, unsigned mask, int argument, uint32_t value, int source = 0)
{
    lane *me = current;

    me->at = at, me->mask = mask, me->argument = argument, me->value = value, me->source = source;
    if (!(mask >> (me - warp) & 1u)) {
        die("a lane is not in its own mask");
    }
    switch_to(&me->context, &scheduler, false, false);
    return me->result;
}

/* Are all lanes that `first` waits for here, for the same purpose? */
static bool complete(const lane *first)
{
    for (int i = 0; i < LANES_OF_WARP; i++) {
        if (first->mask >> i & 1u && (warp[i].at != first->at || warp[i].mask != first->mask
                                      || warp[i].argument != first->argument)) {
            return false;
        }
    }
    return true;
}

static void finish(meeting at, unsigned mask, int argument)
{
    unsigned votes = 0;

    for (int i = 0; i < LANES_OF_WARP; i++) {
        votes |= (unsigned)(mask >> i & 1u && warp[i].value != 0) << i;
    }
    for (int i = 0; i < LANES_OF_WARP; i++) {
        if (mask >> i & 1u) {
            const bool shuffle = at == SHUFFLE || at == SHUFFLE_XOR;
            const int other = at == SHUFFLE ? warp[i].source : i ^ argument;
            if (shuffle && (other < 0 || other >= LANES_OF_WARP || !(mask >> other & 1u))) {
                die("a shuffle reads a lane that is not in the mask");
            }
            warp[i].result = shuffle ? warp[other].value : votes;
            warp[i].at = NONE;
        }
    }
}

/* Run every lane of the warp that can; then hold one meeting.  False when all have
 * returned or wait for the rest of the block. */
static bool step(void)
{
    bool waiting = false;

    for (int i = 0; i < LANES_OF_WARP; i++) {
        if (warp[i].at == NONE) {
            current = &warp[i];
            switch_to(&scheduler, &warp[i].context, true, false);
        }
    }
    for (int i = 0; i < LANES_OF_WARP; i++) {
        if (warp[i].at != RETURNED && warp[i].at != SYNCTHREADS) {
            waiting = true;
            if (complete(&warp[i])) {
                finish(warp[i].at, warp[i].mask, warp[i].argument);
                return true;
            }
        }
    }
    if (waiting) {
        die("lanes wait for one that does not come");
    }
    return false;
}

/* Stacks are kept from block to block.  A function of its own: getcontext() returns
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

/* All threads have come to the barrier: true, they may go on, and each knows whether any
 * brought a predicate.  All have returned: false. */
static bool pass_barrier(unsigned threads)
{
    uint32_t any = 0;

    for (unsigned t = 0; t < threads; t++) {
        warp = &lanes[t / LANES_OF_WARP * LANES_OF_WARP];
        if (lanes[t].at != lanes[0].at) {
            die("a lane waits in __syncthreads() for one that does not come");
        }
        any |= lanes[t].value;
    }
    if (lanes[0].at == RETURNED) {
        return false;
    }
    for (unsigned t = 0; t < threads; t++) {
        lanes[t].result = any;
        lanes[t].at = NONE;
    }
    return true;
}

static void run_block(unsigned threads)
{
    for (unsigned t = 0; t < threads; t++) {
        prepare(&lanes[t], t);
    }
    do {
        for (unsigned t = 0; t < threads; t += LANES_OF_WARP) {
            warp = &lanes[t];
            while (step()) {
            }
        }
    } while (pass_barrier(threads));
}

}  /* namespace emulation */

/* Shared by the .cu files of one library; the test reads and writes them.  Of a grid only
 * the blocks from emulated_first_block to emulated_last_block run: tests of index arithmetic. */
#define EMULATED __attribute__((weak, visibility("default")))
extern "C" {
EMULATED int emulated_device = 0;
EMULATED int emulated_driver = 13000;
EMULATED int emulated_runtime = 13000;
EMULATED int emulated_launches = 0;
EMULATED int emulated_launch_device = -1;
EMULATED int emulated_last_error = 0;    /* until cudaGetLastError() takes it   */
EMULATED int emulated_sticky_error = 0;  /* a kernel crashed: all calls say so  */
EMULATED int emulated_launch_error = 0;  /* of the one launch that fails ...    */
EMULATED int emulated_good_launches = -1;  /* ... after so many; -1: none does  */
EMULATED int emulated_lazy = 0;          /* kernels are loaded when launched    */
EMULATED int emulated_capture = 0;       /* streams are being captured          */
EMULATED int emulated_capture_mode = 0;  /* cudaStreamCaptureModeGlobal         */
EMULATED unsigned emulated_first_block = 0;
EMULATED unsigned emulated_last_block = 0xFFFFFFFFu;
}

namespace emulation {

/* What a call of the runtime returns; errors are remembered. */
static inline int answer(int error)
{
    error = emulated_sticky_error != 0 ? emulated_sticky_error : error;
    emulated_last_error = error != 0 ? error : emulated_last_error;
    return error;
}

/* An F is a kernel: it is loaded at its first launch, which a capture in global mode forbids. */
template <typename F>
static void launch(unsigned grid, unsigned threads, F f)
{
    static bool loaded = false;

    if (emulated_lazy && !loaded && emulated_capture && emulated_capture_mode == 0) {
        answer(900);                      /* cudaErrorStreamCaptureUnsupported */
        return;
    }
    loaded = true;
    if (emulated_good_launches >= 0 && emulated_good_launches-- == 0) {
        answer(emulated_launch_error);
        return;
    }
    if (grid == 0 || threads == 0 || threads > MOST_THREADS || threads % LANES_OF_WARP != 0) {
        answer(9);                        /* cudaErrorInvalidConfiguration */
        return;
    }
    if (answer(0) != 0) {
        return;
    }
    emulated_launches++;
    emulated_launch_device = emulated_device;
    body = [](void *p) { (*(F *)p)(); };
    body_argument = &f;
    nblocks = {grid, 1, 1}, nthreads = {threads, 1, 1};
    for (unsigned b = emulated_first_block; b < grid && b <= emulated_last_block; b++) {
        block = {b, 0, 0};
        run_block(threads);
    }
    body_argument = NULL;
}

}  /* namespace emulation */

#define threadIdx (emulation::current->thread)
#define blockIdx (emulation::block)
#define blockDim (emulation::nthreads)
#define gridDim (emulation::nblocks)

#define GCK_START(kernel, grid, threads, stream, ...) \
    ((void)(stream), emulation::launch(grid, threads, [=]() { kernel(__VA_ARGS__); }))

namespace emulation {

template <typename T>
static inline T shuffle(meeting at, unsigned mask, T v, int argument, int source)
{
    uint32_t word;
    static_assert(sizeof v == sizeof word, "one word at a time");
    memcpy(&word, &v, sizeof word);
    word = meet(at, mask, argument, word, source);
    memcpy(&v, &word, sizeof word);
    return v;
}

}  /* namespace emulation */

template <typename T>
static inline T __shfl_xor_sync(unsigned mask, T v, int lanes)
{
    return emulation::shuffle(emulation::SHUFFLE_XOR, mask, v, lanes, 0);
}

template <typename T>
static inline T __shfl_sync(unsigned mask, T v, int source)
{
    return emulation::shuffle(emulation::SHUFFLE, mask, v, 0, source);
}

static inline unsigned __ballot_sync(unsigned mask, int predicate)
{
    return emulation::meet(emulation::BALLOT, mask, 0, predicate != 0);
}

static inline int __syncthreads_or(int predicate)
{
    return emulation::meet(emulation::SYNCTHREADS, 0xFFFFFFFFu, 0, predicate != 0) != 0;
}

static inline void __syncthreads(void) { (void)__syncthreads_or(0); }
static inline void __syncwarp(unsigned mask = 0xFFFFFFFFu) { (void)emulation::meet(emulation::SYNCWARP, mask, 0, 0); }

/* ---- runtime: two devices, and whatever driver the test says ---- */

typedef int cudaError_t;
typedef void *cudaStream_t;
typedef enum { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive } cudaStreamCaptureStatus;
typedef enum {
    cudaDevAttrIntegrated = 18, cudaDevAttrComputeCapabilityMajor = 75, cudaDevAttrComputeCapabilityMinor = 76,
} cudaDeviceAttr;
typedef enum { cudaStreamCaptureModeGlobal, cudaStreamCaptureModeRelaxed } cudaStreamCaptureMode;
enum { cudaSuccess = 0, cudaErrorNotReady = 600, cudaHostAllocPortable = 1, cudaHostAllocMapped = 2, EMULATED_DEVICES = 2 };

/* Shared by the .cu files of one library; the test reads and writes them. */
extern "C" {
EMULATED int emulated_host_allocs = 0;  /* < 0: the next ones fail            */
EMULATED int emulated_devices = EMULATED_DEVICES;
EMULATED int emulated_capability[EMULATED_DEVICES] = {75, 90};  /* of each    */
}

static inline cudaError_t cudaGetDevice(int *device)
{
    *device = emulated_device;
    return emulation::answer(cudaSuccess);
}

static inline cudaError_t cudaSetDevice(int device)
{
    if (device < 0 || device >= EMULATED_DEVICES) {
        return emulation::answer(101);    /* cudaErrorInvalidDevice */
    }
    emulated_device = device;
    return emulation::answer(cudaSuccess);
}

/* The last error of any call since it was asked for last; one that a kernel caused stays for ever. */
static inline cudaError_t cudaGetLastError(void)
{
    const int error = emulated_last_error;

    emulated_last_error = emulated_sticky_error;
    return error != 0 ? error : emulated_sticky_error;
}

static inline cudaError_t cudaPeekAtLastError(void)
{
    return emulated_last_error != 0 ? emulated_last_error : emulated_sticky_error;
}

/* Those that tests meet, as CUDA 13.0 has them. */
static const struct { cudaError_t error; const char *name, *text; } emulated_errors[] = {
    {1, "cudaErrorInvalidValue", "invalid argument"},
    {2, "cudaErrorMemoryAllocation", "out of memory"},
    {3, "cudaErrorInitializationError", "initialization error"},
    {9, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {35, "cudaErrorInsufficientDriver", "CUDA driver version is insufficient for CUDA runtime version"},
    {98, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {100, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {101, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {209, "cudaErrorNoKernelImageForDevice", "no kernel image is available for execution on the device"},
    {214, "cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"},
    {220, "cudaErrorNvlinkUncorrectable", "uncorrectable NVLink error detected during the execution"},
    {222, "cudaErrorUnsupportedPtxVersion", "the provided PTX was compiled with an unsupported toolchain."},
    {700, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {702, "cudaErrorLaunchTimeout", "the launch timed out and was terminated"},
    {710, "cudaErrorAssert", "device-side assert triggered"},
    {714, "cudaErrorHardwareStackError", "hardware stack error"},
    {715, "cudaErrorIllegalInstruction", "an illegal instruction was encountered"},
    {716, "cudaErrorMisalignedAddress", "misaligned address"},
    {717, "cudaErrorInvalidAddressSpace", "operation not supported on global/shared address space"},
    {718, "cudaErrorInvalidPc", "invalid program counter"},
    {719, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {803, "cudaErrorSystemDriverMismatch", "system has unsupported display driver / cuda driver combination"},
    {900, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
    {901, "cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"},
};

static inline const char *emulated_word(cudaError_t error, bool name)
{
    for (const auto &one : emulated_errors) {
        if (one.error == error) {
            return name ? one.name : one.text;
        }
    }
    return "unrecognized error code";
}

static inline const char *cudaGetErrorName(cudaError_t error) { return emulated_word(error, true); }
static inline const char *cudaGetErrorString(cudaError_t error) { return emulated_word(error, false); }

static inline cudaError_t cudaGetDeviceCount(int *count)
{
    *count = emulated_devices;
    return emulation::answer(emulated_devices > 0 ? cudaSuccess : 100);      /* cudaErrorNoDevice */
}

static inline cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device)
{
    const int capability = emulated_capability[device];

    *value = attribute == cudaDevAttrIntegrated ? 0 : attribute == cudaDevAttrComputeCapabilityMajor ? capability / 10 : capability % 10;
    return emulation::answer(cudaSuccess);
}

static inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *status)
{
    *status = emulated_capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return emulation::answer(cudaSuccess);
}

static inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode)
{
    const cudaStreamCaptureMode before = (cudaStreamCaptureMode)emulated_capture_mode;
    emulated_capture_mode = *mode;
    *mode = before;
    return emulation::answer(cudaSuccess);
}

/* Of a capture: one graph, which asks for nothing when it is gone. */
#define CUDART_VERSION 13000
typedef struct emulated_graph *cudaGraph_t;
typedef struct emulated_user_object *cudaUserObject_t;
enum { cudaStreamSetCaptureDependencies = 1, cudaUserObjectNoDestructorSync = 1, cudaGraphUserObjectMove = 1 };

static inline cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus *status,
                                                   unsigned long long *id, cudaGraph_t *graph, const void *,
                                                   const void *, const size_t *)
{
    *id = 0;
    if (graph != NULL) {
        *graph = NULL;
    }
    return cudaStreamIsCapturing(stream, status);
}

static inline cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t, const void *, const void *, size_t, unsigned)
{
    return emulation::answer(emulated_capture ? (int)cudaSuccess : 401);     /* cudaErrorIllegalState */
}

static inline cudaError_t cudaUserObjectCreate(cudaUserObject_t *object, void *, void (*)(void *), unsigned, unsigned)
{
    *object = NULL;
    return emulation::answer(cudaSuccess);
}

/* As CUDA does, refuses while a capture in global mode goes on. */
static inline cudaError_t cudaHostAlloc(void **p, size_t nbytes, unsigned)
{
    if (emulated_host_allocs < 0 || (emulated_capture && emulated_capture_mode == cudaStreamCaptureModeGlobal)) {
        return emulation::answer(2);      /* cudaErrorMemoryAllocation */
    }
    emulated_host_allocs++;
    *p = malloc(nbytes);
    return emulation::answer(cudaSuccess);
}

/* Streams, events and copies: all work is done at once. */
typedef struct { int recorded; } *cudaEvent_t;
enum { cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2, cudaHostRegisterPortable = 1 };
typedef enum { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2 } cudaMemcpyKind;

#define NOTHING_TO_DO(name, ...) \
    static inline cudaError_t name(__VA_ARGS__) { return emulation::answer(cudaSuccess); }
NOTHING_TO_DO(cudaStreamWaitEvent, cudaStream_t, cudaEvent_t, unsigned)
NOTHING_TO_DO(cudaEventSynchronize, cudaEvent_t)
NOTHING_TO_DO(cudaHostUnregister, void *)
NOTHING_TO_DO(cudaGraphRetainUserObject, cudaGraph_t, cudaUserObject_t, unsigned, unsigned)

static inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned)
{
    *stream = malloc(1);
    return emulation::answer(cudaSuccess);
}

static inline cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    free(stream);
    return emulation::answer(cudaSuccess);
}

static inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned)
{
    *event = (cudaEvent_t)calloc(1, sizeof **event);
    return emulation::answer(cudaSuccess);
}

static inline cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    free(event);
    return emulation::answer(cudaSuccess);
}

static inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t)
{
    event->recorded++;
    return emulation::answer(cudaSuccess);
}

/* The first question finds it pending. */
static inline cudaError_t cudaEventQuery(cudaEvent_t event)
{
    const int pending = event->recorded > 0;

    event->recorded = 0;
    return emulation::answer(pending ? (int)cudaErrorNotReady : (int)cudaSuccess);
}

static inline cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t nbytes, cudaMemcpyKind, cudaStream_t)
{
    memcpy(to, from, nbytes);
    return emulation::answer(cudaSuccess);
}

/* emulated_host_allocs < 0: refused. */
static inline cudaError_t cudaHostRegister(void *, size_t, unsigned)
{
    return emulation::answer(emulated_host_allocs < 0 ? 2 : (int)cudaSuccess);
}

/* Of a driver that is absent: version 0, and no error. */
static inline cudaError_t cudaDriverGetVersion(int *version)
{
    *version = emulated_driver;
    return emulation::answer(cudaSuccess);
}

static inline cudaError_t cudaRuntimeGetVersion(int *version)
{
    *version = emulated_runtime;
    return emulation::answer(cudaSuccess);
}

#endif
