/* Threads that use the virtual device at once, as torch_npu would: streams of their own and a shared one, events that
 * are recorded again, graphs whose task groups are updated, and one thread that holds Python's lock. It exits with 1
 * and a line on what was refused or out of order. test_hammer.py compiles it with sanitizers. */
#include <acl/acl_rt.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

extern void virtual_npu_run_with(int (*)(uint64_t));
extern void virtual_npu_forget_with(void (*)(uint64_t));
extern int virtual_npu_memory(size_t), virtual_npu_submit(aclrtStream, uint64_t), virtual_npu_state(aclrtStream);
extern const char *aclGetRecentErrMsg(void);

enum { PAIRS = 3, GROUPS = 3, MAX_KERNELS = 1 << 16, NOBODY = -1 };

static int num_steps;
static atomic_bool over;
static pthread_barrier_t captured; /* nobody may wait for the device before */

static void demand(bool so, const char *what, int line) {
    if (so) return;
    fprintf(stderr, "line %d: %s: %s\n", line, what, aclGetRecentErrMsg());
    _exit(1);
}
#define OK(call) demand((call) == ACL_SUCCESS, #call, __LINE__)
#define THAT(claim) demand(claim, #claim, __LINE__)

/* Python's lock, which every kernel needs */
static pthread_mutex_t python = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local bool has_python;
int PyGILState_Check(void) { return has_python; }

/* A kernel writes `value` to `place`, or fails */
static struct kernel {
    _Atomic uint64_t *place;
    uint64_t value;
    bool slow, fails;
    atomic_bool forgotten;
} kernels[MAX_KERNELS];
static atomic_int num_kernels = 1;

static int run(uint64_t number) {
    struct kernel *kernel = &kernels[number];
    bool had = has_python;
    if (!had) pthread_mutex_lock(&python);
    has_python = true;
    THAT(!kernel->forgotten);
    if (kernel->slow) usleep(50);
    if (kernel->place) *kernel->place = kernel->value;
    has_python = had;
    if (!had) pthread_mutex_unlock(&python);
    return kernel->fails;
}
static void forget(uint64_t number) { kernels[number].forgotten = true; }

static uint64_t kernel(_Atomic uint64_t *place, uint64_t value, bool slow) {
    int number = atomic_fetch_add(&num_kernels, 1);
    THAT(number < MAX_KERNELS);
    kernels[number].place = place;
    kernels[number].value = value;
    kernels[number].slow = slow;
    return number;
}

static uint64_t *new_word(void) {
    void *word;
    OK(aclrtMalloc(&word, 32, 0));
    OK(aclrtMemset(word, 32, 0, 32));
    return word;
}

/* Decodes of one engine: each layer waits for its update, and the update for the replay before it */
static void *engine(void *waits_on_device) {
    aclrtStream stream, updates, capture;
    aclmdlRI graph;
    aclrtTaskGrp groups[GROUPS];
    uint64_t *words[GROUPS];
    _Atomic uint64_t outputs[GROUPS] = {0};
    OK(aclrtCreateStream(&stream));
    OK(aclrtCreateStream(&updates));
    OK(aclrtCreateStream(&capture));
    OK(aclmdlRICaptureBegin(capture, ACL_MODEL_RI_CAPTURE_MODE_RELAXED));
    for (int i = 0; i < GROUPS; i++) {
        words[i] = new_word();
        OK(aclrtValueWait(words[i], 1, ACL_STREAM_WAIT_VALUE_EQ, capture));
        OK(aclrtValueWrite(words[i], 0, 0, capture));
        OK(aclmdlRICaptureTaskGrpBegin(capture));
        OK(virtual_npu_submit(capture, kernel(&outputs[i], 0, false)));
        OK(aclmdlRICaptureTaskGrpEnd(capture, &groups[i]));
    }
    OK(aclmdlRICaptureEnd(capture, &graph));
    pthread_barrier_wait(&captured);
    for (int step = 1; step <= num_steps; step++) {
        aclrtEvent done;
        OK(aclrtCreateEventExWithFlag(&done, 0));
        OK(aclrtRecordEvent(done, stream));
        if (waits_on_device)
            OK(aclrtStreamWaitEvent(updates, done));
        else
            OK(aclrtSynchronizeStream(stream));
        OK(aclrtDestroyEvent(done));
        OK(aclmdlRIExecuteAsync(graph, stream));
        for (int i = 0; i < GROUPS; i++) {
            OK(aclmdlRICaptureTaskUpdateBegin(updates, groups[i]));
            OK(virtual_npu_submit(updates, kernel(&outputs[i], step, step % 8 == 0)));
            OK(aclmdlRICaptureTaskUpdateEnd(updates));
            OK(aclrtValueWrite(words[i], 1, 0, updates));
        }
        OK(aclrtSynchronizeStream(stream));
        for (int i = 0; i < GROUPS; i++) THAT(outputs[i] == (uint64_t)step);
    }
    OK(aclrtSynchronizeStream(stream));
    OK(aclmdlRIDestroy(graph));
    return NULL;
}

