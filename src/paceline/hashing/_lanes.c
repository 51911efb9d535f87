/* SHA-256 (FIPS 180-4) of up to four messages side by side, for x86-64 with SHA extensions.
 *
 * One message cannot use the SHA unit fully: each sha256rnds2 waits four cycles for the one before,
 * and the unit takes one every two. Rounds of independent messages fill the gaps: on an AMD EPYC
 * (Zen 5) 1.98 GB/s with one message, 3.1 with two, 3.6 with four; the unit's limit is 3.7.
 *
 * Sha256 objects are like hashlib's. update_each([(hash, data), ...]) is hash.update(data) for each
 * pair, in order where a hash is named twice. The GIL is released while bytes are hashed; a hash
 * that another thread is updating meanwhile raises ValueError. The stable ABI of Python 3.11.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#if !defined(__x86_64__)
#error "only x86-64 has these instructions; Paceline uses hashlib here"
#endif

#include <cpuid.h>
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 64
#define LANES 4

typedef struct {
    PyObject_HEAD
    uint32_t words[8]; /* a to h, between blocks */
    uint64_t length;   /* bytes so far */
    uint8_t rest[BLOCK]; /* of which the last length % 64 are here */
    int busy;          /* some thread updates it without the GIL */
} Sha256;

/* Bytes to hash into one object. */
typedef struct {
    Sha256 *hash;
    const uint8_t *at;
    size_t left;
    int begun;
} Job;

typedef struct {
    uint32_t *words;
    const uint8_t *at;
} Lane;

