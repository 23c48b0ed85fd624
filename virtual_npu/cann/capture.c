/* What becomes of a task where it does not simply run: a capture keeps it, an update replaces another by it, and a
 * replay asks whether the update came before. */
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
        return ACL_SUCCESS; /* order inside the graph is the order of capture */
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
    task.group = graph->open;
    append(&graph->tasks, task);
    return ACL_SUCCESS;
}

/* A stream outside a capture that waits for an event inside becomes part of it */
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

/* Does the stream that replays come after the last update of the task's group? */
int in_order(struct stream *stream, const struct task *task) {
    const struct group *group = task->group;
    if (!group || !group->updater || group->updater == stream || group->updater->settled >= group->update)
        return ACL_SUCCESS;
    for (size_t i = 0; i < stream->num_seen; i++)
        if (stream->seen[i].stream == group->updater && stream->seen[i].updates >= group->update)
            return ACL_SUCCESS;
    return refuse(
        ACL_ERROR_RT_MODEL_EXECUTE,
        "a replay runs a task group whose update nothing orders before it: the device may still use "
        "the old arguments. Let the graph wait for an ExternalEvent that the update stream records after "
        "graph_task_update_end");
}
