/* penstock's native engine: it reads a payload and streams weights by one of its plans, without Python or torch.
 *
 * One engine is one load: one plan, one arena, one set of open files. A pass of a method is ps_begin, then
 * ps_acquire and ps_release of each step that ps_probed lists, in order, then ps_end; what goes otherwise is a
 * counted miss, and ps_abort ends a pass that failed. docs/payload.md, "Executing a plan", says what happens when.
 *
 * Passes belong to one thread at a time; ps_stats and ps_close may be called from any. Every function that can
 * fail returns a ps_status, and ps_error then has one sentence. Sizes and offsets are bytes.
 */
#ifndef PENSTOCK_H
#define PENSTOCK_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PS_API __attribute__((visibility("default")))

/* What a binding was written for. ps_version returns that of the library. */
#define PS_VERSION 6
PS_API int32_t ps_version(void);

typedef enum ps_status {
    PS_OK = 0,
    PS_PAYLOAD = 1, /* the payload or the plan is not what docs/payload.md specifies */
    PS_PLAN = 2,    /* this engine cannot run the plan */
    PS_SOURCE = 3,  /* the weights' bytes cannot be had */
    PS_STREAM = 4,  /* the system refused memory or threads, or calls came in an order that cannot be */
    PS_WAITING = 5  /* `patience_ms` have passed: call ps_wait until it returns something else */
} ps_status;

typedef struct ps_engine ps_engine;

/* Reads `nbytes` at `offset` of file number `file` to `address`; returns 0, or an error number of the system.
 * It is called by several threads at once. */
typedef int (*ps_read)(void *context, int32_t file, int64_t offset, void *address, int64_t nbytes);

typedef enum ps_event {
    PS_FILL = 0,   /* the bytes of a range are about to come */
    PS_FILLED = 1, /* they are there */
    PS_DROP = 2    /* a range is about to leave, as far as it is there */
} ps_event;

/* Told what is done with bytes `start` to `stop` of the layout, by several threads at once. */
typedef void (*ps_log)(void *context, int32_t event, int64_t start, int64_t stop);

/* A file that the caller has opened and found to be the one that was compiled, with these times then. Where only its
 * ctime has changed since, the engine compares its bytes with the payload's hashes. */
typedef struct ps_file {
    int32_t fd;
    int64_t mtime_ns, ctime_ns;
} ps_file;

/* An open file without a name, in `folder`, for what leaves the arena: `nbytes` large, and, if `block` is not 0, open
 * a second time past the page cache, for reads and writes that are aligned to so many bytes. */
typedef struct ps_spill {
    int32_t fd, direct_fd;
    int64_t block, nbytes;
    const char *folder;
} ps_spill;

typedef struct ps_options {
    int32_t readers;       /* threads that read, 1 or more */
    int32_t buffered;      /* not 0: read through the page cache */
    int32_t drop_early;    /* not 0: drop bytes when their step ends, not when their room is needed */
    int32_t poison;        /* not 0: fill what is dropped with 0xFF, which is NaN in every floating-point format */
    int32_t debug;         /* not 0: a read of a unit that is not there ends the process; not with a paged arena */
    int32_t patience_ms;   /* how long a call waits before it returns PS_WAITING; 0 waits for ever */
    ps_read read;          /* NULL: the engine opens the payload's files, reads them itself, and may map them */
    void *context;         /* what `read` and `log` are given */
    const ps_file *opened; /* the payload's files, in its order; NULL: the engine opens them and checks stamps */
    int64_t available;     /* bytes that data and page cache may take; 0: what the system says, asked when needed */
    ps_log log;            /* NULL: nobody is told */
    int64_t small_folios;  /* bytes a second: what is mapped more slowly is held page by page; 0: 150e9 */
    const ps_spill *spill; /* NULL: plans by which something leaves the arena for a file are refused */
} ps_options;

/* Bytes, counts and nanoseconds so far. Readers brought `bytes_read` of `bytes_moved`; the rest needed no waiting.
 * `bytes_written` left the arena for the spill file. */
typedef struct ps_statistics {
    int64_t bytes_moved, bytes_read, misses, stall_ns, held_bytes, peak_bytes, bytes_written;
} ps_statistics;

/* Opens an engine for a plan. `payload` and `plan` are JSON as docs/payload.md specifies them, `folder` is the
 * artifact's. Nothing is read yet. On an error `*engine` is NULL and `error`, of `size` bytes, has the sentence. */
PS_API ps_status ps_open(const char *payload, const char *plan, const char *folder, const ps_options *options,
                         ps_engine **engine, char *error, size_t size);

/* The address at which a storage lies while it is there; NULL for one that is not in the arena. */
PS_API void *ps_storage(const ps_engine *engine, int32_t storage);

/* Writes at most `size` of the steps at which the plan acts in passes of a method, ascending; returns their
 * number, or -1 for a method that the plan has no schedule for. */
PS_API int32_t ps_probed(const ps_engine *engine, int32_t graph, int32_t *steps, int32_t size);

