/* Runs the work of streams: a stream does its tasks at once, until it meets an event that has not been recorded.
 * From then on tasks wait in its queue, as they would on the device; a host that waits for such a stream would
 * hang, and gets an error instead. */
#define _GNU_SOURCE
#include "device.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static pthread_cond_t progress = PTHREAD_COND_INITIALIZER;

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ull + now.tv_nsec;
}

/* Records `event` now. */
static void mark(struct stream *stream, struct event *event, uint64_t number) {
    event->recorded = true;
    if (event->num_recorded < number) event->num_recorded = number;
    event->time_ns = now_ns();
    memcpy(event->before, stream->seen, sizeof event->before);
}

/* Returns whether a word of this value ends an AWAIT. */
static bool met(const struct task *wait, uint64_t there) {
    uint64_t wanted = wait->count;
    switch (wait->value) {
    case ACL_STREAM_WAIT_VALUE_GEQ: return (int64_t)(there - wanted) >= 0;
    case ACL_STREAM_WAIT_VALUE_EQ: return there == wanted;
    case ACL_STREAM_WAIT_VALUE_AND: return there & wanted;
    default: return ~(there | wanted);
    }
}

enum { DONE, BLOCKED, FAILED };

/* Replaces the kernels of a task group; the lock is released while the old ones are forgotten. */
static int update(struct stream *stream, const struct task *task) {
    struct group *group = task->group;
    struct tasks kernels = {.items = task->target, .count = task->count};
    int code = updatable(stream, group);
    for (size_t i = 0; i < kernels.count && !code; i++) {
        struct task *old = &group->graph->tasks.items[group->first + i];
        uint64_t kernel = old->kernel;
        old->kernel = kernels.items[i].kernel;
        kernels.items[i].kernel = kernel;
    }
    if (!code) group->updated = tick(stream);
    forget(kernels);
    return code;
}

/* Does one task other than a replay; the lock is released while a kernel or a host function runs. */
static int perform(struct stream *stream, const struct task *task, int *code, bool *recorded) {
    switch (task->kind) {
    case WAIT:
        if (!task->event->recorded || task->event->num_recorded < task->count) return BLOCKED;
        return learn(stream->seen, task->event->before), DONE;
    case RECORD: return mark(stream, task->event, task->count), *recorded = true, DONE;
    case AWAIT:
        if (!met(task, *(const uint64_t *)task->target)) return BLOCKED;
        return learn(stream->seen, event_of(task->target)->before), DONE;
    case WRITE:
        *(uint64_t *)task->target = task->count;
        return mark(stream, event_of(task->target), 0), *recorded = true, DONE;
    case RESET: return task->event->recorded = false, DONE;
    case COPY: return memmove(task->target, task->source, task->count), DONE;
    case FILL: return memset(task->target, task->value, task->count), DONE;
    case KERNEL:
        if ((*code = in_order(stream, task))) return FAILED;
        if (task->group) task->group->ran = tick(stream);
        pthread_mutex_unlock(&lock);
        *code = run_kernel(task->kernel);
        pthread_mutex_lock(&lock);
        return *code ? FAILED : DONE;
    case CALL:
        pthread_mutex_unlock(&lock);
        task->function(task->target);
        pthread_mutex_lock(&lock);
        return DONE;
    case MEET:
        pthread_mutex_unlock(&lock);
        *code = task->meets(task->target);
        pthread_mutex_lock(&lock);
        return *code ? FAILED : DONE;
    case UPDATE: return (*code = update(stream, task)) ? FAILED : DONE;
    case REPLAY: break;
    }
    return DONE;
}

/* Does the first task of a queue. The progress of a replay is written into the queue before each of its tasks,
 * because other threads look there while a kernel runs, and may move the queue by adding to it. */
static int perform_first(struct stream *stream, int *code, bool *recorded) {
    struct task task = stream->queue.items[stream->queue.first];
    if (task.kind != REPLAY) return perform(stream, &task, code, recorded);
    int outcome = DONE;
    while (outcome == DONE && task.next < task.graph->tasks.count) {
        struct task copy = task.graph->tasks.items[task.next];
        stream->queue.items[stream->queue.first].next = ++task.next;
        outcome = perform(stream, &copy, code, recorded);
    }
    if (outcome == BLOCKED) stream->queue.items[stream->queue.first].next--;
    return outcome;
}

/* Removes the first task of a queue, which is done or never will be. */
static void leave(struct stream *stream) {
    struct task task = stream->queue.items[stream->queue.first++];
    if (task.event) release(task.event);
    if (task.kind == REPLAY) task.graph->num_replays--;
    if (task.kind == MEET) free(task.target);
    stream->num_left++;
    pthread_cond_broadcast(&progress);
}

