/* A double of the system's calls on files, to be preloaded: one call on a path under a given folder goes wrong.
 *
 * `fault_arm` names the folder, the number of the call, which kinds of calls count, and what happens to that one. All
 * other calls go to the system. What was armed, and a log of the calls that counted, lie in memory that a process shares
 * with those that it forks and those that it starts: the fault meets whichever makes the call, and the log can be read
 * after that one was killed.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

enum { OPENS = 1, READS = 2, WRITES = 4, SYNCS = 8, NAMES = 16, LOOKS = 32, CLOSES = 64, MAPS = 128, LOCKS = 256 };
enum { PASS, FAIL, SHORTEN, DELAY, TRUNCATE, REPLACE, KILL_BEFORE, KILL_AFTER, NOTHING };
enum { LOGGED = 1 << 15, LONGEST = 4096 };

struct Logged {
    char call[20];
    int kind, writing;
    char path[232];
};

static struct Shared {
    char folder[LONGEST];
    int which, action, value;
    atomic_int left, seen, fired;
    struct Logged calls[LOGGED];
} *shared;

/* What a mapping of a file has, so that populating it counts as a read. */
static struct {
    atomic_uintptr_t start, stop;
    char path[LONGEST];
} mappings[64];

/* The environment says where the process that began this has its memory. */
__attribute__((constructor)) static void begin(void) {
    static const char name[] = "FAULTS_MEMORY";
    int fd = getenv(name) ? (int)syscall(SYS_openat, AT_FDCWD, getenv(name), O_RDWR | O_CLOEXEC, 0) : -1;
    if (fd < 0) {
        char path[64];
        fd = memfd_create("faults", MFD_CLOEXEC);
        snprintf(path, sizeof path, "/proc/%d/fd/%d", getpid(), fd);
        if (fd < 0 || syscall(SYS_ftruncate, fd, sizeof *shared) || setenv(name, path, 1)) abort();
    }
    shared = (void *)syscall(SYS_mmap, NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0L);
    if (shared == MAP_FAILED) abort();
}

/* No further call counts. */
EXPORT void fault_rest(void) { shared->folder[0] = 0; }

/* The call with this number among those of the kinds in `kinds` under `where`, from 0 on, meets `what` (`with`: an errno,
 * microseconds, or how many bytes are moved at most). A number below 0 only counts; an empty `where` ends that too. */
EXPORT void fault_arm(const char *where, int kinds, int number, int what, int with) {
    fault_rest();
    shared->which = kinds, shared->action = what, shared->value = with;
    shared->seen = shared->fired = 0;
    shared->left = number < 0 ? -1 : number + 1;
    strncpy(shared->folder, where, LONGEST - 1);
}

EXPORT int faults_seen(void) { return shared->seen; }
EXPORT int faults_fired(void) { return shared->fired; }
EXPORT const struct Logged *faults_logged(void) { return shared->calls; }

/* Libraries make calls before this one has begun. */
static int armed(void) { return shared && *shared->folder; }

