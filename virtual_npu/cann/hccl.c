/* The interface to collectives, which torch_npu looks up by name. A call is a task of its stream: it waits for its
 * turn, and is captured and replayed like a kernel. */
#define _GNU_SOURCE
#include "device.h"
#include "communicator.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef void *HcclComm;
enum { ROOT_INFO_BYTES = 4108, NAME_BYTES = 128, NOT_SET = -1 };
typedef struct {
    char internal[ROOT_INFO_BYTES];
} HcclRootInfo;
typedef struct { /* only the fields that are read here */
    char reserved[24];
    uint32_t hcclBufferSize, hcclDeterministic;
    char hcclCommName[NAME_BYTES];
} HcclCommConfig;
typedef struct {
    int sendRecvType; /* 0: send */
    void *buf;
    uint64_t count;
    HcclDataType dataType;
    uint32_t remoteRank;
} HcclSendRecvItem;

static double limit_s(const char *name, double otherwise_s) {
    const char *text = getenv(name);
    double found_s = text ? atof(text) : 0;
    return found_s > 0 ? found_s : otherwise_s;
}

HcclResult HcclGetRootInfo(HcclRootInfo *info) {
    static int number;
    struct timespec now;
    forget_stale();
    clock_gettime(CLOCK_REALTIME, &now);
    memset(info, 0, sizeof *info);
    int count = __atomic_fetch_add(&number, 1, __ATOMIC_RELAXED);
    snprintf(info->internal, NAME_BYTES, "/virtual-hccl-%d-%d-%ld", getpid(), count, now.tv_nsec);
    return HCCL_SUCCESS;
}

HcclResult HcclCommInitRootInfoConfig(uint32_t size, const HcclRootInfo *info, uint32_t rank,
                                      const HcclCommConfig *config, HcclComm *communicator) {
    struct communicator *made;
    HcclResult code = join(info->internal, size, rank, limit_s("HCCL_CONNECT_TIMEOUT", 120), &made);
    if (code) return code;
    made->limit_s = limit_s("HCCL_EXEC_TIMEOUT", 1836);
    if (config && config->hcclCommName[0]) snprintf(made->name, sizeof made->name, "%s", config->hcclCommName);
    return *communicator = made, HCCL_SUCCESS;
}
HcclResult HcclCommInitRootInfo(uint32_t size, const HcclRootInfo *info, uint32_t rank, HcclComm *communicator) {
    return HcclCommInitRootInfoConfig(size, info, rank, NULL, communicator);
}
HcclResult HcclCommDestroy(HcclComm communicator) { return leave_communicator(communicator); }

HcclResult HcclGetCommAsyncError(HcclComm communicator, HcclResult *error) {
    return *error = ((struct communicator *)communicator)->failed, HCCL_SUCCESS;
}
HcclResult HcclGetCommName(HcclComm communicator, char *name) {
    return snprintf(name, NAME_BYTES, "%s", ((struct communicator *)communicator)->name), HCCL_SUCCESS;
}
uint32_t HcclGetCommConfigCapability(void) { return 0; }
const char *HcclGetErrorString(HcclResult code) {
    return code == HCCL_E_REMOTE ? "a rank has ended" : code == HCCL_E_TIMEOUT ? "a rank did not come" : "refused";
}
HcclResult HcclSetConfig(int config, int32_t value) { return HCCL_SUCCESS; }

static HcclResult send_task(int (*function)(void *), void *target, struct communicator *communicator,
                            aclrtStream stream) {
    pthread_mutex_lock(&lock);
    int code = submit(stream_of(stream), (struct task){.kind = MEET, .meets = function, .target = target});
    pthread_mutex_unlock(&lock);
    return communicator->failed ? communicator->failed : code ? HCCL_E_RUNTIME : HCCL_SUCCESS;
}

/* Refuses a type or a rank that would lead outside of a table. */
static HcclResult check(const struct said *said, const struct communicator *communicator) {
    if (said->type < 0 || said->type >= NUM_DATA_TYPES)
        return refuse(HCCL_E_NOT_SUPPORT, "the virtual HCCL has no elements of type %d", said->type);
    if (said->root >= communicator->size)
        return refuse(HCCL_E_PARA, "a communicator of %u ranks has no rank %u", communicator->size, said->root);
    return HCCL_SUCCESS;
}

/* Sends the call as a task with its own copy; the stream or the graph that drops the task frees the copy. */
static HcclResult go(struct call call, HcclComm communicator, aclrtStream stream) {
    HcclResult code = check(&call.said, communicator);
    if (code) return code;
    struct call *kept = malloc(sizeof *kept);
    *kept = call;
    kept->communicator = communicator;
    return send_task(perform_call, kept, communicator, stream);
}