/* Drops the first task of a queue, which will not be done. */
static void drop(struct stream *stream) {
    struct task task = stream->queue.items[stream->queue.first];
    if (task.kind == UPDATE) forget((struct tasks){.items = task.target, .count = task.count});
    if (task.kind == KERNEL) {
        pthread_mutex_unlock(&lock);
        forget_kernel(task.kernel);
        pthread_mutex_lock(&lock);
    }
    leave(stream);
}

/* Drops the rest of the queue after a failed task, except its events: other streams would wait for them forever. */
static void fail(struct stream *stream, bool *recorded) {
    for (leave(stream); stream->queue.first < stream->queue.count; drop(stream)) {
        struct task task = stream->queue.items[stream->queue.first];
        int code;
        if (task.kind == RECORD || task.kind == WRITE || task.kind == RESET)
            perform(stream, &task, &code, recorded);
    }
}

bool abandon(struct stream *stream) {
    bool pending = !stream->running && stream->queue.first < stream->queue.count, open = stream->updated;
    struct tasks update = stream->update;
    stream->updated = NULL;
    stream->update = (struct tasks){0};
    forget(update);
    if (pending) {
        stream->running = true;
        stream->runner = pthread_self();
        while (stream->queue.first < stream->queue.count) drop(stream);
        stream->queue.first = stream->queue.count = 0;
        stream->running = false;
        pthread_cond_broadcast(&progress);
    }
    return pending || open;
}

/* Does what can be done of a stream's queue. Beyond task `mine` it leaves the rest to the threads that sent it, if
 * they wait; otherwise a thread would never come back from a stream that others keep busy. */
static int drain(struct stream *stream, uint64_t mine, bool *recorded) {
    int code = ACL_SUCCESS, outcome = DONE;
    if (stream->running) return ACL_SUCCESS; /* another caller runs it, in this thread or another */
    stream->running = true;
    stream->runner = pthread_self();
    while (outcome == DONE && stream->queue.first < stream->queue.count &&
           (stream->num_left < mine || !stream->num_waiting)) {
        outcome = perform_first(stream, &code, recorded);
        if (outcome == DONE) leave(stream);
    }
    if (outcome == FAILED) fail(stream, recorded);
    if (stream->queue.first == stream->queue.count) stream->queue.first = stream->queue.count = 0;
    stream->running = false;
    pthread_cond_broadcast(&progress);
    return code;
}

/* Kernels need Python's lock: a thread that holds the lock cannot wait for a kernel, as torch's allocator would in
 * empty_cache. It need not wait either, because the allocator may not free what another thread's replay uses. */
static bool holds_python(void) {
    static int (*check)(void);
    if (!check) check = (int (*)(void))dlsym(RTLD_DEFAULT, "PyGILState_Check");
    return check && check();
}

/* Does the tasks of a stream up to `mine`, when no other thread runs it. */
static int run(struct stream *stream, uint64_t mine, bool *recorded) {
    while (stream->running && stream->num_left < mine) {
        if (pthread_equal(stream->runner, pthread_self()) || holds_python()) return ACL_SUCCESS;
        stream->num_waiting++;
        pthread_cond_wait(&progress, &lock);
        stream->num_waiting--;
    }
    return drain(stream, mine, recorded);
}

/* A wait is for the last record that was requested before it, because an event may be recorded again. */
static void count_event(struct task *task) {
    struct event *event = task->event;
    event->num_tasks++;
    if (event->external) return;
    if (task->kind == RECORD) {
        task->count = ++event->num_sent;
        event->graph = NULL;
    }
    if (task->kind == WAIT) task->count = event->num_sent;
}

int submit(struct stream *stream, struct task task) {
    if (stream->dead) return refuse(ACL_ERROR_RT_INVALID_HANDLE, "the stream is destroyed");
    if (stream->updated) return replace(stream, task);
    if (task.kind == WAIT && !stream->graph) {
        int refused = join_capture(stream, task.event);
        if (refused) return refused;
    }
    if (stream->graph) return capture(stream, task);
    if (task.event) count_event(&task);
    if (task.kind == REPLAY) task.graph->num_replays++;
    append(&stream->queue, task);
    stream->sender = pthread_self();
    bool recorded = false;
    int code = run(stream, ++stream->num_sent, &recorded);
    while (recorded) { /* other streams may continue, and record what others wait for */
        recorded = false;
        for (struct stream *each = all_streams(); each; each = each->next) {
            int other = each->queue.first < each->queue.count ? drain(each, 0, &recorded) : ACL_SUCCESS;
            code = code ? code : other;
        }
    }
    count_busy();
    return code;
}

