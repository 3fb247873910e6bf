/* file.h: one unnamed file for bytes that live on a disk.
 *
 * O_DIRECT: what is written does not stay in the page cache.  Some file systems take a misaligned request and others
 * refuse it, so addresses, lengths and offsets are checked here, for all of them. */
#ifndef GRADCKPT_FILE_H
#define GRADCKPT_FILE_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum { GCK_FILE_ALIGNMENT = 4096 };

/* Results below 0; above, a result is the errno of a call. */
enum {
    GCK_FILE_IN_MEMORY = -1,    /* the directory is a tmpfs: nothing would be saved     */
    GCK_FILE_MISALIGNED = -2,
    GCK_FILE_SHORT = -3,        /* a read ended before its end                          */
    GCK_FILE_CHANGED = -4,      /* it gave other bytes than were written                */
};

/* The calls of the system.  Each returns as its namesake, and sets errno. */
typedef struct {
    int     (*open)(const char *directory);
    int     (*file_system)(int fd, int64_t *magic);
    ssize_t (*write)(int fd, const void *from, size_t nbytes, off_t offset);
    ssize_t (*read)(int fd, void *to, size_t nbytes, off_t offset);
    int     (*close)(int fd);
} gck_file_calls;

extern const gck_file_calls gck_file_system_calls;

typedef struct {
    const gck_file_calls *calls;
    int fd;
} gck_file;

/* Make a file without a name in this directory.  0, or why not; *file is then closed. */
int gck_file_open(gck_file *file, const gck_file_calls *calls, const char *directory);

/* All of it.  0, or why not. */
int gck_file_write(const gck_file *file, const void *from, int64_t nbytes, int64_t offset);

void gck_file_close(gck_file *file);

/* The same of reading; GCK_FILE_CHANGED: that is not what had this digest. */
int gck_file_read_checked(const gck_file *file, void *to, int64_t nbytes, int64_t offset, uint64_t digest);

/* A digest that each changed bit changes.  nbytes: a multiple of 64. */
uint64_t gck_file_digest(const void *bytes, int64_t nbytes);

#endif