/* A stream that others wait for, which is nearly always at work */
static aclrtStream shared;
static _Atomic uint64_t nowhere;
static void *worker(void *unused) {
    uint64_t slow = kernel(&nowhere, 0, true);
    while (!over) OK(virtual_npu_submit(shared, slow));
    return NULL;
}

/* What is sent to the shared stream before an event is done when the event is, however often it was recorded */
static void *follower(void *unused) {
    aclrtStream stream;
    aclrtEvent event;
    _Atomic uint64_t sent = 0, seen = 0;
    OK(aclrtCreateStream(&stream));
    OK(aclrtCreateEventExWithFlag(&event, 0));
    pthread_barrier_wait(&captured);
    for (int step = 1; step <= num_steps; step++) {
        OK(virtual_npu_submit(shared, kernel(&sent, step, false)));
        OK(aclrtRecordEvent(event, shared));
        OK(aclrtStreamWaitEvent(stream, event));
        OK(virtual_npu_submit(stream, kernel(&seen, step, false)));
        if (step % 2)
            OK(aclrtSynchronizeStream(stream));
        else
            OK(aclrtSynchronizeEvent(event));
        THAT(sent == (uint64_t)step);
        THAT(!(step % 2) || seen == (uint64_t)step);
        aclrtEventRecordedStatus status;
        OK(aclrtQueryEventStatus(event, &status));
        THAT(status == ACL_EVENT_RECORDED_STATUS_COMPLETE);
    }
    OK(aclrtSynchronizeStream(stream));
    OK(aclrtDestroyEvent(event));
    return NULL;
}

/* torch's allocator empties its cache: it waits for the device, holding Python's lock */
static void *allocator(void *unused) {
    pthread_barrier_wait(&captured);
    while (!over) {
        pthread_mutex_lock(&python);
        has_python = true;
        OK(aclrtSynchronizeDevice());
        void *memory;
        OK(aclrtMalloc(&memory, 1 << 20, 0));
        OK(aclrtFree(memory));
        has_python = false;
        pthread_mutex_unlock(&python);
        usleep(100);
    }
    return NULL;
}

/* A stream that fails holds up nobody else */
static void failure(void) {
    aclrtStream failing, waiting;
    aclrtEvent event;
    uint64_t *word = new_word(), wrong = kernel(NULL, 0, false);
    _Atomic uint64_t place = 0;
    OK(aclrtCreateStream(&failing));
    OK(aclrtCreateStream(&waiting));
    OK(aclrtCreateEventExWithFlag(&event, 0));
    kernels[wrong].fails = true;
    OK(aclrtValueWait(word, 1, ACL_STREAM_WAIT_VALUE_EQ, failing));
    OK(virtual_npu_submit(failing, wrong));
    OK(aclrtRecordEvent(event, failing));
    OK(aclrtStreamWaitEvent(waiting, event));
    OK(virtual_npu_submit(waiting, kernel(&place, 1, false)));
    THAT(aclrtValueWrite(word, 1, 0, shared) != ACL_SUCCESS);
    OK(aclrtSynchronizeStream(waiting));
    THAT(place == 1);
    OK(aclrtSynchronizeDevice());
}

int main(int count, char **words) {
    THAT(count == 2);
    num_steps = atoi(words[1]);
    virtual_npu_run_with(run);
    virtual_npu_forget_with(forget);
    OK(virtual_npu_memory(1 << 28));
    OK(aclrtCreateStream(&shared));
    failure();
    pthread_t threads[2 * PAIRS], endless[2];
    pthread_barrier_init(&captured, NULL, 2 * PAIRS + 1);
    pthread_create(&endless[0], NULL, worker, NULL);
    pthread_create(&endless[1], NULL, allocator, NULL);
    for (int i = 0; i < PAIRS; i++) {
        pthread_create(&threads[2 * i], NULL, engine, i % 2 ? words : NULL);
        pthread_create(&threads[2 * i + 1], NULL, follower, NULL);
    }
    for (int i = 0; i < 2 * PAIRS; i++) pthread_join(threads[i], NULL);
    over = true;
    for (int i = 0; i < 2; i++) pthread_join(endless[i], NULL);
    OK(aclrtSynchronizeDevice());
    return 0;
}
