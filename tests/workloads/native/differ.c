/* Threads that sleep at the bottom of stacks of sixty frames, hardly two of which are the same: what a window takes most memory for. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <time.h>

enum { THREADS = 8, DEPTH = 60 };

static volatile uint64_t returned;

static void step(uint64_t way, int left);

/* Each is a frame of its own: something is left to do after the call. */
#define BRANCH(name)                                              \
    __attribute__((noinline)) static void name(uint64_t way, int left) \
    {                                                             \
        step(way, left - 1);                                      \
        returned++;                                               \
    }

BRANCH(north)
BRANCH(south)
BRANCH(east)
BRANCH(west)

static void step(uint64_t way, int left)
{
    static void (*const branches[])(uint64_t, int) = {north, south, east, west};

    if (left == 0) {
        struct timespec moment = {0, 1000};
        nanosleep(&moment, NULL);
        return;
    }
    way = way * 6364136223846793005u + 1442695040888963407u;
    branches[way >> 62](way, left);
}

static void *wander(void *of)
{
    uint64_t way = (uint64_t)(uintptr_t)of;

    for (;;)
        step(way += 0x9e3779b97f4a7c15u, DEPTH);
    return NULL;
}

int main(void)
{
    pthread_t thread;

    for (uintptr_t i = 1; i < THREADS; i++)
        if (pthread_create(&thread, NULL, wander, (void *)i) != 0)
            return 1;
    puts("ready {}");
    fflush(stdout);
    wander((void *)0);
}
