/* Two threads in known call chains, the innermost functions tiny: one calls all the time, the other sleeps 5 ms at a time. Built with and
 * without frame pointers, at each level of optimisation, for each C library. It speaks as workloads/dotnet/Workload.cs does. */
#define _GNU_SOURCE
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Neither inlined nor cloned, its callers know nothing about it. */
#define CHAIN __attribute__((noipa))
#define MOST_WAITS 100000

static atomic_int stopping;
static sem_t started;
static int worker_id, sleeper_id;
static long long waits[MOST_WAITS][2];
static int wait_count;
static volatile unsigned sink;

/* Each uses its callee's result after the call, so that none is a tail call. */
CHAIN unsigned chain_tiny(unsigned x) { return x * 3 + 1; }
CHAIN unsigned chain_6(unsigned x) { return chain_tiny(x + 6) ^ x; }
/* More than six arguments and a buffer: the stack pointer moves within the function. */
CHAIN unsigned chain_5(unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned f, unsigned g, unsigned h)
{
    volatile char buffer[200];
    buffer[a % sizeof buffer] = (char)b;
    return chain_6(c + d + e + f + g + h) + (unsigned)buffer[b % 7];
}
CHAIN unsigned chain_4(unsigned x) { return chain_5(x, x, x, x, x, x, x, x) + 4; }
/* A frame of variable size needs rbp, whatever the flags. */
CHAIN unsigned chain_3(unsigned x)
{
    volatile char variable[(x & 15) + 1];
    variable[x & 15 ? 1 : 0] = 0;
    return chain_4(x) + (unsigned)variable[0];
}
CHAIN unsigned chain_2(unsigned x) { return chain_3(x ^ 2) + x; }
CHAIN unsigned chain_1(unsigned x) { return chain_2(x) + 1; }

CHAIN void chain_loop(void)
{
    while (!atomic_load(&stopping))
        for (unsigned i = 0; i < 10000; i++)
            sink += chain_1(i);
}

CHAIN long long now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

CHAIN int nap_inner(void)
{
    struct timespec time = { 0, 5000000 };
    return nanosleep(&time, NULL) + 1;
}
CHAIN int nap_outer(void) { return nap_inner() + 1; }

CHAIN void nap_loop(void)
{
    while (!atomic_load(&stopping)) {
        long long from = now();
        nap_outer();
        if (wait_count < MOST_WAITS) {
            waits[wait_count][0] = from;
            waits[wait_count++][1] = now();
        }
    }
}

static void *work(void *unused)
{
    worker_id = (int)syscall(SYS_gettid);
    sem_post(&started);
    chain_loop();
    return unused;
}

static void *nap(void *unused)
{
    sleeper_id = (int)syscall(SYS_gettid);
    sem_post(&started);
    nap_loop();
    return unused;
}

int main(void)
{
    pthread_t worker, sleeper;
    char line[100];
    sem_init(&started, 0, 0);
    if (pthread_create(&worker, NULL, work, NULL) || pthread_create(&sleeper, NULL, nap, NULL))
        return 1;
    sem_wait(&started);
    sem_wait(&started);
    printf("ready {\"worker\":%d,\"sleeper\":%d,\"chains\":{"
           "\"worker\":[[\"chain_loop\",\"chain_1\",\"chain_2\",\"chain_3\",\"chain_4\",\"chain_5\",\"chain_6\",\"chain_tiny\"]],"
           "\"sleeper\":[[\"nap_loop\",\"nap_outer\",\"nap_inner\"],[\"nap_loop\",\"now\"]]}}\n", worker_id, sleeper_id);
    fflush(stdout);
    while (fgets(line, sizeof line, stdin) && strcmp(line, "stop\n") != 0) {
    }
    atomic_store(&stopping, 1);
    pthread_join(worker, NULL);
    pthread_join(sleeper, NULL);
    printf("truth {\"waits\":{\"%d\":{\"in\":\"nap_outer\",\"at\":[", sleeper_id);
    for (int i = 0; i < wait_count; i++)
        printf("%s[%lld,%lld]", i ? "," : "", waits[i][0], waits[i][1]);
    printf("]}}}\n");
    return 0;
}
