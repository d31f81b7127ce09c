/* A program that loads a library, runs it, unloads it, writes another one over its file as `cp` does, and loads and runs that. With PLUGIN
 * defined it is such a library: its code is the other one's but for the size of its frame and for its names. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define CHAIN __attribute__((noipa))

#ifdef PLUGIN

#define BURN_NS 1000000000LL
#define JOIN(a, b) a##_##b
#define NAME(a, b) JOIN(a, b)

static volatile uint64_t sink;

static long long cpu(void)
{
    struct timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

CHAIN long long NAME(PLUGIN, burn)(void)
{
    volatile char room[FRAME];
    long long from = cpu(), now;
    room[0] = room[FRAME - 1] = 1;
    do {
        for (int i = 0; i < 100000; i++)
            sink += i;
        now = cpu();
    } while (now - from < BURN_NS);
    return now - from + room[0] - room[FRAME - 1];
}

long long work(void)
{
    long long ns = NAME(PLUGIN, burn)();
    sink++;
    return ns;
}

#else

#include <dlfcn.h>
#include <stdlib.h>

static void check(int good, const char *what)
{
    if (!good) {
        fprintf(stderr, "%s: %s\n", what, dlerror());
        exit(2);
    }
}

/* In place: the inode stays. */
static void overwrite(const char *path, const char *with)
{
    FILE *from = fopen(with, "r"), *to = fopen(path, "w");
    check(from && to, path);
    for (int c; (c = getc(from)) != EOF;)
        putc(c, to);
    fclose(from);
    fclose(to);
}

CHAIN static long long run(const char *path, void **at)
{
    void *library = dlopen(path, RTLD_NOW);
    check(library != NULL, path);
    *at = dlsym(library, "work");
    check(*at != NULL, "work");
    long long ns = ((long long (*)(void))*at)();
    dlclose(library);
    return ns;
}

/* reloads PATH FIRST SECOND: on the line `go`, as said above. */
int main(int argc, char **argv)
{
    char line[16];
    void *before, *after;
    if (argc != 4)
        return 2;
    overwrite(argv[1], argv[2]);
    puts("ready {}");
    fflush(stdout);
    if (!fgets(line, sizeof line, stdin) || strcmp(line, "go\n") != 0)
        return 2;
    long long first = run(argv[1], &before);
    overwrite(argv[1], argv[3]);
    long long second = run(argv[1], &after);
    printf("reloaded {\"first\": %lld, \"second\": %lld, \"same\": %s}\n", first, second,
           before == after ? "true" : "false");
    fflush(stdout);
    check(fgets(line, sizeof line, stdin) != NULL, "stop");
    puts("truth {}");
    return 0;
}

#endif
