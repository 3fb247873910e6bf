/* memory.cpp: the two mappings, faults in the one that torch sees, and pinned memory. */
#include "memory.h"

#include "accesses.h"

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <new>
#include <sys/mman.h>
#include <unistd.h>

namespace virtual_device {

namespace {

char  *seen;                               /* by torch; without access */
size_t nbytes_of_each, total;
struct sigaction before;

std::map<uintptr_t, size_t> pinned;

/* Freed while work was queued that may still use it. */
struct Leaving {
    void *p;
    std::vector<std::pair<Stream *, uint64_t>> after;
};
std::vector<Leaving> leaving;

void free_what_is_done()
{
    size_t kept = 0;

    for (Leaving &each : leaving) {
        bool done = true;
        for (const auto &a : each.after) {
            done = done && a.first->done >= a.second;
        }
        if (done) {
            free(each.p);
        } else {
            leaving[kept++] = std::move(each);
        }
    }
    leaving.resize(kept);
}

/* The process is about to end: what the map of blocks says is read without the lock. */
void on_fault(int number, siginfo_t *info, void *)
{
    if (is_device_memory(info->si_addr)) {
        char text[256];
        const char *why = why_outside((uintptr_t)info->si_addr, 1);
        const int n = snprintf(text, sizeof text,
                               "virtual device: the host used device memory: address %p of device %d, in %s\n",
                               info->si_addr, device_of(info->si_addr), why != nullptr ? why : "an allocated block");
        if (write(STDERR_FILENO, text, (size_t)n) < 0) {
            _exit(1);
        }
    }
    sigaction(number, &before, nullptr);   /* the fault comes again, to the handler before this one */
}

}  /* namespace */

void reserve_memory(size_t nbytes_per_device)
{
    nbytes_of_each = nbytes_per_device;
    total = nbytes_per_device * DEVICES;
    void *p = mmap(nullptr, 2 * total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED || mprotect((char *)p + total, total, PROT_READ | PROT_WRITE) != 0) {
        throw std::bad_alloc();
    }
    seen = (char *)p;
}

size_t capacity() { return nbytes_of_each; }

bool is_device_memory(const void *p)
{
    return seen != nullptr && (const char *)p >= seen && (const char *)p < seen + total;
}

int device_of(const void *p) { return (int)((size_t)((const char *)p - seen) / nbytes_of_each); }

void *writable(const void *p)
{
    return is_device_memory(p) ? (char *)const_cast<void *>(p) + total : const_cast<void *>(p);
}

/* First address of a device's memory. */
uintptr_t memory_of(int device) { return (uintptr_t)seen + (size_t)device * nbytes_of_each; }

void watch_faults()
{
    struct sigaction action = {};

    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &before);
}

void use_memory(const Operation &op, const void *first, size_t nbytes, bool writes)
{
    if (nbytes == 0 || first == nullptr) {
        return;
    }
    if (is_device_memory(first)) {
        const char *why = why_outside((uintptr_t)first, nbytes);
        if (why != nullptr) {
            report_outside(op, (uintptr_t)first, nbytes, why);
        }
        note_access(op, (uintptr_t)first, nbytes, writes);
    } else if (is_pinned(first)) {
        note_access(op, (uintptr_t)first, nbytes, writes);
    }
}

void *allocate_pinned(size_t nbytes)
{
    Lock lock;
    void *p = nullptr;

    if (nbytes == 0) {
        return nullptr;
    }
    if (posix_memalign(&p, 4096, nbytes) != 0) {
        throw std::bad_alloc();
    }
    pinned[(uintptr_t)p] = nbytes;
    return p;
}

void deallocate_pinned(void *p)
{
    Lock lock;

    if (p != nullptr) {
        auto found = pinned.find((uintptr_t)p);
        forget_accesses(found->first, found->second);
        pinned.erase(found);
        leaving.push_back({p, {}});
        for (Stream *s : all_streams()) {
            leaving.back().after.push_back({s, s->queued});
        }
        free_what_is_done();
    }
}

void remember_pinned(void *p, size_t nbytes) { pinned[(uintptr_t)p] = nbytes; }

void forget_pinned(void *p)
{
    auto found = pinned.find((uintptr_t)p);

    forget_accesses(found->first, found->second);
    pinned.erase(found);
}

bool is_pinned(const void *p)
{
    Lock lock;
    auto next = pinned.upper_bound((uintptr_t)p);

    if (next == pinned.begin()) {
        return false;
    }
    --next;
    return (uintptr_t)p < next->first + next->second;
}

}  /* namespace virtual_device */
