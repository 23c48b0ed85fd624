/* Lets the ranks of a communicator find and wait for one another, and names the rank that did not come. */
#define _GNU_SOURCE
#include "device.h"
#include "communicator.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define SHARED_FOLDER "/dev/shm"

static struct communicator *joined; /* the first of a list; guarded by the lock */

static const char *const operations[] = {"nothing",        "init",       "all_reduce", "broadcast", "all_gather",
                                         "reduce_scatter", "all_to_all", "reduce",     "scatter",   "send",
                                         "recv",           "mm_all_reduce", "dispatch", "combine"};
static const struct {
    const char *name;
    size_t width;
} types[NUM_DATA_TYPES] = {{"int8", 1},   {"int16", 2}, {"int32", 4},  {"float16", 2}, {"float32", 4}, {"int64", 8},
                           {"uint64", 8}, {"uint8", 1}, {"uint16", 2}, {"uint32", 4},  {"float64", 8}, {"bfloat16", 2}};
static const char *const reductions[] = {"sum", "product", "maximum", "minimum"};

size_t width(HcclDataType type) { return types[type].width; }

const char *in_words(const struct said *said, char *text, size_t room) {
    int length = snprintf(text, room, "%s", operations[said->operation]);
    if (said->operation >= ALL_REDUCE)
        length += snprintf(text + length, room - length, " of %lu x %s", said->count, types[said->type].name);
    if (said->operation == ALL_REDUCE || said->operation == REDUCE_SCATTER || said->operation == REDUCE ||
        said->operation == MATMUL_ALL_REDUCE)
        length += snprintf(text + length, room - length, " by %s", reductions[said->reduction]);
    if (said->operation == BROADCAST || said->operation == REDUCE || said->operation == SCATTER)
        length += snprintf(text + length, room - length, " with root %u", said->root);
    if (said->operation == SEND || said->operation == RECEIVE)
        snprintf(text + length, room - length, " %s rank %u", said->operation == SEND ? "to" : "from", said->root);
    return text;
}

uint64_t clock_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ull + now.tv_nsec;
}

char *window(struct communicator *communicator, uint32_t rank) {
    return communicator->windows + rank * communicator->window_bytes;
}
struct box *box(struct communicator *communicator, uint32_t from, uint32_t to) {
    return communicator->boxes + from * communicator->size + to;
}

/* The system drops a lock when the process that holds it ends, however it ends, even if its parent has not yet
 * asked for its status. */
static struct flock lock_of(uint32_t rank) {
    return (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1};
}
static bool is_gone(const struct communicator *communicator, uint32_t rank) {
    struct flock found = lock_of(rank);
    if (rank == communicator->rank || !__atomic_load_n(&communicator->shared->ranks[rank].process, __ATOMIC_ACQUIRE))
        return false;
    return fcntl(communicator->file, F_OFD_GETLK, &found) == 0 && found.l_type == F_UNLCK;
}

void begin_call(struct communicator *communicator, const struct said *said) {
    struct shown *mine = &communicator->shared->ranks[communicator->rank];
    mine->said = *said;
    mine->since_ns = clock_ns();
    mine->is_inside = true;
}
void end_call(struct communicator *communicator) {
    struct shown *mine = &communicator->shared->ranks[communicator->rank];
    mine->since_ns = clock_ns();
    mine->is_inside = false;
}

static int say_gone(struct communicator *communicator, uint32_t rank) {
    char mine[128];
    const struct shown *ranks = communicator->shared->ranks;
    communicator->failed = HCCL_E_REMOTE;
    return refuse(ACL_ERROR_RT_SUSPECT_REMOTE_ERROR, "rank %u waits in %s for rank %u, whose process %d has ended",
                  communicator->rank, in_words(&ranks[communicator->rank].said, mine, sizeof mine), rank,
                  (int)ranks[rank].process);
}

static int say_late(struct communicator *communicator, uint32_t rank) {
    char mine[128], theirs[128];
    const struct shown *ranks = communicator->shared->ranks, *late = &ranks[rank];
    double since_s = 1e-9 * (clock_ns() - late->since_ns);
    communicator->failed = HCCL_E_TIMEOUT;
    in_words(&ranks[communicator->rank].said, mine, sizeof mine);
    if (!late->process)
        return refuse(ACL_ERROR_RT_AICORE_TIMEOUT, "rank %u waits in %s for rank %u, which did not come within %g s",
                      communicator->rank, mine, rank, communicator->limit_s);
    return refuse(ACL_ERROR_RT_AICORE_TIMEOUT,
                  "rank %u waits in %s for rank %u (process %d), which did not come within %g s: it %s %s %.1f s ago",
                  communicator->rank, mine, rank, (int)late->process, communicator->limit_s,
                  late->is_inside ? "began" : "ended", in_words(&late->said, theirs, sizeof theirs), since_s);
}

/* Spins at first, for ranks that are about to come. A rank may come and go between a look of the caller and
 * the question whether it has gone: it is missed only if the look after that question does not find it either. */
