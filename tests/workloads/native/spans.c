/* Threads that publish what they work for, as OpenTelemetry's thread context has it (OTEP 4947), and how much CPU time they spend on it: of ten parts six on
 * one span, in which they also sleep, two on another, two on none; and one that sleeps in a span all the time. With -DVARIABLE this is the library that has the thread-local variable alone; with
 * -DOWN the program has it itself; else it is linked with the library, or loads the one that is its argument. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

struct record {
    unsigned char trace[16], span[8], valid, flags;
    uint16_t attributes;
};

void *volatile *slot(void);

#if defined(VARIABLE) || defined(OWN)
__attribute__((visibility("default"))) __thread void *volatile otel_thread_ctx_v1;
/* More than there is to spare for libraries that come later: its block is made for each thread that uses it. */
#ifdef LARGE
__thread char large[1 << 16];
#endif
void *volatile *slot(void)
{
#ifdef LARGE
    large[0]++;
#endif
    return &otel_thread_ctx_v1;
}
#endif

#ifndef VARIABLE
static void *volatile *(*find)(void);

static uint64_t cpu_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static void burn(uint64_t parts)
{
    for (uint64_t end = cpu_ns() + parts * 2000000; cpu_ns() < end;)
        ;
}

static void *works(void *number)
{
    unsigned char n = (unsigned char)(uintptr_t)number;
    struct timespec pause = { .tv_nsec = 10000000 };
    struct record first = { .valid = 1 }, second = { .valid = 1 }, fixed = { 0 };
    memset(first.trace, 0x10 + n, 16);
    memset(first.span, 0xa0 + n, 8);
    memset(second.trace, 0x10 + n, 16);
    memset(second.span, 0xb0 + n, 8);
    char name[16];
    snprintf(name, sizeof name, "worker%d", n);
    prctl(PR_SET_NAME, name);
    void *volatile *pointer = find();
    volatile struct record *shown = &fixed;
    for (;;) {
        /* Both ways to change what is published: another record, or the same one, which is not valid while it changes. */
        if (n) {
            *pointer = &fixed;
            memcpy(&fixed, &first, 24);
            shown->valid = 1;
        } else
            *pointer = &first;
        burn(6);
        nanosleep(&pause, NULL);
        if (n) {
            shown->valid = 0;
            memcpy(&fixed, &second, 24);
            shown->valid = 1;
        } else
            *pointer = &second;
        burn(2);
        if (n)
            shown->valid = 0;
        else
            *pointer = NULL;
        burn(2);
    }
    return NULL;
}

/* For longer than the recorder waits between two looks at threads that sleep. */
static void *rests(void *none)
{
    prctl(PR_SET_NAME, "resting");
    struct timespec pause = { .tv_sec = 2, .tv_nsec = 500000000 };
    struct record span = { .valid = 1 };
    memset(span.trace, 0x12, 16);
    memset(span.span, 0xa2, 8);
    *find() = &span;
    for (;;)
        nanosleep(&pause, NULL);
    return none;
}

static void *idles(void *none)
{
    prctl(PR_SET_NAME, "outside");
    struct timespec pause = { .tv_nsec = 10000000 };
    for (;;) {
        burn(1);
        nanosleep(&pause, NULL);
    }
    return none;
}

/* A protobuf field of type 2: its number, its length (two bytes of it, always), its bytes. */
static size_t field(unsigned char *to, int number, const void *from, size_t size)
{
    to[0] = (unsigned char)(number << 3 | 2);
    to[1] = (unsigned char)(size & 127) | 128;
    to[2] = (unsigned char)(size >> 7);
    memcpy(to + 3, from, size);
    return size + 3;
}

static void publish(void)
{
    unsigned char *payload = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), value[64], pair[256];
    size_t size = field(value, 1, "tlsdesc_v1_dev", 14);
    size_t used = field(pair, 1, "threadlocal.schema_version", 26);
    used += field(pair + used, 2, value, size);
    struct {
        char signature[8];
        uint32_t version, size;
        uint64_t published_ns, payload;
    } *header;
    int file = memfd_create("OTEL_CTX", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, 4096))
        exit(1);
    header = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
    if (header == MAP_FAILED)
        exit(1);
    header->version = 2;
    header->size = (uint32_t)field(payload, 2, pair, used);
    header->payload = (uintptr_t)payload;
    memcpy(header->signature, "OTEL_CTX", 8);
    header->published_ns = 1;
}

int main(int count, char **arguments)
{
    pthread_t thread;
    /* Its vector of blocks is older than a library that is loaded later. */
    pthread_create(&thread, NULL, idles, NULL);
    if (count > 1) {
        void *library = dlopen(arguments[1], RTLD_NOW);
        if (!library)
            return 1;
        *(void **)&find = dlsym(library, "slot");
    } else {
        *(void **)&find = dlsym(RTLD_DEFAULT, "slot");
    }
    if (!find)
        return 1;
    publish();
    for (uintptr_t n = 0; n < 2; n++)
        pthread_create(&thread, NULL, works, (void *)n);
    pthread_create(&thread, NULL, rests, NULL);
    puts("ready {}");
    fflush(stdout);
    char line[16];
    while (fgets(line, sizeof line, stdin))
        ;
    return 0;
}
#endif
