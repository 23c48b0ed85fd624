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

/* Has a replay that is under way passed this task already? */
static bool passed(const struct graph *graph, size_t task) {
    for (const struct stream *each = all_streams(); each; each = each->next)
        for (size_t i = each->queue.first; i < each->queue.count; i++)
            if (each->queue.items[i].kind == REPLAY && each->queue.items[i].graph == graph &&
                each->queue.items[i].next > task)
                return true;
    return false;
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
    else if (passed(group->graph, group->first))
        code = refuse(ACL_ERROR_RT_MODEL_RUNNING,
                      "a task group is updated that the running replay has already begun or done");
    else
        stream->updated = group;
    count_busy();
    pthread_mutex_unlock(&lock);
    return code;
}

/* The kernel that the next one of an update replaces; 0: there is none */
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
    else {
        for (size_t i = 0; i < count; i++) {
            struct task *old = &group->graph->tasks.items[group->first + i];
            uint64_t kernel = old->kernel;
            old->kernel = stream->update.items[i].kernel;
            stream->update.items[i].kernel = kernel; /* to be forgotten */
        }
        group->updater = stream;
        group->update = ++stream->updates;
    }
    struct tasks done = stream->update;
    stream->update = (struct tasks){0};
    stream->updated = NULL;
    count_busy();
    pthread_mutex_unlock(&lock);
    for (size_t i = 0; i < done.count; i++) forget_kernel(done.items[i].kernel);
    free(done.items);
    return code;
}

/* Is a task group open in the capture of this stream? */
int virtual_npu_in_group(aclrtStream handle) {
    pthread_mutex_lock(&lock);
    const struct graph *graph = stream_of(handle)->graph;
    int answer = graph && graph->open;
    pthread_mutex_unlock(&lock);
    return answer;
}
