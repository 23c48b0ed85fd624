/* The interface to streams: creation, waits, and the copies, host functions and kernels that are sent to them. */
#include "device.h"
#include <string.h>

aclError aclrtCreateStreamWithConfig(aclrtStream *handle, uint32_t priority, uint32_t flag) {
    pthread_mutex_lock(&lock);
    *handle = new_stream();
    pthread_mutex_unlock(&lock);
    if (*handle) return ACL_SUCCESS;
    return refuse(ACL_ERROR_RT_NO_STREAM_RESOURCE, "the virtual device has %d streams and no more", MAX_STREAMS);
}
aclError aclrtCreateStream(aclrtStream *handle) { return aclrtCreateStreamWithConfig(handle, 0, 0); }
aclError aclrtDestroyStream(aclrtStream handle) { LOCKED((stream_of(handle)->dead = true, ACL_SUCCESS)); }
aclError aclrtDestroyStreamForce(aclrtStream handle) { return aclrtDestroyStream(handle); }
aclError aclrtStreamGetId(aclrtStream handle, int32_t *id) {
    return *id = stream_of(handle)->id, ACL_SUCCESS;
}
aclError aclrtSetStreamAttribute(aclrtStream handle, aclrtStreamAttr kind, aclrtStreamAttrValue *value) {
    return ACL_SUCCESS;
}
aclError aclrtSetStreamFailureMode(aclrtStream handle, uint64_t mode) { return ACL_SUCCESS; }

aclError aclrtSynchronizeStream(aclrtStream handle) {
    counted(STREAM_WAITS);
    LOCKED(settle(stream_of(handle), false));
}
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream handle, int32_t timeout) {
    return aclrtSynchronizeStream(handle);
}

static int settle_all(void) {
    int code = ACL_SUCCESS;
    for (struct stream *each = all_streams(); each && !code; each = each->next) code = settle(each, true);
    return code;
}
aclError aclrtSynchronizeDevice(void) {
    counted(DEVICE_WAITS);
    LOCKED(settle_all());
}
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

static int check_room(size_t count, size_t room) {
    if (count <= room) return ACL_SUCCESS;
    return refuse(ACL_ERROR_RT_PARAM_INVALID, "%zu bytes are written to a place of %zu", count, room);
}

/* Checks what the host waits for: aclmdlRICaptureMode restricts aclrtMemset and aclrtMemcpy during a capture. */
static int check_at_once(const char *what, size_t count, size_t room) {
    int code = check_room(count, room);
    if (code) return code;
    pthread_mutex_lock(&lock);
    if (forbidden_in_capture())
        code = refuse(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, "a synchronous %s during a capture", what);
    pthread_mutex_unlock(&lock);
    return code;
}

aclError aclrtMemcpyAsync(void *target, size_t room, const void *source, size_t count, aclrtMemcpyKind kind,
                          aclrtStream stream) {
    int code = check_room(count, room);
    if (code) return code;
    LOCKED(submit(stream_of(stream),
                  (struct task){.kind = COPY, .target = target, .source = source, .count = count}));
}
aclError aclrtMemcpy(void *target, size_t room, const void *source, size_t count, aclrtMemcpyKind kind) {
    int code = check_at_once("copy", count, room);
    if (!code) memmove(target, source, count);
    return code;
}
aclError aclrtMemsetAsync(void *target, size_t room, int32_t value, size_t count, aclrtStream stream) {
    int code = check_room(count, room);
    if (code) return code;
    LOCKED(submit(stream_of(stream),
                  (struct task){.kind = FILL, .target = target, .value = value, .count = count}));
}
aclError aclrtMemset(void *target, size_t room, int32_t value, size_t count) {
    int code = check_at_once("fill", count, room);
    if (!code) memset(target, value, count);
    return code;
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

/* Returns what a kernel on this stream has to do: 0 run, 1 be captured, 2 wait for its turn, 3 replace one of a
 * task group. */
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

/* Waits for a stream whose results the host reads. */
int virtual_npu_settle(aclrtStream handle) { LOCKED(settle(stream_of(handle), false)); }

/* Drops work that streams wait to do and never will; returns how many had such work. */
int virtual_npu_abandon(void) {
    int count = 0;
    pthread_mutex_lock(&lock);
    for (struct stream *each = all_streams(); each; each = each->next) count += abandon(each);
    count_busy();
    pthread_mutex_unlock(&lock);
    return count;
}
