/* What the files of the virtual device share, from the bottom up. The wheel's own headers check every signature. */
#include <acl/acl_rt.h>
#include <acl/error_codes/rt_error_codes.h>
#include <pthread.h>
#include <stdbool.h>

enum kind { KERNEL, RECORD, WAIT, RESET, WRITE, AWAIT, COPY, FILL, CALL, REPLAY };

/* One thing that a stream does, or that a graph holds */
struct task {
    enum kind kind;
    uint64_t kernel; /* KERNEL: a number that the owner of the kernels knows */
    struct event *event;
    void *target;
    const void *source;
    size_t count; /* COPY, FILL: bytes; WRITE, AWAIT: the number at `target` */
    int value;
    void (*function)(void *); /* CALL, with `target` */
    struct graph *graph;      /* REPLAY, from task `next` on */
    size_t next;
    struct group *group; /* of a graph's task */
};

struct tasks {
    struct task *items;
    size_t first, count, room;
};

struct event {
    bool external, recorded;
    uint64_t time_ns;
    struct stream *recorder;
    uint64_t updates;      /* of the recorder, when it recorded */
    struct graph *graph;   /* the capture that recorded it last, if one did */
    uint64_t num_captured; /* of the recorder, when it was captured */
};

struct stream {
    int id;
    bool dead, running;
    pthread_t runner;
    struct tasks queue; /* what waits behind an event */
    /* capture */
    struct graph *graph;
    uint64_t num_captured, num_joined;
    /* update of a task group */
    struct group *updated;
    struct tasks update;
    uint64_t updates, settled; /* finished updates, and those that the host waited for */
    struct {
        struct stream *stream;
        uint64_t updates;
    } seen[8]; /* updates of others that come before */
    size_t num_seen;
    struct stream *next;
};

struct group {
    struct graph *graph;
    size_t first, stop;
    struct stream *updater;
    uint64_t update;
    struct group *next;
};

struct graph {
    uint32_t id;
    struct tasks tasks;
    struct stream *origin;
    struct group *groups, *open;
    int mode, num_streams, num_replays; /* replays under way */
    bool capturing, dead;
    pthread_t thread;
    char broken[512]; /* why it cannot be replayed */
    struct graph *next;
};

/* Each file calls only what stands here under its own name or above it. */

/* device.c */
extern pthread_mutex_t lock; /* over all state; never held while a kernel runs */
/* Remembers a sentence for aclGetRecentErrMsg, which torch_npu adds to its exception, and returns the code */
extern int most_graphs; /* that the product holds; 0: as many as its streams allow */

int refuse(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* state.c; the lock is held, as for all that follows but memory.c */
extern struct graph *graphs;
extern _Thread_local int thread_mode; /* of captures, for calls that this thread makes meanwhile */
extern int (*run_kernel)(uint64_t kernel);
extern void (*forget_kernel)(uint64_t kernel);
struct stream *new_stream(void);
struct stream *stream_of(aclrtStream handle);
struct stream *all_streams(void);
void append(struct tasks *tasks, struct task task);
void count_busy(void);
struct event *event_of(const void *word);
bool capturing_anywhere(void);
bool forbidden_in_capture(void); /* for calls that stop the host, in this thread */

/* memory.c */
bool within_device(const void *address);
bool within_pinned(const void *address);

/* capture.c */
int broken(struct graph *graph, int code, const char *text); /* it cannot be replayed, for this reason */
void join_graph(struct stream *stream, struct graph *graph);
int capture(struct stream *stream, struct task task);
int join_capture(struct stream *stream, const struct event *event);
int replace(struct stream *stream, struct task task);
int in_order(struct stream *stream, const struct task *task);

/* execution.c */
int submit(struct stream *stream, struct task task);
int settle(struct stream *stream);

/* streams.c, events.c, graphs.c, groups.c: what torch_npu and Python call, and nothing here */

#define LOCKED(expression)                                                                                   \
    do {                                                                                                     \
        pthread_mutex_lock(&lock);                                                                           \
        int code_ = (expression);                                                                            \
        pthread_mutex_unlock(&lock);                                                                         \
        return code_;                                                                                        \
    } while (0)
