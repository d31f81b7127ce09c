/* A program and a library that burn a CPU in turns: `gone LIBRARY`. With PLUGIN defined it is such a library. The function that burns bears NAME and is
   exported by neither: only the file's own table of symbols knows it. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>

#define JOIN(a, b) a##_##b
#define NAMED(a, b) JOIN(a, b)

static volatile uint64_t sink;

__attribute__((noipa)) static void NAMED(burn, NAME)(void)
{
    for (uint64_t i = 0; i < 1000000; i++)
        sink += i;
}

#ifdef PLUGIN

void work(void)
{
    NAMED(burn, NAME)();
    sink++;
}

#else

#include <dlfcn.h>

int main(int count, char **arguments)
{
    void *library = count == 2 ? dlopen(arguments[1], RTLD_NOW) : NULL;
    void (*work)(void) = library ? (void (*)(void))dlsym(library, "work") : NULL;
    if (!work)
        return 2;
    puts("ready {}");
    fflush(stdout);
    for (;;) {
        NAMED(burn, NAME)();
        work();
    }
}

#endif
