/* Declarations that the files of the virtual device share, from the bottom up. The wheel's own headers check every
 * signature. */
#include <acl/acl_rt.h>
#include <acl/error_codes/rt_error_codes.h>
#include <pthread.h>
#include <stdbool.h>

enum kind { KERNEL, RECORD, WAIT, RESET, WRITE, AWAIT, COPY, FILL, CALL, MEET, UPDATE, REPLAY };

/* more streams than torch_npu's pools have */
enum { MAX_STREAMS = 128 };

/* How far each stream is known to have come, by its id: a vector clock of what happened before. */
typedef uint64_t clocks[MAX_STREAMS];

/* One thing that a stream does, or that a graph holds. */
struct task {
    enum kind kind;
    uint64_t kernel; /* KERNEL: a number that the owner of the kernels knows */
    struct event *event;
    void *target;
    const void *source;
    size_t count; /* COPY, FILL: bytes; WRITE, AWAIT: the number at `target`; RECORD, WAIT: which record of the
                     event; UPDATE: the number of kernels at `target` */
    int value;
    void (*function)(void *); /* CALL, with `target` */
    int (*meets)(void *);     /* MEET: a collective, with `target`, which belongs to the task */
    struct graph *graph;      /* REPLAY, which continues at task `next` */
    size_t next;
    struct group *group; /* the group of a graph's task, or of an UPDATE */
};

struct tasks {
    struct task *items;
    size_t first, count, room;
};

struct event {
    bool external, recorded, destroyed;
    uint64_t num_sent, num_recorded; /* records that streams were given, and records that they have made */
    size_t num_tasks;                /* tasks that name it, in queues and graphs */
    uint64_t time_ns;
    clocks before;           /* what happened before it was recorded */
    struct stream *recorder; /* the stream that recorded it in a capture */
    struct graph *graph;     /* the capture that recorded it last, if one did */
    uint64_t num_captured; /* the recorder's count when it was captured */
};

struct stream {
    int id;
    bool dead, running;
    pthread_t runner;
    struct tasks queue; /* tasks that wait behind an event, or for the thread that runs the stream */
    uint64_t num_sent, num_left;
    int num_waiting; /* threads that wait to run what they sent */
    pthread_t sender;    /* the last thread that sent it something */
    /* state of a capture */
    struct graph *graph;
    uint64_t num_captured, num_joined;
    /* state of an update of a task group */
    struct group *updated;
    struct tasks update;
    clocks seen; /* includes the stream's own clock, which counts updates and runs of task groups */
    struct stream *next;
};

/* A value of a stream's clock; no stream means never. */
struct moment {
    const struct stream *stream;
    uint64_t count;
};

struct group {
    struct graph *graph;
    size_t first, stop;
    struct moment updated, ran; /* the last update and the last run */
    struct group *next;
};

struct graph {
    uint32_t id;
    struct tasks tasks;
    struct stream *origin;
    struct group *groups, *open;
    int mode, num_streams, num_replays; /* num_replays counts replays under way */
    bool capturing, dead;
    pthread_t thread;
    char broken[512]; /* why it cannot be replayed */
    struct graph *next;
};

/* Each file calls only functions that are declared here under its own name or above it. */

/* device.c */
extern pthread_mutex_t lock; /* guards all state; never held while a kernel runs */
extern int most_graphs; /* most graphs that the product holds; 0: as many as its streams allow */

/* Stores a message for aclGetRecentErrMsg, which torch_npu adds to its exception, and returns the code. */
int refuse(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* state.c; the lock is held here and in all that follows, except memory.c */
extern struct graph *graphs;
extern _Thread_local int thread_mode; /* the capture mode for calls that this thread makes during a capture */
extern clocks seen_by_host; /* how far each stream had come when the host last waited for it */
extern int (*run_kernel)(uint64_t kernel);
extern void (*forget_kernel)(uint64_t kernel);
/* launch_log.py reads these: waits of the host for a stream, an event or the device, and replays. */
enum counted { STREAM_WAITS, EVENT_WAITS, DEVICE_WAITS, REPLAYS, NUM_COUNTED };
void counted(enum counted what); /* the lock need not be held */
struct stream *new_stream(void);
struct stream *stream_of(aclrtStream handle);
struct stream *all_streams(void);
void append(struct tasks *tasks, struct task task);
void release(struct event *event); /* called when a task that named it is gone */
void learn(clocks known, const clocks more);
struct moment tick(struct stream *stream);
void count_busy(void);
struct event *event_of(const void *word);
bool capturing_anywhere(void);
bool forbidden_in_capture(void); /* checks calls of this thread that stop the host */

/* memory.c */
bool within_device(const void *address);
bool within_pinned(const void *address);

/* capture.c */
int broken(struct graph *graph, int code, const char *text); /* marks the graph as not replayable, for this reason */
void join_graph(struct stream *stream, struct graph *graph);
int capture(struct stream *stream, struct task task);
int join_capture(struct stream *stream, const struct event *event);
int replace(struct stream *stream, struct task task);
int in_order(struct stream *stream, const struct task *task);
int updatable(struct stream *stream, const struct group *group);

/* execution.c */
int submit(struct stream *stream, struct task task);
void forget(struct tasks tasks); /* drops kernels that are no longer needed; releases the lock meanwhile */
int settle(struct stream *stream, bool with_all);
int settle_event(struct event *event);
bool complete(const struct event *event);
bool abandon(struct stream *stream); /* drops its queue and its open update; returns whether there was any */

/* streams.c, events.c, graphs.c and groups.c have only functions that torch_npu and Python call. */

#define LOCKED(expression)                                                                                   \
    do {                                                                                                     \
        pthread_mutex_lock(&lock);                                                                           \
        int code_ = (expression);                                                                            \
        pthread_mutex_unlock(&lock);                                                                         \
        return code_;                                                                                        \
    } while (0)
