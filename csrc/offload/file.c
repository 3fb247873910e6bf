/* file.c: Linux; elsewhere no file can be made. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "offload/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifdef __linux__
#include <sys/vfs.h>
#endif

enum { TMPFS = 0x01021994, RAMFS = (int)0x858458f6, PIECE = 8 << 20 };

/* overlayfs and others have no O_TMPFILE: there it has a name for a moment. */
static int open_unnamed(const char *directory)
{
#if defined(__linux__) && defined(O_TMPFILE) && defined(O_DIRECT)
    char name[4096];
    int fd = open(directory, O_TMPFILE | O_DIRECT | O_RDWR | O_CLOEXEC, 0600);

    if (fd < 0 && (errno == EOPNOTSUPP || errno == EISDIR || errno == ENOENT || errno == EINVAL)
        && snprintf(name, sizeof name, "%s/gradckpt.XXXXXX", directory) < (int)sizeof name
        && (fd = mkostemp(name, O_DIRECT | O_CLOEXEC)) >= 0) {
        unlink(name);
    }
    return fd;
#else
    (void)directory;
    errno = ENOTSUP;
    return -1;
#endif
}

static int ask_file_system(int fd, int64_t *magic)
{
#ifdef __linux__
    struct statfs about;

    if (fstatfs(fd, &about) != 0) {
        return -1;
    }
    *magic = (int64_t)(uint32_t)about.f_type;
    return 0;
#else
    (void)fd;
    *magic = 0;
    return 0;
#endif
}

const gck_file_calls gck_file_system_calls = {open_unnamed, ask_file_system, pwrite, pread, close};

int gck_file_open(gck_file *file, const gck_file_calls *calls, const char *directory)
{
    int64_t magic = 0;
    int status = 0;

    do {
        *file = (gck_file){calls, calls->open(directory)};
    } while (file->fd < 0 && errno == EINTR);
    if (file->fd < 0) {
        return errno;
    }
    do {
        status = calls->file_system(file->fd, &magic) != 0 ? errno : 0;
    } while (status == EINTR);
    if (status == 0 && (magic == TMPFS || magic == (int64_t)(uint32_t)RAMFS)) {
        status = GCK_FILE_IN_MEMORY;
    }
    if (status != 0) {
        gck_file_close(file);
    }
    return status;
}

static int is_aligned(const void *address, int64_t nbytes, int64_t offset)
{
    return (uintptr_t)address % GCK_FILE_ALIGNMENT == 0 && nbytes > 0 && nbytes % GCK_FILE_ALIGNMENT == 0
        && offset >= 0 && offset % GCK_FILE_ALIGNMENT == 0;
}

/* One piece after the other; a call that does a part goes on with the rest, and one that a signal has interrupted is
 * made again.  A part that is not aligned ends it, since O_DIRECT could not go on. */
static int transfer(const gck_file *file, char *bytes, int64_t nbytes, int64_t offset, int writes)
{
    for (int64_t done = 0; done < nbytes;) {
        const size_t piece = (size_t)(nbytes - done < PIECE ? nbytes - done : PIECE);
        const ssize_t moved = writes ? file->calls->write(file->fd, bytes + done, piece, (off_t)(offset + done))
                                     : file->calls->read(file->fd, bytes + done, piece, (off_t)(offset + done));
        if (moved < 0 && errno != EINTR) {
            return errno;
        }
        if (moved == 0 || (moved > 0 && moved % GCK_FILE_ALIGNMENT != 0)) {
            return writes ? ENOSPC : GCK_FILE_SHORT;
        }
        done += moved > 0 ? moved : 0;
    }
    return 0;
}

int gck_file_write(const gck_file *file, const void *from, int64_t nbytes, int64_t offset)
{
    return is_aligned(from, nbytes, offset) ? transfer(file, (char *)from, nbytes, offset, 1) : GCK_FILE_MISALIGNED;
}

void gck_file_close(gck_file *file)
{
    if (file->fd >= 0) {
        file->calls->close(file->fd);
    }
    file->fd = -1;
}

enum { CHAINS = 8 };

/* Each word goes through a map that is one to one (odd factor, shift), so one that differs ends differently; eight
 * chains, since one would wait for its multiplications. */
uint64_t gck_file_digest(const void *bytes, int64_t nbytes)
{
    const uint64_t factor = UINT64_C(0x9E3779B97F4A7C15);
    const char *at = bytes, *end = at + nbytes;
    uint64_t chain[CHAINS] = {1, 2, 3, 4, 5, 6, 7, 8}, digest = (uint64_t)nbytes;

    for (; at < end; at += sizeof chain) {
        uint64_t words[CHAINS];
        memcpy(words, at, sizeof words);
        for (int i = 0; i < CHAINS; i++) {
            const uint64_t word = (chain[i] ^ words[i]) * factor;
            chain[i] = word ^ (word >> 29);
        }
    }
    for (int i = 0; i < CHAINS; i++) {
        digest = (digest ^ chain[i]) * factor;
        digest ^= digest >> 29;
    }
    return digest;
}

int gck_file_read_checked(const gck_file *file, void *to, int64_t nbytes, int64_t offset, uint64_t digest)
{
    const int status = is_aligned(to, nbytes, offset) ? transfer(file, to, nbytes, offset, 0) : GCK_FILE_MISALIGNED;
    return status == 0 && gck_file_digest(to, nbytes) != digest ? GCK_FILE_CHANGED : status;
}