int pause_for(struct communicator *communicator, uint32_t rank, struct watch *watch) {
    if (watch->is_gone) return say_gone(communicator, rank);
    if (++watch->looks < 200) return 0;
    usleep(watch->looks < 2000 ? 0 : 50);
    if (watch->looks % 64) return 0;
    watch->is_gone = is_gone(communicator, rank);
    bool is_late = 1e-9 * (clock_ns() - watch->since_ns) > communicator->limit_s;
    return is_late && !watch->is_gone ? say_late(communicator, rank) : 0;
}

int meet(struct communicator *communicator) {
    uint64_t number = ++communicator->num_meetings, since_ns = clock_ns();
    struct shown *ranks = communicator->shared->ranks;
    __atomic_store_n(&ranks[communicator->rank].num_meetings, number, __ATOMIC_RELEASE);
    for (uint32_t rank = 0; rank < communicator->size; rank++) {
        struct watch watch = {.since_ns = since_ns};
        while (__atomic_load_n(&ranks[rank].num_meetings, __ATOMIC_ACQUIRE) < number) {
            int code = pause_for(communicator, rank, &watch);
            if (code) return code;
        }
    }
    return 0;
}

void forget_stale(void) {
    DIR *folder = opendir(SHARED_FOLDER);
    for (struct dirent *each; folder && (each = readdir(folder));) {
        int process;
        bool is_ours = sscanf(each->d_name, "virtual-hccl-%d-", &process) == 1;
        if (is_ours && kill(process, 0) && errno == ESRCH) shm_unlink(each->d_name);
    }
    if (folder) closedir(folder);
}

static HcclResult map(struct communicator *made, const char *object) {
    made->file = shm_open(object, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (made->file < 0) return refuse(HCCL_E_SYSCALL, "%s cannot be opened in " SHARED_FOLDER, object), HCCL_E_SYSCALL;
    int code = posix_fallocate(made->file, 0, made->num_bytes); /* a write beyond the limit would kill us later */
    if (code) {
        refuse(HCCL_E_MEMORY, SHARED_FOLDER " has no %zu KiB for a communicator of %u ranks: %s", made->num_bytes >> 10,
               made->size, strerror(code));
        return HCCL_E_MEMORY;
    }
    void *at = mmap(NULL, made->num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, made->file, 0);
    if (at == MAP_FAILED) return HCCL_E_MEMORY;
    made->shared = at;
    made->windows = (char *)(made->shared + 1);
    made->boxes = (struct box *)(made->windows + made->size * made->window_bytes);
    return HCCL_SUCCESS;
}

HcclResult join(const char *object, uint32_t size, uint32_t rank, double limit_s, struct communicator **result) {
    if (size > MAX_RANKS || rank >= size) {
        refuse(HCCL_E_PARA, "rank %u of %u: a virtual communicator has at most %d", rank, size, MAX_RANKS);
        return HCCL_E_PARA;
    }
    struct communicator *made = calloc(1, sizeof *made);
    size_t window_bytes = ALL_WINDOWS_BYTES / size;
    *made = (struct communicator){.rank = rank, .size = size, .limit_s = limit_s, .file = -1};
    made->window_bytes = window_bytes < MOST_WINDOW_BYTES ? window_bytes : MOST_WINDOW_BYTES;
    made->num_bytes = sizeof(struct shared) + size * made->window_bytes + (size_t)size * size * sizeof(struct box);
    snprintf(made->name, sizeof made->name, "%s", object);
    HcclResult code = map(made, object);
    if (!code) {
        struct flock mine = lock_of(rank);
        begin_call(made, &(struct said){.operation = JOIN});
        if (fcntl(made->file, F_OFD_SETLK, &mine)) {
            refuse(HCCL_E_PARA, "rank %u of %s is there already", rank, object);
            code = HCCL_E_PARA;
        } else {
            __atomic_store_n(&made->shared->ranks[rank].process, getpid(), __ATOMIC_RELEASE);
            if (meet(made)) code = made->failed;
            end_call(made);
            shm_unlink(object); /* every rank does it, as any may be the last alive; a mapping keeps the object */
        }
    }
    if (code) return leave_communicator(made), free(made), code;
    pthread_mutex_lock(&lock);
    made->next = joined;
    joined = made;
    pthread_mutex_unlock(&lock);
    return *result = made, HCCL_SUCCESS;
}

struct communicator *communicator_of(const char *name) {
    pthread_mutex_lock(&lock);
    struct communicator *each = joined;
    while (each && strcmp(each->name, name)) each = each->next;
    pthread_mutex_unlock(&lock);
    return each;
}

int leave_communicator(struct communicator *communicator) {
    pthread_mutex_lock(&lock);
    struct communicator **place = &joined;
    while (*place && *place != communicator) place = &(*place)->next;
    if (*place) *place = communicator->next;
    bool is_dead = communicator->dead;
    communicator->dead = true;
    pthread_mutex_unlock(&lock);
    if (is_dead) return refuse(HCCL_E_PARA, "communicator %s is destroyed twice", communicator->name);
    if (communicator->shared) munmap(communicator->shared, communicator->num_bytes);
    if (communicator->file >= 0) close(communicator->file);
    return HCCL_SUCCESS;
}