void forget(struct tasks tasks) {
    pthread_mutex_unlock(&lock);
    for (size_t i = 0; i < tasks.count; i++)
        if (tasks.items[i].kind == KERNEL && forget_kernel) forget_kernel(tasks.items[i].kernel);
    for (size_t i = 0; i < tasks.count; i++)
        if (tasks.items[i].kind == MEET) free(tasks.items[i].target);
    pthread_mutex_lock(&lock);
    free(tasks.items);
}

/* Returns what a stream's first task waits for, or NULL if it does not wait. */
static const struct task *awaited(const struct stream *stream) {
    if (stream->queue.first == stream->queue.count) return NULL;
    const struct task *task = &stream->queue.items[stream->queue.first];
    if (task->kind == REPLAY) task = &task->graph->tasks.items[task->next];
    return task->kind == WAIT || task->kind == AWAIT ? task : NULL;
}

static bool records(const struct task *task, const struct task *wait) {
    return wait->kind == WAIT ? task->kind == RECORD && task->event == wait->event
                              : task->kind == WRITE && task->target == wait->target && met(wait, task->count);
}

/* Explains, as the end of a sentence, why nothing continues: where the record is for which a stream waits. */
static const char *stuck(void) {
    static _Thread_local char text[160];
    for (const struct stream *each = all_streams(); each; each = each->next) {
        const struct task *wait = awaited(each);
        if (!wait) continue;
        for (const struct stream *other = all_streams(); other; other = other->next)
            for (size_t i = other->queue.first; i < other->queue.count; i++)
                if (records(&other->queue.items[i], wait)) {
                    snprintf(text, sizeof text, ". Stream %d waits for an event whose record stands in stream %d%s",
                             each->id, other->id, other == each ? ", behind that wait" : "");
                    return text;
                }
        snprintf(text, sizeof text, ". Stream %d waits for an event that no stream was told to record", each->id);
        return text;
    }
    return "";
}

/* Returns whether another thread does work, on any stream, that may be what is waited for. */
static bool others_run(void) {
    for (const struct stream *each = all_streams(); each; each = each->next)
        if (each->num_waiting || (each->running && !pthread_equal(each->runner, pthread_self()))) return true;
    return false;
}

/* Makes the host wait for what a stream was sent before, not for what other threads send it meanwhile. A wait for
 * all streams includes those of other threads, which may be about to send what it waits for. */
int settle(struct stream *stream, bool with_all) {
    uint64_t sent = stream->num_sent;
    bool inside = stream->running && pthread_equal(stream->runner, pthread_self()); /* called by its kernel */
    while (stream->num_left < sent && (inside || others_run())) {
        if (holds_python()) return ACL_SUCCESS;
        if (inside) break;
        pthread_cond_wait(&progress, &lock);
    }
    if (stream->graph)
        return refuse(ACL_ERROR_RT_STREAM_CAPTURED,
                      "the host waits for a stream that is being captured: a graph cannot hold that");
    if (forbidden_in_capture())
        return refuse(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT,
                      "the host waits for the device during a capture");
    if (stream->num_left < sent && with_all && !pthread_equal(stream->sender, pthread_self())) return ACL_SUCCESS;
    if (stream->num_left < sent)
        return refuse(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT,
                      "the host waits for a stream that waits for an event nothing has recorded: "
                      "on the device this hangs. Record the event (after the task update) first%s",
                      stuck());
    learn(seen_by_host, stream->seen);
    count_busy();
    return ACL_SUCCESS;
}

bool complete(const struct event *event) { return event->recorded && event->num_recorded == event->num_sent; }

/* Makes the host wait for an event. */
int settle_event(struct event *event) {
    uint64_t sent = event->num_sent;
    while (event->num_recorded < sent && others_run()) {
        if (holds_python()) return ACL_SUCCESS;
        pthread_cond_wait(&progress, &lock);
    }
    if (event->graph)
        return refuse(ACL_ERROR_RT_EVENT_CAPTURED, "the host waits for an event that was recorded in a capture");
    if (forbidden_in_capture())
        return refuse(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, "the host waits for an event during a capture");
    if (!event->recorded || event->num_recorded < sent)
        return refuse(ACL_ERROR_RT_EVENT_SYNC_TIMEOUT,
                      "the host waits for an event that nothing has recorded: on the device this hangs%s", stuck());
    learn(seen_by_host, event->before);
    count_busy();
    return ACL_SUCCESS;
}
