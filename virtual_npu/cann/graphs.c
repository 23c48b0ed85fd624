/* The interface to graphs: capture, replay and destruction, with the refusals of a device. */
#include "device.h"
#include <stdlib.h>

/* A device has about 2,048 streams, and every graph keeps those on which it was captured; vllm-ascend plans with
 * 1,920. */
enum { MAX_CAPTURED_STREAMS = 1920 };

static uint32_t num_graphs;

static void open_capture(struct stream *stream, int mode) {
    struct graph *graph = calloc(1, sizeof *graph); /* never freed, so that a stale handle can be recognised */
    graph->id = ++num_graphs;
    graph->origin = stream;
    graph->mode = mode;
    graph->capturing = true;
    graph->thread = pthread_self();
    graph->next = graphs;
    graphs = graph;
    join_graph(stream, graph);
    count_busy();
}

aclError aclmdlRICaptureBegin(aclrtStream handle, aclmdlRICaptureMode mode) {
    pthread_mutex_lock(&lock);
    struct stream *stream = stream_of(handle);
    int code = ACL_SUCCESS, held = 0, num_graphs = 0;
    for (const struct graph *each = graphs; each; each = each->next) {
        held += each->dead ? 0 : each->num_streams;
        num_graphs += !each->dead;
    }
    if (stream->graph)
        code = refuse(ACL_ERROR_RT_STREAM_CAPTURED, "a capture begins on a stream that is captured already");
    else if (stream->queue.first < stream->queue.count)
        code = refuse(ACL_ERROR_RT_STREAM_NOT_COMPLETE,
                      "a capture begins on a stream that waits for an event nothing has recorded");
    else if (held >= MAX_CAPTURED_STREAMS)
        code = refuse(ACL_ERROR_RT_NO_STREAM_RESOURCE,
                      "%d captured streams are held by graphs, and a device has no more: "
                      "capture fewer graphs, or reset those no longer used",
                      held);
    else if (most_graphs && num_graphs >= most_graphs)
        code = refuse(ACL_ERROR_RT_NO_STREAM_RESOURCE,
                      "%d graphs are held, and this product has no room for more: capture fewer sizes",
                      num_graphs);
    else
        open_capture(stream, mode);
    pthread_mutex_unlock(&lock);
    return code;
}

static int close_capture(struct stream *stream, aclmdlRI *model) {
    struct graph *graph = stream->graph;
    if (!graph)
        return refuse(ACL_ERROR_RT_STREAM_NOT_CAPTURED, "a capture ends on a stream that is not captured");
    if (graph->origin != stream)
        return refuse(ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED,
                      "a capture ends on a stream it did not begin on");
    int code = ACL_SUCCESS;
    if (graph->open)
        code = broken(graph, ACL_ERROR_RT_MODEL_CAPTURED,
                      "a capture ends inside a task group: graph_task_group_end is missing");
    for (struct stream *each = all_streams(); each; each = each->next) {
        if (each->graph != graph) continue;
        if (each != stream && each->num_joined != each->num_captured)
            code = broken(graph, ACL_ERROR_RT_STREAM_UNJOINED,
                          "a capture ends while a stream that joined it has not been waited for");
        each->graph = NULL;
    }
    graph->capturing = false;
    count_busy();
    return *model = graph, code;
}

aclError aclmdlRICaptureEnd(aclrtStream handle, aclmdlRI *model) {
    pthread_mutex_lock(&lock);
    int code = close_capture(stream_of(handle), model);
    pthread_mutex_unlock(&lock);
    return code;
}

aclError aclmdlRICaptureGetInfo(aclrtStream handle, aclmdlRICaptureStatus *status, aclmdlRI *model) {
    pthread_mutex_lock(&lock);
    struct graph *graph = stream_of(handle)->graph;
    *status = graph ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE : ACL_MODEL_RI_CAPTURE_STATUS_NONE;
    if (model) *model = graph;
    pthread_mutex_unlock(&lock);
    return ACL_SUCCESS;
}

aclError aclmdlRIGetId(aclmdlRI model, uint32_t *id) {
    return *id = ((struct graph *)model)->id, ACL_SUCCESS;
}

aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode *mode) {
    int before = thread_mode;
    thread_mode = *mode;
    return *mode = before, ACL_SUCCESS;
}

static struct graph *known(const void *model) {
    struct graph *each = graphs;
    while (each && each != model) each = each->next;
    return each;
}

static int replay(struct graph *graph, struct stream *stream) {
    if (!graph || graph->dead)
        return refuse(ACL_ERROR_RT_INVALID_HANDLE, "a graph is replayed that does not exist");
    if (graph->capturing)
        return refuse(ACL_ERROR_RT_MODEL_CAPTURED, "a graph is replayed while it is captured");
    if (graph->broken[0])
        return refuse(ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED, "the capture of this graph failed: %s",
                      graph->broken);
    for (const struct stream *each = all_streams(); each; each = each->next)
        if (each->updated && each->updated->graph == graph)
            return refuse(ACL_ERROR_RT_MODEL_RUNNING,
                          "a graph is replayed while a task group of it is being updated: "
                          "call graph_task_update_end first");
    return submit(stream, (struct task){.kind = REPLAY, .graph = graph});
}

aclError aclmdlRIExecuteAsync(aclmdlRI model, aclrtStream handle) {
    counted(REPLAYS);
    pthread_mutex_lock(&lock);
    int code = replay(known(model), stream_of(handle));
    pthread_mutex_unlock(&lock);
    return code;
}

aclError aclmdlRIDestroy(aclmdlRI model) {
    pthread_mutex_lock(&lock);
    struct graph *graph = known(model);
    int code = ACL_SUCCESS;
    struct tasks tasks = {0};
    if (!graph || graph->dead)
        code = refuse(ACL_ERROR_RT_INVALID_HANDLE, "a graph is destroyed that does not exist");
    else if (graph->num_replays > 0)
        code = refuse(ACL_ERROR_RT_MODEL_RUNNING, "a graph is destroyed while it is replayed");
    else {
        graph->dead = true;
        tasks = graph->tasks;
        graph->tasks = (struct tasks){0};
    }
    forget(tasks);
    pthread_mutex_unlock(&lock);
    return code;
}