HcclResult HcclAllReduce(void *source, void *target, uint64_t count, HcclDataType type, HcclReduceOp reduction,
                         HcclComm communicator, aclrtStream stream) {
    struct call call = {.said = {ALL_REDUCE, type, reduction, 0, count}, .source = source, .target = target};
    return go(call, communicator, stream);
}
HcclResult HcclReduce(void *source, void *target, uint64_t count, HcclDataType type, HcclReduceOp reduction,
                      uint32_t root, HcclComm communicator, aclrtStream stream) {
    struct call call = {.said = {REDUCE, type, reduction, root, count}, .source = source, .target = target};
    return go(call, communicator, stream);
}
HcclResult HcclBroadcast(void *buffer, uint64_t count, HcclDataType type, uint32_t root, HcclComm communicator,
                         aclrtStream stream) {
    struct call call = {.said = {BROADCAST, type, 0, root, count}, .source = buffer, .target = buffer};
    return go(call, communicator, stream);
}
HcclResult HcclScatter(void *source, void *target, uint64_t count, HcclDataType type, uint32_t root,
                       HcclComm communicator, aclrtStream stream) {
    struct call call = {.said = {SCATTER, type, 0, root, count}, .source = source, .target = target};
    return go(call, communicator, stream);
}
HcclResult HcclAllGather(void *source, void *target, uint64_t count, HcclDataType type, HcclComm communicator,
                         aclrtStream stream) {
    struct call call = {.said = {ALL_GATHER, type, 0, 0, count}, .source = source, .target = target};
    return go(call, communicator, stream);
}
HcclResult HcclReduceScatter(void *source, void *target, uint64_t count, HcclDataType type, HcclReduceOp reduction,
                             HcclComm communicator, aclrtStream stream) {
    struct call call = {.said = {REDUCE_SCATTER, type, reduction, 0, count}, .source = source, .target = target};
    return go(call, communicator, stream);
}
HcclResult HcclAlltoAllV(const void *source, const void *sent, const void *sent_from, HcclDataType type,
                         const void *target, const void *received, const void *received_to, HcclDataType to_type,
                         HcclComm communicator, aclrtStream stream) {
    struct call call = {.said = {ALL_TO_ALL, type, 0, 0, 0}, .source = source, .target = (void *)target};
    const void *given[] = {sent, sent_from, received, received_to};
    size_t bytes = ((struct communicator *)communicator)->size * sizeof(uint64_t);
    for (int which = 0; which < 4; which++) memcpy(call.counts[which], given[which], bytes);
    return go(call, communicator, stream);
}
HcclResult HcclAlltoAll(const void *source, uint64_t sent, HcclDataType type, const void *target, uint64_t received,
                        HcclDataType to_type, HcclComm communicator, aclrtStream stream) {
    struct call call = {.said = {ALL_TO_ALL, type, 0, 0, sent}, .source = source, .target = (void *)target};
    for (uint32_t rank = 0; rank < ((struct communicator *)communicator)->size; rank++) {
        call.counts[0][rank] = sent;
        call.counts[1][rank] = rank * sent;
        call.counts[2][rank] = received;
        call.counts[3][rank] = rank * received;
    }
    return go(call, communicator, stream);
}

/* Sends and receives between HcclGroupStart and HcclGroupEnd of a thread go at once, those of each communicator
 * together. */
static _Thread_local struct {
    int depth;
    uint32_t count;
    HcclSendRecvItem items[64];
    HcclComm communicator;
    aclrtStream stream;
} group;

static HcclResult go_all(const HcclSendRecvItem *items, uint32_t count, HcclComm communicator, aclrtStream stream) {
    if (!count) return HCCL_SUCCESS;
    struct calls *kept = calloc(1, sizeof *kept + count * sizeof *kept->items);
    kept->count = count;
    for (uint32_t i = 0; i < count; i++) {
        const HcclSendRecvItem *item = &items[i];
        bool sends = item->sendRecvType == 0;
        struct said said = {sends ? SEND : RECEIVE, item->dataType, 0, item->remoteRank, item->count};
        HcclResult code = check(&said, communicator);
        if (code) return free(kept), code;
        kept->items[i] = (struct call){
            .communicator = communicator, .said = said, .source = item->buf, .target = item->buf};
    }
    return send_task(perform_calls, kept, communicator, stream);
}
static HcclResult flush_group(void) {
    uint32_t count = group.count;
    group.count = 0;
    return go_all(group.items, count, group.communicator, group.stream);
}
HcclResult HcclGroupStart(void) { return group.depth++, HCCL_SUCCESS; }
HcclResult HcclGroupEnd(void) { return --group.depth ? HCCL_SUCCESS : flush_group(); }

static HcclResult go_one(HcclSendRecvItem item, HcclComm communicator, aclrtStream stream) {
    if (!group.depth) return go_all(&item, 1, communicator, stream);
    bool is_full = group.count == sizeof group.items / sizeof *group.items;
    if (group.count && (is_full || group.communicator != communicator || group.stream != stream)) {
        HcclResult code = flush_group();
        if (code) return code;
    }
    group.communicator = communicator;
    group.stream = stream;
    return group.items[group.count++] = item, HCCL_SUCCESS;
}

HcclResult HcclSend(void *source, uint64_t count, HcclDataType type, uint32_t to, HcclComm communicator,
                    aclrtStream stream) {
    return go_one((HcclSendRecvItem){0, source, count, type, to}, communicator, stream);
}
HcclResult HcclRecv(void *target, uint64_t count, HcclDataType type, uint32_t from, HcclComm communicator,
                    aclrtStream stream) {
    return go_one((HcclSendRecvItem){1, target, count, type, from}, communicator, stream);
}
HcclResult HcclBatchSendRecv(HcclSendRecvItem *items, uint32_t count, HcclComm communicator, aclrtStream stream) {
    return go_all(items, count, communicator, stream);
}