PS_API ps_status ps_begin(ps_engine *engine, int32_t graph);
PS_API ps_status ps_acquire(ps_engine *engine, int32_t graph, int32_t step);
PS_API ps_status ps_release(ps_engine *engine, int32_t graph, int32_t step);
PS_API ps_status ps_end(ps_engine *engine, int32_t graph);
PS_API ps_status ps_abort(ps_engine *engine);

/* A probe call of compiled code, in place of ps_acquire and ps_release: 2 p is the acquire of probe p, 2 p + 1 its
 * release. It ends and begins the steps that the payload's probe order says (`probes`); a method without one has step k
 * between acquire and release of probe k. A pass begins with PS_PASS_BEGINS and ends with PS_PASS_ENDS, inside
 * ps_begin and ps_end. */
#define PS_PASS_BEGINS (-1)
#define PS_PASS_ENDS (-2)
PS_API ps_status ps_probe(ps_engine *engine, int32_t graph, int32_t call);

/* Reads the bytes of a storage to `address`, of those that the plan keeps outside of the arena. Any thread may call it,
 * several at once. On an error `error`, of `size` bytes, has the sentence. */
PS_API ps_status ps_fetch(const ps_engine *engine, int32_t storage, void *address, char *error, size_t size);

/* Reads by units, of a plan with a pool (docs/payload.md, "Units"), inside ps_begin and ps_end. A step that reads so asks
 * for all units that its call names, ascending, each once, which are cut into parts that fit into the pool: part k ends before `ends[k]` of them;
 * there is room for `count` ends, and `parts` becomes their number. For each part in turn, ps_units_hold has its units in
 * memory until ps_units_release; `alone` is not 0 where there is no other. Kernels read them at their places in the
 * storage's tensor, whose first byte is at ps_units_storage: NULL for one that is not in the pool. */
PS_API void *ps_units_storage(const ps_engine *engine, int32_t storage);
PS_API ps_status ps_units_ask(ps_engine *engine, int32_t graph, int32_t step, const int64_t *units, int64_t count,
                              int64_t *ends, int64_t *parts);
PS_API ps_status ps_units_hold(ps_engine *engine, int32_t graph, int32_t step, const int64_t *units, int64_t count,
                               int32_t alone);
PS_API ps_status ps_units_release(ps_engine *engine, int32_t graph, int32_t step, const int64_t *units, int64_t count);

/* Goes on waiting after PS_WAITING. */
PS_API ps_status ps_wait(ps_engine *engine);

/* Those of the arena, and those of the pool. */
PS_API void ps_stats(const ps_engine *engine, ps_statistics *statistics);
PS_API void ps_units_stats(const ps_engine *engine, ps_statistics *statistics);

/* The address ranges, `starts[k]` to `stops[k]`, of which the engine's weights take pages; returns their number, of
 * which at most `size` are written. */
PS_API int32_t ps_memory(const ps_engine *engine, void **starts, void **stops, int32_t size);

/* The sentence of the last error, until the next call. */
PS_API const char *ps_error(const ps_engine *engine);

/* Stops the readers and waits for them; a call that waits for weights fails. Any thread may call it, again too. */
PS_API void ps_stop(ps_engine *engine);

/* Stops the readers, and gives everything back. In a forked child, where there are no readers and where locks may be
 * held for ever, it does nothing: the child's copy ends with the child. */
PS_API void ps_close(ps_engine *engine);

/* What passes do to the arena, one range of the layout at a time, for tests of arenas: only between passes, of a plan
 * in which nothing streams. `brought` becomes the number of bytes that came; -1 where ps_fill_ready would have to
 * wait. ps_check fails where bytes that are held may not be the files' any more. */
PS_API ps_status ps_fill(ps_engine *engine, int64_t start, int64_t stop, int64_t *brought);
PS_API ps_status ps_fill_ready(ps_engine *engine, int64_t start, int64_t stop, int64_t *brought);
PS_API ps_status ps_drop(ps_engine *engine, int64_t start, int64_t stop);
PS_API ps_status ps_check(ps_engine *engine);

/* Protects memory that maps files from SIGBUS where they shrink: a read of a page that is gone finds zeros. Returns a
 * number for the other two, -1 where too much is protected already. ps_guard_hit tells whether that has happened since:
 * what was computed meanwhile is worth nothing. Engines protect their own arenas. */
PS_API int32_t ps_guard(const void *memory, int64_t nbytes);
PS_API int32_t ps_guard_hit(int32_t guard);
PS_API void ps_unguard(int32_t guard);

/* What the last ps_units_hold has decided, for tests of decisions: units that it dropped, brought, and brought ahead of
 * need, in this order, the last two with the granules that were read for them, from `first` to the one before `stop`.
 * Returns their number, of which at most `size` are written. */
typedef enum ps_changed { PS_DROPPED = 0, PS_BROUGHT = 1, PS_AHEAD = 2 } ps_changed;
typedef struct ps_change {
    int32_t kind, storage;
    int64_t unit, first, stop;
} ps_change;
PS_API int64_t ps_units_changes(const ps_engine *engine, ps_change *changes, int64_t size);

#ifdef __cplusplus
}
#endif

#endif
