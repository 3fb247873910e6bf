/* codecs.cpp: the kind of device that gradckpt knows this one as: gck_device_kind.  Its kernels are those of
 * csrc/codec/cuda, compiled for the host, and queued as kernels are. */
#include "link.h"
#include "torch_parts.h"

#include "gradckpt.h"

#include <algorithm>
#include <dlfcn.h>

namespace virtual_device {

namespace {

typedef const gck_codec *find_codec(const char *name);
typedef int encode_cuda(const gck_tensor *x, const gck_bytes *to, const gck_how *how, int n);
typedef int decode_cuda(const gck_bytes *from, const gck_tensor *out, int n);
typedef int encode_many(const gck_codec *codec, const gck_tensor *x, const gck_bytes *to, const gck_how *how, int n,
                        gck_parallel_for *parallel);
typedef int decode_many(const gck_codec *codec, const gck_bytes *from, const gck_tensor *out, int n,
                        gck_parallel_for *parallel);

enum { BAD_ADDRESS = 700, BAD_HANDLE = 400 }; /* cudaErrorIllegalAddress, cudaErrorInvalidResourceHandle */
enum { WORDS = 4096 };                        /* GCK_OVERFLOW_FLAGS */

void *kernels;                                /* the .cu files, as a library of the host   */
void *host_codecs;                            /* csrc/codec; used instead, when it is given */
uint32_t words[WORDS];
int statuses;                                 /* kernels that did not return 0: a fault of theirs comes late */

/* NULL: the library does not have it. */
void *symbol(void *library, const std::string &name)
{
    return library != nullptr ? dlsym(library, name.c_str()) : nullptr;
}

void *kernel_of(const gck_codec *codec, bool encodes)
{
    return symbol(kernels, std::string("gck_") + codec->name + (encodes ? "_encode_cuda" : "_decode_cuda"));
}

gck_bytes here(const gck_bytes &b)
{
    return {writable(b.codes), b.scales != nullptr ? writable(b.scales) : nullptr};
}

/* Arguments that live until the kernel runs, at the addresses of kernels. */
struct Job {
    const gck_codec        *codec;
    std::vector<gck_tensor> tensors;
    std::vector<gck_bytes>  bytes;
    std::vector<gck_how>    hows;
    std::vector<gck_dither> dithers;
    std::vector<std::vector<int64_t>> numbers;