/* Whether a path lies in the folder; a relative one of an open folder is made absolute. */
static int absolute(int at, const char *path, char *found) {
    if (!armed() || !path) return 0;
    if (*path == '/') {
        snprintf(found, LONGEST, "%s", path);
    } else {
        char link[64];
        snprintf(link, sizeof link, at == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", at);
        const ssize_t length = readlink(link, found, LONGEST - 1);
        if (length < 0) return 0;
        snprintf(found + length, LONGEST - length, "/%s", path);
    }
    return !strncmp(found, shared->folder, strlen(shared->folder));
}

static int of_descriptor(int fd, char *found) {
    if (!armed() || fd < 0) return 0;
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const ssize_t length = readlink(link, found, LONGEST - 1);
    if (length < 0) return 0;
    found[length] = 0;
    return !strncmp(found, shared->folder, strlen(shared->folder));
}

/* The size of a file; below 0 of what is none, which a call comes to where it takes the number of another. */
static off_t size_of(const char *path) {
    struct stat status;
    memset(&status, 0, sizeof status);
    const int failed = syscall(SYS_newfstatat, AT_FDCWD, path, &status, 0);
    return failed || !S_ISREG(status.st_mode) ? -1 : status.st_size;
}

/* Puts another file of the same size in the place of one: its second half differs. */
static void put_other(const char *path) {
    char other[LONGEST + 16], block[4096];
    const off_t nbytes = size_of(path);
    if (nbytes < 0) return;
    snprintf(other, sizeof other, "%s.other", path);
    const int from = syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0);
    if (from < 0) return;
    const int to = syscall(SYS_openat, AT_FDCWD, other, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    off_t at = 0;
    for (ssize_t got; (got = syscall(SYS_read, from, block, sizeof block)) > 0; at += got) {
        for (ssize_t k = 0; k < got; ++k)
            if (at + k >= nbytes / 2) block[k] ^= 1;
        if (syscall(SYS_write, to, block, got) != got) abort();
    }
    syscall(SYS_close, from), syscall(SYS_close, to);
    if (syscall(SYS_renameat2, AT_FDCWD, other, AT_FDCWD, path, 0)) abort();
}

static void cut(const char *path) {
    const off_t nbytes = size_of(path);
    if (nbytes >= 0) syscall(SYS_truncate, path, (long)nbytes / 2);
}

/* What is to be done about a call: FAIL (errno is set), SHORTEN, KILL_AFTER, or PASS. */
static int meets(const char *call, int kind, int writing, const char *path) {
    if (!(kind & shared->which)) return PASS;
    const int number = atomic_fetch_add(&shared->seen, 1);
    if (number < LOGGED) {
        struct Logged *const one = &shared->calls[number];
        snprintf(one->call, sizeof one->call, "%s", call);
        snprintf(one->path, sizeof one->path, "%s", path + strlen(shared->folder));
        one->kind = kind, one->writing = writing;
    }
    if (atomic_load(&shared->left) < 0 || atomic_fetch_sub(&shared->left, 1) != 1) return PASS;
    atomic_fetch_add(&shared->fired, 1);
    const int what = shared->action;
    if (what == DELAY) usleep(shared->value);
    if (what == TRUNCATE) cut(path);
    if (what == REPLACE) put_other(path);
    if (what == KILL_BEFORE) kill(getpid(), SIGKILL);
    if (what == FAIL) errno = shared->value;
    return what;
}

static int done(int met) {
    if (met == KILL_AFTER) kill(getpid(), SIGKILL);
    return 0;
}

/* How many bytes a call moves: a shortened one half of them, or as many as `value` says, and whole blocks only where the
 * file is read past the page cache. */
static size_t to_move(int met, int fd, size_t nbytes) {
    if (met != SHORTEN) return nbytes;
    size_t most = shared->value ? (size_t)shared->value : nbytes / 2;
    if (fcntl(fd, F_GETFL) & O_DIRECT) most = most < 512 ? 512 : most / 512 * 512;
    return most && most < nbytes ? most : nbytes;
}

#define NEXT(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

/* A call on a path or a descriptor, whose failure is `failure`. */
#define CALL(type, name, kind, writing, failure, where, parameters, ...)             \
    EXPORT type name parameters {                                                    \
        NEXT(name);                                                                  \
        char path[LONGEST];                                                          \
        const int met = where ? meets(#name, kind, writing, path) : PASS;            \
        if (met == FAIL) return failure;                                             \
        type result = real(__VA_ARGS__);                                             \
        done(met);                                                                   \
        return result;                                                               \
    }

/* Makes a file, which has no name before it is linked with __O_TMPFILE. */
#define MAKING (O_CREAT | __O_TMPFILE)

#define OPENING(name, declared, at, ...)                                                                  \
    EXPORT int name declared {                                                                            \
        va_list more;                                                                                     \
        va_start(more, flags);                                                                            \
        const mode_t mode = flags & MAKING ? va_arg(more, mode_t) : 0;                                    \
        va_end(more);                                                                                     \
        NEXT(name);                                                                                       \
        char path[LONGEST];                                                                               \
        const int met = absolute(at, given, path) ? meets(#name, OPENS, (flags & MAKING) != 0, path) : PASS; \
        if (met == FAIL) return -1;                                                                       \
        const int fd = real(__VA_ARGS__, mode);                                                           \
        done(met);                                                                                        \
        return fd;                                                                                        \
    }

#define OPEN(name) OPENING(name, (const char *given, int flags, ...), AT_FDCWD, given, flags)
#define OPEN_AT(name) OPENING(name, (int at, const char *given, int flags, ...), at, at, given, flags)

/* A call that moves bytes between a file and memory: where the descriptor stands, at an offset, or in parts. */
#define MOVING(name, kind, declared, shortened, moving, ...)                                   \
    EXPORT ssize_t name declared {                                                             \
        NEXT(name);                                                                            \
        char path[LONGEST];                                                                    \
        const int ours = of_descriptor(fd, path) && kind & shared->which;                              \
        const int met = ours ? meets(#name, kind, kind == WRITES, path) : PASS;                \
        if (met == FAIL) return -1;                                                            \
        if (met == NOTHING) return 0;                                                          \
        shortened;                                                                             \
        if (ours) moving;                                                                      \
        const ssize_t result = real(__VA_ARGS__);                                              \
        done(met);                                                                             \
        return result;                                                                         \
    }

#define HERE (void)0
#define OF_BYTES nbytes = to_move(met, fd, nbytes)
/* Of several parts only the first one is moved. */
#define OF_PARTS                                                     \
    struct iovec first = parts[0];                                   \
    if (met == SHORTEN) {                                            \
        if (count == 1) first.iov_len = to_move(met, fd, first.iov_len); \
        parts = &first, count = 1;                                   \
    }

#define MOVE(name, kind, memory) MOVING(name, kind, (int fd, memory, size_t nbytes), OF_BYTES, HERE, fd, bytes, nbytes)
#define MOVE_AT(name, kind, memory) \
    MOVING(name, kind, (int fd, memory, size_t nbytes, off_t offset), OF_BYTES, HERE, fd, bytes, nbytes, offset)
#define MOVE_PARTS(name, kind) \
    MOVING(name, kind, (int fd, const struct iovec *parts, int count), OF_PARTS, HERE, fd, parts, count)
#define MOVE_PARTS_AT(name, kind) \
    MOVING(name, kind, (int fd, const struct iovec *parts, int count, off_t offset), OF_PARTS, HERE, fd, parts, count, offset)
#define MOVE_PARTS_BY_FLAGS(name, kind) \
    MOVING(name, kind, (int fd, const struct iovec *parts, int count, off_t offset, int flags), OF_PARTS, HERE, fd, parts, count, offset, flags)

OPEN(open)
OPEN(open64)
OPEN_AT(openat)
OPEN_AT(openat64)
CALL(FILE *, fopen, OPENS, *mode != 'r', NULL, absolute(AT_FDCWD, given, path), (const char *given, const char *mode), given, mode)
CALL(FILE *, fopen64, OPENS, *mode != 'r', NULL, absolute(AT_FDCWD, given, path), (const char *given, const char *mode), given, mode)
CALL(DIR *, opendir, OPENS, 0, NULL, absolute(AT_FDCWD, given, path), (const char *given), given)

MOVE(read, READS, void *bytes)
MOVE(write, WRITES, const void *bytes)
MOVE_AT(pread, READS, void *bytes)
MOVE_AT(pread64, READS, void *bytes)
MOVE_AT(pwrite, WRITES, const void *bytes)
MOVE_AT(pwrite64, WRITES, const void *bytes)
MOVE_PARTS(readv, READS)
MOVE_PARTS(writev, WRITES)
MOVE_PARTS_AT(preadv, READS)
MOVE_PARTS_AT(preadv64, READS)
MOVE_PARTS_AT(pwritev, WRITES)
MOVE_PARTS_AT(pwritev64, WRITES)
MOVE_PARTS_BY_FLAGS(preadv2, READS)
MOVE_PARTS_BY_FLAGS(preadv64v2, READS)
MOVE_PARTS_BY_FLAGS(pwritev2, WRITES)
MOVE_PARTS_BY_FLAGS(pwritev64v2, WRITES)
CALL(ssize_t, sendfile, WRITES, 1, -1, of_descriptor(to, path), (int to, int from, off_t *at, size_t n), to, from, at, n)
CALL(ssize_t, sendfile64, WRITES, 1, -1, of_descriptor(to, path), (int to, int from, off_t *at, size_t n), to, from, at, n)
CALL(ssize_t, copy_file_range, WRITES, 1, -1, of_descriptor(to, path), (int from, off_t *a, int to, off_t *b, size_t n, unsigned flags), from, a, to, b, n, flags)
CALL(int, ftruncate, WRITES, 1, -1, of_descriptor(fd, path), (int fd, off_t nbytes), fd, nbytes)
CALL(int, ftruncate64, WRITES, 1, -1, of_descriptor(fd, path), (int fd, off_t nbytes), fd, nbytes)
CALL(int, posix_fallocate, WRITES, 1, errno, of_descriptor(fd, path), (int fd, off_t at, off_t nbytes), fd, at, nbytes)
CALL(int, posix_fallocate64, WRITES, 1, errno, of_descriptor(fd, path), (int fd, off_t at, off_t nbytes), fd, at, nbytes)
CALL(int, fallocate, WRITES, 1, -1, of_descriptor(fd, path), (int fd, int mode, off_t at, off_t nbytes), fd, mode, at, nbytes)

CALL(int, fsync, SYNCS, 1, -1, of_descriptor(fd, path), (int fd), fd)
CALL(int, fdatasync, SYNCS, 1, -1, of_descriptor(fd, path), (int fd), fd)

CALL(int, rename, NAMES, 1, -1, absolute(AT_FDCWD, old, path), (const char *old, const char *new), old, new)
CALL(int, renameat, NAMES, 1, -1, absolute(a, old, path), (int a, const char *old, int b, const char *new), a, old, b, new)
CALL(int, renameat2, NAMES, 1, -1, absolute(a, old, path), (int a, const char *old, int b, const char *new, unsigned flags), a, old, b, new, flags)
CALL(int, link, NAMES, 1, -1, absolute(AT_FDCWD, old, path), (const char *old, const char *new), old, new)
CALL(int, linkat, NAMES, 1, -1, absolute(a, old, path), (int a, const char *old, int b, const char *new, int flags), a, old, b, new, flags)
CALL(int, unlink, NAMES, 0, -1, absolute(AT_FDCWD, given, path), (const char *given), given)
CALL(int, unlinkat, NAMES, 0, -1, absolute(at, given, path), (int at, const char *given, int flags), at, given, flags)
CALL(int, rmdir, NAMES, 0, -1, absolute(AT_FDCWD, given, path), (const char *given), given)
CALL(int, mkdir, NAMES, 1, -1, absolute(AT_FDCWD, given, path), (const char *given, mode_t mode), given, mode)
CALL(int, mkdirat, NAMES, 1, -1, absolute(at, given, path), (int at, const char *given, mode_t mode), at, given, mode)

#define STAT(name) CALL(int, name, LOOKS, 0, -1, absolute(AT_FDCWD, given, path), (const char *restrict given, struct stat *restrict status), given, status)
#define STAT64(name) CALL(int, name, LOOKS, 0, -1, absolute(AT_FDCWD, given, path), (const char *restrict given, struct stat64 *restrict status), given, status)
STAT(stat)
STAT(lstat)
STAT64(stat64)
STAT64(lstat64)
CALL(int, fstat, LOOKS, 0, -1, of_descriptor(fd, path), (int fd, struct stat *status), fd, status)
CALL(int, fstat64, LOOKS, 0, -1, of_descriptor(fd, path), (int fd, struct stat64 *status), fd, status)
CALL(int, fstatat, LOOKS, 0, -1, absolute(at, given, path), (int at, const char *restrict given, struct stat *restrict status, int flags), at, given, status, flags)
CALL(int, fstatat64, LOOKS, 0, -1, absolute(at, given, path), (int at, const char *restrict given, struct stat64 *restrict status, int flags), at, given, status, flags)
CALL(int, access, LOOKS, 0, -1, absolute(AT_FDCWD, given, path), (const char *given, int mode), given, mode)
CALL(int, statvfs, LOOKS, 0, -1, absolute(AT_FDCWD, given, path), (const char *restrict given, struct statvfs *restrict status), given, status)
CALL(int, statvfs64, LOOKS, 0, -1, absolute(AT_FDCWD, given, path), (const char *restrict given, struct statvfs64 *restrict status), given, status)

CALL(int, flock, LOCKS, 0, -1, of_descriptor(fd, path), (int fd, int operation), fd, operation)
CALL(int, posix_fadvise, LOOKS, 0, errno, of_descriptor(fd, path), (int fd, off_t at, off_t n, int advice), fd, at, n, advice)
CALL(int, posix_fadvise64, LOOKS, 0, errno, of_descriptor(fd, path), (int fd, off_t at, off_t n, int advice), fd, at, n, advice)

/* The descriptor is closed whatever the call says. */
EXPORT int close(int fd) {
    NEXT(close);
    char path[LONGEST];
    const int met = of_descriptor(fd, path) ? meets("close", CLOSES, (fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDONLY, path) : PASS;
    const int error = errno, result = real(fd);
    done(met);
    if (met == FAIL) errno = error;
    return met == FAIL ? -1 : result;
}

static void remember(void *start, size_t nbytes, const char *path) {
    static atomic_int next;
    const int slot = atomic_fetch_add(&next, 1) % 64;
    snprintf(mappings[slot].path, LONGEST, "%s", path);
    mappings[slot].start = (uintptr_t)start;
    mappings[slot].stop = (uintptr_t)start + nbytes;
}

#define MMAP(name)                                                                                 \
    EXPORT void *name(void *address, size_t nbytes, int protection, int flags, int fd, off_t at) { \
        NEXT(name);                                                                                \
        char path[LONGEST];                                                                        \
        const int ours = !(flags & MAP_ANONYMOUS) && of_descriptor(fd, path);                      \
        const int met = ours ? meets(#name, MAPS, 0, path) : PASS;                                 \
        if (met == FAIL) return MAP_FAILED;                                                        \
        void *const result = real(address, nbytes, protection, flags, fd, at);                     \
        if (ours && result != MAP_FAILED) remember(result, nbytes, path);                          \
        done(met);                                                                                 \
        return result;                                                                             \
    }
MMAP(mmap)
MMAP(mmap64)

EXPORT int madvise(void *address, size_t nbytes, int advice) {
    NEXT(madvise);
    const uintptr_t start = (uintptr_t)address;
    int met = PASS;
    for (int k = 0; armed() && advice == 22 && k < 64; ++k)
        if (mappings[k].start <= start && start < mappings[k].stop) {
            met = meets("madvise", READS, 0, mappings[k].path);
            break;
        }
    return met == FAIL ? -1 : real(address, nbytes, advice);
}
