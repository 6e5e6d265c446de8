/* libpenstock_aoti.so: code that AOTInductor compiled with probes inside, for callers that are built without torch.
 *
 * The library links torch, and its callers find it by dlopen: `penstock_aoti` is all that it exports. Functions that can
 * fail return a ps_status, and `error`, of `size` bytes, then has one sentence. Calls of one pa_code belong to one thread
 * at a time.
 */
#ifndef PENSTOCK_AOTI_H
#define PENSTOCK_AOTI_H

#include "../penstock.h"

#ifdef __cplusplus
extern "C" {
#endif

#define PA_VERSION 1
#define PA_ENTRY "penstock_aoti"

/* A tensor in memory of the caller's. */
typedef struct pa_tensor {
    const char *name; /* of a weight, NULL for others */
    void *address; /* NULL for a weight that the code asks for and never reads */
    const int64_t *sizes, *strides; /* in elements */
    int32_t dims;
    int32_t dtype; /* the number of torch's ScalarType, which are those of ExecuTorch's */
} pa_tensor;

/* Compiled code of one method. */
typedef struct pa_code pa_code;

/* A probe call of the code, as ps_probe takes it. Anything but 0 ends the run. */
typedef int (*pa_probe)(void *context, int32_t call);

typedef struct pa_library {
    int32_t version; /* PA_VERSION of what follows */

    /* Loads a method of a package, which `torch`, a version, has compiled for `machine`. */
    ps_status (*load)(const char *bytes, size_t nbytes, const char *method, const char *torch, const char *machine,
                      pa_code **code, char *error, size_t size);

    /* Gives the code its weights, which stay where they are until pa_code is closed; it may need fewer of them. */
    ps_status (*bind)(pa_code *code, const pa_tensor *weights, size_t count, char *error, size_t size);

    /* Runs once. The results stay until the next run, or until `drop`. */
    ps_status (*run)(pa_code *code, const pa_tensor *inputs, size_t count, pa_probe probe, void *context, char *error,
                     size_t size);

    /* The sizes of a result, of which there are `dims`; NULL for a result that there is not. */
    const int64_t *(*sizes)(const pa_code *code, size_t result, int32_t *dims);

    /* Copies a result to a tensor of its sizes and its dtype. */
    ps_status (*copy)(const pa_code *code, size_t result, const pa_tensor *to, char *error, size_t size);

    void (*drop)(pa_code *code);
    void (*close)(pa_code *code);
} pa_library;

PS_API const pa_library *penstock_aoti(void);

#ifdef __cplusplus
}
#endif

#endif
