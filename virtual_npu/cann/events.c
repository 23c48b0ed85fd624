/* The interface to events, and to words of device memory that streams write and wait for: torch_npu makes external
 * events of them. */
#include "device.h"
#include <stdlib.h>

aclError aclrtCreateEventExWithFlag(aclrtEvent *handle, uint32_t flag) {
    struct event *event = calloc(1, sizeof *event); /* never freed: a queue or graph may still name it */
    event->external = flag & ACL_EVENT_EXTERNAL;
    return *handle = event, ACL_SUCCESS;
}
aclError aclrtCreateEventWithFlag(aclrtEvent *handle, uint32_t flag) {
    return aclrtCreateEventExWithFlag(handle, flag);
}
aclError aclrtDestroyEvent(aclrtEvent handle) { return ACL_SUCCESS; }

aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream) {
    LOCKED(submit(stream_of(stream), (struct task){.kind = RECORD, .event = handle}));
}
aclError aclrtResetEvent(aclrtEvent handle, aclrtStream stream) {
    LOCKED(submit(stream_of(stream), (struct task){.kind = RESET, .event = handle}));
}
aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent handle) {
    LOCKED(submit(stream_of(stream), (struct task){.kind = WAIT, .event = handle}));
}

aclError aclrtValueWrite(void *address, uint64_t value, uint32_t flag, aclrtStream stream) {
    LOCKED(submit(stream_of(stream), (struct task){.kind = WRITE, .target = address, .count = value}));
}
aclError aclrtValueWait(void *address, uint64_t value, uint32_t flag, aclrtStream stream) {
    LOCKED(submit(stream_of(stream),
                  (struct task){.kind = AWAIT, .target = address, .count = value, .value = flag}));
}

aclError aclrtSynchronizeEvent(aclrtEvent handle) {
    struct event *event = handle;
    pthread_mutex_lock(&lock);
    int code = ACL_SUCCESS;
    if (event->graph)
        code =
            refuse(ACL_ERROR_RT_EVENT_CAPTURED, "the host waits for an event that was recorded in a capture");
    else if (forbidden_in_capture())
        code = refuse(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, "the host waits for an event during a capture");
    else if (!event->recorded)
        code = refuse(ACL_ERROR_RT_EVENT_SYNC_TIMEOUT,
                      "the host waits for an event that nothing has recorded: on the device this hangs");
    else if (event->recorder->settled < event->updates)
        event->recorder->settled = event->updates;
    pthread_mutex_unlock(&lock);
    return code;
}

aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus *status) {
    pthread_mutex_lock(&lock);
    *status = ((struct event *)handle)->recorded ? ACL_EVENT_RECORDED_STATUS_COMPLETE
                                                 : ACL_EVENT_RECORDED_STATUS_NOT_READY;
    pthread_mutex_unlock(&lock);
    return ACL_SUCCESS;
}
aclError aclrtQueryEventWaitStatus(aclrtEvent handle, aclrtEventWaitStatus *status) {
    return *status = ACL_EVENT_WAIT_STATUS_COMPLETE, ACL_SUCCESS;
}

aclError aclrtEventElapsedTime(float *ms, aclrtEvent start, aclrtEvent end) {
    const struct event *from = start, *to = end;
    if (!from->recorded || !to->recorded)
        return refuse(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID,
                      "time is asked between events of which one is not recorded");
    return *ms = ((int64_t)to->time_ns - (int64_t)from->time_ns) * 1e-6f, ACL_SUCCESS;
}
aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t *time_us) {
    return *time_us = ((struct event *)event)->time_ns / 1000, ACL_SUCCESS;
}
