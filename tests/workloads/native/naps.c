/* One thread that sleeps thousands of times a second at two places, chosen by chance: short naps at one, long ones at the other. On the
 * line `window FROM TO` (nanoseconds of CLOCK_REALTIME) it tells how long it waited at each place in naps that ended between the two: by the
 * wall clock, less what the thread's own CPU clock moved on meanwhile; with the number of naps and the sum of squares (of seconds), which say
 * how far a sample of them may be off. */
#define _GNU_SOURCE
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define CHAIN __attribute__((noipa))
/* Naps remembered: some minutes of them. */
#define MOST (1 << 21)

struct nap {
    long long end;
    long long waited;
    int place;
};

static struct nap naps[MOST];
static atomic_ullong count;
static atomic_int stopping;
static sem_t started;
static int thread_id;

static long long now(clockid_t clock)
{
    struct timespec time;
    clock_gettime(clock, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

CHAIN int pause_for(long ns)
{
    struct timespec time = { 0, ns };
    return nanosleep(&time, NULL) + 1;
}
CHAIN int short_nap(void) { return pause_for(100000) + 1; }
CHAIN int long_nap(void) { return pause_for(300000) + 2; }

CHAIN void nap_loop(void)
{
    unsigned random = 2463534242u;
    while (!atomic_load(&stopping)) {
        /* Xorshift32: which place comes next does not depend on anything the profiler does. */
        random ^= random << 13;
        random ^= random >> 17;
        random ^= random << 5;
        int place = random & 1;
        long long from = now(CLOCK_REALTIME), cpu = now(CLOCK_THREAD_CPUTIME_ID);
        if (place)
            long_nap();
        else
            short_nap();
        cpu = now(CLOCK_THREAD_CPUTIME_ID) - cpu;
        long long end = now(CLOCK_REALTIME);
        unsigned long long n = atomic_load(&count);
        naps[n % MOST] = (struct nap){ end, end - from - cpu, place };
        atomic_store(&count, n + 1);
    }
}

static void *nap(void *unused)
{
    /* The default rounds naps up by 50 us. */
    prctl(PR_SET_TIMERSLACK, 1);
    thread_id = (int)syscall(SYS_gettid);
    sem_post(&started);
    nap_loop();
    return unused;
}

static void tell(long long from, long long to)
{
    long long waited[2] = { 0, 0 };
    unsigned long long end = atomic_load(&count);
    unsigned long long naps_told[2] = { 0, 0 };
    double squares[2] = { 0, 0 };
    for (unsigned long long n = end > MOST ? end - MOST : 0; n < end; n++) {
        const struct nap *nap = &naps[n % MOST];
        if (nap->end > from && nap->end <= to) {
            waited[nap->place] += nap->waited;
            naps_told[nap->place]++;
            squares[nap->place] += nap->waited * 1e-9 * (nap->waited * 1e-9);
        }
    }
    printf("waited {\"short\":%lld,\"long\":%lld,\"short_naps\":%llu,\"long_naps\":%llu,\"short_squares\":%g,\"long_squares\":%g}\n",
           waited[0], waited[1], naps_told[0], naps_told[1], squares[0], squares[1]);
    fflush(stdout);
}

int main(void)
{
    pthread_t thread;
    char line[200];
    sem_init(&started, 0, 0);
    if (pthread_create(&thread, NULL, nap, NULL))
        return 1;
    sem_wait(&started);
    printf("ready {\"napper\":%d}\n", thread_id);
    fflush(stdout);
    while (fgets(line, sizeof line, stdin) && strcmp(line, "stop\n") != 0) {
        long long from, to;
        if (sscanf(line, "window %lld %lld", &from, &to) == 2)
            tell(from, to);
    }
    atomic_store(&stopping, 1);
    pthread_join(thread, NULL);
    printf("truth {}\n");
    return 0;
}
