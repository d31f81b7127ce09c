// Stacks as generic code of .NET makes them: 200 frames with three functions to choose from at each
// level, whose names have FILL in them. Usage: deepnames SPIN_US SLEEP_US DEPTH
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#ifndef FILL
#define FILL x
#endif
#define DEPTH 200
#define PASTE2(a, b, c) a##b##_##c
#define PASTE(a, b, c) PASTE2(a, b, c)
#define TEN(T, DO) DO(T##0) DO(T##1) DO(T##2) DO(T##3) DO(T##4) DO(T##5) DO(T##6) DO(T##7) DO(T##8) DO(T##9)
#define HUNDRED(H, DO)                                                                             \
    TEN(H##0, DO) TEN(H##1, DO) TEN(H##2, DO) TEN(H##3, DO) TEN(H##4, DO) TEN(H##5, DO)            \
    TEN(H##6, DO) TEN(H##7, DO) TEN(H##8, DO) TEN(H##9, DO)
// Numbers from 1000 on: a leading zero would make them octal.
#define ALL(DO) HUNDRED(10, DO) HUNDRED(11, DO)

typedef int (*function)(int);
static function table[DEPTH + 1][3];
static unsigned char choice[DEPTH + 1];
static volatile int sum;
static long spin_us;

static int spin(int level) {
    struct timespec began, now;
    clock_gettime(CLOCK_MONOTONIC, &began);
    do {
        for (int i = 0; i < 2000; i++) sum += i;
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while ((now.tv_sec - began.tv_sec) * 1000000L + (now.tv_nsec - began.tv_nsec) / 1000 < spin_us);
    return level + sum;
}

#define ONE(NAME, N, C)                                                                            \
    __attribute__((noinline)) static int NAME(int level) {                                         \
        int below = table[N - 999][choice[N - 999]](level + 1);                                    \
        sum += below;                                                                              \
        return below + C;                                                                          \
    }
#define DEFINE(N) ONE(PASTE(a, N, FILL), N, 0) ONE(PASTE(b, N, FILL), N, 1) ONE(PASTE(c, N, FILL), N, 2)
ALL(DEFINE)

#define ENTER(N)                                                                                   \
    table[N - 1000][0] = PASTE(a, N, FILL);                                                        \
    table[N - 1000][1] = PASTE(b, N, FILL);                                                        \
    table[N - 1000][2] = PASTE(c, N, FILL);

int main(int count, char **arguments) {
    spin_us = count > 1 ? atol(arguments[1]) : 2000;
    long sleep_us = count > 2 ? atol(arguments[2]) : 8000;
    int depth = count > 3 ? atoi(arguments[3]) : DEPTH;
    ALL(ENTER)
    table[DEPTH][0] = table[DEPTH][1] = table[DEPTH][2] = spin;
    puts("ready {}");
    fflush(stdout);
    uint64_t random = 88172645463325252ull ^ ((uint64_t)getpid() * 2654435761u);
    for (;;) {
        for (int level = 0; level <= DEPTH; level++) {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            choice[level] = random % 3;
        }
        sum += table[DEPTH - depth][choice[DEPTH - depth]](0);
        usleep(sleep_us);
    }
}
