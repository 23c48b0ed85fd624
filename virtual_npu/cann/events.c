/* The interface to events, and to words of device memory that streams write and wait for: torch_npu makes external
 * events of them. */
#include "device.h"
#include <stdlib.h>

aclError aclrtCreateEventExWithFlag(aclrtEvent *handle, uint32_t flag) {
    struct event *event = calloc(1, sizeof *event);
    event->external = flag & ACL_EVENT_EXTERNAL;
    return *handle = event, ACL_SUCCESS;
}
aclError aclrtCreateEventWithFlag(aclrtEvent *handle, uint32_t flag) {
    return aclrtCreateEventExWithFlag(handle, flag);
}

/* Queues and graphs may still name it; the last of them frees it. */
static int destroy(struct event *event) {
    event->destroyed = true;
    event->num_tasks++;
    return release(event), ACL_SUCCESS;
}
aclError aclrtDestroyEvent(aclrtEvent handle) { LOCKED(destroy(handle)); }

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
    counted(EVENT_WAITS);
    LOCKED(settle_event(handle));
}

aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus *status) {
    pthread_mutex_lock(&lock);
    *status = complete(handle) ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
    pthread_mutex_unlock(&lock);
    return ACL_SUCCESS;
}
aclError aclrtQueryEventWaitStatus(aclrtEvent handle, aclrtEventWaitStatus *status) {
    return *status = ACL_EVENT_WAIT_STATUS_COMPLETE, ACL_SUCCESS;
}

static int elapsed(float *ms, const struct event *from, const struct event *to) {
    if (!from->recorded || !to->recorded)
        return refuse(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID,
                      "time is asked between events of which one is not recorded");
    return *ms = ((int64_t)to->time_ns - (int64_t)from->time_ns) * 1e-6f, ACL_SUCCESS;
}
aclError aclrtEventElapsedTime(float *ms, aclrtEvent start, aclrtEvent end) {
    LOCKED(elapsed(ms, start, end));
}
aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t *time_us) {
    LOCKED((*time_us = ((struct event *)event)->time_ns / 1000, ACL_SUCCESS));
}
