/* Streams: a stream does its tasks at once, until it meets an event that nothing has recorded. From then on
 * they wait in its queue, as they would on the device; a host that waits for such a stream would hang, and is
 * told so. */
#define _GNU_SOURCE
#include "device.h"
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

int virtual_npu_busy; /* streams that capture, update or wait: while it is 0, kernels run without a question
                       */
int (*run_kernel)(uint64_t kernel);
static struct stream *streams, first_stream = {.id = 0};
static int num_streams;
static pthread_cond_t idle = PTHREAD_COND_INITIALIZER;

void virtual_npu_run_with(int (*function)(uint64_t)) { run_kernel = function; }

struct stream *stream_of(aclrtStream handle) { return handle ? handle : &first_stream; }

struct stream *all_streams(void) {
    first_stream.next = streams;
    return &first_stream;
}

void append(struct tasks *tasks, struct task task) {
    if (tasks->count == tasks->room) {
        tasks->room = tasks->room ? 2 * tasks->room : 16;
        tasks->items = realloc(tasks->items, tasks->room * sizeof task);
    }
    tasks->items[tasks->count++] = task;
}

void count_busy(void) {
    int busy = 0;
    for (struct stream *each = all_streams(); each; each = each->next)
        busy += each->graph || each->updated || each->queue.first < each->queue.count || each->running;
    __atomic_store_n(&virtual_npu_busy, busy, __ATOMIC_SEQ_CST);
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

aclError aclrtCreateStreamWithConfig(aclrtStream *handle, uint32_t priority, uint32_t flag) {
    struct stream *stream = calloc(1, sizeof *stream);
    pthread_mutex_lock(&lock);
    stream->id = ++num_streams;
    stream->next = streams;
    streams = stream;
    pthread_mutex_unlock(&lock);
    return *handle = stream, ACL_SUCCESS;
}
aclError aclrtCreateStream(aclrtStream *handle) { return aclrtCreateStreamWithConfig(handle, 0, 0); }
aclError aclrtDestroyStream(aclrtStream handle) { return stream_of(handle)->dead = true, ACL_SUCCESS; }
aclError aclrtDestroyStreamForce(aclrtStream handle) { return aclrtDestroyStream(handle); }
aclError aclrtStreamGetId(aclrtStream handle, int32_t *id) {
    return *id = stream_of(handle)->id, ACL_SUCCESS;
}
aclError aclrtSetStreamAttribute(aclrtStream handle, aclrtStreamAttr kind, aclrtStreamAttrValue *value) {
    return ACL_SUCCESS;
}
aclError aclrtSetStreamFailureMode(aclrtStream handle, uint64_t mode) { return ACL_SUCCESS; }

aclError aclrtSynchronizeStream(aclrtStream handle) { LOCKED(settle(stream_of(handle))); }
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream handle, int32_t timeout) {
    return aclrtSynchronizeStream(handle);
}

static int settle_all(void) {
    int code = ACL_SUCCESS;
    for (struct stream *each = all_streams(); each && !code; each = each->next) code = settle(each);
    return code;
}
aclError aclrtSynchronizeDevice(void) { LOCKED(settle_all()); }
aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout) { return aclrtSynchronizeDevice(); }

aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus *status) {
    pthread_mutex_lock(&lock);
    const struct stream *stream = stream_of(handle);
    bool waits = stream->running || stream->queue.first < stream->queue.count;
    *status = waits ? ACL_STREAM_STATUS_NOT_READY : ACL_STREAM_STATUS_COMPLETE;
    int code = stream->graph ? refuse(ACL_ERROR_RT_STREAM_CAPTURED,
                                      "a stream is asked for its state while it is captured")
                             : ACL_SUCCESS;
    pthread_mutex_unlock(&lock);
    return code;
}

aclError aclrtMemcpyAsync(void *target, size_t room, const void *source, size_t count, aclrtMemcpyKind kind,
                          aclrtStream stream) {
    if (count > room)
        return refuse(ACL_ERROR_RT_PARAM_INVALID, "%zu bytes are copied to a place of %zu", count, room);
    LOCKED(submit(stream_of(stream),
                  (struct task){.kind = COPY, .target = target, .source = source, .count = count}));
}
aclError aclrtMemcpy(void *target, size_t room, const void *source, size_t count, aclrtMemcpyKind kind) {
    if (count > room)
        return refuse(ACL_ERROR_RT_PARAM_INVALID, "%zu bytes are copied to a place of %zu", count, room);
    pthread_mutex_lock(&lock);
    int code = forbidden_in_capture()
                   ? refuse(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, "a synchronous copy during a capture")
                   : ACL_SUCCESS;
    pthread_mutex_unlock(&lock);
    if (!code) memmove(target, source, count);
    return code;
}
aclError aclrtMemsetAsync(void *target, size_t room, int32_t value, size_t count, aclrtStream stream) {
    LOCKED(submit(stream_of(stream),
                  (struct task){.kind = FILL, .target = target, .value = value, .count = count}));
}
aclError aclrtMemset(void *target, size_t room, int32_t value, size_t count) {
    return memset(target, value, count), ACL_SUCCESS;
}
aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc function, void *argument) {
    LOCKED(submit(stream_of(stream), (struct task){.kind = CALL, .function = function, .target = argument}));
}
aclError aclrtLaunchCallback(aclrtCallback function, void *argument, aclrtCallbackBlockType block,
                             aclrtStream stream) {
    return aclrtLaunchHostFunc(stream, function, argument);
}
aclError aclrtSubscribeReport(uint64_t thread, aclrtStream stream) { return ACL_SUCCESS; }
aclError aclrtUnSubscribeReport(uint64_t thread, aclrtStream stream) { return ACL_SUCCESS; }
aclError aclrtProcessReport(int32_t timeout) { return ACL_ERROR_WAIT_CALLBACK_TIMEOUT; }

/* What a kernel on this stream has to do: 0 run, 1 be captured, 2 wait its turn, 3 replace one of a task
 * group */
int virtual_npu_state(aclrtStream handle) {
    pthread_mutex_lock(&lock);
    const struct stream *stream = stream_of(handle);
    bool waits = stream->queue.first < stream->queue.count &&
                 !(stream->running && pthread_equal(stream->runner, pthread_self()));
    int state = stream->updated ? 3 : stream->graph ? 1 : waits ? 2 : 0;
    pthread_mutex_unlock(&lock);
    return state;
}

int virtual_npu_submit(aclrtStream handle, uint64_t kernel) {
    LOCKED(submit(stream_of(handle), (struct task){.kind = KERNEL, .kernel = kernel}));
}

/* The host reads what a stream has written */
int virtual_npu_settle(aclrtStream handle) { LOCKED(settle(stream_of(handle))); }
