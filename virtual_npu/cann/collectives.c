/* Performs each collective, piece by piece through the windows of its ranks. Ranks first state what they call.
 * Where the statements differ, the device would hang or mix up data; here the call is refused on all ranks, with
 * both statements. Sums are made in the order of the ranks, so that all ranks get the same bits. */
#define _GNU_SOURCE
#include "device.h"
#include "communicator.h"
#include <stdlib.h>
#include <string.h>

static float from_bfloat16(uint16_t bits) {
    union {
        uint32_t bits;
        float value;
    } wide = {(uint32_t)bits << 16};
    return wide.value;
}
static uint16_t to_bfloat16(float value) {
    union {
        float value;
        uint32_t bits;
    } wide = {value};
    if (value != value) return 0x7fc0;
    return (wide.bits + 0x7fff + ((wide.bits >> 16) & 1)) >> 16;
}

/* IEEE 754 half precision is converted by hand, because not every compiler has it as a type. */
static float from_float16(uint16_t bits) {
    int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    float value = exponent == 31 ? (mantissa ? __builtin_nanf("") : __builtin_inff())
                  : exponent     ? __builtin_ldexpf(1024 + mantissa, exponent - 25)
                                 : __builtin_ldexpf(mantissa, -24);
    return bits >> 15 ? -value : value;
}
static uint16_t to_float16(float value) {
    uint16_t sign = __builtin_signbit(value) ? 0x8000 : 0;
    float size = __builtin_fabsf(value);
    if (value != value) return 0x7e00;
    if (size >= 65520) return sign | 0x7c00;
    int exponent = size < 0x1p-14f ? -14 : __builtin_ilogbf(size);
    int steps = (int)__builtin_rintf(__builtin_ldexpf(size, 10 - exponent)); /* to even, of 2^(exponent - 10) */
    return sign | (uint16_t)(((exponent + 14) << 10) + steps); /* a carry correctly increments the exponent */
}

#define AS_IT_IS(value) (value)
#define REDUCE_AS(TYPE, WIDE, READ, WRITE)                                                                   \
    {                                                                                                        \
        TYPE *to = target;                                                                                   \
        for (size_t i = 0; i < count; i++) {                                                                 \
            WIDE all = READ(((const TYPE *)window(c, 0))[at + i]);                                           \
            for (uint32_t rank = 1; rank < c->size; rank++) {                                                \
                WIDE one = READ(((const TYPE *)window(c, rank))[at + i]);                                    \
                all = said->reduction == HCCL_REDUCE_SUM    ? all + one                                      \
                      : said->reduction == HCCL_REDUCE_PROD ? all * one                                      \
                      : said->reduction == HCCL_REDUCE_MAX  ? (all > one ? all : one)                        \
                                                            : (all < one ? all : one);                       \
            }                                                                                                \
            to[i] = WRITE(all);                                                                              \
        }                                                                                                    \
        break;                                                                                               \
    }

/* Reduces `count` elements of all windows, from element `at` of each. */
static void reduce(struct communicator *c, const struct said *said, size_t at, size_t count, void *target) {
    switch (said->type) {
    case HCCL_DATA_TYPE_INT8: REDUCE_AS(int8_t, int8_t, AS_IT_IS, AS_IT_IS)
    case HCCL_DATA_TYPE_UINT8: REDUCE_AS(uint8_t, uint8_t, AS_IT_IS, AS_IT_IS)
    case HCCL_DATA_TYPE_INT16: REDUCE_AS(int16_t, int16_t, AS_IT_IS, AS_IT_IS)
    case HCCL_DATA_TYPE_UINT16: REDUCE_AS(uint16_t, uint16_t, AS_IT_IS, AS_IT_IS)
    case HCCL_DATA_TYPE_INT32: REDUCE_AS(int32_t, int32_t, AS_IT_IS, AS_IT_IS)
    case HCCL_DATA_TYPE_UINT32: REDUCE_AS(uint32_t, uint32_t, AS_IT_IS, AS_IT_IS)
    case HCCL_DATA_TYPE_INT64: REDUCE_AS(int64_t, int64_t, AS_IT_IS, AS_IT_IS)
    case HCCL_DATA_TYPE_UINT64: REDUCE_AS(uint64_t, uint64_t, AS_IT_IS, AS_IT_IS)
    case HCCL_DATA_TYPE_FP16: REDUCE_AS(uint16_t, float, from_float16, to_float16)
    case HCCL_DATA_TYPE_BFP16: REDUCE_AS(uint16_t, float, from_bfloat16, to_bfloat16)
    case HCCL_DATA_TYPE_FP32: REDUCE_AS(float, float, AS_IT_IS, AS_IT_IS)
    case HCCL_DATA_TYPE_FP64: REDUCE_AS(double, double, AS_IT_IS, AS_IT_IS)
    }
}

static int say_differing(struct communicator *c, const struct said *mine, uint32_t rank, const struct said *theirs) {
    char one[128], other[128];
    c->failed = HCCL_E_PARA;
    in_words(mine, one, sizeof one);
    in_words(theirs, other, sizeof other);
    return refuse(ACL_ERROR_RT_PARAM_INVALID, "rank %u calls %s, and rank %u calls %s: on the device this hangs",
                  c->rank, one, rank, other);
}

