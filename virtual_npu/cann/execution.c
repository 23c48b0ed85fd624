/* How streams do their work: a stream does its tasks at once, until it meets an event that nothing has recorded.
 * From then on they wait in its queue, as they would on the device; a host that waits for such a stream would hang,
 * and is told so. */
#define _GNU_SOURCE
#include "device.h"
#include <dlfcn.h>
#include <string.h>
#include <time.h>

static pthread_cond_t idle = PTHREAD_COND_INITIALIZER;

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ull + now.tv_nsec;
}

/* `event` is recorded, now */
static void mark(struct stream *stream, struct event *event) {
    event->recorded = true;
    event->graph = NULL;
    event->time_ns = now_ns();
    event->recorder = stream;
    event->updates = stream->updates;
}

/* What the recorder of `event` did is done */
static void see(struct stream *stream, const struct event *event) {
    if (!event->recorder) return;
    size_t i = 0;
    while (i < stream->num_seen && stream->seen[i].stream != event->recorder) i++;
    if (i == 8) i = 0; /* more updating streams than any program has: the oldest is forgotten */
    if (i == stream->num_seen) stream->num_seen++;
    stream->seen[i].stream = event->recorder;
    stream->seen[i].updates = event->updates;
}

static bool reached(const struct task *task) {
    uint64_t there = *(const uint64_t *)task->target, wanted = task->count;
    switch (task->value) {
    case ACL_STREAM_WAIT_VALUE_GEQ: return (int64_t)(there - wanted) >= 0;
    case ACL_STREAM_WAIT_VALUE_EQ: return there == wanted;
    case ACL_STREAM_WAIT_VALUE_AND: return there & wanted;
    default: return ~(there | wanted);
    }
}

enum { DONE, BLOCKED, FAILED };

/* Does one task; the lock is dropped while a kernel or a host function runs */
static int perform(struct stream *stream, struct task *task, int *code, bool *recorded) {
    switch (task->kind) {
    case WAIT:
        if (!task->event->recorded) return BLOCKED;
        return see(stream, task->event), DONE;
    case RECORD: return mark(stream, task->event), *recorded = true, DONE;
    case AWAIT:
        if (!reached(task)) return BLOCKED;
        return see(stream, event_of(task->target)), DONE;
    case WRITE:
        *(uint64_t *)task->target = task->count;
        return mark(stream, event_of(task->target)), *recorded = true, DONE;
    case RESET: return task->event->recorded = false, DONE;
    case COPY: return memmove(task->target, task->source, task->count), DONE;
    case FILL: return memset(task->target, task->value, task->count), DONE;
    case KERNEL:
        if ((*code = in_order(stream, task))) return FAILED;
        pthread_mutex_unlock(&lock);
        *code = run_kernel(task->kernel);
        pthread_mutex_lock(&lock);
        return *code ? FAILED : DONE;
    case CALL:
        pthread_mutex_unlock(&lock);
        task->function(task->target);
        pthread_mutex_lock(&lock);
        return DONE;
    case REPLAY:
        while (task->next < task->graph->tasks.count) {
            struct task copy = task->graph->tasks.items[task->next];
            int outcome = perform(stream, &copy, code, recorded);
            if (outcome == BLOCKED) return BLOCKED;
            if (outcome == FAILED) return task->graph->num_replays--, FAILED;
            task->next++;
        }
        task->graph->num_replays--;
    }
    return DONE;
}

/* Does what can be done of a stream's queue; a failed task takes the rest of the queue with it */
static int drain(struct stream *stream, bool *recorded) {
    int code = ACL_SUCCESS;
    if (stream->running) return ACL_SUCCESS; /* by whoever runs it, here or in another thread */
    stream->running = true;
    stream->runner = pthread_self();
    while (stream->queue.first < stream->queue.count) {
        struct task task = stream->queue.items[stream->queue.first];
        int outcome = perform(stream, &task, &code, recorded);
        stream->queue.items[stream->queue.first] = task; /* a replay knows how far it came */
        if (outcome == BLOCKED) break;
        if (outcome == FAILED) {
            while (++stream->queue.first < stream->queue.count)
                if (stream->queue.items[stream->queue.first].kind == REPLAY)
                    stream->queue.items[stream->queue.first].graph->num_replays--;
            break;
        }
        stream->queue.first++;
    }
    if (stream->queue.first == stream->queue.count) stream->queue.first = stream->queue.count = 0;
    stream->running = false;
    pthread_cond_broadcast(&idle);
    return code;
}

int submit(struct stream *stream, struct task task) {
    if (stream->dead) return refuse(ACL_ERROR_RT_INVALID_HANDLE, "the stream is destroyed");
    if (stream->updated) return replace(stream, task);
    if (task.kind == WAIT && !stream->graph) {
        int refused = join_capture(stream, task.event);
        if (refused) return refused;
    }
    if (stream->graph) return capture(stream, task);
    append(&stream->queue, task);
    bool recorded = false;
    int code = drain(stream, &recorded);
    while (recorded) { /* others may go on, and record what others wait for */
        recorded = false;
        for (struct stream *each = all_streams(); each; each = each->next) {
            int other = each->queue.first < each->queue.count ? drain(each, &recorded) : ACL_SUCCESS;
            code = code ? code : other;
        }
    }
    count_busy();
    return code;
}

/* Kernels need Python's lock: a thread that holds it cannot wait for one, as torch's allocator does in empty_cache.
 * Nor need it, for what another thread's replay uses is not the allocator's to free. */
static bool holds_python(void) {
    static int (*check)(void);
    if (!check) check = (int (*)(void))dlsym(RTLD_DEFAULT, "PyGILState_Check");
    return check && check();
}

/* The host waits for a stream */
int settle(struct stream *stream) {
    while (stream->running && !pthread_equal(stream->runner, pthread_self())) {
        if (holds_python()) return ACL_SUCCESS;
        pthread_cond_wait(&idle, &lock);
    }
    if (stream->graph)
        return refuse(ACL_ERROR_RT_STREAM_CAPTURED,
                      "the host waits for a stream that is being captured: a graph cannot hold that");
    if (forbidden_in_capture())
        return refuse(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT,
                      "the host waits for the device during a capture");
    if (stream->queue.first < stream->queue.count)
        return refuse(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT,
                      "the host waits for a stream that waits for an event nothing has recorded: "
                      "on the device this hangs. Record the event (after the task update) first");
    stream->settled = stream->updates;
    return ACL_SUCCESS;
}
