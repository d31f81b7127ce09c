/* A process that becomes another program in mid-recording. On the line `go` a thread burns a CPU and calls execve: with the argument `first`
 * the process's first thread, which its id is named after, with `second` another one, while the first waits for it. The new
 * program, the file that the variable AFTER names, burns a CPU too, and tells how long each did, by the threads' own clocks. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define CHAIN __attribute__((noipa))
#define BURN_NS 400000000LL

static volatile uint64_t sink;

static long long cpu(void)
{
    struct timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

/* Burns until the thread's own clock has moved on by so much; answers by how much it did. */
static long long burn(void)
{
    long long from = cpu(), now;
    do {
        for (int i = 0; i < 100000; i++)
            sink += i;
        now = cpu();
    } while (now - from < BURN_NS);
    return now - from;
}

/* Not by a jump, which would leave no frame. */
CHAIN long long burn_before(void) { long long ns = burn(); sink++; return ns; }
CHAIN long long burn_after(void) { long long ns = burn(); sink++; return ns; }

static void become(void)
{
    char burnt[32];
    snprintf(burnt, sizeof burnt, "%lld", burn_before());
    execl(getenv("AFTER"), "after", "after", burnt, NULL);
    _exit(1);
}

static void await_line(const char *wanted)
{
    /* Byte by byte: what the next program is to read must not end in this one's buffer. */
    char line[16];
    size_t length = 0;
    while (length < sizeof line - 1 && read(0, line + length, 1) == 1 && line[length] != '\n')
        length++;
    line[length] = 0;
    if (strcmp(line, wanted) != 0)
        exit(2);
}

CHAIN void wait_for_the_other(pthread_t thread)
{
    pthread_join(thread, NULL);
    sink++;
}

static int thread_id;
static pthread_barrier_t known;

static void *second(void *unused)
{
    thread_id = (int)syscall(SYS_gettid);
    pthread_barrier_wait(&known);
    await_line("go");
    become();
    return unused;
}

int main(int count, char **arguments)
{
    if (count > 2) {
        prctl(PR_SET_NAME, "after");
        long long burnt = burn_after();
        printf("became {\"before\":%s,\"after\":%lld}\n", arguments[2], burnt);
        fflush(stdout);
        await_line("stop");
        printf("truth {}\n");
        return 0;
    }
    prctl(PR_SET_NAME, "before");
    pthread_t thread;
    thread_id = getpid();
    int other = strcmp(arguments[1], "second") == 0;
    pthread_barrier_init(&known, NULL, 2);
    if (other) {
        pthread_create(&thread, NULL, second, NULL);
        pthread_barrier_wait(&known);
    }
    printf("ready {\"caller\":%d}\n", thread_id);
    fflush(stdout);
    if (other) {
        wait_for_the_other(thread);
    } else {
        await_line("go");
        become();
    }
}
