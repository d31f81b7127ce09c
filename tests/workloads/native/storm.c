/* Starts programs one after the other, no faster than so many a second: `storm COUNT PER_SECOND`. A COUNT of 0 goes on until stdin ends. */
#define _GNU_SOURCE
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static int stdin_has_ended(void)
{
    struct pollfd in = { .fd = 0, .events = POLLIN };
    return poll(&in, 1, 0) > 0;
}

int main(int count_of_arguments, char **arguments)
{
    if (count_of_arguments != 3)
        return 0; /* one of those that were started */
    long count = atol(arguments[1]), rate = atol(arguments[2]), started = 0, failed = 0;
    char *child[] = { "storm", NULL }, *nothing[] = { NULL };
    /* The kernel reaps them: nobody has to wait. */
    signal(SIGCHLD, SIG_IGN);
    puts("ready {}");
    fflush(stdout);
    double begin = now();
    while (count ? started < count : !stdin_has_ended()) {
        double due = begin + (double)started / (double)rate - now();
        if (due > 0) {
            struct timespec pause = { .tv_sec = (time_t)due, .tv_nsec = (long)((due - (double)(time_t)due) * 1e9) };
            nanosleep(&pause, NULL);
        }
        pid_t pid;
        failed += posix_spawn(&pid, "/proc/self/exe", NULL, NULL, child, nothing) != 0;
        started++;
    }
    printf("truth {\"started\": %ld, \"failed\": %ld, \"seconds\": %f}\n", started, failed, now() - begin);
    fflush(stdout);
    return 0;
}
