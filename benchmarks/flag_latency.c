/* Time for a flag in shared memory to be seen by another process, one way.
 *
 *     flag_latency CORE CORE
 *
 * Two processes, each pinned to one core, take turns at raising the flag by one. Prints the median over many
 * batches of turns, in nanoseconds: a batch in which the system took a core away does not count for more.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { BATCHES = 201, TURNS = 2000 };

static void pin(int core) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(core, &cores);
    if (sched_setaffinity(0, sizeof cores, &cores) != 0) {
        perror("sched_setaffinity");
        exit(1);
    }
}

/* Raises the flag to every second number, each time when the other process has raised it to the one before. */
static void take_turns(atomic_int *flag, int first, int last) {
    for (int turn = first; turn < last; turn += 2) {
        while (atomic_load_explicit(flag, memory_order_acquire) != turn) {
        }
        atomic_store_explicit(flag, turn + 1, memory_order_release);
    }
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e9 + time.tv_nsec;
}

static int ascending(const void *left, const void *right) {
    double difference = *(const double *)left - *(const double *)right;
    return (difference > 0) - (difference < 0);
}

int main(int count, char **arguments) {
    if (count != 3) {
        fprintf(stderr, "usage: flag_latency CORE CORE\n");
        return 2;
    }
    atomic_int *flag = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (flag == MAP_FAILED) {
        perror("mmap");
        return 1;
    }
    atomic_init(flag, 0);
    pid_t other = fork();
    if (other < 0) {
        perror("fork");
        return 1;
    }
    if (other == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* or it would turn alone for ever */
        pin(atoi(arguments[2]));
        take_turns(flag, 1, BATCHES * TURNS);
        return 0;
    }
    pin(atoi(arguments[1]));
    static double nanoseconds[BATCHES];
    for (int batch = 0; batch < BATCHES; batch++) {
        double start = now();
        take_turns(flag, batch * TURNS, (batch + 1) * TURNS);
        nanoseconds[batch] = (now() - start) / TURNS;
    }
    waitpid(other, NULL, 0);
    qsort(nanoseconds, BATCHES, sizeof *nanoseconds, ascending);
    printf("%.1f\n", nanoseconds[BATCHES / 2]);
    return 0;
}
