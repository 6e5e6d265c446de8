/* A double of the calls that write and read a spill file: fail_next says which call in which folder goes wrong, and how,
 * and spoil_all what all calls there do.
 *
 * It is preloaded, so that both engines meet it. Other files, and all other calls, go to the system. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[4096];
static atomic_int left, fired, seen;
static int kind, late_us;
static off_t moved;

/* `how` is an errno, 0 to move nothing, -n to move at most n bytes. The call with this number, from 0 on, goes wrong. */
void fail_next(const char *where, int number, int how) {
    strncpy(folder, where, sizeof folder - 1);
    kind = how;
    fired = seen = 0;
    left = number + 1;
}

/* All calls are late, and go to another place of the file. */
void spoil_all(const char *where, int microseconds, long bytes) {
    strncpy(folder, where, sizeof folder - 1);
    late_us = microseconds;
    moved = bytes;
}

int calls_failed(void) { return fired; }
int calls_seen(void) { return seen; }

static int is_ours(int fd) {
    char link[64], target[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const ssize_t length = *folder ? readlink(link, target, sizeof target - 1) : -1;
    if (length < 0) return 0;
    target[length] = 0;
    return !strncmp(target, folder, strlen(folder));
}

/* Whether this call goes wrong; then what it returns is in `result`, or it moves at most `most` bytes. */
static int spoiled(int fd, ssize_t *result, size_t *most, off_t *offset) {
    if (!is_ours(fd)) return 0;
    ++seen;
    if (late_us) usleep(late_us);
    *offset += moved;
    if (atomic_fetch_sub(&left, 1) != 1) return 0;
    ++fired;
    *result = 0;
    if (kind > 0) errno = kind, *result = -1;
    if (kind < 0) *most = -kind;
    if (kind < 0 && fcntl(fd, F_GETFL) & O_DIRECT) *most = -kind < 512 ? 512 : -kind / 512 * 512; /* whole blocks only */
    return 1;
}

#define DOUBLE(name)                                                                              \
    ssize_t name(int fd, MEMORY memory, size_t nbytes, off_t offset) {                            \
        ssize_t (*const real)(int, MEMORY, size_t, off_t) = dlsym(RTLD_NEXT, #name);              \
        ssize_t result;                                                                           \
        size_t most = nbytes;                                                                     \
        if (!spoiled(fd, &result, &most, &offset) || most < nbytes) return real(fd, memory, most, offset); \
        return result;                                                                            \
    }

/* Python has its memory in a vector of one part, and flags behind. */
#define DOUBLE_VECTOR(name)                                                                                      \
    ssize_t name(int fd, const struct iovec *parts, int count, off_t offset, int flags) {                        \
        ssize_t (*const real)(int, const struct iovec *, int, off_t, int) = dlsym(RTLD_NEXT, #name);             \
        struct iovec first = parts[0];                                                                           \
        ssize_t result;                                                                                          \
        size_t most = first.iov_len;                                                                             \
        if (!spoiled(fd, &result, &most, &offset)) return real(fd, parts, count, offset, flags);                          \
        if (most == first.iov_len) return result;                                                                \
        first.iov_len = most;                                                                                    \
        return real(fd, &first, 1, offset, flags);                                                               \
    }

#ifdef OF_READS
#define MEMORY void *
DOUBLE(pread)
DOUBLE(pread64)
DOUBLE_VECTOR(preadv2)
DOUBLE_VECTOR(preadv64v2)
#else
#define MEMORY const void *
DOUBLE(pwrite)
DOUBLE(pwrite64)
DOUBLE_VECTOR(pwritev2)
DOUBLE_VECTOR(pwritev64v2)
#endif
