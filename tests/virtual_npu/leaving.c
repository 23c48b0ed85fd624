/* Rank 1 comes to a meeting, or sends, and leaves while rank 0 waits: after the look that does not find it, and
 * before the question whether it has gone, which its lock answers. Nothing is missing, so rank 0 may not be
 * refused. The program exits with 1 and a line on what was. test_hccl.py links it with `--wrap=fcntl`, so that it
 * hears the question. */
#define _GNU_SOURCE
#include "communicator.h"
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

extern int __real_fcntl(int, int, struct flock *);
extern const char *aclGetRecentErrMsg(void);

static struct communicator *ranks[2];
static int (*last)(void); /* Rank 1 does this, and leaves, once rank 0 asks for it. */

static void demand(bool so, const char *what) {
    if (so) return;
    fprintf(stderr, "%s: %s\n", what, aclGetRecentErrMsg());
    _exit(1);
}
#define THAT(claim) demand(claim, #claim)

int __wrap_fcntl(int file, int command, struct flock *lock) {
    if (command == F_OFD_GETLK && last) {
        THAT(last() == 0);
        last = NULL;
        leave_communicator(ranks[1]);
    }
    return __real_fcntl(file, command, lock);
}

static void *join_as(void *which) {
    char name[64];
    uint32_t rank = (struct communicator **)which - ranks;
    snprintf(name, sizeof name, "/virtual-hccl-%d-leaving", getpid());
    THAT(join(name, 2, rank, 300, which) == HCCL_SUCCESS);
    return NULL;
}
static void join_both(void) {
    pthread_t other;
    pthread_create(&other, NULL, join_as, &ranks[1]);
    join_as(&ranks[0]);
    pthread_join(other, NULL);
}

/* Sends or receives one number. */
static int pass(uint32_t rank, uint32_t operation, uint64_t *number) {
    struct calls *calls = calloc(1, sizeof *calls + sizeof *calls->items);
    calls->count = 1;
    calls->items[0] = (struct call){.communicator = ranks[rank], .source = number, .target = number};
    calls->items[0].said = (struct said){operation, HCCL_DATA_TYPE_UINT64, 0, 1 - rank, 1};
    int code = perform_calls(calls);
    free(calls);
    return code;
}

static int comes(void) { return meet(ranks[1]); }
static int sends(void) { return pass(1, SEND, &(uint64_t){7}); }

int main(void) {
    join_both();
    last = comes;
    THAT(meet(ranks[0]) == 0);
    THAT(!last);
    leave_communicator(ranks[0]);

    uint64_t received = 0;
    join_both();
    last = sends;
    THAT(pass(0, RECEIVE, &received) == 0);
    THAT(!last && received == 7);
    return 0;
}
