/* memory_file.h: calls for a store's file (offload/file.h), which is memory of this process: small and fast, and each
 * access to the store's memory is noted in link_queues.h. */
#ifndef MEMORY_FILE_H
#define MEMORY_FILE_H

#include "link_queues.h"
#include "offload/file.h"

#include <unistd.h>

static struct {
    pthread_mutex_t lock;
    char           *bytes;
    size_t          size;
    _Atomic long    writes, reads;
} m = {.lock = PTHREAD_MUTEX_INITIALIZER};

static int m_open(const char *directory)
{
    return 1 << 20;              /* no descriptor of the process */
}

static int m_file_system(int fd, int64_t *magic)
{
    *magic = 0;
    return 0;
}

static ssize_t m_write(int fd, const void *from, size_t nbytes, off_t offset)
{
    q_host_access(from, (int64_t)nbytes, 0);
    usleep(300);                                 /* others move on meanwhile */
    pthread_mutex_lock(&m.lock);
    m.writes++;
    if ((size_t)offset + nbytes > m.size) {
        m.size = 2 * ((size_t)offset + nbytes);
        m.bytes = realloc(m.bytes, m.size);
    }
    memcpy(m.bytes + offset, from, nbytes);
    pthread_mutex_unlock(&m.lock);
    return (ssize_t)nbytes;
}

static ssize_t m_read(int fd, void *to, size_t nbytes, off_t offset)
{
    q_host_access(to, (int64_t)nbytes, 1);
    usleep(0);
    pthread_mutex_lock(&m.lock);
    m.reads++;
    memcpy(to, m.bytes + offset, nbytes);
    pthread_mutex_unlock(&m.lock);
    return (ssize_t)nbytes;
}

static int m_close(int fd)
{
    free(m.bytes);
    m.bytes = NULL;
    m.size = 0;
    return 0;
}

static const gck_file_calls m_calls = {m_open, m_file_system, m_write, m_read, m_close};

#endif