static int agree(struct communicator *c, const struct said *said) {
    int code = meet(c);
    for (uint32_t rank = 0; rank < c->size && !code; rank++) {
        const struct said *theirs = &c->shared->ranks[rank].said;
        if (memcmp(theirs, said, sizeof *said)) code = say_differing(c, said, rank, theirs);
    }
    return code;
}

/* Each rank writes to its window how many elements it sends to each rank and how many it expects of each, and
 * compares those of all, so that all refuse a call in which only two of them differ. */
static int agree_on_counts(struct communicator *c, const struct call *call, uint64_t *most) {
    uint64_t *mine = (uint64_t *)window(c, c->rank);
    memcpy(mine, call->counts[0], c->size * sizeof *mine);
    memcpy(mine + c->size, call->counts[2], c->size * sizeof *mine);
    int code = meet(c);
    if (code) return code;
    for (uint32_t from = 0; from < c->size; from++)
        for (uint32_t to = 0; to < c->size; to++) {
            uint64_t sent = ((const uint64_t *)window(c, from))[to];
            uint64_t expected = ((const uint64_t *)window(c, to))[c->size + from];
            if (sent > *most) *most = sent;
            if (sent == expected) continue;
            c->failed = HCCL_E_PARA;
            return refuse(ACL_ERROR_RT_PARAM_INVALID,
                          "rank %u expects %lu elements of rank %u, which sends %lu: on the device this hangs", to,
                          expected, from, sent);
        }
    return meet(c); /* The windows are used for the data next. */
}

static int all_to_all(struct communicator *c, const struct call *call) {
    size_t size = width(call->said.type), room = c->window_bytes / c->size / size;
    uint64_t most = 0;
    int code = agree_on_counts(c, call, &most);
    for (uint64_t at = 0; at < most && !code; at += room) {
        for (uint32_t rank = 0; rank < c->size; rank++) {
            uint64_t left = call->counts[0][rank] > at ? call->counts[0][rank] - at : 0;
            const char *from = (const char *)call->source + (call->counts[1][rank] + at) * size;
            if (left) memcpy(window(c, c->rank) + rank * room * size, from, (left < room ? left : room) * size);
        }
        if ((code = meet(c))) break;
        for (uint32_t rank = 0; rank < c->size; rank++) {
            uint64_t left = call->counts[2][rank] > at ? call->counts[2][rank] - at : 0;
            char *to = (char *)call->target + (call->counts[3][rank] + at) * size;
            if (left) memcpy(to, window(c, rank) + c->rank * room * size, (left < room ? left : room) * size);
        }
        code = meet(c);
    }
    return code;
}

/* Copies elements [at, at + count) of this rank's data to where the others can read them. */
static void show(struct communicator *c, const struct call *call, uint64_t at, size_t count) {
    size_t size = width(call->said.type);
    uint32_t operation = call->said.operation;
    uint32_t parts = operation == REDUCE_SCATTER || operation == SCATTER ? c->size : 1;
    if ((operation == BROADCAST || operation == SCATTER) && c->rank != call->said.root) return;
    for (uint32_t part = 0; part < parts; part++)
        memcpy(window(c, c->rank) + part * count * size,
               (const char *)call->source + (part * call->said.count + at) * size, count * size);
}

static void take(struct communicator *c, const struct call *call, uint64_t at, size_t count) {
    const struct said *said = &call->said;
    size_t size = width(said->type);
    char *to = (char *)call->target + at * size;
    switch (said->operation) {
    case ALL_REDUCE:
    case MATMUL_ALL_REDUCE:
    case DISPATCH:
    case COMBINE: reduce(c, said, 0, count, to); break; /* each rank's elements are 0 except its own */
    case REDUCE:
        if (c->rank == said->root) reduce(c, said, 0, count, to);
        break;
    case REDUCE_SCATTER: reduce(c, said, c->rank * count, count, to); break;
    case BROADCAST:
        if (c->rank != said->root) memcpy(to, window(c, said->root), count * size);
        break;
    case SCATTER: memcpy(to, window(c, said->root) + c->rank * count * size, count * size); break;
    case ALL_GATHER:
        for (uint32_t rank = 0; rank < c->size; rank++)
            memcpy(to + rank * said->count * size, window(c, rank), count * size);
        break;
    }
}

static int collective(struct communicator *c, const struct call *call) {
    const struct said *said = &call->said;
    int code = agree(c, said);
    if (code || said->operation == ALL_TO_ALL) return code ? code : all_to_all(c, call);
    size_t most = c->window_bytes / width(said->type);
    if (said->operation == REDUCE_SCATTER || said->operation == SCATTER) most /= c->size;
    uint64_t at = 0;
    do { /* at least once: no rank may state its next call before all have read this one */
        size_t count = said->count - at < most ? said->count - at : most;
        show(c, call, at, count);
        if ((code = meet(c))) break;
        take(c, call, at, count);
        code = meet(c);
        at += count;
    } while (at < said->count && !code);
    return code;
}

