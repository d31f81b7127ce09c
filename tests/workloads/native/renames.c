/* Threads that change their names as they work. On the line `go MODE` a thread of its own works for some seconds, under two names by turns, and the
 * line `did {json}` tells how long it was on a CPU and off it under each, by the thread's CPU clock and the wall clock. Modes: `tasks` (stretches of
 * 30 and 10 ms, and naps), `rapid` (a name each half millisecond), `asleep` (another thread renames it while it sleeps for 1.5 s: told
 * is how long it had the first name at least, `waited_a`, and at most, `waited_b`). */
#define _GNU_SOURCE
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static sem_t asked, done;
static char mode[16];
static long long ran[2], waited[2];
static pthread_t worker;

static long long now(clockid_t clock)
{
    struct timespec time;
    clock_gettime(clock, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

__attribute__((noipa)) static void burn(long long ns)
{
    long long end = now(CLOCK_THREAD_CPUTIME_ID) + ns;
    while (now(CLOCK_THREAD_CPUTIME_ID) < end)
        for (volatile int i = 0; i < 500; i++)
            ;
}

__attribute__((noipa)) static void pause_for(long long ns)
{
    struct timespec time = { ns / 1000000000, ns % 1000000000 };
    nanosleep(&time, NULL);
}

static void stretch(int name, long long work, long long nap)
{
    long long cpu = now(CLOCK_THREAD_CPUTIME_ID), wall = now(CLOCK_MONOTONIC);
    prctl(PR_SET_NAME, name ? "job-B" : "job-A");
    burn(work);
    if (nap)
        pause_for(nap);
    cpu = now(CLOCK_THREAD_CPUTIME_ID) - cpu;
    ran[name] += cpu;
    waited[name] += now(CLOCK_MONOTONIC) - wall - cpu;
}

static void *work(void *unused)
{
    for (;;) {
        sem_wait(&asked);
        if (strcmp(mode, "tasks") == 0)
            for (int n = 0; n < 50; n++) {
                stretch(0, 30000000, 2000000);
                stretch(1, 10000000, 6000000);
            }
        else if (strcmp(mode, "rapid") == 0)
            for (int n = 0; n < 1000; n++) {
                stretch(0, 1500000, 0);
                stretch(1, 500000, 0);
            }
        else
            pause_for(1500000000);
        prctl(PR_SET_NAME, "job-end");
        sem_post(&done);
    }
    return unused;
}

int main(void)
{
    char line[64];
    sem_init(&asked, 0, 0);
    sem_init(&done, 0, 0);
    if (pthread_create(&worker, NULL, work, NULL))
        return 1;
    printf("ready {\"first\":%d}\n", getpid());
    fflush(stdout);
    while (fgets(line, sizeof line, stdin) && strcmp(line, "stop\n") != 0) {
        if (sscanf(line, "go %15s", mode) != 1)
            continue;
        memset(ran, 0, sizeof ran);
        memset(waited, 0, sizeof waited);
        sem_post(&asked);
        if (strcmp(mode, "asleep") == 0) {
            /* When each name was given is known within two readings of the clock: on a busy machine they may lie far apart. */
            pause_for(100000000);
            long long before_a = now(CLOCK_MONOTONIC);
            pthread_setname_np(worker, "job-A");
            long long behind_a = now(CLOCK_MONOTONIC);
            pause_for(400000000);
            long long before_b = now(CLOCK_MONOTONIC);
            pthread_setname_np(worker, "job-B");
            long long behind_b = now(CLOCK_MONOTONIC);
            waited[0] = before_b - behind_a;
            waited[1] = behind_b - before_a;
        }
        sem_wait(&done);
        printf("did {\"ran_a\":%lld,\"ran_b\":%lld,\"waited_a\":%lld,\"waited_b\":%lld}\n", ran[0], ran[1], waited[0], waited[1]);
        fflush(stdout);
    }
    printf("truth {}\n");
    return 0;
}
