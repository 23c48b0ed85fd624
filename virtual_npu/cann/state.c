/* The state of the device: streams, graphs, the words that events are made of, and the two functions that own
 * kernels. */
#include "device.h"
#include <stdlib.h>

/* Number of streams that capture, update or wait, or for whose task groups the host has not waited; while it is 0,
 * kernels run without a check. */
int virtual_npu_busy;

int (*run_kernel)(uint64_t kernel);
void (*forget_kernel)(uint64_t kernel);
void virtual_npu_run_with(int (*function)(uint64_t)) { run_kernel = function; }
void virtual_npu_forget_with(void (*function)(uint64_t)) { forget_kernel = function; }

clocks seen_by_host;

uint64_t virtual_npu_counts[NUM_COUNTED];
void counted(enum counted what) { __atomic_add_fetch(&virtual_npu_counts[what], 1, __ATOMIC_RELAXED); }

static struct stream *streams, first_stream = {.id = 0};
static int num_streams;

struct stream *stream_of(aclrtStream handle) { return handle ? handle : &first_stream; }

struct stream *all_streams(void) {
    first_stream.next = streams;
    return &first_stream;
}

struct stream *new_stream(void) {
    if (num_streams == MAX_STREAMS - 1) return NULL;
    struct stream *stream = calloc(1, sizeof *stream);
    stream->id = ++num_streams;
    stream->next = streams;
    return streams = stream;
}

void append(struct tasks *tasks, struct task task) {
    if (tasks->count == tasks->room) {
        tasks->room = tasks->room ? 2 * tasks->room : 16;
        tasks->items = realloc(tasks->items, tasks->room * sizeof task);
    }
    tasks->items[tasks->count++] = task;
}

void release(struct event *event) {
    if (--event->num_tasks == 0 && event->destroyed) free(event);
}

void learn(clocks known, const clocks more) {
    for (size_t i = 0; i < MAX_STREAMS; i++)
        if (known[i] < more[i]) known[i] = more[i];
}

struct moment tick(struct stream *stream) {
    return (struct moment){stream, ++stream->seen[stream->id]};
}

void count_busy(void) {
    int busy = 0;
    for (struct stream *each = all_streams(); each; each = each->next)
        busy += each->graph || each->updated || each->queue.first < each->queue.count || each->running ||
                seen_by_host[each->id] < each->seen[each->id];
    __atomic_store_n(&virtual_npu_busy, busy, __ATOMIC_SEQ_CST);
}

struct word {
    const void *address;
    struct event event; /* the event that wrote it last */
    struct word *next;
};
static struct word *words;

struct event *event_of(const void *address) {
    struct word *each = words;
    while (each && each->address != address) each = each->next;
    if (!each) {
        each = calloc(1, sizeof *each);
        each->address = address;
        each->next = words;
        words = each;
    }
    return &each->event;
}

struct graph *graphs;
_Thread_local int thread_mode = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;

bool capturing_anywhere(void) {
    for (const struct graph *each = graphs; each; each = each->next)
        if (each->capturing) return true;
    return false;
}

bool forbidden_in_capture(void) {
    if (thread_mode == ACL_MODEL_RI_CAPTURE_MODE_RELAXED) return false;
    for (const struct graph *each = graphs; each; each = each->next)
        if (each->capturing && (each->mode == ACL_MODEL_RI_CAPTURE_MODE_GLOBAL ||
                                (each->mode == ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL &&
                                 pthread_equal(each->thread, pthread_self()))))
            return true;
    return false;
}
