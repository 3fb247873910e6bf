/* failing_memory.h: for sources of csrc/offload built with FAILING of native_programs.py: whatever takes memory, or
 * begins a thread, fails where it is asked to; any thread may ask. */
#ifndef FAILING_MEMORY_H
#define FAILING_MEMORY_H

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { F_CALLOC, F_REALLOC, F_ALIGNED, F_MAP, F_THREAD, F_KINDS };

static struct {
    _Atomic long asked, alive;                   /* alive: not given back                */
    _Atomic long failing;                        /* this request fails; 0: none does     */
    int          forever;                        /* so do all after it                   */
    _Atomic long failed[F_KINDS];
} f_memory;

/* The declarations that the sources see under these names are those of the system's headers. */
void *calloc_or_fail(size_t n, size_t size);
void *realloc_or_fail(void *memory, size_t size);
int   posix_memalign_or_fail(void **memory, size_t alignment, size_t size);
void  free_counted(void *memory);
void *mmap_or_fail(void *at, size_t size, int protection, int flags, int fd, off_t offset);
int   munmap_counted(void *memory, size_t size);
int   pthread_create_or_fail(pthread_t *made, const pthread_attr_t *how, void *(*run)(void *), void *argument);

static int f_fails(int kind)
{
    const long n = ++f_memory.asked, failing = f_memory.failing;
    const int fails = failing > 0 && (n == failing || (f_memory.forever && n > failing));

    f_memory.failed[kind] += fails;
    return fails;
}

/* The end of the line of figures that a program prints. */
static void f_print(void)
{
    printf("\"asked\": %ld, \"alive\": %ld, \"failed\": [", (long)f_memory.asked, (long)f_memory.alive);
    for (int kind = 0; kind < F_KINDS; kind++) {
        printf("%s%ld", kind > 0 ? ", " : "", (long)f_memory.failed[kind]);
    }
    printf("]}\n");
}

/* What a request gave; `new`: it was not there before. */
static void *f_given(void *memory, int new)
{
    f_memory.alive += new && memory != NULL;
    return memory;
}

void *calloc_or_fail(size_t n, size_t size) { return f_fails(F_CALLOC) ? NULL : f_given(calloc(n, size), 1); }

void *realloc_or_fail(void *memory, size_t size)
{
    return f_fails(F_REALLOC) ? NULL : f_given(realloc(memory, size), memory == NULL);
}

int posix_memalign_or_fail(void **memory, size_t alignment, size_t size)
{
    const int status = f_fails(F_ALIGNED) ? ENOMEM : posix_memalign(memory, alignment, size);

    f_given(status == 0 ? *memory : NULL, 1);
    return status;
}

void free_counted(void *memory)
{
    f_memory.alive -= memory != NULL;
    free(memory);
}

void *mmap_or_fail(void *at, size_t size, int protection, int flags, int fd, off_t offset)
{
    void *memory = f_fails(F_MAP) ? MAP_FAILED : mmap(at, size, protection, flags, fd, offset);

    f_given(memory != MAP_FAILED ? memory : NULL, 1);
    return memory;
}

int munmap_counted(void *memory, size_t size)
{
    f_memory.alive--;
    return munmap(memory, size);
}

int pthread_create_or_fail(pthread_t *made, const pthread_attr_t *how, void *(*run)(void *), void *argument)
{
    return f_fails(F_THREAD) ? EAGAIN : pthread_create(made, how, run, argument);
}

#endif
