/* The interface to task groups: tasks of a graph whose arguments another stream replaces. */
#include "device.h"
#include <stdlib.h>

aclError aclmdlRICaptureTaskGrpBegin(aclrtStream handle) {
    pthread_mutex_lock(&lock);
    struct graph *graph = stream_of(handle)->graph;
    int code = ACL_SUCCESS;
    if (!graph)
        code =
            refuse(ACL_ERROR_RT_STREAM_NOT_CAPTURED, "a task group begins on a stream that is not captured");
    else if (graph->open)
        code = broken(graph, ACL_ERROR_RT_MODEL_CAPTURED, "a task group begins inside a task group");
    else {
        struct group *group = calloc(1, sizeof *group);
        *group = (struct group){.graph = graph, .first = graph->tasks.count, .next = graph->groups};
        graph->groups = graph->open = group;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

aclError aclmdlRICaptureTaskGrpEnd(aclrtStream handle, aclrtTaskGrp *group) {
    pthread_mutex_lock(&lock);
    struct graph *graph = stream_of(handle)->graph;
    int code = ACL_SUCCESS;
    if (!graph || !graph->open)
        code = refuse(ACL_ERROR_RT_STREAM_NOT_CAPTURED, "a task group ends that did not begin");
    else {
        graph->open->stop = graph->tasks.count;
        *group = graph->open;
        graph->open = NULL;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

static struct group *group_of(const void *handle) {
    for (const struct graph *graph = graphs; graph; graph = graph->next)
        for (struct group *each = graph->groups; each; each = each->next)
            if (each == handle && !graph->dead) return each;
    return NULL;
}

aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream handle, aclrtTaskGrp group_handle) {
    pthread_mutex_lock(&lock);
    struct stream *stream = stream_of(handle);
    struct group *group = group_of(group_handle);
    int code = ACL_SUCCESS;
    if (!group)
        code = refuse(ACL_ERROR_RT_INVALID_HANDLE, "a task group is updated that no living graph has");
    else if (group->graph->capturing)
        code = refuse(ACL_ERROR_RT_MODEL_CAPTURED, "a task group is updated while its graph is captured");
    else if (stream->graph)
        code = refuse(ACL_ERROR_RT_STREAM_CAPTURED, "a task group is updated on a stream that is captured");
    else if (stream->updated)
        code = refuse(ACL_ERROR_RT_PARAM_INVALID, "a task group is updated inside the update of another");
    else if (stream->queue.first == stream->queue.count) /* otherwise it is checked when its turn comes */
        code = updatable(stream, group);
    if (!code) stream->updated = group;
    count_busy();
    pthread_mutex_unlock(&lock);
    return code;
}

/* Returns the kernel that the next kernel of an update replaces; 0: there is none. */
uint64_t virtual_npu_replaced(aclrtStream handle) {
    pthread_mutex_lock(&lock);
    const struct stream *stream = stream_of(handle);
    size_t place = stream->updated ? stream->updated->first + stream->update.count : 0;
    bool there = stream->updated && place < stream->updated->stop;
    uint64_t kernel = there ? stream->updated->graph->tasks.items[place].kernel : 0;
    pthread_mutex_unlock(&lock);
    return kernel;
}

aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream handle) {
    pthread_mutex_lock(&lock);
    struct stream *stream = stream_of(handle);
    struct group *group = stream->updated;
    int code = ACL_SUCCESS;
    size_t expected = group ? group->stop - group->first : 0, count = stream->update.count;
    if (!group)
        code = refuse(ACL_ERROR_RT_PARAM_INVALID, "an update ends that did not begin");
    else if (count != expected)
        code = refuse(ACL_ERROR_RT_MODEL_UPDATE_FAILED,
                      "the task group holds %zu operators and its update %zu", expected, count);
    struct tasks update = stream->update;
    stream->update = (struct tasks){0};
    stream->updated = NULL;
    if (code)
        forget(update);
    else
        code = submit(stream, (struct task){.kind = UPDATE, .group = group, .target = update.items, .count = count});
    count_busy();
    pthread_mutex_unlock(&lock);
    return code;
}

/* Returns whether a task group is open in the capture of this stream. */
int virtual_npu_in_group(aclrtStream handle) {
    pthread_mutex_lock(&lock);
    const struct graph *graph = stream_of(handle)->graph;
    int answer = graph && graph->open;
    pthread_mutex_unlock(&lock);
    return answer;
}