/* Moves one piece of a send or a receive, and advances `at`; `waits` says that there is nothing to move yet. */
static int move(const struct call *call, uint64_t *at, bool *waits) {
    struct communicator *c = call->communicator;
    bool sends = call->said.operation == SEND;
    struct box *way = sends ? box(c, c->rank, call->said.root) : box(c, call->said.root, c->rank);
    uint64_t left = call->said.count * width(call->said.type) - *at, count = left < BOX_BYTES ? left : BOX_BYTES;
    *waits = __atomic_load_n(&way->is_full, __ATOMIC_ACQUIRE) == sends;
    if (*waits) return 0;
    if (sends) {
        memcpy(way->data, (const char *)call->source + *at, count);
        way->num_bytes = count;
        way->said = call->said;
    } else {
        if (way->said.count != call->said.count || way->said.type != call->said.type)
            return say_differing(c, &call->said, call->said.root, &way->said);
        memcpy((char *)call->target + *at, way->data, count);
    }
    *at += count;
    __atomic_store_n(&way->is_full, sends, __ATOMIC_RELEASE);
    return 0;
}

/* Returns whether all items before it that use its box are done: pieces of two items must not mix. */
static bool is_first(const struct calls *calls, const uint64_t *at, size_t which) {
    const struct said *mine = &calls->items[which].said;
    for (size_t i = 0; i < which; i++) {
        const struct said *other = &calls->items[i].said;
        bool is_done = at[i] == other->count * width(other->type);
        if (other->operation == mine->operation && other->root == mine->root && !is_done) return false;
    }
    return true;
}

/* Refuses a call in a communicator that is destroyed, whose shared memory is gone, or that has failed. */
static int check_usable(const struct call *call) {
    char text[128];
    const struct communicator *c = call->communicator;
    if (c->dead)
        return refuse(ACL_ERROR_RT_INVALID_HANDLE, "rank %u calls %s in communicator %s, which is destroyed", c->rank,
                      in_words(&call->said, text, sizeof text), c->name);
    return c->failed ? refuse(ACL_ERROR_RT_PARAM_INVALID, "the communicator has failed before") : 0;
}

int perform_calls(void *argument) {
    struct calls *calls = argument;
    struct communicator *c = calls->items[0].communicator;
    int code = check_usable(&calls->items[0]);
    if (code) return code;
    uint64_t *at = calloc(calls->count, sizeof *at);
    struct watch watch = {.since_ns = clock_ns()};
    for (bool left = true; left && !code;) {
        const struct call *waiting = NULL;
        bool moved = false;
        left = false;
        for (size_t which = 0; which < calls->count && !code; which++) {
            const struct call *call = &calls->items[which];
            bool waits = !is_first(calls, at, which);
            if (at[which] == call->said.count * width(call->said.type)) continue;
            left = true;
            if (!waits) code = move(call, &at[which], &waits);
            moved |= !waits;
            waiting = waiting || !waits ? waiting : call;
        }
        if (moved) watch = (struct watch){.since_ns = clock_ns()};
        if (moved || !waiting || code) continue;
        begin_call(c, &waiting->said);
        code = pause_for(c, waiting->said.root, &watch);
    }
    free(at);
    end_call(c);
    return code;
}

int perform_call(void *argument) {
    struct call *call = argument;
    struct communicator *c = call->communicator;
    int code = check_usable(call);
    if (code) return code;
    bool carries = call->said.operation == DISPATCH || call->said.operation == COMBINE;
    *(carries ? &c->carries_tokens : &c->carries_sums) = true;
    if (c->carries_tokens && c->carries_sums)
        return refuse(ACL_ERROR_RT_PARAM_INVALID,
                      "%s carries tokens to experts and another collective (op-plugin npu_moe_distribute_dispatch_v2: "
                      "not in one communicator): make a group for each", c->name);
    begin_call(c, &call->said);
    code = collective(c, call);
    end_call(c);
    return code;
}

/* Returns the number of ranks; 0 where no communicator has that name. */
int virtual_npu_ranks(const char *name) {
    struct communicator *communicator = communicator_of(name);
    return communicator ? (int)communicator->size : 0;
}

/* Returns this process's rank; -1 where no communicator has that name. */
int virtual_npu_rank(const char *name) {
    struct communicator *communicator = communicator_of(name);
    return communicator ? (int)communicator->rank : -1;
}

/* Adds up the data of an operator that also computes: `count` elements of each rank, in place. The caller holds no
 * lock. */
int virtual_npu_add_up(const char *name, void *data, uint64_t count, HcclDataType type, int operation) {
    struct call call = {.communicator = communicator_of(name), .source = data, .target = data};
    call.said = (struct said){operation, type, HCCL_REDUCE_SUM, 0, count};
    if (!call.communicator) return refuse(ACL_ERROR_RT_PARAM_INVALID, "no communicator is called %s", name);
    return perform_call(&call);
}
