/* A program that computes a little and publishes how it calls itself, as an OpenTelemetry SDK does (OTEP 4719, format 2). A line `NAME` has it publish the
 * name of its service, and says `done NAME`; `?size`, `?address`, `?payload` and `?version` break what it publishes in that way. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

struct header {
    char signature[8];
    uint32_t version, payload_size;
    uint64_t published_ns, payload;
};

static struct header *header;
static volatile uint64_t sink;

static void *spin(void *none)
{
    struct timespec pause = { .tv_nsec = 10000000 };
    for (;;) {
        for (int i = 0; i < 1000000; i++)
            sink++;
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

static size_t attribute(unsigned char *to, const char *key, const char *text)
{
    unsigned char value[1024], pair[2048];
    size_t size = field(value, 1, text, strlen(text));
    size_t used = field(pair, 1, key, strlen(key));
    used += field(pair + used, 2, value, size);
    return field(to, 1, pair, used);
}

static void publish(const char *name)
{
    unsigned char resource[8192];
    size_t size = attribute(resource, "service.name", name);
    size += attribute(resource + size, "service.instance.id", "one");
    size += attribute(resource + size, "process.command_args", "--password=secret");
    unsigned char *payload = malloc(size + 3);
    size = field(payload, 1, resource, size);

    if (!header) {
        int file = memfd_create("OTEL_CTX", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        if (file < 0 || ftruncate(file, sizeof *header))
            exit(1);
        header = mmap(NULL, sizeof *header, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
        close(file);
        if (header == MAP_FAILED || madvise(header, sizeof *header, MADV_DONTFORK))
            exit(1);
    }
    struct timespec now;
    clock_gettime(CLOCK_BOOTTIME, &now);
    header->published_ns = 0;
    __sync_synchronize();
    header->version = 2;
    header->payload_size = (uint32_t)size;
    header->payload = (uintptr_t)payload;
    if (!strcmp(name, "?size"))
        header->payload_size = 1 << 30;
    if (!strcmp(name, "?address"))
        header->payload = 8;
    if (!strcmp(name, "?payload"))
        memset(payload, 0xff, size);
    if (!strcmp(name, "?version"))
        header->version = 3;
    __sync_synchronize();
    header->published_ns = (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
    __sync_synchronize();
    memcpy(header->signature, "OTEL_CTX", 8);
    prctl(0x53564d41 /* PR_SET_VMA */, 0 /* PR_SET_VMA_ANON_NAME */, header, sizeof *header, "OTEL_CTX");
}

int main(void)
{
    pthread_t thread;
    char line[512];
    pthread_create(&thread, NULL, spin, NULL);
    puts("ready {}");
    fflush(stdout);
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
        publish(line);
        printf("done %s\n", line);
        fflush(stdout);
    }
    return 0;
}