    Job(const gck_codec *codec, const gck_tensor *x, const gck_bytes *b, const gck_how *how, int n)
        : codec(codec), tensors(x, x + n), bytes(b, b + n), dithers((size_t)n)
    {
        for (int i = 0; i < n; i++) {
            gck_tensor &t = tensors[(size_t)i];
            t.data = writable(t.data);
            t.device = gck_device_index(t.device);
            t.sizes = own(t.sizes, t.ndim), t.strides = own(t.strides, t.ndim), t.steps = own(t.steps, t.ndim);
            bytes[(size_t)i] = here(b[i]);
            if (how != nullptr) {
                gck_how h = how[i];
                if (h.dither != nullptr) {
                    dithers[(size_t)i] = *h.dither;
                    h.dither = &dithers[(size_t)i];
                }
                hows.push_back(h);
            }
        }
    }
    Job(const Job &) = delete;
    Job &operator=(const Job &) = delete;
    const gck_how *how() const { return hows.empty() ? nullptr : hows.data(); }
    int n() const { return (int)tensors.size(); }

private:
    const int64_t *own(const int64_t *array, int n)
    {
        if (array == nullptr) {
            return nullptr;
        }
        numbers.emplace_back(array, array + n);
        return numbers.back().data();
    }
};

bool can_reach(const void *p) { return p == nullptr || is_device_memory(p) || is_pinned(p); }

gck_lengths lengths_of(const gck_codec *codec, const gck_tensor &x)
{
    const gck_size size = codec->size[x.dtype];
    const int64_t groups = (x.numel + GCK_GROUP - 1) / GCK_GROUP, row = gck_row(&x);
    const int64_t blocks = (x.numel + GCK_BLOCK - 1) / GCK_BLOCK;
    const int64_t codes = size.value * x.numel + size.group * groups + size.block * blocks;

    const int64_t scales = size.scales * groups + (row > 0 ? size.row * (x.numel / row) : 0);

    return {x.room != 0 ? x.room - scales : codes, scales};
}

void use_bytes(const Operation &op, const gck_bytes &b, gck_lengths n, bool writes, std::vector<Range> *ranges)
{
    const int64_t step[] = {1};

    use_values(op, {b.codes, 1, 1, &n.codes, step}, writes, ranges);
    if (n.scales > 0 && b.scales != nullptr) {
        use_values(op, {b.scales, 1, 1, &n.scales, step}, writes, ranges);
    }
}

void use(const Operation &op, const gck_codec *codec, const gck_tensor &x, const gck_bytes &b, bool encodes,
         std::vector<Range> *ranges)
{
    const int64_t one[] = {x.numel}, step[] = {1};
    const bool dense = x.strides == nullptr;
    const gck_lengths n = lengths_of(codec, x);
    const Values values = {x.data, (int64_t)gck_itemsize(x.dtype), dense ? 1 : x.ndim, dense ? one : x.sizes,
                           dense ? step : x.strides};

    use_values(op, values, !encodes, ranges);
    use_bytes(op, b, n, encodes, ranges);
}

/* One by one; overflow is answered in the word, as kernels do. */
void run_on_host(Job &job, bool encodes)
{
    for (int i = 0; i < job.n(); i++) {
        gck_tensor x = job.tensors[(size_t)i];
        gck_how h = job.hows.empty() ? gck_how{} : job.hows[(size_t)i];
        x.device = -1;
        x.stream = nullptr;
        h.overflow = nullptr;
        const gck_bytes *bytes = &job.bytes[(size_t)i];
        const gck_codec *codec = ((find_codec *)symbol(host_codecs, "gck_codec_find"))(job.codec->name);
        void *function = symbol(host_codecs, encodes ? "gck_encode_many" : "gck_decode_many");
        const int status = encodes ? ((encode_many *)function)(codec, &x, bytes, &h, 1, nullptr)
                                   : ((decode_many *)function)(codec, bytes, &x, 1, nullptr);
        if (!job.hows.empty() && job.hows[(size_t)i].overflow != nullptr) {
            volatile uint32_t *word = job.hows[(size_t)i].overflow;
            *word = status == GCK_E_OVERFLOW ? GCK_OVERFLOW_FOUND : GCK_OVERFLOW_NONE;
        }
        statuses += status != GCK_OK && status != GCK_E_OVERFLOW;
    }
}

int call_kernel(Job &job, bool encodes)
{
    void *function = kernel_of(job.codec, encodes);

    return encodes ? ((encode_cuda *)function)(job.tensors.data(), job.bytes.data(), job.how(), job.n())
                   : ((decode_cuda *)function)(job.bytes.data(), job.tensors.data(), job.n());
}

void run(Job &job, bool encodes)
{
    if (host_codecs != nullptr) {
        run_on_host(job, encodes);
    } else {
        statuses += call_kernel(job, encodes) != GCK_OK;
    }
}

/* What the launch alone returns: no block of it runs. */
int try_launch(Job &job, bool encodes)
{
    unsigned *first_block = (unsigned *)symbol(kernels, "emulated_first_block");

    if (first_block == nullptr || kernel_of(job.codec, encodes) == nullptr) {
        return host_codecs != nullptr ? GCK_OK : GCK_E_DEVICE;
    }
    *first_block = UINT32_MAX;
    const int status = call_kernel(job, encodes);
    *first_block = 0;
    return status;
}

int launch(const gck_codec *codec, const gck_tensor *x, const gck_bytes *b, const gck_how *how, int n, bool encodes)
{
    find_place();
    Lock lock;
    Stream *s = x->stream != nullptr ? (Stream *)x->stream : current_stream(gck_device_index(x->device));
    std::vector<Range> ranges;

    const auto &streams = all_streams();
    if (std::find(streams.begin(), streams.end(), s) == streams.end() || s->device != gck_device_index(x->device)) {
        return BAD_HANDLE;
    }
    for (int i = 0; i < n; i++) {
        if (!can_reach(x[i].data) || !can_reach(b[i].codes) || !can_reach(b[i].scales)) {
            return BAD_ADDRESS;
        }
    }
    auto job = std::make_shared<Job>(codec, x, b, how, n);
    const int status = try_launch(*job, encodes);
    if (status != GCK_OK) {
        return status;
    }
    const Operation op = begin_operation(s, intern(std::string(encodes ? "encode " : "decode ") + codec->name));
    for (int i = 0; i < n; i++) {
        use(op, codec, x[i], b[i], encodes, &ranges);
    }
    if (s->capture != nullptr) {
        drain(s);
        run(*job, encodes);
        keep_in_graph(s, {op.name, std::move(ranges), [job, encodes]() { run(*job, encodes); }});
    } else {
        queue(s, [job, encodes]() { run(*job, encodes); });
    }
    return GCK_OK;
}

int encode(const gck_codec *codec, const gck_tensor *x, const gck_bytes *to, const gck_how *how, int n)
{
    return launch(codec, x, to, how, n, true);
}

int decode(const gck_codec *codec, const gck_bytes *from, const gck_tensor *out, int n)
{
    return launch(codec, out, from, nullptr, n, false);
}

typedef int compare_cuda(int index, void *stream, gck_bytes a, gck_bytes b, gck_lengths lengths, uint32_t *word);

int compare(int index, void *s, gck_bytes a, gck_bytes b, gck_lengths lengths, uint32_t *word)
{
    find_place();
    Lock lock;
    Stream *on = (Stream *)s;
    const gck_bytes both[2] = {here(a), here(b)};
    std::vector<Range> ranges;

    if (on->device != index || on->capture != nullptr) {
        statuses++;                           /* there is no answer before a replay */
        return BAD_HANDLE;
    }
    const Operation op = begin_operation(on, intern("compare"));
    for (const gck_bytes &one : both) {
        use_bytes(op, one, lengths, false, &ranges);
    }
    queue(on, [=]() {
        if (host_codecs != nullptr) {
            const bool same = memcmp(both[0].codes, both[1].codes, (size_t)lengths.codes) == 0
                           && (lengths.scales == 0
                               || memcmp(both[0].scales, both[1].scales, (size_t)lengths.scales) == 0);
            *(volatile uint32_t *)word = same ? GCK_OVERFLOW_NONE : GCK_OVERFLOW_FOUND;
        } else {
            statuses += ((compare_cuda *)symbol(kernels, "gck_compare_cuda"))(0, nullptr, both[0], both[1], lengths, word)
                     != GCK_OK;
        }
    });
    return GCK_OK;
}

int check(int *driver, int *runtime)
{
    *driver = *runtime = 13000;
    return kernels != nullptr || host_codecs != nullptr ? GCK_OK : GCK_E_DEVICE;
}

int stream(int index, void **s)
{
    Lock lock;

    *s = current_stream(index);
    return 0;
}

int set_stream(int index, void *s, void **before)
{
    Lock lock;

    *before = current_stream(index);
    this_thread().current[index] = (Stream *)s;
    return 0;
}

int is_captured(int, void *s, int *captured)
{
    Lock lock;

    *captured = ((Stream *)s)->capture != nullptr;
    return GCK_OK;
}

uint32_t *words_for(int, int n) { return n <= WORDS ? words : nullptr; }

const char *error(int status)
{
    return status == BAD_ADDRESS ? "an illegal memory access was encountered"
         : status == BAD_HANDLE ? "invalid resource handle" : "unknown error of the virtual device";
}

enum { DLPACK_EXTENSION = 12 };               /* kDLExtDev: what torch calls PrivateUse1 */
const gck_device_kind kind = {
    .name = "virtual", .dlpack = DLPACK_EXTENSION, .check = check, .stream = stream, .set_stream = set_stream,
    .is_captured = is_captured, .encode = encode, .decode = decode, .compare = compare,
    .words = words_for, .error = error, .link = &device_link,
};

}  /* namespace */

}  /* namespace virtual_device */

#pragma GCC visibility push(default)
extern "C" {

const void *virtual_device_kind(void) { return &virtual_device::kind; }

/* NULL, or why it cannot be loaded.  host: the codecs of the host run instead of the emulated kernels. */
const char *virtual_load_kernels(const char *path, int host)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);

    if (library != nullptr) {
        if (!host) {
            auto words_are = (void (*)(const uint32_t *, int))virtual_device::symbol(library, "virtual_words_are");
            words_are(virtual_device::words, virtual_device::WORDS);
        }
        (host ? virtual_device::host_codecs : virtual_device::kernels) = library;
    }
    return library == nullptr ? dlerror() : nullptr;
}

/* Back to the emulated kernels. */
void virtual_forget_host_codecs(void) { virtual_device::host_codecs = nullptr; }

int virtual_kernel_errors(void) { return virtual_device::statuses; }

}
#pragma GCC visibility pop
