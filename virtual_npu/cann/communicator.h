/* A communicator: the ranks of one machine that meet in a shared-memory object. Each rank has a window there, which
 * all ranks read, and a box for each other rank. The types are HCCL's, whose own header is C++. */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

typedef int HcclResult;
enum { HCCL_SUCCESS = 0, HCCL_E_PARA = 1, HCCL_E_MEMORY = 3, HCCL_E_NOT_SUPPORT = 5, HCCL_E_SYSCALL = 8,
       HCCL_E_TIMEOUT = 9, HCCL_E_RUNTIME = 15, HCCL_E_REMOTE = 21 };

typedef int HcclReduceOp;
enum { HCCL_REDUCE_SUM = 0, HCCL_REDUCE_PROD = 1, HCCL_REDUCE_MAX = 2, HCCL_REDUCE_MIN = 3 };

typedef int HcclDataType;
enum {
    HCCL_DATA_TYPE_INT8 = 0,
    HCCL_DATA_TYPE_INT16 = 1,
    HCCL_DATA_TYPE_INT32 = 2,
    HCCL_DATA_TYPE_FP16 = 3,
    HCCL_DATA_TYPE_FP32 = 4,
    HCCL_DATA_TYPE_INT64 = 5,
    HCCL_DATA_TYPE_UINT64 = 6,
    HCCL_DATA_TYPE_UINT8 = 7,
    HCCL_DATA_TYPE_UINT16 = 8,
    HCCL_DATA_TYPE_UINT32 = 9,
    HCCL_DATA_TYPE_FP64 = 10,
    HCCL_DATA_TYPE_BFP16 = 11,
    NUM_DATA_TYPES = 12
};

/* Containers have 64 MiB of shared memory for all communicators, so large data is sent in pieces. */
enum { MAX_RANKS = 16, MOST_WINDOW_BYTES = 1 << 20, ALL_WINDOWS_BYTES = 8 << 20, BOX_BYTES = 32 << 10 };

enum operation { NOTHING, JOIN, ALL_REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, REDUCE, SCATTER, SEND,
                 RECEIVE, MATMUL_ALL_REDUCE, DISPATCH, COMBINE };

/* What a rank calls; where ranks meet, all of them must state the same. */
struct said {
    uint32_t operation;
    HcclDataType type;
    HcclReduceOp reduction;
    uint32_t root;  /* SEND, RECEIVE: the other rank */
    uint64_t count; /* elements */
};

/* What a rank shows the others. */
struct shown {
    uint64_t num_meetings; /* number of meetings to which it has come */
    struct said said;
    bool is_inside; /* whether it is inside a call; otherwise the call has ended */
    uint64_t since_ns;
    pid_t process; /* 0 before it has come for the first time */
};

/* The data on its way from one rank to another, piece by piece. */
struct box {
    uint64_t is_full;
    uint64_t num_bytes; /* size of the piece */
    struct said said;
    char data[BOX_BYTES];
};

struct shared {
    struct shown ranks[MAX_RANKS];
};

/* How a rank watches for another one. */
struct watch {
    uint64_t looks, since_ns;
    bool is_gone; /* It has gone, but may have come before that: the caller looks once more. */
};

struct communicator {
    char name[128];
    uint32_t rank, size;
    int file; /* the shared memory; a lock on it, held while it is open, says that this rank lives */
    size_t num_bytes, window_bytes;
    struct shared *shared;
    char *windows;
    struct box *boxes;
    uint64_t num_meetings;
    bool carries_tokens, carries_sums; /* it may carry only one of the two */
    double limit_s; /* most seconds to wait for a rank */
    HcclResult failed;
    bool dead; /* It is destroyed, and kept because graphs and queues may still name it. */
    struct communicator *next; /* next communicator of this process */
};

/* communicator.c */
size_t width(HcclDataType type);
const char *in_words(const struct said *said, char *text, size_t room);
HcclResult join(const char *object, uint32_t size, uint32_t rank, double limit_s, struct communicator **made);
int leave_communicator(struct communicator *communicator);
struct communicator *communicator_of(const char *name); /* one of this process; NULL where there is none */
void forget_stale(void); /* removes shared memory left by processes that ended while they joined */
char *window(struct communicator *communicator, uint32_t rank);
struct box *box(struct communicator *communicator, uint32_t from, uint32_t to);
void begin_call(struct communicator *communicator, const struct said *said);
void end_call(struct communicator *communicator);
/* Waits for all ranks; returns 0, or a code whose message names the rank that did not come. */
int meet(struct communicator *communicator);
/* Waits a little for one rank, between two looks for it; returns likewise. */
int pause_for(struct communicator *communicator, uint32_t rank, struct watch *watch);
uint64_t clock_ns(void);

/* collectives.c */
struct call {
    struct communicator *communicator;
    struct said said;
    const void *source;
    void *target;
    uint64_t counts[4][MAX_RANKS]; /* ALL_TO_ALL: sent elements, their offsets, received elements, their offsets */
};
int perform_call(void *call);

/* Sends and receives of one call, all at once: a receive may be what lets other ranks continue. */
struct calls {
    size_t count;
    struct call items[];
};
int perform_calls(void *calls);

/* hccl.c has only functions that torch_npu calls. */