static const uint32_t FIRST[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                  0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

static const uint32_t K[64] __attribute__((aligned(16))) = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

/* ── rounds ───────────────────────────────────────────────────────────────────────────────────────
 * Each step is written once for lane n and repeated for every lane before the next step: that is
 * the interleaving. The unit takes the state as (ABEF, CDGH): S0_n and S1_n. W0_n to W3_n are the
 * last sixteen words of the message schedule.
 */
#define EACH_1(STEP, ...) STEP(0, __VA_ARGS__)
#define EACH_2(STEP, ...) EACH_1(STEP, __VA_ARGS__) STEP(1, __VA_ARGS__)
#define EACH_3(STEP, ...) EACH_2(STEP, __VA_ARGS__) STEP(2, __VA_ARGS__)
#define EACH_4(STEP, ...) EACH_3(STEP, __VA_ARGS__) STEP(3, __VA_ARGS__)

#define OPEN(n, _)                                                                                 \
    __m128i S0_##n, S1_##n;                                                                        \
    const uint8_t *at_##n = lanes[n].at;                                                           \
    {                                                                                              \
        __m128i abcd = _mm_loadu_si128((const __m128i *)lanes[n].words);                           \
        __m128i efgh = _mm_loadu_si128((const __m128i *)(lanes[n].words + 4));                     \
        __m128i cdab = _mm_shuffle_epi32(abcd, 0xB1), hgfe = _mm_shuffle_epi32(efgh, 0x1B);        \
        S0_##n = _mm_alignr_epi8(cdab, hgfe, 8);                                                   \
        S1_##n = _mm_blend_epi16(hgfe, cdab, 0xF0);                                                \
    }

#define CLOSE(n, _)                                                                                \
    {                                                                                              \
        __m128i feba = _mm_shuffle_epi32(S0_##n, 0x1B), dchg = _mm_shuffle_epi32(S1_##n, 0xB1);    \
        _mm_storeu_si128((__m128i *)lanes[n].words, _mm_blend_epi16(feba, dchg, 0xF0));            \
        _mm_storeu_si128((__m128i *)(lanes[n].words + 4), _mm_alignr_epi8(dchg, feba, 8));         \
        lanes[n].at = at_##n;                                                                      \
    }

#define WORDS(n, i)                                                                                \
    __m128i W##i##_##n =                                                                           \
        _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)at_##n + i), big_endian);

#define KEEP(n, _) __m128i kept0_##n = S0_##n, kept1_##n = S1_##n;

#define ADD(n, _)                                                                                  \
    S0_##n = _mm_add_epi32(S0_##n, kept0_##n);                                                     \
    S1_##n = _mm_add_epi32(S1_##n, kept1_##n);                                                     \
    at_##n += BLOCK;

#define TWO_ROUNDS(n, i, k)                                                                        \
    __m128i M_##n = _mm_add_epi32(W##i##_##n, _mm_load_si128((const __m128i *)(K + 4 * (k))));     \
    S1_##n = _mm_sha256rnds2_epu32(S1_##n, S0_##n, M_##n);

#define TWO_MORE(n, _)                                                                             \
    S0_##n = _mm_sha256rnds2_epu32(S0_##n, S1_##n, _mm_shuffle_epi32(M_##n, 0x0E));

#define SCHEDULE(n, a, b, c, d)                                                                    \
    W##a##_##n = _mm_sha256msg2_epu32(                                                             \
        _mm_add_epi32(_mm_sha256msg1_epu32(W##a##_##n, W##b##_##n),                                \
                      _mm_alignr_epi8(W##d##_##n, W##c##_##n, 4)),                                 \
        W##d##_##n);

#define FOUR(EACH, i, k)                                                                           \
    {                                                                                              \
        EACH(TWO_ROUNDS, i, k)                                                                     \
        EACH(TWO_MORE, _)                                                                          \
    }

#define SIXTEEN(EACH, k)                                                                           \
    EACH(SCHEDULE, 0, 1, 2, 3) FOUR(EACH, 0, k) EACH(SCHEDULE, 1, 2, 3, 0) FOUR(EACH, 1, k + 1)    \
    EACH(SCHEDULE, 2, 3, 0, 1) FOUR(EACH, 2, k + 2) EACH(SCHEDULE, 3, 0, 1, 2) FOUR(EACH, 3, k + 3)

#define COMPRESS(name, EACH)                                                                       \
    __attribute__((target("sha,sse4.1,ssse3"))) static void name(Lane *lanes, size_t blocks)       \
    {                                                                                              \
        const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);     \
        EACH(OPEN, _)                                                                              \
        for (; blocks; blocks--) {                                                                 \
            EACH(KEEP, _)                                                                          \
            EACH(WORDS, 0) EACH(WORDS, 1) EACH(WORDS, 2) EACH(WORDS, 3)                            \
            FOUR(EACH, 0, 0) FOUR(EACH, 1, 1) FOUR(EACH, 2, 2) FOUR(EACH, 3, 3)                    \
            SIXTEEN(EACH, 4) SIXTEEN(EACH, 8) SIXTEEN(EACH, 12)                                    \
            EACH(ADD, _)                                                                           \
        }                                                                                          \
        EACH(CLOSE, _)                                                                             \
    }

COMPRESS(compress_1, EACH_1)
COMPRESS(compress_2, EACH_2)
COMPRESS(compress_3, EACH_3)
COMPRESS(compress_4, EACH_4)

static void (*const COMPRESSES[LANES])(Lane *, size_t) = {compress_1, compress_2, compress_3,
                                                          compress_4};

/* ── jobs, without the GIL ────────────────────────────────────────────────────────────────────── */

/* Complete a partial block. */
static void begin_job(Job *job)
{
    Sha256 *hash = job->hash;
    size_t have = hash->length % BLOCK;
    if (!have || !job->left)
        return;
    size_t take = BLOCK - have < job->left ? BLOCK - have : job->left;
    memcpy(hash->rest + have, job->at, take);
    hash->length += take;
    job->at += take;
    job->left -= take;
    if (have + take == BLOCK) {
        Lane lane = {hash->words, hash->rest};
        compress_1(&lane, 1);
    }
}

/* Store the rest, less than a block. */
static void end_job(Job *job)
{
    if (job->left)
        memcpy(job->hash->rest, job->at, job->left);
    job->hash->length += job->left;
    job->left = 0;
}

static int runs(Job *const *running, size_t used, const Sha256 *hash)
{
    while (used)
        if (running[--used]->hash == hash)
            return 1;
    return 0;
}

static void work(Job *jobs, size_t count)
{
    Job *running[LANES];
    Lane lanes[LANES];
    size_t first = 0, used = 0;
    for (;;) {
        while (first < count && jobs[first].begun)
            first++;
        /* In order: of two jobs for one hash the second starts after the first ends. */
        for (size_t each = first; each < count && used < LANES; each++) {
            Job *job = &jobs[each];
            if (job->begun || runs(running, used, job->hash))
                continue;
            job->begun = 1;
            begin_job(job);
            if (job->left >= BLOCK)
                running[used++] = job;
            else
                end_job(job);
        }
        if (!used)
            return;
        size_t blocks = SIZE_MAX;
        for (size_t lane = 0; lane < used; lane++) {
            lanes[lane].words = running[lane]->hash->words;
            lanes[lane].at = running[lane]->at;
            size_t whole = running[lane]->left / BLOCK;
            blocks = whole < blocks ? whole : blocks;
        }
        COMPRESSES[used - 1](lanes, blocks);
        size_t still = 0;
        for (size_t lane = 0; lane < used; lane++) {
            Job *job = running[lane];
            job->at += blocks * BLOCK;
            job->left -= blocks * BLOCK;
            job->hash->length += blocks * BLOCK;
            if (job->left >= BLOCK)
                running[still++] = job;
            else
                end_job(job);
        }
        used = still;
    }
}

/* ── Python ───────────────────────────────────────────────────────────────────────────────────── */

static PyTypeObject *Sha256Type;

static int busy(Sha256 *hash)
{
    if (hash->busy)
        PyErr_SetString(PyExc_ValueError, "another thread is updating this hash");
    return hash->busy;
}

static PyObject *new_hash(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    if (PyTuple_Size(args) || (kwargs && PyDict_Size(kwargs))) {
        PyErr_SetString(PyExc_TypeError, "Sha256() takes no arguments");
        return NULL;
    }
    Sha256 *hash = (Sha256 *)PyType_GenericAlloc(type, 0);
    if (hash)
        memcpy(hash->words, FIRST, sizeof FIRST);
    return (PyObject *)hash;
}

static void free_hash(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_Free(self);
    Py_DECREF(type);
}

/* Hash ``count`` jobs whose hashes and bytes the caller keeps alive; -1 with an error set. */
static int run(Job *jobs, size_t count)
{
    for (size_t each = 0; each < count; each++)
        if (busy(jobs[each].hash))
            return -1;
    for (size_t each = 0; each < count; each++)
        jobs[each].hash->busy = 1;
    Py_BEGIN_ALLOW_THREADS
    work(jobs, count);
    Py_END_ALLOW_THREADS
    for (size_t each = 0; each < count; each++)
        jobs[each].hash->busy = 0;
    return 0;
}

static PyObject *update(PyObject *self, PyObject *data)
{
    Py_buffer view;
    if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE))
        return NULL;
    Job job = {(Sha256 *)self, view.buf, (size_t)view.len, 0};
    int failed = run(&job, 1);
    PyBuffer_Release(&view);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

static int finish(Sha256 *hash, uint8_t out[32])
{
    if (busy(hash))
        return -1;
    uint8_t last[2 * BLOCK] = {0};
    uint32_t words[8];
    size_t have = hash->length % BLOCK, size = have < BLOCK - 8 ? BLOCK : 2 * BLOCK;
    memcpy(words, hash->words, sizeof words);
    memcpy(last, hash->rest, have);
    last[have] = 0x80;
    for (int byte = 0; byte < 8; byte++)
        last[size - 1 - byte] = (uint8_t)(hash->length * 8 >> 8 * byte);
    Lane lane = {words, last};
    compress_1(&lane, size / BLOCK);
    for (int byte = 0; byte < 32; byte++)
        out[byte] = (uint8_t)(words[byte / 4] >> (24 - 8 * (byte % 4)));
    return 0;
}

static PyObject *digest(PyObject *self, PyObject *unused)
{
    uint8_t out[32];
    (void)unused;
    return finish((Sha256 *)self, out) ? NULL : PyBytes_FromStringAndSize((char *)out, 32);
}

static PyObject *hexdigest(PyObject *self, PyObject *unused)
{
    static const char HEX[] = "0123456789abcdef";
    uint8_t out[32];
    char text[65] = {0};
    (void)unused;
    if (finish((Sha256 *)self, out))
        return NULL;
    for (int byte = 0; byte < 32; byte++) {
        text[2 * byte] = HEX[out[byte] >> 4];
        text[2 * byte + 1] = HEX[out[byte] & 15];
    }
    return PyUnicode_FromString(text);
}

static PyObject *update_each(PyObject *module, PyObject *work_to_do)
{
    PyObject *pairs = PySequence_Tuple(work_to_do); /* keeps references until the end */
    PyObject *result = NULL;
    (void)module;
    if (!pairs)
        return NULL;
    Py_ssize_t count = PyTuple_Size(pairs), held = 0;
    Job *jobs = PyMem_Calloc((size_t)count + 1, sizeof *jobs);
    Py_buffer *views = PyMem_Calloc((size_t)count + 1, sizeof *views);
    if (!jobs || !views) {
        PyErr_NoMemory();
        goto done;
    }
    for (; held < count; held++) {
        PyObject *pair = PyTuple_GetItem(pairs, held);
        if (!PyTuple_Check(pair) || PyTuple_Size(pair) != 2 ||
            !PyObject_TypeCheck(PyTuple_GetItem(pair, 0), Sha256Type)) {
            PyErr_SetString(PyExc_TypeError, "update_each takes pairs (Sha256, buffer)");
            goto done;
        }
        if (PyObject_GetBuffer(PyTuple_GetItem(pair, 1), &views[held], PyBUF_SIMPLE))
            goto done;
        jobs[held].hash = (Sha256 *)PyTuple_GetItem(pair, 0);
        jobs[held].at = views[held].buf;
        jobs[held].left = (size_t)views[held].len;
    }
    if (!run(jobs, (size_t)count))
        result = Py_NewRef(Py_None);
done:
    while (held)
        PyBuffer_Release(&views[--held]);
    PyMem_Free(views);
    PyMem_Free(jobs);
    Py_DECREF(pairs);
    return result;
}

static PyMethodDef HASH_METHODS[] = {
    {"update", update, METH_O, "Hash more bytes."},
    {"digest", digest, METH_NOARGS, "Return the 32 bytes of the digest so far."},
    {"hexdigest", hexdigest, METH_NOARGS, "Return the digest so far in hex."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot HASH_SLOTS[] = {{Py_tp_doc, "SHA-256 of what it is updated with."},
                                   {Py_tp_new, new_hash},
                                   {Py_tp_dealloc, free_hash},
                                   {Py_tp_methods, HASH_METHODS},
                                   {0, NULL}};

static PyType_Spec HASH_SPEC = {"paceline.hashing._lanes.Sha256", sizeof(Sha256), 0,
                                Py_TPFLAGS_DEFAULT, HASH_SLOTS};

static PyMethodDef METHODS[] = {
    {"update_each", update_each, METH_O, "Update each hash of (hash, data) pairs, side by side."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_lanes", "SHA-256 of several messages side by side.", -1, METHODS,
    NULL, NULL, NULL, NULL};

static int has_sha(void)
{
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & bit_SSSE3) || !(ecx & bit_SSE4_1))
        return 0;
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (ebx & bit_SHA);
}

PyMODINIT_FUNC PyInit__lanes(void)
{
    if (!has_sha()) {
        PyErr_SetString(PyExc_ImportError, "this CPU has no SHA extensions");
        return NULL;
    }
    PyObject *module = PyModule_Create(&MODULE);
    if (!module)
        return NULL;
    Sha256Type = (PyTypeObject *)PyType_FromSpec(&HASH_SPEC);
    if (!Sha256Type || PyModule_AddObjectRef(module, "Sha256", (PyObject *)Sha256Type) ||
        PyModule_AddIntConstant(module, "LANES", LANES)) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
