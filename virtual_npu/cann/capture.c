/* Handles a task that does not simply run: a capture keeps it, an update replaces another task by it, and a replay
 * checks that the update came before. */
#include "device.h"
#include <stdio.h>

int broken(struct graph *graph, int code, const char *text) {
    snprintf(graph->broken, sizeof graph->broken, "%s", text);
    return refuse(code, "%s", text);
}

void join_graph(struct stream *stream, struct graph *graph) {
    stream->graph = graph;
    stream->num_captured = stream->num_joined = 0;
    graph->num_streams++;
}

int capture(struct stream *stream, struct task task) {
    struct graph *graph = stream->graph;
    struct event *event = task.event;
    if (task.kind == REPLAY)
        return broken(graph, ACL_ERROR_RT_STREAM_CAPTURED,
                      "a graph is replayed inside the capture of another");
    if (task.kind == COPY) {
        bool host = !(within_device(task.source) || within_pinned(task.source)) ||
                    !(within_device(task.target) || within_pinned(task.target));
        if (host)
            return broken(graph, ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT,
                          "a copy during a capture from or to host memory that is not pinned: the device "
                          "would stop the host for it");
    }
    if (task.kind == RECORD && !event->external) {
        event->graph = graph;
        event->recorder = stream;
        event->num_captured = stream->num_captured;
        return ACL_SUCCESS; /* the order inside the graph is the order of capture */
    }
    if (task.kind == WAIT && !event->external) {
        if (event->graph != graph)
            return broken(graph, ACL_ERROR_RT_CAPTURE_DEPENDENCY,
                          "a captured stream waits for an event from outside its graph: use "
                          "torch.npu.ExternalEvent, or wait before the capture");
        if (event->recorder->num_captured == event->num_captured)
            event->recorder->num_joined = event->num_captured;
        return ACL_SUCCESS;
    }
    stream->num_captured++;
    if (event) event->num_tasks++;
    task.group = graph->open;
    append(&graph->tasks, task);
    return ACL_SUCCESS;
}

/* A stream outside a capture that waits for an event inside becomes part of the capture. */
int join_capture(struct stream *stream, const struct event *event) {
    if (!event->graph || event->external) return ACL_SUCCESS;
    if (!event->graph->capturing)
        return refuse(ACL_ERROR_RT_EVENT_CAPTURED,
                      "a stream waits for an event that was recorded in a capture, and nowhere else");
    join_graph(stream, event->graph);
    count_busy();
    return ACL_SUCCESS;
}

int replace(struct stream *stream, struct task task) {
    if (task.kind != KERNEL)
        return refuse(ACL_ERROR_RT_FEATURE_NOT_SUPPORT_UPDATE_OP,
                      "only operators belong into the update of a task group");
    append(&stream->update, task);
    return ACL_SUCCESS;
}

static bool before(const struct moment *moment, const struct stream *stream) {
    if (!moment->stream) return true;
    int id = moment->stream->id;
    return stream->seen[id] >= moment->count || seen_by_host[id] >= moment->count;
}

/* Checks that the replaying stream comes after the last update of the task's group. */
int in_order(struct stream *stream, const struct task *task) {
    if (!task->group || before(&task->group->updated, stream)) return ACL_SUCCESS;
    return refuse(
        ACL_ERROR_RT_MODEL_EXECUTE,
        "a replay runs a task group whose update nothing orders before it: the device may still use "
        "the old arguments. Let the graph wait for an ExternalEvent that the update stream records after "
        "graph_task_update_end");
}

/* Returns whether a replay that is under way has begun this task. */
static bool begun(const struct graph *graph, size_t task) {
    for (const struct stream *each = all_streams(); each; each = each->next)
        for (size_t i = each->queue.first; i < each->queue.count; i++)
            if (each->queue.items[i].kind == REPLAY && each->queue.items[i].graph == graph &&
                each->queue.items[i].next > task)
                return true;
    return false;
}

/* Checks that the arguments of a group may be replaced on this stream now. The device reads them when a replay runs
 * the group, so the last run has to come before: vllm-ascend waits for it on the host (compilation/acl_graph.py) or
 * on the update stream (worker/v2/aclgraph_utils.py). */
int updatable(struct stream *stream, const struct group *group) {
    if (group->graph->dead)
        return refuse(ACL_ERROR_RT_INVALID_HANDLE, "a task group is updated that no living graph has");
    if (begun(group->graph, group->first))
        return refuse(ACL_ERROR_RT_MODEL_RUNNING,
                      "a task group is updated that the running replay has already begun or done");
    if (!before(&group->ran, stream))
        return refuse(ACL_ERROR_RT_MODEL_RUNNING,
                      "a task group is updated while its last replay may still read the old arguments: before "
                      "the next replay, synchronize the stream that replays, or let the update stream wait for "
                      "it (update_stream.wait_stream)");
    return ACL_SUCCESS;
}
